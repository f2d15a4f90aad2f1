"""Multi-kernel maximum mean discrepancy (Gretton et al. 2012; DAN: Long et al. 2015, arXiv:1502.02791)."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from dgsearch.component import Bool, Choice, Component, Float, known_or_raise
from dgsearch.objectives._pairs import mean_over_pairs
from dgsearch.step import DomainBatch, Losses, Objective, Progress, domain_cross_entropy

FIXED_GAMMAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e3)  # DomainBed's kernels, exp(−γ d²)


@dataclass(frozen=True)
class MkMmd(Component):
    """Match the distribution of features across source domains by kernels (Long et al. 2015, arXiv:1502.02791)."""

    weight: Annotated[float, Float(0.01, 10, log=True)] = 1.0
    num_kernels: Annotated[int, Choice((1, 3, 5, 7, 9, 11))] = 5
    bandwidth: Annotated[str, Choice(("median", "mean", "fixed"))] = "median"
    per_class: Annotated[bool, Bool()] = False

    neutral: ClassVar = {"weight": 0}
    min_domains: ClassVar[int] = 2

    def __post_init__(self) -> None:
        known_or_raise("bandwidth", self.bandwidth, ("median", "mean", "fixed"))
        if self.num_kernels < 1 or self.num_kernels % 2 == 0:
            raise ValueError(f"num_kernels must be odd, not {self.num_kernels}")

    def build(self, *, num_domains: int, num_features: int, num_classes: int) -> nn.Module:
        """Return the objective."""
        return MkMmdObjective(self)


class MkMmdObjective(Objective):
    """Cross-entropy plus the mean over pairs of domains of the squared discrepancy."""

    def __init__(self, options: MkMmd) -> None:
        super().__init__()
        self.options = options

    def forward(self, model: nn.Module, batch: DomainBatch, progress: Progress) -> Losses:
        """Return the losses of ``batch``."""
        features, logits = model(batch.x)
        distance = partial(discrepancy, num_kernels=self.options.num_kernels, bandwidth=self.options.bandwidth)
        least = 1 if self.options.bandwidth == "fixed" else 2
        penalty = mean_over_pairs(features, batch.y, distance, per_class=self.options.per_class, least=least)
        task = domain_cross_entropy(logits, batch.y)
        return Losses(task, self.options.weight * penalty, log={"penalty": penalty})


def discrepancy(a: Tensor, b: Tensor, *, num_kernels: int, bandwidth: str) -> Tensor:
    """Return the squared maximum mean discrepancy between features a [N, F] and b [M, F].

    The kernel is the mean of exp(−d² / 2σ²) over σ² = s · 2^m, m = −(M//2) … M//2, s the median or mean of the
    squared distances between the pooled examples, with no gradient. The estimate is unbiased, so it may be
    negative and is never clamped; it needs two examples a side. ``fixed`` is DomainBed's: the sum of
    exp(−γ d²) over seven γ, biased.
    """
    with torch.autocast(a.device.type, enabled=False):
        pooled = torch.cat([a, b])
        pooled = pooled if pooled.dtype == torch.float64 else pooled.float()
        # Not through inner products: they would leave rounding where two features are equal.
        squared = torch.cdist(pooled, pooled, compute_mode="donot_use_mm_for_euclid_dist").square()  # [N+M, N+M]
        if bandwidth == "fixed":
            kernel = torch.stack([torch.exp(-gamma * squared) for gamma in FIXED_GAMMAS]).sum(0)
        else:
            scale = _scale(squared.detach(), bandwidth)
            powers = range(-(num_kernels // 2), num_kernels // 2 + 1)
            kernel = torch.stack([torch.exp(-squared / (2 * scale * 2.0**m)) for m in powers]).mean(0)
        n = len(a)
        within_a, within_b, across = kernel[:n, :n], kernel[n:, n:], kernel[:n, n:]
        if bandwidth == "fixed":
            return within_a.mean() + within_b.mean() - 2 * across.mean()
        return _mean_of_others(within_a) + _mean_of_others(within_b) - 2 * across.mean()


def _scale(squared: Tensor, bandwidth: str) -> Tensor:
    """Return the median or mean of the off-diagonal squared distances, kept off zero: equal features are legal."""
    i, j = torch.triu_indices(len(squared), len(squared), offset=1, device=squared.device)
    others = squared[i, j]
    mean = others.mean()
    middle = others.quantile(0.5) if bandwidth == "median" else mean
    return torch.maximum(middle, mean * 1e-3).clamp_min(1e-12)


def _mean_of_others(kernel: Tensor) -> Tensor:
    """Return the mean of a square matrix without its diagonal."""
    n = len(kernel)
    return (kernel.sum() - kernel.diagonal().sum()) / (n * (n - 1))

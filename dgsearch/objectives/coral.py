"""Correlation alignment (Sun & Saenko 2016, arXiv:1607.01719), by default in DomainBed's form with means."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from torch import Tensor, nn

from dgsearch.component import Bool, Component, Float
from dgsearch.objectives._pairs import mean_over_pairs
from dgsearch.step import DomainBatch, Losses, Objective, Progress, domain_cross_entropy


@dataclass(frozen=True)
class Coral(Component):
    """Match the mean and covariance of features across source domains (Sun & Saenko 2016, arXiv:1607.01719)."""

    weight: Annotated[float, Float(0.1, 10, log=True)] = 1.0
    match_mean: Annotated[bool, Bool()] = True
    per_class: Annotated[bool, Bool()] = False

    neutral: ClassVar = {"weight": 0}
    min_domains: ClassVar[int] = 2

    def build(self, *, num_domains: int, num_features: int, num_classes: int) -> nn.Module:
        """Return the objective."""
        return CoralObjective(self)


class CoralObjective(Objective):
    """Cross-entropy plus the mean over pairs of domains of the distance between moments."""

    def __init__(self, options: Coral) -> None:
        super().__init__()
        self.options = options

    def forward(self, model: nn.Module, batch: DomainBatch, progress: Progress) -> Losses:
        """Return the losses of ``batch``."""
        features, logits = model(batch.x)
        distance = partial(moment_distance, match_mean=self.options.match_mean)
        penalty = mean_over_pairs(features, batch.y, distance, per_class=self.options.per_class, least=1)
        task = domain_cross_entropy(logits, batch.y)
        return Losses(task, self.options.weight * penalty, log={"penalty": penalty})


def moment_distance(a: Tensor, b: Tensor, *, match_mean: bool) -> Tensor:
    """Return the distance between the moments of features a [N, F] and b [M, F].

    With means: mean_k (μ_a − μ_b)_k² + mean_kl (C_a − C_b)_kl². Without: the paper's ‖C_a − C_b‖² / 4F².
    C has the divisor N − 1; one example has no covariance, and where a side has one, only means are matched.
    """
    mean_a, mean_b = a.mean(0), b.mean(0)  # [F]
    means = (mean_a - mean_b).square().mean() if match_mean else a.sum() * 0
    if min(len(a), len(b)) < 2:
        return means
    centred_a, centred_b = a - mean_a, b - mean_b
    difference = centred_a.T @ centred_a / (len(a) - 1) - centred_b.T @ centred_b / (len(b) - 1)  # [F, F]
    covariances = difference.square().mean()
    return means + covariances if match_mean else covariances / 4

"""Gradient-Guided Annealing (CVPR 2025, arXiv:2502.20162)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from dgsearch.component import Choice, Component, Float, known_or_raise
from dgsearch.gradient._agreement import domain_agreement
from dgsearch.randomness import generator
from dgsearch.step import Intervention, Step


@dataclass(frozen=True)
class Gga(Component):
    """Early in training, search nearby for weights whose domain gradients agree (CVPR 2025, arXiv:2502.20162).

    ``start`` and ``window`` are shares of training. With batch norm in training mode each domain is normalised
    by itself; with frozen batch norm or group norm that equals one pooled forward.
    """

    rho: Annotated[float, Float(1e-7, 1e-3, log=True)] = 1e-5
    candidates: Annotated[int, Choice((10, 30, 100, 250))] = 30
    start: Annotated[float, Float(0.0, 0.1)] = 0.02
    window: Annotated[float, Float(0.004, 0.04)] = 0.02
    tolerance: Annotated[float, Float(0.01, 1.0, log=True)] = 0.1
    agreement: Annotated[str, Choice(("min", "mean"))] = "min"

    neutral: ClassVar = {"rho": 0}
    min_domains: ClassVar[int] = 2

    def __post_init__(self) -> None:
        known_or_raise("agreement", self.agreement, ("min", "mean"))

    def build(self, *, seed: int) -> Intervention:
        """Return the intervention."""
        return Annealing(self, seed=seed)


class Annealing:
    """Moves the featurizer to the best candidate of a step, and returns the step's own closure."""

    def __init__(self, options: Gga, *, seed: int) -> None:
        self.options = options
        self.seed = seed

    def __call__(self, step: Step) -> Callable[[], Tensor]:
        """Search the candidates, within the window of steps."""
        if step.progress.step in self.window(step.progress.steps):
            step.closure.log["gga/accepted"] = torch.tensor(float(self._search(step)))
        return step.closure

    def window(self, steps: int) -> range:
        """Return in which of a training's steps candidates are searched."""
        first = round(self.options.start * steps)
        length = math.ceil(round(self.options.window * steps, 6))  # .02 × 350 is a little over 7
        return range(first, min(steps, first + max(1, length)))

    def _agree(self, step: Step) -> tuple[float, float]:
        losses, pairs, _ = domain_agreement(step)
        agreement = pairs.min() if self.options.agreement == "min" else pairs.mean()
        return losses.mean().item(), agreement.item()

    @torch.no_grad()
    def _search(self, step: Step) -> int:
        """Return how many candidates were accepted, the weights being those of the last one accepted."""
        moved = [p for p in step.model.featurizer.parameters() if p.requires_grad]  # type: ignore[union-attr]
        origin = [p.clone() for p in moved]
        best = origin
        chances = [generator(self.seed, "gga", step.progress.step, n, device=p.device) for n, p in enumerate(moved)]
        with torch.enable_grad():
            least_loss, highest = self._agree(step)
        accepted = 0
        for _ in range(self.options.candidates):
            for p, chance in zip(moved, chances, strict=True):
                noise = torch.empty_like(p).uniform_(-1, 1, generator=chance)
                p.add_(noise, alpha=self.options.rho)
            with torch.enable_grad():
                loss, agreement = self._agree(step)
            if loss - least_loss < self.options.tolerance and agreement > highest:
                least_loss, highest, accepted = loss, agreement, accepted + 1
                best = [p.clone() for p in moved]
                torch._foreach_copy_(moved, origin)
        torch._foreach_copy_(moved, best)
        return accepted

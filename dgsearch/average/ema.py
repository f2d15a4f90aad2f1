"""Exponential moving average of weights (Polyak & Juditsky 1992; for domain generalization: arXiv:2110.10832)."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from dgsearch.component import Choice, Component
from dgsearch.step import Average, Progress


@dataclass(frozen=True)
class Ema(Component):
    """Validate and keep an exponential average of the weights (Polyak & Juditsky 1992; arXiv:2110.10832).

    Early on the decay is at most t / (t + 10), so the average does not hold on to the initial weights.
    """

    decay: Annotated[float, Choice((0.99, 0.997, 0.999, 0.9997, 0.9999))] = 0.999

    neutral: ClassVar = {"decay": 0}

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), not {self.decay}")

    def build(self, model: nn.Module) -> Average:
        """Return the average."""
        return Moving(model, self.decay)


class Moving:
    """The exponential average of a model's parameters."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.parameters = dict(model.named_parameters())
        self.decay = decay
        self.mean = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, progress: Progress) -> None:
        """Take the weights in."""
        decay = min(self.decay, progress.step / (progress.step + 10))
        torch._foreach_lerp_(list(self.mean.values()), list(self.parameters.values()), 1 - decay)

    def observe(self, raw_validation_loss: float, progress: Progress) -> None:
        """Nothing to take in."""

    def weights(self) -> dict[str, Tensor] | None:
        """Return the average; with no decay, None: the model's own."""
        return self.mean if self.decay else None

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        return dict(self.mean)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the average in."""
        for name, value in self.mean.items():
            value.copy_(state[name])

"""No average: the weights themselves are validated and kept."""

from dataclasses import dataclass

from torch import Tensor, nn

from dgsearch.component import Component
from dgsearch.step import Average, Progress, Stateless


@dataclass(frozen=True)
class NoAverage(Component):
    """Validate and keep the weights themselves."""

    def build(self, model: nn.Module) -> Average:
        """Return the average."""
        return Current()


class Current(Stateless):
    """The model's own weights."""

    def update(self, progress: Progress) -> None:
        """Nothing to take in."""

    def observe(self, raw_validation_loss: float, progress: Progress) -> None:
        """Nothing to take in."""

    def weights(self) -> dict[str, Tensor] | None:
        """Return None: the model's own."""
        return None

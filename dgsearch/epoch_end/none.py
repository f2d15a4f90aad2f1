"""No epoch-end intervention."""

from dataclasses import dataclass

from dgsearch.component import Component
from dgsearch.step import EpochEnd, EpochEndIntervention, Stateless


@dataclass(frozen=True)
class NoEdit(Component):
    """Leave the weights alone."""

    def build(self, *, seed: int) -> EpochEndIntervention:
        """Return the intervention."""
        return NoEditIntervention()


class NoEditIntervention(Stateless):
    """Edits nothing."""

    def __call__(self, end: EpochEnd) -> dict[str, float]:
        """Return nothing to draw."""
        return {}

"""No gradient intervention."""

from dataclasses import dataclass

from dgsearch.component import Component
from dgsearch.step import Intervention


@dataclass(frozen=True)
class NoIntervention(Component):
    """Leave the gradient alone."""

    def build(self, *, seed: int) -> Intervention:
        """Return the intervention: the step's own closure."""
        return lambda step: step.closure

"""Identify and Unlearn with averaged scores (ICLR 2026, OpenReview 9ufS5Jl0O0)."""

from dataclasses import dataclass

from dgsearch.epoch_end._unlearning import Unlearning, UnlearningIntervention
from dgsearch.step import EpochEndIntervention


@dataclass(frozen=True)
class Iue(Unlearning):
    """Identify and Unlearn, each example's score averaged over edits (ICLR 2026, OpenReview 9ufS5Jl0O0)."""

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {self.momentum}")

    def build(self, *, seed: int) -> EpochEndIntervention:
        """Return the intervention."""
        return UnlearningIntervention(self, seed=seed, momentum=self.momentum)

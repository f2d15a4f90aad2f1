"""Identify and Unlearn (ICLR 2026, OpenReview 9ufS5Jl0O0)."""

from dataclasses import dataclass

from dgsearch.epoch_end._unlearning import Unlearning, UnlearningIntervention
from dgsearch.step import EpochEndIntervention


@dataclass(frozen=True)
class Iu(Unlearning):
    """Unlearn examples that hurt other data, in the channels that differ between domains (OpenReview 9ufS5Jl0O0)."""

    def build(self, *, seed: int) -> EpochEndIntervention:
        """Return the intervention."""
        return UnlearningIntervention(self, seed=seed)

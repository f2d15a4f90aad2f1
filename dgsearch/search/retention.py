"""What is kept of trials that have ended: weights of the best few, and no training state."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from dgsearch.selection import CRITERIA, FILE, Selection
from dgsearch.study import Fold, Study, TrialRecord

KEEP = ("best", "all")
TOP = 5  # complete trials a fold whose weights are kept, beside the best of each family
LOG = "worker.log"
STATE = (".safetensors", ".pt", ".partial")  # what a trial leaves that is large


@dataclass(frozen=True)
class Complete:
    """A complete trial, as retention needs it: its score by each criterion."""

    number: int
    family: str
    scores: tuple[float, ...]

    @classmethod
    def of(cls, record: TrialRecord) -> "Complete":
        """Return a complete trial's scores."""
        assert record.best is not None
        return cls(record.number, record.family, tuple(score(record.best) for score in CRITERIA.values()))


def kept(complete: Iterable[Complete]) -> set[int]:
    """Return the trials whose weights are kept: by each criterion the top 5 of the fold and the best a family."""
    trials = list(complete)
    found: set[int] = set()
    for n in range(len(CRITERIA)):
        ranked = sorted(trials, key=lambda t: (-t.scores[n], t.number))
        first_of_family = {t.family: t.number for t in reversed(ranked)}
        found |= {t.number for t in ranked[:TOP]} | set(first_of_family.values())
    return found


def selected(study: Study, fold: Fold) -> set[int]:
    """Return the trials of a fold that a selection names: their weights are never removed."""
    if not (study.path / FILE).is_file():
        return set()
    return {s.trial for s in Selection.load(study).folds if s.held_out == fold.held_out and s.sources == fold.sources}


def tidy(record: TrialRecord, *, keep_weights: bool) -> None:
    """Leave of a trial that has ended its weights, where they are kept, and its logs; twice changes nothing."""
    weights = record.result.get("weights") if keep_weights else None
    for session in record.folder.iterdir():
        if not session.is_dir():
            continue
        for file in session.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a stopped worker tidies its log itself
                is_state = file.suffix in STATE and str(file.relative_to(record.folder)) != weights
                if is_state or (file.name == LOG and file.stat().st_size == 0):
                    file.unlink()
        with contextlib.suppress(OSError):  # not empty
            session.rmdir()

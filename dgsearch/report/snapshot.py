"""What a study's directory says of its search at a moment, read again and again at little cost."""

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dgsearch.lease import holder
from dgsearch.search.budget import Budget, Spent, spent
from dgsearch.search.engine import not_given_up, rungs
from dgsearch.search.retention import LOG
from dgsearch.study import STATES, Fold, Study, TrialRecord


@dataclass(frozen=True)
class Seen:
    """A trial, as those who watch a search need it. ``seconds`` of training took it to ``step``."""

    fold: int
    number: int
    family: str
    default: bool
    state: str
    step: int = 0
    seconds: float = 0.0
    best: float | None = None  # mean source accuracy of its best evaluation
    kind: str = ""  # of failure
    reason: str = ""
    log: str | None = None  # what it printed and raised, where it did
    queued: int | None = None  # its place in the fold's queue, if it is from there

    @classmethod
    def of(cls, record: TrialRecord) -> "Seen":
        """Return what is shown of a record."""
        last = record.evaluations[-1] if record.evaluations else None
        logs = sorted(record.folder.glob(f"*/{LOG}")) if record.state == "failed" else []
        return cls(
            record.fold,
            record.number,
            record.family,
            record.default,
            record.state,
            last.step if last else 0,
            last.seconds if last else 0.0,
            record.best.mean if record.best else None,
            str(record.result.get("kind") or ""),
            str(record.result.get("reason") or ""),
            str(logs[-1]) if logs else None,
            record.queued,
        )


@dataclass(frozen=True)
class Course:
    """What a search was asked to do: its budget, and the families whose defaults come first, plain ERM before all."""

    folds: int
    steps: int
    budget: Budget
    defaults: tuple[str, ...] = ()
    floored: tuple[str, ...] = ()  # families that have a floor of trials
    floor: int = 0
    queues: tuple[tuple[str, ...], ...] = ()  # families of the parameters that each fold is given after the defaults

    @property
    def rungs(self) -> tuple[int, ...]:
        """The steps at which a trial may be stopped."""
        return tuple(rungs(self.steps))

    def remaining(self, trials: Sequence[Seen]) -> list[str]:
        """Return the families that a fold with these trials has not given up."""
        failed = (t.family for t in trials if t.state == "failed")
        return not_given_up(self.floored, begun=(t.family for t in trials), failed=failed)

    def is_given_up(self, trials: Sequence[Seen]) -> bool:
        """Whether a fold with these trials has given up every family."""
        return bool(self.floored) and not self.remaining(trials)

    def asked(self, trials: Sequence[Seen]) -> int | None:
        """Return how many trials a fold that has these is to have; None if they are without number."""
        if self.is_given_up(trials):
            return len(trials)
        return None if self.budget.trials is None else max(self.budget.trials, len(trials))

    @classmethod
    def of(cls, study: Study) -> "Course":
        """Return what the latest search of a study was asked for."""
        plan = study.planned
        budget = Budget(plan.get("trials"), plan.get("hours"), plan.get("device_hours"))
        floored = tuple(plan.get("families", ()))
        defaults = tuple(dict.fromkeys((*([plan["baseline"]] if "baseline" in plan else []), *floored)))
        queues = tuple(tuple(p["family"] for p in study.queue(fold.number)["parameters"]) for fold in study.folds)
        return cls(len(study.folds), study.specification.steps, budget, defaults, floored, plan.get("floor", 0), queues)


@dataclass(frozen=True)
class Snapshot:
    """A search at a moment. ``driver`` says who searches, if anybody does."""

    folds: tuple[Fold, ...]
    course: Course
    trials: tuple[Seen, ...]
    spent: Spent
    driver: dict[str, Any] | None
    begun: bool = True  # whether a search was ever asked for

    def of(self, fold: Fold) -> list[Seen]:
        """Return a fold's trials."""
        return [t for t in self.trials if t.fold == fold.number]

    @cached_property
    def asked(self) -> int | None:
        """How many trials all folds are to have; None if they are without number."""
        counts = [self.course.asked(self.of(fold)) for fold in self.folds]
        return None if None in counts else sum(count or 0 for count in counts)

    @cached_property
    def ended_by(self) -> str | None:
        """What leaves nothing more to begin, as the engine says it; of trials and families, nothing to end either."""
        if any(t.state == "running" for t in self.trials) or self.asked != len(self.trials):
            return self.course.budget.used_up(self.spent)
        return "families" if all(self.course.is_given_up(self.of(fold)) for fold in self.folds) else "trials"

    @property
    def state(self) -> str:
        """Return searching, finished, interrupted or not begun."""
        if self.driver is not None:
            return "searching"
        if not self.begun:
            return "not begun"
        return "interrupted" if self.ended_by is None else "finished"


class Reader:
    """Reads a study's search. Trials that have ended are read once, others when they have changed."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._trials: dict[tuple[int, int], Seen] = {}
        self._sizes: dict[tuple[int, int], int] = {}

    def read(self) -> Snapshot:
        """Return the search as it is now."""
        for fold in self.study.folds:
            for number in self._begun(fold.number):
                self._look(fold.number, number)
        trials = tuple(self._trials[key] for key in sorted(self._trials))
        begun = bool(self.study.planned)
        return Snapshot(
            self.study.folds,
            Course.of(self.study),
            trials,
            spent(self.study),
            holder(self.study.path / "sessions"),
            begun,
        )

    def _begun(self, fold: int) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [int(e.name) for e in os.scandir(self.study.fold_dir(fold) / "trials") if e.name.isdigit()]
        return []

    def _look(self, fold: int, number: int) -> None:
        key = (fold, number)
        if key in self._trials and self._trials[key].state != "running":
            return
        folder = self.study.trial_dir(fold, number)
        size = sum(_size(folder / name) for name in ("evaluations.jsonl", "result.json"))
        if self._sizes.get(key) != size and (folder / "trial.json").exists():
            self._trials[key] = Seen.of(self.study.trial(fold, number))
            self._sizes[key] = size


def _size(file: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


def counts(trials: Iterable[Seen]) -> dict[str, Any]:
    """Return how many trials are in each state, and the best accuracy of the complete ones."""
    found = list(trials)
    best = max((t.best for t in found if t.state == "complete" and t.best is not None), default=None)
    return {
        "trials": {state: sum(t.state == state for t in found) for state in STATES},
        "best_source_accuracy": best,
    }


def by_family(trials: Sequence[Seen]) -> dict[str, list[Seen]]:
    """Return trials by family, in the order in which families appear."""
    return {name: [t for t in trials if t.family == name] for name in dict.fromkeys(t.family for t in trials)}

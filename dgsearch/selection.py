"""Selection: the best complete trial of each fold, by source validation alone."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dgsearch.component import known_or_raise
from dgsearch.study import Fold, Study, TrialRecord, read_json, write_json
from dgsearch.train import Evaluation

FILE = "selection.json"


@dataclass(frozen=True)
class Selected:
    """The trial selected for one fold; ``step`` is where its weights were the best."""

    held_out: tuple[str, ...]
    sources: tuple[str, ...]
    trial: int
    family: str
    recipe: dict[str, Any]
    source_accuracy: float
    step: int


@dataclass(frozen=True)
class Selection:
    """One selected trial a fold, in the study's order; ``read`` is a hash of the figures that decided."""

    criterion: str
    folds: tuple[Selected, ...]
    read: str

    @classmethod
    def load(cls, study: Study) -> "Selection":
        """Read a study's selection.

        Raises:
            ValueError: if there is none.
        """
        path = study.path / FILE
        if not path.is_file():
            raise ValueError(f"{study.path} has no selection: run `dgsearch select {study.path}` first")
        values = read_json(path)
        folds = tuple(
            Selected(**f | {"held_out": tuple(f["held_out"]), "sources": tuple(f["sources"])})
            for f in values.pop("folds")
        )
        return cls(**values, folds=folds)


def training_domain(evaluation: Evaluation) -> float:
    """Score by the mean accuracy over the sources' validation parts (arXiv:2007.01434, section 3)."""
    return evaluation.mean


CRITERIA: dict[str, Callable[[Evaluation], float]] = {"training-domain": training_domain}


def select(study: Study, *, criterion: str = "training-domain") -> Selection:
    """Select a trial for each fold, and write ``selection.json`` once.

    Only complete trials can be selected; of equals the earliest is. Selecting again with nothing changed
    gives the same selection.

    Raises:
        ValueError: for an unknown criterion, a fold without a complete trial, or a selection that was made
            already and would now be another, or was evaluated and is gone.
    """
    known_or_raise("criterion", criterion, CRITERIA)
    score = CRITERIA[criterion]
    chosen, read = [], []
    for fold in study.folds:
        complete = [t for t in study.trials(fold.number) if t.state == "complete"]
        if not complete:
            raise ValueError(f"no complete trial in the fold that holds out {', '.join(fold.held_out) or 'none'}")
        chosen.append(_best(fold, complete, score))
        read += [(t.fold, t.number, [(e.step, e.accuracy) for e in t.evaluations]) for t in complete]
    digest = hashlib.blake2b(json.dumps(read).encode(), digest_size=16).hexdigest()
    selection = Selection(criterion, tuple(chosen), digest)
    path = study.path / FILE
    if path.exists():
        if (before := Selection.load(study)) != selection:
            raise ValueError(
                f"{path} holds a selection by {before.criterion!r} from "
                f"{'other trials' if before.read != digest else 'the same trials'}, and it is never overwritten; "
                "move it away to select anew"
            )
    elif (evaluated := path.with_name("evaluation.json")).exists():
        raise ValueError(f"{evaluated} is of a selection that is gone: move it away too, to select anew")
    else:
        write_json(path, asdict(selection))
    return selection


def _best(fold: Fold, trials: list[TrialRecord], score: Callable[[Evaluation], float]) -> Selected:
    pairs = ((t, e) for t in trials if (e := t.best))
    trial, best = max(pairs, key=lambda pair: (score(pair[1]), -pair[0].number))
    return Selected(fold.held_out, fold.sources, trial.number, trial.family, trial.recipe, score(best), best.step)


def best_of_families(study: Study, selection: Selection) -> dict[Fold, list[Selected]]:
    """Return the best complete trial of each family in each fold by the selection's criterion, best first."""
    score = CRITERIA[selection.criterion]
    found = {}
    for fold in study.folds:
        families: dict[str, list[TrialRecord]] = {}
        for trial in study.trials(fold.number):
            if trial.state == "complete":
                families.setdefault(trial.family, []).append(trial)
        best = [_best(fold, trials, score) for trials in families.values()]
        found[fold] = sorted(best, key=lambda s: (-s.source_accuracy, s.trial))
    return found


def selected_trial(study: Study, fold: Fold, selected: Selected) -> tuple[TrialRecord, Path]:
    """Return a fold's selected trial and the file of its weights.

    Raises:
        ValueError: if the weights are gone; it says why, and how to have them again.
    """
    trial = study.trial(fold.number, selected.trial)
    if trial.weights is None:
        name = trial.result.get("weights")
        place = trial.folder / name if name else trial.folder / "weights.safetensors"
        raise ValueError(
            f"the weights of trial {trial.number} of fold {fold.number} are missing: a search keeps those of the best "
            f"trials only (--keep all keeps all), or the file was removed; train it again with: "
            f"dgsearch train {trial.folder / 'trial.json'} --data {study.specification.data} --save {place}"
        )
    return trial, trial.weights

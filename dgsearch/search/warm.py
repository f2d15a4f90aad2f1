"""A search that begins with what an older study found, in the folds that may know it."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dgsearch.domains.layout import DomainIndex
from dgsearch.search.engine import Engine
from dgsearch.study import Fold, Study, TrialRecord, read_json, write_json

QUEUED = 5  # recipes of the older study that each fold tries
FILE = "warm_start.json"


def warm(engine: Engine, older: Path | None) -> str | None:
    """Queue an older study's best recipes in every fold that may know them; return what was done, in words.

    A fold may not if the older study trained or validated on what the fold holds out: a domain of that name, or of
    the same files under another name, where this study knows the files since another fold has them as a source. A
    held-out domain that is no fold's source is known by its name alone: it is never opened to find out. What the
    older study was itself begun with counts as its own. What is queued is written to this study first, and a
    later session goes on with that, without the older study.

    Raises:
        ValueError: if there is no such study, no fold may know it, or this study began with another one.
    """
    study = engine.study
    record = study.path / FILE
    if record.exists():
        begun = read_json(record)
        if older is not None and str(older.resolve()) != begun["study"]:
            raise ValueError(f"the study {study.path} was begun with {begun['study']}, and can't be with another too")
        _queue(engine, begun)
        return None
    if older is None:
        return None
    if older.resolve() == study.path.resolve():
        raise ValueError("--warm-start names the study itself: it needs an older one")
    there = Study.open(older)
    seen = domains(there)
    shared = {fold.number: name for fold in study.folds if (name := _shared(fold, study, seen))}
    names = ", ".join(sorted(set(shared.values())))
    if len(shared) == len(study.folds):
        raise ValueError(f"the study {older} has learned from {names}, held out here: its recipes may not be used")
    space = engine.folds[0].space
    found: list[dict[str, Any]] = []
    known = [space.default_parameters(name) for name in space.family_names]
    outside = 0
    for trial in _best_first(there):
        parameters = space.parameters_of(trial.family, trial.recipe)
        outside += parameters is None
        if parameters is not None and parameters not in known and len(found) < QUEUED:
            known.append(parameters)
            found.append(parameters)
    folds = [fold.number for fold in study.folds if fold.number not in shared]
    begun = {"study": str(older.resolve()), "domains": seen, "folds": folds, "queue": found}
    write_json(record, begun)
    _queue(engine, begun)
    said = f"{len(found)} recipes of {older} are tried after the defaults"
    if outside:
        said += f"; {outside} trials lie outside this search space and are left out"
    return said + (f"; folds that hold out {names} may not know them" if names else "")


def _queue(engine: Engine, begun: dict[str, Any]) -> None:
    for fold in engine.folds:
        if fold.fold.number in begun["folds"]:
            fold.enqueue(begun["study"], begun["queue"])


def domains(study: Study) -> list[list[str]]:
    """Return name and content of every domain that a study has learned from, itself or through an older one."""
    record = study.path / FILE
    before = read_json(record)["domains"] if record.exists() else []
    return sorted([*before, *([name, _content(study, name)] for name in study.specification.fingerprints)])


def _content(study: Study, domain: str) -> str:
    """Return a hash of a source domain's files, whatever the domain is called: their names, labels and sizes."""
    index = DomainIndex.load(study.index_path(domain))
    names = (path.rpartition("/")[2] for path in index.paths)
    rows = sorted(zip(names, index.labels, index.sizes, strict=True))
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def _shared(fold: Fold, study: Study, seen: list[list[str]]) -> str | None:
    """Return a domain that a fold holds out and that is among those seen, or None."""
    names, contents = {name for name, _ in seen}, {content for _, content in seen}
    sources = study.specification.fingerprints
    return next(
        (d for d in fold.held_out if d in names or (d in sources and _content(study, d) in contents)),
        None,
    )


def _best_first(study: Study) -> Iterator[TrialRecord]:
    """Yield complete trials: the best of each fold, then the second of each, since folds' values do not compare."""
    ranked = [
        sorted((t for t in study.trials(fold.number) if t.best and t.state == "complete"), key=_rank)
        for fold in study.folds
    ]
    for place in range(max(map(len, ranked), default=0)):
        yield from (trials[place] for trials in ranked if place < len(trials))


def _rank(trial: TrialRecord) -> tuple[float, int]:
    return (-trial.best.mean if trial.best else 0.0, trial.number)

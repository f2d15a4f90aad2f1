"""What MLflow shows of a study, as plain data: names, tags, parameters, metric points and the note."""

import hashlib
import posixpath
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgsearch.recipe import SLOTS, decode, parameters
from dgsearch.study import Fold, Specification, Study, TrialRecord
from dgsearch.train import Evaluation

LONGEST_NAME = 200  # characters; MLflow's limit is 250, for all parts together
LONGEST_REASON = 1000
LONGEST_NOTE = 5000
OURS = ("curve/", "val/", "cost/", "best/", "target/")  # names that no diagnostic may take

Point = tuple[str, float, int, int]  # key, value, timestamp in milliseconds, step


def safe_name(name: str) -> str:
    """Return a name that MLflow takes for a metric: itself, or a cleaned one that ends in a hash of it.

    MLflow takes letters and digits of any script, ``_ - . : /`` and spaces, but nothing that reads as another
    path, nor the marks that some scripts put on letters.
    """
    plain = re.fullmatch(r"[\w.\- :/]+", name) and posixpath.normpath(name) == name
    if plain and not name.startswith(("/", "..")) and name != "." and len(name) <= LONGEST_NAME:
        return name
    cleaned = re.sub(r"[^\w.\- :/]", "-", unicodedata.normalize("NFC", name))
    parts = [part for part in cleaned.split("/") if part.strip(".")]
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=4).hexdigest()
    return f"{'/'.join(parts)[: LONGEST_NAME - 9].rstrip('/')}-{digest}"


def experiment_name(study: Study) -> str:
    """Return ``<data set folder>/<study folder>``."""
    data = Path(study.specification.data)
    return f"{data.name or data.resolve().name or 'data'}/{study.path.resolve().name}"


def held_out(fold: Fold) -> str:
    """Return the names of the domains that a fold holds out."""
    return ", ".join(fold.held_out) or "none"


def milliseconds(file: Path) -> int:
    """Return when a file was last written."""
    return file.stat().st_mtime_ns // 1_000_000


@dataclass(frozen=True)
class Description:
    """What a run is called and carries besides figures."""

    name: str
    tags: dict[str, str]
    params: dict[str, str]


@dataclass(frozen=True)
class Figures:
    """A trial's figures, with times in milliseconds since it began.

    These times follow from the record, so that a point sent twice is one point.
    """

    curves: dict[int, list[Point]]  # of each evaluation, by its step
    final: list[Point]  # for when it ended: at its best evaluation, and its cost
    accuracy: float | None  # of its best evaluation
    seconds: float


def fold_description(study: Study, fold: Fold, *, study_id: str) -> Description:
    """Describe a fold's run: it carries what is constant over its trials."""
    s = study.specification
    constants = {
        "data": s.data,
        "sources": ", ".join(fold.sources),
        "held_out": held_out(fold),
        "space": s.space,
        "space_hash": s.space_hash,
        "network": s.network,
        "resolution": s.resolution,
        "steps": s.steps,
        "batch_size": "searched" if s.batch_size is None else s.batch_size,
        "seed": s.seed,
        "threads": s.threads,
        "precision": s.precision,
        "version": s.version,
    }
    tags = {"dgsearch.study": study_id, "dgsearch.fold": str(fold.number), "dgsearch.space_hash": s.space_hash}
    params = {name: str(value) for name, value in constants.items() if value != ""}
    return Description(f"held out: {held_out(fold)}", tags, params)


def trial_description(record: TrialRecord, specification: Specification, *, study_id: str) -> Description:
    """Describe a trial's run.

    Raises:
        ValueError: if its recipe has a component that is not known here.
    """
    recipe = decode(record.recipe, where=f"the recipe of {record.folder}")
    tags = {
        "dgsearch.study": study_id,
        "dgsearch.fold": str(record.fold),
        "dgsearch.trial": str(record.number),
        "dgsearch.family": record.family,
        **{f"dgsearch.{slot}": recipe.components[slot].choice() for slot in SLOTS},
        "dgsearch.seed": str(specification.seed),
        "dgsearch.space_hash": specification.space_hash,
        "dgsearch.state": record.state,
    }
    if reason := stop_reason(record):
        tags["dgsearch.stop_reason"] = reason
    if kind := record.result.get("kind"):
        tags["dgsearch.failure"] = kind
    params = {name: str(value) for name, value in parameters(recipe).items()}
    return Description(f"t{record.number:04d} {record.family}", tags, params)


def stop_reason(record: TrialRecord) -> str:
    """Return why a trial did not run to its end, or an empty string."""
    reason = str(record.result.get("reason") or "")
    if record.state == "pruned" and not reason and record.evaluations:
        reason = f"stopped after {record.evaluations[-1].step} steps"
    return reason[:LONGEST_REASON]


def trial_figures(record: TrialRecord) -> Figures:
    """Return what a trial measured."""
    curves = {e.step: curve_points(e) for e in record.evaluations}
    best = record.best
    if best is None:
        return Figures(curves, [], None, 0.0)
    last = record.evaluations[-1]
    figures = {"val/accuracy": best.mean}
    figures |= {f"val/accuracy/{safe_name(domain)}": value for domain, value in best.accuracy.items()}
    final = [(name, float(value), round(best.seconds * 1000), best.step) for name, value in figures.items()]
    final.append(("cost/seconds", last.seconds, round(last.seconds * 1000), last.step))
    return Figures(curves, final, best.mean, last.seconds)


def curve_points(evaluation: Evaluation) -> list[Point]:
    """Return an evaluation's points."""
    figures = {"curve/accuracy": evaluation.mean, "curve/worst": evaluation.worst}
    for kind, values in (("accuracy", evaluation.accuracy), ("loss", evaluation.loss)):
        figures |= {f"curve/{kind}/{safe_name(domain)}": value for domain, value in values.items()}
    for name, value in evaluation.log.items():
        figures[safe_name(f"log/{name}" if name.startswith(OURS) else name)] = value
    at = round(evaluation.seconds * 1000)
    return [(name, float(value), at, evaluation.step) for name, value in figures.items()]


@dataclass(frozen=True)
class Ended:
    """A trial that ended, as the curves and the table of its fold need it. ``end`` is in milliseconds."""

    number: int
    name: str
    state: str
    accuracy: float | None  # of its best evaluation
    seconds: float
    end: int


def in_order(ended: Iterable[Ended]) -> list[Ended]:
    """Return trials in the order in which they ended."""
    return sorted(ended, key=lambda e: (e.end, e.number))


def best_points(ended: Sequence[Ended], *, after: int) -> list[Point]:
    """Return the fold's best complete trial so far against trials ended and against seconds of training.

    ``ended`` is in order; the points of the first ``after`` trials are left out.
    """
    points: list[Point] = []
    best: float | None = None
    seconds = 0.0
    for count, trial in enumerate(ended, start=1):
        seconds += trial.seconds
        if trial.state == "complete" and trial.accuracy is not None:
            best = trial.accuracy if best is None else max(best, trial.accuracy)
        if best is not None and count > after:
            points.append(("best/val_accuracy_by_seconds", best, trial.end, int(seconds)))
            points.append(("best/val_accuracy", best, trial.end, count))
    return points


def note(study: Study, ended: Sequence[Sequence[Ended]]) -> str:
    """Return the experiment's note in Markdown; ``ended`` holds each fold's trials."""
    s = study.specification
    path = study.path.resolve()
    rows = ["| held out | ended | complete | pruned | failed | best `val/accuracy` | trial |", "|---" * 7 + "|"]
    for fold, trials in zip(study.folds, ended, strict=True):
        counts = [sum(t.state == state for t in trials) for state in ("complete", "pruned", "failed")]
        complete = [t for t in trials if t.state == "complete" and t.accuracy is not None]
        best = max(complete, key=lambda t: (t.accuracy, -t.number), default=None)
        figures: tuple[Any, ...] = ("", "") if best is None else (f"{best.accuracy:.4f}", best.name)
        cells = [held_out(fold), len(trials), *counts, *figures]
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    text = f"""\
**Goal.** The training method and hyperparameters that make a classifier work in a domain nobody has seen.
A run `held out: …` is a fold; the runs below it are trials, trained and validated on the fold's other domains.

**Space.** `{s.space}` ({s.space_hash}), network `{s.network}` at {s.resolution} pixels, {s.steps} steps a trial,
seed {s.seed}.

**Protocol.** `val/accuracy` selects: the mean accuracy over the source domains' validation parts at the best of a
trial's evaluations. Trials that fall behind early are stopped (`dgsearch.state = pruned`); only complete ones can be
selected. No trial has a figure of a held-out domain: `target/…` stands on a fold's run, after `dgsearch evaluate`.

**Go on.** The same `dgsearch search` command with `--study {path}` goes on where it stopped;
`dgsearch track {path}` sends all of this again. Sort by *Created* to see trials below their fold.

"""
    return (text + "\n".join(rows))[:LONGEST_NOTE]

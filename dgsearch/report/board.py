"""A search as a table: a row a fold, a row a family, what failed, what it has used and what is left."""

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dgsearch.report.foresight import Foresight, foresee
from dgsearch.report.snapshot import Seen, Snapshot, by_family, counts

SHOWN = 5  # failures; JSON has all
ENDED_BY = {"trials": "--trials", "hours": "--hours", "device_hours": "--device-hours"}


def left(snapshot: Snapshot) -> Foresight:
    """Return what is left of a search, run as its latest session runs it."""
    spent = snapshot.spent
    return foresee(snapshot.course, snapshot.trials, spent=spent, concurrent=spent.concurrent, devices=spent.devices)


def as_data(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as plain data: counts by fold and family, failures, budget, what is used and what is left."""
    budget, spent, rest = snapshot.course.budget, snapshot.spent, left(snapshot)
    return {
        "state": snapshot.state,
        "driver": snapshot.driver,
        "ended_by": snapshot.ended_by if snapshot.begun else None,
        "budget": vars(budget) if snapshot.begun else None,
        "spent": {"seconds": spent.seconds, "device_seconds": spent.device_seconds, "sessions": spent.sessions},
        "left": vars(rest) if snapshot.begun else None,
        "folds": [
            {"held_out": list(fold.held_out)}
            | counts(trials)
            | {"families": {name: counts(found) for name, found in by_family(trials).items()}}
            for fold in snapshot.folds
            for trials in [[t for t in snapshot.trials if t.fold == fold.number]]
        ],
        "failures": [
            {"fold": t.fold, "trial": t.number, "family": t.family, "kind": t.kind, "reason": t.reason, "log": t.log}
            for t in snapshot.trials
            if t.state == "failed"
        ],
    }


def board(snapshot: Snapshot, *, failures: bool = True) -> RenderableType:
    """Return the table of a search; with ``failures``, what failed and why below it."""
    folds = Table(box=None, pad_edge=False)
    families = Table(box=None, pad_edge=False)
    columns = ("done", "running", "pruned", "failed", "best")
    folds.add_column("held out", no_wrap=True, overflow="ellipsis", min_width=8)
    families.add_column("family", no_wrap=True, overflow="ellipsis", min_width=8)
    for table in (folds, families):
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")
    folds.add_column("of", no_wrap=True, overflow="ellipsis")
    families.add_column("held out: best", no_wrap=True, overflow="ellipsis")
    asked = snapshot.course.budget.trials
    for fold in snapshot.folds:
        trials = [t for t in snapshot.trials if t.fold == fold.number]
        ended = sum(t.state != "running" for t in trials)
        done = f"{ended}/{max(asked, len(trials))}" if asked is not None else str(ended)
        best = _best(trials)
        folds.add_row(escape(_held_out(fold.held_out)), done, *_cells(trials), escape(best.family) if best else "")
    for name, trials in sorted(by_family(snapshot.trials).items()):
        bests = [
            f"{_held_out(fold.held_out)} {best.best:.3f}"
            for fold in snapshot.folds
            if (best := _best([t for t in trials if t.fold == fold.number]))
        ]
        ended = sum(t.state != "running" for t in trials)
        families.add_row(escape(name), str(ended), *_cells(trials), escape(", ".join(bests)))
    parts: list[RenderableType] = [folds, "", families, "", *_footer(snapshot)]
    return Group(*parts, *(_failures(snapshot) if failures else []))


def _best(trials: Sequence[Seen]) -> Seen | None:
    complete = [t for t in trials if t.state == "complete" and t.best is not None]
    return max(complete, key=lambda t: (t.best, -t.number), default=None)


def _held_out(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _cells(trials: Sequence[Seen]) -> list[str]:
    best = _best(trials)
    states = [str(sum(t.state == state for t in trials)) for state in ("running", "pruned", "failed")]
    return [*states, f"{best.best:.3f}" if best else ""]


def _footer(snapshot: Snapshot) -> list[Text]:
    spent, budget = snapshot.spent, snapshot.course.budget
    sessions = f"{spent.sessions} session{'s' * (spent.sessions != 1)}"
    hours = f" of {budget.hours:g} h" if budget.hours is not None else ""
    devices = f" of {budget.device_hours:g}" if budget.device_hours is not None else ""
    used = f"{clock(spent.seconds)}{hours} in {sessions}, {spent.device_seconds / 3600:.2f}{devices} device-hours"
    states = {
        "searching": "being searched by process {pid} on {host}".format(**(snapshot.driver or {"pid": 0, "host": ""})),
        "interrupted": "not running and not finished: the same command goes on",
        "finished": f"finished ({ENDED_BY.get(snapshot.ended_by or '', '')})",
        "not begun": "no search has begun",
    }
    lines = [states[snapshot.state], used]
    rest = left(snapshot)
    if snapshot.state in ("searching", "interrupted") and rest.seconds is not None and rest.device_seconds is not None:
        lines.append(f"about {clock(rest.seconds)} and {rest.device_seconds / 3600:.2f} device-hours left")
    return [Text(line) for line in lines]


def _failures(snapshot: Snapshot) -> list[Text]:
    failed = [t for t in snapshot.trials if t.state == "failed"]
    lines = []
    for t in failed[:SHOWN]:
        kind = f"{t.kind}: " if t.kind else ""
        reason = (t.reason.strip().splitlines() or [""])[-1]
        where = _held_out(snapshot.folds[t.fold].held_out)
        lines.append(Text(f"failed: {t.family} t{t.number:04d} (held out: {where}) {kind}{reason}"))
        if t.log:
            lines.append(Text(f"  {t.log}"))
    if len(failed) > SHOWN:
        lines.append(Text(f"failed: {len(failed) - SHOWN} more; `dgsearch status --json` names them all"))
    return lines


def render_board(snapshot: Snapshot, *, width: int | None = None) -> str:
    """Return the table as text."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(board(snapshot), soft_wrap=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def clock(seconds: float) -> str:
    """Return a duration as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

"""A search as a table: a row a fold, a row a family, what failed, what it has used and what is left."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dgsearch.report.foresight import Foresight, foresee
from dgsearch.report.snapshot import Seen, Snapshot, by_family, counts

WIDE = 60  # characters, from which on the last columns are shown
SHOWN = 5  # failures; JSON has all
ENDED_BY = {
    "trials": "--trials",
    "hours": "--hours",
    "device_hours": "--device-hours",
    "families": "every family is given up",
}


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
            for trials in [snapshot.of(fold)]
        ],
        "failures": [
            {"fold": t.fold, "trial": t.number, "family": t.family, "kind": t.kind, "reason": t.reason, "log": t.log}
            for t in snapshot.trials
            if t.state == "failed"
        ],
    }


@dataclass(frozen=True)
class Board:
    """The table of a search; with ``failures``, what failed and why below it. Narrow, it leaves last columns out."""

    snapshot: Snapshot
    failures: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it in the width there is."""
        wide = options.max_width >= WIDE
        yield _folds(self.snapshot, wide=wide)
        yield ""
        yield _families(self.snapshot, wide=wide)
        yield ""
        yield from _footer(self.snapshot)
        if self.failures:
            yield from _failures(self.snapshot)


def _table(name: str, last: str, *, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0))
    table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=3)
    for count in ("done", "run", "pruned", "failed", "best"):
        table.add_column(count, justify="right", no_wrap=True, overflow="ellipsis")
    if wide:
        table.add_column(last, overflow="fold")
    return table


def _folds(snapshot: Snapshot, *, wide: bool) -> Table:
    table = _table("held out", "family", wide=wide)
    for fold in snapshot.folds:
        trials = snapshot.of(fold)
        asked = snapshot.course.asked(trials)
        of = "" if asked is None else f"/{asked}"
        best = _best(trials)
        last = [escape(best.family) if best else ""] if wide else []
        table.add_row(escape(_held_out(fold.held_out)), *_cells(trials, of), *last)
    return table


def _families(snapshot: Snapshot, *, wide: bool) -> Table:
    table = _table("family", "held out: best", wide=wide)
    for name, trials in sorted(by_family(snapshot.trials).items()):
        bests = [
            f"{_held_out(fold.held_out)} {best.best:.3f}"
            for fold in snapshot.folds
            if (best := _best([t for t in trials if t.fold == fold.number]))
        ]
        table.add_row(escape(name), *_cells(trials, ""), *([escape(", ".join(bests))] if wide else []))
    return table


def _best(trials: Sequence[Seen]) -> Seen | None:
    complete = [t for t in trials if t.state == "complete" and t.best is not None]
    return max(complete, key=lambda t: (t.best, -t.number), default=None)


def _held_out(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _cells(trials: Sequence[Seen], of: str) -> list[str]:
    best = _best(trials)
    running, pruned, failed = (sum(t.state == state for t in trials) for state in ("running", "pruned", "failed"))
    done = f"{len(trials) - running}{of}"
    return [done, str(running), str(pruned), str(failed), f"{best.best:.3f}" if best else ""]


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
    console.print(Board(snapshot))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def clock(seconds: float) -> str:
    """Return a duration as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

"""Progress of a search: a line for each trial that ends, and on a terminal a live table below the lines."""

import contextlib
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from dgsearch.report.board import Board, clock, left
from dgsearch.report.snapshot import Reader, Snapshot
from dgsearch.study import Study, TrialRecord

EVERY = 2.0  # seconds between two looks at a study in which nothing was said to happen
LEAST = 0.25  # seconds between two pictures
SAID = ("reason", "note")  # of a result


class TrialLines:
    """Prints a line when a trial ends: how many are done, what it reached, and about how long is left."""

    def __init__(self, study: Study, *, console: Console, reader: Reader | None = None) -> None:
        self.folds = study.folds
        self.console = console
        self.reader = reader or Reader(study)
        self.begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def __call__(self, kind: str, record: TrialRecord) -> None:
        """Print what happened to a trial."""
        held_out = ", ".join(self.folds[record.fold].held_out) or "none"
        said = {
            "retry": f"t{record.number:04d} {record.family} ran out of memory and is tried again, on a whole device",
            "given up": f"the family {record.family} is GIVEN UP: each trial of it so far failed",
        }.get(kind)
        # A study that can't be read now, or a terminal that is gone, must not end the search.
        with contextlib.suppress(OSError, ValueError):
            if said is not None:
                self.console.print(f"held out: {held_out}  {said}", markup=False, soft_wrap=True)
            if self.begun and kind != "end":
                return
            snapshot = self.reader.read()
            if not self.begun:
                self._begin(snapshot)
            if kind == "end":
                self._end(snapshot, record)

    def _begin(self, snapshot: Snapshot) -> None:
        """Say what was there before the first trial of this session."""
        self.begun = True
        if done := sum(t.state != "running" for t in snapshot.trials):
            self.console.print(f"going on: {done}{self._of(snapshot)} trials have ended")

    def _of(self, snapshot: Snapshot) -> str:
        return "" if snapshot.asked is None else f" of {snapshot.asked}"

    def _end(self, snapshot: Snapshot, record: TrialRecord) -> None:
        ended = [t for t in snapshot.trials if t.state != "running"]
        bests = [t.best for t in ended if t.fold == record.fold and t.state == "complete" and t.best is not None]
        score = f"{record.best.mean:.3f}" if record.best else "  -  "
        best = f"{max(bests):.3f}" if bests else "  -  "
        held_out = ", ".join(self.folds[record.fold].held_out) or "none"
        seconds = left(snapshot).seconds
        rest = f" about {clock(seconds)} left" if seconds is not None else ""
        self.console.print(
            f"[{len(ended)}{self._of(snapshot).replace(' of ', '/')}] held out: {held_out:<12} "
            f"t{record.number:04d} {record.family:<12} {record.state:<8} {score} (best {best})"
            f"{rest}" + "".join(f"  {record.result[k]}" for k in SAID if record.result.get(k)),
            markup=False,
            soft_wrap=True,
        )


class LiveBoard:
    """Shows the table of a search below the lines of its trials; redrawn when something happens, and now and then."""

    def __init__(self, study: Study, *, console: Console) -> None:
        self.reader = Reader(study)
        self.lines = TrialLines(study, console=console, reader=self.reader)
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.lock = threading.Lock()
        self.drawn = 0.0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._redraw, name="dgsearch-board", daemon=True)

    def __enter__(self) -> Self:
        self.live.start()
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.over.set()
        self.thread.join()
        self.live.stop()

    def __call__(self, kind: str, record: TrialRecord) -> None:
        """Show what happened to a trial."""
        with self.lock:
            self.lines(kind, record)
            if time.monotonic() - self.drawn >= LEAST:
                self._draw()

    def _redraw(self) -> None:
        while not self.over.wait(EVERY):
            with self.lock:
                self._draw()

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # as above
            self.live.update(Board(self.reader.read(), failures=False), refresh=True)


def watching(study: Study, *, console: Console) -> TrialLines | LiveBoard:
    """Return what shows a search: a live table on a terminal, lines elsewhere."""
    return LiveBoard(study, console=console) if console.is_terminal else TrialLines(study, console=console)


def changes(study: Study) -> Iterator[Snapshot]:
    """Yield a search as it is, and again whenever it has changed, until nobody drives it. It is only read."""
    reader = Reader(study)
    shown: Snapshot | None = None
    while True:
        found = reader.read()
        if found != shown:
            yield found
        shown = found
        if found.driver is None:
            return
        time.sleep(EVERY)


def follow(study: Study, *, console: Console) -> None:
    """Show a search until nobody drives it any more.

    On a terminal the table is redrawn in its place, elsewhere printed again, when it has changed.
    """
    if not console.is_terminal:
        for snapshot in changes(study):
            console.print(Board(snapshot))
        return
    with Live(console=console, auto_refresh=False) as live:
        for snapshot in changes(study):
            live.update(Board(snapshot), refresh=True)

"""What a trial prints, warns and raises goes to ``worker.log`` in its folder, and not to anyone's screen."""

import contextlib
import ctypes
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dgsearch.search.engine import Assignment, Outcome, Report, Trial
from dgsearch.search.retention import LOG
from dgsearch.train import StopTrial


def logged(trial: Trial, *, whole_process: bool) -> Trial:
    """Return the trial with its output sent to its log; what it raises is written there in full, and raised.

    In a process of its own (``whole_process``) what libraries write past Python goes there too.
    """

    def run(assignment: Assignment, report: Report) -> Outcome:
        with _log(Path(assignment.folder) / LOG, whole_process=whole_process) as log:
            try:
                return trial(assignment, report)
            except StopTrial:
                raise
            except Exception:
                traceback.print_exc(file=log)
                raise

    return run


@contextlib.contextmanager
def _log(path: Path, *, whole_process: bool) -> Iterator[IO[str]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as ends:
        ends.callback(_remove_empty, path)
        log = ends.enter_context(path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace"))
        # Of the root logger: without one, logging writes to a stream that it may have kept from before.
        handler = logging.StreamHandler(log)
        handler.setLevel(logging.WARNING)
        logging.getLogger().addHandler(handler)
        ends.callback(logging.getLogger().removeHandler, handler)
        if whole_process:
            ends.enter_context(_descriptors(log))
        ends.enter_context(contextlib.redirect_stdout(log))
        ends.enter_context(contextlib.redirect_stderr(log))
        yield log


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # gone with its folder, perhaps
        if path.stat().st_size == 0:
            path.unlink()


@contextlib.contextmanager
def _descriptors(log: IO[str]) -> Iterator[None]:
    """Send the process's file descriptors 1 and 2 to ``log`` until the exit."""
    _flush()
    own = {number: os.dup(number) for number in (1, 2)}
    try:
        for number in own:
            os.dup2(log.fileno(), number)
        yield
    finally:
        _flush()
        for number, copy in own.items():
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    """Let buffered output go where the descriptors lead now."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    with contextlib.suppress(OSError, TypeError):  # where a process has no C library of its own to name
        ctypes.CDLL(None).fflush(None)

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
    with path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace") as log:
        # Of the root logger: without one, logging writes to a stream that it may have kept from before.
        handler = logging.StreamHandler(log)
        handler.setLevel(logging.WARNING)
        logging.getLogger().addHandler(handler)
        try:
            with (
                _descriptors(log) if whole_process else contextlib.nullcontext(),
                contextlib.redirect_stdout(log),
                contextlib.redirect_stderr(log),
            ):
                yield log
        finally:
            logging.getLogger().removeHandler(handler)
    with contextlib.suppress(OSError):  # gone with its folder, perhaps
        if path.stat().st_size == 0:
            path.unlink()


@contextlib.contextmanager
def _descriptors(log: IO[str]) -> Iterator[None]:
    """Send the process's file descriptors 1 and 2 to ``log`` until the exit."""
    own = {number: os.dup(number) for number in (1, 2)}
    try:
        for number in own:
            os.dup2(log.fileno(), number)
        yield
    finally:
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
        with contextlib.suppress(OSError, TypeError):  # where a process has no C library of its own to name
            ctypes.CDLL(None).fflush(None)
        for number, copy in own.items():
            os.dup2(copy, number)
            os.close(copy)

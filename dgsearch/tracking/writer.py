"""Writer: keeps MLflow up to date while a search runs, from a thread that the search never waits for."""

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from dgsearch.study import Study
from dgsearch.tracking.projection import Projection
from dgsearch.tracking.store import resolve_uri, shown, track_command

BUSY = 2.0  # seconds between two syncs at least
IDLE = 20.0  # seconds until curves of running trials are sent though nothing began or ended
LONGEST_DELAY = 60.0  # seconds between attempts when the store does not answer


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Writer:
    """A background thread that sends a study to MLflow again and again.

    It reads the study's files and shares nothing with the search. Whatever goes wrong in it is tried again,
    and said in one line when the writer is closed.
    """

    def __init__(
        self,
        study: Study,
        uri: str | None = None,
        *,
        busy: float = BUSY,
        idle: float = IDLE,
        say: Callable[[str], None] = _to_stderr,
    ) -> None:
        self._study = study
        self._uri = resolve_uri(study, uri)
        self._busy = busy
        self._idle = idle
        self._say = say
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._problem: str | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Start sending."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mlflow-writer", daemon=True)
            self._thread.start()
        return self

    def poke(self) -> None:
        """Say that something began or ended; returns at once."""
        self._wake.set()

    def close(self, timeout: float = 60.0) -> str | None:
        """Send what is left, for ``timeout`` seconds at most; return a line that says what could not be sent.

        The line ends with the command that sends it later.
        """
        if self._thread is None:
            return None
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout)
        problem = self._problem
        if self._thread.is_alive():
            what = f"MLflow at {shown(self._uri)} has not taken all of {self._study.path} in {timeout:g} s"
            problem = f"{what}; nothing is lost, send it later"
        return f"{problem} with: {track_command(self._study, self._uri)}" if problem else None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if line := self.close():
            self._say(line)

    def _run(self) -> None:
        projection = Projection(self._study, self._uri)
        delay = self._busy
        while True:
            is_last = self._closing.is_set()
            self._wake.clear()
            try:
                problems = projection.sync().problems
                self._problem = f"{'; '.join(problems[:3])}; when that is mended, send it" if problems else None
                delay = self._busy
                failed = False
            except Exception as error:  # noqa: BLE001 - nothing that happens here may reach the search
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                self._problem = f"{reason}; nothing is lost, send it later"
                delay = min(2 * delay, LONGEST_DELAY)
                failed = True
            if is_last:
                return
            if not self._closing.wait(delay) and not failed:
                self._wake.wait(self._idle)


def project_quietly(study: Study, uri: str | None = None, *, say: Callable[[str], None] = _to_stderr) -> None:
    """Send a study once, for a minute at most; what could not be sent is said in one line and no error."""
    with Writer(study, uri, say=say):
        pass

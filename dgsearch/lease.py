"""The lease on a study: which process drives it, shown by a heartbeat; a dead driver is followed by another.

    sessions/0003/ended.json      a driver that ended
    sessions/0004/driver.json     the driver: host, process and its start; touched at each heartbeat

The session with the highest number is the driver's. A session appears whole, in one move, under a number that no
other has: of two that want it one gets it, and a driver that finds a later session has been followed. Nothing here
reads a clock: a process is dead if it is gone from this machine's table of processes, a driver elsewhere if its
heartbeats do not change while this process watches them for a minute.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEAT = 10.0  # seconds between heartbeats
SILENCE = 60.0  # seconds without a heartbeat after which another machine's driver counts as dead


class Lease:
    """A session in the hands of this process, until ``release``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="dgsearch-heartbeat", daemon=True)
        self._thread.start()

    @property
    def session(self) -> str:
        """The session's name, which is its number."""
        return self.folder.name

    @classmethod
    def take(cls, sessions: Path, *, waiting: Callable[[str], None] = lambda who: None) -> "Lease":
        """Begin the next session, once the one before it has ended or its driver is dead.

        A driver on another machine is watched for up to a minute: ``waiting(who)`` is called first.

        Raises:
            ValueError: if a driver is at work.
            OSError: if the session can't be written.
        """
        sessions.mkdir(parents=True, exist_ok=True)
        while True:
            last = max(numbers(sessions), default=0)
            before = sessions / name(last)
            if _is_driven(before / "driver.json", waiting):
                raise ValueError(f"is being searched by {driver(before)}; one driver at a time")
            folder = sessions / name(last + 1)
            aside = sessions / f".{uuid.uuid4().hex}"
            try:
                aside.mkdir()
                me = {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid()}
                me["started"] = _started(os.getpid()) or ""
                with (aside / "driver.json").open("w") as file:
                    json.dump(me, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(aside, folder)  # fails where another driver's session is there already
                return cls(folder)
            except OSError:
                shutil.rmtree(aside, ignore_errors=True)
                if not folder.exists():
                    raise

    def check(self) -> None:
        """Raise a ValueError if another driver has followed this one."""
        after = self.folder.with_name(name(int(self.session) + 1))
        if after.exists():
            raise ValueError(
                f"is searched by {driver(after)} now: this driver gave no sign of life for {SILENCE:.0f} s and was "
                "followed; it stops, and wrote nothing since it was found out"
            )

    def release(self) -> None:
        """End the session."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.folder / "driver.json", self.folder / "ended.json")

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            with contextlib.suppress(OSError):  # the driver meets the fault itself, when it writes
                os.utime(self.folder / "driver.json")


def name(number: int) -> str:
    """Return the name of a session."""
    return f"{number:04d}"


def numbers(sessions: Path) -> list[int]:
    """Return the numbers of the sessions in a folder."""
    return [int(entry.name) for entry in sessions.iterdir() if entry.name.isdigit()]


def driver(session: Path) -> str:
    """Return who drives, or drove, a session, in words."""
    for file in (session / "driver.json", session / "ended.json"):
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(file.read_text())
            return f"process {found['pid']} on {found['host']}"
    return "another process"


def holder(sessions: Path) -> dict[str, Any] | None:
    """Return the host and pid of the driver at work, as far as one look shows, or None.

    A driver on another machine counts for a minute after its last heartbeat, by this machine's clock.
    """
    with contextlib.suppress(OSError, ValueError):
        file = sessions / name(max(numbers(sessions), default=0)) / "driver.json"
        found = json.loads(file.read_text())
        if _lives(found) if _is_here(found) else time.time() - file.stat().st_mtime < SILENCE:
            return {"host": found["host"], "pid": found["pid"]}
    return None


def _is_here(found: dict[str, Any]) -> bool:
    return (found.get("host"), found.get("machine")) == (socket.gethostname(), _machine())


def _lives(found: dict[str, Any]) -> bool:
    started = _started(found["pid"])
    return started is not None and started == found["started"]


def _is_driven(file: Path, waiting: Callable[[str], None]) -> bool:
    beat = _last_beat(file)
    if beat is None:
        return False
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        found = {}
    except FileNotFoundError:
        return False
    if _is_here(found):
        return _lives(found)
    waiting(driver(file.parent))
    began = time.monotonic()
    while time.monotonic() - began < SILENCE:
        time.sleep(min(1.0, SILENCE / 10))
        now = _last_beat(file)
        if now != beat:
            return now is not None
    return False


def _last_beat(file: Path) -> int | None:
    """Return the mark that a heartbeat changes, or None if the session has ended."""
    try:
        with file.open() as opened:  # opened anew: a network file system then asks its server
            return os.fstat(opened.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _machine() -> str:
    """Return what tells this boot and this table of processes from others; empty where the system does not say."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _started(pid: int) -> str | None:
    """Return when a process of this machine started, as a mark that another process of its number lacks.

    None if there is no such process, or it has only not been buried yet.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        with contextlib.suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return None
        return ""
    return None if fields[0] in "ZX" else fields[19]

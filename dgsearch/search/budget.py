"""What a search may use, and what it has used over all its sessions: trials, hours and device-hours.

A session keeps ``sessions/0001/session.json``: how long it has searched, and the training seconds of its trials
times the devices that each reserved (a trial tried again on a whole device reserves that one). It is written as the
search goes, so that a killed session counts up to about its trials' last evaluations.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dgsearch.study import Study, read_json, write_json

TRIALS = 8  # a fold, where nothing is said
EVERY = 1.0  # seconds between two writes of a session's record


@dataclass(frozen=True)
class Spent:
    """What the sessions of a study have used. ``concurrent`` is how many trials the latest ran at once."""

    seconds: float = 0.0
    device_seconds: float = 0.0
    sessions: int = 0
    concurrent: int = 0
    devices: float = 1.0  # that a trial of the latest session reserves


@dataclass(frozen=True)
class Budget:
    """Trials a fold, hours of searching over all sessions, and device-hours; the first used up ends a search.

    Where neither hours nor device-hours are given, trials are 8; where they are, trials may be without number.
    """

    trials: int | None = None
    hours: float | None = None
    device_hours: float | None = None

    def __post_init__(self) -> None:
        if self.trials is None and self.hours is None and self.device_hours is None:
            object.__setattr__(self, "trials", TRIALS)
        if self.trials is not None and self.trials < 1:
            raise ValueError(f"a search needs at least 1 trial a fold, not {self.trials}")
        for name, value in (("hours", self.hours), ("device-hours", self.device_hours)):
            if value is not None and not value > 0:
                raise ValueError(f"a search needs {name} above 0, not {value:g}")

    def used_up(self, spent: Spent) -> str | None:
        """Return which of ``hours`` and ``device_hours`` is used up, if one is."""
        if self.hours is not None and spent.seconds >= self.hours * 3600:
            return "hours"
        if self.device_hours is not None and spent.device_seconds >= self.device_hours * 3600:
            return "device_hours"
        return None


def spent(study: Study, *, before: str | None = None) -> Spent:
    """Return what a study's sessions have used, by their records; ``before`` leaves out that session."""
    folders = sorted(p.name for p in (study.path / "sessions").glob("*") if p.name.isdigit() and p.name != before)
    records = [read_json(file) for n in folders if (file := _file(study.path, n)).is_file()]
    latest = records[-1] if records else {}
    return Spent(
        sum(r["seconds"] for r in records),
        sum(r["device_seconds"] for r in records),
        len(folders),
        latest.get("concurrent", 0),
        latest.get("devices", 1.0),
    )


def _file(study: Path, session: str) -> Path:
    return study / "sessions" / session / "session.json"


class Meter:
    """Measures one session and keeps its record. Time is monotonic: a clock set back gives no negative hours."""

    def __init__(
        self, study: Study, session: str, *, devices: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.file = _file(study.path, session)
        self.devices = devices
        self.clock = clock
        self.earlier = spent(study, before=session)
        self.began = clock()
        self.began_at = time.time()
        self.device_seconds = 0.0
        self.concurrent = 0
        self._heard: dict[tuple[int, int], float] = {}  # when each running trial was last heard of
        self._whole: set[tuple[int, int]] = set()  # trials that have a whole device where others have a share
        self.write()

    def spent(self) -> Spent:
        """Return what all sessions have used, this one included."""
        return Spent(
            self.earlier.seconds + self.clock() - self.began,
            self.earlier.device_seconds + self.device_seconds,
            self.earlier.sessions + 1,
            self.concurrent,
            self.devices,
        )

    def begin(self, trial: tuple[int, int], *, whole_device: bool = False) -> None:
        """Note that a trial was handed out."""
        self._heard[trial] = self.clock()
        if whole_device:
            self._whole.add(trial)
        if len(self._heard) > self.concurrent:
            self.concurrent = len(self._heard)
            self.write()

    def evaluated(self, trial: tuple[int, int], seconds: float) -> None:
        """Count ``seconds`` of training that a running trial has reported."""
        self._count(trial, seconds)

    def end(self, trial: tuple[int, int], *, failed: bool) -> None:
        """Note that a trial ended. One that failed reported nothing of its last seconds: they are counted here."""
        self._count(trial, self.clock() - self._heard.get(trial, self.clock()) if failed else 0.0)
        self._heard.pop(trial, None)

    def _count(self, trial: tuple[int, int], seconds: float) -> None:
        self._heard[trial] = self.clock()
        devices = max(1.0, self.devices) if trial in self._whole else self.devices
        self.device_seconds += max(0.0, seconds) * devices
        if self.clock() - self._written >= EVERY:
            self.write()

    def write(self) -> None:
        """Write the session's record."""
        self._written = self.clock()
        record = {
            "began": self.began_at,
            "seconds": self._written - self.began,
            "device_seconds": self.device_seconds,
            "devices": self.devices,
            "concurrent": self.concurrent,
        }
        write_json(self.file, record)

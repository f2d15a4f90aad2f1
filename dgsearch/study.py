"""Study: the directory a search leaves behind, and the record of everything that happened in it.

    study.json                    the specification: data, space, network, budget, folds
    domains/0.json …              the index of each source domain
    folds/0/journal.log           Optuna's journal
    folds/0/verdicts.jsonl        early stopping: value, rung and verdict, in the order they were given
    folds/0/trials/0007/          trial.json, evaluations.jsonl, result.json, retry.json where its memory was too
                                  small, and a folder a session with weights and worker.log, what it printed and raised
    folds/0/queue.json            parameters that trials are given after the defaults, from other studies or folds
    sessions/0001/                a driver's time with the study: who it is (see lease.py), and session.json: how long
                                  it has searched, and its device-seconds
    plan.json                     the latest search's budget, how its trials are drawn and what of them is kept
    selection.json, evaluation.json, openings.jsonl
    tracking.json, mlflow.db, mlartifacts/

Folders carry numbers only: a trial is never told, even by a path, which domain its fold holds out.
"""

import contextlib
import errno
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dgsearch import lease
from dgsearch.domains.layout import DomainIndex
from dgsearch.train import Evaluation, write_whole

FORMAT = 2  # of study directories: raised when an earlier dgsearch could not go on with one
STATES = ("complete", "pruned", "failed", "running")


REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "let files be larger",
    errno.EROFS: "make it writable",
}


def storage_fault(error: OSError) -> str | None:
    """Return what to say of a storage that takes nothing more, or None if that is not what is wrong.

    It is never a trial's own fault, and ends a session rather than a trial.
    """
    remedy = REMEDIES.get(error.errno or 0)
    if remedy is None:
        return None
    where = f": {error.filename}" if error.filename else ""
    return (
        f"{os.strerror(error.errno or 0).lower()}{where}; nothing that ended is lost: "
        f"{remedy} and run the same command again"
    )


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give an error of writing the name of the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one move, on the disk before it is in place."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; a broken one raises a ValueError that names it."""
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def drop_torn_line(path: Path) -> None:
    """Drop a last line that an earlier writer left cut in half."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)


def append_line(path: Path, value: Any) -> None:
    """Append one line of JSON; a line that an earlier writer left cut in half is dropped first."""
    with _naming(path):
        drop_torn_line(path)
        _append(path, json.dumps(value).encode() + b"\n")


def _append(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the whole lines of a file of JSON lines; a last line cut in half is left out.

    Raises:
        ValueError: at a line that is damaged; it names the file.
    """
    if path.exists():
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if line.endswith(b"\n"):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} of {path} is not JSON: {error}") from None


@dataclass(frozen=True)
class Fold:
    """Source domains, and the domains held out. ``number`` is all that a trial knows of the fold."""

    number: int
    sources: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True)
class Specification:
    """What a study searches and how; two commands go on with one study only if these agree."""

    data: str
    folds: tuple[Fold, ...]
    fingerprints: dict[str, str]  # of each source domain
    network: str
    space: str
    space_hash: str
    resolution: int
    steps: int
    batch_size: int | None
    seed: int
    threads: int
    precision: str
    version: str = ""
    weights_hash: str | None = None  # of the file of the network's initial weights

    def difference(self, other: "Specification") -> str | None:
        """Return what differs from another specification in a way that would change results, or None."""
        mine, theirs = asdict(self), asdict(other)
        for name in mine:
            if name in ("data", "version") or mine[name] == theirs[name]:
                continue
            if name == "folds":
                return f"folds: {_folds(self.folds)} there, {_folds(other.folds)} here"
            if name == "fingerprints":
                changed = sorted(d for d in mine[name] if mine[name][d] != theirs[name].get(d))
                return f"data: the files of {', '.join(changed) or 'some domains'} are not those it was made with"
            if name == "space_hash":
                return f"the choices, ranges or defaults of the space {self.space!r}"
            return f"{name.replace('_', ' ')}: {mine[name]} there, {theirs[name]} here"
        return None


def _folds(folds: tuple[Fold, ...]) -> str:
    return "; ".join(f"{', '.join(f.held_out) or 'none'} held out of {', '.join(f.sources)}" for f in folds)


@dataclass(frozen=True)
class TrialRecord:
    """A trial as the study records it."""

    fold: int
    number: int
    family: str
    recipe: dict[str, Any]
    default: bool
    folder: Path
    evaluations: tuple[Evaluation, ...] = ()
    result: dict[str, Any] = field(default_factory=dict)
    queued: int | None = None  # its place in the fold's queue, if it was given its parameters from there
    whole_device: bool = False  # it ran out of memory once, and is to have a device to itself

    @property
    def state(self) -> str:
        """Return complete, pruned, failed or running (which an interrupted one is too)."""
        return self.result.get("state", "running")

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the highest mean source accuracy, the earliest of equals."""
        return max(self.evaluations, key=lambda e: e.mean, default=None)

    @property
    def weights(self) -> Path | None:
        """Where the best weights are, if they are kept."""
        name = self.result.get("weights")
        return self.folder / name if name and (self.folder / name).is_file() else None


class Study:
    """A study directory: the specification and the records in it."""

    def __init__(self, path: Path, specification: Specification) -> None:
        self.path = path
        self.specification = specification
        self._lease: lease.Lease | None = None

    @property
    def folds(self) -> tuple[Fold, ...]:
        """The folds, by number."""
        return self.specification.folds

    @classmethod
    def create(cls, path: Path, specification: Specification, indexes: list[DomainIndex]) -> "Study":
        """Create the directory, or open it if it was created with the same specification.

        A study in which no trial has begun, and that nobody drives, may be defined anew.

        Raises:
            ValueError: if it holds another study (what differs is said), or something else, or can't be
                written.
        """
        file = path / "study.json"
        try:
            if cls.has_begun(path) or lease.holder(path / "sessions") is not None:
                study = cls.open(path)
                difference = study.specification.difference(specification)
                if difference is not None:
                    raise ValueError(f"the study {path} is of another search ({difference}); give a new --study")
                return study
            if not file.exists() and path.exists() and any(entry.name != "domains" for entry in path.iterdir()):
                raise ValueError(f"{path} holds something that is not a study; give a new --study")
            for number, index in enumerate(indexes):
                (path / "domains").mkdir(parents=True, exist_ok=True)
                index.save(path / "domains" / f"{number}.json")
            write_json(file, {"format": FORMAT} | asdict(specification))
        except OSError as error:
            raise ValueError(f"can't write the study {path}: {error.strerror}") from None
        return cls(path, specification)

    @staticmethod
    def has_begun(path: Path) -> bool:
        """Whether ``path`` holds a study in which a trial has begun."""
        return (path / "study.json").exists() and any(path.glob("folds/*/trials/*/trial.json"))

    @classmethod
    def open(cls, path: Path) -> "Study":
        """Open a study directory.

        Raises:
            ValueError: if there is none at ``path``, or one in another format.
        """
        file = path / "study.json"
        if not file.is_file():
            raise ValueError(f"no study at {path}: {file} does not exist; `dgsearch search --study` makes one")
        values = read_json(file)
        if not isinstance(values, dict):
            raise ValueError(f"{file} is not of a study: it holds no table")
        version = values.get("version") or "of an unknown version"
        # Before formats had numbers there was only the first.
        if (found := values.pop("format", 1)) != FORMAT:
            raise ValueError(
                f"the study {path} has format {found}, written by dgsearch {version}; this one is dgsearch "
                f"{importlib.metadata.version('dgsearch')}, which reads format {FORMAT}"
            )
        try:
            folds = tuple(Fold(f["number"], tuple(f["sources"]), tuple(f["held_out"])) for f in values["folds"])
            return cls(path, Specification(**values | {"folds": folds}))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is not of a study in format {FORMAT} (written by dgsearch {version}; this one is dgsearch "
                f"{importlib.metadata.version('dgsearch')}): {error}"
            ) from None

    @contextlib.contextmanager
    def driven(self, *, waiting: Callable[[str], None] = lambda who: None) -> Iterator[None]:
        """Be the only driver of the study until the exit; a dead driver is followed at once on its machine.

        A driver of another machine is followed after a minute without a sign of life; ``waiting(who)`` is
        called before that minute.

        Raises:
            ValueError: if another one is at work, or the study can't be written.
        """
        try:
            self._lease = lease.Lease.take(self.path / "sessions", waiting=waiting)
        except ValueError as error:
            raise ValueError(f"the study {self.path} {error}") from None
        except OSError as error:
            raise ValueError(f"can't write the study {self.path}: {error.strerror}") from None
        try:
            yield
        finally:
            self._lease.release()
            self._lease = None

    def check_driver(self) -> None:
        """Raise a ValueError if this process was the driver and another has followed it."""
        if self._lease is not None:
            try:
                self._lease.check()
            except ValueError as error:
                raise ValueError(f"the study {self.path} {error}") from None

    def begin_session(self) -> str:
        """Return the name of the driver's session, or of a new one where nobody else drives."""
        if self._lease is not None:
            return self._lease.session
        sessions = self.path / "sessions"
        sessions.mkdir(exist_ok=True)
        name = lease.name(1 + max(lease.numbers(sessions), default=0))
        (sessions / name).mkdir()
        return name

    @property
    def planned(self) -> dict[str, Any]:
        """What the latest search was asked for: its budget and what it keeps; empty before the first."""
        file = self.path / "plan.json"
        return read_json(file) if file.exists() else {}

    def plan(self, plan: dict[str, Any]) -> None:
        """Record what a search is asked for."""
        write_json(self.path / "plan.json", plan)

    def queue(self, fold: int) -> dict[str, Any]:
        """Return the parameters that a fold's trials are given after the defaults, and where they are from."""
        file = self.fold_dir(fold) / "queue.json"
        return read_json(file) if file.exists() else {"origins": [], "parameters": []}

    def index_path(self, domain: str) -> Path:
        """Return where a source domain's index is kept."""
        number = list(self.specification.fingerprints).index(domain)
        return self.path / "domains" / f"{number}.json"

    def fold_dir(self, fold: int) -> Path:
        """Return a fold's folder."""
        return self.path / "folds" / str(fold)

    def trial_dir(self, fold: int, number: int) -> Path:
        """Return a trial's folder."""
        return self.fold_dir(fold) / "trials" / f"{number:04d}"

    def trial(self, fold: int, number: int) -> TrialRecord:
        """Return the record of one trial."""
        folder = self.trial_dir(fold, number)
        begun = read_json(folder / "trial.json")
        result = folder / "result.json"
        # Before the evaluations: of a trial that ends meanwhile, all of them are read.
        ended = read_json(result) if result.exists() else {}
        return TrialRecord(
            fold,
            number,
            begun["family"],
            begun["recipe"],
            begun["default"],
            folder,
            tuple(Evaluation(**e) for e in read_lines(folder / "evaluations.jsonl")),
            ended,
            begun.get("queued"),
            (folder / "retry.json").exists(),
        )

    def trials(self, fold: int) -> list[TrialRecord]:
        """Return the records of a fold's trials that have begun, by number."""
        files = (self.fold_dir(fold) / "trials").glob("*/trial.json")
        return [self.trial(fold, number) for number in sorted(int(file.parent.name) for file in files)]


def recorded_best(trial_file: Path) -> float | None:
    """Return the best mean source accuracy recorded beside a ``trial.json``, if there is a record."""
    evaluations = [Evaluation(**e) for e in read_lines(trial_file.with_name("evaluations.jsonl"))]
    return max((e.mean for e in evaluations), default=None)

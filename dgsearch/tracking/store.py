"""Where a study is shown: the address of an MLflow store, a quiet client of it, and a study's identity in it."""

import contextlib
import hashlib
import json
import logging
import os
import re
import shlex
import sqlite3
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from filelock import FileLock, Timeout

from dgsearch.study import Study, read_json, write_json

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOCK_SECONDS = 60.0  # how long one sender waits for another
SQLITE = "sqlite:///"


def database(study: Study) -> Path:
    """Return the file that the default store is."""
    return study.path.resolve() / "mlflow.db"


def artifacts(study: Study) -> Path:
    """Return the folder that artifacts go to unless a server keeps them."""
    return study.path.resolve() / "mlartifacts"


def default_uri(study: Study) -> str:
    """Return the address of the store inside the study.

    Raises:
        ValueError: if the study's path has characters that such an address can't carry.
    """
    path = str(database(study))
    if "?" in path or unquote(path) != path:
        raise ValueError(
            f"MLflow can't keep its store in {study.path.resolve()}: of the path's characters it reads ? and %; "
            "give --tracking-uri, or a study in another folder"
        )
    return SQLITE + path


def resolve_uri(study: Study, given: str | None = None) -> str:
    """Return the store to use.

    The one given, else the one that the search was given, else that of MLFLOW_TRACKING_URI, else the study's own.
    """
    return given or _kept(study).get("uri") or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(study)


def remember_uri(study: Study, uri: str) -> None:
    """Keep the address that a search was given, so that later commands on the study find it; not a password."""
    if uri == shown(uri):
        with contextlib.suppress(OSError):
            write_json(_file(study), _kept(study) | {"uri": uri})


def _file(study: Study) -> Path:
    return study.path / "tracking.json"


def _kept(study: Study) -> dict[str, str]:
    """Return what is kept of the study's tracking: its id, and the store's address if one was given."""
    file = _file(study)
    return dict(read_json(file)) if file.exists() else {}


def is_database(uri: str) -> bool:
    """Whether an address is that of a database, and not of a server, which keeps artifacts itself."""
    return uri.split(":")[0].split("+")[0] in ("sqlite", "postgresql", "mysql", "mssql")


def shown(uri: str) -> str:
    """Return an address as it may be printed: without a password."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", uri)


def track_command(study: Study, uri: str) -> str:
    """Return the command that sends a study to a store."""
    command = f"dgsearch track {shlex.quote(str(study.path))}"
    with contextlib.suppress(ValueError):
        if uri == resolve_uri(study):
            return command
    return f"{command} --tracking-uri {shlex.quote(shown(uri))}"


def connect(uri: str) -> "MlflowClient":
    """Import MLflow, which takes seconds, and return a client that neither prints nor warns.

    Raises:
        ValueError: if the address is that of an SQLite file that can't be opened.
    """
    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
        # MLflow repeats a request whose answer got lost, and so creates a run twice. Here a projection that
        # failed is done again as a whole, and looks first at what is there.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    _ignore_warnings()
    if uri.startswith(SQLITE):
        _check_sqlite(Path(uri.removeprefix(SQLITE)))
    from mlflow import MlflowClient

    # After the import, which sets the level of its own logger.
    for logger in ("mlflow", "alembic"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    _ignore_warnings()
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _ignore_warnings() -> None:
    """Hide deprecations that are MLflow's to mend. Not ``catch_warnings``: that is no good in a thread."""
    for module in ("mlflow", "sqlalchemy", "alembic"):
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=module)


def _check_sqlite(path: Path) -> None:
    """Open the file once: MLflow itself would try for 100 seconds before it says that it can't."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as connection:
            connection.execute("PRAGMA schema_version").fetchall()
    except (sqlite3.Error, OSError) as error:
        raise ValueError(f"can't open the MLflow store {path}: {error}") from None


def rehome(study: Study, old: str, new: str) -> None:
    """Point the store inside a study at the study's artifacts: it holds absolute paths, and was moved."""
    with contextlib.closing(sqlite3.connect(database(study), timeout=30)) as connection, connection:
        connection.execute("UPDATE experiments SET artifact_location = ? WHERE artifact_location = ?", (new, old))
        connection.execute(
            "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) WHERE substr(artifact_uri, 1, ?) = ?",
            (new, len(old) + 1, len(old) + 1, f"{old}/"),
        )


def study_id(study: Study) -> str:
    """Return what tells a study from all others, wherever its folder is moved: drawn once and kept in it.

    A study that can't be written to is known by its path and specification.
    """
    kept = _kept(study)
    if "study" in kept:
        return kept["study"]
    drawn = uuid.uuid4().hex[:16]
    try:
        write_json(_file(study), kept | {"study": drawn})
    except OSError:
        facts = json.dumps([str(study.path.resolve()), asdict(study.specification)])
        return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
    return drawn


@contextlib.contextmanager
def alone(study: Study) -> Iterator[None]:
    """Be the only process that sends this study; where the folder allows no lock, trust that it is so.

    Raises:
        ValueError: if another process has been sending it for a minute.
    """
    lock = FileLock(study.path / ".tracking.lock", timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"another process is sending {study.path} to MLflow; try again when it is done") from None
    except (OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()

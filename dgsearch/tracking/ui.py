"""serve_ui: the MLflow UI on a study's store, for this machine only."""

import contextlib
import errno
import http.client
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO

from dgsearch.study import Study
from dgsearch.tracking.projection import project
from dgsearch.tracking.store import artifacts, is_database, resolve_uri, shown

START_SECONDS = 120.0  # how long the server may take until it answers
STOP_SECONDS = 5.0


def _print(line: str) -> None:
    print(line, flush=True)


def serve_ui(
    study: Study,
    *,
    port: int = 5000,
    host: str = "127.0.0.1",
    uri: str | None = None,
    say: Callable[[str], None] = _print,
) -> None:
    """Show the study in the MLflow UI until Ctrl-C; where a server keeps it, say that server's address.

    The study is sent first, so that the UI shows all of it. Port 0 takes any free port.

    Raises:
        ValueError: if the port is in use, the host is not this machine's loopback, or the server won't start.
    """
    uri = resolve_uri(study, uri)
    if not is_database(uri):
        projected = project(study, uri)
        say(f"{shown(uri)} shows the study as experiment {projected.experiment!r}; sort by Created")
        return
    port = free_port(host, port=port)
    try:
        projected = project(study, uri)
    except KeyboardInterrupt:
        return
    for problem in projected.problems:
        say(problem)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with contextlib.suppress(KeyboardInterrupt), _server(study, uri, host=host, port=port) as (server, output):
        _wait_until_it_answers(server, output, host=host, port=port)
        # Sorted by Created, newest first: in any other order the UI does not put trials below their fold.
        runs = f"#/experiments/{projected.experiment_id}/runs?orderByKey=attributes.start_time&orderByAsc=false"
        say(f"MLflow shows {study.path} at {address}/{runs}")
        say("Ctrl-C ends it.")
        server.wait()
        raise ValueError(_ended(output))


def free_port(host: str, *, port: int) -> int:
    """Return the port if it can be listened on, or a free one for port 0.

    Raises:
        ValueError: if it is in use, or the host is not a loopback address.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ValueError(
            f"the MLflow UI has no password and is served to this machine only, not on {host}; "
            f"from another machine use: ssh -L {port}:127.0.0.1:{port} <this machine>"
        )
    if not 0 <= port <= 65535:
        raise ValueError(f"a port is a number from 0 to 65535, not {port}")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(f"port {port} on {host} is in use; give another with --port") from None
            raise ValueError(f"can't listen on port {port} of {host}: {error.strerror}") from None
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _server(study: Study, uri: str, *, host: str, port: int) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Run the server in a process group of its own, and end the group at the exit or at SIGTERM."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--artifacts-destination", str(artifacts(study))]
    environment = os.environ | {
        "MLFLOW_BACKEND_STORE_URI": uri,  # not an argument: those are seen by everyone, and it may hold a password
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with tempfile.TemporaryFile() as output, _terminated_as_interrupted():
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=study.path,
            env=environment,
            start_new_session=True,
        )
        try:
            yield server, output
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end this as Ctrl-C does, so that the server does not outlive its parent."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_until_it_answers(server: subprocess.Popen[bytes], output: IO[bytes], *, host: str, port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise ValueError(_ended(output))
        connection = http.client.HTTPConnection(host, port, timeout=2)
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
            return
        except (OSError, http.client.HTTPException):
            time.sleep(0.2)
        finally:
            connection.close()
    raise ValueError(f"the MLflow server did not answer on port {port} in {START_SECONDS:g} s")


def _ended(output: IO[bytes]) -> str:
    """Return why the server ended: the last line it wrote."""
    output.seek(0)
    lines = output.read().decode(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return f"the MLflow server ended: {said[:300]}"

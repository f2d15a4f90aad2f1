import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from toy import begin, end, report, runs_of

from dgsearch.study import Study
from dgsearch.tracking.projection import project
from dgsearch.tracking.store import remember_uri, resolve_uri, study_id
from dgsearch.tracking.ui import free_port
from dgsearch.tracking.writer import Writer, project_quietly


@pytest.fixture
def hung() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_it_follows_a_search(study: Study) -> None:
    lines: list[str] = []
    with Writer(study, busy=0.05, say=lines.append) as writer:
        time.sleep(0.2)
        report(study, 0, 3, 20, 0.4)
        begin(study, 1, 1)
        writer.poke()
        time.sleep(0.5)
        end(study, 1, 1, "failed")  # and no poke: the last sync sends it
    assert lines == []
    runs = runs_of(project(study))
    assert runs["1", "t0001 erm"][0]["dgsearch.state"] == "failed"
    assert [s for *_, s in runs["0", "t0003 erm"][2]["curve/worst"]] == [10, 20]
    assert writer.close() is None


def test_curves_of_running_trials_are_sent_without_a_poke(study: Study) -> None:
    with Writer(study, busy=0.05, idle=0.1):
        report(study, 0, 3, 20, 0.4)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            time.sleep(0.2)
            if (study.path / "tracking.json").exists():
                steps = [s for *_, s in runs_of(project(study))["0", "t0003 erm"][2].get("curve/worst", [])]
                if steps == [10, 20]:
                    return
    pytest.fail("the curve was never sent")


def test_what_the_search_raises_goes_on(study: Study) -> None:
    with pytest.raises(ZeroDivisionError), Writer(study):
        1 / 0  # noqa: B018
    assert runs_of(project(study))


def test_a_server_that_is_down(study: Study, capfd: pytest.CaptureFixture[str]) -> None:
    uri = f"http://127.0.0.1:{free_port('127.0.0.1', port=0)}"
    lines: list[str] = []
    began = time.monotonic()
    with Writer(study, uri, say=lines.append) as writer:
        writer.poke()
    assert time.monotonic() - began < 20
    (line,) = lines
    assert "\n" not in line
    assert line.startswith(f"MLflow at {uri} did not take {study.path}: connection refused; ")
    assert line.endswith(f"dgsearch track {shlex.quote(str(study.path))} --tracking-uri {uri}")
    assert capfd.readouterr() == ("", "")
    project_quietly(study, uri)
    assert capfd.readouterr() == ("", f"{line}\n")


def test_a_server_that_never_answers(study: Study, hung: str) -> None:
    writer = Writer(study, hung).start()
    time.sleep(0.3)
    began = time.monotonic()
    line = writer.close(timeout=1)
    assert time.monotonic() - began < 2
    assert line is not None
    assert line.startswith(f"MLflow at {hung} has not taken all of {study.path} in 1 s; ")
    assert line.endswith(f"dgsearch track {shlex.quote(str(study.path))} --tracking-uri {hung}")


def test_an_interpreter_may_end_at_any_moment(study: Study, hung: str) -> None:
    program = f"""
from pathlib import Path
from dgsearch.study import Study
from dgsearch.tracking.writer import Writer
import sys, time
writer = Writer(Study.open(Path({str(study.path)!r})), sys.argv[1] or None).start()
time.sleep(float(sys.argv[2]))
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, uri, seconds], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for uri, seconds in ((hung, "3"), ("", "1"))
    ]
    for process in started:
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, b"")


def test_the_search_waits_for_nothing(study: Study, hung: str) -> None:
    before = threading.active_count()
    writer = Writer(study, hung)
    assert writer.close() is None  # never started
    began = time.monotonic()
    writer.start().start()
    for _ in range(10_000):
        writer.poke()
    assert time.monotonic() - began < 1
    assert threading.active_count() == before + 1
    writer.close(timeout=0)


def test_later_commands_find_the_store_that_the_search_was_given(study, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert resolve_uri(study) == "http://127.0.0.1:1"
    remember_uri(study, "http://127.0.0.1:2")
    assert resolve_uri(study) == "http://127.0.0.1:2" and resolve_uri(study, "http://127.0.0.1:3")[-1] == "3"
    identity = study_id(study)
    remember_uri(study, "http://user:secret@127.0.0.1:4")
    assert resolve_uri(study) == "http://127.0.0.1:2" and study_id(study) == identity
    assert "secret" not in (study.path / "tracking.json").read_text()

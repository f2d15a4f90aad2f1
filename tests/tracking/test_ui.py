import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from toy import fill, make_study, report, runs_of, same, select

from dgsearch.study import Study
from dgsearch.tracking.projection import project
from dgsearch.tracking.ui import free_port, serve_ui
from dgsearch.tracking.writer import Writer

PROGRAM = """
import sys
from pathlib import Path
from dgsearch.study import Study
from dgsearch.tracking.ui import serve_ui
serve_ui(Study.open(Path(sys.argv[1])), port=int(sys.argv[2]))
"""


def listening(port: int) -> list[str]:
    """The addresses, as /proc/net has them, on which somebody listens to a port."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, hexadecimal = local.split(":")
            if int(hexadecimal, 16) == port and state == "0A":
                found.append(address)
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_the_ui_is_served_to_this_machine_and_is_a_server_that_others_may_send_to(study: Study, tmp_path: Path) -> None:
    other = make_study(tmp_path / "other")
    fill(other)
    select(other, trials={0: 0, 1: 0})
    port = free_port("127.0.0.1", port=0)
    address = f"http://127.0.0.1:{port}"
    lines: list[str] = []
    with Writer(study, address, say=lines.append):
        pass
    assert len(lines) == 1 and "connection refused" in lines[0]

    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(other.path), str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.search(rf"{address}/#/experiments/(\d+)/runs\?orderByKey=attributes.start_time", line)
        assert found, (line, process.stderr.read())
        assert listening(port) == ["0100007F"]
        with urllib.request.urlopen(f"{address}/", timeout=30) as page:
            assert b"MLflow" in page.read()
        shown = project(other)
        assert found[1] == shown.experiment_id
        parent = runs_of(shown)["0", "held out: photo"][3][0]
        with urllib.request.urlopen(
            f"{address}/get-artifact?path=selection.json&run_uuid={parent}", timeout=30
        ) as page:
            assert page.read() == (other.path / "selection.json").read_bytes()
        catch_up(study, address, lines)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert (process.stdout.read(), process.stderr.read()) == ("Ctrl-C ends it.\n", "")
        assert listening(port) == []
    finally:
        process.terminate()
        process.communicate(timeout=20)


def catch_up(study: Study, address: str, lines: list[str]) -> None:
    """What a server missed is sent when it is there, and only once."""
    first = project(study, address)
    assert first.trials == 5
    select(study, trials={0: 0, 1: 0})
    select(study, trials={0: 0, 1: 0}, name="evaluation", target=True)
    report(study, 0, 3, 20, 0.4)
    with Writer(study, address, say=lines.append):
        pass
    assert len(lines) == 1
    runs = runs_of(first)
    assert [s for *_, s in runs["0", "t0003 erm"][2]["curve/accuracy"]] == [10, 20]
    assert runs["0", "held out: photo"][5] == ["selection.json", "target"]
    assert runs["0", "t0000 erm"][5] == ["recipe.json"]
    for (_, name), run in runs.items():
        assert name.startswith("held") == any(key.startswith("target/") for key in run[2])
    assert project(study, address) == first
    assert same(runs_of(first)) == same(runs)
    assert not (study.path / "mlartifacts").exists()


def test_a_port_in_use_is_one_line(study: Study) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"^port {port} on 127.0.0.1 is in use; give another with --port$"):
            serve_ui(study, port=port)
    assert free_port("127.0.0.1", port=port) == port
    assert not (study.path / "tracking.json").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_no_other_host_is_served(study: Study, host: str) -> None:
    with pytest.raises(ValueError, match="to this machine only"):
        serve_ui(study, host=host)


def test_a_port_is_a_number_of_16_bits(study: Study) -> None:
    with pytest.raises(ValueError, match="65535"):
        serve_ui(study, port=65536)


def test_a_server_that_keeps_the_study_is_not_claimed_to_show_it_when_it_does_not_answer(study: Study) -> None:
    said: list[str] = []
    port = free_port("127.0.0.1", port=0)
    with pytest.raises(ValueError, match=rf"^MLflow at http://me:\*\*\*@127.0.0.1:{port} did not take .*refused$"):
        serve_ui(study, uri=f"http://me:secret@127.0.0.1:{port}", say=said.append)
    assert not said


def test_a_server_that_will_not_start_is_one_line(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    project(study)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="^the MLflow server ended: it said nothing$"):
        serve_ui(study, port=0)

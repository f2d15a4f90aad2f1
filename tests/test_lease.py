"""The lease: a live driver refuses another, a dead one is followed at once here and after silence elsewhere."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dgsearch import lease
from dgsearch.lease import Lease


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(lease, "BEAT", 0.05)
    monkeypatch.setattr(lease, "SILENCE", 0.6)


def leave(sessions, number=1, **changed):
    """What a driver leaves that was killed: its session, as if still driven."""
    me = {"host": "elsewhere", "machine": "b 1", "pid": os.getpid(), "started": lease._started(os.getpid())}
    (sessions / f"{number:04d}").mkdir(parents=True)
    file = sessions / f"{number:04d}" / "driver.json"
    file.write_text(json.dumps(me | changed))
    return file


def here():
    return {"host": lease.socket.gethostname(), "machine": lease._machine()}


def test_a_session_ends_and_the_next_begins(tmp_path):
    first = Lease.take(tmp_path)
    assert first.session == "0001" and (tmp_path / "0001/driver.json").exists()
    first.check()
    first.release()
    assert [f.name for f in (tmp_path / "0001").iterdir()] == ["ended.json"]
    second = Lease.take(tmp_path)
    assert second.session == "0002"
    second.release()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_live_driver_of_this_machine_refuses_another_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "SILENCE", 1e6)
    leave(tmp_path, **here())
    with pytest.raises(ValueError, match=f"is being searched by process {os.getpid()} on .*; one driver at a time"):
        Lease.take(tmp_path)


def test_a_dead_process_of_this_machine_is_followed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "SILENCE", 1e6)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    leave(tmp_path, 1, **here(), pid=gone.pid, started="5")
    taken = Lease.take(tmp_path)
    taken.release()
    # Its number has another process now: this one, which started at another time.
    leave(tmp_path, 3, **here(), started="5")
    taken = Lease.take(tmp_path)
    assert taken.session == "0004"
    taken.release()
    # Dead, and not waited for by its parent.
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    started = lease._started(zombie.pid)
    end = time.monotonic() + 30
    while lease._started(zombie.pid) is not None and time.monotonic() < end:
        time.sleep(0.01)
    leave(tmp_path, 5, **here(), pid=zombie.pid, started=started)
    taken = Lease.take(tmp_path)
    assert taken.session == "0006"
    taken.release()
    zombie.wait()


def test_a_driver_elsewhere_is_followed_after_silence_alone(tmp_path, monkeypatch):
    """Judged by heartbeats as this process sees them: neither side's clock matters."""
    waited, file = [], leave(tmp_path)
    os.utime(file, (4e9, 4e9))  # its clock is decades ahead
    began = time.monotonic()
    taken = Lease.take(tmp_path, waiting=waited.append)
    assert taken.session == "0002" and time.monotonic() - began >= 0.6
    assert waited == [f"process {os.getpid()} on elsewhere"]
    taken.release()

    file, stop = leave(tmp_path, 3), threading.Event()

    def beat():
        at = 2e9
        while not stop.wait(0.05):
            at -= 3600  # a clock that runs backwards
            os.utime(file, (at, at))

    thread = threading.Thread(target=beat)
    thread.start()
    monkeypatch.setattr(lease, "SILENCE", 30)
    monkeypatch.setattr(lease.time, "sleep", lambda _: stop.wait(0.1))
    try:
        with pytest.raises(ValueError, match="on elsewhere; one driver at a time"):
            Lease.take(tmp_path)
    finally:
        stop.set()
        thread.join()


def test_a_lease_that_cannot_be_read_is_watched_like_one_from_elsewhere(tmp_path):
    leave(tmp_path).write_text('{"host": ')
    taken = Lease.take(tmp_path)
    assert taken.session == "0002"
    taken.release()


def test_a_driver_that_was_followed_finds_out(tmp_path):
    silent = Lease.take(tmp_path)
    silent.check()
    leave(tmp_path, 2, pid=7)
    with pytest.raises(ValueError, match="is searched by process 7 on elsewhere now: .* gave no sign of life"):
        silent.check()
    silent.release()
    assert (tmp_path / "0002/driver.json").exists()


def test_of_two_that_follow_a_dead_driver_one_does(tmp_path, monkeypatch):
    """The other one is overtaken between its look and its move."""
    before = lease.numbers

    def overtaken(sessions):
        found = before(sessions)
        monkeypatch.setattr(lease, "numbers", before)
        leave(sessions, 1, **here())
        return found

    monkeypatch.setattr(lease, "numbers", overtaken)
    with pytest.raises(ValueError, match="one driver at a time"):
        Lease.take(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["0001"]


DRIVER = """
import sys, time
from pathlib import Path
from dgsearch import lease
lease.BEAT, lease.SILENCE = 0.05, 1.0
lease._machine = lambda: sys.argv[2]
taken = lease.Lease.take(Path(sys.argv[1]))
print(taken.session, flush=True)
while True:
    try:
        taken.check()
    except ValueError as error:
        print(error, flush=True)
        break
    time.sleep(0.05)
"""


def test_a_suspended_driver_is_followed_from_another_machine_and_stops_when_it_wakes(tmp_path):
    def start(machine):
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), machine],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    first = start("one")
    assert first.stdout.readline() == "0001\n"
    refused = start("two")
    assert f"is being searched by process {first.pid} on" in refused.communicate(timeout=60)[1]
    first.send_signal(signal.SIGSTOP)
    second = start("two")
    assert second.stdout.readline() == "0002\n"
    first.send_signal(signal.SIGCONT)
    assert f"is searched by process {second.pid} on" in first.communicate(timeout=60)[0]
    second.kill()
    second.communicate()
    third = start("two")
    assert third.stdout.readline() == "0003\n"
    third.kill()
    third.communicate()

"""A search watched from outside: what the table says, and how little is read again."""

import errno
import io
import json
import os
import socket

import pytest
from rich.cells import cell_len
from rich.console import Console

from dgsearch import lease, line
from dgsearch.recipe import Recipe, encode
from dgsearch.report import progress
from dgsearch.report.board import as_data, render_board
from dgsearch.report.progress import LiveBoard, TrialLines, changes, follow, watching
from dgsearch.report.snapshot import Reader
from dgsearch.study import Fold, Specification, Study, append_line, write_json

PLAN = {
    "trials": 3, "hours": None, "device_hours": None, "keep": "best", "baseline": "erm", "families": ["erm", "coral"],
    "floor": 1,
}  # fmt: skip


@pytest.fixture
def study(tmp_path) -> Study:
    names = ("a", "b", "चित्र [1]")
    specification = Specification(
        data="/data", fingerprints={n: n for n in names}, space="toy", space_hash="", network="small_cnn",
        resolution=8, steps=100, batch_size=None, seed=0, threads=1, precision="float32",
        folds=tuple(Fold(k, tuple(n for n in names if n != held), (held,)) for k, held in enumerate(names[1:])),
    )  # fmt: skip
    return Study.create(tmp_path / "s", specification, [])


def trial(study, fold, number, family="erm", *, steps=(), accuracy=0.5, default=False, state=None, **result):
    folder = study.trial_dir(fold, number)
    recipe = encode(Recipe().resolve("small_cnn"))
    write_json(folder / "trial.json", {"family": family, "recipe": recipe, "default": default})
    for step in steps:
        evaluation = {"step": step, "accuracy": {"a": accuracy}, "loss": {}, "log": {}, "seconds": step / 10}
        append_line(folder / "evaluations.jsonl", evaluation)
    if state:
        write_json(folder / "result.json", {"state": state, "reason": "", "weights": None} | result)
    return folder


def session(study, number=1, **values):
    record = {"began": 0, "seconds": 36.0, "device_seconds": 72.0, "devices": 1.0, "concurrent": 2}
    write_json(study.path / "sessions" / f"{number:04d}" / "session.json", record | values)


def held(study):
    return study.path / "sessions" / "0001" / "driver.json"


def drive(study, *, pid=None, host=None):
    pid = pid or os.getpid()
    here = {"machine": lease._machine(), "started": lease._started(pid) or "never"}
    write_json(held(study), {"pid": pid, "host": host or socket.gethostname()} | here)


def driver(study):
    return lease.holder(study.path / "sessions")


def fill(study):
    study.plan(PLAN)
    session(study)
    trial(study, 0, 0, default=True, steps=(10, 30, 100), accuracy=0.7, state="complete")
    trial(study, 0, 1, "coral", default=True, steps=(10,), accuracy=0.9, state="pruned")
    folder = trial(study, 0, 2, "coral", state="failed", kind="error", reason="first\nValueError: no such thing")
    (folder / "0001").mkdir()
    (folder / "0001" / "worker.log").write_text("Traceback")
    trial(study, 1, 0, default=True, steps=(10,), accuracy=0.6)


def test_the_table_says_what_the_record_holds(study):
    fill(study)
    drive(study)
    text = render_board(Reader(study).read(), width=100)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["b"] == ["3/3", "0", "1", "1", "0.700", "erm"]
    assert rows["चित्र"] == ["[1]", "1/3", "1", "0", "0"] or rows["चित्र"] == ["[1]", "0/3", "1", "0", "0"]
    assert rows["erm"] == ["1", "1", "0", "0", "0.700", "b", "0.700"]
    assert rows["coral"] == ["2", "0", "1", "1"]
    assert f"being searched by process {os.getpid()} on {socket.gethostname()}" in text
    assert "36 s in 1 session, 0.02 device-hours" in text and "left" in text
    assert "failed: coral t0002 (held out: b) error: ValueError: no such thing" in text
    assert "0002/0001/worker.log" in text.replace("\n", "")


def test_the_same_as_data(study):
    fill(study)
    found = json.loads(json.dumps(as_data(Reader(study).read())))
    assert found["state"] == "interrupted" and found["driver"] is None and found["ended_by"] is None
    assert found["folds"][0]["trials"] == {"complete": 1, "pruned": 1, "failed": 1, "running": 0}
    assert found["folds"][0]["families"]["erm"]["best_source_accuracy"] == 0.7
    assert found["spent"] == {"seconds": 36.0, "device_seconds": 72.0, "sessions": 1}
    assert found["budget"] == {"trials": 3, "hours": None, "device_hours": None}
    (failure,) = found["failures"]
    assert (failure["fold"], failure["trial"], failure["kind"]) == (0, 2, "error")
    # Left: plain ERM's 90 steps; coral's default and one sampled trial: of three that were judged, none went on.
    share = [1 / 3, 1 / 3]
    default, free = 30 + share[1] * 70, 10 + share[0] * 20 + share[0] * share[1] * 70
    assert found["left"]["trials"] == 3
    assert found["left"]["seconds"] == pytest.approx(max(0.1 * (90 + default + free) / 2, 0.1 * 90))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_it_fits_any_width(study, width):
    fill(study)
    lines = render_board(Reader(study).read(), width=width).splitlines()
    assert max(map(cell_len, lines)) <= width
    if width >= 40:
        assert lines[1].startswith("b ") and "3/3" in lines[1]


def test_nothing_has_begun(study):
    found = Reader(study).read()
    assert found.state == "not begun" and "no search has begun" in render_board(found)
    assert as_data(found)["left"] is None


def test_a_finished_search_says_what_ended_it(study):
    fill(study)
    assert Reader(study).read().state == "interrupted"
    study.plan(PLAN | {"hours": 0.01})
    assert (Reader(study).read().state, Reader(study).read().ended_by) == ("finished", "hours")
    trial(study, 1, 0, state="complete")
    for number in (1, 2):
        trial(study, 1, number, steps=(10,), state="pruned")
    study.plan(PLAN)
    found = Reader(study).read()
    assert found.ended_by == "trials" and "finished (--trials)" in render_board(found)


def test_a_search_is_not_finished_while_trials_run_though_its_hours_are_used_up(study):
    fill(study)
    assert line.unfinished(study) == "3 of 6 trials have ended"
    study.plan(PLAN | {"hours": 0.01})
    assert line.unfinished(study) is None  # nobody drives it: what is interrupted waits for more hours
    drive(study)
    assert line.unfinished(study) == "3 of 6 trials have ended"
    trial(study, 1, 0, state="complete")
    assert line.unfinished(study) is None


def test_trials_that_ended_are_read_once_and_others_when_they_change(study, monkeypatch):
    fill(study)
    read = []
    original = Study.trial
    monkeypatch.setattr(Study, "trial", lambda self, *key: read.append(key) or original(self, *key))
    reader = Reader(study)
    first = reader.read()
    assert len(read) == 4 and reader.read() == first and len(read) == 4
    trial(study, 1, 0, default=True, steps=(30,), accuracy=0.6)
    assert [t.step for t in reader.read().trials if t.fold == 1] == [30] and read[4:] == [(1, 0)]
    trial(study, 1, 0, default=True, state="complete")
    reader.read()
    trial(study, 1, 0, default=True, steps=(100,))
    assert reader.read().trials[-1].state == "complete" and read[4:] == [(1, 0), (1, 0)]


def test_who_searches(study):
    assert driver(study) is None
    drive(study)
    assert driver(study) == {"host": socket.gethostname(), "pid": os.getpid()}
    drive(study, pid=2**22 + 1)  # no process has that number
    assert driver(study) is None
    drive(study, host="elsewhere")
    assert driver(study) == {"host": "elsewhere", "pid": os.getpid()}
    os.utime(held(study), (0, 0))
    assert driver(study) is None
    held(study).write_text("{")
    assert driver(study) is None


def test_following_ends_when_nobody_drives(study, monkeypatch):
    fill(study)
    drive(study)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            trial(study, 1, 0, default=True, steps=(30,))
        elif len(waits) == 4:
            held(study).unlink()

    monkeypatch.setattr(progress.time, "sleep", wait)
    seen = list(changes(study))
    assert len(waits) == 4 and [s.trials[-1].step for s in seen] == [10, 30, 30]
    assert [s.state for s in seen] == ["searching", "searching", "interrupted"]
    out = io.StringIO()
    follow(study, console=Console(file=out, width=80))
    assert "the same command goes on" in out.getvalue()


def test_on_a_terminal_a_live_table_below_the_lines_elsewhere_lines_alone(study):
    fill(study)
    drive(study)
    out = io.StringIO()
    assert isinstance(watching(study, console=Console(file=out)), TrialLines)
    watch = watching(study, console=Console(file=out, force_terminal=True, width=100, height=40, highlight=False))
    assert isinstance(watch, LiveBoard)
    with watch:
        watch("begin", study.trial(1, 0))
        trial(study, 1, 0, default=True, steps=(30, 100), accuracy=0.8, state="complete")
        watch("end", study.trial(1, 0))
    text = out.getvalue()
    assert "going on: 3 of 6 trials have ended" in text and "held out" in text and "3/3" in text
    assert "[4/6] held out: चित्र [1]" in text and "complete 0.800 (best 0.800) about" in text


def test_what_cannot_be_read_ends_no_search(study):
    fill(study)
    (study.path / "plan.json").write_text("{")
    TrialLines(study, console=Console(file=io.StringIO()))("end", study.trial(0, 0))


def test_a_terminal_that_is_gone_ends_no_search(study):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    fill(study)
    for kind in ("retry", "given up", "end"):
        TrialLines(study, console=Console(file=Gone()))(kind, study.trial(0, 0))

"""Faults of storage, clocks and drivers: a clear end, nothing torn or lost, and the same search goes on to its end."""

import datetime
import errno
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from test_engine import STEPS, assert_whole, make_space, make_study, summary

from dgsearch import cli
from dgsearch.search.engine import Assignment, Engine, Outcome, stops
from dgsearch.search.local import run_local
from dgsearch.study import Study, read_lines
from dgsearch.train import CHECKPOINTS, Evaluation, read_checkpoint, write_whole

AT = (5, 20, 40, 60, 100)


def toy(assignment: Assignment, report) -> Outcome:
    """A trial that goes on from its checkpoint, as a real one does."""
    folder = assignment.folder
    path = Path(folder) / CHECKPOINTS[0]
    done = json.loads(read_checkpoint(path) or b"0")
    optimizer, objective = assignment.recipe["optimizer"], assignment.recipe["objective"]["kind"]
    level = 0.8 - 0.1 * abs(math.log10(optimizer["lr"]) + 3.4) + 0.05 * (objective == "coral")
    for step in AT:
        if step < done:
            continue
        accuracy = level * (1 - math.exp(-5 * step / STEPS))
        content = json.dumps(step).encode()
        write_whole(path, content + hashlib.blake2b(content, digest_size=32).digest())
        report(Evaluation(step, {"a": accuracy, "b": accuracy}, {"a": 1.0, "b": 1.0}, seconds=step / 10))
    write_whole(Path(folder) / "weights.safetensors", b"w")
    return Outcome("complete", weights="weights.safetensors")


def finish(study, space, *, trials=6):
    run_local(Engine(study, space, trials=trials), toy)


def assert_verdicts_replay(study):
    """The recorded verdicts, given again one by one through the rule."""
    for fold in study.folds:
        seen: dict[int, list[float]] = {20: [], 40: []}
        lines = list(read_lines(study.fold_dir(fold.number) / "verdicts.jsonl"))
        assert len({(line["trial"], line["step"]) for line in lines}) == len(lines)
        for line in lines:
            seen[line["step"]].append(line["value"])
            assert line["stop"] == (line["trial"] != 0 and stops(line["value"], seen[line["step"]]))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    space = make_space()
    study = make_study(tmp_path_factory.mktemp("reference") / "s", space, folds=1)
    finish(study, space)
    return summary(study)


WRITTEN = ("journal.log", "trial.json", "evaluations.jsonl", "verdicts.jsonl", "result.json", "checkpoint.pt",
           "weights.safetensors")  # fmt: skip


def test_a_disk_full_at_any_write_ends_the_session_and_the_same_search_goes_on(tmp_path, monkeypatch, reference):
    """Each session fails at its first, or a later, write of one kind, the file cut short; at last all is whole."""
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    sync, state = os.fsync, {"kind": "", "left": 0}

    def full(descriptor):
        written = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).lstrip(".").removesuffix(".partial")
        if written == state["kind"]:
            state["left"] -= 1
            if not state["left"]:
                os.ftruncate(descriptor, max(0, os.fstat(descriptor).st_size - 7))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    places = [("journal.log", n) for n in range(1, 9)] + [(kind, n) for n in (1, 2, 1) for kind in WRITTEN[1:]]
    failed = []
    for kind, left in places:
        state.update(kind=kind, left=left)
        try:
            finish(study, space)
        except (OSError, ValueError) as error:
            assert isinstance(error, OSError) or "free some space and run the same command again" in str(error)
            failed.append(kind)
    state["kind"] = ""
    finish(study, space)
    assert set(failed) == set(WRITTEN) and len(failed) >= 15
    assert_whole(study, trials=6)
    # A trial that never began has left a gap in the numbers, and nothing else.
    assert [t[1:] for t in summary(study)[0]] == [t[1:] for t in reference[0]]
    assert_verdicts_replay(study)
    assert not list(study.path.rglob(".*.partial"))


def test_after_a_fault_nothing_more_is_written(tmp_path, monkeypatch):
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    engine = Engine(study, space, trials=3)
    first, second = engine.ask(), engine.ask()
    broken = study.trial_dir(0, 0) / "evaluations.jsonl"
    broken.mkdir()  # no file can be written there
    with pytest.raises(OSError, match="evaluations.jsonl"):
        engine.report(0, first.number, Evaluation(5, {"a": 0.5}, {}))
    before = snapshot(study.path)
    for call in (
        engine.ask,
        lambda: engine.report(0, second.number, Evaluation(5, {"a": 0.5}, {})),
        lambda: engine.tell(0, second.number, Outcome("complete")),
    ):
        with pytest.raises(OSError, match="evaluations.jsonl"):
            call()
    assert snapshot(study.path) == before
    broken.rmdir()
    finish(study, space, trials=3)
    assert_whole(study, trials=3)


def snapshot(path):
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_driver_that_was_followed_writes_nothing_more(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    state = {}

    def trial(assignment, report):
        if assignment.number == 1:
            (study.path / "sessions" / "0002").mkdir()  # another driver, while this one was suspended
            state.update(snapshot(study.path))
        return toy(assignment, report)

    with study.driven():
        engine = Engine(study, space, trials=3)
        assert engine.session == "0001"
        with pytest.raises(ValueError, match="the study .* is searched by another process now: .* it stops"):
            run_local(engine, trial)
    after = snapshot(study.path)
    changed = {p for p in state.keys() | after.keys() if state.get(p) != after.get(p)}
    assert {p.parent.name for p in changed} == {"0001"}  # its own folders: the trial's, and its session's end
    with study.driven():
        finish(study, space, trials=3)
    assert_whole(study, trials=3)


def test_a_journal_cut_anywhere_in_its_last_line_is_gone_on_with(tmp_path, reference):
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    journal = study.fold_dir(0) / "journal.log"
    for stop in range(2, 26):
        engine = Engine(study, space, trials=6)
        calls = {"n": 0}

        def cut(assignment, report, engine=engine, calls=calls, stop=stop):
            def counted(evaluation):
                calls["n"] += 1
                if calls["n"] == stop:
                    raise KeyboardInterrupt
                report(evaluation)

            return toy(assignment, counted)

        try:
            run_local(engine, cut)
        except KeyboardInterrupt:
            data = journal.read_bytes()
            journal.write_bytes(data[: -1 - len(data.splitlines()[-1]) // 2])
            journal.with_name("journal.log.lock").touch()  # and killed while it held the journal's lock
        else:
            break
    finish(study, space)
    assert_whole(study, trials=6)
    assert [t[1:] for t in summary(study)[0]] == [t[1:] for t in reference[0]]


def test_clocks_that_jump_back_change_nothing(tmp_path, monkeypatch, reference):
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    now = [2e9]

    def back():
        now[0] -= 1000
        return now[0]

    class Backwards(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.fromtimestamp(back(), tz)

    monkeypatch.setattr(time, "time", back)
    monkeypatch.setattr(optuna.storages.journal._storage, "datetime", Backwards)
    for trials in (2, 4, 6):
        with study.driven():
            finish(study, space, trials=trials)
        for file in study.path.rglob("*.json*"):
            os.utime(file, (back(), back()))
    assert_whole(study, trials=6)
    assert summary(study) == reference


def test_the_newest_whole_checkpoint_of_any_session_goes_along(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)

    def checkpoint(session, name, step, *, damaged=False):
        content = json.dumps(step).encode()
        data = content + hashlib.blake2b(content, digest_size=32).digest()
        (folder := study.trial_dir(0, 0) / session).mkdir(exist_ok=True)
        (folder / name).write_bytes(data[:-3] if damaged else data)

    def taken():
        folder = Path(Engine(study, space, trials=1).ask().folder)
        return {p.name: read_checkpoint(p) for p in folder.iterdir()}

    newest, previous = CHECKPOINTS
    assert taken() == {}
    checkpoint("0001", newest, 30)
    checkpoint("0001", previous, 10)
    assert taken() == {newest: b"30", previous: b"10"}
    checkpoint("0002", newest, 60, damaged=True)
    assert taken() == {newest: None, previous: b"10"}  # the second session's, the one before standing in
    checkpoint("0003", newest, 60, damaged=True)
    checkpoint("0003", previous, 30, damaged=True)
    for name in CHECKPOINTS:
        (study.trial_dir(0, 0) / "0002" / name).unlink()
    assert taken() == {newest: b"30", previous: b"10"}  # the first session's
    for name in CHECKPOINTS:
        checkpoint("0001", name, 30, damaged=True)
        (study.trial_dir(0, 0) / "0004" / name).unlink()
    assert taken() == {newest: None, previous: None}  # none is whole: the trial begins again, and says so
    # Tried again in one session, it goes on from what it had reached in that session.
    checkpoint("0001", newest, 30)
    engine = Engine(study, space, trials=1)
    engine.ask()
    checkpoint(engine.session, newest, 60)
    engine.tell(0, 0, Outcome("failed", kind="out of memory"))
    assert read_checkpoint(Path(engine.ask().folder) / newest) == b"60"


def test_how_a_trial_went_on_is_recorded_when_it_ends(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    for n in range(2):
        engine = Engine(study, space, trials=1)
        folder = Path(engine.ask().folder)
        (folder / CHECKPOINTS[0]).write_bytes(b"")
        line = {"step": 10 * n, "damaged": ["checkpoint.pt"] * (1 - n)}
        (folder / "resumed.jsonl").write_text(json.dumps(line) + "\n")
    engine.tell(0, 0, Outcome("pruned"))
    result = study.trial(0, 0).result
    assert result["resumed_from"] == [0, 10]
    assert result["note"] == "a damaged checkpoint was passed over: it went on from step 0"
    assert not list(study.path.rglob("checkpoint*"))


def test_a_study_in_another_format_is_refused_with_what_differs(tmp_path):
    study = make_study(tmp_path / "s", make_space(), folds=1)
    file = study.path / "study.json"
    values = json.loads(file.read_text())
    assert values["format"] == 2
    file.write_text(json.dumps(values | {"format": 3, "version": "9.1"}))
    with pytest.raises(ValueError, match="has format 3, written by dgsearch 9.1; this one is dgsearch .*, which reads"):
        Study.open(study.path)
    file.write_text(json.dumps({k: v for k, v in values.items() if k != "format"}))
    with pytest.raises(ValueError, match="has format 1, written by dgsearch .*, which reads format 2"):
        Study.open(study.path)
    file.write_text(json.dumps(values))
    assert Study.open(study.path).specification == study.specification
    file.write_text(json.dumps({k: v for k, v in values.items() if k != "space_hash"}))
    with pytest.raises(ValueError, match="not of a study in format 2 .*space_hash"):
        Study.open(study.path)
    file.write_text("[]")
    with pytest.raises(ValueError, match="holds no table"):
        Study.open(study.path)


# -- the command itself, on storage that is really full, too small or not writable


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def command(images, store, capsys, monkeypatch):
    space = Path(__file__).parent.parent / "lean.toml"

    def run(study, *, code):
        options = {"data": images, "study": study, "space": space, "targets": "photo", "network": "law_net",
                   "trials": 3, "steps": 6, "resolution": 16, "executor": "local",
                   "tracking-uri": f"sqlite:///{store}/mlflow.db"}  # fmt: skip
        arguments = [str(x) for k, v in options.items() for x in (f"--{k}", v)]
        monkeypatch.setattr(sys, "argv", ["dgsearch", "search", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        err = capsys.readouterr().err
        assert (ended.value.code or 0) == code, err
        return [line for line in err.splitlines() if line.startswith("error: ")]

    return run


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder, *, leaving):
    with (folder / "filler").open("wb") as file:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        file.write(b"0" * max(0, free - leaving))


def test_a_full_disk_and_a_read_only_one_end_the_command_clearly(small_disk, command, tmp_path):
    study = small_disk / "s"
    for leaving in (4_000, 20_000, 60_000):
        fill(small_disk, leaving=leaving)
        (said,) = command(study, code=2)
        assert "no space left on device" in said.lower(), said
        (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    (said,) = command(study, code=2)
    assert said == f"error: can't write the study {study}: Read-only file system"
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    command(study, code=0)
    command(tmp_path / "whole", code=0)
    assert_same_study(study, tmp_path / "whole")


def test_a_limit_on_the_size_of_files_ends_the_command_clearly(command, tmp_path):
    import resource

    study = tmp_path / "s"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        (said,) = command(study, code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "file too large" in said and "checkpoint.pt" in said
    assert said.endswith("nothing that ended is lost: let files be larger and run the same command again")
    assert Study.open(study).trial(0, 0).state == "running"
    command(study, code=0)
    command(tmp_path / "whole", code=0)
    assert_same_study(study, tmp_path / "whole")


def assert_same_study(path, other):
    found, expected = (
        [(t.number, t.family, t.recipe, t.state, [(e.step, e.accuracy, e.loss, e.log) for e in t.evaluations])
         for t in Study.open(p).trials(0)]
        for p in (path, other)
    )  # fmt: skip
    assert found == expected and len(found) == 3

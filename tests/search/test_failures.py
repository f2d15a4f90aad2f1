"""Failures: their kinds, out of memory tried once more, families given up, a sampler that learns from them."""

import json
import math

import pytest
from test_engine import FAMILIES, Killed, assert_whole, finish, make_space, make_study, summary, toy

from dgsearch import line
from dgsearch.report.board import left, render_board
from dgsearch.report.snapshot import Reader
from dgsearch.search import engine as engine_module
from dgsearch.search.engine import Assignment, Engine, Outcome, failure_kind, run_guarded
from dgsearch.search.local import run_local
from dgsearch.train import DivergedError, Evaluation, evaluation_steps

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 8 GiB"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DivergedError("not finite after 5 steps"), "diverged"),
        (RuntimeError(OOM), "out of memory"),
        (MemoryError(), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "out of memory"),
        (ValueError("out of memory is not what this is"), "error"),
        (KeyError("x"), "error"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_kinds_of_failure(error, kind):
    def trial(assignment, report):
        raise error

    assert failure_kind(error) == kind
    outcome = run_guarded(trial, None, None)
    assert (outcome.state, outcome.kind) == ("failed", kind)
    assert "\n" not in outcome.reason and outcome.reason.startswith(type(error).__name__)


def test_torchs_own_error_of_memory_is_known():
    import torch

    assert failure_kind(torch.OutOfMemoryError(OOM)) == "out of memory"


def test_a_trial_out_of_memory_is_tried_once_more_with_a_whole_device(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    started, events = [], []

    def trial(assignment, report):
        started.append((assignment.number, assignment.whole_device))
        big = assignment.recipe["optimizer"]["kind"] == "sgd"
        if assignment.number == 1 and not assignment.whole_device:
            report(Evaluation(5, {"a": 0.5, "b": 0.5}, {}))
            raise RuntimeError(OOM)
        if big:
            raise RuntimeError(OOM)
        return toy(assignment, report)

    run_local(Engine(study, space, trials=5, on_event=lambda k, r: events.append((k, r.number))), trial)
    assert_whole(study, trials=5)
    assert started == [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (4, False)]
    assert [n for kind, n in events if kind == "retry"] == [1, 2]
    assert [n for kind, n in events if kind == "end"] == [0, 1, 2, 3, 4]
    failed = study.trial(0, 2).result
    assert (failed["state"], failed["kind"]) == ("failed", "out of memory") and "GPU 0" not in failed["reason"]
    assert study.trial(0, 1).state in ("complete", "pruned") and study.trial(0, 1).result["kind"] == ""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_second_try_outlives_the_driver(tmp_path, monkeypatch, when):
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    started = []
    write = engine_module.write_json

    def killed(path, value):
        if path.name == "retry.json":
            if when == "after":
                write(path, value)
            raise Killed
        write(path, value)

    def trial(assignment, report):
        started.append((assignment.number, assignment.whole_device))
        if assignment.number == 0 and not assignment.whole_device:
            raise RuntimeError(OOM)
        return toy(assignment, report)

    monkeypatch.setattr(engine_module, "write_json", killed)
    with pytest.raises(Killed):
        finish(study, space, trials=3, trial=trial)
    monkeypatch.setattr(engine_module, "write_json", write)
    finish(study, space, trials=3, trial=trial)
    assert started == [(0, False)] * (2 if when == "before" else 1) + [(0, True), (1, False), (2, False)]
    assert_whole(study, trials=3)


def test_a_family_that_only_fails_is_given_up_in_its_fold_and_said_once(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space)
    events = []

    def trial(assignment, report):
        if assignment.recipe["optimizer"]["kind"] == "sgd" and assignment.fold == 0:
            raise RuntimeError("no such thing")
        return toy(assignment, report)

    run_local(Engine(study, space, trials=12, on_event=lambda k, r: events.append((k, r.fold, r.family))), trial)
    assert_whole(study, trials=12)
    assert [e for e in events if e[0] == "given up"] == [("given up", 0, "sgd")]
    first, second = ([t.family for t in study.trials(n)] for n in (0, 1))
    assert first.count("sgd") == 1 and min(first.count("erm"), first.count("coral")) >= 3 <= second.count("sgd")
    # A search cut anywhere draws the same: the decision follows from the record alone.
    cut = make_study(tmp_path / "cut", space)
    for trials in (3, 4, 9, 12):
        finish(cut, space, trials=trials, trial=trial)
    assert summary(cut) == summary(study)


def test_a_family_whose_defaults_failed_but_not_all_is_kept(tmp_path):
    """Two trials run at once: the default fails while a second one of its family still trains, and succeeds."""
    space = make_space([FAMILIES[0]])
    engine = Engine(make_study(tmp_path / "s", space, folds=1), space, trials=4)
    first, second = engine.ask(), engine.ask()
    engine.tell(0, first.number, Outcome("failed", "x", kind="error"))
    third = engine.ask()
    for a in (second, third):
        toy(a, lambda e, a=a: engine.report(0, a.number, e))
        engine.tell(0, a.number, Outcome("complete"))
    assert engine.ask() is not None and engine.ask() is None


def test_a_fold_whose_families_all_failed_ends_early_with_the_reason(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space)

    def trial(assignment, report):
        if assignment.fold == 1:
            raise RuntimeError("nothing works here")
        return toy(assignment, report)

    engine = Engine(study, space, trials=10)
    run_local(engine, trial)
    assert engine.left == 0 and engine.ended_by == "trials"
    assert len(study.trials(0)) == 10 and len(study.trials(1)) == 3
    assert line.all_failed(study).startswith("RuntimeError: nothing works here (test_failures.py:")
    # Those who watch do not wait for the seven that can't come.
    study.plan({"trials": 10, "floor": 3, "baseline": "erm", "families": space.family_names})
    seen = Reader(study).read()
    assert (seen.state, seen.ended_by, seen.asked) == ("finished", "trials", 13)
    assert left(seen).trials == 0 and line.unfinished(study) is None
    assert [row.split()[1] for row in render_board(seen).splitlines()[1:3]] == ["10/10", "3/3"]
    again = Engine(study, space, trials=10)
    assert again.left == 0 and again.ask() is None


@pytest.mark.parametrize("budget", [{"trials": 10}, {"hours": 1}], ids=lambda b: next(iter(b)))
def test_a_search_that_has_given_up_every_family_is_over_whatever_its_budget(tmp_path, budget):
    space = make_space(FAMILIES[1:])  # plain ERM, which is not among them, completes
    study = make_study(tmp_path / "s", space)

    def trial(assignment, report):
        if assignment.number:
            raise RuntimeError("no such thing")
        return toy(assignment, report)

    engine = Engine(study, space, **budget)
    run_local(engine, trial)
    assert engine.ended_by == "families" and engine.left == 0
    study.plan(budget | {"floor": 3, "baseline": "erm", "families": space.family_names})
    seen = Reader(study).read()
    assert (seen.state, seen.ended_by, seen.asked) == ("finished", "families", 6)
    assert "finished (every family is given up)" in render_board(seen) and left(seen).trials == 0
    assert line.unfinished(study) is None


def diverging(assignment: Assignment, report) -> Outcome:
    """Rates in the upper half of the range diverge early; the best lies in the middle of the lower half."""
    lr = assignment.recipe["optimizer"]["lr"]
    for step in evaluation_steps(100):
        if lr > THRESHOLD and step >= 10:
            raise DivergedError("not finite")
        value = (0.8 - 0.1 * abs(math.log10(lr) + 4)) * (1 - math.exp(-step / 20))
        report(Evaluation(step, {"a": value, "b": value}, {"a": 1.0, "b": 1.0}))
    return Outcome("complete")


THRESHOLD = 10**-3.5  # the range is 10 ** -4.5 … 10 ** -2.5


def test_the_sampler_leaves_the_half_of_a_range_that_diverges(tmp_path):
    space = make_space([{"name": "erm", "defaults": {"adam.lr": 1e-4}}])
    study = make_study(tmp_path / "s", space, folds=1)
    finish(study, space, trials=50, trial=diverging)
    trials = study.trials(0)
    assert {t.result["kind"] for t in trials if t.state == "failed"} == {"diverged"}
    share = sum(t.recipe["optimizer"]["lr"] > THRESHOLD for t in trials[20:]) / 30
    assert share < 0.25


def test_what_failed_is_shown(tmp_path):
    from dgsearch.tracking.describe import trial_description

    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    finish(study, space, trials=1, trial=lambda a, r: (_ for _ in ()).throw(DivergedError("not finite")))
    record = study.trial(0, 0)
    tags = trial_description(record, study.specification, study_id="s").tags
    assert tags["dgsearch.failure"] == "diverged" and tags["dgsearch.stop_reason"].startswith("DivergedError: not")
    assert json.loads((record.folder / "result.json").read_text())["kind"] == "diverged"

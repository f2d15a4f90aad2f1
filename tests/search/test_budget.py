"""Budgets: what ends a search, over all its sessions, and how it goes on."""

import pytest
from toy_search import STEPS, Toy, make_space, make_study

from dgsearch.search.budget import Budget, spent
from dgsearch.search.engine import Engine, Outcome
from dgsearch.search.local import run_local
from dgsearch.study import read_json


def search(study, toy, **budget) -> str | None:
    """Search as the command does, a step of a trial taking as long as the toy says."""
    devices = budget.pop("devices", 1.0)
    engine = Engine(study, make_space(), **budget, devices=devices, clock=toy.clock)
    try:
        run_local(engine, toy)
    finally:
        engine.close()
    return engine.ended_by


def trained(study, *folds) -> float:
    return sum(t.evaluations[-1].seconds for f in folds or [0] for t in study.trials(f) if t.evaluations)


def test_trials_are_eight_unless_another_budget_is_given():
    assert Budget().trials == 8 and Budget(trials=3, hours=2).trials == 3
    assert Budget(hours=2).trials is None and Budget(device_hours=2).trials is None
    for wrong in ({"trials": 0}, {"hours": 0}, {"hours": -1}, {"device_hours": 0}, {"hours": float("nan")}):
        with pytest.raises(ValueError, match="a search needs"):
            Budget(**wrong)


def test_hours_are_of_all_sessions_and_running_trials_go_on_to_their_end(tmp_path):
    study, toy = make_study(tmp_path / "s"), Toy(seconds=1.0)
    # Plain ERM takes its 100 seconds, and is over at 100: one trial more than 90 seconds has begun.
    assert search(study, toy, hours=90 / 3600) == "hours"
    assert [(t.state, t.evaluations[-1].step) for t in study.trials(0)] == [("complete", STEPS)]
    assert spent(study).seconds == 100 and spent(study).sessions == 1
    assert search(study, toy, hours=90 / 3600) == "hours" and len(study.trials(0)) == 1
    assert search(study, toy, hours=101 / 3600) == "hours" and len(study.trials(0)) == 2
    assert spent(study).seconds == trained(study) > 101 and spent(study).sessions == 3


def test_the_first_budget_reached_ends_a_search(tmp_path):
    study, toy = make_study(tmp_path / "s"), Toy(seconds=1.0)
    assert search(study, toy, trials=2, hours=10, device_hours=10) == "trials" and len(study.trials(0)) == 2
    assert search(study, toy, trials=20, hours=10, device_hours=150 / 3600) == "device_hours"
    assert len(study.trials(0)) < 20


def test_device_hours_are_training_seconds_times_devices_pruned_and_failed_trials_included(tmp_path):
    study, toy = make_study(tmp_path / "s", folds=2), Toy(seconds=1.0, fails=(1,))
    assert search(study, toy, trials=6, devices=0.25) == "trials"
    states = {t.state for f in (0, 1) for t in study.trials(f)}
    assert states == {"complete", "pruned", "failed"}
    # A failed trial reports nothing of its last steps, from 10 to 15; the driver saw how long they took.
    failed = [t for f in (0, 1) for t in study.trials(f) if t.state == "failed"]
    assert [t.evaluations[-1].step for t in failed] == [10, 10]
    seconds = trained(study, 0, 1) + 5 * len(failed)
    assert spent(study).device_seconds == pytest.approx(0.25 * seconds)
    # Another session, with other devices a trial, adds its own.
    search(study, toy, trials=8, devices=2.0)
    assert spent(study).device_seconds == pytest.approx(0.25 * seconds + 2 * (trained(study, 0, 1) + 10 - seconds))
    assert (spent(study).devices, spent(study).concurrent, spent(study).sessions) == (2.0, 1, 2)


def test_a_trial_tried_again_on_a_whole_device_uses_that_whole_device(tmp_path):
    study, toy = make_study(tmp_path / "s"), Toy(seconds=1.0)

    def short_of_memory(assignment, report):
        if not assignment.whole_device:
            toy.now += 7
            raise MemoryError
        return toy(assignment, report)

    engine = Engine(study, make_space(), trials=1, devices=0.25, clock=toy.clock)
    run_local(engine, short_of_memory)
    assert engine.meter.spent().device_seconds == 0.25 * 7 + STEPS
    # In a later session too.
    study = make_study(tmp_path / "again")
    engine = Engine(study, make_space(), trials=1, devices=0.25, clock=toy.clock)
    assignment = engine.ask()
    engine.tell(0, assignment.number, Outcome("failed", kind="out of memory"))
    engine = Engine(study, make_space(), trials=1, devices=0.25, clock=toy.clock)
    run_local(engine, toy)
    assert engine.meter.device_seconds == STEPS


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


def test_a_killed_session_counts_to_its_last_evaluation_and_its_trial_goes_on_when_there_is_budget(tmp_path):
    study, toy = make_study(tmp_path / "s"), Toy(seconds=10.0)

    def killed(assignment, report):
        def reporting(evaluation):
            report(evaluation)
            if evaluation.step == 25:
                toy.now += 1000  # no evaluation came of it
                raise Killed

        return toy(assignment, reporting)

    engine = Engine(study, make_space(), hours=0.06, clock=toy.clock)
    with pytest.raises(Killed):
        run_local(engine, killed)
    assert spent(study).seconds == spent(study).device_seconds == 250
    # 216 of 216 seconds are used: the interrupted trial waits for a larger budget.
    assert search(study, toy, hours=0.06) == "hours"
    assert [t.state for t in study.trials(0)] == ["running"]
    assert search(study, toy, trials=1, hours=1) == "trials"
    assert [t.state for t in study.trials(0)] == ["complete"]
    # The toy began anew and took 1000 seconds; the trial's own record counts the 250 before as done.
    assert spent(study).seconds == 250 + 1000 and spent(study).device_seconds == 1000


def test_the_sleep_of_a_driver_that_was_followed_counts_for_nothing(tmp_path):
    study, toy = make_study(tmp_path / "s"), Toy(seconds=1.0)
    with study.driven():
        engine = Engine(study, make_space(), trials=2, clock=toy.clock)
        assignment = engine.ask()
        engine.tell(0, assignment.number, toy(assignment, lambda e: engine.report(0, assignment.number, e)))
        assert spent(study).seconds == STEPS
        (study.path / "sessions" / "0002").mkdir()  # another driver, while this one was suspended
        toy.now += 36000
        with pytest.raises(ValueError, match="was followed"):
            engine.ask()
        engine.close()
    assert spent(study).seconds == STEPS


def test_what_is_left_is_none_of_what_a_budget_forbids(tmp_path):
    study, toy = make_study(tmp_path / "s"), Toy(seconds=1.0)
    engine = Engine(study, make_space(), hours=1, clock=toy.clock)
    assert engine.left > 1000 and engine.ended_by is None
    assignment = engine.ask()
    toy.now = 3600
    assert engine.ask() is None and engine.left == 1 and engine.ended_by == "hours"
    engine.tell(0, assignment.number, toy(assignment, lambda e: engine.report(0, assignment.number, e)))
    assert engine.left == 0
    assert read_json(study.path / "sessions" / "0001" / "session.json")["concurrent"] == 1

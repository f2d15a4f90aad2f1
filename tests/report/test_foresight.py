"""What is left of a search, against figures worked out by hand."""

import dataclasses

import pytest

from dgsearch.report.foresight import expected_steps, foresee, shares_past, step_seconds
from dgsearch.report.snapshot import Course, Seen
from dgsearch.search.budget import Budget, Spent


def seen(number, family="erm", *, fold=0, default=False, state="complete", step=100, seconds=None) -> Seen:
    return Seen(fold, number, family, default, state, step, step / 10 if seconds is None else seconds)


def course(trials=None, *, folds=1, hours=None, device_hours=None, floor=0) -> Course:
    return Course(folds, 100, Budget(trials, hours, device_hours), ("erm", "coral"), ("erm", "coral"), floor)


def test_expected_steps_follow_the_rungs():
    rungs = (10, 30)
    third = [1 / 3, 1 / 3]
    assert expected_steps(100, rungs, [1, 1]) == 100
    assert expected_steps(100, rungs, third) == pytest.approx(10 + 20 / 3 + 70 / 9)
    assert expected_steps(100, rungs, [1, 1 / 3]) == pytest.approx(30 + 70 / 3)
    assert expected_steps(100, rungs, third, after=10) == pytest.approx(20 + 70 / 3)
    assert expected_steps(100, rungs, third, after=25) == pytest.approx(5 + 70 / 3)
    assert expected_steps(100, rungs, third, after=30) == 70
    assert expected_steps(100, rungs, third, after=100) == 0
    assert expected_steps(1, (), []) == 1


def test_shares_past_the_rungs_start_at_the_rules_and_follow_the_trials():
    assert shares_past((10, 30), []) == [1 / 3, 1 / 3]
    trials = [
        seen(0, default=True),  # spared: does not count
        seen(1),
        seen(2, state="pruned", step=30),
        seen(3, state="pruned", step=10),
        seen(4, state="running", step=20),
        seen(5, state="running", step=10),  # not judged yet, or its verdict not seen
    ]
    # At 10: 1, 2 and 4 went on, 3 did not. At 30: 1 went on, 2 did not.
    assert shares_past((10, 30), trials) == [(3 + 1) / (4 + 3), (1 + 1) / (2 + 3)]


def test_a_step_costs_what_the_familys_trials_took():
    trials = [
        seen(0, seconds=10),
        seen(1, state="pruned", step=10, seconds=12),
        seen(2, "coral", step=0, state="failed"),
    ]
    assert step_seconds(trials, {"erm": 9.0, "coral": 3.0}) == {"erm": 22 / 110, "coral": 3.0}


def test_a_search_not_begun_costs_what_was_measured():
    found = foresee(course(3), [], spent=Spent(), concurrent=1, measured={"erm": 0.1, "coral": 0.3})
    free = 20 + 20 / 3 + 60 / 9  # as is every default but the first
    assert found.trials == 3
    assert found.steps == pytest.approx(100 + free + free)
    seconds = 100 * 0.1 + free * 0.3 + free * 0.2  # a free trial is of either family
    assert found.seconds == found.device_seconds == pytest.approx(seconds)
    # Two at once: half of that, but no less than plain ERM's own ten seconds.
    both = foresee(course(3), [], spent=Spent(), concurrent=2, devices=0.25, measured={"erm": 0.1, "coral": 0.3})
    assert both.seconds == pytest.approx(max(seconds / 2, 100 * 0.1))
    assert both.device_seconds == pytest.approx(seconds * 0.25)


def test_defaults_and_floors_that_are_left_are_counted_a_fold():
    trials = [
        seen(0, default=True, seconds=10.0),
        seen(1, "coral", default=True, step=50, state="running", seconds=10.0),
        seen(0, default=True, fold=1, step=0, state="running", seconds=0.0),
    ]
    found = foresee(course(6, folds=2, floor=2), trials, spent=Spent(), concurrent=1)
    free = 20 + 20 / 3 + 60 / 9
    assert found.trials == 2 + 4 + 5
    # Costs: erm 10 s / 100 steps, coral 10 s / 50. Fold 0: coral's rest, erm's floor at trial 3, 3 free ones;
    # fold 1: plain ERM, coral's default, the same floor, 3 free ones.
    coral = 50 * 0.2 + free * 0.2
    erm = free * 0.1 + 100 * 0.1 + free * 0.1
    assert found.seconds == pytest.approx(coral + erm + 6 * free * 0.15)


def test_floors_are_filled_as_the_engine_does_the_family_with_the_fewest_trials_first():
    free = 20 + 20 / 3 + 60 / 9
    found = foresee(course(7, floor=3), [], spent=Spent(), concurrent=1, measured={"erm": 0.1, "coral": 0.3})
    floors = free * 0.1 + free * 0.3  # in the turns of trials 3 and 6; 2, 4 and 5 are free
    assert found.seconds == pytest.approx(100 * 0.1 + free * 0.3 + floors + 3 * free * 0.2)


def test_what_is_queued_comes_between_defaults_and_floors_unless_its_family_is_given_up():
    trials = [
        seen(0, default=True, seconds=10.0),
        seen(1, "coral", default=True, step=20, state="pruned", seconds=6.0),
        seen(2, "coral", step=20, state="pruned", seconds=6.0),
    ]
    trials[2] = dataclasses.replace(trials[2], queued=0)
    queued = dataclasses.replace(course(5, floor=2), queues=(("coral", "coral", "erm"),))
    shares = shares_past((20, 40), trials)
    free = 20 + 20 * shares[0] + 60 * shares[0] * shares[1]
    assert foresee(queued, trials, spent=Spent(), concurrent=1).seconds == pytest.approx(free * 0.3 + free * 0.1)
    failed = [dataclasses.replace(t, state="failed") if t.family == "coral" else t for t in trials]
    shares = shares_past((20, 40), failed)
    free = 20 + 20 * shares[0] + 60 * shares[0] * shares[1]
    mean = (1 * 0.1 + 2 * 0.3) / 3  # of what was drawn freely so far, which a last trial is
    assert foresee(queued, failed, spent=Spent(), concurrent=1).seconds == pytest.approx(free * 0.1 + free * mean)


def test_hours_and_device_hours_bound_it():
    trials = [seen(0, default=True, seconds=36.0)]
    spent = Spent(seconds=40.0, device_seconds=36.0, sessions=1)
    each = 0.36 * (20 + 20 / 3 + 60 / 9)
    by_hours = foresee(course(hours=0.1), trials, spent=spent, concurrent=2)
    assert by_hours.seconds == pytest.approx(320) and by_hours.trials == pytest.approx(2 * 320 / each)
    assert by_hours.device_seconds == pytest.approx(640)
    by_devices = foresee(course(device_hours=0.1), trials, spent=spent, concurrent=2, devices=0.5)
    assert by_devices.seconds == pytest.approx(324) and by_devices.device_seconds == pytest.approx(324)
    # The first that is reached counts; what runs when hours are over goes on to its end.
    assert foresee(course(1, hours=0.1), trials, spent=spent, concurrent=1).seconds == 0
    running = [*trials, seen(1, step=50, state="running", seconds=18.0)]
    late = foresee(course(hours=0.01), running, spent=spent, concurrent=1)
    assert late.seconds == pytest.approx(50 * 54 / 150)


def test_nothing_known_is_no_figure():
    found = foresee(course(4), [], spent=Spent(), concurrent=1)
    assert (found.trials, found.seconds, found.device_seconds) == (4, None, None)
    assert foresee(course(hours=1), [], spent=Spent(), concurrent=1).trials is None

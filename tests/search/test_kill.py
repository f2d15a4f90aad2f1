"""A search on Ray whose driver and workers are killed: the same end as if nothing had happened."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from cluster_toy import reached, runs, trial_dirs
from test_cluster import assert_resumed, make_cluster, said, start_driver, wait_for
from test_engine import assert_whole, make_space, make_study


@pytest.fixture(scope="module")
def cluster():
    """One node with one GPU, which two trials share."""
    made = make_cluster()
    made.add_node(num_cpus=1, num_gpus=1)
    yield made
    made.shutdown()


def ended(study: Path) -> dict[Path, bytes]:
    return {t: (t / "result.json").read_bytes() for t in trial_dirs(study) if (t / "result.json").exists()}


def sessions(study: Path) -> list[str]:
    return sorted(folder.name for folder in study.glob("sessions/*"))


def under_way(study: Path, *, since: int = 0) -> list[Path]:
    """Trials that the latest session, if it is more than ``since``, has begun or taken up, with far to go."""
    names = sessions(study)
    if len(names) <= since:
        return []
    steps = {t: reached(t, names[-1]) for t in trial_dirs(study) if not (t / "result.json").exists()}
    return [t for t, done in steps.items() if done and done[-1] < 75]


def killed(study: Path, cluster, kills: list[tuple[str, float]], *, trials: int, seconds: float) -> None:
    """Search to the end, killing ``driver`` or ``worker`` after so many seconds of trials under way."""
    options = {"trials": trials, "gpus": 0.5, "seconds": seconds}
    untouched: dict[Path, bytes] = {}
    interrupted: set[Path] = set()
    driver = start_driver(study, cluster, **options)
    before = 0
    try:
        for victim, after in kills:
            wait_for(lambda n=before: under_way(study, since=n), driver)
            time.sleep(after)
            chosen = wait_for(lambda n=before: under_way(study, since=n), driver)[0]
            if victim == "worker":
                begun = len(runs(chosen))
                os.kill(runs(chosen)[-1]["pid"], signal.SIGKILL)
                interrupted.add(chosen)
                wait_for(lambda t=chosen, n=begun: len(runs(t)) > n, driver)
                continue
            driver.kill()
            driver.wait()
            interrupted |= set(trial_dirs(study)) - set(ended(study))
            untouched |= ended(study)
            before = len(sessions(study))
            driver = start_driver(study, cluster, **options)
        assert driver.wait(timeout=300) == 0, said(study).read_text()
    finally:
        driver.kill()
        driver.wait()
    assert_whole(make_study(study, make_space()), trials=trials)
    results = ended(study)
    assert len(results) == 2 * trials and results | untouched == results
    for trial, result in results.items():
        assert b"failed" not in result, result
        assert runs(trial)[0]["gpu"] == "0"
        if trial not in interrupted:
            assert len(runs(trial)) == 1
        assert_resumed(trial)
    resumed = [run["start"] for trial in interrupted for run in runs(trial)[1:]]
    assert max(resumed) > 0


def test_a_driver_and_a_worker_killed(tmp_path, cluster):
    killed(tmp_path / "s", cluster, [("worker", 0.0), ("driver", 0.5)], trials=3, seconds=0.2)


@pytest.mark.slow
def test_ten_kills_at_random_moments(tmp_path, cluster):
    chance = random.Random(0)
    victims = chance.sample(["driver", "worker"] * 5, k=10)
    kills = [(victim, chance.uniform(0, 3)) for victim in victims]
    killed(tmp_path / "s", cluster, kills, trials=12, seconds=0.4)

"""Several nodes on one machine: one dies, one joins, one sees no data."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cluster_toy import reached, runs, trial_dirs
from ray.cluster_utils import Cluster
from test_engine import assert_whole, make_space, make_study

from dgsearch.search.nodes import room

HERE = Path(__file__).parent
QUICK_TO_NOTICE = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_timeout_ms": 500}


def make_cluster() -> Cluster:
    """A cluster whose head takes no trials; GPUs are numbers only. Its sockets need a short path."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    head = {
        "num_cpus": 0,
        "include_dashboard": False,
        "_system_config": QUICK_TO_NOTICE,
        "temp_dir": tempfile.mkdtemp(prefix="r", dir="/tmp"),
    }
    return Cluster(initialize_head=True, head_node_args=head)


def start_driver(study: Path, cluster: Cluster, **options) -> subprocess.Popen:
    given = {"address": cluster.address, **options}
    command = [sys.executable, HERE / "driver.py", study, *(x for k, v in given.items() for x in (f"--{k}", str(v)))]
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=study.parent
    )


def wait_for(condition, driver: subprocess.Popen, *, seconds=120):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
    return found


def assert_resumed(trial: Path) -> None:
    """Every run of a trial began where one before had written a checkpoint; no session did a step twice."""
    for session in {run["session"] for run in runs(trial)}:
        steps = reached(trial, session)
        assert steps == sorted(set(steps)), steps
    starts = [run["start"] for run in runs(trial)]
    assert starts[0] == 0 and starts == sorted(starts) and set(starts) <= {0, *reached(trial)}


def test_room():
    def fits(cpu, gpu, cpus, gpus):
        return room({"CPU": cpu, "GPU": gpu}, cpus=cpus, gpus=gpus)

    assert fits(8, 0, 1, 0) == 8 and fits(8, 0, 3, 0) == 2 and fits(8, 0, 1, 1) == 0 and fits(0, 0, 1, 0) == 0
    assert fits(64, 4, 1, 1) == 4 and fits(64, 4, 1, 2) == 2 and fits(2, 4, 1, 1) == 2
    assert fits(64, 1, 1, 0.1) == 10 and fits(64, 1, 1, 0.25) == 4
    assert fits(64, 4, 1, 0.3) == 12  # three on each GPU: no trial lies on two
    assert fits(64, 4, 0, 0.5) == 8


def test_a_node_that_dies_costs_no_trial_one_that_joins_gets_some_and_a_blind_one_none(tmp_path):
    cluster = make_cluster()
    try:
        dies, _ = (cluster.add_node(num_cpus=1, num_gpus=1) for _ in range(2))
        study = tmp_path / "s"
        driver = start_driver(study, cluster, trials=5, gpus=1, seconds=0.3)

        def on_it():
            return [t for t in trial_dirs(study) if len(reached(t)) > 3 and runs(t)[-1]["node"] == dies.node_id]

        (interrupted,) = wait_for(on_it, driver)
        cluster.remove_node(dies, allow_graceful=False)
        before = reached(interrupted)[-1]
        joins = cluster.add_node(num_cpus=1, num_gpus=1)
        blind = cluster.add_node(num_cpus=1, num_gpus=1, env_vars={"BLIND": "1"})
        out, _ = driver.communicate(timeout=150)
        assert driver.returncode == 0, out
        found = {t: runs(t) for t in trial_dirs(study)}
        nodes = {run["node"] for of in found.values() for run in of}
        assert joins.node_id in nodes and blind.node_id not in nodes
        assert out.count("can't see /data/of/this/test (No such file or directory): it gets no trials") == 1, out
        assert_whole(make_study(study, make_space()), trials=5)
        for trial in found:
            assert "failed" not in (trial / "result.json").read_text()
            assert_resumed(trial)
        first, second = found[interrupted]
        assert first["node"] == dies.node_id != second["node"] and second["start"] >= before
        assert all(len(of) == 1 for trial, of in found.items() if trial != interrupted)
        assert {run["cwd"] for of in found.values() for run in of}.isdisjoint({str(interrupted)})

        again = start_driver(tmp_path / "t", cluster, trials=1, gpus=1, seconds=0.1)
        out, _ = again.communicate(timeout=60)
        assert again.returncode == 2 and not trial_dirs(tmp_path / "t")
        assert out.splitlines()[-1].startswith("error: node ") and "can't see /data/of/this/test" in out
    finally:
        cluster.shutdown()

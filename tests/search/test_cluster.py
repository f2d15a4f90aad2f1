"""Several nodes on one machine: one dies, one joins, one sees no data."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_toy import Sleeper, reached, runs, trial_dirs
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster
from test_engine import assert_whole, make_space, make_study

from dgsearch.domains.layout import read_domain
from dgsearch.search import nodes
from dgsearch.search.engine import Engine
from dgsearch.search.nodes import Needs, UnseenError, await_sight, room
from dgsearch.search.ray_tune import run_ray
from dgsearch.search.trial import Training

HERE = Path(__file__).parent
QUICK_TO_NOTICE = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_timeout_ms": 500}


def make_cluster() -> Cluster:
    """A cluster whose head takes no trials; GPUs are numbers only. Its sockets need a short path.

    Ray notes the address of the latest cluster in its own folder, whichever ``temp_dir`` says, and does not make it.
    """
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
    head = {
        "num_cpus": 0,
        "include_dashboard": False,
        "_system_config": QUICK_TO_NOTICE,
        "temp_dir": tempfile.mkdtemp(prefix="r", dir="/tmp"),
    }
    return Cluster(initialize_head=True, head_node_args=head)


def start_driver(study: Path, cluster: Cluster, **options) -> subprocess.Popen:
    """Start a driver, whose output goes to a file beside the study."""
    given = {"address": cluster.address, **options}
    command = [sys.executable, HERE / "driver.py", study, *(x for k, v in given.items() for x in (f"--{k}", str(v)))]
    with said(study).open("a") as out:
        return subprocess.Popen(list(map(str, command)), stdout=out, stderr=subprocess.STDOUT, cwd=study.parent)


def said(study: Path) -> Path:
    return study.with_suffix(".out")


def wait_for(condition, driver: subprocess.Popen, *, seconds=300):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert driver.poll() is None, driver.args
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


@pytest.mark.slow
def test_a_node_that_dies_costs_no_trial_one_that_joins_gets_some_and_a_blind_one_none(tmp_path):
    cluster, study, gate = make_cluster(), tmp_path / "s", tmp_path / "gate"
    drivers = []
    try:
        dies, _ = (cluster.add_node(num_cpus=1, num_gpus=1) for _ in range(2))
        drivers.append(driver := start_driver(study, cluster, trials=4, gpus=1, seconds=0.1, gate=gate))

        def on(node):
            return [t for t in trial_dirs(study) if runs(t) and runs(t)[-1]["node"] == node.node_id]

        # Both nodes are held up at the gate, so that what is left of the dead one's trial needs the new one.
        (interrupted,) = wait_for(lambda: [t for t in on(dies) if len(reached(t)) == 5], driver)
        cluster.remove_node(dies, allow_graceful=False)
        joins = cluster.add_node(num_cpus=1, num_gpus=1)
        wait_for(lambda: on(joins), driver)
        blind = cluster.add_node(num_cpus=1, num_gpus=1, env_vars={"BLIND": "1"})
        wait_for(lambda: "it gets no trials" in said(study).read_text(), driver)
        drivers.append(start_driver(tmp_path / "t", cluster, trials=1, gpus=1, seconds=0.1))
        gate.touch()
        assert [d.wait(timeout=300) for d in drivers] == [0, 2], said(study).read_text()
    finally:
        for process in drivers:
            process.kill()
            process.wait()
        cluster.shutdown()

    found = {t: runs(t) for t in trial_dirs(study)}
    assert blind.node_id not in {run["node"] for of in found.values() for run in of}
    assert said(study).read_text().count("can't see /data/of/this/test (No such file or directory): it gets no") == 1
    assert_whole(make_study(study, make_space()), trials=4)
    first, second = found[interrupted]
    assert first["node"] == dies.node_id and second["node"] == joins.node_id and second["start"] == 25
    assert all(len(of) == 1 for trial, of in found.items() if trial != interrupted)
    assert len({run["pid"] for of in found.values() for run in of}) < len(found)  # workers are used again
    for trial in found:
        result = json.loads((trial / "result.json").read_text())
        assert result["state"] != "failed"
        if result["state"] == "complete":  # and leave their own trial's weights
            fold, number = trial.parts[-3], int(trial.name)
            assert (trial / result["weights"]).read_text() == f"{fold} {number}"
        assert_resumed(trial)

    assert not trial_dirs(tmp_path / "t")
    last = said(tmp_path / "t").read_text().splitlines()[-1]
    assert last.startswith("error: node ") and "can't see /data/of/this/test" in last


@pytest.fixture
def needs(tmp_path):
    (tmp_path / "sessions" / "0001").mkdir(parents=True)
    return Needs.of(tmp_path, "0001", ["index"], None)


def test_a_node_says_what_it_lacks(needs, tmp_path, monkeypatch):
    def look(sources):
        raise FileNotFoundError(2, "No such file or directory", f"/data/{sources[0]}")

    assert needs.lacking() is None
    assert replace(needs, look=look).lacking() == "can't see /data/index (No such file or directory)"
    assert replace(needs, mark="other").lacking() == f"has another study at {tmp_path}"
    assert "has torch" in replace(needs, versions=needs.versions | {"torch": "0"}).lacking()
    (needs.folder / "mark").unlink()
    assert replace(needs, look=look).lacking() == f"can't see the study {tmp_path} (No such file or directory)"
    monkeypatch.setattr(nodes, "SIGHT", 0.1)
    await_sight(tmp_path, None, ["index"])
    with pytest.raises(UnseenError, match="^node .* can't see /data/index"):
        await_sight(tmp_path, look, ["index"])
    with pytest.raises(UnseenError, match="can't write in"):
        await_sight(tmp_path / "nowhere", None, ["index"])


def test_trials_look_at_their_indexes_first_images_and_weights(images, tmp_path):
    index = read_domain(images, "art")
    index.save(tmp_path / "0.json")
    training = Training("small_cnn", 10, 16, 0, "cpu", 1, "float32", None)
    training.look([str(tmp_path / "0.json")])
    replace(index, root=str(tmp_path)).save(tmp_path / "1.json")
    with pytest.raises(OSError) as raised:
        training.look([str(tmp_path / "1.json")])
    assert raised.value.filename == str(tmp_path / index.paths[0])
    with pytest.raises(ValueError, match="no file /nowhere/w.pt"):
        replace(training, network="resnet18@/nowhere/w.pt").look([])


@pytest.fixture
def engine(tmp_path):
    space = make_space()
    return Engine(make_study(tmp_path / "s", space), space, trials=1)


def test_a_share_of_two_gpus_and_rays_own_protocol_are_refused(engine):
    for options, message in (
        ({"gpus_per_trial": 1.5}, "a share of one GPU or whole GPUs, not 1.5"),
        ({"address": "ray://h:1"}, "must be local, auto or HOST:PORT"),
    ):
        with pytest.raises(ValueError, match=message):
            run_ray(engine, Sleeper(0), **options)


def test_a_driver_leaves_rays_copy_of_a_jobs_working_directory_and_keeps_no_study_in_it(engine, tmp_path, monkeypatch):
    study, copy = engine.study.path, tmp_path / "working_dir_files" / "package"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    for path in (copy / "s", Path("s"), Path("../../s")):
        engine.study.path = path
        with pytest.raises(ValueError, match="Ray's copy of the job's working directory"):
            run_ray(engine, Sleeper(0))
    assert Path.cwd() == copy
    engine.study.path = study
    with pytest.raises(ValueError, match="no Ray cluster answers"):
        run_ray(engine, Sleeper(0), address="127.0.0.1:1")
    assert Path.cwd() == study

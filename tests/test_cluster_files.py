"""What scripts/cluster/ holds: parsed and checked, and the Slurm script run with stand-ins of Slurm's commands."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import ray
import typer
import yaml

from dgsearch import cli

FILES = Path(__file__).parent.parent / "scripts" / "cluster"

STANDS_IN = {
    # Runs the command as each task of the step; ends them when told to.
    "srun": """
        echo "srun $*" >> "$CALLS"
        while [ "${1#--}" != "$1" ]; do shift; done
        tasks=
        for id in 0 1; do SLURM_NODEID=$id "$@" & tasks="$tasks $!"; done
        trap 'kill $tasks; exit 143' TERM
        wait
    """,
    # A head listens on its port; each ends when told to.
    "ray": """
        echo "ray $* token=${#RAY_AUTH_TOKEN} mode=$RAY_AUTH_MODE" >> "$CALLS"
        case "$*" in
        *--head*) exec "$PYTHON" -c 'import socket, sys; s = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True: s.accept()' "$HEAD_PORT" ;;
        esac
        exec sleep 60
    """,
    "dgsearch": """
        echo "dgsearch $*" >> "$CALLS"
        trap 'echo driver: USR1 >> "$CALLS"; exit 130' USR1
        trap 'echo driver: TERM >> "$CALLS"; exit 130' TERM
        until [ "$(grep -c '^ray ' "$CALLS")" = 2 ]; do sleep 0.1; done
        echo started >> "$CALLS"
        for _ in $(seq "$SECONDS_OF_SEARCH"); do sleep 1 & wait $!; done
    """,
    "scontrol": 'echo "scontrol $*" >> "$CALLS"',
    "hostname": "echo 127.0.0.1",
}


@pytest.fixture
def job(tmp_path):
    """Start the Slurm script as Slurm would its batch script; return the process and what was called."""
    (tmp_path / "bin").mkdir()
    for name, text in STANDS_IN.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    calls = tmp_path / "calls"
    calls.touch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    started = []

    def start(*arguments, seconds=60):
        environment = {
            "PATH": f"/usr/bin:/bin:{os.environ['PATH']}", "DGSEARCH_ENV": str(tmp_path), "USER": "someone",
            "SLURM_JOB_ID": str(number % 10000), "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "8",
            "CALLS": str(calls), "SECONDS_OF_SEARCH": str(seconds), "PYTHON": sys.executable,
        }  # fmt: skip
        command = ["bash", FILES / "slurm.sh", *arguments]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path))
        return started[0], lambda: calls.read_text().splitlines()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_until(line, calls):
    end = time.monotonic() + 60
    while line not in calls():
        assert time.monotonic() < end, calls()
        time.sleep(0.05)


def test_slurm_starts_a_node_each_and_a_driver_and_ends_with_it(job):
    process, calls = job("--data", "/my data", "--study", "/s", seconds=0)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and out == ""
    said = calls()
    (step,) = [line for line in said if line.startswith("srun ")]
    assert "--ntasks=2 --ntasks-per-node=1" in step and "--kill-on-bad-exit=0" in step
    nodes = [line for line in said if line.startswith("ray ")]
    (head,) = [line for line in nodes if "--head" in line]
    port = next(word.partition("=")[2] for word in head.split() if word.startswith("--port="))
    assert f"--node-ip-address=127.0.0.1 --port={port}" in head
    assert all(line.endswith("token=64 mode=token") and "--num-cpus=8" in line and "--block" in line for line in nodes)
    (worker,) = [line for line in nodes if "--head" not in line]
    assert f"--address=127.0.0.1:{port} " in worker
    assert f"dgsearch search --address 127.0.0.1:{port} --data /my data --study /s" in said
    assert not any(line.startswith("scontrol") for line in said)


def test_slurm_hands_its_notice_to_the_driver_and_queues_the_job_again(job):
    process, calls = job("--study", "/s")
    wait_until("started", calls)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "goes back into the queue" in out
    assert calls()[-2] == "driver: USR1" and calls()[-1].startswith("scontrol requeue ")


def test_slurm_preempts_and_requeues_by_itself(job):
    process, calls = job("--study", "/s")
    wait_until("started", calls)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130 and calls()[-1] == "driver: TERM"


def test_slurm_is_asked_for_a_notice_and_a_requeue():
    text = (FILES / "slurm.sh").read_text()
    subprocess.run(["bash", "-n", FILES / "slurm.sh"], check=True)
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH -" in line
    )
    assert options["signal"] == "B:USR1@120" and "requeue" in options and options["ntasks-per-node"] == "1"


def searched(command: str) -> dict[str, str]:
    """Return the options of a `dgsearch search` command, which must know them all."""
    words = shlex.split(command)
    assert words[:2] == ["dgsearch", "search"]
    given = dict(zip(words[2::2], words[3::2], strict=True))
    known = {o for p in typer.main.get_command(cli.app).commands["search"].params for o in p.opts}
    assert given.keys() <= known, given.keys() - known
    return given


def test_the_rayjob_shares_data_and_study_and_asks_for_a_token():
    job = yaml.safe_load((FILES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    options = searched(job["spec"]["entrypoint"])
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == ray.__version__
    head, (group,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert (
        head["rayStartParams"] == {"num-cpus": "0"}
        and group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    )
    images = set()
    for pod in (head["template"]["spec"], group["template"]["spec"]):
        (container,) = pod["containers"]
        images.add(container["image"])
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        volumes = {v["name"]: v for v in pod["volumes"]}
        assert set(mounts.values()) == set(volumes)
        for option in ("--data", "--study"):
            path = next(p for p in mounts if Path(options[option]).is_relative_to(p))
            assert "persistentVolumeClaim" in volumes[mounts[path]]
        cache = next(e["value"] for e in container["env"] if e["name"] == "DGSEARCH_CACHE")
        assert "emptyDir" in volumes[mounts[cache]]
    assert len(images) == 1
    assert "nvidia.com/gpu" in group["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_the_cluster_yaml_fits_rays_schema_and_hands_the_token_to_every_node():
    text = (FILES / "ray.yaml").read_text()
    cluster = yaml.safe_load(text)
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)
    assert cluster["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    starts = [cluster[f"{part}_start_ray_commands"][-1] for part in ("head", "worker")]
    assert all(command.startswith("RAY_AUTH_MODE=token ray start ") for command in starts)
    assert cluster["available_node_types"][cluster["head_node_type"]]["resources"] == {"CPU": 0}
    commented = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    searched(commented.partition("--tmux '")[2].partition("'")[0])

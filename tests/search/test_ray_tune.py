"""Tune as executor: a trial out of memory gets a whole device; a fault of the record ends the run as itself."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_engine import assert_whole, make_space, make_study

from dgsearch.search import engine as engine_module
from dgsearch.search.engine import Engine, Outcome
from dgsearch.train import Evaluation


def trial(assignment, report):
    """The first trial and the last run out of memory on a share of the GPU."""
    import ray

    gpus = ray.get_runtime_context().get_assigned_resources().get("GPU", 0)
    if assignment.number in (0, 3) and gpus < 1:
        raise RuntimeError("CUDA out of memory")
    report(Evaluation(10, {"a": gpus, "b": gpus}, {"a": 1.0, "b": 1.0}))
    report(Evaluation(100, {"a": gpus, "b": gpus}, {"a": 1.0, "b": 1.0}))
    return Outcome("complete")


def main(path: Path) -> None:
    """A search on a cluster that says it has one GPU, then one whose disk is full."""
    import ray

    from dgsearch.search.ray_tune import run_ray

    ray.init(
        address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    space = make_space()
    study = make_study(path / "whole", space, folds=1)
    events = []
    engine = Engine(study, space, trials=4, on_event=lambda kind, r: events.append((kind, r.number)))
    run_ray(engine, trial, gpus_per_trial=0.5)
    assert_whole(study, trials=4)
    assert [n for kind, n in events if kind == "retry"] == [0, 3]
    assert not [t for t in study.trials(0) if t.state == "failed"]
    assert {t.number: t.best.mean for t in study.trials(0)} == {0: 1.0, 1: 0.5, 2: 0.5, 3: 1.0}

    append = engine_module.append_line

    def full(file, value):
        if file.parent.name == "0001" and file.name == "evaluations.jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        append(file, value)

    engine_module.append_line = full
    with pytest.raises(OSError, match="No space left on device: .*0001/evaluations.jsonl"):
        run_ray(Engine(make_study(path / "full", space, folds=1), space, trials=4), trial, gpus_per_trial=0.5)
    print("whole")


@pytest.mark.slow
def test_memory_is_tried_again_on_a_whole_gpu_and_a_fault_of_the_record_ends_the_run(tmp_path):
    """In a process of its own: Ray leaves processes to its process's end."""
    command = [sys.executable, __file__, str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout.endswith("whole\n"), done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]))

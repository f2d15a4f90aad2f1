"""Runs the engine's trials on a Ray cluster: searcher, scheduler and trainable are thin adapters of the engine.

Each session is a new Tune run; nothing of Tune's own state is ever restored (the study is the record).
"""

import functools
import json
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")  # Ctrl-C is ours: Tune would end as if done
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # the study is the only log

import ray
import torch
from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from dgsearch.search.engine import Assignment, Engine, Outcome, Trial, ended_by_signals, run_guarded
from dgsearch.search.nodes import Look, Needs, Nodes, await_sight, room
from dgsearch.search.worker_log import logged
from dgsearch.train import Evaluation

METRIC = "value"
ACTOR_RESTARTS = 3  # of a trial whose worker or node died
FORWARDED = ("DGSEARCH_CACHE",)  # of the driver's environment, to workers on a cluster; Tune sends its own


class _Adapter:
    """Holds the engine; ``Tuner.fit`` pickles searcher and scheduler once, and the engine stays behind."""

    engine: Engine
    nodes: Nodes

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("engine", "nodes")}


class EngineSearcher(_Adapter, Searcher):
    """Asks the engine for trials, as many at once as fit, and tells it how they ended."""

    def __init__(self, engine: Engine, nodes: Nodes, *, limit: int | None) -> None:
        super().__init__(metric=METRIC, mode="max")
        self.engine = engine
        self.nodes = nodes
        self.limit = limit
        self.assigned: dict[str, Assignment] = {}

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        """Say that the searcher limits itself: its limit follows the nodes that come and go."""
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the next assignment as a Tune config; None if none may begin for now."""
        room = self.nodes.room()
        if len(self.assigned) >= (room if self.limit is None else self.limit):
            return None
        assignment = self.engine.ask()
        if assignment is None:
            return None if self.engine.left else Searcher.FINISHED  # one that runs may have to be tried again
        self.assigned[trial_id] = assignment
        return {"assignment": asdict(assignment)}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell the engine; a trial that ended without an outcome was stopped, or its worker died."""
        assignment = self.assigned.pop(trial_id, None)
        if assignment is None:
            return
        if not error and result is not None and "outcome" in result:
            outcome = Outcome(**json.loads(result["outcome"]))
        elif not error and self.engine.stopped(assignment.fold, assignment.number):
            outcome = Outcome("pruned")
        else:
            outcome = Outcome("failed", f"its worker died {ACTOR_RESTARTS + 1} times", kind="worker lost")
        self.engine.tell(assignment.fold, assignment.number, outcome)

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the study is the record."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing: the study is the record."""


class EngineScheduler(_Adapter, FIFOScheduler):
    """Reports evaluations to the engine, and stops the trials it stops."""

    def __init__(self, engine: Engine, nodes: Nodes) -> None:
        super().__init__()
        self.engine = engine
        self.nodes = nodes

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """Look at the nodes, also when no trial is left to ask for, and leave the choice to Tune."""
        self.nodes.room()
        return super().choose_trial_to_run(tune_controller)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Doubt the nodes: a worker has died, or did not see its trial's files."""
        self.nodes.doubt()

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Return the engine's verdict on an evaluation."""
        if "evaluation" not in result:
            return TrialScheduler.CONTINUE
        assignment = trial.config["assignment"]
        evaluation = Evaluation(**json.loads(result["evaluation"]))
        stop = self.engine.report(assignment["fold"], assignment["number"], evaluation)
        return TrialScheduler.STOP if stop else TrialScheduler.CONTINUE


def _trainable(trial: Trial, look: Look | None) -> Callable[[dict[str, Any]], None]:
    """Return Tune's function. It reports JSON text: Tune would flatten nested tables.

    What the node does not see is raised, not reported: Tune runs the trial again, elsewhere if that node is full.
    """

    def train(config: dict[str, Any]) -> None:
        def report(evaluation: Evaluation) -> None:
            tune.report({"evaluation": json.dumps(asdict(evaluation)), METRIC: evaluation.mean})

        assignment = Assignment(**config["assignment"])
        await_sight(Path(assignment.folder), look, assignment.sources)
        outcome = run_guarded(logged(trial, whole_process=True), assignment, report)
        tune.report({"outcome": json.dumps(asdict(outcome)), METRIC: 0.0})

    return train


def _resources(config: dict[str, Any], *, cpus_per_trial: float, gpus_per_trial: float) -> tune.PlacementGroupFactory:
    """Return what a trial reserves: one that ran out of memory on a share of a GPU gets a GPU to itself."""
    whole = config["assignment"]["whole_device"]
    gpus = max(1.0, gpus_per_trial) if whole and gpus_per_trial else gpus_per_trial
    return tune.PlacementGroupFactory([{"CPU": cpus_per_trial, "GPU": gpus}])


def _check_address(address: str) -> None:
    """Raise a ValueError if nothing listens at HOST:PORT: Ray itself would try for minutes."""
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or "//" in host or not port.isdigit():
        raise ValueError(f"--address must be local, auto or HOST:PORT, not {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"no Ray cluster answers at {address}: {error}") from None


def _forwarded() -> dict[str, Any] | None:
    """Return a runtime environment that hands on what the driver's environment sets."""
    found = {name: os.environ[name] for name in FORWARDED if name in os.environ}
    return {"env_vars": found} if found else None


def _of_a_job(folder: Path) -> bool:
    """Whether a folder is in the copy that Ray makes of a job's working directory, and removes with the job."""
    return "working_dir_files" in folder.absolute().parts


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def run_ray(
    engine: Engine,
    trial: Trial,
    *,
    address: str = "local",
    max_concurrent: int | None = None,
    cpus_per_trial: float = 1,
    gpus_per_trial: float = 0,
    look: Look | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Run trials on a cluster until the engine has none left.

    ``address`` is ``local`` (a cluster of this machine alone), ``auto`` or ``HOST:PORT``. ``max_concurrent``
    defaults to as many trials as the cluster's nodes hold at the time. ``look`` reads a little of what trials
    need: a node where it can't gets no trial, and ``say`` is told.

    Raises:
        ValueError: if there is no such cluster, no node has room for a trial, or one that has lacks something.
    """
    if gpus_per_trial > 1 and gpus_per_trial % 1:
        raise ValueError(f"a trial may have a share of one GPU or whole GPUs, not {gpus_per_trial:g}")
    if _of_a_job(engine.study.path):
        raise ValueError(
            f"the study {engine.study.path} lies in Ray's copy of the job's working directory, which is removed with "
            "the job: give an absolute path on shared storage"
        )
    if _of_a_job(Path()):
        os.chdir(engine.study.path)  # the copy may be gone as soon as Ray is left, and work remains to be done
    ours = not ray.is_initialized()
    if ours:
        _check_address(address)
        try:
            ray.init(
                address=address,
                include_dashboard=None if address != "local" else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env=_forwarded() if address != "local" else None,
            )
        except ConnectionError as error:
            raise ValueError(
                f"no Ray cluster at --address {address} lets this driver in ({str(error).splitlines()[0]}): start one "
                "with `ray start --head`, or use --address local; if it asks for a token, set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN_PATH"
            ) from None
        except (RuntimeError, ray.exceptions.RayError) as error:  # another version of Ray or Python, or no token
            if address == "local":
                raise
            raise ValueError(f"the Ray cluster at --address {address} refuses: {_one_line(error)}") from None
    try:
        sources = sorted({str(engine.study.index_path(n).resolve()) for f in engine.study.folds for n in f.sources})
        needs = Needs.of(engine.study.path, engine.session, sources, look)
        nodes = Nodes(needs, cpus=cpus_per_trial, gpus=gpus_per_trial, say=say)
        with ended_by_signals():  # again: ray.init has put its own handlers in place
            nodes.check()
        # Tune's own files are of no use after the run: the study is the record.
        with tempfile.TemporaryDirectory(prefix="dgsearch-") as scratch:
            tuner = tune.Tuner(
                tune.with_resources(
                    _trainable(trial, look),
                    functools.partial(_resources, cpus_per_trial=cpus_per_trial, gpus_per_trial=gpus_per_trial),
                ),
                tune_config=tune.TuneConfig(
                    metric=METRIC,
                    mode="max",
                    search_alg=EngineSearcher(engine, nodes, limit=max_concurrent),
                    scheduler=EngineScheduler(engine, nodes),
                    num_samples=-1,
                    max_concurrent_trials=max(engine.left, 1),  # of those that wait; the searcher has the limit
                    reuse_actors=True,
                    trial_name_creator=lambda t: t.trial_id,
                    trial_dirname_creator=lambda t: t.trial_id,
                ),
                run_config=tune.RunConfig(
                    name=f"session-{engine.session}",
                    storage_path=scratch,
                    failure_config=tune.FailureConfig(max_failures=ACTOR_RESTARTS),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0),
                    verbose=0,
                    callbacks=[],
                ),
            )
            with ended_by_signals():
                try:
                    tuner.fit()
                except Exception:  # Tune wraps what its adapters raise
                    if engine.fault is not None:
                        raise engine.fault from None
                    raise
            if engine.left:
                # Tune keeps SIGUSR1 for itself, and returns at it as if all were done.
                raise KeyboardInterrupt
    finally:
        if ours:
            ray.shutdown()


def cluster_room(address: str, *, cpus: float, gpus: float) -> int:
    """Return how many trials the nodes of a cluster hold; of ``local``, this machine, without starting one."""
    if address == "local":
        return room({"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}, cpus=cpus, gpus=gpus)
    _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ValueError(f"no Ray cluster at --address {address} ({str(error).splitlines()[0]})") from None
    try:
        return sum(room(node["Resources"], cpus=cpus, gpus=gpus) for node in ray.nodes() if node["Alive"])
    finally:
        ray.shutdown()

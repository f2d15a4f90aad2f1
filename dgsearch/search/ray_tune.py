"""Runs the engine's trials on a Ray cluster: searcher, scheduler and trainable are thin adapters of the engine.

Each session is a new Tune run; nothing of Tune's own state is ever restored (the study is the record).
"""

import json
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict
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
from dgsearch.search.worker_log import logged
from dgsearch.train import Evaluation

METRIC = "value"
ACTOR_RESTARTS = 3  # of a trial whose worker or node died


class _Adapter:
    """Holds the engine; ``Tuner.fit`` pickles searcher and scheduler once, and the engine stays behind."""

    engine: Engine

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "engine"}


class EngineSearcher(_Adapter, Searcher):
    """Asks the engine for trials, and tells it how they ended."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(metric=METRIC, mode="max")
        self.engine = engine
        self.assigned: dict[str, Assignment] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """Return the next assignment as a Tune config."""
        assignment = self.engine.ask()
        if assignment is None:
            return Searcher.FINISHED
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
            outcome = Outcome("failed", f"its worker died {ACTOR_RESTARTS + 1} times")
        self.engine.tell(assignment.fold, assignment.number, outcome)

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the study is the record."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing: the study is the record."""


class EngineScheduler(_Adapter, FIFOScheduler):
    """Reports evaluations to the engine, and stops the trials it stops."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Return the engine's verdict on an evaluation."""
        if "evaluation" not in result:
            return TrialScheduler.CONTINUE
        assignment = trial.config["assignment"]
        evaluation = Evaluation(**json.loads(result["evaluation"]))
        stop = self.engine.report(assignment["fold"], assignment["number"], evaluation)
        return TrialScheduler.STOP if stop else TrialScheduler.CONTINUE


def _trainable(trial: Trial) -> Callable[[dict[str, Any]], None]:
    """Return Tune's function. It reports JSON text: Tune would flatten nested tables."""

    def train(config: dict[str, Any]) -> None:
        def report(evaluation: Evaluation) -> None:
            tune.report({"evaluation": json.dumps(asdict(evaluation)), METRIC: evaluation.mean})

        outcome = run_guarded(logged(trial, whole_process=True), Assignment(**config["assignment"]), report)
        tune.report({"outcome": json.dumps(asdict(outcome)), METRIC: 0.0})

    return train


def _check_address(address: str) -> None:
    """Raise a ValueError if nothing listens at HOST:PORT: Ray itself would try for minutes."""
    if address in ("local", "auto") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--address must be local, auto or HOST:PORT, not {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"no Ray cluster answers at {address}: {error}") from None


def run_ray(
    engine: Engine,
    trial: Trial,
    *,
    address: str = "local",
    max_concurrent: int | None = None,
    cpus_per_trial: float = 1,
    gpus_per_trial: float = 0,
) -> None:
    """Run trials on a cluster until the engine has none left.

    ``address`` is ``local`` (a cluster of this machine alone), ``auto`` or ``HOST:PORT``. ``max_concurrent``
    defaults to as many trials as the cluster's resources hold.
    """
    ours = not ray.is_initialized()
    if ours:
        _check_address(address)
        try:
            ray.init(
                address=address,
                include_dashboard=None if address != "local" else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except ConnectionError as error:
            raise ValueError(
                f"no Ray cluster at --address {address}: start one with `ray start --head`, or use "
                f"--address local ({str(error).splitlines()[0]})"
            ) from None
    try:
        total = ray.cluster_resources()
        fits = int(total.get("CPU", 0) / cpus_per_trial) if cpus_per_trial else engine.left
        if gpus_per_trial:
            fits = min(fits, int(total.get("GPU", 0) / gpus_per_trial))
        if fits < 1:
            raise ValueError(
                f"no room for a trial of {cpus_per_trial:g} CPUs and {gpus_per_trial:g} GPUs on the cluster: "
                f"it has {total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs"
            )
        # Tune's own files are of no use after the run: the study is the record.
        with tempfile.TemporaryDirectory(prefix="dgsearch-") as scratch:
            tuner = tune.Tuner(
                tune.with_resources(_trainable(trial), {"cpu": cpus_per_trial, "gpu": gpus_per_trial}),
                tune_config=tune.TuneConfig(
                    metric=METRIC,
                    mode="max",
                    search_alg=EngineSearcher(engine),
                    scheduler=EngineScheduler(engine),
                    num_samples=-1,
                    max_concurrent_trials=max_concurrent or fits,
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
            with ended_by_signals():  # again: ray.init has put its own handlers in place
                tuner.fit()
            if engine.left:
                # Tune keeps SIGUSR1 for itself, and returns at it as if all were done.
                raise KeyboardInterrupt
    finally:
        if ours:
            ray.shutdown()


def resources(address: str) -> dict[str, float]:
    """Return how many CPUs and GPUs a cluster has; of ``local``, this machine's, without starting one."""
    if address == "local":
        return {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
    _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ValueError(f"no Ray cluster at --address {address} ({str(error).splitlines()[0]})") from None
    try:
        return {"CPU": 0.0, "GPU": 0.0} | ray.cluster_resources()
    finally:
        ray.shutdown()

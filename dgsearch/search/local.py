"""Runs the engine's trials in this process, one after another."""

from dgsearch.search.engine import Assignment, Engine, Trial, run_guarded
from dgsearch.search.worker_log import logged
from dgsearch.train import Evaluation, StopTrial


def run_local(engine: Engine, trial: Trial) -> None:
    """Run trials until the engine has none left."""
    trial = logged(trial, whole_process=False)
    while (assignment := engine.ask()) is not None:
        outcome = run_guarded(trial, assignment, lambda e, a=assignment: _report(engine, a, e))  # type: ignore[misc]
        engine.tell(assignment.fold, assignment.number, outcome)


def _report(engine: Engine, assignment: Assignment, evaluation: Evaluation) -> None:
    if engine.report(assignment.fold, assignment.number, evaluation):
        raise StopTrial

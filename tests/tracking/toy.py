"""A small study written by hand, and what an MLflow store shows of it."""

import os
import time
from dataclasses import asdict
from pathlib import Path

from dgsearch.recipe import Recipe, encode
from dgsearch.study import Fold, Specification, Study, append_line, write_json
from dgsearch.tracking.projection import Projected
from dgsearch.tracking.store import connect
from dgsearch.train import Evaluation

STEPS = 100
NETWORK = "small_cnn"
DOMAINS = ("photo", "sketch", "चित्र @1")  # the last is no name of a metric


def make_study(path: Path, *, data: str = "/data/PACS") -> Study:
    folds = tuple(
        Fold(number, tuple(d for d in DOMAINS if d != held), (held,)) for number, held in enumerate(DOMAINS[:2])
    )
    fingerprints = {domain: f"{i:032x}" for i, domain in enumerate(DOMAINS)}
    specification = Specification(
        data=data, folds=folds, fingerprints=fingerprints, network=NETWORK, space="quick", space_hash="abcd",
        resolution=16, steps=STEPS, batch_size=None, seed=0, threads=1, precision="float32", version="0.1",
    )  # fmt: skip
    return Study.create(path, specification, [])


def begin(study: Study, fold: int, number: int, *, family: str = "erm", objective: str = "erm") -> Path:
    recipe = encode(Recipe().resolve(NETWORK))
    if objective != "erm":
        recipe["objective"] = {"kind": objective}
    folder = study.trial_dir(fold, number)
    write_json(
        folder / "trial.json", {"family": family, "recipe": recipe, "default": number == 0, "fold": fold, "seed": 0}
    )
    a_while_ago = time.time() - 1000
    os.utime(folder / "trial.json", (a_while_ago, a_while_ago))
    return folder


def report(study: Study, fold: int, number: int, step: int, accuracy: float, *, name: str = "train/loss") -> None:
    sources = study.folds[fold].sources
    evaluation = Evaluation(
        step,
        {domain: accuracy + 0.01 * i for i, domain in enumerate(sources)},
        {domain: 1 - accuracy for domain in sources},
        {name: 0.5, "gradient_agreement/mean": 0.2, "val/accuracy": 0.9, "odd@name": float("nan")},
        seconds=step / 10,
    )
    append_line(study.trial_dir(fold, number) / "evaluations.jsonl", asdict(evaluation))


def end(study: Study, fold: int, number: int, state: str = "complete", reason: str = "") -> None:
    write_json(study.trial_dir(fold, number) / "result.json", {"state": state, "reason": reason, "weights": None})


def fill(study: Study) -> None:
    """Two folds; the first has one trial of each state."""
    for fold in (0, 1):
        begin(study, fold, 0)
        for step in (50, 100):
            report(study, fold, 0, step, 0.5 + (step == 50) * 0.2)
        end(study, fold, 0)
    begin(study, 0, 1, family="coral", objective="coral")
    report(study, 0, 1, 10, 0.4)
    end(study, 0, 1, "pruned")
    begin(study, 0, 2)
    end(study, 0, 2, "failed", "DivergedError: not finite")
    begin(study, 0, 3)
    report(study, 0, 3, 10, 0.3)


def select(study: Study, *, trials: dict[int, int], name: str = "selection", target: bool = False) -> None:
    folds = [
        {
            "held_out": list(fold.held_out),
            "sources": list(fold.sources),
            "trial": trials[fold.number],
            "family": "erm",
            "recipe": study.trial(fold.number, trials[fold.number]).recipe,
            "source_accuracy": 0.7,
            "step": 50,
            **({"target_accuracy": 0.123, "target_macro_f1": 0.1} if target else {}),
        }
        for fold in study.folds
    ]
    write_json(study.path / f"{name}.json", {"criterion": "training-domain", "folds": folds})


def runs_of(projected: Projected) -> dict:
    """Everything a store shows of a study's runs, by run name and fold."""
    client = connect(projected.uri)
    found = {}
    for run in client.search_runs([projected.experiment_id], max_results=1000):
        key = (run.data.tags.get("dgsearch.fold"), run.info.run_name)
        assert key not in found
        history = {
            name: [(p.timestamp, p.value, p.step) for p in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        inputs = sorted(i.dataset.name for i in run.inputs.dataset_inputs)
        files = sorted(f.path for f in client.list_artifacts(run.info.run_id))
        found[key] = (
            {**run.data.tags},
            {**run.data.params},
            history,
            (run.info.run_id, run.info.status, run.info.start_time, run.info.end_time),
            inputs,
            files,
        )
    return found


def same(runs: dict) -> str:
    return repr(sorted(runs.items()))  # by repr, since a NaN is not equal to itself

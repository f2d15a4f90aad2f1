"""Trains the families of a space on `digits` and keeps each run as a line of JSON: what they reach, and their curves.

    python scripts/benchmarks/digits.py table OUT --data data/digits [--space methods] [--seeds 3] [--steps 600]
    python scripts/benchmarks/digits.py curves OUT --data data/digits [--space methods] [--runs 30] [--steps 200]

`table` trains every family at its defaults with several seeds, each domain held out in turn, and prints means and
standard errors. `curves` trains draws from every family on one fold: the data of `engine.py`. Lines that OUT has
already are not run again, so an interrupted call goes on. Each run has one thread; seconds are CPU time.
"""

import argparse
import math
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import optuna
import torch
from rich.progress import track

from dgsearch.domains.batches import Sources
from dgsearch.domains.layout import domain_names, read_domain
from dgsearch.networks import build_network
from dgsearch.recipe import encode
from dgsearch.search_space import SearchSpace, read_space
from dgsearch.study import append_line, read_lines
from dgsearch.train import predict, run_trial, threads_of_torch

NETWORK = "small_cnn"


@dataclass(frozen=True)
class Run:
    """A run to make: draw 0 of a family is its defaults."""

    family: str
    draw: int
    held_out: str
    seed: int

    @property
    def key(self) -> tuple:
        return self.family, self.draw, self.held_out, self.seed


def drawn(space: SearchSpace, run: Run):
    """Return the parameters and the recipe of a draw; every draw of a family has a stream of its own."""
    fixed = space.default_parameters(run.family) if run.draw == 0 else {"family": run.family}
    sampler = optuna.samplers.RandomSampler(seed=1000 * space.family_names.index(run.family) + run.draw)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trial = optuna.create_study(sampler=optuna.samplers.PartialFixedSampler(fixed, sampler)).ask()
    _, recipe = space.suggest(trial)
    return trial.params, recipe.resolve(space.network)


def train(run: Run, options: argparse.Namespace) -> dict:
    """Train a run; where its fold has one, the domain held out is opened after training and measured."""
    space = read_space(options.space, network=NETWORK, batch_size=options.batch_size)
    parameters, recipe = drawn(space, run)
    names = [name for name in domain_names(options.data) if name != run.held_out]
    cache = options.out.parent / ".digits_cache"
    sources = Sources(tuple(read_domain(options.data, name) for name in names), options.resolution, cache)
    line = {"family": run.family, "draw": run.draw, "held_out": run.held_out, "seed": run.seed, "steps": options.steps}
    line |= {"precision": options.precision, "parameters": parameters, "recipe": encode(recipe)}
    curve: list[dict] = []
    began = time.process_time()
    try:
        result = run_trial(
            recipe,
            sources,
            network=NETWORK,
            steps=options.steps,
            seed=run.seed,
            precision=options.precision,
            report=lambda e: curve.append({"step": e.step, "mean": e.mean, "seconds": time.process_time() - began}),
        )
    except Exception as error:
        return line | {"curve": curve, "seconds": time.process_time() - began, "failed": f"{error}"}
    line |= {"curve": curve, "seconds": time.process_time() - began, "source": result.best.mean}
    if options.what == "table":
        line["left_out"] = accuracy(result, read_domain(options.data, run.held_out), cache, options)
    return line


def accuracy(result, index, cache: Path, options: argparse.Namespace) -> float:
    """Return a result's accuracy on all images of a domain."""
    model = build_network(
        NETWORK, num_classes=10, normalisation=result.normalisation, seed=0, precision=options.precision, initial=False
    )
    model.load_state_dict(result.weights)
    held = Sources((index,), options.resolution, cache)
    right = count = 0
    with threads_of_torch(1), held.open(seed=0, device=torch.device("cpu"), withhold_guide=True) as opened:
        for part in ("train", "guide", "validation"):
            logits, y = predict(model, opened.part(part))
            right, count = right + int((logits.argmax(1) == y).sum()), count + len(y)
    assert count == len(index)
    return right / count


def runs(options: argparse.Namespace) -> list[Run]:
    families = read_space(options.space, network=NETWORK).family_names
    if options.what == "curves":
        return [Run(family, k, options.held_out, 0) for k in range(options.runs) for family in families]
    held_out = domain_names(options.data)
    return [Run(f, 0, name, seed) for seed in range(options.seeds) for name in held_out for f in families]


def table(lines: list[dict]) -> str:
    """Return the Markdown table of `table`: means over folds, with the standard error over seeds of that mean."""
    held_out = sorted({line["held_out"] for line in lines})
    heads = ["family", "source validation", "left out", *(f"{name} left out" for name in held_out), "CPU s a run"]
    rows = [heads, ["---"] * len(heads)]
    for family in dict.fromkeys(line["family"] for line in lines):
        mine = [line for line in lines if line["family"] == family and "failed" not in line]
        seeds = sorted({line["seed"] for line in mine})

        def over_seeds(key: str, where: list[str], mine=mine, seeds=seeds) -> str:
            means = [statistics.fmean(r[key] for r in mine if r["seed"] == s and r["held_out"] in where) for s in seeds]
            error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
            return f"{statistics.fmean(means):.3f} ± {error:.3f}"

        seconds = f"{statistics.fmean(line['seconds'] for line in mine):.0f}"
        apart = [over_seeds("left_out", [name]) for name in held_out]
        cells = [over_seeds("source", held_out), over_seeds("left_out", held_out), *apart]
        rows.append([family, *cells, seconds])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "curves"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--space", default="methods")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=30, help="draws a family, for curves")
    parser.add_argument("--held-out", default="mnist_m", help="for curves")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--resolution", type=int, default=32)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    there = list(read_lines(options.out))
    known = {(line["family"], line["draw"], line["held_out"], line["seed"]) for line in there}
    missing = [run for run in runs(options) if run.key not in known]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        made = [pool.submit(train, run, options) for run in missing]
        for future in track(as_completed(made), total=len(made), description=options.what):
            append_line(options.out, future.result())
    if options.what == "table":
        print(table(list(read_lines(options.out))))


if __name__ == "__main__":
    main()

"""Steps a second of run_trial against a bare PyTorch loop over the same network, optimizer and decoded batches.

    python scripts/benchmarks/step.py --network small_cnn --resolution 32 --batch-size 32 --threads 1

The bare loop is zero_grad, forward, cross-entropy, backward and step on batches that lie in memory as floats.
"step" is run_trial's own step (batch t gathered, closure, what is logged, average) with no evaluation, timed by
calling `_Trial.train_step`. They take short turns in this process; ratios are medians over the rounds. "trial" is a
whole run_trial, opening the data and 20 evaluations included, against the bare loop's median. `--clock cpu` counts the
process's CPU time, which on a busy machine says more than the wall's; the two agree on a quiet one with one thread.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from dgsearch.domains.batches import OpenSources, Sources
from dgsearch.domains.layout import read_domain
from dgsearch.networks import build_network
from dgsearch.recipe import Recipe, Training
from dgsearch.train import _Trial, run_trial, threads_of_torch

DOMAINS, CLASSES, WARM = 3, 10, 3


def write_noise(root: Path, *, count: int, size: int) -> None:
    """Write `count` random images a domain."""
    chance = np.random.default_rng(0)
    for d in range(DOMAINS):
        for n in range(count):
            folder = root / f"d{d}" / f"c{n % CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(chance.integers(0, 256, (size, size, 3), np.uint8)).save(
                folder / f"{n}.png", compress_level=0
            )


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def timed(step: Callable[[], object], steps: int, *, clock: Callable[[], float]) -> float:
    """Return seconds a step."""
    began = clock()
    for _ in range(steps):
        step()
    return (clock() - began) / steps


def network_of(options: argparse.Namespace, opened: OpenSources, precision: str):
    model = build_network(
        options.network,
        num_classes=CLASSES,
        normalisation=opened.normalisation(),
        seed=0,
        precision=precision,
        freeze_bn=options.freeze_bn,
    )
    return model.to(memory_format=torch.channels_last)


def trial_step(
    options: argparse.Namespace, opened: OpenSources, *, precision: str, augment: str
) -> Callable[[], object]:
    """Return run_trial's step."""
    recipe = recipe_of(options, augment)
    model = network_of(options, opened, precision)
    trial = _Trial(recipe, model, opened, steps=10**9, seed=0, num_classes=CLASSES)

    def step() -> None:
        trial.train_step()
        if len(trial._means["train/loss"]) > 50:  # as an evaluation would
            trial._means.clear()

    return step


def recipe_of(options: argparse.Namespace, augment: str) -> Recipe:
    training = Training(batch_size=options.batch_size, augment=augment, freeze_bn=options.freeze_bn)
    return Recipe(training=training).resolve(options.network)


def bare_step(options: argparse.Namespace, opened: OpenSources, *, precision: str) -> Callable[[], None]:
    """Return a plain loop's step, over eight batches in memory."""
    model = network_of(options, opened, precision)
    optimizer = recipe_of(options, "none").optimizer.build(
        [{"params": list(model.parameters()), "part": "network", "lr_ratio": 1.0}], seed=0
    )
    batches = [opened.batch(t, size=options.batch_size) for t in range(8)]
    turn = 0

    def step() -> None:
        nonlocal turn
        batch = batches[turn % len(batches)]
        turn += 1
        optimizer.zero_grad()
        logits = model(batch.x)[1]
        functional.cross_entropy(logits.flatten(0, 1), batch.y.flatten()).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="small_cnn", help="small_cnn, mnist_cnn, resnet18@none, …")
    parser.add_argument("--resolution", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32, help="examples a domain; there are three domains")
    parser.add_argument("--steps", type=int, default=2, help="a round")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--trial-steps", type=int, default=300, help="of the whole trials; 0 leaves them out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--freeze-bn", action="store_true")
    parser.add_argument("--augment", default="standard", help="of the rows with augmentation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, threads_of_torch(options.threads):
        root = Path(folder) / "data"
        write_noise(root, count=max(100, 4 * options.batch_size), size=options.resolution)
        indexes = tuple(read_domain(root, f"d{d}") for d in range(DOMAINS))
        sources = Sources(indexes, options.resolution, Path(folder) / "cache")
        with sources.open(seed=0, device=torch.device("cpu"), withhold_guide=False) as opened:
            measure(options, sources, opened)


def measure(options: argparse.Namespace, sources: Sources, opened: OpenSources) -> None:
    clock = CLOCKS[options.clock]
    rows = {
        ("bare", "float32"): bare_step(options, opened, precision="float32"),
        ("step", "float32"): trial_step(options, opened, precision="float32", augment="none"),
        (f"step, {options.augment}", "float32"): trial_step(
            options, opened, precision="float32", augment=options.augment
        ),
        ("bare", "bfloat16"): bare_step(options, opened, precision="bfloat16"),
        ("step", "bfloat16"): trial_step(options, opened, precision="bfloat16", augment="none"),
        (f"step, {options.augment}", "bfloat16"): trial_step(
            options, opened, precision="bfloat16", augment=options.augment
        ),
    }
    for step in rows.values():
        timed(step, WARM, clock=clock)
    found: dict[tuple[str, str], list[float]] = {row: [] for row in rows}
    for round_ in range(options.rounds):
        # The order turns round, so that a machine that warms up favours none.
        for row in sorted(rows, key=list(rows).index, reverse=bool(round_ % 2)):
            found[row].append(timed(rows[row], options.steps, clock=clock))
    print(
        f"{options.network}, {DOMAINS} × {options.batch_size} images of {options.resolution} px, {options.threads} "
        f"threads, torch {torch.__version__}, {options.rounds} rounds of {options.steps} steps, {options.clock} time"
    )
    print(f"{'':20}{'precision':10}{'ms a step':>10}{'of bare':>9}{'of float32':>12}")

    def show(row: tuple[str, str], seconds: list[float]) -> None:
        median = statistics.median(seconds)
        bare = statistics.median(b / s for b, s in zip(found["bare", row[1]], seconds, strict=False))
        wide = statistics.median(f / s for f, s in zip(found.get((row[0], "float32"), []), seconds, strict=False))
        print(f"{row[0]:20}{row[1]:10}{1000 * median:10.1f}{bare:9.3f}{wide:12.3f}", flush=True)

    for row, seconds in found.items():
        show(row, seconds)
    if options.trial_steps:
        for precision in ("float32", "bfloat16"):
            for augment in ("none", options.augment):
                began = clock()
                run_trial(
                    recipe_of(options, augment),
                    sources,
                    network=options.network,
                    steps=options.trial_steps,
                    seed=0,
                    threads=options.threads,
                    precision=precision,
                )
                each = (clock() - began) / options.trial_steps
                row = (f"trial, {augment}", precision)
                found.setdefault(row, []).append(each)
                bare = statistics.median(found["bare", precision]) / each
                wide = found[row[0], "float32"][0] / each
                print(f"{row[0]:20}{row[1]:10}{1000 * each:10.1f}{bare:9.3f}{wide:12.3f}", flush=True)


if __name__ == "__main__":
    main()

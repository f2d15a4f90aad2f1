"""Toy problems with known answers: a file each, with ``CASES``, ``QUICK_STEPS``, ``run`` and ``draw``."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dgsearch.train import threads_of_torch

TOYS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def over_seeds(name: str, *, seeds: int, quick: bool = False, progress: Callable[[str], None] = print) -> list[Any]:
    """Run every case of a toy for the seeds 0 … seeds − 1; ``progress`` is told of each before it begins.

    ``quick`` takes the toy's fewer steps: the sign of its effect shows, not the size. Computes with one thread,
    so that a machine's number of cores changes nothing.
    """
    toy = importlib.import_module(f"dgsearch.toys.{name}")
    results = []
    with threads_of_torch(1):
        for seed in range(seeds):
            for case in toy.CASES:
                progress(f"{name}: {case}, seed {seed}")
                results.append(toy.run(seed=seed, case=case, steps=toy.QUICK_STEPS[case] if quick else None))
    return results


def draw(name: str, results: Sequence[Any], path: Path) -> None:
    """Draw a toy's results into a PNG file."""
    importlib.import_module(f"dgsearch.toys.{name}").draw(results, path)


def figure_frame(results: Sequence[Any]) -> pd.DataFrame:
    """Return a row a figure and a column a case: the mean over seeds ± its standard error."""
    names = [field.name for field in dataclasses.fields(results[0]) if field.type in (float, "float")]
    columns: dict[str, list[str]] = {"figure": [_heading(name) for name in names]}
    for case in dict.fromkeys(result.case for result in results):
        values = pd.DataFrame([[getattr(r, name) for name in names] for r in results if r.case == case])
        errors = values.sem()  # NaN for one seed
        columns[case] = [
            f"{mean:.3f}" if pd.isna(error) else f"{mean:.3f}±{error:.3f}"
            for mean, error in zip(values.mean(), errors, strict=True)
        ]
    return pd.DataFrame(columns)


def _heading(name: str) -> str:
    return " ".join(word.upper() if word in ("id", "ood") else word for word in name.split("_"))

"""The result table of a study: for each held-out domain, what was selected and how it does there."""

import io
from collections.abc import Iterable, Mapping

import pandas as pd
from rich.console import Console
from rich.table import Table

from dgsearch.evaluation import Evaluated
from dgsearch.recipe import decode, parameters
from dgsearch.selection import Selected
from dgsearch.study import Fold

FORMATS = ("table", "markdown", "csv")
FIGURES = ("source_accuracy", "target_accuracy", "target_macro_f1", "gap")
HEADINGS = {"source_accuracy": "source", "target_accuracy": "target", "target_macro_f1": "macro-F1"}


def result_frame(folds: Iterable[Selected]) -> pd.DataFrame:
    """Return a row a fold, and a last one with means; target figures are NaN before `dgsearch evaluate`.

    ``source_accuracy`` is the mean over the sources' validation parts, ``target_accuracy`` that on the domain
    held out, ``gap`` their difference.
    """
    rows = []
    for fold in folds:
        target, f1 = (fold.target_accuracy, fold.target_macro_f1) if isinstance(fold, Evaluated) else (None, None)
        rows.append(
            {
                "held_out": ", ".join(fold.held_out) or "none",
                "family": fold.family,
                "trial": str(fold.trial),
                "source_accuracy": fold.source_accuracy,
                "target_accuracy": target,
                "target_macro_f1": f1,
                "gap": None if target is None else fold.source_accuracy - target,
                "hyperparameters": _short(fold),
            }
        )
    frame = pd.DataFrame(rows).astype(dict.fromkeys(FIGURES, float))
    mean = {"held_out": "mean", "family": "", "trial": "", "hyperparameters": ""}
    return pd.concat([frame, pd.DataFrame([mean | frame[list(FIGURES)].mean().to_dict()])], ignore_index=True)


def family_frame(folds: Iterable[Selected], families: Mapping[Fold, list[Selected]]) -> pd.DataFrame:
    """Return ``result_frame`` with the best trial of every other family below each fold's selected one.

    Those were not evaluated, so they have no target figures. ``selected`` tells the rows apart.
    """
    chosen = list(folds)
    frame = result_frame(chosen)
    frame.insert(3, "selected", ["yes"] * len(chosen) + [""])
    parts = []
    for n, (selected, others) in enumerate(zip(chosen, families.values(), strict=True)):
        rest = [other for other in others if other.trial != selected.trial]
        parts += [frame.iloc[[n]], *([result_frame(rest).iloc[:-1].assign(selected="")] if rest else [])]
    return pd.concat([*parts, frame.iloc[[-1]]], ignore_index=True)


def _short(fold: Selected) -> str:
    values = parameters(decode(fold.recipe))
    return ", ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())


def render(frame: pd.DataFrame, *, form: str, title: str = "", width: int | None = None) -> str:
    """Return a frame as text: ``table`` for a terminal, ``markdown`` or ``csv``; figures with three decimals."""
    if form == "csv":
        return frame.to_csv(index=False, float_format="%.4f")
    cells = [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
    if form == "markdown":
        lines = [[_heading(c) for c in frame.columns], ["---"] * len(frame.columns), *cells]
        return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines) + "\n"
    notes = "hyperparameters"  # too long for a column of a terminal: they go below
    columns = [c for c in frame.columns if c != notes]
    grouped = bool(frame.iloc[:, 0].duplicated().any())
    table = Table(title=title or None)
    for column in columns:
        numeric = pd.api.types.is_numeric_dtype(frame[column])
        table.add_column(_heading(column), justify="right" if numeric else "left", overflow="fold")
    following = [cell[0] for cell in cells[1:]] + [""]
    for line, after in zip(cells, following, strict=True):
        table.add_row(*line[: len(columns)], end_section=after == "mean" or (grouped and after != line[0]))
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    if notes in frame:
        noted = frame[frame[notes] != ""]
        for row in (noted[noted["selected"] != ""] if "selected" in noted else noted).itertuples():
            console.print(f"{row.held_out} · {row.family}: {row.hyperparameters}", highlight=False, markup=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _heading(column: str) -> str:
    return HEADINGS.get(column, column.replace("_", " "))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "" if pd.isna(value) else f"{value:.3f}"
    return str(value)

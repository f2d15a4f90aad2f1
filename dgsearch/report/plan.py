"""What a search would take, said before it: steps, time, device-hours and bytes."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dgsearch.report.board import clock
from dgsearch.report.foresight import Foresight, foresee
from dgsearch.report.snapshot import Course, Seen
from dgsearch.search.budget import Spent
from dgsearch.search.retention import TOP
from dgsearch.train import Cost, evaluation_steps

FILES = 4000  # bytes of a trial's records besides its evaluations, Optuna's journal included


@dataclass(frozen=True)
class Plan:
    """What a search would take from now on. ``most_steps`` is if no trial were stopped; sizes are in bytes."""

    course: Course
    begun: int  # trials there are already
    at_once: int
    devices: float  # that a trial reserves
    costs: dict[str, Cost]
    unmeasured: dict[str, str]  # why, by family
    left: Foresight
    most_steps: int | None
    weight_bytes: int  # of all trials whose weights are kept
    record_bytes: int
    image_bytes: int

    @classmethod
    def of(
        cls,
        course: Course,
        begun: Sequence[Seen],
        spent: Spent,
        costs: Mapping[str, Cost],
        unmeasured: Mapping[str, str],
        *,
        at_once: int,
        devices: float,
        keep: str,
        image_bytes: int,
    ) -> "Plan":
        """Work out a plan from what the families' defaults cost."""
        each = {name: cost.seconds(course.steps) / course.steps for name, cost in costs.items()}
        left = foresee(course, begun, spent=spent, concurrent=at_once, devices=devices, measured=each)
        asked = course.budget.trials
        total = len(begun) + (left.trials or 0)
        a_fold = asked if asked is not None else total / course.folds
        kept = a_fold if keep == "all" else min(a_fold, TOP + len(course.floored))
        evaluations = (left.steps or 0) / course.steps * len(evaluation_steps(course.steps))
        folds = [[t for t in begun if t.fold == n] for n in range(course.folds)]
        to_end = sum((course.asked(fold) or 0) - sum(t.state != "running" for t in fold) for fold in folds)
        return cls(
            course,
            len(begun),
            at_once,
            devices,
            dict(costs),
            dict(unmeasured),
            left,
            None if asked is None else to_end * course.steps,
            round(course.folds * kept * max((c.weights for c in costs.values()), default=0)),
            round(evaluations * max((c.record for c in costs.values()), default=0) + FILES * (left.trials or 0)),
            image_bytes,
        )

    def as_data(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        steps = self.course.steps
        return {
            "folds": self.course.folds,
            "families": list(self.course.defaults),
            "budget": vars(self.course.budget),
            "steps_a_trial": steps,
            "trials_begun": self.begun,
            "trials": self.left.trials,
            "steps": {"most": self.most_steps, "expected": self.left.steps},
            "at_once": self.at_once,
            "devices_a_trial": self.devices,
            "seconds": self.left.seconds,
            "device_seconds": self.left.device_seconds,
            "bytes": {"weights": self.weight_bytes, "records": self.record_bytes, "images": self.image_bytes},
            "measured": {
                name: {
                    "step": cost.step,
                    "evaluation": cost.evaluation,
                    "epoch_end": cost.epoch_end,
                    "trial": cost.seconds(steps),
                }
                for name, cost in self.costs.items()
            },
            "unmeasured": self.unmeasured,
        }

    def render(self, *, width: int | None = None) -> str:
        """Return the plan as text."""
        course, left = self.course, self.left
        asked = course.budget.trials
        table = Table(box=None, pad_edge=False)
        for name in ("default of", "step", "evaluation", "epoch's end", "whole trial"):
            table.add_column(name, justify="left" if name == "default of" else "right", overflow="fold")
        for name, cost in self.costs.items():
            figures = (cost.step, cost.evaluation, cost.epoch_end)
            table.add_row(escape(name), *(f"{1000 * s:.1f} ms" for s in figures), clock(cost.seconds(course.steps)))
        for name, why in self.unmeasured.items():
            table.add_row(escape(name), escape(f"not measured: {why}"))
        console = Console(file=io.StringIO(), width=width, highlight=False)
        console.print(table)
        trials = f"{asked} trials" if asked is not None else "as many trials as the budget allows"
        there = f", of which {self.begun} have begun" if self.begun else ""
        console.print(
            f"\n{course.folds} folds × {trials}{there}, {len(course.defaults)} families, {course.steps} steps a trial"
        )
        if left.trials is not None and left.steps is not None:
            most = f", {self.most_steps} at most" if self.most_steps is not None else ""
            console.print(f"about {left.trials:.0f} trials and {left.steps:.0f} steps{most}")
        if left.seconds is not None and left.device_seconds is not None:
            console.print(
                f"about {clock(left.seconds)} with {self.at_once} at once, and "
                f"{left.device_seconds / 3600:.2f} device-hours at {self.devices:g} a trial"
            )
        sizes = (self.weight_bytes, self.record_bytes, self.image_bytes)
        console.print("kept: {:.1f} MB of weights, {:.1f} MB of records; cached images {:.1f} MB".format(
            *(size / 1e6 for size in sizes)))  # fmt: skip
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

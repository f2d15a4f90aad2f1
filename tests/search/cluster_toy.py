"""A trial that sleeps, keeps checkpoints and records where it ran; for tests on clusters and of kills."""

import json
import math
import os
import random
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import ray

from dgsearch.search.engine import Assignment, Outcome
from dgsearch.study import append_line, read_lines, write_json
from dgsearch.train import Evaluation, evaluation_steps

STEPS = 100


@dataclass(frozen=True)
class Sleeper:
    """Sleeps before each evaluation. Beside its session's folder it keeps ``runs.jsonl`` and ``reached.jsonl``.

    Where there is a ``gate``, no trial goes beyond a quarter of its steps until that file is there.
    """

    seconds: float
    gate: Path | None = None

    def __call__(self, assignment: Assignment, report) -> Outcome:
        folder = Path(assignment.folder)
        checkpoint = folder / "checkpoint.pt"
        start = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
        run = {
            "session": folder.name,
            "start": start,
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "cwd": os.getcwd(),
        }
        append_line(folder.parent / "runs.jsonl", run)
        level = random.Random(f"{assignment.fold} {assignment.number}").uniform(0.5, 0.9)
        for step in evaluation_steps(STEPS):
            if step < start:
                continue
            if step > start:
                sleep(self.seconds)
                while self.gate is not None and step > STEPS / 4 and not self.gate.exists():
                    sleep(0.1)
                write_json(checkpoint, {"step": step})
                append_line(folder.parent / "reached.jsonl", {"session": folder.name, "step": step})
            accuracy = level * (1 - math.exp(-5 * step / STEPS))
            report(Evaluation(step, {"a": accuracy, "b": accuracy}, {"a": 1.0, "b": 1.0}))
        (folder / "weights.safetensors").write_text(f"{assignment.fold} {assignment.number}")
        return Outcome("complete", weights="weights.safetensors")


def runs(trial: Path) -> list[dict]:
    """Return where a trial ran, in order."""
    return list(read_lines(trial / "runs.jsonl"))


def reached(trial: Path, session: str = "") -> list[int]:
    """Return the steps whose checkpoints a trial wrote, in a session or in all, in order."""
    return [line["step"] for line in read_lines(trial / "reached.jsonl") if session in ("", line["session"])]


def trial_dirs(study: Path) -> list[Path]:
    return sorted(path.parent for path in study.glob("folds/*/trials/*/trial.json"))

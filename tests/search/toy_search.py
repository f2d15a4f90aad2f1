"""A study of folders only, and a trial that trains nothing."""

import math
from pathlib import Path

from dgsearch.domains.layout import DomainIndex
from dgsearch.search.engine import Assignment, Outcome
from dgsearch.search_space import SearchSpace, space_from
from dgsearch.study import Fold, Specification, Study
from dgsearch.train import Evaluation, evaluation_steps

STEPS = 100


def make_space() -> SearchSpace:
    families = [{"name": "erm"}, {"name": "coral", "objective": "coral"}]
    return space_from({"family": families}, name="toy", network="small_cnn", where="toy.toml")


def make_study(path: Path, *, folds: int = 1) -> Study:
    space, names = make_space(), ["a", "b", "c"]
    indexes = [DomainIndex(n, "/", (f"{n}/x/1",), ("x",), ("g",), (1,), 0) for n in names]
    specification = Specification(
        data="/data", fingerprints={i.name: i.fingerprint for i in indexes}, space=space.name, space_hash=space.hash,
        network="small_cnn", resolution=8, steps=STEPS, batch_size=None, seed=0, threads=1, precision="float32",
        folds=tuple(Fold(k, tuple(n for n in names if n != names[k]), (names[k],)) for k in range(folds)),
    )  # fmt: skip
    return Study.create(path, specification, indexes)


class Toy:
    """Its accuracy depends on its learning rate; a step takes ``seconds`` of the clock. It leaves weights and state."""

    def __init__(self, *, seconds: float = 0.0, fails: tuple[int, ...] = (), best: float = 1e-3) -> None:
        self.now = 0.0
        self.best = best
        self.seconds = seconds
        self.fails = fails

    def __call__(self, assignment: Assignment, report) -> Outcome:
        folder = Path(assignment.folder)
        level = 0.8 - 0.1 * abs(math.log10(assignment.recipe["optimizer"]["lr"] / self.best))
        (folder / "checkpoint.pt").write_text("state")
        before = 0
        for step in evaluation_steps(STEPS):
            self.now += (step - before) * self.seconds
            before = step
            if assignment.number in self.fails and step > 10:
                raise RuntimeError("no such thing")
            accuracy = level * (1 - math.exp(-5 * step / STEPS))
            report(Evaluation(step, {"a": accuracy}, {"a": 1.0}, seconds=step * self.seconds))
        (folder / "weights.safetensors").write_text("weights")
        return Outcome("complete", weights="weights.safetensors")

    def clock(self) -> float:
        return self.now

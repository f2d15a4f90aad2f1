"""A search against recorded trials: the recording, searchers of three kinds, and the virtual time they run in.

A trial is not trained: the recorded run of its family with the nearest values stands for it, whole, with what it
reached at each evaluation and the seconds it took (`nearest`). Where a few dozen runs must fill a space of ten
dimensions, all values around a run look alike, and a search that betters what it has by small steps can't; so `trend`
moves the nearest run by what a forest, fitted to the runs of all families, expects of the difference: a recorded run
is still itself, its noise included. What a searcher is told, and when, is as on a cluster of so many workers; asking
and telling take no time.
"""

import gzip
import heapq
import itertools
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import optuna
from sklearn.ensemble import ExtraTreesRegressor

from dgsearch.component import Choice, Range
from dgsearch.domains.layout import DomainIndex
from dgsearch.recipe import encode
from dgsearch.search.engine import Engine, Outcome
from dgsearch.search_space import SearchSpace
from dgsearch.study import Fold, Specification, Study
from dgsearch.train import Evaluation, evaluation_steps


def fields(recipe: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return an encoded recipe's values by `component.field`, as spaces name them."""
    return {
        f"{part.get('kind', slot)}.{name}": value
        for slot, part in recipe.items()
        for name, value in part.items()
        if name != "kind"
    }


def compacted(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a searcher can see of a line that `digits.py curves` wrote."""
    values = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in fields(line["recipe"]).items()}
    found = {"family": line["family"], "draw": line["draw"], "steps": line["steps"], "values": values}
    found["means"] = [round(e["mean"], 5) for e in line["curve"]]
    found["seconds"] = [round(e["seconds"], 2) for e in line["curve"]]
    return found | ({"failed": round(line["seconds"], 2)} if "failed" in line else {})


def read_curves(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a recording, as `digits.py curves` wrote them or compacted (and packed, if `.gz`)."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    return [line if "means" in line else compacted(line) for line in lines]


def write_curves(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write a recording, packed; the same lines give the same file."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


@dataclass(frozen=True)
class Run:
    """A recorded trial: the mean accuracy at each evaluation, the seconds until it, and those until it failed."""

    values: dict[str, Any]
    means: tuple[float, ...]
    seconds: tuple[float, ...]
    failed: float | None = None


OFF = -1.0


def place(value: Any, r: Range) -> float:
    """Return where in a range a value lies, 0 … 1, by its logarithm if the range is so; OFF for an absent one."""
    if isinstance(r, Choice):
        return r.values.index(value) / max(1, len(r.values) - 1)
    if value == 0 and getattr(r, "off", False):
        return OFF
    at = math.log if r.log else float
    return (at(value) - at(r.low)) / (at(r.high) - at(r.low))


def distance(a: Mapping[str, Any], b: Mapping[str, Any], ranges: Mapping[str, Range]) -> float:
    """Return the sum over ranges of two values' distance: of the range's width, or its logarithm's, and 0 … 1.

    Two choices that differ, and a value and its absence, are 1 apart (Gower 1971).
    """
    total = 0.0
    for name, r in ranges.items():
        if a[name] != b[name]:
            x, y = place(a[name], r), place(b[name], r)
            total += 1 if isinstance(r, Choice) or OFF in (x, y) else abs(x - y)
    return total


class Recording:
    """Runs of every family of a space."""

    def __init__(self, lines: list[dict[str, Any]], space: SearchSpace, *, between: str = "nearest") -> None:
        self.space = space
        (self.steps,) = {line["steps"] for line in lines}
        self.evaluations = len(evaluation_steps(self.steps))
        self.runs: dict[str, list[Run]] = {name: [] for name in space.family_names}
        for line in lines:
            run = Run(line["values"], tuple(line["means"]), tuple(line["seconds"]), line.get("failed"))
            if run.failed is None and len(run.means) != self.evaluations:
                raise ValueError(
                    f"a run of {line['family']!r} has {len(run.means)} evaluations, not {self.evaluations}"
                )
            if line["family"] in self.runs:
                self.runs[line["family"]].append(run)
        if missing := [name for name, runs in self.runs.items() if not runs]:
            raise ValueError(f"the recording has no run of {', '.join(missing)}")
        self.trend = Trend(self.runs, space) if between == "trend" else None

    def run(self, family: str, values: Mapping[str, Any]) -> Run:
        """Return what stands for a trial."""
        near = self.nearest(family, values)
        return near if self.trend is None else self.trend.moved(near, family, values)

    def nearest(self, family: str, values: Mapping[str, Any]) -> Run:
        """Return the run of a family that is nearest to some values, the earlier of two as near."""
        ranges = self.space.family(family).ranges
        return min(self.runs[family], key=lambda run: distance(run.values, values, ranges))

    def best(self) -> float:
        """Return the best value that a whole run reaches."""
        return max(max(run.means) for runs in self.runs.values() for run in runs if run.failed is None)


class Trend:
    """What a forest expects of curves and seconds, from runs of all families, which share many fields."""

    def __init__(self, runs: Mapping[str, list[Run]], space: SearchSpace) -> None:
        self.space = space
        self.names = sorted({name for family in space.families for name in family.ranges})
        whole = [(family, run) for family, listed in runs.items() for run in listed if run.failed is None]
        self.forest = ExtraTreesRegressor(200, min_samples_leaf=2, random_state=0)
        self.forest.fit([self.features(f, run.values) for f, run in whole], [self.figures(run) for _, run in whole])

    def features(self, family: str, values: Mapping[str, Any]) -> list[float]:
        ranges = self.space.family(family).ranges
        return [float(family == name) for name in self.space.family_names] + [
            place(values[name], ranges[name]) if name in ranges else OFF for name in self.names
        ]

    def figures(self, run: Run) -> list[float]:
        means = np.clip(run.means, 0.01, 0.999)
        return [*np.log(means / (1 - means)), math.log(run.seconds[-1])]

    def moved(self, run: Run, family: str, values: Mapping[str, Any]) -> Run:
        """Return a run as it would be with other values: accuracies by their odds, seconds by their ratio."""
        if run.failed is not None or run.values == values:
            return run
        there, here = self.forest.predict([self.features(family, v) for v in (run.values, values)])
        *odds, seconds = np.array(self.figures(run)) + here - there
        means = tuple(float(1 / (1 + math.exp(-o))) for o in odds)
        longer = math.exp(seconds) / run.seconds[-1]
        return Run(dict(values), means, tuple(s * longer for s in run.seconds))


class Searcher(Protocol):
    """What is compared. Trials are numbered as they are asked; evaluations from 1."""

    def ask(self) -> tuple[str, dict[str, Any]] | None:
        """Return the next trial's family and values, or None when there is none."""
        ...

    def report(self, number: int, evaluation: int, mean: float, seconds: float) -> bool:
        """Take an evaluation; return whether the trial is to stop."""
        ...

    def tell(self, number: int, state: str) -> None:
        """Take how a trial ended: complete, pruned or failed."""
        ...


@dataclass
class Trace:
    """What came of a search: values, and the device-seconds that all trials had used by then."""

    whole: list[tuple[float, float]] = field(default_factory=list)  # (device-seconds, value of a complete trial)
    seen: list[tuple[float, float]] = field(default_factory=list)  # (device-seconds, value of an evaluation)
    families: list[str] = field(default_factory=list)  # of the trials begun
    states: list[str] = field(default_factory=list)  # of the trials ended
    used: float = 0.0

    def reached(self, value: float, *, any_trial: bool = False) -> float:
        """Return the device-seconds until a value was reached, infinity if it wasn't."""
        return next((used for used, found in (self.seen if any_trial else self.whole) if found >= value), math.inf)

    def best(self, used: float = math.inf) -> float:
        """Return the best value of the trials that were complete by then; 0 if there was none."""
        return max((value for at, value in self.whole if at <= used), default=0.0)


def simulate(searcher: Searcher, recording: Recording, *, workers: int, budget: float = math.inf) -> Trace:
    """Run a search in virtual time until its trials, unfinished ones too, have used the budget of device-seconds."""
    trace = Trace()
    spent = 0.0  # by trials that have ended
    begun: dict[int, float] = {}
    runs: list[Run] = []
    events: list[tuple[float, int, int, int]] = []  # time, which came first of equals, trial, evaluation
    order = itertools.count()

    def begin(now: float) -> None:
        if (asked := searcher.ask()) is not None:
            trace.families.append(asked[0])
            runs.append(recording.run(*asked))
            begun[len(runs) - 1] = now
            wait(len(runs) - 1, 1)

    def wait(number: int, evaluation: int) -> None:
        run = runs[number]
        seconds = run.seconds[evaluation - 1] if evaluation <= len(run.seconds) else run.failed
        heapq.heappush(events, (begun[number] + seconds, next(order), number, evaluation))

    for _ in range(workers):
        begin(0.0)
    while events:
        now, _, number, evaluation = heapq.heappop(events)
        used = spent + sum(now - start for start in begun.values())
        if used > budget:
            break
        trace.used = used
        run = runs[number]
        state = ""
        if evaluation > len(run.means):
            state = "failed"
        else:
            trace.seen.append((used, run.means[evaluation - 1]))
            stop = searcher.report(number, evaluation, run.means[evaluation - 1], run.seconds[evaluation - 1])
            if evaluation == recording.evaluations:
                state = "complete"
                trace.whole.append((used, max(run.means)))
            elif stop:
                state = "pruned"
        if not state:
            wait(number, evaluation + 1)
            continue
        searcher.tell(number, state)
        trace.states.append(state)
        spent += now - begun.pop(number)
        begin(now)
    return trace


def drawn(space: SearchSpace, trial: Any) -> tuple[str, dict[str, Any]]:
    """Return a family and its values, drawn through an Optuna trial."""
    family, recipe = space.suggest(trial)
    return family, fields(encode(recipe.resolve(space.network)))


class RandomSearch:
    """DomainBed's: so many trials, families and values at random, none stopped."""

    def __init__(self, space: SearchSpace, *, seed: int, trials: int) -> None:
        self.space = space
        self.left = trials
        self.study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))

    def ask(self) -> tuple[str, dict[str, Any]] | None:
        if not self.left:
            return None
        self.left -= 1
        return drawn(self.space, self.study.ask())

    def report(self, number: int, evaluation: int, mean: float, seconds: float) -> bool:
        return False

    def tell(self, number: int, state: str) -> None:
        pass


class Stock:
    """Ray Tune's `OptunaSearch` and `ASHAScheduler` as they come, called in the order in which Tune's controller does.

    Iterations are evaluations: `max_t` is their number, grace period and reduction factor are the defaults (1, 4).
    Trial objects have an id, which is all that the scheduler reads. With `defaults`, each family's published defaults
    are the points to evaluate first.
    """

    def __init__(self, space: SearchSpace, *, seed: int, evaluations: int, defaults: bool = False) -> None:
        from ray.tune.schedulers import ASHAScheduler
        from ray.tune.search.optuna import OptunaSearch

        def define(trial: optuna.Trial) -> None:
            space.suggest(trial)

        points = [space.default_parameters(name) for name in space.family_names] if defaults else None
        self.space = space
        self.search = OptunaSearch(define, metric="mean", mode="max", seed=seed, points_to_evaluate=points)
        self.scheduler = ASHAScheduler(metric="mean", mode="max", max_t=evaluations)
        self.trials: list[SimpleNamespace] = []

    def ask(self) -> tuple[str, dict[str, Any]] | None:
        trial = SimpleNamespace(trial_id=f"{len(self.trials):05d}", last_result={})
        self.trials.append(trial)
        with warnings.catch_warnings():  # that drawing was slow: a busy machine, here
            warnings.filterwarnings("ignore", "Define-by-run function passed", UserWarning)
            config = self.search.suggest(trial.trial_id)
        self.scheduler.on_trial_add(None, trial)
        return drawn(self.space, optuna.trial.FixedTrial(config))

    def report(self, number: int, evaluation: int, mean: float, seconds: float) -> bool:
        trial = self.trials[number]
        trial.last_result = {"mean": mean, "training_iteration": evaluation, "trial_id": trial.trial_id}
        stop = self.scheduler.on_trial_result(None, trial, trial.last_result) == self.scheduler.STOP
        if not stop:
            self.search.on_trial_result(trial.trial_id, trial.last_result)
        return stop

    def tell(self, number: int, state: str) -> None:
        trial = self.trials[number]
        if state == "failed":
            self.scheduler.on_trial_error(None, trial)
            self.search.on_trial_complete(trial.trial_id, error=True)
        else:
            self.scheduler.on_trial_complete(None, trial, trial.last_result)
            self.search.on_trial_complete(trial.trial_id, trial.last_result)


class Ours:
    """The engine on a study in a folder of its own, asked and told as its executors do."""

    def __init__(self, space: SearchSpace, *, seed: int, steps: int, folder: Path) -> None:
        self.study = bare_study(folder, space, steps=steps, seed=seed)
        self.engine = Engine(self.study, space, trials=10**6)
        self.at = evaluation_steps(steps)

    def ask(self) -> tuple[str, dict[str, Any]] | None:
        assignment = self.engine.ask()
        if assignment is None:
            return None
        return self.study.trial(0, assignment.number).family, fields(assignment.recipe)

    def report(self, number: int, evaluation: int, mean: float, seconds: float) -> bool:
        return self.engine.report(0, number, Evaluation(self.at[evaluation - 1], {"a": mean}, {}, seconds=seconds))

    def tell(self, number: int, state: str) -> None:
        self.engine.tell(0, number, Outcome(state))


def bare_study(path: Path, space: SearchSpace, *, steps: int, seed: int = 0, classes: int = 10) -> Study:
    """Return a study of one fold whose domains have no images: for trials that train nothing."""
    labels = tuple(f"{k}" for k in range(classes))
    index = DomainIndex("a", "/", tuple(f"a/{k}/1" for k in labels), labels, labels, (1,) * classes, 0)
    specification = Specification(
        data="/", folds=(Fold(0, ("a",), ("b",)),), fingerprints={"a": index.fingerprint}, network=space.network,
        space=space.name, space_hash=space.hash, resolution=8, steps=steps, batch_size=None, seed=seed, threads=1,
        precision="float32",
    )  # fmt: skip
    return Study.create(path, specification, [index])


def searchers(recording: Recording, *, trials: int) -> dict[str, Callable[[int, Path], Searcher]]:
    """Return what is compared, by name: each made from a seed and an empty folder."""
    space, steps, evaluations = recording.space, recording.steps, recording.evaluations
    return {
        "random": lambda seed, folder: RandomSearch(space, seed=seed, trials=trials),
        "stock": lambda seed, folder: Stock(space, seed=seed, evaluations=evaluations),
        "stock, defaults first": lambda seed, folder: Stock(space, seed=seed, evaluations=evaluations, defaults=True),
        "dgsearch": lambda seed, folder: Ours(space, seed=seed, steps=steps, folder=folder),
    }


def search(recording: Recording, name: str, *, seed: int, workers: int, trials: int, budget: float = math.inf) -> Trace:
    """Run one search by name."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        searcher = searchers(recording, trials=trials)[name](seed, Path(folder) / "study")
        return simulate(searcher, recording, workers=workers, budget=budget)


def quantiles(values: list[float]) -> dict[str, float]:
    """Return the median and the 5 % and 95 % quantiles; infinite values are beyond all others."""
    low, median, high = np.quantile(values, (0.05, 0.5, 0.95), method="inverted_cdf")
    return {"median": float(median), "low": float(low), "high": float(high)}

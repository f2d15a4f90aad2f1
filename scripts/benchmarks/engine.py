"""What the search engine costs a trial, and what its search is worth against random search and stock Ray Tune.

    python scripts/benchmarks/engine.py [overhead] [ask] [memory] [quality] [--json FILE]
    python scripts/benchmarks/engine.py quality --curves scripts/benchmarks/digits_curves.jsonl.gz --seeds 20

`overhead`: seconds a trial of 20 reports at two workers of a local Ray cluster, MLflow off and on, between the ends of
two trials (start-up left out). `ask`: seconds of ask and suggest as a fold's study grows. `memory`: how much the
driver's resident memory grows a trial. Their trial is a toy of 25 lines that trains nothing.

`quality` searches recorded runs in virtual time (see `_recorded.py`; `digits.py curves` records them). Random search is
DomainBed's: 20 whole trials, families and values at random. B is the device-seconds it takes and v* the value it ends
with (the best of its whole trials), both medians over `--value-seeds` (over 20 seeds v* may fall on either side of what
ERM's defaults reach). Every other search runs until B device-seconds are used; its cost is the share of B until a trial
that ran to its end has v*. Paired: the same within a seed, against the random search of that seed. Device-seconds are
all trials' seconds, unfinished ones' too.

    python scripts/benchmarks/engine.py --curves CURVES --pack scripts/benchmarks/digits_curves.jsonl.gz

keeps of a recording what a search can see.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from _recorded import Recording, Trace, bare_study, quantiles, read_curves, search, searchers, write_curves
from rich.progress import track

from dgsearch.search.engine import Assignment, Engine, FoldSearch, Outcome, Report
from dgsearch.search.local import run_local
from dgsearch.search_space import read_space
from dgsearch.train import Evaluation, evaluation_steps

PARTS = ("overhead", "ask", "memory", "quality")
BETWEEN = ("nearest", "trend")
NETWORK = "small_cnn"
STEPS = 20  # of a toy trial: as many evaluations
LIMITS = {"overhead": 0.35, "ask": 0.15, "memory": 100.0, "quality": 0.4}


@dataclass(frozen=True)
class Toy:
    """A trial that trains nothing: its accuracy rises to a level that its recipe decides, or is level for all.

    Where it is level for all, no trial is stopped (ties go on), so each makes all its reports.
    """

    level: bool = False

    def __call__(self, assignment: Assignment, report: Report) -> Outcome:
        recipe = assignment.recipe
        value = 0.8 - 0.1 * abs(math.log10(recipe["optimizer"]["lr"]) + 3) - 0.1 * recipe["training"]["dropout"]
        value -= 0.02 * abs(math.log2(recipe["training"]["batch_size"] / 32))
        value += 0.05 * (recipe["objective"]["kind"] == "coral")
        for step in evaluation_steps(STEPS):
            mean = 0.5 if self.level else value * (1 - math.exp(-5 * step / STEPS))
            report(Evaluation(step, {"a": mean, "b": mean}, {"a": 1.0, "b": 1.0}, seconds=float(step)))
        return Outcome("complete")


def overhead(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return seconds a trial on Ray, with MLflow and without, and by how much the driver grew a trial."""
    import ray

    from dgsearch.search.ray_tune import run_ray
    from dgsearch.tracking.writer import Writer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    found: dict[str, Any] = {"trials": options.ray_trials, "reports": STEPS, "workers": 2}
    try:
        for name in ("off", "on"):
            space = read_space("methods", network=NETWORK)
            study = bare_study(folder / f"overhead-{name}", space, steps=STEPS)
            ends: list[tuple[float, float]] = []  # when a trial ended, and the memory then
            with Writer(study) if name == "on" else contextlib.nullcontext() as writer:

                def event(kind: str, record: Any, writer=writer, ends=ends) -> None:
                    if kind == "end":
                        ends.append((time.perf_counter(), resident()))
                    if writer is not None:
                        writer.poke()

                run_ray(
                    Engine(study, space, trials=options.ray_trials, on_event=event), Toy(level=True), max_concurrent=2
                )
            warm = len(ends) // 4
            found[f"seconds_tracking_{name}"] = (ends[-1][0] - ends[warm][0]) / (len(ends) - 1 - warm)
            found[f"kb_tracking_{name}"] = growth([memory for _, memory in ends[warm:]])
    finally:
        ray.shutdown()
    return found


def resident() -> float:
    """Return this process's resident memory in KB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


def growth(memory: list[float]) -> float:
    """Return the slope in KB a trial of the least-squares line through the memory after each trial."""
    return float(np.polyfit(range(len(memory)), memory, 1)[0])


def ask(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the seconds of the asks as a study grows to its last trial."""
    space = read_space("methods", network=NETWORK)
    engine = Engine(bare_study(folder / "ask", space, steps=STEPS), space, trials=options.trials)
    took: list[float] = []
    took_cpu: list[float] = []
    asking = FoldSearch._begin

    def timed(fold: FoldSearch) -> Any:
        began, began_cpu = time.perf_counter(), time.thread_time()
        try:
            return asking(fold)
        finally:
            took.append(time.perf_counter() - began)
            took_cpu.append(time.thread_time() - began_cpu)

    FoldSearch._begin = timed  # type: ignore[method-assign]
    began = time.perf_counter()
    try:
        run_local(engine, Toy())
    finally:
        FoldSearch._begin = asking  # type: ignore[method-assign]
    marks = [n for n in (100, 500, 1000, 2000, 5000) if n < options.trials] + [options.trials]
    by_trials = {n: statistics.median(took[max(0, n - 100) : n]) for n in marks}
    last = took[-min(100, len(took)) :]
    return {
        "trials": options.trials,
        "seconds_by_trials": by_trials,
        "seconds_last": statistics.median(last),
        "seconds_last_95": quantiles(last)["high"],
        "cpu_seconds_last": statistics.median(took_cpu[-len(last) :]),
        "seconds_all": time.perf_counter() - began,
    }


def memory(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return by how much the driver grows a trial of 20 reports, without Ray."""
    space = read_space("methods", network=NETWORK)
    after: list[float] = []

    def event(kind: str, record: Any) -> None:
        if kind == "end":
            after.append(resident())

    engine = Engine(bare_study(folder / "memory", space, steps=STEPS), space, trials=options.trials, on_event=event)
    run_local(engine, Toy(level=True))
    first = options.trials // 10
    return {"trials": options.trials, "from_trial": first, "kb_a_trial": growth(after[first:])}


def _one(recording: Recording, name: str, seed: int, workers: int, trials: int, budget: float) -> Trace:
    return search(recording, name, seed=seed, workers=workers, trials=trials, budget=budget)


def quality(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what each search costs until it has what random search ends with."""
    lines = read_curves(options.curves)
    sizes = {line["values"]["training.batch_size"] for line in lines}  # one, if it was not searched
    space = read_space(options.space, network=NETWORK, batch_size=sizes.pop() if len(sizes) == 1 else None)
    recording = Recording(lines, space, between=options.between)
    found: dict[str, Any] = {"curves": options.curves.name, "runs": sum(map(len, recording.runs.values()))}
    found["between"] = options.between
    found |= {
        "seeds": options.seeds,
        "value_seeds": options.value_seeds,
        "random_trials": options.random_trials,
        "best_recorded": recording.best(),
    }
    with contextlib.ExitStack() as stack:
        if options.processes > 1:
            pool = stack.enter_context(ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")))
            run: Callable = pool.map
        else:
            run = map

        def traces(name: str, workers: int, n: int, budget: float = math.inf) -> list[Trace]:
            jobs = ([recording] * n, [name] * n, range(n), [workers] * n, [options.random_trials] * n, [budget] * n)
            return list(track(run(_one, *jobs), total=n, description=f"{name}, {workers} workers"))

        for workers in options.workers:
            random = traces("random", workers, max(options.seeds, options.value_seeds))
            value, budget = (statistics.median(v) for v in ([t.best() for t in random], [t.used for t in random]))
            random = random[: options.seeds]
            rows = {"random": summary(random, random, value, budget, recording)}
            for name in searchers(recording, trials=options.random_trials):
                if name != "random":
                    longest = max(budget, *(t.used for t in random))
                    rows[name] = summary(
                        traces(name, workers, options.seeds, longest), random, value, budget, recording
                    )
            found[f"workers_{workers}"] = {"value": value, "device_seconds": budget, "searches": rows}
    return found


def summary(traces: list[Trace], random: list[Trace], value: float, budget: float, recording: Recording) -> dict:
    """Return one search's figures over seeds: shares of B, values, trials."""

    def share(reached: float, whole: float) -> float:
        return reached / whole if reached <= whole else math.inf

    shares = [share(t.reached(value), budget) for t in traces]
    paired = [share(t.reached(r.best()), r.used) for t, r in zip(traces, random, strict=True)]
    by_any = [share(t.reached(value, any_trial=True), budget) for t in traces]
    return {
        "share": quantiles(shares),
        "share_paired": quantiles(paired),
        "share_any_trial": quantiles(by_any),
        "reached": sum(map(math.isfinite, shares)) / len(shares),
        "reached_paired": sum(map(math.isfinite, paired)) / len(paired),
        "best_at": {f"{part:g}": quantiles([t.best(part * budget) for t in traces]) for part in (0.25, 0.4, 0.5, 1)},
        "trials": quantiles([float(len(t.families)) for t in traces]),
        "complete": quantiles([float(t.states.count("complete")) for t in traces]),
        "fewest_families": min(len(set(t.families)) for t in traces),
        "families": len(recording.runs),
    }


def told(part: str, found: dict[str, Any]) -> str:
    """Return a part's figures as text."""
    limit = f"required: at most {LIMITS[part]:g}"
    if part == "overhead":
        return "\n".join(
            f"overhead, MLflow {name}: {found[f'seconds_tracking_{name}']:.3f} s a trial of {STEPS} reports, 2 workers "
            f"({limit}); driver {found[f'kb_tracking_{name}']:+.0f} KB a trial"
            for name in ("off", "on")
        )
    if part == "ask":
        grown = ", ".join(f"{s:.3f} s at {n}" for n, s in found["seconds_by_trials"].items())
        return (
            f"ask and suggest: {grown} trials ({limit} at 2000); of the last 100, 95 % below "
            f"{found['seconds_last_95']:.3f} s, CPU {found['cpu_seconds_last']:.3f} s; the whole search "
            f"{found['seconds_all']:.0f} s"
        )
    if part == "memory":
        return (
            f"driver: {found['kb_a_trial']:+.1f} KB a trial of {STEPS} reports, from trial {found['from_trial']} to "
            f"{found['trials']} ({limit})"
        )
    heads = ["search", "share of B until v*", "paired", "v* in any trial", "had v* by B", "best at .25, .4, .5, 1 B"]
    heads += ["trials (complete)", "families tried"]
    lines = [
        f"{found['runs']} runs ({found['between']}), {found['seeds']} seeds, best run {found['best_recorded']:.4f}"
    ]
    for key, at in found.items():
        if not key.startswith("workers_"):
            continue
        rows = [heads, ["---"] * len(heads)]
        for name, row in at["searches"].items():
            cells = [name, *(_percent(row[k]) for k in ("share", "share_paired", "share_any_trial"))]
            cells += [f"{row['reached']:.0%}", " ".join(f"{q['median']:.4f}" for q in row["best_at"].values())]
            cells += [f"{row['trials']['median']:.0f} ({row['complete']['median']:.0f})"]
            rows.append([*cells, f"{row['fewest_families']} of {row['families']}"])
        lines += [
            f"{key.removeprefix('workers_')} workers: random search's {found['random_trials']} trials take B = "
            f"{at['device_seconds']:.0f} device-seconds and end with v* = {at['value']:.4f}; dgsearch is required "
            f"to have it by {LIMITS[part]:.0%} of B, and before stock",
            "",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
        ]
    return "\n".join(lines)


def _finite(found: Any) -> Any:
    """Return figures with none for what is infinite: JSON has no such number."""
    if isinstance(found, dict):
        return {key: _finite(value) for key, value in found.items()}
    return None if isinstance(found, float) and math.isinf(found) else found


def _percent(q: dict[str, float]) -> str:
    low, median, high = (f"{q[k]:.0%}" if math.isfinite(q[k]) else "> 100%" for k in ("low", "median", "high"))
    return f"{median} [{low}, {high}]"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="part", help=f"of {', '.join(PARTS)}; all if none")
    parser.add_argument("--trials", type=int, default=2000, help="of ask and memory")
    parser.add_argument("--ray-trials", type=int, default=80, help="of overhead")
    parser.add_argument("--curves", type=Path, default=Path(__file__).with_name("digits_curves.jsonl.gz"))
    parser.add_argument("--space", default="methods", help="of the recording")
    parser.add_argument("--between", choices=BETWEEN, default="nearest", help="what unrecorded values give")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--value-seeds", type=int, default=200, help="of random search, for v* and B")
    parser.add_argument("--random-trials", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="of quality")
    parser.add_argument("--processes", type=int, default=1, help="that quality's seeds are shared among")
    parser.add_argument("--pack", type=Path, help="write the recording to this file, and end")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if options.pack:
        write_curves(options.pack, read_curves(options.curves))
        return
    measure: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
        "overhead": overhead, "ask": ask, "memory": memory, "quality": quality,
    }  # fmt: skip
    found = {}
    for part in options.parts:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="engine-") as folder:
            found[part] = measure[part](options, Path(folder)) | {"load": load}
        print(told(part, found[part]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(_finite(found), indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()

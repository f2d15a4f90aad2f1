"""The engine's benchmark: the recording's look-up and the virtual time on a recording made by hand, and a tiny run."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts/benchmarks"))

import engine as benchmark
from _recorded import Recording, Stock, compacted, distance, read_curves, simulate

from dgsearch.component import Choice, Float, Int
from dgsearch.objectives.coral import Coral
from dgsearch.recipe import encode
from dgsearch.search_space import space_from
from dgsearch.train import evaluation_steps

SPACE = space_from(
    {"family": [{"name": "erm"}, {"name": "coral", "objective": "coral"}]},
    name="toy", network="small_cnn", where="toy.toml",
)  # fmt: skip
DEFAULTS = {"erm": SPACE.family("erm").defaults, "coral": SPACE.family("coral").defaults}


def line(family, means, *, seconds=1.0, failed=None, **values):
    """A recorded run, a constant number of seconds an evaluation."""
    renamed = {name.replace("__", "."): value for name, value in values.items()}
    found = {"family": family, "steps": 20, "values": DEFAULTS[family] | renamed, "means": means}
    found["seconds"] = [seconds * (k + 1) for k in range(len(means))]
    return found | ({} if failed is None else {"failed": failed})


def test_distances_are_shares_of_a_range_and_1_between_choices_and_from_off():
    ranges = {"a": Float(1e-4, 1, log=True), "b": Float(2, 4, off=True), "c": Choice(("x", "y")), "d": Int(0, 10)}
    base = {"a": 1e-4, "b": 2.0, "c": "x", "d": 0}
    assert distance(base, base, ranges) == 0
    assert distance(base, base | {"a": 1e-2}, ranges) == pytest.approx(0.5)
    assert distance(base, base | {"b": 2.5}, ranges) == pytest.approx(0.25)
    assert distance(base, base | {"b": 0}, ranges) == 1 and distance(base, base | {"c": "y"}, ranges) == 1
    assert distance(base, {"a": 1.0, "b": 4.0, "c": "y", "d": 3}, ranges) == pytest.approx(3.3)


def test_the_nearest_run_is_of_the_family_and_nearest_where_ranges_are_logarithmic():
    lines = [line("erm", [0.1] * 20, adam__lr=lr) for lr in (1e-4, 1e-3)] + [line("coral", [0.2] * 20)]
    recording = Recording(lines, SPACE)
    runs = recording.runs["erm"]
    # 4e-4 is nearer to 1e-4 by difference, and to 1e-3 by ratio.
    assert recording.nearest("erm", DEFAULTS["erm"] | {"adam.lr": 4e-4}) is runs[1]
    assert recording.nearest("erm", DEFAULTS["erm"] | {"adam.lr": 2e-4}) is runs[0]
    assert recording.nearest("coral", DEFAULTS["coral"] | {"adam.lr": 1e-4}) is recording.runs["coral"][0]
    with pytest.raises(ValueError, match="no run of coral"):
        Recording(lines[:2], SPACE)
    with pytest.raises(ValueError, match="a run of 'erm' has 19 evaluations, not 20"):
        Recording([line("erm", [0.1] * 19)], SPACE)


def test_the_trend_moves_a_run_as_others_have_it_and_leaves_recorded_ones_as_they_are():
    def level(lr):
        return [0.5 + 0.1 * math.log10(lr / 1e-4)] * 20

    rates = [10 ** (-4.4 + 0.1 * k) for k in range(19)]
    lines = [line("erm", level(lr), seconds=lr, adam__lr=lr) for lr in rates]
    lines += [line("coral", [v - 0.1 for v in level(1e-4)], seconds=1e-4, adam__lr=1e-4)]
    nearest, trend = (Recording(lines, SPACE, between=b) for b in ("nearest", "trend"))
    for recording in (nearest, trend):
        assert recording.run("erm", DEFAULTS["erm"] | {"adam.lr": rates[3]}) is recording.runs["erm"][3]
    asked = ("coral", DEFAULTS["coral"] | {"adam.lr": 1e-3})
    assert nearest.run(*asked).means[0] == pytest.approx(0.4)
    moved = trend.run(*asked)  # coral has one run, and ERM's say what a higher rate gives
    assert 0.45 < moved.means[-1] < 0.53 and 3e-4 < moved.seconds[0] < 2e-3
    assert trend.runs["coral"][0].means[0] == pytest.approx(0.4)


class Script:
    """Asks for given trials, stops some at an evaluation, and notes what it is told."""

    def __init__(self, asked, stop):
        self.asked, self.stop, self.told = list(asked), stop, []

    def ask(self):
        return self.asked.pop(0) if self.asked else None

    def report(self, number, evaluation, mean, seconds):
        self.told.append((number, evaluation, mean, seconds))
        return self.stop.get(number) == evaluation

    def tell(self, number, state):
        self.told.append((number, state))


def test_virtual_time_orders_what_a_searcher_is_told_and_counts_device_seconds():
    rising = [0.01 * k for k in range(1, 21)]
    lines = [
        line("erm", rising, seconds=2.0, adam__lr=1e-3),  # 40 s
        line("erm", [0.5] * 20, seconds=3.0, adam__lr=1e-4),  # 60 s
        line("coral", [0.3, 0.3], seconds=1.0, failed=2.5),
    ]
    recording = Recording(lines, SPACE)
    slow, quick = (DEFAULTS["erm"] | {"adam.lr": lr} for lr in (1e-4, 1e-3))
    asked = [("erm", quick), ("erm", slow), ("coral", DEFAULTS["coral"]), ("erm", quick)]
    searcher = Script(asked, stop={1: 2, 3: 20})
    trace = simulate(searcher, recording, workers=2)
    # By hand: trial 0 reports at 2, 4 … 40; 1 at 3 and 6, where it stops; 2 from 6: 7, 8, fails at 8.5; 3 from 8.5.
    # At 6 both report: trial 1, which has waited since 3, before trial 0, since 4.
    assert searcher.told[:11] == [
        (0, 1, 0.01, 2.0), (1, 1, 0.5, 3.0), (0, 2, 0.02, 4.0), (1, 2, 0.5, 6.0), (1, "pruned"), (0, 3, 0.03, 6.0),
        (2, 1, 0.3, 1.0), (0, 4, 0.04, 8.0), (2, 2, 0.3, 2.0), (2, "failed"), (0, 5, 0.05, 10.0),
    ]  # fmt: skip
    assert trace.states == ["pruned", "failed", "complete", "complete"]
    assert trace.families == ["erm", "erm", "coral", "erm"]
    # Trial 0 ends at 40: 40 of its own, 6 and 2.5 of the ended ones, 31.5 of trial 3, which ends at 48.5 after 40 s.
    assert trace.whole == [(pytest.approx(80.0), pytest.approx(0.2)), (pytest.approx(88.5), pytest.approx(0.2))]
    assert trace.used == pytest.approx(88.5)
    assert trace.reached(0.2) == pytest.approx(80.0) and trace.reached(0.5) == math.inf
    assert trace.reached(0.5, any_trial=True) == pytest.approx(6.0)  # at 3 s, by both workers
    assert trace.best() == pytest.approx(0.2) and trace.best(79.0) == 0.0
    short = simulate(Script(asked, stop={1: 2}), recording, workers=2, budget=79.0)
    assert short.whole == [] and short.used <= 79.0


def test_stock_ray_tune_stops_by_its_own_rungs_and_tells_optuna_the_last_value():
    stock = Stock(SPACE, seed=0, evaluations=20)
    for _ in range(2):
        family, values = stock.ask()
        assert family in ("erm", "coral") and values["training.batch_size"] >= 8
    assert [stock.report(0, k, 0.5, 1.0) for k in range(1, 5)] == [False] * 4
    assert stock.report(1, 1, 0.4, 1.0)  # below the only value at the rung of 1
    stock.tell(1, "pruned")
    assert [stock.report(0, k, 0.5, 1.0) for k in range(5, 21)] == [False] * 15 + [True]  # max_t
    stock.tell(0, "complete")
    trials = stock.search._ot_study.trials
    assert [(t.state.name, t.value) for t in trials] == [("COMPLETE", 0.5), ("COMPLETE", 0.4)]


def recorded(family, draw):
    """A line as `digits.py curves` writes it."""
    lr = 10 ** (-4.4 + 0.19 * draw)
    objective = {"kind": "erm"} if family == "erm" else asdict(Coral()) | {"kind": "coral"}
    recipe = encode(SPACE.default_recipe()) | {"objective": objective}
    recipe["optimizer"]["lr"] = lr
    level = 0.9 - 0.05 * abs(math.log10(lr) + 2.8)
    curve = [{"step": k, "mean": level * (1 - math.exp(-k / 5)), "seconds": k * 0.7} for k in evaluation_steps(20)]
    found = {"family": family, "draw": draw, "held_out": "c", "seed": 0, "steps": 20, "recipe": recipe}
    return found | {"parameters": {"family": family, f"{family}.adam.lr": lr}, "curve": curve, "seconds": 14.2}


def test_quality_runs_on_a_tiny_recording(tmp_path, capsys):
    lines = [recorded(family, draw) for draw in range(10) for family in ("erm", "coral")]
    curves = tmp_path / "curves.jsonl"
    curves.write_text("".join(json.dumps(line) + "\n" for line in lines))
    benchmark.main(["--curves", str(curves), "--pack", str(tmp_path / "packed.jsonl.gz")])
    assert read_curves(curves) == [compacted(line) for line in lines] == read_curves(tmp_path / "packed.jsonl.gz")
    space = tmp_path / "two.toml"
    space.write_text('[[family]]\nname = "erm"\n[[family]]\nname = "coral"\nobjective = "coral"\n')
    out = tmp_path / "found.json"
    arguments = [
        "quality",
        "--curves",
        str(curves),
        "--space",
        str(space),
        "--seeds",
        "2",
        "--value-seeds",
        "2",
        "--random-trials",
        "6",
    ]
    benchmark.main([*arguments, "--json", str(out)])
    found = json.loads(out.read_text())["quality"]
    assert found["runs"] == 20
    assert found["best_recorded"] == pytest.approx(lines[16]["curve"][-1]["mean"], abs=1e-4)
    at = found["workers_2"]
    assert 0 < at["value"] <= found["best_recorded"] and at["device_seconds"] == pytest.approx(6 * 14.0)
    assert list(at["searches"]) == ["random", "stock", "stock, defaults first", "dgsearch"]
    assert at["searches"]["dgsearch"]["fewest_families"] == 2
    assert at["searches"]["random"]["reached"] >= 0.5  # its own median
    assert "| dgsearch |" in capsys.readouterr().out

"""Figures that the built-in set must keep, at 600 steps (run with -m slow)."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from dgsearch.search_space import read_space
from dgsearch.study import Study, read_lines


@pytest.fixture
def python(tmp_path):
    """Run a script or module in the test's folder; return what it prints."""

    def run(*arguments):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, check=True)
        return done.stdout

    return run


@pytest.mark.slow
def test_erm_at_its_defaults_reaches_the_known_figures(tmp_path, python):
    """Some six minutes on two cores."""

    def dgsearch(*arguments):
        return python("-m", "dgsearch", *arguments)

    dgsearch("data", "build", "digits", "--out", "digits")
    dgsearch("search", "--data", "digits", "--space", "quick", "--study", "s", "--trials", "1", "--steps", "600")
    dgsearch("select", "s")
    report = json.loads(dgsearch("evaluate", "s", "--json"))
    assert len(report["folds"]) == 4
    for number, fold in enumerate(report["folds"]):
        best = Study.open(tmp_path / "s").trial(number, 0).best
        assert best.mean == fold["source_accuracy"] >= 0.78, fold
        assert best.accuracy.get("mnist", 1) >= 0.93, fold
        assert best.accuracy.get("optdigits", 1) >= 0.80, fold
        if fold["held_out"] == ["syn"]:
            assert fold["target_accuracy"] <= 0.5


@pytest.mark.slow
def test_every_family_trains_at_its_defaults_whatever_is_held_out(tmp_path, python):
    """Three seeds of four folds of ten families: an hour on two cores. What it prints is in docs/LAB.md."""
    script = Path(__file__).parents[1] / "scripts/benchmarks/digits.py"
    python("-m", "dgsearch", "data", "build", "digits", "--out", "digits")
    table = python(script, "table", "table.jsonl", "--data", "digits")
    lines = list(read_lines(tmp_path / "table.jsonl"))
    families = read_space("methods", network="small_cnn").family_names
    assert len(lines) == 3 * 4 * len(families) and not [line for line in lines if "failed" in line]
    for family in families:
        mean = statistics.fmean(line["source"] for line in lines if line["family"] == family)
        # Genie's published learning rate is for pretrained networks.
        assert mean >= (0.75 if family == "genie" else 0.92), (family, mean)
        assert f"| {family} | {mean:.3f} ±" in table

"""Figures that the built-in set must keep: ERM at its defaults, 600 steps (some six minutes; run with -m slow)."""

import json
import subprocess
import sys

import pytest

from dgsearch.study import Study


@pytest.mark.slow
def test_erm_at_its_defaults_reaches_the_known_figures(tmp_path):
    def dgsearch(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "dgsearch", *arguments], capture_output=True, text=True, cwd=tmp_path, check=True
        )
        return done.stdout

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

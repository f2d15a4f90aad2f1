"""What is kept of trials that ended: weights of the best, no state, no empty folders; and never less."""

import pytest
from toy_search import Toy, make_space, make_study

from dgsearch import selection
from dgsearch.search import engine as engine_module
from dgsearch.search.engine import Engine
from dgsearch.search.local import run_local
from dgsearch.search.retention import Complete, kept


def finish(study, *, trials, keep="best", best=1e-3, on_event=lambda kind, record: None):
    run_local(Engine(study, make_space(), trials=trials, keep=keep, on_event=on_event), Toy(best=best))


def without_stops(monkeypatch):
    monkeypatch.setattr(engine_module, "stops", lambda value, recorded: False)


def weights(study) -> set[int]:
    return {int(p.parent.parent.name) for p in study.path.glob("folds/0/trials/*/*/weights.safetensors")}


def expected(study) -> set[int]:
    """The top five and the best a family, plainly."""
    trials = sorted((t for t in study.trials(0) if t.state == "complete"), key=lambda t: (-t.best.mean, t.number))
    best = {name: min(t.number for t in trials if t.family == name and t.best.mean == max(
        u.best.mean for u in trials if u.family == name)) for name in {t.family for t in trials}}  # fmt: skip
    return {t.number for t in trials[:5]} | set(best.values())


def test_the_top_five_and_the_best_of_each_family_are_kept():
    trials = [Complete(n, "erm", (0.9 - n / 100,)) for n in range(8)]
    assert kept(trials) == {0, 1, 2, 3, 4}
    assert kept([*trials, Complete(8, "coral", (0.1,)), Complete(9, "coral", (0.1,))]) == {0, 1, 2, 3, 4, 8}
    assert kept([*trials, Complete(8, "coral", (0.9,))]) == {0, 8, 1, 2, 3}  # the earlier of equals first
    assert kept([]) == set()


def test_weights_of_the_best_are_kept_at_every_moment_and_no_state(tmp_path, monkeypatch):
    without_stops(monkeypatch)
    study = make_study(tmp_path / "s")
    seen = []

    def look(kind, record):
        if kind == "end":
            assert weights(study) == expected(study)
            assert study.trial(0, selection._best(study.folds[0], [t for t in study.trials(0) if t.state == "complete"],
                                                  selection.training_domain).trial).weights is not None  # fmt: skip
            seen.append(record.number)

    finish(study, trials=14, on_event=look)
    assert len(seen) == 14 and len(weights(study)) < 14
    assert not list(study.path.glob("folds/**/*.pt"))
    for t in study.trials(0):
        assert (t.weights is not None) == (t.number in weights(study))
        assert [p.name for p in t.folder.iterdir() if p.is_dir()] == (["0001"] if t.weights else [])


def test_a_driver_killed_before_it_tidied_up_is_followed_by_one_that_does(tmp_path, monkeypatch):
    without_stops(monkeypatch)
    study = make_study(tmp_path / "s")

    class Killed(BaseException):
        pass

    def kill(record, *, keep_weights):
        if record.number == 8:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "tidy", kill)
        with pytest.raises(Killed):
            finish(study, trials=14)
    assert len(weights(study)) == 9 and len(list(study.path.glob("folds/**/*.pt"))) == 9
    finish(study, trials=9)
    assert weights(study) == expected(study) and not list(study.path.glob("folds/**/*.pt"))
    before = sorted(study.path.glob("folds/**/*"))
    finish(study, trials=9)
    assert sorted(study.path.glob("folds/**/*")) == before


def test_a_selected_trials_weights_stay_though_better_ones_come(tmp_path, monkeypatch):
    without_stops(monkeypatch)
    study = make_study(tmp_path / "s")
    finish(study, trials=2, best=1e-2)
    chosen = selection.select(study).folds[0].trial
    finish(study, trials=20, best=1e-2)
    assert chosen not in expected(study)  # or this shows nothing
    assert weights(study) == expected(study) | {chosen}


def test_all_are_kept_when_asked_for(tmp_path, monkeypatch):
    without_stops(monkeypatch)
    study = make_study(tmp_path / "s")
    finish(study, trials=12, keep="all")
    assert weights(study) == set(range(12)) and not list(study.path.glob("folds/**/*.pt"))
    finish(study, trials=12)
    assert weights(study) == expected(study)
    with pytest.raises(ValueError, match="unknown choice of weights to keep 'some'"):
        finish(study, trials=12, keep="some")


def test_weights_that_are_gone_are_said_to_be_and_how_to_have_them_again(tmp_path, monkeypatch):
    without_stops(monkeypatch)
    study = make_study(tmp_path / "s")
    finish(study, trials=12)
    gone = min(set(range(12)) - weights(study))
    trial = study.trial(0, gone)
    one = selection.Selected(("a",), ("b", "c"), gone, trial.family, trial.recipe, 0.5, 100)
    with pytest.raises(
        ValueError, match=rf"are missing: .*--keep all.*dgsearch train .*/{gone:04d}/trial.json --data /data"
    ):
        selection.selected_trial(study, study.folds[0], one)

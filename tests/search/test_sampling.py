"""What a trial is given in advance: floors, the random baseline, an older study's recipes, the deploy fold's."""

import dataclasses
import json
import math

import pytest
from test_engine import FAMILIES, assert_whole, make_space, make_study, summary

from dgsearch.domains.layout import DomainIndex
from dgsearch.line import plan_folds
from dgsearch.recipe import decode, encode
from dgsearch.report.snapshot import Course
from dgsearch.search.engine import Assignment, Engine, Outcome, run_guarded
from dgsearch.search.local import _report, run_local
from dgsearch.search.warm import warm
from dgsearch.search_space import space_from
from dgsearch.selection import select
from dgsearch.study import Fold, Specification, Study
from dgsearch.train import Evaluation


def toy(assignment: Assignment, report) -> Outcome:
    """A trial of three evaluations; the best learning rate is not the default, and differs between folds."""
    optimizer, objective = assignment.recipe["optimizer"], assignment.recipe["objective"]["kind"]
    level = 0.8 - 0.1 * abs(math.log10(optimizer["lr"]) + 3.6 + 0.2 * assignment.fold) + 0.05 * (objective == "coral")
    for step in (10, 30, 100):
        accuracy = level * (1 - math.exp(-step / 20))
        report(Evaluation(step, {"a": accuracy, "b": accuracy}, {"a": 1.0, "b": 1.0}))
    return Outcome("complete")


def finish(study, space, *, trials):
    run_local(Engine(study, space, trials=trials), toy)


def study_of(path, space, folds, *, contents=None):
    """A study whose folds are (sources, held out); its domains hold what their names, or ``contents``, say."""
    folds = tuple(Fold(k, tuple(s), tuple(h)) for k, (s, h) in enumerate(folds))
    names = sorted({name for fold in folds for name in fold.sources})
    like = {n: (contents or {}).get(n, n) for n in names}  # the size of its file tells one content from another
    indexes = [DomainIndex(n, "/", (f"{n}/x/1",), ("x",), ("g",), (ord(like[n]),), 0) for n in names]
    specification = Specification(
        data="/data", fingerprints={i.name: i.fingerprint for i in indexes}, space=space.name, space_hash=space.hash,
        network="small_cnn", resolution=8, steps=100, batch_size=None, seed=0, threads=1, precision="float32",
        folds=folds,
    )  # fmt: skip
    return Study.create(path, specification, indexes)


def families(study, fold=0):
    return [t.family for t in study.trials(fold)]


def run(study, space, *, trials, older=None, **options):
    engine = Engine(study, space, trials=trials, **options)
    said = warm(engine, older)
    run_local(engine, toy)
    return said


def test_the_floor_is_as_asked_for_and_may_change_between_sessions(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    run(study, space, trials=9, floor=1)
    first = families(study)
    run(study, space, trials=36, floor=5)  # nine turns of the floors
    assert families(study)[:9] == first
    assert min(first.count(f) for f in ("erm", "coral", "sgd")) < 5
    after = families(study)
    assert min(after.count(f) for f in ("erm", "coral", "sgd")) >= 5
    fewest = {n: min(("erm", "coral", "sgd"), key=after[:n].count) for n in range(9, 36, 3)}  # of the turns
    owed = {n: family for n, family in fewest.items() if after[:n].count(family) < 5}
    assert owed and owed == {n: after[n] for n in owed}
    with pytest.raises(ValueError, match="unknown sampler 'bayes'; known: random, tpe"):
        Engine(study, space, trials=1, sampler="bayes")
    with pytest.raises(ValueError, match="the floor is a number of trials a family, not -1"):
        Engine(study, space, trials=1, floor=-1)


def test_random_draws_families_uniformly_and_values_whatever_was_found(tmp_path):
    space = make_space()
    good, bad = (make_study(tmp_path / name, space, folds=1) for name in ("good", "bad"))
    run(good, space, trials=24, sampler="random", floor=0)

    def worse(assignment, report):
        return toy(assignment, lambda e: report(type(e)(e.step, {"a": 1 - e.accuracy["a"]}, e.loss)))

    run_local(Engine(bad, space, trials=24, sampler="random", floor=0), worse)
    assert [t.recipe for t in good.trials(0)] == [t.recipe for t in bad.trials(0)]
    counts = [families(good)[3:].count(f) for f in ("erm", "coral", "sgd")]
    assert sum(counts) == 21 and min(counts) >= 3
    assert_whole(good, trials=24)


def test_parameters_of_a_recipe_draw_that_recipe(tmp_path):
    import optuna

    space = make_space([{"name": "both", "objective": ["erm", "coral"], "optimizer": "sam"}, *FAMILIES])
    study = make_study(tmp_path / "s", space, folds=1)
    finish(study, space, trials=12)
    for trial in study.trials(0):
        parameters = space.parameters_of(trial.family, trial.recipe)
        assert json.loads(json.dumps(parameters)) == parameters
        family, recipe = space.suggest(optuna.trial.FixedTrial(parameters))
        assert (family, encode(recipe)) == (trial.family, trial.recipe)
    for family in space.families:
        parameters = space.default_parameters(family.name)
        _, recipe = space.suggest(optuna.trial.FixedTrial(parameters))
        assert space.parameters_of(family.name, encode(recipe.resolve("small_cnn"))) == parameters
    coral = encode(decode({"objective": {"kind": "coral", "weight": 5.0}}).resolve("small_cnn"))
    narrow = make_space([{"name": "coral", "objective": "coral", "ranges": {"coral.weight": {"low": 0.1, "high": 2}}}])
    fixed = make_space([{"name": "coral", "objective": "coral", "ranges": {"coral.weight": 1.0}}])
    assert narrow.parameters_of("coral", coral) is None and fixed.parameters_of("coral", coral) is None
    assert make_space([FAMILIES[0]]).parameters_of("coral", coral) is None
    other = make_space([{"name": "another", "objective": "coral"}]).parameters_of("coral", coral)
    assert other["family"] == "another" and other["another.coral.weight"] == 5.0


def test_an_older_studys_best_follow_the_defaults_and_are_kept_here(tmp_path):
    space = make_space()
    older = study_of(tmp_path / "older", space, [("ab", "c"), ("bc", "a")])
    finish(older, space, trials=10)
    study = study_of(tmp_path / "s", space, [("de", "f"), ("ef", "d")])
    said = run(study, space, trials=5, older=older.path)
    assert said == f"5 recipes of {older.path} are tried after the defaults"
    ranked = [sorted((t for t in older.trials(n) if t.state == "complete"), key=lambda t: -t.best.mean) for n in (0, 1)]
    known = [t.recipe for t in older.trials(0)[:3]]
    expected = []
    for place in range(5):
        for trials in ranked:
            if place < len(trials) and trials[place].recipe not in known + expected:
                expected.append(trials[place].recipe)
    for fold in (0, 1):
        assert [t.recipe for t in study.trials(fold)[3:5]] == expected[:2]
        assert [t.queued for t in study.trials(fold)] == [None] * 3 + [0, 1]
    older.path.rename(tmp_path / "gone")
    assert run(study, space, trials=9) is None  # goes on from its own record
    assert [t.queued for t in study.trials(0)] == [None] * 3 + [0, 1, 2, 3, 4] + [None]
    assert [t.recipe for t in study.trials(0)[3:8]] == expected[:5]
    assert_whole(study, trials=9)
    another = study_of(tmp_path / "another", space, ["ab"])
    with pytest.raises(ValueError, match="was begun with .*older, and can't be with another too"):
        run(study, space, trials=9, older=another.path)


def test_no_fold_learns_from_a_study_that_knew_what_it_holds_out(tmp_path):
    space = make_space()
    older = study_of(tmp_path / "older", space, [("ab", "c")])
    finish(older, space, trials=9)
    # By name.
    study = study_of(tmp_path / "1", space, [("cd", "a")])
    with pytest.raises(ValueError, match="has learned from a, held out here: its recipes may not be used"):
        run(study, space, trials=5, older=older.path)
    assert not (study.path / "warm_start.json").exists() and not list(study.path.glob("folds/*/queue.json"))
    # By its files, where another fold has the domain as a source: `x` is what was called `a`.
    study = study_of(tmp_path / "2", space, [("dy", "x"), ("dx", "y")], contents={"x": "a"})
    said = run(study, space, trials=5, older=older.path)
    assert said.endswith("; folds that hold out x may not know them")
    assert [t.queued for t in study.trials(0)] == [None] * 5 and study.trials(1)[3].queued == 0
    # What the older one was itself begun with: `2` has seen a and b through `older`.
    third = study_of(tmp_path / "3", space, [("pq", "b")])
    with pytest.raises(ValueError, match="has learned from b"):
        run(third, space, trials=5, older=study.path)
    # A domain that the older one held out is not one that it learned from; a fold that holds nothing out may know all.
    fourth = study_of(tmp_path / "4", space, [("de", "c"), ("abc", "")])
    assert "recipes of" in run(fourth, space, trials=4, older=older.path)
    with pytest.raises(ValueError, match="names the study itself"):
        run(older, space, trials=9, older=older.path)
    with pytest.raises(ValueError, match="no study at"):
        run(third, space, trials=5, older=tmp_path / "nowhere")


def test_what_lies_outside_the_space_is_left_out_and_counted(tmp_path):
    space = make_space()
    older = study_of(tmp_path / "older", space, [("ab", "c")])
    finish(older, space, trials=12)
    narrow = space_from({"family": FAMILIES[:1]}, name="toy", network="small_cnn", where="toy.toml")
    study = study_of(tmp_path / "s", narrow, [("de", "f")])
    said = run(study, narrow, trials=3, older=older.path)
    outside = sum(t.family != "erm" for t in older.trials(0) if t.state == "complete")
    assert outside and f"; {outside} trials lie outside this search space and are left out" in said


def test_the_deploy_fold_begins_with_what_the_others_found_and_they_learn_nothing_from_it(tmp_path):
    space = make_space()
    pairs = [("bc", "a"), ("ac", "b"), ("abc", "")]
    study = study_of(tmp_path / "s", space, pairs)
    finish(study, space, trials=8)
    alone = study_of(tmp_path / "alone", space, pairs[:2])
    finish(alone, space, trials=8)
    assert summary(study)[:2] == summary(alone)
    queue = json.loads((study.fold_dir(2) / "queue.json").read_text())
    assert not (study.fold_dir(0) / "queue.json").exists()
    bests = [max(study.trials(n), key=lambda t: (t.state == "complete", t.best.mean)) for n in (0, 1)]
    assert queue["origins"] == [f"fold {t.fold} trial {t.number}" for t in bests] and queue["parameters"]
    assert Course.of(study).queues == ((), (), tuple(p["family"] for p in queue["parameters"]))
    best = [t.recipe for t in bests]
    given = [t.recipe for t in study.trials(2) if t.queued is not None]
    defaults = [t.recipe for t in study.trials(2)[:3]]
    assert given and given == [r for k, r in enumerate(best) if r not in [*defaults, *best[:k]]]
    assert [t.queued for t in study.trials(2)[:3]] == [None] * 3
    # Cut at any moment, the same.
    cut = study_of(tmp_path / "cut", space, pairs)
    for stop in (20, 3, 2):
        engine = Engine(cut, space, trials=8)
        for _ in range(stop):
            if (assignment := engine.ask()) is None:
                break
            outcome = run_local_one(engine, assignment)
            engine.tell(assignment.fold, assignment.number, outcome)
    finish(cut, space, trials=8)
    assert summary(cut) == summary(study)


@pytest.mark.parametrize("budget", [{"hours": 60 / 3600}, {"trials": 1000, "device_hours": 40 / 3600}], ids=str)
def test_the_deploy_fold_is_searched_too_where_time_ends_the_search(tmp_path, budget):
    space, now = make_space(), [0.0]
    study = study_of(tmp_path / "s", space, [("bc", "a"), ("ac", "b"), ("abc", "")])

    def trial(assignment, report):
        now[0] += 1
        return toy(assignment, lambda e: report(dataclasses.replace(e, seconds=e.step / 100)))

    run_local(Engine(study, space, **budget, clock=lambda: now[0]), trial)
    counts = [len(study.trials(fold.number)) for fold in study.folds]
    assert min(counts) >= 10 and max(counts) - min(counts) <= 1
    assert any(t.queued is not None for t in study.trials(2))
    # What the others find later comes too.
    queue = json.loads((study.fold_dir(2) / "queue.json").read_text())
    assert len(queue["origins"]) > 2


def run_local_one(engine, assignment):
    return run_guarded(toy, assignment, lambda e: _report(engine, assignment, e))


def test_a_fold_without_a_complete_trial_is_named(tmp_path):
    study = study_of(tmp_path / "s", make_space(), [("abc", "")])
    with pytest.raises(ValueError, match="no complete trial in the fold that holds out none"):
        select(study)


def test_deploy_adds_a_fold_that_holds_nothing_out(images):
    folds = plan_folds(images, deploy=True)
    assert [f.held_out for f in folds] == [("art",), ("cartoon",), ("photo",), ("sketch",), ()]
    assert folds[-1].sources == ("art", "cartoon", "photo", "sketch")
    folds = plan_folds(images, sources="art,photo", targets="elsewhere", deploy=True)
    assert [(f.sources, f.held_out) for f in folds] == [(("art", "photo"), ("elsewhere",)), (("art", "photo"), ())]
    assert len(plan_folds(images, sources="all", deploy=True)) == 1

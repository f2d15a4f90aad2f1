"""The engine with a toy trial: order, rungs, seeds, verdicts; a driver killed at any point loses nothing."""

import dataclasses
import json
import math

import optuna
import pytest

from dgsearch.domains.layout import DomainIndex
from dgsearch.search import engine as engine_module
from dgsearch.search.engine import Assignment, Engine, Outcome, run_guarded, rungs, stops
from dgsearch.search.local import run_local
from dgsearch.search_space import space_from
from dgsearch.study import Fold, Specification, Study, append_line, read_lines
from dgsearch.train import Evaluation, evaluation_steps

STEPS = 100
FAMILIES = [{"name": "erm"}, {"name": "coral", "objective": "coral"}, {"name": "sgd", "optimizer": "sgd"}]


def make_space(families=FAMILIES):
    return space_from({"family": families}, name="toy", network="small_cnn", where="toy.toml")


def make_study(path, space, *, folds=2, seed=0) -> Study:
    names = ["a", "b", "c"]
    indexes = [DomainIndex(n, "/", (f"{n}/x/1",), ("x",), ("g",), (1,), 0) for n in names]
    specification = Specification(
        data="/data", fingerprints={i.name: i.fingerprint for i in indexes}, space=space.name, space_hash=space.hash,
        network="small_cnn", resolution=8, steps=STEPS, batch_size=None, seed=seed, threads=1, precision="float32",
        folds=tuple(Fold(k, tuple(n for n in names if n != names[k]), (names[k],)) for k in range(folds)),
    )  # fmt: skip
    return Study.create(path, specification, indexes)


def toy(assignment: Assignment, report) -> Outcome:
    """A trial of 25 lines: its accuracy rises to a level that its learning rate decides, coral's a little higher."""
    optimizer, objective = assignment.recipe["optimizer"], assignment.recipe["objective"]["kind"]
    level = 0.8 - 0.1 * abs(math.log10(optimizer["lr"]) + 3) + 0.05 * (objective == "coral") - 0.03 * assignment.fold
    for step in evaluation_steps(STEPS):
        accuracy = level * (1 - math.exp(-5 * step / STEPS))
        report(Evaluation(step, {"a": accuracy, "b": accuracy}, {"a": 1.0, "b": 1.0}, seconds=step / 10))
    return Outcome("complete")


def finish(study, space, *, trials=10, trial=toy):
    run_local(Engine(study, space, trials=trials), trial)


def summary(study):
    return [[(t.number, t.family, t.recipe, t.state, t.best) for t in study.trials(f.number)] for f in study.folds]


def assert_whole(study, *, trials):
    """Exactly the trials asked for, none twice, none lost, none running; Optuna agrees with the study."""
    for fold in study.folds:
        records = study.trials(fold.number)
        assert len(records) == trials and len({t.number for t in records}) == trials
        assert {t.state for t in records} <= {"complete", "pruned", "failed"}
        storage = optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(study.fold_dir(fold.number) / "journal.log"))
        )
        frozen = optuna.load_study(study_name="fold", storage=storage).trials
        begun = {t.number: t.state.name.lower() for t in frozen if t.state.name != "FAIL"}
        assert begun == {t.number: "complete" if t.state == "complete" else "pruned" for t in records}
        for t in records:
            steps = [e.step for e in t.evaluations]
            assert steps == sorted(set(steps))
            told = {s: v for s, v in frozen[t.number].intermediate_values.items() if s in steps}
            best = [max(e.mean for e in t.evaluations[: k + 1]) for k in range(len(steps))]
            assert told == dict(zip(steps, best, strict=True))


def test_defaults_come_first_plain_erm_before_all_and_every_family_has_its_floor(tmp_path):
    space = make_space([FAMILIES[1], FAMILIES[2], FAMILIES[0]])
    study = make_study(tmp_path / "s", space)
    finish(study, space, trials=21)  # trials 3, 6, … 18 are the floors': two a family beside its defaults
    for fold in study.folds:
        trials = study.trials(fold.number)
        assert [t.family for t in trials[:4]] == ["erm", "coral", "sgd", "erm"]
        assert [t.default for t in trials] == [True] * 3 + [False] * 18
        assert trials[0].recipe["optimizer"] == {"kind": "adam", "lr": 1e-3, "weight_decay": 0.0}
        assert trials[1].recipe["objective"] == {
            "kind": "coral",
            "weight": 1.0,
            "match_mean": True,
            "per_class": False,
        }
        began = [t.family for t in trials]
        for family in ("erm", "coral", "sgd"):
            assert began.count(family) >= 3
        for n in range(3, 21, 3):
            fewest = min(("erm", "coral", "sgd"), key=began[:n].count)
            assert began[:n].count(fewest) >= 3 or began[n] == fewest
    assert_whole(study, trials=21)


def test_plain_erm_is_trial_0_though_the_space_does_not_hold_it(tmp_path):
    space = make_space([FAMILIES[1]])
    study = make_study(tmp_path / "s", space)
    finish(study, space, trials=5)
    trials = study.trials(0)
    assert [t.family for t in trials] == ["erm"] + ["coral"] * 4
    assert trials[0].state == "complete" and [t.default for t in trials] == [True, True, False, False, False]
    assert_whole(study, trials=5)


def test_plain_erm_is_never_stopped_whatever_its_family_is_called(tmp_path):
    space = make_space([FAMILIES[1], {"name": "plain"}])
    study = make_study(tmp_path / "s", space, folds=1)

    def trial(assignment, report):
        erm = assignment.recipe["objective"]["kind"] == "erm"
        for step in evaluation_steps(STEPS):
            report(Evaluation(step, {"a": 0.1 if erm else 0.9, "b": 0.1 if erm else 0.9}, {}))
        return Outcome("complete")

    finish(study, space, trials=6, trial=trial)
    first, *others = study.trials(0)
    assert first.family == "plain" and first.default and first.state == "complete"
    assert {t.state for t in others if t.family == "plain"} == {"pruned"}


def test_folds_share_the_workers_the_one_with_the_fewest_trials_first(tmp_path):
    space = make_space()
    engine = Engine(make_study(tmp_path / "s", space), space, trials=3)
    asked = [engine.ask() for _ in range(6)]
    assert [a.fold for a in asked] == [0, 1, 0, 1, 0, 1] and engine.ask() is None
    assert engine.left == 6


def test_rungs_and_the_rule_of_halving():
    assert rungs(100) == [20, 40] and rungs(300) == [60, 120] and rungs(1) == [] and rungs(3) == [1, 2]
    assert not stops(0.5, [0.5])
    assert stops(0.4, [0.5, 0.4]) and not stops(0.6, [0.5, 0.6])
    assert not stops(0.5, [0.5, 0.5, 0.1])  # a tie goes on
    values = [0.1, 0.2, 0.3, 0.4]  # two of four go on
    assert [stops(v, values) for v in values] == [True, True, False, False]


def test_verdicts_follow_the_rule_and_spare_plain_erms_default(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space)
    finish(study, space, trials=20)
    for fold in study.folds:
        lines = list(read_lines(study.fold_dir(fold.number) / "verdicts.jsonl"))
        trials = {t.number: t for t in study.trials(fold.number)}
        recorded: dict[int, list[float]] = {20: [], 40: []}
        for line in lines:  # replayed through the rule, written plainly
            values = recorded[line["step"]]
            values.append(line["value"])
            among = line["value"] >= sorted(values, reverse=True)[max(1, math.ceil(len(values) / 3)) - 1]
            assert line["stop"] == (line["trial"] != 0 and not among), line
        stopped = {line["trial"] for line in lines if line["stop"]}
        assert stopped == {n for n, t in trials.items() if t.state == "pruned"}
        assert 3 < len(stopped) < 19 and trials[0].state == "complete"
        assert all(t.evaluations[-1].step in (20, 40) for t in trials.values() if t.state == "pruned")


def test_the_same_seed_gives_the_same_search_and_another_seed_another(tmp_path):
    space = make_space()
    studies = [make_study(tmp_path / str(n), space, seed=seed) for n, seed in enumerate((0, 0, 1))]
    for study in studies:
        finish(study, space)
    first, second, third = map(summary, studies)
    assert first == second and first != third


def test_nothing_crosses_between_folds(tmp_path):
    """A fold's trials are the same whether another fold is searched beside it or not, its values being others."""
    space = make_space()
    both, alone = make_study(tmp_path / "2", space), make_study(tmp_path / "1", space, folds=1)
    finish(both, space)
    finish(alone, space)
    assert summary(both)[0] == summary(alone)[0]


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


POINTS = ["ask", "trial.json", "evaluations", "verdicts", "report", "result.json", "tell"]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_driver_killed_at_any_point_loses_and_repeats_nothing(tmp_path, monkeypatch, point, when):
    space = make_space()
    reference = make_study(tmp_path / "whole", space)
    finish(reference, space)
    study = make_study(tmp_path / "killed", space)
    calls = {"n": 0, "at": 0}

    def wrap(function, matches=lambda *args: True):
        def wrapped(*args, **options):
            if matches(*args):
                calls["n"] += 1
                if calls["n"] == calls["at"]:
                    if when == "after":
                        function(*args, **options)
                    raise Killed
            return function(*args, **options)

        return wrapped

    if point in ("ask", "tell"):
        monkeypatch.setattr(optuna.Study, point, wrap(getattr(optuna.Study, point)))
    elif point == "report":
        monkeypatch.setattr(optuna.Trial, "report", wrap(optuna.Trial.report))
    elif point in ("evaluations", "verdicts"):
        name = f"{point}.jsonl"
        monkeypatch.setattr(engine_module, "append_line", wrap(append_line, lambda path, _: path.name == name))
    else:
        monkeypatch.setattr(
            engine_module, "write_json", wrap(engine_module.write_json, lambda path, _: path.name == point)
        )
    kills = 0
    for at in (1, 4, 2, 9, 13):
        calls.update(n=0, at=at)
        try:
            finish(study, space)
        except Killed:
            kills += 1
    calls["at"] = 0
    finish(study, space)
    assert kills >= 3
    assert_whole(study, trials=10)
    begun = sum(len(list((study.fold_dir(f.number) / "trials").glob("*/trial.json"))) for f in study.folds)
    assert begun == 20
    sessions = [s.name for s in (study.path / "sessions").iterdir()]
    assert len(sessions) == kills + 1 + (5 - kills)


def test_unfinished_trials_go_on_from_their_checkpoint_in_a_folder_of_the_new_session(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    first = Engine(study, space, trials=3)
    assignment = first.ask()
    (folder := tmp_path / "s/folds/0/trials/0000/0001").joinpath("checkpoint.pt").write_text("state")
    assert assignment.folder == str(folder)
    first.report(0, 0, Evaluation(5, {"a": 0.5, "b": 0.5}, {}))
    second = Engine(study, space, trials=3)
    again = second.ask()
    assert (again.number, again.recipe) == (0, assignment.recipe) and again.folder != assignment.folder
    folder.joinpath("checkpoint.pt").write_text("an orphan writes on")
    assert (tmp_path / "s/folds/0/trials/0000/0002/checkpoint.pt").read_text() == "state"
    assert not second.report(0, 0, Evaluation(5, {"a": 0.5, "b": 0.5}, {}))  # re-reported: counts once
    assert len(study.trial(0, 0).evaluations) == 1


def test_raising_trials_count_once_and_the_others_go_on(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space, folds=1)
    started = []

    def trial(assignment, report):
        started.append(assignment.number)
        if assignment.recipe["optimizer"]["kind"] == "sgd":
            raise RuntimeError("no such thing")
        return toy(assignment, report)

    finish(study, space, trials=12, trial=trial)
    assert_whole(study, trials=12)
    assert len(started) == len(set(started))
    failed = [t for t in study.trials(0) if t.state == "failed"]
    assert failed and all(t.family == "sgd" for t in failed)
    assert failed[0].result["reason"].startswith("RuntimeError: no such thing (test_engine.py:")


def test_more_trials_are_had_by_running_again(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space)
    finish(study, space, trials=4)
    before = summary(study)
    finish(study, space, trials=7)
    assert [fold[:4] for fold in summary(study)] == before
    assert_whole(study, trials=7)
    finish(study, space, trials=5)
    assert_whole(study, trials=7)


def test_a_line_cut_in_half_is_dropped(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": ')
    assert list(read_lines(path)) == [{"a": 1}]
    append_line(path, {"a": 2})
    assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]
    path.write_bytes(b'{"a": 1}\n\0\0\0\n{"a": 2}\n')
    with pytest.raises(ValueError, match="line 2 of .*lines.jsonl is not JSON: "):
        list(read_lines(path))


def test_another_specification_is_refused_and_the_difference_named(tmp_path):
    space = make_space()
    make_study(tmp_path / "s", space, seed=1)
    study = make_study(tmp_path / "s", space)  # no trial has begun: defined anew
    finish(study, space, trials=1)
    with pytest.raises(ValueError, match="is of another search \\(seed: 0 there, 1 here\\)"):
        make_study(tmp_path / "s", space, seed=1)
    with pytest.raises(ValueError, match="held out of b, c; b held out of a, c there, a held out of b, c here"):
        make_study(tmp_path / "s", space, folds=1)
    with pytest.raises(ValueError, match="choices, ranges or defaults of the space 'toy'"):
        make_study(tmp_path / "s", make_space(FAMILIES[:1]))
    assert make_study(tmp_path / "s", space).specification == study.specification
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("dear")
    with pytest.raises(ValueError, match="holds something that is not a study"):
        make_study(tmp_path / "other", space)
    with pytest.raises(ValueError, match="no study at"):
        Study.open(tmp_path / "nowhere")


def test_a_study_that_somebody_drives_is_not_defined_anew_before_its_first_trial(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space)
    study = make_study(tmp_path / "s", space, seed=1)
    with study.driven(), pytest.raises(ValueError, match="of another search .seed: 1 there, 0 here."):
        make_study(tmp_path / "s", space)
    assert Study.open(study.path).specification.seed == 1


def test_an_assignment_is_plain_data_and_holds_no_held_out_name(tmp_path):
    space = make_space()
    study = make_study(tmp_path / "s", space)
    engine = Engine(study, space, trials=1)
    for _ in study.folds:
        assignment = engine.ask()
        text = json.dumps(dataclasses.asdict(assignment)).replace(str(tmp_path), "")
        held_out = study.folds[assignment.fold].held_out[0]
        number = list(study.specification.fingerprints).index(held_out)
        assert len(assignment.sources) == 2 and f"domains/{number}.json" not in text


def test_the_guard_turns_what_a_trial_raises_into_an_outcome():
    assert run_guarded(lambda a, r: Outcome("complete"), None, None) == Outcome("complete")
    assert run_guarded(lambda a, r: 1 / 0, None, None).reason.startswith("ZeroDivisionError: division by zero")
    with pytest.raises(KeyboardInterrupt):
        run_guarded(lambda a, r: (_ for _ in ()).throw(KeyboardInterrupt), None, None)

import json
import os
import shutil
from pathlib import Path

import pytest
from toy import DOMAINS, NETWORK, begin, end, fill, make_study, report, runs_of, same, select

from dgsearch.recipe import Recipe, encode
from dgsearch.study import Study, append_line
from dgsearch.tracking.describe import OURS, best_points, curve_points, in_order, note, safe_name
from dgsearch.tracking.projection import Projection, project
from dgsearch.tracking.store import connect, default_uri, resolve_uri, study_id, track_command
from dgsearch.tracking.writer import Writer
from dgsearch.train import Evaluation


def test_the_layout(study: Study) -> None:
    projected = project(study)
    assert projected.uri == default_uri(study)
    assert projected.experiment == "PACS/my study #1"
    assert (projected.trials, projected.problems) == (5, ())
    runs = runs_of(projected)
    assert set(runs) == {
        ("0", "held out: photo"),
        ("1", "held out: sketch"),
        *(("0", name) for name in ("t0000 erm", "t0001 coral", "t0002 erm", "t0003 erm")),
        ("1", "t0000 erm"),
    }
    parent = runs["0", "held out: photo"]
    for (fold, name), (tags, params, metrics, _, inputs, _) in runs.items():
        if name.startswith("held"):
            continue
        assert tags["mlflow.parentRunId"] == runs[fold, f"held out: {DOMAINS[int(fold)]}"][3][0]
        assert "dgsearch.selected" not in tags
        assert "network" not in params and "sources" not in params and not inputs
        assert not any(key.startswith("target") for key in metrics)
    statuses = {name: run[3][1] for (fold, name), run in runs.items() if fold == "0"}
    assert statuses == {
        "held out: photo": "RUNNING",
        "t0000 erm": "FINISHED",
        "t0001 coral": "FINISHED",
        "t0002 erm": "FAILED",
        "t0003 erm": "RUNNING",
    }
    assert runs["1", "held out: sketch"][3][1] == "FINISHED"

    tags, params, metrics, *_ = runs["0", "t0000 erm"]
    assert tags["dgsearch.study"] == study_id(study)
    assert (tags["dgsearch.trial"], tags["dgsearch.state"], tags["dgsearch.seed"]) == ("0", "complete", "0")
    assert (tags["dgsearch.objective"], tags["dgsearch.gradient"]) == ("erm", "none")
    assert params["adam.lr"] == str(encode(Recipe().resolve(NETWORK))["optimizer"]["lr"])
    assert [(v, s) for _, v, s in metrics["curve/accuracy"]] == [(0.705, 50), (0.505, 100)]
    assert [(v, s) for _, v, s in metrics["curve/worst"]] == [(0.7, 50), (0.5, 100)]
    assert [s for *_, s in metrics["curve/accuracy/sketch"]] == [50, 100]
    assert [v for _, v, _ in metrics["curve/loss/sketch"]] == pytest.approx([0.3, 0.5])
    assert [s for *_, s in metrics[f"curve/loss/{safe_name(DOMAINS[2])}"]] == [50, 100]
    assert [s for *_, s in metrics["train/loss"]] == [50, 100]
    assert [s for *_, s in metrics["gradient_agreement/mean"]] == [50, 100]
    assert [v for _, v, _ in metrics["log/val/accuracy"]] == [0.9, 0.9]
    assert [(v, s) for _, v, s in metrics["val/accuracy"]] == [(0.705, 50)]
    assert [(v, s) for _, v, s in metrics["val/accuracy/sketch"]] == [(0.7, 50)]
    assert [(v, s) for _, v, s in metrics["cost/seconds"]] == [(10.0, 100)]

    assert runs["0", "t0001 coral"][0]["dgsearch.stop_reason"] == "stopped after 10 steps"
    assert runs["0", "t0001 coral"][1]["coral.weight"]
    assert runs["0", "t0002 erm"][0]["dgsearch.stop_reason"] == "DivergedError: not finite"
    assert runs["0", "t0002 erm"][2] == {}
    assert "val/accuracy" not in runs["0", "t0003 erm"][2]
    assert runs["0", "t0003 erm"][0]["dgsearch.state"] == "running"

    tags, params, metrics, _, inputs, _ = parent
    assert (params["network"], params["steps"], params["batch_size"]) == (NETWORK, "100", "searched")
    assert [(v, s) for _, v, s in metrics["best/val_accuracy"]] == [(0.705, 1), (0.705, 2), (0.705, 3)]
    assert [s for *_, s in metrics["best/val_accuracy_by_seconds"]][0] == 10
    assert inputs == sorted([DOMAINS[2], "sketch"])

    experiment = connect(projected.uri).get_experiment(projected.experiment_id)
    assert experiment.artifact_location == (study.path / "mlartifacts").resolve().as_uri()
    assert experiment.tags["mlflow.experiment.primaryMetric.name"] == "val/accuracy"
    assert experiment.tags["mlflow.experiment.primaryMetric.greaterIsBetter"] == "True"
    text = experiment.tags["mlflow.note.content"]
    assert "| photo | 3 | 1 | 1 | 1 | 0.7050 | t0000 erm |" in text
    assert f"dgsearch track {study.path.resolve()}" in text


def test_sending_twice_or_from_a_new_process_changes_nothing(study: Study) -> None:
    projection = Projection(study)
    before = runs_of(projection.sync())
    select(study, trials={0: 0, 1: 0})
    select(study, trials={0: 0, 1: 0}, name="evaluation", target=True)
    evaluated = runs_of(projection.sync())
    assert same(before) != same(evaluated)
    assert same(runs_of(projection.sync())) == same(evaluated)
    assert same(runs_of(project(study))) == same(evaluated)
    assert project(study) == project(study)


def test_only_the_new_is_sent(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    projection = Projection(study)
    before = runs_of(projection.sync())
    calls: list[tuple] = []
    for name in ("log_batch", "create_run", "set_terminated", "set_experiment_tag", "log_inputs", "search_runs"):
        real = getattr(projection.client, name)

        def call(*args, real=real, name=name, **options):
            calls.append((name, args, options))
            return real(*args, **options)

        monkeypatch.setattr(projection.client, name, call)
    projection.sync()
    assert calls == []
    report(study, 0, 3, 20, 0.6)
    projection.sync()
    assert [name for name, *_ in calls] == ["log_batch"]
    assert {metric.step for metric in calls[0][2]["metrics"]} == {20}
    calls.clear()
    report(study, 0, 3, 100, 0.9)
    end(study, 0, 3)
    begin(study, 1, 1)
    projection.sync()
    after = runs_of(projection.sync())
    changed = {key for key in after if repr(after[key]) != repr(before.get(key))}
    assert changed == {
        ("0", "held out: photo"), ("0", "t0003 erm"), ("1", "held out: sketch"), ("1", "t0001 erm")
    }  # fmt: skip
    assert after["0", "held out: photo"][3][1] == "FINISHED"
    assert after["1", "held out: sketch"][3][1] == "RUNNING"
    assert [(v, s) for _, v, s in after["0", "held out: photo"][2]["best/val_accuracy"]][-1] == (0.905, 4)
    read = []
    monkeypatch.setattr(study, "trial", lambda fold, number: read.append(number))
    assert len(projection.sync().problems) == 1  # the running one alone is read
    assert read == [1]


def test_two_senders_make_no_run_twice(study: Study) -> None:
    first, second = Projection(study), Projection(study)
    first.sync()
    second.sync()
    begin(study, 0, 4)
    report(study, 0, 4, 10, 0.4)
    second.sync()
    report(study, 0, 4, 20, 0.4)
    end(study, 0, 4)
    first.sync()
    second.sync()
    runs = runs_of(first.sync())  # fails on two of one name
    assert [s for *_, s in runs["0", "t0004 erm"][2]["curve/accuracy"]] == [10, 20]
    assert same(runs) == same(runs_of(project(study)))


def test_a_run_made_twice_or_deleted_by_hand_is_mended(study: Study) -> None:
    projected = project(study)
    before = runs_of(projected)
    client = connect(projected.uri)
    gone = before["0", "t0000 erm"][3][0]
    twin = before["0", "t0001 coral"]
    client.delete_run(gone)
    client.create_run(projected.experiment_id, tags=twin[0], run_name="t0001 coral")
    project(study)
    after = runs_of(projected)
    assert set(after) == set(before)
    assert after["0", "t0000 erm"][3][0] == gone
    client.delete_experiment(projected.experiment_id)
    assert same(runs_of(project(study))) == same(after)


def test_selection_and_evaluation(study: Study) -> None:
    projection = Projection(study)
    select(study, trials={0: 0, 1: 0})
    projected = projection.sync()
    runs = runs_of(projected)
    selected = {key for key, run in runs.items() if run[0].get("dgsearch.selected") == "true"}
    assert selected == {("0", "t0000 erm"), ("1", "t0000 erm")}
    assert runs["0", "t0000 erm"][5] == ["recipe.json"]
    assert runs["0", "held out: photo"][5] == ["selection.json"]
    folder = study.path / "mlartifacts" / runs["0", "t0000 erm"][3][0] / "artifacts"
    assert json.loads((folder / "recipe.json").read_text()) == study.trial(0, 0).recipe
    assert not any(name.startswith("target") for run in runs.values() for name in run[2])

    select(study, trials={0: 0, 1: 0}, name="evaluation", target=True)
    after = runs_of(projection.sync())
    parent = after["0", "held out: photo"]
    assert [(v, s) for _, v, s in parent[2]["target/accuracy"]] == [(0.123, 0)]
    assert [(v, s) for _, v, s in parent[2]["target/macro_f1"]] == [(0.1, 0)]
    assert parent[5] == ["selection.json", "target"]
    for key, run in after.items():
        if not key[1].startswith("held"):
            assert repr(run) == repr(runs[key])
            assert "0.123" not in repr(run)

    select(study, trials={0: 1, 1: 0})
    (study.path / "evaluation.json").unlink()
    moved = runs_of(projection.sync())
    selected = {key for key, run in moved.items() if run[0].get("dgsearch.selected") == "true"}
    assert selected == {("0", "t0001 coral"), ("1", "t0000 erm")}


def test_a_record_that_cannot_be_read_stops_no_other(study: Study) -> None:
    (begin(study, 0, 4) / "trial.json").write_text("{")
    (begin(study, 0, 5) / "trial.json").write_text('{"family": "x"}')
    begin(study, 0, 6, family="gone", objective="gone")
    (study.trial_dir(0, 7)).mkdir()  # about to begin
    append_line(begin(study, 0, 8) / "evaluations.jsonl", {"step": 1, "accuracy": {}, "loss": {}})
    append_line(begin(study, 0, 9) / "evaluations.jsonl", {"step": 1, "accuracy": {"a": "x"}, "loss": {}})
    (study.path / "selection.json").write_text('{"folds": [{"held_out": ["x"], "sources": []}]}')
    projected = project(study)
    assert projected.trials == 5
    assert len(projected.problems) == 6
    assert "unknown objective 'gone'" in projected.problems[2]
    assert all("\n" not in problem for problem in projected.problems)
    line = Writer(study).start().close()
    assert line is not None
    assert line.endswith(f"; when that is mended, send it with: dgsearch track '{study.path}'")


def test_a_study_may_be_moved(study: Study, tmp_path: Path) -> None:
    from mlflow.tracking._tracking_service import utils as mlflow_utils

    select(study, trials={0: 0, 1: 0})
    before = runs_of(project(study))
    (tmp_path / "elsewhere").mkdir()
    moved = Study.open(Path(shutil.move(study.path, tmp_path / "elsewhere" / "other")))
    mlflow_utils._artifact_repos_cache.clear()  # as a new process has it
    for file in moved.path.rglob("*.json"):
        os.utime(file)  # as a copy has it
    projected = project(moved)
    after = runs_of(projected)
    assert {key: run[3] for key, run in after.items()} == {key: run[3] for key, run in before.items()}
    assert {key: repr(run[2]) for key, run in after.items()} == {key: repr(run[2]) for key, run in before.items()}
    begin(moved, 1, 1)
    end(moved, 1, 1, "failed")
    select(moved, trials={0: 0, 1: 1})
    project(moved)
    assert runs_of(projected)["1", "t0001 erm"][5] == ["recipe.json"]
    assert not study.path.exists()


def test_two_studies_of_one_name_in_one_store(study: Study, tmp_path: Path, empty_store: Path) -> None:
    other = make_study(tmp_path / "b" / study.path.name)
    fill(other)
    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path)}"
    first, second = project(study, uri), project(other, uri)
    assert first.experiment == "PACS/my study #1"
    assert second.experiment == f"PACS/my study #1 ({study_id(other)})"
    assert len(runs_of(first)) == len(runs_of(second)) == 7


def test_a_store_that_cannot_be_opened_is_one_line(study: Study, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for uri in (f"sqlite:///{tmp_path}/file/x.db", f"file://{tmp_path}/runs", "nonsense://x"):
        with pytest.raises(ValueError) as caught:
            project(study, uri)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"MLflow at {uri} did not take {study.path}: ")


def test_nothing_is_printed(study: Study, capfd: pytest.CaptureFixture[str]) -> None:
    project(study)
    assert capfd.readouterr() == ("", "")


def test_which_store(study: Study, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_uri(study) == f"sqlite:///{study.path.resolve()}/mlflow.db"
    assert track_command(study, resolve_uri(study)) == f"dgsearch track '{study.path}'"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://a")
    assert resolve_uri(study) == "http://a"
    assert resolve_uri(study, "http://b") == "http://b"
    assert track_command(study, "http://a") == f"dgsearch track '{study.path}'"
    command = track_command(study, "https://me:secret@b/x")
    assert command == f"dgsearch track '{study.path}' --tracking-uri 'https://me:***@b/x'"
    for name in ("a?b", "a%20b"):
        with pytest.raises(ValueError, match="--tracking-uri"):
            default_uri(make_study(tmp_path / name))
    assert default_uri(make_study(tmp_path / "100%"))


def test_names_of_metrics() -> None:
    from mlflow.utils.validation import _validate_metric_name

    for name in ("photo", "site A-1.b:c", "素描", "site/A", "Ünï"):
        assert safe_name(name) == name
    odd = ["a@b", "a#b", "चित्र", "../x", "/x", ".", "..", "", "a//b", "a/", "./a", "x\n", "é", "x" * 300, "🙂", "🙃"]
    found = [safe_name(name) for name in odd]
    assert len(set(found)) == len(odd)
    assert [safe_name(name) for name in found] == found
    for name in (*found, "photo"):
        _validate_metric_name(f"curve/accuracy/{name}")
        _validate_metric_name(name)
        assert len(f"curve/accuracy/{name}") <= 250


def test_a_diagnostic_takes_no_name_of_ours() -> None:
    evaluation = Evaluation(1, {"a": 0.5}, {"a": 1.0}, {f"{name}x": 1.0 for name in OURS})
    names = [name for name, *_ in curve_points(evaluation)]
    assert len(set(names)) == len(names)
    assert [n for n in names if n.startswith(OURS)] == [
        "curve/accuracy", "curve/worst", "curve/accuracy/a", "curve/loss/a"
    ]  # fmt: skip


def test_nothing_is_best_before_a_trial_completes(study: Study) -> None:
    assert best_points([], after=0) == []
    assert in_order([]) == []
    empty = note(study, [[], []])
    assert "| photo | 0 | 0 | 0 | 0 |  |  |" in empty
    assert len(empty) < 5000


def test_a_study_that_cannot_be_written_to_is_sent_too(
    study: Study, tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dgsearch.tracking.store.write_json", refuse)
    monkeypatch.setattr("dgsearch.tracking.store.FileLock.acquire", refuse)
    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path)}"
    first = project(study, uri)
    assert not (study.path / "tracking.json").exists()
    assert (first.trials, first.problems) == (5, ())
    assert project(study, uri) == first
    assert len(runs_of(first)) == 7

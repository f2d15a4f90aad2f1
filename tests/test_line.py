"""The whole line by its commands, on a real Ray cluster, with a real MLflow store; killed and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import DOMAINS, write_images

from dgsearch import cli, line
from dgsearch.line import Executor
from dgsearch.study import Study
from dgsearch.train import Cost

SPACE = Path(__file__).parent / "lean.toml"
COMMAND = (sys.executable, "-m", "dgsearch")


def dgsearch(*arguments, code=0, **options) -> subprocess.CompletedProcess:
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == code, f"{arguments} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def here(capsys, monkeypatch):
    """The command line in this process: what needs no process of its own."""

    def run(*arguments, code=0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["dgsearch", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == code, err
        return out, err

    return run


def search_options(data: Path, study: Path, **more) -> list[str]:
    options = {"data": data, "study": study, "space": SPACE, "trials": 4, "steps": 20, "resolution": 16}
    return ["search", *(str(x) for k, v in (options | more).items() for x in (f"--{k.replace('_', '-')}", v))]


def trials_of(path: Path):
    """Everything of every trial that a repetition must give again."""
    study = Study.open(path)
    return [
        [(t.number, t.family, t.recipe, t.state, [(e.step, e.accuracy, e.loss, e.log) for e in t.evaluations])
         for t in study.trials(fold.number)]
        for fold in study.folds
    ]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("line") / "data", count=20)


@pytest.fixture(scope="module")
def studies(data, tmp_path_factory):
    """One search on Ray and the same in-process, one trial at a time."""
    root = tmp_path_factory.mktemp("studies")
    for executor in ("ray", "local"):
        dgsearch(*search_options(data, root / executor, executor=executor, max_concurrent=1, targets="photo,sketch"))
    return root


def test_ray_and_local_give_the_same_trials(studies):
    assert trials_of(studies / "ray") == trials_of(studies / "local")
    for fold in trials_of(studies / "ray"):
        assert [family for _, family, *_ in fold[:2]] == ["erm", "coral"] and len(fold) == 4
        assert all(trial[2] not in (fold[0][2], fold[1][2]) for trial in fold[2:])  # sampled, not the defaults


def test_select_evaluate_report_status(studies, data, here):
    study = studies / "ray"
    status = json.loads(here("status", study, "--json")[0])
    assert [f["held_out"] for f in status["folds"]] == [["photo"], ["sketch"]]
    for fold in status["folds"]:
        assert sum(fold["trials"].values()) == 4 and fold["trials"]["running"] == 0
        assert set(fold["trials"]) == {"complete", "pruned", "failed", "running"}
    _, early = here("evaluate", study, code=2)
    assert "has no selection: run `dgsearch select" in early and early.count("\n") == 1

    selection = json.loads(here("select", study, "--json")[0])
    assert set(selection) == {"criterion", "folds"} and selection["criterion"] == "training-domain"
    for fold, trials, counts in zip(selection["folds"], trials_of(study), status["folds"], strict=True):
        keys = {"held_out", "sources", "trial", "family", "recipe", "source_accuracy", "step"}
        assert set(fold) == keys
        best = max(sum(a.values()) / 3 for t in trials if t[3] == "complete" for _, a, _, _ in t[4])
        assert fold["source_accuracy"] == pytest.approx(best) == counts["best_source_accuracy"]
        assert sorted(fold["sources"] + fold["held_out"]) == sorted(DOMAINS)
    assert json.loads(here("select", study, "--json")[0]) == selection
    table_before = here("report", study, "--format", "csv")[0]
    assert not (study / "openings.jsonl").exists()

    evaluation = json.loads(here("evaluate", study, "--json")[0])
    openings = [json.loads(line) for line in (study / "openings.jsonl").read_text().splitlines()]
    assert [(o["fold"], o["domain"]) for o in openings] == [(0, "photo"), (1, "sketch")]
    for fold, selected in zip(evaluation["folds"], selection["folds"], strict=True):
        assert {k: fold[k] for k in selected} == selected
        assert set(fold) - set(selected) == {"target_accuracy", "target_macro_f1", "unknown_classes"}
        assert 0 <= fold["target_macro_f1"] <= 1
        # Computed again, plainly: the trial's weights on each held-out file.
        assert fold["target_accuracy"] == pytest.approx(_target_accuracy(study, fold, data))
    assert here("evaluate", study, "--json")[0] == json.dumps(evaluation, indent=2) + "\n"
    assert len((study / "openings.jsonl").read_text().splitlines()) == 2
    # A new selection would stand beside the figures of the old one.
    (study / "selection.json").rename(study / "aside")
    assert "evaluation.json is of a selection that is gone" in here("select", study, code=2)[1]
    (study / "aside").rename(study / "selection.json")

    assert "photo" in here("report", study)[0]
    markdown = here("report", study, "--format", "markdown")[0].splitlines()
    assert markdown[1].startswith("| --- |") and markdown[-1].startswith("| mean |")
    lines = here("report", study, "--format", "csv")[0].splitlines()
    assert lines != table_before.splitlines()
    assert lines[0].startswith("held_out,family,trial,selected,source_accuracy,target_accuracy,target_macro_f1,gap")
    assert here("report", study, "--format", "pdf", code=2)[1].startswith("error: unknown format 'pdf'")


def _target_accuracy(study: Path, fold: dict, data: Path) -> float:
    import numpy as np
    import torch
    from PIL import Image
    from safetensors.torch import load_file

    from dgsearch.networks import build_network

    number = [["photo"], ["sketch"]].index(fold["held_out"])
    record = Study.open(study).trial(number, fold["trial"])
    model = build_network("small_cnn", num_classes=3, normalisation=((0.0,) * 3, (1.0,) * 3), seed=0)
    model.load_state_dict(load_file(record.weights))
    model.eval()
    right = []
    for path in sorted((data / fold["held_out"][0]).rglob("*.png")):
        x = torch.from_numpy(np.asarray(Image.open(path)).copy()).permute(2, 0, 1).float() / 255
        with torch.no_grad():
            right.append(model(x)[1].argmax().item() == ["cat", "dog", "horse"].index(path.parent.name))
    return sum(right) / len(right)


def test_the_winner_trained_again_has_the_identical_accuracy(studies, data, here):
    selection = json.loads(here("select", studies / "local", "--json")[0])
    for number, fold in enumerate(selection["folds"]):
        trial = studies / "local" / "folds" / str(number) / "trials" / f"{fold['trial']:04d}" / "trial.json"
        found = json.loads(dgsearch("train", trial, "--data", data, "--json").stdout)
        assert found["source_accuracy"] == found["recorded"] == fold["source_accuracy"]
        assert "identical" in here("train", trial, "--data", data)[0]


def test_a_search_is_the_same_again(studies, data, tmp_path, here):
    here(*search_options(data, tmp_path / "s", executor="local", targets="photo,sketch"))
    assert trials_of(tmp_path / "s") == trials_of(studies / "ray")
    again = json.loads(here("select", tmp_path / "s", "--json")[0])
    assert again == json.loads(here("select", studies / "ray", "--json")[0])


def test_a_driver_killed_in_mid_search_is_followed_by_another(data, tmp_path):
    study = tmp_path / "s"
    options = search_options(data, study, executor="ray", targets="photo,sketch", trials=5, steps=60)
    driver = subprocess.Popen([*COMMAND, *options], stderr=subprocess.PIPE, start_new_session=True)
    end = time.monotonic() + 120
    while len(list(study.glob("folds/*/trials/*/result.json"))) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(driver.pid, signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    driver.stderr.close()
    before = {p: p.stat().st_mtime_ns for p in study.glob("folds/*/trials/*/result.json")}
    done = dgsearch(*options)
    assert f"going on: {len(before)} of 10 trials have ended" in done.stderr
    for path, modified in before.items():
        assert path.stat().st_mtime_ns == modified
    opened = Study.open(study)
    for fold in opened.folds:
        trials = opened.trials(fold.number)
        assert len(trials) == 5 and {t.state for t in trials} <= {"complete", "pruned"}
        assert len({(t.number) for t in trials}) == 5
    status = json.loads(dgsearch("status", study, "--json").stdout)
    assert all(sum(f["trials"].values()) == 5 for f in status["folds"])


BAD = [
    (["search", "--data", "nowhere", "--study", "s"], "no data set at nowhere: the folder does not exist"),
    (["search", "--data", "DATA", "--study", "s", "--targets", "phot"],
     "unknown target domain 'phot' in DATA; known: art, cartoon, photo, sketch. Did you mean 'photo'?"),
    (["search", "--data", "DATA", "--study", "s", "--sources", "art", "--targets", "photo"],
     "family 'coral' needs at least 2 source domains (coral), and the fold that holds out photo has 1"),
    (["search", "--data", "DATA", "--study", "s", "--network", "resnet"], "unknown network 'resnet'"),
    (["search", "--data", "DATA", "--study", "s", "--space", "quik"], "unknown search space 'quik'"),
    (["search", "--data", "DATA", "--study", "s", "--hours", "0"], "a search needs hours above 0, not 0"),
    (["search", "--data", "DATA", "--study", "s", "--keep", "some"], "unknown choice of weights to keep 'some'"),
    (["search", "--data", "DATA", "--study", "s", "--executor", "slurm"], "unknown executor 'slurm'"),
    (["status", "nowhere"], "no study at nowhere"),
    (["methods", "corall"], "unknown method 'corall'"),
    (["data", "build", "digit", "--out", "d"], "unknown built-in data set 'digit'; known: digits."),
    (["train", "nowhere.json", "--data", "DATA"], "no file nowhere.json"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda v: v if isinstance(v, str) else None)
def test_bad_input_is_one_line_and_exit_2(arguments, message, data, tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, err = here(*[str(data) if a == "DATA" else a for a in arguments], code=2)
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message.replace("DATA", str(data)) in err
    assert not list(tmp_path.iterdir())


def test_every_command_has_help_with_an_example(here):
    help_, _ = here("--help")
    for command in ("methods", "search", "status", "select", "evaluate", "report", "track", "ui", "train"):
        assert command in help_
        assert "Example: dgsearch" in " ".join(here(command, "--help")[0].replace("│", "").split())


def test_methods_are_listed_for_people_and_for_scripts(here):
    entries = json.loads(here("methods", "--json")[0])
    assert {e["slot"] for e in entries} == {
        "objective", "optimizer", "gradient", "epoch_end", "average", "training"
    }  # fmt: skip
    coral = json.loads(here("methods", "coral", "--json")[0])
    assert len(coral) == 1 and coral[0]["fields"]["weight"]["scratch"] == {"default": 1.0, "range": "0.1 … 10 log"}
    assert "arXiv:1607.01719" in here("methods", "coral")[0].replace("\n", " ")


def test_a_bare_recipe_is_trained(data, tmp_path, here):
    recipe = tmp_path / "recipe.json"
    recipe.write_text('{"objective": {"kind": "coral", "weight": 0.5}, "training": {"batch_size": 4}}')
    options = ["--steps", "6", "--targets", "photo,sketch", "--resolution", "16", "--seed", "3"]
    found = json.loads(here("train", recipe, "--data", data, *options, "--json")[0])
    assert set(found["accuracy"]) == {"art", "cartoon"} and found["recorded"] is None
    again = json.loads(here("train", recipe, "--data", data, *options, "--json")[0])
    assert again["source_accuracy"] == found["source_accuracy"]
    _, wrong = here("train", recipe, "--data", data, "--targets", "phot", code=2)
    assert "unknown target domain 'phot'" in wrong
    recipe.write_text('{"objective": {"kind": "coral", "wieght": 0.5}}')
    assert "Did you mean 'weight'?" in here("train", recipe, "--data", data, code=2)[1]


def test_status_counts_by_family_and_report_shows_each_familys_best(studies, here):
    here("select", studies / "ray")
    status = json.loads(here("status", studies / "ray", "--json")[0])
    for fold, trials in zip(status["folds"], trials_of(studies / "ray"), strict=True):
        assert set(fold["families"]) == {family for _, family, *_ in trials}
        for state, count in fold["trials"].items():
            assert count == sum(family["trials"][state] for family in fold["families"].values())
            assert count == sum(t[3] == state for t in trials)
    lines = here("report", studies / "ray", "--format", "csv")[0].splitlines()
    head = lines[0].split(",")
    rows = [dict(zip(head, line.split(","), strict=False)) for line in lines[1:-1]]
    for held_out in ("photo", "sketch"):
        shown = [r for r in rows if r["held_out"] == held_out]
        complete = [f for f in status["folds"] if f["held_out"] == [held_out]][0]["families"]
        assert {r["family"] for r in shown} == {n for n, f in complete.items() if f["trials"]["complete"]}
        assert [r["selected"] for r in shown].count("yes") == 1 and shown[0]["selected"] == "yes"
        for r in shown:
            assert float(r["source_accuracy"]) == pytest.approx(complete[r["family"]]["best_source_accuracy"], abs=1e-4)


@pytest.mark.parametrize(
    ("sent", "executor"), [(signal.SIGINT, "local"), (signal.SIGTERM, "ray"), (signal.SIGUSR1, "local")]
)
def test_a_signal_ends_a_search_cleanly(sent, executor, data, tmp_path):
    study = tmp_path / "s"
    options = search_options(data, study, executor=executor, targets="photo", trials=4, steps=60)
    driver = subprocess.Popen([*COMMAND, *options], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not list(study.glob("folds/*/trials/*/evaluations.jsonl")) and time.monotonic() < end:
        time.sleep(0.05)
    driver.send_signal(sent)
    _, err = driver.communicate(timeout=60)
    assert driver.returncode == 130 and "interrupted: nothing that ended is lost" in err
    assert "searched" not in err and "SIGTERM received" not in err
    if sent == signal.SIGTERM:
        assert (
            "note: the search is not finished"
            in subprocess.run([*COMMAND, "select", str(study)], capture_output=True, text=True).stderr
        )


def test_a_search_that_nobody_reads_any_more_goes_on_to_its_end(data, tmp_path):
    options = search_options(data, tmp_path / "s", executor="local", targets="photo", trials=2)
    search = subprocess.Popen([*COMMAND, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert search.stderr.readline()
    search.stderr.close()
    assert search.wait(timeout=300) == 0
    assert [state for *_, state, _ in trials_of(tmp_path / "s")[0]].count("running") == 0


def test_a_second_driver_is_refused(data, tmp_path, here):
    study = tmp_path / "s"
    options = search_options(data, study, executor="local", targets="photo", trials=1)
    here(*options)
    with Study.open(study).driven():
        _, err = here(*options, code=2)
    assert f"is being searched by process {os.getpid()} on" in err.splitlines()[-1]
    here(*options)


def test_evaluate_opens_nothing_when_something_is_missing(data, tmp_path, here):
    study = tmp_path / "s"
    here(*search_options(data, study, executor="local", targets="photo,sketch", trials=1))
    here("select", study)
    (weights,) = study.glob("folds/1/trials/0000/*/weights.safetensors")
    whole = weights.read_bytes()
    for broken, message in ((None, "are missing"), (whole[:100], "are damaged")):
        weights.unlink(missing_ok=True)
        if broken:
            weights.write_bytes(broken)
        _, err = here("evaluate", study, code=2)
        assert message in err and not (study / "openings.jsonl").exists()
    weights.write_bytes(whole)
    here("evaluate", study)
    assert len((study / "openings.jsonl").read_text().splitlines()) == 2


def test_data_that_cannot_be_learned_from_is_refused_before_a_study_is_written(tmp_path, here):
    single = write_images(tmp_path / "single", count=1)
    few = write_images(tmp_path / "few", classes=("cat",))
    for data, message in ((single, "can't be both trained on and validated on"), (few, "only the class 'cat'")):
        _, err = here(*search_options(data, tmp_path / "s", executor="local"), code=2)
        assert message in err and not (tmp_path / "s").exists()


def test_an_unreachable_cluster_is_one_line(data, tmp_path, here):
    _, err = here(*search_options(data, tmp_path / "s", executor="ray", address="127.0.0.1:9"), code=2)
    assert "no Ray cluster answers at 127.0.0.1:9" in err
    # No trial has begun, so the study may be defined anew.
    here(*search_options(data, tmp_path / "s", executor="local", trials=1, targets="photo", seed=5))


def test_a_plan_is_measured_and_leaves_nothing_behind(data, tmp_path, here):
    study = tmp_path / "s"
    options = [*search_options(data, study, executor="local", targets="photo,sketch", trials=6), "--plan"]
    found = json.loads(here(*options, "--json")[0])
    assert not study.exists() and not list(tmp_path.iterdir())
    assert (found["folds"], found["families"], found["steps_a_trial"]) == (2, ["erm", "coral"], 20)
    assert found["trials"] == 12 and found["steps"]["most"] == 240 > found["steps"]["expected"] > 40
    assert set(found["measured"]) == {"erm", "coral"} and not found["unmeasured"]
    assert found["seconds"] == found["device_seconds"] > 0
    assert found["bytes"]["images"] == 4 * 60 * 16 * 16 * 3
    text = here(*options)[0]
    assert "2 folds × 6 trials, 2 families, 20 steps a trial" in text and "240 at most" in text


def test_a_plan_has_the_floor_and_the_room_of_the_search(data, tmp_path, here, monkeypatch):
    def cost(recipe, *_, **__):
        return Cost({"erm": 1.0, "coral": 2.0}[recipe.objective.choice()], 0, 0, 20, 1, 1)

    monkeypatch.setattr(line, "measure", cost)
    options = search_options(data, tmp_path / "s", executor="local", targets="photo", trials=4)
    free, erm = (json.loads(here(*options, "--floor", n, "--plan", "--json")[0])["seconds"] for n in (0, 2))
    assert free > erm  # trial 3: of any family, or the first of a floor
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert Executor(gpus_per_trial=0.3).at_once == 12  # three on each GPU, as the search has them
    assert Executor(cpus_per_trial=0.1).at_once == 640 and Executor(cpus_per_trial=128).at_once == 1


def test_hours_end_a_search_and_the_plan_says_what_is_left(data, tmp_path, here):
    study = tmp_path / "s"
    options = search_options(data, study, executor="local", targets="photo,sketch")
    del options[options.index("--trials") : options.index("--trials") + 2]
    _, err = here(*options, "--hours", "1e-9")
    assert "--hours is used up: the same command with a larger --hours goes on" in err
    found = json.loads(here(*options, "--trials", "1", "--json")[0])
    assert (found["state"], found["ended_by"], found["spent"]["sessions"]) == ("finished", "trials", 2)
    left = json.loads(here(*options, "--trials", "2", "--plan", "--json")[0])
    assert (left["trials_begun"], left["trials"]) == (2, 2)
    weights = list(study.glob("folds/*/trials/*/*/weights.safetensors"))
    assert left["bytes"]["weights"] == pytest.approx(4 * weights[0].stat().st_size, rel=0.05)
    out, _ = here("status", study, "--follow")
    assert "finished (--trials)" in out
    followed = json.loads(here("status", study, "--follow", "--json")[0])
    assert followed == json.loads(here("status", study, "--json")[0])
    weights[0].unlink()
    trial = weights[0].parent.parent / "trial.json"
    here("train", trial, "--data", data, "--save", weights[0])
    assert weights[0].is_file()


def test_the_fold_to_deploy_goes_the_whole_line(data, tmp_path, here):
    study = tmp_path / "s"
    options = search_options(data, study, executor="local", targets="photo", trials=1, floor=2, sampler="random")
    here(*options, "--deploy")
    plan = json.loads((study / "plan.json").read_text())
    assert (plan["trials"], plan["floor"], plan["sampler"]) == (1, 2, "random")
    folds = json.loads(here("select", study, "--json")[0])["folds"]
    assert [(f["held_out"], f["sources"]) for f in folds] == [
        (["photo"], ["art", "cartoon", "sketch"]),
        ([], list(DOMAINS)),
    ]
    figures = [f["target_accuracy"] for f in json.loads(here("evaluate", study, "--json")[0])["folds"]]
    assert figures[0] is not None and figures[1] is None
    openings = [json.loads(line)["domain"] for line in (study / "openings.jsonl").read_text().splitlines()]
    assert openings == ["photo"]
    _, err = here(*search_options(data, study, executor="local", targets="photo", trials=1), code=2)
    assert "is of another search (folds: photo held out of art, cartoon, sketch; none held out of art" in err
    _, err = here(*options, "--deploy", "--warm-start", tmp_path / "nowhere", code=2)
    assert f"no study at {tmp_path / 'nowhere'}" in err


def test_a_search_whose_every_trial_fails_ends_early_with_exit_1(data, tmp_path, here, monkeypatch):
    from dgsearch.search import trial

    def broken(*arguments, **options):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(trial, "run_trial", broken)
    study = tmp_path / "s"
    _, err = here(*search_options(data, study, executor="local", targets="photo", trials=9), code=1)
    assert len(Study.open(study).trials(0)) == 2
    assert [line.split("family ")[1].split()[0] for line in err.splitlines() if "GIVEN UP" in line] == ["erm", "coral"]
    assert "error: every trial of a fold failed, the first with: RuntimeError: no such thing" in err
    assert "; every family is given up\n" in err and "goes on" not in err
    found = json.loads(here("status", study, "--json")[0])
    assert (found["state"], found["ended_by"], found["left"]["trials"]) == ("finished", "families", 0)

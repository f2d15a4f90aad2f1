"""The held-out domain stays out: deleted or garbage, nothing changes; a trial is handed nothing that names it."""

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import write_images

from dgsearch import line
from dgsearch.domains.cache import cache_path
from dgsearch.domains.layout import read_domain
from dgsearch.search.engine import Engine, Outcome
from dgsearch.search_space import read_space
from dgsearch.study import Study

HELD_OUT = "zebrafish"  # a name that nothing else has
DOMAINS = ("art", "cartoon", "photo", HELD_OUT)
OPTIONS = {"space": "quick", "targets": HELD_OUT, "steps": 12, "resolution": 16}


def run(data: Path, path: Path, *, sources="art,cartoon,photo", trials=5) -> Study:
    study = line.open_study(path, data=data, sources=sources, **OPTIONS)
    line.search(study, space="quick", trials=trials, executor=line.Executor("local"))
    return study


def everything(study: Study) -> dict[str, bytes]:
    """Recipes, evaluations and weights of every trial, byte for byte, without times."""
    found = {}
    for file in sorted(study.path.glob("folds/*/trials/**/*")):
        name = str(file.relative_to(study.path))
        if file.suffix == ".safetensors" or file.name in ("trial.json", "result.json"):
            found[name] = file.read_bytes()
        elif file.name == "evaluations.jsonl":
            rows = [json.loads(row) for row in file.read_text().splitlines()]
            found[name] = json.dumps([{k: v for k, v in r.items() if k != "seconds"} for r in rows]).encode()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Study:
    """A search whose held-out domain is there."""
    root = tmp_path_factory.mktemp("whole")
    return run(write_images(root / "data", domains=DOMAINS), root / "study")


@pytest.mark.parametrize("what", ["deleted", "garbage", "other classes"])
def test_law_8_a_search_depends_on_its_sources_only(what, whole, tmp_path):
    other = write_images(tmp_path / "other", domains=DOMAINS)
    shutil.rmtree(other / HELD_OUT)
    if what == "garbage":
        (other / HELD_OUT / "cat").mkdir(parents=True)
        (other / HELD_OUT / "cat" / "1.png").write_text("garbage")
        (other / HELD_OUT / "notes.txt").write_text("garbage")
    elif what == "other classes":
        write_images(other, domains=(HELD_OUT,), classes=("aardvark", "zebra"), seed=9)
    again = run(other, tmp_path / "again")
    first, second = everything(whole), everything(again)
    assert sum(name.endswith(".safetensors") for name in first) >= 2
    assert first == second
    assert line.select(whole) == line.select(again)


def test_a_trial_is_handed_nothing_that_names_or_opens_the_held_out_domain(tmp_path, monkeypatch):
    """Arguments, environment, working directory, open files and memory maps, seen from inside a Ray worker."""
    data = write_images(tmp_path / "data", domains=DOMAINS)
    monkeypatch.chdir(tmp_path)
    study = line.open_study(tmp_path / "study", data=data, **OPTIONS)
    seen = tmp_path / "seen.json"

    def spy(assignment, report) -> Outcome:
        from dgsearch.search.trial import Training

        training = Training("small_cnn", 12, 16, 0, "cpu", 1, "float32", tmp_path / "cache")
        facts = []

        def looking(evaluation):
            facts.append(
                {
                    "assignment": vars(assignment),
                    "environment": dict(os.environ),
                    "command": Path("/proc/self/cmdline").read_text(),
                    "directory": os.getcwd(),
                    "files": [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.exists()],
                    "maps": Path("/proc/self/maps").read_text(),
                    "indexes": [Path(path).read_text() for path in assignment.sources],
                }
            )
            report(evaluation)

        print("printed")
        os.write(2, b"past python\n")
        outcome = training(assignment, looking)
        seen.write_text(json.dumps(facts))
        return outcome

    from dgsearch.search.ray_tune import run_ray

    # The held-out domain's decoded images lie in the same cache, as they do when another fold trains on it.
    hidden = read_domain(data, HELD_OUT)
    secret = cache_path(hidden, resolution=16, cache_dir=tmp_path / "cache")
    engine = Engine(study, read_space("quick", network="small_cnn"), trials=1)
    run_ray(engine, spy, max_concurrent=1)
    (log,) = study.path.glob("folds/0/trials/0000/*/worker.log")
    assert "printed\n" in log.read_text() and "past python\n" in log.read_text()
    assert HELD_OUT not in log.read_text()
    facts = json.loads(seen.read_text())
    assert len(facts) == 12
    art = cache_path(read_domain(data, "art"), resolution=16, cache_dir=tmp_path / "cache")
    for fact in facts:
        text = json.dumps(fact)
        assert art.name in fact["maps"]  # the look is real: a source's images are mapped
        assert HELD_OUT not in text
        assert secret.name not in text
        assert {json.loads(index)["name"] for index in fact["indexes"]} == {"art", "cartoon", "photo"}


def test_paths_of_a_study_name_no_held_out_domain(tmp_path):
    study = run(write_images(tmp_path / "data", domains=DOMAINS), tmp_path / "study", sources=None, trials=2)
    names = [str(p.relative_to(study.path)) for p in study.path.rglob("*")]
    assert not any(HELD_OUT in name for name in names)
    for file in study.path.glob("folds/**/*.json*"):
        assert HELD_OUT not in file.read_text(), file
    for file in study.path.glob("domains/*.json"):
        assert HELD_OUT not in file.read_text(), file

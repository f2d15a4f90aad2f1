"""Three ways to keep decoded images give the same batches; a killed build leaves nothing half-true."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from conftest import DOMAINS, write_images

from dgsearch import line
from dgsearch.domains import cache
from dgsearch.domains.cache import CACHES, cache_path, open_images, readable
from dgsearch.domains.layout import read_domain
from dgsearch.study import Study

CPU = torch.device("cpu")


def opened(sources, mode):
    return dataclasses.replace(sources, cache=mode).open(seed=0, device=CPU, withhold_guide=True)


@pytest.fixture(autouse=True)
def _empty_memory():
    cache._memory.clear()
    yield
    cache._memory.clear()


def test_the_three_modes_give_identical_batches_parts_and_normalisation(sources):
    found = {}
    for mode in CACHES:
        with opened(sources, mode) as data:
            batches = [data.batch(t, size=5) for t in (0, 3, 50)] + list(data.part("validation"))
            found[mode] = (batches, data.normalisation())
    for mode in ("memory", "none"):
        assert found[mode][1] == found["disk"][1]
        for one, other in zip(found[mode][0], found["disk"][0], strict=True):
            assert torch.equal(one.x, other.x) and torch.equal(one.y, other.y) and torch.equal(one.index, other.index)


def test_memory_and_none_leave_no_images_on_the_disk(sources, tmp_path):
    for mode in ("memory", "none"):
        with opened(dataclasses.replace(sources, cache_dir=tmp_path), mode) as data:
            data.batch(0, size=3)
    assert not list(tmp_path.iterdir())


def test_memory_is_kept_between_trials_and_evicted_of_what_is_no_source(sources, tmp_path, monkeypatch):
    sources = dataclasses.replace(sources, cache_dir=tmp_path)
    with opened(sources, "memory") as data:
        first = data.images[1]
    monkeypatch.setattr(cache, "decode", lambda *_, **__: pytest.fail("decoded again"))
    fewer = dataclasses.replace(sources, domains=sources.domains[1:])
    with opened(fewer, "memory") as data:
        assert data.images[0] is first
    kept = {cache_path(index, resolution=16, cache_dir=tmp_path) for index in fewer.domains}
    assert cache._memory.keys() == kept
    monkeypatch.undo()
    with opened(dataclasses.replace(sources, domains=sources.domains[:1]), "disk"):
        assert not cache._memory


def test_memory_reads_what_the_disk_has(sources, monkeypatch):
    with opened(sources, "disk"):
        monkeypatch.setattr(cache, "decode", lambda *_, **__: pytest.fail("decoded again"))
        with opened(sources, "memory") as data:
            assert isinstance(data.images[0], np.ndarray) and not isinstance(data.images[0], np.memmap)


def test_an_unknown_mode_is_refused_before_anything_is_written(images, tmp_path):
    with pytest.raises(ValueError, match="unknown cache 'ram'; known: disk, memory, none"):
        line.open_study(tmp_path / "s", data=images, space="quick", cache="ram")
    assert not (tmp_path / "s").exists()


def test_a_search_gives_the_same_trials_whatever_the_cache(tmp_path):
    data = write_images(tmp_path / "data", count=8)
    found = {}
    for mode in CACHES:
        place = {"cache": mode, "cache_dir": tmp_path / mode}
        study = line.open_study(
            tmp_path / f"study-{mode}", data=data, space="quick", targets="art", steps=6, resolution=16, **place
        )
        line.search(study, space="quick", trials=1, executor=line.Executor("local"), **place)
        trial = study.trial(0, 0)
        assert trial.weights is not None
        found[mode] = (trial.recipe, trial.evaluations[-1].accuracy, trial.weights.read_bytes())
        stored = list((tmp_path / mode).glob("*.npy"))
        assert len(stored) == (3 if mode == "disk" else 0)
    assert found["disk"] == found["memory"] == found["none"]


def test_broken_files_stop_a_search_before_anything_is_written_and_are_left_out_where_asked(tmp_path):
    data = write_images(tmp_path / "data", count=8)
    (data / "photo" / "cat" / "zz.png").write_text("x")
    (data / "art" / "cat" / "zz.png").write_text("held out, and never opened")
    options = {
        "data": data,
        "space": "quick",
        "targets": "art",
        "steps": 6,
        "resolution": 16,
        "cache_dir": tmp_path / "c",
    }
    with pytest.raises(ValueError, match="domain 'photo': 1 of 25 images can't be read"):
        line.open_study(tmp_path / "study", **options)
    assert not (tmp_path / "study").exists()
    told, calls = [], []
    for _ in range(2):
        study = line.open_study(
            tmp_path / "study",
            skip_broken=True,
            left_out=lambda *fact: told.append(fact),
            progress=lambda *fact: calls.append(fact),
            **options,
        )
    assert told == [("photo", 1)] * 2
    assert {name for name, _, _ in calls} <= {"cartoon", "photo", "sketch"}
    index = json.loads(study.index_path("photo").read_text())
    assert len(index["paths"]) == 24 and "photo/cat/zz.png" not in index["paths"]
    line.search(study, space="quick", trials=1, executor=line.Executor("local"), cache_dir=tmp_path / "c")
    assert study.trial(0, 0).state == "complete"
    with pytest.raises(ValueError, match="--skip-broken"):
        line.open_study(tmp_path / "study", **options)
    trial = study.trial_dir(0, 0) / "trial.json"
    with pytest.raises(ValueError, match="--skip-broken"):
        line.train_again(trial, data=data, cache_dir=tmp_path / "c")
    result, _ = line.train_again(trial, data=data, cache_dir=tmp_path / "c", skip_broken=True)
    assert result.best.accuracy == study.trial(0, 0).best.accuracy
    line.select(study)
    with pytest.raises(ValueError, match="domain 'art': 1 of 25 images"):
        line.evaluate_study(study, cache_dir=tmp_path / "c")
    report = line.evaluate_study(study, cache_dir=tmp_path / "c", skip_broken=True, left_out=lambda *f: told.append(f))
    assert report.folds[0].target_accuracy is not None and told[-1] == ("art", 1)


def test_another_search_in_the_study_is_said_before_anything_is_decoded(images, tmp_path):
    options = {"data": images, "space": "quick", "steps": 6, "targets": "photo", "cache_dir": tmp_path / "c"}
    study = line.open_study(tmp_path / "study", resolution=16, **options)
    line.search(study, space="quick", trials=1, executor=line.Executor("local"), cache_dir=tmp_path / "c")
    with pytest.raises(ValueError, match="is of another search .resolution"):
        line.open_study(tmp_path / "study", resolution=17, progress=lambda *_: pytest.fail("decoded"), **options)


def test_a_search_reads_a_manifest(tmp_path):
    data = write_images(tmp_path / "data", count=8)
    lines = ["path,domain,label,group,split"]
    for name in DOMAINS:
        for n, path in enumerate(read_domain(data, name).paths):
            lines.append(f"{path},{name},{path.split('/')[1]},{name}{n // 2},{'val' if n % 8 < 2 else 'train'}")
    (data / "sites.csv").write_text("\n".join(lines))
    study = line.open_study(
        tmp_path / "study", data=data / "sites.csv", space="quick", targets="art", steps=6, resolution=16
    )
    line.search(study, space="quick", trials=1, executor=line.Executor("local"))
    line.select(study)
    assert line.evaluate_study(study).folds[0].target_accuracy is not None
    for file in study.path.glob("domains/*.json"):
        assert json.loads(file.read_text())["name"] != "art" and '"art' not in file.read_text()


def test_a_class_of_one_source_is_legal_and_one_of_the_held_out_domain_alone_counts_as_wrong(tmp_path):
    data = write_images(tmp_path / "data", count=8)
    write_images(data, domains=("photo",), classes=("ant",), count=8, seed=5)
    write_images(data, domains=("art",), classes=("wombat", "yak"), count=8, seed=6)
    study = line.open_study(tmp_path / "study", data=data, space="quick", targets="art", steps=20, resolution=16)
    line.search(study, space="quick", trials=1, executor=line.Executor("local"))
    line.select(study)
    assert "wombat" not in "".join(p.read_text() for p in study.path.rglob("*.json"))
    report = line.evaluate_study(study)
    assert report.folds[0].unknown_classes == ("wombat", "yak")
    assert line.evaluate_study(study).folds[0].unknown_classes == ("wombat", "yak")  # as it was written
    accuracy = report.folds[0].target_accuracy
    assert 0 < accuracy <= 24 / 40
    for name in ("wombat", "yak"):
        for file in (data / "art" / name).iterdir():
            file.unlink()
        (data / "art" / name).rmdir()
    os.remove(study.path / "evaluation.json")
    again = line.evaluate_study(Study.open(study.path))
    assert again.folds[0].unknown_classes == () and again.folds[0].target_accuracy == pytest.approx(accuracy * 40 / 24)


SLOW = """
import sys, time
from pathlib import Path
from dgsearch.domains import cache
from dgsearch.domains.layout import read_domain
real, cache.CHUNK = cache.decode, 4
def slow(path, *, resolution):
    time.sleep(0.02)
    return real(path, resolution=resolution)
cache.decode = slow
told = lambda done, total: print(done, flush=True)
options = dict(resolution=16, cache_dir=Path(sys.argv[2]), progress=told)
cache.readable(read_domain(sys.argv[1], "art"), skip_broken=True, cache=sys.argv[3], **options)
"""


@pytest.mark.parametrize("mode", ["disk", "none"])
def test_a_killed_build_leaves_nothing_half_true_and_the_next_start_works(tmp_path, mode):
    root = write_images(tmp_path / "data", domains=("art",), count=40)
    (root / "art" / "cat" / "broken.png").write_text("x")
    place = tmp_path / "c"
    process = subprocess.Popen([sys.executable, "-c", SLOW, root, place, mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 30:
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    index = read_domain(root, "art")
    assert not cache_path(index, resolution=16, cache_dir=place).exists()
    left = {p.suffix for p in place.iterdir()}
    assert left == ({".lock", ".partial"} if mode == "disk" else {".lock"})
    kept = readable(index, resolution=16, cache_dir=place, cache=mode, skip_broken=True)
    assert len(kept) == 120
    fresh = open_images(kept, resolution=16, cache_dir=tmp_path / "fresh")
    found = open_images(kept, resolution=16, cache_dir=place, cache=mode)
    assert np.array_equal(found[np.arange(120)], fresh[np.arange(120)])
    assert not list(place.glob("*.partial"))


COUNTED = """
import sys, time
from pathlib import Path
from dgsearch.domains import cache
from dgsearch.domains.layout import read_domain
real = cache.decode
def counted(path, *, resolution):
    time.sleep(0.02)
    print(path, flush=True)
    return real(path, resolution=resolution)
cache.decode = counted
index = read_domain(sys.argv[1], "art")
print("ready", flush=True)
sys.stdin.readline()
assert cache.open_images(index, resolution=16, cache_dir=Path(sys.argv[2])).shape == (42, 16, 16, 3)
"""


def test_two_processes_that_start_at_once_on_a_fresh_node_decode_once(tmp_path):
    root = write_images(tmp_path / "data", domains=("art",))
    command = [sys.executable, "-c", COUNTED, root, tmp_path / "c"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    decoded = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(map(len, decoded)) == [0, 42]


def test_half_a_note_is_no_note(tmp_path):
    root = write_images(tmp_path / "data", domains=("art",), count=4)
    (root / "art" / "cat" / "broken.png").write_text("x")
    index = read_domain(root, "art")
    options = {"resolution": 16, "cache_dir": tmp_path / "c", "skip_broken": True}
    first = readable(index, **options)
    notes = cache_path(index, resolution=16, cache_dir=tmp_path / "c").with_suffix(".json")
    for text in (notes.read_text()[:9], "[]", '{"broken": 3}', ""):
        notes.write_text(text)
        assert readable(index, **options) == first


def test_threads_of_one_machine_build_a_file_once(images, tmp_path, monkeypatch):
    index = read_domain(images, "art")
    read = []
    real = cache.decode
    monkeypatch.setattr(cache, "decode", lambda p, *, resolution: (read.append(p), real(p, resolution=resolution))[1])
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(open_images(index, resolution=16, cache_dir=tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == len(index) and all(np.array_equal(found[0], other) for other in found)


def test_the_command_says_what_it_leaves_out(tmp_path):
    data = write_images(tmp_path / "data", count=6)
    (data / "photo" / "cat" / "zz.png").write_text("x")
    study = tmp_path / "study"
    command = [sys.executable, "-m", "dgsearch", "search", "--data", data, "--study", study, "--targets", "art"]
    command += ["--steps", "4", "--resolution", "16", "--trials", "1", "--executor", "local", "--cache", "none"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 2 and not study.exists()
    assert re.fullmatch(r"error: domain 'photo': 1 of 19 images can't be read.*--skip-broken\n", done.stderr)
    done = subprocess.run([*map(str, command), "--skip-broken"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "photo: 1 images that can't be read are left out" in done.stderr

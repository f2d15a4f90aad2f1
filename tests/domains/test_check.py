"""What a check counts, finds and says; its exit codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import write_images
from PIL import Image

from dgsearch.domains.check import check_data
from dgsearch.domains.layout import read_domain
from dgsearch.domains.split import split
from dgsearch.report.checked import render_check


def command(*arguments, code: int) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-m", "dgsearch", "data", "check", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def root(tmp_path) -> Path:
    return write_images(tmp_path / "data", domains=("art", "photo"), classes=("cat", "dog"), count=10, size=8)


def test_a_clean_set_is_counted_and_fit(root):
    calls = []
    found = check_data(root, progress=lambda done, total: calls.append((done, total)))
    assert found["domains"] == {name: {"cat": 10, "dog": 10} for name in ("art", "photo")}
    size = sum(p.stat().st_size for p in (root / "art").rglob("*.png"))
    assert found["sizes"]["art"] == {"images": 20, "bytes": size, "smallest": [8, 8], "largest": [8, 8]}
    assert found["unreadable"] == found["outside"] == found["duplicates"] == found["warnings"] == []
    assert found["ok"] is True and calls[-1] == (40, 40) and json.loads(json.dumps(found)) == found


def test_exact_duplicates_across_domains_are_found(root):
    shutil.copy(root / "art" / "cat" / "000.png", root / "photo" / "cat" / "copy.png")
    found = check_data(root)
    assert found["duplicates"] == [{"paths": ["art/cat/000.png", "photo/cat/copy.png"], "across": "domains"}]
    assert not found["ok"]


def test_duplicates_across_parts_are_found_and_those_within_a_part_are_not(root):
    for n in range(10):
        shutil.copy(root / "art" / "cat" / f"{n:03}.png", root / "art" / "cat" / f"copy{n}.png")
    index = read_domain(root, "art")
    validated = {index.paths[p] for p in split(index, seed=0).validation}
    pairs = [[f"art/cat/{n:03}.png", f"art/cat/copy{n}.png"] for n in range(10)]
    apart = [pair for pair in pairs if len(validated & set(pair)) == 1]
    assert 0 < len(apart) < 10
    assert check_data(root)["duplicates"] == [{"paths": pair, "across": "parts"} for pair in apart]


def test_a_group_keeps_copies_in_one_part(root):
    shutil.copy(root / "art" / "cat" / "000.png", root / "art" / "cat" / "copy.png")
    lines = ["path,domain,label,group"]
    for name in ("art", "photo"):
        lines += [
            f"{p},{d},{c},{'one' if p.endswith(('copy.png', '000.png')) else p}"
            for p, d, c in ((p, p.split("/")[0], p.split("/")[1]) for p in read_domain(root, name).paths)
        ]
    (root / "m.csv").write_text("\n".join(lines))
    found = check_data(root / "m.csv")
    assert found["duplicates"] == []
    assert any("groups with images in several domains" in w and "one" in w for w in found["warnings"])


def test_one_file_in_two_domains_of_a_manifest_is_a_duplicate(root):
    (root / "m.csv").write_text("path,domain,label\nart/cat/000.png,a,x\nart/cat/001.png,a,x\nart/cat/000.png,b,x\n")
    found = check_data(root / "m.csv")
    assert found["duplicates"] == [{"paths": ["art/cat/000.png"] * 2, "across": "domains"}] and not found["ok"]


def test_what_spoils_nothing_is_a_warning(root):
    shutil.rmtree(root / "photo" / "dog")
    shutil.copy(root / "art" / "cat" / "000.png", root / "art" / "dog" / "copy.png")
    (root / "art" / "Cat").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(root / "art" / "Cat" / "a.png")
    (root / "art" / "cat" / "more").mkdir()
    (root / "nothing").mkdir()
    found = check_data(root)
    text = "\n".join(found["warnings"])
    assert "domain 'photo' lacks Cat, dog" in text
    assert "the same bytes stand under several classes: art/cat/000.png" in text
    assert "differ only in case or in how Unicode writes them: Cat, cat" in text
    assert "folders inside a class folder are not read: art/cat/more" in text
    assert "domain 'nothing' holds no image" in text and found["domains"]["nothing"] == {}


def test_a_given_split_without_validation_is_said(root):
    (root / "m.csv").write_text("path,domain,label,split\nart/cat/000.png,a,x,train\nart/cat/001.png,a,x,train\n")
    found = check_data(root / "m.csv")
    assert found["ok"] and any("has no validation image" in w for w in found["warnings"])


def test_the_table_shows_counts_and_names_what_was_found(root):
    (root / "art" / "cat" / "[bold].png").write_text("x")
    text = render_check(check_data(root), width=100)
    assert "art" in text and "10" in text and "smallest, pixels" in text
    assert "can't be read: art/cat/[bold].png: not an image of a known format" in text
    assert "not fit for a search" in text


def test_the_command_and_its_exit_codes(root, tmp_path):
    done = command(root, code=0)
    assert "fit for a search" in done.stdout and done.stderr == ""
    assert json.loads(command(root, "--json", code=0).stdout) == check_data(root)
    assert command(tmp_path / "nowhere", code=2).stderr.startswith("error: no data set at")
    (root / "m.csv").write_text("path,domain\n")
    assert "needs one column 'label'" in command(root / "m.csv", code=2).stderr
    (root / "art" / "cat" / "broken.jpg").touch()
    done = command(root, "--json", code=1)
    assert json.loads(done.stdout)["unreadable"] == [{"path": "art/cat/broken.jpg", "reason": "the file is empty"}]

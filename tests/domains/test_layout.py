"""Folders and manifests give the same index; a wrong row is one line that names file and row."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import write_images

from dgsearch.domains.layout import DomainIndex, class_names, domain_names, read_domain
from dgsearch.domains.split import split


def table(root: Path) -> pd.DataFrame:
    rows = [
        {"path": str(p.relative_to(root)), "domain": p.parent.parent.name, "label": p.parent.name}
        for p in sorted(root.glob("*/*/*.png"))
    ]
    return pd.DataFrame(rows)


def write_manifest(root: Path, frame: pd.DataFrame, suffix=".csv", name="manifest") -> Path:
    path = root / f"{name}{suffix}"
    frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_parquet(path, index=False)
    return path


@pytest.fixture
def root(tmp_path) -> Path:
    return write_images(tmp_path / "data", domains=("art", "photo"), classes=("cat", "dog"), count=10, size=8)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".CSV"])
def test_a_manifest_gives_the_index_that_folders_give(root, suffix):
    frame = table(root).sample(frac=1, random_state=0)
    path = root / f"manifest{suffix}"
    frame.to_parquet(path) if suffix == ".parquet" else frame.to_csv(path, index=False)
    assert domain_names(path) == domain_names(root) == ["art", "photo"]
    for name in ("art", "photo"):
        assert read_domain(path, name) == read_domain(root, name)
        assert read_domain(path, name).fingerprint == read_domain(root, name).fingerprint


def test_a_folder_is_read_by_its_folders_whatever_else_lies_in_it(root):
    before = read_domain(root, "art")
    (root / "manifest.csv").write_text("not,a manifest\n")
    (root / "digits.json").write_text("{}")
    (root / "art" / "notes.txt").write_text("x")
    (root / "art" / "cat" / "notes.txt").write_text("x")
    (root / "art" / "cat" / "deeper").mkdir()
    (root / "art" / "cat" / "folder.png").mkdir()
    assert read_domain(root, "art") == before and domain_names(root) == ["art", "photo"]


@pytest.mark.parametrize("parts", [("train", "val"), ("train", "valid", "test"), ("Train", "Validation")])
def test_the_folders_of_parts_are_read_together_and_are_no_classes(tmp_path, parts):
    for n, part in enumerate(parts):
        write_images(tmp_path / part, domains=("art",), classes=("cat", "dog")[: 2 - (n > 1)], count=3, size=8)
        (tmp_path / "data" / "art").mkdir(parents=True, exist_ok=True)
        (tmp_path / part / "art").rename(tmp_path / "data" / "art" / part)
    index = read_domain(tmp_path / "data", "art")
    assert class_names([index]) == ("cat", "dog") and index.parts == ()
    assert len(index) == sum(1 for _ in (tmp_path / "data").rglob("*.png"))
    assert set(index.paths) == {str(p.relative_to(tmp_path / "data")) for p in (tmp_path / "data").rglob("*.png")}


@pytest.mark.parametrize("classes", [("train",), ("train", "truck"), ("val", "test"), ("train", "val", "car")])
def test_classes_that_happen_to_be_called_like_parts_stay_classes(tmp_path, classes):
    write_images(tmp_path, domains=("art",), classes=classes, count=2, size=12)
    assert class_names([read_domain(tmp_path, "art")]) == tuple(sorted(classes))


def test_groups_of_a_manifest_stay_whole(root):
    frame = table(root)
    frame["group"] = [f"patient {n % 7}" for n in range(len(frame))]
    index = read_domain(write_manifest(root, frame), "art")
    parts = split(index, seed=0)
    where = {}
    for name in ("train", "guide", "validation"):
        for position in getattr(parts, name):
            assert where.setdefault(index.groups[position], name) == name
    assert len(set(index.groups)) == 7
    assert index.fingerprint != read_domain(root, "art").fingerprint


def test_a_given_split_is_obeyed_and_the_guide_comes_out_of_its_training_images(tmp_path):
    root = write_images(tmp_path, domains=("art",), classes=("cat", "dog"), count=60, size=8)
    frame = table(root)
    frame["split"] = ["val" if n % 6 == 0 else "validation" if n % 6 == 1 else "train" for n in range(len(frame))]
    index = read_domain(write_manifest(root, frame), "art")
    assert Counter(index.parts) == {"train": 80, "validation": 40}
    parts = split(index, seed=0)
    assert {index.parts[p] for p in parts.validation} == {"validation"} and len(parts.validation) == 40
    assert {index.parts[p] for p in (*parts.train, *parts.guide)} == {"train"}
    assert Counter(index.labels[p] for p in parts.guide) == {"cat": 4, "dog": 4} and len(parts.train) == 72
    other = split(index, seed=1)
    assert np.array_equal(other.validation, parts.validation) and not np.array_equal(other.guide, parts.guide)
    assert index.fingerprint != read_domain(root, "art").fingerprint


def test_a_given_split_keeps_groups_whole_in_the_guide(tmp_path):
    root = write_images(tmp_path, domains=("art",), classes=("cat",), count=60, size=8)
    frame = table(root)
    frame["group"] = [f"g{n // 3}" for n in range(60)]
    frame["split"] = ["validation" if n < 15 else "train" for n in range(60)]
    index = read_domain(write_manifest(root, frame), "art")
    parts = split(index, seed=0)
    groups = [{index.groups[p] for p in getattr(parts, name)} for name in ("train", "guide", "validation")]
    assert groups[0] and groups[1] and len(groups[2]) == 5
    assert not groups[0] & groups[1] and not (groups[0] | groups[1]) & groups[2]


def test_one_domain_may_have_a_split_and_another_none(root):
    frame = table(root)
    frame["split"] = ["" if d == "photo" else "val" if n % 3 == 0 else "train" for n, d in enumerate(frame["domain"])]
    path = write_manifest(root, frame)
    assert read_domain(path, "photo").parts == () and len(read_domain(path, "art").parts) == 20
    frame["split"] = ["train" if d == "photo" else s for d, s in zip(frame["domain"], frame["split"], strict=True)]
    with pytest.raises(ValueError, match="the split given for domain 'photo' has no validation image"):
        split(read_domain(write_manifest(root, frame), "photo"), seed=0)


def test_an_index_names_no_other_domain_and_survives_json(root, tmp_path):
    frame = table(root).assign(group=[f"g{n}" for n in range(40)], split="train")
    index = read_domain(write_manifest(root, frame), "art")
    index.save(tmp_path / "0.json")
    assert "photo" not in (tmp_path / "0.json").read_text()
    assert DomainIndex.load(tmp_path / "0.json") == index
    old = {k: v for k, v in json.loads((tmp_path / "0.json").read_text()).items() if k != "parts"}
    (tmp_path / "0.json").write_text(json.dumps(old))
    assert DomainIndex.load(tmp_path / "0.json").parts == ()


def test_cells_that_pandas_would_take_for_something_else_stay_text(tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "b.png").touch()
    path = tmp_path / "m.csv"
    path.write_text("\ufeffpath , domain,label\na.png,007,NA\nb.png,007,1.0\n", encoding="utf-8")
    assert domain_names(path) == ["007"] and class_names([read_domain(path, "007")]) == ("1.0", "NA")
    frame = pd.DataFrame({"path": ["a.png", "b.png"], "domain": [7, 7], "label": [0, 1], "group": [1, 2]})
    index = read_domain(write_manifest(tmp_path, frame, ".parquet"), "7")
    assert index.labels == ("0", "1") and index.groups == ("1", "2")


def rows(*lines: str, header="path,domain,label,group,split") -> str:
    return "\n".join([header, *lines, ""])


WRONG = {
    "a missing column": (rows("a.png,art", header="path,domain"), "needs one column 'label'; it has path, domain"),
    "a column twice": (rows("a.png,art,x,y", header="path,domain,label,label "), "needs one column 'label'"),
    "no row": (rows(), "has no row"),
    "an empty file": ("", "can't read the manifest"),
    "a row too long": (rows("a.png,art,x,g,train,more"), "can't read the manifest"),
    "no domain": (rows("a.png,art,x,g,train", "b.png, ,x,g,train"), "row 3 of .*: the cell 'domain' is empty"),
    "no label": (rows("a.png,art,,g,train"), "row 2 of .*: the cell 'label' is empty"),
    "no path": (rows(",art,x,g,train"), "row 2 of .*: the cell 'path' is empty"),
    "no group": (rows("a.png,art,x,,train"), "row 2 of .*: the cell 'group' is empty"),
    "no split": (rows("a.png,art,x,g,train", "b.png,art,x,h,"), "row 3 of .*: the cell 'split' is empty"),
    "an unknown split": (rows("a.png,art,x,g,test"), "row 2 .*unknown split 'test' .known: train, val, validation"),
    "a file twice": (rows("a.png,art,x,g,train", "./a.png,art,y,h,train"), "row 3 .*'a.png' stands in row 2 already"),
    "a path outside": (rows("../a.png,art,x,g,train"), "row 2 .*'../a.png' leaves the manifest's folder"),
    "an absolute path": (rows("/etc/hosts,art,x,g,train"), "row 2 .*'/etc/hosts' leaves the manifest's folder"),
    "a group in two parts": (
        rows("a.png,art,x,g,train", "b.png,art,x,g,val"),
        "row 3 .*the group 'g' is in both parts",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_manifest_is_one_line_that_names_the_row(tmp_path, what):
    text, message = WRONG[what]
    path = tmp_path / "m.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_domain(path, "art")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    if "row" in message and "no row" not in message:
        assert "needed: path, domain, label" in str(caught.value)


def test_a_wrong_row_concerns_its_own_domain_only(tmp_path):
    (tmp_path / "m.csv").write_text(rows("a.png,art,x,g,train", "b.png,photo,,,nonsense"))
    assert read_domain(tmp_path / "m.csv", "art").paths == ("a.png",)


@pytest.mark.parametrize("name", ["m.parquet", "m.xlsx", "m"])
def test_files_that_are_no_manifest_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x00\xff\xfe nothing")
    with pytest.raises(ValueError, match=f"manifest.*{name}") as caught:
        domain_names(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_manifest_that_changed_is_read_again(root):
    frame = table(root)
    path = write_manifest(root, frame)
    assert len(read_domain(path, "art")) == 20
    write_manifest(root, frame.iloc[1:])
    assert len(read_domain(path, "art")) == 19

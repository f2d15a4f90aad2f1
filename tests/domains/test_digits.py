"""The built-in set: what it holds, that it repeats, and that it never harms what is already there."""

import csv
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dgsearch.domains import digits
from dgsearch.domains.digits import COUNTS, build_digits, halves, read_mnist

TOTAL = sum(COUNTS.values())


def contents(root: Path) -> dict[str, str]:
    """Return the hash of every file under a folder by its path."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def rewrite_record(root: Path, key: str, value: object) -> None:
    record = json.loads((root / "digits.json").read_text())
    (root / "digits.json").write_text(json.dumps({**record, key: value}))


@pytest.fixture(scope="module")
def calls() -> list[tuple[int, int]]:
    return []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, int]]) -> Path:
    # A parent that is not there yet, as for a user's first command.
    out = tmp_path_factory.mktemp("digits") / "data" / "digits"
    return build_digits(out, seed=0, progress=lambda done, total: calls.append((done, total)))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A folder with the record of the set of seed 0, and no image."""
    root = tmp_path / "set"
    root.mkdir()
    (root / "digits.json").write_text(json.dumps(digits._record(0)))
    return root


def test_counts_of_domains_and_classes(built: Path):
    assert sorted(path.name for path in built.iterdir() if path.is_dir()) == sorted(COUNTS)
    for domain, count in COUNTS.items():
        a_class = [len(list((built / domain / str(label)).iterdir())) for label in range(10)]
        assert sum(a_class) == count
        if domain != "optdigits":
            assert a_class == [250] * 10
    optdigits = [len(list((built / "optdigits" / str(label)).iterdir())) for label in range(10)]
    assert optdigits == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_every_image_is_32_by_32_rgb(built: Path):
    for path in built.glob("*/*/*"):
        with Image.open(path) as image:
            assert (image.format, image.size, image.mode) == ("PNG", (32, 32), "RGB"), path


def test_no_two_images_are_the_same(built: Path):
    hashes = [value for path, value in contents(built).items() if path.endswith(".png")]
    assert len(set(hashes)) == len(hashes) == TOTAL


def test_manifest_agrees_with_the_folders(built: Path):
    with (built / "manifest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["path", "domain", "label"]
    paths = [row["path"] for row in rows]
    assert paths == sorted(path.relative_to(built).as_posix() for path in built.glob("*/*/*.png"))
    assert all(row["path"].split("/")[:2] == [row["domain"], row["label"]] for row in rows)


def test_only_mnist_m_and_syn_have_colour(built: Path):
    for domain in COUNTS:
        images = [np.asarray(Image.open(path)) for path in sorted((built / domain).glob("*/000*.png"))]
        coloured = np.mean([np.ptp(image, axis=-1).max() > 0 for image in images])
        assert coloured == (0 if domain in ("mnist", "optdigits") else 1)


def test_credits_name_every_domain_and_its_licence(built: Path):
    text = (built / "CREDITS.md").read_text(encoding="utf-8")
    assert all(f"`{domain}`" in text for domain in COUNTS)
    assert all(licence in text for licence in ("CC BY-SA 3.0", "CC BY 4.0", "CC BY 2.0", "Vera", "STIX", "BaKoMa"))


def test_progress_rises_to_the_total(built: Path, calls: list[tuple[int, int]]):
    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    assert calls[-1] == (TOTAL, TOTAL)
    assert {total for _, total in calls} == {TOTAL}


def test_the_same_seed_gives_the_same_bytes(built: Path, tmp_path: Path):
    assert contents(build_digits(str(tmp_path / "again"), seed=0)) == contents(built)


def test_another_seed_differs(built: Path):
    first = {}
    for domain, label, image in digits._images(1):
        first.setdefault(domain, image)
        if domain == "syn":
            assert label == 0
            break
    same = {
        domain: np.array_equal(image, np.asarray(Image.open(min((built / domain).glob("*/0000.png")))))
        for domain, image in first.items()
    }
    # The UCI digits are only enlarged: nothing is drawn for them.
    assert same == {"mnist": False, "mnist_m": False, "optdigits": True, "syn": False}


def test_mnist_and_mnist_m_share_no_digit(built: Path):
    source, labels = read_mnist()
    first, second = halves(labels, seed=0)
    assert sorted([*first, *second]) == list(range(5000))
    for half in (first, second):
        assert np.bincount(labels[half]).tolist() == [250] * 10
    rows = [{source[index].tobytes() for index in half} for half in (first, second)]
    assert len(rows[0]) == len(rows[1]) == 2500
    assert not rows[0] & rows[1]
    written = {np.asarray(Image.open(path))[2:-2, 2:-2, 0].tobytes() for path in (built / "mnist").glob("*/*.png")}
    assert written == rows[0]


def test_another_seed_halves_otherwise():
    labels = np.repeat(np.arange(10), 20)
    assert not np.array_equal(halves(labels, seed=0)[0], halves(labels, seed=1)[0])


def test_mnist_m_is_the_patch_minus_the_digit():
    rng = np.random.default_rng(0)
    photos = [np.full((40, 50, 3), (10, 100, 240), dtype=np.uint8)]
    digit = rng.integers(0, 256, (32, 32), dtype=np.uint8)
    expected = np.abs(np.array([10, 100, 240]) - digit[..., None].astype(int))
    np.testing.assert_array_equal(digits.blend(digit, photos=photos, rng=rng), expected)


def test_every_font_has_ten_different_digits():
    for font in digits._fonts():
        drawn = {font.getmask(str(label)).getbbox() and bytes(font.getmask(str(label))) for label in range(10)}
        assert len(drawn) == 10 and None not in drawn


def test_running_twice_changes_nothing(built: Path):
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    called = []
    assert build_digits(built, seed=0, progress=lambda done, total: called.append(done)) == built
    assert not called
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == before


def test_a_foreign_folder_is_refused_and_untouched(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="mine' already exists and isn't a digits set; remove it or") as caught:
        build_digits(tmp_path / "mine")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("text", ["", "[]", "not json", "{}"])
def test_a_foreign_record_is_refused(tmp_path: Path, text: str):
    (tmp_path / "digits.json").write_text(text)
    with pytest.raises(ValueError, match="already"):
        build_digits(tmp_path)
    assert (tmp_path / "digits.json").read_text() == text


def test_a_file_is_refused(tmp_path: Path):
    (tmp_path / "digits").write_text("a file")
    with pytest.raises(ValueError, match="already exists"):
        build_digits(tmp_path / "digits")
    assert (tmp_path / "digits").read_text() == "a file"


def test_a_set_of_another_seed_is_refused(recorded: Path):
    with pytest.raises(ValueError, match="already holds a digits set of seed 0, not of seed 3; remove it or"):
        build_digits(recorded, seed=3)


def test_a_set_of_another_version_is_refused(recorded: Path):
    rewrite_record(recorded, "pillow", "0.1")
    with pytest.raises(ValueError, match=r"of pillow 0\.1, not of pillow \d+"):
        build_digits(recorded)


def test_a_set_with_missing_images_is_refused(recorded: Path):
    with pytest.raises(ValueError, match="mnist' holds 0 images, not 2500; remove it or"):
        build_digits(recorded)


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, fault: type[BaseException]):
    def interrupt(done: int, total: int) -> None:
        raise fault

    with pytest.raises(fault):
        build_digits(tmp_path / "digits", progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(digits, "PACKAGES", ("numpy", "no-such-package"))
    with pytest.raises(ValueError, match="'no-such-package' isn't installed.*pip install no-such-package"):
        build_digits(tmp_path / "digits")
    assert not list(tmp_path.iterdir())

"""Every odd file has one outcome: decoded right, or named, counted, and left out only where that is asked for."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dgsearch.domains import cache
from dgsearch.domains.cache import decode, open_images, readable
from dgsearch.domains.check import check_data
from dgsearch.domains.layout import class_names, read_domain

RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)
COLOUR = np.stack([RAMP, RAMP[::-1], RAMP.T], -1)  # [H, W, 3]


def put(root: Path, name: str, image: Image.Image, **options) -> Path:
    path = root / "art" / "cat" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def pixels(path: Path) -> np.ndarray:
    return decode(path, resolution=16)


def png(width: int, height: int, data: bytes = b"", bits=1, kind=0) -> bytes:
    """A PNG by hand: of any size, whatever it holds."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def test_cmyk_becomes_rgb(tmp_path):
    path = put(tmp_path, "a.jpg", Image.new("CMYK", (16, 16), (0, 255, 255, 0)), quality=95)  # red
    assert np.abs(pixels(path).astype(int) - (255, 0, 0)).max() < 20
    path = put(tmp_path, "a.tif", Image.new("CMYK", (16, 16), (255, 255, 0, 0)))
    assert (pixels(path) == (0, 0, 255)).all()


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path, name):
    path = put(tmp_path, name, Image.fromarray(RAMP.astype(np.uint16) * 257))
    assert (pixels(path) == RAMP[..., None]).all()


def test_values_of_32_bits_are_refused(tmp_path):
    for name, values in (("f.tif", RAMP.astype(np.float32)), ("i.tif", RAMP.astype(np.int32) * 100_000)):
        with pytest.raises(ValueError, match="32 bits"):
            pixels(put(tmp_path, name, Image.fromarray(values)))


def test_grey_and_bilevel_become_rgb(tmp_path):
    assert (pixels(put(tmp_path, "a.png", Image.fromarray(RAMP))) == RAMP[..., None]).all()
    bilevel = Image.fromarray(RAMP > 99)
    assert (pixels(put(tmp_path, "b.png", bilevel)) == np.where(RAMP > 99, 255, 0)[..., None]).all()


def test_a_palette_is_looked_up(tmp_path):
    image = Image.new("P", (16, 16), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    assert (pixels(put(tmp_path, "a.png", image)) == (10, 200, 30)).all()
    path = put(tmp_path, "b.png", image, transparency=1)
    assert (pixels(path) == 255).all()
    path = put(tmp_path, "c.png", image, transparency=bytes([255, 0]))
    assert (pixels(path) == 255).all()


def test_what_is_transparent_stands_on_white(tmp_path):
    image = np.zeros((16, 16, 4), np.uint8)
    image[:8, :, 0], image[:8, :, 3] = 255, 255
    found = pixels(put(tmp_path, "a.png", Image.fromarray(image)))
    assert (found[:8] == (255, 0, 0)).all() and (found[8:] == 255).all()
    half = Image.new("LA", (16, 16), (0, 128))
    assert (np.abs(pixels(put(tmp_path, "b.png", half)).astype(int) - 127) <= 1).all()


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "a.webp"])
def test_pictures_are_turned_as_exif_says(tmp_path, name):
    image = Image.new("RGB", (16, 16), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 16, 8))  # the upper half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: shown, the white half is on the right
    found = pixels(put(tmp_path, name, image, exif=exif)).mean(-1)
    assert found[:, 10:].min() > 200 and found[:, :6].max() < 55


def test_damaged_exif_is_ignored(tmp_path):
    path = put(tmp_path, "a.jpg", Image.fromarray(COLOUR), exif=b"Exif\0\0nonsense", quality=95)
    assert pixels(path).shape == (16, 16, 3)


def test_of_an_animated_gif_the_first_frame_is_taken_and_check_says_so(tmp_path):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    path = put(tmp_path, "a.gif", frames[0], save_all=True, append_images=frames[1:])
    assert (pixels(path) == (255, 0, 0)).all()
    found = check_data(tmp_path)
    assert found["ok"] and any("several frames" in w and "art/cat/a.gif" in w for w in found["warnings"])


def test_upper_case_suffixes_are_read_and_hidden_files_and_folders_are_not(tmp_path):
    for name in ("A.PNG", "b.JPG", "c.Jpeg", "d.TIF", ".hidden.png", "._A.PNG"):
        put(tmp_path, name, Image.fromarray(COLOUR))
    (tmp_path / ".git" / "cat").mkdir(parents=True)
    (tmp_path / "art" / ".thumbnails").mkdir()
    (tmp_path / "art" / ".thumbnails" / "a.png").write_text("x")
    index = read_domain(tmp_path, "art")
    assert [Path(p).name for p in index.paths] == ["A.PNG", "b.JPG", "c.Jpeg", "d.TIF"]
    assert class_names([index]) == ("cat",) and list(check_data(tmp_path)["domains"]) == ["art"]


def test_an_empty_class_folder_is_no_class_and_said(tmp_path):
    put(tmp_path, "a.png", Image.fromarray(COLOUR))
    (tmp_path / "art" / "dog").mkdir()
    assert class_names([read_domain(tmp_path, "art")]) == ("cat",)
    found = check_data(tmp_path)
    assert found["ok"] and "class folder art/dog is empty: no class" in found["warnings"]


def test_names_in_other_scripts_and_names_that_are_not_unicode(tmp_path):
    folder = tmp_path / "写真" / "кошка"
    folder.mkdir(parents=True)
    for n, name in enumerate(("ελιά.png", "قطة.png", "a b%[x].png", os.fsdecode(b"\xff\xfe.png"))):
        Image.fromarray(COLOUR + np.uint8(n)).save(folder / name)
    index = read_domain(tmp_path, "写真")
    assert len(index) == 4 and class_names([index]) == ("кошка",)
    assert open_images(index, resolution=16, cache_dir=tmp_path / "c").shape == (4, 16, 16, 3)
    found = check_data(tmp_path)
    assert found["domains"] == {"c": {}, "写真": {"кошка": 4}} and found["ok"]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_very_large_jpeg_is_read_scaled_down(tmp_path):
    path = put(tmp_path, "a.jpg", Image.new("L", (16_000, 12_000), 200), quality=50)  # 192 million pixels
    assert (np.abs(pixels(path).astype(int) - 200) < 3).all()
    assert check_data(tmp_path)["sizes"]["art"]["largest"] == [16_000, 12_000]


def test_a_very_large_picture_that_cannot_be_scaled_while_read_is_named(tmp_path):
    put(tmp_path, "ok.png", Image.fromarray(COLOUR))
    (tmp_path / "art" / "cat" / "huge.png").write_bytes(png(20_000, 10_000))
    found = check_data(tmp_path)
    assert [row["path"] for row in found["unreadable"]] == ["art/cat/huge.png"] and not found["ok"]
    assert "too large: 20000 × 10000 pixels, more than 178,956,970" in found["unreadable"][0]["reason"]
    # Above the size from which Pillow warns, and below that limit: read, without a warning.
    small = png(10_000, 9_000, (b"\0" + b"\xff" * 1250) * 9_000)
    (tmp_path / "art" / "cat" / "large.png").write_bytes(small)
    assert (pixels(tmp_path / "art" / "cat" / "large.png") == 255).all()


def test_a_progressive_jpeg_is_held_whole_so_its_size_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "PIXEL_LIMIT", 10_000)
    image = Image.new("RGB", (200, 200))
    assert pixels(put(tmp_path, "a.jpg", image)).shape == (16, 16, 3)
    with pytest.raises(ValueError, match="too large: 200 × 200"):
        pixels(put(tmp_path, "b.jpg", image, progressive=True))


def broken_set(root: Path) -> dict[str, str]:
    """Write a domain with seven good files and one of each broken kind; return what is said of each."""
    for n in range(7):
        put(root, f"good{n}.png", Image.fromarray(COLOUR + np.uint8(n)))
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    truncated(put(root, "truncated.jpg", Image.fromarray(noise)))
    truncated(put(root, "truncated.png", Image.fromarray(noise)))
    folder = root / "art" / "cat"
    (folder / "text.jpg").write_text("P\nthis is a text\n")
    (folder / "zero.png").touch()
    (folder / "garbage.webp").write_bytes(b"RIFF\0\0\0\0WEBPVP8 nonsense")
    (folder / "dangling.png").symlink_to("nowhere.png")
    secret = root.parent / "secret.png"
    Image.fromarray(COLOUR).save(secret)
    (folder / "outside.png").symlink_to(secret)
    return {
        "art/cat/dangling.png": "No such file",
        "art/cat/garbage.webp": "",
        "art/cat/outside.png": "a link that leaves the data's folder",
        "art/cat/text.jpg": "not an image of a known format",
        "art/cat/truncated.jpg": "truncated",
        "art/cat/truncated.png": "truncated",
        "art/cat/zero.png": "the file is empty",
    }


def test_broken_files_are_counted_in_one_line_and_left_out_only_where_asked(tmp_path):
    root = tmp_path / "data"
    reasons = broken_set(root)
    index = read_domain(root, "art")
    options = {"resolution": 16, "cache_dir": tmp_path / "c"}
    for mode in ("none", "memory", "disk"):
        for _ in range(2):
            with pytest.raises(
                ValueError, match="domain 'art': 7 of 14 images can't be read, the first: art/cat/"
            ) as e:
                readable(index, cache=mode, **options)
            assert "dangling.png: No such file" in str(e.value) and "\n" not in str(e.value)
            assert "`dgsearch data check DATA` lists them; leave them out with --skip-broken" in str(e.value)
        kept = readable(index, cache=mode, skip_broken=True, **options)
        assert [Path(p).name for p in kept.paths] == [f"good{n}.png" for n in range(7)]
        assert kept.fingerprint != index.fingerprint
        found = open_images(kept, cache=mode, **options)
        assert (found[np.arange(7)] == COLOUR + np.arange(7, dtype=np.uint8)[:, None, None, None]).all()
    found = check_data(root)
    told = {row["path"]: row["reason"] for row in [*found["unreadable"], *found["outside"]]}
    assert told.keys() == reasons.keys() and all(reasons[path] in reason for path, reason in told.items())
    assert [row["path"] for row in found["outside"]] == ["art/cat/outside.png"] and not found["ok"]


def test_a_second_start_looks_at_the_broken_files_alone_and_sees_a_mended_one(tmp_path, monkeypatch):
    root = tmp_path / "data"
    broken_set(root)
    index = read_domain(root, "art")
    options = {"resolution": 16, "cache_dir": tmp_path / "c", "skip_broken": True}
    first = readable(index, **options)
    read = []
    monkeypatch.setattr(
        cache, "decode", lambda path, *, resolution: (read.append(path.name), decode(path, resolution=16))[1]
    )
    assert readable(index, **options) == first
    open_images(first, resolution=16, cache_dir=tmp_path / "c")
    assert read and not any(name.startswith("good") for name in read)
    (root / "art" / "cat" / "nowhere.png").write_bytes((root / "art" / "cat" / "good0.png").read_bytes())
    os.remove(root / "art" / "cat" / "zero.png")
    mended = readable(read_domain(root, "art"), **options)
    assert "art/cat/dangling.png" in mended.paths


def test_a_domain_of_broken_files_only_is_an_error_even_when_they_are_skipped(tmp_path):
    put(tmp_path, "a.png", Image.fromarray(COLOUR)).write_text("x")
    with pytest.raises(ValueError, match="domain 'art': none of its 1 images can be read"):
        readable(read_domain(tmp_path, "art"), resolution=16, cache_dir=tmp_path / "c", skip_broken=True)


def test_a_fault_of_the_machine_is_not_taken_for_a_broken_file(tmp_path, monkeypatch):
    put(tmp_path, "a.png", Image.fromarray(COLOUR))

    def failing(path, *options):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(cache, "_open", failing)
    with pytest.raises(OSError, match="Too many open files"):
        readable(read_domain(tmp_path, "art"), resolution=16, cache_dir=tmp_path / "c", skip_broken=True)
    assert not list((tmp_path / "c").glob("*.json"))


def test_links_that_leave_the_root_are_never_opened(tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    put(outside, "secret.png", Image.fromarray(COLOUR))
    root = tmp_path / "data"
    put(root, "a.png", Image.fromarray(COLOUR))
    (root / "art" / "dog").symlink_to(outside / "art" / "cat")  # a class
    (root / "photo").symlink_to(outside / "art")  # a domain
    opened = []
    real = cache._open
    monkeypatch.setattr(cache, "_open", lambda path: (opened.append(path), real(path))[1])
    found = check_data(root)
    assert [row["path"] for row in found["outside"]] == ["photo", "art/dog"]
    assert [path.name for path in opened] == ["a.png"]
    with pytest.raises(ValueError, match="domain 'photo' .* is a link to a place outside"):
        read_domain(root, "photo")
    kept = readable(read_domain(root, "art"), resolution=16, cache_dir=tmp_path / "c", skip_broken=True)
    assert kept.paths == ("art/cat/a.png",)


def test_links_inside_the_root_and_a_root_that_is_a_link_are_fine(tmp_path):
    put(tmp_path / "real", "a.png", Image.fromarray(COLOUR))
    (tmp_path / "real" / "art" / "cat" / "b.png").symlink_to("a.png")
    (tmp_path / "data").symlink_to(tmp_path / "real")
    index = read_domain(tmp_path / "data", "art")
    assert len(readable(index, resolution=16, cache_dir=tmp_path / "c")) == 2
    assert check_data(tmp_path / "data")["outside"] == []


def test_a_manifests_links_and_missing_files_are_broken_files(tmp_path):
    put(tmp_path, "a.png", Image.fromarray(COLOUR))
    Image.fromarray(COLOUR).save(tmp_path / "secret.png")
    data = tmp_path / "art"
    (data / "link.png").symlink_to(tmp_path / "secret.png")
    (data / "m.csv").write_text("path,domain,label\ncat/a.png,d,x\nlink.png,d,x\nmissing.png,d,x\n")
    index = read_domain(data / "m.csv", "d")
    assert len(index) == 3
    kept = readable(index, resolution=16, cache_dir=tmp_path / "c", skip_broken=True)
    assert kept.paths == ("cat/a.png",)
    found = check_data(data / "m.csv")
    assert [row["path"] for row in found["unreadable"]] == ["missing.png"]
    assert [row["path"] for row in found["outside"]] == ["link.png"]

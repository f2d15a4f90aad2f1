"""Images decoded: once into a memory-mapped array a domain (disk), once a process (memory), or each time (none)."""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import platformdirs
from filelock import FileLock
from PIL import Image, ImageFile, ImageOps

from dgsearch.component import known_or_raise
from dgsearch.domains.layout import DomainIndex, leaves

FORMAT = 2  # of the decoded pixels: raise it when decoding changes
CACHES = ("disk", "memory", "none")
PIXEL_LIMIT = 178_956_970  # pixels held to read one image, as Pillow's own limit; a large JPEG is read scaled down
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
CHUNK = 64  # images a thread decodes before it says so

OUTSIDE = "a link that leaves the data's folder"

Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")

_AT_THE_FILE = {
    None,
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
}
"""Error numbers that one file has; others (too many open files, a disk that fails) are the machine's, and raised."""


class Images(Protocol):
    """A domain's images, uint8: indexed by positions [n] it gives an array [n, H, W, 3]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, H, W, 3]."""

    def __getitem__(self, rows: np.ndarray | slice) -> np.ndarray: ...


@dataclass(frozen=True)
class Look:
    """An image file, read: what it holds and its pixels, uint8 [H, W, 3]."""

    width: int
    height: int
    animated: bool
    pixels: np.ndarray


class UnreadableError(ValueError):
    """A file that can't be read as an image, and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"can't read the image {path}: {reason}")
        self.reason = reason


def default_cache_dir() -> Path:
    """Return the folder for decoded images: ``$DGSEARCH_CACHE`` or the user's cache folder."""
    return Path(os.environ.get("DGSEARCH_CACHE") or platformdirs.user_cache_dir("dgsearch"))


def decode(path: Path, *, resolution: int) -> np.ndarray:
    """Return an image as RGB bytes [H, W, 3], upright, scaled to resolution × resolution.

    CMYK and grey become RGB, 16 bits are scaled to 8, what is transparent stands on white, and of several
    frames the first is taken.

    Raises:
        ValueError: if the file is not a readable image, or holds more than ``PIXEL_LIMIT`` pixels and can't be
            read scaled down.
    """
    return look(path, resolution=resolution).pixels


def look(path: Path, *, resolution: int) -> Look:
    """Read an image file as ``decode`` does, and say what it holds.

    Raises:
        ValueError: as ``decode``.
    """
    try:
        with _open(path) as image:
            width, height = image.size
            animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
            image.draft("RGB", (resolution, resolution))
            # A progressive JPEG is held whole by the decoder, whatever the scale.
            held = width * height if image.info.get("progressive") else image.width * image.height
            if held > PIXEL_LIMIT:
                raise ValueError(f"too large: {width} × {height} pixels, more than {PIXEL_LIMIT:,} in all")
            image.load()
            upright = _eight_bits(_upright(image))
            if upright.size != (resolution, resolution):
                upright = upright.resize((resolution, resolution), Image.Resampling.BICUBIC)
            return Look(width, height, animated, np.asarray(upright))
    except Exception as error:  # a damaged file makes Pillow raise almost anything
        if isinstance(error, OSError) and error.errno not in _AT_THE_FILE:
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnreadableError(path, reason or type(error).__name__) from None


def _open(path: Path) -> ImageFile.ImageFile:
    """Open an image. Not ``Image.open``: it refuses, or warns of, a large JPEG that can be read scaled down."""
    with path.open("rb") as file:
        prefix = file.read(16)
    if not prefix:
        raise ValueError("the file is empty")
    _load_plugins()
    for name in FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is None or accept(prefix) is True:
            return factory(path, str(path))  # type: ignore[arg-type]  # they take paths too
    raise ValueError(f"not an image of a known format ({', '.join(FORMATS)})")


@once
def _load_plugins() -> None:
    Image.init()


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a damaged EXIF block says nothing of how the picture stands
        return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return an image as RGB with 8 bits a channel."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)  # [H, W]
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise ValueError("its pixels are of 32 bits, and which value is white is not known")
        image = Image.fromarray(((values.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def read_image(index: DomainIndex, path: str, *, resolution: int) -> np.ndarray:
    """Decode one image of a domain, [H, W, 3]; a link that leaves the data's folder is not followed.

    Raises:
        ValueError: as ``decode``, or if the path leaves the data's folder.
    """
    if leaves(index.root, path):
        raise UnreadableError(Path(index.root) / path, OUTSIDE)
    return decode(Path(index.root) / path, resolution=resolution)


def cache_path(index: DomainIndex, *, resolution: int, cache_dir: Path) -> Path:
    """Return where a domain's decoded images are kept; the name tells nothing of the domain."""
    facts = repr((FORMAT, index.fingerprint, index.modified, resolution))
    return cache_dir / f"{hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()}.npy"


def readable(
    index: DomainIndex,
    *,
    resolution: int,
    cache_dir: Path,
    cache: str = "disk",
    skip_broken: bool = False,
    progress: Progress | None = None,
) -> DomainIndex:
    """Return the index of what can be read, having decoded all of a domain if no one has yet.

    With ``cache="disk"`` the images are kept; otherwise only which files are broken is remembered. Those are
    kept in a file beside the images, and a second call looks at them alone.

    Raises:
        ValueError: if a file can't be read and ``skip_broken`` is not set, or if none can be read.
    """
    known_or_raise("cache", cache, CACHES)
    broken = _broken(index, resolution, cache_dir, cache == "disk", progress)
    if not broken:
        return index
    if not skip_broken:
        raise ValueError(_complaint(index, broken))
    kept = index.without(broken)
    if len(kept) == 0:
        raise ValueError(f"domain {index.name!r}: none of its {len(index)} images can be read")
    return kept


def open_images(
    index: DomainIndex,
    *,
    resolution: int,
    cache_dir: Path,
    cache: str = "disk",
    progress: Progress | None = None,
) -> Images:
    """Return a domain's images [N, H, W, 3].

    ``disk``: memory-mapped, decoded first if no one has. Processes of one machine build the file once, under a
    lock; it is written aside and renamed, so an interrupted build leaves nothing that could be taken for a
    whole one. ``memory``: decoded once a process, and kept until ``forget_others``. ``none``: decoded at each
    access, by threads. All three give the same bytes.

    Raises:
        ValueError: if files can't be read; with ``none``, only when one of them is asked for.
    """
    known_or_raise("cache", cache, CACHES)
    if cache == "none":
        return Undecoded(index, resolution)
    path = cache_path(index, resolution=resolution, cache_dir=cache_dir)
    if cache == "memory":
        if path not in _memory:
            _memory[path] = np.load(path, allow_pickle=False) if path.exists() else _in_memory(index, resolution)
        return _memory[path]
    broken = _broken(index, resolution, cache_dir, True, progress)
    if broken:
        raise ValueError(_complaint(index, broken))
    return np.load(path, mmap_mode="r", allow_pickle=False)


_memory: dict[Path, np.ndarray] = {}  # images kept between the trials of a process, by the path they'd have on disk


def forget_others(indexes: Iterable[DomainIndex], *, resolution: int, cache_dir: Path) -> None:
    """Drop every domain kept in memory but these: the next trial may hold one of the others out."""
    keep = {cache_path(index, resolution=resolution, cache_dir=cache_dir) for index in indexes}
    for path in _memory.keys() - keep:
        del _memory[path]


class Undecoded:
    """A domain's images, decoded at each access by the process's threads."""

    def __init__(self, index: DomainIndex, resolution: int) -> None:
        self.index = index
        self.shape = (len(index), resolution, resolution, 3)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray | slice) -> np.ndarray:
        """Return images [n, H, W, 3]."""
        paths = [self.index.paths[n] for n in np.arange(len(self))[rows]]
        out = np.empty((len(paths), *self.shape[1:]), np.uint8)
        images = _threads().map(lambda p: read_image(self.index, p, resolution=self.shape[1]), paths)
        for n, image in enumerate(images):
            out[n] = image
        return out


@once
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers(), thread_name_prefix="decode")


def workers() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _broken(
    index: DomainIndex, resolution: int, cache_dir: Path, keep: bool, progress: Progress | None
) -> dict[str, str]:
    """Return what is wrong with a domain's broken files, by path; with ``keep`` the others are on disk after."""
    path = cache_path(index, resolution=resolution, cache_dir=cache_dir)
    if path.exists():
        return {}
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.exists():
            return {}
        noted = _read_notes(path)
        if noted is not None and (noted or not keep):
            still = dict(_failures(index, noted, resolution))
            if still.keys() == noted.keys():  # none of them has been mended
                return still
        return _build(index, path, resolution, keep, progress)


def _build(index: DomainIndex, path: Path, resolution: int, keep: bool, progress: Progress | None) -> dict[str, str]:
    aside = path.with_suffix(".partial")
    try:
        images = _new_array(aside, len(index), resolution) if keep else None
        broken = _decode_all(index, resolution, images, progress)
        if images is not None:
            images.flush()
            if not broken:
                os.replace(aside, path)
        kept = index.without(broken)
        if broken and len(kept):
            there = cache_path(kept, resolution=resolution, cache_dir=path.parent)
            if images is None:
                _write_notes(there, {})
            else:
                _write_rows(images, [n for n, p in enumerate(index.paths) if p not in broken], there)
        if broken or not keep:
            _write_notes(path, broken)
    finally:
        aside.unlink(missing_ok=True)
    return broken


def _new_array(path: Path, count: int, resolution: int) -> np.memmap:
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(count, resolution, resolution, 3))


def _write_rows(images: np.ndarray, rows: list[int], path: Path) -> None:
    aside = path.with_suffix(f".{os.getpid()}.partial")  # another process may build this one at the same time
    try:
        out = _new_array(aside, len(rows), images.shape[1])
        for n, row in enumerate(rows):
            out[n] = images[row]
        out.flush()
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _in_memory(index: DomainIndex, resolution: int) -> np.ndarray:
    images = np.empty((len(index), resolution, resolution, 3), np.uint8)
    broken = _decode_all(index, resolution, images, None)
    if broken:
        raise ValueError(_complaint(index, broken))
    return images


def _decode_all(
    index: DomainIndex, resolution: int, images: np.ndarray | None, progress: Progress | None
) -> dict[str, str]:
    """Decode a domain by threads, into ``images`` if given; return what is wrong with the files that can't be read.

    Threads, because Pillow decodes and scales without Python's lock: on photographs they are faster than
    processes (docs/LAB.md), and a user's script needs no guard for them.
    """

    def work(start: int) -> tuple[int, list[tuple[str, str]]]:
        failed = []
        for n in range(start, min(start + CHUNK, len(index))):
            try:
                pixels = read_image(index, index.paths[n], resolution=resolution)
            except UnreadableError as error:
                failed.append((index.paths[n], error.reason))
                continue
            if images is not None:
                images[n] = pixels
        return min(CHUNK, len(index) - start), failed

    broken: dict[str, str] = {}
    done = 0
    for count, failed in parallel(work, range(0, len(index), CHUNK)):
        broken.update(failed)
        done += count
        if progress is not None:
            progress(done, len(index))
    return {path: broken[path] for path in sorted(broken)}


def parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``work(item)`` of each item as threads finish it; after an error or an interruption none is begun."""
    pool = ThreadPoolExecutor(workers())
    try:
        for future in as_completed([pool.submit(work, item) for item in items]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _failures(index: DomainIndex, paths: Iterable[str], resolution: int) -> Iterator[tuple[str, str]]:
    for path in paths:
        try:
            read_image(index, path, resolution=resolution)
        except UnreadableError as error:
            yield path, error.reason


def _complaint(index: DomainIndex, broken: dict[str, str]) -> str:
    first, reason = next(iter(broken.items()))
    return (
        f"domain {index.name!r}: {len(broken)} of {len(index)} images can't be read, the first: {first}: {reason}; "
        "`dgsearch data check DATA` lists them; leave them out with --skip-broken"
    )


def _read_notes(path: Path) -> dict[str, str] | None:
    """Return the broken files noted beside a domain's images, or None where nothing whole is noted."""
    try:
        return {str(k): str(v) for k, v in json.loads(path.with_suffix(".json").read_text())["broken"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write_notes(path: Path, broken: dict[str, str]) -> None:
    aside = path.with_suffix(f".{os.getpid()}.partial")
    try:
        aside.write_text(json.dumps({"broken": broken}))
        os.replace(aside, path.with_suffix(".json"))
    finally:
        aside.unlink(missing_ok=True)

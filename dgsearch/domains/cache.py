"""Decode-once image store: one memory-mapped uint8 array a domain and resolution."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import platformdirs
from filelock import FileLock
from PIL import Image, ImageOps

from dgsearch.domains.layout import DomainIndex

FORMAT = 1  # of the decoded pixels: raise it when decoding changes


def default_cache_dir() -> Path:
    """Return the folder for decoded images: ``$DGSEARCH_CACHE`` or the user's cache folder."""
    return Path(os.environ.get("DGSEARCH_CACHE") or platformdirs.user_cache_dir("dgsearch"))


def decode(path: Path, *, resolution: int) -> np.ndarray:
    """Return an image as RGB bytes [H, W, 3], scaled to resolution × resolution.

    Raises:
        ValueError: if the file is not a readable image.
    """
    try:
        with Image.open(path) as image:
            image.draft("RGB", (resolution, resolution))
            upright = ImageOps.exif_transpose(image).convert("RGB")
            if upright.size != (resolution, resolution):
                upright = upright.resize((resolution, resolution), Image.Resampling.BICUBIC)
            return np.asarray(upright)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"can't read the image {path}: {error}") from None


def cache_path(index: DomainIndex, *, resolution: int, cache_dir: Path) -> Path:
    """Return where a domain's decoded images are kept; the name tells nothing of the domain."""
    facts = repr((FORMAT, index.fingerprint, index.modified, resolution))
    return cache_dir / f"{hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()}.npy"


def open_images(
    index: DomainIndex,
    *,
    resolution: int,
    cache_dir: Path,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Return a domain's images, memory-mapped [N, H, W, 3], decoding them first if no one has.

    Processes of one machine build it once, under a file lock; it is written aside and renamed, so an
    interrupted build leaves nothing that could be taken for a whole one.
    """
    path = cache_path(index, resolution=resolution, cache_dir=cache_dir)
    if not path.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                _build(index, path, resolution, progress)
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _build(index: DomainIndex, path: Path, resolution: int, progress: Callable[[int, int], None] | None) -> None:
    aside = path.with_suffix(".partial")
    try:
        shape = (len(index), resolution, resolution, 3)
        images = np.lib.format.open_memmap(aside, mode="w+", dtype=np.uint8, shape=shape)
        root = Path(index.root)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            decoded = pool.map(lambda p: decode(root / p, resolution=resolution), index.paths)
            for n, image in enumerate(decoded):
                images[n] = image
                if progress is not None and n % 100 == 0:
                    progress(n, len(index))
        images.flush()
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    if progress is not None:
        progress(len(index), len(index))

"""How long a data set takes to check, decode and split, and to start on again: JPEG files in four domains."""

import argparse
import io
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dgsearch.domains import cache
from dgsearch.domains.cache import open_images, readable
from dgsearch.domains.check import check_data
from dgsearch.domains.layout import domain_names, read_domain
from dgsearch.domains.split import split

DOMAINS, CLASSES = 4, 10


def make(root: Path, *, images: int, side: int) -> None:
    """Write noise, smoothed, as JPEG files: images // 4 a domain."""
    chance = np.random.default_rng(0)
    for n in range(images):
        folder = root / f"domain{n % DOMAINS}" / f"class{n // DOMAINS % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = chance.integers(0, 256, (side // 4, side // 4, 3), dtype=np.uint8)
        held = io.BytesIO()
        Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC).save(held, "JPEG", quality=90)
        (folder / f"{n:06d}.jpg").write_bytes(held.getvalue())


def timed(what: str, work: Callable[[], Any]) -> Any:
    """Do the work, print how long it took, and return its result."""
    began = time.perf_counter()
    result = work()
    print(f"{what:<44}{time.perf_counter() - began:7.2f} s", flush=True)
    return result


def start(root: Path, place: Path, resolution: int) -> int:
    """Index, decode or open, and split every domain; return how often progress was told."""
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1

    for name in domain_names(root):
        index = read_domain(root, name)
        index = readable(index, resolution=resolution, cache_dir=place, progress=progress)
        split(index, seed=0)
        images = open_images(index, resolution=resolution, cache_dir=place)
        assert len(images[np.arange(32)]) == 32
    return calls


def decode_chunk(paths: list[Path], resolution: int, out: Path, first: int) -> int:
    """Decode some files into their rows of a memory-mapped array."""
    images = np.load(out, mmap_mode="r+")
    for n, path in enumerate(paths, first):
        images[n] = cache.decode(path, resolution=resolution)
    return len(paths)


def compare(root: Path, resolution: int) -> None:
    """Print how long threads and processes take to decode the files."""
    paths, out = sorted(root.rglob("*.jpg")), root.parent / "compared.npy"
    np.lib.format.open_memmap(out, mode="w+", dtype=np.uint8, shape=(len(paths), resolution, resolution, 3))
    chunks = [(paths[n : n + cache.CHUNK], resolution, out, n) for n in range(0, len(paths), cache.CHUNK)]
    processes = ProcessPoolExecutor(cache.workers(), mp_context=multiprocessing.get_context("forkserver"))
    for pool, what in ((ThreadPoolExecutor(cache.workers()), "threads"), (processes, "processes")):
        with pool:
            timed(f"decode by {what}", lambda pool=pool: list(pool.map(decode_chunk, *zip(*chunks, strict=True))))


def main() -> None:
    """Print the figures of one set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=64, help="pixels a side of the files")
    parser.add_argument("--resolution", type=int, default=32, help="pixels a side of the decoded images")
    parser.add_argument("--compare", action="store_true", help="only decode, by threads and by processes")
    given = parser.parse_args()
    print(f"{given.images} JPEG of {given.side} px, decoded to {given.resolution} px, {cache.workers()} CPUs, load "
          f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="dgsearch-data-") as scratch:
        root, place = Path(scratch, "data"), Path(scratch, "cache")
        timed("write the files", lambda: make(root, images=given.images, side=given.side))
        if given.compare:
            compare(root, given.resolution)
            return
        found = timed("check", lambda: check_data(root))
        assert found["ok"] and not found["warnings"], found["warnings"]
        calls = timed("first start: index, decode, split", lambda: start(root, place, given.resolution))
        again = timed("second start: index, open, split", lambda: start(root, place, given.resolution))
        print(f"progress was told {calls} times, then {again}; the cache holds "
              f"{sum(p.stat().st_size for p in place.iterdir()) / 1e6:.0f} MB")  # fmt: skip


if __name__ == "__main__":
    main()

"""What a data set holds and what in it would spoil a result: every file of every domain, read once."""

import hashlib
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgsearch.domains.cache import OUTSIDE, UnreadableError, look, parallel
from dgsearch.domains.layout import DomainIndex, class_folders, domain_names, leaves, read_domain
from dgsearch.domains.split import split

RESOLUTION = 32  # pixels a side that images are decoded to: all of a file is read whatever it is
CHUNK = 32  # files a thread reads before it says so
NAMED = 5  # names a warning gives


@dataclass(frozen=True)
class _Seen:
    """A file, read: a hash of its bytes, its picture's size in pixels, or why there is none."""

    path: str
    digest: str
    size: tuple[int, int] = (0, 0)
    animated: bool = False
    reason: str = ""


def check_data(data: str | Path, *, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Read a whole data set, a folder or a manifest, and return what it holds as plain data.

    ======================== =================================================================================
    data                     where it is
    domains                  {domain: {class: images}}
    sizes                    {domain: {images, bytes, smallest, largest}}, the last two [width, height], pixels
    unreadable               [{path, reason}]: files that no search can read
    outside                  [{path, reason}]: links that leave the data's folder, which are never opened
    duplicates               [{paths, across}]: the same bytes in several domains ("domains"), or in the train
                             and the validation part that seed 0 gives ("parts")
    warnings                 [text]: what is worth knowing, and spoils nothing
    ok                       whether unreadable, outside and duplicates are empty
    ======================== =================================================================================

    Raises:
        ValueError: if the data set is missing, or a row of the manifest is wrong.
    """
    path = Path(data)
    warnings: list[str] = []
    outside: list[dict[str, str]] = []
    names = domain_names(path)
    indexes: list[DomainIndex] = []
    for name in names:
        if path.is_dir():
            if leaves(path, name):
                outside.append({"path": name, "reason": OUTSIDE})
                continue
            warnings += _folder_warnings(path, name)
            if not _holds_images(path, name):
                warnings.append(f"domain {name!r} holds no image: a search can't use it")
                continue
        indexes.append(read_domain(path, name))
    seen = _read(indexes, progress)
    unreadable: list[dict[str, str]] = []
    for rows in seen:
        for row in rows:
            if row.reason:
                (outside if row.reason == OUTSIDE else unreadable).append({"path": row.path, "reason": row.reason})
    duplicates = _duplicates(indexes, seen, warnings)
    counts = {index.name: dict(sorted(Counter(index.labels).items())) for index in indexes}
    domains = {name: counts.get(name, {}) for name in names}
    warnings += _class_warnings(counts)
    warnings += _group_warnings(indexes)
    warnings += _some([row.path for rows in seen for row in rows if row.animated], "several frames: the first is used")
    return _printable(
        {
            "data": str(path.resolve()),
            "domains": domains,
            "sizes": {index.name: _sizes(index, rows) for index, rows in zip(indexes, seen, strict=True)},
            "unreadable": unreadable,
            "outside": outside,
            "duplicates": duplicates,
            "warnings": warnings,
            "ok": not (unreadable or outside or duplicates),
        }
    )


def _read(indexes: list[DomainIndex], progress: Callable[[int, int], None]) -> list[list[_Seen]]:
    """Read each file once, by threads; return for each domain its files in the index's order."""
    total = sum(map(len, indexes))
    chunks = [(d, start) for d, index in enumerate(indexes) for start in range(0, len(index), CHUNK)]

    def work(chunk: tuple[int, int]) -> tuple[int, int, list[_Seen]]:
        d, start = chunk
        return d, start, [_look(indexes[d], path) for path in indexes[d].paths[start : start + CHUNK]]

    found: list[dict[int, list[_Seen]]] = [{} for _ in indexes]
    done = 0
    for d, start, rows in parallel(work, chunks):
        found[d][start] = rows
        done += len(rows)
        progress(done, total)
    return [[row for start in sorted(parts) for row in parts[start]] for parts in found]


def _look(index: DomainIndex, path: str) -> _Seen:
    if leaves(index.root, path):
        return _Seen(path, "", reason=OUTSIDE)
    file = Path(index.root) / path
    try:
        seen = look(file, resolution=RESOLUTION)
    except UnreadableError as error:
        return _Seen(path, "", reason=error.reason)
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return _Seen(path, digest, (seen.width, seen.height), seen.animated)


def _sizes(index: DomainIndex, rows: list[_Seen]) -> dict[str, Any]:
    read = sorted((row.size[0] * row.size[1], row.size) for row in rows if not row.reason)
    return {
        "images": len(index),
        "bytes": sum(index.sizes),
        "smallest": list(read[0][1]) if read else None,
        "largest": list(read[-1][1]) if read else None,
    }


def _duplicates(indexes: list[DomainIndex], seen: list[list[_Seen]], warnings: list[str]) -> list[dict[str, Any]]:
    copies: dict[str, list[tuple[int, int]]] = defaultdict(list)  # (domain, position) of each digest
    for d, rows in enumerate(seen):
        for n, row in enumerate(rows):
            if row.digest:
                copies[row.digest].append((d, n))
    validated = []
    for index in indexes:
        try:
            validated.append(set(split(index, seed=0).validation.tolist()))
        except ValueError as error:
            warnings.append(f"{error}: a search can't train on it")
            validated.append(set())
    duplicates, labelled = [], []
    for places in copies.values():
        if len({d for d, _ in places}) > 1:
            across = "domains"
        elif len({n in validated[d] for d, n in places}) > 1:
            across = "parts"
        else:
            across = ""
        paths = sorted(indexes[d].paths[n] for d, n in places)
        if across:
            duplicates.append({"paths": paths, "across": across})
        if len({indexes[d].labels[n] for d, n in places}) > 1:
            labelled.append(paths[0])
    warnings += _some(sorted(labelled), "the same bytes stand under several classes")
    return sorted(duplicates, key=lambda found: found["paths"])


def _holds_images(root: Path, name: str) -> bool:
    try:
        return len(read_domain(root, name)) > 0
    except ValueError:
        return False


def _folder_warnings(root: Path, name: str) -> list[str]:
    """Name what the layout leaves unread: empty classes, pictures beside class folders, folders inside them."""
    folders = [(label, folder) for label, folder in class_folders(root, name) if not leaves(root, folder)]
    held: dict[str, int] = defaultdict(int)
    deeper = []
    for label, folder in folders:
        for entry in os.scandir(root / folder):
            if entry.is_dir() and not entry.name.startswith("."):
                deeper.append(f"{folder}/{entry.name}")
            else:
                held[label] += not entry.name.startswith(".")
    warnings = [f"class folder {folder} is empty: no class" for label, folder in sorted(folders) if not held[label]]
    return warnings + _some(sorted(deeper), "folders inside a class folder are not read")


def _class_warnings(counts: dict[str, dict[str, int]]) -> list[str]:
    every = sorted({label for found in counts.values() for label in found})
    warnings = []
    for name, found in counts.items():
        missing = [label for label in every if label not in found]
        if missing:
            warnings.append(f"domain {name!r} lacks {_few(missing)}")
    alike: dict[str, list[str]] = defaultdict(list)
    for label in every:
        alike[unicodedata.normalize("NFKC", label).casefold()].append(label)
    for names in alike.values():
        if len(names) > 1:
            warnings.append(f"classes whose names differ only in case or in how Unicode writes them: {_few(names)}")
    return warnings


def _group_warnings(indexes: Iterable[DomainIndex]) -> list[str]:
    domains: dict[str, set[str]] = defaultdict(set)
    for index in indexes:
        if index.groups != index.paths:
            for group in set(index.groups):
                domains[group].add(index.name)
    shared = sorted(group for group, names in domains.items() if len(names) > 1)
    return _some(shared, "groups with images in several domains: a fold may train on one and hold out the other")


def _some(names: list[str], what: str) -> list[str]:
    return [f"{what}: {_few(names)}"] if names else []


def _few(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _printable(value: Any) -> Any:
    """Return plain data with names that are not Unicode escaped, so that any of it can be printed."""
    if isinstance(value, dict):
        return {_printable(k): _printable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_printable(v) for v in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value

"""Folders or a manifest → the index of a domain: its images, their labels and groups, and nothing of other domains."""

import hashlib
import json
import os
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from dgsearch.component import known_or_raise

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
PART_FOLDERS = frozenset(("train", "val", "valid", "validation", "test"))
COLUMNS = ("path", "domain", "label", "group", "split")  # of a manifest; the first three are needed
SPLITS = {"train": "train", "val": "validation", "validation": "validation"}  # as a manifest spells them → part


@dataclass(frozen=True)
class DomainIndex:
    """The images of one domain, sorted by path.

    ``paths`` are relative to ``root``; ``labels`` are class names; ``groups`` name what a split must keep
    whole (a patient, a site visit), each image being its own group where there are none; ``sizes`` are in
    bytes; ``modified`` is the newest modification time in nanoseconds; ``parts`` are train or validation where
    the user gave a split, and none at all where not.
    """

    name: str
    root: str
    paths: tuple[str, ...]
    labels: tuple[str, ...]
    groups: tuple[str, ...]
    sizes: tuple[int, ...]
    modified: int
    parts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the domain's name, paths, labels, groups, sizes and given split, wherever the folder lies."""
        rows = [self.name, *zip(self.paths, self.labels, self.groups, self.sizes, strict=True), *self.parts]
        return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()

    def without(self, paths: Collection[str]) -> "DomainIndex":
        """Return the index without some of its files."""
        keep = [n for n, path in enumerate(self.paths) if path not in paths]
        return replace(
            self,
            paths=tuple(self.paths[n] for n in keep),
            labels=tuple(self.labels[n] for n in keep),
            groups=tuple(self.groups[n] for n in keep),
            sizes=tuple(self.sizes[n] for n in keep),
            parts=tuple(self.parts[n] for n in keep) if self.parts else (),
        )

    def save(self, path: Path) -> None:
        """Write the index as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "DomainIndex":
        """Read an index that ``save`` wrote."""
        values: dict[str, Any] = json.loads(path.read_text())
        return cls(**values | {k: tuple(v) for k, v in values.items() if isinstance(v, list)})


def domain_names(data: str | Path) -> list[str]:
    """Return the names of a data set's domains, sorted. No domain is opened.

    Args:
        data: a folder, whose folders are the domains, or a manifest (.csv or .parquet).

    Raises:
        ValueError: if it is missing, can't be read or holds no domain.
    """
    path = Path(data)
    if path.is_file():
        return sorted(_manifest(path).rows)
    if not path.is_dir():
        raise ValueError(f"no data set at {path}: the folder does not exist")
    names = _folders(path)
    if not names:
        raise ValueError(f"no domains in {path}: expected {path}/<domain>/<class>/<image>")
    return names


def read_domain(data: str | Path, name: str) -> DomainIndex:
    """Index one domain of a data set. No image is opened; files that can't be read are in the index like others.

    A folder is laid out as ``<domain>/<class>/<image>`` or ``<domain>/{train,val}/<class>/<image>``; in the
    second both are read together. A manifest has the columns path, domain, label and, if wanted, group and
    split; its paths are relative to its folder.

    Raises:
        ValueError: if the domain is missing or holds no image, or a row of the manifest is wrong.
    """
    path = Path(data).resolve()
    known_or_raise("domain", name, domain_names(path), where=str(path))
    if path.is_file():
        return _read_rows(path, name)
    if leaves(path, name):
        raise ValueError(f"domain {name!r} in {path} is a link to a place outside of it, which is not followed")
    found: list[tuple[str, str]] = []
    for label, folder in class_folders(path, name):
        if leaves(path, folder):
            found.append((folder, label))  # one broken entry stands for what is behind the link
            continue
        found += [(f"{folder}/{file}", label) for file in _image_files(path / folder)]
    if not found:
        raise ValueError(f"domain {name!r} in {path} holds no image: expected {path / name}/<class>/<image>")
    found.sort()
    paths, labels = zip(*found, strict=True)
    return DomainIndex(name, str(path), paths, labels, paths, *_facts(path, paths))


def class_folders(root: Path, domain: str) -> list[tuple[str, str]]:
    """Return (class, folder relative to ``root``) of a domain's class folders, the parts' folders looked through."""
    names = _folders(root / domain)
    known = {name.lower() for name in names}
    if "train" in known and len(known) > 1 and known <= PART_FOLDERS:
        inside = [name for name in names if not leaves(root, f"{domain}/{name}")]
        found = [(label, f"{domain}/{name}/{label}") for name in inside for label in _folders(root / domain / name)]
        return found + [(name, f"{domain}/{name}") for name in names if name not in inside]
    return [(label, f"{domain}/{label}") for label in names]


def leaves(root: str | Path, path: str) -> bool:
    """Return whether ``path``, relative to ``root``, leads outside of it once links are followed."""
    top = os.path.realpath(root)
    return not os.path.realpath(os.path.join(top, path)).startswith(top.rstrip(os.sep) + os.sep)


def class_names(indexes: Sequence[DomainIndex]) -> tuple[str, ...]:
    """Return the sorted union of the domains' classes: a fold's class ids are positions in it."""
    return tuple(sorted({label for index in indexes for label in index.labels}))


def _folders(path: Path) -> list[str]:
    return sorted(e.name for e in os.scandir(path) if e.is_dir() and not e.name.startswith("."))


def _image_files(folder: Path) -> list[str]:
    return [
        entry.name
        for entry in os.scandir(folder)
        if not entry.name.startswith(".") and os.path.splitext(entry.name)[1].lower() in SUFFIXES and not entry.is_dir()
    ]


def _facts(root: Path, paths: Sequence[str]) -> tuple[tuple[int, ...], int]:
    """Return files' sizes, bytes, and the newest modification time, ns; of a link that leads nowhere, its own."""
    sizes, newest = [], 0
    for path in paths:
        try:
            facts = os.stat(root / path)
        except OSError:
            try:
                facts = os.lstat(root / path)
            except OSError:  # named in a manifest and not there: found broken when it is decoded
                sizes.append(0)
                continue
        sizes.append(facts.st_size)
        newest = max(newest, facts.st_mtime_ns)
    return tuple(sizes), newest


@dataclass(frozen=True)
class _Row:
    number: int  # as a spreadsheet counts
    path: str
    label: str
    group: str
    split: str


@dataclass(frozen=True)
class _Manifest:
    rows: dict[str, list[_Row]]  # a domain
    grouped: bool


def _manifest(path: Path) -> _Manifest:
    facts = path.stat()
    return _read_manifest(path, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=4)
def _read_manifest(path: Path, modified: int, size: int) -> _Manifest:
    """Read a manifest. Only what every domain needs is checked here: a row's faults concern its domain alone."""
    import pandas as pd  # slow to import, and not needed for folders

    suffix = path.suffix.lower()
    known_or_raise("suffix of a manifest", suffix, (".csv", ".parquet"), where=str(path))
    try:
        if suffix == ".csv":
            with warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)  # a row with more cells than the header
                frame = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig", index_col=False)
        else:
            frame = pd.read_parquet(path, dtype_backend="numpy_nullable")
            frame = frame.astype("string").fillna("")
    except (ValueError, OSError, pd.errors.ParserWarning) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"can't read the manifest {path}: {lines[0]}") from None
    frame.columns = [str(column).strip() for column in frame.columns]
    for column in COLUMNS[:3]:
        if list(frame.columns).count(column) != 1:
            raise ValueError(
                f"the manifest {path} needs one column {column!r}; it has {', '.join(frame.columns) or 'none'}; "
                f"needed: {', '.join(COLUMNS[:3])}; known besides: {', '.join(COLUMNS[3:])}"
            )
    first = 2 if suffix == ".csv" else 1
    empty = [""] * len(frame)
    columns = [frame[name].tolist() if name in frame.columns else empty for name in COLUMNS]
    rows: dict[str, list[_Row]] = {}
    for number, (file, domain, label, group, split) in enumerate(zip(*columns, strict=True), first):
        if not domain.strip():
            raise ValueError(_wrong(path, number, "the cell 'domain' is empty"))
        row = _Row(number, file, label.strip(), group.strip(), split.strip())
        rows.setdefault(domain.strip(), []).append(row)
    if not rows:
        raise ValueError(f"the manifest {path} has no row")
    return _Manifest(rows, "group" in frame.columns)


def _wrong(path: Path, number: int, what: str) -> str:
    return f"row {number} of {path}: {what}; needed: {', '.join(COLUMNS[:3])}; known besides: {', '.join(COLUMNS[3:])}"


def _read_rows(path: Path, name: str) -> DomainIndex:
    manifest = _manifest(path)
    rows = manifest.rows[name]
    root = path.parent
    given = any(row.split for row in rows)
    seen: dict[str, int] = {}
    part_of: dict[str, str] = {}  # a group
    found: list[tuple[str, str, str, str]] = []
    for row in rows:
        needed = {"path": row.path.strip(), "label": row.label}
        needed |= {"group": row.group} if manifest.grouped else {}
        needed |= {"split": row.split} if given else {}
        for column, cell in needed.items():
            if not cell:
                raise ValueError(_wrong(path, row.number, f"the cell {column!r} is empty"))
        if given and row.split not in SPLITS:
            raise ValueError(_wrong(path, row.number, f"unknown split {row.split!r} (known: {', '.join(SPLITS)})"))
        file = os.path.normpath(row.path)
        if os.path.isabs(file) or file.split(os.sep)[0] == os.pardir or "\0" in file:
            raise ValueError(_wrong(path, row.number, f"the path {row.path!r} leaves the manifest's folder"))
        if file in seen:
            raise ValueError(_wrong(path, row.number, f"the file {file!r} stands in row {seen[file]} already"))
        seen[file] = row.number
        part = SPLITS[row.split] if given else ""
        group = row.group if manifest.grouped else file
        if part_of.setdefault(group, part) != part:
            raise ValueError(_wrong(path, row.number, f"the group {group!r} is in both parts, train and validation"))
        found.append((file, row.label, group, part))
    found.sort()
    paths, labels, groups, parts = zip(*found, strict=True)
    return DomainIndex(name, str(root), paths, labels, groups, *_facts(root, paths), parts=parts if given else ())

"""Layouts of a data set → the index of a domain: its images, their labels and groups, and nothing of other domains."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dgsearch.component import known_or_raise

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))


@dataclass(frozen=True)
class DomainIndex:
    """The images of one domain, sorted by path.

    ``paths`` are relative to ``root``; ``labels`` are class names; ``groups`` name what a split must keep
    whole (a patient, a site visit), each image being its own group where there are none; ``modified`` is the
    newest modification time in nanoseconds.
    """

    name: str
    root: str
    paths: tuple[str, ...]
    labels: tuple[str, ...]
    groups: tuple[str, ...]
    sizes: tuple[int, ...]
    modified: int

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the domain's name, paths, labels, groups and file sizes, wherever the folder lies."""
        rows = [self.name, *zip(self.paths, self.labels, self.groups, self.sizes, strict=True)]
        return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()

    def save(self, path: Path) -> None:
        """Write the index as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "DomainIndex":
        """Read an index that ``save`` wrote."""
        values: dict[str, Any] = json.loads(path.read_text())
        return cls(**values | {k: tuple(v) for k, v in values.items() if isinstance(v, list)})


def domain_names(root: str | Path) -> list[str]:
    """Return the names of a data set's domains, sorted: its folders. No domain is opened.

    Raises:
        ValueError: if the folder is missing or holds no domain.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise ValueError(f"no data set at {folder}: the folder does not exist")
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise ValueError(f"no domains in {folder}: expected {folder}/<domain>/<class>/<image>")
    return names


def read_domain(root: str | Path, name: str) -> DomainIndex:
    """Index one domain of a data set laid out as ``root/<domain>/<class>/<image>``.

    Raises:
        ValueError: if the domain is missing or holds no image.
    """
    folder = Path(root).resolve()
    known_or_raise("domain", name, domain_names(folder), where=str(folder))
    rows: list[tuple[str, str, int]] = []
    newest = 0
    for label in sorted(e.name for e in os.scandir(folder / name) if e.is_dir() and not e.name.startswith(".")):
        for entry in os.scandir(folder / name / label):
            if entry.name.startswith(".") or os.path.splitext(entry.name)[1].lower() not in SUFFIXES:
                continue
            facts = entry.stat()
            rows.append((f"{name}/{label}/{entry.name}", label, facts.st_size))
            newest = max(newest, facts.st_mtime_ns)
    if not rows:
        raise ValueError(f"domain {name!r} in {folder} holds no image: expected {folder / name}/<class>/<image>")
    rows.sort()
    paths, labels, sizes = zip(*rows, strict=True)
    return DomainIndex(name, str(folder), paths, labels, paths, sizes, newest)


def class_names(indexes: Sequence[DomainIndex]) -> tuple[str, ...]:
    """Return the sorted union of the domains' classes: a fold's class ids are positions in it."""
    return tuple(sorted({label for index in indexes for label in index.labels}))

"""Parts of a source domain: train, guide, validation; deterministic, stratified by class, groups whole."""

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from dgsearch.domains.layout import DomainIndex

VALIDATION_SHARE = 0.2
GUIDE_SHARE = 0.1  # of the training part


@dataclass(frozen=True)
class Parts:
    """Positions in a domain's index, each array sorted; together they cover the domain once."""

    train: np.ndarray  # [N]
    guide: np.ndarray  # [N]
    validation: np.ndarray  # [N]


def split(index: DomainIndex, *, seed: int) -> Parts:
    """Split a domain 72 / 8 / 20 % into train, guide and validation parts.

    A class's groups are put in the order of a hash of (seed, group) and dealt out in that order, so the parts
    are the same on every machine. A group counts to the class most of its images have. Of a class with two
    groups or more, at least one is validated on and one trained on. Where the user gave a split, its validation
    images are the validation part, and the guide part is dealt out of its training images.

    Raises:
        ValueError: if the user's split leaves nothing to validate on, or nothing to train on.
    """
    for part in ("train", "validation") if index.parts else ():
        if part not in index.parts:
            raise ValueError(f"the split given for domain {index.name!r} has no {part} image")
    members: dict[str, list[int]] = defaultdict(list)
    for position, group in enumerate(index.groups):
        members[group].append(position)
    strata: dict[str, list[str]] = defaultdict(list)
    for group, positions in members.items():
        counts = Counter(index.labels[p] for p in positions)
        strata[min(counts, key=lambda label: (-counts[label], label))].append(group)

    def order(group: str) -> bytes:
        return hashlib.blake2b(f"{seed}\0{group}".encode(errors="surrogateescape"), digest_size=16).digest()

    found: dict[str, list[int]] = {"validation": [], "guide": [], "train": []}
    for label in sorted(strata):
        groups = sorted(strata[label], key=order)
        if index.parts:
            given = [g for g in groups if index.parts[members[g][0]] == "validation"]
            groups = [g for g in groups if index.parts[members[g][0]] == "train"]
            found["validation"] += [position for group in given for position in members[group]]
            if not groups:
                continue
        sizes = np.array([len(members[g]) for g in groups])
        before = np.cumsum(sizes) - sizes
        validation = 0.0 if index.parts else VALIDATION_SHARE * sizes.sum()
        guide = validation + GUIDE_SHARE * (sizes.sum() - validation)
        # A group goes where its middle falls, which rounds to the nearest share whatever the groups' sizes.
        middle = before + sizes / 2
        names = np.where(middle < validation, "validation", np.where(middle < guide, "guide", "train"))
        names[-1] = "train"
        if len(groups) > 1 and not index.parts:
            names[0] = "validation"
        for group, name in zip(groups, names, strict=True):
            found[str(name)] += members[group]
    return Parts(**{name: np.array(sorted(positions), dtype=np.int64) for name, positions in found.items()})

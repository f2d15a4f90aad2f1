"""The parts of a domain: covering, stratified, whole groups, independent of order and place."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from dgsearch.domains.layout import DomainIndex
from dgsearch.domains.split import split


def make(labels, groups=None) -> DomainIndex:
    paths = tuple(f"d/{label}/{n}.png" for n, label in enumerate(labels))
    return DomainIndex("d", "/", paths, tuple(labels), tuple(groups or paths), (1,) * len(paths), 0)


LABELS = ["a"] * 100 + ["b"] * 40 + ["c"] * 5


def test_parts_cover_the_domain_once_and_are_stratified():
    index = make(LABELS)
    parts = split(index, seed=0)
    together = np.concatenate([parts.train, parts.guide, parts.validation])
    assert sorted(together) == list(range(len(index)))
    count = {name: Counter(index.labels[p] for p in getattr(parts, name)) for name in ("train", "guide", "validation")}
    assert count["validation"] == {"a": 20, "b": 8, "c": 1}
    assert count["guide"] == {"a": 8, "b": 3}
    assert count["train"] == {"a": 72, "b": 29, "c": 4}


def test_another_seed_is_another_split_and_the_same_seed_the_same():
    index = make(LABELS)
    assert np.array_equal(split(index, seed=0).validation, split(index, seed=0).validation)
    assert not np.array_equal(split(index, seed=0).validation, split(index, seed=1).validation)


def test_an_example_keeps_its_part_wherever_it_stands_in_the_index():
    index = make(LABELS)
    order = np.random.default_rng(0).permutation(len(index))
    columns = {n: tuple(np.array(getattr(index, n))[order].tolist()) for n in ("paths", "labels", "groups", "sizes")}
    shuffled = dataclasses.replace(index, **columns, root="/elsewhere")
    first, second = split(index, seed=3), split(shuffled, seed=3)
    for name in ("train", "guide", "validation"):
        a = {index.paths[p] for p in getattr(first, name)}
        assert a == {shuffled.paths[p] for p in getattr(second, name)}


@pytest.mark.parametrize("seed", range(5))
def test_groups_stay_whole_and_shares_hold(seed):
    chance = np.random.default_rng(seed)
    groups = [f"patient{g}" for g in chance.integers(0, 60, 600)]
    labels = ["a" if int(g[7:]) % 3 else "b" for g in groups]
    index = make(labels, groups)
    parts = split(index, seed=seed)
    where = {}
    for name in ("train", "guide", "validation"):
        for p in getattr(parts, name):
            assert where.setdefault(index.groups[p], name) == name
    assert 0.12 < len(parts.validation) / 600 < 0.28
    assert len(parts.train) > len(parts.guide) > 0


def test_a_class_of_two_is_trained_on_and_validated_on_and_of_one_trained_on():
    index = make(["a", "a", "b"])
    parts = split(index, seed=0)
    assert {index.labels[p] for p in parts.validation} == {"a"}
    assert sorted(index.labels[p] for p in parts.train) == ["a", "b"]

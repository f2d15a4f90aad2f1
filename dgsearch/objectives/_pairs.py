"""Penalties between pairs of source domains, over all features or class by class."""

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor


def mean_over_pairs(
    features: Tensor, y: Tensor, distance: Callable[[Tensor, Tensor], Tensor], *, per_class: bool, least: int
) -> Tensor:
    """Return the mean over pairs i < j of domains of ``distance(f_i, f_j)``, from features [D, B, F] and ids [D, B].

    With ``per_class`` a pair's distance is the mean over classes of that between the class's features, weighted
    by the class's count in the pair; a class with fewer than ``least`` examples on one side is skipped.
    """
    pairs = []
    for i, j in combinations(range(len(features)), 2):
        if not per_class:
            pairs.append(distance(features[i], features[j]))
            continue
        # Zero, and attached to the features: a pair that shares no class has a gradient too.
        total, count = features[i].sum() * 0, 0
        for k in torch.unique(torch.cat([y[i], y[j]])):
            here, there = features[i][y[i] == k], features[j][y[j] == k]
            if min(len(here), len(there)) >= least:
                examples = len(here) + len(there)
                total, count = total + examples * distance(here, there), count + examples
        pairs.append(total / max(count, 1))
    return torch.stack(pairs).mean()

"""Correlation alignment (Sun & Saenko 2016, arXiv:1607.01719), by default in DomainBed's form with means."""

from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from dgsearch.component import Bool, Component, Float
from dgsearch.step import DomainBatch, Losses, Objective, Progress, domain_cross_entropy


@dataclass(frozen=True)
class Coral(Component):
    """Match the mean and covariance of features across source domains (Sun & Saenko 2016, arXiv:1607.01719)."""

    weight: Annotated[float, Float(0.1, 10, log=True)] = 1.0
    match_mean: Annotated[bool, Bool()] = True

    neutral: ClassVar = {"weight": 0}
    min_domains: ClassVar[int] = 2

    def build(self, *, num_domains: int, num_features: int, num_classes: int) -> nn.Module:
        """Return the objective."""
        return CoralObjective(self)


class CoralObjective(Objective):
    """Cross-entropy plus the mean over pairs of domains of the distance between moments."""

    def __init__(self, options: Coral) -> None:
        super().__init__()
        self.options = options

    def forward(self, model: nn.Module, batch: DomainBatch, progress: Progress) -> Losses:
        """Return the losses of ``batch``."""
        features, logits = model(batch.x)
        penalty = coral_penalty(features, match_mean=self.options.match_mean)
        return Losses(
            domain_cross_entropy(logits, batch.y),
            self.options.weight * penalty,
            log={"penalty": penalty},
        )


def coral_penalty(features: Tensor, *, match_mean: bool) -> Tensor:
    """Return the mean over pairs i < j of domains of the distance between moments, from features [D, B, F].

    With means: mean_k (μ_i − μ_j)_k² + mean_kl (C_i − C_j)_kl². Without: the paper's ‖C_i − C_j‖² / 4F².
    C has the divisor B − 1; with one example a domain there is no covariance, and it counts as zero.
    """
    means = features.mean(1)  # [D, F]
    centred = features - means.unsqueeze(1)
    covariances = centred.mT @ centred / max(features.shape[1] - 1, 1)  # [D, F, F]
    pairs = []
    for i, j in combinations(range(len(features)), 2):
        distance = (covariances[i] - covariances[j]).square().mean()
        pairs.append(distance + (means[i] - means[j]).square().mean() if match_mean else distance / 4)
    return torch.stack(pairs).mean()

"""Empirical risk minimisation (Vapnik 1998; as a baseline: Gulrajani & Lopez-Paz 2021, arXiv:2007.01434)."""

from dataclasses import dataclass

from torch import nn

from dgsearch.component import Component
from dgsearch.step import Objective


@dataclass(frozen=True)
class Erm(Component):
    """Minimise the mean cross-entropy over source domains (Vapnik 1998; arXiv:2007.01434)."""

    def build(self, *, num_domains: int, num_features: int, num_classes: int) -> nn.Module:
        """Return the objective."""
        return Objective()

"""Stochastic gradient descent with Nesterov's momentum (Sutskever et al. 2013), torch's fused kernel."""

from dataclasses import dataclass
from typing import Annotated

import torch

from dgsearch.component import Component, Float
from dgsearch.optimizers._groups import WEIGHT_DECAY, Parameters, scaled_groups

MOMENTUM = 0.9


@dataclass(frozen=True)
class Sgd(Component):
    """Stochastic gradient descent, Nesterov momentum .9 (Sutskever et al. 2013, PMLR 28(3))."""

    lr: Annotated[float, Float(1e-4, 1e-1, log=True)] = 1e-2
    weight_decay: Annotated[float, WEIGHT_DECAY] = 0.0

    def build(self, parameters: Parameters, *, seed: int) -> torch.optim.Optimizer:
        """Return torch's optimizer."""
        return torch.optim.SGD(
            scaled_groups(parameters, lr=self.lr),
            momentum=MOMENTUM,
            nesterov=True,
            weight_decay=self.weight_decay,
            fused=True,
        )

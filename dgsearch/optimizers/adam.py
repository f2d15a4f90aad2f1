"""Adam (Kingma & Ba 2015, arXiv:1412.6980), torch's fused kernel."""

from dataclasses import dataclass
from typing import Annotated

import torch

from dgsearch.component import ByNetwork, Component, Float
from dgsearch.optimizers._groups import Parameters, scaled_groups


@dataclass(frozen=True)
class Adam(Component):
    """Adaptive moment estimation, weight decay in the gradient (Kingma & Ba 2015, arXiv:1412.6980)."""

    lr: Annotated[
        float | None,
        ByNetwork(
            pretrained=(Float(1e-5, 10**-3.5, log=True), 5e-5),
            scratch=(Float(10**-4.5, 10**-2.5, log=True), 1e-3),
        ),
    ] = None
    weight_decay: Annotated[float, Float(1e-6, 1e-2, log=True, off=True)] = 0.0

    def build(self, parameters: Parameters, *, seed: int) -> torch.optim.Optimizer:
        """Return torch's optimizer."""
        assert self.lr is not None, "resolve the component for a network first"
        groups = scaled_groups(parameters, lr=self.lr)
        return torch.optim.Adam(groups, weight_decay=self.weight_decay, fused=True)

"""Adam (Kingma & Ba 2015, arXiv:1412.6980), torch's fused kernel."""

from dataclasses import dataclass
from typing import Annotated

import torch

from dgsearch.component import Component
from dgsearch.optimizers._groups import ADAM_LR, WEIGHT_DECAY, Parameters, scaled_groups


@dataclass(frozen=True)
class Adam(Component):
    """Adaptive moment estimation, weight decay in the gradient (Kingma & Ba 2015, arXiv:1412.6980)."""

    lr: Annotated[float | None, ADAM_LR] = None
    weight_decay: Annotated[float, WEIGHT_DECAY] = 0.0

    def build(self, parameters: Parameters, *, seed: int) -> torch.optim.Optimizer:
        """Return torch's optimizer."""
        assert self.lr is not None, "resolve the component for a network first"
        groups = scaled_groups(parameters, lr=self.lr)
        return torch.optim.Adam(groups, weight_decay=self.weight_decay, fused=True)

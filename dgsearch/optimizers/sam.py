"""Sharpness-aware minimisation (Foret et al. 2021, arXiv:2010.01412) over Adam."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from dgsearch.component import Component, Float
from dgsearch.optimizers._groups import ADAM_LR, WEIGHT_DECAY, Parameters, scaled_groups


@dataclass(frozen=True)
class Sam(Component):
    """Step with the gradient at the worst point nearby (Foret et al. 2021, arXiv:2010.01412)."""

    rho: Annotated[float, Float(0.01, 0.5, log=True)] = 0.05
    lr: Annotated[float | None, ADAM_LR] = None
    weight_decay: Annotated[float, WEIGHT_DECAY] = 0.0

    neutral: ClassVar = {"rho": 0}

    def build(self, parameters: Parameters, *, seed: int) -> torch.optim.Optimizer:
        """Return the optimizer."""
        assert self.lr is not None, "resolve the component for a network first"
        groups = scaled_groups(parameters, lr=self.lr)
        return SamOptimizer(groups, weight_decay=self.weight_decay, rho=self.rho)


class SamOptimizer(torch.optim.Adam):
    """Adam on the gradient at θ + ρ g/‖g‖: the closure is called at θ and there.

    Norm and perturbation cover the network's parameters only, not an objective's own.
    """

    def __init__(self, groups: list[dict[str, Any]], *, weight_decay: float, rho: float) -> None:
        super().__init__(groups, weight_decay=weight_decay, fused=True)
        self.rho = rho

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        """Do one step; return the loss at θ."""
        loss = closure()
        members = [
            p
            for group in self.param_groups
            if group.get("part", "network") == "network"
            for p in group["params"]
            if p.grad is not None
        ]
        gradients = [p.grad for p in members]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        with torch.no_grad():
            before = [p.clone() for p in members]
            shift = torch._foreach_mul(gradients, self.rho / norm.clamp_min(torch.finfo(norm.dtype).tiny))
            torch._foreach_add_(members, shift)
        closure()
        with torch.no_grad():
            torch._foreach_copy_(members, before)
        super().step()
        return loss

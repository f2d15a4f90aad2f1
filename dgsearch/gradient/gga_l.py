"""GGA-L: noise that grows as the domains' gradients disagree (CVPR 2025, arXiv:2502.20162)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from dgsearch.component import Component, Float
from dgsearch.gradient._agreement import domain_agreement
from dgsearch.randomness import generator, normal_like
from dgsearch.step import Intervention, Objective, Step


@dataclass(frozen=True)
class GgaL(Component):
    """Add noise to the gradient, the more the less domain gradients agree (CVPR 2025, arXiv:2502.20162)."""

    gamma: Annotated[float, Float(1e-6, 1e-2, log=True)] = 1e-3

    neutral: ClassVar = {"gamma": 0}
    min_domains: ClassVar[int] = 2

    def build(self, *, seed: int) -> Intervention:
        """Return the intervention."""
        return NoisyGradient(self.gamma, seed=seed)


class NoisyGradient:
    """Returns a closure that adds γ (1 − mean cosine) · N(0, I) to the network's gradient, the same at each call.

    Where the loss is the mean of the domains' and no batch norm is live, the gradient is the mean of the domain
    gradients that the cosines needed anyway, and the step's first backward is saved.
    """

    def __init__(self, gamma: float, *, seed: int) -> None:
        self.gamma = gamma
        self.seed = seed

    def __call__(self, step: Step) -> Callable[[], Tensor]:
        """Return the step's closure with noise; with γ = 0 the closure itself."""
        if self.gamma == 0:
            return step.closure
        losses, pairs, gradients = domain_agreement(step)
        scale = self.gamma * (1 - pairs.mean())
        parameters = [p for p in step.model.parameters() if p.requires_grad]
        known = _is_the_mean(step)

        def closure() -> Tensor:
            if known and step.closure.calls == 0:
                first, second, *others = gradients
                mean = torch._foreach_add(first, second)
                for other in others:
                    torch._foreach_add_(mean, other)
                torch._foreach_div_(mean, len(gradients))
                total = step.closure.take(losses, mean)
            else:
                total = step.closure()
            for n, p in enumerate(parameters):
                if p.grad is not None:
                    chance = generator(self.seed, "gga_l", step.progress.step, n, device=p.device)
                    p.grad.addcmul_(normal_like(p, chance), scale)
            return total

        return closure


def _is_the_mean(step: Step) -> bool:
    """Whether the step's gradient is the mean of its domains': plain cross-entropy, and no live batch norm."""
    live = any(m.training for m in step.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return type(step.objective) is Objective and not live

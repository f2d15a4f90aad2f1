"""Domain-adversarial training (Ganin et al. 2016, arXiv:1505.07818), with a scheduled gradient reversal."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from dgsearch.component import Bool, Choice, Component, Float, Int
from dgsearch.step import DomainBatch, Dropout, Losses, Objective, Progress, domain_cross_entropy

LAST_THIRD = 2 / 3  # share of training after which λ falls to its final ratio


@dataclass(frozen=True)
class Dann(Component):
    """Learn features from which a discriminator can't tell the domain (Ganin et al. 2016, arXiv:1505.07818)."""

    peak: Annotated[float, Float(0.01, 10, log=True)] = 1.0
    start: Annotated[float, Float(0.0, 0.3)] = 0.0
    steepness: Annotated[float, Float(2, 20)] = 10.0
    final_ratio: Annotated[float, Float(0.0, 1.0)] = 1.0
    lr_ratio: Annotated[float, Float(0.05, 5, log=True)] = 0.2
    weight_decay: Annotated[float, Float(1e-6, 1e-2, log=True, off=True)] = 0.0
    width: Annotated[int, Choice((64, 128, 256, 512, 1024))] = 256
    depth: Annotated[int, Int(2, 4)] = 2
    dropout: Annotated[float, Choice((0.0, 0.1, 0.5))] = 0.0
    conditional: Annotated[bool, Bool()] = False

    neutral: ClassVar = {"peak": 0}
    min_domains: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not 0 <= self.start < 1:
            raise ValueError(f"start must lie in [0, 1), not {self.start}")
        if self.depth < 1 or self.width < 1:
            raise ValueError(f"depth and width must be at least 1, not {self.depth} and {self.width}")

    def build(self, *, num_domains: int, num_features: int, num_classes: int) -> nn.Module:
        """Return the objective, which has a discriminator of its own."""
        return DannObjective(self, num_domains, num_features, num_classes)

    def reversal(self, share: float) -> float:
        """Return λ after a share of training: 0 until ``start``, then rising to ``peak``.

        peak · (2 / (1 + exp(−steepness · p)) − 1) with p the share of training after ``start``; over the last
        third it falls linearly to ``final_ratio`` of that.
        """
        p = max(0.0, (share - self.start) / (1 - self.start))
        risen = self.peak * (2 / (1 + math.exp(-self.steepness * p)) - 1)
        fallen = max(0.0, (share - LAST_THIRD) / (1 - LAST_THIRD))
        return risen * (1 - (1 - self.final_ratio) * fallen)


class DannObjective(Objective):
    """Cross-entropy plus the discriminator's, whose gradient is reversed on its way into the features.

    Conditional, the discriminator has a head a class, and an example is judged by the head of its own class:
    each class's features are aligned.
    """

    def __init__(self, options: Dann, num_domains: int, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.options = options
        self.heads = num_classes if options.conditional else 1
        widths = [num_features] + [options.width] * (options.depth - 1)
        layers: list[nn.Module] = []
        for n, (before, after) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            layers += [nn.Linear(before, after), nn.ReLU(), Dropout(options.dropout, layer=1000 + n)]
        self.discriminator = nn.Sequential(*layers, nn.Linear(widths[-1], self.heads * num_domains))

    def forward(self, model: nn.Module, batch: DomainBatch, progress: Progress) -> Losses:
        """Return the losses of ``batch``; logs the discriminator's accuracy and λ."""
        features, logits = model(batch.x)
        strength = self.options.reversal(progress.share)
        reversed_ = GradientReversal.apply(features.flatten(0, 1), strength)  # [D·B, F]
        judged = self.discriminator(reversed_).unflatten(1, (self.heads, -1))  # [D·B, heads, D]
        head = batch.y.flatten() if self.options.conditional else torch.zeros_like(batch.y.flatten())
        guess = judged[torch.arange(len(head), device=head.device), head]  # [D·B, D]
        domain = torch.arange(len(features), device=head.device).repeat_interleave(features.shape[1])
        log = {
            "domain_accuracy": (guess.argmax(1) == domain).float().mean(),
            "reversal": features.new_tensor(strength),
        }
        return Losses(domain_cross_entropy(logits, batch.y), functional.cross_entropy(guess, domain), log=log)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the discriminator's parameters, with a learning rate and weight decay of their own."""
        options = self.options
        parameters = list(self.discriminator.parameters())
        return [{"params": parameters, "lr_ratio": options.lr_ratio, "weight_decay": options.weight_decay}]


class GradientReversal(torch.autograd.Function):
    """The identity, whose gradient is −λ times what comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        """Return ``x``."""
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the reversed gradient, and none for λ."""
        return -ctx.strength * gradients[0], None

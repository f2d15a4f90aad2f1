"""Networks: a featurizer and one linear classifier over it; images in [0, 1] come in, the network normalises."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dgsearch.component import NetworkKind, known_or_raise
from dgsearch.randomness import seeded
from dgsearch.step import Dropout

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation a channel


class Network(nn.Module):
    """A featurizer, dropout on its features, and a linear classifier.

    ``precision="bfloat16"`` runs the forward under autocast; features and logits always leave in float32,
    so losses and penalties are computed in float32.
    """

    mean: Tensor  # [C, 1, 1]
    deviation: Tensor  # [C, 1, 1]

    def __init__(
        self,
        featurizer: nn.Module,
        num_features: int,
        num_classes: int,
        *,
        normalisation: Normalisation,
        dropout: float = 0.0,
        freeze_bn: bool = False,
        precision: str = "float32",
    ) -> None:
        super().__init__()
        self.featurizer = featurizer
        self.dropout = Dropout(dropout)
        self.classifier = nn.Linear(num_features, num_classes)
        self.num_features = num_features
        self.freeze_bn = freeze_bn
        self.precision = precision
        mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in normalisation)
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)
        self.train()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [..., F] and logits [..., K] of images [..., C, H, W] in [0, 1]."""
        images = x.reshape(-1, *x.shape[-3:])  # [N, C, H, W]
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            features = self.dropout(self.featurizer((images - self.mean) / self.deviation))  # [N, F]
            logits = self.classifier(features)  # [N, K]
        lead = x.shape[:-3]
        return features.float().view(*lead, -1), logits.float().view(*lead, -1)

    def train(self, mode: bool = True) -> "Network":
        """Set the mode; with ``freeze_bn`` batch norm keeps its statistics in training too."""
        super().train(mode)
        if mode and self.freeze_bn:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self


def small_cnn() -> tuple[nn.Module, int]:
    """Four blocks of 3×3 convolution, 2×2 pooling, group norm and ReLU, widths 32 to 128; 128 features.

    Pooling comes before the norm: on CPUs that makes a step a quarter cheaper.
    """
    widths = (3, 32, 64, 128, 128)
    blocks: list[nn.Module] = []
    for before, after in zip(widths[:-1], widths[1:], strict=True):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), widths[-1]


def mnist_cnn() -> tuple[nn.Module, int]:
    """DomainBed's network for 28-px digits (Gulrajani & Lopez-Paz 2021, arXiv:2007.01434); 128 features."""
    widths, strides = (3, 64, 128, 128, 128), (1, 2, 1, 1)
    blocks: list[nn.Module] = []
    for before, after, stride in zip(widths[:-1], widths[1:], strides, strict=True):
        blocks += [nn.Conv2d(before, after, 3, stride, padding=1), nn.ReLU(), nn.GroupNorm(8, after)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), widths[-1]


@dataclass(frozen=True)
class Architecture:
    """How to build a featurizer, and what kind of network it is."""

    build: Callable[[], tuple[nn.Module, int]]
    kind: NetworkKind


ARCHITECTURES = {
    "small_cnn": Architecture(small_cnn, "scratch"),
    "mnist_cnn": Architecture(mnist_cnn, "scratch"),
}


def network_kind(name: str) -> NetworkKind:
    """Return whether a network starts from pretrained weights or from scratch; ranges depend on it."""
    known_or_raise("network", name, ARCHITECTURES)
    return ARCHITECTURES[name].kind


def build_network(
    name: str,
    *,
    num_classes: int,
    normalisation: Normalisation,
    seed: int,
    dropout: float = 0.0,
    freeze_bn: bool = False,
    precision: str = "float32",
) -> Network:
    """Build a network by name, its initial weights a pure function of ``seed``.

    Raises:
        ValueError: if the name or the precision is unknown.
    """
    known_or_raise("network", name, ARCHITECTURES)
    known_or_raise("precision", precision, ("float32", "bfloat16"))

    def make() -> Network:
        featurizer, num_features = ARCHITECTURES[name].build()
        return Network(
            featurizer,
            num_features,
            num_classes,
            normalisation=normalisation,
            dropout=dropout,
            freeze_bn=freeze_bn,
            precision=precision,
        )

    return seeded(make, seed, "network")

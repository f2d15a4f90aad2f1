"""Networks: a featurizer and one linear classifier over it; images in [0, 1] come in, the network normalises.

A network is named by one string: ``small_cnn``, ``resnet18`` (pretrained), ``resnet18@FILE`` (weights of a file)
or ``resnet18@none`` (random weights).
"""

import hashlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dgsearch.component import NetworkKind, known_or_raise
from dgsearch.randomness import seeded
from dgsearch.step import Dropout

PRECISIONS = ("float32", "bfloat16")
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation a channel
IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # what torchvision's weights were trained with


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


class GroupNorm(nn.GroupNorm):
    """Group norm in float32 whatever the precision, as autocast has it on GPUs; on CPUs bfloat16's is slow."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, in float32."""
        return super().forward(x.float())


def small_cnn() -> tuple[nn.Module, int]:
    """Four blocks of 3×3 convolution, 2×2 pooling, group norm and ReLU, widths 32 to 128; 128 features.

    Pooling comes before the norm: on CPUs that makes a step a quarter cheaper.
    """
    widths = (3, 32, 64, 128, 128)
    blocks: list[nn.Module] = []
    for before, after in zip(widths[:-1], widths[1:], strict=True):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.MaxPool2d(2), GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), widths[-1]


def mnist_cnn() -> tuple[nn.Module, int]:
    """DomainBed's network for 28-px digits (Gulrajani & Lopez-Paz 2021, arXiv:2007.01434); 128 features."""
    widths, strides = (3, 64, 128, 128, 128), (1, 2, 1, 1)
    blocks: list[nn.Module] = []
    for before, after, stride in zip(widths[:-1], widths[1:], strides, strict=True):
        blocks += [nn.Conv2d(before, after, 3, stride, padding=1), nn.ReLU(), GroupNorm(8, after)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), widths[-1]


def _resnet(name: str) -> tuple[nn.Module, int]:
    """A residual network of torchvision's without its last layer (He et al. 2016, arXiv:1512.03385)."""
    import torchvision  # takes a second to import

    network = torchvision.models.get_model(name)
    num_features = network.fc.in_features
    network.fc = nn.Identity()
    return network, num_features


def _imagenet_url(name: str) -> str:
    import torchvision

    return torchvision.models.get_model_weights(name).IMAGENET1K_V1.url


@dataclass(frozen=True)
class Architecture:
    """How to build a featurizer, what kind of network it is, and where its pretrained weights lie."""

    build: Callable[[], tuple[nn.Module, int]]
    kind: NetworkKind
    url: Callable[[], str] | None = None


ARCHITECTURES = {
    "small_cnn": Architecture(small_cnn, "scratch"),
    "mnist_cnn": Architecture(mnist_cnn, "scratch"),
    "resnet18": Architecture(lambda: _resnet("resnet18"), "pretrained", lambda: _imagenet_url("resnet18")),
    "resnet50": Architecture(lambda: _resnet("resnet50"), "pretrained", lambda: _imagenet_url("resnet50")),
}


def _parsed(name: str) -> tuple[str, str | None]:
    """Return a name's architecture, and what its weights are: None for the default ones, ``none``, or a file."""
    architecture, at, weights = name.partition("@")
    known_or_raise("network", architecture, ARCHITECTURES)
    if at and not weights:
        raise ValueError(f"network {name!r} says no weights after the @: give a file or none")
    if at and ARCHITECTURES[architecture].url is None:
        raise ValueError(f"network {architecture!r} always starts from random weights: it takes no {weights!r}")
    return architecture, weights or None


def network_name(network: str, *, weights: str | None = None) -> str:
    """Return a network's full name: its architecture, and ``@none`` or ``@`` the absolute path of its weights.

    Raises:
        ValueError: if the network is unknown, or takes no weights, or its name says them already.
    """
    architecture, named = _parsed(network)
    if weights is not None:
        if named is not None:
            raise ValueError(f"network {network!r} names its weights already: leave out {weights!r}")
        named = _parsed(f"{architecture}@{weights}")[1]
    if named is None:
        return architecture
    return f"{architecture}@{named if named == 'none' else Path(named).resolve()}"


def network_kind(name: str) -> NetworkKind:
    """Return whether a network starts from pretrained weights or from scratch; ranges depend on it."""
    architecture, weights = _parsed(name)
    return "scratch" if weights == "none" else ARCHITECTURES[architecture].kind


def weights_file(name: str) -> Path | None:
    """Return the file of a network's initial weights, downloaded if it must be; None where they are random.

    Raises:
        ValueError: if the file is missing, or the download fails.
    """
    architecture, weights = _parsed(name)
    url = ARCHITECTURES[architecture].url
    if weights == "none" or url is None:
        return None
    if weights is None:
        return _downloaded(url())
    if not Path(weights).is_file():
        raise ValueError(f"no file {weights}: expected the weights of network {architecture!r}")
    return Path(weights)


def _downloaded(url: str) -> Path:
    """Return where a file of weights is kept, after fetching it if it is not there; its name ends in its hash."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f"{path.name}.lock")):
            if not path.is_file():  # torch writes it aside, and moves it once its hash is right
                torch.hub.download_url_to_file(url, str(path), path.stem.rpartition("-")[2], sys.stderr.isatty())
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"can't fetch {url} ({reason}): put that file at {path}, or give --weights FILE") from None
    return path


def weights_hash(name: str) -> str | None:
    """Return a hash of the bytes of a network's initial weights; None where they are random."""
    path = weights_file(name)
    if path is None:
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _load_weights(featurizer: nn.Module, path: Path) -> None:
    """Load a file's weights into a featurizer: every key must fit, but for those of a classifier.

    Batch norm's count of batches may lack: torchvision's files are older than it.
    """
    try:
        found: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"can't read weights from {path}: {reason}") from None
    for key in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no state dict, but a {type(found).__name__}")
    expected = featurizer.state_dict()
    given = {str(k): v for k, v in found.items() if not str(k).startswith(("fc.", "classifier."))}
    problems = [f"{k} is missing" for k in expected if k not in given and not k.endswith(".num_batches_tracked")]
    problems += [f"{k} is unexpected" for k in given if k not in expected]
    for key in expected.keys() & given.keys():
        shape, right = getattr(given[key], "shape", type(given[key]).__name__), expected[key].shape
        if shape != right:
            shown = list(shape) if isinstance(shape, torch.Size) else shape
            problems.append(f"{key} is {shown}, not {list(right)}")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"the weights {path} don't fit the network: {'; '.join(problems[:3])}{more}")
    featurizer.load_state_dict(given, strict=False)


def build_network(
    name: str,
    *,
    num_classes: int,
    normalisation: Normalisation,
    seed: int,
    dropout: float = 0.0,
    freeze_bn: bool = False,
    precision: str = "float32",
    initial: bool = True,
) -> Network:
    """Build a network by name: pretrained weights where it has them, the others a pure function of ``seed``.

    ``initial=False`` leaves pretrained weights out and needs no file of them, for a network whose state dict is
    loaded afterwards.

    Raises:
        ValueError: if the name or the precision is unknown, or the weights can't be had or don't fit.
    """
    architecture, _ = _parsed(name)
    known_or_raise("precision", precision, PRECISIONS)
    path = weights_file(name) if initial else None

    def make() -> Network:
        featurizer, num_features = ARCHITECTURES[architecture].build()
        return Network(
            featurizer,
            num_features,
            num_classes,
            normalisation=normalisation,
            dropout=dropout,
            freeze_bn=freeze_bn,
            precision=precision,
        )

    network = seeded(make, seed, "network")
    if path is not None:
        _load_weights(network.featurizer, path)
    return network

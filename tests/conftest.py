"""A small real-file data set, and a small network with batch norm and dropout."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from dgsearch import networks
from dgsearch.domains.batches import Sources
from dgsearch.domains.layout import read_domain
from dgsearch.step import Dropout

DOMAINS = ("art", "cartoon", "photo", "sketch")
CLASSES = ("cat", "dog", "horse")


def write_images(root: Path, *, domains=DOMAINS, classes=CLASSES, count=14, size=16, seed=0) -> Path:
    """Write domains whose pictures differ in tint, classes that differ in where a bar lies."""
    chance = np.random.default_rng(seed)
    for d, domain in enumerate(domains):
        for k, label in enumerate(classes):
            folder = root / domain / label
            folder.mkdir(parents=True)
            for n in range(count):
                image = chance.integers(0, 120, (size, size, 3))
                image[4 * k : 4 * k + 4] += 90
                image[..., d % 3] += 40
                Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{n:03d}.png")
    return root


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True, scope="session")
def _private_cache(cache_dir):
    os.environ["DGSEARCH_CACHE"] = str(cache_dir)


@pytest.fixture(scope="session")
def sources(images, cache_dir) -> Sources:
    return Sources(tuple(read_domain(images, name) for name in DOMAINS[:3]), 16, cache_dir)


def _law_net() -> tuple[nn.Module, int]:
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), Dropout(0.3, layer=1)]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 8


# The network of the law tests, known by name like any other.
networks.ARCHITECTURES.setdefault("law_net", networks.Architecture(_law_net, "scratch"))

"""A fold's source domains, opened: batch t as a pure function of (seed, domain, t), and the parts in order."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from dgsearch.domains.augment import augmented, draws
from dgsearch.domains.cache import Images, default_cache_dir, forget_others, open_images
from dgsearch.domains.layout import DomainIndex, class_names
from dgsearch.domains.split import Parts, split
from dgsearch.networks import Normalisation
from dgsearch.randomness import numpy_generator
from dgsearch.step import DomainBatch

CHUNK = 256  # images a forward without gradients


@dataclass(frozen=True)
class Sources:
    """The source domains of a fold, described: all that training may know of the data.

    ``cache`` is where their decoded images are: disk, memory or none. Batches do not depend on it.
    """

    domains: tuple[DomainIndex, ...]
    resolution: int
    cache_dir: Path = field(default_factory=default_cache_dir)
    cache: str = "disk"

    @property
    def names(self) -> tuple[str, ...]:
        """The domains' names, in order."""
        return tuple(index.name for index in self.domains)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names; a class id is a position in it."""
        return class_names(self.domains)

    def open(self, *, seed: int, device: torch.device, withhold_guide: bool) -> "OpenSources":
        """Open the domains' images and split them by ``seed``."""
        return OpenSources(self, seed=seed, device=device, withhold_guide=withhold_guide)


class OpenSources:
    """Opened source domains. Use as a context manager: at the exit no memory map is left open."""

    def __init__(self, sources: Sources, *, seed: int, device: torch.device, withhold_guide: bool) -> None:
        ids = {name: k for k, name in enumerate(sources.classes)}
        self.names = sources.names
        self.seed = seed
        self.device = device
        self.labels = [np.array([ids[label] for label in index.labels]) for index in sources.domains]
        self.parts: list[Parts] = [split(index, seed=seed) for index in sources.domains]
        self.trained_on = [
            parts.train if withhold_guide else np.sort(np.concatenate([parts.train, parts.guide]))
            for parts in self.parts
        ]
        for name, positions in zip(self.names, self.trained_on, strict=True):
            if len(positions) == 0:
                raise ValueError(f"domain {name!r} has no example left to train on")
        resolution, place = sources.resolution, sources.cache_dir
        forget_others(sources.domains, resolution=resolution, cache_dir=place)
        self.images: list[Images] = [
            open_images(index, resolution=resolution, cache_dir=place, cache=sources.cache) for index in sources.domains
        ]
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # the current epoch's, a domain

    def __enter__(self) -> "OpenSources":
        return self

    def __exit__(self, *_: object) -> None:
        self.images.clear()  # dropping the last reference closes the map

    def normalisation(self) -> Normalisation:
        """Return the mean and standard deviation a channel, over up to 1,000 training images a domain."""
        total, square, count = np.zeros(3), np.zeros(3), 0
        for images, positions in zip(self.images, self.trained_on, strict=True):
            chosen = positions[np.linspace(0, len(positions) - 1, min(1000, len(positions))).astype(int)]
            pixels = images[chosen].reshape(-1, 3).astype(np.float64) / 255
            total, square, count = total + pixels.sum(0), square + (pixels**2).sum(0), count + len(pixels)
        mean = total / count
        deviation = np.sqrt(np.maximum(square / count - mean**2, 1e-6))
        return tuple(map(float, mean)), tuple(map(float, deviation))

    def batch(self, t: int, *, size: int, augment: str = "none") -> DomainBatch:
        """Return batch ``t``: ``size`` training examples of each domain, augmented as ``augment`` says.

        A domain's examples come epoch after epoch, each epoch in an order of its own; the batch is positions
        t·B … t·B + B − 1 of that endless row, so a domain with fewer than B examples wraps.
        """
        index = np.stack([self._positions(d, t, size) for d in range(len(self.names))])  # [D, B]
        batch = self._batch(index, tuple(range(len(self.names))))
        if augment == "none":
            return batch
        drawn = torch.stack([draws(size, seed=self.seed, domain=name, t=t) for name in self.names])  # [D, B, …]
        return dataclasses.replace(batch, x=augmented(batch.x, augment, drawn=drawn))

    def _positions(self, d: int, t: int, size: int) -> np.ndarray:
        epochs, places = np.divmod(np.arange(t * size, (t + 1) * size), len(self.trained_on[d]))
        order = np.concatenate([self._order(d, int(e))[places[epochs == e]] for e in np.unique(epochs)])
        return self.trained_on[d][order]

    def _order(self, d: int, epoch: int) -> np.ndarray:
        if self._orders.get(d, (-1,))[0] != epoch:
            chance = numpy_generator(self.seed, "order", self.names[d], epoch)
            self._orders[d] = (epoch, chance.permutation(len(self.trained_on[d])))
        return self._orders[d][1]

    def _batch(self, index: np.ndarray, domains: tuple[int, ...]) -> DomainBatch:
        bytes_ = np.stack([self.images[d][rows] for d, rows in zip(domains, index, strict=True)])
        x = torch.from_numpy(bytes_).to(self.device, non_blocking=True)  # [D, B, H, W, C]
        y = np.stack([self.labels[d][rows] for d, rows in zip(domains, index, strict=True)])
        return DomainBatch(
            x.movedim(-1, -3).float().div_(255),
            torch.from_numpy(y).to(self.device),
            torch.from_numpy(index).to(self.device),
            domains,
        )

    def part(self, name: str, *, domain: int | None = None) -> "InOrder":
        """Return a part (train, guide or validation) of one domain, or of all, to iterate in order."""
        return InOrder(self, name, range(len(self.names)) if domain is None else (domain,))


@dataclass(frozen=True)
class InOrder:
    """A part of the source data in its stored order, never augmented; yields batches with D = 1."""

    sources: OpenSources
    name: str
    domains: range | tuple[int, ...]

    def __iter__(self) -> Iterator[DomainBatch]:
        for d in self.domains:
            positions = getattr(self.sources.parts[d], self.name)
            for start in range(0, len(positions), CHUNK):
                yield self.sources._batch(positions[None, start : start + CHUNK], (d,))

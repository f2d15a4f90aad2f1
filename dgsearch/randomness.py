"""The only source of chance: generators seeded by hash(seed, purpose, step, …)."""

import hashlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
Key = int | str | float


def seed_of(*keys: Key) -> int:
    """Return a 63-bit seed: a hash of the keys, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*keys: Key, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator seeded by the keys, on a device."""
    return torch.Generator(device=device).manual_seed(seed_of(*keys))


def numpy_generator(*keys: Key) -> np.random.Generator:
    """Return a numpy generator seeded by the keys."""
    return np.random.Generator(np.random.PCG64(seed_of(*keys)))


def normal_like(p: Tensor, chance: torch.Generator) -> Tensor:
    """Return standard normal numbers in the shape and memory layout of a dense tensor, drawn in memory order.

    Drawn into a strided tensor itself, as a convolution's weights in channels-last are, they take eight times as long.
    """
    return (
        torch.empty(p.numel(), dtype=p.dtype, device=p.device).normal_(generator=chance).as_strided(p.shape, p.stride())
    )


def seeded(make: Callable[[], T], *keys: Key) -> T:
    """Call ``make`` with torch's global generator seeded by the keys, and put that generator back after.

    Modules draw their initial weights from the global generator; here it is lent, not moved. Built on the
    CPU, so that the same seed gives the same weights whatever device they move to.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(*keys))
        return make()

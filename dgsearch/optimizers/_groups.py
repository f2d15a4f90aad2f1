"""Parameter groups: each carries ``lr_ratio``, which multiplies the optimizer's learning rate."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


def scaled_groups(parameters: Parameters, *, lr: float) -> list[dict[str, Any]]:
    """Return groups whose ``lr`` is the group's ratio times ``lr``; plain tensors make one group."""
    given: list[Any] = list(parameters)
    groups: list[dict[str, Any]] = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "lr": lr * group.get("lr_ratio", 1.0)} for group in groups]

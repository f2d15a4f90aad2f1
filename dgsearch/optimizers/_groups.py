"""What optimizers share: parameter groups with learning-rate ratios, and the ranges of Adam's kind."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from dgsearch.component import ByNetwork, Float

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]

ADAM_LR = ByNetwork(
    pretrained=(Float(1e-5, 10**-3.5, log=True), 5e-5),
    scratch=(Float(10**-4.5, 10**-2.5, log=True), 1e-3),
)
WEIGHT_DECAY = Float(1e-6, 1e-2, log=True, off=True)


def scaled_groups(parameters: Parameters, *, lr: float) -> list[dict[str, Any]]:
    """Return groups whose ``lr`` is the group's ratio times ``lr``; plain tensors make one group."""
    given: list[Any] = list(parameters)
    groups: list[dict[str, Any]] = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "lr": lr * group.get("lr_ratio", 1.0)} for group in groups]

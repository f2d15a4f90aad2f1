"""Stochastic weight averaging, densely, over a flat valley of validation loss (Cha et al. 2021, arXiv:2102.08604)."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from dgsearch.component import Component, Float, Int
from dgsearch.step import Average, Progress


@dataclass(frozen=True)
class Swad(Component):
    """Average weights densely over the valley of source validation loss (Cha et al. 2021, arXiv:2102.08604).

    The valley begins with the first of ``start_patience`` evaluations that none of the others undercuts, and
    ends before ``end_patience`` evaluations in a row whose least loss exceeds 1 + ``tolerance`` times the mean of
    those at the beginning. Until it has begun, the average is that of the steps since the last evaluation.
    """

    start_patience: Annotated[int, Int(2, 5)] = 3
    end_patience: Annotated[int, Int(3, 8)] = 6
    tolerance: Annotated[float, Float(0.1, 0.5)] = 0.3

    def __post_init__(self) -> None:
        if min(self.start_patience, self.end_patience) < 1:
            raise ValueError(f"patience must be at least 1, not {self.start_patience} and {self.end_patience}")

    def build(self, model: nn.Module) -> Average:
        """Return the average."""
        return Valley(model, self)


@dataclass
class Segment:
    """The mean weights over the steps between two evaluations, and the validation loss at its end."""

    mean: list[Tensor]
    steps: int
    loss: float = float("nan")


class Valley:
    """Segments that may yet prove to lie beyond the valley, and the mean of those that lie in it."""

    def __init__(self, model: nn.Module, options: Swad) -> None:
        self.parameters = dict(model.named_parameters())
        self.options = options
        self.current = Segment([p.detach().clone() for p in self.parameters.values()], 0)
        self.pending: list[Segment] = []
        self.valley: Segment | None = None
        self.limit: float | None = None  # the loss at which the valley ends, once it has begun
        self.ended = False

    @torch.no_grad()
    def update(self, progress: Progress) -> None:
        """Take the weights into the current segment."""
        self.current.steps += 1
        torch._foreach_lerp_(self.current.mean, list(self.parameters.values()), 1 / self.current.steps)

    @torch.no_grad()
    def observe(self, raw_validation_loss: float, progress: Progress) -> None:
        """End the current segment."""
        segment = Segment([w.clone() for w in self.current.mean], self.current.steps, raw_validation_loss)
        self.current.steps = 0
        if self.ended:
            return
        self.pending.append(segment)
        losses = [s.loss for s in self.pending]
        if self.limit is None:
            window = self.options.start_patience
            self.pending = self.pending[-window:]
            if len(self.pending) == window and min(losses[-window:]) == losses[-window:][0]:
                self.limit = (1 + self.options.tolerance) * sum(losses[-window:]) / window
            return
        window = self.options.end_patience
        self.ended = len(losses) >= window and min(losses[-window:]) > self.limit
        # Where the end's window is the shorter, segments of the beginning are still pending: they lie in the valley.
        while len(self.pending) >= window + self.ended:
            self.valley = _joined(self.valley, self.pending.pop(0))
        if self.ended:
            self.pending.clear()

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor] | None:
        """Return the average as it would be if training ended now."""
        found = self.valley
        if self.limit is None:
            found = self.pending[-1] if self.pending else self.current
        else:
            for segment in self.pending:
                found = _joined(found, segment)
        assert found is not None
        return dict(zip(self.parameters, found.mean, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the segments."""
        return {
            "current": vars(self.current),
            "pending": [vars(segment) for segment in self.pending],
            "valley": None if self.valley is None else vars(self.valley),
            "limit": self.limit,
            "ended": self.ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the segments in."""
        self.current = Segment(**state["current"])
        self.pending = [Segment(**segment) for segment in state["pending"]]
        self.valley = None if state["valley"] is None else Segment(**state["valley"])
        self.limit, self.ended = state["limit"], state["ended"]


def _joined(a: Segment | None, b: Segment) -> Segment:
    """Return the mean of two segments, by their steps."""
    if a is None:
        return b
    steps = a.steps + b.steps
    return Segment(list(torch._foreach_lerp(a.mean, b.mean, b.steps / steps)), steps, b.loss)

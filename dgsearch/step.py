"""Vocabulary of a training step: batches, losses, the repeatable closure, probes and domain gradients.

Shape letters, used in trailing comments everywhere: D domains, B examples a domain, C H W image,
F features, K classes, P parameters, N examples.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dgsearch.randomness import generator


@dataclass(frozen=True)
class Progress:
    """How far training is: ``step`` steps are done of ``steps``."""

    step: int
    steps: int

    @property
    def share(self) -> float:
        """The share of training done, in [0, 1]."""
        return self.step / self.steps


@dataclass(frozen=True)
class DomainBatch:
    """B examples of each of D source domains; the domain axis is a tensor axis.

    ``x`` are pixels in [0, 1], ``y`` class ids, ``index`` each example's position in its domain, and
    ``domains`` which of the trial's source domains the rows are.
    """

    x: Tensor  # [D, B, C, H, W]
    y: Tensor  # [D, B]
    index: Tensor  # [D, B]
    domains: tuple[int, ...]

    def domain(self, d: int) -> "DomainBatch":
        """Return the batch's ``d``-th domain alone, as a batch with D = 1."""
        rows = slice(d, d + 1)
        return DomainBatch(self.x[rows], self.y[rows], self.index[rows], self.domains[rows])


@dataclass(frozen=True)
class Losses:
    """An objective's losses on a batch; ``total`` is what is minimised, ``log`` what is worth drawing."""

    task: Tensor  # [D]
    penalty: Tensor  # []
    reset_moments: bool = False
    log: dict[str, Tensor] = field(default_factory=dict)

    @property
    def total(self) -> Tensor:
        """The mean over domains of the task loss, plus the penalty."""
        return self.task.mean() + self.penalty  # []


def domain_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return each domain's mean cross-entropy [D], from logits [D, B, K] and class ids [D, B]."""
    each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return each.view_as(y).mean(1)  # [D]


class Objective(nn.Module):
    """The loss of a batch: by itself plain cross-entropy, and what every objective starts from."""

    def forward(self, model: nn.Module, batch: DomainBatch, progress: Progress) -> Losses:
        """Return the losses of ``batch``."""
        task = self.task(model, batch, progress)
        return Losses(task, task.new_zeros(()))

    def task(self, model: nn.Module, batch: DomainBatch, progress: Progress) -> Tensor:
        """Return the supervised part alone [D]: legal at D = 1, and it moves no state."""
        _, logits = model(batch.x)
        return domain_cross_entropy(logits, batch.y)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the groups ``{params, lr_ratio, weight_decay}`` of the objective's own parameters."""
        return []


class Dropout(nn.Module):
    """Dropout whose mask is a pure function of (seed, step, layer, domain).

    Pooled and separate forwards of the domains, and every repetition within a step, see the same masks.
    The rows it gets, [D·B, …] or [D, B, …], are those of ``domains`` in order, equally many each.
    """

    def __init__(self, p: float = 0.5, *, layer: int = 0) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout must lie in [0, 1), not {p}")
        self.p = p
        self.layer = layer
        self.draw: tuple[int, int] | None = None  # seed, step
        self.domains: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Drop features of ``x`` in training mode."""
        if not self.training or self.p == 0:
            return x
        assert self.draw is not None and self.domains, "no step has begun: a Closure sets the masks' seed"
        seed, step = self.draw
        rows = x.reshape(len(self.domains), -1)  # [D, …]
        kept = torch.empty_like(rows)
        for row, domain in zip(kept, self.domains, strict=True):
            chance = generator(seed, "dropout", step, self.layer, domain, device=x.device)
            row.bernoulli_(1 - self.p, generator=chance)
        return x * kept.div_(1 - self.p).view_as(x)


@contextmanager
def masks(*modules: nn.Module, domains: Sequence[int], draw: tuple[int, int] | None = None) -> Iterator[None]:
    """Tell the modules' dropout which domains its rows are, and (seed, step) where given, until the exit."""
    layers = [m for module in modules for m in module.modules() if isinstance(m, Dropout)]
    before = [(layer.domains, layer.draw) for layer in layers]
    for layer in layers:
        layer.domains = tuple(domains)
        layer.draw = layer.draw if draw is None else draw
    try:
        yield
    finally:
        for layer, (domains_before, draw_before) in zip(layers, before, strict=True):
            layer.domains, layer.draw = domains_before, draw_before


def signal_to_noise(gradients: Sequence[Sequence[Tensor]], *, batches: float) -> tuple[float, float]:
    """Return the share of parameters whose gradient's signal-to-noise ratio over domains is above 1, and the OSGR.

    The ratio is r = mean² / variance over the domains' gradients (unbiased), and the one-step generalization ratio
    1 − (1/n) Σ W/(r + 1/n), W = E[g²] / Σ E[g²], n = ``batches``: how many batches of this size the training
    examples make (ICML 2025, arXiv:2606.16301).
    """
    over = count = 0
    terms = total = 0.0
    for found in zip(*gradients, strict=True):
        stacked = torch.stack(found)  # [D, …]
        ratio = stacked.mean(0).square() / stacked.var(0).clamp_min(1e-20)
        square = stacked.square().mean(0)
        over, count = over + int((ratio > 1).sum()), count + ratio.numel()
        terms += (square / (ratio + 1 / batches)).sum().item()
        total += square.sum().item()
    return over / count, 1 - terms / total / batches if total > 0 else 0.0


@contextmanager
def probing(*modules: nn.Module) -> Iterator[None]:
    """Keep the modules' mode and put every buffer back at the exit: batch norm's, and objectives' state.

    In training mode batch norm still normalises by the forward's own batch. Backward inside the block.
    """
    buffers = [buffer for module in modules for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            # Through .data: where nothing changed, a graph that saved the buffer must stay valid.
            buffer.data.copy_(value)


class Closure:
    """Computes the losses of one step's batch and their gradients; a new one each step, repeatable.

    Calling it zeroes the gradients, runs forward and backward, and returns the total loss. Only the first
    call moves batch-norm buffers and objective state; every call sees the same dropout masks.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        batch: DomainBatch,
        progress: Progress,
        *,
        seed: int,
    ) -> None:
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.batch = batch
        self.progress = progress
        self.seed = seed
        self.calls = 0
        self.losses: Losses | None = None  # of the first call, detached
        self.log: dict[str, Tensor] = {}  # what is worth drawing of the step; interventions may add to it

    def __call__(self) -> Tensor:
        """Compute the losses and gradients at the current weights."""
        again = self.calls > 0
        self.calls += 1
        self.optimizer.zero_grad()
        with self.masks(), probing(self.model, self.objective) if again else nullcontext():
            losses: Losses = self.objective(self.model, self.batch, self.progress)
            total = losses.total
            total.backward()
        if losses.reset_moments and not again:
            self.optimizer.state.clear()
        if not again:
            self.losses = dataclasses.replace(
                losses,
                task=losses.task.detach(),
                penalty=losses.penalty.detach(),
            )
            self.log |= {name: value.detach() for name, value in losses.log.items()}
        return total.detach()

    def take(self, task: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """Count as a call whose task losses [D] and gradients are known already; return the total loss."""
        self.calls += 1
        self.optimizer.zero_grad()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            # In the parameter's layout, as backward leaves it: fused optimizers go through both in memory order.
            same = gradient.stride() == parameter.stride()
            parameter.grad = gradient if same else torch.empty_like(parameter).copy_(gradient)
        self.losses = Losses(task, task.new_zeros(()))
        return self.losses.total

    @contextmanager
    def masks(self) -> Iterator[None]:
        """Make the dropout of model and objective draw this step's masks."""
        draw = (self.seed, self.progress.step)
        with masks(self.model, self.objective, domains=self.batch.domains, draw=draw):
            yield


@dataclass(frozen=True)
class Step:
    """What a gradient intervention sees of a step."""

    model: nn.Module
    objective: Objective
    batch: DomainBatch
    progress: Progress
    closure: Closure


Intervention = Callable[[Step], Callable[[], Tensor]]


class Part(Protocol):
    """A part of the source data: iterating yields its examples in order, a domain at a time."""

    def __iter__(self) -> Iterator[DomainBatch]:
        """Yield batches with D = 1."""
        ...


@dataclass(frozen=True)
class EpochEnd:
    """What an epoch-end intervention sees: the parts are in order, not augmented, with indices."""

    model: nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    train: Part
    guide: Part
    progress: Progress


class Stateless:
    """State-dict methods of what has no state."""

    def state_dict(self) -> dict[str, Any]:
        """Return no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take no state."""
        assert not state


class EpochEndIntervention(Protocol):
    """Edits the weights after an epoch, and returns what is worth drawing."""

    def __call__(self, end: EpochEnd) -> dict[str, float]:
        """Edit ``end.model`` in place."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of tensors and plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that ``state_dict`` returned."""
        ...


class Average(Protocol):
    """Decides which weights are validated and kept."""

    def update(self, progress: Progress) -> None:
        """Take the weights in after a step; ``progress`` counts it."""
        ...

    def observe(self, raw_validation_loss: float, progress: Progress) -> None:
        """Take in the mean validation loss of the raw weights, at an evaluation."""
        ...

    def weights(self) -> dict[str, Tensor] | None:
        """Return the parameters to validate and keep, by name; None for the model's own."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of tensors and plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that ``state_dict`` returned."""
        ...


def domain_gradients(
    model: nn.Module, objective: Objective, batch: DomainBatch, progress: Progress
) -> tuple[Tensor, list[list[Tensor]]]:
    """Return the task loss [D] of each domain and its gradient in all the model's parameters.

    One forward and backward a domain, so with batch norm in training mode the statistics are per domain.
    No buffer moves, and ``.grad`` is untouched. Parameters a domain's loss does not reach have zeros.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    losses, gradients = [], []
    with probing(model, objective):
        for d in range(len(batch.domains)):
            one = batch.domain(d)
            with masks(model, objective, domains=one.domains):
                loss = objective.task(model, one, progress)[0]
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
            losses.append(loss.detach())
            gradients.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)])
    return torch.stack(losses), gradients


def _flat(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors of one shape flattened in the same order, in float32: views where both are channels-last."""
    if a.ndim == 4 and not (a.is_contiguous() and b.is_contiguous()):
        a, b = a.movedim(1, -1), b.movedim(1, -1)
    return a.flatten().float(), b.flatten().float()


def cosines(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the cosine between the gradients of every pair i < j of domains, [D(D−1)/2]; 0 where one is 0.

    Accumulated parameter by parameter in float32: no flattened copies.
    """
    count = len(gradients)
    inner = torch.zeros(count, count, device=gradients[0][0].device)
    for i in range(count):
        for j in range(i, count):
            inner[i, j] = sum(
                (torch.dot(*_flat(a, b)) for a, b in zip(gradients[i], gradients[j], strict=True)),
                start=inner.new_zeros(()),
            )
    norms = inner.diagonal().sqrt()  # [D]
    i, j = torch.triu_indices(count, count, offset=1, device=inner.device)
    scale = norms[i] * norms[j]
    return torch.where(scale > 0, inner[i, j] / scale.clamp_min(torch.finfo(scale.dtype).tiny), 0.0)

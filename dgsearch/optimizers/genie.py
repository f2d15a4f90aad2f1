"""GENIE: updates scaled by the one-step generalization ratio (ICML 2025, arXiv:2606.16301)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from dgsearch.component import Component, Float, known_or_raise
from dgsearch.optimizers._groups import WEIGHT_DECAY, Parameters, scaled_groups
from dgsearch.randomness import generator, normal_like

FLOOR = 1e-8  # a variance that is not positive, and what is added to a squared mean
STEEPEST = 10.0  # the largest 1/σ² that tanh is taken of
LEVELS = 2**16  # a mask bit is a 16-bit draw below a threshold


@dataclass(frozen=True)
class Genie(Component):
    """Scale updates by their gradient's signal-to-noise ratio, with noise and a mask (ICML 2025, arXiv:2606.16301).

    ``variant="paper"`` is Algorithm 1 as printed: m̂²/v̂ in place of a, an uncorrected variance, ``dropout`` as the
    probability of keeping, no rescaling. ``precondition``, ``noise`` and ``mask`` switch the three parts off.
    """

    lr: Annotated[float, Float(1e-3, 1e-1, log=True)] = 0.015
    beta: Annotated[float, Float(0.9, 0.999)] = 0.95
    dropout: Annotated[float, Float(0.1, 0.8)] = 0.4
    weight_decay: Annotated[float, WEIGHT_DECAY] = 0.0
    variant: str = "code"
    precondition: bool = True
    noise: bool = True
    mask: bool = True

    def __post_init__(self) -> None:
        known_or_raise("variant", self.variant, ("code", "paper"))
        if not (0 <= self.beta < 1 and 0 <= self.dropout < 1):
            raise ValueError(f"beta and dropout must lie in [0, 1), not {self.beta} and {self.dropout}")

    def build(self, parameters: Parameters, *, seed: int) -> torch.optim.Optimizer:
        """Return the optimizer; its draws of step t are a function of (seed, t, tensor)."""
        return GenieOptimizer(scaled_groups(parameters, lr=self.lr), self, seed=seed)


class GenieOptimizer(torch.optim.Optimizer):
    """Keeps two tensors a parameter: the moving mean and second moment of its gradient."""

    def __init__(self, groups: Iterable[dict[str, Any]], options: Genie, *, seed: int) -> None:
        super().__init__(groups, {"weight_decay": options.weight_decay, "part": "network"})
        self.options = options
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        """Do one step; return the closure's loss."""
        with torch.enable_grad():
            loss = closure()
        beta = self.options.beta
        for group in self.param_groups:
            members = [(n, p) for n, p in enumerate(group["params"]) if p.grad is not None]
            for _, p in members:
                if not self.state[p]:
                    self.state[p].update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                self.state[p]["step"] += 1
            if not members:
                continue
            gradients = [p.grad for _, p in members]
            squares = [self.state[p]["square"] for _, p in members]
            torch._foreach_lerp_([self.state[p]["mean"] for _, p in members], gradients, 1 - beta)
            torch._foreach_mul_(squares, beta)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta)
            for position, p in members:
                self._move(p, group, position)
        return loss

    def _move(self, p: Tensor, group: dict[str, Any], position: int) -> None:
        options, lr, state = self.options, group["lr"], self.state[p]
        t, mean, square = state["step"], state["mean"], state["square"]
        if group["weight_decay"]:
            p.mul_(1 - lr * group["weight_decay"])
        corrected = 1 - options.beta**t
        spread, scale = self._variance(mean, square, t)
        numerator, denominator = self._ratio(mean, square, spread, scale, t)

        def chance(purpose: str) -> torch.Generator:
            return generator(self.seed, purpose, t, group["part"], position, device=p.device)

        # τ is 1 to rounding, and there is no noise, where no variance exceeds 1/10: GPUs need not ask.
        certain = spread is None or (p.device.type == "cpu" and scale * spread.max().item() <= 1 / STEEPEST)
        if certain and not options.mask:
            if denominator is None:
                p.sub_(mean, alpha=lr / corrected)
            else:
                p.addcdiv_(numerator, denominator, value=-lr / corrected)
            return
        update = mean / corrected if denominator is None else numerator.div_(denominator).div_(corrected)
        if not certain:
            assert spread is not None
            weight = torch.div(torch.full((), 1 / scale, dtype=p.dtype, device=p.device), spread)
            weight = weight.clamp_max_(STEEPEST).tanh_()  # τ
            if options.noise:
                level = (weight * update.abs()).sum() / weight.sum()  # ν
                drawn = normal_like(p, chance("genie noise"))
                drawn.mul_(1 - weight).mul_(level)
            if options.precondition:
                update.mul_(weight)
            if options.noise:
                update.add_(drawn)
        if options.mask:
            keep = options.dropout if options.variant == "paper" else 1 - options.dropout
            threshold = round(keep * LEVELS)
            update.mul_(_bits(p, threshold, chance("genie mask")))
            lr = lr if options.variant == "paper" else lr * LEVELS / threshold
        p.sub_(update, alpha=lr)

    def _ratio(
        self, mean: Tensor, square: Tensor, spread: Tensor | None, scale: float, t: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return mean · signal and the denominator whose quotient is mean · a; (mean, None) without it."""
        options = self.options
        if not options.precondition:
            return mean, None
        corrected = 1 - options.beta**t
        if options.variant == "paper":
            # m̂²/v̂; a parameter that never had a gradient stays where it is.
            tiny = torch.finfo(square.dtype).tiny
            return mean * mean.square() / corrected, square.clamp_min(tiny)
        signal = torch.full((), FLOOR, dtype=mean.dtype, device=mean.device)
        signal = torch.addcmul(signal, mean, mean, value=1 / corrected**2)  # m̂² + 1e-8
        assert spread is not None
        denominator = torch.add(signal, spread, alpha=left_over(options.beta, t) * scale)
        return signal.mul_(mean), denominator

    def _variance(self, mean: Tensor, square: Tensor, t: int) -> tuple[Tensor | None, float]:
        """Return σ², which τ is made of, as a tensor and its factor; no tensor where no part asks for it."""
        options = self.options
        if not (options.precondition or options.noise):
            return None, 1.0
        if options.variant == "paper":
            return _floored(torch.addcmul(square, mean, mean, value=-1), FLOOR), 1.0
        return _variance(mean, square, t, options.beta)

    @torch.no_grad()
    def diagnostics(self, *, batches: float) -> dict[str, float]:
        """Return the share of parameters with a signal-to-noise ratio over 1, and the one-step generalization ratio.

        r = m̂²/σ² and OSGR = 1 − (1/n) Σ W/(r + 1/n), W = E[g²] / Σ E[g²], n = ``batches``: how many batches of
        this size the training examples make.
        """
        over, count, total = 0.0, 0, 0.0
        terms = torch.zeros(())
        for group in self.param_groups:
            for p in group["params"] if group["part"] == "network" else ():
                if not (state := self.state.get(p)) or state["step"] < 2:
                    continue
                t, mean, square = state["step"], state["mean"], state["square"]
                spread, scale = _variance(mean, square, t, self.options.beta)
                ratio = (mean / (1 - self.options.beta**t)).square().div_(spread).div_(scale)
                over, count = over + (ratio > 1).sum().item(), count + ratio.numel()
                total += square.sum().item()
                terms = terms + (square / (ratio + 1 / batches)).sum().cpu()
        if not count or total == 0:
            return {}
        return {"gsnr/share_over_1": over / count, "osgr": 1 - terms.item() / total / batches}


def left_over(beta: float, t: int) -> float:
    """Return ρ_t = (1−β)(1+β^t) / ((1+β)(1−β^t)): the share of one gradient's variance left in the average."""
    return (1 - beta) * (1 + beta**t) / ((1 + beta) * (1 - beta**t))


def _variance(mean: Tensor, square: Tensor, t: int, beta: float) -> tuple[Tensor, float]:
    """Return σ² = (v̂ − m̂²)/(1 − ρ_t), 1e-8 where that is not positive, as v − m²/c and the factor that it lacks.

    At t = 1 it is nowhere positive. The factor is left to who scales by another one anyhow.
    """
    if t == 1:
        return torch.full_like(mean, FLOOR), 1.0
    corrected = 1 - beta**t
    scale = 1 / (corrected * (1 - left_over(beta, t)))
    return _floored(torch.addcmul(square, mean, mean, value=-1 / corrected), FLOOR / scale), scale


def _floored(x: Tensor, least: float) -> Tensor:
    """Put ``least`` in place of what is not positive, in place; NaN stays."""
    return torch.threshold_(x, 0.0, least)


def _bits(like: Tensor, threshold: int, chance: torch.Generator) -> Tensor:
    """Return a mask of 0 and 1, each 1 with probability threshold / 2^16: four bits of it a 64-bit draw."""
    draws = torch.empty((like.numel() + 3) // 4, dtype=torch.int64, device=like.device)
    draws.random_(-(2**63), None, generator=chance)
    return (draws.view(torch.int16)[: like.numel()] < threshold - LEVELS // 2).view(like.shape)

"""Identify and Unlearn (ICLR 2026, OpenReview 9ufS5Jl0O0): what iu and iue share."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from dgsearch.component import Choice, Component, Float, known_or_raise
from dgsearch.epoch_end._influence import (
    MICRO,
    Outputs,
    classifier_scores,
    images,
    loss_gradient,
    network_scores,
    outputs,
)
from dgsearch.randomness import generator
from dgsearch.step import EpochEnd, probing

CHUNK = 256  # images of a pass that goes back through the last layers only
TINY = 1e-12


@dataclass(frozen=True)
class Unlearning(Component):
    """The fields that iu and iue share.

    ``mad_k`` is k of both thresholds, ``ascent`` a factor of the optimizer's learning rate, ``clip`` a bound of
    the ascent's gradient in norms of the last training gradient, ``max_share`` of the share unlearned,
    ``damping`` a factor of H's mean diagonal, ``every`` the share of training between edits (0: an epoch).
    ``scope`` says over which parameters examples are scored, ``inverse`` how over the classifier's, and
    ``iterations`` are those of conjugate gradients; ``network_damping`` and ``network_iterations`` are the network
    scope's, where mislabelled examples stand out only if H is damped much. For the ablation ``parts`` leaves one half
    out: ``set`` unlearns in all parameters, ``channels`` unlearns every example.
    """

    alpha: Annotated[float, Float(0.25, 2)] = 1.0
    mad_k: Annotated[float, Float(1, 4)] = 2.0
    ascent: Annotated[float, Float(0.1, 10, log=True)] = 1.0
    statistic: Annotated[str, Choice(("variance", "mean", "both"))] = "variance"
    clip: float = 1.0
    max_share: float = 0.1
    damping: float = 1e-3
    network_damping: float = 1.0
    every: float = 0.1
    scope: str = "classifier"
    inverse: str = "kronecker"
    iterations: int = 20
    network_iterations: int = 5
    parts: str = "both"

    needs_guide: ClassVar[bool] = True
    min_domains: ClassVar[int] = 2

    def __post_init__(self) -> None:
        known_or_raise("statistic", self.statistic, ("variance", "mean", "both"))
        known_or_raise("scope", self.scope, ("classifier", "network"))
        known_or_raise("inverse", self.inverse, ("kronecker", "exact"))
        known_or_raise("parts", self.parts, ("both", "set", "channels"))
        if not (self.damping > 0 and self.network_damping > 0 and self.alpha > 0):
            raise ValueError(
                f"damping and alpha must be above 0, not {self.damping}, {self.network_damping} and {self.alpha}"
            )
        if not (0 <= self.max_share <= 1 and 0 <= self.every <= 1):
            raise ValueError(f"max_share and every must lie in [0, 1], not {self.max_share} and {self.every}")
        if min(self.clip, self.ascent, self.iterations, self.network_iterations) < 0:
            raise ValueError("clip, ascent and iterations must not be negative")


def utility(gain: Tensor, complexity: Tensor, *, alpha: float) -> Tensor:
    """Return U [N] = sign(G)|G|^α / (C + ε): low where an example hurts the guide part for little complexity."""
    return gain.sign() * gain.abs().pow(alpha) / (complexity + TINY)


def spread(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the median and the unscaled median absolute deviation."""
    median = values.quantile(0.5)
    return median, (values - median).abs().quantile(0.5)


def unlearning_set(score: Tensor, *, k: float, max_share: float) -> Tensor:
    """Return which [N] examples lie below median − k·MAD: of them the lowest, up to ``max_share`` of all."""
    median, deviation = spread(score)
    order = score.sort(stable=True).indices[: int(max_share * len(score))]
    chosen = torch.zeros_like(score, dtype=torch.bool)
    chosen[order] = True
    return chosen & (score < median - k * deviation)


def domain_variance(features: Tensor, domain: Tensor, *, statistic: str) -> Tensor:
    """Return how much each channel's [F] distribution differs between domains.

    ``variance``: IDV(c) = Var_d(Var over domain d's examples of c's activation); ``mean``: Var_d of the means,
    which IDV misses; ``both``: their sum. A channel that varies as much in every domain scores low.
    """
    parts = [features[domain == d].double() for d in domain.unique()]
    variance = torch.stack([part.var(0, unbiased=False) for part in parts]).var(0, unbiased=False)
    mean = torch.stack([part.mean(0) for part in parts]).var(0, unbiased=False)
    return {"variance": variance, "mean": mean, "both": variance + mean}[statistic]


def specific_channels(score: Tensor, *, k: float) -> Tensor:
    """Return the channels above median + k·MAD; none where MAD = 0."""
    median, deviation = spread(score)
    return ((score > median + k * deviation) & (deviation > 0)).nonzero()[:, 0]


def producers(model: nn.Module) -> dict[str, int]:
    """Return, of each parameter that makes or reads a feature channel alone, its name and channel axis.

    They are the last convolution or linear layer as wide as the features, the norm of that width after it
    (its scale and shift), and the classifier's columns.
    """
    width, last, norm = model.num_features, "", ""
    for name, module in model.featurizer.named_modules():  # type: ignore[union-attr]
        if width in (getattr(module, "out_channels", None), getattr(module, "out_features", None)):
            last, norm = f"featurizer.{name}".rstrip("."), ""
        elif isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm) and last and not norm:
            sizes = (getattr(module, "num_features", 0), getattr(module, "num_channels", 0))
            shape = getattr(module, "normalized_shape", ())
            norm = f"featurizer.{name}" if width in sizes or tuple(shape) == (width,) else ""
    known = dict(model.named_parameters())
    found = {f"{module}.{kind}": 0 for module in (last, norm) for kind in ("weight", "bias")}
    return {name: axis for name, axis in (found | {"classifier.weight": 1}).items() if name in known}


class UnlearningIntervention:
    """Scores the training examples, finds the domain-specific channels, and ascends where both meet.

    With a ``momentum`` the scores are averaged over edits, an example at a time.
    """

    def __init__(self, options: Unlearning, *, seed: int, momentum: float = 0.0) -> None:
        self.options = options
        self.seed = seed
        self.momentum = momentum
        self.every = options.every
        self.scores: dict[str, Tensor] = {}  # key [N], score [N]

    def __call__(self, end: EpochEnd) -> dict[str, float]:
        """Edit ``end.model``; return the share unlearned, the channels touched and the length of the edit."""
        options, model = self.options, end.model
        mode = model.training
        model.eval()
        try:
            with probing(model):
                seen = outputs(model, end.train)
                channels = specific_channels(
                    domain_variance(seen.features, seen.domain, statistic=options.statistic), k=options.mad_k
                )
                if options.parts == "channels":
                    chosen = torch.ones_like(seen.y, dtype=torch.bool)
                else:
                    score = self.remember(seen, self.score(end, seen))
                    chosen = unlearning_set(score, k=options.mad_k, max_share=options.max_share)
                if options.parts == "set":
                    axes: dict[str, int | None] = {name: None for name, _ in model.named_parameters()}
                else:
                    axes = dict(producers(model)) if len(channels) else {}
                length = self.ascend(end, chosen, channels, axes) if axes and chosen.any() else 0.0
        finally:
            model.train(mode)
        return {
            "iu/unlearned": chosen.double().mean().item(),
            "iu/channels": 0.0 if options.parts == "set" else float(len(channels)),
            "iu/ascent": length,
        }

    def score(self, end: EpochEnd, seen: Outputs) -> Tensor:
        """Return U [N] of the training examples."""
        options = self.options
        if options.scope == "classifier":
            guide = outputs(end.model, end.guide)
            exact = options.inverse == "exact"
            found = classifier_scores(seen, guide, damping=options.damping, exact=exact, iterations=options.iterations)
        else:
            chance = generator(self.seed, "iu", end.progress.step)
            found = network_scores(
                end.model,
                end.train,
                end.guide,
                seen,
                damping=options.network_damping,
                iterations=options.network_iterations,
                chance=chance,
            )
        return utility(*found, alpha=options.alpha)

    def remember(self, seen: Outputs, score: Tensor) -> Tensor:
        """Return the scores averaged over edits: an example not seen before starts with its own."""
        if not self.momentum:
            return score
        key, order = (seen.domain << 32 | seen.index).sort()
        score = score[order]
        if self.scores:
            known, before = self.scores["key"], self.scores["score"]
            place = torch.searchsorted(known, key).clamp(max=len(known) - 1)
            averaged = self.momentum * before[place] + (1 - self.momentum) * score
            score = torch.where(known[place] == key, averaged, score)
        self.scores = {"key": key, "score": score}
        return torch.empty_like(score).index_copy_(0, order, score)

    def ascend(self, end: EpochEnd, chosen: Tensor, channels: Tensor, axes: dict[str, int | None]) -> float:
        """Move the parameters up the summed loss of the chosen examples; return how far.

        Of each parameter only the channels along its axis move, or all of it where the axis is None.
        """
        model, trained = end.model, dict(end.model.named_parameters())
        gradient: dict[str, Tensor] = {}
        whole = None in axes.values()
        for x, y in images(end.train, chosen, size=MICRO if whole else CHUNK):
            for name, g in loss_gradient(model, x, y, axes).items():
                axis = axes[name]
                part = g if axis is None else g.index_select(axis, channels)
                gradient[name] = gradient[name] + part if name in gradient else part
        norm = _norm(list(gradient.values()))
        bound = self.options.clip * _norm([p.grad for p in trained.values() if p.grad is not None])
        groups = end.optimizer.param_groups
        group = next((g for g in groups if g.get("part") == "network"), groups[0])
        step = self.options.ascent * float(group["lr"]) * min(1.0, bound / max(norm, TINY))
        if not 0 < step * norm < float("inf"):
            return 0.0
        with torch.no_grad():
            for name, g in gradient.items():
                axis = axes[name]
                if axis is None:
                    trained[name].add_(g, alpha=step)
                else:
                    trained[name].index_add_(axis, channels, g, alpha=step)
        return step * norm

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged scores."""
        return dict(self.scores)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what ``state_dict`` returned."""
        self.scores = dict(state)


def _norm(tensors: list[Tensor]) -> float:
    return torch.stack([t.float().norm() for t in tensors]).norm().item() if tensors else 0.0

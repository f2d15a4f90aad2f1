"""The 2-D toy of Gradient-Guided Annealing: a boundary that should not bend (CVPR 2025, arXiv:2502.20162)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from dgsearch.component import known_or_raise
from dgsearch.gradient.gga import Gga
from dgsearch.gradient.none import NoIntervention
from dgsearch.optimizers.adam import Adam
from dgsearch.randomness import generator, seeded
from dgsearch.step import Closure, DomainBatch, Objective, Progress, Step, cosines, domain_gradients

STEPS = 200
PER_DOMAIN, PER_TARGET = 100, 2_000
CENTRES = (-1.0, 1.0, 2.0)  # of x2: two source domains, then the target
LEANS = (0.3, -0.3, 0.0)  # how far x2 leans with the class: the sources contradict one another
POWERS = tuple((total - j, j) for total in range(1, 5) for j in range(total + 1))  # 14 of them
CASES = ("erm", "gga early", "gga")
QUICK_STEPS = dict.fromkeys(CASES, 100)
REACH = 2.0  # both features are looked at in [−2, 2]
FINE = 401  # points a feature there


@dataclass(frozen=True)
class Boundary:
    """What one classifier learnt.

    ``bend`` is the mean |∂b/∂x2| over x2 in [−2, 2], b(x2) being the x1 at which the class changes; ``agreement``
    the cosine of the two sources' gradients at the end. The boundary is b at the points ``x2``.
    """

    case: str
    seed: int
    bend: float
    source_accuracy: float
    target_accuracy: float
    source_loss: float
    agreement: float
    x2: tuple[float, ...]
    boundary: tuple[float, ...]


def sample(*, seed: int, domain: int, count: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` points [N, 2] of domain 0, 1 (sources) or 2 (target), and their classes [N].

    x1 is ±1 with the class, plus noise; x2 lies about the domain's centre and leans a little with the class,
    one way in one source and the other way in the other.
    """
    chance = generator(seed, "gga_2d", "points", domain)
    y = torch.arange(count) % 2  # [N]
    side = 2.0 * y - 1
    x1 = side + 0.5 * torch.randn(count, generator=chance)
    x2 = CENTRES[domain] + LEANS[domain] * side + 0.3 * torch.randn(count, generator=chance)
    return torch.stack([x1, x2], 1), y


def sources(*, seed: int) -> DomainBatch:
    """Return all of both source domains as one batch, its ``x`` [D, B, 2]."""
    x, y = zip(*(sample(seed=seed, domain=d, count=PER_DOMAIN) for d in (0, 1)), strict=True)
    return DomainBatch(torch.stack(x), torch.stack(y), torch.arange(PER_DOMAIN).expand(2, -1), (0, 1))


class PolynomialRegression(nn.Module):
    """Logistic regression on the monomials of degree 1 to 4, standardised, in the form of a network.

    The featurizer, which GGA moves, is the regression's one linear map; the classifier turns its score into two
    logits.
    """

    mean: Tensor  # [14]
    deviation: Tensor  # [14]

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        monomials = _monomials(x).flatten(0, -2)  # [N, 14]
        self.register_buffer("mean", monomials.mean(0))
        self.register_buffer("deviation", monomials.std(0))
        self.featurizer = nn.Linear(len(POWERS), 1)
        self.classifier = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [..., 1] and logits [..., 2] of points [..., 2]."""
        features = self.featurizer((_monomials(x) - self.mean) / self.deviation)  # [..., 1]
        return features, self.classifier(features)


def _monomials(x: Tensor) -> Tensor:
    i, j = zip(*POWERS, strict=True)
    powers = x[..., None] ** torch.arange(5)  # [..., 2, 5]
    return powers[..., 0, i] * powers[..., 1, j]  # [..., 14]


@torch.no_grad()
def boundary(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return x2 in [−2, 2] and, at each, the x1 at which the class changes.

    Where it changes more than once, or never, within |x1| ≤ 2: the x1 left of which lies as much of that range
    as is given to class 0.
    """
    ticks = torch.linspace(-REACH, REACH, FINE)
    x2, x1 = torch.meshgrid(ticks, ticks, indexing="ij")
    logits = model(torch.stack([x1, x2], -1))[1]  # [x2, x1, 2]
    return ticks, -REACH + 2 * REACH * (logits.argmax(-1) == 0).float().mean(1)


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x)[1].argmax(-1) == y).float().mean().item()


def run(*, seed: int, case: str = "gga", steps: int | None = None, candidates: int = 30) -> Boundary:
    """Train the regression by Adam on full batches of two source domains; ``steps``: else 200.

    Cases: ``erm``; ``gga early``, which searches in the first 2 % of the steps, like the published window; ``gga``,
    which searches at every step. Each search tries ``candidates``, in steps of ρ = .03.

    Raises:
        ValueError: if the case is unknown.
    """
    known_or_raise("case", case, CASES)
    steps = STEPS if steps is None else steps
    batch = sources(seed=seed)
    model = seeded(lambda: PolynomialRegression(batch.x), seed, "gga_2d", "network")
    objective = Objective()
    optimizer = Adam(lr=0.01).build(model.parameters(), seed=seed)
    window = {"gga early": 0.02, "gga": 1.0}.get(case)
    gga = Gga(rho=0.03, candidates=candidates, start=0.0, window=window or 0.0)
    intervention = (NoIntervention() if window is None else gga).build(seed=seed)
    for step in range(steps):
        progress = Progress(step, steps)
        closure = Closure(model, objective, optimizer, batch, progress, seed=seed)
        again: Any = intervention(Step(model, objective, batch, progress, closure))  # torch types it as -> float
        optimizer.step(again)
    losses, gradients = domain_gradients(model, objective, batch, Progress(steps, steps))
    x2, x1 = boundary(model)
    return Boundary(
        case=case,
        seed=seed,
        bend=((x1.diff() / x2.diff()).abs().mean()).item(),
        source_accuracy=_accuracy(model, batch.x, batch.y),
        target_accuracy=_accuracy(model, *sample(seed=seed, domain=2, count=PER_TARGET)),
        source_loss=losses.mean().item(),
        agreement=cosines(gradients).min().item(),
        x2=tuple(x2.tolist()),
        boundary=tuple(x1.tolist()),
    )


def draw(results: Sequence[Boundary], path: Path) -> None:
    """Draw the boundaries, a panel a case and a line a seed, over the first seed's points, into a PNG file."""
    cases = list(dict.fromkeys(result.case for result in results))
    figure = Figure(figsize=(4.2 * len(cases) + 0.4, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("x1 tells the class, x2 the domain: a boundary that generalises is vertical")
    panels = figure.subplots(1, len(cases), squeeze=False, sharey=True)[0]
    for case, axis in zip(cases, panels, strict=True):
        these = [result for result in results if result.case == case]
        for domain, (marker, alpha) in enumerate((("o", 0.8), ("s", 0.8), ("^", 0.3))):
            x, y = sample(seed=these[0].seed, domain=domain, count=PER_DOMAIN)
            name = f"source {domain + 1}" if domain < 2 else "target, unseen"
            for k, colour in enumerate(("tab:blue", "tab:orange")):
                inside = x[y == k].numpy()
                axis.scatter(*inside.T, s=14, marker=marker, color=colour, alpha=alpha, linewidths=0,
                             label=f"class {k}, {name}")  # fmt: skip
        for n, result in enumerate(these):
            label = {0: "boundary, these points", 1: "boundary, other seeds"}.get(n)
            width, alpha = (2.5, 1.0) if n == 0 else (1.0, 0.4)
            axis.plot(result.boundary, result.x2, color="black", linewidth=width, alpha=alpha, label=label)
        bend, target = (sum(getattr(r, name) for r in these) / len(these) for name in ("bend", "target_accuracy"))
        axis.set_title(f"{case}: bend {bend:.2f}, target accuracy {target:.2f}")
        axis.set(xlabel="x1 (class-specific)", xlim=(-REACH - 0.1, REACH + 0.1), ylim=(-2.2, 2.9))
    panels[0].set_ylabel("x2 (domain-specific)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=120, format="png")

"""Feature contamination: ReLU networks learn features that don't matter (ICML 2024, arXiv:2406.03345)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from dgsearch.component import known_or_raise
from dgsearch.randomness import generator, seeded

NUM_POINTS, CORE, BACKGROUND, INPUTS, HIDDEN = 1000, 32, 32, 256, 256
FULL_STEPS = {"theory": 4_000, "practical": 20_000}  # by setting
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "identity": nn.Identity}
CASES = tuple(f"{setting} {activation}" for setting in FULL_STEPS for activation in ACTIVATIONS)
QUICK_STEPS = dict.fromkeys(CASES, 1_500)
LOOKS = 20  # how often a run is measured on its way


@dataclass(frozen=True)
class Contamination:
    """What one network learnt. Losses and accuracies are final ones; projections are of the first layer.

    A projection is the mean over hidden neurons of the norm of a neuron's weights projected on the core, or on
    the background, subspace. In distribution (ID) is the training set itself; out of it (OOD) are the same core
    features with the background's sign turned. The ``_curve`` fields are what they were at ``steps_curve``.
    """

    case: str
    seed: int
    id_loss: float
    ood_loss: float
    id_accuracy: float
    ood_accuracy: float
    core_before: float
    core_after: float
    background_before: float
    background_after: float
    steps_curve: tuple[int, ...]
    id_loss_curve: tuple[float, ...]
    ood_loss_curve: tuple[float, ...]
    core_curve: tuple[float, ...]
    background_curve: tuple[float, ...]


def embedding(*, seed: int) -> Tensor:
    """Return the map of features into inputs, its rows orthonormal: [core + background, inputs]."""
    columns = torch.randn(INPUTS, CORE + BACKGROUND, generator=generator(seed, "contamination", "embedding"))
    return torch.linalg.qr(columns).Q.T.contiguous()


def points(*, seed: int, linear: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return training features, features out of distribution [N, core + background] and labels ±1 [N].

    Core: ±U[0, 1] where ``linear``, else the unit sphere for +1 and that of radius 2 for −1. Background, whatever
    the label: U[0, 1] in training, −U[0, 1] out of distribution.
    """
    chance = generator(seed, "contamination", "points")
    y = torch.ones(NUM_POINTS)  # [N]
    y[NUM_POINTS // 2 :] = -1
    if linear:
        core = torch.rand(NUM_POINTS, CORE, generator=chance) * y[:, None]
    else:
        directions = functional.normalize(torch.randn(NUM_POINTS, CORE, generator=chance), dim=1)
        core = directions * torch.where(y > 0, 1.0, 2.0)[:, None]
    inside, outside = torch.rand(2, NUM_POINTS, BACKGROUND, generator=chance)
    return torch.cat([core, inside], 1), torch.cat([core, -outside], 1), y


class TwoLayers(nn.Module):
    """A network of one hidden layer and one output; a frozen head holds ±1/hidden, half of the neurons each."""

    def __init__(self, *, activation: str, frozen_head: bool) -> None:
        super().__init__()
        self.hidden = nn.Linear(INPUTS, HIDDEN)
        self.activation = ACTIVATIONS[activation]()
        self.head = nn.Linear(HIDDEN, 1)
        if frozen_head:
            self.head.requires_grad_(False)
            self.head.weight.fill_(1 / HIDDEN)[:, HIDDEN // 2 :].neg_()

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [N] of inputs [N, inputs]."""
        return self.head(self.activation(self.hidden(x))).squeeze(1)


def _logistic(margins: Tensor) -> Tensor:
    return functional.softplus(-margins).mean()


def _hinge(margins: Tensor) -> Tensor:
    return (1 - margins).clamp_min(0).mean()


def run(*, seed: int, case: str = "theory relu", steps: int | None = None) -> Contamination:
    """Train a network on full batches, and measure it before, on the way and after.

    A case is a setting and an activation. ``practical``: logistic loss, AdamW with lr = weight decay = 1e-3, core
    on two spheres, both layers trained. ``theory``: hinge loss, SGD with momentum .9 and the same lr and weight
    decay, linear core, frozen head: what the paper's theorems are about. ``steps``: else the setting's full
    20,000 or 4,000.

    Raises:
        ValueError: if the case is unknown.
    """
    known_or_raise("case", case, CASES)
    setting, activation = case.split()
    steps = FULL_STEPS[setting] if steps is None else steps
    theory = setting == "theory"
    embed = embedding(seed=seed)
    inside, outside, y = points(seed=seed, linear=theory)
    inside, outside = inside @ embed, outside @ embed  # [N, inputs]
    model = seeded(lambda: TwoLayers(activation=activation, frozen_head=theory), seed, "contamination", "network")
    loss = _hinge if theory else _logistic
    optimizer: torch.optim.Optimizer
    if theory:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-3)

    def margins(x: Tensor) -> Tensor:
        return y * model(x)  # [N]

    at, curves = [], []
    every = max(1, steps // LOOKS)
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            with torch.no_grad():
                learnt = model.hidden.weight @ embed.T  # [hidden, core + background]
                core, background = (part.norm(dim=1).mean() for part in learnt.split([CORE, BACKGROUND], dim=1))
                losses = (loss(margins(inside)), loss(margins(outside)))
            at.append(step)
            curves.append([float(value) for value in (*losses, core, background)])
        if step < steps:
            optimizer.zero_grad()
            loss(margins(inside)).backward()
            optimizer.step()
    with torch.no_grad():
        id_accuracy, ood_accuracy = ((margins(x) > 0).float().mean().item() for x in (inside, outside))
    id_losses, ood_losses, cores, backgrounds = zip(*curves, strict=True)
    return Contamination(
        case=case,
        seed=seed,
        id_loss=id_losses[-1],
        ood_loss=ood_losses[-1],
        id_accuracy=id_accuracy,
        ood_accuracy=ood_accuracy,
        core_before=cores[0],
        core_after=cores[-1],
        background_before=backgrounds[0],
        background_after=backgrounds[-1],
        steps_curve=tuple(at),
        id_loss_curve=id_losses,
        ood_loss_curve=ood_losses,
        core_curve=cores,
        background_curve=backgrounds,
    )


def draw(results: Sequence[Contamination], path: Path) -> None:
    """Draw losses and projections against steps, a column a case and a thin line a seed, into a PNG file."""
    cases = list(dict.fromkeys(result.case for result in results))
    figure = Figure(figsize=(3.4 * len(cases) + 0.6, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Feature contamination: ReLU learns the background, which says nothing of the label")
    rows = (
        ("loss", {"in distribution": "id_loss_curve", "background turned (OOD)": "ood_loss_curve"}),
        ("projection of first-layer weights", {"core": "core_curve", "background": "background_curve"}),
    )
    panels = figure.subplots(2, len(cases), squeeze=False, sharex="col")
    for (label, curves), axes in zip(rows, panels, strict=True):
        for case, axis in zip(cases, axes, strict=True):
            these = [result for result in results if result.case == case]
            looks = (("tab:blue", "-"), ("tab:red", "--"))  # dashed, so that two curves on one another both show
            for (colour, style), (name, field) in zip(looks, curves.items(), strict=True):
                each = torch.tensor([getattr(result, field) for result in these])  # [seeds, looks]
                at = these[0].steps_curve
                axis.plot(at, each.T.numpy(), color=colour, alpha=0.25, linewidth=0.8)
                axis.plot(at, each.mean(0).numpy(), color=colour, linestyle=style, linewidth=2, label=name)
            axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
            axis.grid(alpha=0.3)
        axes[0].set_ylabel(label)
        axes[0].legend(fontsize="small", loc="lower left")
    for case, top, bottom in zip(cases, *panels, strict=True):
        top.set_title(case)
        bottom.set_xlabel("step")
    figure.savefig(path, dpi=120, format="png")

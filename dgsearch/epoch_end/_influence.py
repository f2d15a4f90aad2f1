"""How much each training example helps the guide part: damped influence functions without per-example solves.

ℓ is cross-entropy, H the mean generalized Gauss–Newton matrix of the training part, λ = damping × H's mean
diagonal. Of each training example x: gain G = Σ_z ∇ℓ(z)ᵀ (H + λ)⁻¹ ∇ℓ(x) over the guide part, positive where x
helps it, and complexity C = ‖(H + λ)⁻¹ ∇ℓ(x)‖. The Kronecker approximation of
H has the eigenvectors of H's partial traces (Martens & Grosse 2015, arXiv:1503.05671, without their assumption that
positions are independent) and H's diagonal in that basis (George et al. 2018, arXiv:1806.03884). C is a norm and
survives it; G does not, so H⁻¹ Σ_z ∇ℓ(z) is found by conjugate gradients that it preconditions.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.nn import functional

from dgsearch.step import Part

ROWS = 4096  # examples of a closed form at once
MICRO = 32  # images of a pass with gradients at once
SAMPLE = 256  # images the network's curvature is estimated on
FEW = 5  # positions of a layer for which C goes over pairs of them
ELEMENTS = 2**20  # of per-example gradients at once

Scores = tuple[Tensor, Tensor]  # gain [N], complexity [N]
Tree = dict[str, Tensor]  # a tensor a parameter, by name


@dataclass(frozen=True)
class Outputs:
    """What one forward pass over a part gives."""

    features: Tensor  # [N, F]
    logits: Tensor  # [N, K]
    y: Tensor  # [N]
    domain: Tensor  # [N]
    index: Tensor  # [N]


@torch.no_grad()
def outputs(model: nn.Module, part: Part) -> Outputs:
    """Return the model's outputs on a part, in order."""
    device = next(model.parameters()).device
    none = torch.zeros(0, dtype=torch.int64, device=device)
    features, logits = torch.zeros(0, model.num_features), torch.zeros(0, model.classifier.out_features)  # type: ignore
    found = [(features.to(device), logits.to(device), none, none, none)]
    for batch in part:
        domain = torch.full_like(batch.y[0], batch.domains[0])
        found.append((*(out[0] for out in model(batch.x)), batch.y[0], domain, batch.index[0]))
    return Outputs(*(torch.cat(rows) for rows in zip(*found, strict=True)))


def images(part: Part, chosen: Tensor, *, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images [B, C, H, W] and class ids [B] of the chosen [N] examples of a part, up to ``size`` at once."""
    held: list[tuple[Tensor, Tensor]] = []
    start = count = 0
    for batch in part:
        rows = chosen[start : start + batch.y.shape[1]].nonzero()[:, 0]
        start += batch.y.shape[1]
        for some in rows.split(size):
            held.append((batch.x[0, some], batch.y[0, some]))
            count += len(some)
            if count >= size:
                x, y = (torch.cat(t) for t in zip(*held, strict=True))
                yield x[:size], y[:size]
                held, count = [(x[size:], y[size:])], count - size
    if count:
        x, y = (torch.cat(t) for t in zip(*held, strict=True))
        yield x, y


def _eigenvectors(matrix: Tensor) -> Tensor:
    """Return eigenvectors; NaN where a matrix is not finite: nothing is unlearned then."""
    return torch.linalg.eigh(matrix)[1] if torch.isfinite(matrix).all() else torch.full_like(matrix, math.nan)


# -- the classifier alone: ∇ℓ = (softmax − onehot) ⊗ [f, 1]


def classifier_scores(
    train: Outputs, guide: Outputs, *, damping: float, exact: bool = False, iterations: int = 20
) -> Scores:
    """Return the scores over the classifier's parameters, from outputs alone, computed in float64.

    ``exact`` inverts the K(F+1) Gauss–Newton matrix: for small F·K only. Else C is that of a Kronecker
    approximation with H's own diagonal in its eigenbasis, and G that of conjugate gradients preconditioned by it.
    """
    slope = sum((r.mT @ a for r, a, _ in _chunks(guide)), start=torch.zeros(()).double())  # [K, F+1]
    gain, complexity = _exact(train, slope, damping) if exact else _kronecker(train, slope, damping, iterations)
    return gain.float(), complexity.float()


def _chunks(part: Outputs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield residuals [B, K], rows [f, 1] [B, F+1] and probabilities [B, K], in float64."""
    parts = (part.features.split(ROWS), part.logits.split(ROWS), part.y.split(ROWS))
    for features, logits, y in zip(*parts, strict=True):
        p = logits.double().softmax(1)
        yield p - functional.one_hot(y, p.shape[1]), functional.pad(features.double(), (0, 1), value=1.0), p


def _kronecker(train: Outputs, slope: Tensor, damping: float, iterations: int) -> Scores:
    outer: Tensor | float = 0.0  # Σ S ‖a‖² [K, K]
    inner: Tensor | float = 0.0  # Σ tr(S) a aᵀ [F+1, F+1]
    for _, a, p in _chunks(train):
        length = a.square().sum(1, keepdim=True)  # [B, 1]
        outer = outer + (p * length).sum(0).diag() - (p * length).mT @ p
        inner = inner + a.mT @ (a * (p - p.square()).sum(1, keepdim=True))
    assert isinstance(outer, Tensor) and isinstance(inner, Tensor)
    trace, n = outer.trace(), len(train.y)
    left, right = _eigenvectors(outer), _eigenvectors(inner)
    damped = torch.zeros_like(slope) + damping * trace / n / slope.numel()  # [K, F+1]
    for _, a, p in _chunks(train):
        damped += (p @ left.square() - (p @ left).square()).mT @ (a @ right).square() / n

    def precondition(tree: Tree) -> Tree:
        return {"": left @ ((left.mT @ tree[""] @ right) / damped) @ right.mT}

    def product(tree: Tree) -> Tree:
        pushed = tree[""] * (damping * trace / n / slope.numel())
        for _, a, p in _chunks(train):
            change = a @ tree[""].mT  # [B, K]
            pushed = pushed + (p * (change - (p * change).sum(1, keepdim=True))).mT @ a / n
        return {"": pushed}

    u = conjugate_gradients(product, {"": slope}, precondition=precondition, iterations=iterations)
    direction = left.mT @ u[""] @ right
    found = []
    for r, a, _ in _chunks(train):
        turned, rows = r @ left, a @ right
        gain = ((turned @ direction) * rows).sum(1)
        found.append((gain, ((turned.square() @ damped.pow(-2)) * rows.square()).sum(1).sqrt()))
    gains, complexities = zip(*found, strict=True)
    return torch.cat(gains), torch.cat(complexities)


def _exact(train: Outputs, slope: Tensor, damping: float) -> Scores:
    k, f = slope.shape
    h = slope.new_zeros(k, f, k, f)
    for _, a, p in _chunks(train):
        for i in range(k):
            for j in range(k):
                s = p[:, i] * (float(i == j) - p[:, j])  # [B]
                h[i, :, j] += a.mT @ (a * s[:, None]) / len(train.y)
    matrix = h.view(k * f, k * f)
    matrix.diagonal().add_(damping * matrix.diagonal().mean())
    vectors = _eigenvectors(matrix)
    values = ((matrix @ vectors) * vectors).sum(0)
    direction = vectors @ ((vectors.mT @ slope.flatten()) / values)  # [K(F+1)]
    found = []
    for r, a, _ in _chunks(train):
        for some, rows in zip(r.split(MICRO), a.split(MICRO), strict=True):
            gradients = (some[:, :, None] * rows[:, None]).flatten(1)  # [B, K(F+1)]
            found.append((gradients @ direction, (gradients @ vectors / values).norm(dim=1)))
    gains, complexities = zip(*found, strict=True)
    return torch.cat(gains), torch.cat(complexities)


# -- the whole network


@dataclass(frozen=True)
class Kronecker:
    """A layer's damped H as a Kronecker product over outputs, inputs and the kernel's offsets, in its eigenbasis."""

    outputs: Tensor  # [O, O]
    inputs: Tensor  # [I, I]
    offsets: Tensor  # [S, S]
    damped: Tensor  # [O, I, S]

    def turn(self, slope: Tensor) -> Tensor:
        """Return ``slope`` [O, I, S] in the eigenbasis."""
        return torch.einsum("ois,op,ij,st->pjt", slope, self.outputs, self.inputs, self.offsets)

    def solve(self, slope: Tensor) -> Tensor:
        """Return (H + λ)⁻¹ slope [O, I, S]."""
        turned = self.turn(slope) / self.damped
        return torch.einsum("pjt,op,ij,st->ois", turned, self.outputs, self.inputs, self.offsets)


def scored_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose weights take part: linear ones, with their bias, and plain convolutions."""
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
        or (isinstance(m, nn.Conv2d) and m.groups == 1 and m.padding_mode == "zeros" and not isinstance(m.padding, str))
    }


def network_scores(
    model: nn.Module,
    train: Part,
    guide: Part,
    outputs: Outputs,
    *,
    damping: float,
    iterations: int,
    chance: torch.Generator,
) -> Scores:
    """Return the scores over all layers' weights (``scored_layers``); the model must be in evaluation mode.

    One backward pass gives both: with a layer's inputs a and output gradients b, G is the sum of bᵀ U a over
    positions and layers, where u = (H + λ)⁻¹ Σ_z ∇ℓ(z) comes from ``iterations`` steps of conjugate gradients,
    preconditioned by the layers' Kronecker products, with H of up to SAMPLE images; C comes from those Kronecker
    products. ``chance`` draws the labels, from the model's own predictions, whose gradients' second moment is H.
    """
    layers = scored_layers(model)
    every = torch.ones(len(outputs.y), dtype=torch.bool, device=outputs.y.device)
    some = torch.zeros_like(every)
    some[:: math.ceil(len(every) / SAMPLE)] = True
    p = outputs.logits[some].softmax(1).nan_to_num(1.0)
    labels = torch.multinomial(p.cpu(), 1, generator=chance)[:, 0].to(p.device)
    sample = [x for x, _ in images(train, some, size=MICRO)]
    drawn = list(zip(sample, labels.split(MICRO), strict=True))
    factors, mean = layer_factors(model, layers, drawn, damping=damping)
    names = [
        f"{name}.{kind}"
        for name, layer in layers.items()
        for kind in (("weight", "bias") if isinstance(layer, nn.Linear) and layer.bias is not None else ("weight",))
    ]
    slope = {name: torch.zeros_like(p) for name, p in parameters(model).items() if name in names}
    for batch in guide:
        for x, y in zip(batch.x[0].split(MICRO), batch.y[0].split(MICRO), strict=True):
            add_(slope, loss_gradient(model, x, y, names))

    def joined(tree: Tree) -> Tree:
        return {n: _join(layer, tree[f"{n}.weight"], tree.get(f"{n}.bias")) for n, layer in layers.items()}

    def precondition(tree: Tree) -> Tree:
        found = {}
        for name, rows in joined(tree).items():
            weight, solved = tree[f"{name}.weight"], factors[name].solve(rows)
            found[f"{name}.weight"] = solved[:, : weight.shape[1]].reshape(weight.shape)
            if f"{name}.bias" in tree:
                found[f"{name}.bias"] = solved[:, -1, 0]
        return found

    def product(tree: Tree) -> Tree:
        found = {name: damping * mean * t for name, t in tree.items()}
        for x in sample:
            add_(found, gauss_newton(model, x, tree), scale=1 / len(labels))
        return found

    u = conjugate_gradients(product, slope, precondition=precondition, iterations=iterations)
    turned = {name: factors[name].turn(rows).flatten(1) for name, rows in joined(u).items()}
    scores = [layer_scores(model, layers, factors, turned, x, y) for x, y in images(train, every, size=MICRO)]
    gains, complexities = zip(*scores, strict=True)
    return torch.cat(gains), torch.cat(complexities)


def parameters(model: nn.Module) -> Tree:
    """Return the model's parameters, detached."""
    return {name: p.detach() for name, p in model.named_parameters()}


def logits_at(model: nn.Module, tree: Tree, x: Tensor) -> Tensor:
    """Return logits [B, K] at other parameters."""
    return functional_call(model, tree, (x,))[1]


def loss_gradient(model: nn.Module, x: Tensor, y: Tensor, names: Collection[str]) -> Tree:
    """Return the gradient of the summed loss in the parameters named; no ``.grad`` is touched."""
    tree = parameters(model)
    wanted = {name: t.requires_grad_() for name, t in tree.items() if name in names}
    loss = functional.cross_entropy(logits_at(model, tree, x), y, reduction="sum")
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(wanted.items(), found, strict=True)}


def gauss_newton(model: nn.Module, x: Tensor, tree: Tree) -> Tree:
    """Return Σ_x Jᵀ (diag p − p pᵀ) J times ``tree``, J in its parameters alone; in float32 whatever the precision."""
    fixed = parameters(model)
    at = {name: fixed[name] for name in tree}
    with _in_float32(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's first jvp of a process warns of torch's own use of jit
        found = jvp(lambda some: logits_at(model, fixed | some, x), (at,), (tree,))
        logits, change = found[0], found[1]
        p = logits.softmax(1)
        back = vjp(lambda some: logits_at(model, fixed | some, x), at)[1]
        return back(p * (change - (p * change).sum(1, keepdim=True)))[0]


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Let a network run in float32 until the exit: torch has no forward derivative of batch norm under autocast."""
    before = model.precision
    model.precision = "float32"  # type: ignore[assignment]
    try:
        yield
    finally:
        model.precision = before


def add_(tree: Tree, other: Tree, *, scale: float | Tensor = 1.0) -> None:
    """Add ``scale`` × ``other`` in place."""
    for name, t in tree.items():
        t.add_(other[name] * scale)


def inner(a: Tree, b: Tree) -> Tensor:
    """Return the inner product of two trees."""
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def conjugate_gradients(
    product: Callable[[Tree], Tree], slope: Tree, *, precondition: Callable[[Tree], Tree], iterations: int
) -> Tree:
    """Return an approximate solution u of product(u) = slope; with no iteration, the preconditioner's."""
    step = precondition(slope)
    if not iterations:
        return step
    u = {name: torch.zeros_like(t) for name, t in slope.items()}
    rest = {name: t.clone() for name, t in slope.items()}
    before = inner(rest, step)
    for _ in range(iterations):
        pushed = product(step)
        length = before / inner(step, pushed).clamp(min=1e-30)
        add_(u, step, scale=length)
        add_(rest, pushed, scale=-length)
        turned = precondition(rest)
        after = inner(rest, turned)
        step = {name: turned[name] + after / before.clamp(min=1e-30) * t for name, t in step.items()}
        before = after
    return u


def layer_factors(
    model: nn.Module, layers: dict[str, nn.Module], drawn: list[tuple[Tensor, Tensor]], *, damping: float
) -> tuple[dict[str, Kronecker], Tensor]:
    """Return each layer's damped Kronecker product and H's mean diagonal over the layers, from drawn labels."""
    sums: dict[str, list[Tensor]] = {}

    def take(name: str, a: Tensor, b: Tensor) -> None:
        new = partial_traces(_slopes(layers[name], b, len(a)), _patches(layers[name], a, len(a)))
        sums[name] = [s + t for s, t in zip(sums[name], new, strict=True)] if name in sums else new

    for x, y in drawn:
        each_layer(model, layers, x, y, take)
    count = sum(len(y) for _, y in drawn)
    sizes = {name: [len(t) for t in traces] for name, traces in sums.items()}
    trace = torch.stack([outer.trace() for outer, _, _ in sums.values()]).sum() / count
    mean = trace / sum(math.prod(size) for size in sizes.values())
    found = {}
    for name, traces in sums.items():
        outer, inner_, offsets = (_eigenvectors(t.double()).float() for t in traces)
        found[name] = Kronecker(outer, inner_, offsets, (damping * mean).repeat(*sizes[name]))

    def correct(name: str, a: Tensor, b: Tensor) -> None:
        slopes, patches = _turned(layers[name], found[name], a, b)
        damped = found[name].damped.flatten(1)  # a view
        if slopes.shape[1] > FEW:
            for g in _products(slopes, patches):
                damped.add_(g.square_().sum(0).view_as(damped), alpha=1 / count)
        else:
            left, right = _pairs(slopes, patches)
            damped.addmm_(left.flatten(0, 1).mT, right.flatten(0, 1), alpha=1 / count)

    for x, y in drawn:
        each_layer(model, layers, x, y, correct)
    return found, mean


def _turned(layer: nn.Module, factor: Kronecker, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return output gradients [B, T, O] and patches [B, T, I·S] in the factor's eigenbasis."""
    return _slopes(layer, b, len(a)).mT @ factor.outputs, _patches(layer, a, len(a), factor).flatten(1, 2).mT


def _products(slopes: Tensor, patches: Tensor) -> Iterator[Tensor]:
    """Yield per-example gradients [B, O·I·S], a few examples at a time."""
    size = max(1, ELEMENTS // (slopes.shape[2] * patches.shape[2]))
    for left, right in zip(slopes.split(size), patches.split(size), strict=True):
        yield (left.mT @ right).flatten(1)


def _pairs(slopes: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return left [B, T(T+1)/2, O] and right [B, T(T+1)/2, I·S] with leftᵀ right = (Σ_t b_t a_tᵀ)², element by element.

    The square is a sum over pairs of positions: with few, that is a product of matrices.
    """
    i, j = torch.triu_indices(slopes.shape[1], slopes.shape[1], device=slopes.device)
    return slopes[:, i] * slopes[:, j] * (1 + (i < j))[:, None], patches[:, i] * patches[:, j]


def partial_traces(b: Tensor, a: Tensor) -> list[Tensor]:
    """Return Σ_x of g gᵀ over outputs [O, O], inputs [I, I] and offsets [S, S], where g = Σ_t b_t ⊗ a_t.

    ``b`` are output gradients [B, O, T] and ``a`` input patches [B, I, S, T], over T positions.
    """
    flat = a.flatten(1, 2)  # [B, I·S, T]
    if b.shape[2] < b.shape[1]:  # fewer positions than outputs: g itself is the larger thing
        pushed = (flat @ (b.mT @ b)).view_as(a)
        left = torch.einsum("bot,bpt->op", b @ (flat.mT @ flat), b)
        return [left, torch.einsum("bist,bjst->ij", pushed, a), torch.einsum("bist,biut->su", pushed, a)]
    g = (b @ flat.mT).unflatten(2, a.shape[1:3])  # [B, O, I, S]
    return [
        torch.einsum("bois,bpis->op", g, g),
        torch.einsum("bois,bojs->ij", g, g),
        torch.einsum("bois,boiu->su", g, g),
    ]


def layer_scores(
    model: nn.Module,
    layers: dict[str, nn.Module],
    factors: dict[str, Kronecker],
    turned: Tree,
    x: Tensor,
    y: Tensor,
) -> Scores:
    """Return G and C [B] from one backward pass; ``turned`` is u [O, I·S] in each layer's eigenbasis."""
    gain, square = x.new_zeros(len(x)), x.new_zeros(len(x))

    def take(name: str, a: Tensor, b: Tensor) -> None:
        weights = factors[name].damped.pow(-2).flatten(1)  # [O, I·S]
        slopes, patches = _turned(layers[name], factors[name], a, b)
        if slopes.shape[1] > FEW:
            both = [(g @ turned[name].flatten(), g.square_() @ weights.flatten()) for g in _products(slopes, patches)]
            gain.add_(torch.cat([g for g, _ in both]))
            square.add_(torch.cat([c for _, c in both]))
        else:
            gain.add_(((slopes @ turned[name]) * patches).sum((1, 2)))
            left, right = _pairs(slopes, patches)
            square.add_(((left @ weights) * right).sum((1, 2)))

    each_layer(model, layers, x, y, take)
    return gain, square.clamp(min=0).sqrt()


def each_layer(
    model: nn.Module,
    layers: dict[str, nn.Module],
    x: Tensor,
    y: Tensor,
    take: Callable[[str, Tensor, Tensor], None],
) -> None:
    """Call ``take(name, a, b)`` with each layer's input and the gradient of the summed loss in its output."""

    def hook(name: str) -> Callable[..., None]:
        def remember(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            a = inputs[0].detach()
            # On the tensor, not the module: a ReLU in place may follow.
            output.register_hook(lambda b: take(name, a, b))

        return remember

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        x = x.detach().requires_grad_()  # the graph begins here: no gradient of a parameter is wanted
        loss = functional.cross_entropy(logits_at(model, parameters(model), x), y, reduction="sum")
        torch.autograd.grad(loss, x)
    finally:
        for handle in handles:
            handle.remove()


def _slopes(layer: nn.Module, b: Tensor, size: int) -> Tensor:
    """Return output gradients [B, O, T]."""
    return b.float().flatten(2) if isinstance(layer, nn.Conv2d) else b.float().reshape(size, -1, b.shape[-1]).mT


def _patches(layer: nn.Module, a: Tensor, size: int, factor: Kronecker | None = None) -> Tensor:
    """Return the inputs that meet each weight [B, I, S, T], in the factor's eigenbasis where one is given."""
    a = a.float()
    if not isinstance(layer, nn.Conv2d):
        rows = a.reshape(size, -1, a.shape[-1])  # [B, T, I]
        rows = functional.pad(rows, (0, 1), value=1.0) if layer.bias is not None else rows
        return (rows if factor is None else rows @ factor.inputs).mT[:, :, None]
    assert not isinstance(layer.padding, str)
    if factor is None:
        patches = functional.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    else:  # channels turn before the patches are cut, and offsets while they are: a convolution a channel
        a = (a.movedim(1, -1) @ factor.inputs).movedim(-1, 1)
        kernels = factor.offsets.mT.reshape(-1, 1, *layer.kernel_size).repeat(layer.in_channels, 1, 1, 1)
        patches = functional.conv2d(
            a, kernels, None, layer.stride, layer.padding, layer.dilation, groups=layer.in_channels
        ).flatten(2)
    return patches.unflatten(1, (layer.in_channels, -1))


def _join(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a layer's parameters as [O, I, S], a linear layer's bias as its last input."""
    joined = weight.reshape(*weight.shape[:2], -1)
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        assert bias is not None
        joined = torch.cat([joined, bias[:, None, None]], 1)
    return joined

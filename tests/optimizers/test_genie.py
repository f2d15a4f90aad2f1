"""GENIE against a float64 derivation; its first step, noise, mask and variants; an edit survives."""

import math

import numpy as np
import pytest
import torch

from dgsearch.optimizers.genie import LEVELS, Genie, GenieOptimizer, left_over


def optimizer_of(parameters, component, seed=0) -> GenieOptimizer:
    groups = [{"params": parameters, "part": "network", "lr_ratio": 1.0}]
    return component.build(groups, seed=seed)


def step_with(optimizer, parameter, gradient):
    def closure():
        parameter.grad = gradient.clone()
        return torch.zeros(())

    optimizer.step(closure)


def derived(x, gradients, *, lr, beta, variant="code", precondition=True, weight_decay=0.0):
    """The algorithm written again, plainly, element by element in float64, without noise and mask."""
    x = np.array(x, dtype=np.float64)
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        for i in range(x.size):
            m[i] = beta * m[i] + (1 - beta) * g[i]
            v[i] = beta * v[i] + (1 - beta) * g[i] ** 2
            c = 1 - beta**t
            m_hat, v_hat = m[i] / c, v[i] / c
            rho = (1 - beta) * (1 + beta**t) / ((1 + beta) * (1 - beta**t))
            if variant == "paper":
                variance = v[i] - m[i] ** 2
                factor = m_hat**2 / v_hat if v_hat > 0 else 0.0
            else:
                variance = (v_hat - m_hat**2) / (1 - rho) if t > 1 else 0.0
            variance = variance if variance > 0 else 1e-8
            tau = math.tanh(min(1 / variance, 10))
            if variant == "code":
                of_mean = rho * variance
                factor = 1 / (1 + of_mean / (m_hat**2 + 1e-8))
            update = m_hat * (factor * tau if precondition else 1.0)
            x[i] = x[i] * (1 - lr * weight_decay) - lr * update
    return x


@pytest.mark.parametrize(
    "options",
    [{}, {"variant": "paper"}, {"precondition": False}, {"weight_decay": 0.1}, {"beta": 0.9}],
    ids=str,
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_fifty_steps_equal_a_float64_derivation(options, scale):
    chance = np.random.default_rng(0)
    start = chance.normal(size=12)
    gradients = [scale * (chance.normal(size=12) + np.linspace(-2, 2, 12)) for _ in range(50)]
    for gradient in gradients:
        gradient[3] = 0.0  # never had a gradient
        gradient[4] = 2e-5  # no variance at all
    component = Genie(lr=0.015, noise=False, mask=False, **options)
    parameter = torch.nn.Parameter(torch.tensor(start))
    optimizer = optimizer_of([parameter], component)
    for gradient in gradients:
        step_with(optimizer, parameter, torch.tensor(gradient))
    keys = {k: v for k, v in options.items() if k != "beta"}
    expected = derived(start, gradients, lr=0.015, beta=options.get("beta", 0.95), **keys)
    assert parameter.detach().numpy() == pytest.approx(expected, abs=1e-6)


def test_the_first_step_is_finite_and_known():
    """At t = 1 there is no variance yet: ρ = 1 and σ² is 1e-8 everywhere; the published code divides by zero."""
    assert left_over(0.95, 1) == pytest.approx(1.0)
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    gradient = torch.tensor([1.0, -2.0, 0.0, 1e-4], dtype=torch.float64)
    step_with(optimizer_of([parameter], Genie(lr=1.0, mask=False)), parameter, gradient)
    tau = math.tanh(10)
    expected = [-g * tau / (1 + 1e-8 / (g * g + 1e-8)) for g in gradient.tolist()]
    # τ = tanh(10) is 1 − 4e-9, and taken as 1
    assert parameter.tolist() == pytest.approx(expected, rel=1e-8)


def test_the_mask_keeps_its_share_and_the_mean():
    n = 200_000
    component = Genie(lr=1.0, dropout=0.4, noise=False)
    parameter = torch.nn.Parameter(torch.zeros(n))
    optimizer = optimizer_of([parameter], component)
    step_with(optimizer, parameter, torch.ones(n))
    moved = parameter.detach().clone()
    kept = (moved != 0).double().mean().item()
    assert kept == pytest.approx(0.6, abs=4 * math.sqrt(0.6 * 0.4 / n))
    whole = -(LEVELS / round(0.6 * LEVELS))
    torch.testing.assert_close(moved[moved != 0], torch.full_like(moved[moved != 0], whole), rtol=1e-5, atol=0)
    assert moved.double().mean().item() == pytest.approx(-1, abs=0.01)
    step_with(optimizer, parameter, torch.ones(n))
    fresh = parameter.detach() - moved
    both = ((moved != 0) & (fresh != 0)).double().mean().item()
    assert both == pytest.approx(0.36, abs=0.006)  # another mask each step
    neighbours = ((moved[:-1] != 0) & (moved[1:] != 0)).double().mean().item()
    assert neighbours == pytest.approx(0.36, abs=0.006)


def test_the_noise_has_its_moments():
    """Where σ² is large τ is small, and the update is (1 − τ) ν N(0, 1) beside a small mean."""
    n = 200_000
    chance = np.random.default_rng(1)
    component = Genie(lr=1.0, mask=False)
    quiet = Genie(lr=1.0, mask=False, noise=False)
    gradients = [torch.tensor(3 * chance.normal(size=n)) for _ in range(3)]
    moved = {}
    for name, options in (("noisy", component), ("quiet", quiet)):
        parameter = torch.nn.Parameter(torch.zeros(n, dtype=torch.float64))
        optimizer = optimizer_of([parameter], options)
        for gradient in gradients:
            before = parameter.detach().clone()
            step_with(optimizer, parameter, gradient)
        moved[name] = (parameter.detach() - before, optimizer.state[parameter])
    noise = -(moved["noisy"][0] - moved["quiet"][0]).numpy()
    m, v = (moved["quiet"][1][k].numpy() for k in ("mean", "square"))
    c, rho = 1 - 0.95**3, left_over(0.95, 3)
    variance = (v / c - (m / c) ** 2) / (1 - rho)
    variance = np.where(variance > 0, variance, 1e-8)
    tau = np.tanh(np.minimum(1 / variance, 10))
    a = 1 / (1 + rho * variance / ((m / c) ** 2 + 1e-8))
    level = (tau * np.abs(m / c) * a).sum() / tau.sum()
    drawn = noise / ((1 - tau) * level)
    drawn = drawn[tau < 0.9]
    assert len(drawn) > n / 2
    assert abs(drawn.mean()) < 5 / math.sqrt(len(drawn))
    assert drawn.std() == pytest.approx(1, abs=0.01)
    assert (drawn**4).mean() == pytest.approx(3, abs=0.1)


def test_no_noise_is_drawn_where_variances_are_small(monkeypatch):
    parameter = torch.nn.Parameter(torch.zeros(50))
    optimizer = optimizer_of([parameter], Genie(mask=False))
    monkeypatch.setattr(torch.Tensor, "normal_", lambda *a, **k: pytest.fail("drew noise"))
    chance = np.random.default_rng(0)
    for _ in range(5):
        step_with(optimizer, parameter, torch.tensor(0.1 * chance.normal(size=50), dtype=torch.float32))


def test_the_papers_variant_keeps_with_probability_dropout_and_does_not_rescale():
    parameter = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = optimizer_of([parameter], Genie(lr=1.0, dropout=0.3, variant="paper", noise=False))
    step_with(optimizer, parameter, torch.full((100_000,), 0.1))
    kept = parameter.detach()[parameter.detach() != 0]
    assert len(kept) / 100_000 == pytest.approx(0.3, abs=0.01)
    m_hat, v_hat = 0.1, 0.01
    torch.testing.assert_close(kept, torch.full_like(kept, -m_hat * m_hat**2 / v_hat), rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="unknown variant 'papre'; known: code, paper"):
        Genie(variant="papre")


def test_draws_are_a_tensors_own():
    """Another group beside the network's changes nothing for the network."""

    def run(extra):
        parameter = torch.nn.Parameter(torch.zeros(64))
        groups = [{"params": [parameter], "part": "network", "lr_ratio": 1.0}]
        if extra:
            groups.append({"params": [torch.nn.Parameter(torch.zeros(9))], "part": "objective", "lr_ratio": 0.2})
        optimizer = Genie().build(groups, seed=3)

        def closure():
            for group in groups:
                group["params"][0].grad = torch.ones_like(group["params"][0])
            return torch.zeros(())

        optimizer.step(closure)
        return parameter.detach()

    assert torch.equal(run(False), run(True))


def test_diagnostics_equal_their_definition():
    chance = np.random.default_rng(0)
    parameter = torch.nn.Parameter(torch.zeros(30, dtype=torch.float64))
    optimizer = optimizer_of([parameter], Genie(mask=False))
    assert optimizer.diagnostics(batches=20) == {}
    for _ in range(10):
        step_with(optimizer, parameter, torch.tensor(chance.normal(size=30) + np.linspace(0, 6, 30)))
    state = optimizer.state[parameter]
    m, v = state["mean"].numpy(), state["square"].numpy()
    c, rho = 1 - 0.95**10, left_over(0.95, 10)
    variance = np.maximum((v / c - (m / c) ** 2) / (1 - rho), 1e-8)
    ratio = (m / c) ** 2 / variance
    weights = v / v.sum()
    found = optimizer.diagnostics(batches=20)
    assert found["gsnr/share_over_1"] == pytest.approx((ratio > 1).mean())
    assert found["osgr"] == pytest.approx(1 - (weights / (ratio + 1 / 20)).sum() / 20)

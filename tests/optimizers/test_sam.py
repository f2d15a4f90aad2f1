"""SAM against a float64 derivation: the norm, the perturbation, the base step, what they cover."""

import numpy as np
import pytest
import torch

from dgsearch.optimizers.sam import Sam


def test_steps_equal_a_float64_derivation_and_cover_the_network_only():
    """Loss Σ x⁴/4 + Σ y⁴/4 with y an objective's own parameter: SAM perturbs x alone."""
    rho, lr = 0.3, 1e-2
    x = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    y = torch.nn.Parameter(torch.tensor([1.5], dtype=torch.float64))
    groups = [
        {"params": [x], "part": "network", "lr_ratio": 1.0},
        {"params": [y], "part": "objective", "lr_ratio": 0.5},
    ]
    optimizer = Sam(rho=rho, lr=lr).build(groups, seed=0)
    seen = []

    def closure():
        optimizer.zero_grad()
        seen.append((x.detach().clone(), y.detach().clone()))
        loss = (x**4).sum() / 4 + (y**4).sum() / 4
        loss.backward()
        return loss.detach()

    a, b = x.detach().numpy().copy(), y.detach().numpy().copy()
    moments = {"a": [0.0, 0.0], "b": [0.0, 0.0]}
    for t in range(1, 6):
        loss = optimizer.step(closure)
        assert loss.item() == pytest.approx((a**4).sum() / 4 + (b**4).sum() / 4)
        gradient = a**3
        there = a + rho * gradient / np.linalg.norm(gradient)
        first, second = seen[-2:]
        assert first[0].numpy() == pytest.approx(a) and second[0].numpy() == pytest.approx(there)
        assert second[1].numpy() == pytest.approx(b)
        for name, value, g, rate in (("a", a, there**3, lr), ("b", b, b**3, lr * 0.5)):
            m, v = moments[name]
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            moments[name] = [m, v]
            value -= rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        assert x.detach().numpy() == pytest.approx(a, abs=1e-7) and y.detach().numpy() == pytest.approx(b, abs=1e-7)
    assert len(seen) == 10


def test_a_zero_gradient_moves_nothing():
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = Sam(lr=1e-2).build([x], seed=0)

    def closure():
        optimizer.zero_grad()
        loss = (x * 0).sum()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    assert torch.equal(x, torch.ones(3))

"""MK-MMD's traps: bandwidth from the data, equal features, tiny classes, autocast, the sign of the estimate."""

import numpy as np
import pytest
import torch

from dgsearch.objectives._pairs import mean_over_pairs
from dgsearch.objectives.coral import moment_distance
from dgsearch.objectives.mk_mmd import _scale, discrepancy


def draw(n, f=5, shift=0.0, seed=0):
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, f)) + shift, dtype=torch.float32)


def test_the_bandwidth_is_the_median_of_off_diagonal_squared_distances():
    x = draw(9)
    squared = torch.cdist(x, x).square()
    others = [((x[i] - x[j]) ** 2).sum().item() for i in range(9) for j in range(9) if i != j]
    assert _scale(squared, "median").item() == pytest.approx(np.median(others), rel=1e-5)
    assert _scale(squared, "mean").item() == pytest.approx(np.mean(others), rel=1e-5)


@pytest.mark.parametrize("bandwidth", ["median", "mean", "fixed"])
def test_equal_features_have_no_discrepancy_and_a_finite_gradient(bandwidth):
    features = torch.ones(8, 5, requires_grad=True)
    value = discrepancy(features, features * 1, num_kernels=5, bandwidth=bandwidth)
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-6) and torch.isfinite(features.grad).all()


def test_scale_free_and_larger_where_domains_differ():
    a, b = draw(40), draw(40, seed=1)
    near = discrepancy(a, b, num_kernels=5, bandwidth="median")
    far = discrepancy(a, b + 2, num_kernels=5, bandwidth="median")
    assert abs(near.item()) < 0.05 < 0.3 < far.item()
    scaled = discrepancy(1e3 * a, 1e3 * (b + 2), num_kernels=5, bandwidth="median")
    assert scaled.item() == pytest.approx(far.item(), rel=1e-4)


def test_the_unbiased_estimate_averages_zero_and_may_be_negative():
    values = [
        discrepancy(draw(12, seed=2 * s), draw(12, seed=2 * s + 1), num_kernels=5, bandwidth="median").item()
        for s in range(200)
    ]
    assert min(values) < 0 < max(values)
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(200)


def test_autocast_changes_nothing():
    a, b = draw(16, shift=30.0), draw(16, shift=30.5, seed=1)
    plain = discrepancy(a, b, num_kernels=5, bandwidth="median")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(discrepancy(a, b, num_kernels=5, bandwidth="median"), plain)
        half = discrepancy(a.bfloat16(), b.bfloat16(), num_kernels=5, bandwidth="median")
    assert half.dtype == torch.float32


def test_classes_that_are_absent_or_too_small_on_one_side_are_skipped():
    features = torch.stack([draw(6), draw(6, shift=1.0, seed=1)]).requires_grad_()
    y = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 3]])

    def mmd(a, b):
        return discrepancy(a, b, num_kernels=5, bandwidth="median")

    def coral(a, b):
        return moment_distance(a, b, match_mean=True)

    # class 0 alone has two examples on both sides; class 1 has one on the right
    only = mmd(features[0][:3], features[1][:4])
    assert mean_over_pairs(features, y, mmd, per_class=True, least=2).item() == pytest.approx(only.item())
    one = coral(features[0][3:5], features[1][4:5])  # one example: means only
    assert one.item() == pytest.approx(((features[0][3:5].mean(0) - features[1][4]) ** 2).mean().item())
    zero = coral(features[0][:3], features[1][:4])
    expected = (7 * zero + 3 * one) / 10
    assert mean_over_pairs(features, y, coral, per_class=True, least=1).item() == pytest.approx(expected.item())
    apart = mean_over_pairs(features, torch.tensor([[0] * 6, [1] * 6]), mmd, per_class=True, least=2)
    apart.backward()
    assert apart.item() == 0 and not features.grad.any()

"""Gradient reversal, its schedule, and what the discriminator is told and learns."""

import math

import pytest
import torch
from torch import nn

from dgsearch.objectives.dann import Dann, GradientReversal
from dgsearch.step import Closure, DomainBatch, Progress


class Features(nn.Module):
    """Features are the inputs plus a parameter; logits do not depend on them."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        features = x.flatten(2) + self.shift
        return features, features.new_zeros(*features.shape[:2], 3)


def batch():
    x = torch.randn(2, 5, 1, 2, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(10).view(2, 5) % 3
    return DomainBatch(x, y, y, (0, 1))


def gradients(dann, share):
    torch.manual_seed(0)
    objective = dann.build(num_domains=2, num_features=6, num_classes=3)
    model = Features()
    losses = objective(model, batch(), Progress(round(share * 1000), 1000))
    losses.total.backward()
    return model.shift.grad, [p.grad for p in objective.parameters()], losses


def plain(dann):
    """The gradients of the discriminator's loss without any reversal, in float64."""
    torch.manual_seed(0)
    objective = dann.build(num_domains=2, num_features=6, num_classes=3).double()
    shift = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    hidden = batch().x.flatten(2).double() + shift
    loss = nn.functional.cross_entropy(objective.discriminator(hidden.flatten(0, 1)), torch.tensor([0] * 5 + [1] * 5))
    loss.backward()
    return shift.grad, [p.grad for p in objective.parameters()]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_features_get_minus_lambda_times_the_gradient_and_the_discriminator_the_plain_one(share):
    """At λ = 0, in mid rise, and at its peak."""
    dann = Dann(peak=2.0, width=64)
    strength = {0.0: 0.0, 0.3: 2 * (2 / (1 + math.exp(-3)) - 1), 0.999: 2 * (2 / (1 + math.exp(-9.99)) - 1)}[share]
    got, own, losses = gradients(dann, share)
    expected, expected_own = plain(dann)
    torch.testing.assert_close(got.double(), -strength * expected, rtol=1e-4, atol=1e-7)
    for a, b in zip(own, expected_own, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-7)
    assert losses.log["reversal"].item() == pytest.approx(strength)


def test_the_schedule():
    ganin = Dann()
    assert ganin.reversal(0.0) == 0.0
    for share in (0.1, 0.5, 0.9, 1.0):
        assert ganin.reversal(share) == pytest.approx(2 / (1 + math.exp(-10 * share)) - 1)
    late = Dann(peak=3.0, start=0.2, steepness=5.0)
    assert late.reversal(0.2) == 0.0 == late.reversal(0.1)
    assert late.reversal(0.6) == pytest.approx(3 * (2 / (1 + math.exp(-5 * 0.5)) - 1))
    falling = Dann(final_ratio=0.1)
    assert falling.reversal(2 / 3) == pytest.approx(ganin.reversal(2 / 3))
    assert falling.reversal(5 / 6) == pytest.approx(0.55 * ganin.reversal(5 / 6))
    assert falling.reversal(1.0) == pytest.approx(0.1 * ganin.reversal(1.0))


def test_reversal_is_the_identity_forwards():
    x = torch.randn(3, requires_grad=True)
    y = GradientReversal.apply(x, 0.7)
    assert torch.equal(x, y)
    y.sum().backward()
    assert x.grad.tolist() == pytest.approx([-0.7] * 3)


def test_the_discriminator_learns_at_its_own_rate_and_tells_domains_apart():
    torch.manual_seed(0)
    dann = Dann(peak=0.01, lr_ratio=0.5, weight_decay=1e-3)
    objective = dann.build(num_domains=2, num_features=6, num_classes=3)
    (group,) = objective.parameter_groups()
    assert group["lr_ratio"] == 0.5 and group["weight_decay"] == 1e-3
    assert {id(p) for p in group["params"]} == {id(p) for p in objective.parameters()}
    shifted = batch()
    shifted = DomainBatch(shifted.x + torch.tensor([0.0, 2.0]).view(2, 1, 1, 1, 1), shifted.y, shifted.y, (0, 1))
    optimizer = torch.optim.Adam(objective.parameters(), lr=1e-2)
    accuracies = []
    for step in range(60):
        closure = Closure(Features(), objective, optimizer, shifted, Progress(step, 60), seed=0)
        optimizer.step(closure)
        accuracies.append(closure.losses.log["domain_accuracy"].item())
    assert accuracies[-1] == 1.0 > accuracies[0]


def test_conditional_judges_each_example_by_the_head_of_its_class():
    torch.manual_seed(0)
    objective = Dann(conditional=True, width=64).build(num_domains=2, num_features=6, num_classes=3)
    last = objective.discriminator[-1]
    assert last.out_features == 6
    one_class = batch()
    one_class = DomainBatch(one_class.x, torch.full_like(one_class.y, 1), one_class.y, (0, 1))
    objective(Features(), one_class, Progress(5, 10)).total.backward()
    used = last.weight.grad.abs().sum(1) > 0
    assert used.tolist() == [False, False, True, True, False, False]

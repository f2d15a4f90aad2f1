"""Domain gradients and cosines against plain computations; the closure; determinism of chance."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from dgsearch.networks import build_network
from dgsearch.optimizers.sgd import Sgd
from dgsearch.randomness import generator, numpy_generator, seed_of, seeded
from dgsearch.step import Closure, DomainBatch, Losses, Objective, Progress, cosines, domain_gradients

NORMALISATION = ((0.4,) * 3, (0.2,) * 3)


@pytest.fixture
def setting():
    model = build_network("small_cnn", num_classes=3, normalisation=NORMALISATION, seed=1)
    x = torch.rand(3, 4, 3, 16, 16, generator=generator(0, "x"))
    y = torch.arange(12).view(3, 4) % 3
    return model, DomainBatch(x, y, y, (0, 1, 2))


def test_domain_gradients_equal_plain_backwards(setting):
    model, batch = setting
    losses, gradients = domain_gradients(model, Objective(), batch, Progress(0, 1))
    for d in range(3):
        model.zero_grad()
        loss = functional.cross_entropy(model(batch.x[d])[1], batch.y[d])
        loss.backward()
        assert loss.item() == pytest.approx(losses[d].item(), rel=1e-6)
        for g, p in zip(gradients[d], model.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad)


def test_cosines_equal_numpys_in_float64(setting):
    model, batch = setting
    _, gradients = domain_gradients(model, Objective(), batch, Progress(0, 1))
    flat = [np.concatenate([g.double().numpy().ravel() for g in one]) for one in gradients]
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = [flat[i] @ flat[j] / np.linalg.norm(flat[i]) / np.linalg.norm(flat[j]) for i, j in pairs]
    assert cosines(gradients).tolist() == pytest.approx(expected, abs=1e-5)
    zero = [[torch.zeros(3)], [torch.ones(3)]]
    assert cosines(zero).tolist() == [0.0]


def test_unreached_parameters_have_zero_gradients():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return x, self.used(x.flatten(2))

    batch = DomainBatch(torch.rand(2, 3, 1, 2, 2), torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3), (0, 1))
    _, gradients = domain_gradients(Half(), Objective(), batch, Progress(0, 1))
    assert [bool(g.any()) for g in gradients[0]] == [True, True, False, False]


def test_the_closure_counts_its_calls_and_resets_moments_when_told(setting):
    model, batch = setting

    class Annealed(Objective):
        def forward(self, model, batch, progress):
            losses = super().forward(model, batch, progress)
            return Losses(losses.task, losses.penalty, reset_moments=progress.step == 1)

    optimizer = torch.optim.Adam(model.parameters())
    for step, expected in ((0, 1), (1, 1), (2, 2)):
        closure = Closure(model, Annealed(), optimizer, batch, Progress(step, 3), seed=0)
        total = optimizer.step(closure)
        assert closure.calls == 1 and closure.losses.total.item() == pytest.approx(total.item())
        counts = {int(state["step"]) for state in optimizer.state.values()}
        assert counts == {expected}, step


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_known_gradients_of_another_layout_reach_their_own_weights(layout):
    """A fused step of momentum, which walks weights and gradients in memory order, against x − lr (g + .9 g)."""
    model = nn.Conv2d(5, 4, 3, bias=False).to(memory_format=torch.channels_last)
    before, gradient = model.weight.detach().clone(), torch.randn(4, 5, 3, 3, generator=generator(0, "gradient"))
    optimizer = Sgd(lr=0.1).build(model.parameters(), seed=0)
    y = torch.zeros(2, 1, dtype=torch.long)
    batch = DomainBatch(torch.zeros(2, 1, 5, 3, 3), y, y, (0, 1))
    closure = Closure(model, Objective(), optimizer, batch, Progress(0, 1), seed=0)
    optimizer.step(lambda: closure.take(torch.zeros(2), [gradient.to(memory_format=layout)]))
    expected = before.double() - 0.1 * 1.9 * gradient.double()
    torch.testing.assert_close(model.weight.detach().double(), expected, rtol=1e-6, atol=1e-6)


def test_chance_is_a_function_of_its_keys_alone():
    assert seed_of(1, "a", 2) == seed_of(1, "a", 2) != seed_of(1, "a", 3)
    assert 0 <= seed_of("x") < 2**63
    assert torch.equal(torch.rand(3, generator=generator(1, "b")), torch.rand(3, generator=generator(1, "b")))
    assert numpy_generator(1).random() == numpy_generator(1).random() != numpy_generator(2).random()
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    assert torch.equal(seeded(lambda: torch.rand(2), 4), seeded(lambda: torch.rand(2), 4))
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_network_keeps_its_contract(setting):
    model, batch = setting
    for name in ("small_cnn", "mnist_cnn"):
        network = build_network(name, num_classes=5, normalisation=NORMALISATION, seed=1)
        features, logits = network(batch.x)
        assert features.shape == (3, 4, 128) and logits.shape == (3, 4, 5)
        torch.testing.assert_close(network.classifier(features), logits)
        alone, _ = network(batch.x[1, 2])
        torch.testing.assert_close(alone, features[1, 2], rtol=1e-4, atol=1e-5)
        assert isinstance(network.classifier, nn.Linear)


def test_bfloat16_gives_float32_features_close_to_float32(setting):
    model, batch = setting
    half = build_network("small_cnn", num_classes=3, normalisation=NORMALISATION, seed=1, precision="bfloat16")
    (f32, _), (f16, logits) = model(batch.x), half(batch.x)
    assert f16.dtype == logits.dtype == torch.float32
    assert not torch.equal(f32, f16)
    torch.testing.assert_close(f16, f32, rtol=0.1, atol=0.05)


def test_frozen_batch_norm_keeps_its_statistics():
    for freeze in (False, True):
        model = build_network("law_net", num_classes=3, normalisation=NORMALISATION, seed=1, freeze_bn=freeze)
        model.dropout.p = 0.0
        model.featurizer[3].p = 0.0
        before = model.featurizer[1].running_mean.clone()
        model(torch.rand(2, 4, 3, 16, 16))
        assert torch.equal(before, model.featurizer[1].running_mean) is freeze


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown network 'smal_cnn'; known: .*Did you mean 'small_cnn'"):
        build_network("smal_cnn", num_classes=2, normalisation=NORMALISATION, seed=0)
    with pytest.raises(ValueError, match="unknown precision 'float16'"):
        build_network("small_cnn", num_classes=2, normalisation=NORMALISATION, seed=0, precision="float16")

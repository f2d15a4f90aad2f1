"""GGA and GGA-L: what is accepted, what is fixed over the candidates of a step, and what composes."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dgsearch.gradient.gga import Annealing, Gga
from dgsearch.gradient.gga_l import GgaL
from dgsearch.gradient.none import NoIntervention
from dgsearch.networks import build_network
from dgsearch.objectives.coral import Coral
from dgsearch.optimizers.adam import Adam
from dgsearch.optimizers.genie import Genie
from dgsearch.optimizers.sam import Sam
from dgsearch.randomness import generator
from dgsearch.recipe import Recipe, Training
from dgsearch.step import Closure, DomainBatch, Objective, Progress, Step, cosines, domain_gradients, masks
from dgsearch.train import measure

NORMALISATION = ((0.5,) * 3, (0.25,) * 3)


def make(network="small_cnn", *, dropout=0.3, objective=None, optimizer=None, seed=1, freeze_bn=False, step=3):
    model = build_network(
        network, num_classes=3, normalisation=NORMALISATION, seed=seed, dropout=dropout, freeze_bn=freeze_bn
    )
    objective = objective or Objective()
    optimizer = (optimizer or Adam(lr=1e-3)).build(
        [{"params": list(model.parameters()), "part": "network", "lr_ratio": 1.0}], seed=0
    )
    x = torch.rand(3, 6, 3, 16, 16, generator=generator(0, "x"))
    y = torch.arange(18).view(3, 6) % 3
    batch = DomainBatch(x, y, y, (0, 1, 2))
    progress = Progress(step, 100)
    closure = Closure(model, objective, optimizer, batch, progress, seed=7)
    return model, optimizer, Step(model, objective, batch, progress, closure)


def measured(step) -> tuple[float, float]:
    """The mean loss and least cosine of the step's batch, computed here from plain backwards in float64."""
    losses, flat = [], []
    for d in range(3):
        one = step.batch.domain(d)
        step.model.zero_grad()
        with masks(step.model, domains=one.domains, draw=(7, step.progress.step)):
            loss = nn.functional.cross_entropy(step.model(one.x)[1][0], one.y[0])
        loss.backward()
        losses.append(loss.item())
        flat.append(np.concatenate([p.grad.double().numpy().ravel() for p in step.model.parameters()]))
    step.model.zero_grad()
    pairs = [(0, 1), (0, 2), (1, 2)]
    return float(np.mean(losses)), min(
        flat[i] @ flat[j] / np.linalg.norm(flat[i]) / np.linalg.norm(flat[j]) for i, j in pairs
    )


def featurizer(model):
    return [p.detach().clone() for p in model.featurizer.parameters()]


@pytest.mark.parametrize("seed", range(4))
def test_accepted_candidates_agree_more_and_cost_little_and_the_classifier_stays(seed, monkeypatch):
    model, _, step = make(seed=seed)
    options = Gga(rho=3e-3, candidates=15, start=0.0, window=1.0)
    intervention = options.build(seed=seed)
    agreements = []
    plain = Annealing._agree

    def recorded(self, step):
        found = plain(self, step)
        agreements.append(found)
        return found

    monkeypatch.setattr(Annealing, "_agree", recorded)
    loss_before, agreement_before = measured(step)
    classifier = [p.detach().clone() for p in model.classifier.parameters()]
    assert intervention(step) is step.closure
    loss_after, agreement_after = measured(step)
    # The sequence of accepted candidates, from the probes: each beats the last one accepted.
    loss, agreement = agreements[0]
    accepted = 0
    for candidate_loss, candidate in agreements[1:]:
        if candidate_loss - loss < options.tolerance and candidate > agreement:
            loss, agreement, accepted = candidate_loss, candidate, accepted + 1
    assert len(agreements) == 16 and step.closure.log["gga/accepted"] == accepted > 0
    assert (loss_before, agreement_before) == pytest.approx(agreements[0], abs=1e-4)
    assert (loss_after, agreement_after) == pytest.approx((loss, agreement), abs=1e-4)
    assert agreement_after > agreement_before and loss_after < loss_before + accepted * options.tolerance
    assert all(torch.equal(a, b) for a, b in zip(classifier, model.classifier.parameters(), strict=True))


def test_rejections_walk_on_and_an_acceptance_starts_from_the_origin(monkeypatch):
    """Probes are scripted: reject, accept, reject, reject; positions must be those of the definition."""
    model, _, step = make()
    origin = featurizer(model)
    seen = []
    answers = iter([(1.0, 0.1), (1.0, 0.0), (1.0, 0.5), (1.0, 0.2), (1.3, 0.9)])

    def scripted(self, step):
        seen.append(featurizer(model))
        return next(answers)

    monkeypatch.setattr(Annealing, "_agree", scripted)
    Gga(rho=1e-2, candidates=4, start=0.0, window=1.0).build(seed=0)(step)
    offsets = [[(a - b) for a, b in zip(s, origin, strict=True)] for s in seen]
    assert not any(o.any() for o in offsets[0])

    def size(offset):
        return max(o.abs().max().item() for o in offset)

    assert 0.009 < size(offsets[1]) <= 0.01 * 1.001
    walked = [b - a for a, b in zip(offsets[1], offsets[2], strict=True)]
    assert size(walked) <= 0.01 * 1.001 and size(offsets[2]) > 0.015  # a second draw on top of the first
    assert size(offsets[3]) <= 0.01 * 1.001  # from the origin again, after the acceptance
    assert size(offsets[4]) > 0.015
    final = featurizer(model)
    assert all(torch.equal(a, b) for a, b in zip(final, seen[2], strict=True))


def test_when_none_is_accepted_the_weights_are_the_origin_bit_for_bit(monkeypatch):
    model, _, step = make()
    origin = featurizer(model)
    answers = iter([(1.0, 0.9)] + [(1.0, 0.1)] * 5)
    monkeypatch.setattr(Annealing, "_agree", lambda self, step: next(answers))
    Gga(rho=1e-2, candidates=5, start=0.0, window=1.0).build(seed=0)(step)
    assert all(torch.equal(a, b) for a, b in zip(origin, featurizer(model), strict=True))


def test_the_same_weights_agree_the_same_with_dropout():
    _, _, step = make(dropout=0.5)
    intervention = Gga(start=0.0, window=1.0).build(seed=0)
    assert intervention._agree(step) == intervention._agree(step)


def test_the_window_is_a_share_of_training():
    for at, inside in ((1, False), (2, True), (5, True), (6, False)):
        model, _, step = make(step=at)
        before = featurizer(model)
        intervention = Gga(rho=1e-2, candidates=10, start=0.02, window=0.04, tolerance=1.0).build(seed=0)
        intervention(step)
        assert bool(step.closure.log) is inside, at
        moved = any(not torch.equal(a, b) for a, b in zip(before, featurizer(model), strict=True))
        assert moved is (inside and step.closure.log["gga/accepted"].item() > 0)


def test_the_windows_length_is_that_share_rounded_up():
    for steps, first, length in ((5000, 100, 100), (15000, 300, 300), (350, 7, 7), (310, 6, 7), (10, 0, 1)):
        assert Gga().build(seed=0).window(steps) == range(first, first + length), steps


@pytest.mark.parametrize("start", [0.0, 0.1])
def test_a_trials_measured_cost_counts_the_windows_steps_as_often_as_they_occur(start, sources, monkeypatch):
    """By a clock that runs 1 s a closure's call and 30 s a search: 100 steps, 4 of them with one, take 220 s."""
    now = [0.0]
    plain = Closure.__call__

    def call(self):
        now[0] += 1
        return plain(self)

    def search(self, step):
        now[0] += 30
        return 0

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Closure, "__call__", call)
    monkeypatch.setattr(Annealing, "_search", search)
    gga = Gga(start=start, window=0.04)
    recipe = Recipe(gradient=gga, training=Training(batch_size=4))
    cost = measure(recipe, sources, network="law_net", steps=100, seed=0, most_seconds=1e9)
    assert cost.step == pytest.approx(2.2)
    plainly = measure(replace(recipe, gradient=NoIntervention()), sources, network="law_net", steps=100, seed=0)
    assert plainly.step == 1


@pytest.mark.parametrize("optimizer", [Sam(lr=1e-3), Genie()], ids=lambda o: o.choice())
def test_it_works_under_other_optimizers(optimizer):
    model, built, step = make(optimizer=optimizer)
    closure = Gga(rho=3e-3, candidates=5, start=0.0, window=1.0).build(seed=0)(step)
    after_search = featurizer(model)
    loss = built.step(closure)
    assert math.isfinite(loss.item())
    moved = [(a - b).abs().max().item() for a, b in zip(after_search, featurizer(model), strict=True)]
    assert 0 < max(moved) < 0.1  # a step from where the search ended, not from where it began


# -- GGA-L


@pytest.mark.parametrize("objective", [Objective(), Coral().build(num_domains=3, num_features=128, num_classes=3)])
def test_the_gradient_is_the_ordinary_one_plus_the_noise_that_disagreement_asks_for(objective):
    gamma = 0.01
    model, _, step = make(objective=objective)
    step.closure()
    ordinary = [p.grad.clone() for p in model.parameters()]
    calls = step.closure.calls
    with step.closure.masks():
        _, gradients = domain_gradients(model, objective, step.batch, step.progress)
    scale = gamma * (1 - cosines(gradients).mean().item())
    _, _, again = make(objective=objective)
    closure = GgaL(gamma=gamma).build(seed=5)(again)
    loss = closure()
    noisy = [p.grad.clone() for p in again.model.parameters()]
    noise = torch.cat([((a - b) / scale).flatten() for a, b in zip(noisy, ordinary, strict=True)]).double()
    assert abs(noise.mean().item()) < 5 / math.sqrt(len(noise)) and noise.std().item() == pytest.approx(1, abs=0.01)
    assert again.closure.calls == calls == 1
    assert loss.item() == pytest.approx(step.closure.losses.total.item(), rel=1e-5)
    # Drawn once a step: the second call's noise is the first's, and without noise the gradient is the base's.
    closure()
    repeated = [p.grad.clone() for p in again.model.parameters()]
    for a, b, base in zip(noisy, repeated, ordinary, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * base.abs().max().item())


def test_domain_gradients_are_reused_only_where_their_mean_is_the_gradient():
    calls = []
    for network, freeze, expected in (("small_cnn", False, 3), ("law_net", True, 3), ("law_net", False, 4)):
        _, _, step = make(network, freeze_bn=freeze)
        count = {"n": 0}
        step.model.register_forward_hook(lambda *a, count=count: count.update(n=count["n"] + 1))
        GgaL().build(seed=0)(step)()
        calls.append(count["n"])
        assert count["n"] == expected, (network, freeze)


def test_zero_noise_returns_the_steps_own_closure():
    _, _, step = make()
    assert GgaL(gamma=0).build(seed=0)(step) is step.closure

"""iu and iue against explicit float64 references, and what they must leave alone."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional

from dgsearch.component import Component
from dgsearch.epoch_end._influence import classifier_scores, network_scores, outputs
from dgsearch.epoch_end._unlearning import (
    domain_variance,
    producers,
    specific_channels,
    unlearning_set,
    utility,
)
from dgsearch.epoch_end.iu import Iu
from dgsearch.epoch_end.iue import Iue
from dgsearch.epoch_end.none import NoEditIntervention
from dgsearch.networks import ARCHITECTURES, PRECISIONS, Network
from dgsearch.recipe import Recipe, Training
from dgsearch.step import DomainBatch, EpochEnd, Objective, Progress
from dgsearch.train import run_trial

K = 4


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # these products are too small to share
    yield
    torch.set_num_threads(before)


def part(count: int, *, seed: int, flip: float = 0.0) -> tuple[list[DomainBatch], torch.Tensor]:
    """Make three tinted domains whose class is where a bar lies, with some labels moved on by one."""
    g = torch.Generator().manual_seed(seed)
    batches, flipped = [], []
    for d in range(3):
        y = torch.randint(0, K, (count,), generator=g)
        x = functional.avg_pool2d(torch.rand(count, 3, 12, 12, generator=g) * 0.8, 3, 1, 1)
        x[:, d] += 0.15
        x += (torch.arange(12)[:, None] // 3 == y[:, None, None, None]) * 0.25
        wrong = torch.rand(count, generator=g) < flip
        label = torch.where(wrong, (y + 1) % K, y)
        batches.append(DomainBatch(x.clamp(0, 1)[None], label[None], torch.arange(count)[None], (d,)))
        flipped.append(wrong)
    return batches, torch.cat(flipped)


def conv() -> tuple[nn.Module, int]:
    layers = [nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 8


def norms() -> tuple[nn.Module, int]:
    layers = [nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 8


def mlp() -> tuple[nn.Module, int]:
    return nn.Sequential(nn.AvgPool2d(3), nn.Flatten(), nn.Linear(48, 12), nn.ReLU()), 12


def fitted(make, batches, *, steps=100) -> tuple[Network, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        featurizer, width = make()
        model = Network(featurizer, width, K, normalisation=((0.4,) * 3, (0.3,) * 3))
        optimizer = torch.optim.Adam([{"params": list(model.parameters()), "part": "network"}], lr=3e-3)
        x, y = (torch.cat([getattr(b, n)[0] for b in batches]) for n in ("x", "y"))
        for _ in range(steps):
            rows = torch.randint(0, len(y), (64,))
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows])[1], y[rows]).backward()
            optimizer.step()
    return model, optimizer


def rank_correlation(a, b) -> float:
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return torch.corrcoef(ranks)[0, 1].item()


def reference(jacobian, guide_jacobian, p, guide_p, y, guide_y, *, damping):
    """U from the explicit damped generalized Gauss–Newton matrix; jacobians are of logits, [N, K, P]."""
    h = torch.zeros(jacobian.shape[2], jacobian.shape[2], dtype=torch.float64)
    for j, q in zip(jacobian, p, strict=True):
        h += j.T @ (q.diag() - torch.outer(q, q)) @ j / len(y)
    h += damping * h.diagonal().mean() * torch.eye(len(h))
    slopes = torch.einsum("nk,nkp->np", p - functional.one_hot(y, K), jacobian)
    guide = torch.einsum("nk,nkp->p", guide_p - functional.one_hot(guide_y, K), guide_jacobian)
    solved = torch.linalg.solve(h, slopes.T)  # [P, N]
    return (guide @ solved) / solved.norm(dim=0)


@pytest.mark.parametrize("damping", [1e-3, 1.0])
@pytest.mark.parametrize("make", [mlp, norms])
def test_classifier_scores_rank_as_the_explicit_matrix(make, damping):
    (train, _), (guide, _) = part(80, seed=1, flip=0.1), part(25, seed=2)
    model, _ = fitted(make, train)
    model.eval()
    seen, other = outputs(model, train), outputs(model, guide)

    def jacobian(out):
        rows = torch.cat([out.features, torch.ones(len(out.y), 1)], 1).double()
        return torch.einsum("kl,nf->nklf", torch.eye(K).double(), rows).flatten(2)

    probabilities = [o.logits.double().softmax(1) for o in (seen, other)]
    expected = reference(jacobian(seen), jacobian(other), *probabilities, seen.y, other.y, damping=damping)
    exact = utility(*classifier_scores(seen, other, damping=damping, exact=True), alpha=1.0)
    fast = utility(*classifier_scores(seen, other, damping=damping), alpha=1.0)
    assert rank_correlation(exact, expected) >= 0.99
    assert rank_correlation(fast, expected) >= 0.9


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("make", "damping", "iterations"),
    [*((make, 1.0, 5) for make in (mlp, conv, norms)), (norms, 0.1, 20), (mlp, 1e-3, 20), (conv, 1e-3, 20)],
)
def test_network_scores_rank_as_the_explicit_matrix(make, damping, iterations, precision):
    (train, _), (guide, _) = part(80, seed=1, flip=0.1), part(25, seed=2)
    model, _ = fitted(make, train)
    model.eval()
    everything = {name: p.detach() for name, p in model.named_parameters()}
    weights = {  # of every linear layer and convolution; a linear layer's bias too
        name: p
        for name, p in everything.items()
        if isinstance(module := model.get_submodule(name.rpartition(".")[0]), nn.Linear)
        or (isinstance(module, nn.Conv2d) and name.endswith("weight"))
    }

    def at(batches):
        x, y = (torch.cat([getattr(b, n)[0] for b in batches]) for n in ("x", "y"))
        one = jacrev(lambda some, image: functional_call(model, everything | some, (image[None],))[1][0])
        found = vmap(one, (None, 0))(weights, x)
        return torch.cat([found[n].flatten(2) for n in weights], 2).double(), model(x)[1].detach().softmax(1), y

    (j, p, y), (guide_j, guide_p, guide_y) = at(train), at(guide)
    expected = reference(j, guide_j, p.double(), guide_p.double(), y, guide_y, damping=damping)
    chance = torch.Generator().manual_seed(0)
    model.precision = precision
    options = {"damping": damping, "iterations": iterations, "chance": chance}
    found = utility(*network_scores(model, train, guide, outputs(model, train), **options), alpha=1.0)
    assert rank_correlation(found, expected) >= 0.8
    assert model.precision == precision


@pytest.mark.parametrize("scope", ["classifier", "network"])
def test_what_is_unlearned_is_mislabelled_and_the_literal_sign_would_take_the_others(scope):
    (train, flipped), (guide, _) = part(80, seed=1, flip=0.1), part(25, seed=2)
    model, _ = fitted(conv, train)
    model.eval()
    seen = outputs(model, train)
    if scope == "classifier":
        gain, complexity = classifier_scores(seen, outputs(model, guide), damping=1e-3)
    else:
        options = {
            "damping": Iu().network_damping,
            "iterations": Iu().network_iterations,
            "chance": torch.Generator().manual_seed(0),
        }
        gain, complexity = network_scores(model, train, guide, seen, **options)

    def share(sign):
        chosen = unlearning_set(utility(sign * gain, complexity, alpha=1.0), k=2, max_share=0.1)
        return flipped[chosen].double().mean().item() if chosen.any() else 0.0

    assert share(1) >= 0.7
    assert share(-1) < 0.3  # the published sign


def test_unlearning_set_is_below_the_threshold_and_capped():
    score = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, -20, -30, -40])
    # median 1.5, MAD median(|U − 1.5|) = 3
    assert unlearning_set(score, k=2, max_share=1.0).nonzero()[:, 0].tolist() == [7, 8, 9]
    assert unlearning_set(score, k=2, max_share=0.2).nonzero()[:, 0].tolist() == [8, 9]
    assert not unlearning_set(score, k=2, max_share=0.0).any()
    assert not unlearning_set(torch.full((10,), torch.nan), k=2, max_share=1.0).any()
    assert utility(torch.tensor([-4.0, 4.0]), torch.tensor([2.0, 2.0]), alpha=0.5).tolist() == [-1.0, 1.0]


def test_a_channel_is_domain_specific_where_its_distribution_differs_not_where_it_varies():
    g = torch.Generator().manual_seed(0)
    domain = torch.arange(3).repeat_interleave(400)
    features = torch.randn(1200, 12, generator=g) * torch.linspace(0.5, 1.5, 12)
    features[:, 0] *= 10  # texture: varies greatly, as much in every domain; its pooled variance is the largest
    features[:, 1] *= torch.tensor([1.0, 5.0, 20.0])[domain]
    features[:, 2] += torch.tensor([0.0, 40.0, 80.0])[domain]
    texture = features / torch.stack([features[domain == d].std(0, unbiased=False) for d in range(3)])[domain]
    features[:, 0] = texture[:, 0] * 10
    found = {s: domain_variance(features, domain, statistic=s) for s in ("variance", "mean", "both")}
    by_hand = torch.stack([features[domain == d].double().var(0, unbiased=False) for d in range(3)])
    torch.testing.assert_close(found["variance"], by_hand.var(0, unbiased=False))
    chosen = {s: specific_channels(score, k=4).tolist() for s, score in found.items()}
    assert 0 not in chosen["variance"] and 1 in chosen["variance"] and 2 not in chosen["variance"]
    assert 2 in chosen["mean"] and {1, 2} <= set(chosen["both"])
    assert found["variance"][0] < found["variance"].median()
    assert not len(specific_channels(torch.tensor([1.0, 1, 1, 1, 9]), k=2))  # MAD = 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("small_cnn", {"featurizer.12.weight": 0, "featurizer.12.bias": 0, "featurizer.14.weight": 0}),
        ("mnist_cnn", {"featurizer.9.weight": 0, "featurizer.11.bias": 0}),
        ("law_net", {"featurizer.4.weight": 0, "featurizer.4.bias": 0}),
    ],
)
def test_producers_of_our_networks(name, expected):
    featurizer, width = ARCHITECTURES[name].build()
    found = producers(Network(featurizer, width, K, normalisation=((0.4,) * 3, (0.3,) * 3)))
    assert expected.items() <= found.items()
    assert found["classifier.weight"] == 1 and "classifier.bias" not in found
    assert len(found) == (3 if name == "law_net" else 5)


def test_producers_of_a_resnet_and_an_mlp():
    from torchvision.models import resnet18, resnet50

    for build, last, width in ((resnet18, "layer4.1.{}2", 512), (resnet50, "layer4.2.{}3", 2048)):
        net = build(weights=None)
        net.fc = nn.Identity()
        found = producers(Network(net, width, K, normalisation=((0.4,) * 3, (0.3,) * 3)))
        conv_, norm = (f"featurizer.{last.format(kind)}" for kind in ("conv", "bn"))
        assert found == {f"{conv_}.weight": 0, f"{norm}.weight": 0, f"{norm}.bias": 0, "classifier.weight": 1}
    found = producers(Network(*mlp(), K, normalisation=((0.4,) * 3, (0.3,) * 3)))
    assert found == {"featurizer.2.weight": 0, "featurizer.2.bias": 0, "classifier.weight": 1}


def ended(make=norms, *, count=80):
    (train, _), (guide, _) = part(count, seed=1, flip=0.1), part(25, seed=2)
    model, optimizer = fitted(make, train, steps=40)
    return EpochEnd(model, Objective(), optimizer, train, guide, Progress(3, 10))


@pytest.mark.parametrize("scope", ["classifier", "network"])
def test_only_the_channels_parameters_move_and_nothing_else_does(scope):
    end = ended()
    model = end.model
    before = {name: t.clone() for name, t in model.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    chance = torch.random.get_rng_state()
    log = Iu(scope=scope, mad_k=1.0).build(seed=3)(end)
    assert torch.equal(chance, torch.random.get_rng_state())
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert log["iu/channels"] >= 1 and 0 < log["iu/unlearned"] <= 0.1

    axes = producers(model)
    assert axes.keys() >= {"featurizer.3.weight", "featurizer.5.weight", "featurizer.5.bias", "classifier.weight"}
    moved = {name: (t != before[name]) for name, t in model.state_dict().items()}  # buffers too
    touched = moved["classifier.weight"].any(0)
    assert touched.sum() == log["iu/channels"]
    for name, where in moved.items():
        if name in axes:
            rows = where.movedim(axes[name], 0).reshape(8, -1).any(1)
            assert not (rows & ~touched).any(), name
        else:
            assert not where.any(), name
    assert all(moved[name].any() for name in axes)
    change = torch.stack([(t - before[n]).norm() for n, t in model.state_dict().items() if n in axes]).norm()
    assert change.item() == pytest.approx(log["iu/ascent"], rel=1e-2)
    bound = 3e-3 * torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert log["iu/ascent"] <= bound * (1 + 1e-6)


def test_the_ascent_raises_the_loss_of_what_is_unlearned_and_each_half_stands_alone():
    for parts in ("both", "set", "channels"):
        end = ended()
        end.model.eval()
        seen = outputs(end.model, end.train)
        component = Iu(parts=parts, mad_k=1.0, ascent=10.0)
        score = utility(*classifier_scores(seen, outputs(end.model, end.guide), damping=1e-3), alpha=1.0)
        chosen = unlearning_set(score, k=1.0, max_share=0.1) if parts != "channels" else torch.ones(240).bool()
        end.model.train()
        log = component.build(seed=0)(end)
        assert log["iu/unlearned"] == pytest.approx(chosen.double().mean().item())
        after = outputs(end.model.eval(), end.train).logits
        losses = [functional.cross_entropy(out[chosen], seen.y[chosen]) for out in (seen.logits, after)]
        assert losses[1] > losses[0], parts
        assert (log["iu/channels"] == 0) == (parts == "set")


@dataclass(frozen=True)
class Withheld(Component):
    """Edits nothing, but withholds the guide part."""

    needs_guide = True

    def build(self, *, seed):
        return NoEditIntervention()


@pytest.mark.parametrize("component", [Iu(max_share=0.0), Iu(ascent=0.0), Iue(max_share=0.0)], ids=str)
def test_law_2_an_empty_set_is_the_base_without_its_guide_part(component, sources):
    recipe = Recipe(epoch_end=component, training=Training(batch_size=4, dropout=0.2))
    options = {"network": "law_net", "steps": 8, "seed": 5}
    found = run_trial(recipe, sources, **options)
    base = run_trial(replace(recipe, epoch_end=Withheld()), sources, **options)
    assert all(torch.equal(found.weights[name], base.weights[name]) for name in base.weights)
    edited = run_trial(replace(recipe, epoch_end=Iu(mad_k=1.0)), sources, **options)
    assert any(not torch.equal(edited.weights[name], base.weights[name]) for name in base.weights)


def test_iue_averages_each_examples_score_and_keeps_it():
    end = ended()
    seen = outputs(end.model.eval(), end.train)
    intervention = Iue(momentum=0.75).build(seed=0)
    first, second = torch.arange(240.0), torch.arange(240.0) * 3 + 1
    assert torch.equal(intervention.remember(seen, first), first)
    restored = Iue(momentum=0.75).build(seed=0)
    restored.load_state_dict(intervention.state_dict())
    order = torch.randperm(240, generator=torch.Generator().manual_seed(0))
    shuffled = replace(seen, domain=seen.domain[order], index=seen.index[order])
    expected = 0.75 * first + 0.25 * second
    torch.testing.assert_close(restored.remember(shuffled, second[order]), expected[order])
    torch.testing.assert_close(intervention.remember(seen, second), expected)
    assert not Iu().build(seed=0).state_dict()


def test_the_period_is_a_share_of_training_or_an_epoch(sources, monkeypatch):
    def ends(every):
        seen = []
        monkeypatch.setattr(
            "dgsearch.epoch_end._unlearning.UnlearningIntervention.__call__",
            lambda self, end: seen.append(end.progress.step) or {},
        )
        recipe = Recipe(epoch_end=Iu(every=every), training=Training(batch_size=4))
        run_trial(recipe, sources, network="law_net", steps=20, seed=5)
        return seen

    assert ends(0.25) == [5, 10, 15, 20]
    assert ends(0.01) == list(range(1, 21))
    assert ends(0.0) == [8, 16]  # 30 or 31 training images a domain


def test_a_wrong_field_is_named():
    with pytest.raises(ValueError, match="unknown scope 'layer'; known: classifier, network"):
        Iu(scope="layer")
    with pytest.raises(ValueError, match="momentum"):
        Iue(momentum=1.0)

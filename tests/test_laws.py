"""The laws: what holds for every component that is discovered, and for every combination of them."""

import dataclasses
import itertools
import json
import os
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
from torch import nn

from dgsearch import networks
from dgsearch.component import Component
from dgsearch.domains.batches import Sources
from dgsearch.recipe import PLAIN, SLOTS, Recipe, Training, decode, encode
from dgsearch.search_space import space_from
from dgsearch.step import Closure, DomainBatch, Objective, Progress, Step, domain_gradients, masks
from dgsearch.train import StopTrial, run_trial

STEPS = 8
TRAINING = Training(batch_size=4, dropout=0.2)
COMPONENTS = [(slot, name) for slot, choices in SLOTS.items() for name in choices]
# A component dropped in from outside has no reference here: who drops it in names it.
EXEMPT = set(filter(None, os.environ.get("DGSEARCH_LAWS_EXEMPT", "").split(",")))


def recipe_of(chosen: dict[str, str]) -> Recipe:
    return Recipe(**{slot: SLOTS[slot][name]() for slot, name in chosen.items()}, training=TRAINING)


def combinations() -> list[dict[str, str]]:
    return [dict(zip(SLOTS, names, strict=True)) for names in itertools.product(*SLOTS.values())]


def pairwise(combos: list[dict[str, str]]) -> list[dict[str, str]]:
    """Choose combinations that hold every pair of choices of two slots, greedily; all with DGSEARCH_LAWS=all."""
    if os.environ.get("DGSEARCH_LAWS") == "all":
        return combos
    left = {pair for c in combos for pair in itertools.combinations(c.items(), 2)}
    chosen = []
    while left:
        best = max(combos, key=lambda c: len(left & set(itertools.combinations(c.items(), 2))))
        chosen.append(best)
        left -= set(itertools.combinations(best.items(), 2))
    return chosen


def combo_id(chosen: dict[str, str]) -> str:
    return "+".join(chosen.values())


def train(recipe: Recipe, sources: Sources, **options) -> tuple[dict[str, torch.Tensor], tuple]:
    result = run_trial(recipe, sources, **({"network": "law_net", "steps": STEPS, "seed": 5} | options))
    return result.weights, tuple(dataclasses.replace(e, seconds=0.0) for e in result.evaluations)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs by {(a[name] - b[name]).abs().max()}"


every_combination = pytest.mark.parametrize("chosen", pairwise(combinations()), ids=combo_id)
every_component = pytest.mark.parametrize(("slot", "name"), COMPONENTS, ids=lambda v: v)


@every_combination
def test_law_1_trains_and_repeats_bit_for_bit(chosen, sources):
    recipe = recipe_of(chosen)
    weights, evaluations = train(recipe, sources)
    again, evaluations_again = train(recipe, sources)
    assert_same(weights, again)
    assert evaluations == evaluations_again
    other, _ = train(recipe, sources, seed=6)
    assert any(not torch.equal(weights[name], other[name]) for name in weights if name.endswith("weight"))


NEUTRAL = [(slot, name) for slot, name in COMPONENTS if SLOTS[slot][name].neutral]


@pytest.mark.parametrize(("slot", "name"), NEUTRAL, ids=lambda v: v)
def test_law_2_zero_strength_is_the_base(slot, name, sources):
    cls = SLOTS[slot][name]
    neutral = recipe_of(PLAIN | {slot: name})
    neutral = dataclasses.replace(neutral, **{slot: cls(**cls.neutral)})
    weights, evaluations = train(neutral, sources)
    base, base_evaluations = train(recipe_of(PLAIN), sources)
    assert_same(weights, base)
    assert [e.accuracy for e in evaluations] == [e.accuracy for e in base_evaluations]


@pytest.mark.parametrize("name", SLOTS["optimizer"])
def test_law_3_an_edit_between_steps_is_kept(name):
    def run(edit: float) -> torch.Tensor:
        parameter = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float32).view(3, 4))
        component = SLOTS["optimizer"][name]().resolve("scratch")
        optimizer = component.build([{"params": [parameter], "part": "network", "lr_ratio": 1.0}], seed=0)
        slope = torch.linspace(1, 2, 12).view(3, 4)

        def closure():
            optimizer.zero_grad()
            loss = (parameter * slope).sum()  # its gradient is the same wherever the parameter is
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
        with torch.no_grad():
            parameter.add_(edit)
        optimizer.step(closure)
        return parameter.detach()

    torch.testing.assert_close(run(0.5) - run(0.0), torch.full((3, 4), 0.5), rtol=0, atol=1e-5)


class _Setting:
    """A model, objective and batch at some step, as run_trial makes them."""

    def __init__(self, chosen: dict[str, str], sources: Sources) -> None:
        self.recipe = recipe_of(chosen).resolve("law_net")
        opened = sources.open(seed=5, device=torch.device("cpu"), withhold_guide=self.recipe.needs_guide)
        with opened:
            self.batch = opened.batch(0, size=4)
            normalisation = opened.normalisation()
        self.model = networks.build_network("law_net", num_classes=3, normalisation=normalisation, seed=5, dropout=0.2)
        self.objective = self.recipe.objective.build(num_domains=3, num_features=8, num_classes=3)
        groups = [{"params": list(self.model.parameters()), "part": "network", "lr_ratio": 1.0}]
        groups += [{**group, "part": "objective"} for group in self.objective.parameter_groups()]
        self.optimizer = self.recipe.optimizer.build(groups, seed=5)
        self.progress = Progress(2, 10)
        self.closure = Closure(self.model, self.objective, self.optimizer, self.batch, self.progress, seed=5)

    def buffers(self) -> list[torch.Tensor]:
        return [b.clone() for m in (self.model, self.objective) for b in m.buffers()]


@pytest.mark.parametrize("name", SLOTS["objective"])
def test_law_4_probes_move_nothing(name, sources):
    setting = _Setting(PLAIN | {"objective": name}, sources)
    before, chance = setting.buffers(), torch.random.get_rng_state()
    with setting.closure.masks():
        loss, first = domain_gradients(setting.model, setting.objective, setting.batch, setting.progress)
        _, second = domain_gradients(setting.model, setting.objective, setting.batch, setting.progress)
    assert loss.shape == (3,)
    assert all(torch.equal(a, b) for a, b in zip(before, setting.buffers(), strict=True))
    assert torch.equal(chance, torch.random.get_rng_state())
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert setting.model.training


@pytest.mark.parametrize("name", SLOTS["gradient"])
def test_law_4_gradient_interventions_leave_buffers_and_draws_alone(name, sources):
    setting = _Setting(PLAIN | {"gradient": name}, sources)
    intervention = setting.recipe.gradient.build(seed=5)
    before, chance = setting.buffers(), torch.random.get_rng_state()
    step = Step(setting.model, setting.objective, setting.batch, setting.progress, setting.closure)
    closure = intervention(step)
    assert all(torch.equal(a, b) for a, b in zip(before, setting.buffers(), strict=True))
    assert torch.equal(chance, torch.random.get_rng_state())
    first = closure()
    moved = setting.buffers()
    second = closure()
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(moved, setting.buffers(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(before, moved, strict=True))


@every_component
def test_law_5_defaults_lie_inside_their_ranges(slot, name):
    cls = SLOTS[slot][name]
    for kind in ("scratch", "pretrained"):
        ranges, defaults = cls.ranges(kind), cls.defaults(kind)
        resolved = cls().resolve(kind)
        for field, r in ranges.items():
            assert r.contains(defaults[field]), f"{field} = {defaults[field]} of {name} lies outside {r}"
            assert getattr(resolved, field) == defaults[field]
        assert None not in dataclasses.asdict(resolved).values()


@every_combination
def test_law_5_a_recipe_survives_json_and_replay(chosen):
    recipe = recipe_of(chosen).resolve("law_net")
    assert decode(json.loads(json.dumps(encode(recipe)))) == recipe
    space = space_from({"family": [{"name": "f", **chosen}]}, name="t", network="law_net", where="t.toml")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    trial = study.ask()
    _, drawn = space.suggest(trial)
    assert space.suggest(optuna.trial.FixedTrial(trial.params)) == ("f", drawn)
    for slot, component in drawn.components.items():
        for field, r in type(component).ranges("scratch").items():
            assert r.contains(getattr(component, field)), (slot, field)
    _, default = space.suggest(optuna.trial.FixedTrial(space.default_parameters("f")))
    assert default == Recipe(**{s: SLOTS[s][n]() for s, n in chosen.items()}).resolve("law_net")


@every_combination
def test_law_6_save_load_continue_is_an_uninterrupted_run(chosen, sources, tmp_path):
    recipe = recipe_of(chosen)
    weights, evaluations = train(recipe, sources)

    def stop_at(step):
        def report(evaluation):
            if evaluation.step == step:
                raise StopTrial

        return report

    for step in (3, 6):
        with pytest.raises(StopTrial):
            train(recipe, sources, checkpoint_dir=tmp_path, report=stop_at(step))
    reported = []
    continued, evaluations_continued = train(
        recipe, sources, checkpoint_dir=tmp_path, report=lambda e: reported.append(e.step)
    )
    assert reported == [6, 7, 8]
    assert_same(continued, weights)
    assert evaluations_continued == evaluations


# -- law 7: independent float64 references, in numpy


def reference_erm(features, logits, y, component, objective=None):
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_p, y[..., None], -1)[..., 0].mean(1).mean()


def reference_pairs(features, y, distance, *, per_class, least):
    pairs = []
    for i, j in itertools.combinations(range(len(features)), 2):
        if not per_class:
            pairs.append(distance(features[i], features[j]))
            continue
        found = []
        for k in range(4):
            a, b = features[i][y[i] == k], features[j][y[j] == k]
            if len(a) >= least and len(b) >= least:
                found.append((len(a) + len(b), distance(a, b)))
        pairs.append(sum(n * d for n, d in found) / sum(n for n, _ in found) if found else 0.0)
    return np.mean(pairs)


def reference_coral(features, logits, y, component, objective=None):
    def distance(a, b):
        mean = ((a.mean(0) - b.mean(0)) ** 2).mean() if component.match_mean else 0.0
        if len(a) < 2 or len(b) < 2:
            return mean
        difference = np.cov(a.T) - np.cov(b.T)
        return mean + (difference**2).sum() / (a.shape[1] ** 2 * (1 if component.match_mean else 4))

    penalty = reference_pairs(features, y, distance, per_class=component.per_class, least=1)
    return reference_erm(features, logits, y, component) + component.weight * penalty


def reference_mmd(a, b, *, bandwidth, num_kernels):
    pooled = np.concatenate([a, b])
    squared = np.array([[sum((p - q) ** 2) for q in pooled] for p in pooled])
    if bandwidth == "fixed":
        kernel = sum(np.exp(-g * squared) for g in (1e-3, 1e-2, 1e-1, 1, 10, 100, 1e3))
    else:
        others = squared[~np.eye(len(pooled), dtype=bool)]
        scale = np.median(others) if bandwidth == "median" else others.mean()
        powers = {1: [0], 3: [-1, 0, 1], 5: [-2, -1, 0, 1, 2]}[num_kernels]
        kernel = sum(np.exp(-squared / (2 * scale * 2.0**m)) for m in powers) / num_kernels
    n, m = len(a), len(b)
    aa, bb, ab = kernel[:n, :n], kernel[n:, n:], kernel[:n, n:]
    if bandwidth == "fixed":
        return aa.mean() + bb.mean() - 2 * ab.mean()
    within = [k[~np.eye(len(k), dtype=bool)].sum() / (len(k) * (len(k) - 1)) for k in (aa, bb)]
    assert within and n > 1 and m > 1
    return within[0] + within[1] - 2 * ab.mean()


def reference_mk_mmd(features, logits, y, component, objective=None):
    def distance(a, b):
        return reference_mmd(a, b, bandwidth=component.bandwidth, num_kernels=component.num_kernels)

    least = 1 if component.bandwidth == "fixed" else 2
    penalty = reference_pairs(features, y, distance, per_class=component.per_class, least=least)
    return reference_erm(features, logits, y, component) + component.weight * penalty


def reference_dann(features, logits, y, component, objective):
    hidden = features.reshape(-1, features.shape[-1])
    layers = [m for m in objective.discriminator if isinstance(m, nn.Linear)]
    for n, layer in enumerate(layers):
        hidden = hidden @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        hidden = np.maximum(hidden, 0) if n < len(layers) - 1 else hidden
    judged = hidden.reshape(len(features), features.shape[1], -1, len(features))  # [D, B, heads, D]
    heads = y if component.conditional else np.zeros_like(y)
    chosen = np.take_along_axis(judged, heads[..., None, None], axis=2)[:, :, 0]
    domains = np.repeat(np.arange(len(features))[:, None], features.shape[1], 1)
    return reference_erm(features, logits, y, component) + reference_erm(features, chosen, domains, component)


OBJECTIVE_REFERENCES = {
    "erm": reference_erm,
    "coral": reference_coral,
    "mk_mmd": reference_mk_mmd,
    "dann": reference_dann,
}
VARIANTS = [  # of fields whose values take another path through the mathematics
    {"per_class": True},
    {"match_mean": False},
    {"match_mean": False, "per_class": True},
    {"bandwidth": "mean", "num_kernels": 3},
    {"bandwidth": "fixed"},
    {"bandwidth": "fixed", "per_class": True},
    {"num_kernels": 1, "per_class": True},
    {"conditional": True, "depth": 3},
]
# torch's own: nothing of ours to compare, but that options arrive is tested in tests/test_train.py
OPTIMIZER_REFERENCES = {
    "adam": "torch",
    "adamw": "torch",
    "sgd": "torch",
    "sam": "tests/optimizers/test_sam.py",
    "genie": "tests/optimizers/test_genie.py",
}


APPLICABLE = [
    (name, variant)
    for name in sorted(set(SLOTS["objective"]) - EXEMPT)
    for variant in [{}, *VARIANTS]
    if variant.keys() <= {f.name for f in dataclasses.fields(SLOTS["objective"][name])}
]


@pytest.mark.parametrize(("name", "variant"), APPLICABLE, ids=str)
def test_law_7_objectives_equal_a_float64_reference(name, variant):
    assert name in OBJECTIVE_REFERENCES, f"the built-in objective {name!r} has no reference"
    component: Component = dataclasses.replace(SLOTS["objective"][name](), **variant)
    chance = np.random.default_rng(3)
    features, logits = chance.normal(size=(3, 7, 5)), chance.normal(size=(3, 7, 4))
    y = chance.integers(0, 4, (3, 7))

    class Fixed(nn.Module):
        def forward(self, x):
            return torch.tensor(features), torch.tensor(logits)

    objective: Objective = component.build(num_domains=3, num_features=5, num_classes=4)
    batch = DomainBatch(torch.zeros(3, 7, 3, 4, 4), torch.tensor(y), torch.zeros(3, 7), (0, 1, 2))
    total = objective.double()(Fixed(), batch, Progress(5, 10)).total
    assert total.dtype == torch.float64
    expected = OBJECTIVE_REFERENCES[name](features, logits, y, component, objective)
    assert total.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", sorted(set(SLOTS["optimizer"]) - EXEMPT))
def test_law_7_optimizers_have_a_reference(name):
    assert name in OPTIMIZER_REFERENCES, f"the built-in optimizer {name!r} has no reference"
    reference = OPTIMIZER_REFERENCES[name]
    assert reference == "torch" or (Path(__file__).parent.parent / reference).is_file()


@every_component
def test_law_9_too_few_domains_are_refused_before_training(slot, name, sources):
    one = dataclasses.replace(sources, domains=sources.domains[:1])
    recipe = recipe_of(PLAIN | {slot: name})
    if SLOTS[slot][name].min_domains > 1:
        reported = []
        with pytest.raises(ValueError, match=f"{slot} '{name}' needs at least 2 source domains"):
            train(recipe, one, report=reported.append)
        assert not reported
    else:
        _, evaluations = train(recipe, one)
        assert len(evaluations) == STEPS


def test_masks_are_those_of_the_domain_pooled_or_alone(sources):
    setting = _Setting(PLAIN, sources)
    layer = setting.model.dropout
    x = torch.ones(3, 4, 8)
    with masks(setting.model, domains=(0, 1, 2), draw=(5, 2)):
        pooled = layer(x.flatten(0, 1)).view(3, 4, 8)
    for d in range(3):
        with masks(setting.model, domains=(d,), draw=(5, 2)):
            assert torch.equal(layer(x[d]), pooled[d])
    assert not torch.equal(pooled[0], pooled[1])
    kept = pooled[pooled != 0]
    assert 0 < len(kept) < pooled.numel()
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.8))

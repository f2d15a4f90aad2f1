"""run_trial: what it reports and keeps; optimizers' options arrive; divergence."""

import contextlib
import dataclasses
import json
import math

import pytest
import torch
from torch.nn import functional

from dgsearch.networks import build_network
from dgsearch.optimizers.adam import Adam
from dgsearch.optimizers.adamw import AdamW
from dgsearch.optimizers.sgd import Sgd
from dgsearch.recipe import Recipe, Training
from dgsearch.train import CHECKPOINTS, RESUMED, DivergedError, StopTrial, evaluation_steps, run_trial

SMALL = Training(batch_size=4)


def test_there_are_twenty_evaluations_the_last_at_the_end():
    assert evaluation_steps(300) == [15 * k for k in range(1, 21)]
    assert evaluation_steps(7) == [1, 2, 3, 4, 5, 6, 7]
    assert len(evaluation_steps(333)) == 20 and evaluation_steps(333)[-1] == 333


def test_the_best_weights_are_those_of_the_best_evaluation(sources):
    result = run_trial(Recipe(training=SMALL), sources, network="small_cnn", steps=30, seed=0)
    means = [e.mean for e in result.evaluations]
    assert result.best == result.evaluations[means.index(max(means))]
    assert result.best.worst == min(result.best.accuracy.values())
    model = build_network("small_cnn", num_classes=3, normalisation=result.normalisation, seed=9)
    model.load_state_dict(result.weights)
    model.eval()
    with sources.open(seed=0, device=torch.device("cpu"), withhold_guide=False) as opened, torch.no_grad():
        for d, name in enumerate(sources.names):
            (batch,) = opened.part("validation", domain=d)
            logits = model(batch.x)[1][0]
            assert (logits.argmax(1) == batch.y[0]).double().mean() == result.best.accuracy[name]
            loss = functional.cross_entropy(logits, batch.y[0]).item()
            assert loss == pytest.approx(result.best.loss[name], rel=1e-4)
    assert max(means) > 0.8


def test_agreement_of_domain_gradients_is_logged_at_each_evaluation(sources):
    result = run_trial(Recipe(training=SMALL), sources, network="small_cnn", steps=20, seed=0)
    assert len(result.evaluations) == 20
    for evaluation in result.evaluations:
        assert -1 <= evaluation.log["gradient_agreement/min"] <= evaluation.log["gradient_agreement/mean"] <= 1
        assert evaluation.log["train/loss"] > 0
    one = dataclasses.replace(sources, domains=sources.domains[:1])
    alone = run_trial(Recipe(training=SMALL), one, network="small_cnn", steps=2, seed=0)
    assert not any("agreement" in name for name in alone.evaluations[0].log)


def test_a_diverging_trial_says_so(sources):
    wild = Recipe(optimizer=Sgd(lr=1e30), training=SMALL)
    with pytest.raises(DivergedError, match="not finite after \\d+ steps"):
        run_trial(wild, sources, network="small_cnn", steps=20, seed=0)


def test_a_checkpoint_of_another_trial_is_refused(sources, tmp_path):
    run_trial(Recipe(training=SMALL), sources, network="small_cnn", steps=2, seed=0, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="belongs to a trial with other settings"):
        run_trial(Recipe(training=SMALL), sources, network="small_cnn", steps=2, seed=1, checkpoint_dir=tmp_path)


def test_bfloat16_trains(sources):
    result = run_trial(Recipe(training=SMALL), sources, network="small_cnn", steps=30, seed=0, precision="bfloat16")
    assert result.best.mean > 0.8 and all(v.dtype == torch.float32 for v in result.weights.values())


def test_threads_are_put_back(sources):
    before = torch.get_num_threads()
    run_trial(Recipe(training=SMALL), sources, network="small_cnn", steps=1, seed=0, threads=before + 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "component",
    [Adam(lr=3e-3, weight_decay=1e-2), AdamW(lr=3e-3, weight_decay=0.1), Sgd(lr=3e-2, weight_decay=1e-2)],
    ids=lambda c: c.choice(),
)
def test_optimizer_options_and_group_ratios_arrive(component):
    """Three steps equal a float64 derivation from the papers' formulas, in each group at its own rate."""
    start = torch.linspace(-1, 1, 5)
    slope = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    parameters = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    groups = [{"params": [p], "part": "network", "lr_ratio": r} for p, r in zip(parameters, (1.0, 0.2), strict=True)]
    optimizer = component.build(groups, seed=0)
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = sum((p * slope).sum() for p in parameters)
            loss.backward()
            return loss

        optimizer.step(closure)
    for parameter, ratio in zip(parameters, (1.0, 0.2), strict=True):
        x, lr = start.double(), component.lr * ratio
        m = v = torch.zeros(5, dtype=torch.float64)
        for t in range(1, 4):
            decoupled = isinstance(component, AdamW)
            g = slope.double() + (0 if decoupled else component.weight_decay * x)
            if isinstance(component, Adam | AdamW):
                x = x * (1 - lr * component.weight_decay) if decoupled else x
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                x = x - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            else:
                m = 0.9 * m + g
                x = x - lr * (g + 0.9 * m)
        assert parameter.detach().double().tolist() == pytest.approx(x.tolist(), abs=1e-6)
    assert math.isfinite(parameters[0].sum().item())


def train_on(sources, folder, *, until=None, steps=10):
    """Train with checkpoints in a folder, until the evaluation at a step; return the result and what was reported."""
    reported = []

    def report(evaluation):
        reported.append(evaluation.step)
        if evaluation.step == until:
            raise StopTrial

    with contextlib.suppress(StopTrial):
        return run_trial(
            Recipe(training=SMALL), sources, network="law_net", steps=steps, seed=0, checkpoint_dir=folder,
            report=report,
        ), reported  # fmt: skip
    return None, reported


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replaced(path):
    path.write_bytes(b"not a checkpoint")


@pytest.mark.parametrize("damage", [cut, flip, replaced])
@pytest.mark.parametrize(("damaged", "again"), [(1, [3, 4, 5, 6, 7, 8, 9, 10]), (2, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])])
def test_a_damaged_checkpoint_is_passed_over(sources, tmp_path, damage, damaged, again):
    whole, _ = train_on(sources, tmp_path / "whole")
    train_on(sources, tmp_path, until=4)
    for name in CHECKPOINTS[:damaged]:
        damage(tmp_path / name)
    continued, reported = train_on(sources, tmp_path)
    assert reported == again
    assert all(torch.equal(continued.weights[k], v) for k, v in whole.weights.items())
    assert [(e.step, e.accuracy, e.loss, e.log) for e in continued.evaluations] == [
        (e.step, e.accuracy, e.loss, e.log) for e in whole.evaluations
    ]
    assert json.loads((tmp_path / RESUMED).read_text()) == {
        "step": again[0] if damaged == 1 else 0, "damaged": list(CHECKPOINTS[:damaged])
    }  # fmt: skip


def test_a_kill_between_the_two_moves_of_a_checkpoint_loses_one_evaluation_at_most(sources, tmp_path, monkeypatch):
    train_on(sources, tmp_path, until=4)
    (tmp_path / CHECKPOINTS[0]).unlink()
    _, reported = train_on(sources, tmp_path)
    assert reported[0] == 3 and not (tmp_path / ".checkpoint.pt.partial").exists()


def test_nothing_is_unpickled_that_was_not_written_whole(sources, tmp_path, monkeypatch):
    train_on(sources, tmp_path, until=2)
    damaged = [tmp_path / name for name in CHECKPOINTS]
    for path in damaged:
        flip(path)
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("loaded"))
    _, reported = train_on(sources, tmp_path)
    assert reported[0] == 1

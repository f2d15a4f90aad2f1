"""EMA and SWAD against plain re-derivations over scripted weights and losses."""

import numpy as np
import pytest
import torch
from torch import nn

from dgsearch.average.ema import Ema
from dgsearch.average.swad import Swad
from dgsearch.step import Progress


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def run(component, values, losses=(), every=2):
    """Feed weights, a step each, and a validation loss every so many steps; return what is yielded at each."""
    model = One()
    average = component.build(model)
    found, losses = [], list(losses)
    for step, value in enumerate(values, start=1):
        with torch.no_grad():
            model.w.fill_(value)
        average.update(Progress(step, len(values)))
        if losses and step % every == 0:
            average.observe(losses.pop(0), Progress(step, len(values)))
            found.append(average.weights()["w"].item())
    return average, found


def test_ema_equals_its_recursion_with_a_warm_start():
    values = np.random.default_rng(0).normal(size=300)
    average, _ = run(Ema(decay=0.99), values)
    expected = 0.0
    for t, value in enumerate(values, start=1):
        decay = min(0.99, t / (t + 10))
        expected = decay * expected + (1 - decay) * value
    assert average.weights()["w"].item() == pytest.approx(expected)
    none, _ = run(Ema(decay=0.0), values)
    assert none.weights() is None


def valley(values, losses, every, n_s=3, n_e=6, r=0.3):
    """The first and last step (inclusive) that the paper's algorithm averages over, once all losses are known."""
    begin = end = limit = None
    for i in range(len(losses)):
        if begin is None:
            window = losses[i - n_s + 1 : i + 1]
            if i >= n_s - 1 and window[0] == min(window):
                begin, limit = i - n_s + 1, (1 + r) * np.mean(window)
        elif i - begin + 1 >= n_e and min(losses[i - n_e + 1 : i + 1]) > limit:
            end = i - n_e
            break
    if begin is None:
        return None
    return begin * every, (len(losses) if end is None else end + 1) * every


FALLING = [3.0, 2.0, 1.5, 1.2, 1.0, 0.9, 0.95, 0.97, 0.92, 0.93, 0.94, 0.95]
ENDING = [2.0, 1.0, 1.1, 1.05, 1.02, 1.2, 1.1] + [2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6]
RECOVERING = [1.0, 1.1, 1.1, 2.0, 2.0, 2.0, 2.0, 1.2, 1.1, 1.0]


@pytest.mark.parametrize("losses", [FALLING, ENDING, RECOVERING], ids=["never ends", "ends", "recovers in time"])
def test_swad_averages_the_valley(losses):
    values = np.random.default_rng(1).normal(size=2 * len(losses))
    _, found = run(Swad(), values, losses)
    for known in range(1, len(losses) + 1):
        span = valley(values, losses[:known], 2)
        expected = values[2 * known - 2 : 2 * known] if span is None else values[slice(*span)]
        assert found[known - 1] == pytest.approx(expected.mean()), known
    assert valley(values, ENDING, 2)[1] < 2 * len(ENDING)


@pytest.mark.parametrize("n_s", [2, 3, 4, 5])
@pytest.mark.parametrize("n_e", [3, 4, 5, 6, 8])
def test_swad_averages_the_valley_whatever_its_windows(n_s, n_e):
    """Also where the end's window is not longer than the beginning's, and the valley ends at once."""
    for seed in range(20):
        chance = np.random.default_rng(seed)
        losses, values = chance.choice([0.1, 0.2, 1.0, 2.0], size=14).tolist(), chance.normal(size=28)
        if seed == 0:
            losses = [0.1] + [1.0] * 13
        _, found = run(Swad(start_patience=n_s, end_patience=n_e, tolerance=0.1), values, losses)
        for known in range(1, 15):
            span = valley(values, losses[:known], 2, n_s, n_e, 0.1)
            expected = values[2 * known - 2 : 2 * known] if span is None else values[slice(*span)]
            assert found[known - 1] == pytest.approx(expected.mean()), (seed, known)


def test_swads_state_survives():
    values = np.random.default_rng(2).normal(size=28)
    _, whole = run(Swad(), values, ENDING)
    for cut in range(1, 14):
        first, _ = run(Swad(), values[: 2 * cut], ENDING[:cut])
        model = One()
        second = Swad().build(model)
        second.load_state_dict(first.state_dict())
        found = []
        for step in range(2 * cut, 28):
            with torch.no_grad():
                model.w.fill_(values[step])
            second.update(Progress(step + 1, 28))
            if step % 2:
                second.observe(ENDING[step // 2], Progress(step + 1, 28))
                found.append(second.weights()["w"].item())
        assert found == pytest.approx(whole[cut:])

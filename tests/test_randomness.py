"""Chance: a pure function of its keys, in the layout that it is used in."""

import pytest
import torch

from dgsearch.randomness import generator, normal_like


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_normal_numbers_have_the_layout_and_the_moments_asked_for(layout):
    p = torch.zeros(64, 32, 5, 5).to(memory_format=layout)
    found = normal_like(p, generator(0, "x"))
    assert (found.shape, found.stride()) == (p.shape, p.stride())
    n = p.numel()
    assert found.unique().numel() > 0.99 * n  # no element is drawn for another
    moments = [found.double().pow(k).mean().item() for k in (1, 2, 3, 4)]
    errors = [(variance / n) ** 0.5 for variance in (1, 2, 15, 96)]
    for moment, expected, error in zip(moments, (0, 1, 0, 3), errors, strict=True):
        assert moment == pytest.approx(expected, abs=4 * error)
    assert torch.equal(found, normal_like(p, generator(0, "x")))
    assert not torch.equal(found, normal_like(p, generator(1, "x")))

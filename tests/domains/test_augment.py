"""Augmentation: a pure function of (seed, domain, t), of training batches only, that keeps what it must."""

import dataclasses

import pytest
import torch

from dgsearch.domains.augment import _QUARTER, AUGMENTATIONS, augmented, coloured, cropped, draws
from dgsearch.randomness import generator

CPU = torch.device("cpu")
KINDS = [kind for kind in AUGMENTATIONS if kind != "none"]


def some_images(count=64, size=16, seed=0):
    """Smooth random images, channels-last, values in [.25, .75]."""
    coarse = torch.rand(count, 3, 4, 4, generator=generator(seed, "images"))
    x = torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")
    return (0.25 + 0.5 * x).contiguous(memory_format=torch.channels_last)


def some_draws(count=64, t=0):
    return draws(count, seed=0, domain="a", t=t)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_the_same_again_and_whatever_the_other_domains_are(kind, sources):
    def batch(chosen, t, seed=3):
        with chosen.open(seed=seed, device=CPU, withhold_guide=False) as opened:
            return opened.batch(t, size=5, augment=kind)

    one = batch(sources, 2)
    assert torch.equal(one.x, batch(sources, 2).x)
    alone = batch(dataclasses.replace(sources, domains=sources.domains[1:2]), 2)
    assert torch.equal(alone.index[0], one.index[1]) and torch.equal(alone.x[0], one.x[1])
    with sources.open(seed=3, device=CPU, withhold_guide=False) as opened:
        plain = opened.batch(2, size=5)
    assert torch.equal(plain.index, one.index) and torch.equal(plain.y, one.y)
    changed = (plain.x - one.x).flatten(2).abs().amax(2)  # [D, B]
    assert (changed > 0).all()
    assert not torch.equal(one.x, batch(sources, 3).x) and not torch.equal(one.x, batch(sources, 2, seed=4).x)


def test_none_is_the_images_themselves_and_an_unknown_kind_is_named(sources):
    x = some_images()[None]
    assert augmented(x, "none", drawn=some_draws()[None]) is x
    with sources.open(seed=0, device=CPU, withhold_guide=False) as opened:
        assert torch.equal(opened.batch(0, size=4, augment="none").x, opened.batch(0, size=4).x)
        with pytest.raises(ValueError, match="unknown augmentation 'color'; known: .*Did you mean 'colour'"):
            opened.batch(0, size=4, augment="color")


@pytest.mark.parametrize("kind", KINDS)
def test_shape_range_type_and_memory_layout_stay(kind):
    x = torch.rand(3, 8, 16, 20, 3, generator=generator(0, "x")).movedim(-1, -3)  # [D, B, C, H, W] of bytes' layout
    drawn = some_draws(24).view(3, 8, -1)
    out = augmented(x, kind, drawn=drawn)
    assert out.shape == x.shape and out.dtype == x.dtype
    assert out.min() >= 0 and out.max() <= 1
    assert out.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out, augmented(x.contiguous(), kind, drawn=drawn))


def test_the_validation_part_never_changes(sources):
    with sources.open(seed=0, device=CPU, withhold_guide=False) as opened:
        before = [batch.x for batch in opened.part("validation")]
        opened.batch(0, size=4, augment="standard")
        assert all(torch.equal(a, b.x) for a, b in zip(before, opened.part("validation"), strict=True))
        for d, batch in enumerate(opened.part("train")):
            stored = torch.from_numpy(opened.images[d][opened.parts[d].train]).movedim(-1, -3).float() / 255
            assert torch.equal(batch.x[0], stored)


def test_a_crop_of_everything_is_the_image():
    x = some_images()
    out = cropped(x, some_draws()[:, :5], flip=False, scale=(1.0, 1.0))
    torch.testing.assert_close(out, x, rtol=0, atol=1e-5)


def test_crops_lie_inside_and_have_the_declared_areas_and_ratios():
    """A ramp shows where each crop lies: its slope is the crop's size, its ends lie inside the image's."""
    size = 64
    ramp = (torch.arange(size) + 0.5) / size
    x = torch.stack([ramp.expand(size, size), ramp[:, None].expand(size, size)]).expand(2000, 2, size, size)
    out = cropped(x, some_draws(2000)[:, :5], flip=False)
    middle = slice(size // 4, 3 * size // 4)  # away from the border
    width = out[:, 0, 0, middle].diff(dim=1).mean(1) * size
    height = out[:, 1, middle, 0].diff(dim=1).mean(1) * size
    area, ratio = width * height, width / height
    assert area.min() > 0.699 and area.max() < 1.001 and area.mean().item() == pytest.approx(0.85, abs=0.01)
    assert ratio.min() > 0.749 and ratio.max() < 1.334
    assert ratio.log().mean().item() == pytest.approx(0, abs=0.01)
    centre = out[:, 0, 0].mean(1)
    assert (centre - width / 2 > -0.01).all() and (centre + width / 2 < 1.01).all()
    assert centre.mean().item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_only_standard_flips(kind):
    ramp = torch.linspace(0.3, 0.6, 16).expand(1, 200, 3, 16, 16)
    out = augmented(ramp, kind, drawn=some_draws(200)[None])[0]
    falling = (out[..., 0] > out[..., -1]).all(2).all(1)
    assert not (out[:, :, 0] > out[:, :, -1] + 1e-4).any(), "an image stands on its head"
    share = falling.double().mean().item()
    assert share == pytest.approx(0.5, abs=0.1) if kind == "standard" else share == 0


def test_colour_keeps_geometry():
    """Gray images keep the place of their brightest pixel, and every image its edges' places."""
    gray = some_images()[:, :1].expand(-1, 3, -1, -1)
    out = coloured(gray, some_draws()[:, 5:])
    assert torch.equal(out.mean(1).flatten(1).argmax(1), gray.mean(1).flatten(1).argmax(1))
    torch.testing.assert_close(out[:, 0], out[:, 1], atol=1e-5, rtol=0)
    flat = torch.zeros(64, 3, 8, 8)
    flat[:, 0, :, :4], flat[:, 2, :, 4:] = 0.6, 0.5
    out = coloured(flat, some_draws()[:, 5:])
    assert all((half.amax((2, 3)) - half.amin((2, 3))).max() == 0 for half in (out[..., :4], out[..., 4:]))


def test_colour_is_the_four_operations_one_after_another():
    """Against a plain float64 derivation: brightness, contrast about mean luma, saturation, hue in YIQ, gray."""
    x, drawn = some_images(), some_draws()[:, 5:]
    out = coloured(x, drawn)
    yiq = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]).double()
    grays = 0
    for n in range(len(x)):
        u = drawn[n].double()
        pixels = x[n].double().flatten(1)  # [3, H·W]
        brightness, contrast, saturation = (0.7 + 0.6 * u[:3]).tolist()
        pixels = pixels * brightness
        mean = (yiq[0] @ pixels).mean()
        pixels = contrast * pixels + (1 - contrast) * mean
        pixels = saturation * pixels + (1 - saturation) * (yiq[0] @ pixels)
        angle = 2 * torch.pi * 0.3 * (2 * u[3] - 1)
        turn = torch.eye(3).double()
        turn[1:, 1:] = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
        pixels = torch.linalg.solve(yiq, turn @ yiq @ pixels)
        if u[4] < 0.1:
            grays += 1
            pixels = (yiq[0] @ pixels).expand(3, -1)
        torch.testing.assert_close(out[n].double().flatten(1), pixels.clamp(0, 1), atol=2e-5, rtol=0)
    assert 0 < grays < 20


def test_two_quarter_turns_of_the_hue_are_the_opposite_hue():
    luma = torch.tensor([0.299, 0.587, 0.114])
    torch.testing.assert_close(_QUARTER @ _QUARTER, luma.expand(3, 3) - torch.eye(3), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_mean_brightness_is_unbiased(kind):
    x = some_images()[None]
    means = [augmented(x, kind, drawn=some_draws(t=t)[None]).mean().item() for t in range(60)]
    assert sum(means) / len(means) == pytest.approx(x.mean().item(), rel=0.01)

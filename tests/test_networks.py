"""Names of networks, pretrained weights from files and downloads, frozen batch norm, and what a study records of it."""

import dataclasses
import sys
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dgsearch import networks
from dgsearch.line import open_study, plan_folds, train_again
from dgsearch.networks import IMAGENET, build_network, network_kind, network_name, weights_file
from dgsearch.recipe import Recipe, Training, encode
from dgsearch.study import write_json
from dgsearch.train import run_trial

SETTINGS = {"num_classes": 3, "normalisation": IMAGENET, "seed": 0}


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """torchvision's own state dict of a resnet18, as its files hold it: with fc, without counts of batches."""
    import torchvision

    torch.manual_seed(7)
    found = torchvision.models.resnet18().state_dict()
    return {k: v for k, v in found.items() if not k.endswith("num_batches_tracked")}


@pytest.fixture(scope="module")
def weights(state, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(state, path)
    return path


@pytest.mark.parametrize(("name", "num_features"), [("resnet18@none", 512), ("resnet50@none", 2048)])
def test_resnets_keep_the_contract_at_small_resolutions(name, num_features):
    model = build_network(name, **SETTINGS, freeze_bn=True).to(memory_format=torch.channels_last)
    for size in (16, 40):
        features, logits = model(torch.rand(2, 3, 3, size, size))
        assert features.shape == (2, 3, num_features) and logits.shape == (2, 3, 3)
    assert not hasattr(model.featurizer.fc, "weight")
    again = build_network(name, **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_torchvision_is_imported_only_for_its_networks():
    import subprocess

    code = (
        "import sys; from dgsearch import line, networks\n"
        "networks.build_network('small_cnn', num_classes=2, normalisation=networks.IMAGENET, seed=0)\n"
        "print('torchvision' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_name_says_the_weights_and_the_weights_say_the_kind(weights, monkeypatch):
    monkeypatch.chdir(weights.parent)
    assert network_name("resnet18") == "resnet18"
    assert network_name("resnet18", weights="none") == network_name("resnet18@none") == "resnet18@none"
    assert network_name("resnet18", weights=weights.name) == network_name(f"resnet18@{weights.name}")
    assert network_name("resnet18", weights=weights.name) == f"resnet18@{weights.resolve()}"
    kinds = [network_kind(name) for name in ("resnet18", f"resnet50@{weights}", "resnet18@none", "small_cnn")]
    assert kinds == ["pretrained", "pretrained", "scratch", "scratch"]
    assert weights_file("resnet18@none") is None and weights_file("small_cnn") is None


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        ("resnet81", "none", r"unknown network 'resnet81'; known: .*Did you mean 'resnet18'"),
        ("small_cnn", "none", "network 'small_cnn' always starts from random weights"),
        ("resnet18@none", "none", "network 'resnet18@none' names its weights already"),
        ("resnet18@", None, "network 'resnet18@' says no weights after the @"),
    ],
)
def test_a_wrong_name_is_one_line(network, options, message):
    with pytest.raises(ValueError, match=message) as error:
        network_name(network, weights=options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["plain", "state_dict", "model", "safetensors", "other fc"])
def test_weights_of_a_file_are_loaded(form, state, tmp_path):
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    if form == "safetensors":
        save_file(state, path)
    else:
        given = state | {"fc.weight": torch.zeros(7, 512)} if form == "other fc" else state
        torch.save({form: given, "epoch": 3} if form in ("state_dict", "model") else given, path)
    model = build_network(f"resnet18@{path}", **SETTINGS)
    found = model.featurizer.state_dict()
    assert all(torch.equal(found[k], v) for k, v in state.items() if not k.startswith("fc."))
    random = build_network("resnet18@none", **SETTINGS)
    assert torch.equal(model.classifier.weight, random.classifier.weight)
    assert not torch.equal(model.featurizer.conv1.weight, random.featurizer.conv1.weight)


def broken(change, state, path: Path) -> Path:
    state = dict(state)
    if change == "text":
        path.write_text("not weights\nat all")
    elif change == "empty":
        path.write_bytes(b"")
    elif change == "pickle":
        torch.save({"model": nn.Linear(2, 2)}, path)
    elif change == "tensor":
        torch.save(torch.zeros(3), path)
    else:
        if change == "missing":
            del state["conv1.weight"]
        elif change == "unexpected":
            state |= {f"extra.{n}": torch.zeros(1) for n in range(5)}
        elif change == "value":
            state["bn1.bias"] = "zero"
        else:
            state["conv1.weight"] = torch.zeros(64, 1, 7, 7)
        torch.save(state, path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"don't fit the network: conv1.weight is missing$"),
        ("unexpected", r"extra.0 is unexpected; extra.1 is unexpected; extra.2 is unexpected and 2 more$"),
        ("shape", r"conv1.weight is \[64, 1, 7, 7\], not \[64, 3, 7, 7\]$"),
        ("value", r"bn1.bias is str, not \[64\]$"),
        ("text", "can't read weights from .*w.pt"),
        ("empty", "can't read weights from .*w.pt"),
        ("pickle", "can't read weights from .*w.pt: Weights only load failed"),
        ("tensor", "w.pt holds no state dict, but a Tensor"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(change, message, state, tmp_path):
    path = broken(change, state, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=message) as error:
        build_network(f"resnet18@{path}", **SETTINGS)
    assert "\n" not in str(error.value)


def test_a_broken_safetensors_and_a_missing_file_are_one_line(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="can't read weights from .*w.safetensors"):
        build_network(f"resnet18@{path}", **SETTINGS)
    with pytest.raises(ValueError, match="no file .*gone.pt: expected the weights of network 'resnet18'"):
        build_network(f"resnet18@{tmp_path / 'gone.pt'}", **SETTINGS)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return tmp_path / "hub" / "checkpoints"


def test_imagenet_weights_are_fetched_once_and_found_after(hub, state, monkeypatch):
    fetched = []

    def download(url, path, prefix, progress):
        fetched.append((url, prefix))
        torch.save(state, path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    for _ in range(2):
        model = build_network("resnet18", **SETTINGS)
        assert torch.equal(model.featurizer.conv1.weight, state["conv1.weight"])
    assert fetched == [("https://download.pytorch.org/models/resnet18-f37072fd.pth", "f37072fd")]
    assert (hub / "resnet18-f37072fd.pth").is_file()


@pytest.mark.parametrize("fault", [URLError("no route to\nthe host"), RuntimeError("invalid hash value")])
def test_a_failed_download_says_which_file_to_put_where(hub, monkeypatch, fault):
    def download(*_):
        raise fault

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    with pytest.raises(ValueError, match="can't fetch https://download.pytorch.org/models/resnet18-f37") as error:
        weights_file("resnet18")
    assert f"put that file at {hub / 'resnet18-f37072fd.pth'}, or give --weights FILE" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_network_to_load_a_state_dict_into_needs_no_weights(hub, monkeypatch, state):
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *_: pytest.fail("a download"))
    model = build_network("resnet18", **SETTINGS, initial=False)
    model.load_state_dict(build_network("resnet18@/gone", **SETTINGS, initial=False).state_dict())


def test_group_norm_is_computed_in_float32_under_autocast():
    norm = networks.GroupNorm(2, 4)
    x = torch.rand(3, 4, 5, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x)
    assert out.dtype == torch.float32
    assert torch.equal(out, nn.functional.group_norm(x.float(), 2, norm.weight, norm.bias))


def test_frozen_batch_norm_still_learns_its_scale_and_shift():
    model = build_network("resnet18@none", **SETTINGS, freeze_bn=True)
    before = {name: b.clone() for name, b in model.named_buffers()}
    _, logits = model(torch.rand(2, 4, 3, 32, 32))
    logits.square().sum().backward()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 20 and not any(norm.training for norm in norms) and model.training
    assert all(norm.weight.grad.abs().sum() > 0 and norm.bias.grad.abs().sum() > 0 for norm in norms)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_a_pretrained_trial_is_frozen_augmented_and_normalised_as_imagenet(weights, state, sources):
    recipe = Recipe(training=Training(batch_size=2))
    network = f"resnet18@{weights}"
    result = run_trial(recipe, sources, network=network, steps=2, seed=0)
    assert result.normalisation == IMAGENET
    assert recipe.resolve(network).training == Training(2, 0.0, True, "standard")
    assert recipe.resolve("resnet18@none").training == Training(2, 0.0, False, "none")
    norms = {k.removeprefix("featurizer."): v for k, v in result.weights.items() if "running" in k}
    assert norms and all(torch.equal(v, state[k]) for k, v in norms.items())
    assert not torch.equal(result.weights["featurizer.bn1.weight"], state["bn1.weight"])
    plain = dataclasses.replace(recipe, training=Training(batch_size=2, augment="none"))
    unaugmented = run_trial(plain, sources, network=network, steps=2, seed=0)
    assert not torch.equal(result.weights["classifier.weight"], unaugmented.weights["classifier.weight"])
    scratch = run_trial(recipe, sources, network="resnet18@none", steps=1, seed=0)
    assert scratch.normalisation != IMAGENET


def test_a_study_of_other_weights_is_another_study(images, state, tmp_path):
    path = tmp_path / "w.pt"
    torch.save(state, path)

    space = tmp_path / "plain.toml"
    space.write_text('[[family]]\nname = "erm"')

    def opened(network):
        return open_study(
            tmp_path / "study", data=images, space=str(space), targets="art", network=network, steps=2, resolution=16
        )

    assert opened(f"resnet18@{path}").specification.weights_hash is not None
    study = opened(f"resnet18@{path}")
    write_json(study.trial_dir(0, 0) / "trial.json", {})  # a trial has begun
    torch.save(state | {"conv1.bias": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="is of another search .weights hash: "):
        opened(f"resnet18@{path}")
    with pytest.raises(ValueError, match="is of another search .network: "):
        opened("resnet18@none")
    with pytest.raises(ValueError, match="no file .*gone"):
        opened(f"resnet18@{tmp_path / 'gone'}")


def test_a_trial_file_names_the_weights(images, weights, tmp_path):
    network = f"resnet18@{weights}"
    recipe = Recipe(training=Training(batch_size=2)).resolve(network)
    values = {"recipe": encode(recipe), "sources": ["art", "photo"], "network": network, "steps": 1, "resolution": 16}
    write_json(tmp_path / "trial.json", values | {"seed": 0, "threads": 1, "precision": "float32"})
    result, _ = train_again(tmp_path / "trial.json", data=images)
    assert result.normalisation == IMAGENET and plan_folds(images)
    assert set(networks.ARCHITECTURES) >= {"small_cnn", "mnist_cnn", "resnet18", "resnet50"}

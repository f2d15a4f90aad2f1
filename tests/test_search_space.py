"""Spaces read from TOML, and every error a user can make in one."""

import tomllib

import optuna
import pytest

from dgsearch.component import Choice, Float, Int
from dgsearch.recipe import Recipe, Training, decode, encode
from dgsearch.search_space import read_space, shipped_spaces, space_from


def read(text: str, network: str = "small_cnn"):
    return space_from(tomllib.loads(text), name="t", network=network, where="t.toml")


def test_a_family_is_drawn_within_its_ranges_and_under_its_name():
    space = read("""
        [ranges]
        "training.batch_size" = 16
        "training.dropout" = {choices = [0.0, 0.1]}
        [[family]]
        name = "coral"
        objective = "coral"
        optimizer = ["adam", "sgd"]
        [family.ranges]
        "coral.weight" = {low = 0.5, high = 2.0}
        "coral.match_mean" = true
        [family.defaults]
        "coral.weight" = 0.7
    """)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seen = set()
    for _ in range(40):
        trial = study.ask()
        family, recipe = space.suggest(trial)
        assert family == "coral" and 0.5 <= recipe.objective.weight <= 2 and recipe.objective.match_mean
        assert recipe.training.batch_size == 16 and recipe.training.dropout in (0.0, 0.1)
        assert all(name == "family" or name.startswith("coral.") for name in trial.params)
        seen.add((recipe.optimizer.choice(), recipe.optimizer.weight_decay > 0))
    assert seen == {("adam", True), ("adam", False), ("sgd", True), ("sgd", False)}
    _, default = space.suggest(optuna.trial.FixedTrial(space.default_parameters("coral")))
    assert default.objective.weight == 0.7 and default.optimizer.choice() == "adam"


def test_defaults_depend_on_the_network_and_a_recipe_is_stored_resolved():
    recipe = Recipe().resolve("small_cnn")
    assert recipe.optimizer.lr == 1e-3 and recipe.training == Training(32, 0.0, False, "none")
    assert decode(encode(recipe)) == recipe
    pretrained = Recipe().resolve("resnet18")
    assert pretrained.optimizer.lr == 5e-5 and pretrained.training == Training(32, 0.0, True, "standard")
    scratch, shipped = (read('[[family]]\nname = "a"', network).families[0] for network in ("small_cnn", "resnet18"))
    assert "standard" not in scratch.ranges["training.augment"].values  # it flips, and a flip may change a digit
    assert shipped.ranges["training.augment"].values == ("none", "crop", "colour", "standard")
    assert shipped.defaults["training.freeze_bn"] and not scratch.defaults["training.freeze_bn"]


def test_every_shipped_space_is_read_and_has_plain_erm_first():
    assert "quick" in shipped_spaces()
    for name in shipped_spaces():
        space = read_space(name, network="small_cnn", batch_size=8)
        assert space.default_recipe().training.batch_size == 8  # also where plain ERM is no family of its own
        assert all(family.defaults["training.batch_size"] == 8 for family in space.families)
        assert space.default_recipe().name == "erm"


def test_a_range_may_be_given_for_one_kind_of_network():
    text = """
        [ranges]
        "adam.lr" = {pretrained = {low = 2e-5, high = 1e-4}, scratch = 2e-3}
        "training.dropout" = {scratch = 0.1}
        [defaults]
        "adam.lr" = {pretrained = 3e-5}
        [[family]]
        name = "erm"
    """
    scratch, pretrained = (read(text, network).families[0] for network in ("small_cnn", "resnet18"))
    assert scratch.ranges["adam.lr"] == Choice((2e-3,)) and scratch.ranges["training.dropout"] == Choice((0.1,))
    assert (scratch.defaults["adam.lr"], scratch.defaults["training.dropout"]) == (2e-3, 0.1)
    assert pretrained.ranges["adam.lr"] == Float(2e-5, 1e-4, log=True) and pretrained.defaults["adam.lr"] == 3e-5
    assert pretrained.ranges["training.dropout"] == Choice((0.0, 0.1, 0.5))


DOMAINBED = {  # published: range and default, by kind of network (hparams_registry.py; networks.py; arXiv:2007.01434)
    "resnet50": {
        "adam.lr": (Float(1e-5, 10**-3.5, log=True), 5e-5),
        "adam.weight_decay": (Float(1e-6, 1e-2, log=True), 1e-6),
        "training.batch_size": (Int(8, int(2**5.5), log=True), 32),
        "training.dropout": (Choice((0.0, 0.1, 0.5)), 0.0),
        "training.freeze_bn": (Choice((True,)), True),
        "training.augment": (Choice(("standard",)), "standard"),
    },
    "mnist_cnn": {
        "adam.lr": (Float(10**-4.5, 10**-2.5, log=True), 1e-3),
        "adam.weight_decay": (Choice((0.0,)), 0.0),
        "training.batch_size": (Int(8, 128, log=True), 64),
        "training.dropout": (Choice((0.0,)), 0.0),
        "training.freeze_bn": (Choice((False,)), False),
        "training.augment": (Choice(("none",)), "none"),
    },
}
DOMAINBED_FAMILIES = {
    "erm": {},
    "coral": {"coral.weight": (Float(0.1, 10, log=True), 1.0)},
    "mmd": {"mk_mmd.weight": (Float(0.1, 10, log=True), 1.0)},
    "dann": {
        "dann.peak": (Float(0.01, 10, log=True), 1.0),
        "dann.weight_decay": (Float(1e-6, 1e-2, log=True), 1e-6),
        "dann.width": (Choice((64, 128, 256, 512, 1024)), 256),
        "dann.depth": (Int(3, 4), 3),
        "dann.dropout": (Choice((0.0, 0.1, 0.5)), 0.0),
        "dann.lr_ratio": (Float(0.05, 5, log=True), 1.0),
    },
    "erm+gga": {},
}


@pytest.mark.parametrize("network", DOMAINBED)
def test_domainbeds_space_searches_what_domainbed_does(network):
    space = read_space("domainbed", network=network)
    assert space.family_names == list(DOMAINBED_FAMILIES)
    for family in space.families:
        expected = DOMAINBED[network] | DOMAINBED_FAMILIES[family.name]
        for key, (declared, default) in expected.items():
            assert (family.ranges[key], family.defaults[key]) == (declared, default), key
        searched = {k for k, r in family.ranges.items() if not (isinstance(r, Choice) and len(r.values) == 1)}
        assert searched <= expected.keys()
    gga = space.family("erm+gga").defaults
    published = {"rho": 1e-5, "candidates": 250, "start": 100 / 5000, "window": 100 / 5000, "tolerance": 0.1}
    assert {name: gga[f"gga.{name}"] for name in published} == published and gga["gga.agreement"] == "min"


def test_the_hash_tells_spaces_apart():
    one = read('[[family]]\nname = "erm"')
    assert one.hash == read('[[family]]\nname = "erm"').hash
    assert one.hash != read('[[family]]\nname = "erm"\n[family.ranges]\n"adam.lr" = 1e-3').hash


ERRORS = [
    ('[[family]]\nname = "a"\nobjective = "corall"',
     r"unknown objective 'corall' in family 'a' of t.toml; known: coral.*, erm.*\. Did you mean 'coral'\?"),
    ('[[family]]\nname = "a"\nobjectiv = "coral"', r"unknown key of a family 'objectiv'.*Did you mean 'objective'"),
    ('[[family]]\nname = "a"\n[family.ranges]\n"adam.lrr" = 1', r"unknown range 'adam.lrr'.*Did you mean 'adam.lr'"),
    ('[[family]]\nname = "a"\n[family.ranges]\n"coral.weight" = 1', r"unknown range 'coral.weight' in family 'a'"),
    ('[[family]]\nname = "a"\n[family.ranges]\n"adam.lr" = {low = 1e-9, high = 1e-3}',
     r"range 'adam.lr' in family 'a' of t.toml: 1e-09 lies outside the declared range"),
    ('[[family]]\nname = "a"\n[family.ranges]\n"adam.lr" = {low = 1e-3, hihg = 1e-3}', r"key .*'hihg'.*mean 'high'"),
    ('[[family]]\nname = "a"\n[family.ranges]\n"adam.lr" = {low = 2e-3, high = 1e-3}', r"low <= high"),
    ('[[family]]\nname = "a"\n[family.ranges]\n"adam.lr" = {low = "x", high = 1e-3}', r"range 'adam.lr'"),
    ('[[family]]\nname = "a"\n[family.ranges]\n"adam.lr" = {low = 2e-3, high = 3e-3}',
     r"the default 0.001 of 'adam.lr' in family 'a' of t.toml lies outside its range"),
    ('[[family]]\nname = "a"\n[family.defaults]\n"adam.lr" = 7.0', r"the default 7.0 of 'adam.lr'"),
    ('[[family]]\nname = "a"\n[[family]]\nname = "a"', r"two families are called 'a' in t.toml"),
    ('[[family]]\nname = "a b"', r"needs a name of letters"),
    ('[[family]]\nname = "erm"\nobjective = "coral"', r"'erm' in t.toml is not plain ERM"),
    ("[ranges]", r"t.toml has no \[\[family\]\]"),
    ("[rnages]\n[[family]]\nname = 'a'", r"unknown table 'rnages' in t.toml.*Did you mean 'ranges'"),
    ('[ranges]\n"adm.lr" = 1\n[[family]]\nname = "a"', r"unknown range 'adm.lr' in t.toml.*Did you mean 'adam.lr'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_errors_say_what_where_and_what_is_known(text, message):
    with pytest.raises(ValueError, match=message) as error:
        read(text)
    assert "\n" not in str(error.value)


def test_an_unknown_space_or_broken_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="unknown search space 'quik'.*Did you mean 'quick'"):
        read_space("quik", network="small_cnn")
    broken = tmp_path / "broken.toml"
    broken.write_text("[[family")
    with pytest.raises(ValueError, match="broken.toml is not TOML"):
        read_space(str(broken), network="small_cnn")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"objektive": {}}, "unknown slot 'objektive'.*Did you mean 'objective'"),
        ({"objective": {"kind": "corl"}}, "unknown objective 'corl'.*Did you mean 'coral'"),
        ({"optimizer": {"kind": "adam", "lrr": 1}}, "unknown field of optimizer 'adam' 'lrr'.*Did you mean 'lr'"),
        (
            {"optimizer": {"lr": "fast"}},
            "lr of optimizer 'adam' in the recipe: input should be a valid number, not 'fast'",
        ),
        ({"training": 3}, "training in .* must be a table of fields"),
        ({"objective": {"kind": "mk_mmd", "bandwidth": "meen"}}, "unknown bandwidth 'meen'.*Did you mean 'mean'"),
        ({"objective": {"kind": "mk_mmd", "num_kernels": 4}}, "num_kernels must be odd, not 4"),
        ({"objective": {"kind": "dann", "start": 1.0}}, r"start must lie in \[0, 1\), not 1.0"),
        ({"objective": {"kind": "dann", "depth": 0}}, "depth and width must be at least 1, not 0 and 256"),
        ({"gradient": {"kind": "gga", "agreement": "least"}}, "unknown agreement 'least'; known: mean, min"),
        ({"optimizer": {"kind": "genie", "dropout": 1.0}}, r"beta and dropout must lie in \[0, 1\)"),
        ({"average": {"kind": "ema", "decay": 1.0}}, r"decay must lie in \[0, 1\), not 1.0"),
        ({"average": {"kind": "swad", "end_patience": 0}}, "patience must be at least 1, not 3 and 0"),
    ],
)
def test_a_bad_recipe_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        decode(values)

"""SearchSpace: families of choices and narrowed ranges, read from TOML and checked against the declarations."""

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgsearch.component import Choice, Component, NetworkKind, Range, Suggest, known_or_raise, range_from
from dgsearch.networks import network_kind
from dgsearch.recipe import PLAIN, SLOTS, Recipe, Training


@dataclass(frozen=True)
class Family:
    """Choices that are searched together: some for each slot, and a range and default for every field.

    ``ranges`` and ``defaults`` are keyed by ``component.field``; the first choice of a slot is its default.
    """

    name: str
    choices: dict[str, tuple[str, ...]]
    ranges: dict[str, Range]
    defaults: dict[str, Any]

    def components(self, chosen: Mapping[str, str]) -> dict[str, type[Component]]:
        """Return the components of one choice a slot, ``training`` included."""
        return {slot: SLOTS[slot][name] for slot, name in chosen.items()} | {"training": Training}

    @property
    def is_plain(self) -> bool:
        """Whether it is ERM with Adam and nothing else."""
        return self.choices == {slot: (name,) for slot, name in PLAIN.items()}


@dataclass(frozen=True)
class SearchSpace:
    """Families of training methods for one network; a trial draws a family, then its choices and fields.

    ``plain`` is plain ERM with Adam, one of the families or not.
    """

    name: str
    network: str
    families: tuple[Family, ...]
    plain: Family

    @property
    def family_names(self) -> list[str]:
        """The families' names, in the file's order."""
        return [family.name for family in self.families]

    @property
    def hash(self) -> str:
        """A hash of what can be drawn, and of the defaults."""
        facts = [[f.name, f.choices, {k: str(r) for k, r in f.ranges.items()}, f.defaults] for f in self.families]
        return hashlib.blake2b(json.dumps([self.network, facts]).encode(), digest_size=8).hexdigest()

    def family(self, name: str) -> Family:
        """Return a family by name."""
        known_or_raise("family", name, self.family_names, where=self.name)
        return self.families[self.family_names.index(name)]

    def suggest(self, trial: Suggest) -> tuple[str, Recipe]:
        """Draw a family and a recipe; parameters carry the family's name in front, as Optuna needs it."""
        name = trial.suggest_categorical("family", self.family_names)
        family = self.family(name)
        chosen = {
            slot: names[0] if len(names) == 1 else trial.suggest_categorical(f"{name}.{slot}", list(names))
            for slot, names in family.choices.items()
        }
        found: dict[str, Component] = {}
        for slot, cls in family.components(chosen).items():
            values = {}
            for field, default in cls.defaults(network_kind(self.network)).items():
                key = f"{cls.choice()}.{field}"
                r = family.ranges.get(key)
                if r is None:
                    values[field] = family.defaults.get(key, default)
                elif isinstance(r, Choice) and len(r.values) == 1:
                    values[field] = r.values[0]
                else:
                    values[field] = r.suggest(trial, f"{name}.{key}")
            found[slot] = cls(**values)
        return name, Recipe(**found)  # type: ignore[arg-type]

    def default_parameters(self, name: str) -> dict[str, Any]:
        """Return the trial parameters that draw a family's defaults."""
        family = self.family(name)
        found: dict[str, Any] = {"family": name}
        for slot, names in family.choices.items():
            if len(names) > 1:
                found[f"{name}.{slot}"] = names[0]
        chosen = {slot: names[0] for slot, names in family.choices.items()}
        for cls in family.components(chosen).values():
            for field in cls.defaults(network_kind(self.network)):
                key = f"{cls.choice()}.{field}"
                if key in family.ranges:
                    found |= family.ranges[key].fixed(f"{name}.{key}", family.defaults[key])
        return found

    def parameters_of(self, name: str, recipe: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the trial parameters that draw an encoded recipe, of the family ``name`` if it holds it.

        None if no family of this space holds it: another choice, or a value outside a range or not the fixed one.
        """
        for family in sorted(self.families, key=lambda f: f.name != name):
            chosen = {slot: recipe[slot]["kind"] for slot in family.choices}
            if any(kind not in family.choices[slot] for slot, kind in chosen.items()):
                continue
            found: dict[str, Any] = {"family": family.name}
            found |= {f"{family.name}.{s}": kind for s, kind in chosen.items() if len(family.choices[s]) > 1}
            fits = True
            for slot, cls in family.components(chosen).items():
                for field, default in cls.defaults(network_kind(self.network)).items():
                    key, value = f"{cls.choice()}.{field}", recipe[slot].get(field)
                    declared = family.ranges.get(key)
                    fits = fits and (declared or Choice((family.defaults.get(key, default),))).contains(value)
                    if fits and declared is not None:
                        found |= declared.fixed(f"{family.name}.{key}", value)
            if fits:
                return found
        return None

    def default_recipe(self) -> Recipe:
        """Return plain ERM with Adam: that family's defaults where there is one, else those of every family."""
        fields: dict[str, dict[str, Any]] = {}
        for key, value in self.plain.defaults.items():
            component, field = key.split(".")
            fields.setdefault(component, {})[field] = value
        classes = self.plain.components({slot: names[0] for slot, names in self.plain.choices.items()})
        found = {slot: cls(**fields.get(cls.choice(), {})) for slot, cls in classes.items()}
        return Recipe(**found).resolve(self.network)  # type: ignore[arg-type]


def shipped_spaces() -> dict[str, Path]:
    """Return the spaces that come with the package, by name."""
    package = Path(__file__).parent
    for folder in (package / "search_spaces", package.parent / "search_spaces"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return {}


def read_space(name: str, *, network: str, batch_size: int | None = None) -> SearchSpace:
    """Read a space: a shipped one by name, or a TOML file; ``batch_size`` fixes what it may otherwise search.

    Raises:
        ValueError: for an unknown space, choice, field or family, a range outside the declared one, or a
            default outside its range; the message says where.
    """
    shipped = shipped_spaces()
    path = Path(name)
    if not (path.suffix == ".toml" and path.is_file()):
        known_or_raise("search space", name, shipped, where=f"the shipped ones, nor is {name!r} a TOML file")
        path = shipped[name]
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    if batch_size is not None:
        for holder in (values, *values.get("family", [])):
            for table in ("ranges", "defaults"):
                holder.get(table, {}).pop("training.batch_size", None)
        values.setdefault("ranges", {})["training.batch_size"] = batch_size
    return space_from(values, name=path.stem, network=network, where=str(path))


def space_from(values: Mapping[str, Any], *, name: str, network: str, where: str) -> SearchSpace:
    """Build a space from what its TOML holds; ``where`` is named in errors."""
    for key in values:
        known_or_raise("table", key, ("family", "ranges", "defaults"), where=where)
    tables = values.get("family", [])
    if not isinstance(tables, list) or not tables:
        raise ValueError(f"{where} has no [[family]]")
    families = tuple(_family(table, values, network=network, where=where) for table in tables)
    names = [family.name for family in families]
    for twice in sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"two families are called {twice!r} in {where}")
    for family in families:
        if family.name == "erm" and not family.is_plain:
            raise ValueError(f"the family 'erm' in {where} is not plain ERM: that name is kept for the baseline")
    plain = next((family for family in families if family.is_plain), None)
    plain = plain or _family({"name": "erm"}, values, network=network, where=where)
    return SearchSpace(name, network, families, plain)


def _family(table: Mapping[str, Any], shared: Mapping[str, Any], *, network: str, where: str) -> Family:
    for key in table:
        known_or_raise("key of a family", key, ("name", *SLOTS, "ranges", "defaults"), where=where)
    name = table.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w+-]+", name):
        raise ValueError(f"a family in {where} needs a name of letters, digits, + _ and -, not {name!r}")
    place = f"family {name!r} of {where}"
    choices: dict[str, tuple[str, ...]] = {}
    for slot, known in SLOTS.items():
        given = table.get(slot, PLAIN[slot])
        listed = given if isinstance(given, list) else [given]
        if not listed:
            raise ValueError(f"{slot} in {place} lists no choice")
        for choice in listed:
            known_or_raise(slot, str(choice), known, where=place)
        choices[slot] = tuple(listed)

    kind = network_kind(network)
    classes = {SLOTS[s][c].choice(): SLOTS[s][c] for s, listed in choices.items() for c in listed}
    classes["training"] = Training
    everywhere = {cls.choice(): cls for slot in SLOTS.values() for cls in slot.values()} | {"training": Training}
    ranges = {f"{c}.{field}": r for c, cls in classes.items() for field, r in cls.ranges(kind).items()}
    defaults = {f"{c}.{field}": v for c, cls in classes.items() for field, v in cls.defaults(kind).items()}
    for source, known_classes in ((shared, everywhere), (table, classes)):
        place_of = where if source is shared else place
        known_ranges = {f"{c}.{f}" for c, cls in known_classes.items() for f in cls.ranges(kind)}
        known_fields = {f"{c}.{f}" for c, cls in known_classes.items() for f in cls.defaults(kind)}
        for key, given in source.get("ranges", {}).items():
            known_or_raise("range", key, known_ranges, where=place_of)
            value = _for_kind(given, kind)
            if key in ranges and value is not None:
                declared = classes[key.split(".")[0]].ranges(kind)[key.split(".")[1]]
                ranges[key] = range_from(value, declared, name=key, where=place_of)
                if isinstance(fixed := ranges[key], Choice) and len(fixed.values) == 1:
                    defaults[key] = fixed.values[0]
        for key, given in source.get("defaults", {}).items():
            known_or_raise("default", key, known_fields, where=place_of)
            value = _for_kind(given, kind)
            if key in defaults and value is not None:
                defaults[key] = value
    for key, r in ranges.items():
        if not r.contains(defaults[key]):
            raise ValueError(f"the default {defaults[key]} of {key!r} in {place} lies outside its range {r}")
    return Family(name, choices, ranges, defaults)


def _for_kind(value: Any, kind: NetworkKind) -> Any:
    """Return what a table ``{pretrained = …, scratch = …}`` gives one kind of network, or None; else the value."""
    if isinstance(value, Mapping) and value and value.keys() <= {"pretrained", "scratch"}:
        return value.get(kind)
    return value

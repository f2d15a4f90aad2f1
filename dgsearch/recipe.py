"""Recipe: one component a slot, and how to train; its JSON form."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from dgsearch.average import AVERAGE
from dgsearch.component import Bool, ByNetwork, Choice, Component, Int, known_or_raise
from dgsearch.domains.augment import AUGMENTATIONS
from dgsearch.epoch_end import EPOCH_END
from dgsearch.gradient import GRADIENT
from dgsearch.networks import network_kind
from dgsearch.objectives import OBJECTIVES
from dgsearch.optimizers import OPTIMIZERS

SLOTS: dict[str, dict[str, type[Component]]] = {
    "objective": OBJECTIVES,
    "optimizer": OPTIMIZERS,
    "gradient": GRADIENT,
    "epoch_end": EPOCH_END,
    "average": AVERAGE,
}
PLAIN = {"objective": "erm", "optimizer": "adam", "gradient": "none", "epoch_end": "none", "average": "none"}


@dataclass(frozen=True)
class Training(Component):
    """How to train, whatever the method: examples a domain, dropout, frozen batch norm, augmentation."""

    batch_size: Annotated[
        int | None, ByNetwork(pretrained=(Int(8, 45, log=True), 32), scratch=(Int(8, 128, log=True), 32))
    ] = None
    dropout: Annotated[float, Choice((0.0, 0.1, 0.5))] = 0.0
    freeze_bn: Annotated[bool | None, ByNetwork(pretrained=(Bool(), True), scratch=(Choice((False,)), False))] = None
    # From scratch one trains on digits: there "standard" is not searched, for a flip may change the class.
    augment: Annotated[
        str | None,
        ByNetwork(
            pretrained=(Choice(AUGMENTATIONS), "standard"),
            scratch=(Choice(tuple(a for a in AUGMENTATIONS if a != "standard")), "none"),
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")

    @classmethod
    def choice(cls) -> str:
        """Return ``training``: its parameters' prefix."""
        return "training"


def _plain(slot: str) -> Any:
    return field(default_factory=SLOTS[slot][PLAIN[slot]])


@dataclass(frozen=True)
class Recipe:
    """A training method with its hyperparameters: a point of the product of the slots."""

    objective: Component = _plain("objective")
    optimizer: Component = _plain("optimizer")
    gradient: Component = _plain("gradient")
    epoch_end: Component = _plain("epoch_end")
    average: Component = _plain("average")
    training: Training = field(default_factory=Training)

    @property
    def components(self) -> dict[str, Component]:
        """The component of each slot, and of ``training``."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def needs_guide(self) -> bool:
        """Whether the guide part must be withheld from training."""
        return any(component.needs_guide for component in self.components.values())

    @property
    def name(self) -> str:
        """The choices that differ from plain ERM with Adam, or ``erm``."""
        chosen = [c.choice() for slot, c in self.components.items() if c.choice() != PLAIN.get(slot, "training")]
        return "+".join(chosen) or "erm"

    def resolve(self, network: str) -> "Recipe":
        """Return the recipe with the fields that depend on the network's kind filled in."""
        kind = network_kind(network)
        return Recipe(**{s: c.resolve(kind) for s, c in self.components.items()})  # type: ignore[arg-type]

    def check(self, num_domains: int) -> None:
        """Raise a ValueError if a component can't run on that many source domains."""
        for slot, component in self.components.items():
            if num_domains < component.min_domains:
                raise ValueError(
                    f"{slot} {component.choice()!r} needs at least {component.min_domains} source domains, "
                    f"and there {'is' if num_domains == 1 else 'are'} {num_domains}"
                )


def encode(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return a recipe as plain data: ``{slot: {"kind": name, **fields}, "training": {…}}``."""
    found = {}
    for slot, component in recipe.components.items():
        kind = {} if slot == "training" else {"kind": component.choice()}
        found[slot] = kind | dataclasses.asdict(component)
    return found


def decode(values: Mapping[str, Mapping[str, Any]], *, where: str = "the recipe") -> Recipe:
    """Return the recipe that ``encode`` gave; slots and fields left out have their defaults.

    Raises:
        ValueError: for an unknown slot, choice or field, or a value outside a field's type.
    """
    found: dict[str, Component] = {}
    for slot, given in values.items():
        known_or_raise("slot", slot, [*SLOTS, "training"], where=where)
        if not isinstance(given, Mapping):
            raise ValueError(f"{slot} in {where} must be a table of fields, not {given!r}")
        options = dict(given)
        cls: type[Component] = Training
        if slot != "training":
            name = options.pop("kind", PLAIN[slot])
            known_or_raise(slot, name, SLOTS[slot], where=where)
            cls = SLOTS[slot][name]
        hints = typing.get_type_hints(cls)
        for option, value in options.items():
            fields = [f.name for f in dataclasses.fields(cls)]
            known_or_raise(f"field of {slot} {cls.choice()!r}", option, fields, where=where)
            try:
                options[option] = TypeAdapter(hints[option]).validate_python(value, strict=True)
            except ValidationError as error:
                reason = error.errors()[0]["msg"].lower()
                raise ValueError(f"{option} of {slot} {cls.choice()!r} in {where}: {reason}, not {value!r}") from None
        found[slot] = cls(**options)
    return Recipe(**found)  # type: ignore[arg-type]


def parameters(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's hyperparameters as flat ``component.field`` names, as files and MLflow spell them."""
    return {
        f"{component.choice()}.{name}": value
        for component in recipe.components.values()
        for name, value in dataclasses.asdict(component).items()
    }

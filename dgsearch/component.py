"""Ranges, and components: frozen dataclasses whose annotated fields are their search space."""

import dataclasses
import difflib
import importlib
import math
import pkgutil
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self, cast

NetworkKind = Literal["pretrained", "scratch"]


class Suggest(Protocol):
    """What a range asks of a trial; Optuna's ``Trial`` and ``FixedTrial`` both have it."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """Return a float in [low, high]."""
        ...

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int:
        """Return an integer in [low, high]."""
        ...

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Return one of the choices."""
        ...


@dataclass(frozen=True)
class Float:
    """A real in [low, high]; ``off=True`` adds absence, which the field holds as 0.0."""

    low: float
    high: float
    log: bool = False
    off: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ValueError(f"a range needs finite low <= high, not {self.low} … {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"a log range needs low > 0, not {self.low}")

    def contains(self, value: object) -> bool:
        """Whether a field may hold ``value``."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.off and value == 0) or self.low <= value <= self.high

    def suggest(self, trial: Suggest, name: str) -> float:
        """Draw through ``trial``; an absent value has a switch of its own, ``name.on``."""
        if self.off and not trial.suggest_categorical(f"{name}.on", [False, True]):
            return 0.0
        return float(trial.suggest_float(name, self.low, self.high, log=self.log))

    def fixed(self, name: str, value: Any) -> dict[str, Any]:
        """Return the trial parameters that make ``suggest`` return ``value``."""
        if not self.off:
            return {name: float(value)}
        return {f"{name}.on": False} if value == 0 else {f"{name}.on": True, name: float(value)}

    def __str__(self) -> str:
        return f"{self.low:g} … {self.high:g}{' log' if self.log else ''}{' or off' if self.off else ''}"


@dataclass(frozen=True)
class Int:
    """An integer in [low, high]."""

    low: int
    high: int
    log: bool = False

    def __post_init__(self) -> None:
        if self.low > self.high or (self.log and self.low < 1):
            raise ValueError(f"a range needs low <= high, and low >= 1 if log, not {self.low} … {self.high}")

    def contains(self, value: object) -> bool:
        """Whether a field may hold ``value``."""
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def suggest(self, trial: Suggest, name: str) -> int:
        """Draw through ``trial``."""
        return int(trial.suggest_int(name, self.low, self.high, log=self.log))

    def fixed(self, name: str, value: Any) -> dict[str, Any]:
        """Return the trial parameters that make ``suggest`` return ``value``."""
        return {name: int(value)}

    def __str__(self) -> str:
        return f"{self.low} … {self.high}{' log' if self.log else ''}"


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[Any, ...]

    def contains(self, value: object) -> bool:
        """Whether a field may hold ``value``."""
        return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.values)

    def suggest(self, trial: Suggest, name: str) -> Any:
        """Draw through ``trial``."""
        return trial.suggest_categorical(name, list(self.values))

    def fixed(self, name: str, value: Any) -> dict[str, Any]:
        """Return the trial parameters that make ``suggest`` return ``value``."""
        return {name: value}

    def __str__(self) -> str:
        return " | ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in self.values)


def Bool() -> Choice:  # noqa: N802 - reads as a range beside Float, Int and Choice
    """On or off."""
    return Choice((False, True))


Range = Float | Int | Choice


@dataclass(frozen=True)
class ByNetwork:
    """A range and default for each kind of network: the field defaults to None until it is resolved."""

    pretrained: tuple[Range, Any]
    scratch: tuple[Range, Any]

    def __getitem__(self, kind: NetworkKind) -> tuple[Range, Any]:
        return self.pretrained if kind == "pretrained" else self.scratch


@dataclass(frozen=True)
class Component:
    """A choice of one slot. Its annotated fields are its search space; its file's name is its name.

    Class attributes a component may set: ``neutral``, the field values at which it does nothing (law 2);
    ``needs_guide``, whether the guide part must be withheld from training; ``min_domains``, the fewest
    source domains it can run on.
    """

    neutral: ClassVar[dict[str, Any]] = {}
    needs_guide: ClassVar[bool] = False
    min_domains: ClassVar[int] = 1

    @classmethod
    def choice(cls) -> str:
        """Return the name of this choice: that of its file."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def ranges(cls, kind: NetworkKind) -> dict[str, Range]:
        """Return the declared range of every searched field, for one kind of network."""
        declared = _declared(cls)
        return {name: r[kind][0] if isinstance(r, ByNetwork) else r for name, r in declared.items()}

    @classmethod
    def defaults(cls, kind: NetworkKind) -> dict[str, Any]:
        """Return the default of every field, for one kind of network."""
        declared = _declared(cls)
        found = {}
        for field in dataclasses.fields(cls):
            r = declared.get(field.name)
            found[field.name] = r[kind][1] if isinstance(r, ByNetwork) else field.default
        return found

    @classmethod
    def idea(cls) -> str:
        """Return the first line of the docstring: the idea and the paper."""
        return (cls.__doc__ or "").strip().splitlines()[0]

    def resolve(self, kind: NetworkKind) -> Self:
        """Return the component with the fields that depend on the network filled in."""
        missing = {n: v for n, v in self.defaults(kind).items() if getattr(self, n) is None and v is not None}
        return dataclasses.replace(self, **missing) if missing else self


def _declared(cls: type[Component]) -> dict[str, Range | ByNetwork]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found: dict[str, Range | ByNetwork] = {}
    for field in dataclasses.fields(cls):
        for mark in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(mark, Float | Int | Choice | ByNetwork):
                found[field.name] = mark
    return found


def components_in(package: str) -> dict[str, type[Component]]:
    """Return the components of a package, one a file, by file name; files that begin with ``_`` are skipped."""
    module = importlib.import_module(package)
    found: dict[str, type[Component]] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(module.__path__)):
        if name.startswith("_"):
            continue
        file = importlib.import_module(f"{package}.{name}")
        classes = [
            value
            for value in vars(file).values()
            if isinstance(value, type) and issubclass(value, Component) and value.__module__ == file.__name__
        ]
        if len(classes) != 1:
            raise ImportError(f"{file.__name__} must define exactly one Component, not {len(classes)}")
        found[name] = classes[0]
    return found


def known_or_raise(what: str, name: str, known: Iterable[str], *, where: str = "") -> None:
    """Raise a ValueError that lists what is known, and the nearest name, unless ``name`` is known."""
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    place = f" in {where}" if where else ""
    raise ValueError(f"unknown {what} {name!r}{place}; known: {', '.join(names) or 'none'}{hint}")


def range_from(value: Any, declared: Range, *, name: str, where: str) -> Range:
    """Read a narrowed range as a space file gives it, and check it against the declared one.

    A table ``{low, high, log, off}`` narrows a Float or an Int, ``{choices = […]}`` anything; a bare value fixes it.
    """
    if not isinstance(value, Mapping):
        value = {"choices": [value]}
    keys = {"choices"} if "choices" in value else {"low", "high", "log", "off"}
    for key in value:
        known_or_raise(f"key for the range {name!r}", key, keys, where=where)
    narrowed: Range
    try:
        if "choices" in value:
            choices = value["choices"]
            if not isinstance(choices, list) or not choices:
                raise ValueError("choices must be a list of at least one value")
            choices = [float(c) if isinstance(declared, Float) and type(c) is int else c for c in choices]
            narrowed = Choice(tuple(choices))
            outside = [c for c in choices if not declared.contains(c)]
        elif isinstance(declared, Choice):
            raise ValueError(f"it takes choices = […], out of {declared}")
        else:
            merged = dataclasses.asdict(declared) | dict(value)
            if isinstance(declared, Float) and not declared.off and merged["off"]:
                raise ValueError("it can't be switched off")
            kind = cast(Any, type(declared))
            narrowed = kind(**merged)
            assert not isinstance(narrowed, Choice)
            outside = [b for b in (narrowed.low, narrowed.high) if not declared.low <= b <= declared.high]
    except (TypeError, ValueError) as error:
        raise ValueError(f"range {name!r} in {where}: {error}") from None
    if outside:
        raise ValueError(f"range {name!r} in {where}: {outside[0]} lies outside the declared range {declared}")
    return narrowed

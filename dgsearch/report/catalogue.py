"""The catalogue of methods: slots, choices, ranges, defaults and papers."""

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from dgsearch.component import NetworkKind, known_or_raise
from dgsearch.recipe import SLOTS, Training

KINDS: tuple[NetworkKind, ...] = ("scratch", "pretrained")


def catalogue(name: str | None = None) -> list[dict[str, Any]]:
    """Return every choice with its fields, or those of one slot or one choice's name.

    Raises:
        ValueError: if nothing has that name.
    """
    entries = [(slot, cls) for slot, choices in SLOTS.items() for cls in choices.values()]
    entries.append(("training", Training))
    if name is not None:
        known_or_raise("method", name, {*(slot for slot, _ in entries), *(cls.choice() for _, cls in entries)})
        entries = [(slot, cls) for slot, cls in entries if name in (slot, cls.choice())]
    found = []
    for slot, cls in entries:
        ranges = {kind: cls.ranges(kind) for kind in KINDS}
        defaults = {kind: cls.defaults(kind) for kind in KINDS}
        fields = {
            field: {
                kind: {"default": defaults[kind][field], "range": str(ranges[kind].get(field, "")) or None}
                for kind in KINDS
            }
            for field in defaults["scratch"]
        }
        found.append({"slot": slot, "choice": cls.choice(), "idea": cls.idea(), "fields": fields})
    return found


def render_catalogue(entries: list[dict[str, Any]], *, width: int | None = None) -> str:
    """Return the catalogue as text: a heading a slot, a paragraph a choice, a line a field."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for slot in dict.fromkeys(entry["slot"] for entry in entries):
        console.print(f"\n[bold]{slot}[/bold]")
        for entry in (e for e in entries if e["slot"] == slot):
            head = Table.grid(padding=(0, 2))
            head.add_row(f"  [bold cyan]{entry['choice']:<10}[/bold cyan]", entry["idea"])
            console.print(head)
            fields = Table.grid(padding=(0, 2))
            for field, kinds in entry["fields"].items():
                fields.add_row(" " * 12, field, _both(kinds, "default"), _both(kinds, "range"))
            console.print(fields)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().lstrip("\n")


def _both(kinds: dict[str, dict[str, Any]], what: str) -> str:
    """Return a field's default or range; both kinds of network where they differ."""
    values = [kinds[kind][what] for kind in KINDS]
    texts = ["" if v is None else f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} ({texts[1]} pretrained)"

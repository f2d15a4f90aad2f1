"""What a check of a data set found, as text for people."""

import io
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

SHOWN = 20  # lines of a kind; JSON has all


def render_check(found: dict[str, Any], *, width: int | None = None) -> str:
    """Return the result of ``check_data``: classes × domains, sizes, then a line for each thing found."""
    domains = found["domains"]
    table = Table()
    table.add_column("class", overflow="fold")
    for name in domains:
        table.add_column(escape(name), justify="right", overflow="fold")
    classes = sorted({label for counts in domains.values() for label in counts})
    for label in classes:
        row = [str(counts.get(label, 0)) for counts in domains.values()]
        table.add_row(escape(label), *row, end_section=label == classes[-1])
    facts = [found["sizes"].get(name) for name in domains]
    table.add_row("images", *(str(sum(counts.values())) for counts in domains.values()))
    table.add_row("megabytes", *(f"{size['bytes'] / 1e6:.1f}" if size else "" for size in facts))
    for which in ("smallest", "largest"):
        row = ["×".join(map(str, size[which])) if size and size[which] else "" for size in facts]
        table.add_row(f"{which}, pixels", *row)
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = [
        *_lines("can't be read", (f"{row['path']}: {row['reason']}" for row in found["unreadable"])),
        *_lines("not opened", (f"{row['path']}: {row['reason']}" for row in found["outside"])),
        *_lines("the same", (f"{', '.join(row['paths'])} (across {row['across']})" for row in found["duplicates"])),
        *_lines("note", found["warnings"]),
        "fit for a search" if found["ok"] else "not fit for a search as it is: see above",
    ]
    return console.file.getvalue() + "\n".join(lines) + "\n"


def _lines(what: str, rows: Iterable[str]) -> list[str]:
    lines = [f"{what}: {row}" for row in rows]
    more = [f"{what}: {len(lines) - SHOWN} more; --json names them all"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more

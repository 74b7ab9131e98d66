"""A table of figures that a page shows in Markdown and a terminal as it can.

    sheet = Sheet(["case", "eager ms", "ours ms"])
    sheet.add("softmax", "1.20", "**0.80**")        # in bold: the best
    print(markdown([sheet])); console.print(terminal(sheet))
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from rich.markup import escape
from rich.table import Column, Table


class Sheet:
    """The first column holds names, the others figures. An empty column is not shown."""

    def __init__(self, heads: Sequence[str]) -> None:
        self.heads, self.rows = list(heads), list[list[str]]()
        self.means: list[list[str]] = []  # below the rows

    def add(self, *cells: str) -> None:
        self.rows.append([*cells, *[""] * (len(self.heads) - len(cells))])

    def mean(self, *cells: str) -> None:
        self.means.append([*cells, *[""] * (len(self.heads) - len(cells))])

    def shown(self) -> tuple[list[str], list[list[str]], list[list[str]]]:
        kept = [k for k in range(len(self.heads)) if not k or any(row[k] for row in self.rows)]
        return ([self.heads[k] for k in kept], *([[row[k] for k in kept] for row in rows]  # type: ignore[return-value]
                                                 for rows in (self.rows, self.means)))


Parts: TypeAlias = "list[str | Sheet]"  # of a page: paragraphs and tables


def markdown(parts: Parts) -> str:
    out = []
    for part in parts:
        if isinstance(part, Sheet):
            heads, rows, means = part.shown()
            bold = [[f"**{x}**" if x else "" for x in row] for row in means]
            part = "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows, *bold))
        out.append(part)
    return "\n\n".join(out)


def terminal(sheet: Sheet, title: str) -> Table:
    heads, rows, means = sheet.shown()
    numbers = (Column(head, justify="right") for head in heads[1:])
    table = Table(Column(heads[0], overflow="fold"), *numbers, title=title)
    for row in rows:
        table.add_row(*(re.sub(r"\*\*(.*?)\*\*", r"[bold]\1[/]", escape(x)) for x in row))
    table.add_section()
    for row in means:
        table.add_row(*map(escape, row), style="bold")
    return table

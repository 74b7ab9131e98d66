"""Building blocks of reports: tables for Markdown and for terminals, and the frame of an HTML page.

    sheet = Sheet(["case", "eager ms", "ours ms"])
    sheet.add("softmax", "1.20", "**0.80**")        # bold: the best
    print(markdown([sheet])); console.print(terminal(sheet))
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import TypeAlias

from rich.markup import escape
from rich.table import Column, Table


class Sheet:
    """A table. The first column holds names, the others numbers. Empty columns are not shown."""

    def __init__(self, heads: Sequence[str]) -> None:
        self.heads, self.rows = list(heads), list[list[str]]()
        self.means: list[list[str]] = []  # rows at the end, in bold

    def add(self, *cells: str) -> None:
        self.rows.append([*cells, *[""] * (len(self.heads) - len(cells))])

    def mean(self, *cells: str) -> None:
        self.means.append([*cells, *[""] * (len(self.heads) - len(cells))])

    def shown(self) -> tuple[list[str], list[list[str]], list[list[str]]]:
        kept = [k for k in range(len(self.heads)) if not k or any(row[k] for row in self.rows)]
        return ([self.heads[k] for k in kept], *([[row[k] for k in kept] for row in rows]  # type: ignore[return-value]
                                                 for rows in (self.rows, self.means)))


Parts: TypeAlias = "list[str | Sheet]"  # paragraphs and tables of a page


NUMBER = re.compile(r"[*~!]*[\d.,]*%?[*]*|failed")  # a cell that is aligned to the right


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem }}
:root {{ color-scheme: light dark }}
table {{ border-collapse: collapse; margin: 1rem 0 }} td, th {{ padding: .2rem .8rem; text-align: left }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums }} tr + tr td {{ border-top: 1px solid #8884 }}
{style}</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


def html_page(title: str, style: str, body: Sequence[str]) -> str:
    """A self-contained HTML page."""
    return PAGE.format(title=html.escape(title), style=style, body="\n".join(body))


def markdown(parts: Parts) -> str:
    out = []
    for part in parts:
        if isinstance(part, Sheet):
            heads, rows, means = part.shown()
            bold = [[f"**{x}**" if x else "" for x in row] for row in means]
            line = ["---:" if all(NUMBER.fullmatch(row[k]) for row in rows) else "---" for k in range(len(heads))]
            part = "\n".join(f"| {' | '.join(row)} |" for row in (heads, line, *rows, *bold))
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

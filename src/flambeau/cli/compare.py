"""`flambeau compare`: compare a compiled model with eager and float64, value by value."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flambeau import Error, OptionError, UnsupportedError
from flambeau.cli.subject import (
    FILES,
    Subject,
    demo_subject,
    file_subject,
    model_subject,
    new_table,
    output,
    page_console,
)

if TYPE_CHECKING:
    from flambeau.compare.comparison import Comparison
    from flambeau.compare.differences import Difference
    from flambeau.compare.first_difference import First

DIFFERENT = 3  # exit status if values differ; 1 is an error, and 2 a usage error
SHORT = 12  # rows of a table, without --full
BAR, ULPS = 50, "ulps"  # characters of the longest bar; heading of the histogram
EPILOG = f"""\
MODEL is a model of the bench suite (its training step without dropout is compared), or FILE:FUNC.

{FILES}
  flambeau compare example.py:norm --numerics eager
  flambeau compare gpt --dtype bfloat16 --html gpt.html

The exit status is 0 if all results, gradients and changed buffers equal eager's bit for bit, {DIFFERENT} if some
differ, and 1 if there was an error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from flambeau.config import Config

    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("model", nargs="?", metavar="MODEL", help="a model of the bench suite, or FILE:FUNC (see below)")
    what.add_argument("--demo", action="store_true", help="a built-in example")
    parser.add_argument("--numerics", choices=("fast", "eager"), default="fast", help=Config.numerics.doc)
    parser.add_argument("--infer", action="store_true", help="without gradients")
    parser.add_argument("--size", choices=("tiny", "small", "large"), default="tiny", help="of a model of the suite")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32",
                        help="dtype of a model of the suite")
    parser.add_argument("--device", default="cpu", help="device of a model of the suite, such as cuda")
    parser.add_argument("--target", metavar="NAME", help=Config.target.doc)
    parser.add_argument("--no-locate", action="store_true", help="do not search for the first operator that differs")
    parser.add_argument("--no-layers", action="store_true", help="do not compile a second time to compare layers")
    parser.add_argument("--full", action="store_true", help="print every row")
    parser.add_argument("--html", type=output, metavar="FILE", help="write a web page with tables and a histogram")
    parser.add_argument("--json", type=output, metavar="FILE", help="write everything as JSON")


def run(args: argparse.Namespace) -> int:
    import torch

    from flambeau.debug import compare
    from flambeau.report.comparison import page

    console = page_console()
    function, inputs = subject(args)
    try:
        with torch.set_grad_enabled(not args.infer):
            report = compare(function, *inputs, numerics=args.numerics, backward=not args.infer, target=args.target,
                             layers=not args.no_layers, locate=not args.no_locate)
    except Error:
        raise
    except Exception as e:  # most likely raised by the user's model
        raise UnsupportedError(f"{title(args)} does not run: {type(e).__name__}: {e}") from e
    show(console, report, None if args.full else SHORT)
    if args.html:
        args.html.write_text(page(report, title(args)))
        console.print(f"Written: {args.html}")
    if args.json:
        args.json.write_text(json.dumps(dataclasses.asdict(report) | {"equal": report.equal}, indent=1) + "\n")
    return 0 if report.equal else DIFFERENT


def title(args: argparse.Namespace) -> str:
    return args.model or "demo"


def subject(args: argparse.Namespace) -> Subject:
    import torch

    if args.demo:
        return demo_subject()
    if ":" in args.model:
        return file_subject(args.model)
    if args.model.endswith(".py"):
        raise OptionError(f"{args.model} is a file; name a function in it", hint=f"for example {args.model}:forward")
    try:
        torch.empty(0, device=args.device)
    except Exception as e:  # torch raises many kinds
        raise OptionError(f"there is no device {args.device!r}: {(str(e).splitlines() or [''])[0]}") from None
    return model_subject(args.model, args.size, args.infer, args.device, args.dtype, dropout=False)


# ---- output --------------------------------------------------------------------------------------------


def show(console: Console, report: Comparison, limit: int | None) -> None:
    colour = "green" if report.equal else "yellow"
    console.print(f"[bold {colour}]{escape(report.headline())}[/]\n", soft_wrap=True)
    for heading, rows in (("Results and gradients", report.rows), ("Layers", report.layers)):
        if rows:
            console.print(f"[bold]{heading}[/]")
            console.print(table(rows, limit))
    if report.histogram:
        console.print("[bold]Size of the differences[/]")
        for line in histogram(report.histogram):
            console.print(line)
        console.print()
    for heading, first in [("First difference", report.first), *(("Also", f) for f in report.also)]:
        if first is not None:
            show_first(console, heading, first)
    for note in report.notes:
        console.print(f"[bold]Note[/]  {escape(note)}", soft_wrap=True)


def table(rows: Sequence[Difference], limit: int | None) -> Table:
    from flambeau.report.comparison import HEADINGS, cells

    made = new_table(*HEADINGS, right=range(2, 8))
    made.columns[0].no_wrap = False  # parameter names are long
    for row in rows[:limit]:
        made.add_row(*map(escape, cells(row)), style=None if row.equal else "yellow")
    if limit is not None and len(rows) > limit:
        made.add_row(f"... {len(rows) - limit} more (--full)", style="dim")
    return made


def histogram(bins: dict[str, int]) -> list[str]:
    widest, most = max(map(len, (*bins, ULPS))), max(bins.values())
    bars = [f"  {name:>{widest}} {'█' * max(1, round(BAR * n / most))} {n:,}" for name, n in bins.items()]
    return [f"  [dim]{ULPS:>{widest}} values[/]", *bars]


def show_first(console: Console, heading: str, f: First) -> None:
    place = f"graph {f.graph}, {f.direction}" if f.graph else f.direction
    console.print(f"[bold]{heading}[/]  {escape(f.operator)} ({place}): {escape(f.why())}", soft_wrap=True)
    if f.layer:
        console.print(f"       in layer {escape(f.layer)}", soft_wrap=True)
    if f.file:
        console.print(f"       {escape(f'{f.file}:{f.line}')}  [cyan]{escape(f.code)}[/]", soft_wrap=True)
    if f.difference is not None:
        d = f.difference
        console.print(f"       {d.differ:,} of {d.total:,} values, {d.max_ulps:,} ulps at most", soft_wrap=True)
    if len(f.fused) > 1:
        console.print(f"       in a kernel with {escape(', '.join(f.fused))}", soft_wrap=True)
    console.print()

"""`flambeau ops`: list operators by family, and what Flambeau does with each in each dtype."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from flambeau import OptionError
from flambeau.cli.subject import output
from flambeau.config import config

if TYPE_CHECKING:
    import torch

    from flambeau.report.coverage import Operator

# One letter, so that eleven dtypes fit beside the longest name.
MARKS = {"native": ("N", "green"), "partly": ("P", "green"), "library": ("L", "cyan"),
         "extern": ("E", "yellow"), "fallback": ("F", "yellow"), "none": (".", "dim"), "unsupported": (".", "dim")}
HEADS = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64",
         "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "bool", "complex64": "c64"}
EPILOG = """\
A cell shows what torch.compile(backend="flambeau") does with the operator in that dtype, on the CPU or on the
machine given by --target:

  N  native   compiled by Flambeau
  P  partly   compiled by Flambeau, but ATen is called for some arguments
  L  library  one call of ATen's library (matrix products, convolutions, attention)
  E  extern   ATen's operator is called
  .  none     PyTorch does not have the operator in this dtype on the CPU

For the target of torch.device("flambeau") (OpenCL, unless FLAMBEAU_DEVICE names another), it shows what the
device does, in eager mode too:

  N  native       a kernel on the device
  P  partly       a kernel on the device, but some arguments run on the CPU
  F  fallback     runs on the CPU, and is counted: flambeau.fallbacks()
  .  unsupported  PyTorch does not have the operator in this dtype on the CPU

The command does not run the operators. Each lowering works for all dtypes of the loop language; PyTorch's
operator tests (OpInfo) say whether PyTorch has the operator in a dtype. Small letters (n, p, l, e) mean that
OpInfo does not know the operator, so its dtypes are assumed. Operators that PyTorch decomposes before a backend
sees them are not listed; their parts are.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", metavar="NAME", default="cpu", help="the machine, such as opencl (default: cpu)")
    parser.add_argument("--family", metavar="NAME", help="one family (a file of flambeau/ops), such as activation")
    parser.add_argument("--dtype", metavar="D", action="append", help="one column, such as int64; can be repeated")
    parser.add_argument("--filter", metavar="TEXT", help="operators whose name contains TEXT")
    parser.add_argument("--json", type=output, metavar="FILE", help="write the table as JSON")
    parser.add_argument("--html", type=output, metavar="FILE", help="write a web page with filters and a search")


def run(args: argparse.Namespace) -> int:
    from flambeau.report.coverage import CELLS, CELLS_OF_A_DEVICE, DTYPES, coverage, page
    from flambeau.targets.base import get_target

    console = Console(highlight=False)
    device = args.target == config.device
    machine = None if args.target == "cpu" else get_target(args.target).capabilities()
    every = coverage([dtype_named(d) for d in args.dtype] if args.dtype else DTYPES, machine, device)
    families = list(dict.fromkeys(row.family for row in every))
    if args.family and args.family not in families:
        raise OptionError(f"there is no family {args.family!r}", hint=f"families: {', '.join(families)}")
    rows = [row for row in every if (not args.family or row.family == args.family)
            and (not args.filter or args.filter in row.name)]
    if not rows:
        console.print(f"No operator matches --filter {args.filter!r}.", markup=False)
        return 1
    for family, members in groupby(rows, key=lambda row: row.family):
        console.print(family_table(family, list(members)))
    console.print(totals(rows), soft_wrap=True)
    if args.json:
        report = {"operators": [dataclasses.asdict(row) for row in rows], "counts": dict(counts(rows))}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.html:
        args.html.write_text(page(rows, args.target, CELLS_OF_A_DEVICE if device else CELLS))
    return 0


def dtype_named(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise OptionError(f"torch has no dtype {name!r}", hint=f"for example {', '.join(HEADS)}")
    return dtype


def family_table(family: str, rows: list[Operator]) -> Table:
    heads = (HEADS.get(dtype, dtype) for dtype in rows[0].cells)
    table = Table(f"[bold]{family}[/] ({len(rows)})", *heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
                  pad_edge=False)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "center", True
    for row in rows:
        marks = (mark(cell, row.assumed) for cell in row.cells.values())
        table.add_row(row.name.removeprefix("aten."), *marks)
    return table


def mark(cell: str, assumed: bool) -> str:
    letter, style = MARKS[cell]
    return f"[{style}]{letter.lower() if assumed else letter}[/]"


def counts(rows: list[Operator]) -> Counter[str]:
    """Number of operators by their best cell: native in one dtype counts as native."""
    return Counter(min(row.cells.values(), key=list(MARKS).index) for row in rows)


def totals(rows: list[Operator]) -> str:
    found = counts(rows)
    words = [f"[{MARKS[key][1]}]{found[key]} {key}[/]" for key in MARKS if found[key]]
    return f"{len(rows)} operators ({sum(row.overloads for row in rows)} overloads): {', '.join(words)}. " \
           "[dim]flambeau ops --help explains the letters.[/]"

"""`flambeau explain`: show what was captured, fused, stored in memory and generated, and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from flambeau import OptionError
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
    from flambeau.compile.regions.cut import Pieces
    from flambeau.pipeline import Compiled
    from flambeau.report.program import Summary
    from flambeau.runtime.recording import Tally

SHORT = 12  # lines of a section, without --full
CALLS = 5  # with --graphs: a warm-up, a recording, and some replays
VALUED = ("--html", "--json", "--trace", "--model")
OF_FUNCTIONS = {"infer": False, "numerics": "fast", "regions": False, "graphs": False, "streams": False, "html": None}
PLACES = {"output": 1, "input": 2}  # order of the memory table; other places come first
EPILOG = f"""\
{FILES}
If a result requires a gradient, the backward graph is shown too.

  flambeau explain example.py:norm --text

SCRIPT.py is a program, which is run like `python SCRIPT.py ARGUMENTS`. Put options for explain before it. The output is
that of FLAMBEAU_DEBUG=2 (with --text, of level 3). --trace also writes a report of three of its steps.

  flambeau explain --trace out train.py --epochs 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from flambeau.config import Config

    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("function", nargs="?", metavar="FILE:FUNC | SCRIPT.py ARGUMENTS...",
                      help="a function with its inputs, or a program (see below)")
    what.add_argument("--demo", action="store_true", help="a built-in example")
    what.add_argument("--model", metavar="NAME", help="a training step of a model of the bench suite")
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny", help="size of the model")
    parser.add_argument("--infer", action="store_true", help="without gradients")
    parser.add_argument("--numerics", choices=("fast", "eager"), default="fast", help=Config.numerics.doc)
    parser.add_argument("--text", action="store_true", help="print the source of the kernels")
    parser.add_argument("--full", action="store_true", help="do not shorten any section")
    parser.add_argument("--regions", action="store_true", help="show the parts that repeat and are compiled once")
    parser.add_argument("--graphs", action="store_true", help="show which of five calls were recorded and replayed")
    parser.add_argument("--streams", action="store_true", help="show the steps of each stream over time")
    parser.add_argument("--html", type=output, metavar="FILE", help="with --regions: write a web page")
    parser.add_argument("--json", type=output, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="for a script: write a report and a trace")


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate our arguments from those of a script."""
    at = next((k for k, a in enumerate(arguments) if a.endswith(".py") and arguments[k - 1] not in VALUED), None)
    return (arguments, []) if at is None else (arguments[:at + 1], arguments[at + 1:])


def run(args: argparse.Namespace) -> int:
    import torch

    from flambeau.debug import collect_regions, compile_once, recordings
    from flambeau.report.program import summarise

    console = page_console()
    if args.function and args.function.endswith(".py"):
        return run_program(console, args)
    if args.trace:
        raise OptionError("--trace needs a script", hint="in Python: with flambeau.debug.trace(folder)")
    function, inputs = subject(args)
    if args.html and not args.regions:
        raise OptionError("--html needs --regions", hint="add --regions")
    with torch.set_grad_enabled(not args.infer), collect_regions() as found:
        before = recordings()
        graphs = compile_once(function, inputs, numerics=args.numerics, graphs=args.graphs,
                              calls=CALLS if args.graphs else 1)
    if not graphs:
        console.print("Nothing was compiled: the function does no work on tensors.")
        return 1
    if args.graphs:
        show_recordings(console, [t for t in recordings() if not any(t is b for b in before)])
        return 0
    if args.regions:
        show_regions(console, found, graphs, args.html)
        return 0
    if args.streams:
        show_streams(console, graphs)
        return 0
    summaries = [summarise(graph) for graph in graphs]
    for number, summary in enumerate(summaries, 1):
        show(console, number, summary, None if args.full else SHORT, args.text)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(s) for s in summaries], indent=1) + "\n")
    return 0


def run_program(console: Console, args: argparse.Namespace) -> int:
    from flambeau.debug.script import run_script
    from flambeau.debug.trace import REPORT, TRACE
    from flambeau.report import session

    if given := [f"--{name}" for name, default in OF_FUNCTIONS.items() if getattr(args, name) != default]:
        raise OptionError(f"{', '.join(given)}: for a function, not for a script", hint="name a function: FILE:FUNC")
    seen, status = run_script(Path(args.function), args.rest, args.trace)
    overview = session.overview_of(seen)
    if not overview.graphs:
        console.print('Nothing was compiled: does the script call torch.compile(..., backend="flambeau")?')
        return 1
    session.show(console, overview, 3 if args.text else 2, args.function)
    if args.full:
        for graph in overview.graphs:
            if graph.summary is not None:
                show(console, graph.number, graph.summary, None, False)
    if args.json:
        args.json.write_text(json.dumps(session.plain(overview), indent=1) + "\n")
    if args.trace:
        files = [file for file in (args.trace / REPORT, args.trace / TRACE) if file.exists()]
        console.print(f"Written: {' and '.join(map(str, files))}", soft_wrap=True)
        if len(files) < 2:
            console.print("There is no trace: too few steps ran without a compilation.")
    return status


def show_streams(console: Console, graphs: list[Compiled]) -> None:
    """Describes what `options={"streams": "auto"}` would change in a program on one stream."""
    from flambeau.report.lanes import drawn
    from flambeau.schedule.streams.overlap import overlapped

    for number, graph in enumerate(graphs, 1):
        tuning = graph.captured.graph.capabilities.tuning
        program = graph.program if graph.program.streams else overlapped(graph.program, tuning, tuning.launch_recorded)
        console.print(f"Graph {number}: {len(graph.program.steps)} steps"
                      f"{', one after the other: there is nothing to gain, as modelled' if program is None else ''}")
        if program is not None:
            console.print(escape(drawn(program, tuning)), highlight=False, soft_wrap=True)


def subject(args: argparse.Namespace) -> Subject:
    if args.demo:
        return demo_subject()
    return model_subject(args.model, args.size, args.infer) if args.model else file_subject(args.function)


# ---- output --------------------------------------------------------------------------------------------


def show(console: Console, number: int, s: Summary, limit: int | None, text: bool) -> None:
    console.rule(f"[bold]graph {number}[/], {escape(s.headline())}", align="left")
    section(console, "Captured", [escape(line) for line in s.operators], limit)
    console.print("[bold]Runs as[/]")
    console.print(steps_table(s, limit))
    externs = [f"{n} x {operator}" for operator, n in s.externs.items()]
    section(console, "Not compiled: calls of ATen", externs, limit)
    section(console, "Products", [escape(why) for why in s.choices], limit)
    section(console, "Computed once, not stored in memory",
            [f"a value of {operator}: {escape(why)}" for operator, why in s.local.items()], limit)
    console.print(f"[bold]Memory[/]  intermediates share one block of {s.arena_bytes:,} bytes")
    console.print(memory_table(s, limit))
    times = ", ".join(f"{phase} {seconds * 1e3:.0f} ms" for phase, seconds in s.seconds.items())
    console.print(f"[bold]Time[/]  {times}\n")
    for name, source in s.texts.items() if text else ():
        console.print(f"[bold]{name}[/]")
        if console.is_terminal:
            console.print(Syntax(source, "cpp", background_color="default", word_wrap=True))
        else:
            console.print(source, markup=False, soft_wrap=True)


def show_regions(console: Console, found: list[Pieces], graphs: list[Compiled], page: Path | None) -> None:
    from flambeau.report import regions
    from flambeau.torch_compat.dynamo import compilation_time_metrics

    summaries = [regions.summarise(f) for f in found]
    seconds = regions.phases(compilation_time_metrics, found, graphs)
    for number, s in enumerate(summaries, 1):
        console.rule(f"[bold]graph {number}[/], {escape(s.headline())}", align="left")
        if not s.stretches:
            continue
        table = new_table("piece", "calls", "operators", "seconds", "from", "to", "why it differs from the one before",
                          right=(1, 2, 3))
        for x in s.stretches:
            table.add_row(x.letter, str(x.calls), str(x.operators), f"{x.seconds:.2f}", x.first, x.last,
                          escape(x.why), style="cyan" if x.repeated else None)
        console.print(table)
    console.print("[bold]Seconds[/]  " + ", ".join(f"{phase} {s:.2f}" for phase, s in seconds.items()))
    if page is not None:
        page.write_text(regions.page(summaries, seconds))
        console.print(f"Written: {page}")


def show_recordings(console: Console, tallies: list[Tally]) -> None:
    table = new_table("graph", "calls", "replayed", "recorded, and why", "not replayed, and why", "bytes copied",
                      right=(1, 2, 5))
    for t in tallies:
        reasons = ["\n".join(f"{n} x {escape(why)}" for why, n in counts.items())
                   for counts in (t.recorded, t.uncaptured)]
        table.add_row(escape(t.label), str(t.calls), str(t.replayed), *reasons, f"{t.copied:,}")
    console.print(table)
    console.print("[dim]All calls had the same arguments, and gradients accumulate. For your own program, "
                  "use flambeau.debug.recordings().[/]")


def section(console: Console, title: str, lines: list[str], limit: int | None) -> None:
    if lines:
        console.print(f"[bold]{title}[/]")
        for line in shortened(lines, limit):
            console.print(f"  {line}", soft_wrap=True)
        console.print()


def shortened(lines: list[str], limit: int | None) -> Iterator[str]:
    yield from lines[:limit]
    if limit is not None and len(lines) > limit:
        yield f"[dim]... {len(lines) - limit} more (--full)[/]"


def steps_table(s: Summary, limit: int | None) -> Table:
    table = new_table("", "step", "operators", "outer", "inner", "vector", "reads", "writes")
    shown = s.steps if limit is None else s.steps[: 2 * limit]
    for step in shown:
        name = f"{step.name} = {step.same_as}" if step.same_as else f"{step.name} {step.title}".rstrip()
        cells = (step.outer, step.inner, step.vector, " ".join(step.reads), " ".join(step.writes))
        table.add_row(step.kind, escape(name), ", ".join(step.operators), *cells,
                      style="cyan" if step.kind == "kernel" else None)
    if len(shown) < len(s.steps):
        table.add_row("...", f"{len(s.steps) - len(shown)} more", "(--full)", style="dim")
    return table


def memory_table(s: Summary, limit: int | None) -> Table:
    """Intermediates come first, because fusion can avoid them. Inputs and outputs belong to the caller."""
    rows = sorted(s.memory, key=lambda m: (PLACES.get(m.place, 0), -(m.bytes or 0)))
    shown = rows[:limit]
    table = new_table("buffer", "type", "place", "bytes", "operator", "why it is stored", right=(3,))
    for m in shown:
        size = "at run time" if m.bytes is None else f"{m.bytes:,}"
        table.add_row(m.buffer, escape(m.type), m.place, size, m.operator, m.why)
    if len(shown) < len(rows):
        table.add_row("...", f"{len(rows) - len(shown)} more (--full)", style="dim")
    return table

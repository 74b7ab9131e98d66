"""`flambeau bench`: ours beside eager and Inductor, in one run."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MODEL_SECONDS, OP_SECONDS = 3.0, 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=sorted(KINDS), help="models: steps; ops: operators; compile: compile times"
    )
    parser.add_argument("--only", metavar="NAME", help="cases whose name (or family) contains NAME")
    parser.add_argument(
        "--backends",
        default="eager,inductor,flambeau",
        metavar="LIST",
        help="separated by commas; options follow a colon: flambeau:numerics=fast",
    )
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="of the models")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the measurements and the machine here"
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="time for the rounds of one case")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--train",
        dest="modes",
        action="store_const",
        const=("train",),
        default=("train", "infer"),
        help="models: training steps alone; ops: backward alone",
    )
    mode.add_argument(
        "--infer",
        dest="modes",
        action="store_const",
        const=("infer",),
        help="models: inference alone; ops: forward alone",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, and returns 1 if a backend failed somewhere."""
    console = Console()
    rows, table, summary = KINDS[args.what](args, args.backends.split(","), console)
    if not rows:
        console.print(f"No case matches --only {args.only!r}.")
        return 1
    console.print(table)
    failures = [(row.name, backend, text) for row in rows for backend, text in row.errors.items()]
    for name, backend, text in failures:
        console.print(f"{name}: {backend} failed: {text}", markup=False)
    if args.json:
        from flambeau.bench.harness import write_json

        write_json(args.json, args.what, rows, summary)
    return 1 if failures else 0


def models(args: argparse.Namespace, backends: Sequence[str], console: Console) -> tuple[Any, Table, Any]:
    from flambeau.bench import harness

    cases = [(name, mode) for mode in args.modes for name in matching(args.only)]
    rows = [
        harness.measure_model(name, args.size, mode, backends, args.limit or MODEL_SECONDS)
        for name, mode in harness.progress(cases, "models", console)
    ]
    return (
        rows,
        harness.time_table(f"Models, {args.size}", rows, backends),
        harness.summarise(rows, backends),
    )


def ops(args: argparse.Namespace, backends: Sequence[str], console: Console) -> tuple[Any, Table, Any]:
    from flambeau.bench import harness
    from flambeau.bench.ops import measure_op, variants

    wanted = {{"train": "backward", "infer": "forward"}[mode] for mode in args.modes}
    cases = [case for case in variants(args.only) if case[2] in wanted]
    rows = [
        measure_op(*case, backends, args.limit or OP_SECONDS)
        for case in harness.progress(cases, "operators", console)
    ]
    return rows, harness.time_table("Operators", rows, backends), harness.summarise(rows, backends)


def compile_times(
    args: argparse.Namespace, backends: Sequence[str], console: Console
) -> tuple[Any, Table, Any]:
    from flambeau.bench import compile_time, harness

    compilers = [backend for backend in backends if backend != "eager"]
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as primed:
        rows = [compile_time.measure_compile(name, args.size, compilers, Path(primed))
                for name in harness.progress(matching(args.only), "compile times", console)]
    return (rows, compile_time.compile_table(f"Compile seconds, training, {args.size}", rows, compilers),
            compile_time.total_seconds(rows, compilers))


def matching(only: str | None) -> list[str]:
    from flambeau.bench.models import SUITE

    return [name for name in SUITE if not only or only in name]


KINDS = {"models": models, "ops": ops, "compile": compile_times}

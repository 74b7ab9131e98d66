"""`flambeau bench`: ours beside eager and Inductor, in one run."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flambeau.errors import OptionError, UnsupportedError
from flambeau.results_file import write_results

MODEL_SECONDS, OP_SECONDS, FLOOR_SECONDS, ALL_SECONDS = 3.0, 1.0, 120.0, 240.0
DEFAULTS = {"floors": "eager,inductor,flaggems,flambeau", "optimizers": "foreach,fused,flambeau,accelerate",
            "compiled": "eager,ours,whole,inductor,graphs,reduce"}
PLAIN_WIDTH = 140  # columns of a table that no terminal bounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=sorted(KINDS),
        help="models: steps; ops: operators; compile: compile times; optimizers: their steps; "
        "compiled: steps, memory and bits of whole networks, in pieces and recorded; "
        "numerics: values that differ from eager's, where none should; "
        "floors: operators beside the memory limit, which is also what ops on cuda are; "
        "device: operators of torch.device('flambeau') beside a copy; device-steps: training steps there; "
        "cliffs: cases drawn at random over all families, and the worst of them",
    )
    parser.add_argument("--only", metavar="NAME", help="cases whose name (or family) contains NAME")
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu", help="where to measure")
    parser.add_argument(
        "--backends",
        metavar="LIST",
        help="separated by commas, eager,inductor,flambeau by default (floors: and flaggems, "
        "where it is installed); options follow a colon: flambeau:numerics=fast; "
        "floors: accelerate, eager calls on our kernels",
    )
    parser.add_argument(
        "--size", choices=("small", "large", "tiny"), help="of the models; large for steps on cuda, else small"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the measurements and the machine here"
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="time for the rounds of one case; floors: the most that one backend may take for a case; "
        "compiled, numerics and cliffs: for all of it",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes at once; half of the cores for compiled, else all"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="numerics, cliffs: of the first case drawn")
    parser.add_argument("--cases", type=int, default=100, metavar="N", help="cliffs: how many are drawn")
    parser.add_argument(
        "--states", default="cold,warm,primed", metavar="LIST", help="compile: of the caches; cold is always measured"
    )
    floor_options = parser.add_argument_group("floors")
    floor_options.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    sizes = floor_options.add_mutually_exclusive_group()
    for name, text in (
        ("odd", "sizes that no block divides"),
        ("small", "less than 64K elements, timed with the host's work"),
        ("tiny", "sizes for tests, also on the CPU"),
    ):
        sizes.add_argument(
            f"--{name}", dest="sizes", action="store_const", const=name, default="full", help=text
        )
    floor_options.add_argument("--strided", action="store_true", help="inputs transposed or channels last")
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
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    if args.target == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError("torch finds no CUDA device here", hint="flambeau doctor, or --target cpu")
    what = "floors" if args.what == "ops" and (args.target, args.sizes) != ("cpu", "full") else args.what
    backends = args.backends or DEFAULTS.get(what, "eager,inductor,flambeau")
    rows, table, summary = KINDS[what](args, backends.split(","), console)
    if not rows:
        console.print(f"No case matches --only {args.only!r}.")
        return 1
    console.print(table)
    failures = [(row.name, backend, text) for row in rows for backend, text in row.errors.items()]
    for name, backend, text in failures:
        console.print(f"{name}: {backend} failed: {text}", markup=False)
    if args.json:
        write_results(args.json, what, rows, summary, args.target)
    return 1 if failures else 0


def models(args: argparse.Namespace, backends: Sequence[str], console: Console) -> tuple[Any, Table, Any]:
    from flambeau.bench import harness

    cases = [(name, mode) for mode in args.modes for name in matching(args.only)]
    size = args.size or ("large" if args.target == "cuda" else "small")
    rows = [
        harness.measure_model(
            name, size, mode, backends, args.limit or MODEL_SECONDS, device=args.target
        )
        for name, mode in harness.progress(cases, "models", console)
    ]
    return (
        rows,
        harness.time_table(f"Models, {size}, {args.target}", rows, backends),
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


def floors(args: argparse.Namespace, backends: Sequence[str], console: Console) -> tuple[Any, Table, Any]:
    from flambeau.bench import floor_cases
    from flambeau.bench import floors as bench

    wanted = [{"train": floor_cases.GRADIENT, "infer": floor_cases.FORWARD}[mode] for mode in args.modes]
    draw = bench.drawer(args.sizes, args.dtype, args.target, args.strided)
    found = bench.available(backends)
    bandwidth = bench.copy_bandwidth(draw.device)
    console.print(f"device copy: {bandwidth / 1e12:.3f} TB/s")
    rows: list[bench.FloorRow] = []
    variant = {"dtype": args.dtype, "sizes": args.sizes, "strided": args.strided}
    cases = floor_cases.chosen(args.only, wanted)
    for row in bench.measure(cases, draw, found, bandwidth, args.limit or FLOOR_SECONDS):
        rows.append(row)
        console.print(bench.line(row, found), markup=False, highlight=False, soft_wrap=True)
        summary = variant | bench.summarise(rows, found, bandwidth)
        if args.json:  # after every case, as a run on a borrowed machine may end at any time
            write_results(args.json, "floors", rows, summary, args.target)
    title = f"Times the floor, {args.dtype}, {args.sizes} sizes, {bandwidth / 1e12:.2f} TB/s"
    return rows, bench.floor_table(title, rows, found, bandwidth), variant | bench.summarise(rows, found, bandwidth)


def compile_times(
    args: argparse.Namespace, backends: Sequence[str], console: Console
) -> tuple[Any, Table, Any]:
    from flambeau.bench import compile_time, harness

    compilers = [backend for backend in backends if backend != "eager"]
    size = args.size or "small"
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as primed:
        rows = [compile_time.measure_compile(name, size, compilers, Path(primed), device=args.target,
                                             states=args.states.split(","))
                for name in harness.progress(matching(args.only), "compile times", console)]
    title = f"Compile seconds, training, {size}, {args.target}"
    return (rows, compile_time.compile_table(title, rows, compilers),
            compile_time.total_seconds(rows, compilers))


def optimizers(args: argparse.Namespace, backends: Sequence[str], console: Console) -> tuple[Any, Table, Any]:
    from flambeau.bench import floors as floor_bench
    from flambeau.bench import optimizers as bench

    bandwidth = floor_bench.copy_bandwidth(floor_bench.drawer("tiny", "float32", args.target).device)
    rows = list(bench.measure(args.target, args.only, backends, bandwidth, args.sizes == "tiny"))
    return rows, bench.step_table(rows, backends), {"bandwidth": bandwidth}


def compiled(args: argparse.Namespace, backends: Sequence[str], console: Console) -> tuple[Any, Table, Any]:
    from flambeau.bench import compiled as bench

    size = args.size or ("large" if args.target == "cuda" else "tiny")
    jobs, limit = args.jobs or max(1, (os.cpu_count() or 1) // 2), args.limit or ALL_SECONDS
    if unknown := set(backends) - bench.KINDS.keys():
        raise OptionError(f"no step is called {', '.join(sorted(unknown))}", hint=f"there are {', '.join(bench.KINDS)}")
    rows: list[bench.CompiledRow] = []
    summary = {"size": size, "jobs": jobs, "limit": limit}
    for rows in bench.measure(args.target, size, args.modes, args.only, backends, jobs, limit):
        if args.json:  # as for floors
            write_results(args.json, "compiled", rows, summary, args.target)
    return rows, bench.step_table(rows, size), summary


def numerics(args: argparse.Namespace, backends: Sequence[str], console: Console) -> tuple[Any, Table, Any]:
    from flambeau.bench import numerics as bench

    size = "large" if args.target == "cuda" else "tiny"
    jobs, limit = args.jobs or os.cpu_count() or 1, args.limit or ALL_SECONDS
    rows: list[bench.NumericsRow] = []
    summary: dict[str, Any] = {}
    for rows, summary in bench.measure(args.target, size, args.only, jobs, limit, args.seed):
        if args.json:
            write_results(args.json, "numerics", rows, summary, args.target)
    for key in ("done", "planned", "over_eager", "error", "error_of_results"):
        console.print(f"{key}: {summary.get(key, {})}", markup=False, soft_wrap=True)
    return rows, bench.bits_table(rows, size), summary


def device(args: argparse.Namespace, backends: Sequence[str], console: Console) -> tuple[Any, Table, Any]:
    from flambeau.bench import harness, streams

    size = args.sizes if args.sizes in streams.SIDES else "full"
    rows = list(streams.measure(args.only, size, lambda cases: harness.progress(cases, "device", console)))
    return rows, streams.stream_table(rows), {"device": streams.get_device_name(0), "side": streams.SIDES[size]}


def device_steps(args: argparse.Namespace, backends: Sequence[str], console: Console) -> tuple[Any, Table, Any]:
    from flambeau.bench import device_steps as bench
    from flambeau.bench import harness

    size = args.size or "small"
    rows = list(bench.measure(args.only, size, args.limit or MODEL_SECONDS,
                              lambda cases: harness.progress(cases, "steps", console)))
    return rows, bench.step_table(rows, size), {"device": bench.get_device_name(0), "size": size}


def cliffs(args: argparse.Namespace, backends: Sequence[str], console: Console) -> tuple[Any, Table, Any]:
    from flambeau.bench import cliffs as bench

    size = "tiny" if args.sizes == "tiny" else args.target
    rows: list[bench.CliffRow] = []
    summary: dict[str, Any] = {}
    for rows, summary in bench.measure(args.target, size, args.only, args.cases, args.seed, backends,
                                       args.jobs or os.cpu_count() or 1, args.limit or 12.0 * args.cases):
        if args.json:
            write_results(args.json, "cliffs", rows, summary, args.target)
    if args.json and summary.get("cases"):
        title = f"{summary['cases']} random cases, {args.target}"
        args.json.with_suffix(".svg").write_text(bench.cliff_chart(rows, title))
    return rows, bench.cliff_table(rows, summary, backends), summary


def matching(only: str | None) -> list[str]:
    from flambeau.bench.models import SUITE

    return [name for name in SUITE if not only or only in name]


KINDS = {"models": models, "ops": ops, "floors": floors, "compile": compile_times, "optimizers": optimizers,
         "compiled": compiled, "numerics": numerics, "device": device, "device-steps": device_steps,
         "cliffs": cliffs}

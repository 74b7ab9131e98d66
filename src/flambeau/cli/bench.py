"""`flambeau bench`: measure Flambeau beside eager and Inductor, in one run."""

import argparse
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from flambeau.cli.subject import output
from flambeau.errors import OptionError, UnsupportedError
from flambeau.results_file import plain, without_number, write_results

MODEL_SECONDS, OP_SECONDS, FLOOR_SECONDS, ALL_SECONDS = 3.0, 1.0, 120.0, 240.0
DEFAULTS = {"floors": "eager,inductor,flaggems,flambeau", "optimizers": "foreach,fused,flambeau,accelerate",
            "compiled": "eager,ours,whole,inductor,graphs,reduce",
            "contractions": "eager,inductor,autotuned,flambeau,own,flex,flambeau flex",
            "packages": "eager,flambeau,aotinductor,onnxruntime,package"}
PLAIN_WIDTH = 140  # columns, if the output is not a terminal
# Numbers that are printed below the table.
COUNTS = ("short", "without a time", "done", "planned", "over_eager", "error", "error_of_results")
Measured: TypeAlias = "Iterator[tuple[list[Any], str, dict[str, Any]]]"  # rows so far, title, summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", type=subject, metavar=f"{{{','.join(sorted(KINDS))}}}",
        help="models: steps of the model suite; ops: operators; compile: compile times; optimizers: optimizer steps; "
        "compiled: time, memory and bits of large networks, with and without regions and CUDA graphs; "
        "numerics: values that differ from eager's, where none should; "
        "floors: operators beside the memory limit (the same as ops on cuda); "
        "device: operators of torch.device('flambeau') beside a copy; device-steps: training steps there; "
        "cliffs: random cases of all families, and the worst of them; "
        "contractions: matrix products with fused operators, FP8, attention and experts; "
        "packages: steps, calls and load times of packages beside AOTInductor and ONNX Runtime; "
        "package-results: whether packages have the compiler's bits in a process that has no compiler; "
        "overlap: steps with streams=auto beside one stream; offload: memory and time of steps that keep less; "
        "or a package file: percentiles of its calls, and calls per second by number of threads")
    add("--only", metavar="NAME", help="cases whose name (or family) contains NAME")
    add("--target", choices=("cpu", "cuda", "opencl"), default="cpu", help="where to measure (opencl: package-results)")
    add("--backends", metavar="LIST",
        help="separated by commas (default: eager,inductor,flambeau; for floors also flaggems, if installed); "
        "options follow a colon: flambeau:numerics=fast; for floors also accelerate: eager calls with our kernels")
    add("--size", choices=("small", "large", "tiny"), help="size of the models (default: large on cuda, else small)")
    add("--json", type=output, metavar="FILE", help="write measurements and machine as JSON")
    add("--limit", type=float, metavar="SECONDS",
        help="time to measure one case; floors: the most that one backend may take for a case; "
        "compiled, numerics, cliffs, contractions, overlap and offload: time for everything")
    add("--jobs", type=int, metavar="N", help="number of processes (default: half of the cores for compiled and "
        "package-results, one for packages, else all)")
    add("--beside", type=Path, metavar="FOLDER", help="overlap and offload: commands with the same folder compile at "
        "the same time, and are measured one after the other")
    add("--seed", type=int, metavar="N",
        help="numerics, cliffs, contractions: seed of the first case (default: 0; contractions: random)")
    add("--cases", type=int, default=100, metavar="N", help="cliffs: number of cases")
    add("--states", default="cold,warm,primed", metavar="LIST",
        help="compile: states of the caches; cold is always measured")
    add("--method", default="forward", help="for a package file: the method to call")
    add("--model", metavar="SUBJECT", help="for a package file: its source (FILE:FUNC, or a model), "
        "to measure eager, AOTInductor and ONNX Runtime beside it")
    floor_options = parser.add_argument_group("floors")
    floor_options.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    sizes = floor_options.add_mutually_exclusive_group()
    for name, text in (("odd", "sizes that no block divides"),
                       ("small", "less than 64K elements; the host's work is timed too"),
                       ("tiny", "sizes for tests, also on the CPU")):
        sizes.add_argument(f"--{name}", dest="sizes", action="store_const", const=name, default="full", help=text)
    floor_options.add_argument("--strided", action="store_true", help="transposed or channels-last inputs")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--train", dest="modes", action="store_const", const=("train",), default=("train", "infer"),
                      help="models: only training; ops: only backward")
    mode.add_argument("--infer", dest="modes", action="store_const", const=("infer",),
                      help="models: only inference; ops: only forward")


def subject(text: str) -> str:
    if text not in KINDS and not (text.endswith(".flam") and os.path.isfile(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a file (*.flam) nor one of {', '.join(sorted(KINDS))}")
    return text


def run(args: argparse.Namespace) -> int:
    """Measure and print the table. Returns 1 if a backend failed in some case."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    if args.target == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError("torch finds no CUDA device", hint="run flambeau doctor, or use --target cpu")
    if args.target == "opencl" and args.what != "package-results":
        raise OptionError(f"{args.what} are not measured on OpenCL", hint="use --target cpu or cuda")
    what = "floors" if args.what == "ops" and (args.target, args.sizes) != ("cpu", "full") else args.what
    what = what if what in KINDS else "package"
    backends = args.backends or DEFAULTS.get(what, "eager,inductor,flambeau")
    measured = None
    for measured in KINDS.get(what, package)(args, backends.split(","), console):
        # After every case, because a run can be interrupted at any time; not before the first.
        if args.json and not without_number(measured[2]):
            write_results(args.json, what, measured[0], measured[2], args.target)
    if measured is None or not measured[0]:
        console.print(f"No case matches --only {args.only!r}.")
        return 1
    rows, title, summary = measured
    show(console, what, rows, title, summary)
    failures = [(row.name, backend, text) for row in rows for backend, text in row.errors.items()]
    for name, backend, text in failures:
        console.print(f"{name}: {backend} failed: {text}", markup=False)
    if empty := without_number(summary):
        console.print(f"Nothing was measured: no {', '.join(empty)}." + " No file was written." * bool(args.json))
    return 1 if failures or empty else 0


def show(console: Console, what: str, rows: Sequence[Any], title: str, summary: dict[str, Any]) -> None:
    """Print the tables of docs/results/performance.md for these measurements."""
    from flambeau.report.performance import SECTIONS
    from flambeau.report.sheet import Sheet, terminal

    for part in SECTIONS[what][1]({"kind": what, "machine": {}, "rows": plain(rows), "summary": summary}):
        if isinstance(part, Sheet):
            console.print(terminal(part, title))
        else:
            console.print(part, markup=False, soft_wrap=True)
    for key in (key for key in COUNTS if key in summary):
        console.print(f"{key}: {summary[key]}", markup=False, soft_wrap=True)


def growing(rows: Iterable[Any], title: str, summary: Callable[[list[Any]], dict[str, Any]]) -> Measured:
    found: list[Any] = []
    for row in rows:
        found.append(row)
        yield found, title, summary(found)


def models(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import harness

    cases = [(name, mode) for mode in args.modes for name in matching(args.only)]
    size = args.size or ("large" if args.target == "cuda" else "small")
    rows = (harness.measure_model(name, size, mode, backends, args.limit or MODEL_SECONDS, device=args.target)
            for name, mode in harness.progress(cases, "models", console))
    return growing(rows, f"Models, {size}, {args.target}", lambda rows: harness.summarise(rows, backends))


def ops(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import harness
    from flambeau.bench.ops import measure_op, variants

    wanted = {{"train": "backward", "infer": "forward"}[mode] for mode in args.modes}
    cases = [case for case in variants(args.only) if case[2] in wanted]
    rows = (measure_op(*case, backends, args.limit or OP_SECONDS)
            for case in harness.progress(cases, "operators", console))
    return growing(rows, "Operators", lambda rows: harness.summarise(rows, backends))


def floors(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import floor_cases
    from flambeau.bench import floors as bench

    wanted = [{"train": floor_cases.GRADIENT, "infer": floor_cases.FORWARD}[mode] for mode in args.modes]
    draw = bench.drawer(args.sizes, args.dtype, args.target, args.strided)
    found = bench.available(backends)
    bandwidth = bench.copy_bandwidth(draw.device)
    console.print(f"device copy: {bandwidth / 1e12:.3f} TB/s")
    variant = {"dtype": args.dtype, "sizes": args.sizes, "strided": args.strided}
    cases = floor_cases.chosen(args.only, wanted)
    title = f"Times the floor, {args.dtype}, {args.sizes} sizes, {bandwidth / 1e12:.2f} TB/s"
    for state in growing(bench.measure(cases, draw, found, bandwidth, args.limit or FLOOR_SECONDS), title,
                         lambda rows: variant | bench.summarise(rows, found, bandwidth)):
        console.print(bench.line(state[0][-1], found), markup=False, highlight=False, soft_wrap=True)
        yield state


def compile_times(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import compile_time, harness

    compilers = [backend for backend in backends if backend != "eager"]
    size, states = args.size or "small", args.states.split(",")
    with tempfile.TemporaryDirectory(prefix="flambeau-bench-") as primed:
        rows = (compile_time.measure_compile(name, size, compilers, Path(primed), device=args.target, states=states)
                for name in harness.progress(matching(args.only), "compile times", console))
        yield from growing(rows, f"Compile seconds, training, {size}, {args.target}",
                           lambda rows: compile_time.total_seconds(rows, compilers))


def optimizers(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import floors as floor_bench
    from flambeau.bench import optimizers as bench

    bandwidth = floor_bench.copy_bandwidth(floor_bench.drawer("tiny", "float32", args.target).device)
    rows = bench.measure(args.target, args.only, backends, bandwidth, args.sizes == "tiny")
    return growing(rows, "Optimizer steps", lambda rows: {"bandwidth": bandwidth})


def compiled(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import compiled as bench

    size = args.size or ("large" if args.target == "cuda" else "tiny")
    jobs, limit = args.jobs or max(1, (os.cpu_count() or 1) // 2), args.limit or ALL_SECONDS
    if unknown := set(backends) - bench.KINDS.keys():
        raise OptionError(f"no step is called {', '.join(sorted(unknown))}", hint=f"there are {', '.join(bench.KINDS)}")
    for rows in bench.measure(args.target, size, args.modes, args.only, backends, jobs, limit):
        yield rows, f"Whole networks, {size}", {"size": size, "jobs": jobs, "limit": limit}


def numerics(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import numerics as bench

    size = "large" if args.target == "cuda" else "tiny"
    jobs, limit = args.jobs or os.cpu_count() or 1, args.limit or ALL_SECONDS
    for rows, summary in bench.measure(args.target, size, args.only, jobs, limit, args.seed or 0):
        yield rows, f"Eager's bits, {size}", summary


def device(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import device_operators, harness
    from flambeau.device.torch_module import get_device_name

    size = args.sizes if args.sizes in device_operators.SIDES else "full"
    rows = device_operators.measure(args.only, size, lambda cases: harness.progress(cases, "device", console))
    return growing(rows, "Operators", lambda rows: {"device": get_device_name(0), "side": device_operators.SIDES[size]})


def device_steps(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import device_steps as bench
    from flambeau.bench import harness
    from flambeau.device.torch_module import get_device_name

    size = args.size or "small"
    rows = bench.measure(args.only, size, args.limit or MODEL_SECONDS,
                         lambda cases: harness.progress(cases, "steps", console))
    return growing(rows, "Steps", lambda rows: {"device": get_device_name(0), "size": size})


def cliffs(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import cliffs as bench

    size = "tiny" if args.sizes == "tiny" else args.target
    rows, summary = list[Any](), dict[str, Any]()
    for rows, summary in bench.measure(args.target, size, args.only, args.cases, args.seed or 0, backends,
                                       args.jobs or os.cpu_count() or 1, args.limit or 12.0 * args.cases):
        yield rows, "The worst of the random cases", summary
    if args.json and summary.get("cases"):
        title = f"{summary['cases']} random cases, {args.target}"
        args.json.with_suffix(".svg").write_text(bench.cliff_chart(rows, title))


def contractions(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import contractions as bench

    tiny = args.sizes == "tiny" or args.target == "cpu"
    seed = secrets.randbelow(1 << 16) if args.seed is None else args.seed
    rows = bench.measure(args.target, args.only, seed, 64 if tiny else 1, (3, 9) if tiny else (60, 20), backends,
                         args.limit or ALL_SECONDS, 2 if tiny else 10)
    for state in growing(rows, "Contractions", partial(bench.summarise, seed=seed)):
        console.print(bench.line(state[0][-1]), markup=False, highlight=False, soft_wrap=True)
        yield state


def packages(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import harness
    from flambeau.bench import packages as bench

    names = [name for name in bench.NAMES if harness.wanted(name, args.only)]
    rows = bench.measure(names, args.size or "small", backends, args.limit or MODEL_SECONDS, args.jobs or 1)
    return growing(rows, "Packages", bench.ratios)


def package_results(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import harness
    from flambeau.bench.package_bits import cases, measure_bits

    size = args.size or "tiny"
    names = [name for name in cases(size) if harness.wanted(name, args.only)]
    jobs = args.jobs or max(1, (os.cpu_count() or 1) // 2)
    return growing(measure_bits(names, size, args.target, jobs), f"Packages, {args.target}", lambda rows: {})


def overlap(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import overlap as bench

    device, tiny = subject_device(args)
    jobs = args.jobs or max(1, (os.cpu_count() or 1) - 1)
    for rows in bench.measure(device, tiny, args.modes, args.only, jobs, args.limit or ALL_SECONDS,
                              args.beside):
        yield rows, "Streams", bench.summarise(rows)


def offload(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import offload as bench

    device, tiny = subject_device(args)
    jobs = args.jobs or (6 if device == "cuda" else 1)
    for rows in bench.measure(device, "tiny" if tiny else "large", args.only, jobs, args.limit or ALL_SECONDS,
                              args.beside):
        yield rows, "Offloading", bench.summarise(rows)


def subject_device(args: argparse.Namespace) -> tuple[str, bool]:
    """The device that has streams, and whether to use the sizes of tests."""
    return ("cuda", args.size == "tiny") if args.target == "cuda" else ("flambeau", True)


def package(args: argparse.Namespace, backends: Sequence[str], console: Console) -> Measured:
    from flambeau.bench import packages as bench
    from flambeau.cli.subject import file_subject, model_subject

    given = args.model and (file_subject(args.model) if ":" in args.model else model_subject(args.model, "small", True))
    threads = sorted({1, 2, os.cpu_count() or 1})
    rows = bench.served(args.what, args.method, args.limit or OP_SECONDS, threads, given)
    return growing(rows, os.path.basename(args.what), lambda rows: {"method": args.method})


def matching(only: str | None) -> list[str]:
    from flambeau.bench.models import SUITE

    return [name for name in SUITE if not only or only in name]


KINDS: dict[str, Callable[[argparse.Namespace, Sequence[str], Console], Measured]] = {
    "models": models, "ops": ops, "floors": floors, "compile": compile_times, "optimizers": optimizers,
    "compiled": compiled, "numerics": numerics, "device": device, "device-steps": device_steps, "cliffs": cliffs,
    "contractions": contractions, "packages": packages, "package-results": package_results, "overlap": overlap,
    "offload": offload}

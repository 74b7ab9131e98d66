"""The `flambeau` command. Each subcommand is a module in this folder.

A subcommand is a module `flambeau.cli.<name>` with `add_arguments(parser)` and `run(args) -> int`. A subcommand that
runs programs also has `split(arguments)`, which separates its own arguments from those of the program (`args.rest`).
Only the module of the chosen subcommand is imported, so `flambeau --help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from flambeau import Error, __version__

COMMANDS = {
    "doctor": "check this machine, and say what to install",
    "demo": "a tour: train two small models with eager, Inductor and Flambeau, and compare them",
    "ops": "list operators and dtypes, and which of them Flambeau compiles",
    "bench": "measure Flambeau beside eager and Inductor",
    "explain": "show what was captured, fused and generated, and why",
    "compare": "compare a compiled model with eager and float64, value by value",
    "export": "write a package: a model in one file, which runs without torch and without a compiler",
    "run": "call a method of a package with arrays from files",
    "inspect": "show what is in a package",
    "size": "show how many bytes each part of a package takes",
    "warm": "compile the programs of common eager calls ahead of time",
    "cache": "show, clear, export or import the kernels stored on disk",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="flambeau", description="A compiler for PyTorch models.")
    parser.add_argument("--version", action="version", version=f"flambeau {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    subcommands = {
        name: subparsers.add_parser(name, help=doc, description=doc) for name, doc in COMMANDS.items()
    }

    chosen = arguments[0] if arguments else None
    if chosen not in COMMANDS:
        parser.parse_args(arguments)  # exits: --help, --version or a usage error
        parser.error("the command comes first")
    module = importlib.import_module(f"{__name__}.{chosen}")
    module.add_arguments(subcommands[chosen])
    rest: list[str] = []
    if hasattr(module, "split"):
        arguments, rest = module.split(arguments)
    try:
        return int(module.run(parser.parse_args(arguments, argparse.Namespace(rest=rest))))
    except Error as error:
        print(f"flambeau {chosen}: {error}", file=sys.stderr)
        return 1

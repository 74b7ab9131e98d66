"""The `flambeau` command: a thin layer that hands over to one module per subcommand.

A subcommand is a module `flambeau.cli.<name>` with `add_arguments(parser)` and `run(args) -> int`; one that runs
programs also has `split(arguments)`, which parts theirs (`args.rest`) from its own. Only the module that was asked for
is imported, so that `flambeau --help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from flambeau import Error, __version__

COMMANDS = {
    "doctor": "what works on this machine, and what to install for the rest",
    "demo": "the tour: compile a model, compare it with eager, show what was fused",
    "ops": "which operators have a lowering of their own",
    "bench": "Flambeau beside eager and Inductor, in one run",
    "explain": "what was captured, fused and generated, and why",
    "compare": "where a compiled model differs from eager, by how much, and from which operator on",
    "export": "a model as a package: one file that runs without compiler and torch",
    "run": "a method of a package on arrays out of files",
    "inspect": "what is in a package",
    "size": "the bytes of a package, by what they are for",
    "warm": "build the usual classes of eager programs ahead",
    "cache": "show or clear the kernels kept on disk, or carry them to another machine",
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
    if hasattr(module, "split"):  # what follows is not ours
        arguments, rest = module.split(arguments)
    try:
        return int(module.run(parser.parse_args(arguments, argparse.Namespace(rest=rest))))
    except Error as error:
        print(f"flambeau {chosen}: {error}", file=sys.stderr)
        return 1

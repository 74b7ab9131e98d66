"""`flambeau run`: call a method of a package with arrays from files."""

from __future__ import annotations

import argparse

from flambeau.cli.subject import existing, prefix
from flambeau.errors import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", type=existing)
    parser.add_argument("--method", default="forward")
    parser.add_argument("--input", action="append", default=[], metavar="[NAME=]FILE.npy", help="in order, or by name")
    parser.add_argument("--output", metavar="PREFIX", type=prefix, help="write results to PREFIX0.npy, ...")
    parser.add_argument("--verify", metavar="KEY", help="an Ed25519 public key (a PEM file): fail unless the package "
                        "was signed with its private key")


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from flambeau.package.module import load

    method = load(args.package, verify=args.verify).load_method(args.method)
    named = dict(x.split("=", 1) for x in args.input if "=" in x)
    try:
        given = [np.load(x) for x in args.input if "=" not in x]
        flat = method.ordered(given, {name: np.load(x) for name, x in named.items()})
    except (OSError, ValueError) as e:
        raise OptionError(f"cannot read an input: {e}") from e
    for k, (port, found) in enumerate(zip(method.entry.outputs, method.run(flat))):
        print(f"{port.name}: {port.dtype} {list(found.shape)}")
        if args.output:
            np.save(f"{args.output}{k}.npy", found)
        else:
            print(found)
    return 0

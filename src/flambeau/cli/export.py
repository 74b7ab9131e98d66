"""`flambeau export`: write a function or a model as a package."""

from __future__ import annotations

import argparse
import os

from flambeau.cli.subject import FILES, file_subject, model_subject, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = FILES
    parser.add_argument("subject", help="FILE:FUNC, or a model of the bench suite")
    parser.add_argument("-o", "--output", type=output, default="model.flam", help="default: model.flam")
    parser.add_argument("--target", action="append", help='"cpu" (the default), "cpu:x86-64-v3", '
                        '"cuda:sm_90", "opencl", "opencl:cpu", "opencl:here" or "metal"; can be repeated')
    parser.add_argument("--numerics", choices=("fast", "eager"))
    parser.add_argument("--drop-debug", action="store_true", help="leave out programs and kernel sources")
    parser.add_argument("--sign", metavar="KEY", help="sign the package with this Ed25519 private key (a PEM file)")


def run(args: argparse.Namespace) -> int:
    from flambeau.package.export import export

    function, inputs = file_subject(args.subject) if ":" in args.subject else model_subject(args.subject, "small", True)
    name = export(function, inputs, args.output, targets=args.target or ["cpu"], numerics=args.numerics,
                  debug=not args.drop_debug, sign=args.sign)
    print(f"{args.output}: {os.path.getsize(args.output):,} bytes, {name}")
    return 0

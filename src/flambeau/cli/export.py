"""`flambeau export`: write a function or a model as a package."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from flambeau.cli.subject import FILES, file_function, file_subject, model_subject, output
from flambeau.errors import OptionError

ARGUMENT = re.compile(r"(\w+)\[(.*)\]")
SIZE = re.compile(r"(?:([A-Za-z_]\w*)=)?(\d+)(?::(\d+)\.\.(\d*))?")  # 8, N=4, N=4:2..64, N=4:2..


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = FILES
    parser.add_argument("subject", help="FILE:FUNC, or a model of the bench suite")
    parser.add_argument("-o", "--output", type=output, default="model.flam", help="default: model.flam")
    parser.add_argument("--args", nargs="+", metavar="DTYPE[SIZES]", help="arguments, instead of those that the file "
                        "defines: float32[4,8]; float32[N=4,8] where N is a size of the run, and float32[N=4:2..64,8] "
                        "where it is in a range")
    parser.add_argument("--target", action="append", help='"cpu" (the default), "cpu:x86-64-v3", '
                        '"cuda:sm_90", "opencl", "opencl:cpu", "opencl:here" or "metal"; can be repeated')
    parser.add_argument("--numerics", choices=("fast", "eager"))
    parser.add_argument("--drop-debug", action="store_true", help="leave out programs and kernel sources")
    parser.add_argument("--sign", metavar="KEY", help="sign the package with this Ed25519 private key (a PEM file)")


def run(args: argparse.Namespace) -> int:
    from flambeau.package.export import export

    shapes: tuple[dict[int, Any], ...] | None = None
    if args.args:
        inputs, shapes = described(args.args)
        function = (file_function(args.subject)[0] if ":" in args.subject
                    else model_subject(args.subject, "small", True)[0])
    else:
        function, inputs = (file_subject(args.subject) if ":" in args.subject
                            else model_subject(args.subject, "small", True))
    name = export(function, inputs, args.output, dynamic_shapes=shapes, targets=args.target or ["cpu"],
                  numerics=args.numerics, debug=not args.drop_debug, sign=args.sign)
    print(f"{args.output}: {os.path.getsize(args.output):,} bytes, {name}")
    return 0


def described(texts: list[str]) -> tuple[tuple[Any, ...], tuple[dict[int, Any], ...]]:
    """Arguments of these dtypes and sizes, and the dynamic shapes: sizes with names may differ between calls."""
    import torch
    from torch.export import Dim

    inputs, shapes = [], []
    dims: dict[str, tuple[int, Any]] = {}
    for text in texts:
        found = ARGUMENT.fullmatch(text.strip())
        sizes = [SIZE.fullmatch(x.strip()) for x in found[2].split(",")] if found and found[2].strip() else []
        dtype = getattr(torch, found[1], None) if found else None
        if not isinstance(dtype, torch.dtype) or not all(sizes) or any(
                x[3] is not None and not x[1] for x in sizes if x):
            raise OptionError(f"{text!r} is not an argument", hint="for example float32[4,8] or int64[N=4:2..64]")
        shape, named = [], {}
        for d, size in enumerate(sizes):
            assert size is not None
            name, number = size[1], int(size[2])
            shape.append(number)
            if name:
                bounds = {key: int(n) for key, n in (("min", size[3]), ("max", size[4])) if n}
                known, named[d] = dims.setdefault(name, (number, Dim(name, **bounds)))
                if known != number:
                    raise OptionError(f"size {name} is {known} and {number}", hint="one name has one size")
        inputs.append(torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype))
        shapes.append(named)
    return tuple(inputs), tuple(shapes)

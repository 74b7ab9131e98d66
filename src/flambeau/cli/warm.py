"""`flambeau warm`: compile the programs of common eager calls ahead of time, for the device or for `accelerate`."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from rich.console import Console

from flambeau.errors import OptionError
from flambeau.runtime.progress import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="flambeau", help="flambeau (default), or cpu or cuda for accelerate")
    parser.add_argument("--dtype", nargs="+", default=["float32"], help="dtypes of the tensors (default: float32)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="arithmetic, activations, norms, ... (default: all)")


def run(args: argparse.Namespace) -> int:
    import torch

    from flambeau.device.enable import enable_device
    from flambeau.eager import usual
    from flambeau.eager.accelerate import accelerate
    from flambeau.targets.cache import DiskCache

    ours = args.device == "flambeau"
    chosen = args.only or (usual.USUAL if ours else usual.REPLACED)
    if unknown := {*chosen} - usual.USUAL.keys():
        raise OptionError(f"unknown part: {', '.join(sorted(unknown))}", hint=f"parts: {', '.join(usual.USUAL)}")
    dtypes = [x for name in args.dtype if isinstance(x := getattr(torch, name, None), torch.dtype)]
    if len(dtypes) < len(args.dtype) or not all(x.is_floating_point for x in dtypes):
        raise OptionError(f"{', '.join(args.dtype)}: expected floating-point dtypes of torch")
    if ours:
        enable_device()
    cache, console = DiskCache(), Console(soft_wrap=True, highlight=False)
    before = cache.stats().entries
    parts = [(name, dtype) for dtype in dtypes for name in chosen]
    device, sizes = torch.device(args.device), usual.SIZES if ours else usual.LARGE
    with nullcontext() if ours else accelerate(device, wait=True), progress("warming", len(parts)) as step:
        for name, dtype in parts:
            try:
                usual.USUAL[name](usual.Place(device, dtype, sizes))
            except (RuntimeError, NotImplementedError) as error:  # the device may not have this dtype
                console.print(f"{name} in {dtype}: {str(error).splitlines()[0]}")
            step()
    entries, size = cache.stats()
    console.print(f"{len(parts)} parts of models on {device}: {entries - before} new entries in {cache.root}")
    console.print(f"size      {size / 2**20:.1f} MiB")
    return 0

"""`flambeau warm`: build the usual classes of eager programs ahead, for the device or for `accelerate`."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from rich.console import Console

from flambeau.errors import OptionError
from flambeau.runtime.progress import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="flambeau", help="flambeau, or cpu or cuda: for flambeau.accelerate there")
    parser.add_argument("--dtype", nargs="+", default=["float32"], help="of the tensors (float32)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="arithmetic, activations, norms, ... (all)")


def run(args: argparse.Namespace) -> int:
    import torch

    from flambeau.device.enable import enable_device
    from flambeau.eager import usual
    from flambeau.eager.accelerate import accelerate
    from flambeau.targets.cache import DiskCache

    ours = args.device == "flambeau"
    chosen = args.only or (usual.USUAL if ours else usual.REPLACED)
    if unknown := {*chosen} - usual.USUAL.keys():
        raise OptionError(f"nothing usual is called {', '.join(sorted(unknown))}", hint=f"{', '.join(usual.USUAL)}")
    dtypes = [x for name in args.dtype if isinstance(x := getattr(torch, name, None), torch.dtype)]
    if len(dtypes) < len(args.dtype) or not all(x.is_floating_point for x in dtypes):
        raise OptionError(f"of {', '.join(args.dtype)}, not all are floating dtypes of torch")
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
            except (RuntimeError, NotImplementedError) as error:  # not every device has every dtype
                console.print(f"{name} in {dtype}: {str(error).splitlines()[0]}")
            step()
    entries, size = cache.stats()
    console.print(f"{len(parts)} parts of models on {device}: {entries - before} new entries in {cache.root}")
    console.print(f"size      {size / 2**20:.1f} MiB")
    return 0

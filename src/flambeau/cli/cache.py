"""`flambeau cache`: where the compiled kernels are, how many, how large; and `--clear`."""

from __future__ import annotations

import argparse

from rich.console import Console

from flambeau.config import config
from flambeau.targets.cache import DiskCache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="delete every entry")


def run(args: argparse.Namespace) -> int:
    console = Console(soft_wrap=True, highlight=False)
    cache = DiskCache()
    if args.clear:
        console.print(f"deleted {cache.clear()} entries from {cache.root}")
        return 0
    entries, size = cache.stats()
    console.print(f"location  {cache.root}")
    console.print(f"entries   {entries}")
    console.print(f"size      {size / 2**20:.1f} MiB of {config.cache_limit_mb} MiB")
    return 0

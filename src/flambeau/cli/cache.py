"""`flambeau cache`: show, clear, export or import the kernels stored on disk."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from flambeau.cli.subject import output
from flambeau.config import config
from flambeau.targets.cache import DiskCache
from flambeau.targets.cache_file import export, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--clear", action="store_true", help="delete every entry")
    which.add_argument("--export", metavar="FILE", type=output, help="write all entries to one file")
    which.add_argument("--import", metavar="FILE", type=Path, dest="load", help="add the entries of an exported file")


def run(args: argparse.Namespace) -> int:
    console = Console(soft_wrap=True, highlight=False)
    cache = DiskCache()
    if args.clear:
        console.print(f"deleted {cache.clear()} entries from {cache.root}")
        return 0
    if args.export is not None:
        console.print(f"wrote {export(cache, args.export)} entries to {args.export}")
        return 0
    if args.load is not None:
        console.print(f"added {load(cache, args.load)} new entries from {args.load} to {cache.root}")
        return 0
    entries, size = cache.stats()
    console.print(f"location  {cache.root}")
    console.print(f"entries   {entries}")
    console.print(f"size      {size / 2**20:.1f} MiB of {config.cache_limit_mb} MiB")
    return 0

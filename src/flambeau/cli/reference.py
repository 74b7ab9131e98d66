"""No command: api.md, options.md and commands.md in docs/reference, from docstrings, tables and parsers.

    python -m flambeau.cli.reference docs/reference
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import flambeau
from flambeau import cli, debug, errors
from flambeau.compare.comparison import Comparison
from flambeau.compile.backend import MODES, OPTIONS
from flambeau.config import Config
from flambeau.package.module import Module
from flambeau.report.program import Explanation

KINDS = {"Compiling": ("mark_layers",), "Eager operators": ("accelerate", "accelerated"),
         "The device": ("enable_device", "fallbacks"), "Packages": ("export", "load")}
WIDTH = "100"  # of the texts of --help
OBJECTS, QUOTED = re.compile(r" at 0x[0-9a-f]+"), re.compile(r"(: |-> )'([^']*)'")  # annotations are texts


def entry(name: str, found: Any) -> Iterator[str]:
    """A function or class: its signature, and what it says of itself."""
    try:
        signature = QUOTED.sub(r"\1\2", OBJECTS.sub("", str(inspect.signature(found))))
    except ValueError:
        signature = "()"
    yield f"### {name.removeprefix('flambeau.')}\n\n```\n{name}{signature}\n```\n\n{inspect.getdoc(found) or ''}\n"


def methods(kind: type) -> Iterator[str]:
    """What a class has for its users, a row for each."""
    yield "| | |\n|---|---|"
    for name, found in vars(kind).items():
        doc = inspect.getdoc(found.fget if isinstance(found, property) else found) if not name.startswith("_") else ""
        if doc and (callable(found) or isinstance(found, property)):
            call = "" if isinstance(found, property) else "()"
            yield f"| `{name}{call}` | {' '.join(doc.split())} |"
    yield ""


def api() -> str:
    out = ["# Python\n\n`import flambeau` is cheap: torch is imported by the doors, when the first of them is used.\n\n"
           '`torch.compile(model, backend="flambeau")` needs no import at all; its [options](options.md) and the '
           "[settings](settings.md) have pages of their own.\n"]
    for title, names in KINDS.items():
        out.append(f"## {title}\n")
        for name in names:
            out += entry(f"flambeau.{name}", getattr(flambeau, name))
        if title == "Packages":
            out += ["### A loaded package\n", *methods(Module)]
    out.append("## Looking inside: flambeau.debug\n")
    for name in sorted(set(debug.__all__) - {"Comparison", "Explanation"}):
        out += entry(f"flambeau.debug.{name}", getattr(debug, name))
    for kind in (Comparison, Explanation):
        out += [f"### {kind.__name__}\n\n{inspect.getdoc(kind)}\n", *methods(kind)]
    out += ["## Settings in a program\n", *entry("flambeau.config.config.override", Config.override), "## Errors\n",
            "| | |\n|---|---|"]
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.Error)]
    out += [f"| `flambeau.errors.{k.__name__}` | {' '.join((inspect.getdoc(k) or '').split())} |" for k in kinds]
    return "\n".join(out) + "\n"


def options() -> str:
    rows = []
    for name, (allowed, doc) in OPTIONS.items():
        values = " or ".join(f"`{v!r}`" for v in allowed) if allowed is not None else "a target's name"
        rows.append(f"| `{name}` | {values} | {doc} |")
    modes = ", ".join(f"`{m!r}`" for m in MODES)
    return f"""# Options

Of `torch.compile(..., backend="flambeau", options={{...}})`; the first value is the default, unless a
[setting](settings.md) says otherwise. A name or value that is not known is an `OptionError` at the first call.

| option | values | what it does |
|---|---|---|
{chr(10).join(rows)}

`mode` may be one of {modes}; `"reduce-overhead"` is the option `graphs`. `dynamic` and `fullgraph` are Dynamo's, and
work as with any backend.
"""


def commands() -> str:
    out = ["# Commands\n\nWhat `--help` says of each. [The command line](cli.md) shows them at work.\n"]
    with patch.dict(os.environ, COLUMNS=WIDTH):
        for name, doc in cli.COMMANDS.items():
            parser = argparse.ArgumentParser(prog=f"flambeau {name}", description=doc)
            importlib.import_module(f"flambeau.cli.{name}").add_arguments(parser)
            out.append(f"## flambeau {name}\n\n```\n{parser.format_help().rstrip()}\n```\n")
    return "\n".join(out)


PAGES = {"api.md": api, "options.md": options, "commands.md": commands}

if __name__ == "__main__":
    for file, page in PAGES.items():
        Path(sys.argv[1], file).write_text(page())

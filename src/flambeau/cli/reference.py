"""Writes docs/reference: api.md, options.md and commands.md, from docstrings, tables and parsers. Not a command.

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
         "The device": ("enable_device", "fallbacks"), "Packages": ("export", "load", "TrainStep")}
LINE = 100  # characters of a signature on one line
WIDTH = "100"  # columns of the help texts
OBJECTS, QUOTED = re.compile(r" at 0x[0-9a-f]+"), re.compile(r"(: |-> )'([^']*)'")  # annotations are strings


def entry(name: str, found: Any) -> Iterator[str]:
    """The entry of a function or class: signature and docstring."""
    try:
        parts = inspect.signature(found)
    except ValueError:
        parts = inspect.Signature()
    signature = str(parts)
    if len(name) + len(signature) > LINE:  # one argument on each line
        arguments = list(parts.parameters.values())
        lines, kinds = [str(p) for p in arguments], [p.kind for p in arguments]
        if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
            lines.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
        signature = "(\n    " + ",\n    ".join(lines) + f"\n){str(parts.replace(parameters=()))[2:]}"
    signature = QUOTED.sub(r"\1\2", OBJECTS.sub("", signature))
    yield f"### {name.removeprefix('flambeau.')}\n\n```\n{name}{signature}\n```\n\n{inspect.getdoc(found) or ''}\n"


def methods(kind: type) -> Iterator[str]:
    """A table of the public methods and properties of a class."""
    yield "| name | description |\n|---|---|"
    for name, found in vars(kind).items():
        doc = inspect.getdoc(found.fget if isinstance(found, property) else found) if not name.startswith("_") else ""
        if doc and (callable(found) or isinstance(found, property)):
            call = "" if isinstance(found, property) else "()"
            yield f"| `{name}{call}` | {' '.join(doc.split())} |"
    yield ""


def api() -> str:
    out = ["# Python\n\n`import flambeau` is fast: torch is imported when a function that needs it is first used.\n\n"
           '`torch.compile(model, backend="flambeau")` needs no import at all. See also [options](options.md) and '
           "[settings](settings.md).\n"]
    for title, names in KINDS.items():
        out.append(f"## {title}\n")
        for name in names:
            out += entry(f"flambeau.{name}", getattr(flambeau, name))
        if title == "Packages":
            out += ["### A loaded package\n", *methods(Module)]
    out.append("## Debugging: flambeau.debug\n")
    for name in sorted(set(debug.__all__) - {"Comparison", "Explanation"}):
        out += entry(f"flambeau.debug.{name}", getattr(debug, name))
    for kind in (Comparison, Explanation):
        out += [f"### {kind.__name__}\n\n{inspect.getdoc(kind)}\n", *methods(kind)]
    out += ["## Settings in a program\n", *entry("flambeau.config.config.override", Config.override), "## Errors\n",
            "| error | when |\n|---|---|"]
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.Error)]
    out += [f"| `flambeau.errors.{k.__name__}` | {' '.join((inspect.getdoc(k) or '').split())} |" for k in kinds]
    return "\n".join(out) + "\n"


def options() -> str:
    rows = []
    for name, (allowed, doc) in OPTIONS.items():
        values = allowed if isinstance(allowed, str) else " or ".join(f"`{v!r}`" for v in allowed)
        rows.append(f"| `{name}` | {values} | {doc} |")
    modes = ", ".join(f"`{m!r}`" for m in MODES)
    return f"""# Options

These are the options of `torch.compile(..., backend="flambeau", options={{...}})`. The first value is the default,
unless a [setting](settings.md) changes it. An unknown option or an invalid value raises an `OptionError` at the first
call.

| option | values | what it does |
|---|---|---|
{chr(10).join(rows)}

`mode` can be {modes}. `"reduce-overhead"` is the same as the option `graphs`. `dynamic` and `fullgraph` work as with
any other backend.
"""


def commands() -> str:
    out = ["# Commands\n\nThe output of `--help` for each command. [The command line](cli.md) explains them.\n"]
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

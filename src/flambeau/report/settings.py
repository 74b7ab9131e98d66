"""Writes docs/reference/settings.md: all settings, what Flambeau trusts, and what it changes in torch.

python -m flambeau.report.settings > docs/reference/settings.md
"""

from __future__ import annotations

from flambeau.config import SETTINGS, Setting
from flambeau.torch_compat.patches import PATCHES, Patch

HEAD = """# Settings

Each setting is an environment variable, which is read once, at its first use. In a program, use
`with flambeau.config.config.override(name=value):` to change a setting for the current thread.
`flambeau doctor --settings` prints the current values.

| setting | variable | default | what it does |
|---|---|---|---|
"""

# Defaults that depend on the machine are described in words, so that the page is the same on every machine.
DESCRIBED = {
    "cache_dir": "`$XDG_CACHE_HOME/flambeau`, else `~/.cache/flambeau`",
    "compile_jobs": "number of CPUs",
}


TRUST = """
## What is trusted

Cached kernels and graphs are code, which runs with your rights. A kernel is a shared library or a GPU binary. The
entry of a graph contains the Python source of its run function, the guards on its sizes, and the names of the
operators that it calls. So Flambeau reads an entry only if nobody else can have written it. It checks each time that

- the file and the cache folder belong to you or to root, and that group and others cannot write to them;
- the same holds for every folder above, by its real path. A folder with the sticky bit, such as `/tmp`, is allowed
  above a folder that belongs to you;
- the last line of an entry is the sha256 of its name and content. A damaged entry is deleted and built again.

If a folder fails these checks, it is neither read nor written. A warning says what is wrong, and the process uses a
temporary folder instead. To fix it, run `chmod go-w` or `chown` on the folder in the warning, or set
`FLAMBEAU_CACHE_DIR`.

The entry of a graph is plain data (`runtime/plain_data.py`). Nothing is unpickled: only objects of a fixed list of
types are created from it (`compile/cache_entry.py`), each with exactly the fields of its type. If an entry does not
fit, the graph is compiled again. A graph that contains anything else is not cached; `FLAMBEAU_LOG=info` shows the
reason.

Flambeau also trusts the C++ compiler that `FLAMBEAU_CXX` names, the drivers, Triton, and the caches that these have of
their own (PoCL: `POCL_CACHE_DIR`), and packages that add a target.
"""

PATCHED = """
## What is changed in torch

Where torch has no hook, Flambeau replaces functions of torch at run time. This is the complete list
(`torch_compat/patches.py`). Calls that have nothing to do with Flambeau behave as before, and each change can be
undone. Most changes last only while Flambeau compiles. The others, marked "stays", are visible to all code in the
process. `FLAMBEAU_PATCHES=0` leaves them out, and `flambeau.torch_compat.patches.undo_lasting()` undoes them; the
column "why" says what is lost.

| name | what is changed | when | why | torch |
|---|---|---|---|---|
"""


def page() -> str:
    settings = "".join(f"| `{s.name}` | `{s.env}` | {_default(s)} | {s.doc} |\n" for s in SETTINGS)
    return HEAD + settings + TRUST + PATCHED + "".join(map(_row, PATCHES))


def _row(p: Patch) -> str:
    name = f"`{p.name}`, stays" if p.lasting else f"`{p.name}`"
    return f"| {name} | {p.what} | {p.scope} | {p.reason} | {p.versions} |\n"


def _default(setting: Setting) -> str:
    if setting.default is None:
        return "unset"
    return DESCRIBED.get(setting.name) or f"`{setting.default}`"


if __name__ == "__main__":
    print(page(), end="")

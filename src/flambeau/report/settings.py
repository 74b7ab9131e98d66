"""The page docs/reference/settings.md: settings and changes to torch, from the lists in the code; what is trusted.

python -m flambeau.report.settings > docs/reference/settings.md
"""

from __future__ import annotations

from flambeau.config import SETTINGS, Setting
from flambeau.torch_compat.patches import PATCHES, Patch

HEAD = """# Settings

Each setting is an environment variable, read once at its first use. In a program,
`flambeau.config.config.override(name=value)` changes it for one thread inside a `with` block.
`flambeau doctor --settings` prints the values in force.

| setting | variable | default | what it does |
|---|---|---|---|
"""

# Defaults that depend on the machine are described, so that the page is the same wherever it is written.
DESCRIBED = {
    "cache_dir": "`$XDG_CACHE_HOME/flambeau`, else `~/.cache/flambeau`",
    "compile_jobs": "number of CPUs",
}


TRUST = """
## What is trusted

Compiled kernels and graphs are code, and run with the rights of the user who loads them: shared libraries, binaries for
GPUs, and, in the entry of a graph, the Python source of its run function, the guards on its sizes and the names of the
operators that it calls. So an entry is read only where nobody else can have written it, which is checked each time:

- the file and the folder of the cache belong to this user or to root, and neither group nor others can write to them;
- the same holds for every folder above it, by its real path. A folder with the sticky bit, such as `/tmp`, may stand
  above one that belongs to this user;
- the last line of an entry is the sha256 of its name and its content: what is damaged is deleted and built again.

A folder that does not meet this is neither read nor written. One warning says what is wrong with it, and the process
keeps its kernels in a temporary folder of its own. `chmod go-w` or `chown` of the folder that is named, or another
`FLAMBEAU_CACHE_DIR`, is the way out.

The entry of a graph is plain data (`runtime/plain_data.py`): nothing is unpickled, and only the types of a closed
table are made from it (`compile/cache_entry.py`), each with the fields that it has. What does not fit is compiled
again. A graph that has anything else in it is not cached, with the reason at `FLAMBEAU_LOG=info`.

Also trusted are the C++ compiler that `FLAMBEAU_CXX` names, the drivers and Triton with the caches of their own that
they may have (PoCL: `POCL_CACHE_DIR`), and packages that add a target.
"""

PATCHED = """
## What is changed in torch

Some of what Flambeau does has no hook in torch. All of it is listed here (`torch_compat/patches.py`). Calls that are
not Flambeau's pass through a change as they are, and each has an undo. Most last as long as a compilation by this
backend. The others stay, and everybody in the process meets them: `FLAMBEAU_PATCHES=0` leaves these out, at the
price that their reasons name, and `flambeau.torch_compat.patches.undo_lasting()` takes them back.

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

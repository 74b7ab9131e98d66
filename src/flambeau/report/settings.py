"""The table of settings in docs/settings.md, written from the one list in `flambeau.config`.

python -m flambeau.report.settings > docs/settings.md
"""

from __future__ import annotations

from flambeau.config import SETTINGS, Setting

HEAD = """# Settings

Each setting is an environment variable, read once at its first use. In a program,
`flambeau.config.config.override(name=value)` changes it for one thread inside a `with` block.
`flambeau doctor` prints the values in force.

| setting | variable | default | what it does |
|---|---|---|---|
"""

# Defaults that depend on the machine are described, so that the page is the same wherever it is written.
DESCRIBED = {
    "cache_dir": "`$XDG_CACHE_HOME/flambeau`, else `~/.cache/flambeau`",
    "compile_jobs": "number of CPUs",
}


def page() -> str:
    return HEAD + "".join(f"| `{s.name}` | `{s.env}` | {_default(s)} | {s.doc} |\n" for s in SETTINGS)


def _default(setting: Setting) -> str:
    if setting.default is None:
        return "unset"
    return DESCRIBED.get(setting.name) or f"`{setting.default}`"


if __name__ == "__main__":
    print(page(), end="")

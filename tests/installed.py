"""Tests an installation in an environment that contains nothing else: `make test-install` runs it.

    python tests/installed.py build/dist/flambeau-0.1.0-py3-none-any.whl build/install
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SMOKE = """
import importlib.metadata, torch, flambeau
assert "site-packages" in flambeau.__file__, flambeau.__file__
assert importlib.metadata.version("flambeau") == flambeau.__version__
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
x = torch.randn(4, 8)
compiled = torch.compile(model, backend="flambeau")
torch.testing.assert_close(compiled(x), model(x))
compiled(x).sum().backward()
flambeau.export(model.eval(), (x,), "model.flam")
torch.testing.assert_close(torch.from_numpy(flambeau.load("model.flam").forward(x.numpy())), model(x).detach(),
                           rtol=1e-4, atol=1e-5)
"""


def main(archive: str, where: str) -> None:
    folder = Path(where).absolute()  # commands run in it
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, archive], check=True)  # with its dependencies
    subprocess.run([*install, "--force-reinstall", "--no-deps", archive], check=True)  # this build, not an earlier one
    for command in ([folder / "bin" / "flambeau", "--version"], [folder / "bin" / "flambeau", "doctor"],
                    [python, "-c", SMOKE]):
        subprocess.run(command, cwd=folder, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The transcripts of docs/tasks.md, in a new environment: the commands of each task print what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tasks.md").read_text()
TASKS = {title: text for title, _, text in (part.partition("\n") for part in PAGE.split("\n## ")[1:])}
STATUS = {"flambeau compare block.py:net": 3}  # values differ
MOST = 5
EXTRAS = ("setuptools", "expecttest")  # to build packages; required by the page
pytestmark = pytest.mark.slow


def transcript(task: str) -> list[tuple[str, str]]:
    """The commands of a transcript, each with its expected output."""
    lines = "".join(re.findall(r"```console\n(.*?)```", TASKS[task], re.DOTALL))
    parts = (part.partition("\n") for part in re.split(r"^\$ ", lines, flags=re.MULTILINE)[1:])
    return [(command, said) for command, _, said in parts]


def prints(said: str) -> str:
    """Expected output as a pattern: a line of three dots matches any lines, three dots inside a line any part of it."""
    lines = ["(?:.*\n)*" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + " *\n"
             for line in said.splitlines()]
    return "".join(lines)


def needed() -> list[Distribution]:
    """The packages that `pip install '.[opencl]'` and the page's commands install, from the tests' environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [Requirement(r) for r in (*project["project"]["dependencies"], *EXTRAS,
                                       *project["project"]["optional-dependencies"]["opencl"])]
    found: dict[str, Distribution] = {}
    while wanted:
        r = wanted.pop()
        try:
            there = distribution(r.name)
        except PackageNotFoundError:
            continue
        if r.name not in found or r.extras:
            found[r.name] = there
            more = (Requirement(x) for x in there.requires or ())
            wanted += [x for x in more if x.marker is None or any(x.marker.evaluate({"extra": e})
                                                                  for e in (r.extras or {""}))]
    return list(found.values())


class Place:
    """A checkout and a new environment next to it, with torch and the dependencies of `pip install`, nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src", "examples", "pyproject.toml",
                   "README.md", "LICENSE"]
        files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
        for file in filter(lambda f: (ROOT / f).exists(), files):
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, self.folder / file)
        for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
            (self.folder / name).write_text(text)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "new")], check=True)
        drop = ["pip", "uninstall", "--quiet", "--yes", "setuptools"]  # an old version, which hides ours
        subprocess.run([str(folder / "new" / "bin" / "python"), "-m", *drop], check=True)
        own = sysconfig.get_path("purelib", vars={"base": str(folder / "new")})
        for found in needed():
            for file in {f.parts[0] for f in found.files or () if f.parts[0] != ".."}:
                if not Path(own, file).exists():
                    Path(own, file).symlink_to(Path(str(found.locate_file(file))))
        aside = ("FLAMBEAU_", "TORCH_", "TRITON_", "PIP_", "PYTHONPATH", "VIRTUAL_ENV")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(aside)}
        self.environ = kept | {
            "PATH": f"{folder / 'new' / 'bin'}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "160",
            "FLAMBEAU_CACHE_DIR": os.environ["FLAMBEAU_CACHE_DIR"], "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1"}  # 0 means: without isolation

    def do(self, task: str) -> None:
        commands = transcript(task)
        assert 0 < len(commands) <= MOST
        for command, said in commands:
            done = subprocess.run(["bash", "-c", command], cwd=self.folder, env=self.environ, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, timeout=600, check=False)
            assert done.returncode == STATUS.get(command, 0), f"$ {command}\n{done.stdout}"
            assert command.startswith("pip ") or re.fullmatch(prints(said), done.stdout), f"$ {command}\n{done.stdout}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("tasks"))
    made.do("Install")
    return made


def test_there_are_ten() -> None:
    assert len(TASKS) == 10


@pytest.mark.parametrize("task", [task for task in TASKS if task != "Install"])  # `place` does the installation
def test_task(task: str, place: Place) -> None:
    place.do(task)

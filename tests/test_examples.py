"""The programs of examples/ run unchanged, at their small size. The target plug-in and the server are tested elsewhere
(test_new_target.py, package/test_module.py)."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import warm

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTED = {"train_lm.py": "0 of 43,136 parameters differ", "resnet.py": "loss", "dlrm.py": "loss",
           "decode.py": "1 graph(s) compiled", "own_operator.py": "became 1 kernel(s)"}


def check(script: str, words: str, folder: Path) -> None:
    status, printed = warm.run(["python", str(EXAMPLES / script)], folder)
    assert status == 0 and words in printed, printed


@pytest.mark.parametrize("script", PRINTED)
def test_program(script: str, tmp_path: Path) -> None:
    check(script, PRINTED[script], tmp_path)


@pytest.mark.slow  # its gates are native code, which is compiled first
def test_accelerate(tmp_path: Path) -> None:
    check("accelerate.py", "cumsum", tmp_path)


@pytest.mark.slow
def test_two_processes_on_the_device() -> None:
    pytest.importorskip("pyopencl", reason="PyOpenCL is not installed: pip install 'flambeau[opencl]'")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(EXAMPLES / "ddp.py")], env=os.environ | {"OMP_NUM_THREADS": "1"},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "the same weights in each" in done.stdout, done.stdout


def shown(cell: str, names: dict[str, Any]) -> Any:
    """The output of a notebook cell: the value of its last line, if that is an expression."""
    tree = ast.parse(cell)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


def test_notebook() -> None:
    """Its cells, and the pages that `explain` and `compare` are in Jupyter."""
    cells = json.loads((EXAMPLES / "look_inside.ipynb").read_text())["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    left = [shown("".join(c["source"]), names) for c in cells if c["cell_type"] == "code"]
    pages = [x._repr_html_() for x in left if hasattr(x, "_repr_html_")]
    assert len(pages) == 2 and all("<table" in page for page in pages)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nbclient") is None or find_spec("ipykernel") is None,
                    reason="Jupyter is not installed: pip install 'flambeau[site]'")
def test_notebook_in_jupyter() -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(EXAMPLES / "look_inside.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    kinds = [set(o.get("data", {})) for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert sum("text/html" in k for k in kinds) == 2


def test_the_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    names = {p.name for p in EXAMPLES.iterdir() if p.name not in ("README.md", "__pycache__")}
    assert len(names) == 10 and all(f"({name})" in table for name in names)

"""Runs programs in fresh processes without waiting for torch: forks of a process that has only imported it.

    status, output = warm.run(["python", "train.py", "--steps", "3"], folder)
    status, output = warm.run(["flambeau", "doctor"], folder, FLAMBEAU_JOBS="1")

A program starts as with `python train.py`, except that torch is already imported; Flambeau is not. Environment
variables that torch reads at import have the tests' values.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

LIMIT = 600  # seconds for one program
PLAIN = {key: value for key, value in os.environ.items() if key != "TORCH_DEVICE_BACKEND_AUTOLOAD"}


@cache
def server(process: int) -> subprocess.Popen[str]:
    made = subprocess.Popen([sys.executable, __file__], env=PLAIN, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True)
    atexit.register(made.kill)
    return made


def run(command: Sequence[str], folder: Path, **environ: str) -> tuple[int, str]:
    """The exit status of `python SCRIPT ...` or `flambeau ...`, and what it printed."""
    made = server(os.getpid())
    assert made.stdin is not None and made.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out:
        request = {"command": list(command), "folder": str(folder), "environ": environ, "out": out.name}
        print(json.dumps(request), file=made.stdin, flush=True)
        status = os.waitstatus_to_exitcode(json.loads(made.stdout.readline()))
        return status, out.read()


def serve() -> dict[str, Any]:
    """Forks for each request, and returns in the fork with its task."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return json.loads(line)
        print(os.waitpid(child, 0)[1], file=answers, flush=True)
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    program, *arguments = request["command"]
    signal.alarm(LIMIT)
    os.chdir(request["folder"])
    os.environ.update(request["environ"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = os.open(request["out"], os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if program == "flambeau":
        sys.argv = ["flambeau", *arguments]
        from flambeau.cli import main

        sys.exit(main())
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    import torch._dynamo
    import torch._functorch.aot_autograd
    import torch._inductor.scheduler  # noqa: F401  what Dynamo and AOTAutograd import at their first graph

    become(serve())

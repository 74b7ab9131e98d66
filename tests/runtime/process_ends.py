"""Programs that end while kernels are compiled: at a random moment, and in every way in which a process ends.

    python tests/runtime/process_ends.py 100        # as many starts and ends; exits with 1 if something was left

What is asked of each: the exit status that the end asks for, nothing on stderr, no process left behind, no temporary
folder (one that was killed leaves its folder to the next).
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

MARK = "FLAMBEAU_TEST_MARK"  # in the environment of a program, and so in that of all that it starts

HEAD = """
import os, signal, sys, threading, time
import torch
import flambeau
torch.set_num_threads(1)
WHAT, END, SECONDS, NUMBER = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])

class Ended(Exception):
    pass

asked = []

def end(*_):
    asked.append(True)
    if len(asked) == 1 and (END in ("fork", "late") or WHAT == "device" and not END.startswith(("SIG", "os"))):
        return  # between two calls: torch may be half imported, and native code drops exceptions
    if END == "exception":
        raise Ended
    if END == "SIGTERM":
        signal.raise_signal(signal.SIGTERM)
    if END == "SIGKILL":
        signal.raise_signal(signal.SIGKILL)
    if END == "os._exit":
        os._exit(3)
    if END == "exit in a thread":
        thread = threading.Thread(target=sys.exit)
        thread.start()
        thread.join()
    if END == "fork":
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            torch.compile(lambda x: x.cos() * NUMBER + 1, backend="flambeau")(torch.ones(5))
    sys.exit(0)

def late():
    y = torch.compile(lambda x: x.cos() * NUMBER, backend="flambeau")(torch.ones(5, requires_grad=True))
    y.sum().backward()

if END == "late":
    import atexit
    from flambeau.targets import background
    # Torch cannot be imported so late; it is where a graph is compiled, and this number makes a new one.
    torch.compile(lambda x: x + NUMBER, backend="flambeau")(torch.ones(5))
    atexit.unregister(background.close)
    atexit.register(late)
    atexit.register(background.close)
"""
TAIL = """
signal.signal(signal.SIGALRM, end)
signal.setitimer(signal.ITIMER_REAL, SECONDS)
work()
while not asked:
    time.sleep(0.05)
end()
"""

WORK = {
    # A forward is waited for, a backward is built in the background.
    "compile": """
def work():
    for k in range(3):
        f = lambda x: ((x * NUMBER).softmax(-1).cumsum(0) + x.sin() * (NUMBER + k)).logsumexp(1)
        torch.compile(f, backend="flambeau")(torch.randn(16, 8 + k, requires_grad=True))
        if asked:
            return
""",
    "accelerate": """
flambeau.accelerate("cpu")
def work():
    for n in range(400, 430):
        x = torch.randn(97, int(NUMBER * 100) + n)
        for _ in range(8):
            x.cumsum(0), x.softmax(1), torch.nn.functional.gelu(x), x.var(1)
        if asked:
            return
""",
    "device": """
flambeau.enable_device()
def work():
    for n in range(100):
        x = torch.randn(33, int(NUMBER * 100) + n, device="flambeau")
        for f in (lambda: x.softmax(1), lambda: x.cumsum(0), lambda: x.sin() * NUMBER, lambda: x.sum().item()):
            f()
            if asked:
                return
""",
}

STATUS = {"return": 0, "exception": 1, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL, "os._exit": 3,
          "exit in a thread": 0, "fork": 0, "late": 0}
KILLED = ("SIGTERM", "SIGKILL", "os._exit")  # no exit handler runs
LIMIT = 240  # seconds


def start(what: str, how: str, seconds: float, cache: Path) -> tuple[subprocess.Popen[str], str]:
    mark = uuid.uuid4().hex
    env = {**os.environ, MARK: mark, "FLAMBEAU_CACHE_DIR": str(cache), "FLAMBEAU_VERIFY": "0", "FLAMBEAU_JOBS": "2"}
    command = [sys.executable, "-W", "ignore", "-c", HEAD + WORK[what] + TAIL, what, how, str(seconds),
               str(random.random() + 1)]
    # Files, not pipes: a process that was left behind would keep a pipe open.
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=open(cache / f"{mark}.txt", "w"),
                            text=True), mark


def problems(what: str, how: str, seconds: float, cache: Path) -> list[str]:
    """What was wrong with one start and end."""
    before = set(cache.glob("tmp/*"))  # of one that was killed, if nothing has been started since
    process, mark = start(what, how, seconds, cache)
    try:
        status = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return ["it did not end"]
    # In a new cache, native parts are announced before they are compiled.
    said = re.sub(r"^compiling .*: once, some \d+ seconds\n", "", (cache / f"{mark}.txt").read_text(), flags=re.M)
    found = [] if status == STATUS[how] else [f"status {status}: {said}"]
    if how == "exception":
        said = said if "Ended" not in said or "terminate" in said else ""
    if said:
        found.append(f"it said {said}")
    if left := left_over(mark):
        found.append(f"it left {left}")
    if how not in KILLED and (folders := set(cache.glob("tmp/*")) - before):
        found.append(f"it left {folders}")
    return found


def left_over(mark: str) -> list[str]:
    """Processes with that mark, if they stay for longer than a signal needs."""
    until = time.monotonic() + 5
    while (found := marked(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def marked(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def main(count: int, cache: Path) -> int:
    bad = 0
    for k in range(count):
        what, how = random.choice(list(WORK)), random.choice(list(STATUS))
        seconds = random.uniform(0.02, 4)
        if found := problems(what, how, seconds, cache):
            bad += 1
            print(k, what, how, f"{seconds:.2f}", *found, sep="\n  ", flush=True)
    print(f"{bad} of {count}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(os.environ["FLAMBEAU_CACHE_DIR"])))

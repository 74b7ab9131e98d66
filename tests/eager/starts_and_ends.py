"""Programs that accelerate, call in a loop and end: without a crash, and with the same bits.

    python tests/eager/starts_and_ends.py 100 2      # so many of them, two at a time
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor


def starts(processes: int, together: int) -> str:
    """The bits that all of them had."""
    def one(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300)

    with ThreadPoolExecutor(together) as pool:
        done = list(pool.map(one, range(processes)))
    for process in done:
        assert process.returncode == 0 and "terminate" not in process.stderr, process.stderr
    bits = {process.stdout for process in done}
    assert len(bits) == 1, bits
    return bits.pop()


def program() -> None:
    import torch

    import flambeau

    torch.manual_seed(0)
    x, y = torch.randn(211, 307), torch.randn(64, 1024)
    seen = hashlib.sha256()
    flambeau.accelerate("cpu")

    def call(x: torch.Tensor) -> None:
        for t in (x.softmax(1), x.cumsum(0), torch.nn.functional.gelu(x)):
            seen.update(t.numpy().tobytes())

    for _ in range(3):
        call(x)
        call(y)
    decided = flambeau.accelerated()
    for _ in range(62):  # a shape is hot, and its own programs are on their way when the process ends
        call(y)
    undecided = [str(b) for a, b in zip(sorted(decided, key=str), sorted(flambeau.accelerated(), key=str), strict=True)
                 if a.kernels != b.kernels]
    print(seen.hexdigest(), undecided)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(starts(*map(int, sys.argv[1:])))
    else:
        program()

"""Faster eager operators, in three lines and without any other change to the program.

    python accelerate.py
"""

import torch

import flambeau

flambeau.accelerate("cuda" if torch.cuda.is_available() else "cpu")

x = torch.randn(256, 512, requires_grad=True)
for _ in range(3):  # the second call compiles a kernel, which later calls use
    torch.cumsum(x, 0).softmax(1).square().sum().backward()

used = [row for row in flambeau.accelerated() if row.ours]
print(*used, sep="\n")
assert any("cumsum" in row.operator for row in used)

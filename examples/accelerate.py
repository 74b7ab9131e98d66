"""Three lines in front of an eager program: its slow operators run on our kernels, and nothing else changes.

    python accelerate.py
"""

import torch

import flambeau

flambeau.accelerate("cuda" if torch.cuda.is_available() else "cpu")

x = torch.randn(256, 512, requires_grad=True)
for _ in range(3):  # a class of calls is built at its second call, and serves from then on
    torch.cumsum(x, 0).softmax(1).square().sum().backward()

used = [row for row in flambeau.accelerated() if row.ours]
print(*used, sep="\n")
assert any("cumsum" in row.operator for row in used)

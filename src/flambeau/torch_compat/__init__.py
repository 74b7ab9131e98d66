"""All private names of torch that Flambeau uses, and all changes that it makes to torch.

    from flambeau.torch_compat.fake import FakeTensor
    from flambeau.torch_compat.patches import PATCHES      # what is changed in torch, why, and how to undo it

All other modules use torch's public names and these only: tests/test_torch_compat.py checks their syntax trees. Each
file covers one part of torch, and gives its private names public ones, with the reason why no public name of torch will
do. Unless stated otherwise, a name exists in every supported release (2.11 to 2.15). Importing a file only loads the
part of torch that it covers: `dynamo`, `aot`, `inductor` and `testing` are expensive.

Registered names of operators (`torch.ops.aten._softmax`) do not count as private: ATen's operator table is what
Flambeau compiles.
"""

from __future__ import annotations

import torch

# The module that a first compilation imports, by backend: benchmarks of start-up import it before starting the clock.
COMPILERS = {"dynamo": "torch._dynamo", "inductor": "torch._inductor.compile_fx"}
TORCH: tuple[int, ...] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # (2, 13)

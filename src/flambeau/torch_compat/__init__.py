"""All private names of torch that Flambeau uses, and all changes that it makes to torch.

    from flambeau.torch_compat.fake import FakeTensor
    from flambeau.torch_compat.patches import PATCHES      # what is changed in torch, why, and how to undo it

All other modules use torch's public names and these: tests/test_torch_compat.py reads their syntax trees. A file is
one part of torch. A name is here under a public one, with the reason why a public name of torch does not do. Unless it
says otherwise, it is there in every supported release (2.11 to 2.15). Importing a file loads the part of torch that
it is about and no other: `dynamo`, `aot`, `inductor` and `testing` are expensive, and for those who need them.

Operators by their registered names (`torch.ops.aten._softmax`) are no private names: ATen's table of operators is what
Flambeau compiles.
"""

from __future__ import annotations

import torch

# What a first compilation imports, by backend: benchmarks of start-up time import it before their clock starts.
COMPILERS = {"dynamo": "torch._dynamo", "inductor": "torch._inductor.compile_fx"}
TORCH: tuple[int, ...] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # (2, 13)

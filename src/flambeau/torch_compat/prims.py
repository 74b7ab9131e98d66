"""torch.ops.prims: what torch's own decompositions end in. Importing their files defines them."""

from __future__ import annotations

import torch
import torch._prims

prims = torch.ops.prims


def has_fma() -> bool:
    """Define prims.fma, with Inductor's operators. Not every release has it."""
    import torch._inductor.inductor_prims

    return hasattr(torch.ops.prims, "fma")

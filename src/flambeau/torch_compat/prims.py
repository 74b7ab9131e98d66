"""torch.ops.prims, which torch's decompositions use. Importing their modules defines them."""

from __future__ import annotations

import torch
import torch._prims

prims = torch.ops.prims


def has_fma() -> bool:
    """Define prims.fma, with Inductor's operators. Not every release has it."""
    import torch._inductor.inductor_prims

    return hasattr(torch.ops.prims, "fma")

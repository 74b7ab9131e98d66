"""torch's tables of decompositions, and the parts of them that we use."""

from __future__ import annotations

from torch._decomp import core_aten_decompositions, decomposition_table
from torch._decomp.decompositions import upsample_compute_output_size
from torch._prims_common import suggest_memory_format
from torch._refs.linalg import vector_norm

__all__ = ["core_aten_decompositions", "decomposition_table", "suggest_memory_format", "upsample_compute_output_size",
           "vector_norm"]

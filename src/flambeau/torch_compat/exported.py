"""Decomposes exported programs as AOTAutograd decomposes graphs under torch.compile, with gradients on request.

`ExportedProgram.run_decompositions` keeps every composite operator whole that its table does not name, so exact
numerics would see `linear` and `layer_norm`. And torch has no public way to export gradients: torch.export cannot trace
`torch.autograd.grad`, and the only entry in `torch.export.experimental` (`_export_forward_backward`) takes no table.
The function that all of these call does what is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.export import ExportedProgram
from torch.export.exported_program import _decompose_exported_program, _split_decomp_table_to_cia_and_python_decomp

__all__ = ["decomposed"]


def decomposed(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]], gradients: bool) -> ExportedProgram:
    """Decompose a program by the table. `gradients`: its first result is a loss, and the gradients of all tensors that
    require them are appended to its results."""
    _, plain = _split_decomp_table_to_cia_and_python_decomp(dict(table))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)  # torch copies its own classes
        found: ExportedProgram = _decompose_exported_program(program, cia_to_decomp={}, python_decomp_table=plain,
                                                             joint_loss_index=0 if gradients else None,
                                                             decompose_custom_triton_ops=True)
    return found

"""Exported programs taken apart as AOTAutograd takes graphs apart under torch.compile, with gradients where asked.

`ExportedProgram.run_decompositions` keeps every composite operator whole that its table does not name, so that exact
numerics would meet `linear` and `layer_norm`. And torch has no public name for an export with gradients:
`torch.autograd.grad` cannot be traced by torch.export, and the one entry of `torch.export.experimental`
(`_export_forward_backward`) takes no table. The function below all of them does what is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.export import ExportedProgram
from torch.export.exported_program import _decompose_exported_program, _split_decomp_table_to_cia_and_python_decomp

__all__ = ["decomposed"]


def decomposed(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]], gradients: bool) -> ExportedProgram:
    """The program by the table. `gradients`: its first result is a loss, and the gradients of all that requires them
    stand behind its results."""
    _, plain = _split_decomp_table_to_cia_and_python_decomp(dict(table))
    found: ExportedProgram = _decompose_exported_program(program, cia_to_decomp={}, python_decomp_table=plain,
                                                         joint_loss_index=0 if gradients else None,
                                                         decompose_custom_triton_ops=True)
    return found

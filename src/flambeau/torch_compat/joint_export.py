"""torch.export with gradients: forward, loss and backward in one graph.

torch has no public name for it: `torch.autograd.grad` cannot be traced by torch.export, and the one entry of
`torch.export.experimental` (`_export_forward_backward`) takes no table of decompositions. What it calls does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.export import ExportedProgram
from torch.export.exported_program import _decompose_exported_program, _split_decomp_table_to_cia_and_python_decomp

__all__ = ["with_gradients"]


def with_gradients(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]]) -> ExportedProgram:
    """The program whose first result is a loss, decomposed, with the gradients of all that requires them behind its
    results. Composite operators are taken apart by torch: kept whole they would have no gradient here."""
    _, plain = _split_decomp_table_to_cia_and_python_decomp(dict(table))
    found: ExportedProgram = _decompose_exported_program(program, cia_to_decomp={}, python_decomp_table=plain,
                                                         joint_loss_index=0, decompose_custom_triton_ops=True)
    return found

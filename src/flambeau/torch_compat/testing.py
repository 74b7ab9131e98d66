"""PyTorch's own table of operators with sample inputs (OpInfo). torch has no public name for it."""

from __future__ import annotations

from collections.abc import Iterator

from torch.testing._comparison import default_tolerances

try:
    from torch.testing._internal import common_methods_invocations as tables
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"PyTorch's operator tests need the package {error.name}: pip install {error.name}",
                              name=error.name) from None
from torch.testing._internal.common_methods_invocations import BinaryUfuncInfo, UnaryUfuncInfo, op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = ["BinaryUfuncInfo", "OpInfo", "SampleInput", "UnaryUfuncInfo", "default_tolerances", "op_db",
           "operator_tables"]


def operator_tables() -> Iterator[OpInfo]:
    """Every operator of the tables: operators on tensors, and operators on lists of tensors."""
    lists = [n for n in dir(tables) if n == "op_db" or n.startswith("foreach_") and n.endswith("_op_db")]
    return (info for name in lists for info in getattr(tables, name))

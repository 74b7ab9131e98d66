"""Parts of torch.fx without a public name: graphs and symbolic sizes."""

from __future__ import annotations

from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.node import _get_qualified_name as qualified_name
from torch.utils._sympy.printers import PythonPrinter

__all__ = ["PURE_MODULES", "LazyGraphModule", "PythonPrinter", "qualified_name"]

# The `__module__` of functions that Dynamo writes into graphs, and that affect nothing but their arguments.
PURE_MODULES = ("torch", "torch.nn.functional", "torch._C._nn", "torch._C._linalg", "torch._C._special",
                "torch._C._fft", "torch.functional", "_operator", "math", "torch._tensor")

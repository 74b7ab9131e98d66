"""The numerics policy: where a fused kernel may keep more precision than eager, and what it may contract."""

from __future__ import annotations

import torch

from flambeau.ir.dtypes import is_float
from flambeau.ir.expr import Expr, rewrite
from flambeau.ir.nodes import Graph

from .inline import map_exprs

_SMALL = (torch.float16, torch.bfloat16)


def widen(e: Expr) -> Expr:
    """A float32 value rounded to half precision and widened again stays as it was."""
    if e.op == "cast" and e.dtype is torch.float32 and e.args[0].op == "cast" and e.args[0].dtype in _SMALL:
        inner = e.args[0].args[0]
        if is_float(inner.dtype) and inner.dtype is torch.float32:
            return inner
    return e


def apply(graph: Graph, numerics: str) -> None:
    """fast: no rounding between fused operators. eager: every operator rounds where eager rounds."""
    if numerics == "fast":
        memo: dict[Expr, Expr] = {}
        graph.nodes = [map_exprs(n, lambda e: rewrite(e, widen, None, memo)) for n in graph.nodes]

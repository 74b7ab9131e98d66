"""The results of a traced function: a flat sequence of tensors, and a structure that describes their nesting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from flambeau.torch_compat.fake import detect_fake_mode
from flambeau.torch_compat.pytree import tree_unflatten

aten = torch.ops.aten
NUMBER = "flambeau_number"  # key in a node's meta: the model returns this tensor as a Python number


def numbers_as_tensors(gm: fx.GraphModule) -> None:
    """Converts results that are symbolic numbers, such as sizes, to scalar tensors."""
    out = gm.graph.output_node()
    results = list(out.args[0])  # type: ignore[arg-type]
    for k, r in enumerate(results):
        val = r.meta.get("val") if isinstance(r, fx.Node) else None
        if isinstance(val, torch.SymInt | torch.SymFloat):
            dtype = torch.int64 if isinstance(val, torch.SymInt) else torch.float64
            with gm.graph.inserting_before(out):
                results[k] = gm.graph.call_function(aten.scalar_tensor.default, (r,), {"dtype": dtype})
            mode = detect_fake_mode([n.meta["val"] for n in gm.graph.nodes if "val" in n.meta])
            assert mode is not None, "a traced graph has fake tensors"
            with mode:
                results[k].meta = {"val": torch.empty((), dtype=dtype), NUMBER: True}
    out.args = (tuple(results),)


class Leaf(dict[str, Any]):
    """A leaf of the structure of results: {"output": position of a tensor}, {"number": position of a tensor that the
    model returns as a number}, or {"value": a constant}."""


def structure_of(spec: Any, results: Sequence[Any]) -> Any:
    """The nesting of the results, as JSON-like data with a `Leaf` for each result."""
    count = iter(range(len(results)))

    def leaf(r: Any) -> Leaf:
        if not isinstance(r, fx.Node):
            return Leaf(value=r)
        return Leaf(number=next(count)) if NUMBER in r.meta else Leaf(output=next(count))

    flat = [leaf(r) for r in results]
    return nested(tree_unflatten(flat, spec)) if spec is not None else nested(tuple(flat))


def nested(x: Any) -> Any:
    if isinstance(x, Leaf):
        return x
    if isinstance(x, dict) and all(isinstance(k, str) for k in x):
        return {"dict": {k: nested(v) for k, v in x.items()}}
    if isinstance(x, dict):
        return {"pairs": [[k, nested(v)] for k, v in x.items()]}
    if isinstance(x, list | tuple):
        return {"tuple" if isinstance(x, tuple) else "list": [nested(y) for y in x]}
    if x is None:
        return {"value": None}
    fields = getattr(x, "__dict__", None)
    return {"dict": {k: nested(v) for k, v in fields.items()}} if fields else {"value": None}

"""What a traced function returns: tensors, one after the other, and a structure that says how they are nested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from flambeau.torch_compat.fake import detect_fake_mode
from flambeau.torch_compat.pytree import tree_unflatten

aten = torch.ops.aten
NUMBER = "flambeau_number"  # in what is known of a node: Python takes it as a number


def numbers_as_tensors(gm: fx.GraphModule) -> None:
    """Results that are numbers of the run, such as sizes."""
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
    """Of a structure of results: {"output": its position}, {"number": that of one that is a number in the model}, or
    {"value": what it is}."""


def structure_of(spec: Any, results: Sequence[Any]) -> Any:
    """How results are nested, with their positions at the leaves."""
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

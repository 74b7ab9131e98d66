"""`torch._foreach_lerp_` with a number, as it was written.

Dynamo writes it out as a difference, a product and a sum before any backend sees it. In half precision these round
where eager's kernel does not, so whoever wants eager's bits needs the call itself.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from .region_nodes import name_of, value

CALL = torch.ops.aten._foreach_lerp_.Scalar
WRITTEN = "_foreach_lerp_("  # in the line of the program that the nodes come from
LAST = (torch._foreach_addcmul_, torch._foreach_add_)
WEIGHTS = {"full_like": 1, "tensor": 0, "_foreach_mul": 1}  # which argument it is


def with_lerps(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph, with these calls in it again; changed in place."""
    changed = False
    for n in gm.graph.find_nodes(op="call_function", target=torch._foreach_sub):
        run = written_out(n)
        weights = [x.args[WEIGHTS[name_of(x)]] for x in run if name_of(x) in WEIGHTS]
        if not weights or not all(w == weights[0] and is_number(w) for w in weights):
            continue
        ends, starts = n.args
        with gm.graph.inserting_before(run[-1]):
            call = gm.graph.call_function(CALL, (starts, ends, weights[0]))
        call.meta["stack_trace"] = n.meta["stack_trace"]
        for x in reversed(run):
            if not x.users:  # but for a number that is read out there
                gm.graph.erase_node(x)
        changed = True
    if changed:
        gm.recompile()
    return gm


def is_number(x: object) -> bool:
    """One that is known, or one of the run."""
    known = value(x) if isinstance(x, fx.Node) else x
    return isinstance(known, (int, float, torch.SymInt, torch.SymFloat))


def written_out(first: fx.Node) -> list[fx.Node]:
    """What Dynamo made of one call, or nothing if it is not that."""
    run, at = [], first.meta.get("stack_trace")
    if not isinstance(at, str) or WRITTEN not in at.rstrip().rsplit("File ", 1)[-1]:
        return []
    n = first
    while n.op != "output" and n.meta.get("stack_trace") == at:
        run.append(n)
        if n.target in LAST:
            return run if all(set(x.users) <= set(run) for x in run) else []
        n = n.next
    return []

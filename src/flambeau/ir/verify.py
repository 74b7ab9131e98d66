"""The verifier: checks the rules that every graph must obey, and explains violations."""

from __future__ import annotations

import torch

from .attention import Attention
from .expr import OPS, SMALL_FLOATS, Expr, walk
from .index import Sym
from .nodes import Contract, Extern, Graph, Node, Partial, Pointwise, Reduce, Scan, Scatter, Segment, Value, describe


class VerificationError(AssertionError):
    """Raised when a graph breaks a rule of the language; the message names node, rule and pass."""


def verify(graph: Graph, when: str = "") -> None:
    def fail(n: Node | None, text: str) -> None:
        at = "" if n is None else f" in {', '.join(n.names)} = {describe(n)[:300]}"
        raise VerificationError(f"{text}{at}{' (' + when + ')' if when else ''}")

    known = set(graph.inputs) | set(graph.seeds)
    sizes = set(graph.numbers)
    for n in graph.nodes:
        for name in n.names:
            if name in known:
                fail(n, f"buffer {name} is computed twice")
            if name not in graph.buffers:
                fail(n, f"buffer {name} is not in the buffer table")
        for r in n.reads():
            if r not in known:
                fail(n, f"reads {r}, which is not computed before it")
        if not isinstance(n, Extern):
            _verify_exprs(graph, n, sizes, fail)
        known |= set(n.names)
    for o in graph.outputs:
        if isinstance(o, Value) and o.buffer not in known:
            fail(None, f"output {o.buffer} is never computed")


def _verify_exprs(graph: Graph, n: Node, sizes: set[Sym], fail) -> None:  # type: ignore[no-untyped-def]
    allowed = set(sizes)
    n = n.plain if isinstance(n, Partial) else n
    if isinstance(n, (Pointwise, Reduce, Scan)):
        allowed |= set(n.vars)
        shape = tuple(v.size for v in (n.kept if isinstance(n, Reduce) else n.vars))
        for name in n.names:
            if graph.buffers[name].shape != shape:
                fail(n, f"computes shape {shape} into {name} of shape {graph.buffers[name].shape}")
    if isinstance(n, Attention):
        allowed |= set(n.vars)
        for name, place in zip(n.names, n.places, strict=True):
            if len(place) != len(graph.buffers[name].shape):
                fail(n, f"writes {name} of rank {len(graph.buffers[name].shape)} at {len(place)} indices")
    if isinstance(n, Scatter):
        allowed |= {*n.vars, *n.out_vars}
        if n.mode not in ("set", "add", "mul", "min", "max"):
            fail(n, f"scatter mode {n.mode!r} does not exist")
        if n.value.dtype is not n.init.dtype:
            fail(n, f"scatters {n.value.dtype} into {n.init.dtype}")
    if isinstance(n, Contract) and n.ragged is not None:
        allowed.add(n.ragged.part)
    for e in n.exprs():
        loose = e.symbols() - allowed
        if loose:
            fail(n, f"uses symbols {sorted(map(str, loose))} that are neither its variables nor sizes")
    for e in walk(*n.exprs()):
        problem = check_expr(e, graph)
        if problem:
            fail(n, problem)
    dtypes: tuple[torch.dtype, ...] = ()
    if isinstance(n, Pointwise):
        dtypes = (n.body.dtype,)
    elif isinstance(n, (Reduce, Scan)):
        dtypes = n.combine.dtypes
        if tuple(e.dtype for e in n.inputs) != dtypes:
            fail(n, f"feeds {[e.dtype for e in n.inputs]} to a combine of {dtypes}")
        for r, d in zip(n.combine.result, dtypes, strict=True):
            if r.dtype is not d:
                fail(n, f"combine {n.combine.name} returns {r.dtype} where it takes {d}")
    if isinstance(n, Segment) and len(n.axes) != 1:
        fail(n, "a segment runs over exactly one axis")
    for name, d in zip(n.names, dtypes, strict=False):
        # a scan may store narrower values than it carries
        if graph.buffers[name].dtype is not d and not isinstance(n, Scan):
            fail(n, f"computes {d} into {name} of {graph.buffers[name].dtype}")


def check_expr(e: Expr, graph: Graph) -> str | None:
    """Returns what is wrong with one expression node, or None."""
    if e.op == "load":
        name, index = e.attr
        b = graph.buffers.get(name)
        if b is None:
            return f"loads from unknown buffer {name}"
        if len(index) != len(b.shape):
            return f"indexes {name} of rank {len(b.shape)} with {len(index)} indices"
        if e.dtype is not b.dtype:
            return f"loads {name} of {b.dtype} as {e.dtype}"
        for i, n in zip(index, b.shape, strict=True):
            lo, hi = i.bounds()
            out = (hi is not None and hi < 0) or (n.is_const and lo is not None and lo >= max(n.const, 1))
            if not e.args and out:
                return f"reads {name} at {i}, outside its size {n}, without a mask"
        if e.args and e.args[0].dtype is not torch.bool:
            return f"mask of a load is {e.args[0].dtype}, not bool"
        return None
    if e.op in OPS:
        arity, _ = OPS[e.op]
        if len(e.args) != arity:
            return f"{e.op} takes {arity} arguments, not {len(e.args)}"
        if e.op != "philox" and len({a.dtype for a in e.args}) > 1:
            return f"{e.op} mixes {[str(a.dtype) for a in e.args]}"
        if e.op != "bitcast" and any(a.dtype in SMALL_FLOATS for a in e.args):
            return f"{e.op} of {e.args[0].dtype}, which is computed with in float32"
        return None
    if e.op == "where" and (e.args[0].dtype is not torch.bool or e.args[1].dtype is not e.args[2].dtype):
        return "where needs a bool and two values of one dtype"
    if e.op == "require" and (e.args[0].dtype is not e.dtype or e.args[1].dtype is not torch.bool):
        return "require needs a value of its dtype and a bool"
    if e.op not in ("const", "index", "carry", "cast", "check", "require", "where", "fold", "raw", "local"):
        return f"operation {e.op!r} does not exist"
    return None

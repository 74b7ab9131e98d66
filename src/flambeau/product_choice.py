"""Chooses the kernel of a matrix product: a library call, or our kernel with the next operators fused into it.

A product and the operators after it that our kernels compute, up to the next library call, form a graph of their own
(`Region`). Products that meet in one kernel, as in a gated unit, belong to one region. It is compiled both ways and
timed on random data of its own shapes, and the faster way is kept on disk (`targets/search.py`) under the region's
text, the chip and the versions, so that later processes time nothing and choose the same. If both are about as fast,
the library is used. It is also used without timing if a rule says beforehand that nothing can be gained.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.fx as fx

from flambeau.capture.storage import hint, is_view
from flambeau.ir.capabilities import Capabilities
from flambeau.ops.facts import LOWERINGS, facts
from flambeau.runtime.placement import flat
from flambeau.targets.base import Run, Target
from flambeau.targets.identity import Uncacheable, identity
from flambeau.targets.search import agree, fastest, kept, undecided

log = logging.getLogger(__name__)

ROUNDED = 3e-2  # tolerance, relative to the largest result: a library rounds its product before the next operator
CLOSE = 1.5  # times the library's time, up to which other block shapes than the heuristic's are tried
GAIN = 0.99  # share of the library's time that ours must stay below: smaller differences are noise
WORTH = 0.02  # share of a product's time that fusion must be able to save
MOST_NODES = 48  # nodes of a region: later ones get kernels of their own
MOST_PRODUCTS = 3  # products of a region that our kernels may compute: the last ones
SMALL = (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
Compile = Callable[[fx.GraphModule, frozenset[str]], Run]  # compiles a region with these products as our kernels


@dataclass
class Region:
    products: list[fx.Node]
    nodes: list[fx.Node] = field(default_factory=list)  # in the order of the graph, products among them


def own_products(gm: fx.GraphModule, target: Target, caps: Capabilities, compiled: Compile, exclude: frozenset[str]
                 ) -> tuple[frozenset[str], list[str]]:
    """The names of the products that our kernels compute; and a note for each product with the choice and why."""
    own: set[str] = set()
    notes: list[str] = []
    whose = "the library's"
    for region in regions(gm):
        region.products = [p for p in region.products if p.name not in exclude]
        refused = {p: why for p in region.products if (why := refusal(p, region, caps)) is not None}
        notes += [f"{p.name} is {whose}: {why}" for p, why in refused.items()]
        left = [p for p in region.products if p not in refused][-MOST_PRODUCTS:]
        if left:
            chosen, why = choice(region, left, target, compiled)
            own |= chosen
            notes += [f"{p.name} is {'ours' if p.name in chosen else whose}: {why}" for p in left]
    return frozenset(own), notes


# ---- regions -----------------------------------------------------------------------------------------------


def is_product(n: fx.Node) -> bool:
    return n.op == "call_function" and facts(n.target).library


def is_ours(n: fx.Node) -> bool:
    return n.op == "call_function" and (n.target is operator.getitem or is_view(n.target) or n.target in LOWERINGS
                                        and not facts(n.target).library)


def regions(gm: fx.GraphModule) -> list[Region]:
    """Each product with the operators after it, except those that also depend on it through a call that is not ours."""
    number: dict[fx.Node, int] = {}  # of each call that is not a kernel of ours
    near: dict[fx.Node, int] = {}  # bits: the calls whose results reach a node through our kernels only
    far: dict[fx.Node, int] = {}  # bits: the calls whose results reach it through another call too
    home: dict[int, Region] = {}
    for n in gm.graph.nodes:
        if n.op != "call_function":
            continue
        beyond = _all(far.get(i, 0) for i in n.all_input_nodes)
        before = _all(near.get(i, 0) for i in n.all_input_nodes)
        if is_ours(n):
            far[n], near[n] = beyond, before & ~beyond
            found = [home[k] for k in home if near[n] >> k & 1]
            if found:
                first, *others = dict.fromkeys(map(id, found))
                region = next(r for r in found if id(r) == first)
                for other in (r for r in found if id(r) in others):
                    _join(region, other, home)
                region.nodes.append(n)
            continue
        far[n] = beyond | before
        near[n] = 1 << len(number)
        if is_product(n):
            home[len(number)] = Region([n], [n])
        number[n] = len(number)
    order = {n: k for k, n in enumerate(gm.graph.nodes)}
    out = list({id(r): r for r in home.values()}.values())
    for r in out:
        r.nodes = sorted(set(r.nodes), key=order.__getitem__)
        r.products.sort(key=order.__getitem__)
    return out


def _all(bits: Any) -> int:
    out = 0
    for b in bits:
        out |= b
    return out


def _join(region: Region, other: Region, home: dict[int, Region]) -> None:
    if region is not other:
        region.products += [p for p in other.products if p not in region.products]
        region.nodes += other.nodes
        home.update((k, region) for k, r in home.items() if r is other)


def refusal(n: fx.Node, region: Region, caps: Capabilities) -> str | None:
    """Why the library computes a product, without timing it; None if our kernel may be faster."""
    val, t = n.meta.get("val"), caps.tuning
    kind, first = "convolution" if facts(n.target).family == "convolution" else "product", facts(n.target).factors or 0
    given = [i.meta.get("val") for i in n.args[first:first + 2] if isinstance(i, fx.Node)]
    factors = [v for v in given if isinstance(v, torch.Tensor)]
    if n.target not in LOWERINGS or not isinstance(val, torch.Tensor) or len(factors) < 2:
        return "there is no kernel of ours for it"
    if any(v.dtype not in SMALL and not (v.dtype is torch.float32 and kind in caps.tf32) for v in factors):
        return f"tensor cores do not take {', '.join(sorted({str(v.dtype) for v in factors}))}"
    size = prod(map(hint, val.shape))
    depth = prod(map(hint, factors[1].shape[1:] if kind == "convolution" else factors[0].shape[-1:]))
    nanoseconds = max(size * depth * val.itemsize / t.product_rate, size * val.itemsize / t.memory_rate)
    parts = facts(n.target).ends is not None
    if not parts and not any(n in u.all_input_nodes for u in region.nodes if not is_view(u.target)):
        # Small products differ in launch overhead. A library is as fast as any kernel on large ones, unless ragged.
        return None if nanoseconds < t.launch else "no kernel of ours follows, and its sums take longer than a launch"
    if not parts and 2 * size * val.itemsize / t.memory_rate + t.launch < WORTH * nanoseconds:
        return "its sums take fifty times as long as what follows"
    return None


# ---- the choice --------------------------------------------------------------------------------------------


def choice(region: Region, products: Sequence[fx.Node], target: Target, compiled: Compile
           ) -> tuple[frozenset[str], str]:
    """The products that our kernels compute, and the measured times as text."""
    gm = graph_of(region)
    try:
        about = [*identity(target), target.chip(), *lines(gm, products)]
        found = json.loads(kept(about, lambda: json.dumps(measured(gm, products, target, compiled))))
    except Uncacheable as why:
        found = {"own": [], "why": str(why)}
    return frozenset(products[k].name for k in found["own"]), found["why"]


def measured(gm: fx.GraphModule, products: Sequence[fx.Node], target: Target, compiled: Compile) -> dict[str, Any]:
    """Time the region with no product, the last one, or all as our kernels; returns the positions of ours, and why."""
    names = [p.name for p in products]
    sets = [frozenset[str](), frozenset(names[-1:]), *([frozenset(names)] if len(names) > 1 else [])]
    try:
        runs = [compiled(gm, own) for own in sets]  # all kernels build in parallel
        args = [example(n.meta["val"]) for n in gm.graph.nodes if n.op == "placeholder"]
        spread_parts(gm, args)
        wanted, draws = runs[0](list(args)), any(facts(n.target).random for n in gm.graph.nodes if is_ours(n))
        candidates: dict[int, Callable[[], object]] = {0: partial(call, runs[0], args)}

        def take(number: int) -> None:
            if draws or all(is_alike(a, b) for a, b in zip(runs[number](list(args)), wanted, strict=True)):
                candidates[number] = partial(call, runs[number], args)
            else:
                candidates.pop(number, None)
                log.warning("a product of ours gives other results than the library's, and is not used: %s", names)

        with undecided():
            for k in range(1, len(runs)):
                take(k)
            best, seconds = fastest(target, candidates, GAIN)
        close = [k for k in seconds if k and seconds[k] < CLOSE * seconds[0]]
        for k in close:  # build other block shapes if these may change the choice
            take(k)
        if close:
            best, seconds = fastest(target, candidates, GAIN)
    except Exception as error:  # whatever fails, the library computes it
        log.info("%s: not measured: %s: %s", names, type(error).__name__, error)
        return {"own": [], "why": f"kernels of ours could not be timed: {type(error).__name__}"}
    times = ", ".join(f"{'library' if not own else 'ours' if len(own) == len(names) else 'the last one ours'} "
                      f"{1e6 * seconds[k]:.1f} us" for k, own in enumerate(sets) if k in seconds)
    return {"own": [k for k, name in enumerate(names) if name in sets[best]], "why": times}


def spread_parts(gm: fx.GraphModule, args: Sequence[Any]) -> None:
    """Fills the ends of ragged products with places drawn from a fixed seed. Parts of equal length would hide what the
    ends of parts cost."""
    places = {n: k for k, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    for n in gm.graph.nodes:
        at = facts(n.target).ends if n.op == "call_function" else None
        if at is not None and len(n.args) > at and n.args[at] in places:
            a, b = (i.meta["val"] for i in n.args[:2])
            size = hint(a.shape[-1] if a.dim() == b.dim() else a.shape[0] if a.dim() == 2 else b.shape[-1])
            ends = args[places[n.args[at]]]
            drawn = torch.randint(0, size + 1, (len(ends),), generator=torch.Generator().manual_seed(0))
            drawn[-1:] = size
            ends.copy_(drawn.sort().values)


def call(run: Run, args: Sequence[Any]) -> object:
    return run(list(args))


def is_alike(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    least = max(ROUNDED, torch.finfo(a.dtype).eps) if a.is_floating_point() else 0
    if a.is_floating_point() and a.itemsize == 1:
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    return a.shape == b.shape and agree(a, b, least)


def graph_of(region: Region) -> fx.GraphModule:
    """The region's nodes as a graph; its results are the values that nodes outside of it read."""
    inside = dict.fromkeys(region.nodes[:MOST_NODES])
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for i in dict.fromkeys(i for n in inside for i in n.all_input_nodes if i not in inside):
        env[i] = graph.placeholder(i.name)
        env[i].meta = dict(i.meta)
    for n in inside:
        env[n] = graph.node_copy(n, env.__getitem__)
    graph.output(tuple(env[n] for n in inside if any(u not in inside for u in n.users)
                       and isinstance(n.meta.get("val"), torch.Tensor)))
    return fx.GraphModule(torch.nn.Module(), graph)


def lines(gm: fx.GraphModule, products: Sequence[fx.Node]) -> list[str]:
    """One line per node. Nodes are identified by position, not by name; symbolic sizes count by magnitude only."""
    place, open = {n: f"%{k}" for k, n in enumerate(gm.graph.nodes)}, {p.name for p in products}
    return [f"{n.op} {'?' if n.name in open else ''}{n.target if n.op == 'call_function' else ''} "
            f"{fx.node.map_arg((n.args, n.kwargs), lambda x: place[x])} "
            f"{[shape_text(v) for v in flat(n.meta.get('val'))]}" for n in gm.graph.nodes]


def shape_text(v: Any) -> str:
    def size(n: Any) -> str:
        return f"~{hint(n).bit_length()}" if isinstance(n, torch.SymInt) else str(n)

    if isinstance(v, torch.Tensor):
        return f"{v.dtype} {[*map(size, v.shape)]} {[*map(size, v.stride())]} {v.device}"
    return size(v) if isinstance(v, (int, torch.SymInt)) else type(v).__name__


def example(v: Any) -> Any:
    """Random data with the layout of a value; zeros for integers, which may be indices."""
    if not isinstance(v, torch.Tensor):
        return hint(v) if isinstance(v, torch.SymInt) else v
    shape, strides = [*map(hint, v.shape)], [*map(hint, v.stride())]
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if prod(shape) else 0
    if not v.dtype.is_floating_point:
        return torch.zeros(count, dtype=v.dtype, device=v.device).as_strided(shape, strides)
    small = max([1, *shape[-2:]]) ** -0.25 if len(shape) > 1 else 1  # so that products are of the order of one
    return (small * torch.randn(count, device=v.device)).to(v.dtype).as_strided(shape, strides)

"""Which maps become kernels of their own because they write a row in another memory order than it was reduced in.

A layer norm of a permuted tensor reads its rows along one dimension and writes them along another. All stages of one
kernel walk a row in the same order, and one side then jumps at every element. As two kernels, the reductions read in
order, with their dimensions merged where they follow one another in memory, and the map is written in tiles. It reads
its input once more. That takes less time where a row does not stay in the first-level cache, or where few columns lie
side by side and are no whole vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flambeau.ir.expr import loads
from flambeau.ir.index import ONE, Index, Sym, volume
from flambeau.ir.nodes import Buffer, Node, Pointwise, Reduce
from flambeau.ir.tuning import Tuning

from .fuse import Group, Joined, member_exprs, regrouping


def is_turned(g: Group, n: Node, j: Joined, buffers: Mapping[str, Buffer], t: Tuning) -> bool:
    """Whether n, as a member of g, would write rows in another order than its reductions read."""
    if not t.row_kept or j.axes is None or j.level != "full" or not isinstance(n, Pointwise):
        return False
    vars = [Sym(f"g{k}", size) for k, size in enumerate(j.fine)]
    rows = volume([vars[k] for k in j.axes])
    if not all(v.size.is_const for v in vars):
        return False
    written = contiguous(buffers[n.names[0]], [j.mapping.get(v, Index((), 0)) for v in n.vars], vars)
    read = {*read_along(g, j, buffers, vars)}
    if written is None or len(read) != 1 or written in read:
        return False
    (along,) = read
    if along is None:
        return False
    inside = {vars[k] for k in j.axes}
    if {along, written} <= inside:
        return rows.const * buffers[n.names[0]].dtype.itemsize > t.row_kept
    return inside.isdisjoint((along, written)) and along.size.const < t.columns_kept


def read_along(g: Group, j: Joined, buffers: Mapping[str, Buffer], vars: Sequence[Sym]) -> Iterator[Sym | None]:
    """The variables along which the reductions of a group read what is as large as their rows."""
    regroup = regrouping(g, j.fine)
    rows = {vars[k] for k in j.axes or ()}
    for m in g.members:
        if isinstance(m.node, Reduce):
            for e in loads(*(e.subs(regroup) for e in member_exprs(m))):
                name, at = e.attr
                used = frozenset().union(*(i.symbols() for i in at))
                if name not in g.written and rows <= used:
                    yield contiguous(buffers[name], at, vars)


def contiguous(b: Buffer, at: Sequence[Index], vars: Sequence[Sym]) -> Sym | None:
    """The variable along which neighbouring points are neighbours in memory."""
    place = b.place(at)
    return next((v for v in vars if v.size is not ONE and place.coefficient(v) is ONE), None)

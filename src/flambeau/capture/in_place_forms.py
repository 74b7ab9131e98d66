"""Replaces operators that return new values of their arguments by their in-place forms.

In a graph without side effects, running statistics are results that are copied into the inputs at the end, whereas
eager's kernel writes to the inputs directly. If nothing else reads either, the call does the same.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from flambeau.ops.facts import facts, overloads_named
from flambeau.torch_compat.ops import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class InPlace:
    op: Any
    written: tuple[int, ...]  # positions of the arguments that it writes to
    done: tuple[fx.Node, ...]  # nodes that the call replaces


def in_place_form(n: fx.Node) -> InPlace | None:
    """The in-place form of a node's operator; None if there is none, or if other nodes would see the difference."""
    op, written = writing_form(n.target)
    done: list[fx.Node] = []
    for k, at in enumerate(written):
        found = copied_by(n, len(op._schema.returns) + k, n.args[at])
        if found is None:
            return None
        done += found
    return InPlace(op, written, tuple(done)) if op is not None else None


@cache
def writing_form(op: Any) -> tuple[Any, tuple[int, ...]]:
    """The in-place form of `op`, and the positions of the arguments it writes: `op` returns their new values last."""
    if isinstance(op, OpOverload) and len(op._schema.returns) > 1:
        for form in overloads_named(facts(op).in_place):
            written = tuple(k for k, a in enumerate(form._schema.arguments) if a.is_write)
            same = [a.name for a in form._schema.arguments] == [a.name for a in op._schema.arguments]
            if written and same and len(form._schema.returns) + len(written) == len(op._schema.returns):
                return form, written
    return None, ()


def copied_by(n: fx.Node, output: int, into: Any) -> list[fx.Node] | None:
    """The nodes that copy a result into an input which only this node reads; None if the result is used elsewhere."""
    if not isinstance(into, fx.Node) or into.op != "placeholder":
        return None
    others = [u for u in into.users if u is not n]
    path = [u for u in n.users if u.target is operator.getitem and u.args[1] == output]
    # The result is a copy of the input that was written to, whatever torch's dtype rule says; hence the casts.
    while len(path) in (1, 2) and [u.target for u in path[-1].users] == [aten._to_copy.default]:
        path += path[-1].users
    if len(path) not in (1, 2) or len(others) != 1 or list(path[-1].users) != others:
        return None
    copy, = others
    if copy.target is not aten.copy_.default or copy.args != (into, path[-1]) or copy.users:
        return None
    return [*path[1:], copy]

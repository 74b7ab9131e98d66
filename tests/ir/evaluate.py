"""What an index is worth at a point: the plain reading of the algebra, with nothing simplified."""

from __future__ import annotations

from collections.abc import Mapping

from flambeau.ir.index import Atom, Index, Op, Sym


def evaluate(i: Index, env: Mapping[Sym, int]) -> int:
    total = i.const
    for mono, coef in i.terms:
        for a in mono:
            coef *= evaluate_atom(a, env)
        total += coef
    return total


def evaluate_atom(a: Atom, env: Mapping[Sym, int]) -> int:
    if isinstance(a, Sym):
        return env[a]
    assert isinstance(a, Op)
    x, y = evaluate(a.a, env), evaluate(a.b, env)
    return {"div": lambda: x // y, "mod": lambda: x % y, "min": lambda: min(x, y), "max": lambda: max(x, y)}[a.kind]()

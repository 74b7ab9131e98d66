"""Symbolic sizes of torch as indices of ours."""

from __future__ import annotations

from typing import Any

import torch

from flambeau.errors import UnsupportedError
from flambeau.ir.index import Index, Sym, as_index, floordiv, maximum, minimum, mod


class Symbols:
    """One graph's size symbols, by name."""

    def __init__(self) -> None:
        self.known: dict[str, Sym] = {}

    def index(self, x: Any) -> Index:
        """An int or SymInt as an Index."""
        if isinstance(x, torch.SymInt):
            return self.convert(x.node.expr, x.node.shape_env)
        return as_index(int(x))

    def symbol(self, s: Any, env: Any) -> Sym:
        if s.name not in self.known:
            lo, hi = 0, None
            ranges = getattr(env, "var_to_range", {})
            if s in ranges:
                r = ranges[s]
                lo = int(r.lower) if r.lower.is_Integer else 0
                hi = int(r.upper) if r.upper.is_Integer and int(r.upper) < 2**40 else None
            self.known[s.name] = Sym(s.name, None, max(lo, 0), hi)
        return self.known[s.name]

    def convert(self, e: Any, env: Any) -> Index:
        if e.is_Integer:
            return as_index(int(e))
        if e.is_Symbol:
            return as_index(self.symbol(e, env))
        name = type(e).__name__
        args = [self.convert(a, env) for a in e.args] if name not in ("Pow", "Rational") else []
        if e.is_Add:
            return sum(args[1:], args[0])
        if e.is_Mul:
            out = args[0]
            for a in args[1:]:
                out = out * a
            return out
        if name == "Pow" and e.args[1].is_Integer and int(e.args[1]) > 0:
            base = self.convert(e.args[0], env)
            out = base
            for _ in range(int(e.args[1]) - 1):
                out = out * base
            return out
        if name in ("FloorDiv", "CleanDiv", "IntTrueDiv") and len(args) == 2:
            return floordiv(*args)
        if name in ("Mod", "PythonMod"):
            return mod(*args)
        if name == "ModularIndexing":
            return mod(floordiv(args[0], args[1]), args[2])
        if name in ("Max", "Min"):
            out = args[0]
            for a in args[1:]:
                out = (maximum if name == "Max" else minimum)(out, a)
            return out
        if name in ("Identity", "CeilToInt", "FloorToInt", "TruncToInt") and len(args) == 1:
            return args[0]
        raise UnsupportedError(f"symbolic size {e} has no index form")


def python_text(i: Index) -> str:
    """Python source of an index over size symbols."""
    from flambeau.ir.index import Atom, Op

    def atom(a: Atom) -> str:
        if isinstance(a, Sym):
            return a.name
        assert isinstance(a, Op)
        x, y = python_text(a.a), python_text(a.b)
        form = {"div": "({} // {})", "mod": "({} % {})", "min": "min({}, {})", "max": "max({}, {})"}[a.kind]
        return form.format(x, y)

    parts = ["*".join(([str(c)] if c != 1 else []) + [atom(a) for a in m]) for m, c in i.terms]
    if i.const or not parts:
        parts.append(str(i.const))
    return parts[0] if len(parts) == 1 else "(" + " + ".join(parts) + ")"

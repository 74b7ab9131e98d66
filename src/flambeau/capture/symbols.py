"""Converts torch's symbolic sizes into our indices, and into Python source."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch

from flambeau.errors import UnsupportedError
from flambeau.ir.index import Index, Op, Sym, as_index, ceildiv, floordiv, maximum, minimum, mod
from flambeau.ir.nodes import Host
from flambeau.torch_compat.fx import PythonPrinter

# Functions of sympy, by name, and the corresponding functions of our indices.
FOLDED: dict[str, Callable[[Index, Index], Index]] = {
    "Add": operator.add, "Mul": operator.mul, "Max": maximum, "Min": minimum}
BINARY = {"FloorDiv": floordiv, "CleanDiv": floordiv, "Mod": mod, "PythonMod": mod}
# Kinds of our index atoms, and the corresponding functions of torch's symbolic numbers.
COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    "div": operator.floordiv, "mod": operator.mod, "min": torch.sym_min, "max": torch.sym_max}


class Symbols:
    """The size symbols of one graph, by name."""

    def __init__(self) -> None:
        self.known: dict[str, Sym] = {}
        self.hosts: dict[Sym, Host] = {}  # symbols that stand for computed numbers
        self.typical: dict[Sym, int] = {}  # their values when the graph was captured
        self._numbers: dict[Sym, Callable[[], Any]] = {}  # the symbols as torch's numbers
        self._fixed: tuple[tuple[int, int], dict[Any, Any]] = ((0, 0), {})  # at this number of an environment's guards

    def index(self, x: Any) -> Index:
        """Convert an int or SymInt to an Index."""
        if not isinstance(x, torch.SymInt):
            return as_index(int(x))
        try:
            found = self.convert(x.node.expr, x.node.shape_env)
        except UnsupportedError:
            found = as_index(self.computed(x))
        if isinstance(size := found.atom(), Sym) and x.node.hint is not None:
            self.typical[size] = int(x.node.hint)
        return found

    def fixed(self, env: Any) -> dict[Any, Any]:
        """Expressions that a guard fixes to a number. torch does not solve guards with quotients for their symbol, but
        the size that a dimension of one is broadcast to depends on them."""
        guards = getattr(env, "guards", ())
        if self._fixed[0] != (at := (id(env), len(guards))):
            sides = (g.expr.args for g in guards if type(g.expr).__name__ == "Equality")
            self._fixed = at, {a: b for left, right in sides for a, b in ((left, right), (right, left)) if b.is_Integer}
        return self._fixed[1]

    def symbol(self, s: Any, env: Any) -> Sym:
        if s.name not in self.known:
            lo = hi = None
            ranges = getattr(env, "var_to_range", {})
            if s in ranges:
                r = ranges[s]
                lo = int(r.lower) if r.lower.is_Integer and int(r.lower) > -(2**40) else None
                hi = int(r.upper) if r.upper.is_Integer and int(r.upper) < 2**40 else None
            made = self.known[s.name] = Sym(s.name, None, lo, hi)
            self._numbers[made] = lambda: env.create_symintnode(s, hint=None)
        return self.known[s.name]

    def host(self, x: Any) -> Host:
        """Convert a symbolic number of any kind to Python source."""
        expr, env = x.node.expr, x.node.shape_env
        return Host(PythonPrinter().doprint(expr), frozenset(self.symbol(s, env).name for s in expr.free_symbols))

    def computed(self, x: torch.SymInt) -> Sym:
        """A new symbol for a size that cannot be expressed as an index."""
        host = self.host(x)
        for sym, known in self.hosts.items():
            if known == host:
                return sym
        low = x.node.shape_env.bound_sympy(x.node.expr).lower
        sym = Sym(f"host{len(self.hosts)}", None, int(low) if low.is_Integer else None)
        self.known[sym.name] = sym
        self.hosts[sym] = host
        self._numbers[sym] = lambda: x
        return sym

    def same(self, a: Index, b: Index) -> bool | None:
        """Whether two sizes are equal; None if only data determines that. If it depends on the sizes of a call, this
        adds a guard that keeps the present answer."""
        if a is b:
            return True
        found = self.number(a) == self.number(b)
        if isinstance(found, torch.SymBool) and found.node.hint is None:
            return None
        return bool(found)

    def number(self, i: Index) -> Any:
        """Convert an index to torch's symbolic number."""
        total: Any = i.const
        for atoms, factor in i.terms:
            product: Any = factor
            for a in atoms:
                product *= COMPUTED[a.kind](self.number(a.a), self.number(a.b)) if isinstance(
                    a, Op) else self._numbers[a]()  # type: ignore[index]
            total += product
        return total

    def solve(self, x: torch.SymInt, name: str, known: Mapping[Sym, Any]) -> tuple[Sym, Host] | None:
        """If x, called `name`, is linear in exactly one unknown symbol: that symbol, and its value."""
        expr, env = x.node.expr.expand(), x.node.shape_env
        missing = [s for s in expr.free_symbols if self.symbol(s, env) not in known]
        if len(missing) != 1:
            return None
        factor = expr.coeff(missing[0], 1)
        rest = (expr - factor * missing[0]).expand()
        if factor == 0 or missing[0] in factor.free_symbols | rest.free_symbols:
            return None
        text = PythonPrinter().doprint
        sizes = frozenset((name, *(s.name for s in factor.free_symbols | rest.free_symbols)))
        return self.symbol(missing[0], env), Host(f"({name} - ({text(rest)})) // ({text(factor)})", sizes)

    def convert(self, e: Any, env: Any) -> Index:
        e = self.fixed(env).get(e, e)
        if e.is_Integer:
            return as_index(int(e))
        if e.is_Symbol:
            return as_index(self.symbol(e, env))
        name = type(e).__name__
        if name in ("CeilToInt", "FloorToInt") and type(e.args[0]).__name__ == "IntTrueDiv":
            a, b = (self.convert(x, env) for x in e.args[0].args)
            return ceildiv(a, b) if name == "CeilToInt" else floordiv(a, b)
        args = [self.convert(a, env) for a in e.args] if name not in ("Pow", "Rational") else []
        if name in FOLDED:
            return reduce(FOLDED[name], args)
        if name in BINARY and len(args) == 2:
            return BINARY[name](*args)
        if name == "Pow" and e.args[1].is_Integer and int(e.args[1]) > 0:
            return reduce(operator.mul, [self.convert(e.args[0], env)] * int(e.args[1]))
        if name == "ModularIndexing":
            return mod(floordiv(args[0], args[1]), args[2])
        if name == "Identity":
            return args[0]
        raise UnsupportedError(f"symbolic size {e} has no index form")

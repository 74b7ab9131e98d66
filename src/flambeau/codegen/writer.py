"""Writes kernels in all C-like languages; a dialect has the differences.

Text is built in nested scopes. An expression is emitted in the outermost scope in which all its operands are known, so
that loop invariants are outside of loops. Expressions are interned, so each is emitted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from flambeau.ir.dtypes import DType, is_float, is_int
from flambeau.ir.expr import Expr, Fold, rewrite
from flambeau.ir.faults import Bound, head
from flambeau.ir.index import ZERO, Dyn, Index, Op, Sym, as_index, is_positive

from .dialect import Dialect, Lanes, Steps


def was_float(e: Expr) -> bool:
    """Whether this is an integer truncated from a float; a value computed earlier in the kernel may be one."""
    if e.op == "local":
        return is_int(e.dtype)
    if e.op != "cast" or not is_int(e.dtype):
        return False
    return is_float(e.args[0].dtype) or was_float(e.args[0])


@dataclass
class Scope:
    lines: list[str] = field(default_factory=list)
    vars: set[Sym] = field(default_factory=set)
    known: dict[Expr, str] = field(default_factory=dict)
    indices: dict[Index, str] = field(default_factory=dict)
    locals: dict[str, str] = field(default_factory=dict)  # buffer computed in this kernel -> text
    checks: bool = False
    vector: bool = False  # inside a loop whose steps are lanes

    def may_be_skipped(self) -> bool:
        """Whether it is a loop that may have no points."""
        return any(v.extent is not None and not is_positive(v.extent) for v in self.vars)


class Writer:
    """Renders expressions and loops of one kernel."""

    def __init__(self, dialect: Dialect) -> None:
        self.d = dialect
        self.fl = dialect.function.format("")  # the prefix of the library's functions
        self.scopes: list[Scope] = [Scope()]
        self.names: dict[Sym, str] = {}
        self.count = 0
        self.unroll = dialect.unroll
        self.functions: set[str] = set()
        self.beneath: dict[Expr, bool] = {}  # whether a library is called for an expression
        self.recast = False  # whether an integer that was a float becomes one again
        self.sites: Mapping[Bound, int] = {}  # what indices are checked against, and the numbers of their faults

    # ---- scopes --------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.scopes[-1].lines.append(text)

    def define(self, s: Scope, kind: str, name: str, text: str) -> None:
        s.lines.append(f"const {kind} {name} = {text};")

    def variable(self, dtype: DType, name: str, text: str) -> None:
        """Declares a variable that will be assigned again."""
        self.line(f"{self.d.types[dtype]} {name} = {text};")

    def assign(self, slots: Iterable[str], texts: Iterable[str]) -> None:
        for slot, text in zip(slots, texts, strict=True):
            self.line(f"{slot} = {text}{self.d.end}")

    def fresh(self, prefix: str = "t") -> str:
        """Returns a new name. PyTorch's names of sizes are s5 or u0, so other prefixes are used."""
        self.count += 1
        return f"{prefix}{self.count}"

    @contextmanager
    def scope(self, header: str, vars: Iterable[Sym] = (), footer: str = "}", how: Steps | None = None,
              counted: bool = False) -> Iterator[Scope]:
        """Opens a block. `how`: facts about its steps, if it is a loop; `counted`: a loop over a variable."""
        s = Scope(vars=set(vars), vector=self.scopes[-1].vector or isinstance(how, Lanes))
        self.scopes.append(s)
        yield s
        self.scopes.pop()
        parent = self.scopes[-1]
        parent.checks |= s.checks
        if how is not None and (pragma := self.d.pragma(how, s.checks, counted)):
            parent.lines.append(pragma)
        parent.lines.append(header)
        parent.lines.extend("  " + x for x in s.lines)
        if footer:
            parent.lines.append(footer)

    @contextmanager
    def loop(self, var: Sym, lo: str, hi: str, step: str = "1", how: Steps | None = None) -> Iterator[Scope]:
        name = self.sym(var)
        advance = f"++{name}" if step == "1" else f"{name} += {step}"
        header = f"for ({self.d.long} {name} = {lo}; {name} < {hi}; {advance}) {{"
        with self.scope(header, (var,), how=how, counted=True) as s:
            yield s

    # ---- names ---------------------------------------------------------------------------------------

    def sym(self, s: Sym) -> str:
        if s not in self.names:
            taken = set(self.names.values())
            name = s.name
            k = 0
            while name in taken:
                k += 1
                name = f"{s.name}_{k}"
            self.names[s] = name
        return self.names[s]

    # ---- where an expression belongs -------------------------------------------------------------------

    def depth_of_syms(self, syms: frozenset[Sym]) -> int:
        return next((k for k in range(len(self.scopes) - 1, 0, -1) if self.scopes[k].vars & syms), 0)

    def innermost(self, table: str, key: object) -> tuple[int, str] | None:
        """Returns (scope depth, text) of a table's entry in the innermost scope that has one."""
        for k in range(len(self.scopes) - 1, -1, -1):
            if key in (held := getattr(self.scopes[k], table)):
                return k, held[key]
        return None

    def local(self, name: str) -> tuple[int, str] | None:
        return self.innermost("locals", name)

    def lookup(self, e: Expr) -> tuple[int, str] | None:
        return self.innermost("known", e)

    # ---- indices -------------------------------------------------------------------------------------

    def index(self, i: Index, atom: str = "{}") -> str:
        """Returns the text of an index, with its variables formatted by `atom`; emits the values it depends on
        first."""
        if i.is_const:
            return str(i.const) if i.const >= 0 else f"({i.const})"
        parts: list[str] = []
        for mono, coef in i.terms:
            factors = [atom.format(self._atom(a)[1]) for a in mono]
            if coef != 1:
                factors.insert(0, str(coef) if coef > 0 else f"({coef})")
            parts.append("*".join(factors))
        if i.const:
            parts.append(str(i.const))
        return parts[0] if len(parts) == 1 and "*" not in parts[0] else "(" + " + ".join(parts) + ")"

    def index_depth(self, i: Index) -> int:
        return max((self._atom(a)[0] for m, _ in i.terms for a in m), default=0)

    def _atom(self, a: object) -> tuple[int, str]:
        if isinstance(a, Sym):
            return self.depth_of_syms(frozenset((a,))), self.sym(a)
        if isinstance(a, Dyn):
            return self.emit(a.expr)
        assert isinstance(a, Op)
        depth = max(self.index_depth(a.a), self.index_depth(a.b))
        key = Index((((a,), 1),), 0)
        if (found := self.innermost("indices", key)) is not None:
            return found
        x, y = self.index(a.a), self.index(a.b)
        if a.kind in ("div", "mod") and not is_positive(a.b):
            y = self.d.divisor.format(y)  # it may be emitted before the loop over a dimension without points
        lo = a.a.bounds()[0]
        if a.kind in ("div", "mod") and lo is not None and lo >= 0:
            text = f"{x} {self.d.quotient if a.kind == 'div' else '%'} {y}"
        else:
            named = {"div": "floordiv", "mod": "mod", "min": "imin", "max": "imax"}[a.kind]
            if a.a.is_const:  # gives it the other operand's type: a bare number has none in some languages
                x = f"({y} * 0 + {x})"
            text = f"{self.d.function.format(named)}({x}, {y})"
        name = self.fresh("i")
        self.define(self.scopes[depth], self.d.long, name, text)
        self.scopes[depth].indices[key] = name
        return depth, name

    def extent(self, v: Sym) -> str:
        return self.index(v.size)

    def decompose(self, flat: str, vars: Sequence[Sym]) -> None:
        """Defines variables from their joint position."""
        here, rest = self.scopes[-1], flat
        for k, v in enumerate(reversed(vars)):
            n = "1" if v.size is ZERO else self.extent(v)  # without points, no position is computed
            if k == len(vars) - 1:
                self.define(here, self.d.long, self.sym(v), rest)
                return
            self.define(here, self.d.long, self.sym(v), f"{rest} % {n}")
            rest, before = self.fresh("q"), rest
            self.define(here, self.d.long, rest, f"{before} {self.d.quotient} {n}")

    # ---- expressions ---------------------------------------------------------------------------------

    def value(self, e: Expr) -> str:
        return self.emit(e)[1]

    def emit(self, e: Expr) -> tuple[int, str]:
        """Returns (scope depth, text) of an expression, emitting it in its scope if that was not done yet."""
        if e.op == "const":
            return 0, self.d.constant(e.attr, e.dtype)
        found = self.lookup(e)
        if found is not None:
            return found
        if e.op == "local":
            got = self.local(e.attr)
            if got is None:
                raise KeyError(f"value {e.attr} is not computed in this kernel")
            return got
        if e.op == "fold":
            return self._fold(e)
        depth = 0
        args: list[str] = []
        for a in () if self._is_narrow(e) else e.args:
            d, t = self.emit(a)
            depth = max(depth, d)
            args.append(t)
        for i in (e.args[0] if self._is_narrow(e) else e).own_indices():
            depth = max(depth, self.index_depth(i))
        if e.op == "load":  # inside a loop that may have no points, as its memory may not exist
            depth = max(depth, next((k for k in range(len(self.scopes) - 1, depth, -1)
                                     if self.scopes[k].may_be_skipped()), 0))
        if e.op in ("check", "require"):
            return depth, self._reported(e, args, self.scopes[depth])
        text = self._text(e, args)
        name = self.fresh()
        self.define(self.scopes[depth], self.d.types[e.dtype], name, text)
        self.scopes[depth].known[e] = name
        return depth, name

    def _reported(self, e: Expr, args: list[str], s: Scope) -> str:
        s.checks = True
        if e.op == "require":
            s.lines.append(f"bad = {self.fl}worse(bad, {args[1]} ? 0 : {self.d.constant(head(e.attr), torch.int64)});")
            s.known[e] = args[0]
            return args[0]
        ok, name = self.fresh("ok"), self.fresh()
        s.known[e] = name
        site, size = self.d.constant(self.sites[e.attr], torch.int64), self.index(e.attr.size)
        if not s.vector and len(args) == 1:
            self.define(s, self.d.long, name, f"{self.fl}checked({args[0]}, {size}, bad, {site})")
            return name
        inside = f"{args[0]} >= 0 && {args[0]} < {size}"
        s.lines.append(f"const bool {ok} = ({inside}){f' || !{args[1]}' if len(args) > 1 else ''};")
        s.lines.append(f"bad = {self.fl}worse(bad, {ok} ? 0 : {self.fl}fault({site}, {args[0]}));")
        s.lines.append(f"const {self.d.long} {name} = {inside} ? {args[0]} : 0;")
        return name

    def _text(self, e: Expr, args: list[str]) -> str:
        d = self.d
        if e.op == "index":
            return self.index(e.attr)
        if e.op == "load":
            buffer, (address,) = e.attr
            read = self.read(buffer, self.index(address), e.dtype)
            return f"{args[0]} ? {read} : {self.zero(e.dtype)}" if args else read
        if self._is_narrow(e):
            return self.index(e.args[0].attr, d.narrow)
        if e.op == "cast":
            whole = e.args[0]
            if is_float(e.dtype) and was_float(whole):
                self.recast = True
                args = [d.rounded.format(args[0], d.types[whole.dtype])]
            return d.cast(args[0], whole.dtype, e.dtype)
        if e.op == "where":
            cond, yes, no = (self.emit(a)[0] for a in e.args)
            # Floats of 16 bits are computed from wider ones, which compilers do only where they are chosen.
            branches = cond < max(yes, no) or self._calls(e) or (is_float(e.dtype) and e.dtype.itemsize == 2)
            return (d.choice if branches else "{} ? {} : {}").format(*args)
        if e.op == "philox":
            return f"({d.types[torch.int64]}){d.function.format('philox')}({', '.join(args)}, {e.attr})"
        if e.op == "bitcast":
            return d.bitcast(args[0], e.dtype)
        if e.op in d.infix and not (e.op == "div" and not is_float(e.dtype)):
            text = f"{args[0]} {d.infix[e.op]} {args[1]}"
            return self._narrowed(text, e.dtype)
        if e.op in d.prefix:
            return self._narrowed(f"{d.prefix[e.op]}{args[0]}", e.dtype)
        self.functions.add(e.op)
        return f"{d.named(e.op, e.args[0].dtype)}({', '.join(args)})"

    def _calls(self, e: Expr) -> bool:
        """Whether a function of a library is beneath, which a compiler would call where it is chosen alone: in a
        branch, and not for a vector."""
        found = self.beneath.get(e)
        if found is None:
            op = "exp" if e.op == "local" else e.op  # what another item computes: nobody looks
            found = self.beneath[e] = self.d.is_called(op, e.dtype) or any(map(self._calls, e.args))
        return found

    def _is_narrow(self, e: Expr) -> bool:
        """Whether this is an index truncated to 32 bits: its terms can be truncated before the sum, since integers
        wrap."""
        if e.op != "cast" or e.dtype is not torch.int32 or e.args[0].op != "index" or not self.d.narrow:
            return False
        i: Index = e.args[0].attr
        return all(abs(c) < 2**31 for c in (i.const, *(c for _, c in i.terms)))

    def _narrowed(self, text: str, dtype: DType) -> str:
        """Truncates a small integer to its width, since C computes it as int."""
        return f"({self.d.types[dtype]})({text})" if is_int(dtype) and dtype.itemsize < 4 else text

    def read(self, buffer: str, address: str, dtype: DType) -> str:
        return f"{buffer}[{address}]"

    def zero(self, dtype: DType) -> str:
        return self.d.cast(self.d.constant(0.0, torch.float32), torch.float32, dtype) if is_float(dtype) \
            else self.d.constant(0, dtype)

    # ---- small loops inside expressions ----------------------------------------------------------------

    def _fold(self, e: Expr) -> tuple[int, str]:
        f: Fold = e.attr
        n = len(f.carries)
        inits, updates = e.args[:n], e.args[n:]
        if f.steps <= self.unroll:
            finals = self._unroll(f, inits, updates)
            out: tuple[int, str] = (0, "")
            for k in range(n):
                twin = Expr("fold", f.carries[k].dtype, e.args, Fold(f.loops, f.carries, k))
                d, t = self.emit(finals[k]) if twin is e or n > 1 else (0, "")
                self.scopes[d].known.setdefault(twin, t)
                if twin is e:
                    out = (d, t)
            return out
        return self._looped(e, inits, updates)

    def _looped(self, e: Expr, inits: Sequence[Expr], updates: Sequence[Expr], ends: Sequence[tuple[str, str]] = ()
                ) -> tuple[int, str]:
        """Writes a fold as loops; `ends` replaces the bounds of the fold's loops."""
        f: Fold = e.attr
        names = []
        for c, init in zip(f.carries, inits, strict=True):
            start = self.shaped(self.value(init))
            names.append(self.fresh("f"))
            self.variable(c.dtype, names[-1], start)
        self._fold_loops(f, updates, names, ends, 0)
        depth = len(self.scopes) - 1
        for k, c in enumerate(f.carries):
            twin = Expr("fold", c.dtype, e.args, Fold(f.loops, f.carries, k))
            self.scopes[depth].known[twin] = names[k]
        return depth, names[f.which]

    def shaped(self, text: str) -> str:
        """Returns a value in the shape that a loop carries."""
        return text

    def _fold_loops(self, f: Fold, updates: Sequence[Expr], names: list[str], ends: Sequence[tuple[str, str]], k: int
                    ) -> None:
        if k == len(f.loops):
            self.scopes[-1].known.update(zip(f.carries, names, strict=True))
            self.assign(names, self.in_variables(updates))
            return
        var, lo, hi = f.loops[k]
        with self.loop(var, *(ends[k] if ends else (self.index(lo), self.index(hi)))):
            self._fold_loops(f, updates, names, ends, k + 1)

    def in_variables(self, exprs: Sequence[Expr]) -> list[str]:
        """Assigns expressions to variables of the current scope; returns their names."""
        names = []
        for e in exprs:
            text = self.shaped(self.value(e))
            names.append(self.fresh("un"))
            self.define(self.scopes[-1], self.d.types[e.dtype], names[-1], text)
        return names

    @staticmethod
    def _unroll(f: Fold, inits: Sequence[Expr], updates: Sequence[Expr]) -> tuple[Expr, ...]:
        points: list[dict[Sym, Index]] = [{}]
        for var, lo, hi in f.loops:
            points = [{**p, var: as_index(k)} for p in points for k in range(lo.const, hi.const)]
        current = tuple(inits)
        for p in points:
            stand = dict(zip(f.carries, current, strict=True))
            memo: dict[Expr, Expr] = {}
            current = tuple(rewrite(u, lambda x, s=stand: s.get(x, x), p, memo) for u in updates)  # type: ignore[misc]
        return current

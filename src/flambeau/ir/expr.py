"""Scalar expressions: the value that a kernel computes at one point. They are typed, immutable and interned.

An expression is a DAG node `(op, dtype, args, attr)`; equal expressions are the same object. Leaves:

    const   attr = a Python number
    index   attr = an Index, as an integer value
    load    attr = (buffer name, indices); args = () or (mask,), read only where the mask holds
    carry   attr = a unique number: the running value inside a fold, or a slot of a combine

Inner nodes: `cast`, `where`, `check` (an index value that must lie in [0, attr), reported otherwise), `require` (a
value and a condition on it; attr = the fault that is reported if it does not hold), `fold` (a small inner loop, see
`Fold`), and the arithmetic of the OPS table.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from .dtypes import DType, is_bool, is_float
from .faults import Bound, Fault
from .index import BUILD, Dyn, Index, Op, Sym, as_index, fits, from_atom, upper

Number = bool | int | float

# The functions of torch.special, with one argument and with two: not every machine has all of them.
_SPECIAL1 = (
    "lgamma", "digamma", "erfcx", "ndtri", "airy_ai", "i0", "i0e", "i1", "i1e", "bessel_j0", "bessel_j1", "bessel_y0",
    "bessel_y1", "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
    "spherical_bessel_j0",
)
_SPECIAL2 = (
    "zeta", "polygamma", "igamma", "igammac", "chebyshev_polynomial_t", "chebyshev_polynomial_u",
    "chebyshev_polynomial_v", "chebyshev_polynomial_w", "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v", "shifted_chebyshev_polynomial_w",
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
)
SPECIAL = frozenset((*_SPECIAL1, *_SPECIAL2))

# name -> (number of arguments, result dtype: "same" as the first argument, "bool", or a dtype)
OPS: dict[str, tuple[int, str | DType]] = {
    **dict.fromkeys((
        "neg", "abs", "sign", "bitwise_not", "floor", "ceil", "trunc", "round", "sqrt", "rsqrt", "exp", "exp2",
        "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
        "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", *_SPECIAL1,
        "rough_log2",  # float32 only: to an absolute 2^-22, where a machine has an instruction for it
    ), (1, "same")),
    **dict.fromkeys(("isnan", "isinf", "signbit", "logical_not"), (1, "bool")),
    **dict.fromkeys((
        "add", "sub", "mul", "div", "floordiv", "fmod", "remainder", "pow", "min", "max", "fmin", "fmax",
        "atan2", "hypot", "copysign", "nextafter", "bitwise_and", "bitwise_or", "bitwise_xor", "shl", "shr",
        "gcd", "lcm", *_SPECIAL2,
    ), (2, "same")),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), (2, "bool")),
    "fma": (3, "same"),
    # Random bits: (seed, subsequence, counter) int64 -> one of the four Philox words (attr = 0..3).
    "philox": (3, torch.int64),
    "bitcast": (1, "same"),  # attr-free reinterpretation between int and float of one width
}
# target languages treat them as bits: everything but moves is computed in float32
SMALL_FLOATS = (torch.float16, torch.bfloat16)
CHECKED = frozenset(("check", "require"))  # operations that test data and report faults

_exprs: WeakValueDictionary[tuple[Any, ...], Expr] = WeakValueDictionary()
_fresh = itertools.count()


def _operator(op: str, reflected: bool = False) -> Callable[[Expr, Scalar], Expr]:
    """Returns the Python operator for an operation of the table; `reflected`: the left operand is a number."""
    if reflected:
        return lambda self, o: binary(op, lift(o, self.dtype), self)
    return lambda self, o: binary(op, self, o)


class Expr:
    __slots__ = ("op", "dtype", "args", "attr", "_symbols", "_digest", "_loads", "__weakref__")
    op: str
    dtype: DType
    args: tuple[Expr, ...]
    attr: Any
    _symbols: frozenset[Sym] | None
    _loads: tuple[Expr, ...] | None
    _digest: str | None

    def __new__(cls, op: str, dtype: DType, args: tuple[Expr, ...] = (), attr: Any = None) -> Expr:
        # 0.0 == -0.0 == 0 == False as dictionary keys, so a constant is keyed by its text.
        key = (op, dtype, args, repr(attr) if op == "const" else attr)
        found = _exprs.get(key)
        if found is not None:
            return found
        self = object.__new__(cls)
        self.op, self.dtype, self.args, self.attr = op, dtype, args, attr
        self._symbols = None
        self._loads = None
        self._digest = None
        _exprs[key] = self
        return self

    @property
    def digest(self) -> str:
        """A name for the structure that is the same in every process."""
        if self._digest is None:
            text = f"{self.op}|{self.dtype}|{self.attr}|{','.join(a.digest for a in self.args)}"
            self._digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return self._digest

    def own_indices(self) -> tuple[Index, ...]:
        """The index expressions in this node itself, not in its operands."""
        if self.op == "index":
            return (self.attr,)
        if self.op == "check":
            return (self.attr.size,)
        if self.op == "load":
            return self.attr[1]  # type: ignore[no-any-return]
        if self.op == "fold":
            return tuple(i for _, lo, hi in self.attr.loops for i in (lo, hi))
        return ()

    def symbols(self) -> frozenset[Sym]:
        if self._symbols is None:
            out: frozenset[Sym] = frozenset()
            for i in self.own_indices():
                out |= i.symbols()
            for a in self.args:
                out |= a.symbols()
            if self.op == "fold":
                out -= {v for v, _, _ in self.attr.loops}
            self._symbols = out
        return self._symbols

    def subs(self, mapping: Mapping[Sym, Index]) -> Expr:
        if not mapping:
            return self
        return rewrite(self, lambda e: e, mapping)

    def __repr__(self) -> str:
        if self.op == "const":
            return repr(self.attr)
        if self.op == "index":
            return f"[{self.attr}]"
        if self.op == "load":
            where = f" if {self.args[0]}" if self.args else ""
            return f"{self.attr[0]}[{', '.join(map(repr, self.attr[1]))}]{where}"
        extra = "" if self.attr is None else f"<{self.attr}>"
        name = str(self.dtype).removeprefix("torch.") if self.op == "cast" else self.op
        return f"{name}{extra}({', '.join(map(repr, self.args))})"

    # ---- operators: a lowering reads like its formula ------------------------------------------------

    __add__, __radd__ = _operator("add"), _operator("add", reflected=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", reflected=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", reflected=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", reflected=True)
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")
    __and__, __or__, __xor__ = _operator("bitwise_and"), _operator("bitwise_or"), _operator("bitwise_xor")

    def __neg__(self) -> Expr:
        return unary("neg", self)

    def __invert__(self) -> Expr:
        return unary("logical_not" if is_bool(self.dtype) else "bitwise_not", self)

    def __bool__(self) -> bool:
        raise TypeError(f"an expression has no truth value while a kernel is being written: {self!r}; use where()")


Scalar = Expr | int | float | bool


@dataclass(frozen=True)
class Fold:
    """A small loop inside an expression: `carries` start at `inits` and become `updates` at each step.

    The fold expression's args are inits followed by updates; `which` selects the carry whose final value it is.
    """

    loops: tuple[tuple[Sym, Index, Index], ...]  # variable, first, one past the last; outermost first
    carries: tuple[Expr, ...]
    which: int

    @property
    def steps(self) -> float:
        """The number of steps; infinite if it is not known before the run."""
        total: float = 1
        for _, lo, hi in self.loops:
            total *= hi.const - lo.const if lo.is_const and hi.is_const else math.inf
        return total

    def __repr__(self) -> str:
        return f"{self.which} of {self.carries} over {self.loops}"


# ---- constructors ------------------------------------------------------------------------------------


def const(value: Number, dtype: DType) -> Expr:
    if is_float(dtype):
        value = rounded(float(value), dtype)
    elif is_bool(dtype):
        value = bool(value)
    else:
        value = _wrap(int(value), dtype)
    return Expr("const", dtype, (), value)


def rounded(value: float, dtype: DType) -> float:
    """Returns the number of that dtype nearest to the value, so that a cast to a wider dtype adds no digits."""
    if dtype is torch.float64 or not math.isfinite(value):
        return value
    try:
        if dtype is torch.float16:
            return float(struct.unpack("e", struct.pack("e", value))[0])
        (bits,) = struct.unpack("I", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    if dtype is torch.bfloat16:
        bits = min(bits + 0x7FFF + ((bits >> 16) & 1), 0xFFFFFFFF) & 0xFFFF0000
    return float(struct.unpack("f", struct.pack("I", bits))[0])


def _wrap(value: int, dtype: DType) -> int:
    info = torch.iinfo(dtype)
    return (value - info.min) % (1 << info.bits) + info.min


def lift(x: Scalar, dtype: DType) -> Expr:
    return x if isinstance(x, Expr) else const(x, dtype)


def index_value(i: Index | Sym | int, dtype: DType = torch.int64) -> Expr:
    i = as_index(i)
    if i.is_const:
        return const(i.const, dtype)
    return cast(Expr("index", torch.int64, (), i), dtype)


def fresh_carry(dtype: DType) -> Expr:
    return Expr("carry", dtype, (), next(_fresh))


def fresh_sym(extent: Index | int | None, prefix: str = "w") -> Sym:
    return Sym(f"{prefix}{next(_fresh)}", extent)


def restart_names() -> None:
    """Restarts the count of fresh names, so that the same graph always gives the same text."""
    global _fresh
    _fresh = itertools.count()


def load(buffer: str, index: tuple[Index, ...], dtype: DType, mask: Expr | None = None) -> Expr:
    return Expr("load", dtype, () if mask is None or _is_true(mask) else (mask,), (buffer, index))


def cast(x: Expr, dtype: DType) -> Expr:
    if x.dtype is dtype:
        return x
    if x.op == "const":
        if is_float(x.dtype) and not is_float(dtype) and not is_bool(dtype) and abs(x.attr) < 2**31:
            return const(int(x.attr), dtype)
        if not is_float(x.dtype) or is_bool(dtype) or dtype in (torch.float32, torch.float64):
            return const(x.attr, dtype)
    if is_bool(dtype) and x.dtype in SMALL_FLOATS:  # the bits of -0.0 are not zero
        x = cast(x, torch.float32)
    return Expr("cast", dtype, (x,))


def unary(op: str, x: Expr) -> Expr:
    if op == "neg" and x.op == "const":
        return const(-x.attr, x.dtype)
    if op == "logical_not":
        if not is_bool(x.dtype):
            return binary("eq", x, 0)
        if x.op == "const":
            return const(not x.attr, x.dtype)
        if x.op == "logical_not":
            return x.args[0]
    _, result = OPS[op]
    if result == "bool" and x.dtype in SMALL_FLOATS:
        x = cast(x, torch.float32)
    return Expr(op, torch.bool if result == "bool" else x.dtype, (x,))


def _is_true(x: Expr) -> bool:
    return x.op == "const" and x.attr is True


def _is_false(x: Expr) -> bool:
    return x.op == "const" and x.attr is False


_FOLDED: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}


def binary(op: str, a: Scalar, b: Scalar) -> Expr:
    if not isinstance(a, Expr):
        if not isinstance(b, Expr):
            raise TypeError(f"{op}: needs at least one expression")
        a = lift(a, b.dtype)
    b = lift(b, a.dtype)
    if a.dtype is not b.dtype:
        raise TypeError(f"{op}: operands have different dtypes {a.dtype} and {b.dtype}: {a!r}, {b!r}")
    if OPS[op][1] == "bool" and a.dtype in SMALL_FLOATS:
        a, b = cast(a, torch.float32), cast(b, torch.float32)
    if op == "bitwise_and" and is_bool(a.dtype):
        if _is_true(a) or a is b or _is_false(b):
            return b
        if _is_true(b) or _is_false(a):
            return a
    if op == "bitwise_or" and is_bool(a.dtype):
        if _is_false(a) or a is b or _is_true(b):
            return b
        if _is_false(b) or _is_true(a):
            return a
    if op in _FOLDED and a.op == "const" and b.op == "const" and not is_bool(a.dtype):
        return const(_FOLDED[op](a.attr, b.attr), torch.bool if OPS[op][1] == "bool" else a.dtype)
    if op == "mul" and not is_bool(a.dtype):
        if b.op == "const" and b.attr == 1:
            return a
        if a.op == "const" and a.attr == 1:
            return b
    if not is_float(a.dtype) and not is_bool(a.dtype):
        if op in ("add", "sub") and b.op == "const" and b.attr == 0:
            return a
        if op == "add" and a.op == "const" and a.attr == 0:
            return b
        bound = _decide_by_range(op, a, b)
        if bound is not None:
            return bound
    return Expr(op, torch.bool if OPS[op][1] == "bool" else a.dtype, (a, b))


def _decide_by_range(op: str, a: Expr, b: Expr) -> Expr | None:
    """Decides comparisons of index values by their ranges: padding masks disappear in the interior."""
    if OPS[op][1] != "bool" or a.dtype not in (torch.int64, torch.int32):
        return None
    ia, ib = _as_plain_index(a), _as_plain_index(b)
    if ia is None or ib is None:
        return None
    d = ib - ia
    least, high = upper(-d).bounds()[1], upper(d).bounds()[1]
    low = None if least is None else -least
    if op in ("lt", "ge"):
        verdict = True if low is not None and low > 0 else False if high is not None and high <= 0 else None
    elif op in ("le", "gt"):
        verdict = True if low is not None and low >= 0 else False if high is not None and high < 0 else None
    else:
        differ = (low is not None and low > 0) or (high is not None and high < 0)
        verdict = True if d.is_const and d.const == 0 else False if differ else None
    if verdict is None:
        return None
    return const(verdict if op in ("lt", "le", "eq") else not verdict, torch.bool)


def _as_plain_index(x: Expr) -> Index | None:
    if x.op == "index":
        return x.attr  # type: ignore[no-any-return]
    if x.op == "cast" and x.dtype is torch.int32 and x.args[0].op == "index":
        lo, hi = x.args[0].attr.bounds()
        return x.args[0].attr if lo is not None and hi is not None and lo >= -2**31 and hi < 2**31 else None
    return as_index(x.attr) if x.op == "const" else None


def where(cond: Expr, a: Scalar, b: Scalar) -> Expr:
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        raise TypeError("where: at least one branch must be an expression")
    a = lift(a, b.dtype) if isinstance(b, Expr) else a
    assert isinstance(a, Expr)
    b = lift(b, a.dtype)
    if a.dtype is not b.dtype:
        raise TypeError(f"where: branches have different dtypes {a.dtype} and {b.dtype}")
    if not is_bool(cond.dtype):
        cond = binary("ne", cond, 0)
    if cond.op == "const":
        return a if cond.attr else b
    if a is b:
        return a
    return Expr("where", a.dtype, (cond, a, b))


def check(value: Expr, size: Index | int, mask: Expr | None = None, fault: Fault = Fault.SELECTED, dim: int = 0
          ) -> Index:
    """Returns an index from a computed value that must lie in [0, size); the kernel reports the fault if it does
    not."""
    size = as_index(size)
    plain = _as_plain_index(cast(value, torch.int64))
    hi = size.bounds()[1]
    if plain is not None:
        if fits(plain, size):
            return plain
    e = Expr("check", torch.int64, (cast(value, torch.int64), *(() if mask is None else (mask,))),
             Bound(size, fault, dim))
    # If 0 is the only valid value, it must not be assumed before the check: leave the upper bound at 1.
    return from_atom(Dyn(e, 0, None if hi is None else max(hi - 1, 1)))


def computed(value: Expr, lo: int | None = None, hi: int | None = None) -> Index:
    """Returns an index from a computed value that needs no check (its range is known by construction)."""
    plain = _as_plain_index(cast(value, torch.int64))
    if plain is not None:
        return plain
    return from_atom(Dyn(cast(value, torch.int64), lo, hi))


def require(value: Expr, holds: Expr, fault: Fault) -> Expr:
    """Returns the value, unchanged; the kernel reports the fault where the condition does not hold."""
    return value if _is_true(holds) else Expr("require", value.dtype, (value, holds), fault)


def held(value: Expr, indices: Iterable[Index], masks: tuple[Expr, ...] = ()) -> Expr:
    """Adds the checks of the given indices to a value that does not contain them: those along a dimension of size one,
    for example, or of a value that is the same everywhere."""
    checks = dict.fromkeys(a.expr for i in indices for a in i.atoms() if isinstance(a, Dyn) and a.expr.op == "check")
    checks.update(dict.fromkeys(e for e in walk(*masks) if e.op == "check"))
    if checks:
        there = {e for e in walk(value) if e.op == "check"}
        for c in checks:
            value = value if c in there else require(value, binary("ge", c, 0), c.attr.fault)
    return value


def fold(loops: tuple[tuple[Sym, Index, Index], ...], carries: tuple[Expr, ...], inits: tuple[Expr, ...],
         updates: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Returns the final values of the carries; see `Fold`."""
    args = inits + updates
    return tuple(Expr("fold", c.dtype, args, Fold(loops, carries, k)) for k, c in enumerate(carries))


# ---- walking -----------------------------------------------------------------------------------------


def rewrite(root: Expr, fn: Callable[[Expr], Expr], mapping: Mapping[Sym, Index] | None = None,
            memo: dict[Expr, Expr] | None = None) -> Expr:
    """Rebuilds an expression bottom-up: replaces symbols by `mapping`, then applies `fn` to every node.

    Values computed inside indices are rebuilt as well, so nothing hides from `fn`.
    """
    mapping = mapping or {}
    memo = {} if memo is None else memo

    def on_index(i: Index) -> Index:
        if not any(isinstance(a, Dyn) for a in i.atoms()):
            return i.subs(mapping)
        total = as_index(i.const)
        for mono, coef in i.terms:
            term = as_index(coef)
            for a in mono:
                if isinstance(a, Dyn):
                    term = term * resolved(rebuilt(a.expr), a)
                elif isinstance(a, Op):
                    x, y = on_index(a.a), on_index(a.b)
                    term = term * BUILD[a.kind](x, y)
                else:
                    term = term * a.subs(mapping)
            total = total + term
        return total

    def rebuilt(e: Expr) -> Expr:
        done = memo.get(e)
        if done is not None:
            return done
        args = tuple(rebuilt(a) for a in e.args)
        out: Expr
        if e.op == "index":
            out = index_value(on_index(e.attr))
        elif e.op == "load":
            out = load(e.attr[0], tuple(on_index(i) for i in e.attr[1]), e.dtype, *args)
        elif e.op == "check":
            out = Expr("check", e.dtype, args, e.attr._replace(size=on_index(e.attr.size)))
        elif e.op == "fold":
            f: Fold = e.attr
            loops = tuple((v, on_index(lo), on_index(hi)) for v, lo, hi in f.loops)
            out = Expr("fold", e.dtype, args, Fold(loops, f.carries, f.which))
        elif args == e.args:
            out = e
        else:
            out = remake(e, args)
            if out in args or any(out in a.args for a in args):  # simplified to an operand: it has been through fn
                memo[e] = out
                return out
        out = fn(out)
        memo[e] = out
        return out

    return rebuilt(root)


def resolved(e: Expr, a: Dyn) -> Index:
    """Rebuilds a computed index after its value was rewritten: plain, if the value is plain and passes its check."""
    plain = _as_plain_index(e.args[0] if e.op == "check" else e)
    if plain is None or (e.op == "check" and not fits(plain, e.attr.size)):
        return from_atom(Dyn(e, a.lo, a.hi))
    return plain


def remake(e: Expr, args: tuple[Expr, ...]) -> Expr:
    """Returns the same operation on other arguments, simplified again."""
    if e.op == "cast":
        return cast(args[0], e.dtype)
    if e.op == "where":
        return where(*args)
    if e.op == "require":
        return require(args[0], args[1], e.attr)
    if e.attr is None and len(args) == 2 and e.op in OPS:
        return binary(e.op, *args)
    if e.attr is None and len(args) == 1 and e.op in OPS and e.op != "bitcast":
        return unary(e.op, *args)
    return Expr(e.op, e.dtype, args, e.attr)


def walk(*roots: Expr) -> Iterator[Expr]:
    """Yields every distinct expression once, operands before users, including values inside indices."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        e, ready = stack.pop()
        if ready:
            yield e
            continue
        if e in seen:
            continue
        seen.add(e)
        stack.append((e, True))
        for child in (*index_children(e), *reversed(e.args)):
            if child not in seen:
                stack.append((child, False))


def index_children(e: Expr) -> tuple[Expr, ...]:
    own = e.own_indices()
    return tuple(a.expr for i in own for a in i.atoms() if isinstance(a, Dyn)) if own else ()


def loads(*roots: Expr) -> list[Expr]:
    """Returns every load once, in the order of `walk`. Cached on the expression, because every pass asks for it."""
    found: dict[Expr, None] = {}
    for root in roots:
        if root.op == "load":  # a cached tuple would contain the expression itself: a reference cycle
            found.update(dict.fromkeys(e for e in walk(root) if e.op == "load"))
            continue
        if root._loads is None:
            root._loads = tuple(e for e in walk(root) if e.op == "load")
        found.update(dict.fromkeys(root._loads))
    return list(found)


def conjuncts(e: Expr) -> Iterator[Expr]:
    """Yields the terms of a conjunction."""
    if e.op == "bitwise_and":
        for a in e.args:
            yield from conjuncts(a)
    else:
        yield e


def chosen(e: Expr) -> tuple[Expr, Expr] | None:
    """Returns a condition and a value if the expression is zero without the condition and the value with it; else
    None."""
    if e.op == "cast":
        found = chosen(e.args[0])
        return None if found is None else (found[0], cast(found[1], e.dtype))
    if e.op != "where" or e.args[2].op != "const" or e.args[2].attr != 0:
        return None
    return e.args[0], e.args[1]


def masked(body: Expr, mask: Expr, along: frozenset[Sym] | None = None) -> Expr:
    """Returns the body with loads and checks executed only where the mask holds. `along`: only those that depend on one
    of these variables."""

    def guard(e: Expr) -> Expr:
        if along is not None and e.op in ("load", *CHECKED) and along.isdisjoint(e.symbols()):
            return e
        if e.op == "load":
            m = mask if not e.args else mask & e.args[0]
            return load(e.attr[0], e.attr[1], e.dtype, m)
        if e.op == "check":
            m = mask if len(e.args) == 1 else mask & e.args[1]
            return Expr("check", e.dtype, (e.args[0], m), e.attr)
        if e.op == "require":
            return require(e.args[0], e.args[1] | ~mask, e.attr)
        return e

    return body if _is_true(mask) else rewrite(body, guard)


# ---- cost ------------------------------------------------------------------------------------------------

FREE = frozenset(("const", "load", "index", "cast", "local", "carry", "raw"))
SIMPLE = frozenset((
    "add", "sub", "mul", "neg", "abs", "min", "max", "where", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and",
    "bitwise_or", "bitwise_xor", "bitwise_not", "logical_not", "shl", "shr", "isnan", "fma", "sign",
    "require"))


def cost_of(exprs: Sequence[Expr]) -> int:
    """The number of element operations of a body; a transcendental function counts for several, a loop for many."""
    total = 1
    for e in walk(*exprs):
        if e.op == "fold":
            total += 16
        elif e.op not in FREE:
            total += 1 if e.op in SIMPLE else 6
    return total

"""Integer index algebra: interned polynomials over symbols with known ranges.

An `Index` is a canonical sum of integer multiples of products of atoms, plus a constant. An atom is a
symbol (a loop variable or a run-time size), a floor-division, a remainder, a minimum, a maximum, or a
value computed by the kernel itself (`Dyn`, an index read from memory). Equal indices are the same object,
so comparison is `is` and every result can be memoised.

Simplification aims at one thing: views of views of views must index with no leftover division where none
is needed. Everything rests on ranges: `(12*a + b) // 24` is `a // 2` when b is known to be in [0, 12).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import Any, Union
from weakref import WeakValueDictionary

IndexLike = Union["Index", "Sym", int]
Monomial = tuple["Atom", ...]
Bounds = tuple[int | None, int | None]


class Atom:
    """An indivisible factor. `key` orders atoms the same way in every process."""

    __slots__ = ("key", "lo", "hi", "__weakref__")
    key: str
    lo: int | None
    hi: int | None

    def __repr__(self) -> str:
        return self.key

    def symbols(self) -> frozenset[Sym]:
        raise NotImplementedError

    def subs(self, mapping: Mapping[Sym, Index]) -> Index:
        raise NotImplementedError


_syms: WeakValueDictionary[tuple[Any, ...], Sym] = WeakValueDictionary()
_ops: WeakValueDictionary[tuple[Any, ...], Op] = WeakValueDictionary()
_dyns: WeakValueDictionary[tuple[Any, ...], Dyn] = WeakValueDictionary()
_indices: WeakValueDictionary[tuple[Any, ...], Index] = WeakValueDictionary()


WORD = "word"  # the prefix of run-time numbers that are not sizes: kernels compute with their bits


class Sym(Atom):
    """A loop variable (with an `extent`), or a run-time size or word (without)."""

    __slots__ = ("name", "extent")
    name: str
    extent: Index | None

    def __new__(cls, name: str, extent: IndexLike | None = None, lo: int | None = 0,
                hi: int | None = None) -> Sym:
        ext = None if extent is None else as_index(extent)
        if ext is not None and hi is None:
            top = ext.bounds()[1]
            hi = None if top is None else max(top - 1, 0)
        key = (name, ext, lo, hi)
        found = _syms.get(key)
        if found is not None:
            return found
        self = object.__new__(cls)
        self.name, self.extent, self.lo, self.hi, self.key = name, ext, lo, hi, name
        _syms[key] = self
        return self

    @property
    def size(self) -> Index:
        """The number of values that a loop variable takes."""
        assert self.extent is not None, f"{self.name} is no loop variable"
        return self.extent

    def symbols(self) -> frozenset[Sym]:
        return frozenset((self,))

    def subs(self, mapping: Mapping[Sym, Index]) -> Index:
        return mapping.get(self) or from_atom(self)


class Op(Atom):
    """`a // b`, `a % b`, `min(a, b)` or `max(a, b)` that did not simplify."""

    __slots__ = ("kind", "a", "b", "_symbols")
    kind: str
    a: Index
    b: Index
    _symbols: frozenset[Sym]

    def __new__(cls, kind: str, a: Index, b: Index, lo: int | None, hi: int | None) -> Op:
        key = (kind, a, b)
        found = _ops.get(key)
        if found is not None:
            return found
        self = object.__new__(cls)
        self.kind, self.a, self.b, self.lo, self.hi = kind, a, b, lo, hi
        self.key = f"{kind}({a},{b})"
        self._symbols = a.symbols() | b.symbols()
        _ops[key] = self
        return self

    def symbols(self) -> frozenset[Sym]:
        return self._symbols

    def subs(self, mapping: Mapping[Sym, Index]) -> Index:
        if self._symbols.isdisjoint(mapping):
            return from_atom(self)
        return BUILD[self.kind](self.a.subs(mapping), self.b.subs(mapping))


class Dyn(Atom):
    """An index that the kernel computes. The scalar expression is opaque here, except for its symbols."""

    __slots__ = ("expr",)
    expr: Any

    def __new__(cls, expr: Any, lo: int | None, hi: int | None) -> Dyn:
        key = (expr, lo, hi)
        found = _dyns.get(key)
        if found is not None:
            return found
        self = object.__new__(cls)
        self.expr, self.lo, self.hi, self.key = expr, lo, hi, f"dyn[{expr.digest}]"
        _dyns[key] = self
        return self

    def symbols(self) -> frozenset[Sym]:
        return self.expr.symbols()  # type: ignore[no-any-return]

    def subs(self, mapping: Mapping[Sym, Index]) -> Index:
        if self.symbols().isdisjoint(mapping):
            return from_atom(self)
        return from_atom(Dyn(self.expr.subs(mapping), self.lo, self.hi))


class Index:
    """A canonical polynomial; make one with `as_index`, `from_atom` and the operators."""

    __slots__ = ("terms", "const", "_bounds", "_symbols", "_text", "__weakref__")
    terms: tuple[tuple[Monomial, int], ...]
    const: int
    _bounds: Bounds | None
    _symbols: frozenset[Sym] | None
    _text: str | None

    def __new__(cls, terms: tuple[tuple[Monomial, int], ...], const: int) -> Index:
        key = (terms, const)
        found = _indices.get(key)
        if found is not None:
            return found
        self = object.__new__(cls)
        self.terms, self.const = terms, const
        self._bounds = None
        self._symbols = None
        self._text = None
        _indices[key] = self
        return self

    # ---- facts -------------------------------------------------------------------------------------

    @property
    def is_const(self) -> bool:
        return not self.terms

    def __int__(self) -> int:
        if self.terms:
            raise TypeError(f"index {self} is not a constant")
        return self.const

    def atom(self) -> Atom | None:
        """The atom, if this index is exactly one."""
        if self.const == 0 and len(self.terms) == 1:
            (mono, coef), = self.terms
            if coef == 1 and len(mono) == 1:
                return mono[0]
        return None

    def symbols(self) -> frozenset[Sym]:
        if self._symbols is None:
            out: frozenset[Sym] = frozenset()
            for mono, _ in self.terms:
                for a in mono:
                    out |= a.symbols()
            self._symbols = out
        return self._symbols

    def atoms(self) -> Iterable[Atom]:
        """Yields every atom, including those inside other atoms (but not inside computed values)."""
        for mono, _ in self.terms:
            for a in mono:
                yield a
                if isinstance(a, Op):
                    yield from a.a.atoms()
                    yield from a.b.atoms()

    def quotients(self) -> Iterable[tuple[Sym, Index]]:
        """Yields variables that this index divides, with their divisors: x of x // k, x % k, and (x + c) // k."""
        for a in self.atoms():
            if isinstance(a, Op) and a.kind in ("div", "mod") and a.b is not ONE:
                v = (a.a - a.a.const).atom()
                if isinstance(v, Sym) and v.extent is not None:
                    yield v, a.b

    def divisions(self) -> Iterable[tuple[Sym, int]]:
        """Yields the divisions in which variable and divisor have known sizes."""
        return ((v, k.const) for v, k in self.quotients()
                if k.is_const and v.size.is_const and 1 < k.const < v.size.const)

    def bounds(self) -> Bounds:
        """The inclusive numeric range; None for an unknown end."""
        if self._bounds is None:
            lo: int | None = self.const
            hi: int | None = self.const
            for mono, coef in self.terms:
                a, b = _mono_bounds(mono)
                if coef < 0:
                    a, b = b, a
                lo = None if lo is None or a is None else lo + coef * a
                hi = None if hi is None or b is None else hi + coef * b
            self._bounds = (lo, hi)
        return self._bounds

    def can_leave(self, limit: int) -> bool:
        """Whether the index, or an operand of a division or comparison inside it, can lie outside of [-limit, limit).
        Sums that overflow wrap back, quotients do not."""
        return any(lo is None or hi is None or lo < -limit or hi >= limit
                   for lo, hi in (i.bounds() for i in self.on_the_way()))

    def on_the_way(self) -> Iterable[Index]:
        """The index itself, and all operands of divisions and comparisons inside it."""
        return (self, *(i for a in self.atoms() if isinstance(a, Op) for i in (a.a, a.b)))

    def at_most_one(self) -> bool:
        """Whether a size is known to be 0 or 1: no index along it moves, and its stride has no meaning."""
        most = self.bounds()[1]
        return most is not None and most <= 1

    def coefficient(self, sym: Sym) -> Index | None:
        """Returns d(self)/d(sym) if this index is affine in `sym`, else None."""
        if sym not in self.symbols():
            return ZERO
        out: list[tuple[Monomial, int]] = []
        const = 0
        for mono, coef in self.terms:
            rest = tuple(a for a in mono if a is not sym)
            if any(sym in a.symbols() for a in rest) or len(mono) - len(rest) > 1:
                return None
            if len(rest) < len(mono):
                if rest:
                    out.append((rest, coef))
                else:
                    const += coef
        return Index(tuple(sorted(out, key=_term_key)), const)

    def subs(self, mapping: Mapping[Sym, Index]) -> Index:
        if not mapping or self.symbols().isdisjoint(mapping):
            return self
        total = as_index(self.const)
        for mono, coef in self.terms:
            product = as_index(coef)
            for a in mono:
                product = product * a.subs(mapping)
            total = total + product
        return total

    # ---- arithmetic --------------------------------------------------------------------------------

    def __add__(self, other: IndexLike) -> Index:
        o = as_index(other)
        if not o.terms:
            return self if o.const == 0 else Index(self.terms, self.const + o.const)
        if not self.terms and self.const == 0:
            return o
        acc = dict(self.terms)
        for mono, coef in o.terms:
            acc[mono] = acc.get(mono, 0) + coef
        return _normal(acc, self.const + o.const)

    __radd__ = __add__

    def __neg__(self) -> Index:
        return Index(tuple((m, -c) for m, c in self.terms), -self.const)

    def __sub__(self, other: IndexLike) -> Index:
        return self + (-as_index(other))

    def __rsub__(self, other: IndexLike) -> Index:
        return as_index(other) - self

    def __mul__(self, other: IndexLike) -> Index:
        o = as_index(other)
        if not o.terms:
            if o.const == 1:
                return self
            if o.const == 0:
                return ZERO
            return Index(tuple((m, c * o.const) for m, c in self.terms), self.const * o.const)
        if not self.terms:
            return o * self.const
        acc: dict[Monomial, int] = {}
        for m1, c1 in (*self.terms, ((), self.const)):
            for m2, c2 in (*o.terms, ((), o.const)):
                if c1 and c2:
                    mono = tuple(sorted(m1 + m2, key=_atom_key))
                    acc[mono] = acc.get(mono, 0) + c1 * c2
        return _normal(acc, acc.pop((), 0))

    __rmul__ = __mul__

    def __floordiv__(self, other: IndexLike) -> Index:
        return floordiv(self, as_index(other))

    def __rfloordiv__(self, other: IndexLike) -> Index:
        return floordiv(as_index(other), self)

    def __mod__(self, other: IndexLike) -> Index:
        return mod(self, as_index(other))

    def __repr__(self) -> str:
        if self._text is None:
            parts = ["*".join(([str(c)] if c != 1 else []) + [a.key for a in m]) for m, c in self.terms]
            if self.const or not parts:
                parts.append(str(self.const))
            self._text = " + ".join(parts)
        return self._text


ZERO = Index((), 0)
ONE = Index((), 1)


def as_index(x: IndexLike) -> Index:
    if isinstance(x, Index):
        return x
    if isinstance(x, Sym):
        return from_atom(x)
    return Index((), int(x))


def from_atom(a: Atom) -> Index:
    return Index((((a,), 1),), 0)


def product(sizes: Iterable[IndexLike]) -> Index:
    out = ONE
    for s in sizes:
        out = out * s
    return out


def volume(vars: Iterable[Sym]) -> Index:
    """The number of points that loop variables span together."""
    return product(v.size for v in vars)


def flat(vars: Iterable[Sym]) -> Index:
    """The row-major position of a point of these variables."""
    at = ZERO
    for v in vars:
        at = at * v.size + v
    return at


def offset_of(index: Iterable[Index], strides: Iterable[IndexLike], start: Index = ZERO) -> Index:
    return sum((i * s for i, s in zip(index, strides, strict=True)), start)


def unflat(at: Index, sizes: Sequence[Index]) -> tuple[Index, ...]:
    """Returns the indices of a row-major position; for contiguous memory the divisions cancel later."""
    out: list[Index] = []
    for n in reversed(sizes[1:]):
        out.append(at % n)
        at = at // n
    return (at, *reversed(out))


def walks_as_one(i: Index, a: Sym, b: Sym) -> bool:
    """Whether a and b occur only as a * (extent of b) + b, within divisions as well. Values that a kernel computes have
    indices of their own."""
    both = {a, b}
    plain = []
    for mono, coef in i.terms:
        if any(isinstance(x, Dyn) for x in mono) and all(
                isinstance(x, Dyn) or isinstance(x, Sym) and x.extent is None for x in mono):
            continue
        inside = [x for x in mono if isinstance(x, Op) and not both.isdisjoint(x.symbols())]
        if not all(walks_as_one(x.a, a, b) and walks_as_one(x.b, a, b) for x in inside):
            return False
        if not inside:
            plain.append((mono, coef))
        elif any(x not in inside and not both.isdisjoint(x.symbols()) for x in mono):
            return False
    rest = Index(tuple(plain), i.const)
    ca, cb = rest.coefficient(a), rest.coefficient(b)
    return ca is not None and cb is not None and ca is cb * b.size


def _atom_key(a: Atom) -> str:
    return a.key


def _term_key(term: tuple[Monomial, int]) -> tuple[str, ...]:
    return tuple(a.key for a in term[0])


def _mono_bounds(mono: Monomial) -> Bounds:
    if len(mono) == 1:
        return mono[0].lo, mono[0].hi
    lo: int | None = 1
    hi: int | None = 1
    for a in mono:
        # Sizes and loop variables are never negative, so half-open products keep their lower end.
        if lo is not None and lo >= 0 and a.lo is not None and a.lo >= 0:
            lo, hi = lo * a.lo, None if hi is None or a.hi is None else hi * a.hi
        elif lo is None or hi is None or a.lo is None or a.hi is None:
            return None, None
        else:
            ends = [x * y for x in (lo, hi) for y in (a.lo, a.hi)]
            lo, hi = min(ends), max(ends)
    return lo, hi


def _normal(acc: dict[Monomial, int], const: int) -> Index:
    terms = {m: c for m, c in acc.items() if c}
    # Joins remainders with their quotients: c*(x % a) + c*a*(x // a) = c*x, and one level deeper.
    for mono, coef in list(terms.items()):
        for k, rest in enumerate(mono):
            joined = _join(rest, mono[:k] + mono[k + 1:], coef, terms) if isinstance(rest, Op) else None
            if joined is not None:
                partners, whole = joined
                for gone in (mono, *partners):
                    del terms[gone]
                return _normal(terms, const) + whole
    return Index(tuple(sorted(terms.items(), key=_term_key)), const)


def _join(rest: Op, factor: Monomial, coef: int, terms: Mapping[Monomial, int]
          ) -> tuple[tuple[Monomial, ...], Index] | None:
    """Finds the terms that combine with coef * factor * rest; returns these terms and the combined index, or None."""
    x, a = rest.a, rest.b
    if rest.kind != "mod":
        return None
    scale = Index(((factor, 1),), 0) * coef if factor else as_index(coef)
    if len(a.terms) > 1 or (a.terms and a.const):  # a sum: the quotient is multiplied with each of its terms
        if not isinstance(q := floordiv(x, a).atom(), Op) or not any(q in mono for mono in terms):
            return None
        parts = {tuple(sorted((*factor, q, *by), key=_atom_key)): coef * c for by, c in (*a.terms, ((), a.const)) if c}
        return (tuple(parts), x * scale) if all(terms.get(m) == c for m, c in parts.items()) else None
    (by, times), = a.terms or (((), a.const),)
    quotient = None
    for other, c in terms.items():
        left = _without(other, factor + by)
        if c != coef * times or left is None or len(left) != 1:
            continue
        quotient = quotient or floordiv(x, a)
        # x % a is (x + a*t) % a, so the quotients may differ by any plain t.
        if _is_plain(t := from_atom(left[0]) - quotient):
            return (other,), (x + t * a) * scale
        if isinstance(left[0], Op) and left[0].kind == "mod" and _is_plain(t := left[0].a - quotient):
            return (other,), mod(x + t * a, a * left[0].b) * scale
    return None


def _without(mono: Monomial, gone: Monomial) -> Monomial | None:
    left = list(mono)
    for a in gone:
        if a not in left:
            return None
        left.remove(a)
    return tuple(left)


def _is_plain(e: Index) -> bool:
    return not any(isinstance(a, Op) for m, _ in e.terms for a in m)


# ---- ranges ------------------------------------------------------------------------------------------


def about(size: Index, typical: Mapping[Sym, int], unknown: int) -> int:
    """Returns a size, or its typical value: for choosing among loops that are correct for any size."""
    if not size.is_const and typical:
        size = size.subs({s: as_index(n) for s, n in typical.items()})
    return size.const if size.is_const else unknown


def upper(e: Index) -> Index:
    """Returns a symbolic upper bound: every loop variable at its last value. An index without symbolic sizes is
    returned unchanged, since its numeric range says as much."""
    if all(s.extent is not None and s.extent.is_const for s in e.symbols()):
        return e
    last = {s: s.extent - 1 for s in e.symbols() if s.extent is not None}
    out = as_index(e.const)
    for mono, coef in e.terms:
        term = Index(((mono, coef),), 0)
        # Only a term that never falls as a variable rises is greatest at the last value; a remainder is not.
        grows = coef > 0 and all(_never_falls(a, last) for a in mono)
        out = out + (term.subs(last) if grows else term)
    return out


def largest(e: Index) -> Index | None:
    """Returns a bound of the absolute value, over run-time sizes alone; None if there is none."""
    if not any(s.extent is not None or s.name.startswith(WORD) for s in e.symbols()) \
            and not any(isinstance(a, Dyn) for a in e.atoms()):
        return e if is_nonneg(e) else maximum(e, -e)
    total = as_index(abs(e.const))
    for mono, coef in e.terms:
        term = as_index(abs(coef))
        for a in mono:
            most = _largest_atom(a)
            if most is None:
                return None
            term = term * most
        total = total + term
    return total


def _largest_atom(a: Atom) -> Index | None:
    if a.lo is not None and a.hi is not None:
        return as_index(max(abs(a.lo), abs(a.hi)))
    if isinstance(a, Sym):
        most = None if a.extent is None or a.lo is None or a.lo < 0 else largest(a.extent)
        return from_atom(a) if a.extent is None and not a.name.startswith(WORD) else None if most is None else most - 1
    if isinstance(a, Dyn):  # a checked value is below its size
        return largest(a.expr.attr.size) if a.expr.op == "check" else None
    assert isinstance(a, Op)
    x, y = largest(a.a), largest(a.b)
    if a.kind == "mod" or a.kind == "min" and is_nonneg(a.a) and is_nonneg(a.b):
        return y if x is None or a.kind == "mod" and not is_nonneg(a.a) else x if y is None else minimum(x, y)
    if x is None or y is None:
        return None
    if a.kind == "div":  # a negative quotient is rounded one further down
        return floordiv(x, maximum(a.b, 1)) + int(not is_nonneg(a.a)) if a.b is y else x
    return maximum(x, y)


def _never_falls(a: Atom, syms: Mapping[Sym, Index]) -> bool:
    if a.lo is None or a.lo < 0:
        return False
    if isinstance(a, Op) and a.kind == "div" and a.b.symbols().isdisjoint(syms):
        return all(c > 0 and all(_never_falls(x, syms) for x in m) for m, c in a.a.terms)
    return isinstance(a, Sym) or a.symbols().isdisjoint(syms)


def is_nonneg(e: Index) -> bool:
    lo = e.bounds()[0]
    return lo is not None and lo >= 0


def is_less(a: Index, b: IndexLike) -> bool:
    """Whether a < b provably."""
    return is_nonneg(as_index(b) - 1 - upper(a))


def fits(e: Index, size: IndexLike) -> bool:
    """Whether 0 <= e < size provably."""
    return is_nonneg(e) and is_less(e, size)


# ---- division ----------------------------------------------------------------------------------------


def _divide_exactly(e: Index, d: Index) -> tuple[Index, Index]:
    """Returns q and r with e = q*d + r: every term of e that d divides is moved into q (d is a single monomial)."""
    if not d.terms:
        k = d.const
        q = Index(tuple((m, c // k) for m, c in e.terms if c % k == 0), e.const // k)
        return q, Index(tuple((m, c) for m, c in e.terms if c % k), e.const % k)
    if len(d.terms) != 1 or d.const:
        return (ONE, ZERO) if e is d else (ZERO, e)
    (dm, dc), = d.terms
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for m, c in e.terms:
        left = list(m)
        try:
            for a in dm:
                left.remove(a)
        except ValueError:
            rest[m] = c
            continue
        if c % dc:
            rest[m] = c
        else:
            quotient[tuple(left)] = c // dc
    return _normal(quotient, quotient.pop((), 0)), _normal(rest, e.const)


def is_positive(d: Index) -> bool:
    """Whether d is provably at least 1: a loop over so many points runs."""
    lo = d.bounds()[0]
    return lo is not None and lo > 0


def _by_common_factor(e: Index, k: int) -> tuple[int, Index, Index] | None:
    """Splits e into g * big + small with 0 <= small < g, for the greatest such g that divides k; None if there is
    none."""
    for g in sorted({gcd(c, k) for _, c in e.terms}, reverse=True):
        if g == 1:
            break
        small = Index(tuple((m, c) for m, c in e.terms if c % g), e.const % g)
        if fits(small, g):
            return g, Index(tuple((m, c // g) for m, c in e.terms if c % g == 0), e.const // g), small
    return None


def floordiv(e: Index, d: Index) -> Index:
    if d is ONE:
        return e
    if d is ZERO:
        return ZERO  # an index into a dimension of size zero: no loop ever gets there
    if not d.terms and not e.terms:
        return as_index(e.const // d.const)
    q, r = _divide_exactly(e, d)
    if r is ZERO or fits(r, d):
        return q
    if not d.terms:
        k = d.const
        if k > 0:
            if (parts := _by_common_factor(r, k)) is not None:
                g, big, _ = parts
                return q + floordiv(big, as_index(k // g))
            a = r.atom()
            if isinstance(a, Op) and a.kind == "mod" and not a.b.terms and a.b.const % k == 0:
                return q + mod(floordiv(a.a, d), as_index(a.b.const // k))
    # Flattens a nested division: (x + y // g) // k is (g*x + y) // (g*k).
    for m, c in r.terms:
        if c == 1 and len(m) == 1 and isinstance(m[0], Op) and m[0].kind == "div" and is_positive(m[0].b):
            return q + floordiv((r - from_atom(m[0])) * m[0].b + m[0].a, m[0].b * d)
    lo, hi = r.bounds()
    dlo, dhi = d.bounds()
    out_lo = out_hi = None
    if dlo is not None and dlo > 0:
        if lo is not None:
            out_lo = lo // dlo if lo < 0 else (0 if dhi is None else lo // dhi)
        if hi is not None:
            out_hi = hi // dlo if hi >= 0 else -1
    if out_lo is not None and out_lo == out_hi:
        return q + out_lo
    return q + from_atom(Op("div", r, d, out_lo, out_hi))


def mod(e: Index, d: Index) -> Index:
    if d is ZERO:
        return ZERO
    if not d.terms and not e.terms:
        return as_index(e.const % d.const)
    _, r = _divide_exactly(e, d)
    if r is ZERO or fits(r, d):
        return r
    if not d.terms and d.const > 0:
        k = d.const
        # Inner remainders by a multiple of k cancel.
        for m, c in r.terms:
            if len(m) == 1 and isinstance(m[0], Op) and m[0].kind == "mod" and not (m[0].b * c % k).terms:
                if (m[0].b * c % k) is ZERO:
                    return mod(r - from_atom(m[0]) * c + m[0].a * c, d)
        if (parts := _by_common_factor(r, k)) is not None:
            g, big, small = parts
            return mod(big, as_index(k // g)) * g + small
    dhi = d.bounds()[1]
    lo = 0
    hi = None if dhi is None else dhi - 1
    if is_nonneg(r) and (rhi := r.bounds()[1]) is not None and (hi is None or rhi < hi):
        hi = rhi
    return from_atom(Op("mod", r, d, lo, hi))


def minimum(a: IndexLike, b: IndexLike) -> Index:
    # a fixed order for equal results, independent of the order of arguments
    a, b = sorted((as_index(a), as_index(b)), key=repr)
    if is_nonneg(b - a):
        return a
    if is_nonneg(a - b):
        return b
    (alo, ahi), (blo, bhi) = a.bounds(), b.bounds()
    lo = None if alo is None or blo is None else min(alo, blo)
    his = [h for h in (ahi, bhi) if h is not None]
    return from_atom(Op("min", a, b, lo, min(his) if his else None))


def maximum(a: IndexLike, b: IndexLike) -> Index:
    a, b = sorted((as_index(a), as_index(b)), key=repr)
    if is_nonneg(a - b):
        return a
    if is_nonneg(b - a):
        return b
    (alo, ahi), (blo, bhi) = a.bounds(), b.bounds()
    los = [x for x in (alo, blo) if x is not None]
    hi = None if ahi is None or bhi is None else max(ahi, bhi)
    return from_atom(Op("max", a, b, max(los) if los else None, hi))


def ceildiv(a: IndexLike, b: IndexLike) -> Index:
    return (as_index(a) + as_index(b) - 1) // b


BUILD = {"div": floordiv, "mod": mod, "min": minimum, "max": maximum}

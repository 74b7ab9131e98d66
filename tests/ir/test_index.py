"""The index algebra: simplification never changes a value, ranges hold, and views of views leave no division."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flambeau.ir.index import (
    ONE,
    ZERO,
    Index,
    Op,
    Sym,
    as_index,
    ceildiv,
    fits,
    floordiv,
    is_less,
    is_nonneg,
    largest,
    maximum,
    minimum,
    mod,
    product,
    upper,
)
from flambeau.ir.nodes import contiguous_strides
from ir.evaluate import evaluate

# Loop variables of known extent, one whose extent is a size, and two sizes.
M, N = Sym("m", lo=1), Sym("n", lo=2, hi=6)
A, B, C, D = Sym("a", 2), Sym("b", 3), Sym("c", 4), Sym("d", M)
SYMS = (A, B, C, D, M, N)


def points() -> list[dict[Sym, int]]:
    """Every value of every symbol, as far as the sizes are worth trying."""
    return [{A: a, B: b, C: c, D: d, M: m, N: n}
            for m, n in ((1, 2), (3, 5), (4, 6)) for d in range(m)
            for a, b, c in itertools.product(range(2), range(3), range(4))]


POINTS = points()


@dataclass(frozen=True)
class Case:
    """An expression twice: through the algebra, and as a plain function of a point."""

    index: Index
    plain: Callable[[dict[Sym, int]], int]


def leaf_sym(s: Sym) -> Case:
    return Case(as_index(s), lambda env: env[s])


def leaf_int(k: int) -> Case:
    return Case(as_index(k), lambda env: k)


BINARY: dict[str, tuple[Callable[[Index, Index], Index], Callable[[int, int], int]]] = {
    "add": (lambda x, y: x + y, lambda x, y: x + y),
    "sub": (lambda x, y: x - y, lambda x, y: x - y),
    "mul": (lambda x, y: x * y, lambda x, y: x * y),
    "min": (minimum, min),
    "max": (maximum, max),
}


def combine(op: str, x: Case, y: Case) -> Case:
    ours, plain = BINARY[op]
    return Case(ours(x.index, y.index), lambda env: plain(x.plain(env), y.plain(env)))


def divide(op: str, x: Case, d: Case) -> Case:
    ours = floordiv if op == "div" else mod
    return Case(ours(x.index, d.index),
                lambda env: x.plain(env) // d.plain(env) if op == "div" else x.plain(env) % d.plain(env))


def scale(x: Case, k: int) -> Case:
    return Case(x.index * k, lambda env: x.plain(env) * k)


leaves = st.sampled_from(SYMS).map(leaf_sym) | st.integers(-6, 30).map(leaf_int)
# Divisors are what sizes are: constants and products of sizes, never zero.
divisors = st.sampled_from((1, 2, 3, 4, 6, 8, 12, 24)).map(leaf_int) | st.sampled_from(
    (leaf_sym(M), leaf_sym(N), scale(leaf_sym(N), 2), combine("mul", leaf_sym(M), leaf_sym(N))))
cases = st.recursive(leaves, lambda inner: st.one_of(
    st.builds(combine, st.sampled_from(sorted(BINARY)), inner, inner),
    st.builds(divide, st.sampled_from(("div", "mod")), inner, divisors),
    st.builds(divide, st.sampled_from(("div", "mod")), inner, divisors),
    st.builds(scale, inner, st.sampled_from((-4, -1, 2, 3, 4, 6, 8, 12))),
), max_leaves=10)
quick = settings(max_examples=400, deadline=None)


@quick
@given(cases)
def test_simplification_keeps_the_value(case: Case) -> None:
    for env in POINTS:
        assert evaluate(case.index, env) == case.plain(env), case.index


@quick
@given(cases)
def test_bounds_hold(case: Case) -> None:
    lo, hi = case.index.bounds()
    top, most = upper(case.index), largest(case.index)
    assert most is not None and most.symbols() <= {M, N}
    for env in POINTS:
        value = case.plain(env)
        assert lo is None or lo <= value, (case.index, lo)
        assert hi is None or value <= hi, (case.index, hi)
        assert value <= evaluate(top, env), (case.index, top)
        assert abs(value) <= evaluate(most, env), (case.index, most)


@quick
@given(cases, cases)
def test_what_is_proved_is_true(x: Case, y: Case) -> None:
    less, nonneg, inside = is_less(x.index, y.index), is_nonneg(x.index), fits(x.index, y.index)
    for env in POINTS:
        a, b = x.plain(env), y.plain(env)
        assert not less or a < b
        assert not nonneg or a >= 0
        assert not inside or 0 <= a < b


@quick
@given(cases, st.sampled_from(SYMS))
def test_coefficient_is_the_step(case: Case, sym: Sym) -> None:
    step = case.index.coefficient(sym)
    if step is None:
        return
    assert sym not in step.symbols()
    for env in POINTS:
        after = {**env, sym: env[sym] + 1}
        assert evaluate(case.index, after) - evaluate(case.index, env) == evaluate(step, env), (case.index, step)


@quick
@given(cases, st.sampled_from((A, B, C)), cases)
def test_substitution_is_composition(case: Case, sym: Sym, other: Case) -> None:
    """What takes a variable's place must have its range: that is what the simplifications rested on."""
    assert sym.extent is not None
    inside = mod(other.index, sym.extent)
    got = case.index.subs({sym: inside})
    for env in POINTS:
        there = {**env, sym: other.plain(env) % sym.extent.const}
        assert evaluate(got, env) == case.plain(there)


@quick
@given(cases, cases)
def test_equal_values_built_in_another_order_are_one_object(x: Case, y: Case) -> None:
    a, b = x.index, y.index
    assert a + b is b + a
    assert a * b is b * a
    assert (a + b) - b is a or evaluate((a + b) - b - a, POINTS[-1]) == 0
    assert minimum(a, b) is minimum(b, a) and maximum(a, b) is maximum(b, a)


# ---- known identities ----------------------------------------------------------------------------------


def v(name: str, extent: int | Sym) -> Index:
    return as_index(Sym(name, as_index(extent) if isinstance(extent, Sym) else extent))


def test_constants_fold() -> None:
    assert as_index(7) // 2 is as_index(3) and as_index(7) % 4 is as_index(3) and as_index(-7) // 2 is as_index(-4)
    assert minimum(3, 5) is as_index(3) and maximum(3, 5) is as_index(5) and ceildiv(7, 2) is as_index(4)
    assert int(as_index(4) * 3) == 12
    with pytest.raises(TypeError, match="not a constant"):
        int(as_index(A))


IDENTITIES: dict[str, tuple[Index, Index]] = {
    "a quotient forgets what is smaller": ((as_index(12) * v("x", 5) + v("y", 12)) // 24, v("x", 5) // 2),
    "a remainder forgets multiples": ((12 * v("x", 5) + v("y", 12)) % 12, v("y", 12)),
    "a small value has no quotient": (v("y", 12) // 12, ZERO),
    "a small value is its own remainder": (v("y", 12) % 12, v("y", 12)),
    "quotient and remainder meet": (v("x", 60) // 7 * 7 + v("x", 60) % 7, v("x", 60)),
    "and one level deeper": (v("x", 60) % 4 + 4 * (v("x", 60) // 4 % 3) + 12 * (v("x", 60) // 12), v("x", 60)),
    "scaled": (5 * (v("x", 60) % 4) + 20 * (v("x", 60) // 4), 5 * v("x", 60)),
    "of sums, too": ((as_index(N) + M - 1) * (v("x", 60) // (as_index(N) + M - 1)) + v("x", 60) % (as_index(N) + M - 1),
                     v("x", 60)),
    "quotients of quotients join": (v("x", 60) // 3 // 4, v("x", 60) // 12),
    "remainder then quotient": (v("x", 60) % 12 // 4, v("x", 60) // 4 % 3),
    "remainders of remainders": (v("x", 60) % 12 % 4, v("x", 60) % 4),
    "a symbolic divisor divides": ((as_index(N) * v("x", 5) + Sym("y", as_index(N))) // N, v("x", 5)),
    "and leaves its remainder": ((as_index(N) * v("x", 5) + Sym("y", as_index(N))) % N, v("y", N)),
    "two sizes": ((as_index(M) * N * v("x", 5)) // (as_index(M) * N), v("x", 5)),
    "min of what is ordered": (minimum(v("x", 5), v("x", 5) + 3), v("x", 5)),
    "max of what is ordered": (maximum(v("x", 5), 4), as_index(4)),
    "differences cancel": (v("x", 5) * N - N * v("x", 5), ZERO),
    "squares expand": ((v("x", 5) + 1) * (v("x", 5) - 1), v("x", 5) * v("x", 5) - 1),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identity(name: str) -> None:
    got, expected = IDENTITIES[name]
    assert got is expected, f"{got} is not {expected}"


def ravel(where: Sequence[Index], shape: Sequence[Index]) -> Index:
    return sum((i * s for i, s in zip(where, contiguous_strides(shape), strict=True)), ZERO)


def unravel(flat: Index, shape: Sequence[Index]) -> list[Index]:
    return [flat // s % n for s, n in zip(contiguous_strides(shape), shape, strict=True)]


def divisions(i: Index) -> list[Op]:
    return [a for a in i.atoms() if isinstance(a, Op)]


# A reshape to each of these shapes and back: none of them may leave a division behind.
ROUND_TRIPS: list[tuple[tuple[int, ...], ...]] = [
    ((4, 6), (24,)), ((2, 3, 4), (6, 4), (2, 12)), ((2, 3, 4), (24,), (4, 6), (2, 3, 2, 2)),
    ((8, 9, 10), (72, 10), (8, 90), (720,)), ((5, 7), (7, 5), (35,)), ((2, 1, 3), (6,), (1, 6)),
    ((16, 16), (4, 4, 4, 4), (256,), (2, 128)),
]


@pytest.mark.parametrize("shapes", ROUND_TRIPS, ids=str)
def test_reshapes_and_back_leave_no_division(shapes: tuple[tuple[int, ...], ...]) -> None:
    first = tuple(map(as_index, shapes[0]))
    start = tuple(v(f"x{k}", n) if n > 1 else ZERO for k, n in enumerate(shapes[0]))
    where, shape = list(start), first
    for sizes in (*shapes[1:], shapes[0]):
        new = tuple(map(as_index, sizes))
        where, shape = unravel(ravel(where, shape), new), new
    assert tuple(where) == start


def test_split_transpose_merge_of_heads_has_no_division() -> None:
    """[batch, time, heads * d] -> [batch, heads, time, d]: what attention does to every tensor."""
    batch, heads, time, d = (v(name, n) for name, n in (("b", 2), ("h", 4), ("t", 16), ("d", 8)))
    merged = (batch, time, heads * 8 + d)
    flat = ravel(merged, tuple(map(as_index, (2, 16, 32))))
    assert flat is batch * 512 + time * 32 + heads * 8 + d
    back = unravel(flat, tuple(map(as_index, (2, 16, 4, 8))))
    assert tuple(back) == (batch, time, heads, d)


def test_symbolic_batch_survives_flatten_and_unflatten() -> None:
    s = Sym("s0", lo=2)
    b, t, c = as_index(Sym("b", as_index(s))), v("t", 16), v("c", 32)
    shape = (as_index(s), as_index(16), as_index(32))
    rows = unravel(ravel((b, t, c), shape), (as_index(s) * 16, as_index(32)))
    assert not any(map(divisions, rows))
    back = unravel(ravel(rows, (as_index(s) * 16, as_index(32))), shape)
    assert tuple(back) == (b, t, c)


def test_symbolic_last_dimension_survives_too() -> None:
    s = Sym("s0", lo=2)
    b, t = v("b", 4), as_index(Sym("t", as_index(s)))
    shape = (as_index(4), as_index(s))
    assert tuple(unravel(ravel((b, t), shape), (product(shape),))) == (b * s + t,)
    assert tuple(unravel(b * s + t, shape)) == (b, t)


def test_division_by_nothing_is_never_reached() -> None:
    """A dimension of size zero: its loop never runs, so any value will do, but none may raise."""
    assert v("x", 4) // ZERO is ZERO and v("x", 4) % ZERO is ZERO


def test_coefficient_of_products_and_squares() -> None:
    x, y = Sym("x", 5), Sym("y", 7)
    i = as_index(x) * N * 3 + as_index(x) * y + as_index(y) * y + 4
    assert i.coefficient(x) is as_index(N) * 3 + y
    assert i.coefficient(y) is None  # a square
    assert i.coefficient(A) is ZERO
    assert (as_index(x) // 2).coefficient(x) is None
    assert (as_index(x) + 1).coefficient(x) is ONE


def test_same_name_and_other_extent_is_another_symbol() -> None:
    assert Sym("x", 4) is Sym("x", 4)
    assert Sym("x", 4) is not Sym("x", 5)
    assert as_index(Sym("x", 4)) is not as_index(Sym("x", 5))

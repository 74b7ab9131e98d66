"""Scalar expressions: interned, folded only where the bits allow it, rebuilt without loss."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flambeau.ir.expr import (
    OPS,
    Expr,
    binary,
    cast,
    check,
    const,
    fold,
    fresh_carry,
    fresh_sym,
    index_value,
    lift,
    load,
    loads,
    masked,
    require,
    rewrite,
    rounded,
    unary,
    walk,
    where,
)
from flambeau.ir.faults import Fault
from flambeau.ir.index import Dyn, Sym, as_index
from flambeau.ir.scalar import clamp, fold_over, is_finite

F32, F64, I64, BOOL = torch.float32, torch.float64, torch.int64, torch.bool
X, Y = Sym("x", 8), Sym("y", 5)
A, B = load("a", (as_index(X),), F32), load("b", (as_index(X),), F32)
M = load("m", (as_index(X),), BOOL)


# ---- identity ------------------------------------------------------------------------------------------


def test_equal_expressions_are_one_object() -> None:
    assert A + B is A + B and A + B is not B + A
    assert load("a", (as_index(X),), F32) is A
    assert cast(A, F64) is cast(A, F64) and cast(A, F32) is A


def test_constants_of_equal_value_and_other_bits_differ() -> None:
    assert const(0.0, F32) is not const(-0.0, F32)
    assert const(1, I64) is not const(1, torch.int32) and const(1.0, F32) is not const(1.0, F64)
    assert const(True, BOOL).attr is True and const(1, F32).attr == 1.0


def test_digest_is_the_same_in_another_process() -> None:
    """Atoms are ordered by it, so kernel text, and with it the cache, depends on it."""
    code = ("from flambeau.ir.expr import *; from flambeau.ir.index import *; import torch;"
            "x = Sym('x', 8); print((load('a', (as_index(x) // 3,), torch.float32) + 2.5).digest)")
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout]
    here = (load("a", (as_index(X) // 3,), F32) + 2.5).digest
    assert runs[0].strip() == here


def test_no_truth_value() -> None:
    with pytest.raises(TypeError, match="where"):
        bool(A < B)


def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="different dtypes"):
        binary("add", A, cast(B, F64))
    with pytest.raises(TypeError, match="different dtypes"):
        where(M, A, cast(B, F64))
    with pytest.raises(TypeError):
        binary("add", 1, 2)


# ---- constants -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(width=64), st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
def test_constants_are_rounded_as_torch_rounds(x: float, dtype: torch.dtype) -> None:
    ours, torchs = rounded(x, dtype), torch.tensor(x, dtype=F64).to(F32 if dtype is not F64 else F64).to(dtype).item()
    assert ours == torchs or (math.isnan(ours) and math.isnan(torchs))


@pytest.mark.parametrize("x", [0.1, 65504.0, 65519.9, 65520.0, -1e9, 6e-8, 2.9e-8, 1e-30, 1 / 3, math.pi, -0.0])
def test_constants_in_half_precision(x: float) -> None:
    ours = rounded(x, torch.float16)
    assert ours == torch.tensor(x, dtype=torch.float16).item()
    assert math.copysign(1, ours) == math.copysign(1, x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("value", [0, -1, 127, 128, 255, 256, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)])
def test_integers_wrap(value: int, dtype: torch.dtype) -> None:
    assert const(value, dtype).attr == torch.tensor(value, dtype=I64).to(dtype).item()


FOLDS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "lt": torch.lt, "le": torch.le, "eq": torch.eq,
         "ne": torch.ne, "gt": torch.gt, "ge": torch.ge}


@settings(deadline=None)
@given(st.sampled_from(sorted(FOLDS)), st.floats(width=32), st.floats(width=32))
def test_folding_has_the_bits_of_the_operation(op: str, x: float, y: float) -> None:
    folded = binary(op, const(x, F32), const(y, F32))
    exact = FOLDS[op](torch.tensor(x, dtype=F32), torch.tensor(y, dtype=F32)).item()
    assert folded.op == "const"
    assert folded.attr == exact or (math.isnan(folded.attr) and math.isnan(exact))


@settings(deadline=None)
@given(st.sampled_from(sorted(FOLDS)), st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_folding_of_integers_wraps(op: str, x: int, y: int) -> None:
    folded = binary(op, const(x, I64), const(y, I64))
    assert folded.attr == FOLDS[op](torch.tensor(x), torch.tensor(y)).item()


def test_what_may_not_be_simplified() -> None:
    """x + 0.0 turns -0.0 into 0.0, x * 0 is NaN for an infinite x, x - x likewise; x == x is false for NaN."""
    for e in (A + 0.0, A * 0.0, A - A, binary("eq", A, A), binary("max", A, A) * 0.0):
        assert e.op != "const" and e is not A
    assert A * 1.0 is A and 1.0 * A is A


def test_logic() -> None:
    yes, no = const(True, BOOL), const(False, BOOL)
    assert M & yes is M and yes & M is M and M & no is no and M | no is M and M | yes is yes and M & M is M
    assert ~~M is M and ~yes is no
    assert where(yes, A, B) is A and where(no, A, B) is B and where(M, A, A) is A
    assert where(A, A, B).args[0] is binary("ne", A, 0)
    assert is_finite(const(1, I64)) is yes


def test_clamp_keeps_nan() -> None:
    assert clamp(A, 0.0, None) is binary("max", A, const(0.0, F32))
    assert clamp(A, None, None) is A


# ---- indices as values ---------------------------------------------------------------------------------


def test_comparisons_that_ranges_decide() -> None:
    x = index_value(X)  # 0 .. 7
    assert (x < 8).attr is True and (x >= 0).attr is True and (x < 0).attr is False and (x > 7).attr is False
    assert binary("eq", x, 9).attr is False and binary("ne", x, -1).attr is True
    assert (x < 7).op == "lt" and (x <= 6).op == "le"
    n = Sym("n", lo=1)
    inside = index_value(Sym("i", as_index(n)))
    assert (inside < index_value(n)).attr is True


def test_check_of_what_is_known_to_fit() -> None:
    assert check(index_value(X), 8) is as_index(X)
    (atom,) = list(check(index_value(X), 7).atoms())
    assert isinstance(atom, Dyn) and (atom.lo, atom.hi) == (0, 6)


# ---- walking -------------------------------------------------------------------------------------------


def gathered() -> Expr:
    """a[m ? i[x] : 0]: a value inside an index."""
    at = check(load("i", (as_index(X),), I64), 10)
    return load("a", (at,), F32, M)


def test_walk_finds_values_inside_indices_once_and_in_order() -> None:
    e = gathered() * gathered() + A
    seen = list(walk(e))
    assert len(seen) == len(set(seen)) and seen[-1] is e
    for node in seen:
        for a in node.args:
            assert seen.index(a) < seen.index(node)
    assert {x.attr[0] for x in loads(e)} == {"i", "a", "m"}


def test_substitution_reaches_values_inside_indices() -> None:
    e = gathered().subs({X: as_index(Y) + 1})
    assert e.symbols() == {Y}
    assert {x.attr[1][0] for x in loads(e) if x.attr[0] != "a"} == {as_index(Y) + 1}


def test_rewriting_simplifies_again() -> None:
    e = where(index_value(X) < 4, A, B)
    assert e.subs({X: as_index(Sym("z", 3))}).op == "load"
    assert rewrite(A * 2.0 + B, lambda x: const(1.0, F32) if x is A else x) is const(2.0, F32) + B


def test_masked_guards_every_read() -> None:
    guard = index_value(X) < 4
    e = masked(gathered() + A, guard)
    for x in loads(e):
        assert guard in list(walk(x.args[0]))
    (inner,) = [c for c in walk(e) if c.op == "check"]
    assert inner.args[1] is guard
    assert masked(A, const(True, BOOL)) is A


def test_what_is_required_is_required_where_the_mask_holds() -> None:
    guard, positive = index_value(X) < 4, A > 0.0
    e = require(A, positive, Fault.ZERO_DIVISION)
    assert require(A, const(True, BOOL), Fault.INDEX) is A
    assert rewrite(e, lambda x: const(1.0, F32) if x is A else x) is const(1.0, F32)
    (inner,) = [c for c in walk(masked(e, guard)) if c.op == "require"]
    assert inner.args[1].op == "bitwise_or" and inner.args[1].args[1] is ~guard
    assert inner.subs({X: as_index(5)}) is inner.args[0].subs({X: as_index(5)})


def test_folds() -> None:
    """The loop variable is bound: only what the loop takes from outside shows."""
    total, = fold_over([(0, 3), (0, as_index(Y) + 1)], [const(0.0, F32)],
                       lambda i, c: [c[0] + load("w", (i[0] * 8 + i[1] + X,), F32)])
    assert total.symbols() == {X, Y}
    assert {v.extent.const for v, _, _ in total.attr.loops} == {3, 5}
    moved = total.subs({X: as_index(0)})
    assert moved.symbols() == {Y}
    with pytest.raises(ValueError, match="start at zero"):
        fold_over([(-1, 3)], [const(0.0, F32)], lambda i, c: c)


def test_the_extent_of_a_fold_speaks_of_sizes_alone() -> None:
    n = Sym("n", lo=2)
    i = Sym("i", as_index(n))
    total, = fold_over([(0, (as_index(i) + 1) * n // 3)], [const(0.0, F32)], lambda k, c: c)
    (v, _, _), = total.attr.loops
    assert v.extent is None or all(s.extent is None for s in v.extent.symbols())


def test_carries_of_a_fold_come_together() -> None:
    c, d = fresh_carry(F32), fresh_carry(I64)
    k = fresh_sym(4)
    first, second = fold(((k, as_index(0), as_index(4)),), (c, d), (const(0.0, F32), const(0, I64)), (c + 1.0, d + 1))
    assert first.args == second.args and (first.dtype, second.dtype) == (F32, I64)


@pytest.mark.parametrize("op", sorted(n for n, (arity, _) in OPS.items() if arity == 1 and n != "bitcast"))
def test_every_unary_operation_has_its_dtype(op: str) -> None:
    e = unary(op, A)
    assert e.dtype is (BOOL if OPS[op][1] == "bool" else F32)


def test_lift() -> None:
    assert lift(2, F32) is const(2.0, F32) and lift(A, F64) is A

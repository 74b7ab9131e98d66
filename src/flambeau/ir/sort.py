"""A stable sort along one axis, built from other nodes: ranks for short rows, radix sort for long ones.

Elements are sorted by keys, integers that are not negative and order as torch does: NaN above all else, zeros of both
signs alike. A key of up to 32 bits and the element's place in its row share one word of 64, so that one write moves
both.

    ranks   an element comes after all smaller ones, and after the equal ones before it: one sum over the row
    rounds  for the first few of a row: each round finds the least word that is greater than the last one found
    radix   four bits of the key at a time, the lowest first. Blocks count their digits; a scan of the counts, by digit
            and then by block, gives the start of each digit of a block; a scan within the block, the position there.

Digits are counted side by side in words, a field of 16 bits each. A pass drops the bits that it sorted by, so that all
passes have the same code. The order of all writes is fixed by the places: nothing depends on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from . import build
from .dtypes import DType, is_bool, is_float, opmath
from .expr import Expr, binary, cast, computed, const, index_value, unary, where
from .index import Index, IndexLike, as_index, ceildiv, product
from .nodes import Combine, Shape, Sort, Value, contiguous_strides, narrow

Place = tuple[Index, ...]

DIGIT = 4  # bits that a pass sorts by
FIELD = 16  # bits of a count; a word has as many counts as fit
BLOCK = 1024  # elements that are counted together; a field holds any such count
PLACE = 31  # bits of a place in a row
LONGEST = 2**PLACE
KEY = 32  # bits of a key that share a word with a place
SHORT = 128  # elements of a row up to which all pairs are compared
FEW = 32  # the most results found in rounds, one pass over the row each: a radix sort takes as many passes
PAIRS = 2**21  # pairs of a call up to which ranks are used for longer rows too: one launch, not thirty

FIELDS = 64 // FIELD
WORDS = 2**DIGIT // FIELDS


# ---- keys ------------------------------------------------------------------------------------------------


def key_bits(dtype: DType) -> int:
    """The number of bits in which keys of a dtype differ. As float32, numbers of float16 end in 13 zero bits, those of
    bfloat16 in 16."""
    return 1 if is_bool(dtype) else {torch.float16: 19, torch.bfloat16: 16}.get(dtype, 8 * dtype.itemsize)


def key_of(x: Expr, descending: bool = False) -> Expr:
    """Returns an int64 key of key_bits(x.dtype) bits that orders as x does when compared without a sign. A key of 64
    bits fills the int64."""
    bits = key_bits(x.dtype)
    if is_float(x.dtype):
        wide = opmath(x.dtype)
        x = cast(x, wide)
        whole, size = (torch.int32, 32) if wide is torch.float32 else (torch.int64, 64)
        most = 2**(size - 1) - 1
        raw = Expr("bitcast", whole, (x,))
        # Among negative numbers the greater has the lower bits.
        raw = where(binary("eq", x, 0), 0, where(raw < 0, raw ^ most, raw))
        key = cast(where(unary("isnan", x), most, raw), torch.int64)
        key = binary("shr", key, size - bits) if bits < size else key
        signed = True
    else:
        key, signed = cast(x, torch.int64), not is_bool(x.dtype) and x.dtype.is_signed
    if signed:
        key = key ^ -(2**63) if bits == 64 else key + 2**(bits - 1)
    if not descending:
        return key
    return ~key if bits == 64 else 2**bits - 1 - key


# ---- the sort --------------------------------------------------------------------------------------------


def sort(x: Value, axis: int, descending: bool = False, first: IndexLike | None = None) -> tuple[Value, Value]:
    """Returns the values of x sorted along an axis, or the `first` of them, and their original positions as int64.
    Equal values keep their order."""
    if not build.graph().capabilities.sorts:
        strides = contiguous_strides(x.shape)
        found = build.extern(torch.ops.aten.sort.stable, (x,), {"stable": True, "dim": axis, "descending": descending},
                             [(x.shape, d, strides) for d in (x.dtype, torch.int64)], True, Sort)
        assert found[0] is not None and found[1] is not None and first is None
        return found[0], found[1]
    order = argsort(x, axis, descending, first)
    at = _most(x.shape[axis])
    values = build.pointwise(order.shape, lambda i: x.load(
        (*i[:axis], computed(order.load(i), 0, at), *i[axis + 1:])))
    return values, order


def argsort(x: Value, axis: int, descending: bool = False, first: IndexLike | None = None) -> Value:
    """Returns the original positions of the elements of x in sorted order along an axis."""
    n, count = x.shape[axis], x.shape[axis] if first is None else as_index(first)
    rows = x.view((*x.shape[:axis], *x.shape[axis + 1:], n), lambda i: (*i[:axis], i[-1], *i[axis:-1]))
    if first is not None and _are_few(rows, count):
        order = _by_rounds(rows, descending, count.const)
    else:
        order = (_by_rank if _is_short(rows.shape) else _by_digits)(rows, descending)
    return order.view((*x.shape[:axis], count, *x.shape[axis + 1:]), lambda i: (*i[:axis], *i[axis + 1:], i[axis]))


def _are_few(rows: Value, count: Index) -> bool:
    n = rows.shape[-1]
    return count.is_const and 0 < count.const <= FEW and key_bits(rows.dtype) <= KEY and not (
        n.is_const and n.const <= SHORT)


def _by_rounds(rows: Value, descending: bool, count: int) -> Value:
    words = build.pointwise(rows.shape, lambda i: _joined(key_of(rows.load(i), descending), index_value(i[-1])),
                            laid=True)
    outer, axis, least = rows.shape[:-1], rows.rank - 1, build.simple_combine("min", torch.int64)
    found = [build.pointwise(outer, lambda i: const(-1, torch.int64), laid=True)]

    def round_after(last: Value) -> Value:
        def later(i: Place) -> Expr:
            word = words.load(i)
            return where(word > last.load(i[:-1]), word, 2**63 - 1)

        return build.reduce(rows.shape, (axis,), least, later)[0]

    for _ in range(count):
        found.append(round_after(found[-1]))

    def place(i: Place) -> Expr:
        word = found[count].load(i[:-1])
        for k in range(count - 1, 0, -1):
            word = where(binary("eq", index_value(i[-1]), k - 1), found[k].load(i[:-1]), word)
        return _place(word)

    return build.pointwise((*outer, count), place)


def _is_short(shape: Shape) -> bool:
    n, pairs = shape[-1], product((*shape, shape[-1]))
    return n.is_const and (n.const <= SHORT or pairs.is_const and pairs.const <= PAIRS)


def _most(size: Index) -> int | None:
    """Returns the greatest index below a size, if it is known."""
    high = size.bounds()[1]
    return None if high is None else max(high - 1, 0)


def _by_rank(rows: Value, descending: bool) -> Value:
    *outer, n = rows.shape
    wide = torch.int64 if key_bits(rows.dtype) > KEY else torch.int32
    offset = -(2**63) if wide is torch.int64 else -(2**31)

    def key(i: Place) -> Expr:  # signed again: every vector unit has that comparison
        e = key_of(rows.load(i), descending)
        return e ^ offset if wide is torch.int64 else cast(e + offset if key_bits(rows.dtype) == KEY else e, wide)

    keys = build.pointwise(rows.shape, key, laid=True)

    def before(i: Place) -> Expr:
        *r, here, there = i
        mine, other = keys.load((*r, here)), keys.load((*r, there))
        earlier = index_value(there, torch.int32) < index_value(here, torch.int32)
        return cast(where(earlier, other <= mine, other < mine), torch.int32)

    rank, = build.reduce((*outer, n, n), (len(outer) + 1,), build.simple_combine("sum", torch.int32), before)
    return _moved(rows.shape, lambda i: rank.load(i), lambda i: index_value(i[-1]))


def _moved(shape: Shape, place: Callable[[Place], Expr], value: Callable[[Place], Expr]) -> Value:
    """Returns rows whose element place(i) is value(i); the places are a permutation."""
    high = _most(shape[-1])
    return build.scatter(shape, lambda o: const(0, torch.int64), shape,
                         lambda i: (*i[:-1], computed(place(i), 0, high)), value, permutes=True)


def _by_digits(rows: Value, descending: bool) -> Value:
    """Sorts by digits. Keys too wide for a word are sorted by their low bits, and then, in that order, by the
    others."""
    bits = key_bits(rows.dtype)
    words = build.pointwise(rows.shape, lambda i: _joined(_part(rows, i, descending, 0), index_value(i[-1])), laid=True)
    words = _sorted(words, min(bits, KEY))
    if bits > KEY:
        first = words
        at = _most(rows.shape[-1])

        def high(i: Place) -> Expr:
            place = _place(first.load(i))
            return _joined(_part(rows, (*i[:-1], computed(place, 0, at)), descending, KEY), place)

        words = _sorted(build.pointwise(rows.shape, high, laid=True), bits - KEY)
    return build.pointwise(rows.shape, lambda i: _place(words.load(i)))


def _part(rows: Value, i: Place, descending: bool, first: int) -> Expr:
    key = key_of(rows.load(i), descending)
    key = binary("shr", key, first) if first else key
    return key & (2**KEY - 1) if key_bits(rows.dtype) > KEY else key


def _joined(key: Expr, place: Expr) -> Expr:
    return binary("shl", key, PLACE) | place


def _place(word: Expr) -> Expr:
    return binary("bitwise_and", word, LONGEST - 1)


def _sorted(words: Value, bits: int) -> Value:
    for _ in range(0, bits, DIGIT):
        words = _pass(words)
    return words


def _digit(word: Expr) -> Expr:
    return cast(binary("shr", word, PLACE) & (2**DIGIT - 1), torch.int32)


@cache
def _counts(extra: int = 0) -> Combine:
    """Returns a combine that sums words of fields, and keeps the extra components of the last element."""

    def fn(a: Sequence[Expr], b: Sequence[Expr]) -> tuple[Expr, ...]:
        return *(x + y for x, y in zip(a[:WORDS], b[:WORDS], strict=True)), *b[WORDS:]

    return build.make_combine("counts", (torch.int64,) * WORDS + (torch.int32,) * extra, (0,) * (WORDS + extra), fn)


def _one(digit: Expr, inside: Expr) -> tuple[Expr, ...]:
    """Returns a count of one for a digit, as words of counts."""
    one = binary("shl", const(1, torch.int64), cast(digit & (FIELDS - 1), torch.int64) * FIELD)
    word = binary("shr", digit, FIELDS.bit_length() - 1)
    return tuple(where(inside & binary("eq", word, w), one, 0) for w in range(WORDS))


def _count(words: Sequence[Expr], digit: Expr) -> Expr:
    """Returns the count of a digit in words of counts."""
    which, chosen = binary("shr", digit, FIELDS.bit_length() - 1), words[0]
    for w in range(1, WORDS):
        chosen = where(binary("eq", which, w), words[w], chosen)
    shifted = binary("shr", chosen, cast(digit & (FIELDS - 1), torch.int64) * FIELD)
    return cast(shifted & (2**FIELD - 1), torch.int32)


def _pass(words: Value) -> Value:
    """Sorts the rows by the lowest digits of their keys, and shifts these digits out."""
    *outer, n = words.shape
    blocks = ceildiv(n, BLOCK)
    size = ceildiv(n, blocks) if n.is_const and n.const else as_index(BLOCK)
    axis = len(outer) + 1

    def element(i: Place) -> tuple[Expr, Expr]:
        at = i[-2] * size + i[-1]
        inside = index_value(at) < index_value(n)
        return _digit(words.load((*i[:-2], at), inside)), inside

    within = (*outer, blocks, size)
    total = build.reduce(within, (axis,), _counts(), lambda i: _one(*element(i)))
    number, = build.scan(within, axis, _counts(1), lambda i: (*_one(*element(i)), element(i)[0]), dtypes=(torch.int32,),
                         finish=lambda c: (_count(c[:WORDS], c[WORDS]) - 1,))
    kind = narrow(n + 1)
    ends = build.make_combine("ends", (kind, kind), (0, 0), lambda a, b: (a[0] + b[0], b[1]))

    def all_of(i: Place) -> tuple[Expr, Expr]:
        digit, block = index_value(i[-1] // blocks, torch.int32), (*i[:-1], i[-1] % blocks)
        count = cast(_count([t.load(block) for t in total], digit), kind)
        return count, count

    start, = build.scan((*outer, blocks * 2**DIGIT), len(outer), ends, all_of, dtypes=(kind,),
                        finish=lambda c: (c[0] - c[1],))

    def place(i: Place) -> Expr:
        block = i[-1] // size
        digit = computed(_digit(words.load(i)), 0, 2**DIGIT - 1)
        return start.load((*i[:-1], digit * blocks + block)) + cast(number.load((*i[:-1], block, i[-1] % size)), kind)

    def rest(i: Place) -> Expr:
        word = words.load(i)
        return _joined(binary("shr", word, PLACE + DIGIT), _place(word))

    return _moved(words.shape, place, rest)

"""Vertical fusion: which values are inlined, which are stored, and the note with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.capture.kept_whole import whole_operators
from flambeau.ir import build
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.expr import const, index_value, walk
from flambeau.ir.nodes import Graph, Pointwise, Value
from flambeau.ir.scalar import exp, sin, sqrt
from flambeau.ir.tuning import BLOCKS
from flambeau.schedule.fusion.inline import DEEPEST, LARGEST, depth_of, inline
from schedule.programs import launches, program, written

F32 = torch.float32
PLAIN = Capabilities("test")


def graph(make, caps: Capabilities = PLAIN) -> tuple[Graph, list[str]]:  # type: ignore[no-untyped-def]
    g = Graph()
    with build.building(g, "test"):
        x = g.add_input((8, 16), F32)
        g.outputs = list(make(x))
    for b in g.buffers.values():
        b.strides = b.strides or (b.shape[1], 1) if len(b.shape) == 2 else b.strides
    notes: list[str] = []
    inline(g, notes, caps)
    return g, notes


def once(x: Value) -> Value:
    return build.pointwise(x.shape, lambda i: exp(x.load(i)))


def names(g: Graph) -> list[str]:
    return [name for n in g.nodes for name in n.names]


def test_a_chain_becomes_one_body() -> None:
    g, notes = graph(lambda x: [once(once(once(x)))])
    assert len(g.nodes) == 1 and not notes
    (n,) = g.nodes
    assert isinstance(n, Pointwise) and n.origins == ("test",)


def test_what_nobody_needs_is_dropped() -> None:
    g, _ = graph(lambda x: (once(x), [build.pointwise(x.shape, lambda i: sin(x.load(i)))])[1])
    assert len(g.nodes) == 1 and "sin" in str(g)


def test_an_output_is_read_from_memory() -> None:
    g, notes = graph(lambda x: (y := once(x), once(y)))
    assert len(g.nodes) == 2 and any("output" in n for n in notes)


def test_something_dear_with_two_consumers_is_kept_and_the_note_says_so() -> None:
    def make(x: Value) -> list[Value]:
        y = build.pointwise(x.shape, lambda i: sin(exp(x.load(i))) * x.load(i))
        return [build.pointwise(x.shape, lambda i: y.load(i) + 1.0),
                build.pointwise(x.shape, lambda i: y.load(i) * 3.0)]

    g, notes = graph(make)
    assert len(g.nodes) == 3
    assert any("2 consumers" in n for n in notes), notes


def test_two_consumers_that_become_one_read_it_once() -> None:
    def make(x: Value) -> list[Value]:
        y = once(once(once(x)))
        a, b = (build.pointwise(y.shape, lambda i, f=f: f(y.load(i))) for f in (sin, sqrt))
        return [build.pointwise(y.shape, lambda i: a.load(i) * b.load(i))]

    g, notes = graph(make)
    assert len(g.nodes) == 1 and not notes


def test_something_cheap_with_two_consumers_is_computed_twice() -> None:
    def make(x: Value) -> list[Value]:
        y = build.pointwise(x.shape, lambda i: x.load(i) * 2.0)
        return [build.pointwise(x.shape, lambda i: exp(y.load(i))), build.pointwise(x.shape, lambda i: sin(y.load(i)))]

    g, _ = graph(make)
    assert len(g.nodes) == 2


def test_a_constant_is_never_memory() -> None:
    def make(x: Value) -> list[Value]:
        two = build.pointwise(x.shape, lambda i: const(2.0, F32))
        return [build.pointwise(x.shape, lambda i: exp(x.load(i)) + two.load(i)),
                build.pointwise(x.shape, lambda i: two.load(i) * exp(x.load(i)))]

    g, _ = graph(make)
    assert len(g.nodes) == 2


def test_something_dear_read_at_two_places_is_kept() -> None:
    def make(x: Value) -> list[Value]:
        y = once(once(x))
        return [build.pointwise(x.shape, lambda i: y.load(i) + y.load((i[0], 15 - i[1])))]

    g, notes = graph(make)
    assert len(g.nodes) == 2 and any("more than once" in n for n in notes)


def test_something_dear_broadcast_is_kept() -> None:
    """A row computed once, not once for each of the rows that read it."""

    def make(x: Value) -> list[Value]:
        row = build.pointwise(x.shape[1:], lambda i: exp(sin(x.load((0, i[0])))))
        return [build.pointwise(x.shape, lambda i: x.load(i) * row.load((i[1],)))]

    g, notes = graph(make)
    assert len(g.nodes) == 2 and any("more than once" in n for n in notes)


def test_where_memory_is_what_counts() -> None:
    """A root is computed for each point that is written, a sum of two for two readers rather than written; not a root
    for every point that a reduction reads, nor a sum of three for three readers."""
    waits = Capabilities("test", tuning=BLOCKS)

    def rows(x: Value) -> list[Value]:
        row = build.pointwise(x.shape[1:], lambda i: 1.0 / sqrt(x.load((0, i[0])) + 1e-5))
        return [build.pointwise(x.shape, lambda i: x.load(i) * row.load((i[1],)))]

    def reduced(x: Value) -> list[Value]:
        row = build.pointwise(x.shape[1:], lambda i: 1.0 / sqrt(x.load((0, i[0])) + 1e-5))
        return [*build.reduce(x.shape, [1], build.simple_combine("sum", F32), lambda i: x.load(i) * row.load((i[1],)))]

    def readers(count: int) -> Callable[[Value], list[Value]]:
        def make(x: Value) -> list[Value]:
            terms = [x.load((7 - k, 0)) for k in range(count)]
            y = build.pointwise(x.shape, lambda i: sum((x.load((k, i[1])) for k in range(count)), terms[0]))
            return [build.pointwise(x.shape, lambda i, k=k: y.load(i) * (k + 2.0)) for k in range(count)]

        return make

    for make, there, elsewhere in ((rows, 1, 2), (reduced, 2, 2), (readers(2), 2, 3), (readers(4), 5, 5)):
        assert [len(graph(make, caps)[0].nodes) for caps in (waits, PLAIN)] == [there, elsewhere], make


def test_bodies_do_not_grow_without_end() -> None:
    def make(x: Value) -> list[Value]:
        y = x
        for _ in range(LARGEST):
            y = once(y)
        return [y]

    g, notes = graph(make)
    assert 1 < len(g.nodes) < 20
    assert all(depth_of(list(walk(*n.exprs()))) <= DEEPEST for n in g.nodes)
    assert any("too deep" in n for n in notes)


def test_bodies_do_not_grow_wide_without_end() -> None:
    def make(x: Value) -> list[Value]:
        y = x
        for k in range(40):
            y = build.pointwise(x.shape, lambda i, y=y, k=k: y.load(i) + x.load(
                ((i[0] + k // 16) % 8, (i[1] + k) % 16)))
        return [y]

    g, notes = graph(make)
    assert 1 < len(g.nodes) < 10 and any("too large" in n for n in notes)


def test_a_masked_read_masks_what_is_inlined() -> None:
    """Padding: outside, the producer's own reads would be outside too."""
    p = program(lambda x: F.pad(x.exp() + x.sin(), (2, 2)), torch.randn(8, 16))
    assert len(launches(p)) == 1
    for k in launches(p):
        for stage in k.stages:
            for e in walk(*(e for i in stage for e in i.exprs)):
                assert e.op != "load" or e.args


@pytest.mark.parametrize("numerics", ["fast", "eager"])
def test_half_precision_is_rounded_between_operators_in_eager_numerics(numerics: str) -> None:
    p = program(lambda x: (x.exp() * 2).sin(), torch.randn(8, 16, dtype=torch.bfloat16), numerics=numerics)
    (k,) = launches(p)
    everything = walk(*(e for s in k.stages for i in s for e in i.exprs))
    casts = [e for e in everything if e.op == "cast" and e.dtype is torch.bfloat16]
    assert len(casts) == (1 if numerics == "fast" else 3)


@pytest.mark.parametrize("numerics", ["fast", "eager"])
@pytest.mark.parametrize("f", [F.relu, F.relu6, lambda x: F.threshold(x, 0.1, -0.3), lambda x: x.clamp_min(0.1),
                               lambda x: torch.minimum(x, x.flip(0))])
def test_a_choice_among_half_precision_values_is_not_rounded(f: Callable[[Tensor], Tensor], numerics: str) -> None:
    p = program(f, torch.randn(8, 16, dtype=torch.bfloat16), numerics=numerics)
    (k,) = launches(p)
    everything = walk(*(e for s in k.stages for i in s for e in i.exprs))
    assert not any(e.op == "cast" and e.dtype is torch.bfloat16 for e in everything)


def test_nothing_but_results_is_stored() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x, (16,), w, b)) * x

    p = program(f, torch.randn(8, 16), torch.randn(16), torch.randn(16))
    assert len(written(p)) == 1 and p.arena_bytes == 0


def test_a_table_with_divisions_is_kept_where_it_is_read_again_and_again() -> None:
    def make(x: Value) -> list[Value]:
        table = build.pointwise((16,), lambda i: index_value((i[0] * 3) // 16, F32))
        return [build.pointwise(x.shape, lambda i: x.load(i) * table.load((i[1],)))]

    g, notes = graph(make)
    assert len(g.nodes) == 2 and any("table" in n for n in notes)


@pytest.mark.parametrize(("mode", "size", "to", "passes"), [
    ("bilinear", (2, 32, 8, 9), (12, 13), 1),
    ("trilinear", (2, 32, 6, 5, 4), (5, 4, 3), 1),
    ("trilinear", (2, 32, 6, 5, 4), (12, 11, 10), 2),  # twice as large: less is read if the first two are kept
])
def test_rows_are_weighed_in_one_pass_where_that_reads_less(
        mode: str, size: tuple[int, ...], to: tuple[int, ...], passes: int) -> None:
    """Where channels lie side by side, taps are the same for all of a row."""
    def resized(x: Tensor) -> Tensor:
        return F.interpolate(x, to, mode=mode)

    flat = torch.randn(size)
    last = flat.to(memory_format=torch.channels_last if flat.dim() == 4 else torch.channels_last_3d)
    assert passes_of(resized, last) == passes and passes_of(resized, flat) > 1


def passes_of(f: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Kernels over the image, without those of tables."""
    with whole_operators(False):
        return sum(len(k.params) > 1 for k in launches(program(f, x)))

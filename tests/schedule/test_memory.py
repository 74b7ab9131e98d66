"""The memory plan: no two buffers that live at once share a byte, on random programs and on real ones."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flambeau.ir.index import Sym, as_index
from flambeau.ir.nodes import Value, as_indices, contiguous_strides, dim_vars
from flambeau.ir.program import BufferPlan, Call, Copy, Launch, Program
from flambeau.schedule.memory import ALIGN, ProgramDraft, lifetimes, nbytes, plan_memory
from schedule.programs import program, programs

F32 = torch.float32


def buffer(name: str, *sizes: object, dtype: torch.dtype = F32, place: str = "arena") -> BufferPlan:
    shape = tuple(as_index(n) for n in sizes)  # type: ignore[arg-type]
    return BufferPlan(name, dtype, shape, contiguous_strides(shape), place)


def value(b: BufferPlan) -> Value:
    return Value(b.name, b.shape, b.dtype, as_indices(dim_vars(b.shape)))


def places(p: Program | ProgramDraft) -> list[BufferPlan]:
    return list(p.buffers.values() if isinstance(p, ProgramDraft) else p.buffers)


def check(p: Program | ProgramDraft) -> None:
    """Arena buffers: inside it, aligned, and apart from all that live at the same time."""
    lives = lifetimes(p)
    placed = [(b, nbytes(b), *lives[b.name]) for b in places(p) if b.place == "arena"]
    for b, size, _, _ in placed:
        assert size is not None and b.offset % ALIGN == 0 and b.offset >= 0 and b.offset + size <= p.arena_bytes
    for i, (a, a_size, a_first, a_last) in enumerate(placed):
        for b, b_size, b_first, b_last in placed[i + 1:]:
            if a_first <= b_last and b_first <= a_last:
                assert a.offset + a_size <= b.offset or b.offset + b_size <= a.offset, f"{a.name} and {b.name} overlap"
    freed = p.frees.items() if isinstance(p, ProgramDraft) else enumerate(p.frees)
    gone: dict[str, int] = {n: k for k, names in freed for n in names}
    for k, step in enumerate(p.steps):
        used = set(step.args) if isinstance(step, Launch) else {step.dst, step.src.buffer} if isinstance(step, Copy) \
            else {v.buffer for v in step.args if isinstance(v, Value)}
        for n in used:
            assert gone.get(n, k) >= k, f"{n} is used in step {k} and freed after step {gone[n]}"
    for o in p.outputs:
        if isinstance(o, Value):
            assert o.buffer not in gone and {b.name: b for b in places(p)}[o.buffer].place != "arena"


@st.composite
def random_programs(draw: st.DrawFn) -> ProgramDraft:
    """Launches and calls over buffers of random sizes, each reading what was made before it."""
    count = draw(st.integers(1, 12))
    dtypes = st.sampled_from((torch.float32, torch.float64, torch.uint8, torch.bfloat16))
    buffers = {"in0": buffer("in0", 8, place="input")}
    steps: list[Launch | Call | Copy] = []
    for k in range(count):
        b = buffer(f"b{k}", draw(st.integers(0, 300)), draw(st.integers(1, 5)), dtype=draw(dtypes))
        reads = draw(st.lists(st.sampled_from(sorted(buffers)), max_size=3, unique=True))
        if draw(st.booleans()):
            steps.append(Launch(0, (*reads, b.name)))
        else:
            steps.append(Call(None, tuple(value(buffers[r]) for r in reads), (), (b.name,), None))
            if draw(st.booleans()):
                b = replace(b, place="extern")
        buffers[b.name] = b
    outputs = draw(st.lists(st.sampled_from(sorted(set(buffers) - {"in0"})), max_size=2, unique=True))
    for name in outputs:
        if buffers[name].place == "arena":
            buffers[name] = replace(buffers[name], place="output")
    return ProgramDraft([], steps, [value(buffers[n]) for n in outputs], buffers)


@settings(max_examples=300, deadline=None)
@given(random_programs())
def test_random_programs(p: ProgramDraft) -> None:
    plan_memory(p)
    check(p)
    live = [sum(-(-max(nbytes(b) or 0, 1) // ALIGN) * ALIGN for b in places(p) if b.place == "arena"
                and lifetimes(p)[b.name][0] <= k <= lifetimes(p)[b.name][1]) for k in range(len(p.steps))]
    total = sum(-(-max(nbytes(b) or 0, 1) // ALIGN) * ALIGN for b in places(p) if b.place == "arena")
    assert max(live, default=0) <= p.arena_bytes <= total


def test_a_chain_needs_two_places() -> None:
    """Each step reads the last result and writes the next: memory is two of them, however long the chain."""
    for length in (3, 10, 40):
        buffers = {f"b{k}": buffer(f"b{k}", 1000) for k in range(length)}
        steps = [Launch(0, (f"b{k}", f"b{k + 1}")) for k in range(length - 1)]
        p = ProgramDraft([], list(steps), [], buffers)
        plan_memory(p)
        check(p)
        assert p.arena_bytes == 2 * 4096


def test_sizes_not_known_before_the_run_are_allocated() -> None:
    buffers = {"b0": buffer("b0", Sym("s0"), 4), "b1": buffer("b1", 10)}
    p = ProgramDraft([], [Launch(0, ("b0", "b1")), Launch(0, ("b1",))], [], buffers)
    plan_memory(p)
    assert buffers["b0"].place == "alloc" and buffers["b1"].place == "arena"
    assert p.frees == {0: ("b0",)}


def test_bytes() -> None:
    assert nbytes(buffer("b", 10, 3)) == 120 and nbytes(buffer("b", 0, 3)) == 0 and nbytes(buffer("b")) == 4
    strided = BufferPlan("b", F32, (as_index(3), as_index(2)), (as_index(10), as_index(1)), "arena")
    assert nbytes(strided) == (2 * 10 + 1 + 1) * 4
    assert nbytes(buffer("b", Sym("s0"))) is None


def deep(x: Tensor, *ws: Tensor) -> Tensor:
    for w in ws:
        x = F.softmax(x @ w, -1) + x
    return x


def test_real_programs() -> None:
    ws = [torch.randn(32, 32).requires_grad_() for _ in range(6)]
    for p in programs(deep, torch.randn(16, 32).requires_grad_(), *ws):
        check(p)
    inference = program(deep, torch.randn(16, 32), *(w.detach() for w in ws))
    check(inference)
    assert inference.arena_bytes <= 4 * 16 * 32 * 4, "depth does not add memory"

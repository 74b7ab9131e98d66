"""Products whose sums are cut into pieces: when, where each begins, and that what follows is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._functorch.aot_autograd import aot_function
from torch.fx.experimental.proxy_tensor import make_fx

from agreement import agree, through
from flambeau.codegen.source import TensorMap
from flambeau.codegen.triton import contractions
from flambeau.config import config
from flambeau.ir.program import ContractKernel, LoopKernel
from flambeau.ir.tuning import BLOCKS, TILES
from flambeau.pipeline import Compiled, compile_graph
from flambeau.targets.cuda.interpreter import InterpreterTarget

DOUBLE, HALF = torch.float64, torch.bfloat16


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    with config.override(target="interpreter", contractions="own"):
        yield


@pytest.fixture(params=["pointers", "engine"])
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Factors that come by pointers alone, and by the copy engine where it can read them."""
    monkeypatch.setattr(contractions, "TILES", tuple(t for t in TILES if t.high * t.wide <= 8192))
    if request.param == "pointers":
        monkeypatch.setattr(TensorMap, "there", lambda *_: False)
    return str(request.param)


def random(*shape: int, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype)


def compiled(fn, *args: torch.Tensor) -> Compiled:
    return compile_graph(make_fx(lambda *a: [fn(*a)], tracing_mode="fake")(*args)).compiled


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b.t()


def test_the_sum_is_cut_where_tiles_would_leave_processors_idle() -> None:
    def pieces(*sizes: int) -> int:
        return BLOCKS.pieces(*sizes, 1, 2, 1024)

    assert pieces(112, 408, 12872) >= 8 and pieces(64, 64, 16384) >= 32
    assert pieces(8192, 4096, 8192) == pieces(6896, 3568, 1328) == 1  # all are busy
    assert pieces(104, 1920, 80) == pieces(64, 64, 256) == 1  # nothing to cut
    assert pieces(0, 64, 4096) == pieces(64, 0, 4096) == pieces(64, 64, 0) == 1
    for rows, columns, depth in ((16, 16, 1024), (33, 1000, 5000), (128, 128, 131072)):
        assert 1 <= pieces(rows, columns, depth) <= min(BLOCKS.split_most, depth // BLOCKS.worker_depth)


@pytest.mark.parametrize("depth", [2048, 2056, 2053])
def test_pieces_begin_where_wide_reads_can_and_are_multiplied_as_they_are(depth: int) -> None:
    made = compiled(product, random(40, depth, dtype=HALF), random(24, depth, dtype=HALF))
    first, last = made.program.kernels
    assert isinstance(first, ContractKernel) and isinstance(last, LoopKernel)
    piece, = first.depth
    assert piece.size.const % BLOCKS.product_even == 0 and first.batch[0].size.const > 1
    assert [contractions.multiplied(f).dtype for f in (first.left, first.right)] == [HALF, HALF]
    assert not any("atomic" in t.text for t in made.texts)


def test_what_follows_is_computed_once_after_the_pieces_are_joined() -> None:
    def tail(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return r + torch.tanh(torch.addmm(b, x, w.t()))

    args = random(40, 2056), random(24, 2056), random(24), random(40, 24)
    first, last = compiled(tail, *args).program.kernels
    assert isinstance(first, ContractKernel) and not first.items and len(last.params) == 4
    agree(tail, *args)


def test_the_copy_engine_reads_zeros_beyond_the_last_piece() -> None:
    even = compiled(product, random(40, 2056, dtype=HALF), random(24, 2056, dtype=HALF)).texts[0].text
    odd = compiled(product, random(40, 2053, dtype=HALF), random(24, 2053, dtype=HALF)).texts[0].text
    assert even.count("[40, 2056], [2056, 1]") == even.count("[24, 2056], [2056, 1]") == 1
    assert ".load([" not in odd  # lines begin where the engine cannot read


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF, torch.float64])
@pytest.mark.parametrize("sizes", [(40, 24, 2056), (17, 9, 2053)])
def test_dtypes(access: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, depth = sizes
    same(product, torch.randint(-3, 4, (rows, depth)).to(dtype), torch.randint(-3, 4, (columns, depth)).to(dtype))


def test_int8(access: str) -> None:
    a, b = (torch.randint(-128, 128, (n, 2056), dtype=torch.int8) for n in (24, 16))
    same(lambda a, b: torch._int_mm(a, b.t()), a, b)


def same(fn, a: torch.Tensor, b: torch.Tensor) -> None:
    """Whole numbers, whose sums are exact."""
    made, = compile_graph(make_fx(lambda *x: [fn(*x)], tracing_mode="fake")(a, b))([a, b])
    torch.testing.assert_close(made, product(a.double(), b.double()).to(made.dtype), rtol=0, atol=0)


def test_layouts(access: str) -> None:
    a, b = random(2056, 40), random(2056, 24)
    agree(lambda a, b: a.t() @ b, a, b)
    agree(lambda a, b: a[::2].t() @ b[1::2], a, b)
    agree(lambda a, b: a.t()[:33, :2050] @ b[:2050, 3:20], a, b)
    agree(lambda a, b: torch.bmm(a, b), random(2, 9, 2056), random(2, 2056, 11))


def test_gradients(access: str) -> None:
    agree(lambda a, b: torch.sigmoid(product(a, b)), random(40, 2056).requires_grad_(),
          random(24, 2056).requires_grad_())
    agree(product, random(2056, 9).requires_grad_(), random(2053, 9).requires_grad_())  # whose gradients are cut


def test_sizes_known_only_at_the_call(access: str) -> None:
    run = through(lambda a, b: product(a, b).relu(), dynamic=True)
    for rows, columns, depth in (40, 24, 2056), (33, 25, 2060), (2, 3, 100), (5, 40, 7001):
        a, b = random(rows, depth), random(columns, depth)
        torch.testing.assert_close(run(a, b), product(a, b).relu())


def test_one_program_for_all_depths_that_a_call_may_have() -> None:
    made: list[Compiled] = []

    def keep(gm: torch.fx.GraphModule, _: object) -> object:
        run = compile_graph(gm)
        made.append(run.compiled)
        return run

    run = aot_function(product, fw_compiler=keep, inference_compiler=keep, dynamic=True)
    for depth in (4096, 1000, 9000):
        a, b = random(20, depth), random(30, depth)
        torch.testing.assert_close(run(a, b), product(a, b))
    assert len(made) == 1 and len(made[0].program.kernels) == 2


def test_tf32_is_kept_in_pieces() -> None:
    """Pieces of a product that may round its factors may round them, too."""
    whole = InterpreterTarget.capabilities
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterTarget, "capabilities", lambda self: replace(whole(self), tf32=frozenset({"product"})))
        first = compiled(product, random(40, 2056, dtype=torch.float32),
                         random(24, 2056, dtype=torch.float32)).program.kernels[0]
    assert isinstance(first, ContractKernel) and first.tf32

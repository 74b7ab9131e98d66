"""Repeated regions: which are joined, which must not be, and that results do not change.

Most tests run the pieces without compiling them: pieces with equal keys share one outlined graph, so regions that were
joined wrongly give other numbers than eager. The comparison is exact.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flambeau.compile.regions import cut as search
from flambeau.compile.regions.cut import Pieces
from flambeau.compile.regions.pieces import in_pieces
from flambeau.compile.subgraphs import calls_subgraphs, written_out

WIDTH, DEPTH = 6, 7


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def outlined(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[Pieces]]:
    """A function whose graph is cut and run piece by piece, with one graph for equal pieces; and the cuts."""
    found: list[Pieces] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        gm = written_out(gm) if calls_subgraphs(gm) else gm
        found.append(cut := search.cut(gm, inputs))
        return in_pieces(cut, lambda piece, _: piece.forward) if cut.pieces else gm.forward

    return torch.compile(function, backend=backend, **options), found


def parameters(count: int = DEPTH, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH for _ in range(count)]
    return [w.requires_grad_(options.get("requires_grad", True)) for w in drawn]


def start() -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


def layer(x: Tensor, w: Tensor, shift: int = 1, scale: float = 0.5) -> Tensor:
    y = F.layer_norm(x, (WIDTH,)) @ w
    y = y.roll(shift, 0).sin() * scale + y.tanh().square() - x.cos()
    return x + F.gelu(y) @ w


def run(function: Callable[..., Any], arguments: Sequence[Any], seed: int = 0) -> list[Any]:
    """The results of a function on copies of the arguments, then the copies, then their gradients."""
    def copy(x: Any) -> Any:
        if isinstance(x, list):
            return [copy(y) for y in x]
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    copies = [copy(a) for a in arguments]
    torch.manual_seed(seed)
    out = function(*copies)
    flat = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
    if any(t.requires_grad for t in flat):
        sum((t.sum() * (k + 1) for k, t in enumerate(flat) if t.requires_grad), torch.zeros(())).backward()
    every = [w for a in copies for w in (a if isinstance(a, list) else [a]) if isinstance(w, Tensor)]
    return [t.detach() for t in flat] + [w.detach() for w in every] + [w.grad for w in every]


def check(function: Callable[..., Any], *arguments: Any, **options: Any) -> Pieces:
    """Checks that results and gradients equal eager's exactly. Returns the cut of the (largest) graph."""
    compiled, found = outlined(function, **options)
    ours, eager = run(compiled, arguments), run(function, arguments)
    for a, b in zip(ours, eager, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    cut = max(found, key=lambda f: len(f.gm.graph.nodes))
    for instances in cut.groups():
        assert len({tuple(map(spelled, nodes)) for nodes in instances}) == 1, "they do not even call the same"
    return cut


def spelled(n: fx.Node) -> str:
    """A call as text, without the nodes it is applied to. Constants that compare equal, as 1 and 1.0, have different
    texts."""
    args, kwargs = (fx.node.map_arg(x, lambda _: None) for x in (n.args, n.kwargs))
    return f"{n.op} {n.target} {args} {kwargs}"


def counts(cut: Pieces) -> list[int]:
    """The number of instances of each region, the largest first."""
    return sorted((len(g) for g in cut.groups()), reverse=True)


def distinct(cut: Pieces) -> int:
    return len({p.key for p in cut.pieces})


# ---- what is joined --------------------------------------------------------------------------------------


def stack(x: Tensor, ws: list[Tensor]) -> Tensor:
    for w in ws:
        x = layer(x, w)
    return x


def test_layers_are_one_region() -> None:
    cut = check(stack, start(), parameters())
    assert counts(cut) == [DEPTH - 2]  # the first and the last lose a part, because cuts are next to library calls
    assert distinct(cut) <= 3


def test_more_layers_are_not_more_pieces() -> None:
    few, many = (check(stack, start(), parameters(n)) for n in (8, 24))
    assert distinct(few) == distinct(many)
    assert counts(many)[0] - counts(few)[0] == 16


def test_pieces_keep_the_order_of_the_graph() -> None:
    cut = check(stack, start(), parameters())
    position = {n: k for k, n in enumerate(cut.gm.graph.nodes)}
    order = [position[n] for p in cut.pieces for n in p.nodes]
    assert order == sorted(order) and len(order) == len(set(order))


def test_two_kinds_of_layers() -> None:
    def other(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).softmax(-1).cumsum(-1)
        return x - (y.exp() * y.sigmoid() - y.abs().sqrt().neg().erf()).relu() @ w

    def alternating(x: Tensor, ws: list[Tensor]) -> Tensor:
        for k, w in enumerate(ws):
            x = (layer if k % 2 else other)(x, w)
        return x

    def mixed(x: Tensor, ws: list[Tensor]) -> Tensor:
        for k, w in enumerate(ws):
            x = (layer if k in (0, 1, 4, 5, 7, 9) else other)(x, w)
        return x

    assert counts(check(alternating, start(), parameters(10)))[0] >= 4
    assert len(counts(check(mixed, start(), parameters(12)))) == 2


def test_repetition_within_repetition() -> None:
    def nested(x: Tensor, ws: list[Tensor]) -> Tensor:
        for _ in range(4):
            for w in ws:
                x = layer(x, w)
            x = x.sort(-1).values * 2
        return x

    cut = check(nested, start(), parameters(5))
    assert counts(cut)[0] >= 15


def test_classes_do_not_matter() -> None:
    class A(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return x + y.sin() * y.cos() - y.tanh() * y.exp().log1p() + y.sigmoid().square()

    class B(A):
        pass

    model = nn.Sequential(*((A if k % 3 else B)() for k in range(9)))
    cut = check(lambda x: model(x), start())
    assert counts(cut)[0] >= 7


def test_shared_weights_collect_their_gradients() -> None:
    def tied(x: Tensor, ws: list[Tensor]) -> Tensor:
        for k in range(10):
            x = layer(x, ws[k % 2])
        return x

    assert counts(check(tied, start(), parameters(2))) == [8]


def test_results_in_tuples_and_dataclasses() -> None:
    @dataclasses.dataclass(frozen=True)
    class Result:
        last: Tensor
        all: tuple[Tensor, ...]

    def collecting(x: Tensor, ws: list[Tensor]) -> Result:
        seen = []
        for w in ws:
            x = layer(x, w)
            seen.append(x)
        return Result(x, tuple(seen))

    def read(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        result = collecting(x, ws)
        return [result.last, *result.all]

    cut = check(read, start(), parameters(9))
    assert counts(cut)[0] >= 7


def test_layers_with_several_results() -> None:
    def pair(x: Tensor, ws: list[Tensor]) -> tuple[Tensor, Tensor]:
        total = x.sum()
        for w in ws:
            a, b = layer(x, w).chunk(2, -1)
            x, total = torch.cat((b, a), -1), total + a.mean()
        return x, total

    assert counts(check(pair, start(), parameters(8)))[0] >= 6


@pytest.mark.parametrize("needs", [False, True])
def test_the_first_input_may_need_no_gradient(needs: bool) -> None:
    cut = check(stack, start().requires_grad_(needs), parameters())
    assert counts(cut) == [DEPTH - 2]


def test_sizes_that_vary() -> None:
    compiled, found = outlined(stack, dynamic=True)
    for rows in (4, 9, 3):
        x = torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH)
        torch.testing.assert_close(run(compiled, (x, parameters())), run(stack, (x, parameters())), rtol=0, atol=0)
    assert len(found) == 1 and counts(found[0]) == [DEPTH - 2]


def test_sizes_computed_in_the_graph() -> None:
    def flat(x: Tensor, ws: list[Tensor]) -> tuple[Tensor, int]:
        a, b, c = x.shape
        for w in ws:
            x = layer(x.view(a * b, c), w).view(a, b, c)
        return x, a * b

    x = torch.linspace(-1, 1, 6 * WIDTH).view(2, 3, WIDTH)
    cut = check(flat, x, parameters(), dynamic=True)
    assert counts(cut)[0] >= DEPTH - 2


def test_checkpointed_layers() -> None:
    def light(x: Tensor, ws: list[Tensor]) -> Tensor:
        for w in ws:
            x = checkpoint(layer, x, w, use_reentrant=False)
        return x

    cut = check(light, start(), parameters())
    assert counts(cut) == [DEPTH - 1]  # the input of the first needs no gradient


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin() * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, = ctx.saved_tensors
        return grad * x.cos() * 3  # deliberately not the derivative, to see that this backward runs


def test_gradients_of_the_user() -> None:
    cut = check(odd_one(lambda x, w, k: Doubled.apply(layer(x, w))), start(), parameters())
    assert counts(cut) == [DEPTH - 2]


def test_marked_regions_are_understood() -> None:
    marked = torch.compiler.nested_compile_region(layer)

    def deep(x: Tensor, ws: list[Tensor]) -> Tensor:
        for w in ws:
            x = marked(x, w)
        return x

    def once(x: Tensor, ws: list[Tensor]) -> Tensor:
        return marked(x, ws[0])

    compiled, found = outlined(deep)
    torch.testing.assert_close(run(compiled, (start(), parameters())), run(stack, (start(), parameters())))
    assert counts(found[0]) == [DEPTH - 2]  # as without marks
    compiled, found = outlined(once)
    one = parameters(1)
    torch.testing.assert_close(run(compiled, (start(), one)), run(stack, (start(), one)))


@pytest.mark.parametrize("inside", [False, True])
def test_modes_hold_in_every_piece(inside: bool) -> None:
    def mixed(x: Tensor, ws: list[Tensor]) -> Tensor:
        if inside:
            for w in ws:
                with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                    x = layer(x, w)
                with torch.no_grad():
                    y = x.sin().cos().exp()
                x = x * y
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                for w in ws:
                    x = layer(x, w)
        return x

    assert counts(check(mixed, start(), parameters()))[0] >= DEPTH - 2


def test_statistics_of_batch_norms() -> None:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)) for _ in range(8)]

    def deep(x: Tensor, *_: Any) -> Tensor:
        for block in blocks:
            x = x + block(x).sin().cos().exp().tanh().neg().sigmoid().log()
        return x

    before = [b.clone() for block in blocks for b in block.buffers()]

    def statistics(function: Callable[..., Any]) -> list[Tensor]:
        for b, old in zip((b for block in blocks for b in block.buffers()), before):
            b.copy_(old)
        out = function(start())
        return [out.detach(), *(b.clone() for block in blocks for b in block.buffers())]

    compiled, found = outlined(deep)
    torch.testing.assert_close(statistics(compiled), statistics(deep), rtol=0, atol=0)
    assert counts(found[0])[0] >= 6


# ---- what must not be joined -------------------------------------------------------------------------------


def odd_one(change: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[..., Any]:
    """A deep function with a different layer in the middle."""

    def deep(x: Tensor, ws: list[Tensor]) -> Tensor:
        for k, w in enumerate(ws):
            x = change(x, w, k)
        return x

    return deep


NEARLY_EQUAL: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "an integer": lambda x, w, k: layer(x, w, shift=2 if k == 6 else 1),
    "a float": lambda x, w, k: layer(x, w, scale=0.25 if k == 6 else 0.5),
    "the sign of zero": lambda x, w, k: layer(x, w) / (-0.0 if k == 6 else 0.0),
    "True for 1": lambda x, w, k: layer(x, w) + (x + (True if k == 6 else 1)),
    "an operator": lambda x, w, k: layer(x, w).sin() if k == 6 else layer(x, w).cos(),
    "the layout of a weight": lambda x, w, k: layer(x, w.t() if k == 6 else w),
    "a dtype": lambda x, w, k: layer(x.double(), w.double()).float() if k == 6 else layer(x.float(), w.float()).float(),
    "a size": lambda x, w, k: layer(x[:3], w) if k == 6 else layer(x, w),
    "a slice": lambda x, w, k: layer(x, w) * x[:, 1 if k == 6 else 0 :][:, :1],
    "a mode": lambda x, w, k: no_gradient(x, w) if k == 6 else layer(x, w),
    "the order of operands": lambda x, w, k: apart(x, layer(x, w)) if k == 6 else apart(layer(x, w), x),
}


def no_gradient(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x, w)


def apart(a: Tensor, b: Tensor) -> Tensor:
    return a.sin() - b * 2


@pytest.mark.parametrize("what", NEARLY_EQUAL)
def test_layers_that_differ_in(what: str) -> None:
    cut = check(odd_one(NEARLY_EQUAL[what]), start(), parameters(13))
    assert 8 <= sum(counts(cut)) <= 12, "the other layers are regions, and this one is not"


def test_frozen_layers_stay_apart() -> None:
    ws = parameters(13)
    ws[6].requires_grad_(False)
    cut = check(stack, start(), ws)
    assert sum(counts(cut)) <= 11


def test_crossing_edges() -> None:
    """Layers equal but for which of two earlier values they read."""

    def crossing(x: Tensor, ws: list[Tensor]) -> Tensor:
        older, old = x, x.sin()
        for k, w in enumerate(ws):
            a, b = (old, older) if k in (5, 6, 9) else (older, old)
            older, old = old, layer(a, w) - b.exp() * 0.1
        return old

    check(crossing, start(), parameters(14))


def test_one_weight_twice_is_not_two_weights() -> None:
    def two(x: Tensor, ws: list[Tensor]) -> Tensor:
        for k in range(12):
            v, w = ws[k], ws[k] if k in (4, 8) else ws[12 + k]
            x = layer(x, v) + x @ w
        return x

    cut = check(two, start(), parameters(24))
    assert counts(cut) == [8, 2]


def test_what_others_read_of_a_layer() -> None:
    def returning(x: Tensor, ws: list[Tensor]) -> tuple[Tensor, Tensor]:
        kept = x
        for k, w in enumerate(ws):
            y = (x @ w).sin()
            if k == 6:
                kept = y
            x = x + layer(y, w)
        return x, kept

    cut = check(returning, start(), parameters(13))
    kept = list(cut.gm.graph.nodes)[-1].args[0][1]
    assert cut.regions and not any(kept in nodes for g in cut.groups() for nodes in g)


# ---- memory and random numbers -----------------------------------------------------------------------------


def test_writes_between_layers() -> None:
    """Every layer reads what was counted so far."""

    def counting(x: Tensor, ws: list[Tensor], state: Tensor) -> Tensor:
        for w in ws:
            x = layer(x, w) + state
            state.add_(1)
        return x

    cut = check(counting, start(), parameters(), torch.ones(WIDTH))
    assert not cut.regions, "all that touches the state stays in one piece"


def test_items_set_between_layers() -> None:
    def storing(x: Tensor, ws: list[Tensor], cache: Tensor) -> Tensor:
        for k, w in enumerate(ws):
            cache[k] = x.detach()
            x = layer(x, w) + cache.sum(0)
        return x

    assert not check(storing, start(), parameters(), torch.zeros(DEPTH, 4, WIDTH)).regions


def test_a_view_of_what_is_written() -> None:
    def through(x: Tensor, ws: list[Tensor], state: Tensor) -> Tensor:
        window = state[1:]
        for w in ws:
            x = layer(x, w) * window.sum()
            state.mul_(0.5)
        return x

    assert not check(through, start(), parameters(), torch.ones(WIDTH)).regions


def test_writes_within_a_layer() -> None:
    def own(x: Tensor, ws: list[Tensor]) -> Tensor:
        for w in ws:
            y = (x @ w).sin()
            y.mul_(2).add_(x)
            y[0] = 1
            y += 1
            x = layer(F.relu(y.cos(), inplace=True), w)
        return x

    assert counts(check(own, start(), parameters()))[0] >= DEPTH - 2


def test_the_stream_of_activations_written_in_place() -> None:
    def residual(x: Tensor, ws: list[Tensor]) -> Tensor:
        x = x * 1
        for w in ws:
            x += layer(x, w).detach()
        return x

    assert not check(residual, start(), parameters()).regions


def test_caches_of_their_own() -> None:
    """Each layer writes to its own buffer, an argument of the graph."""

    def caching(x: Tensor, ws: list[Tensor], caches: list[Tensor]) -> Tensor:
        for w, c in zip(ws, caches):
            x = layer(x, w)
            c.copy_(x.detach())
            x = x + c.sum(0)
        return x

    caches = [torch.zeros(4, WIDTH) for _ in range(DEPTH)]
    assert counts(check(caching, start(), parameters(), caches))[0] >= DEPTH - 2


def test_every_instance_draws_its_own_numbers() -> None:
    def noisy(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        masks = []
        for w in ws:
            masks.append(F.dropout(torch.ones(64), 0.5))
            x = layer(F.dropout(x, 0.3), w) + torch.rand_like(x)
        return [x, *masks]

    cut = check(noisy, start(), parameters())  # in the order of eager, with eager's numbers
    assert counts(cut)[0] >= DEPTH - 2


# ---- what is left alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["backward", "hook", "subclass", "data"])
def test_graphs_that_are_not_cut(why: str) -> None:
    class Wrapped(Tensor):
        pass

    def deep(x: Tensor, ws: list[Tensor]) -> Any:
        if why == "data":
            x = x + x.nonzero().sum()
        for w in ws:
            x = layer(x, w)
        if why == "backward":
            return torch.autograd.grad(x.sum(), ws[0])
        if why == "hook":
            x.register_hook(lambda g: g * 2)
        return x

    x = start().as_subclass(Wrapped) if why == "subclass" else start()
    compiled, found = outlined(deep)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for a, b in zip(run(compiled, (x, parameters())), run(deep, (x, parameters())), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    assert all(not cut.regions for cut in found if why in cut.why or why in ("subclass", "data"))


def test_few_and_small_layers_are_left_alone() -> None:
    assert not check(stack, start(), parameters(3)).regions
    assert not check(odd_one(lambda x, w, k: x @ w), start(), parameters(20)).regions


# ---- random graphs -----------------------------------------------------------------------------------------

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin, torch.tanh, F.gelu, lambda t: t.softmax(-1), lambda t: t.flip(0), lambda t: t.clone().mul_(0.5),
    lambda t: F.layer_norm(t, (WIDTH,)), lambda t: t.t().contiguous().t(),
    lambda t: t.unflatten(0, (2, 2)).transpose(0, 1).flatten(0, 1)]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.maximum, lambda a, b: a * b.sigmoid(), lambda a, b: torch.cat((a, b))[2:6]]


def random_layers(seed: int) -> Callable[..., Any]:
    """A function with several kinds of layers in random order, each a random program over the last values and a
    weight."""
    draw = random.Random(seed)

    def program() -> list[tuple[int, ...]]:
        return [(draw.choice((0, 0, 1, 2)), draw.randrange(9), draw.randrange(4), draw.randrange(4))
                for _ in range(draw.randrange(9, 16))]

    kinds = [program() for _ in range(draw.choice((1, 2, 3)))]
    near = list(kinds[0])
    near[-1] = (0, (near[-1][1] + 1) % 9, *near[-1][2:])
    order = [draw.choice(kinds) for _ in range(draw.randrange(5, 9))] if draw.random() < 0.5 else kinds * 5
    if draw.random() < 0.5:
        order.insert(draw.randrange(len(order)), near)

    def function(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        values = [x, x.cos(), x.exp(), x + 1]
        kept = []
        for k, steps in enumerate(order):
            for kind, which, i, j in steps:
                a, b = values[-1 - i], values[-1 - j]
                if kind == 0:
                    new = UNARY[which](a)
                elif kind == 1:
                    new = BINARY[which % len(BINARY)](a, b)
                else:
                    new = a @ ws[k % len(ws)]
                values.append(F.hardtanh(new, -3, 3))
            values = values[-4:]
            if k == len(order) // 2:
                kept.append(values[-2])
        return [*values, *kept]

    return function


@pytest.mark.parametrize("seed", range(8))
def test_random_layers_give_the_results_of_eager(seed: int) -> None:
    check(random_layers(seed), start(), parameters(3))

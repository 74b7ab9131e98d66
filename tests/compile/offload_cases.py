"""Tests that test_offload.py runs in a separate process: on the device, saved tensors are kept on the host."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flambeau
import flambeau.debug
from compile.stream_cases import RunsAgain
from compile.stream_programs import delayed
from flambeau import pipeline
from flambeau.bench.networks import NETWORKS
from flambeau.compile import offload
from flambeau.config import config
from flambeau.errors import OptionError
from flambeau.ir.program import Call, Copy, Launch, Wait
from flambeau.runtime.streams import host_copies
from flambeau.targets.base import get_target

DEV = "flambeau"
N = 48


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    flambeau.enable_device()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.compiler.reset()
    monkeypatch.setattr(offload, "LEAST", 1)
    monkeypatch.setattr(offload, "COPIES", 0)  # such small tensors would not be worth a copy
    link(monkeypatch, 1e3)
    with config.override(verify=True):
        yield
    torch.accelerator.synchronize()


def link(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """Sets the assumed link rate to the host in GB/s. With a fast link all tensors are copied, with a slow one they
    are recomputed."""
    monkeypatch.setattr(host_copies, "link_rate", lambda *_: rate)
    monkeypatch.setattr(pipeline, "link_rate", lambda *_: rate)


def steps_of(graphs: list[flambeau.debug.Compiled]) -> tuple[int, int]:
    """The number of copies to the host, and of copies back."""
    steps = [s for g in graphs for s in g.program.steps]
    return (sum(isinstance(s, Call) and s.kind == "send" for s in steps),
            sum(isinstance(s, Copy) and s.fetches for s in steps))


def products_of(graphs: list[flambeau.debug.Compiled]) -> int:
    return sum(name.startswith(("mm", "addmm", "bmm")) for g in graphs for s in g.program.steps
               for name in (s.origins if isinstance(s, Launch) else (s.origin,) if isinstance(s, Call) else ()))


def run(f: Callable[..., Any], inputs: list[Tensor], times: int = 2, **options: Any
        ) -> tuple[list[Tensor], list[flambeau.debug.Compiled]]:
    """The results and gradients of the last of several calls, and the graphs."""
    torch.compiler.reset()
    made = torch.compile(f, backend="flambeau", options={"regions": False, **options})
    with flambeau.debug.collect() as graphs, delayed(DEV, random.Random(3), 0.2):
        for _ in range(times):
            torch.manual_seed(5)
            given = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
            out = made(*given)
            outs = out if isinstance(out, tuple) else (out,)
            sum(o.sum() for o in outs).backward()
            found = [o.detach().cpu() for o in outs] + [t.grad.cpu() for t in given if t.grad is not None]
    return found, [g for g in graphs if len(g.program.steps) > 1]


def check(f: Callable[..., Any], inputs: list[Tensor], wish: Any = 0.99, **options: Any
          ) -> list[flambeau.debug.Compiled]:
    """Checks that results have the bits of a run that keeps all tensors on the device."""
    want, plain = run(f, inputs, **options)
    assert steps_of(plain) == (0, 0)
    got, graphs = run(f, inputs, offload=wish, **options)
    assert len(got) == len(want) and all(map(torch.equal, got, want))
    return graphs


def matrices(count: int = 2) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(N, N, device=DEV) / 8 for _ in range(count)]


def layers(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x @ y) @ y
    return x


# ---- what is sent ----------------------------------------------------------------------------------------------


def test_saved_tensors_go_to_the_host_and_come_back() -> None:
    graphs = check(layers, matrices())
    sent, fetched = steps_of(graphs)
    assert sent == fetched >= 4
    forward = next(g for g in graphs if steps_of([g])[0])
    assert any("are copied to the host while kernels run" in note for note in forward.program.notes)


def test_views_of_one_memory_are_sent_once() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        a, b, c = torch.sin(x @ y).reshape(N // 2, 2, N).split(16, -1)  # views, by getitem
        return (a.transpose(0, 1) @ b.permute(1, 2, 0)).exp().sum() + (c * a).tanh().sum() + (b @ c.mT).sum()

    sent, fetched = steps_of(check(f, matrices()))
    assert sent == fetched > 0


def test_what_is_not_contiguous() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)).contiguous(memory_format=torch.channels_last)).square().mean()

    torch.manual_seed(2)
    model = Images().to(DEV)
    x = torch.randn(2, 3, 9, 7, device=DEV).contiguous(memory_format=torch.channels_last)
    sent, fetched = steps_of(check(lambda x: model(x), [x]))
    assert sent == fetched > 0


def test_results_of_an_operator_with_several() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        q = (x @ y).reshape(1, 4, N // 4, N)
        out = F.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=True)
        value, place = out.reshape(N, N).topk(5, 1)
        return (F.layer_norm(out, (N,)) @ y).sum() + (value * place).sum()

    sent, fetched = steps_of(check(f, matrices()))
    assert sent == fetched > 0


def test_results_and_inputs_stay() -> None:
    """What the caller holds anyway saves nothing on the host."""
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.tanh(x @ y)
        return a, (a @ x).sum()

    assert steps_of(check(f, matrices())) == (0, 0)


def test_a_scalar_stays() -> None:
    """On the host it would be a number, which is read before the copy is over."""
    def f(x: Tensor, y: Tensor) -> Tensor:
        total = (x @ y).tanh().sum()
        return (total.sin().exp() * torch.tanh(x @ y) @ y).sum()

    graphs = check(f, matrices())
    sent = [s for g in graphs for s in g.program.steps if isinstance(s, Call) and s.kind == "send"]
    assert sent and all(v.shape for s in sent for v in s.args)


def test_dropout_keeps_its_mask() -> None:
    check(lambda x, y: (F.dropout(x @ y, 0.4) @ y).tanh().sum(), matrices())


def test_a_backward_may_run_twice() -> None:
    x, y = (t.requires_grad_() for t in matrices())
    want = torch.autograd.grad(torch.compile(layers, backend="flambeau")(x, y).sum(), (x, y))
    torch.compiler.reset()
    loss = torch.compile(layers, backend="flambeau", options={"offload": 0.99})(x, y).sum()
    for _ in range(2):
        got = torch.autograd.grad(loss, (x, y), retain_graph=True)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))


def test_two_forwards_before_their_backward() -> None:
    x, y = matrices()
    made = torch.compile(layers, backend="flambeau", options={"offload": 0.99})
    plain = torch.compile(layers, backend="flambeau")
    found = []
    for f in (plain, made):
        a, b = (t.clone().requires_grad_() for t in (x, y))
        first, second = f(a, b), f(b, a)
        found.append(torch.autograd.grad((first * second).sum(), (a, b)))
    assert all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(*found, strict=True))


# ---- what is computed again ------------------------------------------------------------------------------------


def test_behind_a_slow_link_it_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link(monkeypatch, 1e-6)
    _, plain = run(layers, matrices())
    graphs = check(layers, matrices(), 0.3)
    assert steps_of(graphs) == (0, 0) and products_of(graphs) > products_of(plain)


def test_with_eager_numerics_halves_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fast numerics, recomputed values would differ from stored ones, because kernels round less in between."""
    link(monkeypatch, 1e-6)
    inputs = [t.bfloat16() for t in matrices()]
    _, plain = run(layers, inputs, numerics="eager")
    graphs = check(layers, inputs, 0.3, numerics="eager")
    assert steps_of(graphs) == (0, 0) and products_of(graphs) > products_of(plain)


def test_a_checkpoint_stays_one() -> None:
    def inside(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x @ y) @ y

    def f(x: Tensor, y: Tensor) -> Tensor:
        return checkpoint(inside, layers(x, y), y, use_reentrant=False).sum() * 2

    _, plain = run(f, matrices())
    graphs = check(f, matrices())
    sent, fetched = steps_of(graphs)
    assert sent == fetched > 0 and products_of(graphs) == products_of(plain)


# ---- with the rest ---------------------------------------------------------------------------------------------


def test_autocast() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEV, torch.bfloat16):
            return layers(x, y).float()

    sent, fetched = steps_of(check(f, matrices()))
    assert sent == fetched > 0


@pytest.mark.parametrize("regions", [False, True])
def test_a_language_model(regions: bool) -> None:
    network = NETWORKS["lm24"].build("tiny", device=DEV, dtype=torch.float32)
    tokens, target = network.make_inputs()
    found: dict[Any, list[Tensor]] = {}
    for wish in (None, 0.4):
        torch.compiler.reset()
        model = torch.compile(network.module, backend="flambeau", options={"regions": regions, "offload": wish})
        with flambeau.debug.collect() as graphs, delayed(DEV, random.Random(4), 0.1):
            for _ in range(2):
                network.module.zero_grad(set_to_none=True)
                loss = network.loss(model(tokens), target)
                loss.backward()
        found[wish] = [loss.detach().cpu(), *(p.grad.cpu() for p in network.module.parameters())]
        sent, fetched = steps_of(graphs)
        assert sent == fetched and bool(sent) == (wish is not None)
    assert all(map(torch.equal, *found.values()))


def test_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has other values at the same addresses: what an earlier one sent would show."""
    recorder = RunsAgain()
    monkeypatch.setattr(type(get_target(DEV)), "recorder", lambda self: recorder)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.device.type == "cpu")
    before = RunsAgain.made
    found: dict[str, list[Tensor]] = {}
    unwritten = [torch.full((N, N), float("nan"), pin_memory=True) for _ in range(40)]
    del unwritten  # a read that comes too early then finds NaN, not an earlier step's values
    for name, options in (("plain", {}), ("offload", {"offload": 0.99, "graphs": True})):
        x, y = (t.requires_grad_() for t in matrices())  # at fixed addresses, like parameters
        torch.compiler.reset()
        made = torch.compile(layers, backend="flambeau", options=options)
        with flambeau.debug.collect() as graphs:
            for _ in range(6):
                x.grad = y.grad = None
                out = made(x, y)
                out.sum().backward()
                found.setdefault(name, []).extend((out.detach().cpu(), x.grad.cpu(), y.grad.cpu()))
                del out
                with torch.no_grad():
                    x.mul_(-0.75)
                    y.add_(x)
        assert bool(sum(steps_of(graphs))) == (name == "offload")
    assert all(map(torch.equal, *found.values()))
    assert RunsAgain.made > before + 1


def test_beside_streams_of_the_function_nothing_is_sent() -> None:
    """Its own streams decide what runs when."""
    side = torch.Stream(device=DEV)

    def f(x: Tensor, y: Tensor) -> Tensor:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            a = torch.tanh(x @ y) @ y
        torch.accelerator.current_stream().wait_stream(side)
        return a.sum()

    assert steps_of(check(f, matrices())) == (0, 0)


# ---- how much --------------------------------------------------------------------------------------------------


def test_more_is_asked_for_more_is_sent() -> None:
    counts = [steps_of(run(layers, matrices(), offload=wish)[1])[0] for wish in ("1KiB", f"{3 * N * N * 4}", 0.99)]
    assert 1 == counts[0] < counts[1] == 3 < counts[2]


@pytest.mark.parametrize(("memory", "sent"), [(1 << 40, False), (N * N * 4 * 6, True)])
def test_auto_is_what_the_device_lacks(memory: int, sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "device_memory", lambda _: memory)
    assert bool(steps_of(check(layers, matrices(), "auto"))[0]) == sent


def test_memory_goes_before_the_forward_ends() -> None:
    """Stream 0 waits for a copy where it should be over, and the memory is another step's from there on."""
    _, graphs = run(layers, matrices(), offload=0.99)
    forward = next(g for g in graphs if steps_of([g])[0])
    steps, frees = forward.program.steps, forward.program.frees
    sent = {v.buffer for s in steps if isinstance(s, Call) and s.kind == "send" for v in s.args}
    last = max(k for k, s in enumerate(steps) if isinstance(s, Launch))
    early = [name for names in frees[:last] for name in names if name in sent]
    assert early and any(isinstance(s, Wait) and s.stream == 0 for s in steps[:last])


@pytest.mark.parametrize("wish", ["much", 1.5, 3, "0", -0.1])
def test_what_is_no_amount(wish: Any) -> None:
    with pytest.raises(OptionError, match="offload"):
        torch.compile(layers, backend="flambeau", options={"offload": wish})(*matrices())

"""options={"graphs": True}: replays use current data, whichever argument moves between two calls."""

from __future__ import annotations

import copy
import random
import string
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import flambeau
from flambeau.bench.models import Block
from flambeau.compile import disk_cache as graph_cache
from flambeau.compile.backend import check_options
from flambeau.config import config
from flambeau.runtime import recording as graphs
from flambeau.runtime import tensor_lists as lists
from flambeau.runtime.recordable import Recordable
from flambeau.targets.cpu.target import CpuTarget

from .replays import Replays

OPTIONS = {"graphs": True}


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replays]:
    made = Replays()
    monkeypatch.setattr(graphs, "FEWEST", 1)
    monkeypatch.setattr(CpuTarget, "recorder", lambda self: made)
    torch._dynamo.reset()
    graphs.RECORDED.clear()  # of other tests, until the collector finds them
    yield made


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))


def compiled(function: Any, **how: Any) -> Any:
    return torch.compile(function, backend="flambeau", options=OPTIONS, **how)


def total(what: str) -> int:
    return sum(getattr(t, what) for t in flambeau.debug.recordings())


def reasons(what: str) -> Counter[str]:
    return sum((getattr(t, what) for t in flambeau.debug.recordings()), Counter())


class Twins:
    """A model compiled with graphs, and the same in eager; every step is compared."""

    def __init__(self, model: nn.Module, optimizer: Callable[..., Any] | None = None) -> None:
        self.eager, self.model = copy.deepcopy(model), model
        self.compiled = compiled(model)
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, 0.1))
        self.optimizers = make(self.eager.parameters()), make(self.model.parameters())

    def both(self, change: Callable[[nn.Module], Any]) -> None:
        for m in (self.eager, self.model):
            change(m)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seed = int(torch.randint(1 << 30, ()))
        torch.manual_seed(seed)
        a = self.eager(x.clone())
        torch.manual_seed(seed)
        b = self.compiled(x.clone())
        torch.testing.assert_close(b, a)
        return a, b

    def step(self, x: torch.Tensor, zero: bool = True, set_to_none: bool = True) -> torch.Tensor:
        a, b = self.forward(x)
        for y in (a, b):
            y.square().mean().backward()
        self.compare()
        if zero:
            for o in self.optimizers:
                o.step()
                o.zero_grad(set_to_none=set_to_none)
        return b

    def compare(self) -> None:
        for p, q in zip(self.eager.parameters(), self.model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
            torch.testing.assert_close(q.data, p.data)
        for p, q in zip(self.eager.buffers(), self.model.buffers(), strict=True):
            torch.testing.assert_close(q, p)


# ---- what moves between calls ----------------------------------------------------------------------------


def test_user_input_moves() -> None:
    twins = Twins(net())
    held = [torch.randn(4, 8) for _ in range(6)]  # at six addresses
    for x in held:
        twins.step(x)
    assert total("replayed") == 8 and reasons("recorded") == {"first": 2}, flambeau.debug.recordings()
    assert reasons("uncaptured") == {"warm-up": 2}


def test_user_input_changes_in_place() -> None:
    f = compiled(lambda x: x.sin() + 1)
    x = torch.randn(5)
    for _ in range(4):
        x.copy_(torch.randn(5))
        torch.testing.assert_close(f(x), x.sin() + 1)
    assert total("replayed") == 2


@pytest.mark.parametrize("layout", ["expanded", "strided", "offset", "transposed"])
def test_layouts_of_moving_inputs(layout: str) -> None:
    f = compiled(lambda x: torch.softmax(x, -1) * 2)
    for _ in range(4):
        x = {"expanded": lambda: torch.randn(1, 6).expand(4, 6), "strided": lambda: torch.randn(8, 12)[::2, ::2],
             "offset": lambda: torch.randn(30)[5:29].view(4, 6), "transposed": lambda: torch.randn(6, 4).t()}[layout]()
        torch.testing.assert_close(f(x), torch.softmax(x, -1) * 2)
    assert total("replayed") == 2


def test_expanded_gradient() -> None:
    w = nn.Parameter(torch.randn(6))
    f = compiled(lambda x: (x * w).tanh())
    for _ in range(4):
        x = torch.randn(3, 6)
        w.grad = None
        f(x).sum().backward()  # an expanded tensor of ones
        torch.testing.assert_close(w.grad, (x * (1 - (x * w.detach()).tanh() ** 2)).sum(0))
    assert total("replayed") == 4


@pytest.mark.parametrize("move", ["data", "to", "load_state_dict", "assign", "in place"])
def test_parameter_moves(move: str) -> None:
    twins = Twins(net())

    def change(m: nn.Module) -> None:
        state = {k: v * 0.5 + 0.1 for k, v in m.state_dict().items()}
        if move == "data":
            for name, p in m.named_parameters():
                p.data = state[name]
        elif move == "to":
            m.to(torch.float64).to(torch.float32)
        elif move == "in place":
            with torch.no_grad():
                for p in m.parameters():
                    p.mul_(0.5)
        else:
            m.load_state_dict(state, assign=move == "assign")

    for _ in range(3):
        twins.step(torch.randn(4, 8))
    before = total("replayed")
    held = [p.data for m in (twins.eager, twins.model) for p in m.parameters()]  # or one may come back to its place
    twins.both(change)
    twins.optimizers = tuple(torch.optim.SGD(m.parameters(), 0.1) for m in (twins.eager, twins.model))  # type: ignore[assignment]
    for _ in range(4):
        twins.step(torch.randn(4, 8))
    stays = move in ("load_state_dict", "in place")
    assert total("replayed") - before == (8 if stays else 4), flambeau.debug.recordings()
    if not stays and move != "assign":  # other parameters are guarded: Dynamo compiles again
        assert reasons("recorded")["other parameters, or parameters moved"] == 2
        assert reasons("uncaptured")["warm-up: parameters moved"] == 2
    del held


@pytest.mark.parametrize("native", [True, False])
def test_one_of_the_parameters_moves(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(lists, "native", lambda: None)
    stays, moves = (nn.Parameter(torch.randn(6)) for _ in range(2))
    f = compiled(lambda x: (x * stays + moves).tanh())
    held = [torch.randn(6) for _ in range(2)]
    for k in (0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1, 1):
        moves.data = held[k]
        x = torch.randn(3, 6)
        with torch.no_grad():
            torch.testing.assert_close(f(x), (x * stays + held[k]).tanh())
    assert total("replayed") == 10 and sum(reasons("recorded").values()) == 2, flambeau.debug.recordings()


def test_parameter_that_moves_in_every_call_is_never_recorded() -> None:
    twins = Twins(net())
    kept = []
    for _ in range(5):
        for m in (twins.eager, twins.model):
            for p in m.parameters():
                kept.append(p.data)
                p.data = p.data.clone()
        twins.step(torch.randn(4, 8))
    assert total("replayed") == 0 and not reasons("recorded")


def test_buffers_are_written_through() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    twins = Twins(model)
    for _ in range(3):
        twins.step(torch.randn(4, 8))
    twins.both(lambda m: m[1].running_mean.fill_(3.0))  # in place, by the user
    for _ in range(2):
        twins.step(torch.randn(4, 8))
    twins.both(lambda m: setattr(m[1], "running_mean", torch.full((8,), -2.0)))  # another tensor
    for _ in range(4):
        twins.step(torch.randn(4, 8))
    twins.both(lambda m: m.eval())
    with torch.no_grad():
        for _ in range(3):
            twins.forward(torch.randn(4, 8))
    assert total("replayed") >= 10, flambeau.debug.recordings()


def test_tensor_of_the_user_that_is_written_to() -> None:
    def add(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state * 2

    f = compiled(add)
    a, b = torch.zeros(7), torch.zeros(7)
    for state in (a, b, a, b, a, b, a):
        x = torch.randn(7)
        expected = state + x
        torch.testing.assert_close(f(state, x), expected * 2)
        torch.testing.assert_close(state, expected)
    assert total("replayed") == 3


# ---- results that somebody holds -------------------------------------------------------------------------


def test_results_that_are_kept_stay_as_they_were() -> None:
    f = compiled(lambda x: x.exp())
    inputs = [torch.randn(3, 4) for _ in range(9)]
    kept = [f(x) for x in inputs]
    for x, y in zip(inputs, kept, strict=True):
        torch.testing.assert_close(y, x.exp())
    assert reasons("recorded") == {"first": 1, "results of earlier calls are in use": 3}
    assert total("replayed") == 4  # as copies


def test_views_of_results_are_in_use() -> None:
    f = compiled(lambda x: x.exp())
    inputs = [torch.randn(3, 4) for _ in range(4)]
    kept = [f(x)[1:, 2] for x in inputs]
    for x, y in zip(inputs, kept, strict=True):
        torch.testing.assert_close(y, x.exp()[1:, 2])


def test_result_as_the_next_input() -> None:
    f = compiled(lambda x: x * 2 + 1)
    x = y = torch.randn(5)
    for _ in range(6):
        x, y = f(x), y * 2 + 1
        torch.testing.assert_close(x, y)


def test_results_changed_in_place() -> None:
    f = compiled(lambda x: x * 2)
    for _ in range(5):
        x = torch.randn(4)
        f(x).fill_(7.0)
        torch.testing.assert_close(f(x), x * 2)


def test_losses_that_are_kept() -> None:
    twins = Twins(nn.Sequential(net(), nn.Flatten(0), nn.Linear(32, 1)))
    kept = [(twins.step(x), x) for x in torch.randn(8, 4, 8)]
    assert len({float(y.detach()) for y, _ in kept}) == 8
    assert reasons("recorded") == {"first": 2}  # a number is given out as a copy


def test_variables_of_a_loop() -> None:
    """They hold the output of the step before while the next one begins; what the backward needed is free by then."""
    twins = Twins(net())
    for _ in range(8):
        out = twins.forward(torch.randn(4, 8))
        loss = [y.square().mean() for y in out]
        for o, y in zip(twins.optimizers, loss, strict=True):
            o.zero_grad()
            y.backward()
        twins.compare()
        for o in twins.optimizers:
            o.step()
    forward, backward = flambeau.debug.recordings()
    assert backward.recorded == {"first": 1}, backward  # and no other for the call that the forward was not recorded in
    assert forward.recorded == {"first": 1} and forward.replayed == 5, forward
    assert forward.uncaptured["results of the call before are in use: from now on they are copies"] == 1


def test_gradients_accumulate() -> None:
    twins = Twins(net())
    for k in range(12):
        twins.step(torch.randn(4, 8), zero=k % 4 == 3)
    # Gradients of the first backward are in use; what forwards save is not.
    assert reasons("recorded") == {"first": 2, "results of earlier calls are in use": 1}, flambeau.debug.recordings()
    assert total("replayed") == 24 - 2 - 3


def test_gradients_that_are_zeroed_in_place() -> None:
    twins = Twins(net())
    for _ in range(6):
        twins.step(torch.randn(4, 8), set_to_none=False)
    assert total("replayed") >= 7


def accumulated(twins: Twins, count: int, together: bool) -> None:
    """A step over parts of a batch: all forwards first, then the backwards of all at once or one by one."""
    pairs = [twins.forward(torch.randn(4, 8)) for _ in range(count)]
    for k in (0, 1):
        losses = [pair[k].square().mean() for pair in pairs]
        for loss in [sum(losses)] if together else losses:
            loss.backward()  # type: ignore[union-attr]
    twins.compare()
    for o in twins.optimizers:
        o.step()
        o.zero_grad()


def test_two_forwards_before_their_backwards() -> None:
    """Each has a recording of its own, and nothing more is recorded, or copied, once they are there."""
    for count, together in ((2, True), (2, False), (3, True)):
        torch._dynamo.reset()
        graphs.RECORDED.clear()
        twins = Twins(net())
        for _ in range(5):
            accumulated(twins, count, together)
        before, replayed = reasons("recorded"), total("replayed")
        assert sum(before.values()) <= 2 + 3 * count, flambeau.debug.recordings()
        for _ in range(2):
            accumulated(twins, count, together)
        assert reasons("recorded") == before, flambeau.debug.recordings()
        assert total("replayed") == replayed + 2 * 2 * count
        backward = next(t for t in flambeau.debug.recordings() if t.label.startswith("mm"))
        assert backward.copied == 2 * 4 * 8 * 4, "all but the input and the gradient of the output stays where it is"


def test_backward_twice() -> None:
    twins = Twins(net())
    for _ in range(5):
        a, b = twins.forward(torch.randn(4, 8))
        for y in (a, b):
            y.square().mean().backward(retain_graph=True)
            y.sum().backward()
        twins.compare()
        for o in twins.optimizers:
            o.step()
            o.zero_grad()
    assert total("replayed") > 4


def test_backward_is_late() -> None:
    twins = Twins(net())
    late = []
    for _ in range(6):
        late.append(twins.forward(torch.randn(4, 8)))  # more than there are recordings for
    for k in (0, 1):
        sum(pair[k].square().mean() for pair in late).backward()
    twins.compare()
    assert reasons("uncaptured")["results of 4 recordings are in use"] or total("replayed") == 0 or \
        sum(reasons("recorded").values()) >= 3


# ---- what else differs from call to call -------------------------------------------------------------------


def test_random_numbers_are_those_of_uncaptured_calls() -> None:
    def drop(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    plain, f = torch.compile(drop, backend="flambeau"), compiled(drop)
    x = torch.ones(64)
    torch.manual_seed(3)
    expected = [plain(x) for _ in range(5)]
    torch.manual_seed(3)
    got = [f(x).clone() for _ in range(5)]
    assert len({tuple(y.tolist()) for y in got}) == 5
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)
    assert total("replayed") == 3


def test_dropout_and_its_gradient() -> None:
    w = nn.Parameter(torch.ones(64))
    f = compiled(lambda x: nn.functional.dropout(x * w, 0.5))
    for _ in range(8):
        w.grad = None
        y = f(torch.ones(64))
        y.sum().backward()
        torch.testing.assert_close(w.grad, y.detach())
    assert total("replayed") > 4


def test_sizes_change() -> None:
    twins = Twins(net())
    twins.compiled = compiled(twins.model, dynamic=True)
    for rows in (3, 3, 5, 3, 5, 7, 3, 5, 7, 7):
        twins.step(torch.randn(rows, 8))
    assert reasons("recorded") == {"first": 2, "other sizes": 4}, flambeau.debug.recordings()
    assert total("replayed") >= 6


def test_there_are_recordings_of_a_few_sizes_only() -> None:
    f = compiled(lambda x: x.sin(), dynamic=True)
    for _ in range(3):
        for rows in range(2, 4 + graphs.MOST_SIZES):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(f(x), x.sin())
    assert sum(reasons("recorded").values()) == graphs.MOST_SIZES
    assert reasons("uncaptured")["it has recordings of 8 sizes"] >= 3


def test_dtype_changes() -> None:
    f = compiled(lambda x: x.sin() + x)
    for _ in range(3):
        for dtype in (torch.float32, torch.float64):
            x = torch.randn(5, dtype=dtype)
            torch.testing.assert_close(f(x), x.sin() + x)


def test_two_functions_take_turns() -> None:
    f, g = compiled(lambda x: x.sin() * 3), compiled(lambda x: (x + 1).relu())
    for _ in range(8):
        x = torch.randn(6)
        a = f(x)
        b = g(a)
        c = f(b)
        torch.testing.assert_close(c, ((x.sin() * 3 + 1).relu().sin() * 3))
        torch.testing.assert_close(a, x.sin() * 3)
    assert total("replayed") > 4


def test_inference_and_training_take_turns() -> None:
    twins = Twins(nn.Sequential(net(), nn.Dropout(0.0)))
    for k in range(6):
        twins.step(torch.randn(4, 8))
        with torch.no_grad() if k % 2 else torch.inference_mode():
            twins.forward(torch.randn(4, 8))
    assert total("replayed") > 8


def test_regions_have_recordings_of_their_own() -> None:
    torch.manual_seed(0)
    twins = Twins(nn.Sequential(*(Block(16, 2, True) for _ in range(6))))
    for _ in range(4):
        twins.step(torch.randn(2, 4, 16))
    assert reasons("recorded")["other parameters, or parameters moved"] >= 6, flambeau.debug.recordings()
    calls = sum(t.calls for t in flambeau.debug.recordings())
    assert total("replayed") == calls // 2  # all of the third and of the fourth step
    assert total("copied") <= 5 * 2 * 4 * 16 * 4  # between pieces nothing is


# ---- optimizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam])
def test_learning_rate_and_states(make: Any) -> None:
    """AdamW goes along tables; the other one is captured by Dynamo, states and counts of steps being arguments."""
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.linspace(-1, 1, n)) for n in (5, 12)] for _ in range(2))
    a, b = (make(ps, lr=0.1, foreach=True, **({} if make is torch.optim.AdamW else {"capturable": False}))
            for ps in (ours, theirs))
    step = compiled(a.step)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (a, b)]
    saved: Any = None
    for k in range(8):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        step()
        b.step()
        if k == 2:
            saved = copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict())
        if k == 5:
            a.load_state_dict(saved[0])
            b.load_state_dict(saved[1])
        if k % 2:
            for s in schedules:
                s.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, msg=lambda m, k=k: f"step {k}: {m}")


def test_own_optimizer_is_recorded() -> None:
    p, m = nn.Parameter(torch.ones(6)), torch.zeros(6)
    q, n = p.detach().clone(), m.clone()

    @compiled
    @torch.no_grad()
    def step(grad: torch.Tensor, lr: torch.Tensor) -> None:
        m.lerp_(grad, 0.1)
        p.sub_(lr * m)

    for k in range(6):
        grad, lr = torch.randn(6), torch.full((1,), 0.5 / (k + 1))
        step(grad, lr)
        n.lerp_(grad, 0.1)
        q.sub_(lr * n)
        torch.testing.assert_close(p.detach(), q)
        torch.testing.assert_close(m, n)
    assert total("replayed") == 4


# ---- what is not recorded, and why --------------------------------------------------------------------------


def test_what_is_launched_at_once_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(CpuTarget, "recorder", lambda self: Replays())
    w = nn.Parameter(torch.ones(3))
    f, g = compiled(lambda x: x.sin() + 1), compiled(lambda: w * 2)
    with torch.no_grad():
        for _ in range(3):
            f(torch.ones(3))
            g()
    assert reasons("uncaptured") == {"warm-up": 2, "one launch needs no recording": 2}
    assert total("replayed") == 1  # nothing has to be copied for it


def test_sizes_that_data_decide_are_not_recorded() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f = compiled(lambda x: torch.nonzero(x > 0).sum())
        for _ in range(3):
            x = torch.randn(20)
            assert f(x) == torch.nonzero(x > 0).sum()
    assert reasons("uncaptured") == {"aten.nonzero.default makes the host wait for data": 3}


def test_numbers_of_the_host_are_not_recorded(recorder: Replays) -> None:
    """What a launch got as a value would be the same in every replay."""
    what = Recordable("", 2, ())
    device = torch.device("meta")
    for x, reason in ((torch.tensor(0.5), "argument 0 is on cpu: its contents would be part of the recording"),
                      (torch.Generator(), "argument 0 is a Generator"),
                      (torch.ones(2).to_sparse(), "argument 0 is no plain tensor: Tensor")):
        f = graphs.Recorded(lambda args: args, recorder, what, device)
        for _ in range(3):
            assert f([x]) == [x]
        assert f.tally.uncaptured == {reason: 3}


def test_items_that_stay_on_the_device() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        f = compiled(lambda x: x * x.sum().item())
        for _ in range(4):
            x = torch.randn(20)
            torch.testing.assert_close(f(x), x * x.sum())
    assert total("replayed") == 2


def test_operators_from_outside_are_not_recorded() -> None:
    with torch.library._scoped_library("flambeau_test_graphs", "FRAGMENT") as lib:
        lib.define("twice(Tensor x) -> Tensor")
        lib.impl("twice", lambda x: x * 2, "CPU")
        lib.impl("twice", lambda x: torch.empty_like(x), "Meta")
        f = compiled(lambda x: torch.ops.flambeau_test_graphs.twice(x) + 1)
        for _ in range(3):
            x = torch.randn(4)
            torch.testing.assert_close(f(x), x * 2 + 1)
    assert "operator from outside" in str(reasons("uncaptured")) and total("replayed") == 0


def test_dispatch_modes_see_operators() -> None:
    """The first call may be a warm-up all the same: AOTAutograd runs it in a mode of its own."""
    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    calls = graphs.Recorded(lambda args: [args[0].sin()], Replays(), Recordable("sin", 2, ()), torch.device("cpu"))
    for mode, expected in ((Sees(), 1), (nullcontext(), 0), (nullcontext(), 0), (Sees(), 1), (nullcontext(), 0)):
        seen: list[str] = []
        x = torch.randn(4)
        with mode:
            made = calls([x])
        assert seen == ["aten.sin.default"] * expected
        torch.testing.assert_close(made.pop(), x.sin())
    assert calls.tally.replayed == 2
    assert calls.tally.uncaptured == {"warm-up": 1, "a dispatch mode wants to see the operators": 1}


def test_a_recording_that_fails(recorder: Replays) -> None:
    twins = Twins(net())
    twins.step(torch.randn(4, 8))
    recorder.fails = RuntimeError("operation not permitted when stream is capturing\nmore")
    for _ in range(3):
        twins.step(torch.randn(4, 8))
    reason = "recording failed: RuntimeError: operation not permitted when stream is capturing"
    assert reasons("uncaptured") == {"warm-up": 2, reason: 6} and not reasons("recorded")


def test_errors_of_earlier_calls_do_not_end_recording(recorder: Replays) -> None:
    f = compiled(lambda x: x + 1)
    f(torch.ones(3))
    recorder.finds = IndexError("index out of range in self")
    with pytest.raises(IndexError):
        f(torch.ones(3))
    recorder.finds = None
    for _ in range(2):
        torch.testing.assert_close(f(torch.ones(3)), torch.full((3,), 2.0))
    assert total("replayed") == 1


def test_errors_in_data_are_raised() -> None:
    f = compiled(lambda x, i: x[i] + 1)
    x = torch.randn(5)
    for _ in range(3):
        f(x, torch.tensor([1, 2]))
    with pytest.raises(IndexError):
        f(x, torch.tensor([1, 20]))
    torch.testing.assert_close(f(x, torch.tensor([3, 4])), x[3:] + 1)


def test_queues_have_recordings_of_their_own(recorder: Replays) -> None:
    f = compiled(lambda x: x + 1)
    for queue in ("a", "b", "a", "b", "a", "b", None):
        recorder.current = queue
        f(torch.ones(3))
    assert total("replayed") == 2 and sum(reasons("recorded").values()) == 2
    assert reasons("uncaptured")["somebody else is capturing"] == 1


def test_many_bytes_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_COPIED", 64)
    f = compiled(lambda x: x + 1)
    for _ in range(3):
        f(torch.ones(100))
    assert reasons("uncaptured") == {"warm-up": 1, "0 MiB of arguments move": 2}


def test_targets_without_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuTarget, "recorder", lambda self: None)
    f = compiled(lambda x: x + 1)
    f(torch.ones(3))
    assert reasons("uncaptured") == {"nothing is recorded on cpu": 1}


# ---- beside the calls ------------------------------------------------------------------------------------


def test_recordings_that_are_not_used_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "RESTS", 4)
    f = compiled(lambda x: x.sin(), dynamic=True)
    for rows in (2, 3, 4, 5):
        for _ in range(8):
            f(torch.randn(rows, 3))
    (made,) = graphs.RECORDED
    takes = [take for takes in made.takes.values() for take in takes]
    assert len(takes) < 4
    addresses = {address for take in takes for address in take.addresses}
    takes.clear()
    made.takes.clear()
    made.meant.clear()
    graphs.GIVEN.clear()
    assert not any(graphs.RESIDENT[address] for address in addresses)


def test_graphs_out_of_the_cache_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    suffix = ".graph" + "".join(random.choices(string.ascii_lowercase, k=12))
    monkeypatch.setattr(graph_cache, "SUFFIX", suffix)
    graph_cache.stats.clear()
    with config.override(verify=False):
        for _ in range(2):
            torch._dynamo.reset()
            graphs.RECORDED.clear()
            twins = Twins(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
            for _ in range(4):
                twins.step(torch.randn(4, 8))
            for keeper in list(graph_cache.keepers):
                keeper.join(60)
            assert total("replayed") >= 3, flambeau.debug.recordings()
    assert graph_cache.stats["hit"] == 1


def test_threads() -> None:
    f = compiled(lambda x: x.exp() * 2)
    f(torch.randn(1000))
    f(torch.randn(1000))
    wrong = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(1000, generator=generator)
            if not torch.allclose(f(x), x.exp() * 2):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_settings() -> None:
    assert check_options({"graphs": True}, None)["graphs"] and check_options(None, "reduce-overhead")["graphs"]
    assert not check_options(None, None)["graphs"]
    with config.override(graphs=True):
        assert check_options(None, None)["graphs"] and not check_options({"graphs": False}, None)["graphs"]


@pytest.mark.parametrize(("device", "copied"), [("cpu", True), ("cuda", False)])
def test_what_a_device_sends_to_the_host_is_never_copied_there(device: str, copied: bool) -> None:
    """It may still be on its way when a replay returns, and a copy by the host would not wait for it."""
    made = SimpleNamespace(results=[torch.ones(()), torch.ones(4)])
    take = graphs.Take({}, [], made, [], torch.device(device))  # type: ignore[arg-type]
    addresses = [r.owned.data_ptr() for r in take.results if r.owned is not None]
    out = take.give(("a test", device), [], {1})
    assert [t.data_ptr() != address for t, address in zip(out, addresses, strict=True)] == [copied, copied]

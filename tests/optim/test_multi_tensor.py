"""Compiled optimizer steps: eager's results, few kernels however many tensors there are, and no stale memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import flambeau
from flambeau.eager import accelerate as overrides
from flambeau.optim import multi_tensor
from flambeau.optim.clipping import SCALED
from flambeau.optim.multi_tensor import DECLINED, ListFunction
from flambeau.optim.row_kernels import RowKind, Variant

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
TARGETS = ["cpu", pytest.param("interpreter", marks=NEEDS_TRITON)]
SHAPES = [(1,), (), (3, 5), (0, 4), (5000,), (17, 3, 2)]
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True, "foreach": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "foreach": True}),
    ("AdamW", {}),
    ("AdamW", {"foreach": True, "maximize": True, "weight_decay": 0.2, "betas": (0.7, 0.8)}),
    ("AdamW", {"foreach": False, "amsgrad": True}),
    ("RMSprop", {"centered": True, "momentum": 0.5, "weight_decay": 0.1}),
    ("RMSprop", {"foreach": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "foreach": True, "maximize": True}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    *((name, {"foreach": foreach}) for name in ("Adadelta", "Adamax", "RAdam") for foreach in (False, True)),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Each test compiles for itself, and starts with no calls left to torch."""
    multi_tensor.list_function.cache_clear()
    torch._dynamo.reset()
    DECLINED.clear()
    yield


def parameters(shapes: Any = SHAPES, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(s).to(dtype)) for s in shapes]


def compiled(optimizer: Any, target: str = "cpu", numerics: str = "fast") -> Any:
    return torch.compile(optimizer.step, backend="flambeau", options={"target": target, "numerics": numerics})


def train(ours: list[Parameter], eager: list[Parameter], step: Any, other: Any, times: int = 3, **close: Any) -> None:
    """Steps with the same fresh gradients, compared after each."""
    for k in range(times):
        for a, b in zip(ours, eager, strict=True):
            a.grad = torch.empty_like(a).copy_(torch.randn(a.shape, generator=torch.Generator().manual_seed(k)))
            b.grad = a.grad.clone()
        step()
        other()
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, **close)


def function(name: str = "adam") -> ListFunction:
    """What was compiled for one of torch's functions."""
    module = import_module(f"torch.optim.{name}")
    return multi_tensor.list_function(getattr(module, name).__wrapped__, module.__name__)


def variants(name: str = "adam") -> list[Variant]:
    return [v for found in function(name).compiled.values() for v in found if isinstance(v, Variant)]


@pytest.mark.parametrize(("name", "options", "target"), [
    *((*form, "cpu") for form in FORMS),
    *(pytest.param(*FORMS[k], "interpreter", marks=NEEDS_TRITON) for k in (1, 4, 6, 8, 10)),
], ids=lambda x: x if isinstance(x, str) else "-".join(x) or "default")
def test_steps_are_those_of_eager(name: str, options: dict[str, Any], target: str) -> None:
    ours, eager = parameters(), parameters()
    a, b = (getattr(torch.optim, name)(p, **options) for p in (ours, eager))
    train(ours, eager, compiled(a, target), b.step)
    for p, q in zip(ours, eager, strict=True):
        torch.testing.assert_close(dict(a.state[p]), dict(b.state[q]))
    assert set(DECLINED) <= {"sgd: states that this step makes"}


def test_half_precision_rounds_as_eager_does() -> None:
    # In what is left over after its vectors, torch rounds more often.
    ours, eager = (parameters([(64,), (256, 20)], torch.bfloat16) for _ in range(2))
    step = compiled(torch.optim.AdamW(ours), numerics="eager")
    train(ours, eager, step, torch.optim.AdamW(eager).step, rtol=0, atol=0)


@pytest.mark.parametrize("target", TARGETS)
def test_capturable_steps(target: str) -> None:
    """Eager has them on GPUs alone: compared with the form that is not capturable, which rounds less."""
    ours, eager = parameters(), parameters()
    a, b = torch.optim.AdamW(ours, capturable=True), torch.optim.AdamW(eager)
    train(ours, eager, compiled(a, target), b.step, rtol=1e-4, atol=1e-5)
    assert not DECLINED
    assert all(state["step"] == 3 for state in a.state.values())


def test_groups_and_dtypes_share_what_is_equal() -> None:
    def groups(p: list[Parameter]) -> list[dict[str, Any]]:
        return [{"params": p[:4]}, {"params": p[4:8], "lr": 0.5}, {"params": p[8:], "weight_decay": 0.0}]

    def mixed() -> list[Parameter]:
        return [Parameter(torch.randn(7).to(d)) for d in 4 * (torch.float32, torch.float64, torch.float16)]

    torch.manual_seed(0)
    ours = mixed()
    eager = [Parameter(p.detach().clone()) for p in ours]
    a, b = torch.optim.AdamW(groups(ours)), torch.optim.AdamW(groups(eager))
    train(ours, eager, compiled(a), b.step, rtol=2e-3, atol=5e-4)
    assert len(variants()) == 6  # three dtypes, with and without decay; the rate is a number


def test_kernels_do_not_depend_on_how_many_tensors_there_are() -> None:
    texts = []
    for count in (2, 60):
        multi_tensor.list_function.cache_clear()
        torch._dynamo.reset()
        ours, eager = (parameters([(k % 5, 3) for k in range(count)]) for _ in range(2))
        train(ours, eager, compiled(torch.optim.AdamW(ours)), torch.optim.AdamW(eager).step, times=1)
        texts.append([row.kernel for v in variants() for p in v.programs for row in p.launches])
    assert texts[0] == texts[1] and len(texts[0]) == 2


def test_numbers_that_change_compile_nothing() -> None:
    ours, eager = parameters(), parameters()
    a, b = torch.optim.AdamW(ours), torch.optim.AdamW(eager)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (a, b)]
    step = compiled(a)
    for _ in range(4):
        train(ours, eager, step, b.step, times=1)
        for s in schedules:
            s.step()
    assert len(function().compiled) == 1
    assert [len(v) for v in function().compiled.values()] == [1]
    a.param_groups[0]["weight_decay"] = b.param_groups[0]["weight_decay"] = 0.0  # another formula
    train(ours, eager, step, b.step)
    assert [len(v) for v in function().compiled.values()] == [2]


@pytest.mark.parametrize("target", TARGETS)
def test_every_tensor_may_move(target: str) -> None:
    ours, eager = parameters(), parameters()
    a, b = torch.optim.AdamW(ours), torch.optim.AdamW(eager)
    step = compiled(a, target)
    for _ in range(3):
        train(ours, eager, step, b.step, times=1)
        kept = []
        for p in ours:
            kept += [p.data, *a.state[p].values()]
            p.data = p.data.clone()
            for name, t in a.state[p].items():
                a.state[p][name] = t.clone()
        for t in kept:
            t.fill_(float("nan"))  # a read or write there shows


def test_layouts() -> None:
    """Dense in any order, views of one storage, with gaps, and gradients laid out unlike their parameters."""
    def laid() -> list[Parameter]:
        torch.manual_seed(0)
        flat = torch.randn(100)
        images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
        return [Parameter(torch.randn(4, 6).t()), Parameter(images), Parameter(flat[:40]),
                Parameter(flat[40:100].view(6, 10)), Parameter(torch.randn(8, 8)[:, ::2]), Parameter(torch.randn(3, 3))]

    ours, eager = laid(), laid()
    a, b = torch.optim.AdamW(ours), torch.optim.AdamW(eager)
    step = compiled(a)
    for k in range(3):
        for p, q in zip(ours, eager, strict=True):
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape))
            q.grad = torch.empty_like(q).copy_(p.grad)
        if k:
            ours[-1].grad = torch.randn(3, 3).t()
            eager[-1].grad = ours[-1].grad.clone()
        step()
        b.step()
        for p, q in zip(ours, eager, strict=True):
            torch.testing.assert_close(p, q)
    assert set(DECLINED) == {"adam: rows that are not laid out alike"}


def test_what_shares_memory_is_left_to_torch() -> None:
    def tied() -> list[Parameter]:
        torch.manual_seed(0)
        flat = torch.randn(10)
        return [Parameter(flat[:6]), Parameter(flat[4:])]

    ours, eager = tied(), tied()
    train(ours, eager, compiled(torch.optim.SGD(ours, lr=0.1)), torch.optim.SGD(eager, lr=0.1).step)
    assert DECLINED["sgd: tensors that share memory"] == 3


def test_a_factor_that_is_part_of_what_it_scales_is_left_to_torch() -> None:
    flat = torch.arange(1.0, 5.0)
    SCALED(([flat[:3]], torch.tensor(2.0)), {}, (None, "near"))
    assert flat.tolist() == [2, 4, 6, 4] and not DECLINED
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        SCALED(([flat[:3]], flat[2]), {}, (None, "near"))
    assert DECLINED == {"scaled: tensors that share memory": 1}


def test_counts_that_differ_from_row_to_row() -> None:
    ours, eager = parameters([(3,), (4,), (5,)]), parameters([(3,), (4,), (5,)])
    a, b = torch.optim.AdamW(ours), torch.optim.AdamW(eager)
    train(ours[:2], eager[:2], compiled(a), b.step)
    train(ours, eager, compiled(a), b.step)  # the third one begins now
    assert not DECLINED and [int(a.state[p]["step"]) for p in ours] == [6, 6, 3]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are taken for those of another device than the CPU's, though the memory is the same."""
    monkeypatch.setattr(multi_tensor, "RowKind", lambda _, *rest: RowKind(torch.device("cpu", 0), *rest))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("name", "target"), [
    *((name, "cpu") for name in ("Adam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "RAdam")),
    *(pytest.param(name, "interpreter", marks=NEEDS_TRITON) for name in ("Adam", "RMSprop"))])
def test_counts_on_the_cpu_of_parameters_elsewhere(name: str, target: str) -> None:
    """As on a GPU without `capturable`: counts have kernels and tables of their own, on the CPU. That is so as well
    where nothing is computed from them."""
    ours, eager = parameters(), parameters()
    a, b = (getattr(torch.optim, name)(p) for p in (ours, eager))
    train(ours, eager, compiled(a, target), b.step)
    assert not DECLINED
    for v in variants(name.lower()):
        assert [len(p.launches) for p in v.programs] == [1, 1]
    assert all(state["step"] == 3 for state in a.state.values())


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_capturable_counts_on_the_cpu_are_torchs_to_refuse(name: str) -> None:
    ours = parameters()
    optimizer = getattr(torch.optim, name)(ours, capturable=True)
    for p in ours:
        p.grad = torch.ones_like(p)
    with pytest.raises(AssertionError, match="capturable"):
        compiled(optimizer)()
    assert list(DECLINED) == [f"{'adam' if name == 'AdamW' else 'rmsprop'}: numbers of parameters on another device"]


def test_a_step_within_a_function() -> None:
    ours, eager = parameters(), parameters()
    a, b = torch.optim.AdamW(ours), torch.optim.AdamW(eager)
    seen = []
    a.register_step_post_hook(lambda *_: seen.append(1))

    @torch.compile(backend="flambeau")
    def step() -> None:
        a.step()

    train(ours, eager, step, b.step)
    assert len(seen) == 3 and function().compiled


def test_autograd_sees_the_updates() -> None:
    p = Parameter(torch.randn(4))
    loss = (p * p).sum()
    p.grad = torch.ones(4)
    compiled(torch.optim.SGD([p], lr=0.1))()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_other_callers_get_torch() -> None:
    """Neither eager steps nor those that another backend compiles come to us."""
    ours, eager = parameters(), parameters()
    a, b = torch.optim.AdamW(ours), torch.optim.AdamW(eager)
    train(ours, eager, torch.compile(a.step, backend="eager"), b.step, rtol=1e-4, atol=1e-5)
    assert not function().compiled


def test_tables_are_kept_for_some_calls_and_for_no_tensor() -> None:
    f = function("sgd")
    gone = []
    for _ in range(multi_tensor.MOST_PREPARED + 3):
        (p,) = parameters([(3,)])
        p.grad = torch.ones(3)
        gone.append(weakref.ref(p))
        f(([p], [p.grad], []), {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False,
                                "maximize": False}, (None, "fast"))
    del p
    assert len(f.prepared) <= multi_tensor.MOST_PREPARED and not any(ref() is not None for ref in gone)


def test_tensors_that_change_their_sizes() -> None:
    """The same parameter, and memory, with fewer elements."""
    ours, eager = parameters([(50,), (6,)]), parameters([(50,), (6,)])
    a, b = torch.optim.SGD(ours, lr=0.1), torch.optim.SGD(eager, lr=0.1)
    step = compiled(a)
    train(ours, eager, step, b.step, times=1)
    for p in (ours[0], eager[0]):
        p.grad = None
        p.data = p.data[:20]
    kept = ours[0].data._base
    train(ours, eager, step, b.step, times=1)
    assert kept is None or kept.shape == (50,)


# ---- clipping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "target"), [
    (1.0, "cpu"), (2.0, "cpu"), (float("inf"), "cpu"), pytest.param(2.0, "interpreter", marks=NEEDS_TRITON)])
def test_clipping(order: float, target: str) -> None:
    clip = torch.compile(torch.nn.utils.clip_grad_norm_, backend="flambeau", options={"target": target})
    shapes = [s for s in (*SHAPES, (9000,)) if 0 not in s]  # they have no largest element
    for k in range(2):
        ours, exact = parameters(shapes), parameters(shapes, torch.float64)
        for a, b in zip(ours, exact, strict=True):
            a.grad = torch.randn(a.shape) * 10.0 ** (k - 2)
            b.grad = a.grad.double()
        norm = torch.nn.utils.clip_grad_norm_(exact, 1.0, order)
        torch.testing.assert_close(clip(ours, 1.0, order), norm.float())
        for a, b in zip(ours, exact, strict=True):
            torch.testing.assert_close(a.grad, b.grad.float())
    assert not DECLINED


def test_clipping_of_several_dtypes_is_the_same_in_every_run() -> None:
    clip = torch.compile(torch.nn.utils.clip_grad_norm_, backend="flambeau")
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        some = [Parameter(torch.randn(50_000).to(d)) for d in (torch.float32, torch.float64, torch.bfloat16)]
        some.append(Parameter(torch.randn(40, 50)[:, ::2]))
        for p in some:
            p.grad = torch.randn(p.shape).to(p.dtype)
        some.append(Parameter(torch.randn(3)))  # without a gradient
        found.append((clip(some, 0.5), [p.grad for p in some[:-1]]))
    assert found[0][0].dtype is torch.float64
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(torch.stack([g.double().norm() for g in found[0][1]]).norm().item(), 0.5, rtol=1e-3,
                               atol=0)


def test_norms_of_another_order_are_torchs() -> None:
    p = parameters([(4,), (5,)])
    for x in p:
        x.grad = torch.ones_like(x)
    clip = torch.compile(torch.nn.utils.clip_grad_norm_, backend="flambeau")
    torch.testing.assert_close(clip(p, 1.0, 3.0), torch.tensor(9.0) ** (1 / 3))
    assert any(reason.startswith("get_total_norm") for reason in DECLINED)
    with pytest.raises(RuntimeError, match="non-finite"):
        p[0].grad = torch.full((4,), float("inf"))
        clip(p, 1.0, 2.0, error_if_nonfinite=True)


# ---- without torch.compile ---------------------------------------------------------------------------------


def test_uncompiled_steps_on_an_accelerated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "wanted", lambda *_: {})  # no operator is replaced, so no gate has to be compiled
    monkeypatch.setattr(overrides, "load_gates", lambda: SimpleNamespace(start=lambda *_: None))
    ours, eager = parameters(), parameters()
    a, b = torch.optim.AdamW(ours), torch.optim.AdamW(eager)

    def step() -> None:
        with flambeau.accelerate("cpu"):
            a.step()
            torch.nn.utils.clip_grad_norm_(ours, 1.0)

    train(ours, eager, step, b.step)
    assert len(variants()) == 1 and len(function().prepared) == 1 and not DECLINED  # the other's was torch's


@pytest.mark.parametrize(("backend", "during"), [("eager", True), ("flambeau", False)])
def test_garbage_is_collected_after_our_compilations_not_in_them(backend: str, during: bool) -> None:
    seen: list[bool] = []

    @torch._dynamo.assume_constant_result
    def look() -> int:
        seen.append(gc.isenabled())
        return 1

    assert gc.isenabled()
    torch.compile(lambda x: x + look(), backend=backend)(torch.ones(2))
    assert seen and set(seen) == {during}
    assert gc.isenabled()

"""What test_device.py runs in a process of its own: what a user is told. The device has no float64."""

from __future__ import annotations

import dataclasses
import os
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import flambeau
from flambeau.config import config
from flambeau.device import operators
from flambeau.eager import any_shape
from flambeau.eager import one_call as eager_graph
from flambeau.eager.any_shape import Programs
from flambeau.eager.kept_programs import Kept
from flambeau.ir.dtypes import SUPPORTED
from flambeau.targets.opencl.device import ClDevice, devices
from flambeau.targets.opencl.target import OpenClTarget

DEV = "flambeau"


@pytest.fixture(scope="module", autouse=True)
def enabled() -> None:
    ClDevice.dtypes = property(lambda self: SUPPORTED - {torch.float64})  # type: ignore[assignment, method-assign]
    flambeau.enable_device()


def test_a_device_index_that_does_not_exist() -> None:
    there = "there is 1 device$" if len(devices()) == 1 else f"there are {len(devices())} devices$"
    for use in (lambda: torch.ones(2, device="flambeau:9"), lambda: nn.Linear(2, 2).to("flambeau:9")):
        with pytest.raises(RuntimeError, match=f"flambeau:9 does not exist: {there}"):
            use()


@pytest.mark.parametrize("call", [
    lambda x, y: x + y, lambda x, y: x @ y, lambda x, y: torch.cat([x, y]), lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: nn.functional.linear(x, y), lambda x, y: torch.add(x, x, out=y), lambda x, y: y.mul_(x),
    lambda x, y: nn.functional.layer_norm(x, (3,), y[0]), lambda x, y: x.index_put((torch.tensor([0]),), y[:1]),
    lambda x, y: y[x.long()], lambda x, y: torch.linalg.lstsq(x, y), lambda x, y: torch.masked_select(x, y > 0),
], ids=["add", "matmul", "cat", "where", "linear", "out", "in place", "layer_norm", "index_put", "index", "lstsq",
        "masked_select"])
def test_a_tensor_of_the_cpu_among_those_of_the_device(call: Any) -> None:
    with pytest.raises(RuntimeError, match="(?i)expected all tensors to be on the same device") as error:
        call(torch.ones(3, 3, device=DEV), torch.ones(3, 3))
    assert "flambeau:0" in str(error.value) and "cpu" in str(error.value)


def test_scalars_of_the_cpu_are_read_and_not_written() -> None:
    x, host = torch.ones((), device=DEV), torch.tensor(3.0)
    assert (x + host).item() == 4
    for call in (lambda: torch.add(x, 1, out=host), lambda: torch.sum(x, 0, out=host), lambda: host.add_(x),
                 lambda: torch.cumsum(x, 0, out=host)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            call()
    assert host.copy_(x).item() == 1


def test_forms_that_pytorch_puts_together() -> None:
    x = torch.tensor([[1, 2, 2], [3, 1, 3]])
    out = torch.empty(0, dtype=torch.int64, device=DEV), torch.empty(0, dtype=torch.int64, device=DEV)
    torch.mode(x.to(DEV), out=out)
    assert [t.tolist() for t in out] == [t.tolist() for t in torch.mode(x)]
    a, b = torch.eye(3), torch.ones(3)
    for left, right in ((a.to(DEV), b), (a, b.to(DEV))):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.linalg.solve(left, right)
    assert torch.linalg.solve(a.to(DEV), b.to(DEV)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("move", [
    lambda x: x[1:4].copy_(x[:3]), lambda x: x[:4].view(2, 2).copy_(x[:4].view(2, 2).t()), lambda x: x[::2].copy_(
        x[1::2]), lambda x: x[:1].expand(3).copy_(x[2:5])], ids=["shifted", "reversed", "between", "onto one"])
def test_copies_onto_what_they_read(move: Any) -> None:
    found = []
    for device in ("cpu", DEV):
        x = torch.arange(6.0, device=device)
        try:
            move(x)
            found.append(x.tolist())
        except RuntimeError as error:
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("call", [
    lambda y, i, v: i.index_add_(0, i, v), lambda y, i, v: i.index_add_(0, v, i), lambda y, i, v: y.index_add_(0, i, y),
    lambda y, i, v: i.index_copy_(0, i, v), lambda y, i, v: i.index_fill_(0, i, 0),
    lambda y, i, v: i.index_put_((i,), v), lambda y, i, v: i.index_put_((v,), i), lambda y, i, v: i.put_(v, i),
    lambda y, i, v: i.scatter_(0, i, v), lambda y, i, v: i.scatter_(0, v, i), lambda y, i, v: i.scatter_add_(0, i, v),
    lambda y, i, v: i.index_reduce_(0, i, v, "prod"), lambda y, i, v: torch.gather(i, 0, v, out=i),
    lambda y, i, v: i.add_(i), lambda y, i, v: torch.mul(y, y, out=y)])
def test_writes_to_what_is_read(call: Any) -> None:
    """Operators that read other elements than the one that they write refuse it."""
    found = []
    for device in ("cpu", DEV):
        y, i, v = torch.arange(3.0, device=device), *torch.tensor([[2, 1, 0]] * 2, device=device)
        try:
            found.append(call(y, i.clone(), v.clone()).tolist())
        except RuntimeError as error:
            assert "unsupported operation" in str(error)
            found.append(type(error))
    assert found[0] == found[1]


def test_masks_that_are_no_truth_values() -> None:
    x, mask = torch.ones(3, device=DEV), torch.ones(3, dtype=torch.uint8, device=DEV)
    with pytest.raises(RuntimeError, match="masked_select: expected BoolTensor for mask"):
        x.masked_select(mask)


def test_more_numbers_than_a_dtype_has() -> None:
    for n in (2049, 2050):
        out = torch.empty(0, dtype=torch.float16, device=DEV)
        with pytest.raises(RuntimeError, match="n cannot be greater than 2049") if n > 2049 else nullcontext():
            torch.randperm(n, out=out, device=DEV)
            assert out.cpu().sort()[0].tolist() == torch.arange(n).half().tolist()


@pytest.mark.parametrize("shape", [(1, 2, 3, 3), (1, 2, 7)], ids=str)
def test_a_gradient_of_another_shape(shape: tuple[int, ...]) -> None:
    said = []
    for device in ("cpu", DEV):
        x = torch.ones(1, 2, 7, 7, device=device)
        with pytest.raises(RuntimeError) as error:
            torch.ops.aten.adaptive_max_pool2d_backward(x, x, torch.ones(shape, dtype=torch.int64, device=device))
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("use", [lambda x, m: x[m], lambda x, m: x.index_put((m,), x[0]), lambda x, m: x[:, m[:3]]],
                         ids=["read", "write", "second"])
def test_masks_of_bytes(use: Any) -> None:
    x, mask = torch.arange(12.0).reshape(4, 3), torch.tensor([1, 0, 1, 1], dtype=torch.uint8)
    found = []
    for device in ("cpu", DEV):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            values = use(x.to(device), mask.to(device)).tolist()
        found.append((values, {str(w.message).partition(" (")[0] for w in said}))
    assert found[0] == found[1] and any("uint8 is now deprecated" in text for text in found[1][1])


# ---- indices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [
    lambda x, d: x[[5]], lambda x, d: x[:, [0, -4]], lambda x, d: x[torch.tensor([-6])],
    lambda x, d: x[torch.tensor([7]).to(d)], lambda x, d: x[[0, 5], [0, 1]], lambda x, d: x.index_put_(
        (torch.tensor([5]),), x[0]), lambda x, d: x.__setitem__([9], 1.0),
    lambda x, d: x.index_select(1, torch.tensor([3]).to(d)), lambda x, d: x.gather(0, torch.tensor([[5]]).to(d)),
    lambda x, d: x.scatter_add(0, torch.tensor([[5]]).to(d), x), lambda x, d: x.take(torch.tensor([15]).to(d)),
    lambda x, d: nn.functional.embedding(torch.tensor([5]).to(d), x), lambda x, d: nn.functional.embedding_bag(
        torch.tensor([[0, 5]]).to(d), x), lambda x, d: x[torch.tensor([[0], [7]]).to(d).t()[None].reshape(-1)],
    lambda x, d: x[:0][[0]], lambda x, d: x[:, :0][:, [0, 1]], lambda x, d: x[:, :0].index_select(1, torch.zeros(
        1, dtype=torch.int64, device=d)), lambda x, d: x[:0].gather(0, torch.zeros(1, 3, dtype=torch.int64, device=d)),
])
def test_an_index_that_the_host_knows(use: Any) -> None:
    """It is eager's error, at the call, and nothing that comes later has heard of it."""
    x = torch.arange(15.0).reshape(5, 3)
    with pytest.raises((IndexError, RuntimeError)) as expected:
        use(x, "cpu")
    with pytest.raises(expected.type) as error:
        use(x.to(DEV), DEV)
    assert str(error.value) == str(expected.value)
    assert torch.ones(3, device=DEV).sum().item() == 3


def test_indices_that_the_host_knew() -> None:
    x, at = torch.arange(5.0, device=DEV), torch.tensor([7]).to(DEV)
    at.sub_(5)  # it knows no longer
    assert x[at].item() == 2
    at = torch.tensor([7]).to(DEV)
    at.data.sub_(5)  # and this it does not notice
    assert x[at].item() == 2
    at = torch.tensor([[3, 7]]).to(DEV)
    view = at.view(-1)
    at.sub_(5)
    assert x[view].tolist() == [3, 2] and x[torch.tensor([7, 1]).to(DEV)[1:]].item() == 1
    assert x[torch.tensor([], dtype=torch.int64)].shape == (0,) and x[:0][[]].shape == (0,)


WAITS: dict[str, Any] = {
    "item": lambda bad, event: bad.sum().item(), "copy": lambda bad, event: bad.cpu(),
    "device": lambda bad, event: torch.flambeau.synchronize(), "event": lambda bad, event: event.synchronize(),
    "stream": lambda bad, event: torch.flambeau.current_stream().synchronize(),
    "accelerator": lambda bad, event: torch.accelerator.synchronize(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_an_index_that_only_the_device_knows(wait: Any) -> None:
    """It is raised by the next that waits, once."""
    x, at = torch.arange(5.0, device=DEV), torch.arange(4, 8, device=DEV)
    bad = x[at]
    event = torch.flambeau.current_stream().record_event()
    with pytest.raises(IndexError, match="index [567] is out of bounds for dimension 0 with size 5") as error:
        wait(bad, event)
    assert "index" in " ".join((*str(error.value).splitlines()[1:], *getattr(error.value, "__notes__", ())))
    for again in WAITS.values():
        again(bad, event)
    assert x[at[:1]].item() == 4


def test_an_index_on_another_stream() -> None:
    """What waited for it is the first to say so."""
    x, at = torch.arange(5.0, device=DEV), torch.arange(4, 8, device=DEV)
    torch.flambeau.synchronize()
    there = torch.Stream(device=DEV)
    with there:
        bad = x[at]
    torch.flambeau.current_stream().wait_stream(there)
    with pytest.raises(IndexError, match="index [567] is out of bounds for dimension 0 with size 5"):
        (bad + 1).cpu()
    assert (x + 1).sum().item() == 15
    there.synchronize()


# ---- what eager refuses ----------------------------------------------------------------------------------


def _put(shape: tuple[int, ...], mask: Any, values: tuple[int, ...]) -> Any:
    def use(d: str) -> torch.Tensor:
        x = torch.arange(12.0, device=d).reshape(shape)
        x[mask(x)] = torch.ones(values, device=d)
        return x.cpu()

    return use


REFUSED: dict[str, Any] = {
    "no values": _put((12,), lambda x: x > -1, (0,)), "fewer": _put((3, 4), lambda x: x > 2, (3,)),
    "more": _put((12,), lambda x: x > 5, (8,)), "for nothing": _put((12,), lambda x: x > 99, (2,)),
    "rows": _put((3, 4), lambda x: x[:, 0] > 1, (3, 4)), "another width": _put((3, 4), lambda x: x[:, 0] >= 0, (3,)),
    "rows without elements": lambda d: torch.ones(3, 0, device=d).index_put_(
        (torch.ones(3, dtype=torch.bool, device=d),), torch.ones(2, 0, device=d)),
    "places": lambda d: torch.ones(300, 300, device=d).index_put_((torch.arange(200, device=d),), torch.ones(
        2, device=d)),
    "source": lambda d: torch.ones(9, device=d).masked_scatter_(
        torch.ones(9, dtype=torch.bool, device=d), torch.ones(4, device=d)).cpu(),
    "probability": lambda d: torch.bernoulli(torch.full((3,), 2.0, device=d)).cpu(),
    "no number": lambda d: torch.empty(3, device=d).bernoulli_(torch.full((3,), float("nan"), device=d)).cpu(),
    "deviation": lambda d: torch.normal(torch.zeros(3, device=d), torch.tensor([1, 0, -1.0]).to(d)).cpu(),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_what_only_data_decide(use: Any) -> None:
    with pytest.raises(RuntimeError) as expected:
        use("cpu")
    with pytest.raises(RuntimeError) as error:
        use(DEV)
        torch.flambeau.synchronize()
    assert str(error.value).partition(" of shape")[0].strip() in str(expected.value)
    assert torch.ones(3, device=DEV).sum().item() == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bits_of_small_floats(dtype: torch.dtype) -> None:
    """GPUs have kernels for small floats that the CPU lacks, but not these."""
    x = torch.ones(3, dtype=dtype, device=DEV)
    for use in (lambda x: x.bitwise_not(), torch.compile(lambda x: (x * 2).bitwise_not(), backend="flambeau")):
        with warnings.catch_warnings(), pytest.raises(NotImplementedError, match="not implemented for"):
            warnings.simplefilter("error")
            use(x)


NUMBERS: dict[str, tuple[Any, torch.dtype, Any, tuple[Any, ...]]] = {
    "fill": (lambda x, n: x.fill_(n), torch.uint8, range(5), (300, -1)),
    "power": (lambda x, n: x.pow(n), torch.int64, range(5), (-1,)),
    "quotient": (lambda x, n: x // n, torch.int64, range(1, 6), (-3,)),
    "float16": (lambda x, n: x.fill_(n), torch.float16, (0.5, 1.5, 2.5, 3.5), (1e6, float("inf"))),
    "factor": (lambda x, n: x.add(x, alpha=n), torch.float32, (0.5, 1.5, 2.5, 3.5), (1e300, -2.5)),
    "range": (lambda x, n: x.uniform_(0, n).sum() * 0, torch.float32, (1.0, 2.0, 3.0, 4.0), (-1.0,)),
    "limits": (lambda x, n: x.clamp(n, n + 1), torch.uint8, range(5), (254, 255, -1)),
}


@pytest.mark.parametrize("elements", [3, 40_000])
@pytest.mark.parametrize(("use", "dtype", "seen", "then"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_are_arguments_of_a_program(use: Any, dtype: Any, seen: Any, then: Any, elements: int) -> None:
    """Eager refuses some of them; those that it takes are still served."""
    for n in (*seen, *then):
        try:
            expected = use(torch.ones(elements, dtype=dtype), n)
        except RuntimeError as refused:
            with pytest.raises(RuntimeError) as error:
                use(torch.ones(elements, dtype=dtype, device=DEV), n)
            assert str(error.value) == str(refused)
        else:
            assert torch.equal(use(torch.ones(elements, dtype=dtype, device=DEV), n).cpu(), expected)


# ---- what a device does not have ------------------------------------------------------------------------


def test_a_dtype_that_the_device_lacks() -> None:
    x = torch.arange(3.0, dtype=torch.float64).to(DEV)
    assert x.mul(2).cpu().tolist() == [0, 2, 4]  # the CPU has it
    with config.override(fallback="error"), pytest.raises(flambeau.UnsupportedError, match="aten::mul") as error:
        x.mul(2)
    assert "does not have a dtype; float64" in str(error.value) and devices()[0].name in str(error.value)
    assert "unset FLAMBEAU_FALLBACK" in str(error.value)
    single = x.float()
    with config.override(fallback="error"):
        assert single.mul(2).cpu().tolist() == [0, 2, 4]


def test_a_kernel_that_does_not_build(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OpenClTarget.render

    def broken(self: OpenClTarget, kernel: Any, name: str) -> Any:
        source: Any = real(self, kernel, name)
        return dataclasses.replace(source, text=source.text.replace(";", " this is no C;", 1))

    x = torch.arange(5.0, device=DEV)
    monkeypatch.setattr(OpenClTarget, "render", broken)
    with pytest.warns(RuntimeWarning, match="did not build, and the CPU computes it. Please report this") as said:
        assert torch.equal(torch.erf(x).cpu(), torch.erf(torch.arange(5.0)))
    assert "aten.erf" in str(said[0].message) and "its source is in" in str(said[0].message)
    with config.override(fallback="error"), pytest.warns(RuntimeWarning), \
            pytest.raises(flambeau.UnsupportedError, match="did not compile"):
        torch.expm1(x)
    with pytest.warns(RuntimeWarning, match="did not build; their operators .* run as ATen"):
        got = torch.compile(lambda x: x.tan() * 3, backend="flambeau")(x)
    torch.testing.assert_close(got.cpu(), torch.arange(5.0).tan() * 3)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_while_something_is_compiled(monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> None:
    """It is the caller's; the next call asks again."""
    def leave(*args: Any, **kwargs: Any) -> Any:
        raise kind(3)

    monkeypatch.setattr(operators, "PROGRAMS", Programs())
    monkeypatch.setattr(Kept, "places", lambda self: [])
    x = torch.zeros((2,) * (5 if kind is SystemExit else 6), device=DEV)  # of which no call has been yet
    with monkeypatch.context() as patch, pytest.raises(kind) as error:
        patch.setattr(any_shape, "build", leave)
        torch.erfinv(x)
    assert error.value.args == (3,)
    assert not torch.erfinv(x).any()


def test_settings_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is one of the settings that it was compiled for."""
    asked: list[str] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        asked.append(config.numerics)
        return eager_graph.build(*args, **kwargs)

    monkeypatch.setattr(any_shape, "build", build)
    monkeypatch.setattr(Kept, "places", lambda self: [])
    x = torch.linspace(0, 1, 13, device=DEV)
    asked.clear()
    for numerics in ("fast", "eager", "fast", "eager"):
        with config.override(numerics=numerics):
            torch.erfinv(x)
    torch.erfinv(x)
    assert asked[:2] == ["fast", "eager"] and len(asked) <= 3


def test_memory_that_is_exhausted() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="flambeau:0 is out of memory: .* bytes were asked for, .* in use"):
        torch.empty(1 << 50, dtype=torch.uint8, device=DEV)
    assert torch.ones(3, device=DEV).sum().item() == 3


def test_a_fork_after_the_start() -> None:
    torch.ones(2, device=DEV)
    for use in (lambda: torch.ones(2, device=DEV), torch.flambeau.init, lambda: torch.Stream(device=DEV).synchronize()):
        read, write = os.pipe()
        if not (child := os.fork()):
            try:
                use()
                said = "no error"
            except RuntimeError as error:
                said = str(error)
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        said = os.read(read, 4096).decode()
        os.close(read)
        assert "was forked after" in said and "spawn" in said


def test_inductor_names_the_backend() -> None:
    with pytest.raises(Exception, match=r"makes no code for the device 'flambeau'[\s\S]*backend=\"flambeau\""):
        torch.compile(lambda x: x + 1)(torch.ones(3, device=DEV))
    assert torch.compile(lambda x: x + 1, backend="flambeau")(torch.ones(3, device=DEV)).tolist() == [2, 2, 2]

"""The fast path to a compiled graph: plain graphs take it, and only its speed differs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile.beside_eager import compiled, same
from flambeau.compile import fast_call as lean
from flambeau.config import config
from flambeau.torch_compat.autograd import current_transform
from flambeau.torch_compat.dynamo import config as dynamo_config
from flambeau.torch_compat.dynamo import get_eval_frame_callback
from flambeau.torch_compat.short_calls import unwatched

pytestmark = pytest.mark.filterwarnings("error:flambeau:RuntimeWarning")


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def takes_short_way(out: Tensor) -> bool:
    return getattr(getattr(out.grad_fn, "_forward_cls", None), "__module__", None) == lean.__name__


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of AOTAutograd's own backward."""
    calls: list[str] = []
    made = lean.autograd_function

    def watched(full: Any, meta: Any) -> Any:
        inherited = full.backward

        def backward(ctx: Any, *grads: Any) -> Any:
            calls.append("backward")
            return inherited(ctx, *grads)

        full.backward = staticmethod(backward)
        return made(full, meta)

    monkeypatch.setattr(lean, "autograd_function", watched)
    yield calls


@pytest.mark.parametrize(("f", "short"), [
    (F.relu, True),
    (lambda x: (x.sin() * 2, x.argmax(0)), True),  # one result has no gradient
    (lambda x: x.detach() * x, True),
    (lambda x: x.t(), False),  # a view of the input
    (lambda x: x.exp().t(), False),  # a view of memory that is not returned otherwise
])
def test_plain_graphs_take_it(f: Callable[[Tensor], Any], short: bool) -> None:
    x = leaf(6, 8)
    same(f, x)
    out = compiled(f)(x)
    assert takes_short_way(out[0] if isinstance(out, tuple) else out) == short


def test_a_graph_that_changes_its_input_does_not() -> None:
    def f(x: Tensor, seen: Tensor) -> Tensor:
        seen.add_(1)
        return x * seen

    same(f, leaf(6, 8), torch.zeros(8))
    assert not takes_short_way(compiled(f)(leaf(6, 8), torch.zeros(8)))


def test_symbolic_sizes() -> None:
    c = compiled(lambda x: x.exp() * x.shape[0], dynamic=True)
    for n in (4, 7, 12):
        same(lambda x: x.exp() * x.shape[0], leaf(n, 8), fn_compiled=c)


def test_without_gradients() -> None:
    x = torch.randn(6, 8)
    c = compiled(F.relu)
    with torch.inference_mode():
        torch.testing.assert_close(c(x), F.relu(x))
    assert not c(x).requires_grad
    f = compiled(lambda x: x.argmax(1))  # the input requires gradients, but the result has none
    torch.testing.assert_close(f(leaf(6, 8)).shape, (6,))
    assert torch.is_grad_enabled()


def test_gradients_on_within_no_grad() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x.sin() * 2

    x = leaf(6, 8)
    with torch.no_grad():
        out = compiled(f)(x)
        assert out.requires_grad and not torch.is_grad_enabled()
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, x.detach().cos() * 2)


# ---- unusual calls -------------------------------------------------------------------------------------


def test_the_usual_call_is_short(general: list[str]) -> None:
    x, c = leaf(6, 8), compiled(F.relu)
    torch.autograd.grad(c(x), x, torch.randn(6, 8))  # may be the call that compiles the backward
    general.clear()
    torch.autograd.grad(c(x), x, torch.randn(6, 8))
    assert general == []


def test_a_gradient_in_another_layout(general: list[str]) -> None:
    x, tangent, c = leaf(6, 8), torch.randn(8, 6).t(), compiled(F.relu)
    for _ in range(2):
        (grad,) = torch.autograd.grad(c(x), x, tangent)
        torch.testing.assert_close(grad, torch.where(x > 0, tangent, 0))
    assert general == ["backward"] * 2


def test_a_second_derivative_is_refused(general: list[str]) -> None:
    x = leaf(6, 8)
    (grad,) = torch.autograd.grad(compiled(torch.sin)(x).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, x.cos())
    assert general == ["backward"]
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_backward_twice() -> None:
    x = leaf(6, 8)
    out = compiled(torch.exp)(x)
    seed = torch.randn(6, 8)
    first = torch.autograd.grad(out, x, seed, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out, x, seed), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x, seed)


def test_a_result_without_a_gradient_of_its_own() -> None:
    x = leaf(6, 8)
    a, b = compiled(lambda x: (x.sin(), x.exp()))(x)
    (grad,) = torch.autograd.grad(b, x, torch.ones(6, 8))
    torch.testing.assert_close(grad, x.exp())


def test_saved_memory_that_changed_is_noticed() -> None:
    x = leaf(6, 8)
    out = compiled(lambda x: x * x)(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_on_saved_tensors() -> None:
    x, seen = leaf(6, 8), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        out = compiled(lambda x: x * x)(x)
    (grad,) = torch.autograd.grad(out, x, torch.ones(6, 8))
    torch.testing.assert_close(grad, 2 * x)
    assert seen


def test_deterministic_algorithms_turned_on_in_between() -> None:
    x = leaf(6, 8)
    out = compiled(torch.sin)(x)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
            torch.autograd.grad(out, x, torch.ones(6, 8))
    finally:
        torch.use_deterministic_algorithms(False)


def test_backward_within_a_compiled_function() -> None:
    """Dynamo is watching while our backward runs."""
    inner = compiled(torch.sin)

    def step(x: Tensor) -> Tensor:
        out = inner(x) * 2
        torch._dynamo.graph_break()
        out.sum().backward()
        assert x.grad is not None
        return x.grad * 3

    x = leaf(6, 8)
    torch.testing.assert_close(torch.compile(step, backend="flambeau")(x), x.detach().cos() * 6)


def test_autocast() -> None:
    x, w = leaf(6, 8), leaf(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(lambda x, w: F.relu(x @ w))(x, w)
    assert out.dtype is torch.bfloat16 and not takes_short_way(out)
    out.float().sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32


def test_dynamo_marks_other_code_as_before() -> None:
    assert torch._dynamo.config.record_runtime_overhead
    compiled(F.relu)(torch.randn(6, 8))
    assert torch._dynamo.config.record_runtime_overhead
    with torch._dynamo.config.patch(record_runtime_overhead=False):
        compiled(F.gelu)(torch.randn(6, 8))
        assert not torch._dynamo.config.record_runtime_overhead


def test_graphs_of_any_size_take_it_too(general: list[str]) -> None:
    """Numbers go from forward to backward, and results carry the mark that their sizes may change."""
    def f(x: Tensor) -> Tensor:
        return torch.cat((x, x.sin() * x.shape[0]), 1)

    run = torch.compile(f, backend="flambeau", dynamic=True)
    for n in (3, 4):
        x = leaf(n, 5)
        out, wanted = run(x), f(x)
        grad = torch.randn_like(out)
        assert takes_short_way(out) and torch.allclose(out, wanted)
        assert any("dynamic_indices" in name for name in vars(out))
        assert torch.allclose(*(torch.autograd.grad(y, x, grad)[0] for y in (out, wanted)))
        assert not general
    torch.autograd.grad(run(x), x, grad.t().contiguous().t())  # a gradient with another layout
    assert general == ["backward"]


# ---- what torch.compile puts around a function and a graph -------------------------------------------------


def test_usual_calls_do_not_pass_torchs_own_function() -> None:
    """And all that it does for unusual ones is still done."""
    run = torch.compile(lambda x: x.sin() + x.shape[0], backend="flambeau", dynamic=True)
    full, called = run.__wrapped__, []
    cell = next(c for c in run.__closure__ or () if c.cell_contents is full)
    cell.cell_contents = lambda *args: called.append(1) or full(*args)
    for n in (3, 4, 5):
        x = torch.randn(n, 4)
        assert torch.allclose(run(x), x.sin() + n)
    with torch.compiler.set_stance("force_eager"):
        assert not called and torch.equal(run(x), x.sin() + 5)
    assert torch.equal(torch.func.vmap(run)(x), torch.func.vmap(lambda r: r.sin() + 4)(x)) and len(called) == 2
    assert torch.compiler.disable(run)(x).equal(x.sin() + 5)  # `disable` looks for the wrapped function
    assert dynamo_config.assume_static_by_default and get_eval_frame_callback() is None


def test_after_an_error_nothing_is_left_behind() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: row @ row)(x) @ torch.ones(3)

    run = torch.compile(f, backend="flambeau")
    for _ in range(2):
        with pytest.raises(Exception, match="size mismatch|inconsistent tensor size|shape"):
            run(torch.randn(4, 4))
        assert get_eval_frame_callback() is None and current_transform() is None
    assert run(torch.ones(3, 2)).item() == 6


def files_called(run: Callable[[], Any]) -> set[str]:
    """The files of the Python functions that a call enters."""
    files: set[str] = set()
    sys.setprofile(lambda frame, event, arg: files.add(frame.f_code.co_filename))
    try:
        run()
    finally:
        sys.setprofile(None)
    return {name.partition("site-packages/")[2] for name in files}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_between_dynamos_code_and_our_wrapper_is_nothing_of_torchs(dynamic: bool, cached: bool) -> None:
    x, grad = leaf(6, 8), torch.randn(6, 8)
    with config.override(graph_cache=cached, verify=False):
        for _ in range(1 + cached):  # the second comes from the disk, if the first has been stored by then
            torch.compiler.reset()
            run = torch.compile(lambda x: x.sin() * 2, backend="flambeau", dynamic=dynamic)
            for _ in range(2):  # the first may compile the backward
                torch.autograd.grad(run(x), x, grad)
            run(x.detach())
    seen = files_called(lambda: torch.autograd.grad(run(x), x, grad)) | files_called(lambda: run(x.detach()))
    assert not seen & {f"torch/{name}.py" for name in (
        "_dynamo/eval_frame", "_compile", "_functorch/aot_autograd", "_functorch/_aot_autograd/aot_autograd_result",
        "_functorch/utils")}


def test_dynamo_is_off_in_a_graph_and_on_again_after_it() -> None:
    inner, x, grad = compiled(lambda x: x.sin() * 2), leaf(6, 8), torch.randn(6, 8)
    after, inside = [], []

    def step(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        (out,) = torch.autograd.grad(inner(x), x, grad)
        after.append(get_eval_frame_callback())
        return out * 3

    run = torch.compile(step, backend="flambeau")
    for _ in range(3):
        torch.testing.assert_close(run(x), x.detach().cos() * 6 * grad)

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == "<flambeau program>":
            inside.append(get_eval_frame_callback())

    sys.setprofile(look)
    try:
        run(x)
    finally:
        sys.setprofile(None)
    assert inside and not any(inside) and all(after)


def test_sizes_of_subclasses_are_read_by_torchs_own_function() -> None:
    from torch._dynamo import utils

    class Sized(Tensor):
        @classmethod
        def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert get_eval_frame_callback() is None
            return 5 if f is Tensor.size else super().__torch_function__(f, types, args, kwargs or {})

    compiled(F.relu)
    x = torch.zeros(2, 3, 4)[:, 1:]
    assert (utils.call_size(x, 1), utils.call_stride(x, 0), utils.call_storage_offset(x)) == (2, 12, 4)
    assert utils.call_size(x.as_subclass(Sized), 1) == 5


def test_a_wrapper_of_our_function_is_disabled_by_torch() -> None:
    compiled(F.relu)  # applies the changes to Dynamo

    @functools.wraps(inner := unwatched(lambda args: get_eval_frame_callback()))
    def wrapper(*args: Any) -> Any:
        return get_eval_frame_callback()

    assert torch.compiler.disable(inner) is inner
    outside, inside = torch.compile(lambda: (torch.compiler.disable(wrapper)(), inner()), backend="eager")()
    assert outside is None and inside is None

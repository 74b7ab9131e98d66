"""Lists of tensors against eager: every overload, and the optimizers that are made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agreement import agree, through
from flambeau.ops import LOWERINGS, ops_loaded

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Adagrad": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
}


def lists() -> list[torch.Tensor]:
    """Three lists of two tensors of different shapes, positive."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(shape, generator=generator) + 0.5 for _ in range(3) for shape in ((3, 4), (5,))]


def test_numbers_and_lists_of_numbers() -> None:
    def fn(a0: torch.Tensor, a1: torch.Tensor, *_: torch.Tensor) -> list[torch.Tensor]:
        a, out = [a0, a1], []
        for op in (torch._foreach_add, torch._foreach_sub, torch._foreach_mul, torch._foreach_div,
                   torch._foreach_pow, torch._foreach_maximum, torch._foreach_minimum,
                   torch._foreach_clamp_max):
            out += [*op(a, 0.7), *op(a, [0.5, 2.0])]
        return [*out, *torch._foreach_pow(2.0, a)]

    agree(fn, *lists())


def test_lists_of_tensors() -> None:
    def fn(*t: torch.Tensor) -> list[torch.Tensor]:
        a, b, c = list(t[:2]), list(t[2:4]), list(t[4:6])
        out = [*torch._foreach_add(a, b, alpha=2), *torch._foreach_sub(a, b, alpha=0.5),
               *torch._foreach_mul(a, b), *torch._foreach_div(a, b), *torch._foreach_pow(a, b),
               *torch._foreach_maximum(a, b), *torch._foreach_add(a, b[1][0], alpha=3),
               *torch._foreach_mul(a, b[1][0])]
        for op in (torch._foreach_addcmul, torch._foreach_addcdiv):
            out += [*op(a, b, c, 0.3), *op(a, b, c, [0.3, 0.4])]
        return [*out, *torch._foreach_lerp(a, b, c), *torch._foreach_lerp(a, b, 0.3)]

    agree(fn, *lists())


def test_functions_of_each() -> None:
    names = ("abs", "acos", "ceil", "cos", "erf", "exp", "expm1", "floor", "frac", "lgamma", "log", "log1p",
             "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "tanh", "trunc")

    def fn(*t: torch.Tensor) -> list[torch.Tensor]:
        out = [y for name in names for y in getattr(torch, f"_foreach_{name}")(list(t[:2]))]
        return [*out, *torch._foreach_norm(list(t)), *torch._foreach_norm(list(t), 1),
                *torch._foreach_max(list(t))]

    agree(fn, *lists())


def test_the_table_knows_every_overload() -> None:
    ops_loaded()
    aten = torch.ops.aten
    missing = {"_foreach_powsum"}  # in no optimizer
    for name in dir(aten):
        if name.startswith("_foreach_") and not name.endswith("_") and name not in missing:
            for overload in getattr(aten, name).overloads():
                op = getattr(getattr(aten, name), overload)
                assert op._schema.is_mutable or op in LOWERINGS, op


def test_clipping_by_norm() -> None:
    def fn(*grads: torch.Tensor) -> list[torch.Tensor]:
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads))))
        return list(torch._foreach_mul(list(grads), torch.clamp(1.0 / (total + 1e-6), max=1.0)))

    agree(fn, *lists())


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    def trained(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
        optimizer = getattr(torch.optim, name)(model.parameters(), foreach=True, **OPTIMIZERS[name])
        step = torch.compile(optimizer.step, backend="flambeau") if compiled else optimizer.step
        for k in range(4):
            torch.manual_seed(k)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            step()
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(trained(True), trained(False))


def test_results_are_lists() -> None:
    out = through(lambda a, b: torch._foreach_neg([a, b]))(torch.ones(2), torch.ones(3))
    assert [t.shape for t in out] == [(2,), (3,)]

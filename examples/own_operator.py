"""Your own operator: you write its formula once, and Flambeau fuses it with its neighbours, gradient included.

    python own_operator.py
"""

import torch

import flambeau.debug
from flambeau.ir.expr import where
from flambeau.ops.registry import lower_pointwise

# What PyTorch needs: a schema, an eager kernel, shapes, and a gradient, which is an operator too.
torch.library.define("mine::squash", "(Tensor x, float slope) -> Tensor")
torch.library.define("mine::squash_backward", "(Tensor grad, Tensor x, float slope) -> Tensor")


@torch.library.impl("mine::squash", "CPU")
def eager(x, slope):
    return torch.where(x > 0, x / (1 + x), x * slope)


@torch.library.impl("mine::squash_backward", "CPU")
def eager_backward(grad, x, slope):
    return torch.where(x > 0, grad / (1 + x).square(), grad * slope)


torch.library.register_fake("mine::squash")(lambda x, slope: torch.empty_like(x))
torch.library.register_fake("mine::squash_backward")(lambda grad, x, slope: torch.empty_like(x))


def keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.slope = inputs[1]


torch.library.register_autograd(
    "mine::squash", lambda ctx, grad: (torch.ops.mine.squash_backward(grad, *ctx.saved_tensors, ctx.slope), None),
    setup_context=keep)


# What Flambeau needs: the two formulas.
@lower_pointwise(torch.ops.mine.squash, operands=1)
def squash(x, slope):
    return where(x > 0, x / (1 + x), x * slope)


@lower_pointwise(torch.ops.mine.squash_backward, operands=2)
def squash_backward(grad, x, slope):
    return where(x > 0, grad / ((1 + x) * (1 + x)), grad * slope)


def f(x):
    return torch.ops.mine.squash(x * 2, 0.1).sum(-1)


x = torch.randn(64, 32, requires_grad=True)
found = flambeau.debug.explain(f, x)
print(found)
assert all(step.kind == "kernel" for graph in found.graphs for step in graph.steps)

compiled = torch.compile(f, backend="flambeau")
torch.testing.assert_close(compiled(x), f(x))
torch.testing.assert_close(*(torch.autograd.grad(g(x).sum(), x)[0] for g in (compiled, f)))

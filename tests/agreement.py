"""`agree`: checks that a function compiled with our own kernels has eager's results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function
from torch.utils import _pytree as pytree

from flambeau.capture.decompositions import table
from flambeau.pipeline import compile_graph


def through(fn: Callable[..., Any], externs: tuple[str, ...] = (), dynamic: bool = False
            ) -> Callable[..., Any]:
    """Compiles fn and fails if an operator other than those in `externs` is left to ATen."""

    def compiler(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        run = compile_graph(gm)
        left = set(run.compiled.captured.externs) - set(externs)
        assert not left, f"left to ATen: {sorted(left)}"
        return run

    return aot_function(fn, fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler,
                        decompositions=table(False), dynamic=dynamic)


def agree(fn: Callable[..., Any], *args: torch.Tensor, externs: tuple[str, ...] = (), dynamic: bool = False
          ) -> None:
    """Compares the outputs, and the gradients of args that require them, with eager at torch's own tolerances."""
    ours, eager = _evaluate(through(fn, externs, dynamic), args), _evaluate(fn, args)
    torch.testing.assert_close(ours, eager, equal_nan=True)


def _evaluate(fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> list[Any]:
    fresh = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    outs = [t for t in pytree.tree_leaves(fn(*fresh)) if isinstance(t, torch.Tensor)]
    diff = [t for t in outs if t.requires_grad]
    leaves = [a for a in fresh if a.requires_grad]
    if not diff:
        return outs
    seeds = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).reshape(t.shape) for t in diff]
    return [*(t.detach() for t in outs), *torch.autograd.grad(diff, leaves, seeds, materialize_grads=True)]

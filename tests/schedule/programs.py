"""What the scheduler makes of a torch function: its programs, without compiling a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils import _pytree as pytree

from flambeau.capture.decompositions import table
from flambeau.capture.graph import capture
from flambeau.ir.capabilities import Capabilities
from flambeau.ir.numerics import policy_of
from flambeau.ir.program import Call, Kernel, Launch, Program
from flambeau.pipeline import interpret
from flambeau.schedule.plan import schedule

CPU = Capabilities("cpu")


def programs(fn: Callable[..., Any], *args: Any, numerics: str = "fast", dynamic: bool = False) -> list[Program]:
    """The program of fn and, where an argument asks for a gradient, that of its backward."""
    made: list[Program] = []

    def compiler(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        made.append(schedule(capture(gm, CPU, policy=policy_of(numerics, "any")).graph, CPU, True))
        return interpret(gm)

    out = aot_function(fn, fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler,
                       partition_fn=min_cut_rematerialization_partition, decompositions=table(False),
                       dynamic=dynamic)(*args)
    for t in pytree.tree_leaves(out):
        if isinstance(t, torch.Tensor) and t.requires_grad:
            t.sum().backward(retain_graph=True)
            break
    return made


def program(fn: Callable[..., Any], *args: Any, **options: Any) -> Program:
    return programs(fn, *args, **options)[0]


def launches(p: Program) -> list[Kernel]:
    return [p.kernels[s.kernel] for s in p.steps if isinstance(s, Launch)]


def calls(p: Program) -> list[str]:
    return [str(s.target) for s in p.steps if isinstance(s, Call)]


def written(p: Program) -> set[str]:
    """Buffers that some kernel stores."""
    return {q.name for k in launches(p) for q in k.params if q.written}

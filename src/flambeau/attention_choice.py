"""Chooses between our attention kernels and a library's: whichever was faster on random data of the same shapes.

Forward and backward are timed together, because the forward saves what the backward needs. Boolean masks are all True
while timing, so that our kernels gain nothing by skipping masked blocks. The choice is kept on disk like that of matrix
products (`product_choice.py`).
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from flambeau.ops.attention_calls import Asked
from flambeau.pipeline import Options, region_run
from flambeau.product_choice import example, is_alike, shape_text
from flambeau.targets.base import Target
from flambeau.targets.identity import Uncacheable, identity
from flambeau.targets.search import fastest, kept
from flambeau.torch_compat.fake import FakeTensorMode

log = logging.getLogger(__name__)


def own_attention(options: Options, target: Target | None, asked: Asked) -> bool:
    """Whether our kernels compute an attention call that a library supports too."""
    if target is None or not target.capabilities().attends or options.contractions == "library":
        return False
    if options.contractions == "own":
        return True
    if options.deterministic or not target.times:
        return False
    given = [asked.query, asked.key, asked.value, *([] if asked.mask is None else [asked.mask])]
    how = asked.dropout, asked.is_causal, asked.scale, asked.grouped, asked.trains and asked.wants
    try:
        about = [*identity(target), target.chip(), "attention", *map(shape_text, given), repr(how)]
        # In a separate thread, where no tracing is in progress.
        with ThreadPoolExecutor(1) as alone:
            return bool(json.loads(kept(about, lambda: alone.submit(measured, options, target, asked).result()))["own"])
    except Uncacheable:
        return False


def measured(options: Options, target: Target, asked: Asked) -> str:
    try:
        with target.on(asked.query.device), torch.set_grad_enabled(asked.trains):
            leaves = [sample(x) for x in (asked.query, asked.key, asked.value, asked.mask)]
            theirs = partial(library, asked, leaves)
            wanted = theirs()
            seed = torch.ones((), dtype=torch.int64, device=asked.query.device) if asked.dropout else None
            given = [None if x is None else x.detach() for x in (*leaves, seed, wanted[0] if asked.trains else None)]
            run, args = region_run(options, graph_of(asked, given), frozenset()), [x for x in given if x is not None]
            if not asked.dropout and not all(map(is_alike, run(list(args)), wanted)):
                log.warning("attention of ours gives other results than the library's, and is not used: %s", asked)
                return json.dumps({"own": False, "why": "ours gives other results"})
            best, seconds = fastest(target, {0: theirs, 1: lambda: run(list(args))})
    except Exception as error:  # whatever fails, the library computes it
        log.info("attention: not measured: %s: %s", type(error).__name__, error)
        return json.dumps({"own": False, "why": f"ours could not be timed: {type(error).__name__}"})
    return json.dumps({"own": best == 1, "why": f"library {1e6 * seconds[0]:.1f} us, ours {1e6 * seconds[1]:.1f} us"})


def sample(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    made = torch.ones_like(example(x)) if x.dtype is torch.bool else example(x)
    return made.requires_grad_(x.requires_grad)


def library(asked: Asked, leaves: list[Tensor | None]) -> list[Tensor]:
    """Run the library's attention; returns the result and the gradients for the leaves that require them."""
    q, k, v, mask = leaves
    assert q is not None and k is not None and v is not None
    out = F.scaled_dot_product_attention(q, k, v, mask, asked.dropout, asked.is_causal, scale=asked.scale,
                                         enable_gqa=asked.grouped)
    wanting = [x for x in leaves if x is not None and x.requires_grad]
    return [out, *(torch.autograd.grad(out, wanting, out.detach()) if asked.trains else ())]


def graph_of(asked: Asked, given: list[Tensor | None]) -> fx.GraphModule:
    """The same call as a graph of our operators. `given`: queries, keys, values, the mask, the seed of dropout and the
    gradient of the result; None for each that is absent."""
    graph, ops = fx.Graph(), torch.ops.flambeau
    names = "query", "key", "value", "mask", "seed", "grad"
    with FakeTensorMode() as mode, torch.no_grad():

        def node(target: Callable[..., Any], *args: Any) -> fx.Node:
            n = graph.call_function(target, args)
            n.meta["val"] = target(*fx.node.map_arg(args, lambda x: x.meta["val"]))
            return n

        def argument(name: str, x: Tensor | None) -> fx.Node | None:
            if x is None:
                return None
            n = graph.placeholder(name)
            n.meta["val"] = mode.from_tensor(x)
            return n

        *tensors, grad = (argument(name, x) for name, x in zip(names, given, strict=True))
        how = float(asked.dropout), asked.is_causal, asked.scale
        both = node(ops.attention.default, *tensors, *how, [0, 1, 2, 3])
        results = [node(operator.getitem, both, 0)]
        if grad is not None:
            logs, wants = node(operator.getitem, both, 1), asked.wants
            made = node(ops.attention_backward.default, grad, *tensors, results[0], logs, *how, wants[3])
            results += [node(operator.getitem, made, k) for k in range(4) if wants[k]]
        graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)

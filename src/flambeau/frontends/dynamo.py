"""torch.compile(backend="flambeau"): AOTAutograd captures, our pipeline compiles.

    torch.compile(model, backend="flambeau", options={"numerics": "fast"})
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo.backends.common import aot_autograd

from flambeau.config import config
from flambeau.errors import OptionError

from .graph_cache import GraphCache
from .lean import lean_wrappers, without_marks

OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "numerics": (("fast", "eager"), "fast: more precision inside fused kernels; eager: rounds where eager does"),
}
MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_options(options: dict[str, Any] | None, mode: str | None) -> dict[str, Any]:
    out: dict[str, Any] = {"numerics": config.numerics}
    for name, value in (options or {}).items():
        if name not in OPTIONS:
            raise OptionError(f"unknown option {name!r}", hint=f"the options are {', '.join(OPTIONS)}")
        allowed, _ = OPTIONS[name]
        if value not in allowed:
            raise OptionError(f"option {name}={value!r} is not one of {allowed}")
        out[name] = value
    if mode not in MODES:
        raise OptionError(f"unknown mode {mode!r}", hint=f"the modes are {MODES}")
    return out


def flambeau_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None,
    mode: str | None = None, **_: Any
) -> Callable[..., Any]:
    settings = check_options(options, mode)
    cache = GraphCache(gm, example_inputs, settings)
    without_marks()
    with lean_wrappers(gm, example_inputs):
        return cache.load() or compile_anew(gm, example_inputs, settings, cache)


def compile_anew(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: dict[str, Any], cache: GraphCache
) -> Callable[..., Any]:
    # Imported here: a process that finds its graphs in the cache needs none of the compiler.
    from .decompositions import table
    from .partition import partition
    from .pipeline import compile_graph
    from .whole import whole_operators

    def compiler() -> Callable[..., Any]:
        return cache.compiler(lambda graph: compile_graph(graph, settings["numerics"]))

    # One for each: torch writes into that of the backward.
    backend = aot_autograd(fw_compiler=compiler(), bw_compiler=compiler(), inference_compiler=compiler(),
                           partition_fn=partition, decompositions=table(), keep_inference_input_mutations=True)
    with torch._dynamo.config.patch(enable_dynamo_decompositions=False), whole_operators(), cache.recording():
        return backend(gm, example_inputs)

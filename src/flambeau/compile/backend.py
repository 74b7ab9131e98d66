"""torch.compile(backend="flambeau"): AOTAutograd captures, our pipeline compiles.

    torch.compile(model, backend="flambeau", options={"numerics": "fast"})
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from flambeau.config import config
from flambeau.errors import OptionError, UnsupportedError, did_you_mean
from flambeau.ir.numerics import wants_bits
from flambeau.optim.compiled_steps import install
from flambeau.runtime.placement import common_device, target_of
from flambeau.runtime.progress import progress
from flambeau.runtime.watchers import look_on
from flambeau.targets.base import Target, get_target
from flambeau.torch_compat import patches
from flambeau.torch_compat.aot import aot_autograd
from flambeau.torch_compat.aot import config as aot_config
from flambeau.torch_compat.dynamo import config as dynamo_config
from flambeau.torch_compat.dynamo import handed_on, without_runtime_marks
from flambeau.torch_compat.fake import CompileContext, FakeTensor, TracingContext
from flambeau.torch_compat.streams import uses_streams

from .cache_key import held
from .channels_last import channels_last
from .disk_cache import GraphCache
from .fast_call import lean_wrappers
from .regions.cut import OBSERVERS, cut
from .regions.pieces import in_pieces
from .stream_checks import check_streams, not_carried, refuse_gradients, refuse_writes_behind
from .subgraphs import calls_subgraphs, written_out

# Name: what it may be (None: `get_target` knows), and what it does.
OPTIONS: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "numerics": (("fast", "eager"), "fast: more precision inside fused kernels; eager: bit for bit what eager has"),
    "target": (None, "runs the graphs, in place of the target of their device"),
    "regions": ((True, False), "compile repeated parts of a graph once"),
    "graphs": ((False, True), "record runs after a warm-up and replay them (NVIDIA GPUs)"),
    "contractions": (("choose", "library", "own"), "products and attention: a library's, our kernels with what follows "
                                                   "in them, or what is faster (NVIDIA GPUs)"),
    "search": ((False, True), "time block shapes at the first call, and keep the fastest on disk (NVIDIA GPUs)"),
}
MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_options(options: dict[str, Any] | None, mode: str | None) -> dict[str, Any]:
    # Read now: a backward may be compiled later, in a thread where an override does not hold.
    out: dict[str, Any] = {"numerics": config.numerics, "target": config.target, "search": config.search,
                           "contractions": config.contractions,
                           "graphs": config.graphs or mode == "reduce-overhead", "regions": config.regions,
                           "deterministic": torch.are_deterministic_algorithms_enabled(), "part": False}
    for name, value in (options or {}).items():
        if name not in OPTIONS:
            raise OptionError(f"unknown option {name!r}", hint=did_you_mean(name, OPTIONS))
        allowed, _ = OPTIONS[name]
        if allowed is not None and value not in allowed:
            raise OptionError(f"option {name}={value!r} is not one of {allowed}")
        out[name] = value
    if mode not in MODES:
        raise OptionError(f"unknown mode {mode!r}", hint=f"the modes are {MODES}")
    if out["target"] is not None:
        get_target(out["target"])
    return out


def flambeau_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None,
    mode: str | None = None, **_: Any
) -> Callable[..., Any]:
    try:
        settings = check_options(options, mode)
        streams = check_streams(gm)
        if streams:
            if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad
                                               for x in (*example_inputs, *held(gm).values())):
                refuse_gradients(gm.graph)
            settings["regions"] = False
    except (OptionError, UnsupportedError) as error:
        raise handed_on(error, inspect.currentframe()) from None
    if CompileContext.try_get() is not None:
        without_runtime_marks()
    # Gradients come laid out as eager's do: torch 2.11 would copy those that are not contiguous, between pieces too,
    # and cuDNN's attention keeps plans that are wrong for another layout than the one it met first. Where a result has
    # an element at several places, torch 2.11 cannot copy its gradient so.
    laid_out = not any(isinstance(s, int) and s == 0 for t in results(gm) for s in t.stride())
    with (progress("compiling a graph"), aot_config.patch(guess_tangent_strides_as_outputs=laid_out),
          patches.SHARED_INPUTS.applied()):
        if not streams:
            return compiled_backend(gm, example_inputs, settings)
        try:
            return compiled_backend(gm, example_inputs, settings)
        except Exception as error:
            raise handed_on(not_carried(error), inspect.currentframe()) from error


def results(gm: fx.GraphModule) -> list[torch.Tensor]:
    """The tensors that a graph of Dynamo's returns, as Dynamo knows them."""
    known = (n.meta.get("example_value") for n in gm.graph.output_node().all_input_nodes)
    return [t for t in known if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def compiled_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: dict[str, Any]
) -> Callable[..., Any]:
    context = TracingContext.try_get()
    if context is None or not context.fakify_first_call:
        return compile_dynamo_graph(gm, example_inputs, settings)
    # DDP compiles its buckets one by one, and runs each on fake tensors first, to learn what the next one gets.
    # AOTAutograd would serve that run; but a graph out of the cache, or a piece called twice, does not come by it.
    # Nor may a backward wait for its first run: torch counts those as one to a bucket, and pieces are more.
    context.fakify_first_call = False
    try:
        with aot_config.patch(force_non_lazy_backward_lowering=True):
            compiled = compile_dynamo_graph(gm, example_inputs, settings | {"part": True})
    finally:
        context.fakify_first_call = True

    def run(*args: Any) -> Any:
        return (gm if any(isinstance(x, FakeTensor) for x in args) else compiled)(*args)

    return run


def compile_dynamo_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: dict[str, Any]
) -> Callable[..., Any]:
    """In pieces, if some of them repeat."""
    if calls_subgraphs(gm):
        gm = written_out(gm)
    target = target_of(common_device(example_inputs), settings["target"])
    if target is not None and not wants_bits(settings["numerics"]) and not uses_streams(gm.graph):
        gm = channels_last(gm, target)
    if settings.pop("regions"):
        found = cut(gm, example_inputs)
        for observe in OBSERVERS:
            observe(found)
        if found.regions:
            try:
                run = in_pieces(found, lambda piece, inputs: compile_whole(piece, inputs, settings | {"part": True}))
                return torch.compiler.disable(run, reason="calls compiled graphs")
            except Exception as e:  # torch may refuse a piece where it takes the whole
                if config.verify:
                    raise
                warnings.warn(f"flambeau: repeated regions are not used for this graph: {type(e).__name__}: {e}. "
                              "Please report it.", RuntimeWarning, stacklevel=2)
    return compile_whole(gm, example_inputs, settings)


def compile_whole(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: dict[str, Any]) -> Callable[..., Any]:
    target = target_of(common_device([*held(gm).values(), *example_inputs]), settings["target"])
    cache = GraphCache(gm, example_inputs, settings, target)
    with lean_wrappers(gm, example_inputs):
        found = cache.load()
        if found is not None:
            return found
        if target is not None:
            target.prepare()
        return compile_anew(gm, example_inputs, settings, target, cache)


def compile_anew(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: dict[str, Any], target: Target | None,
    cache: GraphCache
) -> Callable[..., Any]:
    # Imported here: a process that finds its graphs in the cache needs none of the compiler.
    from flambeau.attention_choice import own_attention
    from flambeau.capture.decompositions import table
    from flambeau.capture.eager_strides import settle_strides
    from flambeau.capture.kept_whole import whole_operators
    from flambeau.ops.attention_calls import choosing
    from flambeau.pipeline import Options, compile_graph

    from .padded_products import pad_products
    from .partition import partition

    wanted = Options(**settings)
    exact = wants_bits(wanted.numerics)
    machine = None if exact or target is None else target.capabilities()
    tuning = None if machine is None or machine.contracts else machine.tuning

    def compile_part(graph: fx.GraphModule) -> Callable[..., Any]:
        refuse_gradients(graph.graph)
        return compile_graph(graph, wanted)

    def compiler() -> Callable[..., Any]:
        return cache.compiler(compile_part)

    def compile_inference(graph: fx.GraphModule) -> Callable[..., Any]:
        if uses_streams(graph.graph):
            refuse_writes_behind()
        settle_strides(graph.graph, names_only=wanted.part, hold=not wanted.part)
        pad_products(graph.graph, tuning)
        return compile_graph(graph, wanted)

    # One for each: torch writes into that of the backward.
    backend = aot_autograd(fw_compiler=compiler(), bw_compiler=compiler(),
                           inference_compiler=cache.compiler(compile_inference),
                           partition_fn=partial(partition, settle=not wanted.part, exact=exact, tuning=tuning),
                           decompositions=table(exact), keep_inference_input_mutations=True)
    with (dynamo_config.patch(enable_dynamo_decompositions=False), whole_operators(exact), cache.recording(),
          choosing(partial(own_attention, wanted, target))):
        return backend(gm, example_inputs)


install(flambeau_backend)
look_on()

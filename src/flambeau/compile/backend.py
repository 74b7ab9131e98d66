"""The torch.compile backend: AOTAutograd traces a graph from Dynamo, and Flambeau's pipeline compiles it.

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
from flambeau.runtime.placement import common_device, has_streams, target_of
from flambeau.runtime.progress import progress
from flambeau.runtime.watchers import look_on
from flambeau.targets.base import Target, get_target
from flambeau.torch_compat import patches
from flambeau.torch_compat.aot import aot_autograd
from flambeau.torch_compat.aot import config as aot_config
from flambeau.torch_compat.dynamo import config as dynamo_config
from flambeau.torch_compat.dynamo import handed_on, without_runtime_marks
from flambeau.torch_compat.fake import CompileContext, FakeTensor, TracingContext

from .cache_key import held
from .channels_last import channels_last
from .disk_cache import GraphCache
from .fast_call import lean_wrappers, short_way
from .offload_wish import check_wish
from .regions.cut import OBSERVERS, cut
from .regions.pieces import in_pieces
from .subgraphs import calls_subgraphs, written_out
from .user_streams import ORDERS, compiled_with_streams, refuse_writes_behind, take_streams

# Option name: (allowed values, or a description of them where a function checks the value; what the option does).
OPTIONS: dict[str, tuple[tuple[Any, ...] | str, str]] = {
    "numerics": (("fast", "eager"), "fast: keep more precision inside fused kernels; eager: equal eager bit for bit"),
    "target": ("a target's name", "the target that runs the graphs, instead of that of their device"),
    "regions": ((True, False), "compile repeated parts of a graph once"),
    "graphs": ((False, True), "record CUDA graphs after a warm-up and replay them (NVIDIA GPUs)"),
    "streams": ((None, "auto"), "auto: run independent steps at the same time on several streams, if that is faster"),
    "offload": ("`'4GiB'`, `0.3` or `'auto'`",
                "how much less device memory saved activations may take: a size, a share of the peak, or what the "
                "device lacks; they go to host memory or are recomputed"),
    "contractions": (("choose", "library", "own"), "matrix products and attention: the faster kernel, the library's, "
                                                   "or our own with later operators fused into it (NVIDIA GPUs)"),
    "search": ((False, True), "time block shapes at the first call, and store the fastest on disk (NVIDIA GPUs)"),
}
MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_options(options: dict[str, Any] | None, mode: str | None) -> dict[str, Any]:
    """The settings of one compilation: the given options, and defaults for all others."""
    # Read here, because a backward can be compiled later, in a thread that does not see an override.
    out: dict[str, Any] = {"numerics": config.numerics, "target": config.target, "search": config.search,
                           "contractions": config.contractions,
                           "graphs": config.graphs or mode == "reduce-overhead", "regions": config.regions,
                           "streams": None, "offload": None,
                           "deterministic": torch.are_deterministic_algorithms_enabled(), "part": False}
    for name, value in (options or {}).items():
        if name not in OPTIONS:
            raise OptionError(f"unknown option {name!r}", hint=did_you_mean(name, OPTIONS))
        allowed, _ = OPTIONS[name]
        if name == "offload":
            check_wish(value)
        if not isinstance(allowed, str) and value not in allowed:
            raise OptionError(f"option {name} is {value!r}, expected {' or '.join(map(repr, allowed))}")
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
    """Compile one Dynamo graph: torch.compile calls this through the entry point "flambeau" in
    `torch_dynamo_backends`."""
    try:
        settings = check_options(options, mode)
        if calls_subgraphs(gm):
            gm = written_out(gm)
        streams = take_streams(gm)
    except (OptionError, UnsupportedError) as error:
        raise handed_on(error, inspect.currentframe()) from None
    if CompileContext.try_get() is not None:
        without_runtime_marks()
    # Expect gradients in the layout of the results, as in eager. Otherwise torch 2.11 copies gradients that are not
    # contiguous, also between pieces, and cuDNN's attention reuses a plan made for the first layout it saw, which is
    # wrong for any other layout. torch 2.11 cannot do this if a result has overlapping elements (stride 0).
    laid_out = not any(isinstance(s, int) and s == 0 for t in results(gm) for s in t.stride())
    with (progress("compiling a graph"), aot_config.patch(guess_tangent_strides_as_outputs=laid_out),
          patches.SHARED_INPUTS.applied()):
        if streams is None:
            return compiled_backend(gm, example_inputs, settings)
        return compiled_with_streams(lambda: compiled_backend(gm, example_inputs, dict(settings)), gm, streams)


def results(gm: fx.GraphModule) -> list[torch.Tensor]:
    """The example values of the strided tensors that a Dynamo graph returns."""
    known = (n.meta.get("example_value") for n in gm.graph.output_node().all_input_nodes)
    return [t for t in known if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def compiled_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: dict[str, Any]
) -> Callable[..., Any]:
    context = TracingContext.try_get()
    if context is None or not context.fakify_first_call:
        return compile_dynamo_graph(gm, example_inputs, settings)
    # DDP compiles its buckets one by one. It runs each on fake tensors first, to find the inputs of the next one.
    # AOTAutograd handles this run, but a graph from the cache, or a piece that is called twice, does not go through
    # AOTAutograd. So fake tensors run the original graph here. Backwards are compiled now and not at their first run,
    # because torch expects one backward for each bucket, and a bucket in pieces has more.
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
    """Compile a graph, in pieces if some of them repeat."""
    target = target_of(common_device(example_inputs), settings["target"])
    if target is not None and not wants_bits(settings["numerics"]) and ORDERS not in gm.meta:
        gm = channels_last(gm, target)
    # The memory limit (`offload`) and the choice of parallel steps (`streams`) concern the whole graph, not pieces.
    whole = ORDERS in gm.meta or isinstance(settings["offload"], str) or settings["streams"] == "auto"
    if settings.pop("regions") and not whole:
        found = cut(gm, example_inputs)
        for observe in OBSERVERS:
            observe(found)
        if found.regions:
            try:
                run = in_pieces(found, lambda piece, inputs: compile_whole(piece, inputs, settings | {"part": True}))
                return torch.compiler.disable(run, reason="calls compiled graphs")
            except Exception as e:  # torch may reject a piece although it accepts the whole graph
                if config.verify:
                    raise
                warnings.warn(f"flambeau: this graph is compiled without repeated regions: {type(e).__name__}: {e}. "
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
        compiled = compile_anew(gm, example_inputs, settings, target, cache)
        return compiled if cache.held else short_way(compiled) or compiled


def compile_anew(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: dict[str, Any], target: Target | None,
    cache: GraphCache
) -> Callable[..., Any]:
    # Imported here, because a process that finds its graphs in the cache does not need the compiler.
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

    orders = gm.meta.get(ORDERS)

    def compile_forward(graph: fx.GraphModule) -> Callable[..., Any]:
        if orders is not None:
            refuse_writes_behind()
            graph.meta[ORDERS] = orders
        return compile_graph(graph, wanted)

    def compile_backward(graph: fx.GraphModule) -> Callable[..., Any]:
        return compile_graph(graph, wanted)

    def compile_inference(graph: fx.GraphModule) -> Callable[..., Any]:
        if orders is not None:
            refuse_writes_behind()
            graph.meta[ORDERS] = orders
        settle_strides(graph.graph, names_only=wanted.part, hold=not wanted.part)
        pad_products(graph.graph, tuning)
        return compile_graph(graph, wanted)

    # A separate compiler for each, because torch writes attributes to that of the backward.
    backend = aot_autograd(fw_compiler=cache.compiler(compile_forward), bw_compiler=cache.compiler(compile_backward),
                           inference_compiler=cache.compiler(compile_inference),
                           partition_fn=partial(partition, settle=not wanted.part, exact=exact, tuning=tuning,
                                                offload=offload_of(wanted, target, example_inputs)),
                           decompositions=table(exact), keep_inference_input_mutations=True)
    with (dynamo_config.patch(enable_dynamo_decompositions=False), whole_operators(exact), cache.recording(),
          choosing(partial(own_attention, wanted, target))):
        return backend(gm, example_inputs)


def offload_of(wanted: Any, target: Target | None, inputs: Sequence[Any]) -> Any:
    """The offload request for the partitioner; None if not asked for, or if the device has no streams."""
    from flambeau.runtime.streams.host_copies import device_memory, link_rate

    from .offload import Offload

    device = common_device(inputs)
    if wanted.offload is None or target is None or not has_streams(device):
        return None
    return Offload(wanted.offload, target.capabilities().tuning, link_rate(target, device),
                   partial(device_memory, device), wanted.part)


install(flambeau_backend)
look_on()

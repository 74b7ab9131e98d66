"""The key of a compiled graph in the disk cache: graph, inputs, torch's state, options, versions.

The key is made from Dynamo's graph, before AOTAutograd, because making it must be much cheaper than tracing. Things
that text cannot identify with certainty get no key: user functions, operators from outside of torch, tensors held as
constants, and inputs that share memory (AOTAutograd specializes on how they overlap).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from flambeau.capture.stream_turns import ORDERS
from flambeau.config import SETTINGS, config
from flambeau.ops.facts import SPACES
from flambeau.targets.base import Target
from flambeau.targets.identity import Uncacheable, identity
from flambeau.torch_compat.aot import config as aot_config
from flambeau.torch_compat.autograd import autocast_devices
from flambeau.torch_compat.fx import qualified_name
from flambeau.torch_compat.inductor import config as inductor_config
from flambeau.torch_compat.ops import HigherOrderOperator

from .regions.nodes import SYMBOLIC, TENSORS, namespace

# Modules whose functions and operators are fixed by the package's version, which is part of the key.
MODULES = ("torch", "operator", "_operator", "math", "builtins")
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device,
             torch.layout, torch.memory_format)
# Settings that affect where and how compilation runs, but not its result.
ASIDE = ("cache_dir", "cache_limit_mb", "graph_cache", "regions", "compiler", "compile_jobs",
         "compile_timeout", "debug", "verify", "log", "nvtx", "progress")
# Entries of a subgraph's meta that change how it is compiled.
REGION_META = ("_checkpoint_context_fn", "nested_region_config")


def graph_key(gm: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any], target: Target) -> str:
    """64 hex digits, equal in two processes only if both would compile the same code. Raises Uncacheable."""
    if ORDERS in gm.meta:
        raise Uncacheable("it uses streams")
    asked = {s.name: config.read(s) for s in SETTINGS if s.name not in ASIDE} | dict(settings)
    parts = [*identity(target), repr(state()), repr(sorted(asked.items())),
             *memory([*held(gm).values(), *inputs]), *graph_lines(gm)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def state() -> tuple[Any, ...]:
    """Global torch state, beyond graph and inputs, that AOTAutograd's trace depends on."""
    casts = [d for d in autocast_devices() if torch.is_autocast_enabled(d)]
    attention = torch.backends.cuda  # these switches apply to the CPU as well
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.get_deterministic_debug_mode(), [(d, torch.get_autocast_dtype(d)) for d in casts],
        attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(), attention.matmul.fp32_precision,
        torch.backends.mkldnn.enabled, aot_config.get_hash(), inductor_config.get_hash(),
    )


# ---- inputs ------------------------------------------------------------------------------------------------


def held(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The parameters and buffers held by the graph. AOTAutograd makes them inputs, ahead of all others."""
    return {**dict(gm.named_parameters(recurse=False, remove_duplicate=False)),
            **dict(gm.named_buffers(recurse=False, remove_duplicate=False))}


def memory(inputs: Sequence[Any]) -> Iterator[str]:
    """Facts about the inputs that the placeholders' fake tensors lack. Shapes come from those, as some are symbolic."""
    storages = set()
    for x in inputs:
        if isinstance(x, torch.SymInt):
            yield symbol_range(x)
            continue
        if type(x) not in TENSORS:
            raise Uncacheable(f"an input is a {type(x).__name__}")
        if x.layout is not torch.strided or x.is_quantized:
            raise Uncacheable(f"an input is {x.layout}")
        storage = x.untyped_storage()._cdata
        if storage in storages:
            raise Uncacheable("two inputs share memory")
        storages.add(storage)
        yield f"{type(x).__name__} {x.is_leaf} {x.is_inference()} {x.is_conj()} {x.is_neg()}"


def symbol_range(x: torch.SymInt) -> str:
    """A symbolic size with its value range, because kernels are specialized on that range."""
    if not x.node.has_hint():
        raise Uncacheable("an input is a size that only data decides")
    ranges = x.node.shape_env.var_to_range
    return f"{x} " + " ".join(f"{s}:{ranges.get(s)}" for s in sorted(x.node.expr.free_symbols, key=str))


def tensor_text(t: torch.Tensor) -> str:
    shape, strides = (",".join(map(str, x)) for x in (t.shape, t.stride()))
    return f"{t.dtype} {t.device} [{shape}] [{strides}] {t.storage_offset()} {t.requires_grad}"


# ---- the graph ---------------------------------------------------------------------------------------------


def graph_lines(gm: fx.GraphModule) -> Iterator[str]:
    """One line of text per node. Nodes are identified by position, so names do not matter."""
    for name, tensor in held(gm).items():
        yield f"held {name} {tensor_text(tensor)}"
    for key in REGION_META:
        if gm.meta.get(key) is not None:
            raise Uncacheable(f"a subgraph has {key}")
    names: dict[fx.Node, str] = {}
    for n in gm.graph.nodes:
        target = "" if n.op in ("placeholder", "output") else node_target(gm, n)
        marks = [f" {k}={n.meta[k]!r}" for k in ("custom", "user_cache_hash") if n.meta.get(k)]
        value = f" {value_text(n.meta.get('example_value'))}" if n.op == "placeholder" else ""
        yield f"{n.op} {target} {text(n.args, names)} {text(n.kwargs, names)}{value}{''.join(marks)}"
        names[n] = f"%{len(names)}"
    for name, child in gm.named_children():
        if not isinstance(child, fx.GraphModule) or held(child):
            raise Uncacheable(f"the graph holds the module {name}")
        yield f"module {name}"
        yield from graph_lines(child)


def value_text(x: Any) -> str:
    return tensor_text(x) if isinstance(x, torch.Tensor) else text(x, {})


def node_target(gm: fx.GraphModule, n: fx.Node) -> str:
    if n.op == "call_function":
        return callable_text(n.target)
    if n.op == "call_method" and isinstance(n.target, str):
        return n.target
    if n.op == "get_attr":
        name = str(n.target)
        if name in held(gm) or isinstance(getattr(gm, name, None), fx.GraphModule):
            return name
    raise Uncacheable(f"the graph has a {n.op} of {n.target}")


def callable_text(f: Any) -> str:
    if (space := namespace(f)) is not None:
        if space not in SPACES:
            raise Uncacheable(f"the operator {f} comes from outside of torch")
        return f"op {f}"
    if isinstance(f, HigherOrderOperator):
        if f.name().startswith("triton_kernel"):
            raise Uncacheable("the graph calls a kernel of the user")
        return f"higher {f.name()}"
    try:
        name = qualified_name(f)
    except (RuntimeError, AttributeError) as error:
        raise Uncacheable(f"{f!r} has no name: {error}") from None
    if name.partition(".")[0] not in MODULES or "<" in name:
        raise Uncacheable(f"the function {name} is not torch's")
    return f"{type(f).__name__} {name}"


def text(x: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(x, fx.Node):
        return names[x]
    if isinstance(x, CONSTANTS):
        return repr(x)
    if isinstance(x, (tuple, list)):
        return type(x).__name__ + "(" + ", ".join([text(y, names) for y in x]) + ")"
    if isinstance(x, dict):
        return "{" + ", ".join([f"{text(k, names)}: {text(v, names)}" for k, v in x.items()]) + "}"
    if isinstance(x, slice):
        return f"slice({text(x.start, names)}, {text(x.stop, names)}, {text(x.step, names)})"
    if isinstance(x, SYMBOLIC):
        return f"sym({x.node.expr})"
    if callable(x):
        return callable_text(x)
    raise Uncacheable(f"the graph holds a {type(x).__name__}")

"""All changes that Flambeau makes to torch: what, why, for which versions, scope, and undo.

    PATCHES                                  # all of them; docs/reference/settings.md has the table
    with WRAPPERS.applied(post_compile):     # within a block
        ...
    FRAMES.apply(passing); FRAMES.undo()     # until somebody undoes it

Most apply only while this backend compiles, under Dynamo's lock. The others, marked `lasting`, are visible to all code
in the process. They do nothing for calls that are not Flambeau's, and FLAMBEAU_PATCHES=0 turns them off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from .call_patches import CALLS, DISABLED, READINGS
from .patch import MISSING, Change, Patch
from .stream_patches import OBJECTS, TRACED_STREAMS

__all__ = ["MISSING", "PATCHES", "Patch", "undo_lasting"]

# ---- while this backend compiles --------------------------------------------------------------------------


def _wrappers(post_compile: Callable[..., Any]) -> Iterator[Change]:
    from .aot import RuntimeWrapper

    full = RuntimeWrapper.post_compile
    yield RuntimeWrapper, "post_compile", lambda *args, **named: post_compile(full, *args, **named)


def _cache(key_of: Callable[..., Any], save: Callable[..., Any]) -> Iterator[Change]:
    from .aot import AOTAutogradCache, autograd_cache

    original = AOTAutogradCache.save
    yield autograd_cache, "autograd_cache_key", key_of
    yield AOTAutogradCache, "_lookup", staticmethod(lambda *_, **__: None)
    yield AOTAutogradCache, "save", staticmethod(lambda *args, **named: save(original, *args, **named))


def _shared_inputs() -> Iterator[Change]:
    from .aot import by_own_memory, runtime_wrappers

    full = runtime_wrappers.create_synthetic_base_metadata
    yield runtime_wrappers, "create_synthetic_base_metadata", lambda *args, **named: by_own_memory(full, *args, **named)


def _cut(fusing: Iterable[Any], maps: Iterable[Any]) -> Iterator[Change]:
    from .aot import partitioners

    known = partitioners.get_default_op_list()
    kind = type(known.fusible_ops)
    again = kind([*known.recomputable_ops, *(op.overloadpacket for op in maps)])
    taken = kind([*known.fusible_ops, *again, *(op.overloadpacket for op in fusing)])
    ours = replace(known, fusible_ops=taken, recomputable_ops=again)
    yield partitioners, "get_default_op_list", lambda: ours


def _kernels(wanted: Mapping[Any, Mapping[Any, Any]]) -> Iterator[Change]:
    """Replace Python kernels. `wanted`: for each operator the new entries of its kernel table; MISSING removes one."""
    for op, kernels in wanted.items():
        for key, kernel in kernels.items():
            yield op.py_kernels, key, kernel


def _forget_kernels(_: bool, wanted: Mapping[Any, Mapping[Any, Any]]) -> None:
    from .dispatch import DispatchKey
    from .fake import forget_shapes

    for op in wanted:
        op._dispatch_cache.clear()  # clear results of lookups in the table
    forget_shapes({op for op, kernels in wanted.items() if DispatchKey.Meta in kernels})


def _handlers(functions: Mapping[Any, Any], methods: Mapping[str, Any], leaving: Callable[..., Any]
              ) -> Iterator[Change]:
    """Wrap the handlers of these functions and methods; a release may lack some of them."""
    from .dynamo import TensorVariable, TorchInGraphFunctionVariable

    handlers = TorchInGraphFunctionVariable._get_handlers()
    for function, number in functions.items():
        if function in handlers:
            yield handlers, function, leaving(handlers[function], number)
    table: dict[str, Any] = vars(TensorVariable).get("tp_methods", {})  # from 2.15 on; before, methods
    for name, number in methods.items():
        if name in table:
            yield table, name, type(table[name])(leaving(table[name].handler, number))
        elif (method := getattr(TensorVariable, f"method_{name}", None)) is not None:
            yield TensorVariable, f"method_{name}", leaving(method, number)


def _count(module: ModuleType, steps: list[Any], count: Any) -> Iterator[Change]:
    from .optim import COUNT

    read = getattr(module, COUNT)
    yield module, COUNT, lambda x: count if any(x is t for t in steps) else read(x)


def _compiling(capturable: bool) -> Iterator[Change]:
    import torch

    yield torch.compiler, "_is_compiling_flag", capturable


WRAPPERS = Patch(
    "wrappers", "`RuntimeWrapper.post_compile` of AOTAutograd",
    "plain graphs get shorter wrappers, with a third of the Python code per call; backends cannot choose wrappers",
    "while a graph is compiled", _wrappers)
CACHE = Patch(
    "cache", "`AOTAutogradCache.save` and `_lookup`, `autograd_cache_key`",
    "compiled graphs are stored in Flambeau's cache; torch's cache does not support other formats or keys",
    "while a graph is compiled", _cache)
SHARED_INPUTS = Patch(
    "shared_inputs", "`create_synthetic_base_metadata` of AOTAutograd",
    "if inputs share memory, torch recreates each as a chain of views and can read beyond lists of parts; here they "
    "are recreated by their strides. torch also confuses numbers of intermediates with numbers of inputs",
    "while a graph is compiled", _shared_inputs)
CUT = Patch(
    "cut", "`get_default_op_list` of torch's partitioner",
    "it lists the operators that Inductor sees after its decompositions, so operators that we fuse would be saved for "
    "the backward; there is no hook for it", "while forward and backward are separated", _cut)
KERNELS = Patch(
    "kernels", "Python kernels (`py_kernels`) of operators with decompositions below autograd",
    "torch decomposes these operators before it looks into the table of decompositions", "while a graph is compiled",
    _kernels, settle=_forget_kernels)
HANDLERS = Patch(
    "handlers", "Dynamo's handlers of `addcdiv`, `addcmul_`, `add_` and `_foreach_lerp_`",
    'they decompose these operators into others that round more often, so `numerics="eager"` would not hold',
    "while a frame is traced for this backend", _handlers)
COUNTS = Patch(
    "counts", "`_get_value` of an optimizer's module",
    "a step is traced once for all step counts", "while a step is compiled", _count)
COMPILING = Patch(
    "compiling", "`torch.compiler._is_compiling_flag`",
    "outside of compilation, a step with `capturable=True` requires a GPU", "while a step is compiled", _compiling)


# ---- lasting ----------------------------------------------------------------------------------------------


def _frames(passing: Callable[..., Any]) -> Iterator[Change]:
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    yield CatchErrorsWrapper, "__call__", passing(CatchErrorsWrapper.__call__)


def _optimizers(routed: Callable[..., Any], remembering: Callable[..., Any]) -> Iterator[Change]:
    import importlib

    from .dynamo import prepare_optimizers
    from .optim import FUNCTIONS, GROUP, group_classes, places

    prepare_optimizers()
    for module, name, kind in FUNCTIONS:
        own = routed(getattr(importlib.import_module(module), name), module, kind)
        for place in places(module, name):
            yield place, name, own
    for optimizer in group_classes():
        yield optimizer, GROUP, remembering(getattr(optimizer, GROUP))


def _skip_asides(on: bool, *_: Any) -> None:
    """Let Dynamo skip frames that do not use tensors, instead of asking about them, at 20 us each."""
    from .dynamo import skip_code, unskip_code
    from .optim import aside_codes

    for code in aside_codes():
        (skip_code if on else unskip_code)(code)


def _before_start(pin_memory: Callable[..., Any], accelerator: Callable[..., Any], found: Callable[..., Any]
                  ) -> Iterator[Change]:
    import torch

    yield torch.Tensor, "pin_memory", pin_memory
    yield torch._C, "_get_accelerator", accelerator
    yield torch._C, "_accelerator_getAccelerator", found


def _dlpack(device: Callable[..., Any]) -> Iterator[Change]:
    import torch

    yield torch.Tensor, "__dlpack_device__", device(torch.Tensor.__dlpack_device__)


def _sharing(only_of_others: Callable[..., Any]) -> Iterator[Change]:
    from multiprocessing.reduction import ForkingPickler

    import torch
    from torch.multiprocessing import reductions

    table: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    for kind, own in ((torch.Tensor, reductions.reduce_tensor), (torch.nn.Parameter, reductions.reduce_tensor),
                      (torch.UntypedStorage, reductions.reduce_storage)):
        yield table, kind, only_of_others(table.get(kind, own))


FRAMES = Patch(
    "frames", "`CatchErrorsWrapper.__call__` of Dynamo",
    "Dynamo should not trace optimizers for this backend, because it takes minutes for thousands of parameters; there "
    "is no hook for it. Without this, Dynamo traces them, and `optimizers` and `handlers` are not applied",
    'from the first `torch.compile(backend="flambeau")` on', _frames, lasting=True)
OPTIMIZERS = Patch(
    "optimizers", "functions over lists in `torch.optim` and `torch.nn.utils.clip_grad` (`adam`, `_get_total_norm`), "
    "`_init_group` of optimizers",
    "optimizer steps and clipping run as few kernels; torch's own hooks cannot replace a step. Without this, they run "
    "as in torch, and are traced if they are compiled",
    "while this backend traces; from the first optimizer on; while `flambeau.accelerate` is active",
    _optimizers, lasting=True, settle=_skip_asides)
BEFORE_START = Patch(
    "before_start", "`Tensor.pin_memory`, `torch._C._get_accelerator` and `_accelerator_getAccelerator`",
    "torch asks for these before it starts the device, and would find none. Without this, call "
    "`flambeau.enable_device()` before you use loaders that pin memory",
    'from `import torch` until the first tensor of `torch.device("flambeau")`, if there is no other device',
    _before_start, lasting=True)
DLPACK = Patch(
    "dlpack", "`Tensor.__dlpack_device__`",
    "torch only knows the original name of the device there. Without this, tensors of the device have no DLPack",
    'from the first tensor of `torch.device("flambeau")` on', _dlpack, lasting=True)
SHARING = Patch(
    "sharing", "how multiprocessing sends tensors and storages (`ForkingPickler`)",
    "memory of the device cannot be shared with other processes, and the error should say so. Without this, other "
    "errors are raised",
    'from the first tensor of `torch.device("flambeau")` on', _sharing, lasting=True)

PATCHES = (FRAMES, CALLS, DISABLED, READINGS, OPTIMIZERS, OBJECTS, BEFORE_START, DLPACK, SHARING, HANDLERS,
           TRACED_STREAMS, WRAPPERS, CACHE, SHARED_INPUTS, CUT, KERNELS, COUNTS, COMPILING)


def undo_lasting() -> None:
    """Undo all lasting changes, for programs that are done with Flambeau but go on using torch."""
    for patch in PATCHES:
        while patch.lasting and patch.is_applied:
            patch.undo()

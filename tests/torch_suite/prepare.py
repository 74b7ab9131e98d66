"""What a worker does before it loads a test file: the device for PyTorch's test classes, or this backend for others."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .files import DEVICE, EXACT, File

# Backends of Dynamo that give eager's results; a test names one of them because it must name some.
_RESULTS_ONLY = ("eager", "eager_noexcept", "aot_eager", "aot_eager_decomp_partition", "inductor")


def before_torch(file: File, side: str) -> None:
    """The environment, before torch is imported."""
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "privateuse1" if side == DEVICE else "cpu"
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"  # a line in every message
    # The name of the device is known on its own sides only.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1" if side == DEVICE and file.kind != "compile" else "0"
    if file.kind == "compile":
        os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "cpu"
    if side == EXACT:
        os.environ["FLAMBEAU_NUMERICS"] = "eager"


def prepare(file: File, side: str) -> Callable[[], None]:
    """Returns what waits for all that a test has started."""
    if file.kind == "compile":
        if side != "stock":
            use_backend(DEVICE if side == EXACT else side)
    elif side == DEVICE:
        use_device()
        import torch

        return torch.accelerator.synchronize
    return lambda: None


def use_device() -> None:
    """Two devices, both of them the first that there is: the test files know what to do with a second."""
    import torch

    import flambeau
    from flambeau.targets.opencl import driver as opencl_driver
    from flambeau.targets.opencl.device import ClDevice, devices

    first = devices()[0].device
    opencl_driver.devices = lambda: (ClDevice(0, first), ClDevice(1, first))  # type: ignore[assignment]
    flambeau.enable_device()
    torch.empty(1, device=DEVICE)  # a device that is in use is available
    logging.getLogger("flambeau.device.fallback").setLevel(logging.ERROR)
    # The skeleton device is a package that its tests import.
    sys.modules[f"torch_{DEVICE}"] = types.ModuleType(f"torch_{DEVICE}")

    from torch.testing._internal import common_device_type, common_utils

    for module in (common_utils, common_device_type):
        if DEVICE not in module.NATIVE_DEVICES:
            module.NATIVE_DEVICES = (*module.NATIVE_DEVICES, DEVICE)
    compare_on_the_cpu()
    freeze_generators()


def compare_on_the_cpu() -> None:
    """The device under test does not judge itself, nor does it compile a comparison for every pair of layouts."""
    from torch.testing import _comparison

    compare = _comparison.TensorLikePair._compare_values

    def on_cpu(self: Any, actual: Any, expected: Any) -> None:
        compare(self, actual.detach().cpu(), expected.detach().cpu())

    _comparison.TensorLikePair._compare_values = on_cpu  # type: ignore[method-assign]


def freeze_generators() -> None:
    """PyTorch's tests hold the random state while they draw twice; before 2.13 those of the CPU and of CUDA alone."""
    import torch
    from torch.testing import _utils

    freeze = _utils.freeze_rng_state

    @contextmanager
    def freeze_rng_state() -> Iterator[None]:
        state = torch.get_device_module(DEVICE).get_rng_state()
        try:
            with freeze():
                yield
        finally:
            torch.get_device_module(DEVICE).set_rng_state(state)

    _utils.freeze_rng_state = freeze_rng_state


def use_backend(name: str) -> None:
    """Whatever backend a test asks for by a name of torch's, or counts graphs with, is this one."""
    import torch._inductor.compile_fx
    from torch._dynamo import testing
    from torch._dynamo.backends import registry

    registry.list_backends()  # all of them are there: a name is registered once
    backend = registry.lookup_backend(name)

    def instead(gm: Any, example_inputs: Any, *_: Any, **__: Any) -> Callable[..., Any]:
        return backend(gm, example_inputs)

    for other in _RESULTS_ONLY:
        if other != name:
            registry._COMPILER_FNS[other] = instead
    torch._inductor.compile_fx.compile_fx = instead
    for recorder in ("CompileCounter", "EagerAndRecordGraphs"):
        cls = getattr(testing, recorder)
        cls.__call__ = _recorded(cls.__call__, backend)


def _recorded(call: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, gm: Any, example_inputs: Any) -> Any:
        call(self, gm, example_inputs)
        return backend(gm, example_inputs)

    return run

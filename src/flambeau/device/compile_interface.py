"""The device's side of torch.compile: a device interface for Dynamo, and an error in place of an Inductor backend."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from flambeau.errors import UnsupportedError
from flambeau.torch_compat.dynamo import DeviceInterface, register_interface_for_device

from . import torch_module
from .torch_module import NAME

# Names that Inductor looks up in the module of an external device.
GENERATORS = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")


class Interface(DeviceInterface):
    """`torch.flambeau` under the names that Dynamo uses."""

    device = torch_module.device
    Event = torch.Event
    Stream = torch.Stream
    current_device = staticmethod(torch_module.current_device)
    set_device = staticmethod(torch_module.set_device)
    device_count = staticmethod(torch_module.device_count)
    is_available = staticmethod(torch_module.is_available)
    stream = staticmethod(torch_module.stream)
    current_stream = staticmethod(torch_module.current_stream)
    set_stream = staticmethod(torch_module.set_stream)
    synchronize = staticmethod(torch_module.synchronize)
    get_device_properties = staticmethod(torch_module.get_device_properties)
    get_compute_capability = staticmethod(torch_module.get_device_capability)
    memory_allocated = staticmethod(torch_module.memory_allocated)

    class Worker:
        set_device = staticmethod(torch_module.set_device)
        current_device = staticmethod(torch_module.current_device)
        get_device_properties = staticmethod(torch_module.get_device_properties)

    @staticmethod
    def exchange_device(device: int) -> int:
        before = torch_module.current_device()
        if device >= 0:
            torch_module.set_device(device)
        return before

    maybe_exchange_device = exchange_device

    @staticmethod
    def get_raw_stream(device_idx: int) -> int:
        return torch_module.current_stream(device_idx).stream_id

    @staticmethod
    def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
        torch_module.set_stream(torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        return True


def register() -> None:
    register_interface_for_device(NAME, Interface)
    for k in range(torch_module.device_count()):
        register_interface_for_device(f"{NAME}:{k}", Interface)


class _NoGenerator:
    """A stand-in for Inductor's code generators that raises an error on any use."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(f"Inductor, the default backend of torch.compile, makes no code for the device {NAME!r}",
                               hint='torch.compile(model, backend="flambeau")')

    def __call__(self, *_: Any) -> NoReturn:
        self.__getattr__("__call__")


def generator() -> Any:
    """The stand-in for a code generator. Inductor may be running just for the CPU. Its table of device names needs an
    entry for ours, since it would otherwise fail there, before it gets to the generator."""
    from flambeau.torch_compat.inductor import name_device

    name_device(NAME)
    return _NoGenerator()

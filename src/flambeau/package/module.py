"""`flambeau.load`: a package as a Python object with methods. Needs neither torch nor a compiler.

    module = flambeau.load("model.flam")
    y = module.forward(x)                          # NumPy arrays, or torch tensors where torch is there
    module.set_input(x, "x"); module.execute(); module.get_output(0)
    module.update_weights({"linear.bias": bias})   # at once, while others run

Any number of threads may call one module. What is given is checked by the runtime before anything is touched.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .arguments import fill, flattened, is_torch, maker, nested, paths, safetensors, torch_of
from .client import Failure, PackageError, Tensor, add_device, failed, runtime_library
from .container import INDEX, RUNTIME, DamagedPackage, hash_of, read
from .index import Entry, Weight, read_index, the
from .signature import Key, verifier


class Call(threading.local):
    """The structures of one method, for each thread its own."""

    def __init__(self, entry: Entry) -> None:
        self.inputs = (Tensor * max(len(entry.inputs), 1))()
        self.outputs = (Tensor * max(len(entry.outputs), 1))()
        self.given, self.results = list(self.inputs)[: len(entry.inputs)], list(self.outputs)[: len(entry.outputs)]
        self.error = Failure()
        self.places = ctypes.addressof(self.inputs), ctypes.addressof(self.outputs), ctypes.addressof(self.error)
        self.key: Any = None  # shapes, strides and dtypes of the arrays of the last call
        self.made: list[Callable[[], tuple[Any, int]]] = []


class Method:
    """A method of a package, to be called with arrays in the order of its inputs, or by their names."""

    def __init__(self, module: Module, number: int, entry: Entry, structure: Any) -> None:
        self.module, self.number, self.entry, self.structure = module, number, entry, structure
        self.names = [p.name for p in entry.inputs]
        self._call = Call(entry)
        self._run = module.library.flam_run
        self._counts = len(entry.inputs), len(entry.outputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and self.is_like_before(args):
            return nested(self.structure, self.launched())
        flat = flattened(args) if not kwargs and len(args) == len(self.names) else self.ordered(args, kwargs)
        return nested(self.structure, self.run(flat))

    def is_like_before(self, args: Sequence[Any]) -> bool:
        """Whether all that is new of them are their addresses, which the runtime is told then."""
        c = self._call
        if c.key is None or len(args) != len(c.key):
            return False
        for x, t, (shape, strides, dtype) in zip(args, c.given, c.key):
            if type(x) is not np.ndarray or x.dtype is not dtype or x.shape != shape or x.strides != strides:
                return False
            t.data = x.__array_interface__["data"][0]
        return True

    def ordered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        flat = flattened(args)
        named = {key: value for name, x in kwargs.items() for key, value in paths(name, x)}
        for name in named:
            if name not in self.names[len(flat):]:
                known = ", ".join(self.names)
                raise PackageError(f"method {self.entry.name!r} has no input {name!r} left: its inputs are {known}")
        for name in self.names[len(flat):]:
            if name not in named:
                raise PackageError(f"method {self.entry.name!r}: input {name!r} is missing")
            flat.append(named[name])
        return flat

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """The results, one after the other."""
        c, (inputs, outputs) = self._call, self._counts
        if len(flat) != inputs:
            raise PackageError(f"method {self.entry.name!r} takes {inputs} inputs, got {len(flat)}")
        device = self.module.device
        away = device != "cpu" and any(is_torch(x) and x.device.type == device for x in flat)
        there = f"{device}:{self.module.number}" if away else "cpu"
        kept = [fill(t, x, name, there) for t, x, name in zip(c.given, flat, self.names)]
        c.key = None
        if self.module.library.flam_shapes(self.module.handle(), self.number, c.inputs, inputs, c.outputs, outputs,
                                           c.error):
            raise failed(c.error)
        if away:
            return self.launched_there(there)
        c.made = [maker(t, port.dtype) for t, port in zip(c.results, self.entry.outputs)]
        arrays = all(type(x) is np.ndarray for x in kept)
        made = self.launched()
        if arrays:
            c.key = [(x.shape, x.strides, x.dtype) for x in kept]
        return [torch_of(x, p.dtype) for x, p in zip(made, self.entry.outputs)] if any(map(is_torch, flat)) else made

    def launched_there(self, device: str) -> list[Any]:
        """The same with tensors on a GPU, in torch's current stream; nobody waits, unless kernels check indices."""
        c, torch = self._call, sys.modules["torch"]
        made = []
        for t, port in zip(c.results, self.entry.outputs):
            made.append(torch.empty_strided(tuple(t.sizes[: t.rank]), tuple(t.strides[: t.rank]),
                                            dtype=getattr(torch, port.dtype), device=device))
            t.data = made[-1].data_ptr() or 64  # without elements it has no address, and needs none
        given, taken, error = c.places
        stream = torch.cuda.current_stream(device).cuda_stream
        if self.module.library.flam_run_on(self.module.handle(), self.number, given, self._counts[0], taken,
                                           self._counts[1], stream, error):
            raise failed(c.error)
        return made

    def launched(self) -> list[Any]:
        """The results of the inputs that the runtime was told of."""
        c, (inputs, outputs) = self._call, self._counts
        made = []
        for t, make in zip(c.results, c.made):
            array, t.data = make()
            made.append(array)
        given, taken, error = c.places
        if self._run(self.module.handle(), self.number, given, inputs, taken, outputs, error):
            raise failed(c.error)
        return made


# ---- the module -------------------------------------------------------------------------------------------


class Module:
    """A loaded package. `forward` and the other methods of the file are attributes of it."""

    def __init__(self, path: str | os.PathLike[str], target: str | None = None, device: int = 0,
                 verify: Key | None = None) -> None:
        self.path = os.fspath(path)
        # The runtime checks weights, in less time.
        sections = read(self.path, whole=False, verify=None if verify is None else verifier(verify))
        self.index = read_index(the(sections, INDEX, "index").data)
        self.hash = hash_of(self.path)
        self.library = runtime_library(the(sections, RUNTIME, "runtime").data)
        for s in sections:
            if s.kind == RUNTIME and s.name.startswith("runtime "):
                add_device(self.library, s.name.removeprefix("runtime "), s.data)
        error = Failure()
        wanted = target.encode() if target else None
        self.device, self.number = "cpu", device
        if hasattr(self.library, "flam_load_on"):
            self._handle: int | None = self.library.flam_load_on(self.path.encode(), wanted, device, error)
            self.device = self.library.flam_device_name(self._handle).decode() if self._handle else ""
        else:  # of format 1.0, which has CPUs alone
            self._handle = self.library.flam_load(self.path.encode(), wanted, error)
        if not self._handle:
            raise failed(error)
        try:
            structures = json.loads(self.index.metadata["methods"])
            self._methods = {e.name: Method(self, k, e, structures[k]["out"]) for k, e in enumerate(self.index.methods)}
        except (KeyError, ValueError, TypeError, IndexError) as e:
            raise DamagedPackage(f"the package is damaged: it does not say how results are nested ({e})") from e
        self._given = threading.local()
        for own, method in self._methods.items():
            if not hasattr(type(self), own):
                setattr(self, own, method)

    def handle(self) -> int:
        if not self._handle:
            raise PackageError(f"{self.path} was unloaded")
        return self._handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load_method("forward")(*args, **kwargs)

    def load_method(self, name: str) -> Method:
        """One of `method_names`; all of them are ready from the start."""
        if name not in self._methods:
            raise PackageError(f"the package has no method {name!r}: it has {', '.join(self._methods)}")
        return self._methods[name]

    @property
    def method_names(self) -> list[str]:
        return list(self._methods)

    @property
    def metadata(self) -> dict[str, str]:
        return {k: v for k, v in self.index.metadata.items() if k != "methods"}

    @property
    def weights(self) -> dict[str, Weight]:
        return {w.name: w for w in self.index.weights}

    # ---- inputs one by one, for each thread its own --------------------------------------------------------

    def _slots(self, method: str) -> dict[str, Any]:
        if not hasattr(self._given, method):
            setattr(self._given, method, {"inputs": {}, "outputs": None})
        found: dict[str, Any] = getattr(self._given, method)
        return found

    def set_input(self, value: Any, which: int | str = 0, method: str = "forward") -> None:
        """Keep an input for `execute`."""
        names = self.load_method(method).names
        name = names[which] if isinstance(which, int) and 0 <= which < len(names) else which
        if name not in names:
            raise PackageError(f"method {method!r} has no input {which!r}: its inputs are {', '.join(names)}")
        self._slots(method)["inputs"][name] = value

    def set_inputs(self, values: Sequence[Any], method: str = "forward") -> None:
        for k, value in enumerate(values):
            self.set_input(value, k, method)

    def execute(self, method: str = "forward") -> list[Any]:
        """Run a method on the inputs that were set; its results, one after the other."""
        one, slots = self.load_method(method), self._slots(method)
        slots["outputs"] = one.run(one.ordered((), slots["inputs"]))
        return self.get_outputs(method)

    def get_outputs(self, method: str = "forward") -> list[Any]:
        found = self._slots(method)["outputs"]
        if found is None:
            raise PackageError(f"method {method!r} was not executed in this thread")
        return list(found)

    def get_output(self, which: int = 0, method: str = "forward") -> Any:
        found = self.get_outputs(method)
        if not 0 <= which < len(found):
            raise PackageError(f"method {method!r} has {len(found)} outputs, asked for number {which}")
        return found[which]

    # ---- weights -------------------------------------------------------------------------------------------

    def update_weights(self, values: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        """New weights, by name or out of a safetensors file, all at once: a call sees the old ones or the new ones."""
        given = values if isinstance(values, Mapping) else safetensors(values)
        names, tensors = (ctypes.c_char_p * len(given))(), (Tensor * max(len(given), 1))()
        kept = []
        for k, (name, value) in enumerate(given.items()):
            names[k] = name.encode()
            kept.append(fill(tensors[k], value, name))
        error = Failure()
        if self.library.flam_update_weights(self.handle(), names, tensors, len(given), error):
            raise failed(error)

    def seed(self, number: int) -> None:
        """Of the random numbers that methods draw."""
        self.library.flam_seed(self.handle(), number)

    def unload(self) -> None:
        """Calls of other threads end as they would have; later ones are refused."""
        handle, self._handle = self._handle, None
        if handle:
            self.library.flam_unload(handle)

    def __enter__(self) -> Module:
        return self

    def __exit__(self, *_: Any) -> None:
        self.unload()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.unload()

    def __repr__(self) -> str:
        ports = "; ".join(f"{e.name}({', '.join(f'{p.name}: {p.type}' for p in e.inputs)})" for e in self.index.methods)
        return f"<flambeau.Module {self.path}: {ports}>"


def load(path: str | os.PathLike[str], target: str | None = None, device: int = 0, verify: Key | None = None) -> Module:
    """Load a package. `target`: one of those in the file, or its kind ("cuda"); otherwise the first that runs here.
    `device`: the number of the GPU or OpenCL device, for a target that is one. `verify`: a public key of Ed25519 in
    PEM; a file that was not signed with it is refused before any of its code is loaded."""
    return Module(path, target, device, verify)

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
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .arguments import NumPy, Torch, calling, fill, library_of, safetensors
from .client import Call, Failure, PackageError, Tensor, add_device, failed, runtime_library
from .container import INDEX, RUNTIME, DamagedPackage, hash_of, read
from .index import ALSO, Entry, Weight, read_index, the
from .signature import Key, verifier
from .structure import Arguments, nesting
from .torch_calls import caller


class Frame:
    """The call structures of one method in one thread, which are passed to the runtime by address. A frame holds a
    reference to the runtime's model, so that the model lives as long as it can be called."""

    def __init__(self, module: Module, number: int, entry: Entry) -> None:
        self.library, self.handle = module.library, module.retained()
        inputs, outputs = (Tensor * max(len(entry.inputs), 1))(), (Tensor * max(len(entry.outputs), 1))()
        self.given, self.results = list(inputs)[: len(entry.inputs)], list(outputs)[: len(entry.outputs)]
        self.error, self.dtypes = Failure(), [p.dtype for p in entry.outputs]
        self.call = Call(self.handle, ctypes.addressof(inputs), ctypes.addressof(outputs), ctypes.addressof(self.error),
                         None, number, len(entry.inputs), len(entry.outputs), 0)
        counted = self.call.inputs, len(entry.inputs), self.call.outputs, len(entry.outputs)
        self.run = partial(self.library.flam_run_call, ctypes.addressof(self.call)) if hasattr(
            self.library, "flam_run_call") else partial(
            self.library.flam_run, self.handle, number, *counted, self.call.error)  # before format 1.3
        self.find_shapes = partial(self.library.flam_shapes, self.handle, number, inputs, len(entry.inputs), outputs,
                                   len(entry.outputs), self.error)
        self.known: Callable[..., tuple[Any, ...] | None] | None = None  # the call for arguments like the last ones

    def learn(self, flat: Sequence[Any], arrays: NumPy | Torch) -> Callable[[], Any]:
        """Computes the results' shapes for the arguments that the structures describe, and generates `known` for later
        calls with the same shapes. Returns the call with the present arguments."""
        self.known = None
        if self.find_shapes():
            raise failed(self.error)
        self.call.on_device = arrays.device != "cpu"
        keys = [arrays.key(x) for x in flat]
        # The generated functions hold no reference to `self`: without a cycle, an unused frame is freed immediately,
        # and with it its reference to the model.
        rest = self.results, self.dtypes, self.run, self.call, self.error
        if None not in keys:
            self.known = calling(arrays, [k for k in keys if k], self.given, *rest)
        return calling(arrays, (), (), *rest)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self.library.release(self.handle)


class Method:
    """A method of a package, to be called with arrays in the order of its inputs, or by their names."""

    def __init__(self, module: Module, number: int, entry: Entry, structure: Any) -> None:
        self.module, self.number, self.entry = module, number, entry
        self.arguments = Arguments(entry.name, entry.inputs, structure["in"])
        self.names = self.arguments.names
        self.count = len(self.names)
        self.nested = nesting(structure["out"])
        self.frames = threading.local()

    def frame(self) -> Frame:
        """The frame of the current thread."""
        try:
            found: Frame = self.frames.own
        except AttributeError:
            found = self.frames.own = Frame(self.module, self.number, self.entry)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and len(args) == self.count:
            known = self.frame().known
            if known is not None and (found := known(*args)) is not None:
                return self.nested(found)
        return self.nested(self.run(self.ordered(args, kwargs)))

    def ordered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return self.arguments.ordered(args, kwargs)

    def run(self, flat: Sequence[Any]) -> Sequence[Any]:
        """Runs the method on its inputs in order. Returns its results as a flat sequence."""
        frame = self.frame()
        if len(flat) != self.count:
            raise self.arguments.miscounted(len(flat))
        if frame.known is not None and (found := frame.known(*flat)) is not None:
            return found
        arrays = library_of(flat, self.module.device, self.module.number)
        for t, x, port in zip(frame.given, flat, self.entry.inputs):
            fill(t, x, port, arrays.device)
        return frame.learn(flat, arrays)()


# ---- the module -------------------------------------------------------------------------------------------


class Module:
    """A loaded package. `forward` and the other methods of the file are attributes of it."""

    def __init__(self, path: str | os.PathLike[str], target: str | None = None, device: int = 0,
                 verify: Key | None = None) -> None:
        self.path = os.fspath(path)
        # `whole=False`: the runtime checks the weights, which takes less time.
        sections = read(self.path, whole=False, verify=None if verify is None else verifier(verify))
        self.index = read_index(the(sections, INDEX, "index").data)
        self.hash = hash_of(self.path)
        self.library = runtime_library(the(sections, RUNTIME, "runtime").data)
        for s in sections:
            kind = s.name.removeprefix("runtime ")
            if s.kind == RUNTIME and kind != s.name and (target is None or target.partition(":")[0] == kind):
                add_device(self.library, kind, s.data)
        if any("torch" in features.split() for features, _ in self.index.targets.values()) and (call := caller()):
            self.library.flam_set_caller(call)
        self._given, self._lock = threading.local(), threading.Lock()
        self._methods: dict[str, Method] = {}
        error = Failure()
        wanted = target.encode() if target else None
        self.device, self.number = "cpu", device
        if hasattr(self.library, "flam_load_on"):
            self._handle: int | None = self.library.flam_load_on(self.path.encode(), wanted, device, error)
            self.device = self.library.flam_device_name(self._handle).decode() if self._handle else ""
        else:  # a package of format 1.0, which supports only CPUs
            self._handle = self.library.flam_load(self.path.encode(), wanted, error)
        if not self._handle:
            raise failed(error)
        try:
            structures = json.loads(self.index.metadata["methods"])
            self._methods = {e.name: Method(self, k, e, structures[k]) for k, e in enumerate(self.index.methods)}
        except (KeyError, ValueError, TypeError, IndexError) as e:
            raise DamagedPackage(f"the package is damaged: it does not say how results are nested ({e})") from e
        for own, method in self._methods.items():
            if not hasattr(type(self), own):
                setattr(self, own, method)

    def retained(self) -> int:
        """The runtime's model, which stays until the caller releases it."""
        with self._lock:
            if not self._handle:
                raise PackageError(f"{self.path} was unloaded")
            self.library.retain(self._handle)
            return self._handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load_method("forward")(*args, **kwargs)

    def load_method(self, name: str) -> Method:
        """One of `method_names`, by name. All methods are ready from the start."""
        if name not in self._methods:
            raise PackageError(f"the package has no method {name!r}: it has {', '.join(self._methods)}")
        return self._methods[name]

    @property
    def method_names(self) -> list[str]:
        return list(self._methods)

    @property
    def metadata(self) -> dict[str, str]:
        return {k: v for k, v in self.index.metadata.items() if k != "methods" and not k.startswith(ALSO)}

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
        """Run a method on the inputs that were set. Returns its results, in order."""
        one, slots = self.load_method(method), self._slots(method)
        slots["outputs"] = list(one.run(one.ordered((), slots["inputs"])))
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
        """Replace weights, given by name or in a safetensors file. A call sees all old or all new ones."""
        given = values if isinstance(values, Mapping) else safetensors(values)
        names, tensors = (ctypes.c_char_p * len(given))(), (Tensor * max(len(given), 1))()
        known = self.weights
        for k, (name, value) in enumerate(given.items()):
            same = self.index.metadata.get(f"{ALSO}{name}", name)
            if same not in known:
                raise PackageError(f"the package has no weight {name!r}: `weights` lists those that it has")
            names[k] = name.encode()
            fill(tensors[k], value, known[same], what="weight")
        error, handle = Failure(), self.retained()
        code = self.library.flam_update_weights(handle, names, tensors, len(given), error)
        self.library.release(handle)
        if code:
            raise failed(error)

    def seed(self, number: int) -> None:
        """Set the seed of the random numbers that methods draw."""
        handle = self.retained()
        self.library.flam_seed(handle, number)
        self.library.release(handle)

    def unload(self) -> None:
        """Free the module. Calls that are running in other threads finish; later calls raise an error."""
        with self._lock:
            handle, self._handle = self._handle, None
        for method in self._methods.values():
            method.frames = threading.local()  # frees the frames of all threads, each once its call has finished
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
    """Load a package. `target`: a target in the file, or its kind ("cuda"); otherwise the first one that runs here.
    `device`: number of the GPU or OpenCL device. `verify`: a public Ed25519 key in PEM format; a file that was not
    signed with that key is refused before any of its code is loaded."""
    return Module(path, target, device, verify)

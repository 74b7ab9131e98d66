"""flambeau.load: a package as an object with methods, without tracing, without a compiler, and without torch.

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
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .client import CODES, DTYPES, Failure, PackageError, Tensor, failed, runtime_library
from .container import INDEX, RUNTIME, DamagedPackage, Section, Words, hash_of, read

_WORDS = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
          "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class Port:
    """An input or output: its name, its type as a text, its dtype and rank."""

    name: str
    type: str
    dtype: str
    rank: int
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Weight:
    name: str
    dtype: str
    mutable: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Entry:
    """One method."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True)
class Index:
    """What a package says of itself."""

    metadata: dict[str, str]
    weights: tuple[Weight, ...]
    methods: tuple[Entry, ...]
    targets: dict[str, tuple[str, int]]  # the features that a CPU must have, and the section of its code
    programs: dict[tuple[str, str], int]  # words, by method and target


def dtype_named(code: int) -> str:
    if not 1 <= code < len(DTYPES):
        raise DamagedPackage(f"the package is damaged: no dtype has the number {code}")
    return DTYPES[code]


def read_index(data: bytes | memoryview) -> Index:
    w = Words(data)
    metadata = {w.text(): w.text() for _ in w.each()}
    weights = []
    for _ in w.each():
        name, dtype, mutable, _, size, rank = w.text(), *w.take(5)
        weights.append(Weight(name, dtype_named(dtype), bool(mutable), w.take(rank), w.take(rank), size))
    methods = []
    for _ in w.each():
        name = w.text()
        sides: list[tuple[Port, ...]] = []
        for ranged in (True, False):
            ports = []
            for _ in w.each():
                named, kind, dtype, rank = w.text(), w.text(), *w.take(2)
                limits = w.take(2 * rank) if ranged else ()
                ports.append(Port(named, kind, dtype_named(dtype), rank, tuple(zip(limits[::2], limits[1::2]))))
            sides.append(tuple(ports))
        methods.append(Entry(name, *sides))
    for _ in w.each():
        w.text()
    targets, programs = {}, {}
    for _ in w.each():
        target = w.text()
        targets[target] = w.text(), w.one()
        for m in methods:
            programs[m.name, target] = len(w.take(w.one()))
    w.end()
    return Index(metadata, tuple(weights), tuple(methods), targets, programs)


def the(sections: Sequence[Section], kind: int, what: str) -> Section:
    for s in sections:
        if s.kind == kind:
            return s
    raise DamagedPackage(f"the package is damaged: it has no {what}")


def bfloat16() -> Any:
    """NumPy's dtype of bfloat16, where a library has brought one; else its bits."""
    found = sys.modules.get("ml_dtypes")
    return np.dtype(found.bfloat16) if found else np.dtype("uint16")


def array_dtype(name: str) -> Any:
    return bfloat16() if name == "bfloat16" else np.dtype(name)


# ---- arguments --------------------------------------------------------------------------------------------


def is_torch(x: Any) -> bool:
    return type(x).__module__.split(".")[0] == "torch" and hasattr(x, "data_ptr")


def fill(t: Tensor, x: Any, name: str) -> Any:
    """Describe an argument to the runtime; what must stay alive meanwhile."""
    if is_torch(x):
        x = x.detach()
        if x.device.type != "cpu" or x.is_neg() or x.is_conj():
            raise PackageError(f"input {name!r} is a tensor on {x.device}: this package runs on the CPU")
        dtype, shape, strides = str(x.dtype).removeprefix("torch."), tuple(x.shape), x.stride()
        t.data = x.data_ptr()
    else:
        if not isinstance(x, np.ndarray):
            raise PackageError(f"input {name!r}: expected an array, got {type(x).__name__}")
        dtype, shape = x.dtype.name, x.shape
        if not x.dtype.isnative:
            raise PackageError(f"input {name!r}: its bytes are in the order of another machine")
        item = x.itemsize
        if any(s % item for s in x.strides):
            raise PackageError(f"input {name!r}: its elements do not lie at multiples of their size")
        strides = tuple(s // item for s in x.strides)
        t.data = x.__array_interface__["data"][0]
    if len(shape) > len(t.sizes):
        raise PackageError(f"input {name!r} has {len(shape)} dimensions, and packages take up to {len(t.sizes)}")
    t.dtype, t.rank = CODES.get(dtype, 0), len(shape)
    for k, (n, s) in enumerate(zip(shape, strides)):
        t.sizes[k], t.strides[k] = n, s
    return x


class Call(threading.local):
    """The structures of one method, for each thread its own."""

    def __init__(self, entry: Entry) -> None:
        self.inputs = (Tensor * max(len(entry.inputs), 1))()
        self.outputs = (Tensor * max(len(entry.outputs), 1))()
        self.given, self.results = list(self.inputs)[: len(entry.inputs)], list(self.outputs)[: len(entry.outputs)]
        self.error = Failure()
        self.places = ctypes.addressof(self.inputs), ctypes.addressof(self.outputs), ctypes.addressof(self.error)
        self.key: Any = None  # shapes, strides and dtypes of the arrays of the last call
        self.made: list[Callable[[], Any]] = []


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
        kept = [fill(t, x, name) for t, x, name in zip(c.given, flat, self.names)]
        c.key = None
        if self.module.library.flam_shapes(self.module.handle(), self.number, c.inputs, inputs, c.outputs, outputs,
                                           c.error):
            raise failed(c.error)
        c.made = [maker(t, port.dtype) for t, port in zip(c.results, self.entry.outputs)]
        arrays = all(type(x) is np.ndarray for x in kept)
        made = self.launched()
        if arrays:
            c.key = [(x.shape, x.strides, x.dtype) for x in kept]
        return [torch_of(x, p.dtype) for x, p in zip(made, self.entry.outputs)] if any(map(is_torch, flat)) else made

    def launched(self) -> list[Any]:
        """The results of the inputs that the runtime was told of."""
        c, (inputs, outputs) = self._call, self._counts
        made = []
        for t, make in zip(c.results, c.made):
            array = make()
            t.data = array.__array_interface__["data"][0]
            made.append(array)
        given, taken, error = c.places
        if self._run(self.module.handle(), self.number, given, inputs, taken, outputs, error):
            raise failed(c.error)
        return made


def maker(t: Tensor, name: str) -> Callable[[], Any]:
    """Makes an array for a result."""
    dtype, shape = array_dtype(name), tuple(t.sizes[: t.rank])
    strides = tuple(s * dtype.itemsize for s in t.strides[: t.rank])
    if strides == contiguous(shape, dtype.itemsize):
        return lambda: np.empty(shape, dtype)
    order = sorted(range(len(shape)), key=lambda d: -strides[d])
    back = [order.index(d) for d in range(len(shape))]
    inner = tuple(shape[d] for d in order)
    return lambda: np.empty(inner, dtype).transpose(back)


def contiguous(shape: Sequence[int], step: int) -> tuple[int, ...]:
    out: list[int] = []
    for n in reversed(shape):
        out.insert(0, step)
        step *= n
    return tuple(out)


def torch_of(x: Any, dtype: str) -> Any:
    torch = sys.modules["torch"]
    return torch.from_numpy(x.view("uint16")).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(x)


def paths(name: str, x: Any) -> list[tuple[str, Any]]:
    """Arrays inside lists, tuples and dictionaries, by where they are."""
    if isinstance(x, Mapping):
        return [found for k in x for found in paths(f"{name}.{k}", x[k])]
    if isinstance(x, list | tuple):
        return [found for k, y in enumerate(x) for found in paths(f"{name}.{k}", y)]
    return [] if x is None or isinstance(x, bool | int | float | str) else [(name, x)]


def flattened(args: Sequence[Any]) -> list[Any]:
    """Numbers that the model was exported with are part of it, and are left out."""
    return [x for a in args for _, x in paths("", a)]


def nested(structure: Any, results: Sequence[Any]) -> Any:
    (kind, inside), = structure.items()
    if kind == "output":
        return results[inside]
    if kind == "dict":
        return {k: nested(v, results) for k, v in inside.items()}
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(nested(x, results) for x in inside)
    return inside


# ---- the module -------------------------------------------------------------------------------------------


class Module:
    """A loaded package. `forward` and the other methods of the file are attributes of it."""

    def __init__(self, path: str | os.PathLike[str], target: str | None = None) -> None:
        self.path = os.fspath(path)
        sections = read(self.path, whole=False)  # the runtime checks weights, in less time
        self.index = read_index(the(sections, INDEX, "index").data)
        self.hash = hash_of(self.path)
        self.library = runtime_library(the(sections, RUNTIME, "runtime").data)
        error = Failure()
        wanted = target.encode() if target else None
        self._handle: int | None = self.library.flam_load(self.path.encode(), wanted, error)
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


def safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tensors of a safetensors file, as views of the mapped file."""
    data = np.memmap(path, mode="r")
    try:
        length, = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
        found = {}
        for name, one in header.items():
            if name != "__metadata__" and not name.startswith("__pad__."):
                begin, end = one["data_offsets"]
                part = data[8 + length + begin : 8 + length + end]
                if one["dtype"] == "BF16" and "ml_dtypes" not in sys.modules:
                    raise PackageError("weights of bfloat16 need ml_dtypes, or torch tensors")
                found[name] = part.view(array_dtype(_WORDS[one["dtype"]])).reshape(one["shape"])
        return found
    except (ValueError, KeyError, TypeError, struct.error) as e:
        raise PackageError(f"{os.fspath(path)} is no safetensors file: {e}") from e


def load(path: str | os.PathLike[str], target: str | None = None) -> Module:
    """Load a package. `target`: one of those in the file; otherwise the first that runs here."""
    return Module(path, target)

"""Writes objects as plain data and reads them back. Only types from a fixed table are created.

    codec = Codec([Record(LaunchPlan), Record(Step)], enums=[...], values={"as_number": as_number})
    data = codec.encode(entry)         # Unwritable, with the path to anything that is not in the table
    entry = codec.decode(data)         # Malformed, whatever is wrong with the data

The header is JSON. None, booleans, integers and strings stand for themselves. Everything else is a list whose first
element names its type: ["tuple", 1, 2], or ["Step", ...] with the fields of that class in order. Interned objects
(expressions, indices) are listed before the rest, each after the objects it consists of, and appear as ["ref", k]
everywhere else. The bytes of tensors follow the header line. Decoding runs no code except the constructors of the
table's classes, which get exactly as many values as they have fields, checked against the declared types.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from .operator_calls import is_operator, operator_named, operator_path

VERSION = 1
DEPTH = 64  # levels of nested lists
PLAIN = frozenset({type(None), bool, int, str})  # written as themselves
TORCH = {kind: {str(x).removeprefix("torch."): x for x in vars(torch).values() if type(x) is kind}
         for kind in (torch.dtype, torch.layout, torch.memory_format)}


class Unwritable(Exception):
    """Raised for an object whose type is not in the table."""


class Malformed(Exception):
    """Raised for data that no encoder has written."""


class Record:
    """A class in the table: by default a dataclass or named tuple, with all its fields.

    `instead` maps fields to the value that is written in place of theirs; `after` names attributes that are set once
    the object is constructed.
    """

    shared = False  # whether equal values are one object

    def __init__(self, kind: Any, instead: Mapping[str, Any] | None = None, after: Sequence[str] = ()) -> None:
        self.kind, self.name = kind, kind.__name__
        self.fields = kind._fields if issubclass(kind, tuple) else tuple(f.name for f in dataclasses.fields(kind))
        self.instead = {k: v for k, v in (instead or {}).items() if k in self.fields}
        self.after = tuple(after)
        self._checks: list[Callable[[Any], bool]] | None = None

    def values(self, x: Any) -> list[Any]:
        return [self.instead[f] if f in self.instead else getattr(x, f) for f in (*self.fields, *self.after)]

    def parts(self, x: Any) -> Iterable[Any]:
        """The objects of this class inside a shared object, each after its own parts, and the object itself last.
        Chains may be too long for recursion."""
        return (x,)

    def make(self, values: Sequence[Any]) -> Any:
        if self._checks is None:
            self._checks = [checker(hint) for hint in hints_of(self.kind, self.fields)]
        if len(values) != len(self.fields) + len(self.after):
            raise Malformed(f"a {self.name} has {len(self.fields) + len(self.after)} fields, not {len(values)}")
        for name, fits, value in zip(self.fields, self._checks, values):
            if not fits(value):
                raise Malformed(f"{self.name}.{name} is not a {type(value).__name__}")
        made = self.new(*values[:len(self.fields)])
        for name, value in zip(self.after, values[len(self.fields):]):
            setattr(made, name, value)
        return made

    def new(self, *values: Any) -> Any:
        return self.kind(**dict(zip(self.fields, values)))


class Attributes(Record):
    """A class whose constructor takes exactly these attributes."""

    def __init__(self, kind: type, shared: bool = False, /, **fields: Any) -> None:
        self.kind, self.name, self.fields, self.instead, self.after = kind, kind.__name__, tuple(fields), {}, ()
        self.shared = shared
        self._checks = [checker(hint) for hint in fields.values()]


class Codec:
    def __init__(self, records: Iterable[Any], enums: Iterable[type[Enum]] = (), values: Mapping[str, Any] | None = None
                 ) -> None:
        """`values`: objects that are known by name, such as functions and types."""
        self.records = {r.kind: r for r in records}
        self.names = {r.name: r for r in self.records.values()}
        self.enums = {e.__name__: e for e in enums}
        self.values = dict(values or {})
        self.known = {id(x): name for name, x in self.values.items()}
        self.readers: dict[str, Callable[[list[Any], Reader, int], Any]] = {
            **READERS, **{name: partial(self._record, r) for name, r in self.names.items()}}

    def encode(self, x: Any) -> bytes:
        return Writer(self).whole(x)

    def decode(self, data: bytes) -> Any:
        try:
            return Reader(self, data).whole()
        except Malformed:
            raise
        except Exception as error:  # a constructor rejects the values
            raise Malformed(f"{type(error).__name__}: {error}") from error

    @staticmethod
    def _record(record: Record, items: list[Any], reader: Reader, depth: int) -> Any:
        return record.make(values(items, reader, depth))


# ---- to data -------------------------------------------------------------------------------------------


class Writer:
    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.tensors: dict[int, tuple[int, torch.Tensor, list[Any]]] = {}  # by identity
        self.storages: dict[int, tuple[int, str, bytes]] = {}
        self.places: dict[int, int] = {}  # index of each shared object, by identity
        self.shared: list[tuple[Any, Any]] = []  # shared objects, and their data

    def whole(self, x: Any) -> bytes:
        root = self.value(x, "", 0)
        if self.shared:
            root = ["shared", [data for _, data in self.shared], root]
        blobs = [data for _, _, data in self.storages.values()]
        storages = [[device, len(data)] for _, device, data in self.storages.values()]
        head = [VERSION, storages, [row for _, _, row in self.tensors.values()], root]
        return b"".join([json.dumps(head, separators=(",", ":")).encode(), b"\n", *blobs])

    def value(self, x: Any, way: str, depth: int) -> Any:
        kind = type(x)
        if kind in PLAIN:
            return x
        depth += 1
        if depth > DEPTH:
            raise Unwritable(f"{way} is too deep")
        if (known := self.codec.known.get(id(x))) is not None:
            return ["value", known]
        if (tag := SEQUENCES.get(kind)) is not None:
            items = sorted(x, key=repr) if tag in ("set", "frozenset") else x
            return [tag, *[self.value(y, f"{way}[{k}]", depth) for k, y in enumerate(items)]]
        if kind is dict:
            return ["dict", *[self.value(y, f"{way}[{k!r}]", depth) for k, v in x.items() for y in (k, v)]]
        if (record := self.codec.records.get(kind)) is not None:
            if not record.shared:
                return self.record(record, x, way, depth)
            if id(x) not in self.places:
                for part in record.parts(x):
                    if id(part) not in self.places:
                        data = self.record(record, part, way, 0)
                        self.places[id(part)] = len(self.shared)
                        self.shared.append((part, data))
            return ["ref", self.places[id(x)]]
        if isinstance(x, Enum) and self.codec.enums.get(kind.__name__) is kind:
            return ["enum", kind.__name__, x.name]
        if kind is torch.Tensor:
            return ["tensor", self.tensor(x, way)]
        if (scalar := SCALARS.get(kind)) is not None:
            return scalar(x)
        if is_operator(x):
            return ["operator", operator_path(x)]
        raise Unwritable(f"{way or 'it'} is a {kind.__module__}.{kind.__qualname__}")

    def record(self, r: Record, x: Any, way: str, depth: int) -> list[Any]:
        named = zip((*r.fields, *r.after), r.values(x), strict=True)
        return [r.name, *[self.value(y, f"{way}.{name}", depth) for name, y in named]]

    def tensor(self, t: torch.Tensor, way: str) -> int:
        if id(t) not in self.tensors:
            if t.layout is not torch.strided or t.is_quantized or t.is_conj() or t.is_neg() or t.requires_grad:
                raise Unwritable(f"{way} is not a plain tensor")
            storage = t.untyped_storage()
            if storage._cdata not in self.storages:
                data = bytes(torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage).cpu().numpy())
                self.storages[storage._cdata] = len(self.storages), str(t.device), data
            place = list(t.shape), list(t.stride()), t.storage_offset()
            self.tensors[id(t)] = len(self.tensors), t, [self.storages[storage._cdata][0], name_of(t.dtype), *place]
        return self.tensors[id(t)][0]


SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
SCALARS: dict[type, Callable[[Any], list[Any]]] = {
    float: lambda x: ["float", struct.pack(">d", x).hex()],
    complex: lambda x: ["complex", struct.pack(">dd", x.real, x.imag).hex()],
    bytes: lambda x: ["bytes", x.hex()],
    type(...): lambda x: ["ellipsis"],
    torch.device: lambda x: ["device", str(x)],
    **{kind: lambda x: [type(x).__name__, name_of(x)] for kind in TORCH},
}


def name_of(x: Any) -> str:
    return str(x).removeprefix("torch.")


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements in memory from a tensor's first element to its last, both included."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


# ---- from data -----------------------------------------------------------------------------------------


class Reader:
    def __init__(self, codec: Codec, data: bytes) -> None:
        self.codec, self.readers = codec, codec.readers
        head, _, self.blobs = data.partition(b"\n")
        found = json.loads(head)
        if type(found) is not list or found[:1] != [VERSION]:
            raise Malformed("it does not begin as such data does")
        _, storages, self.rows, self.root = found
        at = 0
        self.memory: list[torch.Tensor] = []
        for device, length in storages:
            self.memory.append(self.bytes(at, whole_number(length)).to(device_named(device)))
            at += length
        self.made: dict[int, torch.Tensor] = {}
        self.shared: list[Any] = []

    def whole(self) -> Any:
        root = self.root
        if type(root) is list and root[:1] == ["shared"]:
            _, objects, root = root
            for x in objects:
                self.shared.append(self.value(x, 0))
        return self.value(root, 0)

    def value(self, x: Any, depth: int) -> Any:
        kind = type(x)
        if kind in PLAIN:
            return x
        if kind is not list or not x or type(x[0]) is not str:
            raise Malformed(f"a {kind.__name__} stands where there should be a value")
        if depth >= DEPTH:
            raise Malformed("it is too deep")
        reader = self.readers.get(x[0])
        if reader is None:
            raise Malformed(f"{x[0][:80]!r} is not in the table of types")
        return reader(x, self, depth + 1)

    def bytes(self, at: int, length: int) -> torch.Tensor:
        data = bytearray(self.blobs[at:at + length])
        if len(data) != length:
            raise Malformed("bytes of a tensor are missing")
        empty = torch.empty(length, dtype=torch.uint8, device="cpu")  # aligned, unlike the array
        return empty.copy_(torch.frombuffer(data, dtype=torch.uint8)) if data else empty

    def tensor(self, k: Any) -> torch.Tensor:
        if k not in self.made:
            at, dtype, shape, strides, offset = self.rows[whole_number(k)]
            memory, kind = self.memory[whole_number(at)], entry(TORCH[torch.dtype], dtype)
            if min(whole_number(n) for n in (0, *shape, *strides, offset)) < 0:
                raise Malformed("a tensor has a negative size")
            if (offset + extent(shape, strides)) * kind.itemsize > len(memory):
                raise Malformed("a tensor is larger than its memory")
            self.made[k] = torch.empty(0, dtype=kind, device=memory.device).set_(
                memory.untyped_storage(), offset, shape, strides)
        return self.made[k]


def whole_number(x: Any) -> int:
    if type(x) is not int:
        raise Malformed(f"{x!r:.80} is not a whole number")
    return x


def text(x: Any) -> str:
    if type(x) is not str:
        raise Malformed(f"{x!r:.80} is not a text")
    return x


def operator_of(x: list[Any], reader: Reader, depth: int) -> Any:
    found = operator_named(text(x[1]))
    if not is_operator(found):
        raise Malformed(f"{x[1]} is no operator")
    return found


def shared_object(x: list[Any], reader: Reader, depth: int) -> Any:
    if whole_number(x[1]) < 0:
        raise Malformed("an object that does not stand before")
    return reader.shared[x[1]]


def device_named(x: Any) -> torch.device:
    return torch.device(text(x))


def entry(table: Mapping[str, Any], name: Any) -> Any:
    if text(name) not in table:
        raise Malformed(f"{name[:80]!r} is not in the table")
    return table[name]


def values(x: list[Any], reader: Reader, depth: int) -> list[Any]:
    value = reader.value
    return [y if type(y) in PLAIN else value(y, depth) for y in x[1:]]


def sizes(x: list[Any], reader: Reader, depth: int) -> torch.Size:
    return torch.Size([whole_number(n) for n in x[1:]])


def mapping(x: list[Any], reader: Reader, depth: int) -> dict[Any, Any]:
    if len(x) % 2 == 0:
        raise Malformed("a key has no value")
    items = values(x, reader, depth)
    return dict(zip(items[::2], items[1::2]))


def number(x: list[Any], reader: Reader, depth: int) -> float:
    _, digits = x
    found: float = struct.unpack(">d", bytes.fromhex(text(digits)))[0]
    return found


def complex_number(x: list[Any], reader: Reader, depth: int) -> complex:
    _, digits = x
    return complex(*struct.unpack(">dd", bytes.fromhex(text(digits))))


READERS: dict[str, Callable[[list[Any], Reader, int], Any]] = {
    "list": values,
    "tuple": lambda x, r, d: tuple(values(x, r, d)),
    "set": lambda x, r, d: set(values(x, r, d)),
    "frozenset": lambda x, r, d: frozenset(values(x, r, d)),
    "size": sizes,
    "dict": mapping,
    "float": number,
    "complex": complex_number,
    "bytes": lambda x, r, d: bytes.fromhex(text(x[1])),
    "ellipsis": lambda x, r, d: ...,
    "device": lambda x, r, d: device_named(x[1]),
    "tensor": lambda x, r, d: r.tensor(x[1]),
    "operator": operator_of,
    "ref": shared_object,
    "enum": lambda x, r, d: entry(entry(r.codec.enums, x[1]).__members__, x[2]),
    "value": lambda x, r, d: entry(r.codec.values, x[1]),
    "dtype": lambda x, r, d: entry(TORCH[torch.dtype], x[1]),
    "layout": lambda x, r, d: entry(TORCH[torch.layout], x[1]),
    "memory_format": lambda x, r, d: entry(TORCH[torch.memory_format], x[1]),
}


# ---- declared types ------------------------------------------------------------------------------------


def hints_of(kind: type, fields: Sequence[str]) -> list[Any]:
    """The declared types of a class's fields; Any for a type that is only imported for type checkers."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for name, hint in vars(base).get("__annotations__", {}).items():
            hint = getattr(hint, "__forward_arg__", hint)  # named tuples store a forward reference
            if name in fields:
                found[name] = hint_in(base.__module__, hint) if isinstance(hint, str) else hint
    return [found.get(name, Any) for name in fields]


@cache
def hint_in(module: str, hint: str) -> Any:
    try:
        return get_type_hints(types.SimpleNamespace(__annotations__={"hint": hint}), vars(sys.modules[module]))["hint"]
    except NameError:  # imported under TYPE_CHECKING
        return Any


def checker(hint: Any) -> Callable[[Any], bool]:
    """A function that says whether a value has a declared type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        several = [checker(a) for a in args]
        return lambda x: any(fits(x) for fits in several)
    if origin is tuple and (len(args) != 2 or args[1] is not ...):
        parts = [checker(a) for a in args]
        return lambda x: isinstance(x, tuple) and len(x) == len(parts) and all(f(y) for f, y in zip(parts, x))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = (checker(a) for a in args)
        return lambda x: isinstance(x, origin) and all(key(k) and item(v) for k, v in x.items())
    if isinstance(origin, type) and issubclass(origin, Iterable) and args:
        each = checker(args[0])
        if args[0] is int:
            return lambda x: isinstance(x, origin) and not isinstance(x, str) and all(type(y) is int for y in x)
        return lambda x: isinstance(x, origin) and not isinstance(x, str) and all(map(each, x))
    if hint is Any:
        return lambda x: True
    if hint is None or hint is type(None):
        return lambda x: x is None
    if hint is float:
        return lambda x: type(x) in (int, float)
    if hint is int:
        return lambda x: type(x) is int
    if isinstance(origin or hint, type):
        return lambda x: isinstance(x, origin or hint)
    return lambda x: True  # a type variable, a function

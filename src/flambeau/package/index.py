"""The index of a package: methods, inputs, outputs, weights, targets. Needs neither torch nor NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .client import DTYPES
from .container import DamagedPackage, Section, Words

ALSO = "also "  # before another name of a weight, in the metadata
ORDER = "order "  # before the name of a tensor, in the metadata of the section of weights: the memory order of its dims


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

    @property
    def type(self) -> str:
        return f"{self.dtype} {list(self.sizes)}"


@dataclass(frozen=True)
class Entry:
    """A method of the package."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True)
class Index:
    """The decoded index of a package."""

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

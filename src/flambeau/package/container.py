"""The file format of packages: a header, a table of sections, and sections aligned to 64 bytes.

    write("model.flam", [Section(INDEX, "index", data), ...])
    sections = read("model.flam")          # DamagedPackage unless every byte is what was written

docs/reference/package-format.md describes the layout. Needs neither torch nor NumPy, so a process without them can
read packages.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.errors import Error

MAGIC = b"FLAMBEAU"
MAJOR, MINOR = 1, 4
ALIGN = 64
INDEX, WEIGHTS, CODE, RUNTIME, PROGRAM, TEXT, DEVICE, SIGNATURE = range(1, 9)
KINDS = {INDEX: "index", WEIGHTS: "weights", CODE: "code", RUNTIME: "runtime", PROGRAM: "program", TEXT: "text",
         DEVICE: "code of a device", SIGNATURE: "signature"}

_HEADER = struct.Struct("<8sIIQQ32x32s32x")
_SECTION = struct.Struct("<QQQQ32s64s")
_COVERED = 64  # bytes of the header that its checksum covers
_SIGNATURE = 64  # bytes


class DamagedPackage(Error):
    """The file is not a package, or its content differs from what was written."""


class NewerPackage(Error):
    """The package has a newer format than this version reads."""


@dataclass(frozen=True)
class Section:
    kind: int
    name: str
    data: bytes | memoryview
    quick: int = 0  # the quick checksum


def write(path: str | os.PathLike[str], sections: Sequence[Section], quick: Callable[[Any], int],
          sign: Callable[[bytes], bytes] | None = None) -> str:
    """Writes a package atomically and returns the hash that names it. `quick` computes the quick checksum of bytes,
    `sign` the signature of a message."""
    found = [*sections, *([] if sign is None else [Section(SIGNATURE, "ed25519", bytes(_SIGNATURE))])]
    at, places = _HEADER.size + len(found) * _SECTION.size, []
    for s in found:
        places.append(-(-at // ALIGN) * ALIGN)
        at = places[-1] + len(s.data)
    head = _HEADER.pack(MAGIC, MAJOR, MINOR, at, len(found), b"")[:_COVERED]
    entries = [_entry(s, place, quick) for s, place in zip(found, places)]
    if sign is not None:
        found[-1] = Section(SIGNATURE, "ed25519", sign(_message(head, b"".join(entries))))
        entries[-1] = _entry(found[-1], places[-1], quick)
    table = b"".join(entries)
    name = _digest(head, table)
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.write(head + name + bytes(_HEADER.size - _COVERED - len(name)) + table)
            for s, place in zip(found, places):
                file.write(bytes(place - file.tell()))
                file.write(s.data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return name.hex()


def _entry(s: Section, at: int, quick: Callable[[Any], int]) -> bytes:
    return _SECTION.pack(s.kind, at, len(s.data), quick(s.data), hashlib.sha256(s.data).digest(), s.name.encode())


def _message(head: bytes, table: bytes) -> bytes:
    """The message that is signed: the hash of the file, computed with zeros for the checksums of the signature itself,
    which is the last section."""
    own = len(table) - _SECTION.size
    return MAGIC + _digest(head, table[:own + 24] + bytes(40) + table[own + 64:])


def _digest(head: bytes, table: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(head).digest() + hashlib.sha256(table).digest()).digest()


def read(path: str | os.PathLike[str], whole: bool = True,
         verify: Callable[[bytes, bytes | None], None] | None = None) -> list[Section]:
    """The sections of a package, as views of the mapped file. `whole`: check the SHA-256 of the weights too; the
    runtime's quick checksum takes less time, but does not detect deliberate changes. `verify` raises an error unless
    the signature belongs to the message; with it every section is checked."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise DamagedPackage(f"{os.fspath(path)} is empty")
        return parse(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), whole, verify)


def parse(data: memoryview, whole: bool = True,
          verify: Callable[[bytes, bytes | None], None] | None = None) -> list[Section]:
    if bytes(data[:8]) != MAGIC:
        raise DamagedPackage("this is no package of Flambeau's")
    if len(data) < _HEADER.size:
        raise DamagedPackage("the package is damaged: it ends too early")
    _, major, minor, size, count, digest = _HEADER.unpack_from(data)
    if major > MAJOR:
        raise NewerPackage(f"the package has format {major}.{minor}, and this version reads up to {MAJOR}",
                           hint="install a newer flambeau")
    if major < 1:
        raise DamagedPackage("the package is damaged: it has no version")
    if size != len(data):
        raise DamagedPackage(f"the package is damaged: it has {len(data)} bytes and should have {size}")
    if count > (len(data) - _HEADER.size) // _SECTION.size:
        raise DamagedPackage("the package is damaged: its table of sections is cut off")
    end = _HEADER.size + count * _SECTION.size
    table = bytes(data[_HEADER.size:end])
    if _digest(bytes(data[:_COVERED]), table) != digest or any(data[_COVERED + len(digest):_HEADER.size]):
        raise DamagedPackage("the package is damaged: the checksum of its table of sections is wrong")
    found = []
    for k, (kind, at, length, quick, sha, name) in enumerate(_SECTION.iter_unpack(table)):
        begin = -(-end // ALIGN) * ALIGN
        if at != begin or begin + length > len(data) or name[-1]:
            raise DamagedPackage(f"the package is damaged: section {k} is not where it should be")
        if any(data[end:begin]):
            raise DamagedPackage("the package is damaged: there is something between its sections")
        end = begin + length
        part = data[begin:end]
        shown = name.rstrip(b"\0").decode(errors="replace")
        if (whole or verify is not None or kind != WEIGHTS) and hashlib.sha256(part).digest() != sha:
            raise DamagedPackage(f"the package is damaged: the checksum of its section {shown!r} is wrong")
        found.append(Section(kind, shown, part, quick))
    if end != len(data):
        raise DamagedPackage("the package is damaged: there is something behind its sections")
    if verify is not None:
        signed = bool(found) and found[-1].kind == SIGNATURE and len(found[-1].data) == _SIGNATURE
        verify(_message(bytes(data[:_COVERED]), table) if signed else b"", bytes(found[-1].data) if signed else None)
    return found


def hash_of(path: str | os.PathLike[str]) -> str:
    """The hash that names a package and covers all of it."""
    with open(path, "rb") as file:
        head = file.read(_HEADER.size)
    return head[_COVERED:_COVERED + 32].hex()


# ---- words of the index -----------------------------------------------------------------------------------


def text_words(text: str) -> list[int]:
    data = text.encode()
    padded = data + bytes(8 - len(data) % 8)
    return [len(data), *struct.unpack(f"<{len(padded) // 8}q", padded)]


def packed(words: Iterable[int]) -> bytes:
    found = list(words)
    return struct.pack(f"<{len(found)}q", *found)


class Words:
    """Reads the 64-bit words of the index from front to back."""

    def __init__(self, data: bytes | memoryview) -> None:
        if len(data) % 8:
            raise DamagedPackage("the package is damaged: its index is cut off")
        self.words = struct.unpack(f"<{len(data) // 8}q", data)
        self.at = 0

    def take(self, count: int) -> tuple[int, ...]:
        if count < 0 or count > len(self.words) - self.at:
            raise DamagedPackage("the package is damaged: a count in its index is larger than the file")
        self.at += count
        return self.words[self.at - count:self.at]

    def one(self) -> int:
        return self.take(1)[0]

    def text(self) -> str:
        length = self.one()
        data = packed(self.take(length // 8 + 1)) if length >= 0 else b""
        if length < 0 or any(data[length:]):
            raise DamagedPackage("the package is damaged: a text in its index")
        return data[:length].decode(errors="replace")

    def each(self) -> Iterator[int]:
        """Reads a count and iterates that many times."""
        count = self.one()
        if not 0 <= count <= len(self.words) - self.at:
            raise DamagedPackage("the package is damaged: a count in its index is larger than the file")
        return iter(range(count))

    def end(self) -> None:
        if self.at != len(self.words):
            raise DamagedPackage("the package is damaged: there is something behind its index")

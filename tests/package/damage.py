"""A process that loads damaged and forged packages in Python: `damage.py model.flam 10000 SEED runtime.so`. The
runtime was built with AddressSanitizer, and replaces the one in the files.

A forger can compute checksums: for half of the files they are corrected, so that the content is examined. Machine code
is not changed in these files, since it runs with all rights of the process. Each file must be refused with an error of
Flambeau's. A forged file may be loaded instead, and must then keep to the shapes that it declares.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

import flambeau
from flambeau.package import client
from flambeau.package.arguments import NumPy, fill
from flambeau.package.container import CODE, INDEX, RUNTIME, read

HEADER, ENTRY = 128, 128
NUMBERS = (0, 1, 2, 63, 64, 255, 1 << 20, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 64,
           (1 << 64) - 1)


class File:
    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    @property
    def count(self) -> int:
        return min(self.word(24), max(0, len(self.data) - HEADER) // ENTRY)

    def word(self, at: int) -> int:
        found: int = struct.unpack_from("<Q", self.data, at)[0]
        return found

    def put(self, at: int, number: int) -> None:
        struct.pack_into("<Q", self.data, at, number % (1 << 64))

    def section(self, k: int) -> tuple[int, int, int]:
        """The kind, offset and size of a section."""
        at = HEADER + ENTRY * k
        return self.word(at), self.word(at + 8), self.word(at + 16)

    def seal(self, quick) -> None:
        """Corrects all checksums that can be computed."""
        if len(self.data) < HEADER:
            return
        self.put(16, len(self.data))
        for k in range(self.count):
            _, offset, size = self.section(k)
            if offset + size <= len(self.data):
                part, at = bytes(self.data[offset:offset + size]), HEADER + ENTRY * k
                self.put(at + 24, quick(part, len(part)))
                self.data[at + 32:at + 64] = hashlib.sha256(part).digest()
        table = bytes(self.data[HEADER:HEADER + ENTRY * self.count])
        whole = hashlib.sha256(bytes(self.data[:64])).digest() + hashlib.sha256(table).digest()
        self.data[64:96] = hashlib.sha256(whole).digest()


def odd(draw: random.Random, old: int) -> int:
    return draw.choice((old + draw.choice((-64, -8, -1, 1, 8, 64)), old ^ 1 << draw.randrange(64), *NUMBERS))


def cut(f: File, draw: random.Random) -> None:
    del f.data[draw.randrange(len(f.data)):]


def flip(f: File, draw: random.Random) -> None:
    f.data[draw.randrange(len(f.data))] ^= 1 << draw.randrange(8)


def run_of_bytes(f: File, draw: random.Random) -> None:
    """Removes, repeats or overwrites some bytes."""
    at, length = draw.randrange(len(f.data)), draw.randrange(1, 200)
    part = bytes(f.data[at:at + length])
    f.data[at:at + length] = draw.choice((b"", part * 2, bytes(len(part)), draw.randbytes(len(part))))


def header(f: File, draw: random.Random) -> None:
    at = draw.choice((8, 16, 24, 32, 96))
    f.put(at, odd(draw, f.word(at)))


def table(f: File, draw: random.Random) -> None:
    """Writes wrong sizes, and offsets past the end or into another section. Kinds are kept, as code would be run."""
    at = HEADER + ENTRY * draw.randrange(f.count) + draw.choice((8, 16))
    other = HEADER + ENTRY * draw.randrange(f.count) + draw.choice((8, 16))
    f.put(at, draw.choice((odd(draw, f.word(at)), f.word(other))))


def index(f: File, draw: random.Random) -> None:
    """Changes words of the index: counts, sizes, references forward and to themselves."""
    _, offset, size = next(f.section(k) for k in range(f.count) if f.section(k)[0] == INDEX)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at, other = (offset + 8 * draw.randrange(size // 8) for _ in range(2))
        f.put(at, draw.choice((odd(draw, f.word(at)), f.word(other), draw.randrange(64))))


def index_cut(f: File, draw: random.Random) -> None:
    """Removes some words of the index, so that later ones move; the following sections keep their places."""
    _, offset, size = next(f.section(k) for k in range(f.count) if f.section(k)[0] == INDEX)
    at, lost = 8 * draw.randrange(size // 8), 8 * draw.randrange(1, 4)
    part = bytes(f.data[offset:offset + size])
    f.data[offset:offset + size] = (part[:at] + part[at + lost:] + bytes(lost))[:size]


PLAIN, FORGED = (cut, flip, run_of_bytes), (header, table, index, index, index_cut)


def main(path: str, count: int, seed: int, runtime: str) -> None:
    draw, whole = random.Random(seed), Path(path).read_bytes()
    own = next(s.data for s in read(path) if s.kind == RUNTIME)
    client._LIBRARIES[hashlib.sha256(own).digest()] = ctypes.CDLL(runtime)
    library = client.runtime_library(own)
    code = {bytes(s.data) for s in read(path) if s.kind in (CODE, RUNTIME)}
    seen: Counter[str] = Counter()
    with tempfile.NamedTemporaryFile(suffix=".flam", dir="/dev/shm") as out:
        for k in range(count):
            f, kind = File(whole), (PLAIN, FORGED)[k % 2][k // 2 % (3 + k % 2 * 2)]
            kind(f, draw)
            if k % 2:
                f.seal(library.flam_hash)
            if bytes(f.data) == whole:
                seen["as it was"] += 1
                continue
            out.seek(0)
            out.truncate()
            out.write(f.data)
            out.flush()
            try:
                if k % 2 and any(bytes(s.data) not in code for s in read(out.name) if s.kind in (CODE, RUNTIME)):
                    seen["of other code"] += 1  # anyone who makes a file may put any code into it
                    continue
                module = flambeau.load(out.name)
                assert k % 2, f"seed {seed}, file {k}, {kind.__name__}: a damaged file was taken"
                for name in module.method_names:
                    method = module.load_method(name)
                    frame = method.frame()
                    for t, port in zip(frame.given, method.entry.inputs, strict=True):
                        x = np.ones([max(0, min(max(4, lo), hi, 64)) for lo, hi in port.ranges], port.dtype)
                        fill(t, x, port)
                    frame.learn((), NumPy())
                module.unload()
                seen["taken"] += 1
            except flambeau.Error as error:
                seen["refused"] += 1
                assert str(error)
            except MemoryError:
                seen["too large"] += 1
            except BaseException:
                print(f"seed {seed}, file {k}, {kind.__name__}", flush=True)
                raise
    print(sum(seen.values()), "files", dict(seen), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

"""Encodes a Program for the C runtime: how to compute sizes, where buffers are, what to launch.

Every number of a run (a size, an offset, a scale) is computed from earlier ones by one operation. So the runtime
interprets no nested expressions, and a file cannot contain a cycle. The words are in the order of `program` in
runtime/internal.h.
"""

from __future__ import annotations

import ast
import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flambeau.errors import UnsupportedError
from flambeau.ir.faults import MESSAGES, WRAPPED, Fault
from flambeau.ir.index import Index, Op, Sym, as_index, maximum, minimum
from flambeau.ir.nodes import Buffer, Value, contiguous_strides
from flambeau.ir.program import BufferPlan, Call, Copy, Launch, Program, TableKernel, sites_of
from flambeau.runtime.launch_plan import Held
from flambeau.runtime.operator_calls import read_here
from flambeau.schedule.memory import lifetimes
from flambeau.schedule.plan import strided
from flambeau.schedule.streams.order import is_single
from flambeau.torch_compat.ops import OpOverload

from .container import text_words
from .device_code import DeviceKernel

OPS = {name: k for k, name in enumerate((
    "const", "size", "stride", "add", "sub", "mul", "div", "mod", "min", "max",
    "float", "fadd", "fsub", "fmul", "fdiv", "sqrt", "units"))}
INPUT, WEIGHT, STATE, OUTPUT, TEMPORARY, SEED = range(6)
LAUNCH, COPY, DEVICE_LAUNCH, CALL = range(4)
DTYPES = {dtype: k for k, dtype in enumerate((
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64), 1)}
MOST_RANK = 16

FOLDED: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "div", ast.Mod: "mod", ast.Div: "fdiv"}


@dataclass(frozen=True)
class Role:
    """The role of a program's argument: an input of the method, or a weight."""

    place: int
    which: int


def fault_texts() -> list[str]:
    """The messages of faults by kind. The first character tells the runtime how to decode the index to show."""
    out = [""] * (max(MESSAGES) + 1)
    for fault, (_, text) in MESSAGES.items():
        out[fault] = ("-" if fault in WRAPPED else "~" if fault is Fault.VALUES else " ") + text
    return out


class Numbers:
    """The numbers that the runtime computes for a call, without duplicates."""

    def __init__(self, p: Program, positions: dict[str, int]) -> None:
        self.words: dict[tuple[int, int, int], int] = {}
        self.hosts = {s.name: h for s, h in p.numbers}
        self.makers = {name: str(x.target) for x in p.steps if isinstance(x, Call) for name in x.names}
        self.positions = positions  # of the inputs, by the names of their buffers
        self.known: dict[str, int] = {}
        self.sizes: dict[str, int] = {}  # n0, n1, ... of the kernel whose expressions are being parsed

    def add(self, op: str, a: int = 0, b: int = 0) -> int:
        return self.words.setdefault((OPS[op], a, b), len(self.words))

    def constant(self, value: int) -> int:
        return self.add("const", value)

    def index(self, i: Index) -> int:
        total = self.constant(i.const) if i.const or not i.terms else None
        for mono, coef in i.terms:
            product = self.constant(coef) if coef != 1 else None
            for atom in mono:
                factor = self.atom(atom)
                product = factor if product is None else self.add("mul", product, factor)
            assert product is not None
            total = product if total is None else self.add("add", total, product)
        assert total is not None
        return total

    def atom(self, atom: Any) -> int:
        if isinstance(atom, Op):
            return self.add(atom.kind, self.index(atom.a), self.index(atom.b))
        if isinstance(atom, Sym) and atom.extent is None:
            return self.named(atom.name)
        raise UnsupportedError(f"the number {atom} is not known before a launch, and a package needs it")

    def named(self, name: str) -> int:
        if name not in self.known:
            if name not in self.hosts:
                raise UnsupportedError(f"the number {name} does not follow from the sizes of the inputs")
            self.known[name] = -1
            found, _ = self.parsed(ast.parse(self.hosts[name].text, mode="eval").body)
            self.known[name] = found
        if self.known[name] < 0:
            raise UnsupportedError(f"the number {name} follows from itself")
        return self.known[name]

    def text(self, text: str, sizes: Sequence[int]) -> int:
        """The number of a Python expression over the sizes n0, n1, ... of a kernel and `units`, a device's cores."""
        self.sizes = {f"n{k}": n for k, n in enumerate(sizes)}
        try:
            return self.parsed(ast.parse(text, mode="eval").body)[0]
        finally:
            self.sizes = {}

    def parsed(self, e: ast.expr) -> tuple[int, bool]:
        """The number for a Python expression, with Python's result, and whether it is a double."""
        match e:
            case ast.Name(id=name) if name in self.sizes:
                return self.sizes[name], False
            case ast.Name(id="units"):
                return self.add("units"), False
            case ast.Compare(left=a, ops=[ast.Lt() | ast.LtE() as op], comparators=[b]):
                # 1 if the comparison holds, otherwise 0.
                more = self.binary("sub", self.parsed(b), self.parsed(a))[0]
                more = more if isinstance(op, ast.Lt) else self.add("add", more, self.constant(1))
                return self.add("max", self.constant(0), self.add("min", self.constant(1), more)), False
            case ast.BoolOp(op=ast.And(), values=[first, *others]):
                holds = self.parsed(first)[0]
                for other in others:
                    holds = self.add("min", holds, self.parsed(other)[0])
                return holds, False
            case ast.Constant(value=int(value)):
                return self.constant(int(value)), False
            case ast.Constant(value=float(value)):
                return self.constant(struct.unpack("<q", struct.pack("<d", value))[0]), True
            case ast.Name(id=name):
                return self.named(name), False
            case ast.UnaryOp(op=ast.USub(), operand=x):
                return self.binary("sub", (self.constant(0), False), self.parsed(x))
            case ast.BinOp(left=a, op=op, right=b) if type(op) in FOLDED:
                return self.binary(FOLDED[type(op)], self.parsed(a), self.parsed(b))
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=k)):
                return self.add("size", self.position(name), int(k)), False  # type: ignore[arg-type]
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="stride"), args=[ast.Constant(value=k)]):
                return self.add("stride", self.position(name), int(k)), False  # type: ignore[arg-type]
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=[first, *others]):
                found = self.parsed(first)
                for other in others:
                    found = self.binary(name, found, self.parsed(other))
                return found
            case ast.Call(func=ast.Name(id="word" | "float") | ast.Attribute(attr="sym_float"), args=[x]):
                return self.real(self.parsed(x)), True
            case ast.BinOp(left=x, op=ast.Pow(), right=ast.UnaryOp(op=ast.USub(), operand=power)):
                return self.binary("fdiv", (self.constant(1), False), self.parsed(ast.BinOp(x, ast.Pow(), power)))
            case ast.BinOp(left=x, op=ast.Pow(), right=ast.Constant(value=0.5)):
                return self.add("sqrt", self.real(self.parsed(x))), True
            case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr="sqrt"), args=[x]):
                return self.add("sqrt", self.real(self.parsed(x))), True
        raise UnsupportedError(f"a package cannot find the number {ast.unparse(e)}")

    def position(self, name: str) -> int:
        if name not in self.positions:
            made_by = self.makers.get(name, name)
            raise UnsupportedError(f"the size of the result of {made_by} depends on data, and is not "
                                   "known before a call")
        return self.positions[name]

    def real(self, x: tuple[int, bool]) -> int:
        return x[0] if x[1] else self.add("float", x[0])

    def binary(self, op: str, a: tuple[int, bool], b: tuple[int, bool]) -> tuple[int, bool]:
        if op == "fdiv" or (op in ("add", "sub", "mul") and (a[1] or b[1])):
            return self.add(f"f{op.removeprefix('f')}", self.real(a), self.real(b)), True
        if a[1] or b[1]:
            raise UnsupportedError(f"a package cannot find {op} of doubles")
        return self.add(op, a[0], b[0]), False

    def encoded(self) -> list[int]:
        return [len(self.words), *(x for entry in self.words for x in entry)]


def root(p: Program, name: str) -> str:
    """The buffer that owns the memory of `name`."""
    while (b := p.places[name]).place == "over":
        name = b.over
    return name


def layout(p: Program, v: Value) -> tuple[tuple[Index, ...], Index]:
    b = p.places[v.buffer]
    found = strided(v, Buffer(b.name, b.shape, b.dtype, b.strides))
    assert found is not None, f"{v} is not a strided view"
    return found


def direct_outputs(p: Program) -> dict[int, str]:
    """The results that cover a whole buffer of their own, by position: kernels write them directly. The other results
    are copied at the end."""
    found: dict[int, str] = {}
    for k, v in enumerate(p.outputs):
        name = root(p, v.buffer) if isinstance(v, Value) else ""
        if not name or p.places[name].place not in ("output", "arena", "alloc") or name in found.values():
            continue
        b = p.places[name]
        strides, offset = layout(p, v)
        unchanged = v.shape == b.shape and all(
            s is t or n.at_most_one() for s, t, n in zip(strides, b.strides, b.shape, strict=True))
        whole = unchanged or is_dense(v.shape, strides) and is_dense(b.shape, b.strides) and (
            numel(v.shape) == numel(b.shape))
        if whole and offset is as_index(0) and (v.buffer == name or p.places[v.buffer].shape == b.shape):
            found[k] = name
    return found


def numel(shape: Sequence[Index]) -> Index:
    return math.prod(shape, start=as_index(1))


def is_dense(shape: Sequence[Index], strides: Sequence[Index]) -> bool:
    """Whether the memory has no gaps and no overlaps, in any order of its dimensions."""
    step, left = as_index(1), [(s, n) for s, n in zip(strides, shape, strict=True) if n != as_index(1)]
    while left:
        found = next((k for k, (s, _) in enumerate(left) if s == step), None)
        if found is None:
            return False
        step = step * left.pop(found)[1]
    return True


class Plan:
    """Encodes one program as words. `roles`: the roles of its arguments. `kernels`: for each of its kernels the entry
    in the machine code, or the launches on a device. `held`: adds a constant of the graph to the weights and returns
    its position there."""

    def __init__(self, p: Program, roles: Sequence[Role], kernels: Sequence[int | DeviceKernel],
                 held: Callable[[torch.Tensor], int]) -> None:
        self.p, self.kernels, self.held = p, kernels, held
        self.roles = dict(zip(p.arguments, roles, strict=True))
        self.numbers = Numbers(p, {n: r.which for n, r in self.roles.items() if r.place == INPUT})
        self.buffers: list[list[int]] = []
        self.place: dict[str, int] = {}
        self.lives = lifetimes(p)
        self.constants: dict[str, int] = {}
        self.outputs: list[Value] = [self.result(o) for o in p.outputs]
        self.direct = direct_outputs(p)
        self.steps: list[list[int]] = []
        self.write()

    @staticmethod
    def result(o: Any) -> Value:
        if not isinstance(o, Value):
            raise UnsupportedError(f"a result of the method is {o!r}, and packages return tensors alone")
        return o

    # ---- memory ----------------------------------------------------------------------------------------

    def bytes_of(self, shape: Sequence[Index], strides: Sequence[Index], dtype: torch.dtype) -> int:
        top = as_index(1)
        for n, s in zip(shape, strides, strict=True):
            top = top + (n - 1) * s
        some = self.numbers.index(top * dtype.itemsize)
        if all(n.is_const and n.const > 0 for n in shape):
            return some
        # A tensor without elements takes no memory, whatever its other sizes are.
        any_ = self.numbers.index(minimum(maximum(numel(shape), as_index(0)), as_index(1)))
        return self.numbers.add("mul", any_, self.numbers.add("max", some, self.numbers.constant(0)))

    def out_strides(self, k: int) -> Sequence[Index]:
        v = self.outputs[k]
        if k in self.direct:
            b = self.p.places[self.direct[k]]
            return b.strides if v.shape == b.shape else layout(self.p, v)[0]
        strides = v.strides or layout(self.p, v)[0]
        # Dense views keep their memory order; expanded ones and those with gaps become contiguous.
        return strides if is_dense(v.shape, strides) else contiguous_strides(v.shape)

    def add_buffer(self, place: int, which: int, nbytes: int, life: tuple[int, int] = (0, 0)) -> int:
        self.buffers.append([place, which, nbytes, *life])
        return len(self.buffers) - 1

    def buffer(self, name: str) -> int:
        name = root(self.p, name)
        if name not in self.place:
            self.place[name] = self.placed(self.p.places[name])
        return self.place[name]

    def placed(self, b: BufferPlan) -> int:
        nothing = self.numbers.constant(0)
        for k, name in self.direct.items():
            if name == b.name:
                return self.add_buffer(OUTPUT, k, nothing)
        if b.name in self.roles:
            role = self.roles[b.name]
            return self.add_buffer(role.place, role.which, nothing)
        if b.name in self.constants:
            return self.add_buffer(WEIGHT, self.constants[b.name], nothing)
        if b.place == "seed":
            return self.add_buffer(SEED, [s for s in self.p.seeds if s in self.p.places].index(b.name), nothing)
        assert b.place in ("arena", "alloc", "output", "extern"), f"{b} has no place in a package"
        names = [x.name for x in self.p.buffers if root(self.p, x.name) == b.name and x.name in self.lives]
        first = min((self.lives[n][0] for n in names), default=0)
        last = max((self.lives[n][1] for n in names), default=len(self.p.steps))
        return self.add_buffer(TEMPORARY, 0, self.bytes_of(b.shape, b.strides, b.dtype), (first, last))

    # ---- steps -----------------------------------------------------------------------------------------

    def write(self) -> None:
        if not is_single(self.p):
            raise UnsupportedError("a function that uses streams", hint="a package runs on the stream of its caller")
        for step in self.p.steps:
            if isinstance(step, Call) and isinstance(step.target, Held):
                self.constants[step.names[0]] = self.held(step.target.tensor)
        for step in self.p.steps:
            if isinstance(step, Launch):
                self.launch(step)
            elif isinstance(step, Call) and not isinstance(step.target, Held):
                self.call(step)
            elif isinstance(step, Copy):
                b = self.p.places[step.dst]
                self.copy(self.buffer(step.dst), self.numbers.constant(0), b.strides, step.src, "copy_")
        for k, v in enumerate(self.outputs):
            if k not in self.direct:
                to = self.add_buffer(OUTPUT, k, self.numbers.constant(0))
                self.copy(to, self.numbers.constant(0), self.out_strides(k), v, "result")

    def call(self, c: Call) -> None:
        """Encodes a call of a torch operator. Its arguments are JSON that refers to tensors and run-time numbers by
        their positions (torch_calls.py)."""
        tensors: list[list[int]] = []
        sizes: list[int] = []

        def tensor(v: Value | BufferPlan) -> dict[str, int]:
            name, (strides, offset) = (v.buffer, layout(self.p, v)) if isinstance(v, Value) else (
                v.name, (v.strides, as_index(0)))
            tensors.append([self.buffer(name), self.numbers.index(offset * v.dtype.itemsize), DTYPES[v.dtype],
                            len(v.shape), *map(self.numbers.index, (*v.shape, *strides))])
            return {"tensor": len(tensors) - 1}

        def plain(x: Any, kind: str) -> Any:
            if isinstance(x, Value) and not x.number:
                return tensor(x)
            if isinstance(x, str) and "Tensor" in kind:  # a buffer that is written to
                return tensor(self.p.places[x])
            if isinstance(x, Index) and not x.is_const:
                sizes.append(self.numbers.index(x))
                return {"number": len(sizes) - 1}
            if isinstance(x, list | tuple):
                return [plain(y, kind) for y in x]
            if isinstance(x, float):
                return {"float": x.hex()}
            if isinstance(x, torch.dtype | torch.layout | torch.memory_format | torch.device):
                return {"torch": str(x)}
            if x is None or isinstance(x, bool | int | str | Index):
                return x.const if isinstance(x, Index) else x
            raise UnsupportedError(f"{c.target} with {x!r} cannot be called out of a package")

        kinds = {a.name: str(a.type) for a in c.target._schema.arguments}
        args = [plain(x, kind) for x, kind in zip(c.args, kinds.values())]
        named = {k: plain(x, kinds[k]) for k, x in c.kwargs}
        for name in c.names:
            tensor(self.p.places[name])
        text = json.dumps({"operator": str(c.target), "args": args, "kwargs": named,
                           "results": c.outputs if c.names else []})
        self.steps.append([CALL, *text_words(c.origin), *text_words(text), len(tensors),
                           *(x for t in tensors for x in t), len(c.names), len(sizes), *sizes])

    def launch(self, s: Launch) -> None:
        kernel, numbers, entry = self.p.kernels[s.kernel], self.numbers, self.kernels[s.kernel]
        if isinstance(kernel, TableKernel):
            raise UnsupportedError("a launch along a table of tensors")
        places = [(self.buffer(name), numbers.constant(0)) for name in s.args]
        sizes = [numbers.named(n.name) for n in kernel.sizes]
        sites = [(code, numbers.index(b.size) if self.is_known(b.size) else -1) for b, code in sites_of(kernel).items()]
        given = [len(sizes), *sizes, len(sites), *(x for site in sites for x in site)]
        origin = text_words(", ".join(s.origins))
        if isinstance(entry, int):
            self.steps.append([LAUNCH, *origin, entry, len(places), *(x for place in places for x in place), *given])
            return
        pointers = [x for place, size in zip(places, entry.itemsizes, strict=True) for x in (*place, size)]
        work = numbers.text(entry.workspace, sizes) if entry.workspace else -1
        words = [DEVICE_LAUNCH, *origin, len(places), *pointers, *given, int(entry.checks), work, len(entry.choices)]
        for choice in entry.choices:
            words += [numbers.text(choice.condition, sizes) if choice.condition else -1, len(choice.parts)]
            words += [x for function, groups in choice.parts
                      for x in (function, *(numbers.text(g, sizes) for g in groups))]
        self.steps.append(words)

    def is_known(self, i: Index) -> bool:
        return all(s.extent is None and s.name in self.numbers.hosts for s in i.symbols()) and all(
            isinstance(a, Sym | Op) for a in i.atoms())

    def copy(self, to: int, at: int, strides: Sequence[Index], v: Value, origin: str) -> None:
        numbers = self.numbers
        from_strides, offset = layout(self.p, v)
        if len(v.shape) > MOST_RANK:
            raise UnsupportedError(f"a tensor of {len(v.shape)} dimensions, and packages have up to {MOST_RANK}")
        self.steps.append([COPY, *text_words(origin), to, at, self.buffer(v.buffer),
                           numbers.index(offset * v.dtype.itemsize), v.dtype.itemsize, len(v.shape),
                           *map(numbers.index, (*v.shape, *strides, *from_strides))])

    # ---- all of it -------------------------------------------------------------------------------------

    def encoded(self, inputs: Sequence[BufferPlan]) -> list[int]:
        """All words of the program. `inputs`: the buffers of the method's inputs, in order."""
        ports: list[int] = []
        for b in inputs:
            which = self.roles[b.name].which
            for k, n in enumerate(b.shape):
                found = self.numbers.index(n)
                # A size that other numbers are computed from need not be checked against itself.
                ports.append(-1 if found == self.numbers.add("size", which, k) else found)
            for k, s in enumerate(b.strides):
                found = self.numbers.index(s)
                ports.append(-1 if found == self.numbers.add("stride", which, k) else found)
        for k, v in enumerate(self.outputs):
            ports += map(self.numbers.index, (*v.shape, *self.out_strides(k)))
        return [*self.numbers.encoded(), *ports, len(self.buffers), *(x for b in self.buffers for x in b),
                len(self.steps), *(x for s in self.steps for x in s)]


def missing_operators(p: Program, torch_too: bool) -> tuple[list[str], list[str]]:
    """The operators of a program without a kernel of ours, as two lists without duplicates: those that a package cannot
    contain, and those that it leaves to torch."""
    calls = [s for s in p.steps if isinstance(s, Call) and not isinstance(s.target, Held)]
    left = {str(s.target) for s in calls if torch_too and isinstance(s.target, OpOverload)
            and all(p.places[n].dtype in DTYPES for n in s.names if n in p.places)}
    names = {".item()" if s.target is read_here else str(s.target) for s in calls}
    return sorted(names - left), sorted(left)

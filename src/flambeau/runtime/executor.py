"""The executor: turns a Program into a LaunchPlan, a function that launches kernels and makes calls.

The function is written once, as straight-line Python source, so nothing is interpreted at run time. Adjacent launches
become one native plan over a table of pointers. Intermediates of known size live in an arena, which each run has to
itself while it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from flambeau.codegen.source import host_text
from flambeau.ir.index import Index
from flambeau.ir.nodes import Buffer, Host, Value
from flambeau.ir.program import (
    WORK,
    BufferPlan,
    Call,
    Copy,
    Keep,
    Launch,
    Program,
    Record,
    StreamNumbers,
    Synchronize,
    TableKernel,
    Wait,
)
from flambeau.ir.program import Step as ProgramStep
from flambeau.schedule.memory import lifetimes, nbytes, span
from flambeau.schedule.plan import strided
from flambeau.schedule.streams.order import is_single
from flambeau.targets.base import Run, Source, Target, get_target
from flambeau.torch_compat.ops import OpOverload

from .address_tables import Column, Table, counts_of, sizes_of
from .launch_plan import LaunchPlan, Step, View
from .operator_calls import TENSOR, Prepared, Strided, by_schema, is_constant, operator_path
from .result_checks import Promises
from .traffic import moved

LARGE = 16 << 20  # bytes: a target is notified of new allocations of at least this size
HEAVY = 1 << 20  # bytes: split a plan to free such a buffer before the next such allocation


@dataclass(frozen=True)
class Known:
    """The facts that are known once for many similar calls, and not passed with each call."""

    names: frozenset[str]  # names of the numbers that are known
    arguments: int  # how many leading arguments each call passes
    layout: bool  # shape and strides of the results are known; each is a whole buffer with that many elements


def write(p: Program, target: str, kernels: Sequence[Source], device: torch.device | None = None,
          promises: Promises | None = None, known: Known | None = None) -> LaunchPlan:
    """The package of a program, given the source text of its kernels. It runs on `device` (default: CPU) and checks its
    results against `promises`. `known`: what is passed once (`LaunchPlan.maker`), and not with every call."""
    w = Writer(p, [k.bounded for k in kernels], promises, get_target(target).addresses, known)
    over = {b.over for b in p.buffers if b.over}
    return LaunchPlan(target, w.source(), tuple(kernels), w.plans, w.constants, tuple(w.views),
                      w.tables, w.calls, len(w.slots) + 1, device or torch.device("cpu"),
                      overwritten=tuple(at for at, name in enumerate(p.arguments) if name in over))


def executable(p: Program, target: Target, device: torch.device) -> Run:
    """The run function of a program. Raises CompileError if one of its kernels does not build."""
    with target.on(device):
        sources = target.named(p.kernels, [target.render(k, f"k{i}") for i, k in enumerate(p.kernels)])
    return write(p, target.name, sources, device).load()


class Writer:
    """Writes the source of a program's run function, and the tables of objects that the source refers to."""

    def __init__(self, p: Program, bounded: Sequence[bool] = (), promises: Promises | None = None,
                 addresses: bool = True, known: Known | None = None) -> None:
        self.p, self.buffers = p, p.places
        self.addresses = addresses  # whether launches take addresses, instead of tensors
        self.promises = promises
        self.bounded = bounded  # which kernels take the extents of their buffers, after the sizes
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.plans: dict[str, tuple[Step, ...]] = {}
        self.views: list[View] = []
        self.tables: dict[str, tuple[Table, ...]] = {}
        self.along: dict[tuple[int, int], Table] = {}  # tables not yet written, by their two slots
        self.lists: dict[str, int] = {}  # the lists that these tables are filled from
        self.calls: dict[str, Prepared] = {}
        self.slots: dict[str, int] = {}
        self.variables: set[str] = set()
        self.given = known
        self.fixed = {s for s, _ in p.numbers if known is not None and s.name in known.names}
        self.bound: dict[str, str] = {}  # texts that depend on fixed numbers only, and their names
        self.unknown = {s: host for s, host in p.numbers if s not in self.fixed}  # numbers not yet defined
        self.there: set[str] = set()

    def line(self, text: str) -> None:
        self.lines.append("    " + text)

    # ---- texts ---------------------------------------------------------------------------------------

    def const(self, x: Any, prefix: str = "c") -> str:
        return self.named(self.constants, prefix, x)

    @staticmethod
    def named(table: dict[str, Any], prefix: str, x: Any) -> str:
        name = f"{prefix}{len(table)}"
        table[name] = x
        return name

    def shape(self, sizes: tuple[Index, ...]) -> str:
        if all(s.is_const for s in sizes):
            return self.const(tuple(s.const for s in sizes), "k")
        text = "(" + "".join(host_text(s) + ", " for s in sizes) + ")"
        return self.once(text) if self.given and all(s.symbols() <= self.fixed for s in sizes) else text

    def once(self, text: str) -> str:
        return self.bound.setdefault(text, f"o{len(self.bound)}")

    def slot(self, name: str) -> int:
        return self.slots.setdefault(name, len(self.slots) + 1)  # slot 0 is the arena

    def tensor(self, name: str) -> str:
        """A variable that holds buffer `name` as a tensor."""
        b = self.buffers[name]
        if b.place != "arena":
            return name
        if name not in self.variables:
            shape, strides = (tuple(s.const for s in x) for x in (b.shape, b.strides))
            self.line(f"{name} = views[{len(self.views)}]")
            self.views.append(View(b.offset, b.dtype, shape, strides))
            self.variables.add(name)
        return name

    def view(self, v: Value) -> tuple[tuple[Index, ...], Index, bool] | None:
        """Strides and offset of a value; None if it is its whole buffer. The flag says whether the offset counts from
        the buffer's tensor, which may begin inside its storage."""
        b = self.buffers[v.buffer]
        got = strided(v, Buffer(b.name, b.shape, b.dtype, b.strides))
        assert got is not None, f"{v} is not a strided view"
        strides, offset = got
        same = v.shape == b.shape and all(
            s is t or n.at_most_one() for s, t, n in zip(strides, b.strides, b.shape, strict=True))
        if v.strides is not None:
            strides, same = v.strides, same and v.strides == b.strides
        if v.offset is not None:
            offset = v.offset
        if same and offset.is_const and offset.const == 0:
            return None
        return strides, offset, b.place in ("input", "arena", "extern", "over")

    def value(self, v: Value) -> str:
        """A tensor expression for a value: the buffer, or a strided view of it."""
        base, view = self.tensor(v.buffer), self.view(v)
        if view is None:
            return base
        strides, offset, within = view
        at = host_text(offset) + (f" + {base}.storage_offset()" if within else "")
        return f"{base}.as_strided({self.shape(v.shape)}, {self.shape(strides)}, {at})"

    def permuted(self, v: Value, strides: tuple[Index, ...], offset: Index) -> str | None:
        """A tensor expression for a value that is its whole buffer with the dimensions in another order."""
        b = self.buffers[v.buffer]
        there, order = [*zip(b.shape, b.strides, strict=True)], list[int]()
        for dim in zip(v.shape, strides, strict=True):
            found = next((k for k, other in enumerate(there) if other == dim and k not in order), None)
            if found is None:
                return None
            order.append(found)
        whole = len(order) == len(there) and offset.is_const and offset.const == 0
        return f"{self.tensor(v.buffer)}.permute({', '.join(map(str, order))})" if whole else None

    def results(self) -> list[str]:
        """Expressions for the results. A value returned twice is one object; two values in one place are two."""
        values = [o for o in self.p.outputs if isinstance(o, Value)]
        named: dict[Value, str] = {}
        for o, times in Counter(values).items():
            named[o] = self.argument(o) + (".detach()" if o.twin else "")
            if self.given is not None and self.given.layout and not self.is_result(o.buffer):
                named[o] += ".as_strided(shape, strides)"
            if times > 1 and not named[o].isidentifier():
                self.line(f"r{len(named)} = {named[o]}")
                named[o] = f"r{len(named)}"
        return [named[o] if isinstance(o, Value) else self.argument(o) for o in self.p.outputs]

    def argument(self, x: Any) -> str:
        if isinstance(x, Value):
            return self.value(x)
        if isinstance(x, Index):
            return host_text(x)
        if isinstance(x, Host):
            return f"({x.text})"
        if isinstance(x, StreamNumbers):
            return f"stream_numbers({', '.join(f's{k}' for k in x.streams)})"
        if isinstance(x, tuple):
            inside = "".join(self.argument(y) + ", " for y in x)
            return f"({inside})"
        if x is None or isinstance(x, (bool, int)):
            return repr(x)
        return self.const(x)

    # ---- the function ----------------------------------------------------------------------------------

    def source(self) -> str:
        p = self.p
        arguments = p.arguments if self.given is None else p.arguments[:self.given.arguments]
        self.there.update(s.name for s in self.fixed)
        self.line(f"{''.join(n + ', ' for n in arguments)} = args" if arguments else "pass")
        self.line("args.clear()")
        self.find_numbers(arguments)
        if self.promises is not None:
            self.line(f"held = ({''.join(name + ', ' for name in p.inputs)})")
        self.line("P = PROTO.copy()")
        arena, streams = p.arena_bytes > 0, not is_single(p)
        if streams:
            self.line("s0 = current_stream(DEVICE)")
            for k, place in enumerate(p.streams, 1):
                self.line(f"s{k} = " + (f"own_stream({-place}, s0)" if place < 0 else
                                        f"numbered_stream({p.ticket}, {place}, DEVICE)" if p.ticket else
                                        f"caller_stream({place}, DEVICE)"))
        if arena:
            self.line(f"arena = POOL.take(TARGET, DEVICE, {p.arena_bytes})")
        if arena or streams:
            self.line("try:")
        if arena:
            self.line(f"P[0] = arena.{'pointer' if self.addresses else 'memory'}")
            self.line("views = arena.tensors.get(KEY)")
            self.line("if views is None: views = arena.tensors[KEY] = make_views(arena)")
        self.seeds([name for name in p.seeds if name in self.buffers])
        launched = {a for s in p.steps if isinstance(s, Launch) for a in s.args}
        for b in p.buffers:
            if b.place == "input" and b.name in launched:
                self.place(b.name)
        self.steps(launched)
        outs = f"[{''.join(o + ', ' for o in self.results())}]"
        self.line(f"return {outs if self.promises is None else self.compared(self.promises, outs)}")
        if arena or streams:
            head = self.lines.index("    try:") + 1
            self.lines[head:] = ["    " + x for x in self.lines[head:]]
            self.lines += ["    finally:", *["        set_stream(s0)"] * streams, *["        POOL.give(arena)"] * arena]
        run = ["def run(args):", *self.lines]
        if self.given is not None:
            numbers = [f"{s.name} = sizes['{s.name}']" for s in sorted(self.fixed, key=lambda s: s.name)]
            inside = [*numbers, *(f"{name} = {text}" for text, name in self.bound.items()), *run, "return run"]
            run = ["def at(sizes, shape, strides):", *("    " + line for line in inside)]
        return "\n".join(run)

    def compared(self, m: Promises, outs: str) -> str:
        """An expression that checks the results against what torch was promised, and returns them."""
        over = {b.over for b in self.p.buffers}
        donated = self.const(tuple(k for k, name in enumerate(self.p.inputs) if name in over))
        strides = "".join(("None" if s is None else self.shape(s)) + ", " for s in m.strides)
        return f"kept({outs}, held, ({strides}), {self.const(m.results)}, {self.const(m.inputs)}, {donated})"

    def seeds(self, names: Sequence[str]) -> None:
        """Draw all seeds in one call of torch's generator for the device, 16 bytes apart, as kernels may assume."""
        if names:
            self.line(f"seeds = draw_seeds({len(names)}, DEVICE)")
        for k, name in enumerate(names):
            where = f"seeds.data_ptr() + {16 * k}" if self.addresses else f"seeds[{k}:]"
            self.line(f"P[{self.slot(name)}] = {where}")

    def place(self, name: str) -> None:
        """Write a tensor's entry in the pointer table."""
        self.line(f"P[{self.slot(name)}] = {name}" + (".data_ptr()" if self.addresses else ""))

    def find_numbers(self, ready: Sequence[str]) -> None:
        """Define all numbers that can be computed from what is available now."""
        self.there.update(ready)
        while found := [s for s, h in self.unknown.items() if h.needs <= self.there]:
            for s in found:
                self.line(f"{s.name} = {self.unknown.pop(s).text}")
            self.there.update(s.name for s in found)

    def allocate(self, name: str, launched: set[str]) -> None:
        b = self.buffers[name]
        layout = f"{self.shape(b.shape)}, {self.shape(b.strides)}"
        if self.given is not None and self.given.layout and self.is_result(name):
            layout = "shape, strides"
        if b.place == "over":
            old = self.buffers[b.over]
            same = (b.shape, b.strides) == (old.shape, old.strides)
            self.line(f"{name} = {b.over}" + ("" if same else f".as_strided({layout})"))
        else:
            self.line(f"{name} = empty_strided({layout}, {self.const(b.dtype)})")
            elements = span(b)
            if self.given and not elements.is_const and elements.symbols() <= self.fixed:
                self.line(f"if {self.once(f'{host_text(elements)} >= {LARGE // b.dtype.itemsize}')}: fresh({name})")
            elif self.is_of(name, LARGE):
                self.line(f"fresh({name})")
        if name in launched:
            self.place(name)

    def is_of(self, name: str, least: int) -> bool:
        """Whether a buffer may have at least that many bytes."""
        size = nbytes(self.buffers[name])
        return size is None or size >= least

    def is_result(self, name: str) -> bool:
        """Whether a buffer is allocated to be returned as a result without a view."""
        return self.buffers[name].place == "output" and any(
            isinstance(o, Value) and o.buffer == name and self.view(o) is None for o in self.p.outputs)

    def steps(self, launched: set[str]) -> None:
        """Write all steps. Each buffer is allocated right before its first step, and freed after its last."""
        p = self.p
        pending: list[tuple[Step, tuple[str, ...], tuple[str, ...]]] = []  # each with its operators and its buffers
        sizes: dict[str, int] = {}  # texts of the plan's sizes, and their slots
        dead: list[str] = []
        lives = lifetimes(p)
        begins: dict[int, list[str]] = {}
        for b in p.buffers:
            if b.place in ("output", "alloc", "over"):  # buffers that no step uses come last, when all sizes are known
                begins.setdefault(lives[b.name][0] if b.name in lives else len(p.steps), []).append(b.name)

        def flush() -> None:
            if self.along:
                name = self.named(self.tables, "table", tuple(self.along.values()))
                where = "".join(f", P[{slot}]" for slots in self.along for slot in slots)
                self.line(f"m{name}{where} = {name}(P, ({''.join(x + ', ' for x in self.lists)}))")
                self.along, self.lists = {}, {}
            if pending:
                plan = self.named(self.plans, "plan", tuple(step for step, _, _ in pending))
                table = "(" + "".join(s + ", " for s in sizes) + ")"
                if self.given and sizes.keys() <= {s.name for s in self.fixed}:
                    table = self.once(table)
                where = self.const(tuple((origins, args) for _, origins, args in pending), "w")
                self.line(f"bad = {plan}(P, {table})")
                self.line(f"if bad is not None: check(bad, {where}, PLANS['{plan}'], {table}, SITES)")
                pending.clear()
                sizes.clear()
            if dead:
                self.line(f"del {', '.join(dead)}")
                dead.clear()

        def begin(k: int) -> None:
            new = begins.get(k, ())
            fresh = [name for name in new if self.buffers[name].place != "over"]
            if any(self.is_of(name, HEAVY) for name in fresh) and any(self.is_of(name, HEAVY) for name in dead):
                flush()
            for name in new:
                self.allocate(name, launched)

        at = 0
        for k, step in enumerate(p.steps):
            if isinstance(step, WORK) and step.stream != at:
                flush()  # before the allocation, which belongs to the current stream
                at = step.stream
                self.line(f"set_stream(s{at})")
            begin(k)
            if isinstance(step, Launch):
                places = [self.buffers[name] for name in step.args]
                if step.lengths:
                    pointers, names = self.table(step)
                else:
                    pointers, names = tuple(map(self.pointer, places)), [s.name for s in p.kernels[step.kernel].sizes]
                    if self.bounded and self.bounded[step.kernel]:
                        names += [text for b in places for text in self.extent(b)]
                slots = tuple(sizes.setdefault(s, len(sizes)) for s in names)
                known = step.args if self.bounded and self.bounded[step.kernel] else ()
                pending.append((Step(step.kernel, pointers, slots, self.moved(step)), step.origins, known))
            else:
                flush()
                self.other(step, launched)
            dead += p.frees[k]
            if not pending:
                flush()
        if at:
            flush()
            self.line("set_stream(s0)")
        begin(len(p.steps))
        flush()

    def other(self, s: ProgramStep, launched: set[str]) -> None:
        """Write a step that is not a launch. Streams and events are torch's own objects on every device."""
        if isinstance(s, Call):
            self.call(s, launched)
        elif isinstance(s, Copy):
            self.copy(s)
        elif isinstance(s, Record):
            self.line(f"e{s.event} = " + (f"s{s.stream}.record_event()" if s.place is None else
                                          f"record(s{s.stream}, caller_event({s.place}))"))
        elif isinstance(s, Wait):
            self.line(f"wait(s{s.stream}, {self.event(s)})")
        elif isinstance(s, Synchronize):
            waited = "synchronize(DEVICE)" if s.stream is None else f"s{s.stream}.synchronize()"
            self.line(waited if s.event is None and s.place is None else f"{self.event(s)}.synchronize()")
        elif isinstance(s, Keep):
            self.line(f"{s.buffer}.record_stream(s{s.stream})")

    @staticmethod
    def event(s: Wait | Synchronize) -> str:
        return f"caller_event({s.place})" if s.event is None else f"e{s.event}"

    def moved(self, s: Launch) -> str:
        kernel = self.p.kernels[s.kernel]
        found, names = moved(s, kernel, self.buffers), {size: f"n{k}" for k, size in enumerate(kernel.sizes)}
        return host_text(found, names) if found is not None and found.symbols() <= names.keys() else ""

    def extent(self, b: BufferPlan) -> tuple[str, str]:
        """The element range of a buffer's memory, counted from its pointer: first element and end."""
        if b.place in ("arena", "seed"):
            size = nbytes(b) if b.place == "arena" else 16
            assert size is not None
            return "0", str(size // b.dtype.itemsize)
        return f"-{b.name}.storage_offset()", f"elements_from({b.name})"

    def pointer(self, b: BufferPlan) -> tuple[int, int]:
        return (0, b.offset) if b.place == "arena" else (self.slot(b.name), 0)

    def table(self, s: Launch) -> tuple[tuple[tuple[int, int], ...], list[str]]:
        """Register a table for a launch; returns pointers to the table and its blocks, and the sizes."""
        kernel, rows = self.p.kernels[s.kernel], len(s.lengths)
        assert isinstance(kernel, TableKernel)
        columns: list[Column] = []
        each = len(s.args) // len(kernel.columns)
        for k, p in enumerate(kernel.columns):
            b, *others = (self.buffers[name] for name in s.args[k * each : (k + 1) * each])
            if b.place == "list":
                columns.append(self.lists.setdefault(b.name, len(self.lists)))
            elif each == rows:
                columns.append(tuple(map(self.pointer, (b, *others))))
            else:  # row after row in one buffer, or the same for all rows
                counts = counts_of(s.lengths) if kernel.steps().get(p.name, 1) > 1 else [1 if b.shape else 0] * rows
                slot, first = self.pointer(b)
                before = accumulate(counts[:-1], initial=0)
                columns.append(tuple((slot, first + n * p.dtype.itemsize) for n in before))
        slots = self.slot(f"table {len(self.slots)}"), self.slot(f"blocks {len(self.slots)}")
        self.along[slots] = Table(tuple(columns), s.lengths)
        return tuple((slot, 0) for slot in slots), [*map(str, sizes_of(s.lengths)), *(n.name for n in s.numbers)]

    def copy(self, c: Copy) -> None:
        self.line(f"{self.tensor(c.dst)}.copy_({self.value(c.src)}{', True' if c.fetches else ''})")

    def prepared(self, c: Call) -> str | None:
        """The text of a call whose arguments are all known except for tensors; None if others are unknown."""
        op = c.target if c.out is None else c.out
        if not isinstance(op, OpOverload):
            return None
        outputs = () if c.out is not None or not c.names else c.outputs
        found = by_schema(op, c.args, {**dict(c.kwargs), **({} if c.out is None else {"out": c.names[0]})}, outputs)
        if found is None:
            return None
        args: list[Any] = []
        tensors: list[str] = []
        for x, kind in found:
            got = self.known(x, str(kind))
            if got is None:
                return None
            args.append(got[0])
            tensors += got[1:]
        name = self.named(self.calls, "call", Prepared(operator_path(op), tuple(args), outputs))
        return f"{name}({', '.join(tensors)})"

    def known(self, x: Any, kind: str) -> tuple[Any, ...] | None:
        """An argument as a prepared call stores it, followed by the tensor that fills it; None if it is unknown."""
        if kind == "Tensor" and isinstance(x, str):  # a buffer that the call writes to
            return TENSOR, self.tensor(x)
        if isinstance(x, Value):
            view = self.view(x)
            if view is None:
                return TENSOR, self.tensor(x.buffer)
            strides, offset, within = view
            if not all(i.is_const for i in (*x.shape, *strides, offset)):
                permuted = self.permuted(x, strides, offset)
                return None if permuted is None else (TENSOR, permuted)
            shape, steps = (tuple(i.const for i in y) for y in (x.shape, strides))
            return Strided(shape, steps, offset.const, within), self.tensor(x.buffer)
        constant = plain_constant(x)
        return (constant,) if is_constant(constant, kind) else None

    def call(self, c: Call, launched: set[str]) -> None:
        call = self.prepared(c)
        if call is None:
            args = [self.argument(a) for a in c.args] + [f"{k}={self.argument(v)}" for k, v in c.kwargs]
            args += [] if c.out is None else [f"out={self.tensor(c.names[0])}"]
            call = f"{self.const(c.target if c.out is None else c.out, 'f')}({', '.join(args)})"
        if c.out is not None or not c.names:
            self.line(call)
            return
        if c.outputs is None:
            self.line(f"{c.names[0]} = {call}")
        elif call.startswith("call"):
            self.line(f"{''.join(n + ', ' for n in c.names)} = {call}")
        else:
            got = f"r{len(self.lines)}"
            self.line(f"{got} = {call}")
            for name, k in zip(c.names, c.outputs, strict=True):
                self.line(f"{name} = {got}[{k}]")
            self.line(f"del {got}")
        self.find_numbers(c.names)
        for name in c.names:
            if name in self.buffers:
                b = self.buffers[name]
                strides = self.shape(b.strides)
                if c.outputs is not None:  # torch's rules for the dtypes of several results are not always right
                    self.line(f"if {name}.dtype is not {b.dtype}: {name} = {name}.to({b.dtype})")
                self.line(f"if {name}.stride() != {strides}: {name} = fit({name}, {strides})")
                if name in launched:
                    self.place(name)


def plain_constant(x: Any) -> Any:
    """Convert constant sizes to numbers, and sequences to lists."""
    if isinstance(x, Index):
        return x.const if x.is_const else x
    return [plain_constant(y) for y in x] if isinstance(x, (list, tuple)) else x

"""Records compiled graphs as CUDA graphs after a warm-up, and replays them: options={"graphs": True}.

A recording contains fixed addresses. So for every argument there is a rule for how it reaches the recording:

| argument | is | because |
|---|---|---|
| parameter, buffer, whatever the graph writes to | bound: another address needs another recording | it stays |
| a result of another recording | bound in the same way | it lies where that recording puts it |
| any other tensor | copied into memory of our own before each replay | it moves |
| number | part of the recording | kernels got it as a value |

Results lie in memory of the recording, and the next replay overwrites them. While the caller holds one of them, the
recording must not be replayed. If the held part is small (an output, when what the backward needs is free again), it is
returned as a copy from then on. Otherwise (gradients that accumulate, a second forward before the backward) another
recording is made. Intermediates of a recording share memory with later recordings, including their results: while the
caller holds a result of a later recording, the earlier one must not be replayed either. So if several recordings fit,
the first one is used, and a step goes through its recordings in the order in which they were made. A graph that cannot
be recorded runs normally: the reason is counted, and `flambeau.debug.recordings()` lists it.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from flambeau.ir.lines import overlapping, reach
from flambeau.targets.base import Recorder, Recording, Run
from flambeau.torch_compat.dispatch import count_dispatch_modes
from flambeau.torch_compat.fake import CompileContext
from flambeau.torch_compat.memory import TensorBase, storage_use_count

from . import tensor_lists
from .recordable import Recordable
from .tensor_lists import Watch

FEWEST = 2  # steps, if arguments must be copied: replaying a graph costs the host as much as launching one kernel
MOST_SIZES = 8  # sizes for which one graph may have recordings
MOST_ALIKE = 3  # recordings that differ in nothing, made because results of the others are in use
SMALL = 0.5  # share of the bytes of all results
MOST_COPIED = 256 << 20  # bytes of arguments: copying more takes longer than launching
MOST_WARM = 1024  # address combinations that were seen once
RESTS = 64  # calls (or four for each recording, if that is more) after which an unused recording is dropped
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
STATIC = "_dynamo_static_input_type"  # Dynamo's mark on parameters and buffers; torch's on promised ones


# ---- one recording ---------------------------------------------------------------------------------------


@dataclass
class Result:
    """Where a result of a replay comes from."""

    owned: torch.Tensor | None  # a tensor in the recording's memory
    argument: int = -1  # or in the memory of this argument
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0  # from the beginning of the argument, in elements
    value: Any = None  # or a number
    same_as: int = -1  # or the same object as an earlier result


class Take:
    """One recording: the addresses it is bound to, the arguments copied for it, and where its results are."""

    def __init__(self, bound: dict[int, int], copies: list[tuple[int, torch.Tensor]], made: Recording,
                 inputs: list[Any], device: torch.device) -> None:
        self.bound = bound  # by position: addresses of arguments that are results of other recordings
        self.copies = copies
        self.made = made
        moving = {k for k, _ in copies}
        self.staying, self.moving = [k for k in range(len(inputs)) if k not in moving], sorted(moving)
        self.watches: tuple[Watch, Watch] | None = None  # over staying and moving arguments, if all are tensors
        self.given: Hashable = None
        self.last = 0  # the number of the last call that used it
        self.number = next(_made)
        starts = {x.untyped_storage().data_ptr(): k for k, x in reversed(list(enumerate(inputs)))
                  if isinstance(x, torch.Tensor) and x.numel()}
        first = {id(x): k for k, x in reversed(list(enumerate(made.results))) if isinstance(x, torch.Tensor)}
        self.results = [Result(None, same_as=first[id(x)]) if first.get(id(x), k) < k else given_out(x, inputs, starts)
                        for k, x in enumerate(made.results)]
        # An argument that is also a result belongs to the caller: holding it here would keep it in use.
        made.results = [r.owned for r in self.results]
        # Whoever holds a result holds its storage. Count the references while only the recording has any.
        owned: dict[int, list[int]] = {}
        for k, r in enumerate(self.results):
            if r.owned is not None:
                owned.setdefault(r.owned.untyped_storage()._cdata, []).append(k)
        self.storages = [(cdata, storage_use_count(cdata), ks) for cdata, ks in owned.items()]
        self.bytes = {k: r.owned.untyped_storage().nbytes() for k, r in enumerate(self.results) if r.owned is not None}
        self.addresses = [r.owned.data_ptr() for r in self.results if r.owned is not None and r.owned.numel()]
        # A copy to the host may be incomplete when a replay returns: only the device can read it in order.
        self.sent = frozenset(k for k, r in enumerate(self.results)
                              if r.owned is not None and r.owned.device.type != device.type)
        self.scalars = frozenset(k for k, r in enumerate(self.results) if r.owned is not None and r.owned.numel() == 1)
        RESIDENT.update(self.addresses)
        weakref.finalize(self, RESIDENT.subtract, self.addresses).atexit = False

    def expect(self, args: list[Any], given: Hashable) -> None:
        """Remember this call, so that the next one like it is recognized quickly."""
        self.given = given
        if self.watches is None and all(type(x) in tensor_lists.PLAIN for x in args):
            self.watches = Watch([[args[k] for k in self.staying]]), Watch([[args[k] for k in self.moving]])

    def is_meant(self, args: list[Any], given: Hashable) -> bool:
        """Whether a call is like the remembered one; if not, forget that one."""
        if self.watches is None or self.given != given:
            return False
        staying, moving = self.watches
        moves = staying.moves
        if staying.check([[args[k] for k in self.staying]]) and staying.moves == moves:
            others = [args[k] for k in self.moving]
            return moving.check([others]) and not any(map(is_resident, others))
        self.watches = None
        return False

    def rank(self) -> tuple[int, int]:
        """The sort key among several fitting recordings: first the one with the fewest copies, then the oldest. Later
        ones can be replayed while its results are in use, but not the other way round."""
        return len(self.copies), self.number

    def fits(self, args: list[Any]) -> bool:
        return all(args[k].data_ptr() == address for k, address in self.bound.items())

    def in_use(self) -> list[int]:
        """Results of the last replay that the caller still holds."""
        count = storage_use_count
        return [k for cdata, alone, ks in self.storages if count(cdata) > alone for k in ks]

    def is_free(self, place: Hashable) -> bool:
        """Whether a replay overwrites nothing that the caller holds: neither its own results, nor those of later
        recordings, which may lie where it computes. Results of earlier ones were in place when it was made, so it does
        not touch them."""
        if self.in_use():
            return False
        with _GIVEN_LOCK:
            given = GIVEN.setdefault(place, [])
            later = bisect_right(given, self.number, key=attrgetter("number"))
            given[later:] = [take for take in given[later:] if take.in_use()]
            return later == len(given)

    def give(self, place: Hashable, args: list[Any], copied: set[int]) -> list[Any]:
        with _GIVEN_LOCK:
            given = GIVEN.setdefault(place, [])
            at = bisect_left(given, self.number, key=attrgetter("number"))
            if at == len(given) or given[at] is not self:
                given.insert(at, self)
        out: list[Any] = []
        copied = (copied | self.scalars) - self.sent
        for k, r in enumerate(self.results):
            if r.owned is not None:
                # `data` has its own version counter, so in-place writes to results of earlier replays do not affect it.
                out.append(r.owned.clone() if k in copied else r.owned.data)
            elif r.same_as >= 0:
                out.append(out[r.same_as])
            elif r.argument < 0:
                out.append(r.value)
            else:
                x = args[r.argument]
                same = x.shape == r.shape and x.stride() == r.strides and not r.offset
                out.append(x if same else x.as_strided(r.shape, r.strides, x.storage_offset() + r.offset))
        return out


RESIDENT: Counter[int] = Counter()  # reference counts of the addresses of recordings' results
# By shared memory pool: recordings whose results the caller may hold, in the order in which they were made.
GIVEN: dict[Hashable, list[Take]] = {}
_GIVEN_LOCK = threading.Lock()
_made = itertools.count()


def is_resident(x: torch.Tensor) -> bool:
    """Whether a tensor is a result of a recording."""
    return RESIDENT[TensorBase.data_ptr(x)] > 0


def bring(args: list[Any], copies: list[tuple[int, torch.Tensor]]) -> None:
    for k, memory in copies:
        memory.copy_(args[k].detach().as_strided(memory.shape, memory.stride()))


def given_out(x: Any, inputs: list[Any], starts: dict[int, int]) -> Result:
    if not isinstance(x, torch.Tensor):
        return Result(None, value=x)
    at = starts.get(x.untyped_storage().data_ptr(), -1) if x.numel() else -1
    if at < 0:
        return Result(x)
    return Result(None, at, tuple(x.shape), x.stride(), x.storage_offset() - inputs[at].storage_offset())


def elements(x: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """Sizes and strides for copying: if elements overlap, those of all memory from the first to the last element."""
    shape, strides = x.shape, x.stride()
    return ((reach(shape, strides),), (1,)) if overlapping(shape, strides) else (shape, strides)


# ---- the recordings of a graph ---------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts what happened to the calls of a graph."""

    label: str
    calls: int = 0
    replayed: int = 0
    recorded: Counter[str] = field(default_factory=Counter)  # why each recording was made
    uncaptured: Counter[str] = field(default_factory=Counter)  # why calls ran without a recording
    copied: int = 0  # bytes of arguments, in the last replay


RECORDED: weakref.WeakSet[Recorded] = weakref.WeakSet()  # every graph that may have recordings
_numbers = itertools.count()


class Recorded:
    """A run function that records its calls and replays the recordings."""

    def __init__(self, run: Run, recorder: Recorder | None, what: Recordable, device: torch.device,
                 function: Hashable = None) -> None:
        self.run, self.recorder, self.device = run, recorder, device
        self.steps, self.written = what.steps, frozenset(what.written)
        self.off = what.obstacle if recorder is not None else f"nothing is recorded on {device.type}"
        self.takes: dict[Hashable, list[Take] | str] = {}  # empty list: called once; text: the reason for no recording
        self.missed: set[Hashable] = set()  # addresses of other recordings' results that were seen once
        self.sizes: set[Hashable] = set()
        self.memory: dict[Hashable, torch.Tensor] = {}  # arguments are copied here; replays take turns with it
        self.copied: set[int] = set()  # results that are returned as copies
        self.guides: tuple[int, ...] = ()  # positions of an argument that stays and of another recording's result
        self.meant: dict[tuple[int, ...], list[Take]] = {}  # by the addresses of the guides: recordings that were used
        self.tally = Tally(what.label)
        self.lock = threading.RLock()
        self.number = next(_numbers)
        # The graphs of one function share memory, and do not depend on whether results of other functions are held.
        # Forwards and backwards are separate, as gradients accumulate over several backwards, with forwards in between.
        self.group: Hashable = ("graph", self.number) if function is None else (function, what.backward)
        RECORDED.add(self)
        if not self.off:
            tensor_lists.EXTENSION.begin()

    def __call__(self, args: list[Any]) -> list[Any]:
        self.tally.calls += 1
        if self.off or self.recorder is None:
            return self.plainly(args, self.off)
        place = self.recorder.place()
        if place is None:
            return self.plainly(args, "somebody else is capturing")
        with self.lock:
            reason = self.from_recording(args, place)
            if isinstance(reason, list):
                args.clear()
                return reason
        return self.plainly(args, reason)

    def plainly(self, args: list[Any], reason: str) -> list[Any]:
        self.tally.uncaptured[reason] += 1
        return self.run(args)

    def key(self, args: list[Any], given: tuple[Hashable, ...]) -> tuple[Hashable, Hashable]:
        """The addresses of parameters and written arguments together with all sizes and numbers; and the sizes by
        themselves."""
        where: list[int] = []
        sizes: list[Any] = [*given]
        for k, x in enumerate(args):
            if type(x) is torch.nn.Parameter:
                where += k, TensorBase.data_ptr(x)
            elif not isinstance(x, torch.Tensor):
                sizes.append((type(x), x))
            else:
                sizes.append((x.shape, x.stride(), x.device))
                if self.is_anchor(k, x):
                    where += k, TensorBase.data_ptr(x)
        return (tuple(where), tuple(sizes)), tuple(sizes)

    def is_anchor(self, k: int, x: torch.Tensor) -> bool:
        return k in self.written or type(x) is torch.nn.Parameter or hasattr(x, STATIC)

    def from_recording(self, args: list[Any], place: Hashable) -> list[Any] | str:
        """The results of a replay; or the reason why this call runs without a recording."""
        assert self.recorder is not None
        given = (place, torch.is_inference_mode_enabled())
        take = None
        if not count_dispatch_modes():
            meant = self.meant.get(self.hint(args), ())
            take = next((t for t in meant if t.is_free((place, self.group)) and t.is_meant(args, given)), None)
        if take is None:
            found = self.find(args, given)
            if isinstance(found, str):
                return found
            take = found
        if take.last:  # otherwise it was made just now, and has run
            self.recorder.check()
            bring(args, take.copies)
            take.made.replay()
            self.tally.replayed += 1
            if self.tally.replayed % RESTS == 0:
                self.drop_unused()
        take.last = self.tally.calls
        return take.give((place, self.group), args, self.copied)

    def hint(self, args: list[Any]) -> tuple[int, ...]:
        return tuple(TensorBase.data_ptr(args[k]) for k in self.guides)

    def find(self, args: list[Any], given: tuple[Hashable, ...]) -> Take | str:
        """A recording for this call, made now if necessary; or the reason why there is none."""
        key, sizes = self.key(args, given)
        takes = self.takes.get(key)
        if takes is None:
            return self.warm(key, sizes, args)
        if isinstance(takes, str):
            return takes
        if count_dispatch_modes():  # AOTAutograd observes first calls with a dispatch mode of its own
            return "a dispatch mode wants to see the operators"
        bound = self.results_of_others(args)
        fitting = sorted((t for t in takes if t.fits(args)), key=Take.rank)
        exact = [t for t in fitting if t.bound.keys() >= bound.keys()]  # others would copy what need not be copied
        where = (given[0], self.group)
        take = next((t for t in exact if t.is_free(where)), None)
        if take is not None:
            return self.remember(take, args, given)
        if takes and not exact and self.is_new((key, tuple(bound.items()))):
            # If a forward ran without a recording once, its saved tensors have other addresses just that once.
            return next((t for t in fitting if t.is_free(where)), "results of other recordings moved")
        why = self.why(takes, exact, sizes)
        made = self.record(args, key, sizes, exact, bound)
        if isinstance(made, str):
            return made
        self.tally.recorded[why] += 1
        return self.remember(made, args, given)

    def remember(self, take: Take, args: list[Any], given: Hashable) -> Take:
        """Remember which recording this call used, so that the next call like it finds it quickly."""
        take.expect(args, given)
        meant = self.meant.setdefault(self.hint(args), [])
        if take not in meant:
            insort(meant, take, key=Take.rank)
        return take

    def is_new(self, where: Hashable) -> bool:
        if where in self.missed:
            return False
        if len(self.missed) >= MOST_WARM:
            self.missed.clear()
        self.missed.add(where)
        return True

    def results_of_others(self, args: list[Any]) -> dict[int, int]:
        """Positions and addresses of arguments that are results of recordings."""
        return {k: x.data_ptr() for k, x in enumerate(args)
                if isinstance(x, torch.Tensor) and not self.is_anchor(k, x) and is_resident(x)}

    def warm(self, key: Hashable, sizes: Hashable, args: list[Any]) -> str:
        """Let the first call of a kind run normally: kernels are compiled, and libraries choose theirs."""
        idle = [k for k, takes in self.takes.items() if not takes or isinstance(takes, str)]
        if len(idle) >= MOST_WARM:
            del self.takes[idle[0]]
        refusal = next((why for k, x in enumerate(args) if (why := self.refusal(x, f"argument {k}"))), "")
        self.takes[key] = refusal or []
        return refusal or ("warm-up: parameters moved" if sizes in self.sizes else "warm-up")

    def refusal(self, x: Any, name: str) -> str:
        """The reason why a recording cannot take this argument; empty if it can."""
        if not isinstance(x, torch.Tensor):
            return "" if isinstance(x, int | float | None) else f"{name} is a {type(x).__name__}"
        if type(x) not in PLAIN or x.layout is not torch.strided or x.is_neg() or x.is_conj():
            return f"{name} is no plain tensor: {type(x).__name__}"
        elsewhere = f"{name} is on {x.device}: its contents would be part of the recording"
        # A tensor that a forward's recording sent to the host always has the same address.
        return "" if x.device == self.device or (x.device.type == "cpu" and x.is_pinned()) else elsewhere

    def why(self, takes: list[Take], fitting: list[Take], sizes: Hashable) -> str:
        """The reason for making a new recording."""
        if fitting:
            return "results of earlier calls are in use"
        if takes:
            return "results of other recordings moved"
        if sizes in self.sizes:
            return "other parameters, or parameters moved"
        return "other sizes" if self.sizes else "first"

    def record(self, args: list[Any], key: Hashable, sizes: Hashable, busy: list[Take],
               bound: dict[int, int]) -> Take | str:
        assert self.recorder is not None
        if sizes not in self.sizes and len(self.sizes) >= MOST_SIZES:
            return f"it has recordings of {MOST_SIZES} sizes"
        kept = {k for take in busy for k in take.in_use()} - self.copied
        copyable = bool(kept) and not any(kept & take.sent for take in busy)
        if copyable and all(sum(t.bytes[k] for k in kept) < SMALL * sum(t.bytes.values()) for t in busy):
            self.copied |= kept
            return "results of the call before are in use: from now on they are copies"
        if len(busy) >= MOST_ALIKE:
            if not copyable:
                return f"results of {len(busy)} recordings are in use"
            self.copied |= kept
        tensors = {k: x for k, x in enumerate(args) if isinstance(x, torch.Tensor)}
        anchors = {k for k, x in tensors.items() if self.is_anchor(k, x)}  # their addresses are in the key
        moving = [k for k in tensors if k not in bound and k not in anchors]
        if any(args[k].device != self.device for k in moving):
            return "what was sent to the host lies elsewhere for once"
        if moving and self.steps < FEWEST:
            return "one launch needs no recording"
        bytes_moved = sum(math.prod(elements(args[k])[0]) * args[k].element_size() for k in moving)
        if bytes_moved > MOST_COPIED:
            return f"{bytes_moved >> 20} MiB of arguments move"
        inputs, copies = list(args), []
        with torch.no_grad():
            for k, x in tensors.items():
                if k not in moving:
                    # The recording needs a tensor of its own: the caller's may get other memory (`.data = `).
                    inputs[k] = x.data
                    continue
                memory = self.static(key, k, x)
                copies.append((k, memory.as_strided(*elements(x))))
                inputs[k] = memory.as_strided(x.shape, x.stride())
            bring(args, copies)
            self.recorder.settle()
            try:
                made = self.recorder.record(self.run, inputs, self.group)
            except Exception as e:  # a graph that cannot be captured runs without
                self.off = f"recording failed: {type(e).__name__}: {str(e).partition(chr(10))[0]}"
                return self.off
        self.tally.copied = bytes_moved
        self.sizes.add(sizes)
        take = Take(bound, copies, made, inputs, self.device)
        takes = self.takes[key]
        assert isinstance(takes, list)
        takes.append(take)
        guides = tuple(min(some) for some in (anchors, bound) if some)
        if guides != self.guides:
            self.guides = guides
            self.meant.clear()
        return take

    def static(self, key: Hashable, k: int, x: torch.Tensor) -> torch.Tensor:
        """Memory for an argument that moves. Recordings in one place share it, as they are replayed in turn."""
        place = key[1][0]  # type: ignore[index]
        which = (place, k, x.dtype, reach(x.shape, x.stride()), torch.is_inference_mode_enabled())
        if which not in self.memory:
            self.memory[which] = torch.empty(which[3], dtype=x.dtype, device=x.device)
        return self.memory[which]

    def drop_unused(self) -> None:
        made = [takes for takes in self.takes.values() if isinstance(takes, list)]
        oldest = self.tally.calls - max(RESTS, 4 * sum(map(len, made)))
        for takes in made:
            takes[:] = [t for t in takes if t.last >= oldest]
        meant = {where: [t for t in some if t.last >= oldest] for where, some in self.meant.items()}
        self.meant = {where: some for where, some in meant.items() if some}
        with _GIVEN_LOCK:
            for given in GIVEN.values():
                given[:] = [t for t in given if t.in_use()]


def function_now() -> Hashable:
    """An identifier of the function that Dynamo is compiling; None outside of a compilation."""
    compiling = CompileContext.current_compile_id()
    return None if compiling is None else compiling.frame_id


def recorded(run: Run, recorder: Recorder | None, what: Recordable, device: torch.device,
             function: Hashable) -> Callable[..., Any]:
    """Wrap a Recorded in a plain function, as AOTAutograd's wrappers require."""
    calls = Recorded(run, recorder, what, device, function)

    def replayed(args: list[Any]) -> list[Any]:
        return calls(args)

    replayed._boxed_call = True  # type: ignore[attr-defined]
    return replayed

"""Finds the streams and events of a run: those of the caller, those of a backward's forward, and the program's own.

torch.cuda has stream and event classes of its own besides torch.Stream and torch.Event. A torch.Stream neither waits
for a torch.cuda.Event nor records it, and raises no error. So every stream here is a torch.Stream, and an event of
another class is passed a stream of its class.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from flambeau.errors import UnsupportedError
from flambeau.ir.program import Fence
from flambeau.targets.base import Run
from flambeau.torch_compat.streams import object_at


def caller_stream(place: int, device: torch.device) -> torch.Stream:
    """The stream that the compiled function uses in this call, by its index among the caller's objects."""
    found = object_at(place)
    if not isinstance(found, torch.Stream) or found.device != device:
        raise UnsupportedError(f"a compiled function on {device} uses {found}", hint="streams of one device, in the "
                               "function that is compiled for it")
    return plain(found)


def plain(s: torch.Stream) -> torch.Stream:
    return s if type(s) is torch.Stream else torch.Stream(
        stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type)


def of_its_kind(event: torch.Event, s: torch.Stream) -> torch.Stream:
    """The stream, as an object of the class that an event works with."""
    if type(event) is torch.Event:
        return s
    kind: type[torch.Stream] = torch.get_device_module(s.device).Stream
    return kind(stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type)


def record(s: torch.Stream, event: torch.Event) -> torch.Event:
    event.record(of_its_kind(event, s))
    return event


def wait(s: torch.Stream, event: torch.Event) -> None:
    event.wait(of_its_kind(event, s))


def stream_numbers(*streams: torch.Stream) -> torch.Tensor:
    """The ids of streams, as a tensor from which a backward finds the streams of its forward."""
    return torch.tensor([s.stream_id for s in streams])


def numbered_stream(numbers: torch.Tensor, k: int, device: torch.device) -> torch.Stream:
    like = torch.accelerator.current_stream(device)
    return torch.Stream(stream_id=int(numbers[k]), device_index=like.device_index, device_type=like.device_type)


def caller_event(place: int) -> torch.Event:
    found: torch.Event = object_at(place)
    return found


# ---- the program's own streams -----------------------------------------------------------------------------------

_own: dict[tuple[torch.device, int, int], torch.Stream] = {}
_lock = threading.Lock()


def own_stream(k: int, beside: torch.Stream) -> torch.Stream:
    """The k-th extra stream that belongs to another stream. Each stream has its own extra streams, because a capture on
    one must not affect the others, and libraries have a workspace per stream."""
    key = beside.device, beside.stream_id, k
    found = _own.get(key)
    if found is None:
        with _lock:
            found = _own.setdefault(key, torch.Stream(device=beside.device))
    return found


def fenced(run: Run, fence: Fence, device: torch.device) -> Run:
    """Wrap a run on the caller's stream and the program's own: it waits for the caller's others, and they for it."""

    def between(args: list[Any]) -> list[Any]:
        here = torch.accelerator.current_stream(device)
        if fence.ticket is None:
            others = [own_stream(-place, here) if place < 0 else caller_stream(place, device)
                      for place in fence.streams]
        else:
            numbers = args.pop(fence.ticket)
            others = [numbered_stream(numbers, k, device) for k in fence.streams]
        before, after = (list(map(caller_event, events)) for events in (fence.before, fence.after))
        for s in others:
            here.wait_stream(s)
        for e in before:
            wait(here, e)
        results = run(args)
        for s in others:
            s.wait_stream(here)
        for e in after:
            record(here, e)
        if fence.numbers is not None:
            results = list(results)
            results[fence.numbers] = stream_numbers(*others)
        return results

    between._boxed_call = True  # type: ignore[attr-defined]
    return between

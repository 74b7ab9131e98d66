"""A recorder for the CPU: it runs the recorded call again at the addresses of then, as a CUDA graph would.

An argument that was not brought along, a parameter that moved, a result that is overwritten while somebody holds it, by
a replay of its own recording or of an earlier one:
here as there, they are wrong numbers.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Hashable
from typing import Any

import torch

from flambeau.targets.base import Recorder, Recording, Run


def at_its_address(x: Any) -> Any:
    """A tensor that reads and writes the same memory, and does not keep it alive."""
    if not isinstance(x, torch.Tensor) or not x.numel():
        return x
    memory = x.untyped_storage()
    raw = (ctypes.c_char * memory.nbytes()).from_address(memory.data_ptr())
    return torch.frombuffer(raw, dtype=x.dtype, count=memory.nbytes() // x.element_size()).as_strided(
        x.shape, x.stride(), x.storage_offset())


class Replay(Recording):
    """`later`: of the same memory. Its intermediates lie where the results of later recordings do."""

    def __init__(self, run: Run, inputs: list[Any]) -> None:
        self.later: list[weakref.ref[Replay]] = []
        self.run, self.inputs = run, [at_its_address(x) for x in inputs]
        self.results = run(list(self.inputs))
        given = {x.untyped_storage().data_ptr(): x for x in inputs if isinstance(x, torch.Tensor)}
        first = {id(x): k for k, x in reversed(list(enumerate(self.results))) if isinstance(x, torch.Tensor)}
        self.own = [k for k in sorted(first.values()) if self.results[k].untyped_storage().data_ptr() not in given]
        # Where a result is an argument, a captured call returns that argument, and so keeps its memory.
        self.results = [given[at].as_strided(x.shape, x.stride(), x.storage_offset())
                        if isinstance(x, torch.Tensor) and (at := x.untyped_storage().data_ptr()) in given else x
                        for x in self.results]

    def replay(self) -> None:
        for k in self.own:  # the first kernels may write there already
            self.results[k].fill_(float("nan") if self.results[k].is_floating_point() else 0)
        for other in filter(None, (ref() for ref in self.later)):
            for k in other.own:
                with torch.inference_mode(other.results[k].is_inference()):
                    other.results[k].fill_(7)
        made = self.run(list(self.inputs))
        for k in self.own:
            self.results[k].copy_(made[k])


class Replays(Recorder):
    """`fails`: what recordings raise; `finds`: what is wrong with data of earlier calls."""

    def __init__(self) -> None:
        self.current: Hashable | None = "queue"
        self.fails: Exception | None = None
        self.finds: Exception | None = None
        self.made: dict[Hashable, list[weakref.ref[Replay]]] = {}

    def place(self) -> Hashable | None:
        return self.current

    def settle(self) -> None:
        if self.finds is not None:
            raise self.finds

    def record(self, run: Run, inputs: list[Any], group: Hashable = None) -> Replay:
        if self.fails is not None:
            raise self.fails
        made = Replay(run, inputs)
        earlier = self.made.setdefault((self.current, group), [])
        for other in filter(None, (ref() for ref in earlier)):
            other.later.append(weakref.ref(made))
        earlier.append(weakref.ref(made))
        return made

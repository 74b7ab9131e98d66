"""Caches the lists of tensors that an optimizer collects from its parameter groups in each step.

Torch goes through all parameters in Python: two thousand take it longer than the step takes a GPU. What it finds are
the parameters, their gradients and their states. As long as those are the same objects, and gradients come in the same
places and of the same kinds, so are the lists; one pass of C++ sees whether that is so (tensor_lists.cpp).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch

from flambeau.runtime import tensor_lists
from flambeau.runtime.tensor_lists import PLAIN, Watch

MOST_TRIES = 8  # of remembering what then changes again

_REMEMBERED: WeakKeyDictionary[Any, dict[int, ListGroup]] = WeakKeyDictionary()


def remembering(original: Callable[..., Any], wanted: Callable[[Any], Any]) -> Callable[..., Any]:
    """`_init_group` of an optimizer's class, with a memory where `wanted` says so of the parameters."""

    @functools.wraps(original)
    def _init_group(self: Any, group: dict[str, Any], *gathered: list[Any], **others: list[Any]) -> Any:
        if torch.compiler.is_dynamo_compiling() or others or wanted(group["params"]) is None:
            return original(self, group, *gathered, **others)
        return gather(original, self, group, gathered)

    return _init_group


@torch.compiler.disable
def gather(original: Callable[..., Any], optimizer: Any, group: dict[str, Any], gathered: tuple[list[Any], ...]) -> Any:
    try:
        known = _REMEMBERED.setdefault(optimizer, {})
    except TypeError:  # a class of the user's that cannot be hashed
        return original(optimizer, group, *gathered)
    memory = known.get(id(group))
    if memory is None or memory.group is not group:
        if len(known) > 2 * len(optimizer.param_groups):  # groups that are gone
            known.clear()
        memory = known[id(group)] = ListGroup(group)
        return original(optimizer, group, *gathered)  # states are made here
    if memory.recall(optimizer, gathered):
        return memory.result
    result = original(optimizer, group, *gathered)
    memory.keep(optimizer, gathered, result)
    return result


class ListGroup:
    """What was gathered of one group."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group, self.tries, self.known = group, 0, False
        self.result: Any = None

    def keep(self, optimizer: Any, gathered: tuple[list[Any], ...], result: Any) -> None:
        self.known = False
        if self.tries == MOST_TRIES or tensor_lists.native() is None:
            return
        self.tries += 1
        params, state = list(self.group["params"]), optimizer.state
        grads = [p.grad for p in params]
        some = [g for g in grads if g is not None]
        owners = [p for p, g in zip(params, grads, strict=True) if g is not None]
        if not some or any(type(t) not in PLAIN or t.layout is not torch.strided for t in (*owners, *some)):
            return
        items = [tuple(chain.from_iterable(state[p].items())) if p in state else None for p in params]
        # All that is not a gradient must follow from the parameters and their states.
        explained = {id(None), *map(id, params), *(id(x) for found in items if found is not None for x in found)}
        parts: list[list[Any] | None] = []
        for found in gathered:
            if len(found) == len(some) and all(x is g for x, g in zip(found, some, strict=True)):
                parts.append(None)
            elif all(id(x) in explained for x in found):
                parts.append(list(found))
            else:
                return
        self.settings = settings_of(self.group)
        self.has_grad = bytes(g is not None for g in grads)
        self.params, self.owners, self.parts, self.result = params, owners, parts, result
        self.states = [state.get(p) for p in params]
        self.items, self.watch, self.known = items, Watch([owners, some]), True

    def recall(self, optimizer: Any, gathered: tuple[list[Any], ...]) -> bool:
        """Fill the lists, if nothing but gradients changed."""
        if not self.known or len(gathered) != len(self.parts) or settings_of(self.group) != self.settings:
            return False
        grads = tensor_lists.native().gradients(self.group["params"], self.params, self.has_grad, optimizer.state,
                                                self.states, self.items)
        if grads is None or not self.watch.check((self.owners, grads)):
            return False
        for to, part in zip(gathered, self.parts, strict=True):
            to.extend(grads if part is None else part)
        return True


def settings_of(group: dict[str, Any]) -> list[Any]:
    """What may decide what is gathered. Of numbers, such as a momentum, it is whether they are zero."""
    return [(name, settled(value)) for name, value in group.items() if name != "params"]


def settled(value: Any) -> Any:
    if isinstance(value, float):
        return (value > 0) - (value < 0)
    if isinstance(value, torch.Tensor):
        return id(value)
    return tuple(map(settled, value)) if isinstance(value, tuple) else value

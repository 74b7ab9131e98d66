"""Caches the lists of tensors that an optimizer collects from its parameter groups in each step.

Torch loops over all parameters in Python, which for two thousand of them takes longer than the step takes a GPU. The
result is the parameters, their gradients and their states. As long as those are the same objects, and gradients exist
at the same positions and are of the same kinds, the lists are the same; one pass of C++ checks this (lists.cpp).
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

MOST_TRIES = 8  # attempts to cache a group whose tensors keep changing

_REMEMBERED: WeakKeyDictionary[Any, dict[int, ListGroup]] = WeakKeyDictionary()


def remembering(original: Callable[..., Any], wanted: Callable[[Any], Any]) -> Callable[..., Any]:
    """Wrap an optimizer class's `_init_group` with a cache, used for parameters for which `wanted` gives options."""

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
    except TypeError:  # a user's class that cannot be hashed
        return original(optimizer, group, *gathered)
    memory = known.get(id(group))
    if memory is None or memory.group is not group:
        if len(known) > 2 * len(optimizer.param_groups):  # some groups no longer exist
            known.clear()
        memory = known[id(group)] = ListGroup(group)
        return original(optimizer, group, *gathered)  # the first call creates the states
    if memory.recall(optimizer, gathered):
        return memory.result
    result = original(optimizer, group, *gathered)
    memory.keep(optimizer, gathered, result)
    return result


class ListGroup:
    """The cached lists of one parameter group."""

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
        # Everything that is not a gradient must be a parameter or part of its state.
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
        """Fill the lists from the cache if nothing but gradients changed; returns whether it did."""
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
    """The settings that may affect what is collected. Of a number, such as a momentum, only its sign counts."""
    return [(name, settled(value)) for name, value in group.items() if name != "params"]


def settled(value: Any) -> Any:
    if isinstance(value, float):
        return (value > 0) - (value < 0)
    if isinstance(value, torch.Tensor):
        return id(value)
    return tuple(map(settled, value)) if isinstance(value, tuple) else value

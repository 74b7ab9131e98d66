"""A change to torch as an object: what it changes, why, for which versions, its scope, how to apply and undo it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MISSING: Any = object()  # the name is absent, or is to be removed
Change = tuple[Any, Any, Any]  # the owner (an object or a dict), the name in it, and the new value
_LOCK = threading.Lock()


@dataclass
class _Made:
    """One application: its arguments, and for each place the new value and the one it replaced."""

    given: tuple[Any, ...]
    places: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)


@dataclass(eq=False)
class Patch:
    """A change to torch. `changes` yields the changes for the arguments of `apply`."""

    name: str
    what: str  # what is changed
    reason: str
    scope: str  # when other code sees it
    changes: Callable[..., Iterable[Change]]
    lasting: bool = False
    versions: str = "2.11 to 2.15"
    settle: Callable[..., None] | None = None  # called after each change: whether made or undone, and the arguments
    _made: list[_Made] = field(default_factory=list, repr=False)

    def apply(self, *given: Any) -> None:
        """Make the change. Applications can be nested."""
        changes = [*self.changes(*given)]  # may import, which must not happen under the lock
        with _LOCK:
            made = _Made(given)
            for owner, name, new in changes:
                made.places.append((owner, name, new, found_at(owner, name)))
                put_at(owner, name, new)
            self._made.append(made)
        if self.settle is not None:
            self.settle(True, *given)

    def undo(self) -> None:
        """Undo the latest application. Places that other code has changed since then are left alone."""
        with _LOCK:
            made = self._made.pop()
            for owner, name, new, before in reversed(made.places):
                if found_at(owner, name) is new:
                    put_at(owner, name, before)
        if self.settle is not None:
            self.settle(False, *made.given)

    @contextmanager
    def applied(self, *given: Any) -> Iterator[None]:
        self.apply(*given)
        try:
            yield
        finally:
            self.undo()

    @property
    def is_applied(self) -> bool:
        return bool(self._made)


def found_at(owner: Any, name: Any) -> Any:
    """The owner's own value for a name; MISSING if there is none or it is inherited."""
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, MISSING)


def put_at(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        if value is MISSING:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif value is not MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)

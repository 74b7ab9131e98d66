"""All errors that Flambeau raises. They name the operator, shapes, dtypes, target, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class Error(RuntimeError):
    """The base class of all errors of Flambeau.

    All fields are optional, and can be read as attributes. ``str(error)`` shows those that are set.
    """

    def __init__(
        self,
        message: str,
        *,
        operator: str | None = None,
        shapes: Iterable[Iterable[object]] = (),
        dtypes: Iterable[object] = (),
        target: str | None = None,
        hint: str | None = None,
    ) -> None:
        # Only the message is in `args`. Pickle creates an exception as cls(*args) and then restores its attributes, so
        # errors can be sent back from a worker process.
        super().__init__(message)
        self.message = message
        self.operator = operator
        self.shapes = tuple(tuple(shape) for shape in shapes)
        self.dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
        self.target = target
        self.hint = hint

    def __str__(self) -> str:
        head = f"{self.operator}: {self.message}" if self.operator else self.message
        rows = {
            "shapes": ", ".join(_shape(shape) for shape in self.shapes),
            "dtypes": ", ".join(self.dtypes),
            "target": self.target,
            "hint": self.hint,
        }
        return "\n".join([head, *(f"  {name}: {text}" for name, text in rows.items() if text)])


class CompileError(Error):
    """A generated kernel did not compile, or the compiler could not be run."""


class CacheError(Error):
    """The cache on disk cannot be read or written."""


class OptionError(Error, ValueError):
    """A setting or option has an unknown name or an invalid value."""


class UnsupportedError(Error):
    """This target cannot run an operator, dtype or layout."""


class BoundsError(Error):
    """A kernel accessed memory outside of a buffer. Checked with the setting `verify`."""


class PromiseError(Error):
    """A result has other strides, or shares other memory, than torch expects. Checked with the setting `verify`."""


class OrderError(Error):
    """Two steps of a program use the same memory in no defined order. Checked for programs with several streams."""


class GuessedShapeError(UnsupportedError):
    """A shape depends on data, but torch treats it as known."""


def did_you_mean(name: str, there: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known one, or the list of all."""
    known = list(there)
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known names: {', '.join(known)}"


def _shape(shape: tuple[object, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"

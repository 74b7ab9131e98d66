"""Every error Flambeau raises: what failed, on which shapes and dtypes, on which target, and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class Error(RuntimeError):
    """The base of all Flambeau errors.

    The fields are optional and stay readable as attributes; ``str(error)`` shows those that are set.
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
        # Only the message goes into `args`: pickle rebuilds an exception as cls(*args) and then restores the
        # attributes, so errors survive the way back from a worker process.
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
    """Generated text did not compile, or the compiler could not be run."""


class CacheError(Error):
    """The cache on disk cannot be read or written."""


class OptionError(Error, ValueError):
    """A setting or an option has a name or a value that Flambeau does not know."""


class UnsupportedError(Error):
    """An operator, dtype or layout that this target cannot run."""


class BoundsError(Error):
    """A kernel accessed memory outside of its buffer. Found by the setting `verify`."""


class PromiseError(Error):
    """A result has other strides, or shares other memory, than torch was told. Found by the setting `verify`."""


class OrderError(Error):
    """Two steps of a program use the same memory, and nothing says which of them runs first. Found by the setting
    `verify`."""


class GuessedShapeError(UnsupportedError):
    """The data decides a shape, and torch does not know that it does."""


def did_you_mean(name: str, there: Iterable[str]) -> str:
    """A hint for a name that is not there."""
    known = list(there)
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _shape(shape: tuple[object, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"

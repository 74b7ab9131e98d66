"""All kinds of lines, and `draw` with them."""

from . import kinds_compute, kinds_memory  # noqa: F401
from .draw import draw

__all__ = ["draw"]

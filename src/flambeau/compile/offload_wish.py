"""Checks the value of the option `offload`: a size in bytes, a share of the peak, or "auto"."""

from __future__ import annotations

import re
from typing import Any

from flambeau.errors import OptionError

UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}  # powers of two


def check_wish(wish: Any) -> None:
    """Raise OptionError unless the value is a size in bytes, a share, "auto" or None."""
    if wish is None or wish == "auto" or (isinstance(wish, float) and 0 < wish < 1):
        return
    if not isinstance(wish, str) or not bytes_of(wish):
        raise OptionError(f"option offload={wish!r} is neither bytes (\"4GiB\"), nor a part (0.3), nor \"auto\"")


def bytes_of(text: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    return int(float(found[1]) * (1 << UNITS[found[2]])) if found else 0

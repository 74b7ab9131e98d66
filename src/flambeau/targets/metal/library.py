"""The source of a Metal library: kernels after the header with the functions they call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from flambeau.codegen.source import LIBRARY

_INCLUDE = re.compile(r'^#include "(\S+)"$', re.MULTILINE)


def whole(texts: Sequence[str]) -> str:
    return "\n".join([header("metal.h"), *texts])


@cache
def header(name: str) -> str:
    text = (LIBRARY / name).read_text().replace("#pragma once\n", "")
    return _INCLUDE.sub(lambda found: header(found[1]), text)

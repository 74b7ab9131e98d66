"""Stores the programs of eager calls on disk, so that later processes do not compile them.

Programs are stored in the kernel cache's folder, under a key of everything they depend on: the class, the settings, the
versions of torch and of our source, and the machine. `flambeau cache --export` includes them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from flambeau.config import COMPILED_FOR, config
from flambeau.ops.facts import SPACES
from flambeau.runtime.launch_plan import LaunchPlan
from flambeau.runtime.placement import flat, target_of
from flambeau.runtime.plain_data import Codec, Malformed, Record, Unwritable
from flambeau.runtime.plain_program import FUNCTIONS, RECORDS, names
from flambeau.targets.cache import shared_cache
from flambeau.targets.identity import Uncacheable, identity

from .one_call import Arguments, TensorLike
from .operator_forms import OperatorForm

log = logging.getLogger(__name__)

SUFFIX = ".class"
MOST = 4  # programs of a class


@dataclass(frozen=True)
class PlainProgram:
    """A program for the calls of a class, in its final form. Texts are Python expressions over the values of a call."""

    package: LaunchPlan | None
    names: tuple[str, ...]
    holds: str
    ranges: str
    results: str
    taken: tuple[Any, ...]


@cache
def codec() -> Codec:
    return Codec([*RECORDS, Record(PlainProgram)], values=names(*FUNCTIONS))


class Kept:
    """The entries of a class on disk. Operators from outside of torch have none: their formulas may change."""

    def __init__(self, key: tuple[Any, ...], form: OperatorForm, args: Arguments) -> None:
        self.key, self.form, self.args = key, form, args

    def places(self) -> list[str]:
        devices = [x.device for x in flat(self.args) if isinstance(x, TensorLike)]
        target = target_of(devices[0], config.target) if devices else None
        if target is None or self.form.op.namespace not in SPACES or config.verify or not config.graph_cache:
            return []
        state = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
        with target.on(devices[0]), suppress(Uncacheable):
            said = repr((*identity(target), *state, [getattr(config, name) for name in COMPILED_FOR], self.key))
            return [hashlib.sha256(f"{said} {k}".encode()).hexdigest() for k in range(MOST)]
        return []

    def load(self) -> Iterator[PlainProgram]:
        disk = shared_cache(config.cache_dir, config.cache_limit_mb)
        for place in self.places():
            data = disk.read(place, SUFFIX)
            if data is None:
                return
            try:
                made = codec().decode(data)
                if not isinstance(made, PlainProgram):
                    raise Malformed(f"it is a {type(made).__name__}")
            except Malformed as error:
                log.warning("a cached program of %s does not load, and is made again: %s", self.form.name, error)
                return
            yield made

    def store(self, program: PlainProgram, number: int) -> None:
        try:
            data = codec().encode(program)
        except Unwritable as reason:
            log.info("a program of %s is not cached: %s", self.form.name, reason)
            return
        for place in self.places()[number:number + 1]:
            shared_cache(config.cache_dir, config.cache_limit_mb).put(place, data, SUFFIX)

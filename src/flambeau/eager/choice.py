"""Whose kernel serves the calls of a class, torch's or ours: the faster one, on the data of one call.

Which one that is, is a fact about the machine. It is kept on disk for the class of the call, its sizes (to the next
power of two), the chip and the release of torch. Of several processes that come to it at once, one times the two, and
all take what it found: so results follow from what a program calls, and not from the clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from flambeau import __version__
from flambeau.config import COMPILED_FOR, config
from flambeau.runtime.launch_plan import Run, word
from flambeau.runtime.placement import flat
from flambeau.targets.base import Target
from flambeau.targets.cache import shared_cache

from .any_shape import Shapes
from .one_call import Arguments, numbers_of
from .operator_forms import Form

SUFFIX = ".chosen"
ROUNDS = 5  # each times both
FEW, LONG = 2, 0.02  # rounds of calls that take as many seconds
WAIT = 30.0  # seconds, for another process that times the same

_CHOSEN: dict[str, bool] = {}


def is_ours(target: Target, form: Form, call: Arguments, args: Arguments, run: Run, lifted: int, many: bool) -> bool:
    """Whether a program is the better one for such calls; `many`: it is one for many shapes."""
    shapes = Shapes(form.op, call)
    key = hashlib.sha256(repr((
        __version__, torch.__version__, target.chip(), form.name, shapes.key, [n.bit_length() for n in shapes.values],
        many, torch.get_default_dtype(), [getattr(config, name) for name in COMPILED_FOR])).encode()).hexdigest()
    if key not in _CHOSEN:
        disk = shared_cache(config.cache_dir, config.cache_limit_mb)
        with disk.alone("choice", WAIT):
            said = disk.read(key, SUFFIX)
            if said is None:
                said = str(int(measured(target, form, call, args, run, lifted))).encode()
                disk.put(key, said, SUFFIX)
        _CHOSEN[key] = said == b"1"
    return _CHOSEN[key]


def measured(target: Target, form: Form, call: Arguments, args: Arguments, run: Run, lifted: int) -> bool:
    own = [copied(x) if k in form.written else x for k, x in enumerate(args)]
    tensors = [t for t in flat(own) if isinstance(t, torch.Tensor)]
    numbers = [word(x) if isinstance(x, float) else x for k, x in enumerate(numbers_of(form.op, call))
               if lifted >> k & 1]
    schema = form.op._schema.arguments
    positional = [x for a, x in zip(schema, own, strict=True) if not a.kwarg_only]
    named = {a.name: x for a, x in zip(schema, own, strict=True) if a.kwarg_only}
    both: list[Callable[[], Any]] = [lambda: form.op(*positional, **named), lambda: run([*tensors, *numbers])]
    # How results lie must not depend on whose they are.
    made = [layout(call()) for call in both]
    if not form.written and made[0] != made[1]:
        return False
    best = [target.seconds(call) for call in both]
    for turn in range(1, FEW if sum(best) > LONG else ROUNDS):
        for which in (0, 1) if turn % 2 else (1, 0):
            best[which] = min(best[which], target.seconds(both[which]))
    return best[1] < best[0]


def copied(x: Any) -> Any:
    return type(x)(map(copied, x)) if isinstance(x, (list, tuple)) else x.clone()


def layout(results: Any) -> list[Any]:
    """Strides of dimensions of one element say nothing."""
    return [(t.dtype, t.shape, [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1])
            for t in flat(results) if isinstance(t, torch.Tensor)]

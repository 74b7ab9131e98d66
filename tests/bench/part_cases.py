"""A part of a bench for test_parts.py. It performs the actions that it is given."""

from __future__ import annotations

import os
import time
from typing import Any

from flambeau.bench.parts import Talk


def part(talk: Talk, acts: list[str]) -> None:
    for act in acts:
        talk.tell(seen={act: time.time()})
        ACTS[act](talk)


def fail(talk: Talk) -> None:
    raise ValueError("as it was told")


def sleep_on(talk: Talk) -> None:
    while True:
        time.sleep(0.1)


def compile_for_long(talk: Talk) -> None:
    assert not talk.attempt("compile", lambda: sleep_on(talk), 0.2)


def measure(talk: Talk) -> None:
    start = time.time()
    time.sleep(0.3)
    talk.tell(measured=[start, time.time()])


ACTS: dict[str, Any] = {
    "fail": fail, "die": lambda talk: os._exit(7), "sleep": sleep_on, "turn": Talk.turn, "measure": measure,
    "long": compile_for_long, "attempt": lambda talk: talk.attempt("it", lambda: fail(talk)),
    "noise": lambda talk: print("a library's word"),
}

"""Checks every Metal source that is rendered while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flambeau import pipeline
from flambeau.targets.metal.checker import check

_known: set[str] = set()


@contextmanager
def texts_checked() -> Iterator[list[str]]:
    """Collects the sources rendered inside the block; at its end, checks that each new one has no problems."""
    texts: list[str] = []
    observe = lambda made: texts.extend(t.text for t in made.texts)  # noqa: E731
    pipeline.OBSERVERS.append(observe)
    try:
        yield texts
    finally:
        pipeline.OBSERVERS.remove(observe)
    for text in dict.fromkeys(texts):
        if text not in _known:
            problems = check(text)
            assert not problems, f"{problems}\n{text}"
            _known.add(text)

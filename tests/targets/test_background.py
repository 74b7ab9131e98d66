"""Background threads: a pool never has more threads than its limit, whichever thread submits."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from flambeau.targets.background import Pool


class Slow(int):
    """A number whose comparison takes a moment, so that other threads can decide on the same state meanwhile."""

    def __gt__(self, other: int) -> bool:
        time.sleep(0.02)
        return super().__gt__(other)


def test_threads_that_submit_at_once_start_one_thread() -> None:
    pool, lock, most, now = Pool(1, "test"), threading.Lock(), 0, 0
    pool.count = Slow(1)

    def work() -> None:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    with ThreadPoolExecutor(8) as submitters:
        futures = list(submitters.map(lambda _: pool.submit(work), range(8)))
    for future in futures:
        future.result(30)
    assert most == 1

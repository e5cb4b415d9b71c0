"""Threads that share the work on one large fragment, slab by slab.

Rule 1: each item of the work reads and writes its own part of the arrays alone, so that the results do not depend on
the number of threads.  Rule 2: the thread that asks works along; a small fragment is left to it alone, because to wake
others would take longer.  Rule 3: all users in a process share the same threads.  Rule 4: threads are used as far as
cores are idle: on busy cores they would wait for each other, and take the time of those who train there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")

MOST_THREADS = 4
"""More threads wait for the same memory, and for the parts of the work that hold the interpreter's lock."""

LEAST_VALUES = 1 << 20
"""A fragment of fewer values is worked on by one thread: it takes a millisecond or two."""

_lock = threading.Lock()
_shared: tuple[int, ThreadPoolExecutor] | None = None  # of which process, since threads do not survive a fork


def idle_cores() -> int:
    """Return how many of the cores that this process may use were idle in the last minute, as the machine's load says;
    all of them where it does not say."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        busy = os.getloadavg()[0]
    except (AttributeError, OSError):  # a system that has no such figure, or does not give it
        busy = 0.0
    return max(0, round(cores - busy))


def _helpers() -> ThreadPoolExecutor:
    global _shared
    with _lock:
        if _shared is None or _shared[0] != os.getpid():
            _shared = os.getpid(), ThreadPoolExecutor(MOST_THREADS - 1, "zmqtrain-slabs")
        return _shared[1]


class SlabThreads:
    """Do independent pieces of work in `threads` threads; None: in the caller's and one for each idle core, at most 4.

    least_values: work on fewer values is done in the caller's thread.
    """

    def __init__(self, threads: int | None = None, least_values: int = LEAST_VALUES) -> None:
        self._threads, self._least_values = threads, least_values

    def count(self, values: int) -> int:
        """Return how many threads work on so many values."""
        if values < self._least_values:
            return 1
        return min(MOST_THREADS, 1 + idle_cores()) if self._threads is None else self._threads

    def each(self, work: Callable[[Item], object], items: Sequence[Item], values: int) -> None:
        """Do `work` for every item and wait for all of it. values: that all items have together.

        Raises what `work` raised for the earliest item; later ones may then not have been begun.
        """
        threads = min(self.count(values), len(items))
        if threads <= 1:
            for item in items:
                work(item)
            return
        coming, failed = iter(range(len(items))), dict[int, BaseException]()

        def some() -> None:
            while not failed:
                number = next(coming, None)  # one call into C: no two threads are given the same
                if number is None:
                    return
                try:
                    work(items[number])
                except BaseException as error:
                    failed[number] = error

        helping = [_helpers().submit(some) for _ in range(threads - 1)]
        some()
        wait(helping)
        if failed:
            raise failed[min(failed)]

"""Look at what a process holds: memory, file descriptors, threads, tasks; and say whether it grows.

Rule 1: read from the kernel (any process of ours) or from the interpreter (this one): nothing is estimated.
Rule 2: a slope is robust: the median of the slopes of all pairs (Theil and Sen), which a few bursts do not move.
Rule 3: what is left after something was closed is compared with what was there before it was opened, once what ends by
itself (a thread that is joined elsewhere, a socket that libzmq reaps) has had time to.
Rule 4: nothing looks through all objects of a process that goes on: a tuple that another thread is just filling
must not be held by anybody else (CPython raises SystemError there).
Source: Linux proc(5); Sen 1968, Estimates of the regression coefficient based on Kendall's tau.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakSet

__all__ = ["Vitals", "vitals_of", "slope", "Left", "count_left", "watch_unraisable"]

SETTLE_SECONDS = 5.0
_LOOPS: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Vitals:
    """What a process held at a moment. seconds: of a monotonic clock."""

    seconds: float
    rss_bytes: int
    descriptors: int
    threads: int


def vitals_of(pid: int | str = "self") -> Vitals:
    """Return what a process holds now. Raises FileNotFoundError or ProcessLookupError if there is none."""
    process = Path(f"/proc/{pid}")
    rss = int((process / "statm").read_text().split()[1]) * PAGE_BYTES
    descriptors, threads = (len(os.listdir(process / kind)) for kind in ("fd", "task"))
    return Vitals(time.monotonic(), rss, descriptors, threads)


def slope(points: Sequence[tuple[float, float]], most: int = 300) -> float:
    """Return the Theil-Sen slope of (x, y) points, 0 for fewer than two; of more than `most` some are left out."""
    taken = points[:: max(1, -(-len(points) // most))]
    slopes = [(second[1] - first[1]) / (second[0] - first[0]) for first, second in combinations(taken, 2)]
    return median(slopes) if slopes else 0.0


@dataclass(frozen=True)
class Left:
    """What is alive in this process. threads: their names.  tasks: the loop and the name of each asyncio task that is
    not done, of the loops made since this module is here; what goes on in a loop that was there before is its own
    affair.  descriptors: what each one of a file is of."""

    threads: tuple[str, ...]
    tasks: tuple[tuple[int, str], ...]
    descriptors: tuple[str, ...]

    def beyond(self, before: Left) -> list[str]:
        """Say what is here and was not before; nothing: all was given back."""
        said = [f"thread {name}" for name in _more(self.threads, before.threads)]
        loops = {loop for loop, _ in before.tasks}
        said += [f"task {name}" for loop, name in self.tasks if loop not in loops]
        if (more := len(self.descriptors) - len(before.descriptors)) > 0:
            named = [_of_socket(name) for name in _more(self.descriptors, before.descriptors)]
            said.append(f"{more} file descriptors, of {', '.join(named)}")
        return said


def _more(now: Sequence[str], before: Sequence[str]) -> list[str]:
    rest = list(now)
    for name in before:
        if name in rest:
            rest.remove(name)
    return rest


def _note_loops() -> None:
    made = asyncio.BaseEventLoop.__init__

    def make(loop: asyncio.BaseEventLoop) -> None:
        made(loop)
        _LOOPS.add(loop)

    asyncio.BaseEventLoop.__init__ = make  # type: ignore[method-assign]


_note_loops()


def _loops() -> list[asyncio.AbstractEventLoop]:
    while True:
        try:
            return list(_LOOPS)
        except RuntimeError:  # one was made or lost meanwhile, in another thread
            continue


def _alive() -> Left:
    threads = tuple(sorted(thread.name for thread in threading.enumerate()))
    tasks = [one for loop in _loops() for one in asyncio.all_tasks(loop) if not one.done()]
    named = tuple((id(one.get_loop()), getattr(one.get_coro(), "__qualname__", one.get_name())) for one in tasks)
    return Left(threads, named, _descriptors())


def _descriptors() -> tuple[str, ...]:
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself; or it is closed meanwhile
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return tuple(sorted(names))


def _of_socket(name: str) -> str:
    """Return the ports (here and there, in hexadecimal) and the state of a TCP socket; of what is none, the name."""
    inode = name.removeprefix("socket:[").removesuffix("]")
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        if (words := line.split())[9] == inode:
            return f"TCP {words[1]} to {words[2]}, state {words[3]}"
    return name


def count_left(before: Left | None = None, seconds: float = SETTLE_SECONDS) -> Left:
    """Return what is alive here; with `before`, as soon as nothing is beyond it, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        gc.collect()
        left = _alive()
        if before is None or not left.beyond(before) or time.monotonic() >= deadline:
            return left
        threading.Event().wait(0.02)


def watch_unraisable() -> Callable[[], list[str]]:
    """Note from now on what nobody can catch (a ResourceWarning that is an error, an exception in a thread or in
    `__del__`) besides printing it; return a function that gives what was noted."""
    noted: list[str] = []
    said, of_thread = sys.unraisablehook, threading.excepthook

    def unraisable(what: Any) -> None:
        noted.append(f"{what.exc_type.__name__}: {what.exc_value}")
        said(what)

    def in_thread(what: Any) -> None:
        noted.append(f"in a thread, {what.exc_type.__name__}: {what.exc_value}")
        of_thread(what)

    sys.unraisablehook, threading.excepthook = unraisable, in_thread
    return lambda: list(noted)

"""A bounded queue between threads, and a thread that does jobs in order.

Rule 1: `put_nowait` never waits and returns whether the item was taken.  Rule 2: an item is never written again.
Rule 3: where cores are short, training, heartbeats and sockets get more of them than a worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from zmqtrain.core.errors import ChannelClosed

T = TypeVar("T")

NICENESS = 5
"""A worker is nicer by this than the thread that made it: it has a third of its weight at a core."""


class Mailbox(Generic[T]):
    """A bounded queue between threads; closing it wakes all threads that wait."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put_nowait(self, item: T) -> bool:
        """Put one item in; False if the mailbox is full or closed."""
        with self._changed:
            if self._closed or len(self._items) >= self.capacity:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get_nowait(self) -> T | None:
        """Take the oldest item, or None."""
        with self._changed:
            return self._items.popleft() if self._items else None

    def peek(self) -> T | None:
        """Return the oldest item without taking it, or None."""
        with self._changed:
            return self._items[0] if self._items else None

    def get(self, timeout_seconds: float | None = None) -> T | None:
        """Take the oldest item, waiting for one; None when the time is up. Raises ChannelClosed if closed and empty."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items or self._closed, timeout_seconds):
                return None
            if not self._items:
                raise ChannelClosed("the mailbox is closed")
            return self._items.popleft()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until there is an item or it is closed; return whether there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed, timeout_seconds)
            return bool(self._items)

    def close(self) -> None:
        """Refuse further items; those in it can still be taken out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._items)


class Worker:
    """One thread that does jobs in the order in which they were submitted: the codec thread of a node and of the hub.

    failed: called in the worker's thread with the exception of a job that raised; the worker goes on.
    """

    def __init__(self, name: str, capacity: int, failed: Callable[[BaseException], None]) -> None:
        self._jobs: Mailbox[Callable[[], None]] = Mailbox(capacity)
        self._failed = failed
        self.seconds = 0.0
        """See Executor."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], values: int = 0) -> bool:
        """See Executor."""
        return self._jobs.put_nowait(job)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Finish the submitted jobs and end; return whether the thread has ended in time."""
        self._jobs.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        _stand_back()
        while True:
            try:
                job = self._jobs.get()
            except ChannelClosed:
                return
            assert job is not None
            began = time.thread_time()
            try:
                job()
            except BaseException as error:
                self._failed(error)
            finally:
                self.seconds += time.thread_time() - began


def _stand_back() -> None:
    """Make this thread nicer, if that is allowed. Only Linux does that to a thread; elsewhere it would be the whole
    process."""
    if sys.platform == "linux":
        this = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, this, min(19, os.getpriority(os.PRIO_PROCESS, this) + NICENESS))

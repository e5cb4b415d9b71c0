"""Be what a node's training thread waits on, and where it hears that the node cannot go on.

Rule 1: the first failure is the one that counts; it is raised in the training thread, whenever that asks.
Rule 2: who waits is woken by every change and by a failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from zmqtrain.core.errors import ZmqTrainError


class Waiting:
    """What one training thread waits on. changed: a condition of the thread's own kind of time."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._failure: ZmqTrainError | None = None

    def notify(self) -> None:
        """Something has changed (any thread)."""
        with self._changed:
            self._changed.notify_all()

    def fail(self, error: ZmqTrainError) -> None:
        """The node cannot go on (any thread); who waits is woken by `notify`."""
        self._failure = self._failure or error

    def check(self) -> None:
        """Raise what has failed."""
        if self._failure is not None:
            raise self._failure

    def wait(self, condition: Callable[[], bool], timeout_seconds: float | None) -> bool:
        """Wait until the condition holds; False when the time is up. Raises what has failed, or fails meanwhile."""
        with self._changed:
            came = self._changed.wait_for(lambda: condition() or self._failure is not None, timeout_seconds)
        self.check()
        return came

"""Thread that writes checkpoints beside training: one write at a time, and the newest state wins.

A write that fails is a warning; training goes on, and AGAIN_SECONDS later the owner saves the state that it has then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import copy_context
from math import inf

from zmqtrain.core.errors import CheckpointError
from zmqtrain.core.interfaces import Clock

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 10.0
"""A write that failed is tried again after this time."""


class BackgroundWriter:
    """Writes for one owner. An owner calls `begin`, and then either `start` or `put_off`.

    what: is written, in the plural, for the log ("checkpoints").  goes_on: who does not stop for a failure ("the run").
    clock: the owner's.
    """

    def __init__(self, what: str, goes_on: str, clock: Clock) -> None:
        self._what, self._goes_on, self._clock = what, goes_on, clock
        self._idle = threading.Event()
        self._idle.set()
        self.unsaved = False
        """Whether the last state is not on the disk."""
        self.retry_at = inf
        """When the owner is to save again, by its clock; inf if nothing has failed since."""

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def begin(self) -> None:
        """Wait for the write in progress, if any, and reserve the writer for the next."""
        self._idle.wait()
        self._idle.clear()
        self.retry_at = inf

    def start(self, version: int, write: Callable[[], object]) -> None:
        """Do the write that was begun, in a thread. Its failure is a warning; it raises nothing."""

        def run() -> None:
            try:
                write()
            except CheckpointError as error:
                self.put_off(str(error))
            except Exception as error:  # the owner waits for this write, and must go on
                logger.error("writing %s failed at version %d", self._what, version, exc_info=error)
                self.put_off(repr(error))
            else:
                self.written(version)
                self._idle.set()

        try:
            threading.Thread(target=copy_context().run, args=(run,), name="zmqtrain-checkpoint").start()
        except RuntimeError as error:  # the system has no thread left
            self.put_off(str(error))

    def put_off(self, why: str) -> None:
        """Abandon the write that was begun: nothing is written, and the owner saves again later."""
        text = "no %s were written: %s. %s goes on; it is tried again in %.0f s"
        logger.warning(text, self._what, why, self._goes_on.capitalize(), AGAIN_SECONDS)
        self.unsaved, self.retry_at = True, self._clock.monotonic() + AGAIN_SECONDS
        self._idle.set()

    def cancel(self) -> None:
        """Abandon the write that was begun, without another try: its owner has failed."""
        self._idle.set()

    def written(self, version: int) -> None:
        if self.unsaved:
            logger.warning("%s are written again, from version %d", self._what, version)
        self.unsaved = False

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is being written; return False if that takes longer. None: for as long as it takes."""
        return self._idle.wait(timeout_seconds)

"""Keep a node one data unit ahead of its training thread, and say which units are done.

Rule 1: the training thread waits here only when there is nothing left to train on, and a broker is there to deal more.
Rule 2: while no broker deals, the node draws units of its own: training never stops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from zmqtrain.protocol.messages import WorkRequest, WorkUnit
from zmqtrain.types import LOCAL_UNITS, PeerId, first_local_unit

__all__ = ["UnitQueue"]

AHEAD = 2
ASK_AGAIN_SECONDS = 1.0


class UnitQueue:
    """The data units dealt to one node.

    ask: tells the network thread that `request` has something to say.  live: whether a broker is there to deal.
    changed: what the training thread waits on, None for one of its own.  idle: called in the training thread, now and
    then, while that waits for a unit.
    """

    def __init__(
        self,
        peer: PeerId,
        ask: Callable[[], None],
        live: Callable[[], bool],
        changed: threading.Condition | None = None,
    ) -> None:
        self._ask, self._live = ask, live
        self._next_local = first_local_unit(peer)
        self._units: deque[int] = deque()
        self._done: list[int] = []
        self._finished = self._asked = self._idle = self._drained = False
        self.end_version = -1
        """The last version of a run whose nodes have all drained, -1 until then."""
        self._changed = threading.Condition() if changed is None else changed
        self.idle: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ training thread

    def take(self, check: Callable[[], None]) -> int | None:
        """Return the next unit to train on, None when the run has no more. check: raises when the node has failed."""
        while True:
            unit = self.take_soon(check, ASK_AGAIN_SECONDS)
            if unit is not None or self._finished:
                return unit

    def take_soon(self, check: Callable[[], None], wait_seconds: float) -> int | None:
        """Return the next unit to train on; None when the run has no more (`finished`), or none came in this time."""
        check()
        with self._changed:
            self._idle = not (self._units or self._finished)
        if self._idle:
            self._ask()
            self.idle()
        with self._changed:
            if self._idle:
                self._changed.wait_for(lambda: self._units or self._finished or not self._live(), wait_seconds)
                self._idle = False
            if self._units or self._finished:
                unit = self._units.popleft() if self._units else None
                self._ask()
                return unit
            if self._live():
                return None
            self._next_local += 1
            return self._next_local

    def done(self, unit: int) -> None:
        """Take note that a unit is trained on."""
        if unit < LOCAL_UNITS:  # others were not dealt
            with self._changed:
                self._done.append(unit)

    def drain(self) -> bool:
        """Say, once the run has no more units, that nothing is pending here; False while it has."""
        with self._changed:
            if not self._finished:
                return False
            said, self._drained = self._drained, True
        if not said:
            self._ask()
        return True

    @property
    def finished(self) -> bool:
        """True once the run has no more units."""
        return self._finished

    def finish(self) -> None:
        """The run has no more units, as another than this broker has said."""
        self._finished = True

    @property
    def drained(self) -> bool:
        """True once this node has said that nothing is pending here."""
        return self._drained

    @property
    def waiting(self) -> bool:
        """True while the training thread waits for a unit."""
        return self._idle

    # ------------------------------------------------------------------ network thread

    def request(self) -> WorkRequest | None:
        """Return what is to be asked of the broker now, None for nothing."""
        with self._changed:
            if self._asked and not (self._idle or self._done or self._drained):
                return None
            done, self._done = tuple(self._done), []
            if self._drained:
                return WorkRequest(done, 0, idle=True)
            want = 0 if self._finished else max(0, AHEAD - len(self._units))
            if not done and not want:
                return None
            self._asked = True
            return WorkRequest(done, want, self._idle and want > 0)  # idle and wanting nothing would say: drained

    def dealt(self, answer: WorkUnit) -> None:
        """Take the broker's answer."""
        with self._changed:
            self._units.extend(answer.numbers)
            self._finished, self.end_version = answer.finished, max(self.end_version, answer.end_version)
            self._asked = False
            self._changed.notify_all()

    def reset(self) -> None:
        """The broker is gone: what was asked will not be answered, and what was dealt will be dealt again."""
        with self._changed:
            self._asked = False
            self._units.clear()
            self._changed.notify_all()

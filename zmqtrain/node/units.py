"""Keep a node one data unit ahead of its training thread, and say which units are done.

Rule 1: the training thread waits here only when there is nothing left to train on, and a broker is there to deal more.
Rule 2: while no broker deals, the node draws units of its own: training never stops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from zmqtrain.core.types import LOCAL_UNITS, PeerId, first_local_unit
from zmqtrain.protocol.messages import WorkRequest, WorkUnit

AHEAD = 2
ASK_AGAIN_SECONDS = 1.0
WHOLE_UNIT = 1 << 30
"""More batches than a unit has: it was done, and the broker had not heard so."""


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
        self.first = -1
        """The unit on which training began here, -1 until then."""
        self.used = self.stopped = False
        """Whether the training thread has asked for a unit yet; whether an operator has ended the run."""
        self._begun: tuple[int, int] | None = None  # the unit in hand, and how many of its batches were given
        self._passed: dict[int, int] = {}  # by unit of a checkpoint: so many of its batches were given before that
        self._held: tuple[int, ...] = ()  # the units of a checkpoint, until the broker has said which are still ours
        self._reached = -1
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
        self.used = True
        with self._changed:
            if self._held and not self._live():  # as far as is known here they are ours
                self._units.extend(self._held)
                self._held = ()
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

    def begin(self, unit: int) -> int:
        """Take note that training begins on a unit; return how many of its batches were given before (a checkpoint)."""
        passed = self._passed.pop(unit, 0)
        self._begun = (unit, passed)
        self.first = unit if self.first < 0 else self.first
        return passed

    def given(self) -> None:
        """Take note that a further batch of the unit in hand is given."""
        assert self._begun is not None
        self._begun = (self._begun[0], self._begun[1] + 1)

    def to_plain(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, as JSON can: the units in hand, and those done and not told."""
        with self._changed:
            begun = [] if self._begun is None else [list(self._begun)]
            passed = [*self._passed.items(), *((unit, WHOLE_UNIT) for unit in self._done)]
            return {
                "held": [*self._done, *(unit for unit, _ in begun), *self._units, *self._held],
                "passed": [*(list(one) for one in passed), *begun],
                "reached": begun[0][0] if begun else 0,
                "next_local": self._next_local,
            }

    def restore(self, plain: dict[str, Any], exactly: bool) -> None:
        """Take over what `to_plain` wrote: the broker is asked which of the units are still this node's.

        exactly: it has gone back to just where this node was, and is told where that is.
        """
        held = dict.fromkeys(int(unit) for unit in plain["held"])
        with self._changed:
            self._next_local = max(self._next_local, int(plain["next_local"]))
            self._passed = {int(unit): int(passed) for unit, passed in plain["passed"]}
            self._held = tuple(unit for unit in held if unit < LOCAL_UNITS)
            self._units = deque(unit for unit in held if unit >= LOCAL_UNITS)
            self._reached = int(plain["reached"]) if exactly else -1

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
        """The run has no more units, as another than this broker has said; this one deals none."""
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
            if self._held:
                self._asked = True
                want = max(0, AHEAD - len(self._held))
                return WorkRequest(done, want, self._idle and want > 0, self._held, self._reached)
            if self._drained:
                return WorkRequest(done, 0, idle=True)
            want = 0 if self._finished else max(0, AHEAD - len(self._units))
            if not done and not want:
                return None
            self._asked = True
            return WorkRequest(done, want, self._idle and want > 0)  # idle and wanting nothing would say: drained

    def stop(self) -> None:
        """An operator has ended the run: the unit in hand is cut short, and no other begins."""
        with self._changed:
            self.stopped = self._finished = True
            self._held = ()
            self._units.clear()
            self._changed.notify_all()

    def dealt(self, answer: WorkUnit) -> None:
        """Take the broker's answer."""
        with self._changed:
            self._held, self._reached = (), -1
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

"""The data units dealt to one node, fetched one ahead of its training thread, and the batches made of them.

The training thread waits here only while it has nothing to train on and a broker can deal more. While no broker
deals, the node draws units of its own, so training never stops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from zmqtrain.core.types import LOCAL_UNITS, PeerId, first_local_unit
from zmqtrain.monitor.recorder import NodeRecorder
from zmqtrain.protocol.messages import WorkRequest, WorkUnit

Batch = TypeVar("Batch", covariant=True)

AHEAD = 2
ASK_AGAIN_SECONDS = 1.0
WHOLE_UNIT = 1 << 30
"""More batches than a unit has: the unit was finished, and the broker had not been told."""


class UnitSource(Protocol[Batch]):
    """Makes batches of a numbered data unit: the same number gives the same batches on every node."""

    def batches(self, unit: int) -> Iterator[Batch]:
        """Give the batches of one unit."""


Source = UnitSource[Batch] | Callable[[int], Iterator[Batch]]


class UnitNode(Protocol):
    """The node, as its unit queue uses it."""

    @property
    def live(self) -> bool:
        """Whether a broker is there to deal units."""

    def ask_for_units(self) -> None:
        """Send `UnitQueue.request` to the broker, if there is one."""

    def check(self) -> None:
        """Raise the error with which the node has failed, if it has."""

    def while_idle(self) -> None:
        """Called in the training thread, about once a second, while it waits for a unit."""


class UnitQueue:
    """The data units of one node. changed: the condition on which the training thread waits."""

    def __init__(
        self, peer: PeerId, node: UnitNode, changed: threading.Condition, events: NodeRecorder | None = None
    ) -> None:
        self._node, self._changed, self._events = node, changed, events
        self._next_local = first_local_unit(peer)
        self._units: deque[int] = deque()
        self._done: list[int] = []
        self._asked = False
        self.finished = self.waiting = self.drained = False
        """Whether the run has no more units; the training thread waits for one; this node has said it has drained."""
        self.first = -1
        """The unit on which training began here, -1 until then."""
        self.used = self.stopped = False
        """Whether the training thread has asked for a unit yet; whether an operator has ended the run."""
        self._begun: tuple[int, int] | None = None  # the current unit, and how many of its batches were given
        self._passed: dict[int, int] = {}  # by unit of a checkpoint: how many of its batches were given before it
        self._held: tuple[int, ...] = ()  # units of a checkpoint, until the broker has said which are still ours
        self._reached = -1
        self.end_version = -1
        """The last version of a run whose nodes have all drained, -1 until then."""

    # ------------------------------------------------------------------ training thread

    def batches(self, source: Source[Batch]) -> Iterator[Batch]:
        """Give the batches of all units until the run is over. A unit is done when the batch after its last is
        asked for."""
        while (unit := self.take()) is not None:
            yield from self._batches_of(source, unit)

    def batches_within(self, source: Source[Batch], wait_seconds: float) -> Iterator[Batch | None]:
        """Give the batches as `batches` does, and None each time that no unit has come for `wait_seconds`."""
        while (unit := self.take_soon(wait_seconds)) is not None or not self.finished:
            if unit is None:
                yield None
            else:
                yield from self._batches_of(source, unit)

    def _batches_of(self, source: Source[Batch], unit: int) -> Iterator[Batch]:
        if self._events is not None:
            self._events.began(unit)
        batches_of: Callable[[int], Iterator[Batch]] = source.batches if hasattr(source, "batches") else source
        passed = self._passed.pop(unit, 0)
        self._begun = (unit, passed)
        self.first = unit if self.first < 0 else self.first
        for number, batch in enumerate(batches_of(unit)):
            if self.stopped:  # an operator has ended the run: the unit is not done
                return
            if number >= passed:  # the checkpoint was made after those before it
                self._begun = (unit, self._begun[1] + 1)
                yield batch
        self.done(unit)

    def take(self) -> int | None:
        """Return the next unit to train on, None when the run has no more."""
        while True:
            unit = self.take_soon(ASK_AGAIN_SECONDS)
            if unit is not None or self.finished:
                return unit

    def take_soon(self, wait_seconds: float) -> int | None:
        """Return the next unit to train on; None when the run has no more (`finished`), or none came in this time."""
        self._node.check()
        self.used = True
        with self._changed:
            if self._held and not self._node.live:  # nobody can say that they are not ours
                self._units.extend(self._held)
                self._held = ()
            self.waiting = not (self._units or self.finished)
        if self.waiting:
            self._node.ask_for_units()
            self._node.while_idle()
        with self._changed:
            if self.waiting:
                self._changed.wait_for(lambda: self._units or self.finished or not self._node.live, wait_seconds)
                self.waiting = False
            if self._units or self.finished:
                unit = self._units.popleft() if self._units else None
                self._node.ask_for_units()
                return unit
            if self._node.live:
                return None
            self._next_local += 1
            return self._next_local

    def done(self, unit: int) -> None:
        """Record that a unit is trained on; one that no broker dealt is nobody's business."""
        if unit < LOCAL_UNITS:
            with self._changed:
                self._done.append(unit)

    def drain(self) -> bool:
        """Tell the broker, once the run has no more units, that nothing is pending here; False while it has."""
        with self._changed:
            if not self.finished:
                return False
            said, self.drained = self.drained, True
        if not said:
            self._node.ask_for_units()
        return True

    def to_plain(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as JSON can: the units in hand, and those done that were not reported."""
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
        """Take over what `to_plain` wrote; the broker is asked which of the units are still this node's.

        exactly: the broker has gone back to where this node was, and is told where that is.
        """
        held = dict.fromkeys(int(unit) for unit in plain["held"])
        with self._changed:
            self._next_local = max(self._next_local, int(plain["next_local"]))
            self._passed = {int(unit): int(passed) for unit, passed in plain["passed"]}
            self._held = tuple(unit for unit in held if unit < LOCAL_UNITS)
            self._units = deque(unit for unit in held if unit >= LOCAL_UNITS)
            self._reached = int(plain["reached"]) if exactly else -1

    # ------------------------------------------------------------------ network thread

    def request(self) -> WorkRequest | None:
        """Return what is to be asked of the broker now, None for nothing."""
        with self._changed:
            if self._asked and not (self.waiting or self._done or self.drained):
                return None
            done, self._done = tuple(self._done), []
            if self._held:
                self._asked = True
                want = max(0, AHEAD - len(self._held))
                return WorkRequest(done, want, self.waiting and want > 0, self._held, self._reached)
            if self.drained:
                return WorkRequest(done, 0, idle=True)
            want = 0 if self.finished else max(0, AHEAD - len(self._units))
            if not done and not want:
                return None
            self._asked = True
            return WorkRequest(done, want, self.waiting and want > 0)  # idle and wanting nothing would mean: drained

    def stop(self) -> None:
        """An operator has ended the run: the current unit is cut short, and no other begins."""
        with self._changed:
            self.stopped = self.finished = True
            self._held = ()
            self._units.clear()
            self._changed.notify_all()

    def dealt(self, answer: WorkUnit) -> None:
        """Take the broker's answer."""
        with self._changed:
            self._held, self._reached = (), -1
            self._units.extend(answer.numbers)
            self.finished, self.end_version = answer.finished, max(self.end_version, answer.end_version)
            self._asked = False
            self._changed.notify_all()

    def reset(self) -> None:
        """The broker is lost: it will not answer, and will deal what it had dealt again."""
        with self._changed:
            self._asked = False
            self._units.clear()
            self._changed.notify_all()

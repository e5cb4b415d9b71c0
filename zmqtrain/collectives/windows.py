"""Keep the windows of one call: what goes to a rank as far as there is room there, and what has come of one (pure).

Rule 1: at most WINDOW_BYTES of a call are on their way to a rank and not taken there; half of that at a time is
reported as taken. To the hub, which has a window of its own for each rank, there is always room.
Rule 2: what is longer than PART_BYTES is cut on its way; each part says how long the whole is, and where it begins.
Rule 3: memory that goes out uncopied is lent until the other side has said that it has taken it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zmqtrain.collectives.wire import COPIED_BELOW_BYTES
from zmqtrain.core.types import MAX_FRAME_BYTES

PART_BYTES = MAX_FRAME_BYTES
"""What is longer is cut on its way."""

WINDOW_BYTES = 4 * PART_BYTES
REPORT_BYTES = WINDOW_BYTES // 2
"""How much may be on its way, and after how much more the other side says that it has taken it."""


class Part(NamedTuple):
    """A part of something sent. values: anything with `nbytes`, None for nothing.  total: bytes of the whole.
    start: where in it the part begins.  code: of their dtype."""

    values: Any
    total: int
    start: int
    code: int


@dataclass(slots=True)
class Outflow:
    """What goes to one rank, in order.

    bounded: there is room for WINDOW_BYTES; else always.  confirm: whatever is sent counts as lent.
    sent, taken: bytes so far; lent: up to here memory of the sender's may be on its way.
    """

    bounded: bool = True
    confirm: bool = False
    sent: int = 0
    taken: int = 0
    lent: int = 0
    _waiting: deque[Part] = field(default_factory=deque)

    def put(self, values: memoryview, code: int) -> None:
        """Send these bytes when there is room. code: of their dtype, which may be another by then."""
        total = values.nbytes
        if not total:
            self._waiting.append(Part(None, 0, 0, code))
        for start in range(0, total, PART_BYTES):
            self._waiting.append(Part(values[start : start + PART_BYTES], total, start, code))

    def next(self) -> Part | None:
        """Return what is sent now; None: nothing waits, or there is no room."""
        if not self._waiting or (self.bounded and self.sent - self.taken >= WINDOW_BYTES):
            return None
        part = self._waiting.popleft()
        if part.values is not None:
            self.sent += part.values.nbytes
            if self.bounded and (part.values.nbytes >= COPIED_BELOW_BYTES or self.confirm):
                self.lent = self.sent
        return part

    @property
    def is_done(self) -> bool:
        """Whether all is sent, and none of the sender's memory is on its way."""
        return self.taken >= self.lent and not self._waiting


@dataclass(slots=True)
class Inflow:
    """What has come of one rank and was not taken: (values or None, bytes of the whole, code of their dtype).

    digest: of the call that it says it makes.  reports: it hears what is taken (the hub does not).
    """

    digest: int
    reports: bool = True
    parts: deque[tuple[memoryview | None, int, int]] = field(default_factory=deque)
    taken: int = 0
    _reported: int = 0
    _is_awaited: bool = False

    def put(self, values: memoryview | None, total: int, code: int, confirm: bool) -> None:
        """Keep a part that has come. confirm: whatever its length, the sender waits to hear that it is taken."""
        self.parts.append((values, total, code))
        nbytes = 0 if values is None else values.nbytes
        self._is_awaited |= (nbytes >= COPIED_BELOW_BYTES or confirm) and self.reports

    def take(self, nbytes: int) -> bool:
        """Count so much as taken; return whether its sender is to be told how much that is by now."""
        self.taken += nbytes
        return self._report(self.reports and self.taken - self._reported >= REPORT_BYTES)

    def finish(self) -> bool:
        """Return whether its sender is to be told how much was taken, as nothing more will be."""
        return self._report(self._is_awaited and self._reported < self.taken)

    def _report(self, due: bool) -> bool:
        if due:
            self._reported = self.taken
        return due

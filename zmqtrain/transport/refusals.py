"""Count what was refused at a port, and log it at a bounded rate: a flood must not fill a disk.

Rule 1: the first refusal is said at once; what follows within `SAY_SECONDS` is one line at their end.
Rule 2: what belongs to normal life (a node that connects again, a look at the port) is counted, and not said.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

SAY_SECONDS = 10.0

RECENT_SECONDS = 60.0
"""For so long a refusal is shown beside the run: who was turned away long ago is no news."""
GRAIN_SECONDS = 5.0

REASONS = {
    "handshake": (
        "connection that does not speak as our nodes do here (without keys, or with another hub's key)",
        "connections that do not speak as our nodes do here (without keys, or with another hub's key)",
    ),
    "unfinished": ("connection that ended before it was greeted", "connections that ended before they were greeted"),
    "key": ("connection with a key that is not authorised", "connections with a key that is not authorised"),
    "revoked": ("message of a key that was revoked", "messages of a key that was revoked"),
    "name": (
        "message under the name of a peer that came with another key",
        "messages under the name of a peer that came with another key",
    ),
    "life": ("message of a peer's former life", "messages of a peer's former life"),
    "dismissed": (
        "message of a peer that was shown out, or of another's id",
        "messages of peers that were shown out, or of others' ids",
    ),
    "half-open": (
        "connection that had not said who it is, to make room",
        "connections that had not said who they are, to make room",
    ),
    "address": ("connection from an address that has too many", "connections from an address that has too many"),
    "full": ("connection, as there are too many in all", "connections, as there are too many in all"),
}
"""What is refused: in a few words, of one and of several."""

NORMAL = frozenset({"life", "unfinished"})
"""What happens in normal life: a node connects again, `zmqtrain doctor` looks whether the port is open."""


class Refusals:
    """The refusals at one port, in its loop. told: called at each.  counts: by reason, since the beginning.

    clock: seconds; never goes back.
    """

    def __init__(
        self, where: str, told: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._where, self._told, self._clock = where, told, clock
        self._recent: deque[tuple[float, int]] = deque()  # the beginnings of spans of GRAIN_SECONDS, with counts
        self.counts: Counter[str] = Counter()
        self._unsaid: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None

    def count(self, reason: str, whose: str = "") -> None:
        """Count one. whose: an address or a name, for people."""
        self.counts[reason] += 1
        if reason in NORMAL:
            logger.debug("%s: a %s (%s)", self._where, REASONS[reason][0], whose)
            return self._told()
        self._unsaid[reason] += 1
        now = self._clock()
        if not self._recent or now - self._recent[-1][0] >= GRAIN_SECONDS:
            self._recent.append((now, 0))
        self._recent[-1] = self._recent[-1][0], self._recent[-1][1] + 1
        if whose:
            self._last[reason] = whose
        self._told()
        if self._timer is None:
            self._say()
            self._timer = asyncio.get_running_loop().call_later(SAY_SECONDS, self._say_again)

    @property
    def recent(self) -> int:
        """How many there were in the last minute, but for what happens in normal life."""
        while self._recent and self._clock() - self._recent[0][0] > RECENT_SECONDS:
            self._recent.popleft()
        return sum(count for _, count in self._recent)

    def close(self) -> None:
        """Say what was not said yet, and nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._say()

    def _say_again(self) -> None:
        self._timer = None
        if self._unsaid:
            self._say()
            self._timer = asyncio.get_running_loop().call_later(SAY_SECONDS, self._say_again)

    def _say(self) -> None:
        for reason, count in self._unsaid.items():
            last = f" (the last: {self._last[reason]})" if reason in self._last else ""
            logger.warning("%s refused %d %s%s", self._where, count, REASONS[reason][count > 1], last)
        self._unsaid.clear()

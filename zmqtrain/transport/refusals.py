"""Count what was refused at a port, and log it at a bounded rate: a flood must not fill a disk.

Rule: the first refusal is said at once; what follows within `SAY_SECONDS` is one line at their end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

__all__ = ["REASONS", "SAY_SECONDS", "Refusals"]

logger = logging.getLogger(__name__)

SAY_SECONDS = 10.0

REASONS = {
    "handshake": "connections that do not speak as our nodes do here (without keys, or with another hub's key)",
    "key": "connections with a key that is not authorised",
    "revoked": "messages of a key that was revoked",
    "name": "messages under the name of a peer that came with another key",
    "life": "messages of a peer's former life",
    "dismissed": "messages of peers that were shown out, and of others' ids",
    "half-open": "connections that had not said who they are, to make room",
    "address": "connections from an address that has too many",
    "full": "connections, as there are too many in all",
}
"""What is refused: in a few words."""


class Refusals:
    """The refusals at one port, in its loop. told: called at each.  counts: by reason, since the beginning."""

    def __init__(self, where: str, told: Callable[[], None] = lambda: None) -> None:
        self._where, self._told = where, told
        self.counts: Counter[str] = Counter()
        self._unsaid: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None

    def count(self, reason: str, whose: str = "") -> None:
        """Count one. whose: an address or a name, for people."""
        self.counts[reason] += 1
        self._unsaid[reason] += 1
        if whose:
            self._last[reason] = whose
        self._told()
        if self._timer is None:
            self._say()
            self._timer = asyncio.get_running_loop().call_later(SAY_SECONDS, self._say_again)

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
            logger.warning("%s refused %d %s%s", self._where, count, REASONS[reason], last)
        self._unsaid.clear()

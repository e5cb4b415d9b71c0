"""Decide when a node says Hello, and where: to the hub where it was, or to its standby (pure: `now` is an argument).

Rule 1: an attempt is given its time, by `Backoff`; the next one begins with new connections, for what nobody answered
may be a connection to a host that is no more.
Rule 2: the addresses are taken in turn: those that were given, then the standbys that were heard of, the newest few.
Without a given one no other is looked for: then there is one channel, and who made it knows where that leads.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from zmqtrain.core.types import PeerId
from zmqtrain.protocol.backoff import Backoff

MOST_LEARNT = 4
"""Addresses of standbys that a node keeps, the newest."""


class Search:
    """A node's search for its hub. given: where that may be, the first one where the node looks first."""

    def __init__(self, peer: PeerId, given: Sequence[str]) -> None:
        self._given, self._learnt = tuple(given), list[str]()
        self._looks_at = self._given[0] if self._given else ""
        self._backoff = Backoff(zlib.crc32(peer.encode()))
        self._at = 0.0
        self._fresh = True  # the connections: no Hello has gone over them

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the hub is looked for: as given, then the standbys that were heard of."""
        return (*self._given, *self._learnt)

    def know(self, standby: str) -> None:
        """Take note of where a standby of the hub is, or was."""
        if standby and self._given and standby not in self.addresses:
            self._learnt = [*self._learnt, standby][-MOST_LEARNT:]

    def is_due(self, now: float) -> bool:
        """Return whether the next attempt begins."""
        return now >= self._at

    def anew(self) -> str | None:
        """Return the address to which the next attempt makes new connections; "": where they were; None: those that
        are there were not tried yet."""
        if self._fresh:
            return None
        known = self.addresses
        if len(known) < 2:
            return ""
        at = known.index(self._looks_at) if self._looks_at in known else -1
        self._looks_at = known[(at + 1) % len(known)]
        return self._looks_at

    def began(self, now: float) -> None:
        """Take note that a Hello goes out."""
        self._at, self._fresh = now + self._backoff.next(), False

    def answered(self) -> None:
        """Take note that somebody has answered: the next attempts need not be further and further apart."""
        self._backoff.reset()

    def lost(self, again_at: float, elsewhere: bool) -> None:
        """Look for the hub again, from then on. elsewhere: not first where it was, if another address is known."""
        self._at, self._fresh = again_at, not (elsewhere and len(self.addresses) > 1)

"""Decide whose turn it is to be sent the run's parameters, so that this takes a bounded share of the hub's port.

Rule 1: at most `AT_ONCE` peers are being sent parameters, or as many as together are sent at most `AT_ONCE_BYTES`; the
others wait for their turn.
Rule 2: peers that were not sent any in the last `AGAIN_SECONDS` come first; then the one that was sent them longest
ago.
Rule 3: in the long run all of them together have `SHARE` of the port's rate, and those that fetch again have
`AGAIN_SHARE`.  A number of snapshots is free, so that a peer that fetches alone never waits.
Rule 4: a peer that does not take what it is sent loses its place to the next one, and not what is sent.
Rule 5: pure: `now` is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqtrain.core.types import PeerId

AT_ONCE, AT_ONCE_BYTES = 2, 8 << 20
SHARE, AGAIN_SHARE = 0.5, 0.125
AGAIN_SECONDS = 60.0
FREE, FREE_BYTES = 4, 32 << 20
"""So many snapshots, or bytes if they are more, go before `SHARE` holds."""
AGAIN_FREE, AGAIN_FREE_BYTES = 2, 4 << 20
"""And before `AGAIN_SHARE` holds."""
PATIENCE_SECONDS, PATIENCE_TIMES = 2.0, 4.0
"""A place is kept for so long, and for so many times as long as the parameters take at the port's rate."""
PEERS_KEPT = 1024


@dataclass
class _Place:
    """Of one peer whose turn has come. used: it has been sent what it asked for, at `since`."""

    since: float
    used: bool = False


@dataclass
class _Owed:
    """Bytes that were sent ahead of a rate. at: when it was so many."""

    bytes: float = 0.0
    at: float = 0.0

    def left(self, rate: float, now: float) -> float:
        """Let time pass at this rate; return what is owed then."""
        self.bytes, self.at = max(0.0, self.bytes - rate * max(0.0, now - self.at)), max(now, self.at)
        return self.bytes


class Turns:
    """The peers that wait for parameters, and those whose turn it is."""

    def __init__(self) -> None:
        self._waiting: dict[PeerId, None] = {}  # in the order in which they came
        self._places: dict[PeerId, _Place] = {}
        self._served: dict[PeerId, float] = {}  # when its last turn came, the oldest first
        self._all, self._again = _Owed(), _Owed()

    @property
    def places(self) -> list[PeerId]:
        """The peers whose turn it is, whether or not they have been sent anything yet."""
        return list(self._places)

    def wait(self, peer: PeerId) -> bool:
        """Let a peer wait for its turn; False if it waits already, or its turn has come and was not used yet."""
        if peer in self._waiting or self.is_due(peer):
            return False
        self._waiting[peer] = None
        return True

    def next(self, size: int, rate: float, now: float) -> PeerId | None:
        """Give the next turn, if there may be one now; return whose it is.

        size: of the parameters, in bytes.  rate: what the port carries, in bytes per second.
        """
        if len(self._places) >= max(AT_ONCE, AT_ONCE_BYTES // max(1, size)):
            return None
        waiting = [peer for peer in self._waiting if peer not in self._places]
        peer = min(waiting, key=lambda peer: self._last(peer, now), default=None)  # the first of those that are equal
        if peer is None or not _has_room(self._all, SHARE * rate, size, max(FREE * size, FREE_BYTES), now):
            return None
        most = max(AGAIN_FREE * size, AGAIN_FREE_BYTES)
        if self._last(peer, now) and not _has_room(self._again, AGAIN_SHARE * rate, size, most, now):
            return None
        del self._waiting[peer]
        self._places[peer] = _Place(now)
        return peer

    def is_due(self, peer: PeerId) -> bool:
        """Return whether the peer's turn has come, and was not used yet."""
        return peer in self._places and not self._places[peer].used

    def used(self, peer: PeerId, size: int, now: float) -> None:
        """Take note that a peer whose turn it is has been sent so many bytes."""
        if (place := self._places.get(peer)) is not None:
            place.used, place.since = True, now
        self._all.bytes += size
        if self._last(peer, now):
            self._again.bytes += size
        self._served.pop(peer, None)
        self._served[peer] = now
        while len(self._served) > PEERS_KEPT:
            del self._served[next(iter(self._served))]

    def took(self, peer: PeerId) -> None:
        """Take note that a peer has all that it was sent: its place is the next one's."""
        if peer in self._places and self._places[peer].used:
            del self._places[peer]

    def look(self, size: int, rate: float, now: float) -> None:
        """Let time pass: a peer that does not take what it was sent gives up its place."""
        patience = PATIENCE_SECONDS + PATIENCE_TIMES * size / rate
        for peer, place in list(self._places.items()):
            if place.used and now - place.since > patience:
                del self._places[peer]

    def withdraw(self, peer: PeerId) -> None:
        """Take note that a peer needs nothing; what it is being sent keeps its place."""
        self._waiting.pop(peer, None)
        if self.is_due(peer):
            del self._places[peer]

    def forget(self, peer: PeerId) -> None:
        """Take note that a peer has gone; when it was served is remembered."""
        self._waiting.pop(peer, None)
        self._places.pop(peer, None)

    def _last(self, peer: PeerId, now: float) -> float:
        """Return when the peer was last served; 0 if that was never, or long ago."""
        at = self._served.get(peer, 0.0)
        return at if at and now - at < AGAIN_SECONDS else 0.0


def _has_room(owed: _Owed, rate: float, size: int, most: float, now: float) -> bool:
    return owed.left(rate, now) + size <= most

"""Say again, once a minute, that a node has no hub: whoever looks at its log then knows that it trains alone (pure).

Rule: what is said is the caller's; here is when.
"""

from __future__ import annotations

from typing import NamedTuple

from zmqtrain.protocol.peer import Peer, PeerState

AGAIN_SECONDS = 60.0


class Solitude(NamedTuple):
    """A node without a hub: since how many seconds, where it looks for one, why none is there, and where its training
    stands."""

    seconds: float
    where: str
    why: str
    step: int
    loss: float


class Alone:
    """How long one node has been without a hub, and when that was said last.

    since: when it lost its hub; None: it has one, or has had none yet.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._say_at = 0.0

    def look(self, peer: Peer, now: float) -> float:
        """Take note of how it is now; return the seconds for which it has been alone if they are to be said, else 0."""
        if peer.observer or not peer.run or peer.state is not PeerState.CONNECTING:
            self.since = None
            return 0.0
        if self.since is None:
            self.since, self._say_at = now, now + AGAIN_SECONDS
        if now < self._say_at:
            return 0.0
        self._say_at = now + AGAIN_SECONDS
        return now - self.since

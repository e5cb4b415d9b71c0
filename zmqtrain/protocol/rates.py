"""Bound how many messages a peer may say in a second: far more than any node does, far fewer than would hold up others.

    a node that offers in every step of 1 ms: 1000 x (Publish, WorkRequest, 2 credits of an aggregate's chunks, ...)

Rule 1: pure: `now` is an argument.  Rule 2: on the lane of control alone: what comes on the other one has its windows.
Rule 3: who is over its measure is not heard: first it is sent away, once; while it goes on, nothing of it is read, so
that it costs what counting costs.  Rule 4: strangers are counted like members; who was heard of longest ago is
forgotten first.
Source: the token bucket, Turner 1986.
"""

from __future__ import annotations

from enum import Enum

from zmqtrain.types import PeerId

__all__ = ["MESSAGES_PER_SECOND", "MESSAGES_AT_ONCE", "Hearing", "MessageRates"]

MESSAGES_PER_SECOND = 20_000.0
"""What a peer may say for long: thrice what a node says whose steps take 1 ms, each with an exchange."""
MESSAGES_AT_ONCE = 200_000.0
"""And at once: what queued while the broker was stopped for ten seconds, or the requests of a client of many keys."""
PEERS_KEPT = 1024


class Hearing(Enum):
    """What is done with a message."""

    HEARD = "heard"
    TOO_MANY = "too many"
    NOT_HEARD = "not heard"


class MessageRates:
    """What each peer may still say. not_heard: messages that were not read, of all peers."""

    def __init__(self) -> None:
        self.not_heard = 0
        self._left: dict[PeerId, tuple[float, float]] = {}  # what was left, and when
        self._over: set[PeerId] = set()

    def take(self, peer: PeerId, now: float) -> Hearing:
        """Take note of a message; TOO_MANY for the first that is over the measure.

        Who is over it is heard again when a second's messages are left.
        """
        left, at = self._left.pop(peer, (MESSAGES_AT_ONCE, now))
        left = min(MESSAGES_AT_ONCE, left + (now - at) * MESSAGES_PER_SECOND)
        heard = left >= (MESSAGES_PER_SECOND if peer in self._over else 1)
        self._left[peer] = (left - heard, now)  # now the most recent
        if len(self._left) > PEERS_KEPT:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._over.discard(oldest)
        if heard:
            self._over.discard(peer)
            return Hearing.HEARD
        self.not_heard += 1
        if peer in self._over:
            return Hearing.NOT_HEARD
        self._over.add(peer)
        return Hearing.TOO_MANY

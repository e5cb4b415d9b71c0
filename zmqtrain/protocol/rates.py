"""Bound what a peer may say in a second, and how much of the broker's time its messages may take.

    a node that offers in every step of 1 ms: 1000 x (Publish, WorkRequest, 2 credits of an aggregate's chunks, ...)

Rule 1: pure: `now` is an argument.  Rule 2: messages are counted on the lane of control alone: what comes on the other
one has its windows; time is counted on both.
Rule 3: a peer over its measure is not heard: first it is sent away, once; while it goes on, nothing of it is read, so
that it costs what counting costs.  Rule 4: unknown peers are counted like members; the peer that was heard longest ago
is forgotten first.
Rule 5: the time that an ordinary message takes is not counted: the channel is fair among connections, and the number of
messages is bounded.  Counted is what a message takes besides, and a fixed time for one that no sound peer sends.
Source: the token bucket, Turner 1986.
"""

from __future__ import annotations

from enum import Enum

from zmqtrain.core.types import PeerId

MESSAGES_PER_SECOND = 20_000.0
"""What a peer may say for long: thrice what a node says whose steps take 1 ms, each with an exchange."""
MESSAGES_AT_ONCE = 200_000.0
"""And at once: what queued while the broker was stopped for ten seconds, or the requests of a client of many keys."""
LOOP_SECONDS, LOOP_SHARE = 0.5, 0.02
"""A peer's messages may take so many seconds of the broker's loop at once, and for long this share of its time, beyond
what ordinary ones take."""
FAULT_SECONDS = 0.02
"""What a message is counted for that no sound peer sends: 25 at once, and one a second for long."""
BACK_AT, MOST_COUNTED = 0.9, 1.3
"""A peer that was shown out is heard again once so much of LOOP_SECONDS is left of what was counted, and never more is
counted than MOST_COUNTED times that: so it is heard 10 s later at the latest."""
SPARED_SECONDS, SPARED_SECONDS_PER_BYTE = 5e-4, 1e-7
"""What an ordinary message takes at most, by the bytes of its head: an old PC needs a fifth of it."""
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


def cost_of(seconds: float, head_bytes: int) -> float:
    """Return what of the time that a message took is counted."""
    return max(0.0, seconds - SPARED_SECONDS - SPARED_SECONDS_PER_BYTE * head_bytes)


class LoopBudgets:
    """What each peer has taken of the loop's time, of late, beyond ordinary messages."""

    def __init__(self) -> None:
        self._taken: dict[PeerId, tuple[float, float]] = {}  # how much, and when that was so
        self._out: set[PeerId] = set()

    def take(self, peer: PeerId, seconds: float, now: float) -> bool:
        """Count so many seconds; return whether the peer is to be shown out for them, which it is once."""
        if seconds <= 0:
            return False
        taken = min(MOST_COUNTED * LOOP_SECONDS, self._taken_by(peer, now) + seconds)
        self._taken.pop(peer, None)
        self._taken[peer] = taken, now  # now the most recent
        if len(self._taken) > PEERS_KEPT:
            oldest = next(iter(self._taken))
            del self._taken[oldest]
            self._out.discard(oldest)
        if taken <= LOOP_SECONDS or peer in self._out:
            return False
        self._out.add(peer)
        return True

    def is_heard(self, peer: PeerId, now: float) -> bool:
        """Return whether messages of this peer are read; one that was shown out is again after a while."""
        if peer in self._out and self._taken_by(peer, now) <= BACK_AT * LOOP_SECONDS:
            self._out.discard(peer)
        return peer not in self._out

    def _taken_by(self, peer: PeerId, now: float) -> float:
        taken, at = self._taken.get(peer, (0.0, now))
        return max(0.0, taken - (now - at) * LOOP_SHARE)

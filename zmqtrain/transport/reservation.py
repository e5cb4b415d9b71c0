"""Keep what is sent through a port to a share of it, control first (pure: no clock, no socket; `now` is an argument).

Rule 1: control never waits, but it is paid for: what follows waits the longer.
Rule 2: deltas go before snapshots, but for one chunk in `OVERTAKEN`, so that nothing waits for ever.
Rule 3: who must wait is told for how long, and asks again then: nobody polls.
Rule 4: a rate that was not told is measured from below: bytes that are known to be over, by a time that is known to
hold all of their way. So the fastest that was ever seen is never more than the port can do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import IntEnum
from math import inf, isfinite
from typing import Generic, TypeVar

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import MAX_FRAME_BYTES

BURST_SECONDS = 0.03
"""What may go at once after a rest, as time at the reserved rate: a late timer costs nothing, and who types in a remote
shell does not feel it."""
BURST_BYTES = MAX_FRAME_BYTES + 4096
"""And at least so much: the largest chunk with its head, so that no message is larger than the burst."""
OVERTAKEN = 8
METERED_BYTES = 256 << 10
"""Fewer bytes at a time say more of latencies than of a link's rate."""

Who = TypeVar("Who", bound=Hashable)


@dataclass(frozen=True)
class LinkShare:
    """What training may use of a port, each way.

    rate: of the port, bytes of payload per second, one way; 0: as it is measured.  share: of that.
    Raises ConfigError for what no port has.
    """

    rate: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is what training may take of the link, in 0 < share <= 1, got {self.share:g}")
        if not 0 <= self.rate < inf:
            raise ConfigError(f"a link's rate must be 0 (as measured) or more, got {self.rate:g}")

    def limit(self, measured: float = 0.0) -> float | None:
        """Return the bytes per second that may be used; None: no limit is wanted, or none can be said yet."""
        rate = self.rate or (measured if self.share < 1 else 0.0)
        return self.share * rate if rate else None

    def usable(self, measured: float = 0.0) -> float:
        """Return the bytes per second that can be counted on, limited or not; 0: nothing is known of the port yet."""
        return self.share * (self.rate or measured)


class TokenBucket:
    """A rate that may be exceeded by one burst.

    rate: bytes per second; None: no limit.  Whoever may go at `wait_seconds` 0 and pays: over any time t, what has gone
    so is at most burst_bytes + rate · t. What is larger than the burst goes when the bucket is full, and owes the rest.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.rate: float | None = None
        self.burst_bytes = self._tokens = float(BURST_BYTES)
        self._now: float | None = None
        self.set_rate(rate)

    def set_rate(self, rate: float | None) -> None:
        """Go on at another rate; what is in the bucket stays, as far as it has room. Raises ConfigError unless > 0."""
        if rate is not None and not (rate > 0 and isfinite(rate)):
            raise ConfigError(f"a rate must be more than 0 bytes per second (or None), got {rate}")
        was_full = self._tokens >= self.burst_bytes
        self.rate, self.burst_bytes = rate, max(float(BURST_BYTES), BURST_SECONDS * (rate or 0.0))
        self._tokens = self.burst_bytes if was_full else min(self._tokens, self.burst_bytes)

    def wait_seconds(self, size: float, now: float) -> float:
        """Return how long `size` bytes must wait from `now` (seconds, any origin); 0: they may go."""
        if self.rate is None:
            return 0.0
        self._fill(now)
        missing = min(size, self.burst_bytes) - self._tokens
        return missing / self.rate if missing > 0.5 else 0.0  # half a byte: what floats lose

    def pay(self, size: float, now: float) -> None:
        """Take note that `size` bytes go at `now`, whether or not they should have waited."""
        if self.rate is not None:
            self._fill(now)
            self._tokens -= size

    def _fill(self, now: float) -> None:
        """Add what has come in since; a `now` that runs backwards adds nothing."""
        assert self.rate is not None
        passed = 0.0 if self._now is None else max(0.0, now - self._now)
        self._now = now if self._now is None else max(self._now, now)
        self._tokens = min(self.burst_bytes, self._tokens + passed * self.rate)


class Use(IntEnum):
    """What a port is used for, the first first."""

    CONTROL = 0
    DELTA = 1
    SNAPSHOT = 2


class Reservation(Generic[Who]):
    """One way through a port: whose turn it is to send, and when, within a rate.

    rate: bytes per second that may be used; None: no limit.  Those who wait on a lane take turns; one whose own link
    is not ready is passed over, one that the port is not ready for is waited for, and never overtaken by what is small.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.bucket = TokenBucket(rate)
        self._lanes: dict[Use, dict[Who, None]] = {Use.DELTA: {}, Use.SNAPSHOT: {}}
        self._overtaken = 0

    def pay(self, size: int, now: float) -> None:
        """Take note that `size` bytes of control go."""
        self.bucket.pay(size, now)

    def wait(self, who: Who, use: Use) -> None:
        """Let `who` wait for its turn on a lane; who waits there already keeps its place, who waits elsewhere moves."""
        if who not in self._lanes[use]:
            self.leave(who)
            self._lanes[use][who] = None

    def leave(self, who: Who) -> None:
        """Let `who` wait no more; no error if it does not."""
        for lane in self._lanes.values():
            lane.pop(who, None)

    def turn(self, claim: Callable[[Who], tuple[int, float]], now: float) -> tuple[Who | None, float]:
        """Return who may send now, and 0; or nobody, and after how many seconds to ask again (inf: nobody waits).

        claim: gives the bytes that one wants to send next, and how long its own link makes it wait.
        """
        soonest = inf
        order = (Use.SNAPSHOT, Use.DELTA) if self._overtaken >= OVERTAKEN else (Use.DELTA, Use.SNAPSHOT)
        for use in order:
            for who in self._lanes[use]:
                size, own_seconds = claim(who)
                if own_seconds > 0:
                    soonest = min(soonest, own_seconds)
                    continue
                seconds = self.bucket.wait_seconds(size, now)
                return (who, 0.0) if seconds <= 0 else (None, min(soonest, seconds))
        return None, soonest

    def sent(self, who: Who, size: int, now: float) -> None:
        """Take note that `who` has sent `size` bytes at its turn: it goes to the end of its lane."""
        self.bucket.pay(size, now)
        if who in self._lanes[Use.DELTA]:
            self._overtaken = self._overtaken + 1 if self._lanes[Use.SNAPSHOT] else 0
        else:
            self._overtaken = 0
        for lane in self._lanes.values():
            if who in lane:
                del lane[who]
                lane[who] = None


class RateMeter:
    """The fastest that a link was seen to carry, in bytes per second; `rate` is 0 until enough has gone at a time.

    A stretch begins when something is sent to (or granted to) who had nothing on its way, and lasts while something is.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self._began: float | None = None
        self._bytes = 0

    def begun(self, now: float) -> None:
        """Take note that something goes on its way."""
        if self._began is None:
            self._began, self._bytes = now, 0

    def over(self, size: int, now: float, idle: bool) -> None:
        """Take note that `size` bytes are known to have come. idle: nothing more is on its way."""
        if self._began is not None:
            self._bytes += size
            if self._bytes >= METERED_BYTES and now > self._began:
                self.rate = max(self.rate, self._bytes / (now - self._began))
            if idle:
                self._began = None

"""Know how the nodes of a run keep pace: how far each has come, how often it sends, and how late it is (pure).

Rule 1: nothing need be said of who comes and goes but the live nodes, at every look: a newcomer's clock begins where
the slowest live node stands; who is no longer live stops counting, and is forgotten once nothing of it waits.
Rule 2: what is kept is bounded, however long a run is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from math import ceil
from statistics import median

from zmqtrain.core.types import PeerId

LATENESS_KEPT, LATENESS_OF_A_ROUND = 64, 16
"""How many observations of lateness are kept, and how many of them one round gives at most."""
INTERVALS_KEPT = 5
"""Between contributions of one node."""


class Intervals:
    """How often nodes send. seconds: between two contributions of one node, the median over the nodes, as of the last
    `observe`; None: nobody had sent two."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._last: dict[PeerId, float] = {}
        self._newest: dict[PeerId, deque[float]] = {}

    def came(self, peer: PeerId, now: float) -> None:
        """Take note of one contribution."""
        if (last := self._last.get(peer)) is not None:
            self._newest.setdefault(peer, deque(maxlen=INTERVALS_KEPT)).append(now - last)
        self._last[peer] = now

    def forget(self, peer: PeerId) -> None:
        """Know nothing of this node any more."""
        self._last.pop(peer, None)
        self._newest.pop(peer, None)

    def observe(self) -> None:
        """Take note, at a release, of how often nodes send."""
        medians = [median(newest) for newest in self._newest.values()]
        self.seconds = median(medians) if medians else None


class Paces:
    """The paces of all nodes, as the hub sees their contributions to one series of rounds come and go.

    intervals: how often they send, to whichever of the series that share it; None: there is this one.
    clocks, landed: per node, how many of its contributions have come, and have been released.
    lateness: seconds after the quorum of their round at which others came, the newest last.
    """

    def __init__(self, intervals: Intervals | None = None) -> None:
        self.intervals = intervals or Intervals()
        self.clocks: dict[PeerId, int] = {}
        self.landed: dict[PeerId, int] = {}
        self.lateness: deque[float] = deque(maxlen=LATENESS_KEPT)
        self._live: Set[PeerId] = frozenset()
        self._missed: tuple[float, Set[PeerId]] = (0.0, frozenset())

    def came(self, peer: PeerId, now: float) -> None:
        """Take note of one contribution."""
        if peer not in self.clocks:
            self._meet({peer})
        self.clocks[peer] += 1
        self.intervals.came(peer, now)

    def released(self, peer: PeerId) -> None:
        """Take note that one contribution, which had come, is in a release."""
        self.landed[peer] += 1

    def look(self, live: Set[PeerId], waiting: Set[PeerId]) -> None:
        """Take note of who is live; forget who is neither live nor has anything waiting (here: of several series that
        share `intervals`, the first to forget a node forgets those for all)."""
        for peer in self.clocks.keys() - live - waiting:
            del self.clocks[peer], self.landed[peer]
            self.intervals.forget(peer)
        self._live = live
        if newcomers := live - self.clocks.keys():
            self._meet(newcomers)

    def observe(self, first: Mapping[PeerId, float], quorum: int) -> None:
        """Take note, at a release, of how late nodes came in this round, or after the one before.

        first: per contributing node, when its oldest contribution came.  quorum: how many of them the round awaited.
        """
        self.intervals.observe()
        times = sorted(first.values())
        reached = times[quorum - 1] if 0 < quorum <= len(times) else None
        before, missed = self._missed
        late = [
            came - before for peer, came in first.items() if peer in missed and (reached is None or came <= reached)
        ]
        if reached is None:
            self._missed = (before, missed - first.keys())
        else:
            self._missed = (reached, self._live - first.keys())
            late += [came - reached for came in times[quorum:]]
        late.sort()
        self.lateness.extend(late[:: ceil(len(late) / LATENESS_OF_A_ROUND) or 1])

    def _meet(self, newcomers: Set[PeerId]) -> None:
        # what the slowest has landed, not what has come: a node may be new since before the newest arrival
        known = self.clocks.keys() & self._live or self.clocks.keys()
        start = min((self.landed[peer] for peer in known), default=0)
        for peer in newcomers:
            self.clocks[peer] = self.landed[peer] = start

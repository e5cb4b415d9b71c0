"""Follow the versions of a run at a node: what was announced, what is here whole, what must be fetched (pure).

Rule 1: versions come one after another: what is announced out of turn is not applied; the node fetches a snapshot.
Rule 2: what the node was told to drop, and what it has lost, stays so until a whole snapshot is here, through whatever
is cut short on the way.
Rule 3: a gap that nothing later shows is found by the roster, which says the hub's version.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from zmqtrain.core.types import Version
from zmqtrain.protocol.messages import Aggregate, Snapshot


class Step(Enum):
    """What an announcement asks for."""

    EXPECT = "let its chunks come"
    FETCH = "fetch a snapshot: it is not what comes next"
    NOTHING = "nothing"


class Whole(NamedTuple):
    """An announcement whose chunks are all here. reset, warm: as in Deliver.  first: nothing was here before."""

    announcement: Aggregate | Snapshot
    reset: bool
    warm: bool
    first: bool


class Following:
    """Where a node stands in its run.

    version: of the last aggregate or snapshot that is here whole.  announced: of the last that was announced.
    confirmed: the hub has said that what this node held is the run's (of a founder: that its parameters are).
    """

    def __init__(self) -> None:
        self.version: Version = -1
        self.announced: Version = -1
        self.confirmed = False
        self._open: dict[int, Aggregate | Snapshot] = {}
        self._reset = self._warm = self._missing = False  # until a whole snapshot is here
        self._behind_since: float | None = None

    def announce(self, announcement: Aggregate | Snapshot) -> Step:
        """Take note of an announcement, and return what it asks for."""
        self._behind_since = None
        if isinstance(announcement, Aggregate):
            if announcement.version != self.announced + 1:
                return Step.FETCH if announcement.version > self.announced else Step.NOTHING
            self.announced = announcement.version
        elif announcement.version >= 0:
            self.announced = announcement.version
            if not announcement.sizes:
                self.version, self.confirmed = announcement.version, True
                ordered = self._missing or self._reset  # after this was asked for
                return Step.FETCH if ordered else Step.NOTHING
        self._open[announcement.transfer] = announcement
        return Step.EXPECT

    def whole(self, transfer: int) -> Whole | None:
        """Take note that all chunks of an announcement are here; None: it is not awaited any more."""
        announcement = self._open.pop(transfer, None)
        if announcement is None:
            return None
        first, reset, warm = self.version < 0, False, False
        if isinstance(announcement, Snapshot):
            reset, warm = self._reset or announcement.reset, self._warm and not announcement.reset
            self._reset = self._warm = self._missing = False
        self.version = announcement.version
        return Whole(announcement, reset, warm, first)

    def spoiled(self, transfer: int) -> bool:
        """Take note that what has come is not what was announced; return whether it was awaited."""
        awaited = self._open.pop(transfer, None) is not None
        self._missing |= awaited
        return awaited

    def dropped(self) -> None:
        """Take note that what came was not applied: the snapshot may be of the very version that is here."""
        self._missing = True

    def begin_anew(self, warm: bool) -> None:
        """Start again from the next snapshot, and drop what is pending. warm: the optimizer may go on as it is."""
        self._warm = warm and (self._warm or not self._reset)
        self._reset = True

    def fetch(self) -> Version:
        """Forget what was on its way, and return the version that the node holds, as it says in a Fetch."""
        if any(one.reset for one in self._open.values() if isinstance(one, Snapshot) and one.version >= 0):
            self.begin_anew(warm=False)
        self._open.clear()
        return -1 if self._reset or self._missing else self.version

    def lose(self) -> None:
        """Forget what was on its way: the connection is gone."""
        self._open.clear()

    def lags(self, version: Version, patience_seconds: float, now: float) -> bool:
        """Return whether the hub's version was not announced here for so long; asked at every heartbeat."""
        if version <= self.announced or self._open:
            self._behind_since = None
            return False
        if self._behind_since is None:
            self._behind_since = now
        return now - self._behind_since > patience_seconds

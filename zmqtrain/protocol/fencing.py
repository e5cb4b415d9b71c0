"""Incarnations and stamps: which process, connection and message a head belongs to; and which hub a node believes.

Rule 1: every Hello of a peer id has a higher `incarnation` than all before it, across processes. A lower one comes from
a former process, or from an older process of the same name.
Rule 2: both sides stamp what they send on a connection with the incarnation of its Hello, and number the messages on
CONTROL. A message with another incarnation belongs to a former connection; a number already seen is a duplicate or a
replay. Both are dropped and counted, without penalty. After a gap in the numbers the connection starts over.
Rule 3: incarnation 0 is not fenced; no client of ours uses it.
Rule 4: a hub of another run, of an earlier term, or one that knows less than the node has seen is not believed:
following it would lose what the run has learnt.
Source: fencing tokens, Gray and Cheriton 1989 (leases); the epochs of Viewstamped Replication, Liskov and Cowling 2012.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from enum import Enum
from typing import NamedTuple

from zmqtrain.core.types import PeerId, Version
from zmqtrain.protocol.messages import Welcome

MAX_INCARNATION = 1 << 63  # all incarnations are less: a head holds no more
AHEAD_SECONDS = 86_400.0
"""A process with a clock further ahead of its hub's is refused: no later process could use its id."""
SET_NANOSECONDS = 1_700_000_000 * 10**9
"""A clock before this time (November 2023) was never set."""
UNKNOWN = "say Hello first: this broker does not know you"
SUPERSEDED = (
    "a process of the same id has said Hello later: it was started after this one, perhaps from a copy of its "
    "checkpoint. One of them is enough, and this one ends. To have both, start one without that checkpoint"
)
GAP = "messages of it were lost in flight"
LIFE = 1 << 20
"""A new process begins this far above what its predecessor saved, because that one may have said Hello since. As time
it is a millisecond: of two processes started one after the other from one checkpoint, the clock says which is later."""


class Stamp(NamedTuple):
    """Connection and place of a message. number: from 1, on CONTROL; 0: not counted."""

    incarnation: int = 0
    number: int = 0


UNSTAMPED = Stamp()


class Verdict(Enum):
    """What a received message is: current, of a former connection, a duplicate, or after a gap."""

    NOW = "now"
    FORMER = "former"
    DUPLICATE = "double"
    GAP = "gap"


def begin_incarnation(before: int, wall_nanoseconds: int, random: int = 0) -> int:
    """Return the incarnation above which a process begins.

    before: as its predecessor saved it; 0: none.  wall_nanoseconds: since 1970; a clock that was set back does no harm
    where `before` is known.  random: less than 2^20, so that two copies of one process differ.
    """
    return max(before + LIFE, wall_nanoseconds) + random


def latest_incarnation(wall_nanoseconds: int) -> int:
    """Return the highest incarnation that a hub takes, by its clock; any, where that was never set."""
    if wall_nanoseconds < SET_NANOSECONDS:
        return MAX_INCARNATION - 1
    return min(wall_nanoseconds + round(AHEAD_SECONDS * 1e9), MAX_INCARNATION - 1)


class Connection:
    """One side of a connection: the messages that it has sent and received.

    heard: 1 at the hub, where the Hello was the first; 0 at a node.
    """

    __slots__ = ("_heard", "_said", "incarnation")

    def __init__(self, incarnation: int, heard: int = 0) -> None:
        self.incarnation, self._said, self._heard = incarnation, 0, heard

    def stamp(self, counted: bool = True) -> Stamp:
        if not self.incarnation or not counted:
            return Stamp(self.incarnation)
        self._said += 1
        return Stamp(self.incarnation, self._said)

    def judge(self, stamp: Stamp, counted: bool = True) -> Verdict:
        """Return what a message with this stamp is, and record it."""
        if stamp.incarnation != self.incarnation:
            return Verdict.FORMER
        if not self.incarnation or not counted:
            return Verdict.NOW
        if stamp.number <= self._heard:
            return Verdict.DUPLICATE
        if stamp.number > self._heard + 1:
            return Verdict.GAP
        self._heard = stamp.number
        return Verdict.NOW


class Fence:
    """The connections of a hub to its peers. dropped: messages dropped, by verdict, over all peers."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self._connections: dict[PeerId, Connection] = {}

    def open(self, peer: PeerId, incarnation: int) -> None:
        """Begin the connection of a Hello, in place of the one before."""
        self._connections[peer] = Connection(incarnation, heard=1)

    def close(self, peer: PeerId) -> None:
        self._connections.pop(peer, None)

    def keep(self, peers: Container[PeerId]) -> None:
        self._connections = {peer: one for peer, one in self._connections.items() if peer in peers}

    def stamp(self, peer: PeerId, counted: bool = True) -> Stamp | None:
        """Return the stamp of the next message to a peer; None: there is no connection."""
        connection = self._connections.get(peer)
        return None if connection is None else connection.stamp(counted)

    def judge(self, peer: PeerId, stamp: Stamp, counted: bool = True) -> Verdict | None:
        """Return what a message is, and count it unless it is current; None: there is no connection."""
        connection = self._connections.get(peer)
        if connection is None:
            return None
        if (verdict := connection.judge(stamp, counted)) is not Verdict.NOW:
            self.count(verdict)
        return verdict

    def count(self, verdict: Verdict) -> None:
        self.dropped[verdict.value] += 1


def hub_mismatch(
    welcome: Welcome, run: str, term: int, version: Version, may_start_over: bool = False
) -> tuple[str, str] | None:
    """Return why a hub is not believed, as a code ("run", "term", "version") and a sentence; None if it is.

    run: of the node, "" if it has none.  term, version: the highest that it knows.  may_start_over: in another run.
    """
    if run and welcome.run != run and not may_start_over:
        return "run", (
            f"the broker now runs {welcome.run}, this node belongs to {run}. Restart the broker with the checkpoint of "
            "the old run, or stop this node and start it again to join the new run (with --new-run where it has a "
            "checkpoint)"
        )
    if welcome.term < term:
        return "term", (
            f"the broker here is that of term {welcome.term} of {run}, and its standby has taken over: this node knows "
            f"one of term {term}. Stop this broker, or start it again as the standby of that one"
        )
    if welcome.version < version:
        return "version", (
            f"the broker is at version {welcome.version} of {run}, this node has seen {version}: it was restarted from "
            "an older state. Restart it with the newest checkpoint folder, or stop this node and start it again"
        )
    return None

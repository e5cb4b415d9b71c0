"""Let a second hub take the place of the first, so that there is one truth at any time (pure).

    Follower    the standby's talk with the first: it holds all that the first is, and says which version it holds
    Succession  the standby's decision: the first is gone, and nodes say so too
    Tenure      the first's decision: whether it may go on without its standby

Rule 1: while a standby is in step, nodes hear of a version only once the standby holds it: a takeover loses nothing
that a node has heard of.
Rule 2: of the nodes that were there when the two last heard each other, the standby needs at least half to take over,
and the first more than half to go on without it: never both.
Rule 3: a standby that knows less than a node that turns to it is not the run's next hub, and says so.
Rule 4: each takeover has a higher `term`; nodes believe the highest that they know, and a first that hears of a higher
one steps down.
Source: terms and majorities as in Raft, Ongaro and Ousterhout 2014, with the nodes as voters.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from zmqtrain.protocol.effects import Deliver, Expect, PeerEffect, Send
from zmqtrain.protocol.masters import RUN_OVER
from zmqtrain.protocol.messages import Aggregate, Goodbye, Hello, Message
from zmqtrain.protocol.peer import HUB, Peer, PeerState
from zmqtrain.protocol.standby_messages import Books, Holding, Replica
from zmqtrain.types import PeerId, Version

__all__ = ["STANDBY", "TAKES_OVER", "VOTE_SECONDS", "Follower", "Succession", "Tenure"]

STANDBY = "what listens there is the standby of another broker, and has not taken over: give the address of that"
TAKES_OVER = "it takes over"
"""The reason of a standby's Goodbye to a first that is there: who was told to take over says so before it does."""
VOTE_SECONDS = 6.0
"""A node that turned to the standby so long ago may have found the first again: it comes several times in this time."""

MOST_VOTES = 1024
"""Nodes that turned to the standby last, whoever they say that they are."""


class Follower(Peer):
    """The standby's side of its talk with the first.

    address: where nodes reach the standby.  holds: the version that is here whole; -1: the run is not founded yet.
    in_step: what nodes have heard of the first is here, as that last said.  books: the first's, as it last said.
    nodes: those that were live there then.  lost_at: when the first was lost; None: it is there.
    """

    def __init__(self, peer: PeerId, name: str, address: str, incarnation: int = 0) -> None:
        super().__init__(peer, name, observer=True, incarnation=incarnation)
        self.address = address
        self.in_step = False
        self.books: dict[str, Any] = {}
        self.nodes: frozenset[PeerId] = frozenset()
        self.lost_at: float | None = None
        self._copies: dict[int, Replica | Aggregate] = {}

    @property
    def holds(self) -> Version:
        """See above."""
        return self.version

    def receive(self, message: Message, now: float) -> list[PeerEffect]:
        """Take one message of the first."""
        if message == Goodbye(RUN_OVER):
            self.over, self.state = True, PeerState.CLOSED
            return []
        if self.state is not PeerState.WELCOMED or not isinstance(message, Replica | Aggregate | Books):
            before = self.state
            effects = super().receive(message, now)
            if before is PeerState.CONNECTING and self.state is PeerState.WELCOMED:
                self.lost_at, self.in_step = None, False
            return effects
        self.saw(now)
        if isinstance(message, Books):
            return self._read(message, now)
        announced = self._following.announced
        if isinstance(message, Aggregate) and message.version != announced + 1:
            return self._lose_hub("gap", f"version {message.version} came after {announced}", now, now)
        self._following.announced = message.version
        self._copies[message.transfer] = message
        return [Expect(HUB, message)]

    def received(self, transfer: int) -> list[PeerEffect]:
        """All chunks of a copy or a release are here: it is held, and the first may let the nodes hear of it."""
        copy = self._copies.pop(transfer, None)
        if copy is None:
            return []
        self._following.version = copy.version
        return [Deliver(copy, ()), Send(Holding(copy.version))]

    def _read(self, books: Books, now: float) -> list[PeerEffect]:
        try:
            self.books = dict(json.loads(books.text))
            self.nodes = frozenset(PeerId(str(peer)) for peer in self.books["nodes"])
            self.in_step = self.books["in_step"] is True
        except (ValueError, KeyError, TypeError) as error:
            return self.distrust(f"its books: {error!r}", now)
        return []

    def _greeting(self) -> Hello:
        return Hello(self.name, "standby", self.run, self.version, address=self.address)

    def _lose_hub(self, reason: str, text: str, now: float, hello_at: float) -> list[PeerEffect]:
        if self.lost_at is None and self.state is not PeerState.CONNECTING:
            self.lost_at = now
        self._copies.clear()
        effects = super()._lose_hub(reason, text, now, hello_at)
        if reason in ("gap", "garbage", "unknown"):  # it is there, and may have told nodes what is not here
            self.in_step = False
        return effects


class Succession:
    """Whether a standby is to take over. seconds: how long the first must be gone."""

    def __init__(self, follower: Follower, seconds: float) -> None:
        self._follower, self._seconds = follower, seconds
        self._votes: dict[PeerId, tuple[float, Version]] = {}

    def turned_to(self, peer: PeerId, hello: Hello, now: float) -> None:
        """Take note that a node of this run has turned to the standby: the first does not answer it."""
        if hello.role == "node" and hello.run == self._follower.run:
            self._votes.pop(peer, None)
            self._votes[peer] = (now, hello.version)
            if len(self._votes) > MOST_VOTES:
                del self._votes[next(iter(self._votes))]

    def is_due(self, now: float) -> bool:
        """Return whether the standby takes over now, by itself."""
        lost_at = self._follower.lost_at
        if lost_at is None:
            self._votes.clear()
            return False
        nodes, fresh = self._follower.nodes, self._fresh(now)
        enough = bool(fresh) and 2 * len(fresh & nodes) >= len(nodes)  # others may be anybody
        return now - lost_at >= self._seconds and enough and not self.obstacle(now)

    def obstacle(self, now: float) -> str:
        """Return why this standby is not the run's next hub, in words for people; "" if it is."""
        follower = self._follower
        if not follower.run:
            return "it has never heard the first broker"
        if not follower.in_step:
            return (
                f"it was not in step with the first broker when that was lost: it holds version {follower.holds}, and "
                "nodes may have heard of later ones. Start the first again with its checkpoint"
            )
        known = max((version for at, version in self._votes.values() if now - at <= VOTE_SECONDS), default=-1)
        if known > follower.holds:
            return (
                f"it holds version {follower.holds}, and a node has seen version {known}: the first broker went on "
                "without this standby. Start the first again with its checkpoint"
            )
        return ""

    def _fresh(self, now: float) -> frozenset[PeerId]:
        return frozenset(peer for peer, (at, _) in self._votes.items() if now - at <= VOTE_SECONDS)


class Tenure:
    """Whether a hub that had a standby may go on without it. standby: its address, as the hub last heard; "": none.

    ended: the standby has said that it takes over.
    """

    def __init__(self) -> None:
        self.standby = ""
        self.follows = self.ended = False
        self._crew = 0

    def joined(self, address: str) -> None:
        """A standby follows."""
        self.standby, self.follows, self._crew = address, True, 0

    def lost(self, nodes: Collection[PeerId]) -> None:
        """The standby is gone, when these nodes were live: it may take over, with half of them."""
        if self.follows:
            self.follows, self._crew = False, len(nodes)

    def dismissed(self, reason: str) -> None:
        """The standby has said goodbye: it will not take over, or does so now."""
        if reason == TAKES_OVER:
            self.ended = True
        else:
            self.standby, self.follows, self._crew = "", False, 0

    def said_goodbye(self) -> None:
        """A node of those that were there has left for good: it turns to nobody."""
        self._crew = max(0, self._crew - 1)

    def holds(self, nodes: int) -> bool:
        """Return whether nodes may hear of what is new: the standby holds it, or cannot take over."""
        return not self.ended and (self.follows or not self._crew or 2 * nodes > self._crew)

    def state(self, nodes: int) -> dict[str, Any]:
        """Return what a checkpoint must hold. nodes: that are live."""
        return {"standby": self.standby, "crew": nodes if self.follows else self._crew}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` wrote: begin without the standby. Raises KeyError, TypeError or ValueError."""
        self.standby, self._crew, self.follows = str(state["standby"]), int(state["crew"]), False

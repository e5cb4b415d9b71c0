"""Let a second hub take the place of the first, so that there is one truth at any time (pure).

    Follower    the standby's talk with the first: it holds all that the first is, and says which version it holds
    Succession  the standby's decision: the first is gone, and nodes say so too
    Tenure      the first's decision: whether it may go on without its standby

Rule 1: while a standby is in step, nodes hear of a version only once the standby holds it: a takeover loses nothing
that a node has heard of.
Rule 2: the first tells the standby which nodes are its crew. Of the crew that it was last told, the standby needs at
least half to take over; of every crew that the standby may have been told last, the first needs more than half to go on
without it: never both. Nodes are counted by id: a newcomer is of no crew, and only a node of the crew counts as one
that has left.
Rule 3: a standby that knows less than a node that turns to it is not the run's next hub, and says so.
Rule 4: who tells a standby to take over must be an operator: one who has the hub's own keys, or, where there are none,
is on the standby's own machine; and says so on a connection of now (`fencing`).
Rule 5: each takeover has a higher `term`; nodes believe the highest that they know, and a first that hears of a higher
one steps down.
Source: terms and majorities as in Raft, Ongaro and Ousterhout 2014, with the nodes as voters.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from zmqtrain.protocol.effects import Deliver, Expect, PeerEffect, Send
from zmqtrain.protocol.fencing import LIFE, Connection, Stamp, Verdict
from zmqtrain.protocol.masters import RUN_OVER
from zmqtrain.protocol.messages import Aggregate, Goodbye, Heartbeat, Hello, Message, Refused
from zmqtrain.protocol.peer import HUB, Peer, PeerState
from zmqtrain.protocol.standby_messages import Books, Holding, Promote, Replica
from zmqtrain.types import PeerId, Version

__all__ = ["STANDBY", "NO_OPERATOR", "TAKES_OVER", "VOTE_SECONDS", "Follower", "Succession", "Tenure"]

STANDBY = "what listens there is the standby of another broker, and has not taken over: give the address of that"
NO_OPERATOR = (
    "this standby takes over by itself once its first broker is gone; only an operator can tell it to take over before "
    "that. Say `zmqtrain promote` on the PC of the standby, or, where the brokers have keys, with the hub's own pair "
    "(--keys hub.key_secret, from their keys folder)"
)
TAKES_OVER = "it takes over"
"""The reason of a standby's Goodbye to a first that is there: who was told to take over says so before it does."""
VOTE_SECONDS = 6.0
"""A node that turned to the standby so long ago may have found the first again: it comes several times in this time."""

MOST_OPERATORS = 16
MOST_VOTES = 1024
"""Nodes that turned to the standby last, whoever they say that they are."""


class Follower(Peer):
    """The standby's side of its talk with the first.

    address: where nodes reach the standby.  holds: the version that is here whole; -1: the run is not founded yet.
    in_step: what nodes have heard of the first is here, as that last said.  books: the first's, as it last said;
    read: their number.  crew: the nodes that were live there then, with their incarnations.
    lost_at: when the first was lost; None: it is there.
    """

    def __init__(self, peer: PeerId, name: str, address: str, incarnation: int = 0) -> None:
        super().__init__(peer, name, observer=True, incarnation=incarnation)
        self.address = address
        self.in_step = False
        self.books: dict[str, Any] = {}
        self.read = 0
        self.crew: dict[PeerId, int] = {}
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
                self.lost_at, self.in_step, self.read = None, False, 0
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
            told = dict(json.loads(books.text))
            crew = {PeerId(str(peer)): int(incarnation) for peer, incarnation in told["crew"].items()}
            in_step, number = told["in_step"] is True, int(told["number"])
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            return self.distrust(f"its books: {error!r}", now)
        self.books, self.crew, self.in_step, self.read = told, crew, in_step, number
        return []

    def _beat(self, now: float) -> Heartbeat:
        return Heartbeat(now, self.read)

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


class _Vote(NamedTuple):
    """The word of a node that the first does not answer. at: when it came.  version, incarnation: as in its Hello."""

    at: float
    version: Version
    incarnation: int


class Succession:
    """Whether a standby is to take over, and what it answers at its port before. seconds: how long the first must be
    gone.

    promoted: an operator has told it to.
    """

    def __init__(self, follower: Follower, seconds: float) -> None:
        self._follower, self._seconds = follower, seconds
        self._votes: dict[PeerId, _Vote] = {}
        self._operators: dict[PeerId, Connection] = {}
        self.promoted = False

    def receive(
        self, sender: PeerId, stamp: Stamp, message: Message, is_operator: bool, now: float
    ) -> tuple[Refused, Stamp] | None:
        """Take one message at the standby's port; return the answer with its stamp, None for none.

        is_operator: the sender may tell this standby to take over. It is obeyed after its Hello, and once.
        """
        here = Stamp(stamp.incarnation)
        match message:
            case Goodbye():
                return None
            case Hello():
                if is_operator and message.incarnation:
                    self._operators.pop(sender, None)
                    self._operators[sender] = Connection(message.incarnation, heard=1)
                    if len(self._operators) > MOST_OPERATORS:
                        del self._operators[next(iter(self._operators))]
                self.turned_to(sender, message, now)
                return Refused("standby", STANDBY), Stamp(message.incarnation)
            case Promote() if not is_operator:
                return Refused("keys", NO_OPERATOR), here
            case Promote() if (known := self._operators.get(sender)) is not None:
                if known.judge(stamp) is Verdict.NOW:
                    self.promoted = True
                return None
        return Refused("unknown", STANDBY), here

    def turned_to(self, peer: PeerId, hello: Hello, now: float) -> None:
        """Record that a node of this run has turned to the standby: the first does not answer it."""
        if hello.role == "node" and hello.run == self._follower.run:
            self._votes.pop(peer, None)
            self._votes[peer] = _Vote(now, hello.version, hello.incarnation)
            if len(self._votes) > MOST_VOTES:
                del self._votes[next(iter(self._votes))]

    def is_due(self, now: float) -> bool:
        """Return whether the standby takes over now: by itself, or because an operator has told it to."""
        if self.promoted:
            return True
        lost_at = self._follower.lost_at
        if lost_at is None:
            self._votes.clear()
            return False
        turned = self._turned(now)
        enough = bool(turned) and 2 * len(turned) >= len(self._follower.crew)
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
        known = max((vote.version for vote in self._votes.values() if now - vote.at <= VOTE_SECONDS), default=-1)
        if known > follower.holds:
            return (
                f"it holds version {follower.holds}, and a node has seen version {known}: the first broker went on "
                "without this standby. Start the first again with its checkpoint"
            )
        return ""

    def _turned(self, now: float) -> set[PeerId]:
        """The nodes of the crew that have turned to the standby. A node that was started anew since the crew was told
        is not one of them: it may have said goodbye to the first in between, which then counts it as one that left."""
        crew = self._follower.crew
        return {
            peer
            for peer, vote in self._votes.items()
            if now - vote.at <= VOTE_SECONDS and peer in crew and vote.incarnation - crew[peer] < LIFE
        }


class Tenure:
    """Whether a hub that had a standby may go on without it. standby: its address, as the hub last heard; "": none.

    follows: it is in step.  ended: the standby has said that it takes over.
    """

    def __init__(self) -> None:
        self.standby = ""
        self.follows = self.ended = False
        self._told = 0
        self._crews: dict[frozenset[PeerId], int] = {}  # that the standby may go by, with the number it was last told
        self._left: set[PeerId] = set()
        self._counted = 0  # the size of a crew, of a checkpoint that holds no ids

    def joined(self, address: str) -> None:
        """A standby is in step: it goes by no crew before it is told one."""
        self.standby, self.follows, self._counted = address, True, 0
        self._crews.clear()
        self._left.clear()

    def tell(self, crew: Collection[PeerId]) -> int:
        """Return the number of the books in which the standby is told this crew now."""
        self._told += 1
        if self.follows:
            self._crews[frozenset(crew)] = self._told
        return self._told

    def read(self, number: int) -> None:
        """The standby has read the books of this number: it goes by no earlier ones."""
        if self.follows:
            self._crews = {crew: told for crew, told in self._crews.items() if told >= number}

    def lost(self) -> None:
        """The standby is gone: it may take over, with half of the crew that it was told last."""
        self.follows = False

    def dismissed(self, reason: str) -> None:
        """The standby has said goodbye: it will not take over, or does so now."""
        if reason == TAKES_OVER:
            self.ended = True
        else:
            self.joined("")
            self.follows = False

    def said_goodbye(self, peer: PeerId) -> None:
        """A node has left for good: it turns to nobody."""
        if any(peer in crew for crew in self._crews):
            self._left.add(peer)
        self._counted = max(0, self._counted - 1)

    def came(self, peer: PeerId) -> None:
        """A node is here, again perhaps."""
        self._left.discard(peer)

    def holds(self, nodes: Collection[PeerId]) -> bool:
        """Return whether nodes may hear of what is new: the standby holds it, or cannot take over. nodes: that are
        here."""
        if self.ended or self.follows:
            return not self.ended
        here, crews = set(nodes), [crew - self._left for crew in self._crews]
        if self._counted and 2 * len(here) <= self._counted:
            return False
        return all(not crew or 2 * len(crew & here) > len(crew) for crew in crews)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        crews = [sorted(crew) for crew in self._crews]
        return {"standby": self.standby, "crews": crews, "left": sorted(self._left), "crew": self._counted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` wrote: begin without the standby. Raises KeyError, TypeError or ValueError.

        A checkpoint of an older release says only how many nodes the crew has.
        """
        self.standby, self._counted, self.follows = str(state["standby"]), int(state.get("crew", 0)), False
        self._crews = {frozenset(PeerId(str(peer)) for peer in crew): 0 for crew in state.get("crews", ())}
        self._left = {PeerId(str(peer)) for peer in state.get("left", ())}

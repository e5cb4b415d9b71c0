"""Let a second hub take the place of the first, so that there is one truth at any time (pure).

    Follower    the standby's talk with the first: it holds all that the first is, and says which version it holds
    Succession  the standby's decision: the first is gone, and nodes say so too
    Tenure      the first's decision: whether it may go on without its standby
    Patience    the first's decision: how long nodes wait for its standby before that is out of step

Rule 1: while a standby is in step, nodes hear of a version only once the standby holds it: a takeover loses nothing
that a node has heard of.
Rule 2: the first tells the standby which nodes are its crew, by id. Of the crew that it was last told, the standby
needs the word of at least half to take over: nodes that have turned to it since, and have not let the first go on.
Of every crew that the standby may have been told last, the first needs more than half to go on without it: nodes that
let it, or have left for good, and were here since before the standby read of a crew, so that it has no word of theirs.
So never both, whoever is cut off when. Newcomers are of no crew, and nor is a node that was started anew. A first that
was itself started again does not know the crew, and waits for a standby.
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

from zmqtrain.core.types import PeerId, Version
from zmqtrain.protocol.effects import Deliver, Expect, PeerEffect, Send
from zmqtrain.protocol.fencing import LIFE, Connection, Stamp, Verdict
from zmqtrain.protocol.members import RUN_OVER
from zmqtrain.protocol.messages import Aggregate, Books, Goodbye, Hello, Holding, Message, Promote, Refused, Replica
from zmqtrain.protocol.peer import HUB, Move, Peer, PeerState

STANDBY = "what listens there is the standby of another broker, and has not taken over: give the address of that"
NO_OPERATOR = (
    "this standby takes over by itself once its first broker is gone; only an operator can tell it to take over before "
    "that. Say `zmqtrain promote` on the PC of the standby, or, where the brokers have keys, with the hub's own pair "
    "(--keys hub.key_secret, from their keys folder)"
)
TAKES_OVER = "it takes over"
"""The reason of a standby's Goodbye to a first that is there: who was told to take over says so before it does."""
PATIENCE_SECONDS, PATIENCE_SHARE = 1.0, 0.05
"""Nodes wait for a standby at most so long at once, and in the long run for this share of the time."""
FREE_SECONDS, FREE_BYTES_PER_SECOND = 0.1, 10e6
"""What is no waiting: so long for each version, and as long as its bytes take at this rate."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 960.0
"""For so long a standby that nodes had to wait for stays out of step: at first, and at most."""
VOTE_SECONDS = 6.0
"""A node that turned to the standby so long ago may have found the first again: it comes several times in this time."""

VOTE_DELAY_SECONDS = 2.0
"""A word of a node at the standby may have been on the network for so long."""
TENURES_OF_A_LIFE = 1 << 20
MOST_OPERATORS = 16
MOST_VOTES = 1024
"""Nodes that turned to the standby last, whoever they say that they are."""


class Follower(Peer):
    """The standby's side of its talk with the first.

    address: where nodes reach the standby.  holds: the version that is here whole; -1: the run is not founded yet.
    in_step: what nodes have heard of the first is here, as that last said.  books: the first's, as it last said; read,
    read_at: their number, and when they came.  crew: the nodes that were live there then, with their incarnations;
    owners: the names of their keys, where there are keys; tenure: its number.
    lost_at: when the first was lost; None: it is there.
    """

    def __init__(self, peer: PeerId, name: str, address: str, incarnation: int = 0) -> None:
        super().__init__(peer, name, observer=True, incarnation=incarnation)
        self.address = address
        self.in_step = False
        self.books: dict[str, Any] = {}
        self.read = self.tenure = 0
        self.read_at = float("-inf")
        self.crew: dict[PeerId, int] = {}
        self.owners: dict[PeerId, str] = {}
        self.lost_at: float | None = None
        self._copies: dict[int, Replica | Aggregate] = {}

    @property
    def holds(self) -> Version:
        """See above."""
        return self.version

    def receive(self, message: Message, now: float) -> list[PeerEffect]:
        """Take one message of the first."""
        if message == Goodbye(RUN_OVER):
            self.over = True
            self._move(Move.CLOSE)
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
            owners = {PeerId(str(peer)): str(name) for peer, name in told["owners"].items()}
            in_step, number, tenure = told["in_step"] is True, int(told["number"]), int(told["tenure_number"])
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            return self.distrust(f"its books: {error!r}", now)
        self.books, self.crew, self.in_step, self.read, self.tenure = told, crew, in_step, number, tenure
        self.read_at, self.owners = now, owners
        return []

    @property
    def _read_last(self) -> int:
        return self.read

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
    """The word of a node that the first does not answer. at: when it came.  The rest: as in its Hello."""

    at: float
    version: Version
    incarnation: int
    without: int


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
            self._votes[peer] = _Vote(now, hello.version, hello.incarnation, hello.without)
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
        fresh = [(peer, vote) for peer, vote in self._votes.items() if now - vote.at <= VOTE_SECONDS]
        without = sum(peer in follower.crew and vote.without >= follower.tenure for peer, vote in fresh)
        if 2 * without > len(follower.crew):
            return "its nodes have let the first broker go on without it. Start the first again with its checkpoint"
        known = max((vote.version for _, vote in fresh), default=-1)
        if known > follower.holds:
            return (
                f"it holds version {follower.holds}, and a node has seen version {known}: the first broker went on "
                "without this standby. Start the first again with its checkpoint"
            )
        return ""

    def _turned(self, now: float) -> set[PeerId]:
        """The nodes of the crew whose word counts here. That of a node that was started anew since the crew was told
        does not: it may have said goodbye to the first in between; nor that of one that lets the first go on."""
        crew, tenure = self._follower.crew, self._follower.tenure
        return {
            peer
            for peer, vote in self._votes.items()
            if now - vote.at <= VOTE_SECONDS
            and vote.at > self._follower.read_at
            and peer in crew
            and vote.incarnation - crew[peer] < LIFE
            and vote.without < tenure
        }


class Tenure:
    """Whether a hub that had a standby may go on without it. standby: its address, as the hub last heard; "": none.

    follows: it is in step.  number: how often one came in step; of a hub that was started again, far more: a checkpoint
    may be older than the last time.  ended: the standby has said that it takes over.
    """

    def __init__(self) -> None:
        self.standby, self.number = "", 0
        self.follows = self.ended = False
        self._told: dict[int, tuple[frozenset[PeerId], float]] = {}  # by number: a crew that it may go by, and when
        self._books = 0
        self._read_at = float("-inf")  # when the books were told that the standby has read last
        self._released: dict[PeerId, float] = {}  # who lets this hub go on, or has left, with when it came here
        self._unknown = False  # by which crew the standby goes

    @property
    def without(self) -> int:
        """The number of the tenure without which the nodes are to let this hub go on; 0: none."""
        return self.number if self.standby and not self.follows else 0

    def joined(self, address: str) -> None:
        """A standby is in step: it goes by no crew before it is told one."""
        self.standby, self.number, self.follows, self._unknown = address, self.number + 1, True, False
        self._read_at = float("-inf")
        self._told.clear()
        self._released.clear()

    def tell(self, crew: Collection[PeerId], now: float) -> int:
        """Return the number of the books in which the standby is told this crew now."""
        self._books += 1
        if self.follows:
            self._told[self._books] = frozenset(crew), now
            for peer in crew:
                self._released.pop(peer, None)
        return self._books

    def read(self, number: int) -> None:
        """The standby has read the books of this number: it goes by no earlier ones, nor by what it heard before."""
        if self.follows and number in self._told:
            self._read_at = self._told[number][1]
            self._told = {told: one for told, one in self._told.items() if told >= number}

    def lost(self) -> None:
        """The standby is gone: it may take over, with half of the crew that it was told last."""
        self.follows = False

    def returned(self, address: str) -> None:
        """A standby at this address follows again, and is not in step: it holds a copy that it was sent since it came
        back. If it is the one that was in step last, it takes over no more before it is told that it is in step again:
        no node need let this hub go on. A hub that was started again may not know which one was in step last."""
        if address == self.standby and not (self.follows or self._unknown):
            self._told.clear()
            self._released.clear()

    def dismissed(self, reason: str) -> None:
        """The standby has said goodbye: it will not take over, or does so now."""
        if reason == TAKES_OVER:
            self.ended = True
        else:
            self.joined("")
            self.follows = False

    def let_go_on(self, peer: PeerId, number: int, joined: float) -> None:
        """A node lets this hub go on without the standby of that tenure. joined: when it came to this hub."""
        if number and number == self.without:
            self._release(peer, joined)

    def said_goodbye(self, peer: PeerId, joined: float) -> None:
        """A node has left for good: it turns to nobody."""
        self._release(peer, joined)

    def _release(self, peer: PeerId, joined: float) -> None:
        if any(peer in crew for crew, _ in self._told.values()):
            self._released.setdefault(peer, joined)

    @property
    def holds(self) -> bool:
        """Whether nodes may hear of what is new: the standby holds it, or cannot take over."""
        if self.ended or self.follows or self._unknown:
            return self.follows and not self.ended
        released = {peer for peer, joined in self._released.items() if joined + VOTE_DELAY_SECONDS <= self._read_at}
        return all(not crew or 2 * len(crew & released) > len(crew) for crew, _ in self._told.values())

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"standby": self.standby, "number": self.number}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` wrote, in this release or an earlier one. Raises KeyError, TypeError or ValueError.

        Who follows or has taken over since is not known: nodes hear of nothing new before a standby is in step.
        """
        self.standby, self.number, self.follows = str(state["standby"]), int(state.get("number", 0)), False
        self._unknown = bool(self.standby)
        if self.standby or self.number:
            self.number += TENURES_OF_A_LIFE


class Patience:
    """How long nodes wait for a standby that confirms versions late: a budget of seconds that fills up again slowly.

    A standby that uses it up is out of step, and the run goes on. Each time it stays so for twice as long, unless it
    has been in step for longer than that in between.
    """

    def __init__(self) -> None:
        self._seconds, self._at = PATIENCE_SECONDS, 0.0
        self._in_step_at: float | None = None
        self._pause, self._until = PAUSE_SECONDS, float("-inf")

    def is_used_up(self, waited: float, size: int, now: float) -> bool:
        """Return whether nodes have waited too long. waited: until now, for one version; size: the bytes of it."""
        return _charge(waited, size) > self._left(now)

    def waited(self, seconds: float, size: int, now: float) -> None:
        """Nodes have waited so long for a version of this size, and the standby holds it now."""
        self._seconds, self._at = self._left(now) - _charge(seconds, size), now

    def may_be_in_step(self, now: float) -> bool:
        """Return whether a standby may come in step again."""
        return now >= self._until

    def in_step(self, now: float) -> None:
        """The standby is in step from now on."""
        self._in_step_at = now

    def out_of_step(self, now: float) -> float:
        """The standby is out of step now; return for how many seconds it stays so."""
        if self._in_step_at is not None and now - self._in_step_at > self._pause:
            self._pause = PAUSE_SECONDS
        self._in_step_at = None
        seconds, self._until = self._pause, now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._seconds, self._at = PATIENCE_SECONDS, now
        return seconds

    def _left(self, now: float) -> float:
        return min(PATIENCE_SECONDS, self._seconds + PATIENCE_SHARE * max(0.0, now - self._at))


def _charge(seconds: float, size: int) -> float:
    return max(0.0, seconds - FREE_SECONDS - size / FREE_BYTES_PER_SECOND)

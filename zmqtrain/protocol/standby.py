"""Standby hub: it takes the place of the first hub (the primary), with one hub in charge at any time (pure).

    Follower        the standby's connection to the primary: it holds all that the primary is, and confirms versions
    TakeoverPolicy  the standby's decision: the primary is gone, and nodes confirm it
    PrimaryLease    the primary's decision: whether it may go on without its standby
    Patience        the primary's decision: how long nodes wait for its standby before that is out of step

Rule 1: while a standby is in step, nodes hear of a version only after the standby holds it, so a takeover loses nothing
that a node has heard of.
Rule 2: the primary sends the standby its electorate: the nodes that vote, by id. To take over, the standby needs votes
of at least half of the electorate that it last read: nodes that have turned to it since then and have not released the
primary. To go on without its standby, the primary needs more than half of every electorate that the standby may have
read last: nodes that release it or have left for good, and that joined early enough for the standby to hold no vote of
theirs. So both never go on, whatever connections are cut and when. A new node, and a node process that was restarted,
is in no electorate. A restarted primary does not know the electorate and waits for a standby.
Rule 3: a standby that knows less than a node that turns to it is not the run's next hub, and says so.
Rule 4: only an operator may order a takeover: a process with the hub's own keys or, without keys, one on the standby's
own machine; and on a current connection (`fencing`).
Rule 5: each takeover has a higher `term`. Nodes believe the highest that they know; a primary that hears of a higher
one steps down.
Source: terms and majorities as in Raft, Ongaro and Ousterhout 2014, with the nodes as voters.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from zmqtrain.core.types import PeerId, Recent, Version
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
"""Reason of the Goodbye that a standby sends to a live primary before it takes over by order."""
PATIENCE_SECONDS, PATIENCE_SHARE = 1.0, 0.05
"""Nodes wait for a standby at most this long at once, and in the long run for this share of the time."""
FREE_SECONDS, FREE_BYTES_PER_SECOND = 0.1, 10e6
"""Not charged as waiting: this long for each version, and the time of its bytes at this rate."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 960.0
"""A standby that nodes had to wait for stays out of step this long: at first, and at most."""
VOTE_SECONDS = 6.0
"""A vote is valid this long: a node without a hub turns to the standby several times in this time."""
VOTE_DELAY_SECONDS = 2.0
"""A vote may be on the network this long before it reaches the standby."""
LEASES_OF_A_PROCESS = 1 << 20
MOST_OPERATORS, MOST_VOTES = 16, 1024


class Follower(Peer):
    """The standby's connection to the primary.

    address: where nodes reach the standby.  in_step: this standby holds all that nodes have heard of, as the primary
    last said.  books: the last ones of the primary; read, read_at: their number and time of arrival.  electorate: the
    voters in them, with their incarnations; owners: the names of their keys, where there are keys; lease: its number.
    lost_at: when the primary was lost; None: it is there.
    """

    def __init__(self, peer: PeerId, name: str, address: str, incarnation: int = 0) -> None:
        super().__init__(peer, name, "observer", incarnation=incarnation)
        self.address = address
        self.in_step = False
        self.books: dict[str, Any] = {}
        self.read = self.lease = 0
        self.read_at = float("-inf")
        self.electorate: dict[PeerId, int] = {}
        self.owners: dict[PeerId, str] = {}
        self.lost_at: float | None = None
        self._copies: dict[int, Replica | Aggregate] = {}

    def receive(self, message: Message, now: float) -> list[PeerEffect]:
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
        announced = self.following.announced
        if isinstance(message, Aggregate) and message.version != announced + 1:
            return self._lose_hub("gap", f"version {message.version} came after {announced}", now, now)
        self.following.announced = message.version
        self._copies[message.transfer] = message
        return [Expect(HUB, message)]

    def received(self, transfer: int) -> list[PeerEffect]:
        """All chunks of a copy or a release are here; once confirmed, the primary lets the nodes hear of it."""
        copy = self._copies.pop(transfer, None)
        if copy is None:
            return []
        self.following.version = copy.version
        return [Deliver(copy, ()), Send(Holding(copy.version))]

    def _read(self, books: Books, now: float) -> list[PeerEffect]:
        try:
            told = dict(json.loads(books.text))
            electorate = {PeerId(str(peer)): int(incarnation) for peer, incarnation in told["crew"].items()}
            owners = {PeerId(str(peer)): str(name) for peer, name in told["owners"].items()}
            in_step, number, lease = told["in_step"] is True, int(told["number"]), int(told["tenure_number"])
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            return self.distrust(f"its books: {error!r}", now)
        self.books, self.electorate, self.owners = told, electorate, owners
        self.in_step, self.read, self.lease, self.read_at = in_step, number, lease, now
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
        if reason in ("gap", "garbage", "unknown"):  # it is alive, and nodes may have heard what is not here
            self.in_step = False
        return effects


class _Vote(NamedTuple):
    """A node that turned to the standby. at: when; the rest as in its Hello."""

    at: float
    version: Version
    incarnation: int
    without: int


class TakeoverPolicy:
    """Whether a standby takes over, and what it answers at its port before.

    seconds: how long the primary must be gone.  promoted: an operator has ordered the takeover.
    """

    def __init__(self, follower: Follower, seconds: float) -> None:
        self._follower, self._seconds = follower, seconds
        self._votes = Recent[PeerId, _Vote](MOST_VOTES)
        self._operators = Recent[PeerId, Connection](MOST_OPERATORS)
        self.promoted = False

    def receive(
        self, sender: PeerId, stamp: Stamp, message: Message, is_operator: bool, now: float
    ) -> tuple[Refused, Stamp] | None:
        """Take one message at the standby's port; return the answer with its stamp, None for none.

        is_operator: the sender may order the takeover, after its Hello and once.
        """
        here = Stamp(stamp.incarnation)
        match message:
            case Goodbye():
                return None
            case Hello():
                if is_operator and message.incarnation:
                    self._operators[sender] = Connection(message.incarnation, heard=1)
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
        """Record that a node of this run has turned to the standby, because the primary does not answer it."""
        if hello.role == "node" and hello.run == self._follower.run:
            self._votes[peer] = _Vote(now, hello.version, hello.incarnation, hello.without)

    def is_due(self, now: float) -> bool:
        """Return whether the standby takes over now: by itself, or by an operator's order."""
        if self.promoted:
            return True
        lost_at = self._follower.lost_at
        if lost_at is None:
            self._votes.clear()
            return False
        turned = self._turned(now)
        enough = bool(turned) and 2 * len(turned) >= len(self._follower.electorate)
        return now - lost_at >= self._seconds and enough and not self.obstacle(now)

    def obstacle(self, now: float) -> str:
        """Return why this standby is not the run's next hub, for people; "" if it is."""
        follower = self._follower
        if not follower.run:
            return "it has never heard the first broker"
        if not follower.in_step:
            return (
                f"it was not in step with the first broker when that was lost: it holds version {follower.version}, "
                "and nodes may have heard of later ones. Start the first again with its checkpoint"
            )
        fresh = [(peer, vote) for peer, vote in self._votes.items() if now - vote.at <= VOTE_SECONDS]
        without = sum(peer in follower.electorate and vote.without >= follower.lease for peer, vote in fresh)
        if 2 * without > len(follower.electorate):
            return "its nodes have let the first broker go on without it. Start the first again with its checkpoint"
        known = max((vote.version for _, vote in fresh), default=-1)
        if known > follower.version:
            return (
                f"it holds version {follower.version}, and a node has seen version {known}: the first broker went on "
                "without this standby. Start the first again with its checkpoint"
            )
        return ""

    def _turned(self, now: float) -> set[PeerId]:
        """The voters whose vote counts: not a process restarted since the electorate was sent (it may have said goodbye
        to the primary in between), and not one that has released the primary."""
        follower = self._follower
        return {
            peer
            for peer, vote in self._votes.items()
            if now - vote.at <= VOTE_SECONDS
            and vote.at > follower.read_at
            and peer in follower.electorate
            and vote.incarnation - follower.electorate[peer] < LIFE
            and vote.without < follower.lease
        }


class PrimaryLease:
    """Whether a hub that had a standby may go on without it.

    standby: its address, as last heard; "": none.  follows: it is in step.  number: how often a standby came in step;
    far higher in a restarted hub, because the checkpoint may be older than the last time.  ended: the standby has said
    that it takes over.
    """

    def __init__(self) -> None:
        self.standby, self.number = "", 0
        self.follows = self.ended = False
        self._told: dict[int, tuple[frozenset[PeerId], float]] = {}  # books it may be bound by: voters, time sent
        self._books = 0
        self._read_at = float("-inf")  # when the books that the standby has read last were sent
        self._released: dict[PeerId, float] = {}  # nodes that release this hub, or have left: when they joined
        self._unknown = False  # which electorate binds the standby

    @property
    def without(self) -> int:
        """Number of the lease without which the nodes are to let this hub go on; 0: none."""
        return self.number if self.standby and not self.follows else 0

    def joined(self, address: str) -> None:
        """A standby is in step; no electorate binds it before it is sent one."""
        self.standby, self.number, self.follows, self._unknown = address, self.number + 1, True, False
        self._read_at = float("-inf")
        self._told.clear()
        self._released.clear()

    def tell(self, electorate: Collection[PeerId], now: float) -> int:
        """Return the number of the books with which the standby is sent this electorate now."""
        self._books += 1
        if self.follows:
            self._told[self._books] = frozenset(electorate), now
            for peer in electorate:
                self._released.pop(peer, None)
        return self._books

    def read(self, number: int) -> None:
        """The standby has read the books of this number; earlier books, and earlier votes, bind it no more."""
        if self.follows and number in self._told:
            self._read_at = self._told[number][1]
            self._told = {told: one for told, one in self._told.items() if told >= number}

    def lost(self) -> None:
        """The standby is gone: it may take over with half of the electorate that it read last."""
        self.follows = False

    def returned(self, address: str) -> None:
        """A standby at this address follows again, and is not in step: it has received a new copy of the hub.

        If it is the one that was in step last, it takes over no more until it is told that it is in step, so no node
        need release this hub. A restarted hub may not know which standby was in step last.
        """
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
        """A node releases this hub from the lease of that number. joined: when the node came to this hub."""
        if number and number == self.without:
            self.said_goodbye(peer, joined)

    def said_goodbye(self, peer: PeerId, joined: float) -> None:
        """A node has left for good, and turns to nobody."""
        if any(peer in voters for voters, _ in self._told.values()):
            self._released.setdefault(peer, joined)

    @property
    def holds(self) -> bool:
        """Whether nodes may hear of new versions: the standby holds them, or cannot take over."""
        if self.ended or self.follows or self._unknown:
            return self.follows and not self.ended
        released = {peer for peer, joined in self._released.items() if joined + VOTE_DELAY_SECONDS <= self._read_at}
        return all(not voters or 2 * len(voters & released) > len(voters) for voters, _ in self._told.values())

    def state(self) -> dict[str, Any]:
        return {"standby": self.standby, "number": self.number}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` wrote, in this release or an earlier one. Raises KeyError, TypeError or ValueError.

        It is unknown who follows or has taken over since: nodes hear of nothing new before a standby is in step.
        """
        self.standby, self.number, self.follows = str(state["standby"]), int(state.get("number", 0)), False
        self._unknown = bool(self.standby)
        if self.standby or self.number:
            self.number += LEASES_OF_A_PROCESS


class Patience:
    """How long nodes wait for a standby that confirms versions late: a budget of seconds that refills slowly.

    A standby that uses it up is out of step, and the run goes on. Each time it stays so twice as long, unless it has
    been in step for longer than that in between.
    """

    def __init__(self) -> None:
        self._seconds, self._at = PATIENCE_SECONDS, 0.0
        self._in_step_at: float | None = None
        self._pause, self._until = PAUSE_SECONDS, float("-inf")

    def is_used_up(self, waited: float, size: int, now: float) -> bool:
        """Return whether nodes have waited too long. waited: seconds so far, for one version of `size` bytes."""
        return _charge(waited, size) > self._left(now)

    def waited(self, seconds: float, size: int, now: float) -> None:
        """The standby holds a version of `size` bytes now, for which nodes have waited so many seconds."""
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

"""A node's side of the protocol, without a socket or a clock: messages and `now` go in, effects come out.

Rule 1: `PEER_TRANSITIONS` says what moves which state where; `_move` is the only way.
Rule 2: whatever happens to the hub, training goes on: the machine falls back to CONNECTING and says Hello again.
Rule 3: `Search` says when and where: each attempt has the time of an answer plus a random time whose bound doubles, so
that the nodes that lost one hub do not all return at once. The next attempt makes new connections, because the old one
may lead to a host that is gone. Addresses are tried in turn: the given ones, then the newest standbys.
Rule 4: `Following` tracks versions. They are applied in order; an announcement out of order makes the node fetch a
snapshot. What the node was ordered to drop, or has lost, stays so until a whole snapshot is here. A gap that no later
message reveals is found through the roster, which says the hub's version.
Source: "full jitter", Brooker 2015, Exponential Backoff and Jitter (AWS Architecture Blog).
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from random import Random
from typing import Literal, NamedTuple

from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings
from zmqtrain.core.types import ModelSpec, PeerId, Version, describe_mismatch
from zmqtrain.protocol.effects import Connect, Deliver, Disconnect, Expect, PeerEffect, Send, Serve, Withdraw
from zmqtrain.protocol.fencing import Connection, Stamp, Verdict, hub_mismatch
from zmqtrain.protocol.groups import LATE_SECONDS
from zmqtrain.protocol.limits import OVER
from zmqtrain.protocol.members import MOST_WAITING, RUN_OVER, Claim
from zmqtrain.protocol.messages import (
    Aggregate,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Preempt,
    Promote,
    Publish,
    Quarantine,
    Refused,
    Roster,
    Schedule,
    Snapshot,
    Stop,
    Welcome,
    WireSchedule,
    model_from_wire,
    model_to_wire,
    replace_fields,
)
from zmqtrain.protocol.pipelines import Share
from zmqtrain.protocol.schedules import Timetable, schedule_from_plain

ANSWER_SECONDS = 0.5  # that an answer may take before anything else is tried
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.25, 1.5
"""Bounds of the random time: at first, and at most. With ANSWER_SECONDS the longest attempt takes 2 s, because a hub
that is back must be found soon."""
MOST_LEARNT = 4  # addresses of standbys that a node keeps, the newest
GOODBYE_HELLO_SECONDS, REFUSED_HELLO_SECONDS = 1.0, 5.0
"""Pauses before the next Hello: after a Goodbye of the hub, and after a hub that is not believed."""
HUB = PeerId("hub")
KEEPS_OPTIMIZER = frozenset({"norm", "again", OVER})
"""Reasons of a Quarantine or Preempt after which the optimizer goes on: a fresh one makes large deltas again."""

PeerRole = Literal["node", "observer"] | Claim | Promote | Stop


class Backoff:
    """Durations of the attempts of one node. seed: differs between nodes, so that their times do."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._bound = FIRST_BACKOFF_SECONDS

    def next(self) -> float:
        """Return how many seconds the attempt that begins now is given."""
        bound, self._bound = self._bound, min(2 * self._bound, LONGEST_BACKOFF_SECONDS)
        return ANSWER_SECONDS + self._random.uniform(0, bound)

    def reset(self) -> None:
        """Somebody has answered: the next attempts need not be further apart."""
        self._bound = FIRST_BACKOFF_SECONDS


class Search:
    """A node's search for its hub.

    given: its possible addresses, the first one tried first. Without any no other address is tried: there is one
    channel, and its owner knows where it leads.
    """

    def __init__(self, peer: PeerId, given: Sequence[str]) -> None:
        self._given, self._learnt = tuple(given), list[str]()
        self._looks_at = self._given[0] if self._given else ""
        self.backoff = Backoff(zlib.crc32(peer.encode()))
        self._at = 0.0
        self._fresh = True  # the connections: no Hello has gone over them

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the hub is looked for: the given addresses, then the standbys heard of."""
        return (*self._given, *self._learnt)

    def know(self, standby: str) -> None:
        if standby and self._given and standby not in self.addresses:
            self._learnt = [*self._learnt, standby][-MOST_LEARNT:]

    def is_due(self, now: float) -> bool:
        return now >= self._at

    def next_address(self) -> str | None:
        """Return the address to which the next attempt connects; "": the same as before; None: the present connections
        have not been tried yet."""
        if self._fresh:
            return None
        known = self.addresses
        if len(known) < 2:
            return ""
        at = known.index(self._looks_at) if self._looks_at in known else -1
        self._looks_at = known[(at + 1) % len(known)]
        return self._looks_at

    def began(self, now: float) -> None:
        self._at, self._fresh = now + self.backoff.next(), False

    def lost(self, again_at: float, elsewhere: bool) -> None:
        """Look for the hub again, from then on. elsewhere: first at another address, if one is known."""
        self._at, self._fresh = again_at, not (elsewhere and len(self.addresses) > 1)


class Step(Enum):
    """What an announcement requires."""

    EXPECT = "expect its chunks"
    FETCH = "fetch a snapshot: it is not the next version"
    NOTHING = "nothing"


class Whole(NamedTuple):
    """An announcement with all of its chunks. reset, warm: as in Deliver.  first: nothing was here before."""

    announcement: Aggregate | Snapshot
    reset: bool
    warm: bool
    first: bool


class Following:
    """The versions of a run at a node.

    version: of the last aggregate or snapshot that is here whole.  announced: of the last announcement.  confirmed: the
    hub has said that what this node held is the run's (of a founder: that the run begins with its parameters).
    """

    def __init__(self) -> None:
        self.version: Version = -1
        self.announced: Version = -1
        self.confirmed = False
        self._open: dict[int, Aggregate | Snapshot] = {}
        self._reset = self._warm = self._missing = False  # until a whole snapshot is here
        self._behind_since: float | None = None

    def announce(self, announcement: Aggregate | Snapshot) -> Step:
        """Record an announcement, and return what it requires."""
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
        """All chunks of an announcement are here; None: it is not awaited any more."""
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
        """A transfer does not match its announcement; return whether it was awaited."""
        awaited = self._open.pop(transfer, None) is not None
        self._missing |= awaited
        return awaited

    def dropped(self) -> None:
        """An aggregate was not applied: the snapshot may be of the very version that is here."""
        self._missing = True

    def restart(self, warm: bool) -> None:
        """Start again from the next snapshot, and drop what is pending. warm: the optimizer may go on as it is."""
        self._warm = warm and (self._warm or not self._reset)
        self._reset = True

    def fetch(self) -> Version:
        """Forget what is in flight, and return the version that the node holds, for its Fetch."""
        if any(one.reset for one in self._open.values() if isinstance(one, Snapshot) and one.version >= 0):
            self.restart(warm=False)
        self._open.clear()
        return -1 if self._reset or self._missing else self.version

    def lose(self) -> None:
        self._open.clear()

    def lags(self, version: Version, patience_seconds: float, now: float) -> bool:
        """Return whether the hub's version was not announced here for so long; asked at every heartbeat."""
        if version <= self.announced or self._open:
            self._behind_since = None
            return False
        if self._behind_since is None:
            self._behind_since = now
        return now - self._behind_since > patience_seconds


class PeerState(Enum):
    """Where a node stands with its hub."""

    CONNECTING = "connecting"
    WELCOMED = "welcomed"
    SYNCING = "waiting for a snapshot"
    FOUNDING = "founding the run"
    APART = "training apart"
    LIVE = "live"
    CLOSED = "closed"


class Move(Enum):
    """Causes of a move besides messages of the hub."""

    FETCH = "it asks for the run's parameters"
    FETCH_APART = "the same, in a population before its run is founded"
    LOSE = (
        "its hub is lost: silence, Goodbye, garbage, a gap in the numbers, a connection that is gone, `unknown`, `run`"
    )
    CLOSE = "it leaves, the run is over, or it is refused for good"


_WITH_HUB = (PeerState.WELCOMED, PeerState.SYNCING, PeerState.FOUNDING, PeerState.APART, PeerState.LIVE)
PEER_TRANSITIONS: dict[tuple[PeerState, type[Message] | Move], PeerState] = {
    (PeerState.CONNECTING, Welcome): PeerState.WELCOMED,
    (PeerState.SYNCING, Fetch): PeerState.FOUNDING,
    (PeerState.SYNCING, Snapshot): PeerState.LIVE,
    (PeerState.FOUNDING, Snapshot): PeerState.LIVE,
    (PeerState.APART, Fetch): PeerState.APART,
    (PeerState.APART, Snapshot): PeerState.LIVE,
    (PeerState.LIVE, Aggregate): PeerState.LIVE,
    (PeerState.LIVE, Preempt): PeerState.SYNCING,
    (PeerState.SYNCING, Preempt): PeerState.SYNCING,
    (PeerState.LIVE, Quarantine): PeerState.SYNCING,
    (PeerState.SYNCING, Quarantine): PeerState.SYNCING,
    (PeerState.WELCOMED, Move.FETCH_APART): PeerState.APART,
    (PeerState.APART, Move.FETCH_APART): PeerState.APART,
    **{(state, Move.FETCH): PeerState.SYNCING for state in _WITH_HUB},
    **{(state, Move.LOSE): PeerState.CONNECTING for state in (PeerState.CONNECTING, *_WITH_HUB)},
    **{(state, Move.CLOSE): PeerState.CLOSED for state in PeerState},
}
"""All moves of a node's state. A message without an entry for the present state is ignored. A Snapshot that is not of
the run's parameters (version -1) moves nothing."""


class Peer:
    """A node's state machine.

    peer: its id at the hub.  name: for people.  role: "node"; "observer"; the claim of a broker that registers a shard
    with the first and then observes; or an operator's order, sent after each Hello (Promote to a standby, Stop to a
    hub).  link, share, exchange: as in Hello.  incarnation: of the last Hello that this id has said, in any process
    (0: not fenced).  addresses: where the hub is looked for, in turn; without any a standby is never tried.

    founding: the number with which a node initializes the shards of several brokers: received from the first, sent to
    the others.  over: the hub has said so to a broker, or to an operator.  score: of its own parameters, as last sent.
    timetable: which k and d hold when, from Welcome on.  quarantined_until: the hub rejects its deltas until then.
    held: as in Fetch: what a lost connection has left of a snapshot.  term: of the last hub believed.  without, heard,
    called: as in Hello and Welcome.  dropped: messages of the hub that were not current, by verdict.  run_samples: of
    all nodes, as the hub last said.  obstacle: what the last broker that was no hub said, "" once one welcomes this
    peer.  rewound: the version that all have gone back to, -1 if none.  overtaken: what was pending at the checkpoint
    that this node goes on from has landed since, or will, because a former process offered it; it must be dropped.
    """

    def __init__(
        self,
        peer: PeerId,
        name: str,
        role: PeerRole = "node",
        link: float = 0.0,
        share: float = 1.0,
        exchange: str = "",
        incarnation: int = 0,
        addresses: Sequence[str] = (),
    ) -> None:
        self.peer, self.name, self.link, self.share, self.exchange = peer, name, link, share, exchange
        self.observer = role != "node"
        self.claim = role if isinstance(role, Claim) else None
        self.order = role if isinstance(role, Promote | Stop) else None
        self.incarnation, self.term, self.without = incarnation, 0, 0
        self.dropped = Counter[str]()
        self.heard, self.called = -1, ""
        self.whole = False
        """As in Hello; set before `start`."""
        self.holds: Share | None = None
        """What this peer holds as one PC of a pipeline; set before `start`."""
        self.timetable: Timetable | None = None
        self.run = self.obstacle = ""
        self.settings: RunSettings | None = None
        self.model: ModelSpec = ()
        self.run_model: ModelSpec = ()
        self.run_version: Version = -1
        self.roster: Roster | None = None
        self.run_samples = self.shard = self.founding = 0
        self.shards: tuple[str, ...] = ()
        self.over = self.overtaken = False
        self.quarantined_until = 0.0
        self.held: tuple[str, int] = ("", 0)
        self.round_trip_seconds: float | None = None
        self.in_flight: set[int] = set()
        self.score = math.nan
        self.checkpoints: tuple[int, ...] = ()
        self.rewound: Version = -1
        self._state = PeerState.CONNECTING
        self.search, self.following = Search(peer, addresses), Following()
        self._connection = Connection(0)
        self._beats: dict[float, int] = {}  # by unanswered heartbeat: the last publish before it
        self._asks_of: tuple[int, ...] = ()
        self.next_sequence = -1
        self._voting = False  # the mean has come since this node was last asked for its parameters
        self._beat_at = self._heard = self._ticked = 0.0

    def resume(
        self,
        run: str,
        version: Version,
        settings: RunSettings,
        model: ModelSpec,
        in_flight: Sequence[int],
        checkpoints: tuple[int, ...] = (),
        next_sequence: int = -1,
        schedules: Iterable[WireSchedule] = (),
    ) -> None:
        """Go on as a node of this run from this version; call before `start`. checkpoints: as in Hello.

        next_sequence: of the first offer of the former process that the checkpoint does not know of, -1 for none: then
        nothing of what is pending is dropped.
        schedules: as `Timetable.since` gave them, for a restarted hub that may not know the last ones; the schedules in
        its Welcome replace them.
        """
        self.run, self.settings, self.run_model = run, settings, model
        self.following.version = version
        self.timetable, self.run_version = Timetable(settings, schedules), version
        self.in_flight, self.checkpoints = set(in_flight), checkpoints
        self._asks_of, self.next_sequence = tuple(sorted(self.in_flight))[:MOST_WAITING], next_sequence

    def _move(self, cause: type[Message] | Move) -> None:
        self._state = PEER_TRANSITIONS[self._state, cause]

    @property
    def state(self) -> PeerState:
        return self._state

    @property
    def version(self) -> Version:
        return self.following.version

    @property
    def heartbeat_seconds(self) -> float:
        assert self.settings is not None
        return self.settings.heartbeat_seconds

    @property
    def lost_seconds(self) -> float:
        assert self.settings is not None
        return self.settings.lost_seconds

    @property
    def measured_rate(self) -> float:
        """The rate of this node's port as the hub last said, in bytes per second; 0: it has not."""
        members = self.roster.members if self.roster is not None else ()
        return next((float(one.get("link_rate", 0.0)) for one in members if one.get("peer") == self.called), 0.0)

    @property
    def is_evaluator(self) -> bool:
        """Whether this node scores the shared model, as the hub last said."""
        return self.roster is not None and bool(self.called) and self.roster.evaluator == self.called

    @property
    def founded(self) -> bool:
        """Whether the run has parameters, as far as the hub has said."""
        return self.run_version >= 0 or (self.roster is not None and self.roster.version >= 0)

    # ------------------------------------------------------------------ actions of this side

    def divided(self, shards: int) -> None:
        """The hub has decided the number of brokers. With one, this node needs the whole model from now on: its coder
        codes the whole, and a hub that is started again would decide once more."""
        assert self.settings is not None
        self.settings = replace(self.settings, shards=shards)
        self.whole |= shards == 1

    def start(self, now: float) -> list[PeerEffect]:
        """Say Hello, for the first time or again."""
        self.search.began(now)
        self.incarnation += bool(self.incarnation)
        self._connection = Connection(self.incarnation)
        hello = replace_fields(self._greeting(), incarnation=self.incarnation, term=self.term, without=self.without)
        # the order goes with each Hello, because nothing of an unanswered attempt is sent again
        return [Send(hello)] if self.order is None else [Send(hello), Send(self.order)]

    def join(self, model: ModelSpec, now: float, score: float = math.nan) -> list[PeerEffect]:
        """Describe this node's model; from Welcome on the machine asks for the run's parameters by itself.

        score: of this node's own parameters, lower is better.
        """
        self.model, self.score = model, score
        return self._fetch(now) if self.state is PeerState.WELCOMED else []

    def compare(self, score: float, declined: bool = False) -> list[PeerEffect]:
        """Report the score of this node's own parameters, while it trains apart as one of a population.

        declined: it keeps its own in place of lent ones, which it says by describing its model once more.
        """
        self.score = score
        if self.state is not PeerState.APART:
            return []
        return [Send(Fetch(-1, model_to_wire(self.model), score))] if declined else [Send(Fetch(score=score))]

    def vote(self, score: float) -> list[PeerEffect]:
        if self.state is not PeerState.FOUNDING or not self._voting:
            return []
        self._voting = False
        return [Send(Fetch(score=score))]

    def publish(self, publish: Publish) -> list[PeerEffect]:
        """Announce a delta. Raises LocalProtocolError unless live."""
        if self.state is not PeerState.LIVE:
            raise LocalProtocolError(f"{self.name} cannot publish while it is {self.state.value}")
        self.in_flight.add(publish.sequence)
        return [Send(publish)]

    def resync(self) -> list[PeerEffect]:
        """Ask for a snapshot because this side dropped aggregates; a node that is not live asks as soon as it can."""
        self.following.dropped()
        return self._resync() if self.state is PeerState.LIVE else []

    def leave(self, reason: str) -> list[PeerEffect]:
        connected = self.state not in (PeerState.CONNECTING, PeerState.CLOSED)
        self._move(Move.CLOSE)
        return [Send(Goodbye(reason))] if connected else []

    def tick(self, now: float) -> list[PeerEffect]:
        """Let time pass: heartbeats, Hello again, the timeout of the hub."""
        late, self._ticked = now - max(self._ticked, self._heard) - LATE_SECONDS, now
        if self.state is PeerState.CLOSED:
            return []
        if self.state is PeerState.CONNECTING:
            if not self.search.is_due(now):
                return []
            address = self.search.next_address()
            return [*([] if address is None else [Connect(address)]), *self.start(now)]
        if late > self.heartbeat_seconds:  # this side did not run: messages of the hub wait to be read
            self._heard = min(now, self._heard + late)
        silent = now - self._heard
        if silent > self.lost_seconds:
            return self._lose_hub("lost", f"the broker has been silent for {silent:.1f} s", now, now)
        if now < self._beat_at:
            return []
        self._beat_at = now + self.heartbeat_seconds
        return [Send(self._beat(now)), *self._resync_if_behind(now)]

    def stamp(self, counted: bool = True) -> Stamp:
        return self._connection.stamp(counted)

    # ------------------------------------------------------------------ messages of the hub

    def judge(self, stamp: Stamp, message: Message, now: float, counted: bool = True) -> list[PeerEffect] | None:
        """Return None for a current message, which is to be received; for any other the effects in its place.

        counted: it came on CONTROL.
        """
        if isinstance(message, Refused) and not stamp.number and stamp.incarnation in (0, self._connection.incarnation):
            return None  # of a hub that has no connection with this node, or cannot read its heads
        verdict = self._connection.judge(stamp, counted)
        if verdict is Verdict.NOW:
            return None
        self.dropped[verdict.value] += 1
        if verdict is Verdict.GAP and self.state not in (PeerState.CONNECTING, PeerState.CLOSED):
            return self._lose_hub("gap", "messages of the broker were lost in flight", now, now)
        return []

    def saw(self, now: float) -> None:
        self._heard = now

    def receive(self, message: Message, now: float) -> list[PeerEffect]:
        """Take one message of the hub. One that does not fit the state is ignored: it was sent before the hub knew."""
        if self.state is PeerState.CLOSED:
            return []
        self._heard = now
        match message:
            case Heartbeat(sent, heard):
                self.round_trip_seconds = now - sent
                return self._withdraw_unheard(sent, heard)
            case Roster():
                self.roster, self.shards = message, message.shards or self.shards
                self.run_samples = message.samples
                if message.shards and self.settings is not None and self.settings.shards == AUTO_SHARDS:
                    self.divided(len(message.shards))
                self.search.know(str(message.hub.get("standby", "")))
                return self._let_go_on(message, now)
            case Schedule() if self.timetable is not None and self.state is not PeerState.CONNECTING:
                self.timetable.add(message)
            case Quarantine(reason, _, seconds):
                self.quarantined_until = now + seconds
                if seconds > 0 and (self.state, Quarantine) in PEER_TRANSITIONS:
                    self.following.restart(warm=reason in KEEPS_OPTIMIZER)
                    return self._resync(Quarantine)
            case Refused():
                return self._on_refused(message, now)
            case Goodbye(reason) if reason == RUN_OVER and (self.claim is not None or self.order is not None):
                self.over = True
                self._move(Move.CLOSE)
            case Goodbye(reason) if self.state is not PeerState.CONNECTING:
                text = f"the broker said goodbye: {reason}" if reason else "the broker said goodbye"
                return self._lose_hub("goodbye", text, now, now + GOODBYE_HELLO_SECONDS)
            case _ if (self.state, type(message)) in PEER_TRANSITIONS:
                match message:
                    case Welcome():
                        return self._on_welcome(message, now)
                    case Fetch():
                        self._move(Fetch)
                        self.founding, self._voting = message.founding, False
                        return [Serve(HUB, -1)]
                    case Snapshot() | Aggregate():
                        return self._on_announcement(message)
                    case Preempt(reason):
                        self.following.restart(warm=reason in KEEPS_OPTIMIZER)
                        return self._resync(Preempt)
        return []

    def distrust(self, text: str, now: float) -> list[PeerEffect]:
        """The hub sent unreadable data: connect again."""
        if self.state is PeerState.CLOSED:
            return []
        text = f"the broker sent what cannot be read ({text})"
        return self._lose_hub("garbage", text, now, now + GOODBYE_HELLO_SECONDS)

    def gone(self, now: float) -> list[PeerEffect]:
        if self.state in (PeerState.CONNECTING, PeerState.CLOSED):
            return []
        return self._lose_hub("gone", "the connection to the broker is gone", now, now)

    def spoiled(self, transfer: int) -> list[PeerEffect]:
        """An expected snapshot does not match its announcement: ask for it again."""
        return self._resync() if self.following.spoiled(transfer) else []

    def received(self, transfer: int) -> list[PeerEffect]:
        whole = self.following.whole(transfer)
        if whole is None:
            return []
        announcement, own = whole.announcement, self.settings is not None and self.settings.initial == "own"
        if isinstance(announcement, Snapshot):
            landed = tuple(s for s, _ in announcement.landed if s in self.in_flight)
            keep = whole.first and own and not whole.reset
            self._voting = announcement.version < 0
        else:
            landed = tuple(s for peer, s in announcement.landed if s in self.in_flight and peer == self.peer)
            keep = False
        self.in_flight.difference_update(landed)
        return [Deliver(announcement, landed, whole.reset, keep, whole.warm)]

    # ------------------------------------------------------------------ the moves

    def _withdraw_unheard(self, sent: float, heard: int) -> list[PeerEffect]:
        """Withdraw the publishes sent before this heartbeat that did not arrive; the lane keeps the order."""
        published = self._beats.pop(sent, -1)
        self._beats = {beat: sequence for beat, sequence in self._beats.items() if beat > sent}
        lost = sorted(sequence for sequence in self.in_flight if heard < sequence <= published)
        self.in_flight.difference_update(lost)
        return [Withdraw(sequence, "lost", "it never reached the broker") for sequence in lost]

    def _resync_if_behind(self, now: float) -> list[PeerEffect]:
        """Fetch what was lost in flight, if no later aggregate shows the gap."""
        known = self.roster.version if self.roster is not None and self.state is PeerState.LIVE else -1
        return self._resync() if self.following.lags(known, self.lost_seconds, now) else []

    def _let_go_on(self, roster: Roster, now: float) -> list[PeerEffect]:
        """Release the hub from its standby, as the roster asks: this node then has no vote there (`standby`)."""
        without = roster.hub.get("without", 0)
        if self.observer or self.state is PeerState.CONNECTING or type(without) is not int or without <= self.without:
            return []
        self.without = without
        return [Send(self._beat(now))]

    def _beat(self, now: float) -> Heartbeat:
        self._beats[now] = max(self.in_flight, default=-1)
        return Heartbeat(now, self._read_last)

    @property
    def _read_last(self) -> int:
        """What a heartbeat confirms; -1: nothing."""
        return self.without or -1

    def _greeting(self) -> Hello:
        if (claim := self.claim) is not None:
            return Hello(self.name, "broker", self.run, self.version, shard=claim.shard, address=claim.address)
        role = "observer" if self.observer else "node"
        hello = Hello(
            self.name, role, self.run, self.version, self.link, self.share, exchange=self.exchange, whole=self.whole
        )
        if (share := self.holds) is not None:
            hello = replace_fields(hello, pipeline=share.pipeline, holds=(share.first, share.end, share.parts))
        return replace_fields(hello, in_flight=self._asks_of, checkpoints=self.checkpoints)

    def _may_start_over(self, welcome: Welcome) -> bool:
        """Whether this node has nothing of its run, and is offered the same settings again: its broker was lost during
        the initialization."""
        nothing, settings = self.version < 0 and self.claim is None, self.settings
        if not nothing or settings is None or settings.shards > 1:
            return False
        own = settings.to_dict()
        return all(welcome.settings.get(name) == own[name] for name in own if name != "shards")

    def _on_welcome(self, welcome: Welcome, now: float) -> list[PeerEffect]:
        mismatch = hub_mismatch(welcome, self.run, self.term, self.version, self._may_start_over(welcome))
        if mismatch is not None:
            return self._lose_hub(*mismatch, now, now + REFUSED_HELLO_SECONDS)
        self.term, self.called = welcome.term, welcome.called
        self.search.know(welcome.standby)
        self.shard, self.shards, self.run_samples = welcome.shard, welcome.shards, welcome.samples
        settings = RunSettings.from_dict(welcome.settings)
        if self.whole and settings.shards == AUTO_SHARDS:
            settings = replace(settings, shards=1)  # as `divided` says
        if self.timetable is None:
            self.timetable = Timetable(settings)
        for schedule in welcome.schedules:
            self.timetable.add(schedule_from_plain(schedule))
        self.run, self.run_model, self.run_version = welcome.run, model_from_wire(welcome.model), welcome.version
        self.settings = settings  # the last of all this: other threads wait for it
        self._move(Welcome)
        self.obstacle = ""
        self.search.backoff.reset()
        self._beat_at = now
        kept = {sequence for sequence, _ in welcome.landed} | set(welcome.accepted)
        lost = sorted(self.in_flight - kept)
        self.in_flight &= kept
        effects: list[PeerEffect] = [Withdraw(s, "lost", "the connection was lost in flight") for s in lost]
        drops = self.settings.mode != "strict" and self.settings.initial != "own"
        if drops and 0 <= self.next_sequence <= max(kept, default=-1):
            self.overtaken = True
            self.following.restart(warm=True)
        self.next_sequence, self.heard = -1, welcome.heard
        return effects + (self._fetch(now) if self.model else [])

    def _fetch(self, now: float) -> list[PeerEffect]:
        difference = describe_mismatch(self.run_model, self.model) if self.run_model else None
        if difference is None:
            return self._resync()
        self._move(Move.CLOSE)
        text = f"{difference[1]}. Start this node with the run's model, or another broker for this one"
        return [Send(Goodbye("another model")), Disconnect(HUB, "model", text)]

    def _resync(self, cause: type[Message] | Move = Move.FETCH) -> list[PeerEffect]:
        settings = self.settings
        population = settings is not None and settings.initial == "own" and settings.elastic == 1
        population &= (self.state, Move.FETCH_APART) in PEER_TRANSITIONS
        apart = population and not self.founded and self.version < 0
        self._move(Move.FETCH_APART if apart and cause is Move.FETCH else cause)
        founding = self.founding if self.shard else 0  # the first broker gives the number
        return [Send(Fetch(self.following.fetch(), model_to_wire(self.model), self.score, founding, *self.held))]

    def _on_announcement(self, announcement: Aggregate | Snapshot) -> list[PeerEffect]:
        if isinstance(announcement, Snapshot) and announcement.version >= 0:
            self.run_version = announcement.version
            self._move(Snapshot)
            self.checkpoints, self._asks_of = (), ()
            if announcement.rewound:
                self.rewound, self.heard = announcement.version, -1
                self.in_flight.clear()
        elif isinstance(announcement, Snapshot) and self.state is not PeerState.APART:
            # parameters that are not the run's: the mean to vote on, if this node was asked for its own
            is_mean = self.settings is not None and self.settings.initial == "mean"
            if not (is_mean and self.state is PeerState.FOUNDING):
                return []
        step = self.following.announce(announcement)
        if step is Step.FETCH:
            return self._resync()
        return [Expect(HUB, announcement)] if step is Step.EXPECT else []

    def _on_refused(self, refused: Refused, now: float) -> list[PeerEffect]:
        if refused.sequence >= 0:
            if refused.sequence not in self.in_flight:
                return []
            self.in_flight.discard(refused.sequence)
            return [Withdraw(refused.sequence, refused.reason, refused.text)]
        if refused.reason == "probe":
            return []
        if refused.reason in ("standby", "term"):  # the next attempt is at another address
            self.obstacle = refused.text
            self.search.backoff.reset()
            return []
        if refused.reason == "unknown":
            if self.state is PeerState.CONNECTING:
                return []
            return self._lose_hub("unknown", refused.text, now, now)
        if refused.reason == "run":
            return self._lose_hub("run", refused.text, now, now + REFUSED_HELLO_SECONDS)
        self._move(Move.CLOSE)
        return [Disconnect(HUB, refused.reason, refused.text)]

    def _lose_hub(self, reason: str, text: str, now: float, hello_at: float) -> list[PeerEffect]:
        self._move(Move.LOSE)
        self.following.lose()
        self._beats.clear()
        self.search.lost(hello_at, elsewhere=reason in ("run", "version", "term"))
        return [Disconnect(HUB, reason, text)]

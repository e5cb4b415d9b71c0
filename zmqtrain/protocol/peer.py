"""Be a node's side of the talk with the hub, without a socket or a clock: messages and `now` go in, effects come out.

Rule 1: `PEER_TRANSITIONS` says which message moves which state where.  Rule 2: whatever happens to the hub, training
goes on: the machine falls back to CONNECTING and says Hello again.  Rule 3: a hub of another run, or one that knows
less than this node has seen, is not believed.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from zmqtrain.errors import LocalProtocolError
from zmqtrain.protocol.backoff import Backoff
from zmqtrain.protocol.effects import Connect, Deliver, Disconnect, Expect, PeerEffect, Send, Serve, Withdraw
from zmqtrain.protocol.fencing import Connection, Stamp, Verdict
from zmqtrain.protocol.masters import RUN_OVER, Claim
from zmqtrain.protocol.members import MOST_WAITING
from zmqtrain.protocol.messages import (
    Aggregate,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Preempt,
    Publish,
    Quarantine,
    Refused,
    Roster,
    Schedule,
    Snapshot,
    Welcome,
    model_from_wire,
    model_to_wire,
)
from zmqtrain.protocol.schedules import Timetable
from zmqtrain.settings import RunSettings
from zmqtrain.types import ModelSpec, PeerId, describe_mismatch

__all__ = ["PeerState", "PEER_TRANSITIONS", "Peer", "HUB"]

HUB = PeerId("hub")
MOST_LEARNT = 4
"""Addresses of standbys that a node keeps, the newest."""
KEEPS_OPTIMIZER = frozenset({"norm", "again"})
"""Who is quarantined for these goes on with the optimizer that it has: a fresh one makes large deltas again."""
GOODBYE_HELLO_SECONDS, REFUSED_HELLO_SECONDS = 1.0, 5.0
"""After a Goodbye of the hub, and after one that is not believed."""


class PeerState(Enum):
    """Where a node stands with its hub."""

    CONNECTING = "connecting"
    WELCOMED = "welcomed"
    SYNCING = "waiting for a snapshot"
    FOUNDING = "founding the run"
    APART = "training apart"
    LIVE = "live"
    CLOSED = "closed"


PEER_TRANSITIONS: dict[tuple[PeerState, type[Message]], PeerState] = {
    (PeerState.CONNECTING, Welcome): PeerState.WELCOMED,
    (PeerState.SYNCING, Fetch): PeerState.FOUNDING,
    (PeerState.SYNCING, Snapshot): PeerState.LIVE,
    (PeerState.FOUNDING, Snapshot): PeerState.LIVE,
    (PeerState.APART, Fetch): PeerState.APART,
    (PeerState.APART, Snapshot): PeerState.LIVE,
    (PeerState.LIVE, Aggregate): PeerState.LIVE,
    (PeerState.LIVE, Preempt): PeerState.SYNCING,
    (PeerState.LIVE, Quarantine): PeerState.SYNCING,
    (PeerState.SYNCING, Quarantine): PeerState.SYNCING,
}
"""The moves of a node's state. Besides these: a version gap leads from LIVE to SYNCING; silence, Goodbye, garbage, a
gap in the numbers, a connection that is gone, and Refused "unknown" or "run" of the hub from anywhere to CONNECTING;
any other Refused without a sequence, and another model, to CLOSED; `join` from WELCOMED to SYNCING, or in a population
whose run is not founded to APART; `leave` from anywhere to CLOSED. A Snapshot of another node's parameters (version -1)
leaves APART as it is. Others are ignored."""


class Peer:
    """A node's state machine.

    peer: how the hub knows this node.  name: for people.  observer: only watch.  link, share, exchange: as in
    Hello.
    claim: be the master of a shard, who registers with the first and then watches.  founding: the number with which a
    node founds the shards of several masters: as the first said it, and, at the others, as it is said to them.
    over: the first has said so to a master.
    version: of the last aggregate or snapshot that is here whole.  confirmed: the hub has said that what this node held
    is the run's (of a founder: that its parameters are).  score: of this node's own parameters, as it last said.
    timetable: which k and d hold when, from Welcome on.  quarantined_until: until then the hub takes no delta of this
    node.  held: as in Fetch: what a lost connection has left of a snapshot.
    incarnation: of the last Hello; what is given is that of the last one that this id has said, in whatever process (0:
    not fenced).  addresses: where the hub is looked for, in turn; without any no standby is.  term: of the hub that was
    last believed.  dropped: messages of the hub that were not of now, by what they were.  heard: as in Welcome.
    """

    def __init__(
        self,
        peer: PeerId,
        name: str,
        observer: bool = False,
        link: float = 0.0,
        share: float = 1.0,
        claim: Claim | None = None,
        exchange: str = "",
        incarnation: int = 0,
        addresses: Sequence[str] = (),
    ) -> None:
        self.term = 0
        self._given, self._learnt = tuple(addresses), list[str]()
        self._looks_at = self._given[0] if self._given else ""
        self.incarnation, self.dropped = incarnation, Counter[str]()
        self._connection = Connection(0)
        self._backoff = Backoff(zlib.crc32(peer.encode()))
        self._fresh = True  # the connections: no Hello has gone over them
        self.heard = -1
        self.peer, self.name, self.observer, self.link, self.share = peer, name, observer, link, share
        self.exchange = exchange
        self.observer, self.claim = observer or claim is not None, claim
        self.timetable: Timetable | None = None
        self.state = PeerState.CONNECTING
        self.run = ""
        self.version = -1
        self.settings: RunSettings | None = None
        self.model: ModelSpec = ()
        self.run_model: ModelSpec = ()
        self.roster: Roster | None = None
        self.shard = self.founding = 0
        self.masters: tuple[str, ...] = ()
        self.over = False
        self.quarantined_until = 0.0
        self.held: tuple[str, int] = ("", 0)
        self.round_trip_seconds: float | None = None
        self.in_flight: set[int] = set()
        self.confirmed = False
        self.score = math.nan
        self._announced = self.run_version = -1
        self._behind_since: float | None = None
        self._beats: dict[float, int] = {}  # per heartbeat that is not answered, the last publish before it
        self._reset = self._warm = self._missing = False  # until a whole snapshot is here
        self._open: dict[int, Aggregate | Snapshot] = {}
        self.checkpoints: tuple[int, ...] = ()
        self._asks_of: tuple[int, ...] = ()
        self.obstacle = ""
        """What the last broker that was no hub said of itself, "" once one has welcomed this peer."""
        self.rewound = -1
        """The version to which all have gone back, -1 if they have not."""
        self._hello_at = 0.0
        self._beat_at = 0.0
        self._heard = 0.0

    # ------------------------------------------------------------------ what this side wants

    def start(self, now: float) -> list[PeerEffect]:
        """Say Hello for the first time."""
        return self._hello(now)

    def resume(
        self,
        run: str,
        version: int,
        settings: RunSettings,
        model: ModelSpec,
        in_flight: Sequence[int],
        checkpoints: tuple[int, ...] = (),
    ) -> None:
        """Be a node of this run, as it was at this version: before `start`. checkpoints: as in Hello."""
        self.run, self.version, self.settings, self.run_model = run, version, settings, model
        self.timetable, self.run_version = Timetable(settings), version
        self.in_flight, self.checkpoints = set(in_flight), checkpoints
        self._asks_of = tuple(sorted(self.in_flight))[:MOST_WAITING]

    def join(self, model: ModelSpec, now: float, score: float = math.nan) -> list[PeerEffect]:
        """Describe this node's model; from Welcome on the machine asks for the run's parameters by itself.

        score: of this node's own parameters, lower is better.
        """
        self.model, self.score = model, score
        return self._fetch(now) if self.state is PeerState.WELCOMED else []

    def compare(self, score: float) -> list[PeerEffect]:
        """Say how this node's own parameters score now; heard while it trains apart, as one of a population."""
        self.score = score
        return [Send(Fetch(score=score))] if self.state is PeerState.APART else []

    @property
    def measured_rate(self) -> float:
        """The rate of this node's port as the hub last said, in bytes per second; 0: it has not."""
        members = self.roster.members if self.roster is not None else ()
        return next((float(one.get("link_rate", 0.0)) for one in members if one.get("peer") == self.peer), 0.0)

    @property
    def founded(self) -> bool:
        """Whether the run has parameters, as far as the hub has said."""
        return self.run_version >= 0 or (self.roster is not None and self.roster.version >= 0)

    def publish(self, publish: Publish) -> list[PeerEffect]:
        """Announce a delta. Raises LocalProtocolError unless live."""
        if self.state is not PeerState.LIVE:
            raise LocalProtocolError(f"{self.name} cannot publish while it is {self.state.value}")
        self.in_flight.add(publish.sequence)
        return [Send(publish)]

    def resync(self) -> list[PeerEffect]:
        """Ask for a snapshot because this side dropped aggregates."""
        if self.state is not PeerState.LIVE:
            return []
        self._missing = True  # `version` counts what was dropped: the snapshot may be of that very version
        return self._resync()

    def leave(self, reason: str) -> list[PeerEffect]:
        """Say goodbye; nothing is awaited any more."""
        said: list[PeerEffect] = (
            [] if self.state in (PeerState.CONNECTING, PeerState.CLOSED) else [Send(Goodbye(reason))]
        )
        self.state = PeerState.CLOSED
        return said

    def tick(self, now: float) -> list[PeerEffect]:
        """Let time pass: heartbeats, Hello again, the hub taken for lost."""
        if self.state is PeerState.CLOSED:
            return []
        if self.state is PeerState.CONNECTING:
            if now < self._hello_at:
                return []
            # what an attempt that nobody answered has left behind may be a connection to a host that is no more
            anew: list[PeerEffect] = [] if self._fresh else [Connect(self._next_address())]
            return anew + self._hello(now)
        assert self.settings is not None
        silent = now - self._heard
        if silent > self.settings.lost_seconds:
            return self._lose_hub("lost", f"the broker has been silent for {silent:.1f} s", now, now)
        if now < self._beat_at:
            return []
        self._beat_at = now + self.settings.heartbeat_seconds
        self._beats[now] = max(self.in_flight, default=-1)
        return [Send(Heartbeat(now)), *self._resync_if_behind(now)]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the hub is looked for: as given, then the standbys that were heard of."""
        return (*self._given, *self._learnt)

    def know(self, standby: str) -> None:
        """Take note of where a standby of the hub is, or was."""
        if standby and self._given and standby not in self.addresses:
            self._learnt = [*self._learnt, standby][-MOST_LEARNT:]

    def stamp(self, counted: bool = True) -> Stamp:
        """Return the stamp of what is said next. counted: on the lane of control."""
        return self._connection.stamp(counted)

    # ------------------------------------------------------------------ what the hub says

    def judge(self, stamp: Stamp, message: Message, now: float, counted: bool = True) -> list[PeerEffect] | None:
        """Return None for a message of now, which is to be received; for any other what is to be done instead.

        counted: it came on the lane of control.
        """
        if isinstance(message, Refused) and not stamp.number and stamp.incarnation in (0, self._connection.incarnation):
            return None  # of a hub that has no connection with this node, or cannot read its heads
        verdict = self._connection.judge(stamp, counted)
        if verdict is Verdict.NOW:
            return None
        self.dropped[verdict.value] += 1
        if verdict is Verdict.GAP and self.state not in (PeerState.CONNECTING, PeerState.CLOSED):
            return self._lose_hub("gap", "messages of the broker were lost on their way", now, now)
        return []

    def saw(self, now: float) -> None:
        """Take note that the hub lives (a chunk came)."""
        self._heard = now

    def receive(self, message: Message, now: float) -> list[PeerEffect]:
        """Take one message of the hub; what does not fit the state is ignored (it was sent before the hub knew)."""
        if self.state is PeerState.CLOSED:
            return []
        self._heard = now
        match message:
            case Heartbeat(sent, heard):
                self.round_trip_seconds = now - sent
                return self._withdraw_unheard(sent, heard)
            case Roster():
                self.roster, self.masters = message, message.masters or self.masters
                self.know(str(message.hub.get("standby", "")))
            case Schedule() if self.timetable is not None and self.state is not PeerState.CONNECTING:
                self.timetable.add(message)
            case Quarantine(reason, _, seconds):
                self.quarantined_until = now + seconds
                if seconds <= 0:
                    return []
                several = self.settings is not None and self.settings.masters > 1
                if (self.state, Quarantine) in PEER_TRANSITIONS and not several:  # one of several has a part only
                    self._warm = reason in KEEPS_OPTIMIZER and (self._warm or not self._reset)
                    self._reset = True
                    return self._resync()
            case Refused():
                return self._on_refused(message, now)
            case Goodbye(reason) if reason == RUN_OVER and self.claim is not None:
                self.over, self.state = True, PeerState.CLOSED
            case Goodbye(reason) if self.state is not PeerState.CONNECTING:
                text = f"the broker said goodbye: {reason}" if reason else "the broker said goodbye"
                return self._lose_hub("goodbye", text, now, now + GOODBYE_HELLO_SECONDS)
            case _ if (self.state, type(message)) in PEER_TRANSITIONS:
                match message:
                    case Welcome():
                        return self._on_welcome(message, now)
                    case Fetch():
                        self.state, self.founding = PEER_TRANSITIONS[self.state, Fetch], message.founding
                        return [Serve(HUB, -1)]
                    case Snapshot() | Aggregate():
                        return self._on_announcement(message)
                    case Preempt():
                        self._reset, self._warm = True, False
                        return self._resync()
        return []

    def distrust(self, text: str, now: float) -> list[PeerEffect]:
        """The hub sent what cannot be read: begin anew."""
        if self.state is PeerState.CLOSED:
            return []
        return self._lose_hub(
            "garbage", f"the broker sent what cannot be read ({text})", now, now + GOODBYE_HELLO_SECONDS
        )

    def gone(self, now: float) -> list[PeerEffect]:
        """A connection to the hub is gone."""
        if self.state in (PeerState.CONNECTING, PeerState.CLOSED):
            return []
        return self._lose_hub("gone", "the connection to the broker is gone", now, now)

    def spoiled(self, transfer: int) -> list[PeerEffect]:
        """An expected snapshot is here, and is not what was sent: ask for it again."""
        if self._open.pop(transfer, None) is None:
            return []
        self._missing = True
        return self._resync()

    def received(self, transfer: int) -> list[PeerEffect]:
        """All chunks of an expected aggregate or snapshot are here."""
        announcement = self._open.pop(transfer, None)
        if announcement is None:
            return []
        if isinstance(announcement, Snapshot):
            landed = tuple(s for s, _ in announcement.landed if s in self.in_flight)
            reset = self._reset or announcement.reset
            warm = self._warm and not announcement.reset
            self._reset = self._warm = self._missing = False
            keep = not reset and self.version < 0 and self.settings is not None and self.settings.initial == "own"
        else:
            landed = tuple(s for peer, s in announcement.landed if s in self.in_flight and peer == self.peer)
            reset = keep = warm = False
        self.version = announcement.version
        self.in_flight.difference_update(landed)
        return [Deliver(announcement, landed, reset, keep, warm)]

    # ------------------------------------------------------------------ the moves

    def _withdraw_unheard(self, sent: float, heard: int) -> list[PeerEffect]:
        """Give up the publishes that went out before this heartbeat and did not get there: the lane keeps the order."""
        published = self._beats.pop(sent, -1)
        self._beats = {beat: sequence for beat, sequence in self._beats.items() if beat > sent}
        lost = sorted(sequence for sequence in self.in_flight if heard < sequence <= published)
        self.in_flight.difference_update(lost)
        return [Withdraw(sequence, "lost", "it never reached the broker") for sequence in lost]

    def _resync_if_behind(self, now: float) -> list[PeerEffect]:
        """Fetch what the hub dropped on its way here, where no later aggregate shows the gap."""
        assert self.settings is not None
        behind = self.roster is not None and self.roster.version > self._announced and not self._open
        if self.state is not PeerState.LIVE or not behind:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        elif now - self._behind_since > self.settings.lost_seconds:
            return self._resync()
        return []

    def _hello(self, now: float) -> list[PeerEffect]:
        self._hello_at, self._fresh = now + self._backoff.next(), False
        self.incarnation += bool(self.incarnation)
        self._connection = Connection(self.incarnation)
        return [Send(replace(self._greeting(), incarnation=self.incarnation, term=self.term))]

    def _next_address(self) -> str:
        """Return where to look for the hub next: where it was, and where its standby is, in turn."""
        known = self.addresses
        if len(known) < 2:
            return ""
        at = known.index(self._looks_at) if self._looks_at in known else -1
        self._looks_at = known[(at + 1) % len(known)]
        return self._looks_at

    def _greeting(self) -> Hello:
        if (claim := self.claim) is not None:
            return Hello(self.name, "master", self.run, self.version, shard=claim.shard, address=claim.address)
        role = "observer" if self.observer else "node"
        hello = Hello(self.name, role, self.run, self.version, self.link, self.share, exchange=self.exchange)
        return replace(hello, in_flight=self._asks_of, checkpoints=self.checkpoints)

    def _on_welcome(self, welcome: Welcome, now: float) -> list[PeerEffect]:
        if self.run and welcome.run != self.run and not self._may_begin_anew(welcome):
            text = (
                f"the broker now runs {welcome.run}, this node belongs to {self.run}. Restart the broker with the "
                "checkpoint of the old run, or stop this node and start it again to join the new run (with --new-run "
                "where it has a checkpoint)."
            )
            return self._lose_hub("run", text, now, now + REFUSED_HELLO_SECONDS)
        if welcome.term < self.term:
            text = (
                f"the broker here is that of term {welcome.term} of {self.run}, and its standby has taken over: this "
                f"node knows one of term {self.term}. Stop this broker, or start it again as the standby of that one"
            )
            return self._lose_hub("term", text, now, now + REFUSED_HELLO_SECONDS)
        if welcome.version < self.version:
            text = (
                f"the broker is at version {welcome.version} of {self.run}, this node has seen {self.version}: it was "
                "restarted from an older state. Restart it with the newest checkpoint folder, or stop this node and "
                "start it again."
            )
            return self._lose_hub("version", text, now, now + REFUSED_HELLO_SECONDS)
        self.term = welcome.term
        self.know(welcome.standby)
        self.run, self.settings = welcome.run, RunSettings.from_dict(welcome.settings)
        if self.timetable is None:
            self.timetable = Timetable(self.settings)
        for from_version, every, delay in welcome.schedules:
            self.timetable.add(Schedule(every, delay, from_version))
        self.run_model, self.run_version = model_from_wire(welcome.model), welcome.version
        self.shard, self.masters, self.heard = welcome.shard, welcome.masters, welcome.heard
        self.state, self.obstacle = PeerState.WELCOMED, ""
        self._backoff.reset()
        self._beat_at = now
        kept = {sequence for sequence, _ in welcome.landed} | set(welcome.accepted)
        lost = sorted(self.in_flight - kept)
        self.in_flight &= kept
        effects: list[PeerEffect] = [Withdraw(s, "lost", "the connection was lost on its way") for s in lost]
        return effects + (self._fetch(now) if self.model else [])

    def _may_begin_anew(self, welcome: Welcome) -> bool:
        """Whether this node has nothing of its run yet and is offered the same again: its broker died founding it."""
        nothing, settings = self.version < 0 and self.claim is None, self.settings
        return nothing and settings is not None and settings.masters == 1 and welcome.settings == settings.to_dict()

    def _fetch(self, now: float) -> list[PeerEffect]:
        if self.run_model:
            difference = describe_mismatch(self.run_model, self.model)
            if difference is not None:
                self.state = PeerState.CLOSED
                text = f"{difference[1]}. Start this node with the run's model, or another broker for this one."
                return [Send(Goodbye("another model")), Disconnect(HUB, "model", text)]
        return self._resync()

    def _resync(self) -> list[PeerEffect]:
        settings = self.settings
        population = settings is not None and settings.initial == "own" and settings.elastic == 1
        self.state = PeerState.APART if population and not self.founded and self.version < 0 else PeerState.SYNCING
        if any(one.reset for one in self._open.values() if isinstance(one, Snapshot) and one.version >= 0):
            self._reset, self._warm = True, False
        self._open.clear()
        known = -1 if self._reset or self._missing else self.version
        founding = self.founding if self.shard else 0  # the first gives the number, and needs not be told it
        return [Send(Fetch(known, model_to_wire(self.model), self.score, founding, *self.held))]

    def _on_announcement(self, announcement: Aggregate | Snapshot) -> list[PeerEffect]:
        self._behind_since = None
        if isinstance(announcement, Snapshot) and announcement.version >= 0:
            self._announced = self.run_version = announcement.version
            self.state, self.checkpoints, self._asks_of = PeerState.LIVE, (), ()
            if announcement.rewound:
                self.rewound, self.heard = announcement.version, -1
                self.in_flight.clear()
            if not announcement.sizes:
                self.version, self.confirmed = announcement.version, True
                return []
        elif isinstance(announcement, Aggregate):
            if announcement.version != self._announced + 1:
                return self._resync() if announcement.version > self._announced else []
            self._announced = announcement.version
        elif self.state is not PeerState.APART:
            return []
        self._open[announcement.transfer] = announcement
        return [Expect(HUB, announcement)]

    def _on_refused(self, refused: Refused, now: float) -> list[PeerEffect]:
        if refused.sequence >= 0:
            if refused.sequence not in self.in_flight:
                return []
            self.in_flight.discard(refused.sequence)
            return [Withdraw(refused.sequence, refused.reason, refused.text)]
        if refused.reason == "probe":
            return []
        if refused.reason in ("standby", "term"):  # the hub may be elsewhere: it is looked for in turn
            self.obstacle = refused.text
            self._backoff.reset()
            return []
        if refused.reason == "unknown":
            if self.state is PeerState.CONNECTING:
                return []
            return self._lose_hub("unknown", refused.text, now, now)
        if refused.reason == "run":
            return self._lose_hub("run", refused.text, now, now + REFUSED_HELLO_SECONDS)
        self.state = PeerState.CLOSED
        return [Disconnect(HUB, refused.reason, refused.text)]

    def _lose_hub(self, reason: str, text: str, now: float, hello_at: float) -> list[PeerEffect]:
        self.state = PeerState.CONNECTING
        self._open.clear()
        self._beats.clear()
        elsewhere = len(self.addresses) > 1 and reason in ("run", "version", "term")
        self._hello_at, self._fresh = hello_at, not elsewhere
        return [Disconnect(HUB, reason, text)]

"""Be a node's side of the talk with the hub, without a socket or a clock: messages and `now` go in, effects come out.

Rule 1: `PEER_TRANSITIONS` says what moves which state where.  Rule 2: whatever happens to the hub, training
goes on: the machine falls back to CONNECTING and says Hello again.
Rule 3: which hub to believe is for `belief` to say, when and where to look for one for `search`, and which versions to
fetch for `following`; what is known stands in the `PeerBook`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import ModelSpec, PeerId, describe_mismatch
from zmqtrain.protocol.belief import disbelief
from zmqtrain.protocol.effects import Connect, Deliver, Disconnect, Expect, PeerEffect, Send, Serve, Withdraw
from zmqtrain.protocol.fencing import Connection, Stamp, Verdict
from zmqtrain.protocol.following import Step
from zmqtrain.protocol.groups import LATE_SECONDS
from zmqtrain.protocol.masters import RUN_OVER
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
from zmqtrain.protocol.peer_book import PEER_TRANSITIONS, Move, PeerBook, PeerState
from zmqtrain.protocol.quarantine import OVER
from zmqtrain.protocol.schedules import Timetable, schedule_from_plain

__all__ = ["PeerState", "Move", "PEER_TRANSITIONS", "Peer", "HUB"]

HUB = PeerId("hub")
KEEPS_OPTIMIZER = frozenset({"norm", "again", OVER})
"""Who is quarantined or preempted for these keeps its optimizer: a fresh one makes large deltas again."""
GOODBYE_HELLO_SECONDS, REFUSED_HELLO_SECONDS = 1.0, 5.0
"""After a Goodbye of the hub, and after one that is not believed."""


class Peer(PeerBook):
    """A node's state machine; its arguments are as in `PeerBook`."""

    # ------------------------------------------------------------------ what this side wants

    def start(self, now: float) -> list[PeerEffect]:
        """Say Hello for the first time."""
        return self._hello(now)

    def join(self, model: ModelSpec, now: float, score: float = math.nan) -> list[PeerEffect]:
        """Describe this node's model; from Welcome on the machine asks for the run's parameters by itself.

        score: of this node's own parameters, lower is better.
        """
        self.model, self.score = model, score
        return self._fetch(now) if self.state is PeerState.WELCOMED else []

    def compare(self, score: float, declined: bool = False) -> list[PeerEffect]:
        """Say how this node's own parameters score now; heard while it trains apart, as one of a population.

        declined: it was lent others, and keeps these: it says so by describing its model once more.
        """
        self.score = score
        if self.state is not PeerState.APART:
            return []
        return [Send(Fetch(-1, model_to_wire(self.model), score))] if declined else [Send(Fetch(score=score))]

    def vote(self, score: float) -> list[PeerEffect]:
        """Say how the mean scores that the hub has lent; NaN: this node cannot tell. Heard while the run may begin with
        it."""
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
        """Ask for a snapshot because this side dropped aggregates; one that is not live, as soon as it can."""
        self._following.dropped()
        return self._resync() if self.state is PeerState.LIVE else []

    def leave(self, reason: str) -> list[PeerEffect]:
        """Say goodbye; nothing is awaited any more."""
        said: list[PeerEffect] = (
            [] if self.state in (PeerState.CONNECTING, PeerState.CLOSED) else [Send(Goodbye(reason))]
        )
        self._move(Move.CLOSE)
        return said

    def tick(self, now: float) -> list[PeerEffect]:
        """Let time pass: heartbeats, Hello again, the hub taken for lost."""
        late, self._ticked = now - max(self._ticked, self._heard) - LATE_SECONDS, now
        if self.state is PeerState.CLOSED:
            return []
        if self.state is PeerState.CONNECTING:
            if not self._search.is_due(now):
                return []
            address = self._search.anew()
            return [*([] if address is None else [Connect(address)]), *self._hello(now)]
        assert self.settings is not None
        if late > self.settings.heartbeat_seconds:  # nobody listened here: what it said then waits to be heard
            self._heard = min(now, self._heard + late)
        silent = now - self._heard
        if silent > self.settings.lost_seconds:
            return self._lose_hub("lost", f"the broker has been silent for {silent:.1f} s", now, now)
        if now < self._beat_at:
            return []
        self._beat_at = now + self.settings.heartbeat_seconds
        return [Send(self._beat(now)), *self._resync_if_behind(now)]

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
                self.run_samples = message.samples
                self.know(str(message.hub.get("standby", "")))
                return self._let_go_on(message, now)
            case Schedule() if self.timetable is not None and self.state is not PeerState.CONNECTING:
                self.timetable.add(message)
            case Quarantine(reason, _, seconds):
                self.quarantined_until = now + seconds
                if seconds <= 0:
                    return []
                several = self.settings is not None and self.settings.masters > 1
                if (self.state, Quarantine) in PEER_TRANSITIONS and not several:  # one of several has a part only
                    self._following.begin_anew(warm=reason in KEEPS_OPTIMIZER)
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
                        self._following.begin_anew(warm=reason in KEEPS_OPTIMIZER)
                        return self._resync(Preempt)
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
        return self._resync() if self._following.spoiled(transfer) else []

    def received(self, transfer: int) -> list[PeerEffect]:
        """All chunks of an expected aggregate or snapshot are here."""
        whole = self._following.whole(transfer)
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
        """Give up the publishes that went out before this heartbeat and did not get there: the lane keeps the order."""
        published = self._beats.pop(sent, -1)
        self._beats = {beat: sequence for beat, sequence in self._beats.items() if beat > sent}
        lost = sorted(sequence for sequence in self.in_flight if heard < sequence <= published)
        self.in_flight.difference_update(lost)
        return [Withdraw(sequence, "lost", "it never reached the broker") for sequence in lost]

    def _resync_if_behind(self, now: float) -> list[PeerEffect]:
        """Fetch what the hub dropped on its way here, where no later aggregate shows the gap."""
        assert self.settings is not None
        known = self.roster.version if self.roster is not None and self.state is PeerState.LIVE else -1
        return self._resync() if self._following.lags(known, self.settings.lost_seconds, now) else []

    def _hello(self, now: float) -> list[PeerEffect]:
        self._search.began(now)
        self.incarnation += bool(self.incarnation)
        self._connection = Connection(self.incarnation)
        hello = replace(self._greeting(), incarnation=self.incarnation, term=self.term, without=self.without)
        # with each: of what was said to one that did not answer in time nothing is said again
        return [Send(hello)] if self.order is None else [Send(hello), Send(self.order)]

    def _let_go_on(self, roster: Roster, now: float) -> list[PeerEffect]:
        """Let the hub go on without its standby, as the roster asks: this node then has no word there (`standby`)."""
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
        """What a heartbeat says that this side has read; -1: nothing."""
        return self.without or -1

    def _greeting(self) -> Hello:
        if (claim := self.claim) is not None:
            return Hello(self.name, "master", self.run, self.version, shard=claim.shard, address=claim.address)
        role = "observer" if self.observer else "node"
        hello = Hello(self.name, role, self.run, self.version, self.link, self.share, exchange=self.exchange)
        return replace(hello, in_flight=self._asks_of, checkpoints=self.checkpoints)

    def _on_welcome(self, welcome: Welcome, now: float) -> list[PeerEffect]:
        doubt = disbelief(welcome, self.run, self.term, self.version, self._may_begin_anew(welcome))
        if doubt is not None:
            return self._lose_hub(*doubt, now, now + REFUSED_HELLO_SECONDS)
        self.term, self.called = welcome.term, welcome.called
        self.know(welcome.standby)
        self.run, self.settings = welcome.run, RunSettings.from_dict(welcome.settings)
        if self.timetable is None:
            self.timetable = Timetable(self.settings)
        for schedule in welcome.schedules:
            self.timetable.add(schedule_from_plain(schedule))
        self.run_model, self.run_version = model_from_wire(welcome.model), welcome.version
        self.shard, self.masters, self.run_samples = welcome.shard, welcome.masters, welcome.samples
        self._move(Welcome)
        self.obstacle = ""
        self._search.answered()
        self._beat_at = now
        kept = {sequence for sequence, _ in welcome.landed} | set(welcome.accepted)
        lost = sorted(self.in_flight - kept)
        self.in_flight &= kept
        effects: list[PeerEffect] = [Withdraw(s, "lost", "the connection was lost on its way") for s in lost]
        drops = self.settings.mode != "strict" and self.settings.initial != "own"
        if drops and 0 <= self._next_sequence <= max(kept, default=-1):
            self.overtaken = True
            self._following.begin_anew(warm=True)
        self._next_sequence, self.heard = -1, welcome.heard  # who knows the one knows whether it is overtaken
        return effects + (self._fetch(now) if self.model else [])

    def _fetch(self, now: float) -> list[PeerEffect]:
        if self.run_model:
            difference = describe_mismatch(self.run_model, self.model)
            if difference is not None:
                self._move(Move.CLOSE)
                text = f"{difference[1]}. Start this node with the run's model, or another broker for this one"
                return [Send(Goodbye("another model")), Disconnect(HUB, "model", text)]
        return self._resync()

    def _resync(self, cause: type[Message] | Move = Move.FETCH) -> list[PeerEffect]:
        settings = self.settings
        population = settings is not None and settings.initial == "own" and settings.elastic == 1
        population &= (self.state, Move.FETCH_APART) in PEER_TRANSITIONS
        apart = population and not self.founded and self.version < 0
        self._move(Move.FETCH_APART if apart and cause is Move.FETCH else cause)
        founding = self.founding if self.shard else 0  # the first gives the number, and needs not be told it
        return [Send(Fetch(self._following.fetch(), model_to_wire(self.model), self.score, founding, *self.held))]

    @property
    def _awaits_loan(self) -> bool:
        """Whether parameters that are not the run's may come: another's of a population, or the mean that is judged."""
        is_mean = self.settings is not None and self.settings.initial == "mean"
        return self.state is PeerState.APART or (is_mean and self.state is PeerState.FOUNDING)

    def _on_announcement(self, announcement: Aggregate | Snapshot) -> list[PeerEffect]:
        if isinstance(announcement, Snapshot) and announcement.version >= 0:
            self.run_version = announcement.version
            self._move(Snapshot)
            self.checkpoints, self._asks_of = (), ()
            if announcement.rewound:
                self.rewound, self.heard = announcement.version, -1
                self.in_flight.clear()
        elif isinstance(announcement, Snapshot) and not self._awaits_loan:
            return []
        step = self._following.announce(announcement)
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
        if refused.reason in ("standby", "term"):  # the hub may be elsewhere: it is looked for in turn
            self.obstacle = refused.text
            self._search.answered()
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
        self._following.lose()
        self._beats.clear()
        self._search.lost(hello_at, elsewhere=reason in ("run", "version", "term"))
        return [Disconnect(HUB, reason, text)]

"""Be a node's network thread in virtual time: a Peer on a wire, as `zmqtrain.session.hub_session` is one on a channel.

Rule 1: what comes is handed to a `Listener`, as there.  Rule 2: messages go over as they are, and are counted by the
bytes that they would be; only time, and what a cut or a death loses, is modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from zmqtrain.averaging.coder import Encoded
from zmqtrain.core.errors import JoinRefused, ModelMismatch
from zmqtrain.core.types import Buffer, Offer, Version
from zmqtrain.protocol.effects import Deliver, Disconnect, Expect, PeerEffect, Send, Serve, Withdraw
from zmqtrain.protocol.fencing import Stamp
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.messages import Aggregate, Credit, Message, Publish, Quarantine, Snapshot, WorkUnit
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.session.hub_session import NullListener
from zmqtrain.sim.clock import Scheduler
from zmqtrain.sim.faults import flipped
from zmqtrain.sim.hub import SimHub
from zmqtrain.sim.star import Wire

REPORT_SECONDS = 1.0
ATTEND_SECONDS = 0.05
"""As often a node looks at its line before it knows the run's heartbeat: who does not takes itself for held up."""


class SimLink:
    """The network thread of one simulated node: a `NodeLink`."""

    address, obstacle, refused = "the simulated hub", "", ""
    why_alone, whereabouts, link_rate = "", ("the simulated hub",), 0.0

    def __init__(self, scheduler: Scheduler, hub: SimHub, wire: Wire, peer: Peer, listener: NullListener) -> None:
        self.wire, self.peer, self.listener = wire, peer, listener
        self.publishes = 0
        self.undecided, self.trouble = False, ("", "")
        self._scheduler, self._hub = scheduler, hub
        self._outgoing: dict[int, Sequence[Buffer]] = {}
        self._transfer = 0
        self._founding = self._closed = False
        hub.nodes[peer.peer] = self
        wire.broken = self._broken

    @property
    def live(self) -> bool:
        """Whether the node takes part in the run now."""
        return self.peer.state is PeerState.LIVE

    @property
    def bytes_sent(self) -> int:
        """See NodeLink."""
        return self.wire.up

    @property
    def bytes_received(self) -> int:
        """See NodeLink."""
        return self.wire.down

    def alone_seconds(self) -> None:
        """See NodeLink."""

    def move(self, address: str) -> None:
        """See NodeLink: there is one hub."""

    # ------------------------------------------------------------------ out

    def call(self, what: Callable[[], object], after_seconds: float = 0.0) -> None:
        """See NodeLink."""
        if after_seconds > 0:
            self._scheduler.call_later(after_seconds, what)
        else:
            what()

    def start(self) -> None:
        """Say Hello; from then on, heartbeats and reports."""
        self.carry_out(self.peer.start(self._scheduler.now))
        self._beat()
        self._report()

    def close(self, reason: str) -> None:
        """Say goodbye; nothing is taken any more."""
        self.carry_out(self.peer.leave(reason))
        self._closed = True

    def die(self) -> None:
        """Be killed: nothing is said to anybody."""
        self._closed = True
        self.wire.die()

    def send(self, message: Message) -> None:
        """Send a head."""
        peer, stamp = self.peer.peer, self.peer.stamp()
        self.wire.head(True, len(encode_message(message, stamp)), lambda: self._hub.take(peer, message, stamp))

    def carry_out(self, effects: Sequence[PeerEffect], frames: Sequence[Buffer] = ()) -> None:
        """Do what the machine wishes. frames: of the transfer that a Deliver is about."""
        for effect in effects:
            match effect:
                case Send(message):
                    self.send(message)
                case Expect():
                    pass  # it comes as a whole
                case Deliver():
                    self.listener.on_delivered(effect, list(frames))
                case Serve():
                    self._founding = True
                    self.listener.on_founding()
                case Withdraw(sequence, reason, text):
                    self.listener.on_withdrawn(sequence, reason, text)
                case Disconnect(_, reason, text):
                    self._disconnect(reason, text)

    def publish(self, offer: Offer, base: Version, encoded: Encoded, score: float) -> None:
        """Announce an encoded offer."""
        if self._closed:
            return
        if not self.live:
            self.listener.on_withdrawn(offer.sequence, "lost", "the connection was lost before it was sent")
            return
        transfer, sizes = self._stage(encoded.frames)
        self.publishes += 1
        codec, samples, steps = encoded.codec, offer.samples, offer.steps
        publish = Publish(
            transfer, offer.sequence, base, offer.fragment, codec, sizes, samples, steps, score, offer.dense
        )
        self.carry_out(self.peer.publish(publish))

    def send_founding(self, frames: Sequence[Buffer], moments: Sequence[Buffer] = (), digest: str = "") -> None:
        """Announce the parameters that the hub asked for, unless it is lost. moments: frames that go behind."""
        if self._founding:
            self._founding = False
            transfer, sizes = self._stage([*frames, *moments])
            self.send(Snapshot(transfer, 0, sizes, moments=len(moments), digest=digest))

    def _stage(self, frames: Sequence[Buffer]) -> tuple[int, tuple[int, ...]]:
        self._transfer += 1
        self._outgoing[self._transfer] = frames
        return self._transfer, tuple(len(frame) for frame in frames)

    def _send_payload(self, transfer: int) -> None:
        """Send what the hub has granted frame by frame: those of several nodes take turns at its port."""
        frames, peer, stamp = self._outgoing.pop(transfer, ()), self.peer.peer, self.peer.stamp(False)
        for frame in frames[:-1]:
            self.wire.payload(True, len(frame), lambda: None)
        for frame in frames[-1:]:
            other = (*frames[:-1], flipped(bytes(frame), transfer))
            self.wire.payload(
                True,
                len(frame),
                lambda: self._hub.take_payload(peer, transfer, frames, stamp),
                partial(self._hub.take_payload, peer, transfer, other, stamp),
            )

    def _broken(self) -> None:
        """The connection is gone, and the wire says so."""
        if not self._closed:
            self.carry_out(self.peer.gone(self._scheduler.now))

    def _disconnect(self, reason: str, text: str) -> None:
        self._founding = False
        self._outgoing.clear()
        if self.peer.state is PeerState.CLOSED:
            kind = ModelMismatch if reason == "model" else JoinRefused
            self.listener.on_failed(kind(f"{self.peer.name} cannot join the run: {text}", reason))
            return
        self.wire.reconnect()
        self.listener.on_changed()

    # ------------------------------------------------------------------ in

    def take(self, message: Message, stamp: Stamp) -> None:
        """Take a head from the hub."""
        if self._closed:
            return
        now = self._scheduler.now
        if (instead := self.peer.judge(stamp, message, now)) is not None:
            return self.carry_out(instead)
        self.peer.saw(now)
        match message:
            case Credit(transfer):
                self._send_payload(transfer)
            case WorkUnit():
                self.listener.on_work(message)
            case _:
                before = self.peer.state
                self.carry_out(self.peer.receive(message, now))
                if isinstance(message, Quarantine):
                    self.listener.on_quarantined(message)
                self._say_where(before)

    def take_payload(self, announcement: Aggregate | Snapshot, frames: Sequence[Buffer], stamp: Stamp) -> None:
        """Take an aggregate or a snapshot, whole."""
        if self._closed:
            return
        if (instead := self.peer.judge(stamp, announcement, self._scheduler.now, False)) is not None:
            return self.carry_out(instead)
        before = self.peer.state
        self.carry_out(self.peer.receive(announcement, self._scheduler.now))
        self.carry_out(self.peer.received(announcement.transfer), frames)
        self._say_where(before)

    def _say_where(self, before: PeerState) -> None:
        if self.peer.state is not before:
            self.listener.on_changed()

    def _beat(self) -> None:
        if not self._closed:
            self.carry_out(self.peer.tick(self._scheduler.now))
            settings = self.peer.settings
            self._scheduler.call_later(ATTEND_SECONDS if settings is None else settings.heartbeat_seconds, self._beat)

    def _report(self) -> None:
        """Tell the hub how training goes, every second."""
        if not self._closed:
            if self.live or self.peer.state is PeerState.APART:
                self.send(self.listener.make_report())
            self._scheduler.call_later(REPORT_SECONDS, self._report)

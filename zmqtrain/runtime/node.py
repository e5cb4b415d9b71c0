"""Be a node alive, as its training thread sees it: an Exchange that never makes it wait.

Rule 1: three threads: the caller's trains, one speaks with the hub (`HubLink`), one codes and decodes; what passes
between them is never written again.  Rule 2: whatever happens to the broker, offers are refused, training goes on,
and the node comes back by itself.  Rule 3: an update is applied when it is polled; until then its u is on its way.
Rule 4: where parameters live on an accelerator, deltas are coded there; who has not imported jax is not made to.
"""

from __future__ import annotations

import atexit
import logging
import math
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar, get_args

from zmqtrain.errors import (
    AggregateTimeout,
    CodecError,
    ConfigError,
    HubUnreachable,
    LocalProtocolError,
    NonFiniteDelta,
    ZmqTrainError,
)
from zmqtrain.protocol.messages import Aggregate, Deliver, Report, Roster, WorkUnit
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.runtime.delta import DeltaCoder, OnDevice, encode_snapshot, mean_score
from zmqtrain.runtime.events import NodeEvents
from zmqtrain.runtime.inbox import Inbox
from zmqtrain.runtime.link import HubLink
from zmqtrain.runtime.mailbox import Mailbox, Worker
from zmqtrain.runtime.moments import encode_moments
from zmqtrain.runtime.progress import Progress, paces
from zmqtrain.runtime.units import UnitQueue
from zmqtrain.settings import RunSettings
from zmqtrain.transport.zmq_channel import CurveKeys, DealerChannel
from zmqtrain.types import (
    Array,
    Buffer,
    Channel,
    Clock,
    ExchangeStatistics,
    Layout,
    ModelSpec,
    Offer,
    PeerId,
    Update,
    Version,
)

__all__ = ["CodecOn", "UnitSource", "Node", "connect"]

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch", covariant=True)

SAY_AGAIN_SECONDS = 5.0

CodecOn = Literal["auto", "host", "device"]
"""Where deltas are compressed: on the processor, on the device that trains, or there if it is no processor (auto)."""


class UnitSource(Protocol[Batch]):
    """Where a numbered data unit becomes batches: the same number gives the same batches on every node."""

    def batches(self, unit: int) -> Iterator[Batch]:
        """Give the batches of one unit."""


class Node:
    """One node of a run, alive: an `Exchange`, and the `Listener` of its link.

    open_channel: makes the channel to the hub.  peer: the id under which it does so.  address: for messages.
    codec_on: where deltas are compressed; the bytes are the same.  events: who is told what happens here, None for
    nobody.  Use `connect` for the usual one.
    """

    def __init__(
        self,
        open_channel: Callable[[], Channel],
        peer: PeerId,
        name: str,
        address: str,
        observer: bool = False,
        codec_on: CodecOn = "auto",
        events: NodeEvents | None = None,
    ) -> None:
        self._events = events
        self.name, self.address, self.peer_id, self.codec_on = name, address, peer, codec_on
        self._peer = Peer(peer, name, observer)
        self._link = HubLink(open_channel, self._peer, address, self)
        self._worker = Worker("zmqtrain-codec", 256, self._codec_failed)
        self._units = UnitQueue(peer, lambda: self._link.call(self._ask_for_units), lambda: self._link.live)
        self._progress = Progress()
        self._changed = threading.Condition()
        self._failure: ZmqTrainError | None = None
        self._closed = False
        self.message_delay: Callable[[], float] | None = None
        """For experiments: draws by how many seconds a delta is sent late."""
        self._coder: DeltaCoder | None = None
        self._founding: tuple[Sequence[Any], Sequence[Any]] = ((), ())
        self._asked = self._settled = False
        # of the training thread
        self._sequence = 0
        self._applied_version: Version = -1
        self._applied: list[int] = []
        self._offered: set[int] = set()
        self._offers_since: dict[int, int] = {}
        # of the other two
        self._inbox = Inbox(self._notify)
        self._withdrawn: Mailbox[int] = Mailbox(1024)
        self._withdrawals = 0
        self._encode_seconds = 0.0
        self._link.start()
        try:
            self._raise_failure()
        except ZmqTrainError:
            self.close()
            raise

    # ------------------------------------------------------------------ joining (training thread)

    def wait_welcome(self, timeout_seconds: float = 10.0) -> RunSettings:
        """Wait for the broker's Welcome and return the run's settings. Raises HubUnreachable or JoinRefused."""
        if not self._wait(lambda: self._peer.settings is not None, timeout_seconds):
            port = self.address.rpartition(":")[2]
            raise HubUnreachable(
                f"no broker answers at {self.address} (waited {timeout_seconds:g} s). Start one on the hub with "
                f"`zmqtrain-broker --bind tcp://*:{port} --insecure`, check the address and the port, and that the "
                "hub's firewall lets that one port in; a broker with keys answers only who gives its --server-key.",
                self.address,
            )
        assert self._peer.settings is not None
        return self._peer.settings

    def join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, moments: Sequence[Any] = ()
    ) -> Update | None:
        """See Exchange. Waits for the other nodes of a run that starts with several, unless it is a population.

        Raises ModelMismatch, JoinRefused, HubUnreachable, NonFiniteDelta.
        """
        self._coder, self._founding = DeltaCoder(model, self.wait_welcome(), self._device_coder()), (leaves, moments)
        if self._events is not None:
            self._events.joining(self.peer_id, self.run, self.settings, self.founded)
        self._link.call(lambda: self._link.carry_out(self._peer.join(model, time.monotonic(), score)))
        waited = 0.0
        while not self._wait(
            lambda: (
                self._peer.state is PeerState.APART
                or (self._link.live and (len(self._inbox) > 0 or self._peer.confirmed))
            ),
            SAY_AGAIN_SECONDS,
        ):
            waited += SAY_AGAIN_SECONDS
            logger.info("%s has waited %.0f s for %s", self.name, waited, self.waiting_for or "its first parameters")
        self._founding = ((), ())
        if self._coder.device is not None:  # while the caller compiles its own
            self._worker.submit(lambda: self._warm_up(0))
        if self._peer.state is PeerState.APART:
            return None
        first = self._inbox.peek()
        if first is None or first.anchor is None:  # the founder holds version 0; an aggregate that is here is the next
            self._applied_version = 0
            return None
        return self.poll()

    @property
    def waiting_for(self) -> str:
        """What this node is waiting for, in a few words; "" for nothing."""
        match self._peer.state:
            case PeerState.CONNECTING:
                return "the broker"
            case PeerState.SYNCING:
                return "the run's parameters" if self._peer.run_model else "the nodes that the run starts with"
            case PeerState.LIVE if self._units.waiting:
                return "data units"
        return ""

    @property
    def founded(self) -> bool:
        """See Exchange."""
        return self._peer.founded

    def compare(self, score: float) -> None:
        """See Exchange."""
        self._link.call(lambda: self._link.carry_out(self._peer.compare(score)))

    @property
    def wanted(self) -> bool:
        """See Exchange."""
        return self._asked

    def lend(self, leaves: Sequence[Any], moments: Sequence[Any] = ()) -> None:
        """See Exchange."""
        self._asked = False
        self._worker.submit(lambda: self._encode_founding(leaves, moments))

    @property
    def clock(self) -> Clock:
        """See Exchange."""
        return time

    @property
    def settings(self) -> RunSettings:
        """The run's settings, as the broker gave them."""
        return self.wait_welcome()

    @property
    def layout(self) -> Layout:
        """See Exchange. Raises LocalProtocolError before `join`."""
        if self._coder is None:
            raise LocalProtocolError(f"{self.name} has not joined the run yet: call join first")
        return self._coder.layout

    @property
    def roster(self) -> Roster | None:
        """Who is in the run, as the broker last said."""
        return self._peer.roster

    @property
    def run(self) -> str:
        """The id of the run."""
        return self._peer.run

    @property
    def device_coder(self) -> OnDevice | None:
        """What compresses on the device, and counts the bytes that leave it; None where the processor does."""
        return None if self._coder is None else self._coder.device

    @property
    def is_evaluator(self) -> bool:
        """See Exchange."""
        roster = self._peer.roster
        return roster is not None and roster.evaluator == self.peer_id

    @property
    def reachable(self) -> bool:
        """See Exchange."""
        return self._link.live

    # ------------------------------------------------------------------ exchange (training thread)

    def next_fragment(self) -> int | None:
        """See Exchange.

        All nodes that are up to date offer the same fragment, version modulo fragments, so that an aggregate carries
        one; a fragment that has waited for 2n own offers goes first, so that no rhythm of versions can starve it.
        """
        while (withdrawn := self._withdrawn.get_nowait()) is not None:
            self._offered.discard(withdrawn)
        settings = self._peer.settings
        if settings is None or not self._link.live or len(self._offered) >= settings.offers_in_flight:
            return None
        if self._applied_version < 0:  # the run has just been founded, and its parameters are on their way
            return None
        starved = [f for f, since in self._offers_since.items() if since >= 2 * settings.fragments]
        if starved:
            return max(starved, key=lambda fragment: self._offers_since[fragment])
        return (self._applied_version + len(self._offered)) % settings.fragments

    def offer(
        self,
        fragment: int,
        segments: Sequence[Array],
        *,
        samples: int,
        steps: int,
        scores: tuple[Any, ...] = (),
        dense: bool = False,
    ) -> int | None:
        """See Exchange. Raises NonFiniteDelta or JoinRefused when the node cannot go on."""
        self._raise_failure()
        if self.next_fragment() is None:
            return None
        offer = Offer(self._sequence, fragment, segments, samples, steps, scores, tuple(self._applied), dense)
        base = self._applied_version
        taken = [offer]  # from there: the segments need not stay until the next job
        if not self._worker.submit(lambda: self._encode(taken.pop(), base)):
            return None
        self._sequence += 1
        self._applied.clear()
        self._offered.add(offer.sequence)
        if self._events is not None:
            self._events.offered(offer.sequence, fragment, base, dense)
        for other in range(self.layout.fragments):
            self._offers_since[other] = 0 if other == fragment else self._offers_since.get(other, 0) + 1
        return offer.sequence

    def in_flight(self) -> tuple[int, ...]:
        """See Exchange."""
        while (withdrawn := self._withdrawn.get_nowait()) is not None:
            self._offered.discard(withdrawn)
        return tuple(sorted(self._offered))

    def peek(self) -> Update | None:
        """See Exchange."""
        self._raise_failure()
        return self._inbox.peek()

    def poll(self) -> Update | None:
        """See Exchange."""
        self._raise_failure()
        update = self._inbox.take()
        if update is not None:
            self._applied_version = update.version
            self._applied += update.landed
            self._offered.difference_update(update.landed)
            self._worker.submit(self._decode)
            if self._events is not None:
                self._events.applied(update)
        return update

    def wait_update(self, timeout_seconds: float) -> Update:
        """See Exchange."""
        until = time.monotonic() + timeout_seconds
        while not self._wait(lambda: len(self._inbox) > 0, min(SAY_AGAIN_SECONDS, max(0.0, until - time.monotonic()))):
            waiting = self.waiting_for or "the other nodes' contributions"
            if time.monotonic() >= until:
                raise AggregateTimeout(
                    f"{self.name} waited {timeout_seconds:g} s for the aggregate after version {self._applied_version} "
                    f"from {waiting}. In strict mode every node must contribute; who does not is said by "
                    f"`zmqtrain status {self.address}`."
                )
            logger.info("%s waits for the aggregate after version %d: %s", self.name, self._applied_version, waiting)
        update = self.poll()
        assert update is not None
        return update

    def batches(self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]]) -> Iterator[Batch]:
        """Give the batches of the data units that the broker deals to this node, until the run is over.

        source: a program, or any function from a unit's number to its batches.  While no broker deals any, the node
        draws units of its own, so that training never stops.
        """
        batches_of: Callable[[int], Iterator[Batch]] = source.batches if hasattr(source, "batches") else source
        while (unit := self._units.take(self._raise_failure)) is not None:
            if self._events is not None:
                self._events.began(unit)
            yield from batches_of(unit)
            self._units.done(unit)

    def everyone_drained(self) -> bool:
        """See Exchange."""
        if not self._link.live or not self._units.drain():
            return True
        return 0 <= self._units.end_version <= self._applied_version

    def _ask_for_units(self) -> None:
        if self._link.live and (request := self._units.request()) is not None:
            self._link.send(request)

    # ------------------------------------------------------------------ figures, and the end

    def pace(self) -> tuple[float, Sequence[float]]:
        """See Exchange."""
        own, rates = paces(self._peer.roster, self.peer_id)
        if self._events is not None:
            self._events.paced(own, rates)
        return own, rates

    def report(self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int) -> None:
        """See Exchange."""
        progress = self._progress
        progress.step, progress.samples, progress.loss = step, samples, loss
        progress.age_steps, progress.offers_refused = age_steps, offers_refused
        if self._events is not None:
            self._events.stepped(step, samples, loss)

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        """See Exchange."""
        scores = {name: float(score) for name, score in scores.items()}  # a program may give device or numpy scalars
        self._progress.scores, self._progress.score_version = scores, version
        self._link.call(lambda: self._link.send(self.make_report()) if self._link.live else None)

    def statistics(self) -> ExchangeStatistics:
        """See Exchange."""
        roster = self._peer.roster
        return ExchangeStatistics(
            version=self._applied_version,
            peers=len(roster.members) if roster else 0,
            bytes_sent=self._link.bytes_sent,
            bytes_received=self._link.bytes_received,
            encode_seconds=self._encode_seconds,
            decode_seconds=self._inbox.decode_seconds,
            publishes=self._link.publishes,
            publishes_refused=self._withdrawals,
            round_trip_seconds=self._peer.round_trip_seconds,
        )

    def close(self, reason: str = "") -> None:
        """Say goodbye and end the threads; safe to call twice."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._link.close(reason)
            self._worker.close()
            if self._events is not None:
                self._events.closed()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        with self._changed:
            came = self._changed.wait_for(lambda: condition() or self._failure is not None, timeout_seconds)
        self._raise_failure()
        return came

    # ------------------------------------------------------------------ Listener (network thread)

    def on_delivered(self, deliver: Deliver, frames: list[Buffer]) -> None:
        """See Listener."""
        if self._inbox.full and isinstance(deliver.announcement, Aggregate):
            taken = self._worker.submit(lambda: self._inbox.skip(deliver))
            self._link.carry_out(self._peer.resync())
        else:
            taken = self._worker.submit(lambda: self._arrive(deliver, frames))
        if not taken:
            self.on_failed(ZmqTrainError(f"the codec thread of {self.name} cannot keep up"))

    def on_withdrawn(self, sequence: int, reason: str, text: str) -> None:
        """See Listener."""
        self._withdrawals += 1
        if reason == "non-finite":
            self.on_failed(NonFiniteDelta(f"the broker refused a delta of {self.name}, which is not finite: {text}"))
        elif reason != "lost":
            why = f"{reason}: {text}"
            logger.warning("%s: the broker refused delta %d (%s); the next one holds it", self.name, sequence, why)
        if self._coder is not None:
            coder = self._coder
            self._worker.submit(lambda: self._withdraw(coder, sequence, reason))
        self._withdrawn.put_nowait(sequence)

    def on_founding(self) -> None:
        """See Listener."""
        if self._peer.state is PeerState.APART:  # what it holds changes with every step: the training thread answers
            self._asked = True
        else:
            leaves, moments = self._founding
            self._worker.submit(lambda: self._encode_founding(leaves, moments))

    def on_work(self, answer: WorkUnit) -> None:
        """See Listener."""
        self._units.dealt(answer)

    def on_changed(self) -> None:
        """See Listener."""
        if self._peer.state is PeerState.CONNECTING:  # who only waits for a snapshot keeps what it was dealt
            self._units.reset()
            self._asked = False
        if self._units.drained:  # a hub that had lost this node has forgotten that it said so
            self._ask_for_units()
        self._notify()

    def on_failed(self, error: ZmqTrainError) -> None:
        """See Listener."""
        self._failure = self._failure or error
        self._units.reset()  # whoever waits for a unit is told
        self._notify()

    def make_report(self) -> Report:
        """See Listener."""
        return self._progress.report(self._link.bytes_sent, self._link.bytes_received, self.waiting_for)

    # ------------------------------------------------------------------ codec thread

    def _encode(self, offer: Offer, base: Version) -> None:
        assert self._coder is not None
        if not self._settled:
            self._settle(self._coder, offer)
        began = time.thread_time()
        try:
            encoded = self._coder.encode(offer)
        except NonFiniteDelta as error:
            text = (
                f"{self.name}: {error}: training has diverged here, and nothing of it was sent. Start this node "
                "again (it takes the shared parameters); if it happens again, use a smaller learning rate."
            )
            raise NonFiniteDelta(text, error.leaf) from None
        self._encode_seconds += time.thread_time() - began
        if self._events is not None:
            self._events.encoded(offer.sequence)
        score = mean_score(offer)
        offer = replace(offer, segments=())  # their memory is the device's, and free from here on
        late = self.message_delay() if self.message_delay is not None else 0.0
        self._link.call(lambda: self._link.publish(offer, base, encoded, score), late)

    def _withdraw(self, coder: DeltaCoder, sequence: int, reason: str) -> None:
        coder.withdraw(sequence)
        if self._events is not None:
            self._events.withdrawn(sequence, reason)

    def _device_coder(self) -> OnDevice | None:
        """Return the coder of jax's device if parameters live there, as far as can be known before the first offer."""
        jax = sys.modules.get("jax")  # who has not imported it has no parameters on a device
        if self.codec_on == "device" or (self.codec_on == "auto" and jax and jax.default_backend() != "cpu"):
            from zmqtrain.codecs.payload_jax import DeviceCoder

            return DeviceCoder()
        return None

    def _settle(self, coder: DeltaCoder, offer: Offer) -> None:
        """Decide for good where deltas are coded: "auto" goes by where the first offer's segments are."""
        self._settled = True
        if self.codec_on == "auto":
            coder.device = (coder.device or self._device_coder()) if _on_accelerator(offer.segments) else None

    def _warm_up(self, fragment: int) -> None:
        """Compile for one fragment, and the next ones after what has come meanwhile."""
        assert self._coder is not None
        if fragment < self._coder.layout.fragments:
            self._coder.warm_up(fragment)
            self._worker.submit(lambda: self._warm_up(fragment + 1))

    def _encode_founding(self, leaves: Sequence[Any], moments: Sequence[Any]) -> None:
        assert self._coder is not None
        layout = self._coder.layout
        try:
            frames = encode_snapshot(layout, layout.split(leaves))
            state = encode_moments(moments)
        except NonFiniteDelta as error:
            text = f"{self.name}: the initial parameters are not finite ({error}); check how they are initialised"
            raise NonFiniteDelta(text, error.leaf) from None
        self._link.call(lambda: self._link.send_founding(frames, state))

    def _arrive(self, deliver: Deliver, frames: list[Buffer]) -> None:
        assert self._coder is not None
        self._inbox.arrive(self._coder, deliver, frames)

    def _decode(self) -> None:
        assert self._coder is not None
        self._inbox.decode(self._coder)

    def _codec_failed(self, error: BaseException) -> None:
        if isinstance(error, ZmqTrainError) and (
            isinstance(error, NonFiniteDelta) or not isinstance(error, CodecError)
        ):
            self.on_failed(error)
        elif isinstance(error, CodecError):
            self.on_failed(
                ZmqTrainError(f"{self.name} cannot read what the broker sent: {error}. Start this node again.")
            )
        else:
            logger.error("the codec thread of %s failed", self.name, exc_info=error)
            self.on_failed(ZmqTrainError(f"the codec thread of {self.name} failed: {error!r}"))


def _on_accelerator(segments: Sequence[Array]) -> bool:
    """True if these are jax arrays, all on one device that is not a processor; what is spread goes by the host."""
    if not all(hasattr(segment, "devices") for segment in segments):
        return False
    devices = {device for segment in segments for device in segment.devices()}
    return len(devices) == 1 and devices.pop().platform != "cpu"


def connect(
    address: str,
    name: str | None = None,
    server_key: bytes | None = None,
    keys: CurveKeys | None = None,
    observer: bool = False,
    timeout_seconds: float = 10.0,
    codec_on: CodecOn = "auto",
    events: NodeEvents | None = None,
) -> Node:
    """Connect to the broker at `address` ("tcp://hub:5555") and return the node, welcomed.

    A script that ends without closing its node says goodbye all the same.

    name: for people; the host's name if not given.  server_key: the hub's public CURVE key, where it has one.
    codec_on: where deltas are compressed: "host", "device", or "auto": on the device unless that is a processor.
    events: who is told what happens here, as a `NodeRecorder`.
    Raises ConfigError for an address that is none and for another choice, HubUnreachable when no broker answers,
    JoinRefused.
    """
    name = name or socket.gethostname().partition(".")[0] or "node"
    if not name.isprintable() or len(name) > 64 or "#" in name:
        raise ConfigError(f"a node's name is at most 64 printable characters without '#', got {name!r}")
    if codec_on not in get_args(CodecOn):
        raise ConfigError(f"codec_on must be one of {', '.join(map(repr, get_args(CodecOn)))}, got {codec_on!r}")
    peer = PeerId(f"{name}#{secrets.token_hex(4)}")

    def open_channel() -> Channel:
        return DealerChannel.connect(address, peer=peer, keys=keys, server_key=server_key)

    node = Node(open_channel, peer, name, address, observer, codec_on, events)
    atexit.register(node.close)
    try:
        node.wait_welcome(timeout_seconds)
    except BaseException:
        node.close()
        raise
    return node

"""Be a node alive: a Peer on a socket, in a thread of its own, behind the Exchange that the training thread sees.

Rule 1: the training thread never waits here, except where it asks to (`join`, `wait_update`).  Rule 2: one asyncio thread
owns the sockets and the machine, one codec thread owns the deltas; what passes between threads is never written again.
Rule 3: whatever happens to the broker, offers are refused, training goes on, and the node comes back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from zmqtrain.errors import (
    AggregateTimeout,
    ChannelClosed,
    CodecError,
    ConfigError,
    FramingError,
    HubUnreachable,
    JoinRefused,
    LocalProtocolError,
    ModelMismatch,
    NonFiniteDelta,
    ZmqTrainError,
)
from zmqtrain.protocol.framing import Assembler, ProtocolVersionError, decode_message, encode_message, split
from zmqtrain.protocol.messages import (
    Aggregate,
    Chunk,
    Credit,
    Deliver,
    Disconnect,
    Expect,
    Message,
    PeerEffect,
    Publish,
    Report,
    Roster,
    Send,
    Serve,
    Snapshot,
    Withdraw,
    WorkRequest,
    WorkUnit,
)
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.runtime.delta import DeltaCoder, Encoded, encode_snapshot
from zmqtrain.runtime.mailbox import Mailbox, Worker
from zmqtrain.settings import RunSettings
from zmqtrain.transport.zmq_channel import CurveKeys, DealerChannel
from zmqtrain.types import (
    Array,
    Buffer,
    Channel,
    ExchangeStatistics,
    Lane,
    Layout,
    ModelSpec,
    Offer,
    PeerId,
    Update,
    Version,
)

__all__ = ["UnitSource", "Node", "connect"]

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch", covariant=True)

TICK_SECONDS = 0.05
REPORT_SECONDS = 1.0
UPDATES_DECODED = 2
UPDATES_KEPT = 32
"""Aggregates that may wait for the training thread; with more, the node takes a snapshot instead."""
LOCAL_UNITS = 1 << 40
"""Units that a node draws for itself while no broker deals any are numbered from here."""


@dataclass(slots=True)
class _Progress:
    """What the training thread last said of itself, and when its pace was last measured."""

    step: int = 0
    samples: int = 0
    samples_per_second: float = 0.0
    loss: Any = math.nan
    loss_known: float = math.nan
    age_steps: float = math.nan
    offers_refused: int = 0
    scores: dict[str, float] | None = None
    score_version: Version = -1
    measured_at: float = 0.0
    measured_samples: int = 0


class UnitSource(Protocol[Batch]):
    """Where a numbered data unit becomes batches: the same number gives the same batches on every node."""

    def batches(self, unit: int) -> Iterator[Batch]:
        """Give the batches of one unit."""


class Node:
    """One node of a run, alive: an `Exchange`.

    open_channel: makes the channel to the hub, in the node's own loop.  peer: the id under which it does so.
    Use `connect` for the usual one.
    """

    def __init__(self, open_channel: Callable[[], Channel], peer: PeerId, name: str, address: str, observer: bool = False) -> None:
        self.name, self.address, self.peer_id = name, address, peer
        self._progress = _Progress()
        self._open_channel = open_channel
        self._peer = Peer(peer, name, observer)
        self._coder: DeltaCoder | None = None
        self._founding: Sequence[Any] = ()
        self._lock = threading.Condition()
        self._failure: ZmqTrainError | None = None
        self._stopping = False
        # training thread
        self._sequence = 0
        self._applied_version: Version = -1
        self._applied: list[int] = []
        self._offered: set[int] = set()
        self._offers_since: dict[int, int] = {}
        # the way back, in order: what has come (codec thread), what is decoded (the door to the training thread)
        self._arrived: deque[tuple[Deliver, list[Buffer]]] = deque()
        self._landed_unseen: list[int] = []
        self._updates: Mailbox[Update] = Mailbox(UPDATES_DECODED)
        self._withdrawn: Mailbox[int] = Mailbox(1024)
        # data units
        self._units: deque[int] = deque()
        self._units_done: list[int] = []
        self._units_finished = False
        self._units_asked = False
        self._local_units = 0
        # the network thread
        self._outgoing: dict[int, deque[tuple[bytes, Buffer]]] = {}
        self._bulk: deque[tuple[bytes, Buffer]] = deque()
        self._transfer = 0
        self._bytes_sent = self._bytes_received = self._publishes = self._refused = 0
        self._encode_seconds = self._decode_seconds = 0.0
        self._said: tuple[str, str] = ("", "")
        self._worker = Worker("zmqtrain-codec", 256, self._codec_failed)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zmqtrain-network", daemon=True)
        self._thread.start()
        self._ready.wait()
        self._raise_failure()

    # ------------------------------------------------------------------ joining (training thread)

    def wait_welcome(self, timeout_seconds: float = 10.0) -> RunSettings:
        """Wait for the broker's Welcome and return the run's settings. Raises HubUnreachable or JoinRefused."""
        if not self._wait(lambda: self._peer.settings is not None, timeout_seconds):
            raise HubUnreachable(
                f"no broker answers at {self.address} (waited {timeout_seconds:g} s). Start one on the hub with "
                f"`zmqtrain-broker --bind tcp://*:{self.address.rpartition(':')[2]}`, check the address and the port, and that the "
                "hub's firewall lets that one port in.",
                self.address,
            )
        assert self._peer.settings is not None
        return self._peer.settings

    def join(self, model: ModelSpec, leaves: Sequence[Any]) -> Update | None:
        """Join the run with this model; return the run's parameters (an update with an anchor), None for the founder.

        leaves: this node's own parameters as float32 numpy arrays, wanted only if it founds the run.
        Waits for the other nodes of a run that starts with several. Raises ModelMismatch, JoinRefused, HubUnreachable.
        """
        settings = self.wait_welcome()
        self._coder, self._founding = DeltaCoder(model, settings), leaves
        self._applied_version = -1
        self._call(lambda: self._carry_out(self._peer.join(model, time.monotonic())))
        waited = 0.0
        while not self._wait(lambda: self._peer.state is PeerState.LIVE and (len(self._updates) > 0 or self._peer.confirmed), 5.0):
            waited += 5.0
            logger.info("%s: %s for %.0f s (%s)", self.name, self.waiting_for, waited, self.address)
        self._founding = ()
        update = self.poll()
        if update is None:
            self._applied_version = 0
        return update

    @property
    def waiting_for(self) -> str:
        """What this node waits for now, in a few words; "" for nothing."""
        state = self._peer.state
        if state is PeerState.CONNECTING:
            return f"waiting for the broker, training alone ({self._said[1]})" if self._said[1] else "waiting for the broker"
        if state is PeerState.SYNCING:
            return "waiting for the run's parameters (or for the nodes that the run starts with)"
        if state is PeerState.LIVE and not self._units and self._units_asked and not self._units_finished:
            return "waiting for data units"
        return ""

    @property
    def layout(self) -> Layout:
        """See Exchange."""
        if self._coder is None:
            raise LocalProtocolError(f"{self.name} has not joined the run yet: call join first")
        return self._coder.layout

    @property
    def settings(self) -> RunSettings:
        """The run's settings, as the broker gave them."""
        return self.wait_welcome()

    @property
    def roster(self) -> Roster | None:
        """Who is in the run, as the broker last said."""
        return self._peer.roster

    @property
    def is_evaluator(self) -> bool:
        """True while this node is the one that scores the shared model."""
        roster = self._peer.roster
        return roster is not None and roster.evaluator == self.peer_id

    @property
    def version(self) -> Version:
        """The version that the training thread has applied."""
        return self._applied_version

    # ------------------------------------------------------------------ Exchange (training thread)

    def next_fragment(self) -> int | None:
        """Return the fragment of the next offer, None when an offer would be refused now.

        All nodes that are up to date offer the same fragment, version modulo fragments, so that an aggregate carries one;
        a fragment that has waited for 2n own offers goes first, so that no rhythm of versions can starve it.
        """
        self._settle_withdrawn()
        settings = self._peer.settings
        if settings is None or self._peer.state is not PeerState.LIVE or len(self._offered) >= settings.offers_in_flight:
            return None
        starved = [f for f, since in self._offers_since.items() if since >= 2 * settings.fragments]
        if starved:
            return max(starved, key=lambda fragment: self._offers_since[fragment])
        return (self._applied_version + len(self._offered)) % settings.fragments

    def offer(
        self, fragment: int, segments: Sequence[Array], *, samples: int, steps: int, score: Any = None, dense: bool = False
    ) -> int | None:
        """See Exchange. Raises NonFiniteDelta or JoinRefused when the node cannot go on."""
        self._raise_failure()
        if self.next_fragment() is None:
            return None
        offer = Offer(self._sequence, fragment, segments, samples, steps, score, tuple(self._applied), dense)
        base = self._applied_version
        if not self._worker.submit(lambda: self._encode(offer, base)):
            return None
        self._sequence += 1
        self._applied.clear()
        self._offered.add(offer.sequence)
        for other in range(self.layout.fragments):
            self._offers_since[other] = 0 if other == fragment else self._offers_since.get(other, 0) + 1
        return offer.sequence

    def in_flight(self) -> tuple[int, ...]:
        """Return the sequences of the offers that have neither landed in a polled update nor been withdrawn."""
        self._settle_withdrawn()
        return tuple(sorted(self._offered))

    def peek(self) -> Update | None:
        """See Exchange."""
        self._raise_failure()
        return self._updates.peek()

    def poll(self) -> Update | None:
        """See Exchange."""
        self._raise_failure()
        update = self._updates.get_nowait()
        if update is not None:
            self._applied_version = update.version
            self._applied += update.landed
            self._offered.difference_update(update.landed)
            self._worker.submit(self._decode_next)
        return update

    def wait_update(self, timeout_seconds: float) -> Update:
        """See Exchange."""
        until = time.monotonic() + timeout_seconds
        while not self._updates.wait(min(5.0, max(0.0, until - time.monotonic()))):
            self._raise_failure()
            waiting = self.waiting_for or "the other nodes' contributions"
            if time.monotonic() >= until:
                raise AggregateTimeout(
                    f"{self.name} waited {timeout_seconds:g} s for the aggregate after version {self._applied_version}: {waiting}. "
                    "In strict mode every node must contribute; see `zmqtrain status` for who does not."
                )
            logger.info("%s waits for the aggregate after version %d: %s", self.name, self._applied_version, waiting)
        update = self.poll()
        assert update is not None
        return update

    def _settle_withdrawn(self) -> None:
        while (sequence := self._withdrawn.get_nowait()) is not None:
            self._offered.discard(sequence)

    # ------------------------------------------------------------------ data units (training thread)

    def batches(self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]]) -> Iterator[Batch]:
        """Give the batches of the data units that the broker deals to this node, until the run is over.

        source: a program, or any function from a unit's number to its batches.  While no broker deals any, the node draws
        units of its own, so that training never stops.
        """
        batches_of: Callable[[int], Iterator[Batch]] = source.batches if hasattr(source, "batches") else source
        while (unit := self._next_unit()) is not None:
            yield from batches_of(unit)
            with self._lock:
                if unit < LOCAL_UNITS:
                    self._units_done.append(unit)

    def _next_unit(self) -> int | None:
        while True:
            self._raise_failure()
            with self._lock:
                empty = not self._units
                if self._units_finished and empty:
                    self._call(self._tell_done)
                    return None
            self._call(lambda idle=empty: self._ask_for_units(idle))
            if empty and not self._wait(self._has_units, 1.0):
                if self._peer.state is not PeerState.LIVE:
                    self._local_units += 1
                    base = LOCAL_UNITS + (hash_name(self.peer_id) << 24)
                    return base + self._local_units
                continue
            with self._lock:
                if self._units:
                    return self._units.popleft()

    def _has_units(self) -> bool:
        return bool(self._units) or self._units_finished or self._peer.state is not PeerState.LIVE

    def _ask_for_units(self, idle: bool) -> None:
        """In the network thread: report what is done, and keep one unit ahead."""
        if self._peer.state is not PeerState.LIVE or (self._units_asked and not idle and not self._units_done):
            return
        done, self._units_done = tuple(self._units_done), []
        self._units_asked = True
        self._send(WorkRequest(done, max(0, 2 - len(self._units)), idle))

    def _tell_done(self) -> None:
        if self._units_done and self._peer.state is PeerState.LIVE:
            done, self._units_done = tuple(self._units_done), []
            self._send(WorkRequest(done, 0, False))

    # ------------------------------------------------------------------ figures, and the end

    def report(self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int) -> None:
        """See Exchange."""
        progress = self._progress
        progress.step, progress.samples, progress.loss = step, samples, loss
        progress.age_steps, progress.offers_refused = age_steps, offers_refused

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        """See Exchange."""
        self._progress.scores, self._progress.score_version = scores, version
        self._call(self._send_report)

    def statistics(self) -> ExchangeStatistics:
        """Return the running figures."""
        roster = self._peer.roster
        return ExchangeStatistics(
            self._applied_version,
            len(roster.members) if roster else 0,
            self._bytes_sent,
            self._bytes_received,
            self._encode_seconds,
            self._decode_seconds,
            self._publishes,
            self._refused,
            self._peer.round_trip_seconds,
        )

    def close(self, reason: str = "") -> None:
        """Say goodbye and end the threads; safe to call twice."""
        if self._stopping:
            return
        self._stopping = True
        with contextlib.suppress(RuntimeError):
            self._call(lambda: self._carry_out(self._peer.leave(reason)))
            self._call(self._stop.set)
        self._thread.join(10.0)
        self._worker.close()
        self._updates.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: ZmqTrainError) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._lock.notify_all()

    def _wait(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        with self._lock:
            came = self._lock.wait_for(lambda: condition() or self._failure is not None, timeout_seconds)
        self._raise_failure()
        return came

    def _changed(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _call(self, what: Callable[[], Any]) -> None:
        """Have the network thread do something."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what)

    # ------------------------------------------------------------------ codec thread

    def _encode(self, offer: Offer, base: Version) -> None:
        assert self._coder is not None
        began = time.thread_time()
        try:
            encoded = self._coder.encode(offer)
        except NonFiniteDelta as error:
            self._fail(
                NonFiniteDelta(
                    f"{self.name}: {error}: training has diverged here. Nothing of it was sent. Start this node again (it takes the "
                    "shared parameters); if it happens again, use a smaller learning rate.",
                    error.leaf,
                )
            )
            return
        self._encode_seconds += time.thread_time() - began
        score = math.nan if offer.score is None else float(offer.score)
        self._call(lambda: self._publish(offer, base, encoded, score))

    def _decode_next(self) -> None:
        """Decode what has arrived, as far as the door to the training thread has room."""
        assert self._coder is not None
        while self._arrived and len(self._updates) < UPDATES_DECODED:
            deliver, frames = self._arrived.popleft()
            began = time.thread_time()
            landed = (*self._landed_unseen, *deliver.landed)
            self._landed_unseen = []
            if isinstance(deliver.announcement, Aggregate):
                update = self._coder.decode_aggregate(deliver.announcement, landed, frames)
            else:
                update = self._coder.decode_snapshot(deliver.announcement, landed, frames, deliver.reset)
            self._decode_seconds += time.thread_time() - began
            self._updates.put_nowait(update)
        self._changed()

    def _arrive(self, deliver: Deliver, frames: list[Buffer]) -> None:
        if isinstance(deliver.announcement, Snapshot):
            # whatever aggregates still wait are in it; what landed in them has landed
            self._landed_unseen += [s for waiting, _ in self._arrived for s in waiting.landed]
            self._arrived.clear()
        self._arrived.append((deliver, frames))
        self._decode_next()

    def _codec_failed(self, error: BaseException) -> None:
        if isinstance(error, CodecError):
            error = ZmqTrainError(f"{self.name} cannot read what the broker sent: {error}; restart this node")
        elif not isinstance(error, ZmqTrainError):
            logger.error("the codec thread failed", exc_info=error)
            error = ZmqTrainError(f"the codec thread of {self.name} failed: {error!r}")
        self._fail(error)

    # ------------------------------------------------------------------ network thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except ZmqTrainError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the network thread of %s failed", self.name)
            self._fail(ZmqTrainError(f"the network thread of {self.name} failed: {error!r}"))
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()
        self._channel = self._open_channel()
        self._control: deque[bytes] = deque()
        self._reconnecting = False
        self._assembler = Assembler(1 << 62)
        self._ready.set()
        tasks = [asyncio.create_task(coroutine) for coroutine in (self._receive_forever(), self._send_forever())]
        self._carry_out(self._peer.start(time.monotonic()))
        report_at = 0.0
        try:
            while not self._stop.is_set():
                now = time.monotonic()
                self._carry_out(self._peer.tick(now))
                if now >= report_at and not self._peer.observer:
                    report_at = now + REPORT_SECONDS
                    self._send_report()
                for task in tasks:
                    if task.done():
                        task.result()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), TICK_SECONDS)
            deadline = time.monotonic() + 1.0
            while self._control and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.close()

    async def _receive_forever(self) -> None:
        while True:
            try:
                lane, frames = await self._channel.receive()
            except ChannelClosed:
                return
            self._bytes_received += sum(len(frame) for frame in frames)
            try:
                self._take(lane, frames)
            except ProtocolVersionError as error:
                self._fail(JoinRefused(f"{self.address}: {error}", "protocol"))
            except FramingError as error:
                logger.warning("%s: the broker sent what cannot be read (%s); connecting again", self.name, error)
                self._carry_out([Disconnect(PeerId("hub"), "protocol", str(error))])

    def _take(self, lane: Lane, frames: list[Buffer]) -> None:
        message = decode_message(frames[0])
        now = time.monotonic()
        if lane is Lane.BULK:
            transfer = getattr(message, "transfer", -1)
            self._send(Credit(transfer, 1))
        if isinstance(message, Chunk):
            self._peer.saw(now)
            if len(frames) == 2 and (whole := self._assembler.add(message, frames[1])) is not None:
                self._carry_out(self._peer.received(message.transfer), whole[1])
        elif isinstance(message, Credit):
            self._peer.saw(now)
            chunks = self._outgoing.get(message.transfer)
            for _ in range(min(message.chunks, len(chunks or ()))):
                assert chunks is not None
                self._bulk.append(chunks.popleft())
            if not chunks:
                self._outgoing.pop(message.transfer, None)
            self._wake.set()
        elif isinstance(message, WorkUnit):
            self._peer.saw(now)
            with self._lock:
                self._units.extend(message.numbers)
                self._units_finished = message.finished
                self._units_asked = False
                self._lock.notify_all()
        else:
            before = self._peer.state
            self._carry_out(self._peer.receive(message, now))
            if self._peer.state is not before:
                if self._peer.state is PeerState.LIVE and self._said[0]:
                    logger.info("%s federates again at version %d", self.name, self._peer.version)
                    self._said = ("", "")
                self._changed()

    def _carry_out(self, effects: Sequence[PeerEffect], frames: list[Buffer] | None = None) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self._send(message)
                case Expect(_, announcement):
                    self._assembler.expect(announcement)
                case Deliver():
                    self._deliver(effect, frames or [])
                case Serve():
                    self._worker.submit(self._encode_founding)
                case Withdraw(sequence, reason, text):
                    self._withdraw(sequence, reason, text)
                case Disconnect(_, reason, text):
                    self._disconnect(reason, text)

    def _deliver(self, deliver: Deliver, frames: list[Buffer]) -> None:
        if len(self._arrived) > UPDATES_KEPT and isinstance(deliver.announcement, Aggregate):
            # the training thread is far behind: one snapshot is less than all these
            self._worker.submit(lambda: self._skip(deliver.landed))
            self._carry_out(self._peer.resync())
        elif not self._worker.submit(lambda: self._arrive(deliver, frames)):
            self._codec_failed(ZmqTrainError(f"the codec thread of {self.name} cannot keep up"))

    def _skip(self, landed: tuple[int, ...]) -> None:
        self._landed_unseen += landed

    def _withdraw(self, sequence: int, reason: str, text: str) -> None:
        self._refused += 1
        if reason == "non-finite":
            self._fail(NonFiniteDelta(f"{self.name}: the broker refused a delta that is not finite: {text}"))
        elif reason != "lost":
            logger.warning("%s: the broker refused delta %d (%s: %s); the next one holds it", self.name, sequence, reason, text)
        coder = self._coder
        if coder is not None:
            self._worker.submit(lambda: coder.withdraw(sequence))
        self._withdrawn.put_nowait(sequence)

    def _disconnect(self, reason: str, text: str) -> None:
        self._assembler.clear()
        self._outgoing.clear()
        self._bulk.clear()
        self._units_asked = False
        if self._peer.state is PeerState.CLOSED:
            error = ModelMismatch if reason == "model" else JoinRefused
            self._fail(error(f"{self.name} cannot join the run at {self.address}: {text}", reason))
            return
        if self._said != (reason, text) and self._said[0] != reason:
            logger.warning("%s: %s. Training goes on alone; trying again.", self.name, text.rstrip("."))
        self._said = (reason, text)
        self._reconnecting = True
        self._control.clear()
        self._wake.set()
        self._changed()

    def _send(self, message: Message) -> None:
        self._control.append(encode_message(message))
        self._wake.set()

    async def _send_forever(self) -> None:
        while True:
            if self._reconnecting:
                self._reconnecting = False
                await self._channel.reconnect()
            elif self._control:
                head = self._control.popleft()
                self._bytes_sent += len(head)
                await self._channel.send(Lane.CONTROL, [head])
            elif self._bulk:
                chunk = self._bulk.popleft()
                self._bytes_sent += len(chunk[0]) + len(chunk[1])
                await self._channel.send(Lane.BULK, chunk)
            else:
                self._wake.clear()
                await self._wake.wait()

    def _publish(self, offer: Offer, base: Version, encoded: Encoded, score: float) -> None:
        if self._peer.state is not PeerState.LIVE:
            self._withdraw(offer.sequence, "lost", "the connection was lost before it was sent")
            return
        self._transfer += 1
        sizes = tuple(len(frame) for frame in encoded.frames)
        self._outgoing[self._transfer] = deque(split(self._transfer, encoded.frames))
        self._publishes += 1
        publish = Publish(
            self._transfer, offer.sequence, base, offer.fragment, encoded.codec, sizes, offer.samples, offer.steps, score
        )
        self._carry_out(self._peer.publish(publish))

    def _encode_founding(self) -> None:
        assert self._coder is not None
        layout = self._coder.layout
        try:
            frames = encode_snapshot(layout, layout.split(self._founding))
        except NonFiniteDelta as error:
            self._fail(NonFiniteDelta(f"{self.name}: the initial parameters are not finite ({error}); check the init", error.leaf))
            return
        self._call(lambda: self._send_founding(frames))

    def _send_founding(self, frames: Sequence[Buffer]) -> None:
        self._transfer += 1
        self._outgoing[self._transfer] = deque(split(self._transfer, frames))
        self._send(Snapshot(self._transfer, 0, tuple(len(frame) for frame in frames)))

    def _send_report(self) -> None:
        if self._peer.state is not PeerState.LIVE:
            return
        progress, now = self._progress, time.monotonic()
        if getattr(progress.loss, "is_ready", lambda: True)():  # a device scalar that is still computed is not waited for
            progress.loss_known = float(progress.loss)
        if progress.measured_at and now > progress.measured_at:
            progress.samples_per_second = (progress.samples - progress.measured_samples) / (now - progress.measured_at)
        progress.measured_at, progress.measured_samples = now, progress.samples
        self._send(
            Report(
                step=progress.step,
                samples=progress.samples,
                samples_per_second=progress.samples_per_second,
                loss=progress.loss_known,
                age_steps=float(progress.age_steps),
                offers_refused=progress.offers_refused,
                bytes_sent=self._bytes_sent,
                bytes_received=self._bytes_received,
                waiting=self.waiting_for,
                scores=progress.scores,
                score_version=progress.score_version,
            )
        )


def hash_name(name: str) -> int:
    """Return 15 bits that depend on a name alone (the same in every process)."""
    return sum(ord(letter) * 31**index for index, letter in enumerate(name)) & 0x7FFF


def connect(
    address: str,
    name: str | None = None,
    server_key: bytes | None = None,
    keys: CurveKeys | None = None,
    observer: bool = False,
    timeout_seconds: float = 10.0,
) -> Node:
    """Connect to the broker at `address` ("tcp://hub:5555") and return the node, welcomed.

    name: for people; the host's name if not given.  server_key: the hub's public CURVE key, where it has one.
    Raises ConfigError for an address that is none, HubUnreachable when no broker answers, JoinRefused.
    """
    name = name or socket.gethostname().partition(".")[0] or "node"
    if not name.isprintable() or len(name) > 64 or "#" in name:
        raise ConfigError(f"a node's name is at most 64 printable characters without '#', got {name!r}")
    peer = PeerId(f"{name}#{secrets.token_hex(4)}")
    node = Node(lambda: DealerChannel.connect(address, peer=peer, keys=keys, server_key=server_key), peer, name, address, observer)
    try:
        node.wait_welcome(timeout_seconds)
    except BaseException:
        node.close()
        raise
    return node

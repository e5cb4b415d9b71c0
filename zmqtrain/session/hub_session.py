"""A peer's session with a hub: one class for nodes, standbys, shard brokers, observers, group members, parameter-server
clients and probes.

A session dials the hub and carries out what its state machine (`Peer`) decides: Hello, heartbeats, Hello again after a
loss. It sends payloads as the hub grants credit, puts received chunks together, and ends with Goodbye.  What a role
does with its messages is up to the session's listener.
Rule 1: one asyncio loop owns the channel and the machine; other threads use `call`.
Rule 2: a listener is called in that loop and never waits.
Rule 3: each Hello has a higher incarnation than the one before; a message of an earlier connection is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from math import inf
from typing import ClassVar, NamedTuple

from zmqtrain.averaging.coder import Encoded
from zmqtrain.averaging.snapshot import Digest
from zmqtrain.core.errors import ChannelClosed, FramingError, JoinRefused, ModelMismatch, RunStopped, ZmqTrainError
from zmqtrain.core.interfaces import Channel, Dialer, LoopThread
from zmqtrain.core.types import Buffer, Lane, Offer, PeerId, Version
from zmqtrain.protocol.effects import Connect, Deliver, Disconnect, Expect, PeerEffect, Send, Serve, Withdraw
from zmqtrain.protocol.failure_detector import BEAT_SECONDS
from zmqtrain.protocol.fencing import Stamp, Verdict
from zmqtrain.protocol.framing import Assembler, ProtocolVersionError, decode_head, encode_message, split
from zmqtrain.protocol.groups import SILENCE_SECONDS
from zmqtrain.protocol.messages import (
    Chunk,
    Credit,
    GroupLost,
    Hello,
    Message,
    Publish,
    Quarantine,
    Refused,
    Report,
    Roster,
    Snapshot,
    Stop,
    Values,
    WorkUnit,
)
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.session.environment import EffectQueue, clock, environment
from zmqtrain.session.unequal import cannot_join, with_upgrade
from zmqtrain.transport.address import say_addresses, split_key
from zmqtrain.transport.pacing import Gate, LinkShare, Reservation, TokenBucket, Use

logger = logging.getLogger(__name__)

SHORTEST_TICK_SECONDS, LONGEST_TICK_SECONDS = 0.05, 0.25
TICKS_A_HEARTBEAT = 4
"""A session looks at the time so often; each look wakes a thread. One that was never welcomed looks most often."""
REPORT_SECONDS = 1.0
GOODBYE_SECONDS = 1.0
ABSENCE_SECONDS = 60.0
"""A node without a hub logs that this often."""
ASSEMBLED_BYTES = 1 << 40
"""No bound on what the hub may announce: the hub is trusted with the size of its own model."""
MOST_SPOILED = 2
"""So many snapshots in a row with another digest than announced are no accident; nor so many aggregates."""


class Solitude(NamedTuple):
    """A node without a hub: for how many seconds, where it looks for one, why none is there, and where its training
    stands."""

    seconds: float
    where: str
    why: str
    step: int
    loss: float


class NullListener:
    """Listener of a session: its methods do nothing, a role overrides those that it needs.

    failure: why the session cannot go on; None while it can.  messages: the types that `on_message` gets.
    """

    failure: ZmqTrainError | None = None
    messages: ClassVar[tuple[type[Message], ...]] = ()

    def on_message(self, message: Message, frames: Sequence[Buffer]) -> bool:
        """Take a message of one of `messages`, with the frames behind its head (or, of an announced payload, all its
        frames). Return False to let the session's machine take it, too."""
        return False

    def on_delivered(self, deliver: Deliver, frames: list[Buffer]) -> None:
        """A whole aggregate or snapshot is received."""

    def on_withdrawn(self, sequence: int, reason: str, text: str) -> None:
        """An offer will not be applied."""

    def on_quarantined(self, quarantine: Quarantine) -> None:
        """The hub takes no delta of this node for a while."""

    def on_founding(self) -> None:
        """The hub wants this node's parameters: answer with `HubSession.send_founding`."""

    def on_work(self, answer: WorkUnit) -> None:
        """The hub deals data units."""

    def on_stopped(self) -> None:
        """An operator has ended the run: the node drains what is pending, and leaves."""

    def on_changed(self) -> None:
        """The state of the session has changed."""

    def on_ended(self, reason: str, text: str, error: ZmqTrainError) -> None:
        """The hub has refused this peer for good, or is lost to a peer that does not come again. error: says so."""
        self.on_failed(error)

    def on_failed(self, error: ZmqTrainError) -> None:
        """The session cannot go on."""
        self.failure = self.failure or error

    def make_report(self) -> Report:
        """Return a node's report of now."""
        raise AssertionError("only nodes report")


class ProcessPeer(Peer):
    """Machine of a client that is no node: a group member, a parameter-server client, a probe.

    It believes any hub that welcomes it.  role: as in Hello.  silence: after so many seconds the hub is lost.
    comes_again: whether a welcomed client says Hello again after a loss; if not, the loss ends its session. A hub that
    cannot be understood always does.
    """

    def __init__(
        self,
        peer: PeerId,
        name: str,
        role: str = "process",
        silence: float = SILENCE_SECONDS,
        comes_again: bool = True,
    ) -> None:
        super().__init__(peer, name, role="observer", incarnation=1)
        self.comes_again = comes_again
        self._role, self._silence = role, silence

    @property
    def heartbeat_seconds(self) -> float:
        return BEAT_SECONDS

    @property
    def lost_seconds(self) -> float:
        return self._silence

    def judge(self, stamp: Stamp, message: Message, now: float, counted: bool = True) -> list[PeerEffect] | None:
        """See Peer: the hub tells a process that it has just lost so, without a number."""
        if isinstance(message, GroupLost) and stamp == Stamp(self.incarnation):
            return None
        return super().judge(stamp, message, now, counted)

    def gone(self, now: float) -> list[PeerEffect]:
        """See Peer: a connection that breaks comes back, or the hub falls silent."""
        return super().gone(now) if self.comes_again else []

    def start(self, now: float) -> list[PeerEffect]:
        self.run, self.term = "", 0
        return super().start(now)

    def _greeting(self) -> Hello:
        return Hello(self.name, self._role)

    def _let_go_on(self, roster: Roster, now: float) -> list[PeerEffect]:
        return []

    def _lose_hub(self, reason: str, text: str, now: float, hello_at: float) -> list[PeerEffect]:
        ends = reason == "garbage" or not (self.comes_again or self.state is PeerState.CONNECTING)
        effects = super()._lose_hub(reason, text, now, hello_at)
        self._state = PeerState.CLOSED if ends else self._state
        return effects


class Sender:
    """Queue of what a peer sends: control messages at once, granted chunks as the reserved share of its port allows.

    Each lane has one task, so that a lane keeps its order and heartbeats do not wait for chunks.
    rate: bytes per second that may be sent, None: no limit.  bytes_sent: payload and heads.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.bytes_sent = 0
        self._control: deque[bytes] = deque()
        self._chunks: dict[Use, deque[Sequence[Buffer]]] = {Use.DELTA: deque(), Use.SNAPSHOT: deque()}
        self._reservation: Reservation[Use] = Reservation(rate)
        self._wake, self._wake_control, self._sent = asyncio.Event(), asyncio.Event(), Gate()
        self._open, self._sends_control = True, False

    @property
    def waiting_control(self) -> tuple[bytes, ...]:
        return tuple(self._control)

    def limit(self, rate: float | None) -> None:
        """Send no more than `rate` bytes per second from now on; None: no limit."""
        if rate != self._reservation.bucket.rate:
            self._reservation.bucket.set_rate(rate)
            self._wake.set()

    def say(self, head: bytes) -> None:
        self._control.append(head)
        self._wake_control.set()

    def give(self, use: Use, chunk: Sequence[Buffer]) -> None:
        """Send a message on BULK, after those of the same use."""
        self._chunks[use].append(chunk)
        self._wake.set()

    def clear(self, *, control: bool) -> None:
        """Drop the chunks that wait; control: and the control messages."""
        for chunks in self._chunks.values():
            chunks.clear()
        if control:
            self._control.clear()
            self._reservation.bucket = TokenBucket(self._reservation.bucket.rate)  # the hub's bucket is full again, too
        self._sent.open()

    def pause(self) -> None:
        """Send nothing until `resume`: the channel reconnects."""
        self._open = False

    def resume(self) -> None:
        self._open = True
        self._wake.set()
        self._wake_control.set()

    async def run(self, channel: Channel) -> None:
        """Send on this channel until cancelled. Raises ChannelClosed."""
        lanes = [asyncio.create_task(send(channel)) for send in (self._send_control, self._send_chunks)]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    async def _send_control(self, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._open and self._control:
                head = self._control.popleft()
                self._reservation.pay(len(head), loop.time())
                self.bytes_sent += len(head)
                self._sends_control = True
                try:
                    await channel.send(Lane.CONTROL, [head])
                finally:
                    self._sends_control = False
                    self._sent.open()
            self._wake_control.clear()
            await self._wake_control.wait()

    async def _send_chunks(self, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        while True:
            seconds = inf
            if self._open:
                use, seconds = self._turn(loop.time())
                if use is not None:
                    chunk = self._chunks[use].popleft()
                    size = _size_of(chunk)
                    self._reservation.sent(use, size, loop.time())
                    self.bytes_sent += size
                    await channel.send(Lane.BULK, chunk)
                    continue
            self._wake.clear()
            timer = loop.call_later(seconds, self._wake.set) if seconds < inf else None
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    async def sent_control(self) -> None:
        """Wait until the channel has taken all control messages."""
        while self._control or self._sends_control:
            await self._sent.wait()

    def _turn(self, now: float) -> tuple[Use | None, float]:
        for use, chunks in self._chunks.items():
            if chunks:
                self._reservation.wait(use, use)
            else:
                self._reservation.leave(use)
        return self._reservation.turn(lambda use: (_size_of(self._chunks[use][0]), 0.0), now)


def _size_of(chunk: Sequence[Buffer]) -> int:
    return sum(len(frame) for frame in chunk)


class SnapshotResume:
    """The first frames of a snapshot, kept over a lost connection; the whole is used only if its digest is right.

    One snapshot at a time, the last announced.  spoiled: snapshots in a row with a wrong digest.
    """

    def __init__(self) -> None:
        self.spoiled = 0
        self._snapshot: Snapshot | None = None
        self._frames: list[Buffer] = []
        self._digest = Digest()

    @property
    def held(self) -> tuple[str, int]:
        """The digest of the snapshot held in part, and how many of its first frames are; ("", 0): none."""
        if self._snapshot is None or not self._frames:
            return "", 0
        return self._snapshot.digest, len(self._frames)

    def begin(self, snapshot: Snapshot) -> Sequence[Buffer]:
        """Begin an announced snapshot; return the frames of it that are held already.

        Raises FramingError if it begins behind them.
        """
        digest, held = self.held
        if snapshot.first and (snapshot.digest, snapshot.first) != (digest, held):
            raise FramingError(f"a snapshot from its frame {snapshot.first} on; {held} of it are here")
        if not snapshot.first:
            self._frames, self._digest = [], Digest()
        self._snapshot = snapshot if snapshot.digest else None
        return self._frames

    def add(self, chunk: Chunk, frame: Buffer) -> None:
        """Keep a received frame, if it is the snapshot's. Raises FramingError for one out of order."""
        if self._snapshot is not None and chunk.transfer == self._snapshot.transfer:
            if chunk.index != len(self._frames):
                raise FramingError(f"frame {chunk.index} of a snapshot comes where {len(self._frames)} is due")
            self._frames.append(frame)
            self._digest.add(frame)

    def is_sound(self, transfer: int) -> bool:
        """Return whether a whole transfer has its digest; one that is no snapshot with a digest always has."""
        if self._snapshot is None or transfer != self._snapshot.transfer:
            return True
        sound = self._digest.text == self._snapshot.digest
        self.spoiled = 0 if sound else self.spoiled + 1
        self._snapshot, self._frames, self._digest = None, [], Digest()
        return sound


class HubSession:
    """One peer's session: a task of the running loop (`begin`), or a thread with its own loop (`start`).

    dialer: connects to the hub, first at `address`.  share: what training may use of this
    machine's port; the hub, which knows it, and this side keep to it.  meanwhile: what goes on without a hub, for
    messages.
    """

    def __init__(
        self,
        dialer: Dialer,
        peer: Peer,
        address: str,
        listener: NullListener,
        share: LinkShare | None = None,
        meanwhile: str = "Training goes on alone",
    ) -> None:
        self.peer, self.endpoint, self.listener = peer, address, listener
        self.share = share or LinkShare()
        self.bytes_received = self.messages_received = self.publishes = 0
        self.linger_seconds = 1.0
        self.trouble: tuple[str, str] = ("", "")
        """Why there is no hub now, as (code, sentence); empty when all is well."""
        self.undecided = False
        """Whether a run other than the checkpoint's is not logged here yet, because it may end the node."""
        self._meanwhile, self._dialer = meanwhile, dialer
        self._sender = Sender(self.share.limit())
        self._obstacle_said, self._met = "", ("", "")
        self._absent_since: float | None = None
        self._say_absence_at = 0.0
        self._outgoing: dict[int, tuple[Use, deque[tuple[bytes, Buffer]]]] = {}
        self._published: dict[int, int] = {}  # by sequence: the transfer, as long as it is outgoing
        self._assembler = Assembler(ASSEMBLED_BYTES)
        self._resume = SnapshotResume()
        self._transfer = 0
        self._founding = False
        self._reconnecting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._effects = EffectQueue[tuple[PeerEffect, list[Buffer]]](self._carry_out_one)
        self._stop = asyncio.Event()
        self._ready = environment().event()
        self._task: asyncio.Task[None] | None = None
        self._thread: LoopThread | None = None

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Begin in a thread of its own; return when the channel is open and Hello is queued."""
        self._thread = environment().start("zmqtrain-network", self._main)
        self._ready.wait()

    def call(self, what: Callable[[], object], after_seconds: float = 0.0) -> None:
        """Have the session's loop do something soon, or after some seconds; nothing happens once it has ended."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                if after_seconds > 0:
                    loop.call_soon_threadsafe(loop.call_later, after_seconds, self._do, what)
                else:
                    loop.call_soon_threadsafe(self._do, what)

    def move(self, address: str) -> None:
        """Look for the hub at this address from now on, unless it is heard where it was."""
        self.call(lambda: self._move(address))

    def close(self, reason: str) -> None:
        """Say goodbye and end the thread."""
        self.call(lambda: self.leave(reason))
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # this is that very thread
                self._thread.join(10.0)

    @property
    def address(self) -> str:
        """The address at which the hub is looked for, as people know it: without a key."""
        return split_key(self.endpoint)[0]

    @property
    def live(self) -> bool:
        return self.peer.state is PeerState.LIVE

    @property
    def whereabouts(self) -> tuple[str, ...]:
        """The addresses at which the hub is looked for, in turn; the one to which it has moved, if it has."""
        return self.peer.search.addresses if self.endpoint in self.peer.search.addresses else (self.endpoint,)

    @property
    def obstacle(self) -> str:
        """Why the hub does not let this peer in, where more is known than that nobody answers; else ""."""
        return self._met[1] or self.peer.obstacle

    @property
    def why_alone(self) -> str:
        """Why there is no hub now, as far as it is known."""
        return (self.obstacle or self.trouble[1] or "nobody answers").rstrip(".")

    def alone_seconds(self) -> float | None:
        """For how long this node has had no hub; None: it has one, or has never had one."""
        since = self._absent_since
        return None if since is None else clock.monotonic() - since

    @property
    def refused(self) -> str:
        """Why the hub ended the last handshake with this peer, as in Channel; "" once it is welcomed."""
        return self._met[0]

    @property
    def bytes_sent(self) -> int:
        return self._sender.bytes_sent

    @property
    def link_rate(self) -> float:
        """The rate of this machine's port in bytes per second, as configured here or measured by the hub; or 0."""
        return self.share.rate or self.peer.measured_rate

    # ------------------------------------------------------------------ the session's loop: out

    def begin(self) -> None:
        self._task = asyncio.ensure_future(self._main())

    async def wait_closed(self) -> None:
        if self._task is not None:
            await self._task

    def leave(self, reason: str) -> None:
        self.carry_out(self.peer.leave(reason))
        self._stop.set()

    def _do(self, what: Callable[[], object]) -> None:
        try:
            what()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, ZmqTrainError):
            return self.listener.on_failed(error)
        logger.error("the session of %s failed", self.peer.name, exc_info=error)
        self.listener.on_failed(ZmqTrainError(f"the session of {self.peer.name} failed: {error!r}"))

    def send(self, message: Message) -> None:
        self._sender.say(encode_message(message, self.peer.stamp()))

    def send_bulk(self, message: Message, frames: Sequence[Buffer]) -> None:
        """Queue a message on BULK that needs no credit, with frames behind it."""
        self._sender.give(Use.DELTA, [encode_message(message, self.peer.stamp(False)), *frames])

    def carry_out(self, effects: Sequence[PeerEffect], frames: list[Buffer] | None = None) -> None:
        """Carry out effects, after all effects before. frames: of the transfer that a Deliver is about."""
        self._effects.carry_out([(effect, frames or []) for effect in effects])

    def _carry_out_one(self, wish: tuple[PeerEffect, list[Buffer]]) -> None:
        effect, frames = wish
        match effect:
            case Send(message):
                self.send(message)
            case Connect(address):
                self._connect(address)
            case Expect(_, announcement):
                held = self._resume.begin(announcement) if isinstance(announcement, Snapshot) else ()
                self.peer.held = "", 0
                self._assembler.expect(announcement, held)
            case Deliver():
                self.listener.on_delivered(effect, frames)
            case Serve():
                self._founding = True
                self.listener.on_founding()
            case Withdraw(sequence, reason, text):
                self.cancel(self._published.pop(sequence, -1))
                self.listener.on_withdrawn(sequence, reason, text)
            case Disconnect(_, reason, text):
                self._disconnect(reason, text)

    def publish(self, offer: Offer, base: Version, encoded: Encoded, score: float) -> None:
        """Announce an encoded offer; its chunks are sent as the hub grants them."""
        if not self.live:
            self.listener.on_withdrawn(offer.sequence, "lost", "the connection was lost before it was sent")
            return
        transfer, sizes = self.stage(encoded.frames)
        self.publishes += 1
        self._published = {s: t for s, t in self._published.items() if t in self._outgoing} | {offer.sequence: transfer}
        codec, samples, steps = encoded.codec, offer.samples, offer.steps
        publish = Publish(
            transfer, offer.sequence, base, offer.fragment, codec, sizes, samples, steps, score, offer.dense, offer.turn
        )
        self.carry_out(self.peer.publish(publish))

    def send_founding(self, frames: Sequence[Buffer], moments: Sequence[Buffer] = (), digest: str = "") -> None:
        """Announce the parameters that the hub asked for, unless that hub is lost. moments: frames behind them."""
        if not self._founding:
            return
        self._founding = False
        transfer, sizes = self.stage([*frames, *moments], Use.SNAPSHOT)
        self.send(Snapshot(transfer, 0, sizes, moments=len(moments), digest=digest))

    def stage(self, frames: Sequence[Buffer], use: Use = Use.DELTA) -> tuple[int, tuple[int, ...]]:
        """Hold a payload until the hub grants its chunks; return the transfer's number and the sizes to announce.

        Nobody may write into the frames before they are sent.
        """
        transfer = self.next_transfer()
        self._outgoing[transfer] = (use, deque(split(transfer, frames, self.peer.stamp(False))))
        return transfer, tuple(len(frame) for frame in frames)

    def next_transfer(self) -> int:
        """Return a number that no transfer of this session has."""
        self._transfer += 1
        return self._transfer

    def cancel(self, transfer: int) -> None:
        """Send nothing more of a transfer, whatever it is granted."""
        self._outgoing.pop(transfer, None)

    def _disconnect(self, reason: str, text: str) -> None:
        self._founding = False
        self._assembler.clear()
        self.peer.held = self._resume.held
        self._outgoing.clear()
        self._sender.clear(control=False)
        if self.peer.state is PeerState.CLOSED:
            self.listener.on_ended(reason, text, self._refusal(reason, text))
            return
        if self.trouble[0] != reason and not (self.undecided and reason == "run"):  # once, not with every attempt
            logger.warning("%s: %s. %s; trying again", self.peer.name, text.rstrip("."), self._meanwhile)
        self.trouble = (reason, text)
        self._connect()
        self.listener.on_changed()

    def _refusal(self, reason: str, text: str) -> ZmqTrainError:
        """Return the error of a peer that the hub has refused for good."""
        if reason == "stopped":
            return RunStopped(f"{self.peer.name} ends: {text}. What it had not sent is not in the run", reason)
        if self.peer.order is not None:
            return JoinRefused(f"{self.address} does not obey: {text}", reason)
        kind = ModelMismatch if reason == "model" else JoinRefused
        return kind(f"{self.peer.name} cannot join the run at {self.address}: {text}", reason)

    def _connect(self, address: str = "") -> None:
        """Reconnect, and drop what waits to be sent."""
        self.endpoint = address or self.endpoint
        self._sender.clear(control=True)
        if self._reconnecting is None:
            self._sender.pause()
            self._reconnecting = asyncio.ensure_future(self._reconnect())

    def _move(self, address: str) -> None:
        if address == self.endpoint or not self.trouble[0] or self._reconnecting is not None:
            return
        logger.info(
            "%s looks for the hub, which was at %s, at %s from now on",
            self.peer.name,
            self.address,
            split_key(address)[0],
        )
        self._connect(address)

    async def _reconnect(self) -> None:
        try:
            await self._channel.reconnect(self.endpoint)
        finally:
            self._reconnecting = None
            self._sender.resume()

    # ------------------------------------------------------------------ the session's loop: life

    async def _main(self) -> None:
        try:
            await self._live()
        except Exception as error:
            self._failed(error)
        finally:
            self._ready.set()

    async def _live(self) -> None:
        self._channel: Channel = self._dialer.dial(self.endpoint, self.peer.peer)
        self._channel.watch(lambda: self._do(lambda: self.carry_out(self.peer.gone(clock.monotonic()))))
        self._loop = asyncio.get_running_loop()
        coroutines = self._receive_forever(), self._sender.run(self._channel), self._follow_refusals()
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        self.carry_out(self.peer.start(clock.monotonic()))
        self._ready.set()
        try:
            await self._tick_forever(tasks)
            with contextlib.suppress(TimeoutError):  # the goodbye
                await asyncio.wait_for(self._sender.sent_control(), min(GOODBYE_SECONDS, self.linger_seconds + 0.1))
        finally:
            if self._reconnecting is not None:
                tasks.append(self._reconnecting)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.close(self.linger_seconds)

    async def _tick_forever(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        report_at = 0.0
        while not self._stop.is_set():
            now = clock.monotonic()
            self.carry_out(self.peer.tick(now))
            self._say_obstacle()
            self._say_absence(now)
            trains = self.live or self.peer.state is PeerState.APART
            if trains and now >= report_at and not self.peer.observer:
                report_at = now + REPORT_SECONDS
                self.send(self.listener.make_report())
            for task in tasks:
                if task.done():
                    task.result()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_seconds):
                    await self._stop.wait()

    @property
    def _tick_seconds(self) -> float:
        """How long this session waits before it looks at the time again."""
        wanted = 0.0 if self.peer.settings is None else self.peer.heartbeat_seconds / TICKS_A_HEARTBEAT
        return min(LONGEST_TICK_SECONDS, max(SHORTEST_TICK_SECONDS, wanted))

    async def _follow_refusals(self) -> None:
        """Remember why a handshake was refused while the next address is tried; until a hub welcomes this peer."""
        with contextlib.suppress(ChannelClosed):
            while True:
                if self._channel.refused:
                    self._met = self._channel.refused, self._channel.obstacle
                    self.listener.on_changed()
                await self._channel.changed()

    def _say_obstacle(self) -> None:
        """Log once why a hub that was there does not let this peer in again."""
        if self.trouble[0] and (obstacle := self.obstacle) not in ("", self._obstacle_said):
            logger.warning("%s does not come in again at %s: %s", self.peer.name, self.address, obstacle)
            self._obstacle_said = obstacle

    def _say_absence(self, now: float) -> None:
        """Log once a minute that a node of a run has no hub."""
        if self.peer.observer or not self.peer.run or self.peer.state is not PeerState.CONNECTING:
            self._absent_since = None
            return
        if self._absent_since is None:
            self._absent_since, self._say_absence_at = now, now + ABSENCE_SECONDS
        if now >= self._say_absence_at:
            self._say_absence_at = now + ABSENCE_SECONDS
            where, seconds = say_addresses(self.whereabouts), now - self._absent_since
            text = "%s has had no hub for %.0f s, at %s: %s. %s; trying again"
            logger.warning(text, self.peer.name, seconds, where, self.why_alone, self._meanwhile)

    # ------------------------------------------------------------------ the session's loop: in

    async def _receive_forever(self) -> None:
        while True:
            try:
                lane, frames = await self._channel.receive()
            except ChannelClosed:
                return
            self.bytes_received += sum(len(frame) for frame in frames)
            try:
                self._take(lane, frames)
            except ProtocolVersionError as error:
                self.listener.on_failed(cannot_join(self.address, error))
            except FramingError as error:
                self.carry_out(self.peer.distrust(str(error), clock.monotonic()))

    def _take(self, lane: Lane, frames: list[Buffer]) -> None:
        (stamp, message), now = decode_head(frames[0]), clock.monotonic()
        if isinstance(message, Refused):
            message = with_upgrade(message)
        if (instead := self.peer.judge(stamp, message, now, lane is Lane.CONTROL)) is not None:
            return self.carry_out(instead)
        self.peer.saw(now)
        self.messages_received += 1
        if lane is Lane.BULK and hasattr(message, "transfer"):  # reopens the hub's window
            self.send(Credit(message.transfer, 1))
        match message:
            case Chunk():
                self._take_chunk(message, frames)
            case Values():
                self._assembler.expect(message)
            case Credit(transfer, chunks):
                self._granted(transfer, chunks)
            case WorkUnit():
                self.listener.on_work(message)
            case Stop():
                self.listener.on_stopped()
            case _ if isinstance(message, self.listener.messages) and self.listener.on_message(message, frames[1:]):
                pass
            case _:
                before = self.peer.state
                self.carry_out(self.peer.receive(message, now))
                if isinstance(message, Quarantine):
                    self.listener.on_quarantined(message)
                if isinstance(message, Roster):  # it says what the hub has measured
                    self._sender.limit(self.share.limit(self.peer.measured_rate))
                if self.peer.state is not before:
                    self._state_changed(before)

    def _take_chunk(self, chunk: Chunk, frames: list[Buffer]) -> None:
        if self._assembler.has(chunk):
            self.peer.dropped[Verdict.DUPLICATE.value] += 1
        elif len(frames) == 2 and chunk.transfer in self._assembler:
            whole = self._assembler.add(chunk, frames[1])
            self._resume.add(chunk, frames[1])
            if whole is None:
                return
            if isinstance(whole[0], Values):
                self.listener.on_message(*whole)
            else:
                self._take_whole(chunk.transfer, whole[1])

    def _take_whole(self, transfer: int, frames: list[Buffer]) -> None:
        if self._resume.is_sound(transfer):
            return self.carry_out(self.peer.received(transfer), frames)
        if self._resume.spoiled >= MOST_SPOILED:
            raise ZmqTrainError(
                f"{self.peer.name} has fetched the run's parameters {MOST_SPOILED} times from {self.address}, and each "
                "time the bytes received were not those sent. The network or this PC's memory corrupts them: check "
                "both, and start this node again"
            )
        text = "%s fetches the run's parameters again: the bytes received are not those sent"
        logger.warning(text, self.peer.name)
        self.carry_out(self.peer.spoiled(transfer))

    def _granted(self, transfer: int, chunks: int) -> None:
        if transfer not in self._outgoing:
            return
        use, waiting = self._outgoing[transfer]
        for _ in range(min(chunks, len(waiting))):
            self._sender.give(use, waiting.popleft())
        if not waiting:
            del self._outgoing[transfer]

    def _state_changed(self, before: PeerState) -> None:
        if self.peer.state is not PeerState.CONNECTING:
            self._met = "", ""
        if self.live and self.trouble[0]:
            where = f", at version {self.peer.version}" if self.peer.version >= 0 else ""
            logger.info("%s federates again%s", self.peer.name, where)
            self.trouble, self._obstacle_said = ("", ""), ""
        logger.debug("%s: %s -> %s", self.peer.name, before.value, self.peer.state.value)
        self.listener.on_changed()


# ---------------------------------------------------------------------- the first answer

REFUSED_SECONDS = 3.0
"""A hub that refuses this program's keys does so again unless somebody authorises them meanwhile: a refused program
tries again for so long, and then says so."""
LOOK_SECONDS = 0.05


class ConnectDeadline:
    """When a session stops waiting for the first answer of its hub: as configured; soon once it is refused.

    now: monotonic seconds at the beginning.
    """

    def __init__(self, session: HubSession, seconds: float, now: float) -> None:
        self.began, self.until = now, now + seconds
        self._session, self._was_refused = session, False

    def is_over(self, now: float) -> bool:
        if not self._was_refused and self._session.refused:
            self._was_refused = True
            self.until = min(self.until, now + REFUSED_SECONDS)
        return now >= self.until


@contextlib.asynccontextmanager
async def limited(session: HubSession, seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError in the block after `seconds`, or soon after the hub has refused a session that no hub has
    welcomed."""
    deadline = ConnectDeadline(session, seconds, clock.monotonic())

    async def watch() -> None:
        while session.peer.state is PeerState.CONNECTING:
            await asyncio.sleep(LOOK_SECONDS)
            if deadline.is_over(clock.monotonic()):
                limit.reschedule(asyncio.get_running_loop().time())
                return

    async with asyncio.timeout(seconds) as limit:
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()

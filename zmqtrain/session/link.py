"""Be a node's network thread: a Peer on a channel, with a clock.

Rule 1: one asyncio loop in one thread owns the channel and the machine; others reach it through `call`.
Rule 2: what comes is handed to a `Listener`, in this thread; a listener never waits.
Rule 3: a lost hub costs what was on its way, nothing else: the machine says Hello until somebody answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from zmqtrain.averaging.delta import Encoded
from zmqtrain.core.errors import ChannelClosed, FramingError, JoinRefused, ModelMismatch, RunStopped, ZmqTrainError
from zmqtrain.core.interfaces import Channel
from zmqtrain.core.types import Buffer, Lane, Offer, Version
from zmqtrain.protocol.effects import Connect, Deliver, Disconnect, Expect, PeerEffect, Send, Serve, Withdraw
from zmqtrain.protocol.fencing import Verdict
from zmqtrain.protocol.framing import Assembler, ProtocolVersionError, decode_head, encode_message, split
from zmqtrain.protocol.messages import Chunk, Credit, Message, Publish, Quarantine, Roster, Snapshot, Stop, WorkUnit
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.session.alone import Alone
from zmqtrain.session.effect_queue import EffectQueue
from zmqtrain.session.listener import Listener
from zmqtrain.session.resuming import MOST_SPOILED, Resuming
from zmqtrain.session.sender import Sender
from zmqtrain.transport.address import say_addresses
from zmqtrain.transport.reservation import LinkShare, Use

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
REPORT_SECONDS = 1.0
ASSEMBLED_BYTES = 1 << 40
"""No bound of ours on what the hub may announce: the hub is trusted with the size of its own model."""


class HubLink:
    """The network thread of one node.

    open_channel: makes the channel, in the thread's loop; address: for messages.  share: what training may use of this
    machine's port: the hub, which is told, keeps to it on the way down, and both do on the way up.  meanwhile: what
    goes on without a hub, for messages too.
    """

    def __init__(
        self,
        open_channel: Callable[[], Channel],
        peer: Peer,
        address: str,
        listener: Listener,
        share: LinkShare | None = None,
        meanwhile: str = "Training goes on alone",
    ) -> None:
        self._meanwhile = meanwhile
        self.peer, self.address, self.listener = peer, address, listener
        self.share = share or LinkShare()
        self.bytes_received = self.publishes = 0
        self._sender = Sender(self.share.limit())
        self.trouble: tuple[str, str] = ("", "")
        """Why there is no hub now, as (code, sentence); empty when all is well."""
        self.undecided = False
        """Whether another run than that of the checkpoint is not said here yet, as it may end the node."""
        self._obstacle_said, self._met, self._alone = "", ("", ""), Alone()
        self._open_channel = open_channel
        self._outgoing: dict[int, tuple[Use, deque[tuple[bytes, Buffer]]]] = {}
        self._published: dict[int, int] = {}  # by sequence: the transfer, as long as it is outgoing
        self._assembler = Assembler(ASSEMBLED_BYTES)
        self._resuming = Resuming()
        self._transfer = 0
        self._founding = False
        self._reconnecting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._effects = EffectQueue[tuple[PeerEffect, list[Buffer]]](self._carry_out_one)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zmqtrain-network", daemon=True)

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Start the thread and say Hello; returns when the channel is open."""
        self._thread.start()
        self._ready.wait()

    def call(self, what: Callable[[], object], after_seconds: float = 0.0) -> None:
        """Have the network thread do something soon, or after some seconds; nothing happens once it has ended."""
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
        self.call(lambda: self._leave(reason))
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    @property
    def live(self) -> bool:
        """Whether the node takes part in the run now."""
        return self.peer.state is PeerState.LIVE

    @property
    def whereabouts(self) -> tuple[str, ...]:
        """Where the hub is looked for, in turn; the one place to which it has moved, if it has."""
        return self.peer.addresses if self.address in self.peer.addresses else (self.address,)

    @property
    def obstacle(self) -> str:
        """What keeps this node from its hub, where more is known than that nobody answers; else ""."""
        return self._met[1] or self.peer.obstacle

    @property
    def why_alone(self) -> str:
        """Why there is no hub now, as far as it is known."""
        return (self.obstacle or self.trouble[1] or "nobody answers").rstrip(".")

    def alone_seconds(self) -> float | None:
        """For how long this node has had no hub; None: it has one, or has never had one."""
        since = self._alone.since
        return None if since is None else time.monotonic() - since

    @property
    def refused(self) -> str:
        """Why the hub ended the last handshake with this node, as in Channel; "" once it is welcomed."""
        return self._met[0]

    @property
    def bytes_sent(self) -> int:
        """What was sent, payload and heads."""
        return self._sender.bytes_sent

    @property
    def link_rate(self) -> float:
        """The rate of this machine's port in bytes per second: as it was told here, or as the hub measured it; or 0."""
        return self.share.rate or self.peer.measured_rate

    # ------------------------------------------------------------------ network thread: out

    def _do(self, what: Callable[[], object]) -> None:
        try:
            what()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, ZmqTrainError):
            return self.listener.on_failed(error)
        logger.error("the network thread of %s failed", self.peer.name, exc_info=error)
        self.listener.on_failed(ZmqTrainError(f"the network thread of {self.peer.name} failed: {error!r}"))

    def send(self, message: Message) -> None:
        """Queue a control message."""
        self._sender.say(encode_message(message, self.peer.stamp()))

    def carry_out(self, effects: Sequence[PeerEffect], frames: list[Buffer] | None = None) -> None:
        """Do what the machine wishes, after what it wished before. frames: of the transfer that a Deliver is about."""
        self._effects.carry_out([(effect, frames or []) for effect in effects])

    def _carry_out_one(self, wish: tuple[PeerEffect, list[Buffer]]) -> None:
        effect, frames = wish
        match effect:
            case Send(message):
                self.send(message)
            case Connect(address):
                self._connect(address)
            case Expect(_, announcement):
                held = self._resuming.begin(announcement) if isinstance(announcement, Snapshot) else ()
                self.peer.held = "", 0
                self._assembler.expect(announcement, held)
            case Deliver():
                self.listener.on_delivered(effect, frames)
            case Serve():
                self._founding = True
                self.listener.on_founding()
            case Withdraw(sequence, reason, text):
                self._outgoing.pop(self._published.pop(sequence, -1), None)
                self.listener.on_withdrawn(sequence, reason, text)
            case Disconnect(_, reason, text):
                self._disconnect(reason, text)

    def publish(self, offer: Offer, base: Version, encoded: Encoded, score: float) -> None:
        """Announce an encoded offer; its chunks go as the hub grants."""
        if not self.live:
            self.listener.on_withdrawn(offer.sequence, "lost", "the connection was lost before it was sent")
            return
        transfer, sizes = self._stage(Use.DELTA, encoded.frames)
        self.publishes += 1
        self._published = {s: t for s, t in self._published.items() if t in self._outgoing} | {offer.sequence: transfer}
        codec, samples, steps = encoded.codec, offer.samples, offer.steps
        publish = Publish(
            transfer, offer.sequence, base, offer.fragment, codec, sizes, samples, steps, score, offer.dense
        )
        self.carry_out(self.peer.publish(publish))

    def send_founding(self, frames: Sequence[Buffer], moments: Sequence[Buffer] = (), digest: str = "") -> None:
        """Announce the parameters that the hub asked for, unless that hub is lost. moments: frames that go behind."""
        if not self._founding:
            return
        self._founding = False
        transfer, sizes = self._stage(Use.SNAPSHOT, [*frames, *moments])
        self.send(Snapshot(transfer, 0, sizes, moments=len(moments), digest=digest))

    def _stage(self, use: Use, frames: Sequence[Buffer]) -> tuple[int, tuple[int, ...]]:
        self._transfer += 1
        self._outgoing[self._transfer] = (use, deque(split(self._transfer, frames, self.peer.stamp(False))))
        return self._transfer, tuple(len(frame) for frame in frames)

    def _disconnect(self, reason: str, text: str) -> None:
        self._founding = False
        self._assembler.clear()
        self.peer.held = self._resuming.held
        self._outgoing.clear()
        self._sender.clear(control=False)
        if self.peer.state is PeerState.CLOSED:
            self.listener.on_failed(self._refusal(reason, text))
            return
        if self.trouble[0] != reason and not (self.undecided and reason == "run"):  # once, not with every attempt
            logger.warning("%s: %s. %s; trying again", self.peer.name, text.rstrip("."), self._meanwhile)
        self.trouble = (reason, text)
        self._connect()
        self.listener.on_changed()

    def _refusal(self, reason: str, text: str) -> ZmqTrainError:
        """Return what the owner of this link is told when the hub has refused it for good."""
        if reason == "stopped":
            return RunStopped(f"{self.peer.name} ends: {text}. What it had not sent is not in the run", reason)
        if self.peer.order is not None:
            return JoinRefused(f"{self.address} does not obey: {text}", reason)
        kind = ModelMismatch if reason == "model" else JoinRefused
        return kind(f"{self.peer.name} cannot join the run at {self.address}: {text}", reason)

    def _connect(self, address: str = "") -> None:
        """Connect anew, and drop what was to be sent."""
        self.address = address or self.address
        self._sender.clear(control=True)
        if self._reconnecting is None:
            self._sender.pause()
            self._reconnecting = asyncio.ensure_future(self._reconnect())

    def _move(self, address: str) -> None:
        if address == self.address or not self.trouble[0] or self._reconnecting is not None:
            return
        logger.info("%s looks for what was at %s at %s from now on", self.peer.name, self.address, address)
        self._connect(address)

    async def _reconnect(self) -> None:
        try:
            await self._channel.reconnect(self.address)
        finally:
            self._reconnecting = None
            self._sender.resume()

    def _leave(self, reason: str) -> None:
        self.carry_out(self.peer.leave(reason))
        self._stop.set()

    # ------------------------------------------------------------------ network thread: life

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            self._failed(error)
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._channel = self._open_channel()
        self._channel.watch(lambda: self._do(lambda: self.carry_out(self.peer.gone(time.monotonic()))))
        self._loop = asyncio.get_running_loop()
        lives = self._receive_forever(), self._sender.run(self._channel), self._follow_refusals()
        tasks = [asyncio.create_task(life) for life in lives]
        self.carry_out(self.peer.start(time.monotonic()))
        self._ready.set()
        try:
            await self._live(tasks)
            with contextlib.suppress(TimeoutError):  # the goodbye
                await asyncio.wait_for(self._sender.sent_control(), 1.0)
        finally:
            if self._reconnecting is not None:
                tasks.append(self._reconnecting)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.close()

    async def _live(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        report_at = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            self.carry_out(self.peer.tick(now))
            self._say_obstacle()
            self._say_alone(now)
            trains = self.live or self.peer.state is PeerState.APART
            if trains and now >= report_at and not self.peer.observer:
                report_at = now + REPORT_SECONDS
                self.send(self.listener.make_report())
            for task in tasks:
                if task.done():
                    task.result()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._stop.wait()

    async def _follow_refusals(self) -> None:
        """Keep what an attempt has met for the time of the next, which may be elsewhere; until one is welcomed."""
        with contextlib.suppress(ChannelClosed):
            while True:
                if self._channel.refused:
                    self._met = self._channel.refused, self._channel.obstacle
                    self.listener.on_changed()
                await self._channel.changed()

    def _say_obstacle(self) -> None:
        """Say once why a hub that was there does not let this node in again."""
        if self.trouble[0] and (obstacle := self.obstacle) not in ("", self._obstacle_said):
            logger.warning("%s does not come in again at %s: %s", self.peer.name, self.address, obstacle)
            self._obstacle_said = obstacle

    def _say_alone(self, now: float) -> None:
        """Say once a minute that a node of a run has no hub."""
        if seconds := self._alone.look(self.peer, now):
            where = say_addresses(self.whereabouts)
            text = "%s has had no hub for %.0f s, at %s: %s. %s; trying again"
            logger.warning(text, self.peer.name, seconds, where, self.why_alone, self._meanwhile)

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
                self.listener.on_failed(JoinRefused(f"{self.address}: {error}", "protocol"))
            except FramingError as error:
                self.carry_out(self.peer.distrust(str(error), time.monotonic()))

    def _take(self, lane: Lane, frames: list[Buffer]) -> None:
        (stamp, message), now = decode_head(frames[0]), time.monotonic()
        if (instead := self.peer.judge(stamp, message, now, lane is Lane.CONTROL)) is not None:
            return self.carry_out(instead)
        self.peer.saw(now)
        if lane is Lane.BULK:  # every message of the bulk lane belongs to a transfer, and opens the hub's window again
            self.send(Credit(getattr(message, "transfer", -1), 1))
        match message:
            case Chunk() if self._assembler.has(message):
                self.peer.dropped[Verdict.DOUBLE.value] += 1
            case Chunk(transfer):
                if len(frames) == 2 and transfer in self._assembler:
                    whole = self._assembler.add(message, frames[1])
                    self._resuming.add(message, frames[1])
                    if whole is not None:
                        self._take_whole(transfer, whole[1])
            case Credit(transfer, chunks):
                self._granted(transfer, chunks)
            case WorkUnit():
                self.listener.on_work(message)
            case Stop():
                self.listener.on_stopped()
            case _:
                before = self.peer.state
                self.carry_out(self.peer.receive(message, now))
                if isinstance(message, Quarantine):
                    self.listener.on_quarantined(message)
                if isinstance(message, Roster):  # it says what the hub has measured
                    self._sender.limit(self.share.limit(self.peer.measured_rate))
                if self.peer.state is not before:
                    self._said_where(before)

    def _take_whole(self, transfer: int, frames: list[Buffer]) -> None:
        if self._resuming.is_sound(transfer):
            return self.carry_out(self.peer.received(transfer), frames)
        if self._resuming.spoiled >= MOST_SPOILED:
            raise ZmqTrainError(
                f"{self.peer.name} has fetched the run's parameters {MOST_SPOILED} times from {self.address}, and each "
                "time other bytes came than were sent. Something on the way, or this PC's memory, spoils them: check "
                "both, and start this node again"
            )
        text = "%s fetches the run's parameters again: the bytes that came are not those that were sent"
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

    def _said_where(self, before: PeerState) -> None:
        if self.peer.state is not PeerState.CONNECTING:
            self._met = "", ""
        if self.live and self.trouble[0]:
            where = f", at version {self.peer.version}" if self.peer.version >= 0 else ""
            logger.info("%s federates again%s", self.peer.name, where)
            self.trouble, self._obstacle_said = ("", ""), ""
        logger.debug("%s: %s -> %s", self.peer.name, before.value, self.peer.state.value)
        self.listener.on_changed()

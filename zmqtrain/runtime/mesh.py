"""Be a live `Port`: one thread that holds a process's sockets to all others of its group.

Rule 1: each process listens with a ROUTER and connects a DEALER to each of the others: messages on the lane BULK, and
so in order; signs of life and words about who is lost on CONTROL.  Rule 2: a connection is known by its routing id,
"RANK@TOKEN", with the token that only the group was told: who has none is a stranger, counted and ignored, and no
message needs a head.  Rule 3: each process sends a sign of life back over every connection that others have made to it:
who hears it knows that its own messages arrive.  A rank of which none comes in time is sent to through the hub, from
then on, for good.  Rule 4: who is lost is lost for all (`protocol/vigil`, `protocol/groups`); nothing here ever waits.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum

from zmqtrain.errors import ChannelClosed, ChannelFull, FramingError, LocalProtocolError, PeerLost
from zmqtrain.protocol.framing import decode_message, encode_message
from zmqtrain.protocol.messages import Goodbye, Group, GroupLost, Heartbeat, Leave, WireProcess
from zmqtrain.protocol.vigil import BEAT_SECONDS, Accuse, CutOff, Declare, Vigil
from zmqtrain.runtime.hub_line import HubLine
from zmqtrain.runtime.outgoing import Outgoing, keep
from zmqtrain.runtime.reducer import MAX_OWN_BYTES, MAX_OWN_FRAMES, find_fold
from zmqtrain.transport.limits import check_message
from zmqtrain.transport.zmq_channel import DealerChannel, RouterChannel
from zmqtrain.types import HUB, MAX_FRAME_BYTES, Buffer, Clock, HubChunk, Lane, PeerId, PortListener

__all__ = ["LEFT", "MeshPort", "MeshStatistics", "Meeting"]

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
HUB_SILENCE_SECONDS = 3.0
"""A hub that is silent for so long is gone: the group lives on without it."""
LEAVE_SECONDS = 1.0
"""What somebody who has left has sent comes within this, or not at all."""
LEFT = "it has left the group"
"""Why a rank is lost that has closed its port."""
JOIN_SECONDS = 10.0
LEAVE_LOOK_SECONDS = 0.005
BEAT = encode_message(Heartbeat())


class _State(Enum):
    OPENING = "opening"
    DIRECT = "direct"
    RELAYED = "through the hub"
    LOST = "lost"


class _Way:
    """The way to one other rank. received: messages that came from it directly; due: how many it says it has sent."""

    def __init__(self, name: str, address: str, channel: DealerChannel) -> None:
        self.name, self.address, self.channel, self.state = name, address, channel, _State.OPENING
        self.control, self.bulk = Outgoing(channel, Lane.CONTROL), Outgoing(channel, Lane.BULK)
        self.waiting: list[list[Buffer]] = []  # until it is known how to send
        self.sent = self.received = 0
        self.connected = False  # from there to here
        self.due: int | None = None
        self.left_at: float | None = None


@dataclass(frozen=True)
class MeshStatistics:
    """Running figures of a port. bytes: of messages, whole.  relayed: ranks that are sent to through the hub.

    strangers: messages that were ignored because nobody of the group could have sent them.
    """

    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    relayed: tuple[int, ...]
    strangers: int


@dataclass(frozen=True)
class Meeting:
    """What a port begins with: the socket at which others reach it, its line to the hub, and the group that has met
    there."""

    router: RouterChannel
    line: HubLine
    group: Group


class MeshPort:
    """A process's way to the others of its group (a `HubPort`). Made by `zmqtrain.runtime.rendezvous.open_port`.

    meet: makes the sockets and meets the others, in the port's loop.  direct_seconds: a rank that is not reached within
    this is sent to through the hub.
    """

    def __init__(self, meet: Callable[[], Coroutine[None, None, Meeting]], direct_seconds: float) -> None:
        self._meet, self._direct_seconds = meet, direct_seconds
        self._listener: PortListener | None = None
        self._untold: deque[Callable[[PortListener], object]] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._calls_lock = threading.Lock()
        self._woken = self._closing = self._cut_off = self._reduces = self._hub_told = False
        self._linger_seconds = 0.0
        self._ways: dict[int, _Way] = {}
        self._ranks: dict[PeerId, int] = {}  # by the id that only a process of the group can have here
        self._closings: set[asyncio.Task[None]] = set()
        self._messages_sent = self._messages_received = self._bytes_sent = self._bytes_received = 0
        self._strangers = 0
        self._beat_at = 0.0
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="zmqtrain-mesh", daemon=True)

    # ------------------------------------------------------------------ any thread

    def open(self) -> None:
        """Start the thread, and wait until the group has met and it is known how to reach each of it.

        Raises what `meet` raises.
        """
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # somebody gave up waiting
            self.close(0.0)
            raise
        if self._failure is not None:
            raise self._failure
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        """Which of the group this process is, from 0."""
        return self._group.rank

    @property
    def names(self) -> tuple[str, ...]:
        """What people call the processes, by rank."""
        return tuple(member[0] for member in self._group.members)

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._group.group

    @property
    def clock(self) -> Clock:
        """The time of this machine."""
        return time

    def start(self, listener: PortListener) -> None:
        """Tell this listener what happens from now on, and what came before it."""
        self.call(lambda: self._start(listener))

    def call(self, what: Callable[[], object]) -> None:
        """Have the port's thread do something soon; from any thread. Calls are done in order; none after `close`."""
        with self._calls_lock:
            self._calls.append(what)
            wake, self._woken = not self._woken, True
        if wake:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._do_calls)

    def close(self, linger_seconds: float = 1.0) -> None:
        """Send what is queued for at most `linger_seconds`, tell the others that this process leaves, end the thread.

        From any thread; twice is once.
        """
        atexit.unregister(self.close)
        self.call(lambda: self._begin_to_close(linger_seconds))
        if threading.current_thread() is not self._thread:
            self._thread.join(linger_seconds + JOIN_SECONDS)

    def statistics(self) -> MeshStatistics:
        """Return the running figures."""
        return MeshStatistics(
            self._messages_sent,
            self._messages_received,
            self._bytes_sent,
            self._bytes_received,
            tuple(rank for rank, way in self._ways.items() if way.state is _State.RELAYED),
            self._strangers + self._router.strangers,
        )

    # ------------------------------------------------------------------ the port's thread: out

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Queue one message to another rank, in order with all others to it; see `Port.send`.

        Raises LocalProtocolError in another thread, for a rank that is not one of the others, and for a message that
        cannot be sent.
        """
        self._check_thread()
        way = self._ways.get(rank)
        if way is None:
            raise LocalProtocolError(f"rank {self.rank} of {len(self.names)} has no way to rank {rank}")
        size = check_message(frames)
        if self._cut_off or way.state is _State.LOST:
            return
        self._messages_sent += 1
        self._bytes_sent += size
        if way.state is _State.DIRECT:
            way.sent += 1
            way.bulk.send(frames)
        elif way.state is _State.RELAYED:
            self._line.relay(rank, frames)
        else:
            way.waiting.append(keep(frames))

    def reduce(self, chunk: HubChunk, frames: Sequence[Buffer]) -> None:
        """Have the hub reduce a chunk with those of all other ranks; see `HubPort.reduce`.

        Raises LocalProtocolError in another thread and for frames that cannot be sent so, ConfigError for an operation
        or a dtype that the hub does not reduce.
        """
        self._check_thread()
        size = check_message(frames)
        values = memoryview(frames[-1]).nbytes
        _, dtype = find_fold(chunk.op, chunk.dtype)
        if not 0 < values <= MAX_FRAME_BYTES or values % dtype.itemsize or not 0 <= chunk.key < 1 << 63:
            raise LocalProtocolError(f"a chunk with key {chunk.key} of {values} bytes, which are no values of {dtype}")
        if len(frames) > 1 + MAX_OWN_FRAMES or size - values > MAX_OWN_BYTES:
            raise LocalProtocolError(f"{size - values} bytes in {len(frames) - 1} frames go to the hub with a chunk")
        if self._cut_off:
            return
        self._reduces = True
        if not self._line.there:
            return self._lose_hub()
        self._messages_sent += 1
        self._bytes_sent += size
        self._line.fold(chunk, frames, len(self.names))

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread.ident:
            raise LocalProtocolError("a port sends in its own thread: use call")

    def _tell_all(self, message: GroupLost | Leave) -> None:
        head = encode_message(message)
        for way in self._ways.values():
            if way.state is _State.DIRECT:
                way.control.send([head])

    def _beat(self) -> None:
        """Send a sign of life over each connection that others have made to this process."""
        self._line.beat()
        for rank, way in self._ways.items():
            if way.state is _State.LOST:
                continue
            try:
                self._router.send(self._peer(rank), Lane.CONTROL, [BEAT])
                way.connected = True
                self._vigil.reached(rank, True)
            except PeerLost:
                if way.connected:
                    self._vigil.reached(rank, False)
            except ChannelFull:  # it does not read: it will be found silent
                pass

    def _peer(self, rank: int) -> PeerId:
        """The id with which a rank connects to this process."""
        return PeerId(f"{rank}@{self._group.members[self.rank][3]}")

    # ------------------------------------------------------------------ the port's thread: in

    async def _receive_forever(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                peer, lane, frames = await self._router.receive()
                rank = self._ranks.get(peer)
                if rank is None:
                    self._strangers += 1
                    continue
                self._vigil.heard(rank)
                if lane is Lane.BULK:
                    way = self._ways[rank]
                    way.received += 1
                    if way.left_at is not None:
                        way.left_at = self._vigil.attended
                    self._on_message(rank, frames)
                    self._lose_if_all_came(rank, way)
                else:
                    self._on_word(rank, frames[0])

    async def _hear_forever(self, rank: int, way: _Way) -> None:
        """Take the signs of life that come back over the connection to another rank."""
        with contextlib.suppress(ChannelClosed):
            while True:
                await way.channel.receive()
                self._vigil.heard(rank)
                if way.state is _State.OPENING:
                    self._go(rank, way, _State.DIRECT)

    def _on_message(self, rank: int, frames: list[Buffer]) -> None:
        self._messages_received += 1
        self._bytes_received += sum(len(frame) for frame in frames)
        self._tell(lambda listener: listener.on_message(rank, frames))

    def _on_word(self, rank: int, head: Buffer) -> None:
        try:
            message = decode_message(head)
        except FramingError:
            self._strangers += 1
            return
        way = self._ways[rank]
        match message:
            case Leave(messages):
                way.due, way.left_at = messages, self._vigil.attended
                self._vigil.forget(rank)
                self._lose_if_all_came(rank, way)
            case GroupLost(lost, why):
                if self._line.there:  # it judges
                    self._line.say(message)
                elif lost == self.rank or lost in self._ways:
                    self._lose(lost, why)

    def on_relayed(self, rank: int, frames: list[Buffer]) -> None:
        """See HubListener."""
        way = self._ways.get(rank)
        if frames and (rank == HUB or (way is not None and way.state is not _State.LOST)):
            self._on_message(rank, frames)

    def on_hub_heard(self) -> None:
        """See HubListener."""
        self._vigil.heard_hub()

    def on_hub_gone(self, why: str) -> None:
        """See HubListener."""
        self._vigil.hub = False
        if self._closing:
            return
        logger.warning("%s: the hub is gone (%s); the group goes on without it", self._here, why)
        for rank, way in self._ways.items():
            if way.state is _State.RELAYED:
                self._declare(rank, f"it was reached through the hub only, which is gone: {why}")
        if self._reduces:
            self._lose_hub()

    def on_group_lost(self, lost: GroupLost) -> None:
        """See HubListener."""
        way = self._ways.get(lost.rank)
        if lost.rank == self.rank:
            self._lose(lost.rank, lost.why)
        elif way is not None and lost.left:
            if way.left_at is None:
                way.left_at = self._vigil.attended
            self._vigil.forget(lost.rank)
        elif way is not None:
            self._lose(lost.rank, lost.why)

    def _start(self, listener: PortListener) -> None:
        self._listener = listener
        while self._untold:
            self._tell(self._untold.popleft())

    def _tell(self, tell: Callable[[PortListener], object]) -> None:
        if self._listener is None:
            self._untold.append(tell)
        elif not self._closing:
            self._do(lambda: tell(self._listener))  # type: ignore[arg-type]

    def _do_calls(self) -> None:
        with self._calls_lock:
            self._woken = False
            count = len(self._calls)
        for _ in range(count):
            what = self._calls.popleft()
            if not self._closing:
                self._do(what)

    def _do(self, what: Callable[[], object]) -> None:
        try:
            what()
        except Exception:
            logger.exception("%s: what its port was to do failed", self._here)

    # ------------------------------------------------------------------ the port's thread: who is there

    def _go(self, rank: int, way: _Way, state: _State) -> None:
        """Send to a rank so from now on, first what has waited."""
        way.state = state
        if state is _State.DIRECT:
            self._vigil.watch(rank)
            for frames in way.waiting:
                way.sent += 1
                way.bulk.send(frames)
        else:
            logger.info(
                "%s does not reach %s (rank %d) at %s within %g s: its messages to it go through the hub",
                self._here,
                way.name,
                rank,
                way.address,
                self._direct_seconds,
            )
            for frames in way.waiting:
                self._line.relay(rank, frames)
        way.waiting.clear()

    def _lose_if_all_came(self, rank: int, way: _Way) -> None:
        if way.due is not None and way.received >= way.due:
            self._lose(rank, LEFT)

    def _declare(self, rank: int, why: str) -> None:
        self._tell_all(GroupLost(rank, why))
        self._lose(rank, why)

    def _lose(self, rank: int, why: str) -> None:
        """Take a rank for lost (the own one: this process is cut off), and tell the listener, once."""
        if self._cut_off or self._closing:
            return
        if rank == self.rank:
            self._cut_off = True
            logger.warning("%s is cut off from its group: %s", self._here, why)
        else:
            way = self._ways[rank]
            if way.state is _State.LOST:
                return
            way.state = _State.LOST
            way.waiting.clear()
            self._ranks.pop(self._peer(rank), None)
            self._vigil.forget(rank)
            self._line.forget(rank)
            self._close_way(way)
            logger.info("%s: %s (rank %d) is lost: %s", self._here, way.name, rank, why)
        self._tell(lambda listener: listener.on_lost(rank, why))

    def _lose_hub(self) -> None:
        """Say that the hub is gone to who has it reduce, once."""
        if not self._hub_told:
            self._hub_told = True
            self._tell(lambda listener: listener.on_lost(HUB, "the hub is gone"))

    def _close_way(self, way: _Way) -> None:
        way.control.drop()
        way.bulk.drop()
        closing = asyncio.get_running_loop().create_task(way.channel.close(0.0))
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)

    def _tick(self, now: float) -> None:
        for finding in self._vigil.tick(now):
            match finding:
                case Accuse(rank, why):
                    self._line.say(GroupLost(rank, why))
                case Declare(rank, why):
                    self._declare(rank, why)
                case CutOff(why):
                    self._lose(self.rank, why)
        if self._line.there and self._vigil.hub_silence > HUB_SILENCE_SECONDS:
            self._line.give_up(self, f"silent for {self._vigil.hub_silence:.1f} s")
        opening = [rank for rank, way in self._ways.items() if way.state is _State.OPENING]
        if now >= self._beat_at or opening:
            self._beat_at = now + BEAT_SECONDS
            self._beat()
        for rank, way in self._ways.items():
            if way.state is _State.OPENING and self._vigil.attended > self._direct_seconds:
                self._go(rank, way, _State.RELAYED)
            elif way.left_at is not None and self._vigil.attended - way.left_at > LEAVE_SECONDS:
                self._lose(rank, LEFT)
        if not opening:
            self._ready.set()
        if self._listener is not None:
            self._tell(lambda listener: listener.on_tick(now))

    # ------------------------------------------------------------------ the port's thread: life

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                logger.error("the port of %s failed", self._here, exc_info=error)
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._meeting = asyncio.ensure_future(self._meet())
        meeting = await self._meeting
        self._router, self._line, self._group = meeting.router, meeting.line, meeting.group
        self._here = f"{self._group.members[self.rank][0]} (rank {self.rank} of {self._group.group!r})"
        self._vigil = Vigil(time.monotonic())
        tasks = [asyncio.create_task(self._receive_forever()), asyncio.create_task(self._line.run(self))]
        try:
            for rank, member in enumerate(self._group.members):
                if rank != self.rank:
                    way = self._ways[rank] = self._connect(rank, member)
                    self._ranks[self._peer(rank)] = rank
                    tasks.append(asyncio.create_task(self._hear_forever(rank, way)))
            while not self._closing:
                self._tick(time.monotonic())
                for task in tasks:
                    if task.done():
                        task.result()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), TICK_SECONDS)
            await self._leave()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *self._closings, return_exceptions=True)
            for way in self._ways.values():
                await way.channel.close(self._linger_seconds)
            await self._line.close(self._linger_seconds)
            await self._router.close(self._linger_seconds)

    def _connect(self, rank: int, member: WireProcess) -> _Way:
        name, address, key, token = member
        peer, server_key = PeerId(f"{self.rank}@{token}"), key.encode() or None
        channel = DealerChannel.connect(address, peer=peer, server_key=server_key, beside=self._router)
        return _Way(name, address, channel)

    def _begin_to_close(self, linger_seconds: float) -> None:
        self._closing, self._linger_seconds = True, linger_seconds
        self._meeting.cancel()  # unless it has met
        self._stop.set()

    async def _leave(self) -> None:
        """Send what is queued, then say goodbye to all; meanwhile show that this process lives."""
        until = time.monotonic() + self._linger_seconds
        direct = [way for way in self._ways.values() if way.state is _State.DIRECT]

        async def wait(done: Callable[[], bool]) -> None:
            while not done() and time.monotonic() < until:
                self._tick(time.monotonic())
                await asyncio.sleep(LEAVE_LOOK_SECONDS)

        relayed = self._line.there and not self._cut_off
        await wait(lambda: all(way.bulk.empty for way in direct) and (not relayed or self._line.relayed_all))
        for way in direct:
            if way.state is _State.DIRECT:
                way.control.send([encode_message(Leave(way.sent))])
        self._line.say(Goodbye(LEFT))
        await wait(lambda: self._line.all_sent and all(way.control.empty for way in direct))
        self._linger_seconds = max(0.0, until - time.monotonic())

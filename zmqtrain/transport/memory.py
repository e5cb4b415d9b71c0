"""Be the transport's public double: a hub and its nodes in one event loop, with modelled links and faults on demand.

Rule 1: this channel refuses what the real one refuses, and loses what that may lose: all that is queued or in flight
when a connection ends, and nothing else.  In order within a lane, never twice.
Rule 2: time is the loop's time: under `session.virtual.VirtualClockLoop` a test of minutes takes milliseconds, exactly.
Rule 3: the star of the model is ports and a switch that forwards as it receives: each port, per direction, carries one
message after the other at its rate; CONTROL and BULK do not wait for each other, as on two connections.

    node --tx port--> switch --hub's rx port--> hub          node <--rx port-- switch <--hub's tx port-- hub
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.core.errors import ChannelClosed, ChannelFull, ConfigError, PeerLost
from zmqtrain.core.types import Buffer, Lane, PeerId
from zmqtrain.transport.pacing import COPY_BELOW_BYTES, Fairness, Gate, check_message, check_peer_id


@dataclass(frozen=True, slots=True)
class LinkModel:
    """What every port of the star can do: its rate each way, and the time from a sender to its receiver."""

    bits_per_second: float = 1e9
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bits_per_second > 0 and self.latency_seconds >= 0):
            raise ConfigError(f"a link needs a rate above 0 and a latency of at least 0, got {self}")

    def seconds(self, size: int) -> float:
        return 8 * size / self.bits_per_second


class _Port:
    """One direction of one lane of one machine's port: free again at a time."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0

    def reserve(self, now: float, seconds: float) -> float:
        """Occupy the port for `seconds`, as soon as it is free; return when that starts."""
        start = max(now, self.free_at)
        self.free_at = start + seconds
        return start


_Ports = dict[Lane, _Port]


class Machine:
    """The port of one machine of the star: what all hubs and nodes there send and receive shares its rate.

    What they say to each other takes no time.
    """

    def __init__(self) -> None:
        self.tx: _Ports = {lane: _Port() for lane in Lane}
        self.rx: _Ports = {lane: _Port() for lane in Lane}


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one message. delays: how many seconds later each copy of it arrives; breaks: it ends its
    connection instead; flipped: a bit of it is another."""

    delays: tuple[float, ...] = (0.0,)
    breaks: bool = False
    flipped: bool = False


class Noise(Protocol):
    """Decides what becomes of the messages of one node's connection, in the order in which they are sent."""

    def fate(self, payload_up: bool) -> Fate:
        """Return what becomes of the next message. payload_up: it is a payload toward the hub."""


class _Stream:
    """One lane in one direction of one connection: what was sent and not yet taken by the receiver.

    links: of the sender and of the receiver; None delivers at once.  free_heads: heads take the latency alone.
    paused: what is sent is held, as on a wire that is cut.
    """

    def __init__(self, lane: Lane, hub: MemoryHub, up: bool, channel: MemoryChannel) -> None:
        links, machines = (hub.link, hub.hub_link or hub.link), (channel.machine, hub.machine)
        if channel.machine is hub.machine:
            links = (None, None)
        self._tx_link, self._rx_link = links if up else links[::-1]
        sender, receiver = machines if up else machines[::-1]
        self._tx, self._rx = sender.tx[lane], receiver.rx[lane]
        self.lane, self.peer, self._hub, self._up, self._channel = lane, channel.peer, hub, up, channel
        self._receiver: MemoryHub | MemoryChannel = hub if up else channel
        self._wire: list[tuple[int, list[Buffer], int]] = []  # not sent on: there was no connection, or it paused
        self._sent = 0
        self._moving = 0
        self._held = 0  # sent, and not yet taken by the receiver
        self.connected, self.stopped, self.lost = hub._accepts(channel), False, False
        self.paused = channel.peer in hub._paused
        self.changed = Gate()  # there is room, or nothing left in flight

    @property
    def full(self) -> bool:
        return self._held >= self._hub._limit

    @property
    def empty(self) -> bool:
        return not (self._wire or self._moving)

    def put(self, frames: Sequence[Buffer], size: int) -> None:
        received = [_as_received(frame) for frame in frames]
        if self._hub.free_heads:
            size = 0 if self.lane is Lane.CONTROL else size - len(frames[0])
        self._held += 1
        noise = self._channel.noise
        if noise is None or not self.connected:
            self._go(received, size)
            return
        is_payload = self._up and len(received) == 2
        fate = noise.fate(is_payload)
        if fate.breaks:
            asyncio.get_running_loop().call_soon(self._channel._break)
            return
        if fate.flipped and is_payload:
            received[1] = _flipped(received[1])
        self._held += len(fate.delays) - 1
        for late in fate.delays:
            if late:
                asyncio.get_running_loop().call_later(late, self._go, received, size)
            else:
                self._go(received, size)

    def _go(self, frames: list[Buffer], size: int) -> None:
        self._sent += 1
        if self.connected and not self.paused:
            self._transmit(self._sent, frames, size)
        elif not self.stopped:
            self._wire.append((self._sent, frames, size))

    def connect(self) -> None:
        """Send what was queued while there was no connection, or while it paused."""
        self.connected, self.paused = True, False
        waiting, self._wire = self._wire, []
        for number, frames, size in sorted(waiting, key=lambda one: one[0]):
            self._transmit(number, frames, size)

    def taken(self) -> None:
        self._held -= 1
        self.changed.open()

    def stop(self, lost: bool) -> None:
        """Deliver nothing more; lost: what has arrived and was not yet taken is lost too."""
        self.stopped, self.lost = True, lost
        self._wire.clear()
        self._moving = 0
        self.changed.open()

    def _transmit(self, number: int, frames: list[Buffer], size: int) -> None:
        if self._tx_link is None or self._rx_link is None:
            return None if self.stopped else self._receiver._deliver(self, frames)
        self._moving += 1
        loop, seconds = asyncio.get_running_loop(), self._tx_link.seconds(size)
        latency = (self._hub.link or self._tx_link).latency_seconds
        if self.lane is Lane.CONTROL and self._hub.free_heads:
            loop.call_at(loop.time() + latency, self._arrive, number, frames, size)
            return None
        start = self._tx.reserve(loop.time(), seconds)
        loop.call_at(start + latency, self._reach, number, frames, size, start + latency + seconds)
        return None

    def _reach(self, number: int, frames: list[Buffer], size: int, last_byte_at: float) -> None:
        if self.stopped or self.paused:
            return self._arrive(number, frames, size)
        assert self._rx_link is not None
        loop, seconds = asyncio.get_running_loop(), self._rx_link.seconds(size)
        forwarded_at = self._rx.reserve(loop.time(), seconds) + seconds
        loop.call_at(max(forwarded_at, last_byte_at), self._arrive, number, frames, size)

    def _arrive(self, number: int, frames: list[Buffer], size: int) -> None:
        if self.stopped:
            return
        self._moving -= 1
        if self.paused:
            self._wire.append((number, frames, size))
            return
        self._receiver._deliver(self, frames)
        if self.empty:
            self.changed.open()


def _flipped(frame: Buffer) -> Buffer:
    changed = bytearray(frame)
    changed[len(changed) // 2] ^= 1 << len(changed) % 8
    return bytes(changed)


def _as_received(frame: Buffer) -> Buffer:
    """Return what the network would hand out: a copy of a small frame, a read-only view of a large one."""
    if isinstance(frame, bytes):
        return frame
    view = memoryview(frame)
    return bytes(view) if view.nbytes < COPY_BELOW_BYTES else view.cast("B").toreadonly()


async def _drain(streams: Sequence[_Stream], linger_seconds: float) -> None:
    """Wait until what was sent has arrived, for at most `linger_seconds`; then stop the streams."""
    try:
        async with asyncio.timeout(linger_seconds):
            for stream in streams:
                while stream.connected and not stream.stopped and not stream.empty:
                    await stream.changed.wait()
    except TimeoutError:
        pass
    finally:
        for stream in streams:
            stream.stop(stream.lost)


class MemoryChannel:
    """A node's end (a `Channel`); made by `MemoryHub.connect`.

    `send` waits while the lane holds the hub's `queue_messages`.  With the connection cut, it queues, as a socket does
    that tries to reconnect; what it queued flows when the hub restores the peer.
    """

    refused = obstacle = ""  # nobody is refused here

    def __init__(self, hub: MemoryHub, peer: PeerId, machine: Machine | None = None) -> None:
        self.peer, self.machine = peer, machine or Machine()
        self._hub = hub
        self._inbox: dict[Lane, deque[tuple[_Stream, list[Buffer]]]] = {lane: deque() for lane in Lane}
        self._incoming, self._news = Gate(), Gate()
        self._fairness = Fairness()
        self._closed = False
        self._attempt = 0
        self._told: Callable[[], None] = lambda: None
        self.noise: Noise | None = None
        """What becomes of its messages; None: all arrive."""
        self._open()

    def _open(self) -> None:
        """Make new streams both ways, connected unless the hub has cut this peer off (or is closed)."""
        self._up = {lane: _Stream(lane, self._hub, True, self) for lane in Lane}
        self._down = {lane: _Stream(lane, self._hub, False, self) for lane in Lane}

    def _deliver(self, stream: _Stream, frames: list[Buffer]) -> None:
        self._inbox[stream.lane].append((stream, frames))
        self._incoming.open()

    def _lose(self, arrived: bool = True) -> None:
        """Lose the connection and all that is queued on it, both ways; with `arrived`, what was not yet taken too."""
        old = [*self._up.values(), *self._down.values()]
        self._open()
        for stream in old:
            stream.stop(lost=arrived)

    def _break(self) -> None:
        """Lose the connection, as this end notices at once."""
        if not self._closed:
            self._lose()
            self._told()

    def _connect(self) -> None:
        for stream in (*self._up.values(), *self._down.values()):
            if not stream.connected or stream.paused:
                stream.connect()

    def _pause(self) -> None:
        for stream in (*self._up.values(), *self._down.values()):
            stream.paused = True

    async def send(self, lane: Lane, frames: Sequence[Buffer]) -> None:
        """Send one message; wait while the lane is full.

        Raise ChannelClosed, and LocalProtocolError for a message that no channel carries.  One that still waits when
        `reconnect` is called is lost like all that is queued.
        """
        size, attempt = check_message(frames), self._attempt
        await self._fairness.turn()
        while not self._closed and self._attempt == attempt:
            stream = self._up[lane]
            if not stream.full:
                stream.put(frames, size)
                return
            await stream.changed.wait()
        if self._closed:
            raise ChannelClosed(f"the channel of {self.peer} is closed")

    async def receive(self) -> tuple[Lane, list[Buffer]]:
        """Return the next message of either lane, CONTROL first; raise ChannelClosed."""
        await self._fairness.turn()
        while not self._closed:
            for lane in Lane:
                while self._inbox[lane]:
                    stream, frames = self._inbox[lane].popleft()
                    if not stream.lost:
                        stream.taken()
                        return lane, frames
            await self._incoming.wait()
        raise ChannelClosed(f"the channel of {self.peer} is closed")

    def watch(self, told: Callable[[], None]) -> None:
        """Have `told` called when the hub is closed: a cut is not seen, as with a cable."""
        self._told = told

    async def changed(self) -> None:
        """See Channel: wait until this one is closed."""
        if not self._closed:
            await self._news.wait()
        raise ChannelClosed(f"the channel of {self.peer} is closed")

    async def reconnect(self, address: str = "") -> None:
        """Drop the connection and all that is queued on it; connect again, or as soon as the hub restores this peer.

        address: has no meaning here, where there is one hub.
        """
        if self._closed:
            raise ChannelClosed(f"the channel of {self.peer} is closed")
        self._attempt += 1
        self._hub._register(self)
        self._lose()

    async def close(self, linger_seconds: float = 1.0) -> None:
        """Wake who waits here, send what is queued for at most `linger_seconds`, then close; twice is once."""
        if self._closed:
            return
        self._closed = True
        self._hub._unregister(self)
        self._incoming.open()
        self._news.open()
        for stream in self._up.values():
            stream.changed.open()
        for stream in self._down.values():
            stream.stop(lost=True)
        await _drain(list(self._up.values()), linger_seconds)


class MemoryHub:
    """The hub's end (a `HubChannel`), and the hands of a test on the network; `connect` makes a node's end.

    link: of every port; None delivers at once.  hub_link: of the hub's port, if it is another; the latency is link's.
    free_heads: heads and control messages take the latency alone, because they are small; only payloads take a port's
    time.  machine: where the hub is; None: on one of its own.  address: by which it is known.
    queue_messages: how many messages a lane holds, per node and direction, from `send` to the receiver's `receive`; a
    node's `send` then waits, the hub's raises ChannelFull.
    """

    def __init__(
        self,
        link: LinkModel | None = None,
        *,
        queue_messages: int = 64,
        hub_link: LinkModel | None = None,
        free_heads: bool = False,
        machine: Machine | None = None,
        address: str = "memory://hub",
    ) -> None:
        if queue_messages < 1:
            raise ConfigError(f"queue_messages must be at least 1, got {queue_messages}")
        self.link, self.hub_link, self.free_heads, self._limit = link, hub_link, free_heads, queue_messages
        self.machine, self.address = machine or Machine(), address
        self._channels: dict[PeerId, MemoryChannel] = {}
        self._cut: set[PeerId] = set()
        self._paused: set[PeerId] = set()
        self._inbox: deque[tuple[_Stream, list[Buffer]]] = deque()
        self._incoming = Gate()
        self._fairness = Fairness()
        self._closed = False

    def connect(self, peer: PeerId, machine: Machine | None = None) -> MemoryChannel:
        """Return a node's end; a second one of the same name takes the connection over, as at the real hub.

        machine: where the node is; None: on one of its own.

        Raise ConfigError for a name that the real hub would ignore, ChannelClosed after `close`.
        """
        check_peer_id(peer)
        if self._closed:
            raise ChannelClosed("the hub is closed")
        before = self._channels.pop(peer, None)
        if before is not None:
            before._lose()
        channel = MemoryChannel(self, peer, machine)
        self._channels[peer] = channel
        if self._accepts(channel):
            channel._connect()
        return channel

    def cut(self, peer: PeerId) -> None:
        """Lose the connection of `peer`, and all that is queued on it, both ways; keep it cut off until `restore`."""
        self._cut.add(peer)
        if peer in self._channels:
            self._channels[peer]._lose()

    def restore(self, peer: PeerId) -> None:
        """Let `peer` be connected again: its channel is at once, and what it queued since the cut flows."""
        self._cut.discard(peer)
        if peer in self._channels:
            self._channels[peer]._connect()

    def pause(self, peer: PeerId) -> None:
        """Hold all that is sent to and from `peer` until `resume`, as TCP does on a wire that is unplugged."""
        self._paused.add(peer)
        if peer in self._channels:
            self._channels[peer]._pause()

    def resume(self, peer: PeerId) -> None:
        """Let messages of `peer` pass again, those that were held first."""
        self._paused.discard(peer)
        if peer in self._channels and self._accepts(self._channels[peer]):
            self._channels[peer]._connect()

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Buffer]) -> None:
        """Send one message; never waits.

        Raise PeerLost, ChannelFull, ChannelClosed, and LocalProtocolError for a message that no channel carries.
        """
        size = check_message(frames)
        if self._closed:
            raise ChannelClosed("the hub is closed")
        if peer not in self._channels or peer in self._cut:
            raise PeerLost(peer)
        stream = self._channels[peer]._down[lane]
        if stream.full:
            raise ChannelFull(f"the {lane.name} lane to {peer} holds {self._limit} messages")
        stream.put(frames, size)

    async def receive(self) -> tuple[PeerId, Lane, list[Buffer]]:
        """Return the next message of any peer, in the order of arrival; raise ChannelClosed."""
        await self._fairness.turn()
        while not self._closed:
            while self._inbox:
                stream, frames = self._inbox.popleft()
                if not stream.lost:
                    stream.taken()
                    return stream.peer, stream.lane, frames
            await self._incoming.wait()
        raise ChannelClosed("the hub is closed")

    def dismiss(self, peer: PeerId) -> None:
        """Drop what has arrived of a peer and was not received."""
        for stream, _ in self._inbox:
            if stream.peer == peer:
                stream.taken()
        self._inbox = deque(one for one in self._inbox if one[0].peer != peer)

    async def close(self, linger_seconds: float = 1.0) -> None:
        """Wake who waits here, send what is queued for at most `linger_seconds`, then close; twice is once.

        Nodes are not told, as at the real hub: they receive what has arrived, and what they send queues up.
        """
        if self._closed:
            return
        self._closed = True
        self._incoming.open()
        down = [stream for channel in self._channels.values() for stream in channel._down.values()]
        await _drain(down, linger_seconds)
        for channel in self._channels.values():
            channel._lose(arrived=False)
            asyncio.get_running_loop().call_soon(channel._told)
        self._channels.clear()

    def _accepts(self, channel: MemoryChannel) -> bool:
        return not self._closed and channel.peer not in self._cut and self._channels.get(channel.peer) is channel

    def _register(self, channel: MemoryChannel) -> None:
        if not self._closed:
            before = self._channels.get(channel.peer)
            self._channels[channel.peer] = channel
            if before is not None and before is not channel:
                before._lose()

    def _unregister(self, channel: MemoryChannel) -> None:
        if self._channels.get(channel.peer) is channel:
            del self._channels[channel.peer]

    def _deliver(self, stream: _Stream, frames: list[Buffer]) -> None:
        self._inbox.append((stream, frames))
        self._incoming.open()

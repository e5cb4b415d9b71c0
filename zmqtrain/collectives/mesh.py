"""The live `Port` of a process: one thread that holds its sockets to all other processes of its group.

Rule 1: each process listens with a ROUTER (`GroupListenSocket`) and connects a DEALER to each of the others
(`PeerRoute`): messages on BULK, as they are and in order; heartbeats and losses on CONTROL.  Rule 2: each process sends
heartbeats back over every connection made to it: a process that hears one knows that its own messages arrive.
Rule 3: a rank whose heartbeats do not come back in time is reached through the hub from then on, for good.
Rule 4: a lost rank is lost for all: `FailureDetector` notices, the hub judges (`Groups`); without a hub a process tells
the others itself.  A rank that leaves is lost when all its messages are received.
Rule 5: nothing here waits, and the listener is called in the thread only, never after the port began to close.
Rule 6: a route is direct or through the hub, in order either way.  It is chosen once: messages sent before wait for it,
and it never changes, because a change would mix their order.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from zmqtrain.collectives.group_connection import GroupConnection, Meeting, Rendezvous, keep
from zmqtrain.collectives.reducer import check_chunk
from zmqtrain.core.errors import (
    ChannelClosed,
    ChannelFull,
    ConfigError,
    FramingError,
    LocalProtocolError,
    PeerLost,
    ZmqTrainError,
)
from zmqtrain.core.interfaces import Clock, PortListener
from zmqtrain.core.types import HUB, Buffer, HubChunk, Lane, PeerId
from zmqtrain.protocol.failure_detector import BEAT_SECONDS, Accuse, CutOff, Declare, FailureDetector
from zmqtrain.protocol.framing import decode_message, encode_message
from zmqtrain.protocol.groups import MAX_PROCESSES
from zmqtrain.protocol.messages import GroupLost, Heartbeat, JoinGroup, Leave, Message
from zmqtrain.transport.pacing import Gate, check_message
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel
from zmqtrain.transport.zmq_keys import GivenKeys, GivenServerKey, read_credentials

logger = logging.getLogger(__name__)

HEARTBEATS_AT_ONCE = 8
"""Heartbeats of one rank that are taken at a tick, of which one is due: a rank that floods delays nobody."""
TICK_SECONDS = 0.05
JOIN_SECONDS = 10.0
LEAVE_SECONDS = 1.0
"""The messages of a rank that has left arrive within this, or not at all."""
LEFT = "it has left the group"
"""The reason of the loss of a rank that has closed its port."""
MEETING_SECONDS, DIRECT_SECONDS = 60.0, 3.0
"""A process that is not reached directly within this is reached through the hub."""


class PortThread:
    """A thread with an event loop that runs `life`: calls from other threads, in order, and a listener.

    Calls of the listener wait for it until there is one.  name: of the process, for messages.  silent: the port is
    closing: nothing is called any more.
    """

    def __init__(self, life: MeshPort) -> None:
        self._life = life
        self.name = "a process"
        self.silent = False
        self.listener: PortListener | None = None
        self._untold: deque[Callable[[PortListener], object]] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="zmqtrain-mesh", daemon=True)

    # ------------------------------------------------------------------ any thread

    def open(self) -> None:
        """Start, and wait until `ready` is called; raise what `live` raised before."""
        self._thread.start()
        self._ready.wait()
        if isinstance(self._failure, ZmqTrainError):  # without a traceback of this thread
            raise self._failure.with_traceback(None)
        if self._failure is not None:
            raise self._failure

    def call(self, what: Callable[[], object]) -> None:
        """Have the thread do something soon; nothing happens once it has ended."""
        with self._lock:
            self._calls.append(what)
            wake, self._woken = not self._woken, True
        loop = self._loop
        if wake and loop is not None:  # without a loop yet, the calls are done when it begins
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._do_calls)

    def start(self, listener: PortListener) -> None:
        """Call this listener from now on, first for all that happened before."""
        self.call(lambda: self._start(listener))

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the thread, unless this is it."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)

    # ------------------------------------------------------------------ the thread

    def check(self) -> None:
        """Raise LocalProtocolError in another thread."""
        if threading.get_ident() != self._thread.ident:
            raise LocalProtocolError("a port sends in its own thread: use call")

    def ready(self) -> None:
        self._ready.set()

    def tell(self, tell: Callable[[PortListener], object]) -> None:
        """Make this call of the listener, once there is one."""
        listener = self.listener
        if listener is None:
            self._untold.append(tell)
        elif not self.silent:
            self._do(lambda: tell(listener))

    def _start(self, listener: PortListener) -> None:
        self.listener = listener
        while self._untold:
            self.tell(self._untold.popleft())

    def _do_calls(self) -> None:
        with self._lock:
            self._woken = False
            count = len(self._calls)
        for _ in range(count):
            what = self._calls.popleft()
            if not self.silent:
                self._do(what)

    def _do(self, what: Callable[[], object]) -> None:
        try:
            what()
        except Exception:
            logger.exception("%s: a call in the thread of its port failed", self.name)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():  # nobody waits for it any more
                logger.error("the port of %s failed", self.name, exc_info=error)
                self._life.on_failed(error)
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._do_calls)  # made before
        await self._life.live()


# ---------------------------------------------------------------------- the routes to the others, and from them


HEARTBEAT = encode_message(Heartbeat())


class LaneSender:
    """Queue of one lane of a channel, in the channel's loop: `send` never waits."""

    def __init__(self, channel: DealerChannel, lane: Lane) -> None:
        self._channel, self._lane = channel, lane
        self._waiting: deque[list[Buffer]] = deque()
        self._emptied = Gate()
        self._task: asyncio.Task[None] | None = None

    async def all_sent(self) -> None:
        while self._waiting:
            await self._emptied.wait()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send one message after all that wait; on a closed channel it is dropped. Raises LocalProtocolError for one
        that no channel carries."""
        try:
            if not self._waiting and self._channel.try_send(self._lane, frames):
                return
        except ChannelClosed:
            return
        check_message(frames)
        self._waiting.append(keep(frames))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._send_waiting())

    async def _send_waiting(self) -> None:
        try:
            while self._waiting:
                await self._channel.send(self._lane, self._waiting[0])
                self._waiting.popleft()
        except ChannelClosed:
            self._waiting.clear()
        finally:
            self._task = None
            self._emptied.open()

    def drop(self) -> None:
        self._waiting.clear()
        self._emptied.open()
        if self._task is not None:
            self._task.cancel()


class RouteState(Enum):
    """How messages reach a process."""

    OPENING = "not known yet"
    DIRECT = "directly"
    RELAYED = "through the hub"
    LOST = "not any more"


class PeerRoute:
    """The route to one other process. relay: the connection to the hub.

    sent, received: messages sent and received directly.  due: how many it has sent, as it says when it leaves.
    connected: whether it has ever connected to this process.  shown: whether the last heartbeat reached it.
    left_at: when it was last heard after it said that it leaves, in attended seconds.
    """

    def __init__(self, rank: int, name: str, address: str, channel: DealerChannel, relay: GroupConnection) -> None:
        self.rank, self.name, self.address, self.channel = rank, name, address, channel
        self.state = RouteState.OPENING
        self.sent = self.received = 0
        self.connected = self.shown = False
        self.due: int | None = None
        self.left_at: float | None = None
        self._relay = relay
        self._control, self._bulk = LaneSender(channel, Lane.CONTROL), LaneSender(channel, Lane.BULK)
        self._waiting: list[list[Buffer]] = []  # until the route is chosen

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send one message, after all others; for a lost process it is dropped."""
        if self.state is RouteState.DIRECT:
            self.sent += 1
            self._bulk.send(frames)
        elif self.state is RouteState.RELAYED:
            self._relay.relay(self.rank, frames)
        elif self.state is RouteState.OPENING:
            self._waiting.append(keep(frames))

    def say(self, message: Message) -> None:
        if self.state is RouteState.DIRECT:
            self._control.send([encode_message(message)])

    def choose(self, state: RouteState) -> None:
        """Choose the route, and send the messages that wait for it."""
        self.state = state
        waiting, self._waiting = self._waiting, []
        for frames in waiting:
            self.send(frames)

    def lose(self) -> asyncio.Task[None]:
        """Drop the messages that wait; return the task that closes the channel."""
        self.state = RouteState.LOST
        self._waiting.clear()
        self._control.drop()
        self._bulk.drop()
        return asyncio.get_running_loop().create_task(self.channel.close(0.0))

    async def all_sent(self) -> None:
        """Wait until the channel has taken all direct messages."""
        await self._bulk.all_sent()
        await self._control.all_sent()

    @property
    def all_received(self) -> bool:
        """Whether a process that leaves has sent nothing more than was received."""
        return self.due is not None and self.received >= self.due


def member_id(rank: int, token: str) -> PeerId:
    """Return the id with which a rank connects to the process that has this token."""
    return PeerId(f"{rank}@{token}")


class GroupListenSocket:
    """The ROUTER of a process, to which the other ranks connect.

    A rank's routing id is "RANK@TOKEN": this process made the token up, and the hub told it only to the group. Messages
    of any other id are counted (`strangers`) and never answered.
    """

    def __init__(self, router: RouterChannel, token: str, ranks: Iterable[int]) -> None:
        self._router = router
        self._peers = {rank: member_id(rank, token) for rank in ranks}
        self._ranks = {peer: rank for rank, peer in self._peers.items()}
        self._strangers = 0

    @property
    def strangers(self) -> int:
        """How many messages were ignored because no member of the group can have sent them."""
        return self._strangers + self._router.strangers

    def listen(self, on_message: Callable[[int, Lane, list[Buffer]], object]) -> None:
        """Call `on_message` with each message of any rank from now on."""

        def hear(peer: PeerId, lane: Lane, frames: list[Buffer]) -> None:
            if (rank := self._ranks.get(peer)) is not None:
                on_message(rank, lane, frames)
            else:
                self._strangers += 1

        self._router.listen(hear)

    def show(self, rank: int) -> bool:
        """Send a heartbeat over the connection that a rank made; False if there is none. Raises ChannelClosed."""
        try:
            self._router.send(self._peers[rank], Lane.CONTROL, [HEARTBEAT])
        except PeerLost:
            return False
        except ChannelFull:  # it does not read: it will be found silent
            pass
        return True

    def shut_out(self, rank: int) -> None:
        self._ranks.pop(self._peers[rank], None)

    async def close(self, linger_seconds: float) -> None:
        await self._router.close(linger_seconds)


# ---------------------------------------------------------------------- who is here, and the port


class Presence:
    """Which ranks of the group are here, as its port knows it (a `GroupListener`).

    cut_off: whether this process is lost to the others.
    """

    def __init__(self, port: MeshPort, socket: GroupListenSocket, hub: GroupConnection) -> None:
        self._port, self._rank, self._thread, self._routes = port, port.rank, port.thread, port.routes
        self._socket, self._hub = socket, hub
        self._detector = FailureDetector(time.monotonic())
        self._closings: set[asyncio.Task[None]] = set()
        self.cut_off = self._needs_hub = self._hub_told = False
        self._beat_at = 0.0

    # ------------------------------------------------------------------ from the other ranks

    def heard(self, rank: int) -> None:
        self._detector.heard(rank)

    def answered(self, rank: int) -> None:
        """A heartbeat came back over the connection to a rank: messages sent there arrive."""
        self._detector.heard(rank)
        if self._routes[rank].state is RouteState.OPENING:
            self._detector.watch(rank)
            self._routes[rank].choose(RouteState.DIRECT)

    def received(self, rank: int) -> None:
        """A message of a rank was received directly, and handed on."""
        route = self._routes[rank]
        route.received += 1
        if route.left_at is not None:
            route.left_at = self._detector.attended
        if route.all_received:
            self.lose(rank, LEFT)

    def leaves(self, rank: int, messages: int) -> None:
        """A rank leaves, which has sent so many messages directly."""
        route = self._routes[rank]
        route.due, route.left_at = messages, self._detector.attended
        self._detector.forget(rank)
        if route.all_received:
            self.lose(rank, LEFT)

    def accused(self, lost: GroupLost) -> None:
        """Another process says that a rank is lost."""
        if self._hub.there:  # the hub judges
            self._hub.send(lost)
        elif lost.rank == self._rank or lost.rank in self._routes:
            self.lose(lost.rank, lost.why)

    # ------------------------------------------------------------------ from the hub

    def on_relayed(self, rank: int, frames: list[Buffer]) -> None:
        route = self._routes.get(rank)
        if frames and (rank == HUB or (route is not None and route.state is not RouteState.LOST)):
            self._port.on_message(rank, frames)

    def on_hub_gone(self, why: str) -> None:
        self._detector.hub = False
        if self._thread.silent:
            return
        logger.warning("%s: the hub is gone (%s); the group goes on without it", self._thread.name, why)
        for rank, route in self._routes.items():
            if route.state is RouteState.RELAYED:
                self._declare(rank, f"it was reached through the hub only, which is gone: {why}")
        if self._needs_hub:
            self._lose_hub()

    def on_sent_away(self, why: str) -> None:
        self.lose(self._rank, f"the hub has sent it away: {why}")

    def on_group_lost(self, lost: GroupLost) -> None:
        route = self._routes.get(lost.rank)
        if lost.rank == self._rank or (route is not None and not lost.left):
            self.lose(lost.rank, lost.why)
        elif route is not None:  # its messages are received first
            self._detector.forget(lost.rank)
            if route.left_at is None:
                route.left_at = self._detector.attended

    def need_hub(self) -> bool:
        """Tell the listener when the hub is lost, from now on and if it is already; return whether it is there."""
        self._needs_hub = True
        if not self._hub.there:
            self._lose_hub()
        return self._hub.there

    # ------------------------------------------------------------------ as time passes

    def tick(self, now: float) -> None:
        """Find the ranks that are silent for too long, and send heartbeats. now: monotonic seconds."""
        if self._hub.heard():
            self._detector.heard_hub()
        for finding in self._detector.tick(now):
            match finding:
                case Accuse(rank, why):
                    self._hub.send(GroupLost(rank, why))
                case Declare(rank, why):
                    self._declare(rank, why)
                case CutOff(why):
                    self.lose(self._rank, why)
        self._beat(now)
        for rank, route in self._routes.items():
            if route.state is RouteState.OPENING and self._detector.attended > self._port.direct_seconds:
                self._relay_to(rank, route)
            elif route.left_at is not None and self._detector.attended - route.left_at > LEAVE_SECONDS:
                self.lose(rank, LEFT)

    def _beat(self, now: float) -> None:
        """Send a heartbeat over each connection made to this process; to a new connection at once."""
        due = now >= self._beat_at
        if due:
            self._beat_at = now + BEAT_SECONDS
        for rank, route in self._routes.items():
            if route.state is RouteState.LOST or (route.shown and not due):
                continue
            route.shown = self._socket.show(rank)
            route.connected |= route.shown
            if route.connected:
                self._detector.reached(rank, route.shown)

    def _relay_to(self, rank: int, route: PeerRoute) -> None:
        """Send through the hub to a rank that was not reached in time."""
        if not self._hub.there:
            return self._declare(rank, f"it is not reached at {route.address}, and there is no hub")
        logger.warning(
            "%s does not reach %s (rank %d) at %s within %g s: its messages to it go through the hub, which is slower",
            self._thread.name,
            route.name,
            rank,
            route.address,
            self._port.direct_seconds,
        )
        route.choose(RouteState.RELAYED)

    # ------------------------------------------------------------------ losses

    def _declare(self, rank: int, why: str) -> None:
        for route in self._routes.values():
            route.say(GroupLost(rank, why))
        self.lose(rank, why)

    def lose(self, rank: int, why: str) -> None:
        """Record the loss of a rank (the own one: this process is cut off), and tell the listener, once."""
        if self.cut_off or self._thread.silent:
            return
        if rank == self._rank:
            self.cut_off = True
            logger.warning("%s is cut off from its group: %s", self._thread.name, why)
        else:
            route = self._routes[rank]
            if route.state is RouteState.LOST:
                return
            self._socket.shut_out(rank)
            self._detector.forget(rank)
            self._hub.forget(rank)
            closing = route.lose()
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)
            what = "has left the group" if why == LEFT else f"is lost: {why}"
            logger.info("%s: %s (rank %d) %s", self._thread.name, route.name, rank, what)
        self._thread.tell(lambda listener: listener.on_lost(rank, why))

    def _lose_hub(self) -> None:
        """Tell the listener once that the hub, which reduces for it, is gone."""
        if not self._hub_told:
            self._hub_told = True
            self._thread.tell(lambda listener: listener.on_lost(HUB, "the hub is gone"))

    async def close(self) -> None:
        """Wait until the routes to lost ranks are closed."""
        await asyncio.gather(*self._closings, return_exceptions=True)


@dataclass
class MeshStatistics:
    """Running figures of a port. bytes: of whole messages.  relayed: ranks reached through the hub.

    strangers: messages that were ignored because no member of the group can have sent them.
    """

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    relayed: tuple[int, ...] = ()
    strangers: int = 0


class MeshPort:
    """A process's port to the others of its group (a `HubPort`). Made by `open_port`.

    direct_seconds: a rank that is not reached directly within this is reached through the hub.
    """

    clock: Clock = time

    def __init__(self, rendezvous: Rendezvous, direct_seconds: float) -> None:
        self._rendezvous, self.direct_seconds = rendezvous, direct_seconds
        self.thread = PortThread(self)
        self._linger_seconds = 0.0
        self.routes: dict[int, PeerRoute] = {}
        self._moved = MeshStatistics()

    # ------------------------------------------------------------------ any thread

    def open(self) -> None:
        """Start the thread, and wait until the group has met and the route to each rank is chosen.

        Raises the errors of `meet`.
        """
        try:
            self.thread.open()
        except BaseException:  # perhaps somebody gave up waiting
            self.close(0.0)
            raise
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member[0] for member in self._group.members)

    @property
    def group(self) -> str:
        return self._group.group

    def start(self, listener: PortListener) -> None:
        self.thread.start(listener)

    def call(self, what: Callable[[], object]) -> None:
        self.thread.call(what)

    def close(self, linger_seconds: float = 1.0) -> None:
        atexit.unregister(self.close)
        self.call(lambda: self._begin_to_close(linger_seconds))
        self.thread.join(linger_seconds + JOIN_SECONDS)

    def statistics(self) -> MeshStatistics:
        relayed = tuple(rank for rank, route in self.routes.items() if route.state is RouteState.RELAYED)
        return replace(self._moved, relayed=relayed, strangers=self._socket.strangers)

    # ------------------------------------------------------------------ the port's thread: out

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Queue one message to another rank, in order with all others to it; see `Port.send`.

        Raises LocalProtocolError in another thread, for a rank that is not one of the others, and for a message that
        cannot be sent.
        """
        self.thread.check()
        route = self.routes.get(rank)
        if route is None:
            raise LocalProtocolError(f"rank {self.rank} of {len(self.names)} has no route to rank {rank}")
        size = check_message(frames)
        if not self._presence.cut_off:
            self._moved.messages_sent += 1
            self._moved.bytes_sent += size
            route.send(frames)

    def reduce(self, chunk: HubChunk, frames: Sequence[Buffer]) -> None:
        """Have the hub reduce a chunk with those of all other ranks; see `HubPort.reduce`.

        Raises LocalProtocolError in another thread and for frames that cannot be sent so, ConfigError for an operation
        or a dtype that the hub does not reduce.
        """
        self.thread.check()
        size = check_message(frames)
        check_chunk(chunk, frames, size)
        if self._presence.need_hub() and not self._presence.cut_off:
            self._moved.messages_sent += 1
            self._moved.bytes_sent += size
            self._hub.reduce(chunk, frames, len(self.names))

    # ------------------------------------------------------------------ the port's thread: in

    def _hear(self, rank: int, lane: Lane, frames: list[Buffer]) -> None:
        try:
            self._presence.heard(rank)
            if lane is Lane.BULK:
                self.on_message(rank, frames)
                self._presence.received(rank)
            else:
                self._on_control(rank, frames[0])
        except Exception as error:
            self._fail(error)

    def _hear_back(self) -> None:
        """Take the heartbeats that came back over the connections to the others: nobody is woken for them."""
        for rank, route in self.routes.items():
            for _ in range(HEARTBEATS_AT_ONCE):
                if route.state is RouteState.LOST or route.channel.try_receive(Lane.CONTROL) is None:
                    break
                self._presence.answered(rank)

    def on_message(self, rank: int, frames: list[Buffer]) -> None:
        """Count a received message and hand it on."""
        self._moved.messages_received += 1
        self._moved.bytes_received += sum(len(frame) for frame in frames)
        self.thread.tell(lambda listener: listener.on_message(rank, frames))

    def _on_control(self, rank: int, head: Buffer) -> None:
        try:
            message = decode_message(head)
        except FramingError:
            return
        match message:
            case Leave(messages):
                self._presence.leaves(rank, messages)
            case GroupLost():
                self._presence.accused(message)

    # ------------------------------------------------------------------ the port's thread: life

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        self._closing, self._failure = loop.create_future(), loop.create_future()
        self._meeting = asyncio.ensure_future(self._rendezvous.meet())
        meeting = await self._meeting
        self._hub, self._group = meeting.hub, meeting.group
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        self._socket = GroupListenSocket(meeting.router, self._group.members[self.rank][3], others)
        self.thread.name = f"{self.names[self.rank]} (rank {self.rank} of {self.group!r})"
        self._presence = Presence(self, self._socket, self._hub)
        if meeting.keys is not None:
            meeting.router.admit({member[2]: member[0] for member in self._group.members})
        self._next_tick: asyncio.Handle = loop.call_soon(self._tick)  # once there are routes
        try:
            for rank in others:
                self.routes[rank] = self._connect(rank, meeting)
            self._hub.listen(self._presence)
            self._socket.listen(self._hear)
            await asyncio.wait({self._closing, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if not self._closing.done():  # a port that closes leaves, whatever else has failed
                self._failure.result()
            await self._leave()
        finally:
            self._next_tick.cancel()
            self._failure.cancel()
            await self._presence.close()
            for route in self.routes.values():
                await route.channel.close(self._linger_seconds)
            await self._hub.leave(LEFT, self._linger_seconds)
            await self._socket.close(self._linger_seconds)

    def _tick(self) -> None:
        """Let time pass, again and again until the sockets are closed: a process that leaves sends heartbeats, too."""
        try:
            now = time.monotonic()
            self._hear_back()
            self._presence.tick(now)
            if not any(route.state is RouteState.OPENING for route in self.routes.values()):
                self.thread.ready()
            if self.thread.listener is not None:
                self.thread.tell(lambda listener: listener.on_tick(now))
        except Exception as error:
            self._fail(error)
        finally:
            self._next_tick = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # a port that closes at this moment ignores it

    def _connect(self, rank: int, meeting: Meeting) -> PeerRoute:
        name, address, key, token = self._group.members[rank]
        channel = DealerChannel(
            address,
            peer=member_id(self.rank, token),
            keys=meeting.keys,
            server_key=key.encode() or None,
            beside=meeting.router,
        )
        return PeerRoute(rank, name, address, channel, self._hub)

    def on_failed(self, error: BaseException) -> None:
        self._presence.lose(self.rank, f"its port failed: {error!r}")

    def _begin_to_close(self, linger_seconds: float) -> None:
        self._linger_seconds = linger_seconds
        self.thread.silent = True
        self._meeting.cancel()  # unless it has met
        self._closing.set_result(None)

    async def _leave(self) -> None:
        """Send what is queued, then say goodbye to all."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._linger_seconds

        async def in_time(*what: Coroutine[None, None, None]) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await asyncio.gather(*what)

        relayed = [] if self._presence.cut_off else [self._hub.all_relayed()]
        await in_time(*(route.all_sent() for route in self.routes.values()), *relayed)
        for route in self.routes.values():
            route.say(Leave(route.sent))
        self._hub.session.linger_seconds = max(0.0, until - loop.time())
        self._hub.session.leave(LEFT)
        await in_time(*(route.all_sent() for route in self.routes.values()), self._hub.session.wait_closed())
        self._linger_seconds = max(0.0, until - loop.time())


def open_port(
    hub: str,
    size: int,
    rank: int | None = None,
    *,
    group: str = "default",
    description: str = "",
    name: str | None = None,
    server_key: GivenServerKey = None,
    keys: GivenKeys = None,
    timeout_seconds: float = MEETING_SECONDS,
    direct_seconds: float = DIRECT_SECONDS,
    listen: str = "",
    address: str = "",
    repeated: bool = False,
) -> MeshPort:
    """Meet `size` processes at the broker at `hub` ("tcp://hub:5555"), and return this one's port to all of them.

    rank: the wanted rank, 0 to size - 1; None: by arrival.  group: processes that give the same name meet.
    description: must be the same for all of them.  name: for people; default: the host's name and the process's
    number.  server_key, keys: as for `zmqtrain.connect`, but no key file is searched; with keys all connections are
    encrypted, and the processes let in nobody but each other, by keys made for this group.
    timeout_seconds: how long to wait for the hub and for the others.  direct_seconds: a process that is not reached
    directly within this is reached through the hub.  listen: where this process listens, port 0 chooses a free one
    ("": at the address by which it reaches the hub); address: where the others reach it, if not there.
    repeated: groups of this name meet one after the other.

    Raises ConfigError for invalid arguments, HubUnreachable if no broker answers, JoinRefused if the others were
    started with other arguments, CollectiveTimeout, which names the processes here, if some are missing.
    """
    name = name or f"{socket.gethostname().partition('.')[0] or 'process'}-{os.getpid()}"
    if not name.isprintable() or len(name) > 64 or "#" in name:
        raise ConfigError(f"a process's name is at most 64 printable characters without '#', got {name!r}")
    if not isinstance(size, int) or not 1 <= size <= MAX_PROCESSES:
        raise ConfigError(f"size must be 1 to {MAX_PROCESSES}, got {size!r}")
    if rank is not None and not 0 <= rank < size:
        raise ConfigError(f"rank must be 0 to {size - 1} in a group of {size}, or None for any, got {rank}")
    if timeout_seconds <= 0 or direct_seconds <= 0:
        raise ConfigError(f"a time to wait must be above 0 s, got {min(timeout_seconds, direct_seconds)}")
    hub_key, pair = read_credentials(server_key, keys)
    asked = JoinGroup(group, size, -1 if rank is None else rank, description, address, repeated=repeated)
    keep_freed_memory()
    port = MeshPort(Rendezvous(hub, name, asked, timeout_seconds, listen, hub_key, pair), direct_seconds)
    port.open()
    return port


def keep_freed_memory() -> None:
    """Make the C library keep freed memory, up to some 60 MB a thread, for reuse.

    glibc returns large blocks to the kernel at once, and each page of the next block costs a fault, more than receiving
    it. Its limit for large is the largest block of at most 32 MB that was freed: this frees one that was never touched.
    Other C libraries are not changed.
    Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, the dynamic adjustment.
    """
    np.empty(31 << 20, np.uint8)

"""Be a live `Port`: one thread that holds a process's sockets to all others of its group.

Rule 1: each process listens with a ROUTER (`door`) and connects a DEALER to each of the others (`way`): messages on the
lane BULK, as they are, and so in order; signs of life and words about who is lost on CONTROL.  Rule 2: each process
sends a sign of life back over every connection that others have made to it: who hears it knows that its own messages
arrive.  Rule 3: who is there, and who is reached through the hub, is known in `presence`.  Rule 4: nothing here waits.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial

from zmqtrain.collectives.door import Door, come_in_as
from zmqtrain.collectives.hub_line import HubLine
from zmqtrain.collectives.port_thread import PortThread
from zmqtrain.collectives.presence import LEFT, Presence
from zmqtrain.collectives.reducer import check_chunk
from zmqtrain.collectives.way import Way, WayState
from zmqtrain.core.errors import FramingError, LocalProtocolError
from zmqtrain.core.interfaces import Clock, PortListener
from zmqtrain.core.types import Buffer, HubChunk, Lane
from zmqtrain.protocol.framing import decode_message
from zmqtrain.protocol.messages import Goodbye, Group, GroupLost, Leave
from zmqtrain.transport.pacing import check_message
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel
from zmqtrain.transport.zmq_keys import CurveKeys

BACK_AT_ONCE = 8
"""So many signs of life of one rank are taken at a tick, of which one is due: who floods holds up nobody."""
TICK_SECONDS = 0.05
JOIN_SECONDS = 10.0


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
    """What a port begins with: the socket at which others reach it, its line to the hub, the group that has met there,
    and this process's keys within it, if its hub has keys."""

    router: RouterChannel
    line: HubLine
    group: Group
    keys: CurveKeys | None = field(default=None, repr=False)


class MeshPort:
    """A process's way to the others of its group (a `HubPort`). Made by `zmqtrain.collectives.rendezvous.open_port`.

    meet: makes the sockets and meets the others, in the port's loop.  direct_seconds: a rank that is not reached within
    this is sent to through the hub.
    """

    def __init__(self, meet: Callable[[], Coroutine[None, None, Meeting]], direct_seconds: float) -> None:
        self._meet, self._direct_seconds = meet, direct_seconds
        self._thread = PortThread(self._main, self._failed)
        self._linger_seconds = 0.0
        self._ways: dict[int, Way] = {}
        self._messages_sent = self._messages_received = self._bytes_sent = self._bytes_received = 0

    # ------------------------------------------------------------------ any thread

    def open(self) -> None:
        """Start the thread, and wait until the group has met and it is known how to reach each of it.

        Raises what `meet` raises.
        """
        try:
            self._thread.open()
        except BaseException:  # perhaps somebody gave up waiting
            self.close(0.0)
            raise
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
        self._thread.start(listener)

    def call(self, what: Callable[[], object]) -> None:
        """Have the port's thread do something soon; from any thread. Calls are done in order; none after `close`."""
        self._thread.call(what)

    def close(self, linger_seconds: float = 1.0) -> None:
        """Send what is queued for at most `linger_seconds`, tell the others that this process leaves, end the thread.

        From any thread; twice is once.
        """
        atexit.unregister(self.close)
        self.call(lambda: self._begin_to_close(linger_seconds))
        self._thread.join(linger_seconds + JOIN_SECONDS)

    def statistics(self) -> MeshStatistics:
        """Return the running figures."""
        return MeshStatistics(
            self._messages_sent,
            self._messages_received,
            self._bytes_sent,
            self._bytes_received,
            tuple(rank for rank, way in self._ways.items() if way.state is WayState.RELAYED),
            self._door.strangers,
        )

    # ------------------------------------------------------------------ the port's thread: out

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Queue one message to another rank, in order with all others to it; see `Port.send`.

        Raises LocalProtocolError in another thread, for a rank that is not one of the others, and for a message that
        cannot be sent.
        """
        self._thread.check()
        way = self._ways.get(rank)
        if way is None:
            raise LocalProtocolError(f"rank {self.rank} of {len(self.names)} has no way to rank {rank}")
        size = check_message(frames)
        if not self._presence.cut_off:
            self._messages_sent += 1
            self._bytes_sent += size
            way.send(frames)

    def reduce(self, chunk: HubChunk, frames: Sequence[Buffer]) -> None:
        """Have the hub reduce a chunk with those of all other ranks; see `HubPort.reduce`.

        Raises LocalProtocolError in another thread and for frames that cannot be sent so, ConfigError for an operation
        or a dtype that the hub does not reduce.
        """
        self._thread.check()
        size = check_message(frames)
        check_chunk(chunk, frames, size)
        if self._presence.need_hub() and not self._presence.cut_off:
            self._messages_sent += 1
            self._bytes_sent += size
            self._line.fold(chunk, frames, len(self.names))

    # ------------------------------------------------------------------ the port's thread: in

    def _hear(self, rank: int, lane: Lane, frames: list[Buffer]) -> None:
        try:
            self._presence.heard(rank)
            if lane is Lane.BULK:
                self._on_message(rank, frames)
                self._presence.received(rank)
            else:
                self._on_word(rank, frames[0])
        except Exception as error:
            self._fail(error)

    def _hear_back(self) -> None:
        """Take the signs of life that have come back over the connections to the others: nobody is woken for them."""
        for rank, way in self._ways.items():
            for _ in range(BACK_AT_ONCE):
                if way.state is WayState.LOST or way.channel.try_receive(Lane.CONTROL) is None:
                    break
                self._presence.answered(rank)

    def _on_message(self, rank: int, frames: list[Buffer]) -> None:
        self._messages_received += 1
        self._bytes_received += sum(len(frame) for frame in frames)
        self._thread.tell(lambda listener: listener.on_message(rank, frames))

    def _on_word(self, rank: int, head: Buffer) -> None:
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

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        self._closing, self._failure = loop.create_future(), loop.create_future()
        self._meeting = asyncio.ensure_future(self._meet())
        meeting = await self._meeting
        self._line, self._group = meeting.line, meeting.group
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        self._door = Door(meeting.router, self._group.members[self.rank][3], others)
        self._thread.name = f"{self.names[self.rank]} (rank {self.rank} of {self.group!r})"
        self._presence = Presence(
            self.rank, self._thread, self._ways, self._door, self._line, self._direct_seconds, self._on_message
        )
        if meeting.keys is not None:
            meeting.router.admit({member[2]: member[0] for member in self._group.members})
        tasks: list[asyncio.Future[None]] = [self._failure, asyncio.create_task(self._line.run(self._presence))]
        self._next_tick: asyncio.Handle = loop.call_soon(self._tick)  # once there are ways
        try:
            for rank in others:
                self._ways[rank] = self._connect(rank, meeting)
            self._door.listen(self._hear)
            done, pending = set[asyncio.Future[None]](), {self._closing, *tasks}
            while not self._closing.done():  # who closes leaves, whatever else has failed
                for task in done:
                    task.result()
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            await self._leave()
        finally:
            self._next_tick.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._presence.close()
            for way in self._ways.values():
                await way.channel.close(self._linger_seconds)
            await self._line.close(self._linger_seconds)
            await self._door.close(self._linger_seconds)

    def _tick(self) -> None:
        """Let time pass, now and from now on until the sockets are closed: who leaves shows that it lives, too."""
        try:
            now = time.monotonic()
            self._hear_back()
            self._presence.tick(now)
            if not any(way.state is WayState.OPENING for way in self._ways.values()):
                self._thread.ready()
            if self._thread.has_listener:
                self._thread.tell(lambda listener: listener.on_tick(now))
        except Exception as error:
            self._fail(error)
        finally:
            self._next_tick = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _fail(self, error: Exception) -> None:
        """Have `_main` end with this error."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def _connect(self, rank: int, meeting: Meeting) -> Way:
        name, address, key, token = self._group.members[rank]
        channel = DealerChannel.connect(
            address,
            peer=come_in_as(self.rank, token),
            keys=meeting.keys,
            server_key=key.encode() or None,
            beside=meeting.router,
        )
        return Way(name, address, channel, partial(self._line.relay, rank))

    def _failed(self, error: BaseException) -> None:
        self._presence.lose(self.rank, f"its port failed: {error!r}")

    def _begin_to_close(self, linger_seconds: float) -> None:
        self._linger_seconds = linger_seconds
        self._thread.silence()
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

        relayed = [] if self._presence.cut_off else [self._line.all_relayed()]
        await in_time(*(way.all_sent() for way in self._ways.values()), *relayed)
        for way in self._ways.values():
            way.say(Leave(way.sent))
        self._line.say(Goodbye(LEFT))
        await in_time(*(way.all_sent() for way in self._ways.values()), self._line.all_sent())
        self._linger_seconds = max(0.0, until - loop.time())

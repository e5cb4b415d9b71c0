"""Be a live `Port`: one thread that holds a process's sockets to all others of its group.

Rule 1: each process listens with a ROUTER (`door`) and connects a DEALER to each of the others (`way`): messages on the
lane BULK, as they are, and so in order; signs of life and words about who is lost on CONTROL.  Rule 2: each process
sends a sign of life back over every connection that others have made to it: who hears it knows that its own messages
arrive.  A rank of which none comes in time is sent to through the hub, from then on, for good.  Rule 3: who is lost is
lost for all (`protocol/vigil` notices, `protocol/groups` at the hub judges).  Rule 4: nothing here ever waits.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial

from zmqtrain.errors import ChannelClosed, FramingError, LocalProtocolError
from zmqtrain.interfaces import Clock, PortListener
from zmqtrain.protocol.framing import decode_message
from zmqtrain.protocol.group_messages import Group, GroupLost, Leave
from zmqtrain.protocol.messages import Goodbye
from zmqtrain.protocol.vigil import BEAT_SECONDS, Accuse, CutOff, Declare, Vigil
from zmqtrain.runtime.groups.door import Door, come_in_as
from zmqtrain.runtime.groups.hub_line import HubLine
from zmqtrain.runtime.groups.port_thread import PortThread
from zmqtrain.runtime.groups.reducer import check_chunk
from zmqtrain.runtime.groups.way import Way, WayState
from zmqtrain.transport.limits import check_message
from zmqtrain.transport.zmq_dealer import DealerChannel
from zmqtrain.transport.zmq_keys import CurveKeys
from zmqtrain.transport.zmq_router import RouterChannel
from zmqtrain.types import HUB, Buffer, HubChunk, Lane

__all__ = ["LEFT", "MeshPort", "MeshStatistics", "Meeting"]

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
HUB_SILENCE_SECONDS = 5.0
"""A hub that is silent for so long is gone: the group lives on without it."""
LEAVE_SECONDS = 1.0
"""What somebody who has left has sent comes within this, or not at all."""
LEFT = "it has left the group"
"""Why a rank is lost that has closed its port."""
JOIN_SECONDS = 10.0
LEAVE_LOOK_SECONDS = 0.005


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
    """A process's way to the others of its group (a `HubPort`). Made by `zmqtrain.runtime.groups.rendezvous.open_port`.

    meet: makes the sockets and meets the others, in the port's loop.  direct_seconds: a rank that is not reached within
    this is sent to through the hub.
    """

    def __init__(self, meet: Callable[[], Coroutine[None, None, Meeting]], direct_seconds: float) -> None:
        self._meet, self._direct_seconds = meet, direct_seconds
        self._thread = PortThread(self._main, lambda error: self._lose(self.rank, f"its port failed: {error!r}"))
        self._closing = self._cut_off = self._reduces = self._hub_told = False
        self._linger_seconds = 0.0
        self._ways: dict[int, Way] = {}
        self._closings: set[asyncio.Task[None]] = set()
        self._messages_sent = self._messages_received = self._bytes_sent = self._bytes_received = 0
        self._beat_at = 0.0

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
        if not self._cut_off:
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
        self._reduces = True
        if not self._line.there:
            self._lose_hub()
        elif not self._cut_off:
            self._messages_sent += 1
            self._bytes_sent += size
            self._line.fold(chunk, frames, len(self.names))

    def _beat(self, now: float) -> None:
        """Send a sign of life over each connection that others have made to this process; where there is none, as soon
        as there is."""
        due = now >= self._beat_at
        if due:
            self._beat_at = now + BEAT_SECONDS
            self._line.beat()
        for rank, way in self._ways.items():
            if way.state is WayState.LOST or (way.shown and not due):
                continue
            way.shown = self._door.show(rank)
            way.connected |= way.shown
            if way.connected:
                self._vigil.reached(rank, way.shown)

    # ------------------------------------------------------------------ the port's thread: in

    async def _receive_forever(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                rank, lane, frames = await self._door.receive()
                self._vigil.heard(rank)
                if lane is Lane.BULK:
                    way = self._ways[rank]
                    way.received += 1
                    if way.left_at is not None:
                        way.left_at = self._vigil.attended
                    self._on_message(rank, frames)
                    if way.all_came:
                        self._lose(rank, LEFT)
                else:
                    self._on_word(rank, frames[0])

    async def _hear_forever(self, rank: int, way: Way) -> None:
        """Take the signs of life that come back over the connection to another rank."""
        with contextlib.suppress(ChannelClosed):
            while True:
                await way.channel.receive()
                self._vigil.heard(rank)
                if way.state is WayState.OPENING:
                    self._vigil.watch(rank)
                    way.go(WayState.DIRECT)

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
                way = self._ways[rank]
                way.due, way.left_at = messages, self._vigil.attended
                self._vigil.forget(rank)
                if way.all_came:
                    self._lose(rank, LEFT)
            case GroupLost(lost, why):
                if self._line.there:  # it judges
                    self._line.say(message)
                elif lost == self.rank or lost in self._ways:
                    self._lose(lost, why)

    def on_relayed(self, rank: int, frames: list[Buffer]) -> None:
        """See HubListener."""
        way = self._ways.get(rank)
        if frames and (rank == HUB or (way is not None and way.state is not WayState.LOST)):
            self._on_message(rank, frames)

    def on_hub_heard(self) -> None:
        """See HubListener."""
        self._vigil.heard_hub()

    def on_hub_gone(self, why: str) -> None:
        """See HubListener."""
        self._vigil.hub = False
        if self._closing:
            return
        logger.warning("%s: the hub is gone (%s); the group goes on without it", self._thread.name, why)
        for rank, way in self._ways.items():
            if way.state is WayState.RELAYED:
                self._declare(rank, f"it was reached through the hub only, which is gone: {why}")
        if self._reduces:
            self._lose_hub()

    def on_sent_away(self, why: str) -> None:
        """See HubListener."""
        self._lose(self.rank, f"the hub has sent it away: {why}")

    def on_group_lost(self, lost: GroupLost) -> None:
        """See HubListener."""
        way = self._ways.get(lost.rank)
        if lost.rank == self.rank or (way is not None and not lost.left):
            self._lose(lost.rank, lost.why)
        elif way is not None:  # what it has sent comes before
            self._vigil.forget(lost.rank)
            if way.left_at is None:
                way.left_at = self._vigil.attended

    # ------------------------------------------------------------------ the port's thread: who is there

    def _declare(self, rank: int, why: str) -> None:
        for way in self._ways.values():
            way.say(GroupLost(rank, why))
        self._lose(rank, why)

    def _lose(self, rank: int, why: str) -> None:
        """Take a rank for lost (the own one: this process is cut off), and tell the listener, once."""
        if self._cut_off or self._closing:
            return
        if rank == self.rank:
            self._cut_off = True
            logger.warning("%s is cut off from its group: %s", self._thread.name, why)
        else:
            way = self._ways[rank]
            if way.state is WayState.LOST:
                return
            self._door.shut_out(rank)
            self._vigil.forget(rank)
            self._line.forget(rank)
            closing = way.lose()
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)
            what = "has left the group" if why == LEFT else f"is lost: {why}"
            logger.info("%s: %s (rank %d) %s", self._thread.name, way.name, rank, what)
        self._thread.tell(lambda listener: listener.on_lost(rank, why))

    def _lose_hub(self) -> None:
        """Say that the hub is gone to who has it reduce, once."""
        if not self._hub_told:
            self._hub_told = True
            self._thread.tell(lambda listener: listener.on_lost(HUB, "the hub is gone"))

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
        self._beat(now)
        for rank, way in self._ways.items():
            if way.state is WayState.OPENING and self._vigil.attended > self._direct_seconds:
                self._go_round(rank, way)
            elif way.left_at is not None and self._vigil.attended - way.left_at > LEAVE_SECONDS:
                self._lose(rank, LEFT)
        if not any(way.state is WayState.OPENING for way in self._ways.values()):
            self._thread.ready()
        if self._thread.has_listener:
            self._thread.tell(lambda listener: listener.on_tick(now))

    def _go_round(self, rank: int, way: Way) -> None:
        """Send to a rank through the hub that was not reached in time."""
        if not self._line.there:
            return self._declare(rank, f"it is not reached at {way.address}, and there is no hub")
        logger.warning(
            "%s does not reach %s (rank %d) at %s within %g s: its messages to it go through the hub, which is slower",
            self._thread.name,
            way.name,
            rank,
            way.address,
            self._direct_seconds,
        )
        way.go(WayState.RELAYED)

    # ------------------------------------------------------------------ the port's thread: life

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._meeting = asyncio.ensure_future(self._meet())
        meeting = await self._meeting
        self._line, self._group = meeting.line, meeting.group
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        self._door = Door(meeting.router, self._group.members[self.rank][3], others)
        self._thread.name = f"{self.names[self.rank]} (rank {self.rank} of {self.group!r})"
        self._vigil = Vigil(time.monotonic())
        if meeting.keys is not None:
            meeting.router.admit({member[2]: member[0] for member in self._group.members})
        tasks = [asyncio.create_task(self._receive_forever()), asyncio.create_task(self._line.run(self))]
        try:
            for rank in others:
                way = self._ways[rank] = self._connect(rank, meeting)
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
            await self._door.close(self._linger_seconds)

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

    def _begin_to_close(self, linger_seconds: float) -> None:
        self._closing, self._linger_seconds = True, linger_seconds
        self._thread.silence()
        self._meeting.cancel()  # unless it has met
        self._stop.set()

    async def _leave(self) -> None:
        """Send what is queued, then say goodbye to all; meanwhile show that this process lives."""
        until = time.monotonic() + self._linger_seconds

        async def wait(done: Callable[[], bool]) -> None:
            while not done() and time.monotonic() < until:
                self._tick(time.monotonic())
                await asyncio.sleep(LEAVE_LOOK_SECONDS)

        def all_sent() -> bool:
            return all(way.all_sent for way in self._ways.values())

        relays = self._line.there and not self._cut_off
        await wait(lambda: all_sent() and (not relays or self._line.relayed_all))
        for way in self._ways.values():
            way.say(Leave(way.sent))
        self._line.say(Goodbye(LEFT))
        await wait(lambda: all_sent() and self._line.all_sent)
        self._linger_seconds = max(0.0, until - time.monotonic())

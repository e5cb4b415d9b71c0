"""Be a process's line to the hub: meet the others of the group there, and keep in touch with it as long as they do.

Rule 1: it lives in the loop of its `MeshPort`, and tells it what the hub says.  Rule 2: while the group meets, a hub
that goes is waited for; once it has met, a hub that goes is gone for good (another one would not know the group), and
the group lives on without it.  Rule 3: what goes through the hub waits here for room in the window that the hub allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from zmqtrain.collectives.outgoing import Outgoing, keep
from zmqtrain.collectives.reducer import FOLD_BYTES, FOLD_MESSAGES, window_bytes
from zmqtrain.core.errors import ChannelClosed, CollectiveTimeout, FramingError, HubUnreachable, JoinRefused
from zmqtrain.core.types import HUB, Buffer, HubChunk, Lane
from zmqtrain.protocol.failure_detector import BEAT_SECONDS
from zmqtrain.protocol.framing import decode_message, encode_message
from zmqtrain.protocol.groups import RELAY_BYTES, RELAY_MESSAGES, list_names
from zmqtrain.protocol.messages import (
    Fold,
    Folded,
    Forming,
    Goodbye,
    Group,
    GroupLost,
    Heartbeat,
    Hello,
    JoinGroup,
    Message,
    Refused,
    Relay,
    Relayed,
    Welcome,
)
from zmqtrain.session.patience import patient
from zmqtrain.transport.address import say_unreachable
from zmqtrain.transport.pacing import Gate
from zmqtrain.transport.zmq_channels import DealerChannel

logger = logging.getLogger(__name__)

LEAVE_LINGER_SECONDS = 0.2
ASK_SECONDS = 1.0
"""A hub that knows nothing of this process is asked no more often than this: several messages may tell so."""

PATIENCE_SECONDS, SAY_AGAIN_SECONDS = 5.0, 15.0
"""After so long it is said for whom a process waits that would meet others, and again and again after so long."""

OCCUPIED_SECONDS = 3.0
"""Who has what this process asks for, and has it for so long, lives: it was not just killed, to be started again."""


class HubListener(Protocol):
    """Who is told what comes over the line, once the group has met."""

    def on_hub_heard(self) -> None:
        """The hub lives."""

    def on_hub_gone(self, why: str) -> None:
        """The hub is gone for good. Told once."""

    def on_sent_away(self, why: str) -> None:
        """The hub takes this process for lost, for what it has said."""

    def on_group_lost(self, lost: GroupLost) -> None:
        """The hub says that a rank is lost."""

    def on_relayed(self, rank: int, frames: list[Buffer]) -> None:
        """A message of that rank has come through the hub; of rank HUB: a chunk, reduced."""


class HubLine:
    """The line of one process. channel: to the hub at `address`, opened for this line alone.

    there: whether the hub is, as far as is known.
    """

    def __init__(self, channel: DealerChannel, address: str, name: str) -> None:
        self.address, self.name, self.there = address, name, True
        self._channel, self._asked_at = channel, 0.0
        self._control, self._bulk = Outgoing(channel, Lane.CONTROL), Outgoing(channel, Lane.BULK)
        self._queued: deque[tuple[int, int, list[Buffer]]] = deque()  # rank, bytes, frames: not relayed yet
        self._on_their_way: dict[int, deque[int]] = {}  # by rank the sizes of what is
        self._unfolded: deque[tuple[Fold, list[Buffer]]] = deque()  # chunks that are not at the hub yet
        self._pumped = Gate()  # something has come to its receiver, or never will
        self._folding: list[Fold] = []  # those that are
        self._fold_bytes = FOLD_BYTES

    # ------------------------------------------------------------------ meeting

    async def meet(self, asked: JoinGroup, timeout_seconds: float) -> Group:
        """Ask for a place in the group, and wait until all are here.

        Raises HubUnreachable if no hub answers in time, JoinRefused if it refuses, CollectiveTimeout, which says who is
        here, if processes are missing. While it waits for long, the log says for whom, as a warning: people look on.
        """
        began, welcomed, forming = time.monotonic(), False, Forming(asked.group, (self.name,), asked.size - 1)
        self._ask(asked)
        occupied, occupied_until = "", math.inf

        def still() -> str:
            if welcomed:
                return _say_forming(asked, forming)
            obstacle = self._channel.obstacle
            return f"no broker answers at {self.address} yet" + (f": {obstacle}" if obstacle else "")

        tasks = [asyncio.create_task(one) for one in (self._beat_forever(), self._say_forever(still, timeout_seconds))]
        try:
            async with patient(self._channel, asyncio.get_running_loop().time() + timeout_seconds, lambda: welcomed):
                while True:
                    match await self._next():
                        case Welcome():
                            welcomed = True
                        case Forming() as told:
                            forming, occupied, occupied_until = told, "", math.inf
                        case Group() as met:
                            return met
                        case Refused("unknown"):  # another hub than the one that was there
                            if time.monotonic() - self._asked_at > ASK_SECONDS:
                                self._ask(asked)
                        case Refused("occupied", text) if time.monotonic() < occupied_until:  # by the dead, perhaps
                            occupied_until = min(occupied_until, time.monotonic() + OCCUPIED_SECONDS)
                            occupied = text
                            asyncio.get_running_loop().call_later(BEAT_SECONDS, self.say, asked)
                        case Refused(reason, text):
                            raise self._refused(text, reason)
        except TimeoutError:
            if not welcomed:
                said = say_unreachable(
                    [self.address], min(timeout_seconds, time.monotonic() - began), self._channel.obstacle
                )
                raise HubUnreachable(said, self.address, self._channel.refused) from None
            if occupied:
                raise self._refused(occupied, "occupied") from None
            raise CollectiveTimeout(_say_missing(asked, forming, timeout_seconds)) from None
        finally:
            for task in tasks:
                task.cancel()

    def _refused(self, text: str, reason: str) -> JoinRefused:
        return JoinRefused(f"{self.name} cannot join at {self.address}: {text}", reason)

    def _ask(self, asked: JoinGroup) -> None:
        self._asked_at = time.monotonic()
        self.say(Hello(self.name, "process"))
        self.say(asked)

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if self._control.empty:  # else there is no hub to beat for
                self.beat()

    async def _say_forever(self, still: Callable[[], str], timeout_seconds: float) -> None:
        began, seconds = time.monotonic(), PATIENCE_SECONDS
        while True:
            await asyncio.sleep(seconds)
            waited, seconds = time.monotonic() - began, SAY_AGAIN_SECONDS
            logger.warning("%s waits (%.0f s of at most %g): %s", self.name, waited, timeout_seconds, still())

    async def _next(self) -> Message | None:
        _, frames = await self._channel.receive()
        try:
            return decode_message(frames[0])
        except FramingError as error:
            raise JoinRefused(f"the broker at {self.address} cannot be understood: {error}", "protocol") from error

    # ------------------------------------------------------------------ keeping in touch

    def say(self, message: Message) -> None:
        """Send a control message."""
        self._control.send([encode_message(message)])

    def beat(self) -> None:
        """Show the hub that this process lives."""
        if self.there:
            self.say(Heartbeat(time.monotonic()))

    async def run(self, told: HubListener) -> None:
        """Tell what comes, until the channel is closed or the hub is gone."""
        with contextlib.suppress(ChannelClosed):
            while self.there:
                _, frames = await self._channel.receive()
                try:
                    message = decode_message(frames[0])
                except FramingError as error:
                    self.give_up(told, f"it cannot be understood: {error}")
                    return
                told.on_hub_heard()
                self._take(told, message, frames)

    def _take(self, told: HubListener, message: Message, frames: list[Buffer]) -> None:
        match message:
            case GroupLost():
                told.on_group_lost(message)
            case Relay(rank):
                told.on_relayed(rank, frames[1:])
                self.say(Relayed(rank, 1))
            case Relayed(rank, messages):
                waiting = self._on_their_way.get(rank, deque())
                for _ in range(min(messages, len(waiting))):
                    waiting.popleft()
                self._pump()
            case Folded(key):
                folding = next((fold for fold in self._folding if fold.key == key), None)
                if folding is not None:
                    self._folding.remove(folding)
                    told.on_relayed(HUB, frames[1:])
                    self._pump_folds()
            case Goodbye(reason):
                self.give_up(told, reason or "it said goodbye")
            case Refused("unknown", text):
                self.give_up(told, text)
            case Refused(_, text):
                told.on_sent_away(text)

    def give_up(self, told: HubListener, why: str) -> None:
        """Take the hub for gone, for good."""
        if self.there:
            self.there = False
            self._queued.clear()
            self._unfolded.clear()
            self._pumped.open()
            told.on_hub_gone(why)

    # ------------------------------------------------------------------ through the hub

    async def all_relayed(self) -> None:
        """Wait until all that was to go through the hub has come to its receivers, or the hub is gone."""
        while self.there and (self._queued or any(self._on_their_way.values())):
            await self._pumped.wait()

    def relay(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Send a message to a rank through the hub, when the window has room for it."""
        self._queued.append((rank, sum(memoryview(frame).nbytes for frame in frames), keep(frames)))
        self._pump()

    def forget(self, rank: int) -> None:
        """Drop what is for a rank that is lost."""
        self._queued = deque(one for one in self._queued if one[0] != rank)
        self._on_their_way.pop(rank, None)
        self._pump()

    def _pump(self) -> None:
        self._pumped.open()
        while self._queued and self.there:
            rank, size, frames = self._queued[0]
            sizes = [one for waiting in self._on_their_way.values() for one in waiting]
            if len(sizes) >= RELAY_MESSAGES or (sizes and sum(sizes) + size > RELAY_BYTES):
                return
            self._queued.popleft()
            self._on_their_way.setdefault(rank, deque()).append(size)
            self._bulk.send([encode_message(Relay(rank, size)), *frames])

    def fold(self, chunk: HubChunk, frames: Sequence[Buffer], size: int) -> None:
        """Have a chunk reduced, when the window has room for it. size: of the group."""
        self._fold_bytes = window_bytes(size)
        total = sum(memoryview(frame).nbytes for frame in frames)
        self._unfolded.append((Fold(chunk.key, chunk.op, chunk.dtype, total), keep(frames)))
        self._pump_folds()

    def _pump_folds(self) -> None:
        while self._unfolded and self.there:
            fold, frames = self._unfolded[0]
            there = sum(one.size for one in self._folding)
            if len(self._folding) >= FOLD_MESSAGES or (there and there + fold.size > self._fold_bytes):
                return
            self._unfolded.popleft()
            self._folding.append(fold)
            self._bulk.send([encode_message(fold), *frames])

    async def all_sent(self) -> None:
        """Wait until nothing waits to be sent to the hub."""
        await self._control.all_sent()
        await self._bulk.all_sent()

    async def leave(self) -> None:
        """Say goodbye, where no group has met, and close."""
        self.say(Goodbye())
        await self.close(LEAVE_LINGER_SECONDS)

    async def close(self, linger_seconds: float) -> None:
        """Close the channel."""
        self._control.drop()
        self._bulk.drop()
        await self._channel.close(linger_seconds)


def _say_forming(asked: JoinGroup, forming: Forming) -> str:
    here = f"{list_names(forming.here)} {'is' if len(forming.here) == 1 else 'are'} here"
    return f"of the group {asked.group!r} of {asked.size} processes {here}, {forming.missing} missing"


def _say_missing(asked: JoinGroup, forming: Forming, seconds: float) -> str:
    return (
        f"not all came within {seconds:g} s: {_say_forming(asked, forming)}. Start those that are missing with the "
        "same hub, group and size, or wait longer (timeout_seconds)"
    )

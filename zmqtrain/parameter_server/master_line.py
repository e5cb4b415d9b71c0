"""Be a client's connection to one master of a parameter server: requests go out, their answers come back.

Rule 1: all of it belongs to one asyncio loop.  Rule 2: a request is a future; a master that is lost is the exception of
all that are open, and of those that come later: nothing waits for who is gone.
Rule 3: silence is counted as `protocol/failure_detector` does: a process that was stopped accuses nobody for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from zmqtrain.core.errors import (
    ChannelClosed,
    CodecError,
    ConfigError,
    FramingError,
    JoinRefused,
    NonFiniteDelta,
    PeerLost,
    ZmqTrainError,
)
from zmqtrain.core.interfaces import Channel
from zmqtrain.core.types import Buffer, Lane
from zmqtrain.protocol import messages
from zmqtrain.protocol.failure_detector import BEAT_SECONDS, FailureDetector
from zmqtrain.protocol.framing import Assembler, ProtocolVersionError, decode_message, encode_message, split
from zmqtrain.protocol.groups import SILENCE_SECONDS
from zmqtrain.protocol.messages import Chunk, Credit, Goodbye, Heartbeat, Hello, Message, Refused, Welcome
from zmqtrain.session.hub_session import Sender
from zmqtrain.transport.pacing import Use

TICK_SECONDS = 0.05
HELLO_SECONDS = 1.0
MAX_REASON = 200
ASSEMBLED_BYTES = 1 << 40
"""No bound of ours on what a master may announce: it sends what was asked for."""

Answer = tuple[int, Sequence[Buffer]]
"""What a request was answered with: a version, and the frames of values (none: it is done)."""


class MasterLine:
    """One master, as a client reaches it.

    master: its number.  channel: to it.  name: of this client.  placed: told of each Placed.
    failed: told once, when the line is of no use any more.  awaited: whom requests wait for there, as it last said.
    """

    def __init__(
        self,
        master: int,
        address: str,
        channel: Channel,
        name: str,
        placed: Callable[[messages.Placed], None],
        failed: Callable[[ZmqTrainError], None],
    ) -> None:
        self.master, self.address, self.name = master, address, name
        self.failure: ZmqTrainError | None = None
        self.welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.enrolled: asyncio.Future[messages.Enrolled] = asyncio.get_running_loop().create_future()
        self.bytes_received = 0
        self.awaited = messages.Awaited((), 0)
        self.channel, self._placed, self._failed = channel, placed, failed
        self._sender = Sender()
        self._assembler = Assembler(ASSEMBLED_BYTES)
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._outgoing: dict[int, deque[tuple[bytes, Buffer]]] = {}
        self._number, self._there = 0, True
        self._vigil = FailureDetector(time.monotonic())
        self._tasks = [
            asyncio.ensure_future(coroutine)
            for coroutine in (self._receive_forever(), self._sender.run(channel), self._tick_forever())
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    @property
    def bytes_sent(self) -> int:
        """What was sent, payload and heads."""
        return self._sender.bytes_sent

    @property
    def waits(self) -> bool:
        """Whether a request is not answered."""
        return bool(self._open)

    # ------------------------------------------------------------------ out

    def say(self, message: Message) -> None:
        """Send what is not answered by number."""
        self._sender.say(encode_message(message))

    def ask(self, make: Callable[[int], Message]) -> asyncio.Future[Answer]:
        """Send a request, made with its number; return its answer to come. It is sent before this returns."""
        number, future = self._begin()
        if not future.done():
            self.say(make(number))
        return future

    def announce(
        self, make: Callable[[int, tuple[int, ...]], messages.Initialise | messages.Push], frames: Sequence[Buffer]
    ) -> asyncio.Future[Answer]:
        """Announce a payload, by a message made with its number and the sizes of its frames; these go as granted.

        Nobody writes into the frames before the answer is there.
        """
        number, future = self._begin()
        if not future.done():
            self._outgoing[number] = deque(split(number, frames))
            self.say(make(number, tuple(len(frame) for frame in frames)))
        return future

    def conclude(self, number: int) -> None:
        """Take note that a request is answered otherwise, or needs no answer any more."""
        self._answered(number, (0, ()))

    def _begin(self) -> tuple[int, asyncio.Future[Answer]]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._number += 1
        if self.failure is not None:
            future.set_exception(self.failure)
        else:
            self._open[self._number] = future
        return self._number, future

    async def close(self) -> None:
        """Say goodbye, if that has not been said, and close the channel."""
        self.fail(ChannelClosed("this client was closed"))
        if self._there:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sender.sent_control(), 1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.channel.close()

    def fail(self, error: ZmqTrainError) -> None:
        """End all requests that are open, and to come, with this error; a master that is there is told goodbye."""
        if self.failure is not None:
            return
        self.failure = error
        waiting, self._open = self._open, {}
        futures: list[asyncio.Future[Any]] = [self.welcome, self.enrolled, *waiting.values()]
        self._there = self._there and self.welcome.done()
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever still waits for it is told; nobody need
        self._outgoing.clear()
        self._sender.clear(control=False)
        if self._there:  # other workers must not wait for a client that can do nothing more
            self.say(Goodbye("" if isinstance(error, ChannelClosed) else str(error)[:MAX_REASON]))
        self._failed(error)

    def lose(self, why: str) -> None:
        """Take the master for lost."""
        self._there = False
        self.fail(PeerLost(f"master {self.master} at {self.address}", why, self.master))

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ChannelClosed):
            self.fail(error if isinstance(error, ZmqTrainError) else ZmqTrainError(f"{self.address}: {error!r}"))

    # ------------------------------------------------------------------ in

    async def _tick_forever(self) -> None:
        hello_at = beat_at = 0.0
        while self.failure is None:
            now = time.monotonic()
            self._vigil.tick(now)
            if not self.welcome.done():
                self._vigil.heard_hub()
                if now >= hello_at:
                    hello_at = now + HELLO_SECONDS
                    self.say(Hello(self.name, "process"))
            elif self._vigil.hub_silence > SILENCE_SECONDS:
                self.lose(f"silent for {self._vigil.hub_silence:.1f} s")
            elif now >= beat_at:
                beat_at = now + BEAT_SECONDS
                self.say(Heartbeat(now))
            await asyncio.sleep(TICK_SECONDS)

    async def _receive_forever(self) -> None:
        while True:
            try:
                lane, frames = await self.channel.receive()
            except ChannelClosed:
                return
            self.bytes_received += sum(len(frame) for frame in frames)
            self._vigil.heard_hub()
            try:
                self._take(lane, frames)
            except ProtocolVersionError as error:
                self.fail(JoinRefused(f"{self.address}: {error}", "protocol"))
            except FramingError as error:
                self.lose(f"it sent what cannot be read ({error})")

    def _take(self, lane: Lane, frames: list[Buffer]) -> None:
        message = decode_message(frames[0])
        if lane is Lane.BULK:  # every message of the bulk lane belongs to a transfer, and opens the master's window
            self.say(Credit(getattr(message, "transfer", -1), 1))
        match message:
            case Chunk():
                whole = self._assembler.add(message, frames[1]) if len(frames) == 2 else None
                if whole is not None and isinstance(whole[0], messages.Values):
                    self._answered(whole[0].request, (whole[0].version, whole[1]))
            case messages.Values():
                self._assembler.expect(message)
            case Credit(transfer, chunks):
                self._granted(transfer, chunks)
            case messages.Done(request):
                self.conclude(request)
            case messages.Placed():
                self._placed(message)
            case messages.Awaited():
                self.awaited = message
            case Refused():
                self._refused(message)
            case Welcome() if not self.welcome.done():
                self.welcome.set_result(message)
            case messages.Enrolled() if not self.enrolled.done():
                self.enrolled.set_result(message)
            case Goodbye(reason):
                self.lose(f"it said goodbye: {reason}" if reason else "it said goodbye")

    def _answered(self, request: int, answer: Answer) -> None:
        future = self._open.pop(request, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def _refused(self, refused: Refused) -> None:
        text = f"{self.address}: {refused.text}"
        if refused.sequence >= 0:
            self._outgoing.pop(refused.sequence, None)
            future = self._open.pop(refused.sequence, None)
            if future is not None and not future.done():
                kinds: dict[str, type[ZmqTrainError]] = {"non-finite": NonFiniteDelta, "corrupt": CodecError}
                future.set_exception(kinds.get(refused.reason, ConfigError)(text))
        elif refused.reason == "unknown":
            if self.welcome.done():
                self.lose("it does not know this client any more: it was started anew, or lost it")
        elif refused.reason == "rules":
            self.fail(ConfigError(text))
        else:
            self.fail(JoinRefused(text, refused.reason))

    def _granted(self, transfer: int, chunks: int) -> None:
        waiting = self._outgoing.get(transfer)
        if waiting is None:
            return
        for _ in range(min(chunks, len(waiting))):
            self._sender.give(Use.DELTA, waiting.popleft())
        if not waiting:
            del self._outgoing[transfer]

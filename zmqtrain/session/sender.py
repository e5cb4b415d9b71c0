"""Send what a node has to say: control at once, granted chunks as the reserved share of its port lets them.

Rule 1: one task a lane, so that a lane keeps its order, and heartbeats go also while a chunk waits for room on the
other; a chunk that waits for the share does so until its time.
Rule 2: what waits here was granted already: the hub, which knows the share, seldom grants more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from math import inf

from zmqtrain.core.interfaces import Channel
from zmqtrain.core.types import Buffer, Lane
from zmqtrain.transport.gate import Gate
from zmqtrain.transport.reservation import Reservation, TokenBucket, Use

PayloadChunk = tuple[bytes, Buffer]


class Sender:
    """What a node has to send; used in the loop that owns its channel.

    rate: bytes per second that may be sent, None: no limit.  bytes_sent: payload and heads.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.bytes_sent = 0
        self._control: deque[bytes] = deque()
        self._chunks: dict[Use, deque[PayloadChunk]] = {Use.DELTA: deque(), Use.SNAPSHOT: deque()}
        self._reservation: Reservation[Use] = Reservation(rate)
        self._wake, self._wake_control, self._control_sent = asyncio.Event(), asyncio.Event(), Gate()
        self._open, self._says = True, False

    @property
    def waiting_control(self) -> tuple[bytes, ...]:
        """The control messages that have not gone yet."""
        return tuple(self._control)

    def limit(self, rate: float | None) -> None:
        """Send no more than `rate` bytes per second from now on; None: as much as there is."""
        if rate != self._reservation.bucket.rate:
            self._reservation.bucket.set_rate(rate)
            self._wake.set()

    def say(self, head: bytes) -> None:
        """Send a control message before all else."""
        self._control.append(head)
        self._wake_control.set()

    def give(self, use: Use, chunk: PayloadChunk) -> None:
        """Send a chunk that was granted, after what waits for the same use."""
        self._chunks[use].append(chunk)
        self._wake.set()

    def clear(self, *, control: bool) -> None:
        """Drop the chunks that wait, and control messages too if that is said."""
        for chunks in self._chunks.values():
            chunks.clear()
        if control:
            self._control.clear()
            self._control_sent.open()
            self._reservation.bucket = TokenBucket(self._reservation.bucket.rate)  # the hub begins anew, too

    def pause(self) -> None:
        """Send nothing until `resume`: the channel connects anew."""
        self._open = False

    def resume(self) -> None:
        """Send again."""
        self._open = True
        self._wake.set()
        self._wake_control.set()

    async def run(self, channel: Channel) -> None:
        """Send for ever, on this channel. Raises ChannelClosed."""
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
                self._says = True
                try:
                    await channel.send(Lane.CONTROL, [head])
                finally:
                    self._says = False
                    self._control_sent.open()
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
                    size = len(chunk[0]) + len(chunk[1])
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
        """Wait until no control message waits, here or for room on its lane."""
        while self._control or self._says:
            await self._control_sent.wait()

    def _turn(self, now: float) -> tuple[Use | None, float]:
        for use, chunks in self._chunks.items():
            if chunks:
                self._reservation.wait(use, use)
            else:
                self._reservation.leave(use)
        return self._reservation.turn(self._claim, now)

    def _claim(self, use: Use) -> tuple[int, float]:
        head, frame = self._chunks[use][0]
        return len(head) + len(frame), 0.0

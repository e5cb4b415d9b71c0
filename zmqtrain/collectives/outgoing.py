"""Send on one lane of a channel without ever waiting: at once if there is room, else in order when there is.

Rule: what waits was handed over: small frames are copied, large ones are the sender's to leave alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from zmqtrain.core.errors import ChannelClosed
from zmqtrain.core.types import Buffer, Lane
from zmqtrain.transport.pacing import COPY_BELOW_BYTES, Gate, check_message
from zmqtrain.transport.zmq_channels import DealerChannel


def keep(frames: Sequence[Buffer]) -> list[Buffer]:
    """Return a message that may wait: its small frames are copied."""
    return [
        frame if isinstance(frame, bytes) or memoryview(frame).nbytes >= COPY_BELOW_BYTES else bytes(frame)
        for frame in frames
    ]


class Outgoing:
    """One lane of a channel, in the channel's loop."""

    def __init__(self, channel: DealerChannel, lane: Lane) -> None:
        self._channel, self._lane = channel, lane
        self._waiting: deque[list[Buffer]] = deque()
        self._emptied = Gate()
        self._task: asyncio.Task[None] | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing waits here (what the channel has taken may still be on its way)."""
        return not self._waiting

    async def all_sent(self) -> None:
        """Wait until nothing waits here."""
        while self._waiting:
            await self._emptied.wait()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send one message after all that wait. Raises LocalProtocolError for one that no channel carries; what is sent
        on a closed channel is dropped."""
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
        """Forget what waits."""
        self._waiting.clear()
        self._emptied.open()
        if self._task is not None:
            self._task.cancel()

"""Be the way to one other process of a group: directly, or through the hub, in order either way.

Rule: a way is found once: what is sent before waits for it, and none is changed for another, which would mix the order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum

from zmqtrain.collectives.outgoing import Outgoing, keep
from zmqtrain.core.types import Buffer, Lane
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.messages import Message
from zmqtrain.transport.zmq_channels import DealerChannel


class WayState(Enum):
    """How a process is sent to."""

    OPENING = "not known yet"
    DIRECT = "directly"
    RELAYED = "through the hub"
    LOST = "not any more"


class Way:
    """The way to one other process. relay: sends it a message through the hub.

    sent, received: messages that went, and came, directly; due: how many it says it has sent, when it leaves.
    connected: whether it has ever connected to this process; shown: whether the last sign of life reached it.
    left_at: when it was last heard of as one that leaves, in attended seconds.
    """

    def __init__(
        self, name: str, address: str, channel: DealerChannel, relay: Callable[[Sequence[Buffer]], object]
    ) -> None:
        self.name, self.address, self.channel = name, address, channel
        self.state = WayState.OPENING
        self.sent = self.received = 0
        self.connected = self.shown = False
        self.due: int | None = None
        self.left_at: float | None = None
        self._relay = relay
        self._control, self._bulk = Outgoing(channel, Lane.CONTROL), Outgoing(channel, Lane.BULK)
        self._waiting: list[list[Buffer]] = []  # until it is known how to send

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send one message, after all others; what is for a lost process is dropped."""
        if self.state is WayState.DIRECT:
            self.sent += 1
            self._bulk.send(frames)
        elif self.state is WayState.RELAYED:
            self._relay(frames)
        elif self.state is WayState.OPENING:
            self._waiting.append(keep(frames))

    def say(self, message: Message) -> None:
        """Say something on the lane CONTROL, if there is a direct way."""
        if self.state is WayState.DIRECT:
            self._control.send([encode_message(message)])

    def go(self, state: WayState) -> None:
        """Send so from now on, first what has waited."""
        self.state = state
        waiting, self._waiting = self._waiting, []
        for frames in waiting:
            self.send(frames)

    def lose(self) -> asyncio.Task[None]:
        """Drop what waits; return the task that closes the channel."""
        self.state = WayState.LOST
        self._waiting.clear()
        self._control.drop()
        self._bulk.drop()
        return asyncio.get_running_loop().create_task(self.channel.close(0.0))

    async def all_sent(self) -> None:
        """Wait until the channel has taken all that goes directly."""
        await self._bulk.all_sent()
        await self._control.all_sent()

    @property
    def all_came(self) -> bool:
        """Whether all is here that a process has sent which leaves."""
        return self.due is not None and self.received >= self.due

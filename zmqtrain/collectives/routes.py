"""Routes between the processes of a group: one lane's queue, the route to each other process, and the listening socket.

A route is direct or through the hub, in order either way.  It is chosen once: messages sent before wait for it, and it
never changes, because a change would mix their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from zmqtrain.collectives.group_connection import GroupConnection, keep
from zmqtrain.core.errors import ChannelClosed, ChannelFull, PeerLost
from zmqtrain.core.types import Buffer, Lane, PeerId
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.messages import Heartbeat, Message
from zmqtrain.transport.pacing import Gate, check_message
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel

HEARTBEAT = encode_message(Heartbeat())


class LaneSender:
    """Queue of one lane of a channel, in the channel's loop: `send` never waits."""

    def __init__(self, channel: DealerChannel, lane: Lane) -> None:
        self._channel, self._lane = channel, lane
        self._waiting: deque[list[Buffer]] = deque()
        self._emptied = Gate()
        self._task: asyncio.Task[None] | None = None

    async def all_sent(self) -> None:
        """Wait until the channel has taken all messages."""
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
        """Forget the messages that wait."""
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
        """Send a control message, if the route is direct."""
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
        """Ignore this rank from now on."""
        self._ranks.pop(self._peers[rank], None)

    async def close(self, linger_seconds: float) -> None:
        """Close the socket."""
        await self._router.close(linger_seconds)

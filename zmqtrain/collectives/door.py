"""Be the door of a process: the ROUTER at which the others of its group come in, each known by its routing id.

Rule: an id is "RANK@TOKEN", with the token that this process made up and only the group was told. Any other is a
stranger's: counted, never answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zmqtrain.core.errors import ChannelFull, PeerLost
from zmqtrain.core.types import Buffer, Lane, PeerId
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.messages import Heartbeat
from zmqtrain.transport.zmq_channels import RouterChannel

BEAT = encode_message(Heartbeat())


def come_in_as(rank: int, token: str) -> PeerId:
    """Return the id with which a rank connects to a process that has this token."""
    return PeerId(f"{rank}@{token}")


class Door:
    """The door for these ranks. strangers: how many messages of others have come."""

    def __init__(self, router: RouterChannel, token: str, ranks: Iterable[int]) -> None:
        self._router = router
        self._peers = {rank: come_in_as(rank, token) for rank in ranks}
        self._ranks = {peer: rank for rank, peer in self._peers.items()}
        self._strangers = 0

    @property
    def strangers(self) -> int:
        """How many messages were ignored because nobody of the group could have sent them."""
        return self._strangers + self._router.strangers

    def listen(self, told: Callable[[int, Lane, list[Buffer]], object]) -> None:
        """Have each message of any rank told as it comes, from now on."""

        def hear(peer: PeerId, lane: Lane, frames: list[Buffer]) -> None:
            if (rank := self._ranks.get(peer)) is not None:
                told(rank, lane, frames)
            else:
                self._strangers += 1

        self._router.listen(hear)

    def show(self, rank: int) -> bool:
        """Send a sign of life back over the connection of a rank; False if there is none. Raises ChannelClosed."""
        try:
            self._router.send(self._peers[rank], Lane.CONTROL, [BEAT])
        except PeerLost:
            return False
        except ChannelFull:  # it does not read: it will be found silent
            pass
        return True

    def shut_out(self, rank: int) -> None:
        """Take this rank for a stranger from now on."""
        self._ranks.pop(self._peers[rank], None)

    async def close(self, linger_seconds: float) -> None:
        """Close the socket."""
        await self._router.close(linger_seconds)

"""Pass messages on between processes that do not reach each other, as fast as their receivers take them.

Rule 1: what may be on its way is bounded by `protocol/groups`, for each sender; here it only waits, in order, for room
on the way to its receiver, and who does not read holds up what is for him, nothing else.  Rule 2: frames are passed on
as they came, never looked into and never copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from zmqtrain.core.types import Buffer, PeerId
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.messages import Message
from zmqtrain.session.downlink import Downlink


class Relays:
    """What waits at the hub to be passed on; used by the broker's loop alone."""

    def __init__(self, downlink: Downlink) -> None:
        self._downlink = downlink
        self._waiting: dict[PeerId, deque[tuple[list[Buffer], Callable[[], object] | None]]] = {}

    def forward(
        self, peer: PeerId, message: Message, frames: Sequence[Buffer], sent: Callable[[], object] | None = None
    ) -> None:
        """Send a message with frames behind it, after all that waits for this peer; call `sent` when it has gone."""
        self._waiting.setdefault(peer, deque()).append(([encode_message(message), *frames], sent))
        self.pump(peer)

    def pump(self, peer: PeerId) -> None:
        """Send what there is room for."""
        waiting = self._waiting.get(peer)
        while waiting and self._downlink.forward(peer, waiting[0][0]):
            _, sent = waiting.popleft()
            if sent is not None:
                sent()
        if not waiting:
            self._waiting.pop(peer, None)

    def pump_all(self) -> None:
        """Send to all what there is room for."""
        for peer in list(self._waiting):
            self.pump(peer)

    def forget(self, peer: PeerId) -> None:
        """Drop what waits for a peer that is gone."""
        self._waiting.pop(peer, None)

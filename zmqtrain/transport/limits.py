"""Say what one message on a channel may be, the same for the real channel and for its double in memory.

Rule 1: what is refused here is our own mistake (`LocalProtocolError`): it never reaches the wire, where it would cost
the connection.
Rule 2: nothing here looks inside a frame; a frame is counted and measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.core.errors import ConfigError, LocalProtocolError
from zmqtrain.core.types import MAX_FRAME_BYTES, Buffer, PeerId

MAX_WIRE_FRAME_BYTES = MAX_FRAME_BYTES + (64 << 10)
"""The largest frame that a connection survives: one payload frame, and 64 KiB for whoever counts its head into it."""

MAX_MESSAGE_FRAMES = 6
"""A control message is one frame, a chunk two, and a message of a group that is relayed five; the other is room for a
later version to be understood."""

MAX_PEER_ID_BYTES = 200
"""A ZeroMQ routing id holds 255 bytes; one is the lane, and the rest stays free."""

COPY_BELOW_BYTES = 64 << 10
"""Frames below this are copied, both ways: cheaper than to keep their owner alive until the network has them."""


def check_message(frames: Sequence[Buffer]) -> int:
    """Return the bytes of a whole message; raise LocalProtocolError if no channel would carry it."""
    if not 1 <= len(frames) <= MAX_MESSAGE_FRAMES:
        raise LocalProtocolError(f"a message has 1 to {MAX_MESSAGE_FRAMES} frames, this one has {len(frames)}")
    total = 0
    for index, frame in enumerate(frames):
        size = len(frame) if isinstance(frame, bytes) else _measure(index, frame)
        if size > MAX_WIRE_FRAME_BYTES:
            raise LocalProtocolError(
                f"frame {index} of a message holds {size} bytes; the limit is {MAX_WIRE_FRAME_BYTES}: split it"
            )
        total += size
    return total


def _measure(index: int, frame: Buffer) -> int:
    view = memoryview(frame)
    if not view.c_contiguous:
        raise LocalProtocolError(f"frame {index} of a message is not contiguous in memory: copy it first")
    return view.nbytes


def is_peer_id(text: str) -> bool:
    """Tell whether `text` can name a peer: printable, not empty, at most `MAX_PEER_ID_BYTES` bytes of utf-8."""
    return 0 < len(text) <= MAX_PEER_ID_BYTES and text.isprintable() and len(text.encode()) <= MAX_PEER_ID_BYTES


def check_peer_id(peer: PeerId) -> None:
    """Raise ConfigError if `peer` cannot name a peer on the wire."""
    if not is_peer_id(peer):
        raise ConfigError(
            f"a node's name must be printable and 1 to {MAX_PEER_ID_BYTES} bytes long, got {peer!r}:"
            " choose another --name"
        )

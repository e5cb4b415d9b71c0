"""Say whose connection it is: the routing id under which a node's socket speaks on one lane (pure: no socket).

Rule 1: a routing id is the lane, b"C" or b"B", the peer's id in utf-8, a zero byte, and the life of that channel.
Rule 2: a life is a random series, so that nobody else can take the place of a connection (libzmq gives it to whoever
comes last with the same id), and a count: of two lives of one series the later has the higher.
Source: ZeroMQ RFC 28 (ROUTER, DEALER).
"""

from __future__ import annotations

import secrets
from functools import lru_cache

from zmqtrain.core.types import Lane, PeerId
from zmqtrain.transport.limits import is_peer_id

_LANE_BYTES = {Lane.CONTROL: b"C", Lane.BULK: b"B"}
_LANES = {value: lane for lane, value in _LANE_BYTES.items()}
_SERIES_BYTES, _COUNT_BYTES = 8, 4

_REMEMBERED = 1024  # routing ids that were read: the same ones come with each message


def first_life() -> bytes:
    """Return what tells a new channel of a peer from all others of that peer."""
    return secrets.token_bytes(_SERIES_BYTES) + bytes(_COUNT_BYTES)


def next_life(life: bytes) -> bytes:
    """Return the life of the same channel when it is opened once more."""
    count = int.from_bytes(life[_SERIES_BYTES:], "big") + 1
    return life[:_SERIES_BYTES] + count.to_bytes(_COUNT_BYTES, "big")


def is_former(life: bytes, other: bytes) -> bool | None:
    """Return whether `life` was before `other`; None for lives of two series, which do not tell."""
    if life[:_SERIES_BYTES] != other[:_SERIES_BYTES]:
        return None
    return life < other


def routing_id_of(lane: Lane, peer: PeerId, life: bytes) -> bytes:
    """Return the routing id of one lane of a peer's channel. life: as above; b"" for none."""
    return _LANE_BYTES[lane] + peer.encode() + (b"\0" + life if life else b"")


@lru_cache(maxsize=_REMEMBERED)
def sender_of(routing_id: bytes) -> tuple[PeerId, Lane, bytes] | None:
    """Return (peer, lane, life) of a routing id, None if it is none of ours (libzmq's own begin with a zero byte)."""
    lane = _LANES.get(routing_id[:1])
    if lane is None:
        return None
    who, _, life = routing_id[1:].partition(b"\0")
    try:
        name = who.decode()
    except UnicodeDecodeError:
        return None
    return (PeerId(name), lane, life) if is_peer_id(name) else None

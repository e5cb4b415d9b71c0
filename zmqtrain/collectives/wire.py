"""Say what the ranks of a group tell one another: a head of fixed size, text behind it, and one frame of values.

    message = head-frame [ values ]          values: one raw frame, little-endian, at most MAX_FRAME_BYTES
    head-frame = head [ text ]               text: utf-8, at most MAX_TEXT_BYTES; nothing is ever executed

Rule 1: `unpack` believes nothing: kind, dtype and sizes are checked before anything is made of them (FramingError).
Rule 2: what a field means depends on the kind; `Kind` says so. A field that a kind does not name is 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

from zmqtrain.core.errors import FramingError, LocalProtocolError
from zmqtrain.core.types import MAX_FRAME_BYTES, Buffer

MAX_TEXT_BYTES = 1 << 20
"""What describes a tree of arrays: some ten thousand leaves."""

COPIED_BELOW_BYTES = 64 << 10
"""A port copies smaller frames when they are sent: then nobody has to wait until they have arrived."""

CONFIRM = 0x80


class Kind(IntEnum):
    """What a message says. context: which communicator of the port is meant."""

    # Of collective number `number`:
    PART = 1
    """Values of a Send of `size` bytes, from byte `place` on; digest: of the sender's call; flag: the dtype, and
    CONFIRM where the sender waits to hear that the receiver's call has taken all; to the hub, which sends the head back
    with the reduced values, text: the operation."""
    CONSUMED = 2  # `size` bytes of what came of it from this rank have been taken
    CALLED = 3  # text: the sender's call of that number; compare it with your own
    WAITING = 4  # text: the sender's call of that number, in which it waits for `place`; compare, and answer with DOING
    DOING = 5  # number: of the sender's last call; text: what it did last
    FAILED = (
        17  # text: why the caller's operation failed on the sender, which has ended this call; digest: of that call
    )
    # Of everything:
    BROKEN = 6  # the communicator is of no use any more. flag 0: rank `place` is lost; 1: calls differ; text: why
    LEAVING = 7
    """The sender closes the communicator: nothing comes from it after this; text: the exception that ended its work, if
    one did."""
    SURVIVORS = 8
    """text: the ranks that the sender knows to be lost, and how often calls differed: who goes on after a loss."""
    # Of message `number` from one rank to another, place: its tag, size: its bytes:
    EAGER = 9  # text: what it is; its values are here
    OFFER = 10  # text: what it is; the values wait until it is taken
    TAKE = 11
    """Answer to OFFER: send the values; flag 1: it does not fit (text: why), flag 2: the receiver closes its
    communicator: send nothing."""
    PIECE = 12  # values of it, from byte `place` on
    TAKEN = 13  # `size` bytes of it have been taken
    RETURNED = 14  # `size` bytes of EAGER messages have been taken, in all
    WITHDRAW = 15  # the sender of OFFER wants it back
    WITHDRAWN = 16  # flag 1: it has it back; 0: it was taken before


class Head(NamedTuple):
    """What stands before the values; what each field means: `Kind`."""

    kind: int
    number: int = 0
    size: int = 0
    place: int = 0
    digest: int = 0
    flag: int = 0
    text: str = ""
    context: int = 0


NOTHING = memoryview(b"")
"""The values of a message that has none."""

_HEAD = struct.Struct("<BBHIQQqQ")  # kind, flag, 0, context, number, size, place, digest
HEAD_BYTES = _HEAD.size
_KINDS = frozenset(int(kind) for kind in Kind)
_WITH_VALUES = frozenset((int(Kind.PART), int(Kind.EAGER), int(Kind.PIECE)))


def pack(head: Head, context: int) -> bytes:
    """Return the frame of a head in this context. Raise LocalProtocolError if its text is too long."""
    kind, number, size, place, digest, flag, text, _ = head
    packed = _HEAD.pack(kind, flag, 0, context, number, size, place, digest)
    if not text:
        return packed
    encoded = text.encode()
    if len(encoded) > MAX_TEXT_BYTES:
        raise LocalProtocolError(
            f"what describes these arrays is {len(encoded)} bytes long, more than {MAX_TEXT_BYTES}: join some of them"
        )
    return packed + encoded


def unpack(frames: Sequence[Buffer]) -> tuple[Head, memoryview]:
    """Return the head of a message and its values as bytes.

    Raise FramingError for what no rank of this version sends.
    """
    frame = frames[0]
    length = len(frame)
    if not HEAD_BYTES <= length <= HEAD_BYTES + MAX_TEXT_BYTES or len(frames) > 2:
        raise FramingError(f"{len(frames)} frames, the first of {length} bytes, are no message of a communicator")
    kind, flag, _, context, number, size, place, digest = _HEAD.unpack_from(frame)
    if kind not in _KINDS:
        raise FramingError(f"a communicator of this version knows no message of kind {kind}")
    text = ""
    if length > HEAD_BYTES:
        try:
            text = bytes(frame[HEAD_BYTES:]).decode()
        except UnicodeDecodeError as error:
            raise FramingError(f"the text of a {Kind(kind).name} message is no utf-8") from error
    values = NOTHING
    if len(frames) == 2:
        values = memoryview(frames[1]).cast("B")
        if kind not in _WITH_VALUES or values.nbytes > MAX_FRAME_BYTES:
            raise FramingError(f"a {Kind(kind).name} message with {values.nbytes} bytes of values")
    return Head(kind, number, size, place, digest, flag, text, context), values


def digest(text: str) -> int:
    """Return 64 bits that tell one text from another."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

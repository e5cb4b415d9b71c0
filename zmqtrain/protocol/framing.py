"""Turn a message into bytes and back, and put the chunks of a transfer together again.

Rule 1: the head is msgpack, [PROTOCOL_VERSION, incarnation, number, kind, fields] (incarnation, number: `fencing`);
nothing that comes in is ever executed or unpickled.
Rule 2: sizes are bounded before anything is allocated; whatever is wrong is a FramingError that costs its sender alone.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import msgpack

from zmqtrain.errors import FramingError
from zmqtrain.protocol.fencing import MAX_INCARNATION, UNSTAMPED, Stamp
from zmqtrain.protocol.messages import MESSAGES, Announcement, Chunk, Message
from zmqtrain.types import MAX_FRAME_BYTES, Buffer

__all__ = [
    "PROTOCOL_VERSION",
    "MAX_HEAD_BYTES",
    "ProtocolVersionError",
    "encode_message",
    "decode_message",
    "decode_head",
    "split",
    "Assembler",
]

PROTOCOL_VERSION = 3
MAX_HEAD_BYTES = 1 << 20

Check = Callable[[Any], Any]


class ProtocolVersionError(FramingError):
    """A peer speaks another version of this protocol: `theirs` against PROTOCOL_VERSION."""

    def __init__(self, theirs: object) -> None:
        said = str(theirs) if type(theirs) is int else f"of type {type(theirs).__name__}"  # which may be a megabyte
        super().__init__(
            f"the other side speaks protocol version {said}, this side speaks {PROTOCOL_VERSION}: "
            "install the same zmqtrain on the hub and on every node"
        )
        self.theirs = theirs


def _plain(wanted: type) -> Check:
    def check(value: Any) -> Any:
        if wanted is float and type(value) is int:
            return float(value)
        if type(value) is not wanted:
            raise FramingError(f"expected {wanted.__name__}, got {type(value).__name__}")
        return value

    return check


def _union(checks: Sequence[Check]) -> Check:
    def check(value: Any) -> Any:
        for one in checks:
            try:
                return one(value)
            except FramingError:
                continue
        raise FramingError(f"unexpected {type(value).__name__}")

    return check


def _checker(annotation: Any) -> Check:
    """Build the check of one annotated field: plain types, X | Y, tuple[X, ...], tuple[X, Y], dict[str, X], None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is types.NoneType:
        return _plain(types.NoneType)
    if origin in (types.UnionType, typing.Union):
        # int before float, so that an int stays one
        return _union([_checker(one) for one in arguments])
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        inner = _checker(arguments[0])
        return lambda value: tuple(inner(one) for one in _plain(tuple)(value))
    if origin is tuple:
        inners = [_checker(one) for one in arguments]

        def check_fixed(value: Any) -> Any:
            if len(_plain(tuple)(value)) != len(inners):
                raise FramingError(f"expected {len(inners)} fields, got {len(value)}")
            return tuple(inner(one) for inner, one in zip(inners, value, strict=True))

        return check_fixed
    if origin is dict:
        key, inner = (_checker(one) for one in arguments)
        return lambda value: {key(name): inner(one) for name, one in _plain(dict)(value).items()}
    return _plain(annotation)


_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in MESSAGES}
_CHECKS: dict[str, dict[str, Check]] = {
    name: {field: _checker(hint) for field, hint in typing.get_type_hints(kind).items()}
    for name, kind in _KINDS.items()
}
_FIELDS: dict[type[Message], tuple[str, ...]] = {kind: tuple(f.name for f in fields(kind)) for kind in MESSAGES}


def encode_message(message: Message, stamp: Stamp = UNSTAMPED) -> bytes:
    """Return the head of a message: a few dozen bytes for most, about 60 bytes a leaf where a model is described."""
    kind = type(message)
    body = {name: getattr(message, name) for name in _FIELDS[kind]}
    packed: bytes = msgpack.packb([PROTOCOL_VERSION, *stamp, kind.__name__, body])
    return packed


def decode_message(head: Buffer) -> Message:
    """Read one head, whatever its stamp. Raises what `decode_head` does."""
    return decode_head(head)[1]


def decode_head(head: Buffer) -> tuple[Stamp, Message]:
    """Read one head. Raises FramingError for anything that is no message, ProtocolVersionError for another version."""
    if len(head) > MAX_HEAD_BYTES:
        raise FramingError(f"a head of {len(head)} bytes; at most {MAX_HEAD_BYTES} are read")
    try:
        parts = msgpack.unpackb(head, use_list=False, strict_map_key=True)
    except Exception as error:  # msgpack raises several kinds, ValueError and its own among them
        raise FramingError(f"no msgpack: {error}") from None
    if type(parts) is not tuple or len(parts) < 3:
        raise FramingError("a head is [version, incarnation, number, kind, fields]")
    if type(parts[0]) is not int or parts[0] != PROTOCOL_VERSION:
        raise ProtocolVersionError(parts[0])
    if len(parts) != 5:
        raise FramingError("a head is [version, incarnation, number, kind, fields]")
    _, incarnation, number, name, body = parts
    if not all(type(count) is int and 0 <= count < MAX_INCARNATION for count in (incarnation, number)):
        raise FramingError("a head is stamped with two numbers of at most 63 bits")
    if type(name) is not str or name not in _KINDS or type(body) is not dict:
        raise FramingError(f"unknown message {name[:40]!r}" if type(name) is str else "a message without a name")
    checks = _CHECKS[name]
    if body.keys() != checks.keys():
        raise FramingError(f"{name} has the fields {', '.join(checks)}")
    checked = {}
    for field, value in body.items():
        try:
            checked[field] = checks[field](value)
        except FramingError as error:
            raise FramingError(f"{name}.{field}: {error}") from None
    return Stamp(incarnation, number), _KINDS[name](**checked)


def split(transfer: int, frames: Sequence[Buffer], stamp: Stamp = UNSTAMPED) -> list[tuple[bytes, Buffer]]:
    """Return the chunks of a transfer, ready to send: (head, payload frame) each; no frame is copied."""
    return [(encode_message(Chunk(transfer, index), stamp), frame) for index, frame in enumerate(frames)]


class Assembler:
    """Hold the frames of the transfers that one peer has announced, until each is whole.

    limit_bytes: the most that may be announced and not yet whole, over all transfers of this peer.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.expected_bytes = 0
        self._open: dict[int, tuple[Announcement, list[Buffer | None], int]] = {}

    def expect(self, announcement: Announcement, held: Sequence[Buffer] = ()) -> None:
        """Open a transfer. Raises FramingError for a repeated number, a lying size or more than the limit.

        held: its first frames, where the rest alone will come.
        """
        sizes, transfer = announcement.sizes, announcement.transfer
        if transfer in self._open:
            raise FramingError(f"transfer {transfer} is announced twice")
        if any(not 0 < size <= MAX_FRAME_BYTES for size in sizes):
            raise FramingError(f"a frame is 1 to {MAX_FRAME_BYTES} bytes; {max(sizes)} and {min(sizes)} are announced")
        if self.expected_bytes + sum(sizes) > self.limit_bytes:
            raise FramingError(f"{sum(sizes)} bytes are announced; at most {self.limit_bytes} are expected")
        self.expected_bytes += sum(sizes)
        missing = len(sizes) - len(held)
        if missing < 1 or any(len(frame) != size for frame, size in zip(held, sizes, strict=False)):
            raise FramingError(f"{len(held)} frames are here of {len(sizes)} that are announced, of other sizes")
        self._open[transfer] = (announcement, [*held, *[None] * missing], missing)

    def has(self, chunk: Chunk) -> bool:
        """Return whether this chunk of an open transfer is here already."""
        _, frames, _ = self._open.get(chunk.transfer, (None, (), 0))
        return 0 <= chunk.index < len(frames) and frames[chunk.index] is not None

    def add(self, chunk: Chunk, frame: Buffer) -> tuple[Announcement, list[Buffer]] | None:
        """Take one chunk; return the announcement and all frames when it was the last, else None.

        A chunk of a transfer that is not open (any more) is no error and gives None.
        """
        if chunk.transfer not in self._open:
            return None
        announcement, frames, missing = self._open[chunk.transfer]
        if not 0 <= chunk.index < len(frames) or frames[chunk.index] is not None:
            raise FramingError(f"chunk {chunk.index} of transfer {chunk.transfer} is repeated or does not exist")
        if len(frame) != announcement.sizes[chunk.index]:
            raise FramingError(f"a chunk of {len(frame)} bytes where {announcement.sizes[chunk.index]} were announced")
        frames[chunk.index] = frame
        if missing > 1:
            self._open[chunk.transfer] = (announcement, frames, missing - 1)
            return None
        self.forget(chunk.transfer)
        return announcement, typing.cast("list[Buffer]", frames)

    def forget(self, transfer: int) -> None:
        """Drop an open transfer and what has come of it; no error if there is none."""
        if transfer in self._open:
            announcement, _, _ = self._open.pop(transfer)
            self.expected_bytes -= sum(announcement.sizes)

    def clear(self) -> None:
        """Drop every open transfer."""
        self._open.clear()
        self.expected_bytes = 0

    def __contains__(self, transfer: object) -> bool:
        return transfer in self._open

"""Framing: messages to bytes and back, and the chunks of a transfer back to its frames.

Rule 1: a head is msgpack, [PROTOCOL_VERSION, incarnation, number, kind, fields] (incarnation, number: `fencing`).
Received data is never executed or unpickled.
Rule 2: sizes are bounded before memory is allocated; any fault is a FramingError that affects its sender alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, cast, get_type_hints

import msgpack
import msgspec

from zmqtrain.core.errors import ConfigError, FramingError
from zmqtrain.core.types import MAX_FRAME_BYTES, Buffer
from zmqtrain.protocol.fencing import MAX_INCARNATION, UNSTAMPED, Stamp
from zmqtrain.protocol.messages import MESSAGES, Announcement, Chunk, Message, Refused

PROTOCOL_VERSION = 5
READ_SINCE = 5
"""From this version on, the form of a head and the fields of Refused stay as they are: so peers of two versions can
read why they cannot talk."""
MAX_HEAD_BYTES = 1 << 20

SHORT_BYTES = 256
"""Nearly all heads are as short."""
OPENED_BYTES = 64
"""What precedes the fields of a head fits in this many bytes."""


class Head(NamedTuple):
    """A head before its fields are read."""

    stamp: Stamp
    kind: type[Message]
    fields: Buffer


class ProtocolVersionError(FramingError):
    """A peer speaks another version of this protocol: `theirs` against PROTOCOL_VERSION; -1 if it is no version.

    is_number: it is a version.  is_older: it is lower than this side's.
    """

    def __init__(self, theirs: object) -> None:
        self.is_number = isinstance(theirs, int) and type(theirs) is int and 0 <= theirs < 1 << 31
        said = str(theirs) if self.is_number else f"of type {type(theirs).__name__}"  # which may be a megabyte
        super().__init__(f"the other side speaks protocol version {said}, this side speaks {PROTOCOL_VERSION}")
        self.theirs = theirs if isinstance(theirs, int) and self.is_number else -1
        self.is_older = self.is_number and self.theirs < PROTOCOL_VERSION


_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in MESSAGES}
_HINTS = {kind: get_type_hints(kind) for kind in MESSAGES}
_DECODERS: dict[type[Message], msgspec.msgpack.Decoder[dict[str, Any]]] = {
    kind: msgspec.msgpack.Decoder(TypedDict(kind.__name__, hints))  # type: ignore[operator]
    for kind, hints in _HINTS.items()
}
"""Decoders that check the types of the fields, all of which are required."""


def _as_plain(value: object) -> object:
    """Return an instance of a subclass, such as numpy.float64, as the plain type that travels."""
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} does not travel in a message")


_SHORT = msgspec.msgpack.Decoder(tuple[int, int, int, str, msgspec.Raw])
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_as_plain)


def encode_message(message: Message, stamp: Stamp = UNSTAMPED) -> bytes:
    """Return the head of a message: a few dozen bytes for most, about 60 bytes a leaf where a model is described."""
    return _ENCODER.encode((PROTOCOL_VERSION, *stamp, type(message).__name__, message))


def encode_refusal(refused: Refused, theirs: int) -> bytes:
    """Return the head of a refusal for a peer of version `theirs`: in that version, if its like is known here."""
    version = theirs if theirs >= READ_SINCE else PROTOCOL_VERSION
    return _ENCODER.encode((version, *UNSTAMPED, Refused.__name__, refused))


def decode_message(frame: Buffer) -> Message:
    """Read one head, whatever its stamp. Raises what `decode_head` does."""
    return read_fields(open_head(frame))


def decode_head(frame: Buffer) -> tuple[Stamp, Message]:
    """Read one head. Raises FramingError for anything that is no message, ProtocolVersionError for another version."""
    head = open_head(frame)
    return head.stamp, read_fields(head)


def open_head(frame: Buffer) -> Head:
    """Read of a head its stamp and its kind, at the same cost however large it is. Raises as `decode_head` does."""
    if len(frame) <= SHORT_BYTES and (head := _open_short(frame)) is not None:
        return head
    if len(frame) > MAX_HEAD_BYTES:
        raise FramingError(f"a head of {len(frame)} bytes; at most {MAX_HEAD_BYTES} are read")
    beginning = msgpack.Unpacker(use_list=False, strict_map_key=True, max_buffer_size=OPENED_BYTES)
    beginning.feed(frame[:OPENED_BYTES])
    try:
        count, version = beginning.read_array_header(), beginning.unpack()
        ours = type(version) is int and version == PROTOCOL_VERSION
        if ours:
            incarnation, number, name = beginning.unpack(), beginning.unpack(), beginning.unpack()
    except Exception as error:  # msgpack raises several kinds, ValueError and its own among them
        raise FramingError(f"no head, which is [version, incarnation, number, kind, fields]: {error!r:.100}") from None
    if count >= 3 and not ours:
        raise ProtocolVersionError(version)
    if count != 5 or not ours:
        raise FramingError("a head is [version, incarnation, number, kind, fields]")
    if not all(type(one) is int and 0 <= one < MAX_INCARNATION for one in (incarnation, number)):
        raise FramingError("a head is stamped with two numbers of at most 63 bits")
    if type(name) is not str or name not in _KINDS:
        raise FramingError(f"unknown message {name!r}" if type(name) is str else "a message without a name")
    return Head(Stamp(incarnation, number), _KINDS[name], memoryview(frame)[beginning.tell() :])


def _open_short(frame: Buffer) -> Head | None:
    """Read a short head whole, in a third of the time; None for one that `open_head` refuses."""
    try:
        version, incarnation, number, name, fields = _SHORT.decode(frame)
    except Exception:  # DecodeError and RecursionError among them
        return None
    stamped = 0 <= incarnation < MAX_INCARNATION and 0 <= number < MAX_INCARNATION
    if version != PROTOCOL_VERSION or name not in _KINDS or not stamped:
        return None
    return Head(Stamp(incarnation, number), _KINDS[name], memoryview(fields))


def read_fields(head: Head) -> Message:
    """Read the fields of a head. Raises FramingError unless they are all fields of its message, of the right types."""
    try:
        body = _DECODERS[head.kind].decode(head.fields)
    except Exception as error:  # DecodeError, ValueError and RecursionError among them
        raise FramingError(f"{head.kind.__name__}: {error!s:.200}") from None
    if _map_length(head.fields) != len(_HINTS[head.kind]):  # all fields are there: one is unknown, or there twice
        raise FramingError(f"{head.kind.__name__} has the fields {', '.join(_HINTS[head.kind])}")
    return head.kind(**body)


def _map_length(packed: Buffer) -> int:
    """Return how many pairs a msgpack map holds that was just decoded."""
    if packed[0] & 0xF0 == 0x80:
        return int(packed[0]) & 0x0F
    return int.from_bytes(packed[1 : 3 if packed[0] == 0xDE else 5], "big")


_TUPLE = 1
"""The code of msgpack's extension in which a tuple travels: its items, as a packed list."""

_DEEPEST_TUPLES = 64
"""Nesting limit of tuples: each is packed and unpacked by a call of its own."""


def pack_value(value: Any) -> bytes:
    """Return a Python value as bytes: None, bool, int, float, str, bytes, and lists, tuples and dicts of these.

    Raises ConfigError for anything else, for a whole number of more than 64 bits, and for a value that is too deep.
    """
    try:
        return _pack_value(value, 0)
    except OverflowError as error:
        raise ConfigError("a whole number of more than 64 bits does not travel: send it as a str") from error
    except (ValueError, UnicodeEncodeError) as error:  # too deep or too long; half of a surrogate pair
        raise ConfigError(f"this value does not travel: {error}") from error


def _pack_value(value: Any, depth: int) -> bytes:
    kinds: tuple[Callable[[Any], Any], ...] = (int, float, str, bytes, list, dict)

    def unknown(value: Any) -> Any:
        """Return what stands for a value that msgpack does not know: a tuple, or an instance of a subclass."""
        if isinstance(value, tuple):
            if depth == _DEEPEST_TUPLES:
                raise ValueError(f"more than {depth} tuples lie in each other")
            return msgpack.ExtType(_TUPLE, _pack_value(list(value), depth + 1))
        for kind in kinds:
            if isinstance(value, cast("type", kind)):
                return kind(value)
        raise ConfigError(
            f"{type(value).__name__} does not travel: send None, bool, int, float, str, bytes, or a list, tuple or "
            "dict of these; arrays by themselves"
        )

    packed: bytes = msgpack.packb(value, default=unknown, strict_types=True)
    return packed


def unpack_value(packed: Buffer) -> Any:
    """Return the value of which `pack_value` made these bytes. Raises FramingError for any others."""
    return _unpack_value(packed, 0)


def _unpack_value(packed: Buffer, depth: int) -> Any:
    def extension(code: int, inside: bytes) -> Any:
        items = _unpack_value(inside, depth + 1) if code == _TUPLE and depth < _DEEPEST_TUPLES else None
        if type(items) is not list:
            raise FramingError(f"a value of extension {code}, {depth} deep, which no version of ours packs")
        return tuple(items)

    try:
        return msgpack.unpackb(packed, ext_hook=extension, strict_map_key=False)
    except Exception as error:  # msgpack raises several kinds, ValueError and its own among them
        raise FramingError(f"no packed value: {error!r:.200}") from None


def split(transfer: int, frames: Sequence[Buffer], stamp: Stamp = UNSTAMPED) -> list[tuple[bytes, Buffer]]:
    """Return the chunks of a transfer, ready to send: (head, payload frame) each; no frame is copied."""
    return [(encode_message(Chunk(transfer, index), stamp), frame) for index, frame in enumerate(frames)]


class Assembler:
    """The frames of the announced transfers of one peer, until each is whole.

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
        missing = len(sizes) - len(held)
        if missing < 1 or any(len(frame) != size for frame, size in zip(held, sizes, strict=False)):
            raise FramingError(f"{len(held)} frames are here of {len(sizes)} that are announced, of other sizes")
        self.expected_bytes += sum(sizes)
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
        return announcement, cast("list[Buffer]", frames)

    def forget(self, transfer: int) -> None:
        """Drop an open transfer and its frames; no error if there is none."""
        if transfer in self._open:
            announcement, _, _ = self._open.pop(transfer)
            self.expected_bytes -= sum(announcement.sizes)

    def clear(self) -> None:
        self._open.clear()
        self.expected_bytes = 0

    def __contains__(self, transfer: object) -> bool:
        return transfer in self._open

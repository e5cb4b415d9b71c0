"""Turn a message into bytes and back, and put the chunks of a transfer together again.

Rule 1: the head is msgpack, [PROTOCOL_VERSION, incarnation, number, kind, fields] (incarnation, number: `fencing`);
nothing that comes in is ever executed or unpickled.
Rule 2: sizes are bounded before anything is allocated; whatever is wrong is a FramingError that costs its sender alone.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import msgpack

from zmqtrain.core.errors import ConfigError, FramingError
from zmqtrain.core.types import MAX_FRAME_BYTES, Buffer
from zmqtrain.protocol.fencing import MAX_INCARNATION, UNSTAMPED, Stamp
from zmqtrain.protocol.messages import MESSAGES, Announcement, Chunk, Message

PROTOCOL_VERSION = 4
MAX_HEAD_BYTES = 1 << 20

OPENED_BYTES = 64
"""So many bytes of a head hold all that stands before its fields."""

Check = Callable[[Any], Any]
ColumnCheck = Callable[[Collection[Any]], None]


class Head(NamedTuple):
    """A head whose fields are not read yet."""

    stamp: Stamp
    kind: type[Message]
    fields: Buffer


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
        if type(value) is wanted:
            return value
        if wanted is float and type(value) is int:
            return float(value)
        raise FramingError(f"expected {wanted.__name__}, got {type(value).__name__}")

    return check


def _one_of(wanted: Collection[type]) -> Check:
    """Return the check of a union of plain types; an int stays one, also beside float."""

    def check(value: Any) -> Any:
        if type(value) in wanted:
            return value
        if float in wanted and type(value) is int:
            return float(value)
        raise FramingError(f"unexpected {type(value).__name__}")

    return check


def _checker(annotation: Any) -> Check:
    """Build the check of one annotated field: plain types, X | Y, tuple[X, ...], tuple[X, Y], dict[str, X], None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (tuple, dict) and (check_all := _column_check(annotation)) is not None:

        def check(value: Any) -> Any:
            check_all((value,))
            return value

        return check
    if origin is dict:
        check_names, inner = _column_check(arguments[0]), _checker(arguments[1])
        assert check_names is not None, "the keys of a map are texts"

        def check_map(value: Any) -> Any:
            check_names(_plain(dict)(value))
            return {name: inner(one) for name, one in value.items()}

        return check_map
    if origin in (types.UnionType, typing.Union):
        plain = frozenset(one for one in arguments if typing.get_origin(one) is None)
        others = [_checker(one) for one in arguments if one not in plain]
        assert len(others) <= 1, "a union has one container at most"
        if not others:
            return _one_of(plain)
        return lambda value: value if type(value) in plain else others[0](value)
    assert origin is None, f"no check is known for {annotation}"
    return _plain(annotation)


def _column_check(annotation: Any) -> ColumnCheck | None:
    """Build the check of many values of one annotation at once, without a Python call for each of them.

    None: one by one, as some must be converted (an int where a float is due).
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        endless = len(arguments) == 2 and arguments[1] is Ellipsis
        inners = [_column_check(one) for one in (arguments[:1] if endless else arguments)]
        checks = [one for one in inners if one is not None]
        return None if len(checks) < len(inners) else _tuples_check(checks, endless)
    if origin is dict:
        keys, values = (_column_check(one) for one in arguments)
        return None if keys is None or values is None else _maps_check(keys, values)
    wanted = frozenset(arguments or (annotation,))
    return None if float in wanted and int not in wanted else _types_check(wanted)


def _types_check(wanted: frozenset[type]) -> ColumnCheck:
    words = " or ".join(sorted(one.__name__ for one in wanted))

    def check(column: Collection[Any]) -> None:
        for other in {*map(type, column)} - wanted:
            raise FramingError(f"expected {words}, got {other.__name__}")

    return check


def _tuples_check(inners: Sequence[ColumnCheck], endless: bool) -> ColumnCheck:
    check_types = _types_check(frozenset([tuple]))

    def check(column: Collection[Any]) -> None:
        check_types(column)
        if endless:
            return inners[0]([*chain.from_iterable(column)])
        for count in {*map(len, column)} - {len(inners)}:
            raise FramingError(f"expected {len(inners)} fields, got {count}")
        for place, inner in enumerate(inners):
            inner([*map(itemgetter(place), column)])

    return check


def _maps_check(keys: ColumnCheck, values: ColumnCheck) -> ColumnCheck:
    check_types = _types_check(frozenset([dict]))

    def check(column: Collection[Any]) -> None:
        check_types(column)
        keys([*chain.from_iterable(column)])
        values([*chain.from_iterable(one.values() for one in column)])

    return check


_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in MESSAGES}
_CHECKS: dict[type[Message], dict[str, Check]] = {
    kind: {field: _checker(hint) for field, hint in typing.get_type_hints(kind).items()} for kind in MESSAGES
}
_FIELDS: dict[type[Message], tuple[str, ...]] = {kind: tuple(f.name for f in fields(kind)) for kind in MESSAGES}


def encode_message(message: Message, stamp: Stamp = UNSTAMPED) -> bytes:
    """Return the head of a message: a few dozen bytes for most, about 60 bytes a leaf where a model is described."""
    kind = type(message)
    body = {name: getattr(message, name) for name in _FIELDS[kind]}
    packed: bytes = msgpack.packb([PROTOCOL_VERSION, *stamp, kind.__name__, body])
    return packed


def decode_message(frame: Buffer) -> Message:
    """Read one head, whatever its stamp. Raises what `decode_head` does."""
    return read_fields(open_head(frame))


def decode_head(frame: Buffer) -> tuple[Stamp, Message]:
    """Read one head. Raises FramingError for anything that is no message, ProtocolVersionError for another version."""
    head = open_head(frame)
    return head.stamp, read_fields(head)


def open_head(frame: Buffer) -> Head:
    """Read of a head its stamp and its kind, at the same cost however large it is. Raises as `decode_head` does."""
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


def read_fields(head: Head) -> Message:
    """Read the fields of a head. Raises FramingError for others than its message has, and for other types."""
    name = head.kind.__name__
    try:
        body = msgpack.unpackb(head.fields, use_list=False, strict_map_key=True)
    except Exception as error:  # as above
        raise FramingError(f"no msgpack: {error!r:.100}") from None
    checks = _CHECKS[head.kind]
    if type(body) is not dict or body.keys() != checks.keys():
        raise FramingError(f"{name} has the fields {', '.join(checks)}")
    for field, value in body.items():
        try:
            body[field] = checks[field](value)
        except FramingError as error:
            raise FramingError(f"{name}.{field}: {error}") from None
    return head.kind(**body)


_TUPLE = 1
"""The code of msgpack's extension in which a tuple travels: its items, as a packed list."""

_DEEPEST_TUPLES = 64
"""So many tuples may lie in each other: each is packed and unpacked by a call of its own."""


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
            if isinstance(value, typing.cast("type", kind)):
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

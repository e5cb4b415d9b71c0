"""Make the inputs of a fuzzer: sessions as bytes, a corpus of honest ones, and mutations that know what a message is.

    session = seed *( record )        seed: which settings the target begins with
    record  = kind who *( length frame )        kind: how many frames; 0: time passes

Rule 1: any bytes are a session: what is cut short ends it.  Rule 2: a mutated message is mostly a message still: a
field of it, its order, its frames or its payload is another; a part of all mutations is of plain bytes.
Rule 3: everything follows from the seed of the generator that is given.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import msgpack

from zmqtrain.protocol.framing import PROTOCOL_VERSION
from zmqtrain.protocol.messages import MESSAGES

__all__ = [
    "MOST_FRAMES",
    "MOST_RECORDS",
    "Record",
    "mutate_bytes",
    "mutate_head",
    "mutate_session",
    "pack_session",
    "read_session",
]

Record = tuple[int, tuple[bytes, ...]]
"""Who says it, and the frames of the message; no frames: time passes."""

MOST_FRAMES, MOST_RECORDS = 7, 256
_LENGTH = struct.Struct("<I")
NUMBERS = (
    *(-(1 << 63), -(1 << 31), -2, -1, 0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 1000, 4096, 65535, 65536),
    *(1 << 20, 4 << 20, (4 << 20) + 1, 1 << 31, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e12, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *(
        "",
        "x",
        "node",
        "observer",
        "process",
        "broker",
        "standby",
        "w",
        "float32",
        "float64",
        "int8",
        "ternary",
        "sum",
        "unknown",
    ),
    *("tcp://127.0.0.1:5555", "bsp", "bounded:s=3", "adam:rate=0.1", "sgd:rate=1e400", "allreduce:ring", "a" * 65),
    *("é" * 300, "\n\x1b[31m", "\x00" * 9, "pc-0#00", "[" * 200, "w[0:3]", "float32[3]", "{'a': 'float32[3]'}"),
)


def pack_session(seed: int, records: Sequence[Record]) -> bytes:
    """Return a session as bytes; `read_session` gives it back."""
    parts = [bytes([seed & 255])]
    for who, frames in records[:MOST_RECORDS]:
        parts.append(bytes([min(len(frames), MOST_FRAMES), who & 255]))
        for frame in frames[:MOST_FRAMES]:
            parts += [_LENGTH.pack(len(frame)), frame]
    return b"".join(parts)


def read_session(data: bytes) -> tuple[int, list[Record]]:
    """Return the seed and the records of any bytes."""
    records: list[Record] = []
    place = 1
    while place + 2 <= len(data) and len(records) < MOST_RECORDS:
        count, who = data[place] % (MOST_FRAMES + 1), data[place + 1]
        place += 2
        frames = []
        for _ in range(count):
            if place + _LENGTH.size > len(data):
                break
            (length,) = _LENGTH.unpack_from(data, place)
            place += _LENGTH.size
            frames.append(data[place : place + length])
            place += length
        records.append((who, tuple(frames)))
    return (data[0] if data else 0), records


def mutate_session(data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
    """Return a session that differs in some of its records. others: sessions from which records may come."""
    seed, records = read_session(data)
    if random.random() < 0.05:
        return mutate_bytes(data, random)
    if random.random() < 0.1:
        seed = random.randrange(256)
    for _ in range(1 + min(int(random.expovariate(0.35)), 24)):
        records = _mutate_records(records, random, others)
    return pack_session(seed, records)


def _mutate_records(records: list[Record], random: Random, others: Sequence[bytes]) -> list[Record]:
    if not records:
        return read_session(random.choice(others))[1]
    at, what = random.randrange(len(records)), random.random()
    who, frames = records[at]
    if what < 0.5 and frames:
        head = mutate_head(frames[0], random)
        return [*records[:at], (who, (head, *frames[1:])), *records[at + 1 :]]
    if what < 0.56:
        return [*records[:at], *records[at + 1 :]]
    if what < 0.62:
        return [*records[:at], *[records[at]] * random.choice((2, 2, 3, 20)), *records[at + 1 :]]
    if what < 0.68:
        other = random.randrange(len(records))
        records = list(records)
        records[at], records[other] = records[other], records[at]
        return records
    if what < 0.74:
        return [*records[:at], (random.randrange(8), frames), *records[at + 1 :]]
    if what < 0.82:
        theirs = read_session(random.choice(others))[1]
        start = random.randrange(len(theirs) + 1)
        return [*records[:at], *theirs[start : start + random.choice((1, 1, 2, 5, 40))], *records[at:]]
    if what < 0.86:
        return [*records[:at], (random.randrange(8), ()), *records[at:]]
    if what < 0.90:
        return [*records[:at], (who, (_any_message(random),)), *records[at:]]
    if len(frames) > 1 and what < 0.97:
        which = random.randrange(1, len(frames))
        frame = mutate_bytes(frames[which], random)
        return [*records[:at], (who, (*frames[:which], frame, *frames[which + 1 :])), *records[at + 1 :]]
    frames = frames[:-1] if random.random() < 0.5 else (*frames, *frames[-1:], b"")
    return [*records[:at], (who, frames), *records[at + 1 :]]


def mutate_head(head: bytes, random: Random) -> bytes:
    """Return the head of another message: one field of it is another; now and then, other bytes."""
    if random.random() < 0.1:
        return mutate_bytes(head, random)
    try:
        *stamp, kind, body = msgpack.unpackb(head, use_list=False)
        body = dict(body)  # no field of a record that is none
        name = random.choice(sorted(body))
    except (ValueError, TypeError, AttributeError, IndexError):
        return mutate_bytes(head, random)
    body[name] = _mutate_value(body[name], random)
    if random.random() < 0.02 and stamp:
        at = random.randrange(len(stamp))
        stamp[at] = _mutate_value(stamp[at], random)
    return _pack([*stamp, kind, body], head)


def _pack(parts: Any, otherwise: bytes) -> bytes:
    try:
        packed: bytes = msgpack.packb(parts)
        return packed
    except (OverflowError, ValueError, TypeError):
        return otherwise


def _mutate_value(value: Any, random: Random) -> Any:
    chance = random.random()
    if chance < 0.05:
        return _any_value(random, 2)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice(NUMBERS) if chance < 0.5 else value + random.choice((-2, -1, 1, 2, 1 << 16))
    if isinstance(value, float):
        return random.choice(FLOATS) if chance < 0.6 else value * random.choice((-1.0, 0.5, 2.0, 1e6))
    if isinstance(value, str):
        if chance < 0.6:
            return random.choice(TEXTS)
        return mutate_bytes(value.encode(), random).decode("utf-8", "ignore")
    if isinstance(value, tuple | list):
        items = list(value)
        at = random.randrange(len(items) + 1)
        if items and chance < 0.6:
            at = min(at, len(items) - 1)
            items[at] = _mutate_value(items[at], random)
        elif chance < 0.75:
            del items[at : at + 1]
        elif chance < 0.9:
            items[at:at] = items[:1] or [_any_value(random, 1)]
        else:
            items = items * random.choice((0, 2, 3, 40))
        return items
    if isinstance(value, dict):
        changed = dict(value)
        key = random.choice(sorted(map(str, changed))) if changed and chance < 0.7 else random.choice(TEXTS)
        changed[key] = _mutate_value(changed[key], random) if key in changed else _any_value(random, 1)
        return changed
    return _any_value(random, 2)


def _any_value(random: Random, depth: int) -> Any:
    choice = random.randrange(10 if depth else 7)
    if choice < 3:
        return random.choice(NUMBERS)
    if choice == 3:
        return random.choice(FLOATS)
    if choice < 6:
        return random.choice((*TEXTS, None, True, False, b"", b"\xff\x00", msgpack.ExtType(5, b"abc")))
    if choice == 6:
        return []
    if choice < 9:
        return [_any_value(random, depth - 1) for _ in range(random.randrange(4))]
    return {random.choice(TEXTS): _any_value(random, depth - 1) for _ in range(random.randrange(3))}


def _any_message(random: Random) -> bytes:
    """Return a message of any kind, its fields of any value, most of them of the right type."""
    kind = random.choice(MESSAGES)
    body = {}
    for name, text in kind.__annotations__.items():
        right: Any = random.choice(NUMBERS)
        if text.startswith("str"):
            right = random.choice(TEXTS)
        elif text.startswith("float"):
            right = random.choice(FLOATS)
        elif text.startswith("bool"):
            right = random.random() < 0.5
        elif text.startswith("tuple[int"):
            right = [random.choice(NUMBERS) for _ in range(random.randrange(4))]
        elif text.startswith("tuple"):
            right = []
        elif text.startswith("dict"):
            right = {}
        body[name] = right if random.random() < 0.97 else _any_value(random, 2)
    return _pack([PROTOCOL_VERSION, 0, 0, kind.__name__, body], b"")


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Return bytes that differ in one place or several."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4, 8))):
        at, what = random.randrange(len(changed) + 1), random.random()
        if what < 0.4 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif what < 0.6 and at < len(changed):
            changed[at] = random.choice((0, 1, 127, 128, 192, 255, random.randrange(256)))
        elif what < 0.7:
            del changed[at : at + random.choice((1, 1, 2, 4, 16, 1 << 20))]
        elif what < 0.85:
            changed[at:at] = random.randbytes(random.choice((1, 1, 2, 4, 16)))
        else:
            start = random.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + random.choice((1, 4, 16, 64))]
    return bytes(changed)

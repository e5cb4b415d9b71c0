"""Reduce arrays that cross the network encoded: each share goes to its owner, who sums it up and sends the sum to all.

Rule 1: all ranks decode the same bytes, the owner too: the result is bit-identical on all, whatever the codec loses.
Rule 2: the owner sums in float32, in the order of ranks, its own values as they are, and encodes once.
Rule 3: the codec is what it is handed in as: a pillar imports no other.  It keeps nothing from one call to the next.
Source: Seide et al. 2014, 1-bit SGD, sec. 4 (quantised exchange by owners of stripes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zmqtrain.collectives.algorithms import Receive, Send, Steps, share_bounds
from zmqtrain.collectives.arrays import Tree
from zmqtrain.core.errors import ConfigError

_MESSAGE_BYTES = 256 << 10
_AHEAD = 2
"""So many messages are encoded ahead of those that are awaited."""


class Coder(Protocol):
    """What is needed of a codec: see `zmqtrain.codecs.base.Codec`, which is one."""

    name: str
    init: Any
    layout: Any
    encode: Any
    check: Any
    decode_into: Any
    slab: int


def check_coder(codec: Any, operation: str, tree: Tree) -> Coder:
    """Return the codec; raise ConfigError if it cannot carry these arrays, or this operation."""
    wanted = ("name", "init", "layout", "encode", "check", "decode_into", "slab")
    if not all(hasattr(codec, name) for name in wanted):
        raise ConfigError(f"codec={codec!r} is no codec: give a spec such as 'int8'")
    if operation not in ("sum", "mean"):
        raise ConfigError(f"op={operation!r} with a codec: only sum and mean go encoded")
    if any(shape.dtype != np.float32 for shape in tree.shapes):
        raise ConfigError(f"a codec takes float32 arrays, got {tree.text[:200]}")
    if not _is_empty(codec.init(1)):
        raise ConfigError(
            f"the codec {codec.name} keeps state from one call to the next, and an allreduce keeps none: "
            "take one without feedback, randomk or fragments"
        )
    coder: Coder = codec
    if tree.nbytes:
        _try_out(codec)
    return coder


@lru_cache(maxsize=64)
def _try_out(codec: Any) -> None:
    """Code a slab in the caller's thread: a codec may compile at its first one, for longer than a port may rest."""
    part = [slice(0, codec.slab)]
    values = np.zeros(codec.slab, np.float32)
    _decode(codec, _encode(codec, values, part), values, part, add=True)


def _is_empty(state: Any) -> bool:
    return isinstance(state, tuple) and all(map(_is_empty, state))


def coded_allreduce(rank: int, size: int, buffer: NDArray[Any], codec: Coder, mean: bool) -> Steps:
    """Reduce `buffer` (flat float32, of the same length on all ranks) in place; messages are bytes.

    Share r is a whole number of slabs. Order: ((x[0] + x[1]) + ...) + x[size-1]. A rank sends 2 (size - 1) / size of an
    encoded buffer. Raises NonFiniteDelta if values are not finite, CodecError for bytes that the codec did not make.
    """
    slabs = [slice(start, min(start + codec.slab, buffer.size)) for start in range(0, buffer.size, codec.slab)]
    bounds = share_bounds(len(slabs), size)
    together = max(1, _MESSAGE_BYTES // max(1, _encoded_bytes(codec, min(codec.slab, max(1, buffer.size)))))
    messages = [
        [
            slabs[start : min(start + together, bounds[owner + 1])]
            for start in range(bounds[owner], bounds[owner + 1], together)
        ]
        for owner in range(size)
    ]
    others = [(rank - distance) % size for distance in range(1, size)]
    steps = max(map(len, messages), default=0)
    for index in range(steps + _AHEAD):
        for owner in others:
            if index < len(messages[owner]):
                yield Send(owner, _encode(codec, buffer, messages[owner][index]))
        if _AHEAD <= index < len(messages[rank]) + _AHEAD:
            yield from _reduce(rank, size, buffer, codec, messages[rank][index - _AHEAD], mean, others)
    for index in range(steps):
        for owner in reversed(others):
            if index < len(messages[owner]):
                lent = yield Receive(
                    owner, sum(_encoded_bytes(codec, _length(part)) for part in messages[owner][index])
                )
                _decode(codec, lent, buffer, messages[owner][index], add=False)


def _reduce(
    rank: int, size: int, buffer: NDArray[Any], codec: Coder, parts: Sequence[slice], mean: bool, others: Sequence[int]
) -> Steps:
    """Sum one message of the own share over all ranks, and send it to all."""
    begin, end = parts[0].start, parts[-1].stop
    nbytes = sum(_encoded_bytes(codec, _length(part)) for part in parts)
    shifted = [slice(part.start - begin, part.stop - begin) for part in parts]
    total = np.zeros(end - begin, np.float32)
    for source in range(size):
        if source == rank:
            total += buffer[begin:end]
        else:
            lent = yield Receive(source, nbytes)
            _decode(codec, lent, total, shifted, add=True)
    if mean:
        total /= np.float32(size)
    encoded = _encode(codec, total, shifted)
    for to in others:
        yield Send(to, encoded)
    _decode(codec, encoded, buffer, parts, add=False)


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _encoded_bytes(codec: Coder, values: int) -> int:
    return sum(np.dtype(dtype).itemsize * count for dtype, count in codec.layout(values))


def _encode(codec: Coder, values: NDArray[Any], parts: Sequence[slice]) -> NDArray[np.uint8]:
    made: list[NDArray[np.uint8]] = []
    for part in parts:
        buffers, _ = codec.encode(values[part], codec.init(_length(part)))
        made += [np.ascontiguousarray(buffer).reshape(-1).view(np.uint8) for buffer in buffers]
    return np.concatenate(made)


def _decode(codec: Coder, lent: Any, out: NDArray[Any], parts: Sequence[slice], *, add: bool) -> None:
    """Decode a message into these parts of `out`, or add it to them."""
    cut = _cut(codec, lent, parts)
    for part, buffers in zip(parts, cut, strict=True):
        codec.check(buffers, _length(part))
        codec.decode_into(buffers, out[part], add)


def _cut(codec: Coder, lent: NDArray[np.uint8], parts: Sequence[slice]) -> Iterator[list[NDArray[Any]]]:
    start = 0
    for part in parts:
        buffers = []
        for dtype, count in codec.layout(_length(part)):
            end = start + np.dtype(dtype).itemsize * count
            buffers.append(np.frombuffer(lent[start:end].tobytes(), dtype))
            start = end
        yield buffers

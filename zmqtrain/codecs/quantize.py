"""Send blocks of whole numbers with one scale each: int8.

Rule 1: a scale is a bfloat16, sent as uint16; its reciprocal is looked up, not divided, so that every machine has the
same one.  Rule 2: a block whose largest magnitude is under 2^-100 is sent as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqtrain.codecs.codec import (
    PIECE_VALUES,
    SMALLEST_MAGNITUDE_BITS,
    Codec,
    Scratch,
    Stateless,
    block_count,
    check_scales,
    needs_finite,
    needs_slab,
    read_buffers,
)
from zmqtrain.errors import CodecError
from zmqtrain.types import Array, Buffer

__all__ = ["int8", "scale_blocks"]

_scratch = Scratch()
_MAGNITUDE = 0x7FFFFFFF
_ONE_127TH = np.float32(1 / 127)
_LARGEST_SCALE_BITS = (127 + 121) << 7 | 1
"""The largest bfloat16 that times 127 is finite: 2^121 (1 + 1/128)."""
_RECIPROCAL_BITS = (128 / np.arange(128, 256)).astype(np.float32).view(np.int32)
"""The float32 bits of 1 / (1 + m/128) for the seven bits m of a bfloat16's mantissa."""


def int8(block: int = 256) -> Codec:
    """Send each block as int8 codes in -127..127 and a scale of largest magnitude / 127, rounded up to a bfloat16.

    Error: |x - decoded| <= 0.51 scale <= largest magnitude of the block / 246; blocks under 2^-100 become zero.
    1 byte a value and 2 a block.
    """
    name = f"int8:block={block}"

    def layout(count: int) -> list[tuple[Any, int]]:
        return [(np.int8, count), (np.uint16, block_count(count, block))]

    def encode(x: Array, state: Stateless) -> tuple[tuple[Array, ...], Stateless]:
        needs_slab(x, name)
        return (_encode_numpy if isinstance(x, np.ndarray) else _encode)(x, block), state

    def decode(buffers: Sequence[Buffer | Array], count: int) -> Array:
        codes, scales = read_buffers(buffers, layout(count), name)
        if not isinstance(codes, np.ndarray):
            return _decode(codes, scales, block)
        out = np.empty(count, np.float32)
        decode_into((codes, scales), out, False)
        return out

    def decode_into(buffers: Sequence[Buffer | Array], out: np.ndarray[Any, Any], add: bool) -> None:
        codes, scales = read_buffers(buffers, layout(out.size), name)
        scales = (scales.astype(np.uint32) << 16).view(np.float32)
        step = PIECE_VALUES // block * block
        for start in range(0, out.size, step):
            target = out[start : start + step]
            values = _scratch.take("values", target.size, np.float32) if add else target
            np.copyto(values, codes[start : start + step])
            scale_blocks(values, scales[start // block :], block)
            if add:
                np.add(target, values, out=target)

    def check(buffers: Sequence[Buffer | Array], count: int) -> None:
        codes, scales = read_buffers(buffers, layout(count), name)
        check_scales(scales, _LARGEST_SCALE_BITS, name)
        if np.minimum.reduce(codes) < -127:
            raise CodecError(f"{name}: the code -128 is not one of this codec")

    return Codec(
        name, lambda count: (), encode, decode, check, lambda count: count + 2 * block_count(count, block), decode_into
    )


def scale_blocks(values: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], block: int) -> None:
    """Multiply each block of values (float32[n], in place) by its scale; `scales` may be longer."""
    whole = values.size // block
    if whole:
        head = values[: whole * block].reshape(whole, block)
        np.multiply(head, scales[:whole, None], out=head)
    if whole * block < values.size:
        tail = values[whole * block :]
        np.multiply(tail, scales[whole], out=tail)


def _encode(x: Array, block: int) -> tuple[Array, Array]:
    xp = x.__array_namespace__()
    count, blocks = x.shape[0], block_count(x.shape[0], block)
    padded = xp.concatenate([x, xp.zeros(blocks * block - count, dtype=xp.float32)]).reshape(blocks, block)
    largest = xp.max(padded.view(xp.int32) & _MAGNITUDE, axis=1)
    scales, reciprocals = _scales(xp, largest, xp.asarray(_RECIPROCAL_BITS))
    codes = xp.rint(padded * reciprocals[:, None]).astype(xp.int8)
    return codes.reshape(-1)[:count], scales


def _scales(xp: Any, largest: Array, reciprocal_bits: Array) -> tuple[Array, Array]:
    """Return the scales, bfloat16 as uint16, and their reciprocals, float32 (both 0 for a block under 2^-100)."""
    alive = largest >= SMALLEST_MAGNITUDE_BITS
    exact = (xp.where(alive, largest, SMALLEST_MAGNITUDE_BITS).view(xp.float32) * _ONE_127TH).view(xp.int32)
    bits = xp.minimum((exact + 0xFFFF) >> 16, _LARGEST_SCALE_BITS)
    inverse = reciprocal_bits[bits & 127] - (((bits >> 7) - 127) << 23)
    return xp.where(alive, bits, 0).astype(xp.uint16), xp.where(alive, inverse, 0).view(xp.float32)


def _decode(codes: Array, scales: Array, block: int) -> Array:
    xp = codes.__array_namespace__()
    count, blocks = codes.shape[0], scales.shape[0]
    padded = xp.concatenate([codes, xp.zeros(blocks * block - count, dtype=codes.dtype)]).reshape(blocks, block)
    steps = (scales.astype(xp.uint32) << 16).view(xp.float32)
    return (padded.astype(xp.float32) * steps[:, None]).reshape(-1)[:count]


def _encode_numpy(x: np.ndarray[Any, Any], block: int) -> tuple[Array, Array]:
    x = np.ascontiguousarray(x)
    codes, scales = np.empty(x.size, np.int8), np.empty(block_count(x.size, block), np.uint16)
    step = PIECE_VALUES // block * block
    for start in range(0, x.size, step):
        piece = x[start : start + step]
        magnitudes = np.bitwise_and(
            piece.view(np.int32), _MAGNITUDE, out=_scratch.take("magnitudes", piece.size, np.int32)
        )
        first, whole = start // block, piece.size // block
        blocks = block_count(piece.size, block)
        largest = np.empty(blocks, np.int32)
        np.maximum.reduce(magnitudes[: whole * block].reshape(whole, block), axis=1, out=largest[:whole])
        if whole < blocks:
            largest[whole] = np.maximum.reduce(magnitudes[whole * block :])
        needs_finite(int(largest.max()), x.size)
        scales[first : first + blocks], reciprocals = _scales(np, largest, _RECIPROCAL_BITS)
        values = _scratch.take("values", piece.size, np.float32)
        np.copyto(values, piece)
        scale_blocks(values, reciprocals, block)
        np.rint(values, out=values)
        np.copyto(codes[start : start + step], values, casting="unsafe")
    return codes, scales

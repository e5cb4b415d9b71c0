"""Codecs of blocks of whole numbers with one scale each: int8 and int4, rounded to the nearest or at random.

Rule 1: a scale is a bfloat16, sent as uint16; its reciprocal is looked up, not divided, so that every machine has the
same one.  Rule 2: a block whose largest magnitude is under 2^-100 is sent as zeros.
Rule 3: chance is a hash of the value's own bits and its place in the slab: there is no state, and every machine draws
the same.  Rule 4: two int4 codes lie in a byte, value i with value i + m: vectors are packed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from zmqtrain.codecs import fast
from zmqtrain.codecs.codec import (
    MAGNITUDE,
    PIECE_VALUES,
    SMALLEST_MAGNITUDE_BITS,
    Codec,
    Numpy,
    Scratch,
    Sections,
    block_codec_name,
    block_count,
    check_scales,
    in_blocks,
    needs_finite,
    plain,
    plain_codec,
    put,
)
from zmqtrain.core.errors import CodecError
from zmqtrain.core.types import Array

_scratch = Scratch()
_RECIPROCAL_BITS = (128 / np.arange(128, 256)).astype(np.float32).view(np.int32)
"""The float32 bits of 1 / (1 + m/128) for the seven bits m of a bfloat16's mantissa."""
_GOLDEN = 0x9E3779B9
_MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))
"""Shift and xor, then multiply: the rounds of the hash."""
_SPREAD = np.arange(PIECE_VALUES, dtype=np.uint32) * np.uint32(_GOLDEN)
_FEW_VALUES = 8192
"""Up to how many values `_encode_few` is sooner than pieces and scratch: what `topk` passes on."""
_EIGHTS = 0x88
"""A byte of two codes that are zero: an int4 code is stored with 8 added, so that the nibble 0 is never made."""


class _Range(NamedTuple):
    """most: the largest code.  inverse: 1 / most.  largest_scale_bits: the largest bfloat16 that times most is finite.
    stochastic: codes are rounded at random."""

    most: int
    inverse: np.float32
    largest_scale_bits: int
    stochastic: bool


_INT8 = _Range(127, np.float32(1 / 127), (127 + 121) << 7 | 1, False)
_INT4 = _Range(7, np.float32(1 / 7), (127 + 125) << 7 | 18, False)


def int8(block: int = 256) -> Codec:
    """Send each block as int8 codes in -127..127 and a scale of largest magnitude / 127, rounded up to a bfloat16.

    Error: |x - decoded| <= 0.51 scale <= largest magnitude of the block / 246, and over a block less than x in norm:
    error feedback converges. Blocks under 2^-100 become zero. 1 byte a value and 2 a block.
    """
    return _in_bytes("int8", _INT8, block)


def int8_stochastic(block: int = 256) -> Codec:
    """Send as `int8`, but round each value up or down with the chance that makes it right on average.

    Error: |x - decoded| < 1.01 scale, and its square is, on average, less than that of x; the mean error of many values
    is near 0: for averages of many nodes without error feedback. The spec name is int8s. The chance is drawn in steps
    of 1/65536 of a code by hashing the value's bits and its index: the same value at the same place is rounded the same
    way every time.
    Source: Gupta et al. 2015, Deep Learning with Limited Numerical Precision, sec. 3; Alistarh et al. 2017, QSGD.
    """
    return _in_bytes("int8s", _INT8._replace(stochastic=True), block)


def int4(block: int = 128) -> Codec:
    """Send each block as codes in -7..7, two in a byte, and a scale of largest magnitude / 7, rounded up to a bfloat16.

    Byte i holds the code of value i, plus 8, in its low nibble, and that of value i + m in the high one, m = half of n,
    rounded up; where there is no such value, 8. Error: |x - decoded| <= 0.51 scale <= largest magnitude of the block /
    13.5, and over a block less than x in norm. Blocks under 2^-100 become zero. 1/2 byte a value and 2 bytes a block.
    """
    return _in_nibbles("int4", _INT4, block)


def int4_stochastic(block: int = 128) -> Codec:
    """Send as `int4`, rounded at random as in `int8_stochastic`; the spec name is int4s.

    Error: |x - decoded| < 1.01 scale; in blocks of at most 256 values its square is, on average, less than that of x.
    """
    return _in_nibbles("int4s", _INT4._replace(stochastic=True), block)


def _in_bytes(family: str, span: _Range, block: int) -> Codec:
    name = block_codec_name(family, block)

    def layout(count: int) -> Sections:
        return (np.int8, count), (np.uint16, block_count(count, block))

    def encode(x: Array) -> tuple[Array, ...]:
        if not isinstance(x, np.ndarray):
            return _encode(x, block, span)
        codes = np.empty(x.size, np.int8)
        return codes, _encode_numpy(x, block, span, codes)

    def decode(arrays: tuple[Array, ...], count: int) -> Array:
        return decode_blocks(arrays[0], arrays[1], block)

    def write(arrays: tuple[Array, ...], out: Numpy, add: bool) -> None:
        write_blocks(arrays[0], arrays[1], out, block, add)

    def check(arrays: tuple[Array, ...], count: int) -> None:
        codes, scales = arrays
        check_scales(scales, span.largest_scale_bits, name)
        if np.minimum.reduce(codes) < -span.most:
            raise CodecError(f"{name}: the code {-span.most - 1} is not one of this codec")

    return plain_codec(name, layout, encode, decode, write, check, (1, span.most, block))


def _in_nibbles(family: str, span: _Range, block: int) -> Codec:
    name = block_codec_name(family, block)

    def layout(count: int) -> Sections:
        return (np.uint8, block_count(count, 2)), (np.uint16, block_count(count, block))

    def encode(x: Array) -> tuple[Array, ...]:
        if not isinstance(x, np.ndarray):
            codes, scales = _encode(x, block, span)
            return _pack(codes), scales
        codes = _scratch.take("codes", x.size, np.int8)
        scales = _encode_numpy(x, block, span, codes)
        return _pack_numpy(codes.view(np.uint8)), scales

    def decode(arrays: tuple[Array, ...], count: int) -> Array:
        return decode_blocks(_unpack(arrays[0])[:count], arrays[1], block)

    def write(arrays: tuple[Array, ...], out: Numpy, add: bool) -> None:
        write_blocks(_unpack_numpy(arrays[0])[: out.size], arrays[1], out, block, add)

    def check(arrays: tuple[Array, ...], count: int) -> None:
        packed, scales = arrays
        check_scales(scales, span.largest_scale_bits, name)
        if np.minimum.reduce(packed) < 16 or np.minimum.reduce(packed & 15) < 1:
            raise CodecError(f"{name}: the code {-span.most - 1} is not one of this codec")
        if count % 2 and packed[-1] >> 4 != _EIGHTS >> 4:
            raise CodecError(f"{name}: the last nibble stands for no value and is not 8")

    return plain_codec(name, layout, encode, decode, write, check, (1, span.most, block))


def scale_blocks(values: Numpy, scales: Numpy, block: int, out: Numpy | None = None) -> None:
    """Multiply each block of values (float32[n]) by its scale, in place or into `out`; `scales` may be longer."""
    out = values if out is None else out
    whole = values.size // block
    head = whole * block
    if whole:
        np.multiply(values[:head].reshape(whole, block), scales[:whole, None], out=out[:head].reshape(whole, block))
    if head < values.size:
        np.multiply(values[head:], scales[whole], out=out[head:])


def write_blocks(codes: Numpy, scales: Numpy, out: Numpy, block: int, add: bool) -> None:
    """Write codes (int8[n]) times the scale of their block (bfloat16 as uint16) to `out`, or add them to it."""
    steps = (scales.astype(np.uint32) << 16).view(np.float32)
    plain = out.flags.c_contiguous and out.flags.aligned and codes.flags.c_contiguous
    if plain and (kernels := fast.kernels(out.size)):
        kernels.write(codes, steps, out, block, add)
        return
    step = PIECE_VALUES // block * block
    for start in range(0, out.size, step):
        target = out[start : start + step]
        values = _scratch.take("values", target.size, np.float32) if add or not target.flags.c_contiguous else target
        np.copyto(values, codes[start : start + step])
        scale_blocks(values, steps[start // block :], block)
        if values is not target:
            put(values, target, add)


def decode_blocks(codes: Array, scales: Array, block: int) -> Array:
    """Return codes (int8[n]) times the scale of their block (bfloat16 as uint16): float32[n], of the same kind."""
    xp = codes.__array_namespace__()
    steps = (scales.astype(xp.uint32) << 16).view(xp.float32)
    return (in_blocks(codes, block).astype(xp.float32) * steps[:, None]).reshape(-1)[: codes.shape[0]]


def _encode(x: Array, block: int, span: _Range) -> tuple[Array, Array]:
    xp = x.__array_namespace__()
    padded = in_blocks(x, block)
    bits = padded.view(xp.int32)
    scales = _scale_bits(xp, xp.max(bits & MAGNITUDE, axis=1), span)
    values = padded * _reciprocals(xp, scales)[:, None]
    if span.stochastic:
        places = xp.arange(padded.size, dtype=xp.uint32).reshape(padded.shape)
        codes = _rounded_at_random(xp, values, bits.view(xp.uint32), places, span.most)
    else:
        codes = xp.rint(values)
    return codes.astype(xp.int8).reshape(-1)[: x.shape[0]], scales.astype(xp.uint16)


def _scale_bits(xp: Any, largest: Array, span: _Range) -> Array:
    """Return largest magnitude (bits, int32) / most, rounded up to a bfloat16: int32, 0 for a block under 2^-100."""
    exact = (largest.view(xp.float32) * span.inverse).view(xp.int32)
    bits = xp.minimum((exact + 0xFFFF) >> 16, span.largest_scale_bits)
    return xp.where(largest >= SMALLEST_MAGNITUDE_BITS, bits, 0)


def _reciprocals(xp: Any, scale_bits: Array) -> Array:
    turned = xp.asarray(_RECIPROCAL_BITS)[scale_bits & 127] - (((scale_bits >> 7) - 127) << 23)
    return xp.where(scale_bits > 0, turned, 0).view(xp.float32)


_RECIPROCALS = _reciprocals(np, np.arange(_INT4.largest_scale_bits + 1, dtype=np.int32))
"""One over each scale there is, by its bits."""


def _rounded_at_random(xp: Any, values: Array, bits: Array, places: Array, most: int) -> Array:
    """Return int32: values (float32, scaled) rounded up or down by a hash of their bits and places (uint32).

    Source of the hash: lowbias32, C. Wellons 2018, Prospecting for Hash Functions; the places spread by 2^32 / golden
    ratio. The value in units of 2^-16, a whole number under 2^24, and 16 bits of the hash are added and floored.
    """
    noise = bits ^ (places * xp.uint32(_GOLDEN))
    for shift, factor in _MIXING:
        noise = (noise ^ (noise >> shift)) * xp.uint32(factor)
    units = xp.rint(values * 65536).astype(xp.int32)
    return xp.clip((units + (noise & 0xFFFF).view(xp.int32)) >> 16, -most, most)


def _encode_numpy(x: Numpy, block: int, span: _Range, codes: Numpy) -> Numpy:
    """As `_encode`, piece by piece: fill `codes`, int8[n], and return the scales."""
    if x.size <= _FEW_VALUES and not span.stochastic and not fast.kernels(x.size):
        return _encode_few(x, block, span, codes)
    x = plain(x)
    scales = np.empty(block_count(x.size, block), np.uint16)
    if kernels := fast.kernels(x.size):
        worst = kernels.quantize(
            *(x, block, span.inverse, span.largest_scale_bits, _RECIPROCALS),
            *(span.most if span.stochastic else None, codes, scales),
        )
        needs_finite(worst, x.size)
        return scales
    step = PIECE_VALUES // block * block
    for start in range(0, x.size, step):
        piece = x[start : start + step]
        target = codes[start : start + step]
        magnitudes = _scratch.take("magnitudes", piece.size, np.int32)
        np.bitwise_and(piece.view(np.int32), MAGNITUDE, out=magnitudes)
        largest = np.maximum.reduceat(magnitudes, np.arange(0, piece.size, block))
        needs_finite(int(largest.max()), x.size)
        first = start // block
        scales[first : first + largest.size] = bits = _scale_bits(np, largest, span)
        values = magnitudes.view(np.float32)
        scale_blocks(piece, _RECIPROCALS.take(bits), block, values)
        if span.stochastic:
            _round_at_random_numpy(values, piece.view(np.uint32), start, span.most, target)
        else:
            np.rint(values, out=values)
            np.copyto(target, values, casting="unsafe")
    return scales


def _encode_few(x: Numpy, block: int, span: _Range, codes: Numpy) -> Numpy:
    """As `_encode_numpy`, rounding to the nearest, in the fewest calls: of so few values they are most of the cost."""
    largest = np.maximum.reduceat(x.view(np.int32) & MAGNITUDE, _starts(x.size, block))
    needs_finite(int(np.maximum.reduce(largest)), x.size)
    scales = _scale_bits(np, largest, span)
    values = np.repeat(_RECIPROCALS.take(scales), block)[: x.size]
    np.multiply(x, values, out=values)
    np.rint(values, out=values)
    np.copyto(codes, values, casting="unsafe")
    narrow: Numpy = scales.astype(np.uint16)
    return narrow


@lru_cache(maxsize=64)
def _starts(count: int, block: int) -> Numpy:
    return np.arange(0, count, block)


def _round_at_random_numpy(values: Numpy, bits: Numpy, start: int, most: int, codes: Numpy) -> None:
    """As `_rounded_at_random`, of a piece that begins at place `start`: fill `codes`, int8[n]; spoils the values."""
    noise, shifted = (_scratch.take(name, values.size, np.uint32) for name in ("noise", "shifted"))
    np.add(_SPREAD[: values.size], np.uint32(start * _GOLDEN & 0xFFFFFFFF), out=noise)
    np.bitwise_xor(noise, bits, out=noise)
    for shift, factor in _MIXING:
        np.right_shift(noise, shift, out=shifted)
        np.bitwise_xor(noise, shifted, out=noise)
        if factor > 1:
            np.multiply(noise, factor, out=noise)
    np.bitwise_and(noise, 0xFFFF, out=noise)
    np.multiply(values, 65536, out=values)
    np.rint(values, out=values)
    units = shifted.view(np.int32)
    np.copyto(units, values, casting="unsafe")
    np.add(units, noise.view(np.int32), out=units)
    np.right_shift(units, 16, out=units)
    np.clip(units, -most, most, out=units)
    np.copyto(codes, units, casting="unsafe")


def _pack(codes: Array) -> Array:
    xp, count = codes.__array_namespace__(), codes.shape[0]
    padded = xp.concatenate([codes, xp.zeros(count % 2, dtype=xp.int8)]).astype(xp.uint8).reshape(2, -1)
    return padded[0] + padded[1] * xp.uint8(16) + xp.uint8(_EIGHTS)


def _pack_numpy(codes: Numpy) -> Numpy:
    """As `_pack`, of codes as uint8 (-1 is 255): whatever overflows a byte is carried out of it."""
    packed = np.add(codes[: block_count(codes.size, 2)], _EIGHTS)
    high = _scratch.take("high", codes.size // 2, np.uint8)
    np.multiply(codes[packed.size :], 16, out=high)
    np.add(packed[: high.size], high, out=packed[: high.size])
    return packed


def _unpack(packed: Array) -> Array:
    xp = packed.__array_namespace__()
    return xp.concatenate([packed & 15, packed >> 4]).astype(xp.int8) - 8


def _unpack_numpy(packed: Numpy) -> Numpy:
    """Return int8[2 m] in scratch."""
    codes = _scratch.take("unpacked", 2 * packed.size, np.uint8)
    np.bitwise_and(packed, 15, out=codes[: packed.size])
    np.right_shift(packed, 4, out=codes[packed.size :])
    np.subtract(codes, 8, out=codes)
    return codes.view(np.int8)

"""Codec of -1, 0 and +1 times one scale a block: 1.6 bits a value.

Rule 1: which values are kept, and the scale, follow Ternary Weight Networks (Li & Liu 2016): values over 0.7 of the
block's mean magnitude are kept, the scale is the mean magnitude of the kept.
Rule 2: |x| is first cut to 9 bits of the block's largest power of two, by one exact multiplication: all sums after it
are sums of whole numbers.  Rule 3: five digits lie in a byte, value i with i + m, i + 2m, ...: vectors are packed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zmqtrain.codecs import fast
from zmqtrain.codecs.codec import (
    PIECE_VALUES,
    SMALLEST_MAGNITUDE_BITS,
    Codec,
    Numpy,
    Scratch,
    Sections,
    block_codec_name,
    block_count,
    check_scales,
    needs_finite,
    plain,
    plain_codec,
)
from zmqtrain.codecs.quantize import write_blocks
from zmqtrain.core.errors import CodecError
from zmqtrain.core.types import Array

_scratch = Scratch()
_MAGNITUDE = 0x7FFFFFFF
_DIGITS = 5
_LARGEST_BYTE = 3**_DIGITS - 1
_LARGEST_SCALE_BITS = 0x7F7F
_THRESHOLD, _THRESHOLD_UNIT = 717, 1024  # 0.7002 of the mean
_UNIT_EXPONENT = 262  # 2^(262 - biased exponent): the factor that brings a block's largest magnitude to 256..511


def ternary(block: int = 128) -> Codec:
    """Send each block as digits in -1, 0, +1 and a scale, the mean magnitude of the values kept.

    Error: |x - decoded| <= 1.01 times the largest magnitude of the block, and over a block the Euclidean norm of the
    error is less than that of x (about 0.44 of it for Gaussian values): error feedback converges.
    A block under 2^-100 becomes zero. Block at most 4096 (sums stay in 31 bits). 1/5 byte a value and 2 bytes a block.
    """
    name = block_codec_name("ternary", block)

    def layout(count: int) -> Sections:
        return (np.uint8, block_count(count, _DIGITS)), (np.uint16, block_count(count, block))

    def encode(x: Array) -> tuple[Array, ...]:
        return (_encode_numpy if isinstance(x, np.ndarray) else _encode)(x, block)

    def decode(arrays: tuple[Array, ...], count: int) -> Array:
        return _decode(arrays[0], arrays[1], count, block)

    def write(arrays: tuple[Array, ...], out: Numpy, add: bool) -> None:
        packed, scales = arrays
        if out.flags.c_contiguous and out.flags.aligned and (kernels := fast.kernels(out.size)):
            steps = (scales.astype(np.uint32) << 16).view(np.float32)
            kernels.write_ternary(packed, steps, out, block, add)
        else:
            write_blocks(_unpack_numpy(packed)[: out.size], scales, out, block, add)

    def check(arrays: tuple[Array, ...], count: int) -> None:
        packed, scales = arrays
        check_scales(scales, _LARGEST_SCALE_BITS, name)
        if np.maximum.reduce(packed) > _LARGEST_BYTE:
            raise CodecError(f"{name}: a byte over {_LARGEST_BYTE} holds no five digits")
        width = packed.size
        if any(int(packed[place % width]) // 3 ** (place // width) % 3 != 1 for place in range(count, _DIGITS * width)):
            raise CodecError(f"{name}: a digit after the last value is not 0")

    return plain_codec(name, layout, encode, decode, write, check, (1, 1, block))


def _encode(x: Array, block: int) -> tuple[Array, Array]:
    xp, count = x.__array_namespace__(), x.shape[0]
    digits, scales = _digits(xp, x, block)
    width = block_count(count, _DIGITS)
    padding = xp.ones(width * _DIGITS - count, dtype=xp.uint8)
    planes = xp.concatenate([digits[:count], padding]).reshape(_DIGITS, width)
    packed = planes[_DIGITS - 1]
    for digit in range(_DIGITS - 2, -1, -1):
        packed = packed * 3 + planes[digit]
    return packed, scales


def _digits(xp: Any, x: Array, block: int) -> tuple[Array, Array]:
    """Return (0, 1 or 2 per value, whole blocks: uint8, scales: bfloat16 as uint16)."""
    count, blocks = x.shape[0], block_count(x.shape[0], block)
    padded = xp.concatenate([x, xp.zeros(blocks * block - count, dtype=xp.float32)]).reshape(blocks, block)
    largest = xp.max(padded.view(xp.int32) & _MAGNITUDE, axis=1)
    exponents, alive = largest >> 23, largest >= SMALLEST_MAGNITUDE_BITS
    factors = xp.where(alive, (_UNIT_EXPONENT - exponents) << 23, 0).view(xp.float32)
    units = (padded * factors[:, None]).astype(xp.int32)
    magnitudes = xp.abs(units)
    members = np.full(blocks, block * _THRESHOLD_UNIT, np.int32)
    members[-1] = (count - (blocks - 1) * block) * _THRESHOLD_UNIT
    thresholds = xp.sum(magnitudes, axis=1, dtype=xp.int32) * _THRESHOLD // xp.asarray(members)
    kept = magnitudes > thresholds[:, None]
    kept_sum = xp.sum(xp.where(kept, magnitudes, 0), axis=1, dtype=xp.int32)
    scales = _scales(xp, kept_sum, xp.sum(kept, axis=1, dtype=xp.int32), exponents, alive)
    above, below = units > thresholds[:, None], units < -thresholds[:, None]
    return (above.astype(xp.uint8) + (1 - below.astype(xp.uint8))).reshape(-1), scales


def _scales(xp: Any, kept_sum: Array, kept: Array, exponents: Array, alive: Array) -> Array:
    """Return the mean magnitude of the kept as bfloat16 bits; half a unit is added for what was cut off.

    kept_sum: in units of 2^(exponent - 8); the mean is taken in units of 1/512 of that, an integer under 2^18.
    """
    mean = ((2 * kept_sum + kept) << 8) // xp.maximum(kept, 1)
    bits = mean.astype(xp.float32).view(xp.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    scaled = xp.minimum(rounded + ((exponents - (127 + 8 + 9)) << 7), _LARGEST_SCALE_BITS)
    return xp.where(alive, scaled, 0).astype(xp.uint16)


def _decode(packed: Array, scales: Array, count: int, block: int) -> Array:
    xp, blocks, planes = packed.__array_namespace__(), scales.shape[0], []
    for _ in range(_DIGITS):
        rest = packed // 3
        planes.append(packed - 3 * rest)
        packed = rest
    digits = xp.concatenate(planes)[:count].astype(xp.int8) - 1
    padded = xp.concatenate([digits, xp.zeros(blocks * block - count, dtype=xp.int8)]).reshape(blocks, block)
    steps = (scales.astype(xp.uint32) << 16).view(xp.float32)
    return (padded.astype(xp.float32) * steps[:, None]).reshape(-1)[:count]


def _encode_numpy(x: Numpy, block: int) -> tuple[Array, Array]:
    x = plain(x)
    width = block_count(x.size, _DIGITS)
    digits, scales = _scratch.take("digits", width * _DIGITS, np.uint8), np.empty(block_count(x.size, block), np.uint16)
    if kernels := fast.kernels(x.size):
        units, packed = _scratch.take("units", block, np.int16), np.empty(width, np.uint8)
        needs_finite(kernels.ternary(x, block, units, digits, packed, scales), x.size)
        return packed, scales
    digits[x.size :] = 1
    _all_digits_numpy(x, block, digits, scales)
    planes = digits.reshape(_DIGITS, width)
    packed = np.multiply(planes[_DIGITS - 1], 3)
    for digit in range(_DIGITS - 2, 0, -1):
        np.add(packed, planes[digit], out=packed)
        np.multiply(packed, 3, out=packed)
    return np.add(packed, planes[0], out=packed), scales


def _all_digits_numpy(x: Numpy, block: int, digits: Numpy, scales: Array) -> None:
    whole, step = x.size // block * block, PIECE_VALUES // block * block
    for start in range(0, whole, step):
        end = min(start + step, whole)
        scales[start // block : end // block] = _digits_numpy(x[start:end], block, digits[start:end], x.size)
    if whole < x.size:
        magnitudes = x[whole:].view(np.int32) & _MAGNITUDE
        needs_finite(int(magnitudes.max()), x.size)
        tail, scales[whole // block :] = _digits(np, x[whole:], block)
        digits[whole : x.size] = tail[: x.size - whole]


def _digits_numpy(x: Numpy, block: int, digits: Numpy, slab: int) -> Array:
    """As `_digits`, for whole blocks: writes the digits, returns the scales. Units are int16, sums as small as fits."""
    shape, count = (x.size // block, block), x.size
    wide, narrow = (np.uint16 if block <= 128 else np.uint32), (np.uint8 if block < 256 else np.uint16)
    bits = np.bitwise_and(x.view(np.int32), _MAGNITUDE, out=_scratch.take("bits", count, np.int32))
    largest = np.maximum.reduce(bits.reshape(shape), axis=1)
    needs_finite(int(largest.max()), slab)
    exponents, alive = largest >> 23, largest >= SMALLEST_MAGNITUDE_BITS
    factors = np.where(alive, (_UNIT_EXPONENT - exponents) << 23, 0).view(np.float32)
    values = _scratch.take("values", count, np.float32).reshape(shape)
    np.multiply(x.reshape(shape), factors[:, None], out=values)
    units = _scratch.take("units", count, np.int16).reshape(shape)
    np.copyto(units, values, casting="unsafe")
    magnitudes = np.abs(units, out=_scratch.take("magnitudes", count, np.int16).reshape(shape))
    sums = np.add.reduce(magnitudes.view(np.uint16), axis=1, dtype=wide).astype(np.int32)
    thresholds = sums * _THRESHOLD // (block * _THRESHOLD_UNIT)
    limits = thresholds.astype(np.int16)[:, None]
    above = np.greater(units, limits, out=_scratch.take("above", count, np.bool_).reshape(shape)).view(np.uint8)
    below = np.less(units, -limits, out=_scratch.take("below", count, np.bool_).reshape(shape)).view(np.uint8)
    out = digits.reshape(shape)
    np.add(above, below, out=out)
    kept = np.add.reduce(out, axis=1, dtype=narrow).astype(np.int32)
    np.maximum(magnitudes, limits, out=magnitudes)  # sum of the kept = sum of max(magnitude, limit) - limit per dropped
    raised = np.add.reduce(magnitudes.view(np.uint16), axis=1, dtype=wide).astype(np.int32)
    np.subtract(above, below, out=out)
    np.add(out, 1, out=out)
    return _scales(np, raised - thresholds * (block - kept), kept, exponents, alive)


def _unpack_numpy(packed: Numpy) -> Numpy:
    """Return int8[5 m] in scratch: the digits -1, 0, +1, plane after plane."""
    width = packed.size
    digits = _scratch.take("unpacked", width * _DIGITS, np.uint8)
    planes = digits.reshape(_DIGITS, width)
    rest, thrice = planes[_DIGITS - 1], _scratch.take("thrice", width, np.uint8)
    np.copyto(rest, packed)
    for digit in range(_DIGITS - 1):
        np.copyto(planes[digit], rest)
        np.floor_divide(rest, 3, out=rest)
        np.multiply(rest, 3, out=thrice)
        np.subtract(planes[digit], thrice, out=planes[digit])
    np.subtract(digits, 1, out=digits)
    return digits.view(np.int8)

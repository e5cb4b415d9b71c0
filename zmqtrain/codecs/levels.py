"""Codecs of signs and mean magnitudes: `sign` has one magnitude a block, `int2` two, `ternary` one and zero.

Rule 1: a magnitude that is sent is the mean of those it stands for, as bfloat16: the least squared error there is.
Rule 2: |x| is first rounded to whole units, 1/2048 of the block's largest power of two (`ternary`: cut to 9 bits), by
one exact multiplication: a sum over a block is then a sum of whole numbers that even float32 holds exactly, in any
order.
Rule 3: bits are packed so that vectors are: sign by numpy.packbits; int2 four codes in a byte, ternary five digits,
value i with i + m, i + 2m, ...
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zmqtrain.codecs import fast
from zmqtrain.codecs.codec import (
    INFINITY_BITS,
    LARGEST_BLOCK,
    MAGNITUDE,
    NOT_PINNED,
    NOTHING_SENT,
    PIECE_VALUES,
    SMALLEST_MAGNITUDE_BITS,
    Codec,
    Numpy,
    Pinned,
    RunLoops,
    Scratch,
    Sections,
    Step,
    address_of,
    block_codec_name,
    block_count,
    check_scales,
    in_blocks,
    needs_finite,
    plain,
    plain_codec,
    put,
    to_bfloat16,
)
from zmqtrain.codecs.quantize import decode_blocks, scale_blocks, write_blocks
from zmqtrain.core.errors import CodecError
from zmqtrain.core.types import Array

_scratch = Scratch()
_UNIT_EXPONENT = 127 + 11 + 127
"""2^(265 - biased exponent) is the factor that brings a block's largest magnitude to 2048..4096."""
_FAR = 1.23
"""Values over this times the mean magnitude are far: 1.23 is best for Gaussian values, in blocks of 32 to 256."""
LARGEST_MEAN_BITS = 0x7F7F
SMALLEST_MEAN_BITS = (127 - 124) << 7
"""The bfloat16 bits of 2^-124: a mean is at least 1/4096 unit, a unit at least 2^-111."""
_INVERSES = (1 / np.maximum(np.arange(LARGEST_BLOCK + 1), 1)).astype(np.float32)
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.int8)
_SIGNS = (1 - 2 * _BITS).view(np.int64)[:, 0]
"""The eight signs that a byte stands for, each an int8, as one int64."""
_DIGITS = 5
_LARGEST_BYTE = 3**_DIGITS - 1
_THRESHOLD, _THRESHOLD_UNIT = 717, 1024  # 0.7002 of the mean
_AT_ONCE = 2048
"""So many values are decoded at a time, to be added or subtracted: twice as many fill a core's smallest cache."""
_TERNARY_EXPONENT = 262  # 2^(262 - biased exponent): the factor that brings a block's largest magnitude to 256..511


def sign(block: int = 512) -> Codec:
    """Send the sign bit of each value, and each block's mean magnitude.

    The bits lie as numpy.packbits(bitorder="little") lays them, 1 where the value is negative (or -0.0), 0 after the
    last. Over a block of n values with the mean magnitude m, the squared norm of the error is at most that of x less
    0.7 n m^2 (0.36 of it for Gaussian values, 0.60 in norm): error feedback converges. A block under 2^-100 becomes
    zero. 1 bit a value and 2 bytes a block.
    Source: Seide et al. 2014, 1-bit stochastic gradient descent; Karimireddy et al. 2019, Error feedback fixes signSGD.
    """
    name = block_codec_name("sign", block)

    def layout(count: int) -> Sections:
        return (np.uint8, block_count(count, 8)), (np.uint16, block_count(count, block))

    def encode(x: Array) -> tuple[Array, ...]:
        return (_encode_signs_numpy if isinstance(x, np.ndarray) else _encode_signs)(x, block)

    def decode(arrays: tuple[Array, ...], count: int) -> Array:
        bits = arrays[0].__array_namespace__().unpackbits(arrays[0], count=count, bitorder="little")
        return decode_blocks(1 - 2 * bits.astype(np.int8), arrays[1], block)

    def write(arrays: tuple[Array, ...], out: Numpy, add: bool) -> None:
        packed, scales = arrays
        codes = _scratch.take("codes", 8 * packed.size, np.int8)
        np.take(_SIGNS, packed, out=codes.view(np.int64), mode="clip")
        write_blocks(codes[: out.size], scales, out, block, add)

    def check(arrays: tuple[Array, ...], count: int) -> None:
        packed, scales = arrays
        check_scales(scales, LARGEST_MEAN_BITS, name, SMALLEST_MEAN_BITS)
        if count % 8 and packed[-1] >> count % 8:
            raise CodecError(f"{name}: a bit after the last value is not 0")

    return plain_codec(name, layout, encode, decode, write, check, (1, 1, block))


def int2(block: int = 64) -> Codec:
    """Send of each value its sign and whether it is far, and of each block the mean magnitude of the near and the far.

    Far is what is over 1.23 times the block's mean magnitude; where nothing is far, both means are the same. Bit 0 of a
    code says negative (or -0.0), bit 1 far; byte i holds the codes of the values i, i + m, i + 2m, i + 3m from its low
    bits up, m = a quarter of n, rounded up; 0 where there is no such value. Over a block that is not zero the norm of
    the error is less than that of x (about 0.34 of it for Gaussian values): error feedback converges. A block under
    2^-100 becomes zero. 1/4 byte a value and 4 bytes a block.
    Source: Max 1960, Quantizing for minimum distortion: the levels are the means; his threshold for Gaussian values and
    fixed levels is 1.23 times the mean magnitude.
    """
    name = block_codec_name("int2", block)

    def layout(count: int) -> Sections:
        blocks = block_count(count, block)
        return (np.uint8, block_count(count, 4)), (np.uint16, blocks), (np.uint16, blocks)

    def encode(x: Array) -> tuple[Array, ...]:
        return (_encode_pairs_numpy if isinstance(x, np.ndarray) else _encode_pairs)(x, block)

    def decode(arrays: tuple[Array, ...], count: int) -> Array:
        packed, near, far = arrays
        return _decode_pairs(packed, near, far, count, block)

    def write(arrays: tuple[Array, ...], out: Numpy, add: bool) -> None:
        packed, near, far = arrays
        _write_pairs(packed, near, far, out, block, add)

    def check(arrays: tuple[Array, ...], count: int) -> None:
        packed, near, far = arrays
        for scales in (near, far):
            check_scales(scales, LARGEST_MEAN_BITS, name, SMALLEST_MEAN_BITS)
        if (near > far).any():
            raise CodecError(f"{name}: a block's near mean is larger than its far one")
        width = packed.size
        if any(packed[place % width] >> 2 * (place // width) & 3 for place in range(count, 4 * width)):
            raise CodecError(f"{name}: a code after the last value is not 0")

    return plain_codec(name, layout, encode, decode, write, check, (2, 1, block))


def _members(count: int, block: int) -> Numpy:
    members = np.full(block_count(count, block), block, np.int32)
    members[-1] = count - (members.size - 1) * block
    return members


def _units(x: Array, block: int) -> tuple[Array, Array]:
    """Return (magnitudes, whole numbers up to 4096: float32[blocks, block], zeros after the last value; the exponents
    of the blocks' largest magnitudes, biased: int32[blocks], 0 for a block that is sent as zeros)."""
    xp, padded = x.__array_namespace__(), in_blocks(x, block)
    factors, exponents = _factors(xp, xp.max(padded.view(xp.int32) & MAGNITUDE, axis=1))
    return xp.rint(xp.abs(padded) * factors[:, None]), exponents


def _units_numpy(x: Numpy, block: int, slab: int) -> tuple[Numpy, Numpy]:
    """As `_units`, of a piece of a slab of so many values; the units lie in scratch."""
    blocks = block_count(x.size, block)
    units = _scratch.take("units", blocks * block, np.float32)
    np.abs(x, out=units[: x.size])
    units[x.size :] = 0
    largest = np.maximum.reduceat(units.view(np.int32), np.arange(0, units.size, block))
    needs_finite(int(largest.max()), slab)
    factors, exponents = _factors(np, largest)
    scale_blocks(units, factors, block)
    return np.rint(units, out=units).reshape(blocks, block), exponents


def _factors(xp: Any, largest: Array) -> tuple[Array, Array]:
    exponents = xp.where(largest >= SMALLEST_MAGNITUDE_BITS, largest >> 23, 0)
    return xp.where(exponents > 0, (_UNIT_EXPONENT - exponents) << 23, 0).view(xp.float32), exponents


def _means(xp: Any, sums: Array, inverses: Array, exponents: Array) -> Array:
    """Return sums * inverses as bfloat16 in uint16; sums: whole units, float32[blocks]; inverses: 1 / members."""
    rounded = to_bfloat16((sums * inverses).view(xp.int32))
    scaled = xp.minimum(rounded + ((exponents - (127 + 11)) << 7), LARGEST_MEAN_BITS)
    return xp.where((exponents > 0) & (sums > 0), scaled, 0).astype(xp.uint16)


def _sum(xp: Any, whole: Array) -> Array:
    return xp.sum(whole.astype(xp.int32), axis=1, dtype=xp.int32).astype(xp.float32)


def _encode_signs(x: Array, block: int) -> tuple[Array, Array]:
    xp = x.__array_namespace__()
    units, exponents = _units(x, block)
    inverses = xp.asarray(_INVERSES[_members(x.shape[0], block)])
    packed = xp.packbits(x.view(xp.int32) < 0, bitorder="little")
    return packed, _means(xp, _sum(xp, units), inverses, exponents)


def _encode_signs_numpy(x: Numpy, block: int) -> tuple[Numpy, Numpy]:
    x = plain(x)
    inverses = _INVERSES[_members(x.size, block)]
    scales = np.empty(inverses.size, np.uint16)
    if kernels := fast.kernels(x.size):
        needs_finite(kernels.signs(x, block, scales), x.size)
    else:
        step = PIECE_VALUES // block * block
        for start in range(0, x.size, step):
            units, exponents = _units_numpy(x[start : start + step], block, x.size)
            blocks = slice(start // block, start // block + exponents.size)
            scales[blocks] = _means(np, np.einsum("ij->i", units), inverses[blocks], exponents)
    negative = np.less(x.view(np.int32), 0, out=_scratch.take("negative", x.size, np.bool_))
    return np.packbits(negative, bitorder="little"), scales


def _encode_pairs(x: Array, block: int) -> tuple[Array, Array, Array]:
    xp, count = x.__array_namespace__(), x.shape[0]
    units, exponents = _units(x, block)
    members, sums = _members(count, block), _sum(xp, units)
    is_far = units > (sums * xp.asarray(_FAR * _INVERSES[members]))[:, None]
    far_sums, far_members = _sum(xp, xp.where(is_far, units, 0)), xp.sum(is_far, axis=1, dtype=xp.int32)
    near, far = _two_means(xp, sums, far_sums, xp.asarray(members), far_members, exponents)
    codes = (is_far.reshape(-1)[:count].astype(xp.uint8) << 1) | (x.view(xp.int32) < 0).astype(xp.uint8)
    planes = xp.concatenate([codes, xp.zeros(-count % 4, dtype=xp.uint8)]).reshape(4, -1)
    return planes[0] | planes[1] << 2 | planes[2] << 4 | planes[3] << 6, near, far


def _two_means(xp: Any, sums: Array, far_sums: Array, members: Array, far_members: Array, exponents: Array) -> Any:
    table = xp.asarray(_INVERSES)
    near = _means(xp, sums - far_sums, table[members - far_members], exponents)
    far = _means(xp, far_sums, table[far_members], exponents)
    return near, xp.where(far_members > 0, far, near)


def _encode_pairs_numpy(x: Numpy, block: int) -> tuple[Numpy, Numpy, Numpy]:
    x = plain(x)
    members, width = _members(x.size, block), block_count(x.size, 4)
    near, far = np.empty(members.size, np.uint16), np.empty(members.size, np.uint16)
    codes = _scratch.take("codes", 4 * width, np.uint8)
    codes[x.size :] = 0
    step = PIECE_VALUES // block * block
    for start in range(0, x.size, step):
        piece, target = x[start : start + step], codes[start : min(start + step, x.size)]
        units, exponents = _units_numpy(piece, block, x.size)
        blocks = slice(start // block, start // block + exponents.size)
        sums = np.einsum("ij->i", units)
        is_far = _scratch.take("far", units.size, np.bool_)
        np.greater(units, (sums * (_FAR * _INVERSES[members[blocks]]))[:, None], out=is_far.reshape(units.shape))
        ones = _scratch.take("ones", units.size, np.float32).reshape(units.shape)
        np.copyto(ones, is_far.reshape(units.shape))
        far_sums, far_members = np.einsum("ij,ij->i", ones, units), np.einsum("ij->i", ones).astype(np.int32)
        near[blocks], far[blocks] = _two_means(np, sums, far_sums, members[blocks], far_members, exponents)
        flags = is_far.view(np.uint8)[: piece.size]
        np.less(piece.view(np.int32), 0, out=target.view(np.bool_))
        np.add(target, flags, out=target)
        np.add(target, flags, out=target)
    planes = codes.reshape(4, width)
    packed = np.multiply(planes[3], 4)
    for plane in (2, 1):
        np.add(packed, planes[plane], out=packed)
        np.multiply(packed, 4, out=packed)
    return np.add(packed, planes[0], out=packed), near, far


def _decode_pairs(packed: Array, near: Array, far: Array, count: int, block: int) -> Array:
    xp = packed.__array_namespace__()
    codes = xp.concatenate([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6])[:count]
    codes = in_blocks(codes, block)
    bits = xp.where(codes > 1, far[:, None], near[:, None]).astype(xp.uint32) << 16
    return (bits | codes.astype(xp.uint32) << 31).view(xp.float32).reshape(-1)[:count]


def _write_pairs(packed: Numpy, near: Numpy, far: Numpy, out: Numpy, block: int, add: bool) -> None:
    """As `_decode_pairs`, in 16 bits up to the last step."""
    codes = _scratch.take("codes", 4 * packed.size, np.uint8)
    for plane, target in enumerate(codes.reshape(4, packed.size)):
        np.right_shift(packed, 2 * plane, out=target)
    np.bitwise_and(codes, 3, out=codes)
    steps, step = far - near, PIECE_VALUES // block * block
    for start in range(0, out.size, step):
        target = out[start : start + step]
        blocks = slice(start // block, start // block + block_count(target.size, block))
        rows = (block_count(target.size, block), block)
        bits = _scratch.take("bits", rows[0] * block, np.uint16)
        bits[target.size :] = 0
        np.copyto(bits[: target.size], codes[start : start + target.size])
        signs = np.left_shift(bits, 15, out=_scratch.take("signs", bits.size, np.uint16))
        np.right_shift(bits, 1, out=bits)
        levels = bits.reshape(rows)
        np.multiply(levels, steps[blocks, None], out=levels)
        np.add(levels, near[blocks, None], out=levels)
        np.bitwise_or(bits, signs, out=bits)
        values = _scratch.take("values", target.size, np.uint32)
        np.copyto(values, bits[: target.size])
        np.left_shift(values, 16, out=values)
        put(values.view(np.float32), target, add)


def ternary(block: int = 128) -> Codec:
    """Send each block as digits in -1, 0, +1 and a scale, the mean magnitude of the values kept.

    Error: |x - decoded| <= 1.01 times the largest magnitude of the block, and over a block the Euclidean norm of the
    error is less than that of x (about 0.44 of it for Gaussian values): error feedback converges.
    A block under 2^-100 becomes zero. Block at most 4096 (sums stay in 31 bits). 1/5 byte a value and 2 bytes a block.
    Source: Li and Liu 2016, Ternary Weight Networks: values over 0.7 of the block's mean magnitude are kept.
    """
    name = block_codec_name("ternary", block)

    def layout(count: int) -> Sections:
        return (np.uint8, block_count(count, _DIGITS)), (np.uint16, block_count(count, block))

    def encode(x: Array) -> tuple[Array, ...]:
        return (_encode_ternary_numpy if isinstance(x, np.ndarray) else _encode_ternary)(x, block)

    def decode(arrays: tuple[Array, ...], count: int) -> Array:
        return _decode_ternary(arrays[0], arrays[1], count, block)

    def write(arrays: tuple[Array, ...], out: Numpy, add: bool) -> None:
        packed, scales = arrays
        if out.flags.c_contiguous and out.flags.aligned and fast.kernels(out.size) and _has_loops():
            _loops().write_slab(packed, scales.view(np.uint8), out, block, add)
        else:
            write_blocks(_unpack_digits(packed)[: out.size], scales, out, block, add)

    def check(arrays: tuple[Array, ...], count: int) -> None:
        packed, scales = arrays
        _check_ternary(packed, scales, count, name)

    def encode_run(addresses: Numpy, table: Numpy, frame: Numpy, sent: Numpy, pinned: Pinned) -> int:
        return _encode_run(addresses, table, block, sent, frame, pinned)

    def write_run(frame: Numpy, table: Numpy, addresses: Numpy, add: bool) -> None:
        _loops().write(frame, table, addresses, block, add)

    def check_run(frame: Numpy, table: Numpy) -> int:
        return _loops().check(frame, table, block, _LARGEST_BYTE, LARGEST_MEAN_BITS)

    def energy_of_run(frame: Numpy, table: Numpy) -> float:
        return fast.energy_of_run(frame, table, block, fast.SCALES, fast.SLAB)

    def rebase_run(frame: Numpy, own: Numpy, table: Numpy, places: Numpy, params: Numpy, anchor: Numpy) -> None:
        shared, mine = (_scratch.take(name, max(block, _AT_ONCE), np.float32) for name in ("shared", "own"))
        _loops().rebase(frame, own, table, block, places, params, anchor, shared, mine)

    def release_run(
        frames: Numpy,
        table: Numpy,
        frame: Numpy,
        step: Step,
        parameters: Numpy,
        published: Numpy,
        places: Numpy,
        samples: Numpy,
    ) -> int:
        given = frames, table, block, frame, *fast.arguments_of(step), parameters, published
        return _loops().release(*given, places, samples, *_scratch_of_slabs(table, block))

    loops = RunLoops(
        encode_run, write_run, check_run, energy_of_run, _has_loops, rebase=rebase_run, release=release_run
    )
    return plain_codec(name, layout, encode, decode, write, check, (1, 1, block))._replace(loops=loops)


def _check_ternary(packed: Numpy, scales: Numpy, count: int, name: str) -> None:
    check_scales(scales, LARGEST_MEAN_BITS, name)
    if np.maximum.reduce(packed) > _LARGEST_BYTE:
        raise CodecError(f"{name}: a byte over {_LARGEST_BYTE} holds no five digits")
    for place in range(count, _DIGITS * packed.size):
        if packed[place % packed.size] // 3 ** (place // packed.size) % 3 != 1:
            raise CodecError(f"{name}: a digit after the last value is not 0")


def _has_loops() -> bool:
    return fast.ternary_loops() is not None


def _loops() -> fast.TernaryLoops:
    loops = fast.ternary_loops()
    assert loops is not None, "used only where there are some"
    return loops


def _encode_run(
    addresses: Numpy, table: Numpy, block: int, sent: Numpy, frame: Numpy, pinned: Pinned = NOT_PINNED
) -> int:
    known = _scratch.take("own", max(block, _AT_ONCE), np.float32)
    rest, units, digits = _scratch_of_slabs(table, block)
    return _loops().encode(addresses, table, block, sent, frame, *pinned, rest, known, units, digits)


def _scratch_of_slabs(table: Numpy, block: int) -> tuple[Numpy, Numpy, Numpy]:
    """Return what encoding the slabs of a table needs: values, units, and the digits of a slab."""
    longest = int(table[:, fast.SLAB].max())
    digits = _scratch.take("digits", block_count(longest, _DIGITS) * _DIGITS, np.uint8)
    return _scratch.take("rest", max(block, _AT_ONCE), np.float32), _scratch.take("units", block, np.int16), digits


def _encode_ternary(x: Array, block: int) -> tuple[Array, Array]:
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
    padded = in_blocks(x, block)
    largest = xp.max(padded.view(xp.int32) & MAGNITUDE, axis=1)
    exponents, alive = largest >> 23, largest >= SMALLEST_MAGNITUDE_BITS
    factors = xp.where(alive, (_TERNARY_EXPONENT - exponents) << 23, 0).view(xp.float32)
    units = (padded * factors[:, None]).astype(xp.int32)
    magnitudes = xp.abs(units)
    members = np.full(blocks, block * _THRESHOLD_UNIT, np.int32)
    members[-1] = (count - (blocks - 1) * block) * _THRESHOLD_UNIT
    thresholds = xp.sum(magnitudes, axis=1, dtype=xp.int32) * _THRESHOLD // xp.asarray(members)
    kept = magnitudes > thresholds[:, None]
    kept_sum = xp.sum(xp.where(kept, magnitudes, 0), axis=1, dtype=xp.int32)
    scales = _means_of_kept(xp, kept_sum, xp.sum(kept, axis=1, dtype=xp.int32), exponents, alive)
    above, below = units > thresholds[:, None], units < -thresholds[:, None]
    return (above.astype(xp.uint8) + (1 - below.astype(xp.uint8))).reshape(-1), scales


def _means_of_kept(xp: Any, kept_sum: Array, kept: Array, exponents: Array, alive: Array) -> Array:
    """Return the mean magnitude of the kept as bfloat16 bits; half a unit is added for what was cut off.

    kept_sum: in units of 2^(exponent - 8); the mean is taken in units of 1/512 of that, an integer under 2^18.
    """
    mean = ((2 * kept_sum + kept) << 8) // xp.maximum(kept, 1)
    rounded = to_bfloat16(mean.astype(xp.float32).view(xp.int32))
    scaled = xp.minimum(rounded + ((exponents - (127 + 8 + 9)) << 7), LARGEST_MEAN_BITS)
    return xp.where(alive, scaled, 0).astype(xp.uint16)


def _decode_ternary(packed: Array, scales: Array, count: int, block: int) -> Array:
    xp, planes = packed.__array_namespace__(), list[Array]()
    for _ in range(_DIGITS):
        rest = packed // 3
        planes.append(packed - 3 * rest)
        packed = rest
    return decode_blocks(xp.concatenate(planes)[:count].astype(xp.int8) - 1, scales, block)


def _encode_ternary_numpy(x: Numpy, block: int) -> tuple[Array, Array]:
    x = plain(x)
    width, blocks = block_count(x.size, _DIGITS), block_count(x.size, block)
    if fast.kernels(x.size) and _has_loops():
        first = width + width % 2  # of the scales, 16 bits each
        buffer = np.empty(first + 2 * blocks, np.uint8)
        table = np.array([[0, 1, x.size, 0, 0, first]], np.int64)
        if _encode_run(np.array([address_of(x)]), table, block, NOTHING_SENT, buffer) >= 0:
            needs_finite(INFINITY_BITS, x.size)
        return buffer[:width], buffer[first:].view(np.uint16)
    digits, scales = _scratch.take("digits", width * _DIGITS, np.uint8), np.empty(blocks, np.uint16)
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
        magnitudes = x[whole:].view(np.int32) & MAGNITUDE
        needs_finite(int(magnitudes.max()), x.size)
        tail, scales[whole // block :] = _digits(np, x[whole:], block)
        digits[whole : x.size] = tail[: x.size - whole]


def _digits_numpy(x: Numpy, block: int, digits: Numpy, slab: int) -> Array:
    """As `_digits`, for whole blocks: writes the digits, returns the scales. Units are int16, sums as small as fits."""
    shape, count = (x.size // block, block), x.size
    wide, narrow = (np.uint16 if block <= 128 else np.uint32), (np.uint8 if block < 256 else np.uint16)
    bits = np.bitwise_and(x.view(np.int32), MAGNITUDE, out=_scratch.take("bits", count, np.int32))
    largest = np.maximum.reduce(bits.reshape(shape), axis=1)
    needs_finite(int(largest.max()), slab)
    exponents, alive = largest >> 23, largest >= SMALLEST_MAGNITUDE_BITS
    factors = np.where(alive, (_TERNARY_EXPONENT - exponents) << 23, 0).view(np.float32)
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
    return _means_of_kept(np, raised - thresholds * (block - kept), kept, exponents, alive)


def _unpack_digits(packed: Numpy) -> Numpy:
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

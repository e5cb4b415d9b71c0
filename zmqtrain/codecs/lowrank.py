"""Codec of a slab as a matrix of low rank, two thin factors: PowerSGD with a warm start, without an all-reduce.

Rule 1: a column at a time: p = rest q, the next q = the least squares fit of p to the rest, rest -= p q^T.  Each p is
orthogonal to those before it, up to its rounding: this is the orthogonal iteration of the paper.
Rule 2: sums are of whole numbers.  For each column the rest is rounded to units, a power of two such that all sums stay
under 2^30; p has 7 bits, q 11 bits and a power of two; the division is a long division of whole numbers.
Rule 3: the rest and the decoded values are float32: p q has 18 bits, so that each rest - p q 2^s is rounded once.
Rule 4: a code of q is kept only where it brings the true rest nearer to zero, whatever the units rounded away: encoding
takes something away from the slab or sends zeros.
Source: Vogels, Karimireddy and Jaggi 2019, PowerSGD, algorithm 1, with the fit quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zmqtrain.codecs.codec import (
    MAGNITUDE,
    PIECE_VALUES,
    SMALLEST_MAGNITUDE_BITS,
    Buffers,
    Codec,
    Numpy,
    Scratch,
    Sections,
    State,
    block_count,
    needs_between,
    needs_finite,
    needs_slab,
    put,
    read_buffers,
)
from zmqtrain.core.errors import CodecError
from zmqtrain.core.specs import format_spec
from zmqtrain.core.types import Array

_scratch = Scratch()
_LARGEST_SLAB = 1 << 20
_LARGEST_RANK, _LEAST_WIDTH, _LARGEST_WIDTH, _LARGEST_ROWS = 32, 16, 4096, 4096
_LARGEST_P, _LARGEST_Q, _Q_BITS = 127, 2047, 11
_SUM_BITS = 30  # units of _SUM_BITS - 7 - log2(terms) bits times codes of 7 bits: sums under 2^30
_MOST_UNIT_BITS = 16
_LEAST_POWER, _LARGEST_POWER = -126, 104  # 32 columns of at most 2^18 2^104: finite, and never a denormal
_LARGEST_EXPONENT = 127 + 100  # biased: what is larger is sent as if it were so many powers of two smaller


def lowrank(rank: int = 4, width: int = 0) -> Codec:
    """Send a slab, as a matrix of `width` columns, by `rank` products of a column and a row.

    width 0: the power of two nearest to the square root of the slab's own count; else 16..4096. The last row is filled
    up with zeros; a slab has at most 2^20 values and 4096 rows. Columns beyond min(rank, rows, width) are not sent.
    One power iteration an encode, from where the last one of the same state ended: of a matrix that stays the same the
    error falls to that of the truncated singular value decomposition, in a few encodes.
    Error: the Euclidean norm of x - decoded is never over that of x, up to float32 rounding. Little is taken from a
    slab that has no low rank: send what is left out another time (error feedback, or the residual in the model). Of one
    that has, about 1 % is left, and 1-4 % from a cold start, for p has 7 bits.
    A slab whose largest magnitude is under 2^-100 becomes zeros; one of 2^101 or more is sent smaller, by the power of
    two that brings it under 2^101.
    State: int8[columns * width], the directions to start from. rows + 2 width + 1 bytes a column.
    Raises ConfigError unless rank is in 1..32 and width as said.
    """
    name = format_spec("lowrank", {"rank": rank, "width": width})
    needs_between(name, "rank", rank, 1, _LARGEST_RANK)
    if width:
        needs_between(name, "width", width, _LEAST_WIDTH, _LARGEST_WIDTH)
    slab = min(_LARGEST_SLAB, _LARGEST_ROWS * width) if width else _LARGEST_SLAB

    def shape(count: int) -> tuple[int, int, int]:
        """Return (rows, width, columns sent) of a slab of `count` values."""
        if count > slab:
            raise CodecError(f"{name} takes at most {slab} values, not {count}")
        across = width or 1 << (count.bit_length() // 2)
        rows = block_count(count, across)
        return rows, across, min(rank, rows, across)

    def init(count: int) -> State:
        _, across, columns = shape(count)
        return _directions(columns * across)

    def layout(count: int) -> Sections:
        rows, across, columns = shape(count)
        return (np.int8, columns * rows), (np.int16, columns * across), (np.int8, columns)

    def encode(x: Array, state: State) -> tuple[tuple[Array, ...], State]:
        needs_slab(x, name)
        rows, across, columns = shape(x.shape[0])
        if isinstance(x, np.ndarray):
            x = np.ascontiguousarray(x)
            needs_finite(int(np.maximum.reduce(x.view(np.int32) & MAGNITUDE)), x.size)
        return _encode(x, x.__array_namespace__().asarray(state).reshape(columns, across), rows)

    def decode(buffers: Buffers, count: int) -> Array:
        p, q, powers = read_buffers(buffers, layout(count), name)
        if isinstance(p, np.ndarray):
            out = np.empty(count, np.float32)
            decode_into((p, q, powers), out, False)
            return out
        rows, across, columns = shape(count)
        steps = _scaled(q.reshape(columns, across), powers)
        return _sum_of_products(p.reshape(columns, rows), steps).reshape(-1)[:count]

    def decode_into(buffers: Buffers, out: Numpy, add: bool) -> None:
        p, q, powers = read_buffers(buffers, layout(out.size), name)
        rows, across, columns = shape(out.size)
        p, steps = p.reshape(columns, rows), _scaled(q.reshape(columns, across), powers)
        for piece in _pieces(rows, across):
            target = out[piece.start * across : piece.stop * across]
            values = _sum_of_products(p[:, piece], steps).reshape(-1)[: target.size]
            put(values, target, add)

    def check(buffers: Buffers, count: int) -> None:
        p, q, powers = read_buffers(buffers, layout(count), name)
        if np.minimum.reduce(p) < -_LARGEST_P:
            raise CodecError(f"{name}: the code -128 is not one of this codec")
        if np.minimum.reduce(q) < -_LARGEST_Q or np.maximum.reduce(q) > _LARGEST_Q:
            raise CodecError(f"{name}: a code is not in -{_LARGEST_Q}..{_LARGEST_Q}")
        if np.minimum.reduce(powers) < _LEAST_POWER or np.maximum.reduce(powers) > _LARGEST_POWER:
            raise CodecError(f"{name}: a power of two is not in {_LEAST_POWER}..{_LARGEST_POWER}")

    return Codec(name, init, layout, encode, decode, check, decode_into, slab)


def _directions(count: int) -> Numpy:
    """Return int8[count], odd numbers in -127..127 drawn by a hash of the place."""
    mixed: Array = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE3D)
    directions: Numpy = ((mixed >> 25).astype(np.int32) * 2 - _LARGEST_P).astype(np.int8)
    return directions


def _encode(x: Array, starts: Array, rows: int) -> tuple[tuple[Array, ...], Array]:
    """starts: int8[columns, width]. Returns (p, q, powers), and the directions to start from the next time."""
    xp, (columns, width) = x.__array_namespace__(), starts.shape
    rest = xp.concatenate([x, xp.zeros(rows * width - x.shape[0], dtype=xp.float32)]).reshape(rows, width)
    exponent = xp.max(_largest_bits(rest)) >> 23
    rest = rest * ((127 - xp.maximum(exponent - _LARGEST_EXPONENT, 0)) << 23).view(xp.float32)
    sent = []
    for column in range(columns):
        *codes, step, direction = _column(rest, starts[column])
        sent.append((*codes, direction))
        if column + 1 < columns:
            rest = _less(rest, codes[0], step)
    p, q, powers, directions = (xp.stack(part) for part in zip(*sent, strict=True))
    return (p.reshape(-1), q.reshape(-1), powers.astype(xp.int8)), directions.reshape(-1)


def _column(rest: Array, start: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Return p: int8[rows], q: int16[width], power, q 2^power: float32[width], and the next start: int8[width].

    All codes are zero where the rest is under 2^-100, or the start has found nothing in it: the next start is then its
    row with the largest value, which finds that one.
    """
    xp, (rows, width) = rest.__array_namespace__(), rest.shape
    unit_bits = min(_MOST_UNIT_BITS, _SUM_BITS - 7 - (max(rows, width) - 1).bit_length())
    by_row = _largest_bits(rest)
    largest = xp.max(by_row)
    exponent, alive = largest >> 23, largest >= SMALLEST_MAGNITUDE_BITS
    units = _units(rest, xp.where(alive, (253 + unit_bits - exponent) << 23, 0).view(xp.float32))
    p = _codes(xp, _times(units, start))
    sums = _transposed_times(units, p)
    q, power = _fit(xp, sums, p)
    power = power + (exponent - 127) - (unit_bits - 1)
    found = alive & xp.any(q != 0) & (power >= _LEAST_POWER)
    p, q = xp.where(found, p, 0).astype(xp.int8), xp.where(found, q, 0).astype(xp.int16)
    power = xp.where(found, power, _LEAST_POWER)
    direction = _codes(xp, xp.where(found, sums, units[xp.argmax(by_row)].astype(xp.int32)))
    signs = xp.where(start < 0, -1, 1)
    direction = xp.where(alive, xp.where(direction == 0, signs, direction), start).astype(xp.int8)
    return p, q, power, _scaled(q, power), direction


def _codes(xp: Any, sums: Array) -> Array:
    """Return int32[n] in -127..127: the sums, int32 under 2^30, times a power of two, the largest in 64..127."""
    largest = xp.max(xp.abs(sums))
    exponent = largest.astype(xp.float32).view(xp.int32) >> 23
    factor = xp.where(largest > 0, (260 - exponent) << 23, 0).view(xp.float32)
    rounded = xp.rint(sums.astype(xp.float32) * factor)
    return xp.minimum(xp.maximum(rounded, -_LARGEST_P), _LARGEST_P).astype(xp.int32)


def _fit(xp: Any, sums: Array, p: Array) -> tuple[Array, Array]:
    """Return (q, power): q 2^power is nearest to sums / (p p), q int32 in -2047..2047.

    sums: units^T p, int32 under 2^30. The units are rounded by 1/2 at most, so that the true sum is between |sum| - w
    and |sum| + w, w = 1/2 of the sum of |p|. A q is kept if it is under twice the true quotient even so: then
    |true quotient - q| < |true quotient|.
    """
    square, weight = xp.sum(p * p, dtype=xp.int32), xp.sum(xp.abs(p), dtype=xp.int32)
    magnitudes = xp.abs(sums)
    largest, square = xp.maximum(xp.max(magnitudes), 1), xp.maximum(square, 1)
    apart = (largest.astype(xp.float32).view(xp.int32) >> 23) - (square.astype(xp.float32).view(xp.int32) >> 23)
    raised, lowered = xp.maximum(-apart, 0), xp.maximum(apart, 0)
    divisor = square << lowered
    lowered = lowered + ((largest << raised) >= divisor)
    divisor = square << lowered  # largest << raised is now between divisor / 2 and divisor, which is under 2^31
    limit = (divisor >> (_Q_BITS + 1) >> raised) + weight + (weight >> 6) + 2
    left, over = (magnitudes << raised).astype(xp.uint32), divisor.astype(xp.uint32)
    quotient = xp.zeros_like(sums)
    for _ in range(_Q_BITS):
        left = left << 1
        fits = left >= over
        left = xp.where(fits, left - over, left)
        quotient = quotient * 2 + fits
    quotient = xp.minimum(quotient + (left << 1 >= over), _LARGEST_Q)
    q = xp.where(magnitudes > limit, xp.where(sums < 0, -quotient, quotient), 0)
    return q, lowered - raised - _Q_BITS


def _scaled(q: Array, power: Array) -> Array:
    """Return q 2^power, exact float32; q: int16[..., width], power: [...] in -126..104."""
    xp = q.__array_namespace__()
    return q.astype(xp.float32) * ((power.astype(xp.int32) + 127) << 23).view(xp.float32)[..., None]


def _largest_bits(rest: Array) -> Array:
    """Return int32[rows]: the bits of the largest magnitude of each row."""
    xp = rest.__array_namespace__()
    return xp.max(rest.view(xp.int32) & MAGNITUDE, axis=1)


def _units(rest: Array, factor: Array) -> Array:
    """Return rest times a power of two, rounded: int32, or float64 for numpy, which multiplies those faster."""
    if not isinstance(rest, np.ndarray):
        xp = rest.__array_namespace__()
        return xp.rint(rest * factor).astype(xp.int32)
    units = np.multiply(rest, factor, dtype=np.float64)
    return np.rint(units, out=units)


def _times(units: Array, vector: Array) -> Array:
    """Return int32[rows], the matrix times a vector, every sum exact; numpy: in pieces too small for BLAS's threads."""
    xp = units.__array_namespace__()
    if not isinstance(units, np.ndarray):
        return xp.sum(units * vector, axis=1, dtype=xp.int32)
    sums, factor = np.empty(units.shape[0]), vector.astype(np.float64)
    for piece in _pieces(*units.shape):
        np.matmul(units[piece], factor, out=sums[piece])
    return sums.astype(np.int32)


def _transposed_times(units: Array, vector: Array) -> Array:
    """Return int32[width], as `_times` for the transposed matrix."""
    xp = units.__array_namespace__()
    if not isinstance(units, np.ndarray):
        return xp.sum(units * vector[:, None], axis=0, dtype=xp.int32)
    sums, factor = np.zeros(units.shape[1]), vector.astype(np.float64)
    for piece in _pieces(*units.shape):
        sums += factor[piece] @ units[piece]
    return sums.astype(np.int32)


def _pieces(rows: int, width: int) -> Iterator[slice]:
    """Give the rows of a matrix in pieces of about PIECE_VALUES values."""
    some = max(1, PIECE_VALUES // width)
    for row in range(0, rows, some):
        yield slice(row, row + some)


def _less(rest: Array, p: Array, step: Array) -> Array:
    """Return rest - p step, each rounded once; numpy: in place."""
    if not isinstance(rest, np.ndarray):
        return rest - p.astype(np.float32)[:, None] * step
    for piece in _pieces(*rest.shape):
        part, column = rest[piece], p[piece, None].astype(np.float32)
        product = _scratch.take("product", part.size, np.float32).reshape(part.shape)
        np.multiply(column, step, out=product)
        np.subtract(part, product, out=part)
    return rest


def _sum_of_products(p: Array, steps: Array) -> Array:
    """Return float32[rows, width]: the sum of the products, first to last; p: int8[columns, rows]."""
    xp = p.__array_namespace__()
    columns = p.astype(xp.float32)[:, :, None]
    total = columns[0] * steps[0]
    if not isinstance(p, np.ndarray):
        for column in range(1, p.shape[0]):
            total = total + columns[column] * steps[column]
        return total
    product = _scratch.take("product", total.size, np.float32).reshape(total.shape)
    for column in range(1, p.shape[0]):
        np.multiply(columns[column], steps[column], out=product)
        np.add(total, product, out=total)
    return total

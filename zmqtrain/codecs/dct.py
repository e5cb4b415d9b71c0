"""Transform of blocks of values into their cosine coefficients, of which smooth blocks have few large ones.

Rule 1: the transform is exact in float32, whatever the order of its sums and however few bits a matrix unit takes in: a
block is brought to whole numbers of 15 bits by a power of two and cut in two halves of 8 bits; the cosines are whole
numbers of 8 bits; so every factor is exact in bfloat16 and TF32 too, and every partial sum is under 2^24.
Rule 2: forward and backward are one function, with the matrix and its transpose.
Source: Ahmed, Natarajan and Rao 1974 (DCT-II); DeMo, Peng et al. 2024, extracts with it: error feedback with a decay
over dct, top-k and a codec. They transform two-dimensional chunks of a matrix; here it is one-dimensional, along the
flattened values.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from zmqtrain.codecs.codec import (
    MAGNITUDE,
    PIECE_VALUES,
    SMALLEST_MAGNITUDE_BITS,
    Buffers,
    Numpy,
    Stateless,
    Transform,
    block_count,
    in_blocks,
    needs_finite,
    needs_slab,
    put,
    read_buffers,
)
from zmqtrain.core.errors import CodecError, ConfigError
from zmqtrain.core.specs import format_spec
from zmqtrain.core.types import Array

BLOCKS = {8: 9, 16: 9, 32: 10, 64: 10, 128: 11}
"""The block sizes there are, and the power of two by which each one's cosines become whole numbers up to 256."""

_BITS = 15  # a block's largest magnitude becomes 2^14..2^15
_HALF = 256.0
_ONE_THREAD = 1 << 17  # multiplications in a product; OpenBLAS uses threads from 2^18


def dct(block: int = 64) -> Transform:
    """Pass on the orthonormal DCT-II of each block of 8, 16, 32, 64 or 128 values; the last is filled up with zeros.

    float32[n] -> float32[m], m = whole blocks; backward is the DCT-III, cut to n. No buffers, no state.
    Error of backward(forward(x)): over a block, its Euclidean norm is at most 0.9 % of that of x: the cosines have 8
    bits, so that matrix^T matrix is off the identity by at most 0.0075 (in the spectral norm), and the rounding to
    units adds 0.0008. Typical is 0.34 % at block 16 and 64, 0.2 % at the others. It is not lost where the residual is
    kept.
    A block under 2^-100, either way, becomes zeros; so a block under 2^-100 sqrt(block) may. A value that would be over
    the largest float32 becomes that: a coefficient may be sqrt(block) times the largest value.
    Raises ConfigError for another block.
    """
    name = format_spec("dct", {"block": block})
    if block not in BLOCKS:
        raise ConfigError(f"{name}: block={block} is not one of {', '.join(map(str, BLOCKS))}")

    def passes(count: int) -> int:
        return block_count(count, block) * block

    def forward(x: Array, state: Stateless) -> tuple[tuple[Array, ...], Array, Stateless]:
        needs_slab(x, name)
        padded = in_blocks(x, block).reshape(-1)
        if not isinstance(padded, np.ndarray):
            return (), _transform(padded, _cosines(block).T, BLOCKS[block]), state
        magnitudes = padded.view(np.int32) & MAGNITUDE
        needs_finite(int(magnitudes.max()), x.size)
        return (), _transform_numpy(padded, _cosines(block).T, BLOCKS[block]), state

    def backward(buffers: Buffers, values: Array, count: int) -> Array:
        check(buffers, count)
        if getattr(values, "dtype", None) != np.float32 or tuple(values.shape) != (passes(count),):
            raise CodecError(f"{name} turns back float32[{passes(count)}] for {count} values")
        transform = _transform_numpy if isinstance(values, np.ndarray) else _transform
        return transform(values, _cosines(block), BLOCKS[block])[:count]

    def backward_into(buffers: Buffers, values: Numpy, out: Numpy, add: bool) -> None:
        put(backward(buffers, values, out.size), out, add)

    def check(buffers: Buffers, count: int) -> None:
        read_buffers(buffers, (), name)

    return Transform(name, lambda count: (), passes, lambda count: (), forward, backward, check, backward_into)


@cache
def _cosines(block: int) -> Numpy:
    """Return the orthonormal DCT-II matrix, float32[frequency, place], times its power of two, in whole numbers.

    No entry is near a half, so every machine's cosine rounds to the same.
    """
    frequency, place = np.arange(block)[:, None], np.arange(block)
    matrix = np.sqrt(2 / block) * np.cos(np.pi * (2 * place + 1) * frequency / (2 * block))
    matrix[0] = np.sqrt(1 / block)
    whole: Numpy = np.rint(matrix * 2 ** BLOCKS[block]).astype(np.float32)
    whole.setflags(write=False)
    return whole


def _transform(values: Array, matrix: Numpy, matrix_bits: int) -> Array:
    """Multiply each row of values, float32[whole blocks], by matrix 2^-matrix_bits.

    The halves are at most 128, the entries 256, the rows 128 long: sums are under 2^22. high 2^8 + low is rounded once
    (its product is exact, fused or not) and is under 2^(15 + matrix_bits + 3.6) < 2^30.
    """
    xp, block = values.__array_namespace__(), matrix.shape[0]
    rows = values.reshape(-1, block)
    largest = xp.max(rows.view(xp.int32) & MAGNITUDE, axis=1, keepdims=True)
    exponents, alive = largest >> 23, largest >= SMALLEST_MAGNITUDE_BITS
    to_units = xp.where(alive, (253 + _BITS - exponents) << 23, 0).view(xp.float32)
    units = xp.rint(rows * to_units)
    high = xp.rint(units * (1 / _HALF))
    low = units - high * _HALF
    cosines = xp.asarray(matrix)
    sums = _product(high, cosines) * _HALF + _product(low, cosines)
    unit_exponents = exponents - (_BITS - 1) - matrix_bits  # biased, as all exponents here; 2 and more where alive
    limits = (((382 - xp.maximum(unit_exponents, 224)) << 23) - 1).view(xp.float32)  # the largest float32, in units
    from_units = xp.where(alive, unit_exponents << 23, 0).view(xp.float32)
    return (xp.minimum(xp.maximum(sums, -limits), limits) * from_units).reshape(-1)


def _product(rows: Array, cosines: Array) -> Array:
    """Return rows @ cosines; numpy: a few rows at a time, so that BLAS uses no threads, which would wait for a core."""
    if not isinstance(rows, np.ndarray):
        return rows @ cosines
    some = max(1, _ONE_THREAD // cosines.size)
    few = (rows.shape[0] // some, some, rows.shape[1])
    whole, out = few[0] * some, np.empty_like(rows)
    np.matmul(rows[:whole].reshape(few), cosines, out=out[:whole].reshape(few))
    np.matmul(rows[whole:], cosines, out=out[whole:])
    return out


def _transform_numpy(values: Numpy, matrix: Numpy, matrix_bits: int) -> Array:
    """As `_transform`, in pieces that stay in the cache."""
    out = np.empty_like(values)
    for start in range(0, values.size, PIECE_VALUES):
        piece = slice(start, start + PIECE_VALUES)
        out[piece] = _transform(values[piece], matrix, matrix_bits)
    return out

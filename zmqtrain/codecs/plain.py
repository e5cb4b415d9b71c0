"""Codecs that send each value on its own: float32 and bfloat16.

Rule: nothing here looks at a neighbour; decode gives exactly the bits that were chosen, denormals included.
"""

from __future__ import annotations

import numpy as np

from zmqtrain.codecs.codec import (
    INFINITY_BITS,
    MAGNITUDE,
    Buffers,
    Codec,
    Numpy,
    Scratch,
    Sections,
    needs_finite,
    plain_codec,
    put,
    read_buffers,
    to_bfloat16,
)
from zmqtrain.core.errors import NonFiniteDelta
from zmqtrain.core.types import Array

try:  # it comes with jax, and is ten times as fast; a broker has it not
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = None

_scratch = Scratch()
_LARGEST_BF16 = 0x7F7F


def float32() -> Codec:
    """Send float32 as it is: 4 bytes a value, no error."""

    def encode(x: Array) -> tuple[Array, ...]:
        if isinstance(x, np.ndarray):
            needs_finite(_largest_bits(x), x.size)
        return (x,)

    def write(arrays: tuple[Array, ...], out: Numpy, add: bool) -> None:
        put(arrays[0], out, add)

    def check(arrays: tuple[Array, ...], count: int) -> None:
        if _largest_bits(arrays[0]) >= INFINITY_BITS:
            raise NonFiniteDelta(f"float32: NaN or infinity in a slab of {count} values")

    def layout(count: int) -> Sections:
        return ((np.float32, count),)

    def energy(buffers: Buffers, count: int) -> float:
        (values,) = read_buffers(buffers, layout(count), "float32")
        return float(np.dot(values, values))

    return plain_codec("float32", layout, encode, lambda arrays, count: arrays[0].copy(), write, check, energy)


def bf16() -> Codec:
    """Round to the nearest bfloat16, ties to even: 2 bytes a value, sent as uint16.

    Error: |x - decoded| <= 2^-8 |x| for a normal x, 2^-134 for a denormal one.
    A value that would round to infinity becomes the largest bfloat16, 3.39e38.
    """

    def encode(x: Array) -> tuple[Array, ...]:
        if not isinstance(x, np.ndarray):
            return (_round(x),)
        x = np.ascontiguousarray(x)
        largest = _largest_bits(x)
        needs_finite(largest, x.size)
        return (_round_numpy(x) if largest < (_LARGEST_BF16 << 16) + 0x8000 else _round(x),)

    def decode(arrays: tuple[Array, ...], count: int) -> Array:
        xp = arrays[0].__array_namespace__()
        return (arrays[0].astype(xp.uint32) << 16).view(xp.float32)

    def write(arrays: tuple[Array, ...], out: Numpy, add: bool) -> None:
        values = _scratch.take("values", out.size, np.float32) if add else out
        if bfloat16 is not None:
            np.copyto(values, arrays[0].view(bfloat16))
        else:
            bits = values.view(np.uint32)
            np.copyto(bits, arrays[0])
            np.left_shift(bits, 16, out=bits)
        if add:
            np.add(out, values, out=out)

    def check(arrays: tuple[Array, ...], count: int) -> None:
        magnitudes = np.bitwise_and(arrays[0], 0x7FFF, out=_scratch.take("codes", count, np.uint16))
        if np.maximum.reduce(magnitudes) > _LARGEST_BF16:
            raise NonFiniteDelta(f"bf16: NaN or infinity in a slab of {count} values")

    return plain_codec("bf16", lambda count: ((np.uint16, count),), encode, decode, write, check)


def _largest_bits(x: Numpy) -> int:
    magnitudes = np.bitwise_and(x.view(np.int32), MAGNITUDE, out=_scratch.take("magnitudes", x.size, np.int32))
    return int(np.maximum.reduce(magnitudes))


def _round(x: Array) -> Array:
    xp = x.__array_namespace__()
    bits = x.view(xp.uint32)
    magnitude = bits & MAGNITUDE
    return (xp.minimum(to_bfloat16(magnitude), _LARGEST_BF16) | ((bits >> 16) & 0x8000)).astype(xp.uint16)


def _round_numpy(x: Numpy) -> Numpy:
    """As `_round`, for values that do not round to infinity: the sign bit rides along."""
    if bfloat16 is not None:
        return x.astype(bfloat16).view(np.uint16)
    bits, rounded = x.view(np.uint32), _scratch.take("rounded", x.size, np.uint32)
    np.right_shift(bits, 16, out=rounded)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, 16, out=rounded)
    return rounded.astype(np.uint16)

"""Send values as they are, or each on its own in fewer bits: float32 and bfloat16.

Rule: nothing here looks at a neighbour; decode gives exactly the bits that were chosen, denormals included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqtrain.codecs.codec import Codec, Scratch, Sections, Stateless, needs_finite, needs_slab, read_buffers
from zmqtrain.core.errors import NonFiniteDelta
from zmqtrain.core.types import Array, Buffer

_scratch = Scratch()
_MAGNITUDE = 0x7FFFFFFF
_LARGEST_BF16 = 0x7F7F


def float32() -> Codec:
    """Send float32 as it is: 4 bytes a value, no error."""

    def encode(x: Array, state: Stateless) -> tuple[tuple[Array, ...], Stateless]:
        needs_slab(x, "float32")
        if isinstance(x, np.ndarray):
            needs_finite(_largest_bits(x), x.size)
        return (x,), state

    def decode(buffers: Sequence[Buffer | Array], count: int) -> Array:
        (values,) = read_buffers(buffers, [(np.float32, count)], "float32")
        return values.copy()

    def decode_into(buffers: Sequence[Buffer | Array], out: np.ndarray[Any, Any], add: bool) -> None:
        (values,) = read_buffers(buffers, [(np.float32, out.size)], "float32")
        if add:
            np.add(out, values, out=out)
        else:
            np.copyto(out, values)

    def check(buffers: Sequence[Buffer | Array], count: int) -> None:
        (values,) = read_buffers(buffers, [(np.float32, count)], "float32")
        if _largest_bits(values) >= 0x7F800000:
            raise NonFiniteDelta(f"float32: NaN or infinity in a slab of {count} values")

    def energy(buffers: Sequence[Buffer | Array], count: int) -> float:
        (values,) = read_buffers(buffers, [(np.float32, count)], "float32")
        return float(np.dot(values, values))

    def layout(count: int) -> Sections:
        return ((np.float32, count),)

    return Codec("float32", lambda count: (), layout, encode, decode, check, decode_into, energy=energy)


def bf16() -> Codec:
    """Round to the nearest bfloat16, ties to even: 2 bytes a value, sent as uint16.

    Error: |x - decoded| <= 2^-8 |x| for a normal x, 2^-134 for a denormal one.
    A value that would round to infinity becomes the largest bfloat16, 3.39e38.
    """

    def encode(x: Array, state: Stateless) -> tuple[tuple[Array, ...], Stateless]:
        needs_slab(x, "bf16")
        if not isinstance(x, np.ndarray):
            return (_round(x),), state
        x = np.ascontiguousarray(x)
        largest = _largest_bits(x)
        needs_finite(largest, x.size)
        codes = _round_numpy(x) if largest < (_LARGEST_BF16 << 16) + 0x8000 else _round(x)
        return (codes,), state

    def decode(buffers: Sequence[Buffer | Array], count: int) -> Array:
        (codes,) = read_buffers(buffers, [(np.uint16, count)], "bf16")
        xp = codes.__array_namespace__()
        return (codes.astype(xp.uint32) << 16).view(xp.float32)

    def decode_into(buffers: Sequence[Buffer | Array], out: np.ndarray[Any, Any], add: bool) -> None:
        (codes,) = read_buffers(buffers, [(np.uint16, out.size)], "bf16")
        values = _scratch.take("values", out.size, np.float32) if add else out
        bits = values.view(np.uint32)
        np.copyto(bits, codes)
        np.left_shift(bits, 16, out=bits)
        if add:
            np.add(out, values, out=out)

    def check(buffers: Sequence[Buffer | Array], count: int) -> None:
        (codes,) = read_buffers(buffers, [(np.uint16, count)], "bf16")
        magnitudes = np.bitwise_and(codes, 0x7FFF, out=_scratch.take("codes", count, np.uint16))
        if np.maximum.reduce(magnitudes) > _LARGEST_BF16:
            raise NonFiniteDelta(f"bf16: NaN or infinity in a slab of {count} values")

    return Codec("bf16", lambda count: (), lambda count: ((np.uint16, count),), encode, decode, check, decode_into)


def _largest_bits(x: np.ndarray[Any, Any]) -> int:
    magnitudes = np.bitwise_and(x.view(np.int32), _MAGNITUDE, out=_scratch.take("magnitudes", x.size, np.int32))
    return int(np.maximum.reduce(magnitudes))


def _round(x: Array) -> Array:
    xp = x.__array_namespace__()
    bits = x.view(xp.uint32)
    magnitude = bits & _MAGNITUDE
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    return (xp.minimum(rounded, _LARGEST_BF16) | ((bits >> 16) & 0x8000)).astype(xp.uint16)


def _round_numpy(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """As `_round`, for values that do not round to infinity: the sign bit rides along."""
    bits, rounded = x.view(np.uint32), _scratch.take("rounded", x.size, np.uint32)
    np.right_shift(bits, 16, out=rounded)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, 16, out=rounded)
    return rounded.astype(np.uint16)

"""Do the codecs' innermost loops in machine code where numba is installed: the same bytes, sooner.

Rule 1: nobody needs it: without numba the numpy twins run, and a law in the tests holds the bytes equal.
Rule 2: numba is imported when the first large slab comes, never earlier: importing costs half a second, compiling a few
seconds, once on a machine (the code is kept beside this file, or in the user's cache).
Rule 3: no fast-math and no fused multiply-add: Rule 1 of codec.py holds here too.  Rule 4: one thread, without the GIL.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from zmqtrain.codecs.codec import SMALLEST_MAGNITUDE_BITS

__all__ = ["LARGE_SLAB", "REACH_BLOCK", "Kernels", "kernels", "use"]

logger = logging.getLogger(__name__)

LARGE_SLAB = 16_384
"""The fewest values for which machine code is worth the wait for numba."""

REACH_BLOCK = 16
"""How many values `reach` looks at together."""

_MAGNITUDE = np.int32(0x7FFFFFFF)
_SMALLEST = np.int32(SMALLEST_MAGNITUDE_BITS)
_TO_16_BITS = np.float32(65536)
_NOISE = np.uint32(0xFFFF)
_GOLDEN, _FIRST_FACTOR, _SECOND_FACTOR = np.uint32(0x9E3779B9), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


class Kernels(NamedTuple):
    """The loops in machine code. All arrays are contiguous and aligned.

    quantize(x, its bits as int32, block, 1 / most, largest scale bits, 1 / each scale by its bits, None or most if
      rounded at random, codes, scales): as `_encode_numpy` of quantize.py; returns the largest magnitude's bits.
    write(codes, scales as float32, out, block, add): as `write_blocks` of quantize.py.
    ternary(x, its bits as int32, block, digits, scales): as `_all_digits_numpy` of ternary.py; returns the same.
    reach(bits as int32, threshold, scratch intp[n / 16, rounded up], places intp[n]): as `_places_from` of topk.py:
      writes where the magnitude's bits are `threshold` or more, ascending; returns how many there are.
    """

    quantize: Callable[..., int]
    write: Callable[..., None]
    ternary: Callable[..., int]
    reach: Callable[..., int]


_lock = threading.Lock()
_choice: bool | None = None
_loaded: Kernels | None = None
_tried = False


def use(choice: bool | None) -> None:
    """Choose for this process: True takes machine code for slabs of every size, False never takes it, None (as at the
    start) takes it for large slabs if numba is installed.

    Raises ImportError for True where numba is not installed.
    """
    global _choice
    if choice and _load() is None:
        raise ImportError("numba is not installed here, or cannot be imported")
    _choice = choice


def kernels(count: int) -> Kernels | None:
    """Return the loops to use for a slab of `count` values, or None: then numpy does it."""
    if _choice is False or (_choice is None and count < LARGE_SLAB):
        return None
    return _loaded if _tried else _load()


def _load() -> Kernels | None:
    """Import numba and compile, once; None where numba is not installed."""
    global _loaded, _tried
    with _lock, warnings.catch_warnings():
        if _tried:
            return _loaded
        warnings.simplefilter("ignore")  # what numba says of its own dependencies is not for our users
        try:
            import numba
        except ImportError as error:
            logger.debug("numba cannot be imported (%s): codecs run in numpy", error)
        else:
            try:
                _loaded = _compile(numba)
            except numba.core.errors.NumbaError as error:
                logger.warning("numba %s cannot compile (%s): codecs run in numpy", numba.__version__, error)
        _tried = True
        return _loaded


def _compile(numba: Any) -> Kernels:
    def given(kind: Any) -> Any:
        return numba.types.Array(kind, 1, "C", readonly=True)

    def made(kind: Any) -> Any:
        return numba.types.Array(kind, 1, "C")

    def jit(signature: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            compiled = numba.njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # there is no folder where the code could be kept
            compiled = numba.njit(signature, nogil=True)(function)
        return compiled  # type: ignore[no-any-return]

    x, bits, codes, scales = given(numba.float32), given(numba.int32), made(numba.int8), made(numba.uint16)
    quantize = [
        numba.int64(x, bits, numba.int64, numba.float32, numba.int64, x, most, codes, scales)
        for most in (numba.types.none, numba.int64)
    ]
    write = numba.void(given(numba.int8), given(numba.float32), made(numba.float32), numba.int64, numba.boolean)
    ternary = numba.int64(x, bits, numba.int64, made(numba.uint8), scales)
    reach = numba.int64(bits, numba.int32, made(numba.intp), made(numba.intp))
    return Kernels(jit(quantize, _quantize), jit(write, _write), jit(ternary, _ternary), jit(reach, _reach))


# What follows is compiled. Integers have 64 bits unless they are cast; loops over slices become vectors, but not where
# a branch jumps over them.


def _quantize(
    x: Any,
    bits: Any,
    block: int,
    inverse: np.float32,
    largest_scale_bits: int,
    reciprocals: Any,
    most: int | None,
    codes: Any,
    scales: Any,
) -> int:
    worst = 0
    for number in range(scales.size):
        start = number * block
        values, patterns, target = x[start : start + block], bits[start : start + block], codes[start : start + block]
        largest = np.int32(0)
        for i in range(patterns.size):
            largest = max(largest, np.int32(patterns[i] & _MAGNITUDE))
        worst = max(worst, int(largest))
        exact = np.float32(np.int32(largest).view(np.float32) * inverse).view(np.int32)
        scale = min(int((exact + 0xFFFF) >> 16), largest_scale_bits) if largest >= _SMALLEST else 0
        scales[number], reciprocal = scale, reciprocals[scale]
        if most is None:
            for i in range(values.size):
                target[i] = np.int8(np.rint(values[i] * reciprocal))
        else:
            top = np.int32(most)
            place = np.uint32(start)
            for i in range(values.size):
                noise = np.uint32(np.uint32(patterns[i]) ^ np.uint32(np.uint32(place + np.uint32(i)) * _GOLDEN))
                noise = np.uint32(np.uint32(noise ^ (noise >> 16)) * _FIRST_FACTOR)
                noise = np.uint32(np.uint32(noise ^ (noise >> 15)) * _SECOND_FACTOR)
                noise = np.uint32(noise ^ (noise >> 16)) & _NOISE
                units = np.int32(np.rint(values[i] * reciprocal * _TO_16_BITS))
                code = np.int32(np.int32(units + np.int32(noise)) >> 16)
                target[i] = np.int8(min(max(code, np.int32(-top)), top))
    return worst


def _write(codes: Any, scales: Any, out: Any, block: int, add: bool) -> None:
    for number in range(scales.size):
        start, scale = number * block, scales[number]
        source, target = codes[start : start + block], out[start : start + block]
        if add:
            for i in range(target.size):
                target[i] += np.float32(source[i]) * scale
        else:
            for i in range(target.size):
                target[i] = np.float32(source[i]) * scale


def _ternary(x: Any, bits: Any, block: int, digits: Any, scales: Any) -> int:
    worst = 0
    for number in range(scales.size):
        start = number * block
        values, patterns, target = x[start : start + block], bits[start : start + block], digits[start : start + block]
        largest = np.int32(0)
        for i in range(patterns.size):
            largest = max(largest, np.int32(patterns[i] & _MAGNITUDE))
        worst = max(worst, int(largest))
        alive, exponent = largest >= _SMALLEST, largest >> 23
        factor = np.int32((262 - exponent) << 23 if alive else 0).view(np.float32)
        total = np.int32(0)
        for i in range(values.size):
            total = np.int32(total + abs(np.int32(values[i] * factor)))
        threshold = np.int32(total * 717 // (values.size * 1024))
        below = np.int32(-threshold)
        kept, kept_sum = np.int32(0), np.int32(0)
        for i in range(values.size):
            unit = abs(np.int32(values[i] * factor))
            kept = np.int32(kept + (np.int32(1) if unit > threshold else np.int32(0)))
            kept_sum = np.int32(kept_sum + (unit if unit > threshold else np.int32(0)))
        for i in range(values.size):
            unit = np.int32(values[i] * factor)
            raised = np.int32(2) if unit > threshold else np.int32(1)
            target[i] = np.uint8(raised - (np.int32(1) if unit < below else np.int32(0)))
        mean = np.float32(((2 * kept_sum + kept) << 8) // max(int(kept), 1)).view(np.int32)
        rounded = (mean + 0x7FFF + ((mean >> 16) & 1)) >> 16
        scales[number] = min(rounded + ((exponent - (127 + 8 + 9)) << 7), 0x7F7F) if alive else 0
    return worst


def _reach(bits: Any, threshold: int, hot: Any, places: Any) -> int:
    blocks = count = 0
    for start in range(0, bits.size, REACH_BLOCK):
        patterns = bits[start : start + REACH_BLOCK]
        largest = np.int32(0)
        for i in range(patterns.size):
            largest = max(largest, np.int32(patterns[i] & _MAGNITUDE))
        hot[blocks] = start  # written each time, and counted if it is right: a branch would be predicted wrong
        blocks += 1 if largest >= threshold else 0
    for number in range(blocks):
        start = hot[number]
        for i in range(start, min(start + REACH_BLOCK, bits.size)):
            places[count] = i
            count += 1 if np.int32(bits[i] & _MAGNITUDE) >= threshold else 0
    return count

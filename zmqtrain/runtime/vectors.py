"""Lend large float32 vectors, and lend their memory again once nobody looks at it any more.

The kernel zeroes fresh memory page by page, which costs a codec as much as its own work; and JAX on a CPU takes an
array as it lies, without a copy, if it begins at a multiple of 64 bytes.
Rule 1: memory is lent again only when nothing refers to it but its keeper: a view holds it, and so does a JAX array
until the last computation that reads it is done.  Rule 2: one thread takes; any thread may let go.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALIGNMENT_BYTES", "SMALLEST_KEPT_BYTES", "Vectors"]

ALIGNMENT_BYTES = 64
SMALLEST_KEPT_BYTES = 1 << 20
"""Smaller vectors come from the heap, which holds on to its pages by itself."""

_ALIGNMENT_VALUES = ALIGNMENT_BYTES // 4
_OWN_REFERENCES = 2  # the list's, and that of the call that counts


class Vectors:
    """Memory for vectors, which keeps what was lent last.  most: so many are kept."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._kept: list[NDArray[np.float32]] = []

    def take(self, count: int) -> NDArray[np.float32]:
        """Return float32[count] of undefined content at an address of a multiple of 64 bytes."""
        if 4 * count < SMALLEST_KEPT_BYTES:
            return _aligned(np.empty(count + _ALIGNMENT_VALUES, np.float32), count)
        needed = count + _ALIGNMENT_VALUES
        for number in range(len(self._kept)):
            fits = needed <= self._kept[number].size <= needed + needed // 4
            if fits and sys.getrefcount(self._kept[number]) <= _OWN_REFERENCES:
                self._kept.append(self._kept.pop(number))
                return _aligned(self._kept[-1], count)
        self._kept.append(np.empty(needed + needed // 16, np.float32))  # fragments differ by a block or two
        del self._kept[: -self._most]
        return _aligned(self._kept[-1], count)

    def take_segments(self, counts: Sequence[int]) -> list[NDArray[np.float32]]:
        """Return float32[count] for each count, as `take` does: all of one memory, each at a multiple of 64 bytes."""
        sizes = [-(-count // _ALIGNMENT_VALUES) * _ALIGNMENT_VALUES for count in counts]
        memory = self.take(sum(sizes))
        ends = np.cumsum(sizes).tolist()
        return [memory[end - size : end - size + count] for end, size, count in zip(ends, sizes, counts, strict=True)]


def _aligned(memory: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    first = -memory.ctypes.data % ALIGNMENT_BYTES // 4
    return memory[first : first + count]

"""Lend large float32 vectors, and lend their memory again once nobody looks at it any more.

The kernel zeroes fresh memory page by page, which costs a codec as much as its own work; and JAX on a CPU takes an
array as it lies, without a copy, if it begins at a multiple of 64 bytes.
Rule 1: memory is lent again only when nothing refers to it but its keeper: each time it is lent by an array of its own,
which every view of it holds, and so does a JAX array until the last computation that reads it is done; a weak reference
says whether that array is gone. (Reference counts do not say it: where references are borrowed, or other threads have
theirs, they are too low.)  Rule 2: one thread takes; any thread may let go.
Rule 3: what was lent last is lent first, and what nobody has needed for a while is given back: as much stays as is
needed at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ALIGNMENT_BYTES = 64
SMALLEST_KEPT_BYTES = 1 << 20
"""Smaller vectors come from the heap, which holds on to its pages by itself."""

IDLE_TAKES = 8
"""Memory that was not lent for so many takes is not kept any longer."""

_ALIGNMENT_VALUES = ALIGNMENT_BYTES // 4


class _Kept:
    """Memory, at which take it was lent last, and whether somebody has it."""

    __slots__ = ("_lent", "lent_at", "memory")

    def __init__(self, memory: NDArray[np.float32]) -> None:
        self.memory, self.lent_at = memory, 0
        self._lent: weakref.ref[NDArray[np.float32]] | None = None

    @property
    def is_free(self) -> bool:
        return self._lent is None or self._lent() is None

    def lend(self, take: int) -> NDArray[np.float32]:
        """Return an array of all the memory, which its views hold: of a memoryview they do not look behind it."""
        array = np.frombuffer(self.memory.data, np.float32)
        self._lent, self.lent_at = weakref.ref(array), take
        return array


class Vectors:
    """Memory for vectors, which keeps what was lent last.  most: so many are kept."""

    def __init__(self, most: int = 4) -> None:
        self._most, self._takes = most, 0
        self._kept: list[_Kept] = []  # what was lent last is last

    def take(self, count: int) -> NDArray[np.float32]:
        """Return float32[count] of undefined content at an address of a multiple of 64 bytes."""
        needed = count + _ALIGNMENT_VALUES
        if 4 * count < SMALLEST_KEPT_BYTES:
            return _aligned(np.empty(needed, np.float32), count)
        self._takes += 1
        latest = None
        for kept in reversed(self._kept):
            if needed <= kept.memory.size <= needed + needed // 4 and kept.is_free:
                latest = kept
                self._kept.remove(kept)
                break
        oldest = self._takes - IDLE_TAKES
        self._kept = [kept for kept in self._kept if kept.lent_at > oldest or not kept.is_free]
        if latest is None:  # a little more than is needed: fragments differ by a block or two
            latest = _Kept(np.empty(needed + needed // 16, np.float32))
        self._kept.append(latest)
        del self._kept[: -self._most]
        return _aligned(latest.lend(self._takes), count)

    def take_segments(self, counts: Sequence[int]) -> list[NDArray[np.float32]]:
        """Return float32[count] for each count, as `take` does: all of one memory, each at a multiple of 64 bytes."""
        sizes = [-(-count // _ALIGNMENT_VALUES) * _ALIGNMENT_VALUES for count in counts]
        memory = self.take(sum(sizes))
        ends = np.cumsum(sizes).tolist()
        return [memory[end - size : end - size + count] for end, size, count in zip(ends, sizes, counts, strict=True)]


def _aligned(memory: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    first = -memory.ctypes.data % ALIGNMENT_BYTES // 4
    return memory[first : first + count]

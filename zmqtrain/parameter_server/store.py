"""Hold the values of keys, and make the server's steps on them.

Rule 1: pure: no clock, no socket; one thread calls it.  Rule 2: what comes and goes is frames of at most `FRAME_BYTES`,
raw little-endian values one after the other; `check` looks at all of them before any is used.  Rule 3: gradients of one
step are added in the order given, in the dtype of the values, then divided by their number.
Rule 4: what is read is a copy that nobody writes again, made once for each version, whoever asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import CodecError, NonFiniteDelta
from zmqtrain.core.types import Buffer
from zmqtrain.parameter_server.optimizers import ServerOptimizer

FRAME_BYTES = 1 << 20
"""Of one frame of values, the last one of a piece apart."""
LARGEST_VALUE = 1e18
"""A gradient, or an initial value, of which the square is no float32 any more is refused like one that is infinite."""

_BLOCK_VALUES = 65_536  # values, gradients and state stay in a core's cache between the passes

Vector = NDArray[Any]


def frame_sizes(size: int) -> tuple[int, ...]:
    """Return the bytes of each frame of a piece of `size` bytes."""
    whole, rest = divmod(size, FRAME_BYTES)
    return (FRAME_BYTES,) * whole + ((rest,) if rest else ())


def is_cut(size: int, sizes: Sequence[int]) -> bool:
    """Return whether these are the frames of a piece of `size` bytes; whatever somebody claims, it costs nothing."""
    *whole, rest = sizes or (0,)
    return 0 < rest <= FRAME_BYTES and sum(sizes) == size and all(one == FRAME_BYTES for one in whole)


def cut_frames(values: Vector) -> list[memoryview]:
    """Return the frames of a flat contiguous array, little-endian; nothing is copied where the machine is that too."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    raw = little.view(np.uint8).data
    return [raw[start : start + FRAME_BYTES] for start in range(0, len(raw), FRAME_BYTES)]


def join_frames(frames: Sequence[Buffer], into: Vector) -> None:
    """Copy frames into a flat contiguous array of as many values. Raises CodecError if they are not as many."""
    if sum(len(frame) for frame in frames) != into.nbytes:
        raise CodecError(f"{sum(len(frame) for frame in frames)} bytes came where {into.nbytes} are due")
    start = 0
    for frame in frames:
        part = _read(frame, into.dtype)
        into[start : start + part.size] = part
        start += part.size


@dataclass
class Entry:
    """One key's piece. version: how many steps the optimizer has made of it; state: its arrays by slot."""

    values: Vector
    state: dict[str, Vector]
    version: int = 0
    frames: tuple[memoryview, ...] = field(default=(), repr=False)


class Store:
    """The values of keys, each a flat array, and what the optimizer keeps of them."""

    def __init__(self, optimizer: ServerOptimizer) -> None:
        self.optimizer = optimizer
        self.entries: dict[str, Entry] = {}

    def check(self, dtype: str, frames: Sequence[Buffer]) -> None:
        """Raise NonFiniteDelta if a value is no number, infinite, or beyond `LARGEST_VALUE`."""
        for frame in frames:
            values = _read(frame, np.dtype(dtype))
            if not (values.min() >= -LARGEST_VALUE and values.max() <= LARGEST_VALUE):  # NaN is neither
                raise NonFiniteDelta(f"a value is not finite, or beyond {LARGEST_VALUE:g}")

    def install(self, key: str, dtype: str, frames: Sequence[Buffer]) -> None:
        """Begin a key with these values, at version 0."""
        values = np.empty(sum(len(frame) for frame in frames) // np.dtype(dtype).itemsize, dtype)
        join_frames(frames, values)
        self.entries[key] = Entry(values, self._fresh(values))

    def begin(self, optimizer: ServerOptimizer, anew: bool) -> None:
        """Step by this optimizer from now on, its state fresh and versions from 0. anew: without any key."""
        self.optimizer = optimizer
        if anew:
            self.entries.clear()
        for entry in self.entries.values():
            entry.state, entry.version = self._fresh(entry.values), 0

    def _fresh(self, values: Vector) -> dict[str, Vector]:
        return {slot: np.zeros_like(values) for slot in self.optimizer.slots}

    def apply(self, key: str, gradients: Sequence[Sequence[Buffer]]) -> None:
        """Make one step by the mean of gradients, each given as its frames; none by none.

        They were checked, and are as many bytes as the key has.
        """
        if not gradients:
            return
        entry = self.entries[key]
        entry.version, entry.frames = entry.version + 1, ()
        values, dtype = entry.values, entry.values.dtype
        scratch = np.empty(min(_BLOCK_VALUES, values.size), dtype)
        count = dtype.type(len(gradients))
        start = 0
        for frames in zip(*gradients, strict=True):
            parts = [_read(frame, dtype) for frame in frames]
            for begin in range(0, parts[0].size, _BLOCK_VALUES):
                first, *others = [part[begin : begin + _BLOCK_VALUES] for part in parts]
                gradient, place = scratch[: first.size], slice(start + begin, start + begin + first.size)
                np.copyto(gradient, first)
                for other in others:
                    np.add(gradient, other, out=gradient)
                if others:
                    np.divide(gradient, count, out=gradient)
                state = {slot: array[place] for slot, array in entry.state.items()}
                self.optimizer.update(values[place], gradient, state, entry.version)
            start += parts[0].size

    def read(self, key: str) -> tuple[int, tuple[memoryview, ...]]:
        """Return a key's version and its values as frames."""
        entry = self.entries[key]
        if not entry.frames:
            entry.frames = tuple(cut_frames(entry.values.copy()))
        return entry.version, entry.frames

    def arrays(self) -> dict[str, Vector]:
        """Return copies of all values and state, for a checkpoint: "values/KEY" and "SLOT/KEY"."""
        copies = {f"values/{key}": entry.values.copy() for key, entry in self.entries.items()}
        for key, entry in self.entries.items():
            copies |= {f"{slot}/{key}": array.copy() for slot, array in entry.state.items()}
        return copies

    def restore(self, versions: Mapping[str, int], arrays: Mapping[str, Vector]) -> None:
        """Take over what `arrays` gave, with the versions then. Raises KeyError if an array is missing."""
        for key, version in versions.items():
            state = {slot: arrays[f"{slot}/{key}"] for slot in self.optimizer.slots}
            self.entries[key] = Entry(arrays[f"values/{key}"], state, version)


def _read(frame: Buffer, dtype: np.dtype[Any]) -> Vector:
    return np.frombuffer(frame, dtype.newbyteorder("<"))

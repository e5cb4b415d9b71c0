"""Say which values of a model travel together: fragment f holds every n-th block of 4,096 values.

Rule 1: the blocks of all leaves are numbered through the model in leaf order; fragment f has those with
number % fragments == f. Every node computes the same: no index is ever sent.
Rule 2: a leaf's part in a fragment is one segment: flat float32, in block order. A block never spans two leaves; the
last of a leaf may be shorter.  Rule 3: `take`, `add` and `place` are the same for numpy and, with a
static f, under jax.jit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError, ModelMismatch
from zmqtrain.types import Array, ModelSpec

__all__ = ["BLOCK_VALUES", "Layout", "check_model"]

BLOCK_VALUES = 4096

_DTYPES = ("float32", "float16", "bfloat16", "float64")

Vector = NDArray[np.float32]


def check_model(spec: ModelSpec) -> None:
    """Raise ModelMismatch, naming the leaf, unless every leaf is of float32, float16, bfloat16 or float64."""
    for leaf in spec:
        if leaf.dtype not in _DTYPES:
            message = f"the leaf {leaf} cannot be trained: its dtype must be one of {', '.join(_DTYPES)}"
            raise ModelMismatch(message, leaf.path)


@dataclass(frozen=True, slots=True)
class Layout:
    """The cut of a model in `fragments` parts, equal but for a block or two. Hashable: jit may take it as static.

    Raises ModelMismatch for a leaf that holds no real numbers, ConfigError for under one fragment or more than blocks.
    """

    spec: ModelSpec
    fragments: int
    _first: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Per leaf the number of its first block."""

    def __post_init__(self) -> None:
        check_model(self.spec)
        first, blocks = [], 0
        for leaf in self.spec:
            first.append(blocks)
            blocks += -(-leaf.values // BLOCK_VALUES)
        object.__setattr__(self, "_first", tuple(first))
        if not blocks:
            raise ConfigError("the model has no values: there is nothing to exchange")
        if not 1 <= self.fragments <= blocks:
            raise ConfigError(
                f"fragments={self.fragments}: this model has {blocks} blocks of at most {BLOCK_VALUES} values, "
                f"so fragments must be 1 to {blocks}"
            )

    def counts(self, fragment: int) -> tuple[int, ...]:
        """Return how many values of each of `leaves(fragment)` the fragment holds; none is 0."""
        return tuple(self._count(leaf, fragment) for leaf in self.leaves(fragment))

    def leaves(self, fragment: int) -> tuple[int, ...]:
        """Return the indices of the leaves that have a block in the fragment, in order."""
        return tuple(leaf for leaf in range(len(self.spec)) if self._count(leaf, fragment))

    def spans(self, leaf_index: int, fragment: int) -> NDArray[np.int64]:
        """Return where in the flat leaf its segment lies: int64[pieces, 2] of (start, end), rising."""
        whole, column, start, end = self._cut(leaf_index, fragment)
        starts = np.arange(column, whole, self.fragments, dtype=np.int64) * BLOCK_VALUES
        spans = np.stack([starts, starts + BLOCK_VALUES], axis=1)
        return spans if start == end else np.concatenate([spans, np.array([[start, end]], np.int64)])

    def take(self, leaf: Array, leaf_index: int, fragment: int) -> Array:
        """Return the leaf's segment of the fragment, float32[count], from an array of the leaf's shape.

        numpy: a copy, or a view where the leaf is one contiguous float32 segment as a whole.
        """
        flat = leaf.reshape(-1)
        if self.fragments == 1:
            return flat.astype(np.float32, copy=False)
        whole, column, start, end = self._cut(leaf_index, fragment)
        blocks = flat[: whole * BLOCK_VALUES].reshape(whole, BLOCK_VALUES)[column :: self.fragments]
        if hasattr(leaf, "at"):
            return leaf.__array_namespace__().concatenate([blocks.reshape(-1), flat[start:end]]).astype(np.float32)
        segment = np.empty(blocks.size + end - start, np.float32)
        segment[: blocks.size].reshape(blocks.shape)[:] = blocks
        segment[blocks.size :] = flat[start:end]
        return segment

    def add(self, leaf: Array, leaf_index: int, fragment: int, segment: Array) -> Array:
        """Add a segment to its places in a leaf and return the leaf: numpy in place (contiguous), jax a new leaf.

        The sum is made in the wider of the two dtypes and rounded to the leaf's.
        """
        return self._write(leaf, leaf_index, fragment, segment, True)

    def place(self, leaf: Array, leaf_index: int, fragment: int, segment: Array) -> Array:
        """Write a segment to its places in a leaf and return the leaf: numpy in place (contiguous), jax a new leaf."""
        return self._write(leaf, leaf_index, fragment, segment, False)

    def split(self, leaves: Sequence[Array]) -> list[Vector]:
        """Return per fragment all its segments in one flat float32 vector of its own (numpy), from all leaves."""
        return [
            np.concatenate([self.take(np.asarray(leaves[leaf]), leaf, fragment) for leaf in self.leaves(fragment)])
            for fragment in range(self.fragments)
        ]

    def join(self, flats: Sequence[Vector]) -> list[Vector]:
        """Return all leaves in their shapes, float32 (numpy), from the vectors of `split`."""
        joined = [np.empty(leaf.shape, np.float32) for leaf in self.spec]
        for fragment, flat in enumerate(flats):
            start = 0
            for leaf, count in zip(self.leaves(fragment), self.counts(fragment), strict=True):
                self.place(joined[leaf], leaf, fragment, flat[start : start + count])
                start += count
        return joined

    def _cut(self, leaf: int, fragment: int) -> tuple[int, int, int, int]:
        """Return (whole, column, start, end): of the leaf's `whole` whole blocks this fragment has every n-th, from
        `column` on; then the values start..end, the short block at the leaf's end, if that is this fragment's."""
        values = self.spec[leaf].values
        whole = values // BLOCK_VALUES
        column = (fragment - self._first[leaf]) % self.fragments
        mine = whole % self.fragments == column
        return whole, column, whole * BLOCK_VALUES if mine else values, values

    def _count(self, leaf: int, fragment: int) -> int:
        whole, column, start, end = self._cut(leaf, fragment)
        return len(range(column, whole, self.fragments)) * BLOCK_VALUES + end - start

    def _write(self, leaf: Array, leaf_index: int, fragment: int, segment: Array, add: bool) -> Array:
        whole, column, start, end = self._cut(leaf_index, fragment)
        flat, span = leaf.reshape(-1), whole * BLOCK_VALUES
        head = len(range(column, whole, self.fragments)) * BLOCK_VALUES
        blocks, tail = segment[:head].reshape(-1, BLOCK_VALUES), segment[head:]
        if hasattr(leaf, "at"):
            return self._write_jax(leaf, leaf_index, fragment, segment, add)
        if not leaf.flags.c_contiguous:
            raise ConfigError(f"the leaf {self.spec[leaf_index]} is not contiguous: it cannot be written in place")
        _put(flat[:span].reshape(whole, BLOCK_VALUES)[column :: self.fragments], blocks, add)
        _put(flat[start:end], tail, add)
        return leaf

    def _write_jax(self, leaf: Array, leaf_index: int, fragment: int, segment: Array, add: bool) -> Array:
        """Return the leaf with the segment added or placed; under jit in the leaf's own memory, if that is donated.

        XLA copies nothing else as long as the leaf is never cut: it is written by rows of `grain` values, which divide
        the leaf, its blocks and the short block at its end. (Slices of the leaf cost a copy of it each: 3 to 60 times
        the time on the CPU, and twice the model in memory on any device.)
        """
        if self.fragments == 1:
            segment = segment.reshape(leaf.shape)
            return (leaf + segment).astype(leaf.dtype) if add else segment.astype(leaf.dtype)
        whole, column, start, end = self._cut(leaf_index, fragment)
        grain = gcd(end, BLOCK_VALUES)
        blocks = np.arange(column, whole, self.fragments)[:, None] * (BLOCK_VALUES // grain)
        inside = blocks + np.arange(BLOCK_VALUES // grain)
        numbers = np.concatenate([inside.reshape(-1), np.arange(start // grain, end // grain)])
        rows, values = leaf.reshape(-1, grain), segment.reshape(-1, grain)
        promise = {"unique_indices": True, "indices_are_sorted": True, "mode": "promise_in_bounds"}
        if add and leaf.dtype == segment.dtype:
            return rows.at[numbers].add(values, **promise).reshape(leaf.shape)
        wanted = rows[numbers] + values if add else values
        return rows.at[numbers].set(wanted.astype(leaf.dtype), **promise).reshape(leaf.shape)


def _put(target: np.ndarray[Any, Any], values: np.ndarray[Any, Any], add: bool) -> None:
    if not add:
        target[...] = values
    elif target.dtype == values.dtype:
        np.add(target, values, out=target)
    else:
        target[...] = target + values

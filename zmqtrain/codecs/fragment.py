"""The cut of a model into fragments: fragment f holds every n-th block of 4,096 values.

Rule 1: the blocks of all leaves are numbered through the model in leaf order. One broker has them all; of M brokers
each has a shard: a range of them, as large as the others' but for a block. Fragment f has those of its shard with
(number inside the shard) % fragments == f. Every node computes the same: no index is ever sent.
Rule 2: a leaf's part in a fragment is one segment: flat float32, in block order. A block never spans two leaves; the
last of a leaf may be shorter.  Rule 3: `take`, `add` and `place` are the same for numpy and, with a
static f, under jax.jit.
Rule 4: a node of several brokers sees the fragments of all shards in a row (`WholeLayout`): shard * fragments + f.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import gcd

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.codec import Numpy
from zmqtrain.core.errors import ConfigError, ModelMismatch
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, ModelSpec, parts_of

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
    """The cut of one shard of a model in `fragments` parts, equal but for a block or two. Hashable: jit may take it as
    static.

    shard: (i, M): the i-th of M ranges of the model's blocks; (0, 1) is the whole model.
    Raises ModelMismatch for a leaf that holds no real numbers, ConfigError for under one fragment or more than blocks,
    and for a shard that is none.
    """

    spec: ModelSpec
    fragments: int
    shard: tuple[int, int] = (0, 1)
    _first: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Per leaf the number of its first block."""
    _range: tuple[int, int] = field(init=False, repr=False, compare=False)
    """The blocks of the shard: from, to."""
    _known: dict[int, dict[int, int]] = field(init=False, repr=False, compare=False, default_factory=dict)
    """By fragment, once it was asked for: what `_held` returns."""

    def __post_init__(self) -> None:
        check_model(self.spec)
        first = list(accumulate((-(-leaf.values // BLOCK_VALUES) for leaf in self.spec), initial=0))
        object.__setattr__(self, "_first", tuple(first[:-1]))
        blocks, (index, shards) = first[-1], self.shard
        if not blocks:
            raise ConfigError("the model has no values: there is nothing to exchange")
        if not 0 <= index < shards:
            raise ConfigError(f"shard {index}/{shards}: of {shards} shards the first is 0 and the last {shards - 1}")
        if not 1 <= self.fragments * shards <= blocks:
            several = f" (each of {shards} shards has so many)" if shards > 1 else ""
            raise ConfigError(
                f"fragments={self.fragments}{several}: this model has {blocks} blocks of at most {BLOCK_VALUES} "
                f"values, so fragments must be 1 to {blocks // shards}"
                + (f", and shards at most {blocks}" if shards > 1 else "")
            )
        object.__setattr__(self, "_range", self._bounds(blocks)[index : index + 2])

    def _bounds(self, blocks: int) -> tuple[int, ...]:
        """Where the shards begin: at the block nearest to each M-th of the values, `fragments` blocks in each."""
        shards = self.shard[1]
        if shards == 1:
            return 0, blocks
        total = sum(leaf.values for leaf in self.spec)
        bounds = [0]
        for index in range(1, shards):
            block = self._block_at(total * index / shards)
            least, most = bounds[-1] + self.fragments, blocks - self.fragments * (shards - index)
            bounds.append(min(max(block, least), most))
        return *bounds, blocks

    def _block_at(self, value: float) -> int:
        """Return the block that begins nearest to a place among the model's values."""
        begins = 0
        for leaf, first in zip(self.spec, self._first, strict=True):
            if begins <= value < begins + leaf.values:
                inside = int(value - begins) // BLOCK_VALUES
                start = begins + inside * BLOCK_VALUES
                end = min(start + BLOCK_VALUES, begins + leaf.values)
                return first + inside + (end - value < value - start)
            begins += leaf.values
        raise AssertionError(f"no value {value}")

    def counts(self, fragment: int) -> tuple[int, ...]:
        """Return how many values of each of `leaves(fragment)` the fragment holds; none is 0."""
        return tuple(self._held(fragment).values())

    def leaves(self, fragment: int) -> tuple[int, ...]:
        """Return the indices of the leaves that have a block in the fragment, in order."""
        return tuple(self._held(fragment))

    def part(self, leaf: int) -> slice:
        """Return which of the flat leaf's values are the shard's: one piece, which may be empty or all."""
        values, first = self.spec[leaf].values, self._first[leaf]
        start, end = ((bound - first) * BLOCK_VALUES for bound in self._range)
        return slice(min(max(start, 0), values), min(max(end, 0), values))

    def spans(self, leaf_index: int, fragment: int) -> NDArray[np.int64]:
        """Return where in the flat leaf its segment lies: int64[pieces, 2] of (start, end), rising."""
        part, (whole, column, mine) = self.part(leaf_index), self._cut(leaf_index, fragment)
        starts = part.start + np.arange(column, whole, self.fragments, dtype=np.int64) * BLOCK_VALUES
        spans, tail = np.stack([starts, starts + BLOCK_VALUES], axis=1), part.start + whole * BLOCK_VALUES
        return np.concatenate([spans, np.array([[tail, part.stop]], np.int64)]) if mine and tail < part.stop else spans

    def take(self, leaf: Array, leaf_index: int, fragment: int) -> Array:
        """Return the leaf's segment of the fragment, float32[count], from an array of the leaf's shape.

        numpy: a copy, or a view where the segment is one contiguous piece of a float32 leaf.
        """
        return self._gather(self._of_shard(leaf, leaf_index), leaf_index, fragment)

    def add(self, leaf: Array, leaf_index: int, fragment: int, segment: Array) -> Array:
        """Add a segment to its places in a leaf and return the leaf: numpy in place (contiguous), jax a new leaf.

        The sum is made in the wider of the two dtypes and rounded to the leaf's.
        """
        return self._write(leaf, leaf_index, fragment, segment, True)

    def place(self, leaf: Array, leaf_index: int, fragment: int, segment: Array) -> Array:
        """Write a segment to its places in a leaf and return the leaf: numpy in place (contiguous), jax a new leaf."""
        return self._write(leaf, leaf_index, fragment, segment, False)

    def split(self, leaves: Sequence[Array]) -> list[Vector]:
        """Return per fragment all its segments in one flat float32 vector of its own (numpy), from all leaves.

        Of a leaf that the shard has only a part of, that part is enough: what `join` returns.
        """
        values = [self._of_shard(np.asarray(leaf), i) for i, leaf in enumerate(leaves)]
        return [
            np.concatenate([self._gather(values[leaf], leaf, fragment) for leaf in self.leaves(fragment)])
            for fragment in range(self.fragments)
        ]

    def join(self, flats: Sequence[Vector]) -> list[Vector]:
        """Return what the shard has of all leaves, float32 (numpy), from the vectors of `split`.

        A whole leaf is in its shape; of any other only its `part` is there, flat: it may be empty.
        """
        sizes = [part.stop - part.start for part in map(self.part, range(len(self.spec)))]
        joined = [
            np.empty(leaf.shape if size == leaf.values else size, np.float32)
            for leaf, size in zip(self.spec, sizes, strict=True)
        ]
        for fragment, flat in enumerate(flats):
            start = 0
            for leaf, count in zip(self.leaves(fragment), self.counts(fragment), strict=True):
                self.place(joined[leaf], leaf, fragment, flat[start : start + count])
                start += count
        return joined

    def _of_shard(self, leaf: Array, leaf_index: int) -> Array:
        """Return the shard's values of a leaf, flat: a view. leaf: all of it, or those values alone."""
        flat, part = leaf.reshape(-1), self.part(leaf_index)
        return flat if flat.shape[0] == part.stop - part.start else flat[part]

    def _cut(self, leaf: int, fragment: int) -> tuple[int, int, bool]:
        """Return (whole, column, mine): of the shard's `whole` whole blocks of the leaf this fragment has every n-th,
        from `column` on; and whether the short block behind them, if there is one, is this fragment's."""
        part = self.part(leaf)
        whole = (part.stop - part.start) // BLOCK_VALUES
        column = (fragment + self._range[0] - max(self._first[leaf], self._range[0])) % self.fragments
        return whole, column, whole % self.fragments == column

    def _held(self, fragment: int) -> dict[int, int]:
        """Return, by leaf, how many values of it the fragment holds, if any: counted once (every exchange asks)."""
        if fragment not in self._known:
            counts = ((leaf, self._count(leaf, fragment)) for leaf in range(len(self.spec)))
            self._known[fragment] = {leaf: count for leaf, count in counts if count}
        return self._known[fragment]

    def _count(self, leaf: int, fragment: int) -> int:
        whole, column, mine = self._cut(leaf, fragment)
        part = self.part(leaf)
        tail = part.stop - part.start - whole * BLOCK_VALUES if mine else 0
        return len(range(column, whole, self.fragments)) * BLOCK_VALUES + tail

    def _pieces(self, values: Array, leaf: int, fragment: int) -> tuple[Array, Array]:
        """Return the fragment's whole blocks, [blocks, BLOCK_VALUES], and its short one, of the shard's values of a
        leaf."""
        whole, column, mine = self._cut(leaf, fragment)
        end = whole * BLOCK_VALUES
        blocks = values[:end].reshape(whole, BLOCK_VALUES)[column :: self.fragments]
        return blocks, values[end if mine else values.shape[0] :]

    def _gather(self, values: Array, leaf: int, fragment: int) -> Array:
        if self.fragments == 1:
            return values.astype(np.float32, copy=False)
        blocks, tail = self._pieces(values, leaf, fragment)
        if hasattr(values, "at"):
            return values.__array_namespace__().concatenate([blocks.reshape(-1), tail]).astype(np.float32)
        segment = np.empty(blocks.size + tail.size, np.float32)
        segment[: blocks.size].reshape(blocks.shape)[:] = blocks
        segment[blocks.size :] = tail
        return segment

    def _write(self, leaf: Array, leaf_index: int, fragment: int, segment: Array, add: bool) -> Array:
        if hasattr(leaf, "at"):
            return self._write_jax(leaf, leaf_index, fragment, segment, add)
        if not leaf.flags.c_contiguous:
            raise ConfigError(f"the leaf {self.spec[leaf_index]} is not contiguous: it cannot be written in place")
        blocks, tail = self._pieces(self._of_shard(leaf, leaf_index), leaf_index, fragment)
        _put(blocks, segment[: blocks.size].reshape(blocks.shape), add)
        _put(tail, segment[blocks.size :], add)
        return leaf

    def _write_jax(self, leaf: Array, leaf_index: int, fragment: int, segment: Array, add: bool) -> Array:
        """Return the leaf with the segment added or placed; under jit in the leaf's own memory, if that is donated.

        XLA copies nothing else as long as the leaf is never cut: it is written by rows of `grain` values, which divide
        the leaf, its blocks and the short block at its end. (Slices of the leaf cost a copy of it each: 3 to 60 times
        the time on the CPU, and twice the model in memory on any device.)
        """
        part, (whole, column, mine) = self.part(leaf_index), self._cut(leaf_index, fragment)
        values = self.spec[leaf_index].values
        if self.fragments == 1 and part.stop - part.start == values:
            segment = segment.reshape(leaf.shape)
            return (leaf + segment).astype(leaf.dtype) if add else segment.astype(leaf.dtype)
        grain = gcd(values, BLOCK_VALUES)
        blocks = part.start // grain + np.arange(column, whole, self.fragments)[:, None] * (BLOCK_VALUES // grain)
        inside = blocks + np.arange(BLOCK_VALUES // grain)
        tail = part.start + whole * BLOCK_VALUES if mine else part.stop
        numbers = np.concatenate([inside.reshape(-1), np.arange(tail // grain, part.stop // grain)])
        rows, places = leaf.reshape(-1, grain), segment.reshape(-1, grain)
        promise = {"unique_indices": True, "indices_are_sorted": True, "mode": "promise_in_bounds"}
        if add and leaf.dtype == segment.dtype:
            return rows.at[numbers].add(places, **promise).reshape(leaf.shape)
        wanted = rows[numbers] + places if add else places
        return rows.at[numbers].set(wanted.astype(leaf.dtype), **promise).reshape(leaf.shape)


@dataclass(frozen=True, slots=True)
class PartLayout(Layout):
    """The cut of a model for pipelines: each part is a fragment, which has its leaves whole. A PC of a pipeline has
    some parts in a row, and counts them from 0.

    Raises ModelMismatch for a leaf that holds no real numbers, and where the leaves do not lie part by part.
    """

    def __post_init__(self) -> None:
        check_model(self.spec)
        parts = parts_of(self.spec)
        rising = list(dict.fromkeys(parts))
        if not parts or rising != list(range(rising[0], rising[0] + len(rising))) or parts != tuple(sorted(parts)):
            raise ModelMismatch("the parts of a model that is cut for pipelines do not follow each other", "")
        blocks = list(accumulate((-(-leaf.values // BLOCK_VALUES) for leaf in self.spec), initial=0))
        object.__setattr__(self, "_first", tuple(blocks[:-1]))
        object.__setattr__(self, "_range", (0, blocks[-1]))

    def spans(self, leaf_index: int, fragment: int) -> NDArray[np.int64]:
        held = leaf_index in self._held(fragment)
        return np.array([[0, self.spec[leaf_index].values]] if held else np.empty((0, 2)), np.int64)

    def _held(self, fragment: int) -> dict[int, int]:
        if not self._known:
            parts = parts_of(self.spec)
            for number in range(self.fragments):
                leaves = (leaf for leaf, part in enumerate(parts) if part == parts[0] + number)
                self._known[number] = {leaf: self.spec[leaf].values for leaf in leaves if self.spec[leaf].values}
        return self._known[fragment]

    def _pieces(self, values: Array, leaf: int, fragment: int) -> tuple[Array, Array]:
        return values[:0].reshape(0, BLOCK_VALUES), values

    def _gather(self, values: Array, leaf: int, fragment: int) -> Array:
        return values.astype(np.float32, copy=False)

    def _write_jax(self, leaf: Array, leaf_index: int, fragment: int, segment: Array, add: bool) -> Array:
        segment = segment.reshape(leaf.shape)
        return (leaf + segment).astype(leaf.dtype) if add else segment.astype(leaf.dtype)


def layout_of(model: ModelSpec, settings: RunSettings, shard: int = 0) -> Layout:
    """Return how a model is cut in a run of these settings, at its hub and at each node. shard: of several brokers'.
    Raises what `Layout` and `PartLayout` do."""
    fragments = settings.fragments_of(model)
    return PartLayout(model, fragments) if parts_of(model) else Layout(model, fragments, (shard, settings.shards))


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """The cut of a whole model as a node of several brokers sees it: the fragments of all shards, in a row.

    fragments: of each shard; fragment shard * fragments + f is the shard's f.  Raises what `Layout` does.
    """

    spec: ModelSpec
    fragments_each: int
    shards: int
    layouts: tuple[Layout, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shards = [Layout(self.spec, self.fragments_each, (i, self.shards)) for i in range(self.shards)]
        object.__setattr__(self, "layouts", tuple(shards))

    @property
    def fragments(self) -> int:
        """How many fragments there are in all."""
        return self.fragments_each * self.shards

    def leaves(self, fragment: int) -> tuple[int, ...]:
        layout, inside = self._place(fragment)
        return layout.leaves(inside)

    def counts(self, fragment: int) -> tuple[int, ...]:
        layout, inside = self._place(fragment)
        return layout.counts(inside)

    def spans(self, leaf_index: int, fragment: int) -> NDArray[np.int64]:
        layout, inside = self._place(fragment)
        return layout.spans(leaf_index, inside)

    def take(self, leaf: Array, leaf_index: int, fragment: int) -> Array:
        layout, inside = self._place(fragment)
        return layout.take(leaf, leaf_index, inside)

    def add(self, leaf: Array, leaf_index: int, fragment: int, segment: Array) -> Array:
        layout, inside = self._place(fragment)
        return layout.add(leaf, leaf_index, inside, segment)

    def _place(self, fragment: int) -> tuple[Layout, int]:
        shard, inside = divmod(fragment, self.fragments_each)
        return self.layouts[shard], inside


def _put(target: Numpy, values: Numpy, add: bool) -> None:
    if not add:
        target[...] = values
    elif target.dtype == values.dtype:
        np.add(target, values, out=target)
    else:
        target[...] = target + values

"""Say where one fragment of a leaf lies in the leaf's shards, when the leaf is spread over several devices.

A *shard* is the part of a leaf that one device holds: a range along each axis. The fragment's blocks and the shard's
runs of values cross in pieces; all of them begin and end at multiples of `grain` values, so that both the shard and the
segment can be seen as rows of `grain` values, and each device moves rows.
Rule: numpy only, and no leaf: nothing but ranges goes in, nothing but row numbers comes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

Shard = tuple[tuple[int, int], ...]
"""Per axis of a leaf, the range (start, end) that one device holds."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """One fragment in the shards of one leaf.

    rows: per shard int32[width]: which rows of the flat shard are the fragment's, in the segment's order; those past
    the shard's own number of them lie outside the shard, so that every device moves as many.
    places: per shard, which rows of the segment those are (as many as are real).
    """

    grain: int
    width: int
    rows: tuple[NDArray[np.int32], ...]
    places: tuple[Numbers, ...]


def cut_shards(shape: tuple[int, ...], shards: tuple[Shard, ...], spans: Numbers) -> Cut:
    """Return where a fragment lies in shards of one size.

    shape: of the leaf.  shards: one per device; equal ones share their numbers.  spans: int64[pieces, 2], the ranges of
    the flat leaf that make up the fragment's segment, rising and apart.
    """
    runs = {shard: _runs(shape, shard) for shard in dict.fromkeys(shards)}
    grain = gcd(*spans.reshape(-1).tolist())
    for starts, length in runs.values():
        grain = gcd(grain, length, int(np.gcd.reduce(starts)))
    found = {shard: _cross(starts, length, spans, grain) for shard, (starts, length) in runs.items()}
    width = max(places.size for _, places in found.values())
    beyond = np.arange(width) + prod(end - start for start, end in shards[0]) // grain
    padded = {
        shard: np.concatenate([rows, beyond[: width - rows.size]]).astype(np.int32)
        for shard, (rows, _) in found.items()
    }
    return Cut(grain, width, tuple(padded[s] for s in shards), tuple(found[s][1] for s in shards))


def _runs(shape: tuple[int, ...], shard: Shard) -> tuple[Numbers, int]:
    """Return where in the flat leaf the shard's runs of values begin, in the shard's order, and how long each is."""
    inner = len(shape)
    while inner and shard[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    starts, stride = np.zeros(1, np.int64), prod(shape[inner:])
    if not inner:
        return starts, stride
    first, last = shard[inner - 1]
    length, starts = (last - first) * stride, starts + first * stride
    for axis in reversed(range(inner - 1)):
        stride *= shape[axis + 1]
        starts = (np.arange(*shard[axis], dtype=np.int64)[:, None] * stride + starts).reshape(-1)
    return starts, length


def _cross(starts: Numbers, length: int, spans: Numbers, grain: int) -> tuple[Numbers, Numbers]:
    """Return (rows of the shard, rows of the segment) that are the same values, in the segment's order."""
    ours = ((starts // grain)[:, None] + np.arange(length // grain)).reshape(-1)  # rows of the flat leaf
    firsts, ends = spans[:, 0] // grain, spans[:, 1] // grain
    before = np.cumsum(ends - firsts) - (ends - firsts)
    span = np.searchsorted(firsts, ours, side="right") - 1
    (rows,) = np.nonzero((span >= 0) & (ours < ends[span]))
    return rows, before[span[rows]] + ours[rows] - firsts[span[rows]]

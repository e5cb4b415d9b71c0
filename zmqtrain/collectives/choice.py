"""Choose how an allreduce is done by how much there is to reduce and how many ranks there are.

Rule: the choice follows from sizes alone, so that all ranks make the same one without a word.
"""

from __future__ import annotations

from math import inf

from zmqtrain.core.types import MAX_FRAME_BYTES

TABLE: tuple[tuple[float, tuple[tuple[float, str], ...]], ...] = (
    (2, ((55_000, "naive"), (173_000, "parallel"), (inf, "ring"))),
    (4, ((55_000, "naive"), (173_000, "halving"), (inf, "ring"))),
    (8, ((4 << 10, "naive"), (256 << 10, "halving"), (inf, "ring"))),
    (inf, ((1 << 20, "halving"), (inf, "ring"))),
)
"""For at most so many ranks: for at most so many bytes, the algorithm. The lines for 2 and 4 are what
`bench/collectives.py --table` has measured; the others are drawn out from them."""

SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES = 64 << 10, MAX_FRAME_BYTES
"""A message costs about as much CPU as 200 KB of it do, whatever its size."""

_CHUNKS_PER_SHARE = 2
"""One is reduced while the other is on its way; more cost more messages, and gain little time: what comes last is cut
smaller anyhow (`shares.dwindling`)."""

_ROUNDED_UP_BYTES = 64
"""So that no chunk of a few values is left over of a share that is a little longer than others."""

_PASSED_ON_WHOLE = ("tree", "chain", "hub")
"""Algorithms in which an array takes a chunk longer for each rank on its way; in others a rank always has something
else to send meanwhile."""
_CHUNKS_PASSED_ON, _LARGEST_PASSED_ON = 16, 1 << 20


def choose_algorithm(size: int, nbytes: int) -> str:
    """Return the name of the allreduce for `size` ranks and arrays of so many bytes."""
    rows = next(rows for most, rows in TABLE if size <= most)
    return next(algorithm for most, algorithm in rows if nbytes <= most)


def choose_chunk_bytes(algorithm: str, size: int, nbytes: int) -> int:
    """Return how many bytes go in one message: a part of each rank's share of an array, so that some are reduced while
    others are on their way.

    algorithm: of whatever collective; "" for one that has no name.
    """
    passed_on = algorithm in _PASSED_ON_WHOLE
    wanted = nbytes // (size * (_CHUNKS_PASSED_ON if passed_on else _CHUNKS_PER_SHARE)) + _ROUNDED_UP_BYTES
    return min(max(wanted, SMALLEST_CHUNK_BYTES), _LARGEST_PASSED_ON if passed_on else LARGEST_CHUNK_BYTES)

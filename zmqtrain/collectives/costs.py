"""What each allreduce costs: bytes sent by each rank, messages, steps, and the time that it takes at least.

    seconds = steps x latency + bytes through the busiest port / its rate

1. What a rank sends is exact, computed from the shares as they are cut: lengths need not be divisible by anything.
2. Bytes are those of the values; heads of messages come on top.
3. Every port carries its rate both ways at once, and the switch in between carries all of it.
Source: the model of Thakur, Rabenseifner & Gropp 2005, Optimization of collective communication operations in MPICH,
sec. 3, for ports that are duplex; the least for any allreduce: Patarasuk & Yuan 2009, theorem 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from zmqtrain.collectives.algorithms import ALIASES, children, share_bounds
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import MAX_FRAME_BYTES


@dataclass(frozen=True, slots=True)
class Cost:
    """What one algorithm costs, in words and as functions. N or size: ranks; S: the bytes of an array; P: the largest
    power of two that is not above N.

    each: what one rank sends, as a formula.
    values_sent(size, values, rank): what a rank sends.  messages_sent(size): in how many messages all send what they
      send, where no array is cut in chunks.  steps_taken(size): the steps.
    port_share(size): how many arrays pass the busiest port one way (phases that wait for each other add up).
    """

    each: str
    values_sent: Callable[[int, int, int], int]
    messages_sent: Callable[[int], int]
    steps_taken: Callable[[int], int]
    port_share: Callable[[int], float]


def bytes_sent(algorithm: str, size: int, values_bytes: int, rank: int, *, itemsize: int = 1) -> int:
    """Return the bytes of values that a rank sends in an allreduce of an array of so many bytes.

    rank: HUB for the hub's part in "hub".  itemsize: bytes of one value: arrays are cut between values. Raises
    ConfigError: no such algorithm.
    """
    return itemsize * _cost(algorithm).values_sent(size, values_bytes // itemsize, rank)


def messages_sent(algorithm: str, size: int) -> int:
    """Return how many messages all ranks, and the hub in "hub", send together in an allreduce of an array that is not
    cut in chunks and has a value for each rank at least. Raises ConfigError: no such algorithm."""
    return _cost(algorithm).messages_sent(size)


def steps_taken(algorithm: str, size: int) -> int:
    """Return how many messages go one after another in an allreduce of one chunk. Raises ConfigError: no such one."""
    return _cost(algorithm).steps_taken(size)


def port_bytes(algorithm: str, size: int, values_bytes: int) -> float:
    """Return the bytes that pass the busiest port one way; for "hub" that is the broker's. Raises ConfigError."""
    return _cost(algorithm).port_share(size) * values_bytes


def least_bytes(size: int, values_bytes: int) -> float:
    """Return what must pass each port one way in any allreduce: 2 (size - 1) / size of the array."""
    return _twice_but_one(size) * values_bytes


def seconds_expected(
    algorithm: str, size: int, values_bytes: int, *, latency_seconds: float, bytes_per_second: float
) -> float:
    """Return how long an allreduce takes by the model at the top. bytes_per_second: of each port, each way."""
    wire = port_bytes(algorithm, size, values_bytes) / bytes_per_second
    return steps_taken(algorithm, size) * latency_seconds + wire


def _twice_but_one(size: int) -> float:
    return 2 * (size - 1) / size


def _share(size: int, values: int, rank: int) -> int:
    bounds = share_bounds(values, size)
    return bounds[rank % size + 1] - bounds[rank % size]


def _power(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _halving(size: int, values: int, rank: int) -> int:
    power = _power(size)
    others = size - power
    if rank < 2 * others and rank % 2:
        return values  # the half that its partner reduces, and the one that it has reduced itself
    place = rank // 2 if rank < 2 * others else rank - others
    bounds = share_bounds(values, power)
    sent, low, high = 0, 0, power
    for level in range(power.bit_length() - 1):
        sent += bounds[high] - bounds[low]  # one half of it is given now, and the other one, reduced, in the end
        middle = (low + high) // 2
        low, high = (middle, high) if place >> level & 1 else (low, middle)
    return sent + (values - values // 2 + values if rank < 2 * others else 0)


COSTS: dict[str, Cost] = {
    "naive": Cost(
        "(N-1) S",
        lambda size, values, rank: (size - 1) * values,
        lambda size: size * (size - 1),
        lambda size: min(1, size - 1),
        lambda size: size - 1,
    ),
    "ring": Cost(
        "2 (N-1)/N S",
        lambda size, values, rank: 2 * values - _share(size, values, rank) - _share(size, values, rank + 1),
        lambda size: 2 * size * (size - 1),
        lambda size: 2 * (size - 1),
        _twice_but_one,
    ),
    "parallel": Cost(
        "2 (N-1)/N S",
        lambda size, values, rank: values + (size - 2) * _share(size, values, rank),
        lambda size: 2 * size * (size - 1),
        lambda size: 2 * min(1, size - 1),
        _twice_but_one,
    ),
    "tree": Cost(
        "S to the parent, S to each child",
        lambda size, values, rank: values * (len(children(rank, size)) + (rank != 0)),
        lambda size: 2 * (size - 1),
        lambda size: 2 * (size.bit_length() - 1),
        lambda size: (size - 1).bit_length(),
    ),
    "halving": Cost(
        "2 (P-1)/P S; of N-P pairs 3/2 S more, and S",
        _halving,
        lambda size: 2 * _power(size) * (size.bit_length() - 1) + 5 * (size - _power(size)),
        lambda size: 2 * (size.bit_length() - 1) + (3 if size != _power(size) else 0),
        lambda size: _twice_but_one(_power(size)) + (2 if size != _power(size) else 0),
    ),
    "sequential": Cost(
        "S; rank 0 (N-1) S",
        lambda size, values, rank: values * (size - 1 if rank == 0 else 1),
        lambda size: 2 * (size - 1),
        lambda size: 2 * min(1, size - 1),
        lambda size: size - 1,
    ),
    "hub": Cost(
        "S; the hub N S",
        lambda size, values, rank: size * values if rank < 0 else values,
        lambda size: 2 * size,
        lambda size: 2,
        lambda size: size,
    ),
}
"""By allreduce."""


def _cost(algorithm: str) -> Cost:
    algorithm = ALIASES.get(algorithm, algorithm)
    if algorithm not in COSTS:
        raise ConfigError(f"algorithm={algorithm!r}: choose one of {', '.join(COSTS)}")
    return COSTS[algorithm]


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
"""One is reduced while the other is in flight; more cost more messages and gain little time, as the last one is cut
smaller anyhow (`dwindling`)."""

_ROUNDED_UP_BYTES = 64
"""So that no chunk of a few values is left over of a share that is a little longer than others."""

_PASSED_ON_WHOLE = ("tree", "chain", "hub")
"""Algorithms in which each hop costs an array the time of one chunk; in others a rank always has something to send."""
_CHUNKS_PASSED_ON, _LARGEST_PASSED_ON = 16, 1 << 20


def choose_algorithm(size: int, nbytes: int) -> str:
    """Return the name of the allreduce for `size` ranks and arrays of so many bytes."""
    rows = next(rows for most, rows in TABLE if size <= most)
    return next(algorithm for most, algorithm in rows if nbytes <= most)


def choose_chunk_bytes(algorithm: str, size: int, nbytes: int) -> int:
    """Return how many bytes go in one message: a part of each rank's share of an array, so that some are reduced while
    others are in flight.

    algorithm: of whatever collective; "" for one that has no name.
    """
    passed_on = algorithm in _PASSED_ON_WHOLE
    wanted = nbytes // (size * (_CHUNKS_PASSED_ON if passed_on else _CHUNKS_PER_SHARE)) + _ROUNDED_UP_BYTES
    return min(max(wanted, SMALLEST_CHUNK_BYTES), _LARGEST_PASSED_ON if passed_on else LARGEST_CHUNK_BYTES)

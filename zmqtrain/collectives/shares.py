"""Reduce and spread the shares of an array, each owned by one rank: round a ring, or straight to and from the owner.

Rule 1: share i of a flat array is `values[bounds[i]:bounds[i + 1]]`; shares may be of any lengths, or empty. Only
chunks with values in them are sent, so that what is empty costs nothing.
Rule 2: a chunk goes on as soon as it is reduced or has come, and nobody waits for the rest of a share: all ports are
busy both ways from the first chunk to the last.
Rule 3: what a rank has sent of a share is written over only by the share's final values, which come from its owner, who
had them only after all had given their part.
Rule 4: each message has its price, so chunks are few and large. What comes last is cut ever smaller (`dwindling`):
what is done with it once it is here, when no wire is busy any more, is soon over.
Source: Patarasuk & Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations, sec. 3 (the ring);
Thakur, Rabenseifner & Gropp 2005, Optimization of collective communication operations in MPICH, sec. 4.1 and 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zmqtrain.collectives.reductions import Reduction
from zmqtrain.collectives.steps import Receive, Send, Steps, Values

LAST_CHUNK_BYTES = 256 << 10
"""What comes last is halved as long as the halves are no smaller than this, which takes 2 ms to come on 1 Gb/s."""


def share_bounds(values: int, shares: int) -> list[int]:
    """Return where equal shares of so many values begin and end: `shares` + 1 rising numbers; none is longer than
    another by more than one value."""
    return [values * index // shares for index in range(shares + 1)]


def chunks(start: int, stop: int, chunk_values: int) -> Iterator[slice]:
    """Cut start:stop in pieces of so many values, the last one shorter; nothing of nothing."""
    for begin in range(start, stop, chunk_values):
        yield slice(begin, min(begin + chunk_values, stop))


def dwindling(chunk: slice, least_values: int) -> Iterator[slice]:
    """Cut a chunk in one half, one quarter and so on, none shorter than `least_values`; the last two are equal, but for
    a value."""
    start, stop = chunk.start, chunk.stop
    while (half := (stop - start) // 2) >= max(1, least_values):
        yield slice(start, start + half)
        start += half
    yield slice(start, stop)


def round_the_ring(
    rank: int,
    size: int,
    buffer: Values,
    bounds: Sequence[int],
    chunk_values: int,
    *,
    op: Reduction | None = None,
    spread: bool = True,
) -> Steps:
    """Pass shares from each rank to the next: with `op` once round to be reduced, with `spread` once to be spread.

    In step s rank r receives share r - 2 - s (mod size) of rank r - 1, and what it receives in step s it sends in step
    s + 1. In the first size - 1 steps (left out without `op`) own values are reduced into it, the owner is the last; in
    the next size - 1 (left out without `spread`) it is final. A share j becomes, in this order,
    ((x[j+1] op x[j+2]) op ...) op x[j], ranks modulo size.
    """
    first, last = (0 if op else size - 1), (2 * (size - 1) if spread else size - 1)
    before, after = (rank - 1) % size, (rank + 1) % size

    def cut(chunk: slice, share: int, step: int) -> Iterator[slice]:
        """Cut a chunk of a share as it is sent to be received in that step."""
        is_end = step == last - 1 and chunk.stop == bounds[share + 1]
        return dwindling(chunk, LAST_CHUNK_BYTES // buffer.itemsize) if is_end else iter((chunk,))

    for step in range(first - 1, last):
        share = (rank - 2 - step) % size
        whole = chunks(bounds[share], bounds[share + 1], chunk_values)
        for chunk in (piece for one in whole for piece in cut(one, share, step)):
            part = buffer[chunk]
            if step >= size - 1:
                yield Receive(before, part.size, part)
            elif step >= first:
                assert op is not None
                lent = yield Receive(before, part.size)
                assert lent is not None
                op.combine(lent, part, part)
                if step == size - 2:
                    op.finish(part, size)
            if step < last - 1:
                for piece in cut(chunk, share, step + 1):
                    yield Send(after, buffer[piece])


def by_the_owners(
    rank: int,
    size: int,
    buffer: Values,
    bounds: Sequence[int],
    chunk_values: int,
    *,
    op: Reduction | None = None,
    spread: bool = True,
) -> Steps:
    """With `op` send each share to its owner, who reduces it; with `spread` the owners send theirs to all.

    Who sends first to rank r is r + 1, whom it takes first, then r + 2: each port has one partner at a time, as far as
    all keep step. A share j becomes, in this order, ((x[j] op x[j+1]) op ...) op x[j-1], ranks modulo size.
    """
    below = [(rank - distance) % size for distance in range(1, size)]
    above = [(rank + distance) % size for distance in range(1, size)]
    own = list(chunks(bounds[rank], bounds[rank + 1], chunk_values))
    if op is not None:
        for owner in below:
            for chunk in chunks(bounds[owner], bounds[owner + 1], chunk_values):
                yield Send(owner, buffer[chunk])
        for source in above:
            for chunk in own:
                part = buffer[chunk]
                lent = yield Receive(source, part.size)
                assert lent is not None
                op.combine(part, lent, part)
                if source == above[-1]:
                    op.finish(part, size)
                    yield from _send_to(below if spread else (), part)
    else:
        for chunk in own:
            yield from _send_to(below, buffer[chunk])
    for owner in above if spread else ():
        for chunk in chunks(bounds[owner], bounds[owner + 1], chunk_values):
            part = buffer[chunk]
            yield Receive(owner, part.size, part)


def _send_to(ranks: Sequence[int], part: Values) -> Steps:
    for to in ranks:
        yield Send(to, part)


def ring_reduce_scatter(
    rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int, bounds: Sequence[int] | None = None
) -> Steps:
    """Reduce a buffer, of which rank r then has share r in place; the rest of it is left with partial results.

    buffer: flat, of the same length on all ranks.  bounds: of the shares, equal ones if left out.
    Each rank sends (size - 1) / size of a buffer, in size - 1 steps. For the order see `round_the_ring`.
    """
    return round_the_ring(
        rank, size, buffer, bounds or share_bounds(buffer.size, size), chunk_values, op=op, spread=False
    )


def parallel_reduce_scatter(
    rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int, bounds: Sequence[int] | None = None
) -> Steps:
    """Reduce a buffer, of which rank r then has share r in place; the rest of it is as it was.

    The arguments and the bytes sent are those of `ring_reduce_scatter`, in one step. For the order see `by_the_owners`.
    """
    return by_the_owners(
        rank, size, buffer, bounds or share_bounds(buffer.size, size), chunk_values, op=op, spread=False
    )


def ring_allgather(
    rank: int, size: int, buffer: Values, chunk_values: int, bounds: Sequence[int] | None = None
) -> Steps:
    """Fill a buffer, of which rank r has share r in place, with the shares of the others.

    buffer: flat, of the same length on all ranks.  bounds: of the shares, equal ones if left out.
    Each rank sends all shares but one, in size - 1 steps.
    """
    return round_the_ring(rank, size, buffer, bounds or share_bounds(buffer.size, size), chunk_values)


def parallel_allgather(
    rank: int, size: int, buffer: Values, chunk_values: int, bounds: Sequence[int] | None = None
) -> Steps:
    """Fill a buffer, of which rank r has share r in place, with the shares of the others; each sends its own to all.

    Each rank sends size - 1 times its share, in one step.
    """
    return by_the_owners(rank, size, buffer, bounds or share_bounds(buffer.size, size), chunk_values)


REDUCE_SCATTER: dict[str, Callable[..., Steps]] = {
    "ring": ring_reduce_scatter,
    "parallel": parallel_reduce_scatter,
}
"""By name: f(rank, size, buffer, op, chunk_values, bounds=None)."""

ALLGATHER: dict[str, Callable[..., Steps]] = {"ring": ring_allgather, "parallel": parallel_allgather}
"""By name: f(rank, size, buffer, chunk_values, bounds=None)."""

"""Give every rank the reduction of all ranks' arrays, in place: seven algorithms; who sends what to whom differs.

Rule 1: the result is bit-identical on all ranks: each value is reduced once and spread, or by all in the same order.
The order follows from the group's size and the array's length, and from nothing that happens; each algorithm states it.
Rule 2: each is f(rank, size, buffer, op, chunk_values): `buffer` is flat, of the same length and dtype on all ranks; it
holds what is this rank's, and then the result. Any size, any length, 0 values too (nothing is sent then).
Rule 3: what crosses the network is cut in chunks, which are reduced and go on one by one.
Source: Thakur, Rabenseifner & Gropp 2005, Optimization of collective communication operations in MPICH, sec. 4.5;
Rabenseifner 2004, Optimization of collective reduction operations; Patarasuk & Yuan 2009, Bandwidth optimal all-reduce
algorithms for clusters of workstations. What each costs: `costs`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zmqtrain.collectives.reductions import Reduction
from zmqtrain.collectives.rooted import children, combine_children, parent
from zmqtrain.collectives.shares import by_the_owners, chunks, round_the_ring, share_bounds
from zmqtrain.collectives.steps import HUB, Receive, Send, Steps, Values

Allreduce = Callable[[int, int, Values, Reduction, int], Steps]
"""f(rank, size, buffer, op, chunk_values)."""

CHUNKS_AHEAD = 8
"""So many chunks a rank sends before it waits for the first one's result, where it holds copies of them or a hub does:
what is held does not grow with the array."""


def naive(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Send everything to every other, and reduce what comes: one step, and the most bytes.

    Order: ((x[0] op x[1]) op ...) op x[size-1], by every rank for itself. Sends (size - 1) buffers a rank.
    What it sends are copies of its own values, CHUNKS_AHEAD chunks at a time.
    """
    pieces = [buffer[chunk] for chunk in chunks(0, buffer.size, chunk_values)]
    copies = deque[Values]()
    for index in range(len(pieces) + CHUNKS_AHEAD):
        if index < len(pieces):
            copies.append(pieces[index].copy())
            for distance in range(1, size):
                yield Send((rank + distance) % size, copies[-1])
        if index >= CHUNKS_AHEAD:
            part, own = pieces[index - CHUNKS_AHEAD], copies.popleft()
            if rank != 0:
                yield Receive(0, part.size, part)
            for source in range(1, size):
                values = (yield Receive(source, part.size)) if source != rank else own
                assert values is not None
                op.combine(part, values, part)
            op.finish(part, size)


def ring(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Reduce shares on one way round the ring, spread them on the second: the fewest bytes, all ports busy both ways.

    Order: share j is ((x[j+1] op x[j+2]) op ...) op x[j], ranks modulo size. Sends 2 (size - 1) / size of a buffer a
    rank, in 2 (size - 1) steps: size times the latency, hidden behind the bytes once there are enough of them.
    Source: Patarasuk & Yuan 2009, sec. 3.
    """
    return round_the_ring(rank, size, buffer, share_bounds(buffer.size, size), chunk_values, op=op)


def parallel(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Send each share to its owner, who reduces it and sends it to all: as few bytes as the ring, in two steps.

    Order: share j is ((x[j] op x[j+1]) op ...) op x[j-1], ranks modulo size. Sends 2 (size - 1) / size of a buffer a
    rank, but each port hears all others at once: where a switch drops packets then, the ring is better.
    Source: a parameter server on each rank; Thakur, Rabenseifner & Gropp 2005, sec. 4.1 (the direct exchange).
    """
    return by_the_owners(rank, size, buffer, share_bounds(buffer.size, size), chunk_values, op=op)


def tree(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Reduce up a binomial tree to rank 0, and broadcast down the same tree: few steps, few messages.

    Order: that of `reduce_up_the_tree`, from rank 0. The root sends and receives ceil(log2 size) buffers, in
    2 floor(log2 size) steps. A chunk comes down while later ones go up: three for each step to the root, more than are
    on their way, so that neither way waits for the other.
    What a rank has sent up is written over by what comes down, which the root had only after it.
    Source: Thakur, Rabenseifner & Gropp 2005, sec. 4.2 and 4.4.
    """
    below = children(rank, size)
    pieces = [buffer[chunk] for chunk in chunks(0, buffer.size, chunk_values)]
    ahead = 3 * rank.bit_count()  # the bits of a rank are its steps to the root
    for index in range(len(pieces) + ahead):
        if index < len(pieces):
            yield from combine_children(below, pieces[index], op)
            if rank == 0:
                op.finish(pieces[index], size)
            else:
                yield Send(parent(rank), pieces[index])
        if index >= ahead:
            part = pieces[index - ahead]
            if rank != 0:
                yield Receive(parent(rank), part.size, part)
            for child in reversed(below):
                yield Send(child, part)


def halving(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Halve the array with one partner after another until each has reduced a share, then double it again the same way.

    With P the largest power of two that is not above the size: 2 log2 P steps in which each sends 2 (P - 1) / P of a
    buffer. Of the size - P others each has a neighbour among the first ones: rank 2i + 1 reduces one half of its array
    and of rank 2i's, which reduces the other half and then stands for both; in the end it sends its partner the result.

    Order: with y[i] = x[2i] op x[2i+1] for i < size - P and y[i] = x[i + size - P] for the other i < P:
    (y[0] op y[1]) op (y[2] op y[3]) and so on, halves of P each.
    What a rank has sent is written over by what the one that it was sent to sends back, or by what follows from it.
    Source: Rabenseifner 2004; Thakur, Rabenseifner & Gropp 2005, sec. 4.5 (their MPI_Reduce_scatter and MPI_Allgather).
    """
    power = 1 << (size.bit_length() - 1)
    others = size - power
    middle = buffer.size // 2
    halves = [list(_parts(buffer, 0, middle, chunk_values)), list(_parts(buffer, middle, buffer.size, chunk_values))]
    if rank < 2 * others and rank % 2:
        partner = rank - 1
        yield from _send(partner, halves[0])
        for part in halves[1]:
            lent = yield Receive(partner, part.size)
            assert lent is not None
            op.combine(lent, part, part)
            yield Send(partner, part)
        yield from _receive(partner, [*halves[0], *halves[1]])
        return
    if rank < 2 * others:
        yield from _send(rank + 1, halves[1])
        yield from _receive_and_combine(rank + 1, halves[0], op, first=True)
        yield from _receive(rank + 1, halves[1])
    place = rank // 2 if rank < 2 * others else rank - others
    bounds = share_bounds(buffer.size, power)
    low, high = 0, power
    steps: list[tuple[int, list[Values], list[Values]]] = []
    for level in range(power.bit_length() - 1):
        other = place ^ (1 << level)
        middle = (low + high) // 2
        ranges = (low, middle), (middle, high)
        kept, given = ranges if place < other else ranges[::-1]
        low, high = kept
        partner = 2 * other if other < others else other + others
        ours, theirs = (list(_parts(buffer, bounds[one], bounds[end], chunk_values)) for one, end in (kept, given))
        steps.append((partner, ours, theirs))
        yield from _send(partner, theirs)
        yield from _receive_and_combine(partner, ours, op, first=place < other)
    op.finish(buffer[bounds[low] : bounds[high]], size)
    for partner, ours, theirs in reversed(steps):
        yield from _send(partner, ours)
        yield from _receive(partner, theirs)
    if rank < 2 * others:
        yield from _send(rank + 1, [*halves[0], *halves[1]])


def sequential(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Collect everything on rank 0, which reduces it and sends the result to one rank after the other.

    Order: ((x[0] op x[1]) op ...) op x[size-1]. Rank 0 receives and sends size - 1 buffers, each other rank sends one
    and receives one: few messages, all of them through the port of rank 0.
    What a rank has sent is written over by the answer of rank 0, which holds it; a rank sends CHUNKS_AHEAD chunks
    before it waits for the first answer.
    """
    pieces = [buffer[chunk] for chunk in chunks(0, buffer.size, chunk_values)]
    others = range(1, size)
    if rank == 0:
        for part in pieces:
            yield from combine_children(others, part, op)
            op.finish(part, size)
            for to in others:
                yield Send(to, part)
        return
    for index in range(len(pieces) + CHUNKS_AHEAD):
        if index < len(pieces):
            yield Send(0, pieces[index])
        if index >= CHUNKS_AHEAD:
            part = pieces[index - CHUNKS_AHEAD]
            yield Receive(0, part.size, part)


def hub(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Send everything to the broker, which reduces it and sends it to all: what all must pass is the broker's one port.

    Order: ((x[0] op x[1]) op ...) op x[size-1]. A rank sends one buffer, the hub `size` of them, in two steps.
    What a rank has sent is written over by the hub's answer, which holds it.
    """
    pieces = [buffer[chunk] for chunk in chunks(0, buffer.size, chunk_values)]
    for index in range(len(pieces) + CHUNKS_AHEAD):
        if index < len(pieces):
            yield Send(HUB, pieces[index])
        if index >= CHUNKS_AHEAD:
            part = pieces[index - CHUNKS_AHEAD]
            yield Receive(HUB, part.size, part)


def reduce_at_the_hub(size: int, values: int, dtype: np.dtype[Any], op: Reduction, chunk_values: int) -> Steps:
    """The hub's part of `hub`, for `run_locally`: reduce so many values of this dtype of all ranks, chunk by chunk.

    It holds at most CHUNKS_AHEAD chunks of each rank, and as many results.
    """
    for chunk in chunks(0, values, chunk_values):
        total = np.empty(chunk.stop - chunk.start, dtype)  # a new one: the last one is still on its way
        yield Receive(0, total.size, total)
        for source in range(1, size):
            lent = yield Receive(source, total.size)
            assert lent is not None
            op.combine(total, lent, total)
        op.finish(total, size)
        for to in range(size):
            yield Send(to, total)


ALLREDUCE: dict[str, Allreduce] = {
    "naive": naive,
    "ring": ring,
    "tree": tree,
    "halving": halving,
    "parallel": parallel,
    "sequential": sequential,
    "hub": hub,
}
"""By name; "hub" only where a hub plays `reduce_at_the_hub`."""

ALIASES = {"recursive_halving": "halving"}
"""Other names of these."""


def _parts(buffer: Values, start: int, stop: int, chunk_values: int) -> Iterator[Values]:
    return (buffer[chunk] for chunk in chunks(start, stop, chunk_values))


def _send(to: int, parts: Sequence[Values]) -> Steps:
    for part in parts:
        yield Send(to, part)


def _receive(source: int, parts: Sequence[Values]) -> Steps:
    for part in parts:
        yield Receive(source, part.size, part)


def _receive_and_combine(source: int, parts: Sequence[Values], op: Reduction, *, first: bool) -> Steps:
    """Reduce what comes into the parts. first: these are the first operand, what comes the second one."""
    for part in parts:
        lent = yield Receive(source, part.size)
        assert lent is not None
        op.combine(*((part, lent) if first else (lent, part)), part)

"""Algorithms of the collectives: generators of sends and receives, which a communicator or `run_locally` plays.

A generator knows its rank, the size of the group and its own arrays; it has no socket, clock or thread. Its player
carries out what it yields, in order.
1. A Send never waits; a Receive waits for the next message of its source. Messages between two ranks stay in order.
2. Nothing is copied: a sent array must not change until the receiver has it. An algorithm writes there only after a
   message that depends on it; each docstring names that message. When it ends, its last sends may be in flight.
3. The result is bit-identical on all ranks: each value is reduced once and sent to the others, or reduced by all in the
   same order. The order depends only on the size of the group and the length of the array; each algorithm states it.
4. Arrays are cut into chunks, which are reduced and forwarded one by one.
Sources: Thakur, Rabenseifner & Gropp 2005, Optimization of collective communication operations in MPICH; Rabenseifner
2004, Optimization of collective reduction operations; Patarasuk & Yuan 2009, Bandwidth optimal all-reduce algorithms
for clusters of workstations; Sanders & Sibeyn 2003, A bandwidth latency tradeoff for broadcast and reduction (chains).
Seide et al. 2014, 1-bit SGD, sec. 4 (encoded shares). The cost of each allreduce: `costs`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.codec import Codec
from zmqtrain.collectives.arrays import Tree
from zmqtrain.collectives.reductions import Reduction, Values
from zmqtrain.core.checksum import crc32
from zmqtrain.core.errors import CollectiveMismatch, ConfigError, LocalProtocolError

HUB = -1
"""Where a rank is wanted: the broker, as one that reduces."""

_POISON = 0xA5  # what a rank was lent is filled with this byte at its next yield


class Send(NamedTuple):
    """Send these values (flat, contiguous) to a rank, or to HUB. It does not wait; nobody writes there before the
    receiver has them."""

    to: int
    values: Values


class Receive(NamedTuple):
    """Wait for the next message of `source` (a rank, or HUB), which is so many values.

    into: flat, contiguous, `values` long: they are put there, and the generator is sent None.  None: the generator is
    sent a read-only flat array, good until its next yield.
    """

    source: int
    values: int
    into: Values | None = None


Steps = Generator[Send | Receive, Values | None, None]
"""What an algorithm is: it yields its sends and receives in order, and has its result in its arrays when it ends."""


@dataclass(slots=True)
class Traffic:
    """What one rank has moved: bytes of values (no heads), and messages."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0


@dataclass(frozen=True, slots=True)
class _Message:
    values: Values  # the sender's own memory, as on a wire that copies nothing
    checksum: int  # of its bytes when it was sent


_Queues = dict[tuple[int, int], deque[_Message]]  # by (source, receiver)


def run_locally(algorithms: Sequence[Steps], *, hub: Steps | None = None, seed: int | None = None) -> list[Traffic]:
    """Play all ranks of one collective in this thread: `algorithms[rank]`, and the broker's part where there is one.

    seed: None plays each rank as far as it goes; a number plays single steps in an order drawn from it, so that other
    interleavings are seen. A message is read from the sender's memory as late as can be, when it is received.
    Returns what each rank moved; with a hub, its traffic stands last: `traffic[HUB]`.
    Raises CollectiveMismatch: all wait (it says who for whom), a message has another length or dtype than its Receive,
    or is never received. Raises LocalProtocolError: an algorithm breaks the rules of `Send` and `Receive`.
    """
    players = {rank: _Player(rank, steps) for rank, steps in enumerate(algorithms)}
    if hub is not None:
        players[HUB] = _Player(HUB, hub)
    queues: _Queues = {(source, to): deque() for source in players for to in players if source != to}
    draw = None if seed is None else random.Random(seed)
    while ready := [player for player in players.values() if player.can_go_on(queues)]:
        if draw is not None:
            draw.choice(ready).go_on(queues)
            continue
        while ready[0].can_go_on(queues):
            ready[0].go_on(queues)
    if waiting := [player for player in players.values() if not player.ended]:
        lines = "; ".join(player.describe(players) for player in waiting)
        raise CollectiveMismatch(f"every rank that has not ended waits for another: {lines}")
    for (source, to), queue in queues.items():
        if queue:
            raise CollectiveMismatch(
                f"{_name(to)} ended without {len(queue)} messages of {_name(source)}, the first of them "
                f"{queue[0].values.size} values long"
            )
    return [player.traffic for player in players.values()]


class _Player:
    """One rank: its generator, and the message that it waits for."""

    def __init__(self, rank: int, steps: Steps) -> None:
        self.rank, self.traffic, self.ended = rank, Traffic(), False
        self._steps = steps
        self._wanted: Receive | None = None

    def can_go_on(self, queues: _Queues) -> bool:
        return not self.ended and (self._wanted is None or bool(queues[self._wanted.source, self.rank]))

    def go_on(self, queues: _Queues) -> None:
        """Play one step; what the generator was lent for it is spoilt afterwards, in case it still looks there."""
        lent = None
        if self._wanted is not None:
            lent = self._take(self._wanted, queues[self._wanted.source, self.rank].popleft())
        try:
            step = self._steps.send(lent)
        except StopIteration:
            self.ended, self._wanted = True, None
            return
        if lent is not None:
            lent.flags.writeable = True
            lent.view(np.uint8)[:] = _POISON
        self._check(step, queues)
        self._wanted = step if isinstance(step, Receive) else None
        if isinstance(step, Send):
            queues[self.rank, step.to].append(_Message(step.values, _checksum(step.values)))
            self.traffic.messages_sent += 1
            self.traffic.bytes_sent += step.values.nbytes

    def describe(self, players: dict[int, _Player]) -> str:
        """Say whom this rank waits for."""
        assert self._wanted is not None
        source = self._wanted.source
        state = ", which has ended" if players[source].ended else ""
        return f"{_name(self.rank)} waits for {self._wanted.values} values of {_name(source)}{state}"

    def _take(self, wanted: Receive, message: _Message) -> Values | None:
        values = message.values
        where = f"what {_name(wanted.source)} sent to {_name(self.rank)}"
        if values.size != wanted.values:
            raise CollectiveMismatch(f"{where} is {values.size} values long, and not {wanted.values} as awaited")
        if wanted.into is not None and wanted.into.dtype != values.dtype:
            raise CollectiveMismatch(f"{where} is {values.dtype}, and not {wanted.into.dtype} as awaited")
        if _checksum(values) != message.checksum:
            raise LocalProtocolError(f"{where} was written over before it was received")
        self.traffic.messages_received += 1
        self.traffic.bytes_received += values.nbytes
        if wanted.into is not None:
            wanted.into[:] = values
            return None
        lent = values.copy()
        lent.flags.writeable = False
        return lent

    def _check(self, step: Send | Receive, queues: _Queues) -> None:
        other, values = (step.to, step.values) if isinstance(step, Send) else (step.source, step.into)
        if (other, self.rank) not in queues:
            raise LocalProtocolError(f"{_name(self.rank)} names {_name(other)}, which is no other one of this group")
        if values is not None and not (values.ndim == 1 and values.flags.c_contiguous):
            raise LocalProtocolError(f"{_name(self.rank)} names an array that is not flat and contiguous")
        if isinstance(step, Receive) and values is not None and values.size != step.values:
            raise LocalProtocolError(f"{_name(self.rank)} receives {step.values} values into {values.size}")


def _checksum(values: Values) -> int:
    return crc32(values.view(np.uint8).data)


def _name(rank: int) -> str:
    return "the hub" if rank == HUB else f"rank {rank}"


LAST_CHUNK_BYTES = 256 << 10
"""The last chunk is halved while the halves are at least so large: 2 ms on 1 Gb/s."""

CHUNKS_AHEAD = 8
"""So many chunks a rank sends before it waits for the first one's result, where it holds copies of them or a hub does:
what is held does not grow with the array."""


# ---------------------------------------------------------------------- parts and how they go


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


def _pieces(buffer: Values, chunk_values: int, start: int = 0, stop: int | None = None) -> list[Values]:
    return [buffer[chunk] for chunk in chunks(start, buffer.size if stop is None else stop, chunk_values)]


def _others(rank: int, size: int) -> list[int]:
    """Return the other ranks, the next one first."""
    return [(rank + distance) % size for distance in range(1, size)]


def _send(to: int, parts: Iterable[Values]) -> Steps:
    for part in parts:
        yield Send(to, part)


def _send_to_all(ranks: Iterable[int], part: Values) -> Steps:
    for to in ranks:
        yield Send(to, part)


def _receive(source: int, parts: Iterable[Values]) -> Steps:
    for part in parts:
        yield Receive(source, part.size, part)


def _combine(source: int, parts: Iterable[Values], op: Reduction, *, first: bool = True) -> Steps:
    """Reduce received arrays into the parts, in place. first: the parts are the first operand."""
    for part in parts:
        lent = yield Receive(source, part.size)
        assert lent is not None
        op.combine(*((part, lent) if first else (lent, part)), part)


def _combine_in_turn(sources: Iterable[int], part: Values, op: Reduction) -> Steps:
    """Reduce into `part` what each of these ranks sends next, in turn; `part` is the first operand."""
    for source in sources:
        yield from _combine(source, (part,), op)


def _ask(answerer: int, pieces: Sequence[Values]) -> Steps:
    """Send pieces, and put the answers in their places, CHUNKS_AHEAD pieces behind."""
    for index in range(len(pieces) + CHUNKS_AHEAD):
        if index < len(pieces):
            yield Send(answerer, pieces[index])
        if index >= CHUNKS_AHEAD:
            yield from _receive(answerer, (pieces[index - CHUNKS_AHEAD],))


# ---------------------------------------------------------------------- round the ring, and by the owners of shares


def ring(
    rank: int,
    size: int,
    buffer: Values,
    op: Reduction | None,
    chunk_values: int,
    bounds: Sequence[int] | None = None,
    *,
    spread: bool = True,
) -> Steps:
    """Reduce shares on one way round the ring, spread them on the second: the fewest bytes, all ports busy both ways.

    buffer: flat, of the same length on all ranks.  op: None leaves out the first way round: rank r has share r.
    bounds: of the shares, equal ones if left out.  spread: False leaves out the second way round: rank r then has share
    r, and partial results in the rest.
    In step s rank r receives share r - 2 - s (mod size) of rank r - 1, and what it receives in step s it sends in step
    s + 1. In the first size - 1 steps own values are reduced into it, the owner is the last; in the next size - 1 it is
    final.
    Order: share j is ((x[j+1] op x[j+2]) op ...) op x[j], ranks modulo size. Each way a rank sends (size - 1) / size of
    a buffer, in size - 1 steps: size times the latency, hidden behind the bytes once there are enough of them.
    Source: Patarasuk & Yuan 2009, sec. 3.
    """
    bounds = bounds or share_bounds(buffer.size, size)
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
                yield from _combine(before, (part,), op, first=False)
                if step == size - 2:
                    op.finish(part, size)
            if step < last - 1:
                yield from _send(after, (buffer[piece] for piece in cut(chunk, share, step + 1)))


def parallel(
    rank: int,
    size: int,
    buffer: Values,
    op: Reduction | None,
    chunk_values: int,
    bounds: Sequence[int] | None = None,
    *,
    spread: bool = True,
) -> Steps:
    """Send each share to its owner, who reduces it and sends it to all: as few bytes as the ring, in two steps.

    The arguments are those of `ring`; without `spread` the rest of a buffer is left as it was.
    Who sends first to rank r is r + 1, whom it takes first, then r + 2: each port has one partner at a time, as far as
    all keep step; but each port hears all others at once: where a switch drops packets then, the ring is better.
    Order: share j is ((x[j] op x[j+1]) op ...) op x[j-1], ranks modulo size. Each way a rank sends (size - 1) / size of
    a buffer.
    Source: a parameter server on each rank; Thakur, Rabenseifner & Gropp 2005, sec. 4.1 (the direct exchange).
    """
    bounds = bounds or share_bounds(buffer.size, size)
    above = _others(rank, size)
    below = above[::-1]
    shares = [_pieces(buffer, chunk_values, bounds[owner], bounds[owner + 1]) for owner in range(size)]
    if op is not None:
        for owner in below:
            yield from _send(owner, shares[owner])
        for source in above:
            for part in shares[rank]:
                yield from _combine(source, (part,), op)
                if source == above[-1]:
                    op.finish(part, size)
                    yield from _send_to_all(below if spread else (), part)
    else:
        for part in shares[rank]:
            yield from _send_to_all(below, part)
    for owner in above if spread else ():
        yield from _receive(owner, shares[owner])


REDUCE_SCATTER: dict[str, Callable[..., Steps]] = {
    "ring": partial(ring, spread=False),
    "parallel": partial(parallel, spread=False),
}
"""By name: f(rank, size, buffer, op, chunk_values, bounds=None) leaves share r of the reduction with rank r, in place.
bounds: of the shares, equal ones if left out."""


def _without_reduction(algorithm: Callable[..., Steps]) -> Callable[..., Steps]:
    def allgather(
        rank: int, size: int, buffer: Values, chunk_values: int, bounds: Sequence[int] | None = None
    ) -> Steps:
        return algorithm(rank, size, buffer, None, chunk_values, bounds)

    return allgather


ALLGATHER: dict[str, Callable[..., Steps]] = {
    "ring": _without_reduction(ring),
    "parallel": _without_reduction(parallel),
}
"""By name: f(rank, size, buffer, chunk_values, bounds=None) fills a buffer, of which rank r has share r in place."""


# ---------------------------------------------------------------------- with a root


def parent(place: int) -> int:
    """Return who is above a place in the binomial tree: the place without its lowest bit. Place 0 is the root."""
    return place & (place - 1)


def children(place: int, size: int) -> list[int]:
    """Return who is below a place in the binomial tree of so many, rising: with the smallest subtree first."""
    lowest = place & -place if place else size
    return [
        place + step for step in (1 << bit for bit in range(size.bit_length())) if step < lowest and place + step < size
    ]


def _pass_on(buffer: Values, above: int | None, below: Sequence[int], chunk_values: int) -> Steps:
    for part in _pieces(buffer, chunk_values):
        if above is not None:
            yield Receive(above, part.size, part)
        yield from _send_to_all(below, part)


def broadcast_down_the_tree(rank: int, size: int, buffer: Values, root: int, chunk_values: int) -> Steps:
    """Give all ranks the root's buffer (flat, of the same length on all), down a binomial tree.

    The root sends ceil(log2 size) buffers, to the largest subtree first.
    """
    place = (rank - root) % size
    above = (parent(place) + root) % size
    below = [(child + root) % size for child in reversed(children(place, size))]
    return _pass_on(buffer, above if place else None, below, chunk_values)


def broadcast_along_the_chain(rank: int, size: int, buffer: Values, root: int, chunk_values: int) -> Steps:
    """Give all ranks the root's buffer (flat, of the same length on all), each passing it on to the next.

    All but the last send one buffer; it takes as long as one buffer and size - 2 chunks.
    """
    place = (rank - root) % size
    below = [(rank + 1) % size] if place < size - 1 else []
    return _pass_on(buffer, (rank - 1) % size if place else None, below, chunk_values)


def reduce_up_the_tree(rank: int, size: int, buffer: Values, op: Reduction, root: int, chunk_values: int) -> Steps:
    """Reduce all buffers (flat, of the same length on all) into the root's; the others' are left with partial results.

    Order, with x by place: (x[0] op x[1]) op (x[2] op x[3]) and so on, halves of a power of two each; what is not there
    is left out. The root receives ceil(log2 size) buffers, all others send one.
    """
    place = (rank - root) % size
    above, below = (parent(place) + root) % size, [(child + root) % size for child in children(place, size)]
    for part in _pieces(buffer, chunk_values):
        yield from _combine_in_turn(below, part, op)
        if place == 0:
            op.finish(part, size)
        else:
            yield Send(above, part)


def reduce_along_the_chain(rank: int, size: int, buffer: Values, op: Reduction, root: int, chunk_values: int) -> Steps:
    """Reduce all buffers (flat, of the same length on all) into the root's; the others' are left with partial results.

    Order, with x by place: ((x[1] op x[2]) op ...) op x[0]. All but the root send one buffer, and none receives more;
    it takes as long as one buffer and size - 2 chunks.
    """
    place = (rank - root) % size
    for part in _pieces(buffer, chunk_values) if size > 1 else ():
        if place != 1:
            yield from _combine((rank - 1) % size, (part,), op, first=False)
        if place == 0:
            op.finish(part, size)
        else:
            yield Send((rank + 1) % size, part)


BROADCAST: dict[str, Callable[[int, int, Values, int, int], Steps]] = {
    "tree": broadcast_down_the_tree,
    "chain": broadcast_along_the_chain,
}
"""By name: f(rank, size, buffer, root, chunk_values)."""

REDUCE: dict[str, Callable[[int, int, Values, Reduction, int, int], Steps]] = {
    "tree": reduce_up_the_tree,
    "chain": reduce_along_the_chain,
}
"""By name: f(rank, size, buffer, op, root, chunk_values)."""


def scatter(rank: int, size: int, parts: Sequence[Values], into: Values | None, root: int, chunk_values: int) -> Steps:
    """Give each rank its part of the root's `parts`, which has one for each rank.

    parts: not looked at elsewhere.  into: where this rank's part is put; not looked at on the root. The root sends all
    parts but its own, chunk by chunk in turn, so that all have theirs at about the same time.
    """
    if rank != root:
        assert into is not None
        yield from _receive(root, _pieces(into, chunk_values))
        return
    others = _others(rank, size)
    for chunk in chunks(0, max((parts[to].size for to in others), default=0), chunk_values):
        for to in others:
            if chunk.start < parts[to].size:
                yield Send(to, parts[to][chunk])


def gather(rank: int, size: int, part: Values | None, parts: Sequence[Values], root: int, chunk_values: int) -> Steps:
    """Bring each rank's `part` to the root, into its `parts`, which has one for each rank.

    part: not looked at on the root.  parts: not looked at elsewhere. All but the root send their part.
    """
    if rank != root:
        assert part is not None
        yield from _send(root, _pieces(part, chunk_values))
    else:
        for source in _others(rank, size):
            yield from _receive(source, _pieces(parts[source], chunk_values))


def all_to_all(rank: int, size: int, parts: Sequence[Values], into: Sequence[Values], chunk_values: int) -> Steps:
    """Send `parts[r]` to each rank r, and receive into `into[r]` what r has for this rank.

    Each sends all parts but its own, those for the next ranks first, and takes those of the ranks before it first: each
    port has one partner at a time, as far as all keep step.
    Source: Thakur, Rabenseifner & Gropp 2005, sec. 4.3 (long messages).
    """
    others = _others(rank, size)
    for to in others:
        yield from _send(to, _pieces(parts[to], chunk_values))
    for source in reversed(others):
        yield from _receive(source, _pieces(into[source], chunk_values))


def barrier(rank: int, size: int) -> Steps:
    """End on each rank only after it has begun on all: in ceil(log2 size) steps of empty messages.

    In step k each rank tells the one 2^k after it that it, and all whom it has heard of, have begun.
    Source: Hensgen, Finkel & Manber 1988, Two algorithms for barrier synchronization (dissemination).
    """
    nothing = np.empty(0, np.uint8)
    for bit in range((size - 1).bit_length()):
        yield Send((rank + (1 << bit)) % size, nothing)
        yield Receive((rank - (1 << bit)) % size, 0)


# ---------------------------------------------------------------------- the other allreduces


def naive(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Send everything to every other rank, and reduce all arrays: one step, and the most bytes.

    Order: ((x[0] op x[1]) op ...) op x[size-1], by every rank for itself. Sends (size - 1) buffers a rank.
    What it sends are copies of its own values, CHUNKS_AHEAD chunks at a time.
    """
    pieces = _pieces(buffer, chunk_values)
    copies = deque[Values]()
    for index in range(len(pieces) + CHUNKS_AHEAD):
        if index < len(pieces):
            copies.append(pieces[index].copy())
            yield from _send_to_all(_others(rank, size), copies[-1])
        if index >= CHUNKS_AHEAD:
            part, own = pieces[index - CHUNKS_AHEAD], copies.popleft()
            if rank != 0:
                yield Receive(0, part.size, part)
            for source in range(1, size):
                if source == rank:
                    op.combine(part, own, part)
                else:
                    yield from _combine(source, (part,), op)
            op.finish(part, size)


def tree(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Reduce up a binomial tree to rank 0, and broadcast down the same tree: few steps, few messages.

    Order: that of `reduce_up_the_tree`, from rank 0. The root sends and receives ceil(log2 size) buffers, in
    2 floor(log2 size) steps. A chunk comes down while later ones go up: three for each step to the root, more than are
    in flight, so that neither direction waits for the other.
    A chunk that was sent up is overwritten by the result, which depends on it.
    Source: Thakur, Rabenseifner & Gropp 2005, sec. 4.2 and 4.4.
    """
    below, pieces = children(rank, size), _pieces(buffer, chunk_values)
    ahead = 3 * rank.bit_count()  # the bits of a rank are its steps to the root
    for index in range(len(pieces) + ahead):
        if index < len(pieces):
            yield from _combine_in_turn(below, pieces[index], op)
            if rank == 0:
                op.finish(pieces[index], size)
            else:
                yield Send(parent(rank), pieces[index])
        if index >= ahead:
            part = pieces[index - ahead]
            if rank != 0:
                yield Receive(parent(rank), part.size, part)
            yield from _send_to_all(reversed(below), part)


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
    others, middle = size - power, buffer.size // 2
    lower, upper = _pieces(buffer, chunk_values, 0, middle), _pieces(buffer, chunk_values, middle)
    stands_for_two = rank < 2 * others
    if stands_for_two and rank % 2:
        yield from _send(rank - 1, lower)
        for part in upper:
            yield from _combine(rank - 1, (part,), op, first=False)
            yield Send(rank - 1, part)
        yield from _receive(rank - 1, [*lower, *upper])
        return
    if stands_for_two:
        yield from _send(rank + 1, upper)
        yield from _combine(rank + 1, lower, op)
        yield from _receive(rank + 1, upper)
    place = rank // 2 if stands_for_two else rank - others
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
        ours, theirs = (_pieces(buffer, chunk_values, bounds[one], bounds[end]) for one, end in (kept, given))
        steps.append((partner, ours, theirs))
        yield from _send(partner, theirs)
        yield from _combine(partner, ours, op, first=place < other)
    op.finish(buffer[bounds[low] : bounds[high]], size)
    for partner, ours, theirs in reversed(steps):
        yield from _send(partner, ours)
        yield from _receive(partner, theirs)
    if stands_for_two:
        yield from _send(rank + 1, [*lower, *upper])


def sequential(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Collect everything on rank 0, which reduces it and sends the result to one rank after the other.

    Order: ((x[0] op x[1]) op ...) op x[size-1]. Rank 0 receives and sends size - 1 buffers, each other rank sends one
    and receives one: few messages, all of them through the port of rank 0.
    What a rank has sent is written over by the answer of rank 0, which holds it.
    """
    pieces, others = _pieces(buffer, chunk_values), range(1, size)
    if rank != 0:
        yield from _ask(0, pieces)
        return
    for part in pieces:
        yield from _combine_in_turn(others, part, op)
        op.finish(part, size)
        yield from _send_to_all(others, part)


def hub(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Send everything to the broker, which reduces it and sends it to all: what all must pass is the broker's one port.

    Order: ((x[0] op x[1]) op ...) op x[size-1]. A rank sends one buffer, the hub `size` of them, in two steps.
    What a rank has sent is written over by the hub's answer, which holds it.
    """
    return _ask(HUB, _pieces(buffer, chunk_values))


def reduce_at_the_hub(size: int, values: int, dtype: np.dtype[Any], op: Reduction, chunk_values: int) -> Steps:
    """The hub's part of `hub`, for `run_locally`: reduce so many values of this dtype of all ranks, chunk by chunk.

    It holds at most CHUNKS_AHEAD chunks of each rank, and as many results.
    """
    for chunk in chunks(0, values, chunk_values):
        total = np.empty(chunk.stop - chunk.start, dtype)  # a new array: the last one is in flight
        yield Receive(0, total.size, total)
        yield from _combine_in_turn(range(1, size), total, op)
        op.finish(total, size)
        yield from _send_to_all(range(size), total)


ALLREDUCE: dict[str, Callable[[int, int, Values, Reduction, int], Steps]] = {
    "naive": naive,
    "ring": ring,
    "tree": tree,
    "halving": halving,
    "parallel": parallel,
    "sequential": sequential,
    "hub": hub,
}
"""By name: f(rank, size, buffer, op, chunk_values); "hub" only where a hub plays `reduce_at_the_hub`."""

ALIASES = {"recursive_halving": "halving"}
"""Other names of these."""


# ---------------------------------------------------------------------- encoded

_MESSAGE_BYTES = 256 << 10
_AHEAD = 2
"""So many messages are encoded ahead of those that are awaited."""


def check_codec(codec: Any, operation: str, tree: Tree) -> Codec:
    """Return the codec; raise ConfigError if it is none, or cannot carry these arrays or this operation."""
    if not isinstance(codec, Codec):
        raise ConfigError(f"codec={codec!r} is no codec: give a spec such as 'int8'")
    if operation not in ("sum", "mean"):
        raise ConfigError(f"op={operation!r} with a codec: only sum and mean go encoded")
    if any(shape.dtype != np.float32 for shape in tree.shapes):
        raise ConfigError(f"a codec takes float32 arrays, got {tree.text[:200]}")
    if not _is_empty(codec.init(1)):
        raise ConfigError(
            f"the codec {codec.name} keeps state from one call to the next, and an allreduce keeps none: "
            "take one without feedback, randomk or fragments"
        )
    if tree.nbytes:
        _try_out(codec)
    return codec


@lru_cache(maxsize=64)
def _try_out(codec: Codec) -> None:
    """Code a slab in the caller's thread: a codec may compile at its first one, for longer than a port may rest."""
    part = [slice(0, codec.slab)]
    values = np.zeros(codec.slab, np.float32)
    _decode(codec, _encode(codec, values, part), values, part, add=True)


def _is_empty(state: Any) -> bool:
    return isinstance(state, tuple) and all(map(_is_empty, state))


def coded_allreduce(rank: int, size: int, buffer: NDArray[Any], codec: Codec, mean: bool) -> Steps:
    """Reduce `buffer` (flat float32, of the same length on all ranks) in place; messages are bytes.

    Share r is a whole number of slabs. Order: ((x[0] + x[1]) + ...) + x[size-1], in float32. The owner of a share sums
    it and encodes the sum once; all ranks decode the same bytes, the owner too, so that the result is bit-identical
    whatever the codec loses. A rank sends 2 (size - 1) / size of an encoded buffer. Raises NonFiniteDelta if values are
    not finite, CodecError for bytes that the codec did not make.
    """
    slabs = list(chunks(0, buffer.size, codec.slab))
    bounds = share_bounds(len(slabs), size)
    together = max(1, _MESSAGE_BYTES // max(1, _encoded_bytes(codec, [slice(0, min(codec.slab, max(1, buffer.size)))])))
    messages = [
        [slabs[several] for several in chunks(bounds[owner], bounds[owner + 1], together)] for owner in range(size)
    ]
    above = _others(rank, size)
    below = above[::-1]
    steps = max(map(len, messages), default=0)
    for index in range(steps + _AHEAD):
        for owner in below:
            if index < len(messages[owner]):
                yield Send(owner, _encode(codec, buffer, messages[owner][index]))
        if _AHEAD <= index < len(messages[rank]) + _AHEAD:
            yield from _sum_encoded(rank, size, buffer, codec, messages[rank][index - _AHEAD], mean)
    for index in range(steps):
        for owner in above:
            if index < len(messages[owner]):
                parts = messages[owner][index]
                lent = yield Receive(owner, _encoded_bytes(codec, parts))
                _decode(codec, lent, buffer, parts, add=False)


def _sum_encoded(rank: int, size: int, buffer: NDArray[Any], codec: Codec, parts: Sequence[slice], mean: bool) -> Steps:
    """Sum one message of the own share over all ranks, and send it to all."""
    begin, end = parts[0].start, parts[-1].stop
    shifted = [slice(part.start - begin, part.stop - begin) for part in parts]
    total = np.zeros(end - begin, np.float32)
    for source in range(size):
        if source == rank:
            total += buffer[begin:end]
        else:
            lent = yield Receive(source, _encoded_bytes(codec, parts))
            _decode(codec, lent, total, shifted, add=True)
    if mean:
        total /= np.float32(size)
    encoded = _encode(codec, total, shifted)
    yield from _send_to_all(reversed(_others(rank, size)), encoded)
    _decode(codec, encoded, buffer, parts, add=False)


def _encoded_bytes(codec: Codec, parts: Iterable[slice]) -> int:
    sections = (section for part in parts for section in codec.layout(part.stop - part.start))
    return sum(np.dtype(dtype).itemsize * count for dtype, count in sections)


def _encode(codec: Codec, values: NDArray[Any], parts: Sequence[slice]) -> NDArray[np.uint8]:
    made: list[NDArray[np.uint8]] = []
    for part in parts:
        buffers, _ = codec.encode(values[part], codec.init(part.stop - part.start))
        made += [np.ascontiguousarray(buffer).reshape(-1).view(np.uint8) for buffer in buffers]
    return np.concatenate(made)


def _decode(codec: Codec, lent: Any, out: NDArray[Any], parts: Sequence[slice], *, add: bool) -> None:
    start = 0
    for part in parts:
        buffers = []
        for dtype, count in codec.layout(part.stop - part.start):
            end = start + np.dtype(dtype).itemsize * count
            buffers.append(lent[start:end].tobytes())
            start = end
        codec.check(buffers, part.stop - part.start)
        codec.decode_into(buffers, out[part], add)

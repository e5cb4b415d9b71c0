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
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zmqtrain.collectives.arrays import Tree
from zmqtrain.collectives.reductions import Reduction, Values
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
    return zlib.crc32(values.view(np.uint8).data)


def _name(rank: int) -> str:
    return "the hub" if rank == HUB else f"rank {rank}"


LAST_CHUNK_BYTES = 256 << 10
"""The last chunk is halved while the halves are at least so large: 2 ms on 1 Gb/s."""


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


def parent(place: int) -> int:
    """Return who is above a place in the binomial tree: the place without its lowest bit. Place 0 is the root."""
    return place & (place - 1)


def children(place: int, size: int) -> list[int]:
    """Return who is below a place in the binomial tree of so many, rising: with the smallest subtree first."""
    lowest = place & -place if place else size
    return [
        place + step for step in (1 << bit for bit in range(size.bit_length())) if step < lowest and place + step < size
    ]


def combine_children(ranks: Sequence[int], part: Values, op: Reduction) -> Steps:
    """Reduce into `part`, in place, what each of these ranks sends next, in turn; `part` is the first operand."""
    for rank in ranks:
        lent = yield Receive(rank, part.size)
        assert lent is not None
        op.combine(part, lent, part)


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
    for chunk in chunks(0, buffer.size, chunk_values):
        part = buffer[chunk]
        yield from combine_children(below, part, op)
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
    for chunk in chunks(0, buffer.size, chunk_values) if size > 1 else ():
        part = buffer[chunk]
        if place != 1:
            lent = yield Receive((rank - 1) % size, part.size)
            assert lent is not None
            op.combine(lent, part, part)
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


def _pass_on(buffer: Values, above: int | None, below: Sequence[int], chunk_values: int) -> Steps:
    for chunk in chunks(0, buffer.size, chunk_values):
        part = buffer[chunk]
        if above is not None:
            yield Receive(above, part.size, part)
        for rank in below:
            yield Send(rank, part)


def scatter(rank: int, size: int, parts: Sequence[Values], into: Values | None, root: int, chunk_values: int) -> Steps:
    """Give each rank its part of the root's `parts`, which has one for each rank.

    parts: not looked at elsewhere.  into: where this rank's part is put; not looked at on the root. The root sends all
    parts but its own, chunk by chunk in turn, so that all have theirs at about the same time.
    """
    if rank == root:
        yield from _send_in_turn([(to, parts[to]) for to in _others(rank, size)], chunk_values)
    else:
        assert into is not None
        yield from _receive_chunks(root, into, chunk_values)


def gather(rank: int, size: int, part: Values | None, parts: Sequence[Values], root: int, chunk_values: int) -> Steps:
    """Bring each rank's `part` to the root, into its `parts`, which has one for each rank.

    part: not looked at on the root.  parts: not looked at elsewhere. All but the root send their part.
    """
    if rank != root:
        assert part is not None
        yield from _send_in_turn([(root, part)], chunk_values)
    else:
        for source in _others(rank, size):
            yield from _receive_chunks(source, parts[source], chunk_values)


def all_to_all(rank: int, size: int, parts: Sequence[Values], into: Sequence[Values], chunk_values: int) -> Steps:
    """Send `parts[r]` to each rank r, and receive into `into[r]` what r has for this rank.

    Each sends all parts but its own, those for the next ranks first, and takes those of the ranks before it first: each
    port has one partner at a time, as far as all keep step.
    Source: Thakur, Rabenseifner & Gropp 2005, sec. 4.3 (long messages).
    """
    for to in _others(rank, size):
        yield from _send_in_turn([(to, parts[to])], chunk_values)
    for source in reversed(_others(rank, size)):
        yield from _receive_chunks(source, into[source], chunk_values)


def barrier(rank: int, size: int) -> Steps:
    """End on each rank only after it has begun on all: in ceil(log2 size) steps of empty messages.

    In step k each rank tells the one 2^k after it that it, and all whom it has heard of, have begun.
    Source: Hensgen, Finkel & Manber 1988, Two algorithms for barrier synchronization (dissemination).
    """
    nothing = np.empty(0, np.uint8)
    for bit in range((size - 1).bit_length()):
        yield Send((rank + (1 << bit)) % size, nothing)
        yield Receive((rank - (1 << bit)) % size, 0)


def _others(rank: int, size: int) -> list[int]:
    return [(rank + distance) % size for distance in range(1, size)]


def _send_in_turn(parts: Sequence[tuple[int, Values]], chunk_values: int) -> Steps:
    longest = max((part.size for _, part in parts), default=0)
    for chunk in chunks(0, longest, chunk_values):
        for to, part in parts:
            if chunk.start < part.size:
                yield Send(to, part[chunk])


def _receive_chunks(source: int, into: Values, chunk_values: int) -> Steps:
    for chunk in chunks(0, into.size, chunk_values):
        part = into[chunk]
        yield Receive(source, part.size, part)


Allreduce = Callable[[int, int, Values, Reduction, int], Steps]
"""f(rank, size, buffer, op, chunk_values)."""

CHUNKS_AHEAD = 8
"""So many chunks a rank sends before it waits for the first one's result, where it holds copies of them or a hub does:
what is held does not grow with the array."""


def naive(rank: int, size: int, buffer: Values, op: Reduction, chunk_values: int) -> Steps:
    """Send everything to every other rank, and reduce all arrays: one step, and the most bytes.

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
    in flight, so that neither direction waits for the other.
    A chunk that was sent up is overwritten by the result, which depends on it.
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
        total = np.empty(chunk.stop - chunk.start, dtype)  # a new array: the last one is in flight
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
    """Reduce received arrays into the parts. first: the parts are the first operand."""
    for part in parts:
        lent = yield Receive(source, part.size)
        assert lent is not None
        op.combine(*((part, lent) if first else (lent, part)), part)


_MESSAGE_BYTES = 256 << 10
_AHEAD = 2
"""So many messages are encoded ahead of those that are awaited."""


class Coder(Protocol):
    """What is needed of a codec: see `zmqtrain.codecs.base.Codec`, which is one."""

    name: str
    init: Any
    layout: Any
    encode: Any
    check: Any
    decode_into: Any
    slab: int


def check_coder(codec: Any, operation: str, tree: Tree) -> Coder:
    """Return the codec; raise ConfigError if it cannot carry these arrays, or this operation."""
    wanted = ("name", "init", "layout", "encode", "check", "decode_into", "slab")
    if not all(hasattr(codec, name) for name in wanted):
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
    coder: Coder = codec
    if tree.nbytes:
        _try_out(codec)
    return coder


@lru_cache(maxsize=64)
def _try_out(codec: Any) -> None:
    """Code a slab in the caller's thread: a codec may compile at its first one, for longer than a port may rest."""
    part = [slice(0, codec.slab)]
    values = np.zeros(codec.slab, np.float32)
    _decode(codec, _encode(codec, values, part), values, part, add=True)


def _is_empty(state: Any) -> bool:
    return isinstance(state, tuple) and all(map(_is_empty, state))


def coded_allreduce(rank: int, size: int, buffer: NDArray[Any], codec: Coder, mean: bool) -> Steps:
    """Reduce `buffer` (flat float32, of the same length on all ranks) in place; messages are bytes.

    Share r is a whole number of slabs. Order: ((x[0] + x[1]) + ...) + x[size-1], in float32. The owner of a share sums
    it and encodes the sum once; all ranks decode the same bytes, the owner too, so that the result is bit-identical
    whatever the codec loses. A rank sends 2 (size - 1) / size of an encoded buffer. Raises NonFiniteDelta if values are
    not finite, CodecError for bytes that the codec did not make.
    """
    slabs = [slice(start, min(start + codec.slab, buffer.size)) for start in range(0, buffer.size, codec.slab)]
    bounds = share_bounds(len(slabs), size)
    together = max(1, _MESSAGE_BYTES // max(1, _encoded_bytes(codec, min(codec.slab, max(1, buffer.size)))))
    messages = [
        [
            slabs[start : min(start + together, bounds[owner + 1])]
            for start in range(bounds[owner], bounds[owner + 1], together)
        ]
        for owner in range(size)
    ]
    others = [(rank - distance) % size for distance in range(1, size)]
    steps = max(map(len, messages), default=0)
    for index in range(steps + _AHEAD):
        for owner in others:
            if index < len(messages[owner]):
                yield Send(owner, _encode(codec, buffer, messages[owner][index]))
        if _AHEAD <= index < len(messages[rank]) + _AHEAD:
            yield from _reduce(rank, size, buffer, codec, messages[rank][index - _AHEAD], mean, others)
    for index in range(steps):
        for owner in reversed(others):
            if index < len(messages[owner]):
                lent = yield Receive(
                    owner, sum(_encoded_bytes(codec, _length(part)) for part in messages[owner][index])
                )
                _decode(codec, lent, buffer, messages[owner][index], add=False)


def _reduce(
    rank: int, size: int, buffer: NDArray[Any], codec: Coder, parts: Sequence[slice], mean: bool, others: Sequence[int]
) -> Steps:
    """Sum one message of the own share over all ranks, and send it to all."""
    begin, end = parts[0].start, parts[-1].stop
    nbytes = sum(_encoded_bytes(codec, _length(part)) for part in parts)
    shifted = [slice(part.start - begin, part.stop - begin) for part in parts]
    total = np.zeros(end - begin, np.float32)
    for source in range(size):
        if source == rank:
            total += buffer[begin:end]
        else:
            lent = yield Receive(source, nbytes)
            _decode(codec, lent, total, shifted, add=True)
    if mean:
        total /= np.float32(size)
    encoded = _encode(codec, total, shifted)
    for to in others:
        yield Send(to, encoded)
    _decode(codec, encoded, buffer, parts, add=False)


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _encoded_bytes(codec: Coder, values: int) -> int:
    return sum(np.dtype(dtype).itemsize * count for dtype, count in codec.layout(values))


def _encode(codec: Coder, values: NDArray[Any], parts: Sequence[slice]) -> NDArray[np.uint8]:
    made: list[NDArray[np.uint8]] = []
    for part in parts:
        buffers, _ = codec.encode(values[part], codec.init(_length(part)))
        made += [np.ascontiguousarray(buffer).reshape(-1).view(np.uint8) for buffer in buffers]
    return np.concatenate(made)


def _decode(codec: Coder, lent: Any, out: NDArray[Any], parts: Sequence[slice], *, add: bool) -> None:
    cut = _cut(codec, lent, parts)
    for part, buffers in zip(parts, cut, strict=True):
        codec.check(buffers, _length(part))
        codec.decode_into(buffers, out[part], add)


def _cut(codec: Coder, lent: NDArray[np.uint8], parts: Sequence[slice]) -> Iterator[list[NDArray[Any]]]:
    start = 0
    for part in parts:
        buffers = []
        for dtype, count in codec.layout(_length(part)):
            end = start + np.dtype(dtype).itemsize * count
            buffers.append(np.frombuffer(lent[start:end].tobytes(), dtype))
            start = end
        yield buffers

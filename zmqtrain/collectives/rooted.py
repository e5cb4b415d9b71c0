"""Reduce all ranks' arrays to one rank, or broadcast one rank's to all: along a binomial tree, or along a chain.

Rule 1: ranks are counted from the root: the root's place is 0, rank r's is (r - root) modulo size.
Rule 2: a tree has the fewest steps, floor(log2 size), but its root's port must carry ceil(log2 size) arrays; along a
chain every port carries one array each way, and the size - 1 steps take one chunk each: better where there are many.
Rule 3: a chunk is sent when it has its last value on that rank: what is on its way is never written over.
Source: Thakur, Rabenseifner & Gropp 2005, Optimization of collective communication operations in MPICH, sec. 4.2 and
4.4 (binomial trees); Sanders & Sibeyn 2003, A bandwidth latency tradeoff for broadcast and reduction (chains).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zmqtrain.collectives.reductions import Reduction
from zmqtrain.collectives.shares import chunks
from zmqtrain.collectives.steps import Receive, Send, Steps, Values


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

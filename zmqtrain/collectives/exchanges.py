"""Give each rank what is meant for it: scatter, gather, all to all; and let all wait for all: barrier.

Rule 1: each part goes straight from who has it to who wants it. Through a switch that is the least that any port must
carry, and for scatter and gather the root's port carries it however it is done: a tree would only send parts twice.
Rule 2: parts are flat arrays of any lengths and dtypes, which both sides know beforehand; empty ones are not sent.
Rule 3: a rank's own part does not travel: who calls has it already, or copies it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zmqtrain.collectives.shares import chunks
from zmqtrain.collectives.steps import Receive, Send, Steps, Values


def scatter(rank: int, size: int, parts: Sequence[Values], into: Values | None, root: int, chunk_values: int) -> Steps:
    """Give each rank its part of the root's `parts`, which has one for each rank.

    parts: not looked at elsewhere.  into: where this rank's part is put; not looked at on the root. The root sends all
    parts but its own, chunk by chunk in turn, so that all have theirs at about the same time.
    """
    if rank == root:
        yield from _send_in_turn([(to, parts[to]) for to in _others(rank, size)], chunk_values)
    else:
        assert into is not None
        yield from _receive(root, into, chunk_values)


def gather(rank: int, size: int, part: Values | None, parts: Sequence[Values], root: int, chunk_values: int) -> Steps:
    """Bring each rank's `part` to the root, into its `parts`, which has one for each rank.

    part: not looked at on the root.  parts: not looked at elsewhere. All but the root send their part.
    """
    if rank != root:
        assert part is not None
        yield from _send_in_turn([(root, part)], chunk_values)
    else:
        for source in _others(rank, size):
            yield from _receive(source, parts[source], chunk_values)


def all_to_all(rank: int, size: int, parts: Sequence[Values], into: Sequence[Values], chunk_values: int) -> Steps:
    """Send `parts[r]` to each rank r, and receive into `into[r]` what r has for this rank.

    Each sends all parts but its own, those for the next ranks first, and takes those of the ranks before it first: each
    port has one partner at a time, as far as all keep step.
    Source: Thakur, Rabenseifner & Gropp 2005, sec. 4.3 (long messages).
    """
    for to in _others(rank, size):
        yield from _send_in_turn([(to, parts[to])], chunk_values)
    for source in reversed(_others(rank, size)):
        yield from _receive(source, into[source], chunk_values)


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
    """Return all other ranks, from the next one on."""
    return [(rank + distance) % size for distance in range(1, size)]


def _send_in_turn(parts: Sequence[tuple[int, Values]], chunk_values: int) -> Steps:
    longest = max((part.size for _, part in parts), default=0)
    for chunk in chunks(0, longest, chunk_values):
        for to, part in parts:
            if chunk.start < part.size:
                yield Send(to, part[chunk])


def _receive(source: int, into: Values, chunk_values: int) -> Steps:
    for chunk in chunks(0, into.size, chunk_values):
        part = into[chunk]
        yield Receive(source, part.size, part)

"""Let what other ranks say loose on one rank of a group, with calls and messages of its own: a target of fuzzing.

Rule 1: whatever comes, a rank's calls end, well or in an error that is meant: none is left waiting for ever.
Rule 2: the others are there only as what rank 0 heard of them in a group that did its calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np

from zmqtrain.collectives.algorithms import ALLREDUCE, barrier
from zmqtrain.collectives.arrays import take_tree
from zmqtrain.collectives.group import Group, Request
from zmqtrain.collectives.matching import ANY_SOURCE, ANY_TAG, Receiving, Sending
from zmqtrain.collectives.reductions import find_reduction
from zmqtrain.collectives.wire import NOTHING, Head, pack, unpack
from zmqtrain.core.errors import (
    FramingError,
    ZmqTrainError,
)

from fuzz_inputs import mutate_bytes, pack_session, read_session

__all__ = ["run_collectives", "collective_sessions", "mutate_collectives"]


class _Post:
    """What a group needs of its endpoint, and nobody at the other end."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes, Any]] = []

    def send(self, rank: int, context: int, head: Head, values: memoryview = NOTHING) -> int:
        """See Post."""
        self.sent.append((rank, pack(head, context), bytes(values)))
        return 1

    def reduce(self, context: int, head: Head, values: memoryview) -> int:
        """See Post."""
        return 1

    def note_lost(self, rank: int, why: str) -> None:
        """See Post."""

    def note_difference(self, context: int) -> None:
        """See Post."""


RANKS = 3
FLOAT = np.dtype(np.float32)


class _Rank:
    """One rank that makes a few calls, as they are made."""

    def __init__(self, rank: int) -> None:
        self.post, self.rank = _Post(), rank
        self.group = Group(self.post, 0, tuple(range(RANKS)), rank, tuple(f"pc-{other}" for other in range(RANKS)))
        values, total = np.arange(9, dtype=np.float32) + rank, find_reduction("sum", FLOAT)
        self._begin("barrier()", iter([(barrier(rank, RANKS), np.dtype(np.uint8))]))
        for algorithm in ("ring", "tree"):
            steps = ALLREDUCE[algorithm](rank, RANKS, values.copy(), total, 4)
            self._begin(f"allreduce(float32[9], op=sum, algorithm={algorithm})", iter([(steps, FLOAT)]))
        for size in (5, 40_000):
            tree = take_tree(np.full(size, rank, np.float32))
            sending = Sending((rank + 1) % RANKS, 7)
            self._post(sending, lambda s=sending, t=tree: self.group.matching.send(s, t.text, t.join()))
        for tag in (7, ANY_TAG):
            receiving = Receiving(ANY_SOURCE, tag)
            self._post(receiving, lambda r=receiving: self.group.matching.receive(r))

    def _request(self) -> Request[Any]:
        return Request(self.group, "a call", 1.0)

    def _begin(self, text: str, phases: Iterator[Any]) -> None:
        self.group.begin(self._request(), text, phases, False, "sum")

    def _post(self, transfer: Any, post: Callable[[], object]) -> None:
        self.group.post(self._request(), transfer, post)


def run_collectives(data: bytes) -> int:
    """Tell one rank anything: it ends its calls, well or not, by errors of ours alone, and holds no more than came."""
    _, records = read_session(data)
    noted: list[str] = []
    logger = logging.getLogger("zmqtrain.collectives.group")
    handler = _Said(noted)
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    count = held = 0
    try:
        me, now = _Rank(0), 0.0
        for who, frames in records:
            if not frames:
                now += 0.3
                me.group.on_tick(now)
                continue
            count += len(frames)
            held += sum(map(len, frames))
            try:
                head, values = unpack(frames)
            except FramingError:
                continue
            me.group.hear(1 + who % (RANKS - 1), head, values)
        assert not noted, noted[0]
        assert me.group.matching.unexpected_bytes <= held
        me.group.break_off(ZmqTrainError("the end"))
        assert not (me.group.calls.pending or me.group.matching.waiting), "calls that never end"
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
    return count


class _Said(logging.Handler):
    """Keeps errors that are logged with an exception that is none of ours."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._noted = noted

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what it says."""
        self._noted.append(f"{record.getMessage()}: {record.exc_info[1]!r}" if record.exc_info else record.getMessage())


def collective_sessions() -> list[bytes]:
    """Return what rank 0 hears of the others, in a group that does its calls."""
    ranks = [_Rank(rank) for rank in range(RANKS)]
    records = []
    while any(rank.post.sent for rank in ranks):
        for rank in ranks:
            sent, rank.post.sent = rank.post.sent, []
            for to, head, values in sent:
                frames = (head, values) if values else (head,)
                if to == 0:
                    records.append((rank.rank - 1, frames))
                ranks[to].group.hear(rank.rank, *unpack(frames))
    broken = (pack(Head(6, place=1, text="gone"), 0),)
    return [pack_session(0, one) for one in (records, [*records, (0, ())], [*records[:3], (1, broken)])]


def mutate_collectives(data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
    seed, records = read_session(data)
    mutated = []
    for who, frames in records:
        chance = random.random()
        if chance < 0.15 and frames:
            frames = (mutate_bytes(frames[0], random), *frames[1:])
        elif chance < 0.2 and len(frames) > 1:
            frames = (frames[0], mutate_bytes(frames[1], random))
        elif chance < 0.25:
            continue
        mutated += [((who + (chance > 0.97)) & 255, frames)] * (2 if chance > 0.94 else 1)
        if chance > 0.99:
            random.shuffle(mutated)
    return pack_session(seed, mutated)

"""Reduces chunks of all ranks of a group at the hub, and relays messages between ranks that cannot reach each other.

1. The order of reduction is that of the ranks, whatever the order of arrival: ((x[0] op x[1]) op ...) op x[size-1].
2. The n-th chunk that a rank sends with a key meets the n-th of the others with that key. If they differ in operation,
   dtype or length, the reduction of that key ends and the hub logs it; the ranks find out whose call was different.
3. What is held of each rank, results for it included, is bounded by its window: it sends more as results come.
4. Relayed frames are forwarded as they came, never decoded or copied. They wait in order for room to their receiver;
   a receiver that does not read delays only its own messages. `protocol/groups` bounds them per sender.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from zmqtrain.collectives.arrays import HUB_DTYPES, dtype_of_name
from zmqtrain.collectives.reductions import OPERATIONS, Reduction, Values, find_reduction
from zmqtrain.core.errors import ConfigError, FramingError, LocalProtocolError, RemoteProtocolError
from zmqtrain.core.types import MAX_FRAME_BYTES, Buffer, HubChunk, PeerId
from zmqtrain.protocol.effects import Combine
from zmqtrain.protocol.groups import Window
from zmqtrain.protocol.messages import Message, ReduceChunk, ReducedChunk, printable
from zmqtrain.session.downlink import Downlink
from zmqtrain.session.rate_limited_logger import RateLimitedLogger

logger = logging.getLogger(__name__)

REDUCE_MESSAGES, REDUCE_BYTES = 16, 8 << 20
"""The window of one rank: chunks in flight to the hub and not answered, and their bytes."""
GROUP_REDUCE_BYTES = 128 << 20
"""What of a whole group may be: of a large one each rank has less."""
MAX_OWN_BYTES, MAX_OWN_FRAMES = 4096, 2
"""What a rank may have come back with the result."""


def window_bytes(size: int) -> int:
    """Return the bytes that one rank of a group of `size` may have in flight."""
    return min(REDUCE_BYTES, GROUP_REDUCE_BYTES // size)


def hub_reduction(op: str, dtype: str) -> tuple[Reduction, np.dtype[np.generic]]:
    """Return what the hub does for an operation and a dtype by their names. Raises ConfigError, which says what it can
    do, for any other."""
    if op not in OPERATIONS:
        raise ConfigError(f"op={op[:32]!r}: the hub reduces by {', '.join(OPERATIONS)}; take another algorithm")
    if dtype not in HUB_DTYPES:
        raise ConfigError(
            f"the hub reduces no arrays of {dtype[:32]}, but of {', '.join(HUB_DTYPES)}; cast them, or take another "
            "algorithm"
        )
    kind = dtype_of_name(dtype)
    return find_reduction(op, kind), kind


def check_chunk(chunk: HubChunk, frames: Sequence[Buffer], total: int) -> None:
    """Refuse what the hub would: a message of `total` bytes that cannot be reduced so.

    Raises ConfigError for an operation or a dtype that it does not reduce, LocalProtocolError for frames that are none.
    """
    _, dtype = hub_reduction(chunk.op, chunk.dtype)
    values = memoryview(frames[-1]).nbytes
    if not 0 < values <= MAX_FRAME_BYTES or values % dtype.itemsize or not 0 <= chunk.key < 1 << 63:
        raise LocalProtocolError(f"a chunk with key {chunk.key} of {values} bytes, which are no values of {dtype}")
    if len(frames) > 1 + MAX_OWN_FRAMES or total - values > MAX_OWN_BYTES:
        raise LocalProtocolError(f"{total - values} bytes in {len(frames) - 1} frames go to the hub with a chunk")


@dataclass(eq=False)
class _Chunk:
    """A chunk that has not arrived from all ranks. arrived: by rank its own frames.  waiting: by rank values that wait
    for those of lower ranks.  total: of the ranks below `combined`."""

    asked: ReduceChunk
    nbytes: int
    reduction: Reduction
    dtype: np.dtype[np.generic]
    arrived: dict[int, Sequence[Buffer]] = field(default_factory=dict)
    waiting: dict[int, Buffer] = field(default_factory=dict)
    total: Values | None = None
    combined: int = 0

    def add(self, rank: int, own: Sequence[Buffer], values: Buffer) -> None:
        self.arrived[rank] = own
        self.waiting[rank] = values
        while (ready := self.waiting.pop(self.combined, None)) is not None:
            part = np.frombuffer(ready, self.dtype)
            if self.total is None:
                self.total = part.copy()
            else:
                self.reduction.combine(self.total, part, self.total)
            self.combined += 1


class _Reducer:
    def __init__(self, size: int, log: RateLimitedLogger) -> None:
        self.size, self._log = size, log
        self._open: dict[int, deque[_Chunk]] = {}
        self._ended: set[int] = set()  # keys whose chunks differed
        self._windows = [Window(REDUCE_MESSAGES, window_bytes(size)) for _ in range(size)]  # by rank

    def add(self, combine: Combine, frames: Sequence[Buffer]) -> list[_Chunk]:
        """Take a chunk of one rank; return those that are there of all now."""
        asked, rank, peer = combine.chunk, combine.rank, combine.peers[combine.rank]
        own, values = _cut(asked, frames)
        if not self._windows[rank].has_room(asked.size):
            raise RemoteProtocolError(peer, "in a group", "a ReduceChunk beyond its window")
        self._windows[rank].add(asked.key, asked.size)
        if asked.key in self._ended:
            return []
        chunks = self._open.setdefault(asked.key, deque())
        chunk = next((one for one in chunks if rank not in one.arrived), None)
        if chunk is None:
            chunk = _Chunk(asked, len(values), *_find(asked, values))
            chunks.append(chunk)
        if (asked.op, asked.dtype, len(values)) != (chunk.asked.op, chunk.asked.dtype, chunk.nbytes):
            first = next(iter(chunk.arrived))
            self._log.warning(
                "ranks %d and %d differ in what the hub is to reduce: %s and %s; it reduces nothing more of that",
                first,
                rank,
                _describe(chunk.asked, chunk.nbytes),
                _describe(asked, len(values)),
            )
            self._ended.add(asked.key)
            del self._open[asked.key]
            return []
        chunk.add(rank, own, values)
        whole: list[_Chunk] = []
        while chunks and chunks[0].combined == self.size:
            whole.append(chunks.popleft())
        if not chunks:
            del self._open[asked.key]
        return whole

    def answered(self, rank: int, key: int) -> None:
        """A result was sent to a rank, of its oldest chunk with this key."""
        self._windows[rank].remove(key)


class Reducers:
    """The reductions of all groups at this hub; used by the broker's loop alone. relays: send the results."""

    def __init__(self, relays: Relays) -> None:
        self._relays = relays
        self._groups: dict[int, _Reducer] = {}
        self._log = RateLimitedLogger(logger)

    def combine(self, combine: Combine, frames: Sequence[Buffer]) -> None:
        """Take a chunk of one rank, and send to all what is reduced now.

        Raises FramingError for what cannot be reduced, RemoteProtocolError for more than the window allows.
        """
        size = len(combine.peers)
        group = self._groups.setdefault(combine.generation, _Reducer(size, self._log))
        for chunk in group.add(combine, frames):
            assert chunk.total is not None
            chunk.reduction.finish(chunk.total, size)
            values = chunk.total.view(np.uint8).data
            for rank, own in chunk.arrived.items():
                answer = ReducedChunk(chunk.asked.key, sum(len(frame) for frame in own) + len(values))
                sent = partial(group.answered, rank, chunk.asked.key)
                self._relays.forward(combine.peers[rank], answer, [*own, values], sent)

    def discard(self, generation: int) -> None:
        self._groups.pop(generation, None)


def _cut(asked: ReduceChunk, frames: Sequence[Buffer]) -> tuple[Sequence[Buffer], Buffer]:
    if not 1 <= len(frames) <= 1 + MAX_OWN_FRAMES or not 0 < len(frames[-1]) <= MAX_FRAME_BYTES:
        raise FramingError(f"a ReduceChunk with {len(frames)} frames behind it, or a last one of no values")
    own = frames[:-1]
    if asked.size - len(frames[-1]) > MAX_OWN_BYTES or not 0 <= asked.key < 1 << 63:
        raise FramingError(
            f"a ReduceChunk with {asked.size - len(frames[-1])} bytes of its sender's own, and key {asked.key}"
        )
    return own, frames[-1]


def _find(asked: ReduceChunk, values: Buffer) -> tuple[Reduction, np.dtype[np.generic]]:
    try:
        reduction, dtype = hub_reduction(asked.op, asked.dtype)
    except ConfigError as error:
        raise FramingError(str(error)) from None
    if len(values) % dtype.itemsize:
        raise FramingError(f"{len(values)} bytes are no values of {dtype}")
    return reduction, dtype


def _describe(asked: ReduceChunk, nbytes: int) -> str:
    return f"{printable(asked.op, 32)} of {nbytes} bytes of {printable(asked.dtype, 32)}"


class Relays:
    """Messages that wait at the hub to be relayed; used by the broker's loop alone."""

    def __init__(self, downlink: Downlink) -> None:
        self._downlink = downlink
        self._waiting: dict[PeerId, deque[tuple[list[Buffer], Callable[[], object] | None]]] = {}

    def forward(
        self, peer: PeerId, message: Message, frames: Sequence[Buffer], sent: Callable[[], object] | None = None
    ) -> None:
        """Send a message with frames behind it, after all that waits for this peer; call `sent` when it has gone."""
        self._waiting.setdefault(peer, deque()).append(([self._downlink.bulk_head(peer, message), *frames], sent))
        self.pump(peer)

    def pump(self, peer: PeerId) -> None:
        waiting = self._waiting.get(peer)
        while waiting and self._downlink.forward(peer, waiting[0][0]):
            _, sent = waiting.popleft()
            if sent is not None:
                sent()
        if not waiting:
            self._waiting.pop(peer, None)

    def pump_all(self) -> None:
        """Send to all what there is room for."""
        for peer in list(self._waiting):
            self.pump(peer)

    def forget(self, peer: PeerId) -> None:
        self._waiting.pop(peer, None)

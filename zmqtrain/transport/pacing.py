"""Decide how many bytes may be on their way, and whose (pure: no clock, no socket; `now` is an argument).

Rule 1: toward the hub's port, the hub grants: `Credits` keeps what is granted and has not arrived, over ALL peers, in
one window, so that the queue in the switch stays short whoever sends.
Rule 2: toward a node's port, the hub keeps its own bounded queue: `Outbox` sends while the node's acknowledgements say
that at most one window is on its way.
Rule 3: a chunk larger than a window goes when it goes alone; nothing that was asked for waits for ever.
Rule 4: grants keep to the share of the hub's port, and of each node's: a chunk that is granted can go at once.
Rule 5: chunks are references to buffers that every peer shares: counted, never copied, never looked into.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from zmqtrain.core.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from zmqtrain.core.types import Buffer, PeerId
from zmqtrain.transport.reservation import TokenBucket

_SOME_PEER = PeerId("the peer")


@dataclass(slots=True, eq=False)
class _Asked:
    """One transfer that a node wants to send: the chunks not yet granted, and those granted that have not arrived."""

    priority: int
    waiting: deque[int]
    granted: deque[int] = field(default_factory=deque)


class Credits:
    """The hub's grants: which node may send how many chunks now.

    window_bytes: the most bytes granted and not yet arrived, over all peers.  A grant goes to the lowest `priority`
    that waits; among equals to one peer after the other, chunk by chunk; within a peer in the order asked.  A chunk
    that does not fit is waited for, never overtaken: what is small does not starve what is large.
    A peer that was granted and stays silent holds its part of the window: `holders` says who, `forget` or `cancel`
    frees it.  A peer whose own link has no more to give now (`limit`) is passed over until it has; while the hub's own
    (`bucket`) has none, all wait.
    retry_seconds: after the last `grants`, how long until one that only a rate has kept back may be granted.
    """

    def __init__(self, window_bytes: int = 1 << 20) -> None:
        if window_bytes < 1:
            raise ConfigError(f"window_bytes must be at least 1, got {window_bytes}")
        self.window_bytes = window_bytes
        self._transfers: dict[PeerId, dict[int, _Asked]] = {}
        self._turns: dict[int, deque[PeerId]] = {}  # by priority: the peers that wait, whose turn it is first
        self._in_flight: dict[PeerId, int] = {}
        self._in_flight_bytes = 0
        self._waiting = 0
        self.bucket = TokenBucket()
        self.retry_seconds = inf
        self._buckets: dict[PeerId, TokenBucket] = {}

    @property
    def in_flight_bytes(self) -> int:
        """The bytes granted and not yet arrived, over all peers."""
        return self._in_flight_bytes

    @property
    def waiting(self) -> int:
        """The number of chunks asked for and not yet granted, over all peers."""
        return self._waiting

    @property
    def holders(self) -> Mapping[PeerId, int]:
        """The peers that have been granted bytes that have not arrived, and how many."""
        return dict(self._in_flight)

    def ask(self, peer: PeerId, transfer: int, sizes: Sequence[int], priority: int = 0) -> None:
        """Register a transfer of chunks of these `sizes` (bytes, head included) that `peer` wants to send.

        Raise RemoteProtocolError if the peer asked for the same transfer before and it is not finished, or if there is
        no chunk in it, or one of no bytes.
        """
        transfers = self._transfers.get(peer, {})
        if transfer in transfers:
            raise RemoteProtocolError(peer, "sending it", f"a second request to send transfer {transfer}")
        if not sizes or min(sizes) < 1:
            raise RemoteProtocolError(peer, "asking to send", f"transfer {transfer} with chunk sizes {list(sizes[:8])}")
        self._transfers.setdefault(peer, transfers)[transfer] = _Asked(priority, deque(sizes))
        self._waiting += len(sizes)
        turns = self._turns.setdefault(priority, deque())
        if peer not in turns:
            turns.append(peer)

    def limit(self, peer: PeerId, rate: float | None) -> None:
        """Grant a peer no more than `rate` bytes per second; None: as much as there is. Kept until `forget`."""
        if rate is None:
            self._buckets.pop(peer, None)
        else:
            self._buckets.setdefault(peer, TokenBucket(rate)).set_rate(rate)

    def grants(self, now: float = 0.0) -> list[tuple[PeerId, int, int]]:
        """Grant what fits now; return (peer, transfer, further chunks), each pair once, in the order granted."""
        granted: dict[tuple[PeerId, int], int] = {}
        self.retry_seconds = inf
        for priority in sorted(self._turns):
            if not self._grant(self._turns[priority], priority, granted, now):
                break
            if not self._turns[priority]:
                del self._turns[priority]
        return [(who, what, count) for (who, what), count in granted.items()]

    def _grant(self, turns: deque[PeerId], priority: int, granted: dict[tuple[PeerId, int], int], now: float) -> bool:
        """Grant to those of one priority; False if one of them must be waited for, and nothing else may go."""
        passed_over = 0
        while passed_over < len(turns):
            peer = turns[0]
            transfer, asked = self._next_of(peer, priority)
            size = asked.waiting[0]
            if self._in_flight_bytes and self._in_flight_bytes + size > self.window_bytes:
                return False
            own = self._buckets.get(peer)
            if own is not None and (seconds := own.wait_seconds(size, now)) > 0:
                self.retry_seconds = min(self.retry_seconds, seconds)
                turns.rotate(-1)
                passed_over += 1
                continue
            if (seconds := self.bucket.wait_seconds(size, now)) > 0:
                self.retry_seconds = min(self.retry_seconds, seconds)
                return False
            passed_over = 0
            self.bucket.pay(size, now)
            if own is not None:
                own.pay(size, now)
            asked.granted.append(asked.waiting.popleft())
            self._waiting -= 1
            self._in_flight_bytes += size
            self._in_flight[peer] = self._in_flight.get(peer, 0) + size
            granted[peer, transfer] = granted.get((peer, transfer), 0) + 1
            turns.popleft()
            if self._waits(peer, priority):
                turns.append(peer)
        return True

    def arrived(self, peer: PeerId, transfer: int) -> None:
        """Note that one chunk has come; raise RemoteProtocolError if it was not granted."""
        asked = self._transfers.get(peer, {}).get(transfer)
        if asked is None or not asked.granted:
            raise RemoteProtocolError(peer, "without a grant for it", f"a chunk of transfer {transfer}")
        self._release(peer, asked.granted.popleft())
        if not asked.granted and not asked.waiting:
            self._remove(peer, transfer)

    def cancel(self, peer: PeerId, transfer: int) -> None:
        """Release all of a transfer; one that is unknown, or finished, is none.

        Granted chunks that still come afterwards are the caller's to drop: it must not call `arrived` for them.
        """
        asked = self._transfers.get(peer, {}).get(transfer)
        if asked is None:
            return
        self._waiting -= len(asked.waiting)
        self._release(peer, sum(asked.granted))
        self._remove(peer, transfer)
        if asked.waiting and not self._waits(peer, asked.priority):
            turns = self._turns[asked.priority]
            turns.remove(peer)
            if not turns:
                del self._turns[asked.priority]

    def forget(self, peer: PeerId) -> None:
        """Release all transfers of a lost peer, and its limit."""
        self._buckets.pop(peer, None)
        for transfer in list(self._transfers.get(peer, ())):
            self.cancel(peer, transfer)

    def _next_of(self, peer: PeerId, priority: int) -> tuple[int, _Asked]:
        for transfer, asked in self._transfers[peer].items():
            if asked.priority == priority and asked.waiting:
                return transfer, asked
        raise AssertionError(f"{peer} has a turn at priority {priority} and nothing waiting")

    def _waits(self, peer: PeerId, priority: int) -> bool:
        return any(asked.waiting and asked.priority == priority for asked in self._transfers.get(peer, {}).values())

    def _release(self, peer: PeerId, size: int) -> None:
        self._in_flight_bytes -= size
        left = self._in_flight.pop(peer, 0) - size
        if left > 0:
            self._in_flight[peer] = left

    def _remove(self, peer: PeerId, transfer: int) -> None:
        del self._transfers[peer][transfer]
        if not self._transfers[peer]:
            del self._transfers[peer]


@dataclass(slots=True, eq=False)
class _Queued:
    """One transfer toward a node: its chunks, their bytes, and how many were sent and acknowledged."""

    transfer: int
    chunks: Sequence[Sequence[Buffer]]
    sizes: Sequence[int]
    droppable: bool
    sent: int = 0
    acknowledged: int = 0


class Outbox:
    """What the hub has for ONE peer on the bulk lane: bounded, in order, and sent as the peer acknowledges.

    window_bytes: the most bytes sent and not yet acknowledged.  limit_bytes: the most bytes held in all (sent and not
    yet acknowledged ones too).  peer: whose it is, for the messages of errors.
    """

    def __init__(self, window_bytes: int = 1 << 20, limit_bytes: int = 256 << 20, peer: PeerId = _SOME_PEER) -> None:
        if not 1 <= window_bytes <= limit_bytes:
            raise ConfigError(f"1 <= window_bytes <= limit_bytes must hold, got {window_bytes} and {limit_bytes}")
        self.window_bytes, self.limit_bytes, self.peer = window_bytes, limit_bytes, peer
        self._transfers: dict[int, _Queued] = {}  # in the order pushed, until all of it is acknowledged
        self._unsent: deque[_Queued] = deque()  # those of them with chunks to send
        self._last: _Queued | None = None  # whose chunk `put_back` would put back
        self._in_flight_bytes = 0
        self._held_bytes = 0

    @property
    def in_flight_bytes(self) -> int:
        """The bytes sent and not yet acknowledged."""
        return self._in_flight_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes pushed and not yet acknowledged, sent or not."""
        return self._held_bytes

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send and nothing to be acknowledged."""
        return not self._transfers

    @property
    def holds_undroppable(self) -> bool:
        """Whether there is a transfer, not taken whole yet, that may not be dropped."""
        return any(not queued.droppable for queued in self._transfers.values())

    def push(self, transfer: int, chunks: Sequence[Sequence[Buffer]], droppable: bool) -> bool:
        """Queue a transfer whole; return False if it does not fit in `limit_bytes`, and then nothing is queued.

        chunks: messages, in order; the buffers are kept, not copied.  droppable: whether `drop_droppable` may take it.
        Raise LocalProtocolError if the transfer is empty, or one of the same number is not finished.
        """
        if transfer in self._transfers:
            raise LocalProtocolError(f"transfer {transfer} is already on its way to {self.peer}")
        if not chunks:
            raise LocalProtocolError(f"transfer {transfer} to {self.peer} has no chunks")
        sizes = [sum(memoryview(frame).nbytes for frame in chunk) for chunk in chunks]
        if self._held_bytes + sum(sizes) > self.limit_bytes:
            return False
        queued = _Queued(transfer, chunks, sizes, droppable)
        self._transfers[transfer] = queued
        self._unsent.append(queued)
        self._held_bytes += sum(sizes)
        return True

    @property
    def next_size(self) -> int:
        """The bytes of what `next_chunk` would return; 0 if that is nothing."""
        if not self._unsent:
            return 0
        size = self._unsent[0].sizes[self._unsent[0].sent]
        return 0 if self._in_flight_bytes and self._in_flight_bytes + size > self.window_bytes else size

    @property
    def next_is_droppable(self) -> bool:
        """Whether the next chunk is one of a droppable transfer; False if there is none."""
        return bool(self._unsent) and self._unsent[0].droppable

    @property
    def next_is_head(self) -> bool:
        """Whether the next chunk announces a transfer, and fits the window; False if there is none."""
        return bool(self.next_size) and len(self._unsent[0].chunks[self._unsent[0].sent]) == 1

    def next_chunk(self) -> Sequence[Buffer] | None:
        """Return the next chunk and count it as sent; None if there is none, or the window is full."""
        size = self.next_size
        if not size:
            return None
        queued = self._unsent[0]
        chunk = queued.chunks[queued.sent]
        queued.sent += 1
        self._in_flight_bytes += size
        self._last = queued
        if queued.sent == len(queued.chunks):
            self._unsent.popleft()
        return chunk

    def put_back(self) -> None:
        """Undo the last `next_chunk`, whose send raised ChannelFull; raise LocalProtocolError if there is none."""
        queued, self._last = self._last, None
        if queued is None or queued.sent == queued.acknowledged:
            raise LocalProtocolError(f"no chunk to {self.peer} was taken that could be put back")
        queued.sent -= 1
        self._in_flight_bytes -= queued.sizes[queued.sent]
        if not self._unsent or self._unsent[0] is not queued:
            self._unsent.appendleft(queued)

    def acknowledged(self, transfer: int, chunks: int = 1) -> None:
        """Note that the peer has `chunks` further ones; raise RemoteProtocolError if they were never sent."""
        queued = self._transfers.get(transfer)
        outstanding = queued.sent - queued.acknowledged if queued is not None else 0
        if queued is None or not 1 <= chunks <= outstanding:
            raise RemoteProtocolError(
                self.peer, f"owing {outstanding}", f"an acknowledgement of {chunks} chunks of transfer {transfer}"
            )
        size = sum(queued.sizes[queued.acknowledged : queued.acknowledged + chunks])
        queued.acknowledged += chunks
        self._in_flight_bytes -= size
        self._held_bytes -= size
        if queued.acknowledged == len(queued.chunks):
            del self._transfers[transfer]

    def drop_droppable(self) -> list[int]:
        """Drop the droppable transfers of which nothing was sent yet; return them, in the order they were pushed."""
        dropped = [queued for queued in self._unsent if queued.droppable and not queued.sent]
        for queued in dropped:
            self._unsent.remove(queued)
            del self._transfers[queued.transfer]
            self._held_bytes -= sum(queued.sizes)
        return [queued.transfer for queued in dropped]

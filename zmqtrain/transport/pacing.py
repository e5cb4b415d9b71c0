"""Limits and flow control of a port (pure but for `Gate`: no socket; `now` is an argument).

1. Toward the hub's port, the hub grants: `Credits` keeps the bytes granted and not arrived, over ALL peers, in one
   window, so that the queue in the switch stays short, however many send. Grants keep to the rate of the hub's port
   and of each node's: a granted chunk can go at once.
2. Toward a node's port, the hub keeps a bounded queue: `Outbox` sends while at most one window is unacknowledged. A
   chunk larger than a window goes when it goes alone.
3. Chunks are references to buffers that every peer shares: counted, never copied, never decoded.
4. `Share` keeps a port to its rate: control never waits but is paid for; deltas go before snapshots, but for one chunk
   in `OVERTAKEN`. A sender that must wait is told for how long. If no rate is configured, it is a lower bound measured
   from traffic.
5. `Connections` bounds the connections of a port, in all and by address. A connection is half open until a message has
   come over it, greeted until its peer has sent more than the empty first message of a lane. Over a limit, an address
   loses its oldest half-open connection; when all places are taken, a new connection replaces a half-open one, else a
   greeted one. Identified connections are never evicted.
6. A message that a limit refuses never reaches the wire (`LocalProtocolError`), where it would cost the connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf, isfinite
from typing import Generic, TypeVar

from zmqtrain.core.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from zmqtrain.core.types import MAX_FRAME_BYTES, Buffer, PeerId

MAX_WIRE_FRAME_BYTES = MAX_FRAME_BYTES + (64 << 10)
"""The largest frame that a connection survives: one payload frame, and 64 KiB for a head in the same frame."""

MAX_MESSAGE_FRAMES = 6
"""A control message is one frame, a chunk two, and a message of a group that is relayed five; the other is room for a
later version to be understood."""

MAX_PEER_ID_BYTES = 200
"""A ZeroMQ routing id holds 255 bytes; one is the lane, and the rest stays free."""

COPY_BELOW_BYTES = 64 << 10
"""Frames below this are copied, both ways: cheaper than to keep their owner alive until the network has them."""


def check_message(frames: Sequence[Buffer]) -> int:
    """Return the bytes of a whole message; raise LocalProtocolError if no channel would carry it."""
    if not 1 <= len(frames) <= MAX_MESSAGE_FRAMES:
        raise LocalProtocolError(f"a message has 1 to {MAX_MESSAGE_FRAMES} frames, this one has {len(frames)}")
    total = 0
    for index, frame in enumerate(frames):
        size = len(frame) if isinstance(frame, bytes) else _measure(index, frame)
        if size > MAX_WIRE_FRAME_BYTES:
            raise LocalProtocolError(
                f"frame {index} of a message holds {size} bytes; the limit is {MAX_WIRE_FRAME_BYTES}: split it"
            )
        total += size
    return total


def _measure(index: int, frame: Buffer) -> int:
    view = memoryview(frame)
    if not view.c_contiguous:
        raise LocalProtocolError(f"frame {index} of a message is not contiguous in memory: copy it first")
    return view.nbytes


def is_peer_id(text: str) -> bool:
    """Tell whether `text` can name a peer: printable, not empty, at most `MAX_PEER_ID_BYTES` bytes of utf-8."""
    return 0 < len(text) <= MAX_PEER_ID_BYTES and text.isprintable() and len(text.encode()) <= MAX_PEER_ID_BYTES


def check_peer_id(peer: PeerId) -> None:
    """Raise ConfigError if `peer` cannot name a peer on the wire."""
    if not is_peer_id(peer):
        raise ConfigError(
            f"a node's name must be printable and 1 to {MAX_PEER_ID_BYTES} bytes long, got {peer!r}:"
            " choose another --name"
        )


class Gate:
    """A place where tasks wait until somebody calls `open`."""

    __slots__ = ("_called", "_waiters")

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []
        self._called: Callable[[], object] | None = None

    @property
    def waited_at(self) -> bool:
        return bool(self._waiters) or self._called is not None

    def call(self, what: Callable[[], object]) -> None:
        """Call this at each `open` from now on, inside it: it must only record, and return."""
        self._called = what

    def open(self) -> None:
        """Wake all who wait here now."""
        if self._called is not None:
            self._called()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until the next `open`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:  # cancelled, not woken
                self._waiters.remove(waiter)


class Fairness:
    """Yields to the loop's other tasks now and then, because a call under load may never have to wait."""

    __slots__ = ("_turns", "every")

    def __init__(self, every: int = 8) -> None:
        self.every, self._turns = every, 0

    async def turn(self) -> None:
        """Count one call, before it takes a message (it may be cancelled here); let others run at each `every`-th."""
        self._turns += 1
        if self._turns >= self.every:
            self._turns = 0
            await asyncio.sleep(0)


BURST_SECONDS = 0.03
"""What may go at once after a rest, as time at the reserved rate: a late timer costs nothing, and who types in a remote
shell does not feel it."""
BURST_BYTES = MAX_FRAME_BYTES + 4096
"""And at least so much: the largest chunk with its head, so that no message is larger than the burst."""
OVERTAKEN = 8
METERED_BYTES = 256 << 10
"""Fewer bytes at a time say more of latencies than of a link's rate."""

Who = TypeVar("Who", bound=Hashable)


@dataclass(frozen=True)
class LinkShare:
    """What training may use of a port, each way.

    rate: payload bytes per second of the port, one way; 0: as measured.  share: the part of it to use.
    Raises ConfigError for a rate or share that is out of range.
    """

    rate: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is what training may take of the link, in 0 < share <= 1, got {self.share:g}")
        if not 0 <= self.rate < inf:
            raise ConfigError(f"a link's rate must be 0 (as measured) or more, got {self.rate:g}")

    def limit(self, measured: float = 0.0) -> float | None:
        """Return the bytes per second that may be used; None: no limit is configured, or none is known yet."""
        rate = self.rate or (measured if self.share < 1 else 0.0)
        return self.share * rate if rate else None

    def usable(self, measured: float = 0.0) -> float:
        """Return the bytes per second that can be counted on, limited or not; 0: nothing is known of the port yet."""
        return self.share * (self.rate or measured)


class TokenBucket:
    """A rate that may be exceeded by one burst.

    rate: bytes per second; None: no limit.  A sender goes at `wait_seconds` 0 and pays: over any time t at most
    burst_bytes + rate · t are sent. A message larger than the burst goes when the bucket is full, and owes the rest.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.rate: float | None = None
        self.burst_bytes = self._tokens = float(BURST_BYTES)
        self._now: float | None = None
        self.set_rate(rate)

    def set_rate(self, rate: float | None) -> None:
        """Change the rate; the bucket keeps its content, as far as it has room. Raises ConfigError unless > 0."""
        if rate is not None and not (rate > 0 and isfinite(rate)):
            raise ConfigError(f"a rate must be more than 0 bytes per second (or None), got {rate}")
        was_full = self._tokens >= self.burst_bytes
        self.rate, self.burst_bytes = rate, max(float(BURST_BYTES), BURST_SECONDS * (rate or 0.0))
        self._tokens = self.burst_bytes if was_full else min(self._tokens, self.burst_bytes)

    def wait_seconds(self, size: float, now: float) -> float:
        """Return how long `size` bytes must wait from `now` (seconds, any origin); 0: they may go."""
        if self.rate is None:
            return 0.0
        self._fill(now)
        missing = min(size, self.burst_bytes) - self._tokens
        return missing / self.rate if missing > 0.5 else 0.0  # half a byte: what floats lose

    def pay(self, size: float, now: float) -> None:
        """Record that `size` bytes are sent at `now`, whether or not they should have waited."""
        if self.rate is not None:
            self._fill(now)
            self._tokens -= size

    def _fill(self, now: float) -> None:
        """Refill up to `now`; a `now` that runs backwards adds nothing."""
        assert self.rate is not None
        passed = 0.0 if self._now is None else max(0.0, now - self._now)
        self._now = now if self._now is None else max(self._now, now)
        self._tokens = min(self.burst_bytes, self._tokens + passed * self.rate)


class Use(IntEnum):
    """What a port is used for, the first first."""

    CONTROL = 0
    DELTA = 1
    SNAPSHOT = 2


class Reservation(Generic[Who]):
    """One way through a port: whose turn it is to send, and when, within a rate.

    rate: bytes per second that may be used; None: no limit.  Waiting peers of a lane take turns. A peer whose own link
    is not ready is passed over; one that the port is not ready for is never overtaken by a smaller message.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.bucket = TokenBucket(rate)
        self._lanes: dict[Use, dict[Who, None]] = {Use.DELTA: {}, Use.SNAPSHOT: {}}
        self._overtaken = 0

    def pay(self, size: int, now: float) -> None:
        """Record that `size` bytes of control are sent."""
        self.bucket.pay(size, now)

    def wait(self, who: Who, use: Use) -> None:
        """Queue `who` on a lane; if it waits there already it keeps its place, if on another lane it moves."""
        if who not in self._lanes[use]:
            self.leave(who)
            self._lanes[use][who] = None

    def leave(self, who: Who) -> None:
        """Let `who` wait no more; no error if it does not."""
        for lane in self._lanes.values():
            lane.pop(who, None)

    def turn(self, claim: Callable[[Who], tuple[int, float]], now: float) -> tuple[Who | None, float]:
        """Return the peer that may send now, and 0; or None, and the seconds until to ask again (inf: nobody waits).

        claim: returns the bytes that a peer wants to send next, and how long its own link makes it wait.
        """
        soonest = inf
        order = (Use.SNAPSHOT, Use.DELTA) if self._overtaken >= OVERTAKEN else (Use.DELTA, Use.SNAPSHOT)
        for use in order:
            for who in self._lanes[use]:
                size, own_seconds = claim(who)
                if own_seconds > 0:
                    soonest = min(soonest, own_seconds)
                    continue
                seconds = self.bucket.wait_seconds(size, now)
                return (who, 0.0) if seconds <= 0 else (None, min(soonest, seconds))
        return None, soonest

    def sent(self, who: Who, size: int, now: float) -> None:
        """Record that `who` has sent `size` bytes at its turn: it goes to the end of its lane."""
        self.bucket.pay(size, now)
        if who in self._lanes[Use.DELTA]:
            self._overtaken = self._overtaken + 1 if self._lanes[Use.SNAPSHOT] else 0
        else:
            self._overtaken = 0
        for lane in self._lanes.values():
            if who in lane:
                del lane[who]
                lane[who] = None


class RateMeter:
    """The highest rate measured on a link, in bytes per second; `rate` is 0 until enough was sent at a time.

    A stretch begins when something is sent (or granted) to a peer that had nothing in flight, and lasts while something
    is.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self._began: float | None = None
        self._bytes = 0

    def begun(self, now: float) -> None:
        if self._began is None:
            self._began, self._bytes = now, 0

    def over(self, size: int, now: float, idle: bool) -> None:
        """Record that `size` bytes have arrived. idle: nothing more is in flight."""
        if self._began is not None:
            self._bytes += size
            if self._bytes >= METERED_BYTES and now > self._began:
                self.rate = max(self.rate, self._bytes / (now - self._began))
            if idle:
                self._began = None


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be, and how long a handshake may last.

    A node has two connections to a hub.  The bounds of half-open connections bound the memory that unauthenticated
    peers can take: each may send one frame of at most 4.06 MiB before it is identified.
    """

    total: int = 4096
    per_address: int = 512
    half_open: int = 256
    half_open_per_address: int = 64
    handshake_seconds: float = 5.0


@dataclass(slots=True)
class Connection:
    """One TCP connection. address, port: of the other end.  since: when it was accepted, in seconds.  number: higher
    for each."""

    descriptor: int
    address: str
    port: int
    since: float
    number: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A connection that is to be cut: "half-open", "address" (too many from it) or "full"."""

    connection: Connection
    reason: str


class Connections:
    """All connections at a port, by the number of their descriptor."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._all: dict[int, Connection] = {}
        self._of: dict[str, dict[int, Connection]] = {}
        self._half: dict[str, dict[int, Connection]] = {}  # by address, the oldest first
        self._greeted: dict[str, dict[int, Connection]] = {}  # likewise
        self.half_open = self._accepted = 0

    def __len__(self) -> int:
        return len(self._all)

    def get(self, descriptor: int) -> Connection | None:
        """Return the connection with this descriptor; None if there is none."""
        return self._all.get(descriptor)

    def of(self, address: str) -> list[Connection]:
        """Return the connections from an address, in the order in which they were accepted."""
        return list(self._of.get(address, {}).values())

    def accepted(self, descriptor: int, address: str, port: int, now: float) -> list[Cut]:
        """Record a new connection; return the connections to cut for it, perhaps itself."""
        self.closed(descriptor)
        self._accepted += 1
        new = Connection(descriptor, address, port, now, self._accepted)
        self._all[descriptor] = self._of.setdefault(address, {})[descriptor] = new
        self._half.setdefault(address, {})[descriptor] = new
        self.half_open += 1
        limits = self.limits
        if len(self._of[address]) > limits.per_address:
            return [self._cut(new, "address")]
        if len(self._half[address]) > limits.half_open_per_address:
            return [self._cut_oldest(address)]
        if len(self._all) > limits.total:
            least = self._least_known()
            return [self._cut(least, "full" if least is new else "half-open")]
        if self.half_open > limits.half_open:
            return [self._cut_oldest(_crowded(self._half))]
        return []

    def proved(self, descriptor: int) -> None:
        """Record that a message has come over this connection: it is not half open any more."""
        if (connection := self._all.get(descriptor)) is not None and self._leave_half(connection):
            self._greeted.setdefault(connection.address, {})[descriptor] = connection

    def spoke(self, descriptor: int) -> None:
        """Record that the peer of this connection is identified: it is never evicted."""
        if (connection := self._all.get(descriptor)) is not None:
            self._settle(connection)

    def closed(self, descriptor: int) -> None:
        """Record that this connection has ended, or is being cut."""
        if (connection := self._all.pop(descriptor, None)) is not None:
            self._settle(connection)
            here = self._of[connection.address]
            del here[descriptor]
            if not here:
                del self._of[connection.address]

    def _least_known(self) -> Connection:
        """Return the connection to cut when no place is free: the new one, if all others are identified."""
        address = _crowded(self._half)
        table = self._greeted if self._greeted and len(self._half[address]) == 1 else self._half
        return next(iter(table[_crowded(table)].values()))

    def _cut_oldest(self, address: str) -> Cut:
        return self._cut(next(iter(self._half[address].values())), "half-open")

    def _cut(self, connection: Connection, reason: str) -> Cut:
        self.closed(connection.descriptor)
        return Cut(connection, reason)

    def _settle(self, connection: Connection) -> None:
        if not self._leave_half(connection):
            _take_out(self._greeted, connection)

    def _leave_half(self, connection: Connection) -> bool:
        left = _take_out(self._half, connection)
        self.half_open -= left
        return left


def _crowded(table: dict[str, dict[int, Connection]]) -> str:
    return max(table, key=lambda address: len(table[address]))


def _take_out(table: dict[str, dict[int, Connection]], connection: Connection) -> bool:
    here = table.get(connection.address, {})
    found = here.pop(connection.descriptor, None) is not None
    if found and not here:
        del table[connection.address]
    return found


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
    that does not fit is waited for, never overtaken: what is small does not starve what is large. A silent peer holds
    its part of the window until `forget`.  A peer whose own link is used up (`limit`) is passed over until it has room;
    while the hub's own link (`bucket`) is used up, all wait.  A peer that is set aside has one chunk at a time, which
    counts in nobody's window.  holders: by peer the bytes granted that have not arrived.
    in_flight_bytes: these, over all peers in the window.  waiting: the chunks asked for and not yet granted, over all
    peers.  retry_seconds: after the last `grants`, how long until a chunk that only a rate has delayed may be granted.
    """

    def __init__(self, window_bytes: int) -> None:
        if window_bytes < 1:
            raise ConfigError(f"window_bytes must be at least 1, got {window_bytes}")
        self.window_bytes = window_bytes
        self._transfers: dict[PeerId, dict[int, _Asked]] = {}
        self._turns: dict[int, deque[PeerId]] = {}  # by priority: the peers that wait, whose turn it is first
        self.holders: dict[PeerId, int] = {}
        self.in_flight_bytes = self.waiting = 0
        self.bucket = TokenBucket()
        self.retry_seconds = inf
        self._buckets: dict[PeerId, TokenBucket] = {}
        self._aside: set[PeerId] = set()

    def set_aside(self, peer: PeerId) -> None:
        """Grant a peer one chunk at a time from now on, past the window, also after `forget`."""
        if peer not in self._aside:
            self.in_flight_bytes -= self.holders.get(peer, 0)
            self._aside.add(peer)

    def bring_back(self, peer: PeerId) -> None:
        """Grant a peer as any other again."""
        if peer in self._aside:
            self._aside.remove(peer)
            self.in_flight_bytes += self.holders.get(peer, 0)

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
        self.waiting += len(sizes)
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
            if (aside := peer in self._aside) and peer in self.holders:
                turns.rotate(-1)
                passed_over += 1
                continue
            if not aside and self.in_flight_bytes and self.in_flight_bytes + size > self.window_bytes:
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
            self.waiting -= 1
            self.in_flight_bytes += 0 if aside else size
            self.holders[peer] = self.holders.get(peer, 0) + size
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

    def forget(self, peer: PeerId) -> None:
        """Release all transfers of a lost peer, and its limit. The caller drops granted chunks that still arrive."""
        self._buckets.pop(peer, None)
        self.waiting -= sum(len(asked.waiting) for asked in self._transfers.pop(peer, {}).values())
        self._release(peer, self.holders.get(peer, 0))
        for priority, turns in list(self._turns.items()):
            if peer in turns:
                turns.remove(peer)
            if not turns:
                del self._turns[priority]

    def _next_of(self, peer: PeerId, priority: int) -> tuple[int, _Asked]:
        for transfer, asked in self._transfers[peer].items():
            if asked.priority == priority and asked.waiting:
                return transfer, asked
        raise AssertionError(f"{peer} has a turn at priority {priority} and nothing waiting")

    def _waits(self, peer: PeerId, priority: int) -> bool:
        return any(asked.waiting and asked.priority == priority for asked in self._transfers.get(peer, {}).values())

    def _release(self, peer: PeerId, size: int) -> None:
        self.in_flight_bytes -= 0 if peer in self._aside else size
        left = self.holders.pop(peer, 0) - size
        if left > 0:
            self.holders[peer] = left

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
    yet acknowledged ones too).  in_flight_bytes: sent and not yet
    acknowledged.  held_bytes: pushed and not yet acknowledged.
    """

    def __init__(self, window_bytes: int, limit_bytes: int) -> None:
        if not 1 <= window_bytes <= limit_bytes:
            raise ConfigError(f"1 <= window_bytes <= limit_bytes must hold, got {window_bytes} and {limit_bytes}")
        self.window_bytes, self.limit_bytes = window_bytes, limit_bytes
        self._transfers: dict[int, _Queued] = {}  # in the order pushed, until all of it is acknowledged
        self._unsent: deque[_Queued] = deque()  # those of them with chunks to send
        self.in_flight_bytes = self.held_bytes = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send and nothing to be acknowledged."""
        return not self._transfers

    @property
    def holds_undroppable(self) -> bool:
        """Whether there is a transfer, not taken whole yet, that may not be dropped."""
        return any(not queued.droppable for queued in self._transfers.values())

    def push(self, transfer: int, chunks: Sequence[Sequence[Buffer]], droppable: bool) -> bool:
        """Queue a whole transfer; return False, and queue nothing, if it does not fit in `limit_bytes`.

        chunks: messages, in order; the buffers are kept, not copied.  droppable: whether `drop_droppable` may take it.
        Raise LocalProtocolError if the transfer is empty, or one of the same number is not finished.
        """
        if transfer in self._transfers:
            raise LocalProtocolError(f"transfer {transfer} is already in flight")
        if not chunks:
            raise LocalProtocolError(f"transfer {transfer} has no chunks")
        sizes = [sum(memoryview(frame).nbytes for frame in chunk) for chunk in chunks]
        if self.held_bytes + sum(sizes) > self.limit_bytes:
            return False
        queued = _Queued(transfer, chunks, sizes, droppable)
        self._transfers[transfer] = queued
        self._unsent.append(queued)
        self.held_bytes += sum(sizes)
        return True

    @property
    def next_size(self) -> int:
        """The bytes of `next_chunk`; 0 if there is none."""
        if not self._unsent:
            return 0
        size = self._unsent[0].sizes[self._unsent[0].sent]
        return 0 if self.in_flight_bytes and self.in_flight_bytes + size > self.window_bytes else size

    @property
    def next_is_droppable(self) -> bool:
        """Whether the next chunk is one of a droppable transfer; False if there is none."""
        return bool(self._unsent) and self._unsent[0].droppable

    @property
    def next_is_head(self) -> bool:
        """Whether the next chunk announces a transfer, and fits the window; False if there is none."""
        return bool(self.next_size) and len(self._unsent[0].chunks[self._unsent[0].sent]) == 1

    @property
    def next_chunk(self) -> Sequence[Buffer] | None:
        """The chunk to send next, until it is `sent`; None if there is none, or the window is full."""
        return self._unsent[0].chunks[self._unsent[0].sent] if self.next_size else None

    def sent(self) -> None:
        """Count the next chunk as sent."""
        self.in_flight_bytes += self.next_size
        queued = self._unsent[0]
        queued.sent += 1
        if queued.sent == len(queued.chunks):
            self._unsent.popleft()

    def acknowledged(self, transfer: int, chunks: int = 1) -> None:
        """Note that the peer has `chunks` further ones; raise RemoteProtocolError if they were never sent."""
        queued = self._transfers.get(transfer)
        outstanding = queued.sent - queued.acknowledged if queued is not None else 0
        if queued is None or not 1 <= chunks <= outstanding:
            raise RemoteProtocolError(
                _SOME_PEER, f"owing {outstanding}", f"an acknowledgement of {chunks} chunks of transfer {transfer}"
            )
        size = sum(queued.sizes[queued.acknowledged : queued.acknowledged + chunks])
        queued.acknowledged += chunks
        self.in_flight_bytes -= size
        self.held_bytes -= size
        if queued.acknowledged == len(queued.chunks):
            del self._transfers[transfer]

    def drop_droppable(self) -> list[int]:
        """Drop the droppable transfers of which nothing was sent yet; return them, in the order they were pushed."""
        dropped = [queued for queued in self._unsent if queued.droppable and not queued.sent]
        for queued in dropped:
            self._unsent.remove(queued)
            del self._transfers[queued.transfer]
            self.held_bytes -= sum(queued.sizes)
        return [queued.transfer for queued in dropped]

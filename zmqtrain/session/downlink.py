"""The hub's bytes to and from its peers: outboxes, windows, grants and the shares of its port.

Two classes, used by the broker's loop alone: `Downlink` sends, `UploadFlowControl` grants what peers may send and puts
their transfers together.  Neither waits: bytes without room in a window, a socket or a share stay in an outbox.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from zmqtrain.averaging.aggregator import Released
from zmqtrain.core.errors import ChannelClosed, ChannelFull, LocalProtocolError, PeerLost, RemoteProtocolError
from zmqtrain.core.interfaces import HubChannel
from zmqtrain.core.types import Buffer, Lane, PeerId, Version
from zmqtrain.protocol.effects import Reduce
from zmqtrain.protocol.fencing import Stamp
from zmqtrain.protocol.framing import Assembler, ProtocolVersionError, encode_message, encode_refusal, split
from zmqtrain.protocol.groups import LATE_SECONDS
from zmqtrain.protocol.limits import PROBE_FRAME_BYTES
from zmqtrain.protocol.messages import (
    Aggregate,
    Announcement,
    Chunk,
    Credit,
    Initialise,
    Message,
    Probed,
    Publish,
    Push,
    Replica,
    Snapshot,
    Values,
    replace_fields,
)
from zmqtrain.protocol.pipelines import Share
from zmqtrain.session.environment import clock
from zmqtrain.session.unequal import refuse_version
from zmqtrain.transport.pacing import Credits, Outbox, RateMeter, Reservation, TokenBucket, Use


class Timer:
    """One-shot timer that can be rescheduled; used by one loop."""

    _timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, what: Callable[[], None]) -> None:
        """Call this in so many seconds, in place of what was set before; inf: not at all."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, what) if seconds < inf else None


GRANT_WINDOW_BYTES = 6 << 20
"""Bytes in flight to the hub's port in all: one full chunk and a half, or several small ones, so that the port is not
idle while a grant travels (with 1 MiB it was idle a quarter of the time), and a peer that sends almost sends alone."""
GRANT_SECONDS, SLOWEST_BYTES_PER_SECOND = 2.0, 1e6
"""A node that was granted chunks and sends none for so long, and the time they take at that rate, is sent away, because
other nodes need its part of the window."""
MOST_PATIENCE = 64.0
"""Each time that a node was sent away so it has twice the time, up to so many times: its link may be slower than that,
and it could never send a chunk. At 16 kB/s and more each chunk comes. It has one at a time then, beside the window."""
MOST_SLOW = 512
"""So many slow nodes are remembered, the latest."""

GIGABIT_BYTES_PER_SECOND = 125e6


@dataclass
class _UploadLine:
    """One peer's transfers. arrived_at: of its last chunk, or grant; rate: measured, of its link."""

    assembler: Assembler
    arrived_at: float = 0.0
    rate: RateMeter = field(default_factory=RateMeter)


class UploadFlowControl:
    """Grants peers the chunks of the transfers that they have announced, and puts these together.

    The bytes in flight from all peers keep to one window, and to the shares of the port and of each node's. Nothing is
    held that was not announced.  downlink: sends the credits; a peer may be lost by that.
    """

    def __init__(self, downlink: Downlink) -> None:
        self._downlink = downlink
        self._credits = Credits(GRANT_WINDOW_BYTES)
        self._slowest = SLOWEST_BYTES_PER_SECOND
        self._lines: dict[PeerId, _UploadLine] = {}
        self._looked = 0.0  # for idle holders
        self._patience: dict[PeerId, float] = {}  # with those that have been idle
        self._again = Timer()

    # ------------------------------------------------------------------ shares

    def limit(self, rate: float | None) -> None:
        """Let all peers send no more than `rate` bytes per second in all; None: no limit."""
        self._credits.bucket.set_rate(rate)

    def scale(self, rate: float) -> None:
        """Take the hub's port for one of `rate` bytes per second, not of a gigabit: less is in flight, in proportion.

        For a simulated run whose payloads and links are smaller than those that they stand for.
        """
        part = min(1.0, rate / GIGABIT_BYTES_PER_SECOND)
        self._credits.window_bytes = max(1, int(part * GRANT_WINDOW_BYTES))
        self._slowest = part * SLOWEST_BYTES_PER_SECOND

    def limit_peer(self, peer: PeerId, rate: float | None) -> None:
        """Let one peer send no more than `rate` bytes per second, until `forget`; None: no limit."""
        self._credits.limit(peer, rate)

    def pay(self, size: int) -> None:
        """Count `size` bytes that arrived without a grant: heads."""
        self._credits.bucket.pay(size, clock.monotonic())

    def measured(self, peer: PeerId) -> float:
        """Return the measured rate of the peer's uploads, in bytes per second; 0: too few were received."""
        return self._lines[peer].rate.rate if peer in self._lines else 0.0

    # ------------------------------------------------------------------ transfers

    def has_room(self, peer: PeerId, size: int) -> bool:
        """Return whether a peer may have `size` bytes more in flight; a single transfer may have any size."""
        assembler = self._line(peer).assembler
        if not assembler.expected_bytes:
            assembler.limit_bytes = max(assembler.limit_bytes, size)
        return assembler.expected_bytes + size <= assembler.limit_bytes

    def expect(self, peer: PeerId, announcement: Publish | Snapshot | Initialise | Push) -> None:
        """Let a peer send what it has announced, chunk by chunk as the window of all peers has room; deltas first.

        Raises FramingError for impossible sizes, RemoteProtocolError for a transfer that has begun already.
        """
        self._line(peer).assembler.expect(announcement)
        priority = 0 if isinstance(announcement, Publish | Push) else 1
        self._credits.ask(peer, announcement.transfer, announcement.sizes, priority)
        self._grant()

    def has_chunk(self, peer: PeerId, chunk: Chunk) -> bool:
        """Return whether this is a duplicate of a chunk, of a transfer that is not whole yet."""
        return peer in self._lines and self._lines[peer].assembler.has(chunk)

    def take_chunk(self, peer: PeerId, chunk: Chunk, frame: Buffer) -> tuple[Announcement, list[Buffer]] | None:
        """Take a chunk; return its whole transfer, announcement and frames, once all of it is here.

        Raises RemoteProtocolError for a chunk that was not granted, FramingError for an impossible one.
        """
        line = self._lines.get(peer)
        if line is None or chunk.transfer not in line.assembler:
            return None  # of a transfer that was given up
        self._credits.arrived(peer, chunk.transfer)
        now, before = clock.monotonic(), line.arrived_at
        line.arrived_at = now
        if peer in self._patience and now - before <= GRANT_SECONDS + len(frame) / self._slowest:
            self._be_patient(peer, self._patience[peer] / 2)  # it only was slow for a while
        line.rate.over(len(frame), now, idle=peer not in self._credits.holders)
        whole = line.assembler.add(chunk, frame)
        self._grant()
        return whole

    def idle_holders(self) -> Iterator[PeerId]:
        """Give the peers that were granted chunks and have sent none for longer than these take on a slow link; a peer
        that was given before has longer.

        Call it regularly: time in which it was not called does not count, because chunks of it may wait to be received.
        """
        now = clock.monotonic()
        late, self._looked = max(0.0, now - self._looked - LATE_SECONDS), now
        for peer, granted in self._credits.holders.items():
            if (line := self._lines.get(peer)) is None:
                continue
            line.arrived_at = min(now, line.arrived_at + late)
            patience = self._patience.get(peer, 1.0)
            if now - line.arrived_at > GRANT_SECONDS + patience * granted / self._slowest:
                self._be_patient(peer, 2 * patience)
                yield peer

    def _be_patient(self, peer: PeerId, patience: float) -> None:
        self._patience.pop(peer, None)
        if patience <= 1:
            return self._credits.bring_back(peer)
        self._patience[peer] = min(patience, MOST_PATIENCE)
        self._credits.set_aside(peer)
        if len(self._patience) > MOST_SLOW:
            earliest = next(iter(self._patience))
            del self._patience[earliest]
            self._credits.bring_back(earliest)

    def forget(self, peer: PeerId) -> None:
        """Drop all transfers of a peer, and give the others its part of the window."""
        self._credits.forget(peer)
        self._lines.pop(peer, None)
        self._grant()

    def _grant(self) -> None:
        holding, now = set(self._credits.holders), clock.monotonic()
        for peer, transfer, chunks in self._credits.grants(now):
            if peer not in self._lines:  # lost while its credit was sent
                continue
            if peer not in holding:
                self._lines[peer].arrived_at = now
            self._lines[peer].rate.begun(now)
            self._downlink.send(peer, Credit(transfer, chunks))
        self._again.set(self._credits.retry_seconds, self._grant)

    def _line(self, peer: PeerId) -> _UploadLine:
        if peer not in self._lines:
            self._lines[peer] = _UploadLine(Assembler(self._downlink.most_bytes()))
        return self._lines[peer]


OUTBOX_WINDOW_BYTES = 4 << 20
"""Bytes in flight to one peer, not acknowledged: enough to cover a receiver's stalls."""
OUTBOX_BYTES = 64 << 20
"""Bytes that may queue for one peer, at least; beyond, it is sent a snapshot instead."""
HEADS_BYTES = 1 << 20
"""More than the heads of one transfer."""
PADDING = memoryview(bytes(PROBE_FRAME_BYTES))
"""The payload of answers to probes; never written."""


@dataclass
class _DownlinkPeer:
    """One peer's outbox. bucket: of its own port, downwards; rate: measured; full: a chunk was put back, because its
    lane had no room."""

    outbox: Outbox
    bucket: TokenBucket
    following: bool = False
    full: bool = False
    rate: RateMeter = field(default_factory=RateMeter)


class DownlinkOwner(Protocol):
    """What a downlink asks, and tells when a peer cannot be sent to; the peer may have left already."""

    def share_of(self, peer: PeerId) -> Share | None:
        """Return what a PC of a pipeline holds of the model; None for any other peer."""

    def queue_bytes(self) -> int:
        """Return how many bytes may have to queue for one peer; asked at its first transfer."""

    def lost(self, peer: PeerId, why: str) -> None:
        """A peer cannot be sent to."""

    def unreachable(self, peer: PeerId) -> None:
        """A peer's connection is gone; messages of it may still wait to be received."""

    def stamp(self, peer: PeerId, counted: bool) -> Stamp:
        """Return the stamp of the next message to a peer. counted: it goes on the control lane."""


class Downlink:
    """The bytes to the peers of `channel`; used by the broker's loop alone. uploads: grants the bytes from them.

    bytes_sent: payload and heads.  dropped: aggregates that were not sent because a snapshot replaces them.
    """

    def __init__(self, channel: HubChannel, owner: DownlinkOwner) -> None:
        self._channel, self._owner = channel, owner
        self.bytes_sent = self.dropped = 0
        self.uploads = UploadFlowControl(self)
        self._sending: Reservation[PeerId] = Reservation()
        self._lines: dict[PeerId, _DownlinkPeer] = {}
        self._limits: dict[PeerId, float | None] = {}
        self._port = RateMeter()
        self._again = Timer()
        self._transfer = 0

    # ------------------------------------------------------------------ shares

    def limit(self, rate: float | None) -> None:
        """Limit the hub's port to `rate` bytes per second each way; None: no limit."""
        self._sending.bucket.set_rate(rate)
        self.uploads.limit(rate)

    def limit_peer(self, peer: PeerId, rate: float | None) -> None:
        """Limit traffic with this peer to `rate` bytes per second each way, until `forget`; None: no limit."""
        self._limits[peer] = rate
        self.uploads.limit_peer(peer, rate)
        if peer in self._lines:
            self._lines[peer].bucket.set_rate(rate)

    @property
    def port_measured(self) -> float:
        """The measured rate of the hub's own port to all peers, in bytes per second; 0: not known yet."""
        return self._port.rate

    def measured(self, peer: PeerId) -> float:
        """Return the measured rate of the peer's link, the faster direction, in bytes per second; 0: not known yet."""
        line = self._lines.get(peer)
        return max(self.uploads.measured(peer), 0.0 if line is None else line.rate.rate)

    # ------------------------------------------------------------------ toward the peers

    def send(self, peer: PeerId, message: Message, stamp: Stamp | None = None) -> None:
        """Send a control message. stamp: None for the next of the peer's connection."""
        self._send_head(peer, encode_message(message, self._owner.stamp(peer, True) if stamp is None else stamp))

    def refuse_version(self, peer: PeerId, error: ProtocolVersionError) -> None:
        """Tell a peer of another protocol version which of the two is the older, in the peer's version."""
        self._send_head(peer, encode_refusal(refuse_version(error), error.theirs))

    def _send_head(self, peer: PeerId, head: bytes) -> None:
        try:
            self._channel.send(peer, Lane.CONTROL, [head])
            self._count(len(head))
        except PeerLost:
            self._owner.unreachable(peer)
        except ChannelFull:
            self._owner.lost(peer, "it does not read what it is sent")
        except LocalProtocolError as error:  # the answer that it asked for fits in no message
            self._owner.lost(peer, str(error))
        except ChannelClosed:
            pass

    def answer(self, peer: PeerId, probed: Probed, size: int) -> None:
        """Answer a probe with `size` bytes of padding, on BULK; without any, on CONTROL. Without room, do not answer,
        because a probe measures a link with room."""
        if not size:
            return self.send(peer, probed)
        message: list[Buffer] = [encode_message(probed, self._owner.stamp(peer, False)), PADDING[:size]]
        with contextlib.suppress(PeerLost, ChannelFull, ChannelClosed):
            self._channel.send(peer, Lane.BULK, message)
            self._count(sum(len(frame) for frame in message))

    def bulk_head(self, peer: PeerId, message: Message) -> bytes:
        """Return the head of a message to a peer on BULK, stamped with its connection."""
        return encode_message(message, self._owner.stamp(peer, False))

    def forward(self, peer: PeerId, frames: Sequence[Buffer]) -> bool:
        """Send a message on BULK outside the windows of transfers; False if there is no room for it now.

        A message to a peer that is gone is dropped, and the owner is told, so that the gap is known.
        """
        try:
            self._channel.send(peer, Lane.BULK, frames)
        except ChannelFull:
            return False
        except PeerLost:
            self._owner.unreachable(peer)
            return True
        except ChannelClosed:
            return True
        self._count(sum(len(frame) for frame in frames))
        return True

    def _count(self, size: int) -> None:
        self.bytes_sent += size
        self._sending.pay(size, clock.monotonic())

    def send_snapshot(
        self,
        peer: PeerId,
        version: Version,
        frames: Sequence[Buffer],
        moments: Sequence[Buffer] = (),
        landed: tuple[tuple[int, int], ...] = (),
        reset: bool = False,
        rewound: bool = False,
        digest: str = "",
        first: int = 0,
    ) -> bool:
        """Send a snapshot as the peer's window lets it through; False if too much is queued for the peer already.

        moments: frames of optimizer state, sent after those of the parameters.  The others: as in `Snapshot`.
        """
        frames = [*frames, *moments]
        sizes, count = tuple(len(frame) for frame in frames), len(moments)
        snapshot = Snapshot(self._next_transfer(), version, sizes, landed, count, reset, rewound, digest, first)
        return self._queue(peer, snapshot, frames, first)

    def holds_snapshot(self, peer: PeerId) -> bool:
        """Return whether a peer has not acknowledged all of a snapshot that it was sent."""
        return peer in self._lines and self._lines[peer].outbox.holds_undroppable

    def has_room_to(self, peer: PeerId, size: int) -> bool:
        """Return whether `size` bytes may queue for a peer now; into an empty outbox any number may."""
        outbox = self._line(peer).outbox
        if outbox.idle:
            outbox.limit_bytes = max(outbox.limit_bytes, 2 * size)
        return outbox.held_bytes + size + HEADS_BYTES <= outbox.limit_bytes

    def send_values(self, peer: PeerId, request: int, version: Version, frames: Sequence[Buffer]) -> None:
        """Send the values that a client has requested; the caller has checked that there is room."""
        values = Values(self._next_transfer(), request, version, tuple(len(frame) for frame in frames))
        if not self._queue(peer, values, frames):
            raise LocalProtocolError(f"{peer} was sent values without room for them")

    def send_replica(self, peer: PeerId, version: Version, frames: Sequence[Buffer], state: int) -> bool:
        """Send the standby a copy of the hub, and releases from then on; False without room. state: as in `Replica`."""
        replica = Replica(self._next_transfer(), version, tuple(len(frame) for frame in frames), state)
        outbox = self._line(peer).outbox
        outbox.limit_bytes = max(outbox.limit_bytes, 2 * sum(replica.sizes) + HEADS_BYTES)
        outbox.drop_droppable()
        queued = self._queue(peer, replica, frames)
        if queued:
            self.follow(peer, True)
        return queued

    def _queue(
        self, peer: PeerId, announcement: Snapshot | Replica | Values, frames: Sequence[Buffer], first: int = 0
    ) -> bool:
        """Queue a transfer, its chunks from `first` on, and send what goes now; False if there is no room for it."""
        head, *chunks = _messages(announcement, frames, self._owner.stamp(peer, False))
        if not self._line(peer).outbox.push(announcement.transfer, [head, *chunks[first:]], droppable=False):
            return False
        self._pump(peer)
        return True

    def send_aggregate(
        self, released: Released, reduce: Reduce, to: Callable[[PeerId], bool], whole: bool = False
    ) -> None:
        """Send the same buffers to every peer that follows; a peer with a full outbox sees a gap in the versions.

        to: selects among these.  whole: list all publishes in it, not the receiver's own alone; only the standby may
        know the ids of other nodes.
        """
        transfer = self._next_transfer()
        of_all = _announced(released, reduce, transfer, None)
        for peer, line in list(self._lines.items()):
            if not (line.following and to(peer)):
                continue
            share = None if whole else self._owner.share_of(peer)
            announcement, frames = of_all if share is None else _announced(released, reduce, transfer, share)
            own = tuple(one for one in announcement.landed if whole or one[0] == peer)
            messages = _messages(replace_fields(announcement, landed=own), frames, self._owner.stamp(peer, False))
            if not line.outbox.push(announcement.transfer, messages, droppable=True):
                self.dropped += 1 + len(line.outbox.drop_droppable())  # the gap makes the node fetch a snapshot
            self._pump(peer)

    def drop_aggregates(self, peer: PeerId) -> None:
        """Drop the aggregates of which nothing was sent to this peer, because a snapshot that holds them is next."""
        self.dropped += len(self._line(peer).outbox.drop_droppable())

    def follow(self, peer: PeerId, following: bool) -> None:
        """Send aggregates to this peer from now on, or none; do nothing if it is lost."""
        if peer in self._lines:
            self._lines[peer].following = following

    def follows(self, peer: PeerId) -> bool:
        return peer in self._lines and self._lines[peer].following

    def acknowledged(self, peer: PeerId, credit: Credit) -> None:
        """Record that a peer has received chunks, and send what its window then lets through."""
        if (line := self._lines.get(peer)) is None:
            return
        before = line.outbox.in_flight_bytes
        with contextlib.suppress(RemoteProtocolError):  # of a transfer to its former connection
            line.outbox.acknowledged(credit.transfer, credit.chunks)
        left, now = line.outbox.in_flight_bytes, clock.monotonic()
        line.rate.over(before - left, now, idle=not left)
        all_idle = not any(one.outbox.in_flight_bytes for one in self._lines.values())
        self._port.over(before - left, now, idle=all_idle)
        self._pump(peer)

    def _next_transfer(self) -> int:
        self._transfer += 1
        return self._transfer

    def _pump(self, peer: PeerId) -> None:
        self._line_up(peer)
        self._send_on()

    def _line_up(self, peer: PeerId) -> None:
        """Queue the peer for its turn, if its window lets a chunk through.

        Announcements are sent at once, so that the peer does not ask again for a transfer in flight.
        """
        while (line := self._lines.get(peer)) is not None and line.outbox.next_is_head:
            if not self._send_chunk(peer, line):
                return
        if line is not None and line.outbox.next_size:
            self._sending.wait(peer, Use.DELTA if line.outbox.next_is_droppable else Use.SNAPSHOT)
        else:
            self._sending.leave(peer)

    def _claim(self, peer: PeerId) -> tuple[int, float]:
        line = self._lines[peer]
        return line.outbox.next_size, line.bucket.wait_seconds(line.outbox.next_size, clock.monotonic())

    def _send_on(self) -> None:
        """Send to the peers whose turn it is, while the shares allow it; again when they will."""
        while True:
            now = clock.monotonic()
            peer, seconds = self._sending.turn(self._claim, now)
            if peer is None:
                return self._again.set(seconds, self._send_on)
            if self._send_chunk(peer, self._lines[peer]):
                self._line_up(peer)

    def _send_chunk(self, peer: PeerId, line: _DownlinkPeer) -> bool:
        """Send the peer's next chunk. Return False if it cannot be sent; the peer then waits for no turn."""
        chunk, now = line.outbox.next_chunk, clock.monotonic()
        assert chunk is not None, "only a peer with a chunk waits for a turn"
        try:
            self._channel.send(peer, Lane.BULK, chunk)
        except (ChannelFull, PeerLost, ChannelClosed) as error:
            self._sending.leave(peer)  # until it acknowledges something, or `look_again`
            line.full |= isinstance(error, ChannelFull)
            if isinstance(error, PeerLost):
                self._owner.unreachable(peer)
            return False
        line.outbox.sent()
        line.full = False
        size = sum(len(frame) for frame in chunk)
        self.bytes_sent += size
        self._sending.sent(peer, size, now)
        line.bucket.pay(size, now)
        line.rate.begun(now)
        self._port.begun(now)
        return True

    def look_again(self) -> None:
        """Try peers again whose lane had no room, or was not connected yet; nothing else may report that it has."""
        for peer, line in list(self._lines.items()):
            if line.full:
                line.full = False
                self._pump(peer)

    def forget(self, peer: PeerId) -> None:
        """Drop all transfers from and to a peer, and give the others its part of the window."""
        self._sending.leave(peer)
        self._lines.pop(peer, None)
        self._limits.pop(peer, None)
        self.uploads.forget(peer)

    def _line(self, peer: PeerId) -> _DownlinkPeer:
        if peer not in self._lines:
            outbox = Outbox(OUTBOX_WINDOW_BYTES, self.most_bytes())
            self._lines[peer] = _DownlinkPeer(outbox, TokenBucket(self._limits.get(peer)))
        return self._lines[peer]

    def most_bytes(self) -> int:
        """Return how many bytes may be in flight to or from one peer, and wait."""
        return max(OUTBOX_BYTES, self._owner.queue_bytes())


def _announced(
    released: Released, reduce: Reduce, transfer: int, share: Share | None
) -> tuple[Aggregate, list[Buffer]]:
    """Return what announces a release, and its frames. share: of a PC of a pipeline, which is sent the parts that it
    holds, counted from the first of them."""
    announcement = released.announce(transfer, reduce)
    if share is None:
        return announcement, [frame for frames in released.frames for frame in frames]
    held = [
        (fragment - share.first, frames)
        for fragment, frames in zip(released.fragments, released.frames, strict=True)
        if share.first <= fragment < share.end
    ]
    frames = [frame for _, frames in held for frame in frames]
    announcement = replace_fields(
        announcement,
        fragments=tuple(fragment for fragment, _ in held),
        frames=tuple(len(frames) for _, frames in held),
        sizes=tuple(len(frame) for frame in frames),
    )
    return announcement, frames


def _messages(
    announcement: Aggregate | Snapshot | Replica | Values, frames: Sequence[Buffer], stamp: Stamp
) -> list[Sequence[Buffer]]:
    return [[encode_message(announcement, stamp)], *split(announcement.transfer, frames, stamp)]

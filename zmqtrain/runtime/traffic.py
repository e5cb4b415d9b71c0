"""Move bytes between the hub and its peers: what is granted, what has come in part, what waits for whom.

Rule 1: knows transfers and windows; what is sent, and to whom, is for others to decide.  Rule 2: nobody waits here:
what a window or a socket has no room for stays in an outbox.  Rule 3: a peer that cannot be sent to is told of through
`lost`, and stays until `forget`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zmqtrain.errors import ChannelClosed, ChannelFull, PeerLost, RemoteProtocolError
from zmqtrain.protocol.framing import Assembler, encode_message, split
from zmqtrain.protocol.messages import (
    Aggregate,
    Announcement,
    Chunk,
    Credit,
    Message,
    Probed,
    Publish,
    Reduce,
    Snapshot,
)
from zmqtrain.protocol.probes import PROBE_FRAME_BYTES
from zmqtrain.runtime.aggregator import Released
from zmqtrain.transport.pacing import Credits, Outbox
from zmqtrain.types import Buffer, HubChannel, Lane, PeerId, Version

__all__ = ["GRANT_SECONDS", "Traffic"]

GRANT_WINDOW_BYTES = 4 << 20
"""What is on its way toward the hub's port in all: one full chunk, or several small ones, so that the port is not idle
while a grant travels (with 1 MiB in all it was, a quarter of the time), and whoever sends, sends nearly alone."""
GRANT_SECONDS, SLOWEST_BYTES_PER_SECOND = 2.0, 1e6
"""A node that is granted chunks and sends none for so long, and the time they take at that rate, is sent away: what it
holds of the window is others'."""
OUTBOX_WINDOW_BYTES = 4 << 20
"""What is on its way toward one peer and not yet taken: it covers a receiver's stalls."""
OUTBOX_BYTES = 64 << 20
"""What may queue for one peer, at least; with more it is sent a snapshot instead."""
PADDING = memoryview(bytes(PROBE_FRAME_BYTES))
"""What probes are answered with: compressed by nobody on the way, and never written."""


@dataclass
class _Line:
    """What is held for one peer."""

    outbox: Outbox
    assembler: Assembler
    following: bool = False
    arrived_at: float = 0.0


class Traffic:
    """The bytes that go and come on `channel`; used by the broker's loop alone.

    queue_bytes: says how much may be needed to queue for one peer, asked when its first transfer comes or goes.
    lost: told of a peer that cannot be sent to, and why; it may have left already.
    bytes_sent: payload and heads.  dropped: aggregates that did not go, as a snapshot went instead or will.
    """

    def __init__(
        self, channel: HubChannel, queue_bytes: Callable[[], int], lost: Callable[[PeerId, str], None]
    ) -> None:
        self._channel, self._queue_bytes, self._lost = channel, queue_bytes, lost
        self.bytes_sent = self.dropped = 0
        self._credits = Credits(GRANT_WINDOW_BYTES)
        self._lines: dict[PeerId, _Line] = {}
        self._transfer = 0

    # ------------------------------------------------------------------ toward the peers

    def send(self, peer: PeerId, message: Message) -> None:
        """Send a control message."""
        head = encode_message(message)
        try:
            self._channel.send(peer, Lane.CONTROL, [head])
            self.bytes_sent += len(head)
        except (PeerLost, ChannelFull) as error:
            why = "its connection is gone" if isinstance(error, PeerLost) else "it does not read what it is sent"
            self._lost(peer, why)
        except ChannelClosed:
            pass

    def answer(self, peer: PeerId, probed: Probed, size: int) -> None:
        """Answer a probe with `size` bytes of padding, on BULK; without any, on CONTROL.

        One that finds no room is not answered: what is measured is a link with room.
        """
        if not size:
            return self.send(peer, probed)
        message: list[Buffer] = [encode_message(probed), PADDING[:size]]
        with contextlib.suppress(PeerLost, ChannelFull, ChannelClosed):
            self._channel.send(peer, Lane.BULK, message)
            self.bytes_sent += sum(len(frame) for frame in message)

    def send_snapshot(
        self,
        peer: PeerId,
        version: Version,
        frames: Sequence[Buffer],
        moments: Sequence[Buffer] = (),
        landed: tuple[tuple[int, int], ...] = (),
        reset: bool = False,
    ) -> bool:
        """Send a snapshot as the peer's window lets it through; False if more than may waits for it already.

        moments: frames of optimizer state that go behind those of the parameters.  The rest: as in `Snapshot`.
        """
        transfer, frames = self._next_transfer(), [*frames, *moments]
        announcement = Snapshot(transfer, version, tuple(len(frame) for frame in frames), landed, len(moments), reset)
        if not self._line(peer).outbox.push(transfer, _messages(announcement, frames), droppable=False):
            return False
        self._pump(peer)
        return True

    def send_aggregate(self, released: Released, reduce: Reduce) -> None:
        """Send the same buffers to every peer that follows; who lets too much queue sees a gap in the versions."""
        frames = [frame for frames in released.frames for frame in frames]
        announcement = Aggregate(
            transfer=self._next_transfer(),
            version=released.version,
            codec=released.codec,
            fragments=released.fragments,
            frames=tuple(len(frames) for frames in released.frames),
            sizes=tuple(len(frame) for frame in frames),
            landed=reduce.landed,
            live=reduce.live,
        )
        messages = _messages(announcement, frames)
        for peer, line in list(self._lines.items()):
            if not line.following:
                continue
            if not line.outbox.push(announcement.transfer, messages, droppable=True):
                self.dropped += len(line.outbox.drop_droppable())  # the gap makes the node fetch a snapshot
            self._pump(peer)

    def drop_aggregates(self, peer: PeerId) -> None:
        """Drop the aggregates of which nothing was sent to this peer: a snapshot that holds them goes next."""
        self.dropped += len(self._line(peer).outbox.drop_droppable())

    def follow(self, peer: PeerId, following: bool) -> None:
        """Send aggregates to this peer from now on, or none; one that is lost is left alone."""
        if peer in self._lines:
            self._lines[peer].following = following

    def follows(self, peer: PeerId) -> bool:
        """Return whether aggregates are sent to this peer."""
        return peer in self._lines and self._lines[peer].following

    def acknowledged(self, peer: PeerId, credit: Credit) -> None:
        """Take note that a peer has chunks of what it was sent, and send what its window lets through then."""
        if peer in self._lines:
            with contextlib.suppress(RemoteProtocolError):  # of a transfer to its former connection
                self._lines[peer].outbox.acknowledged(credit.transfer, credit.chunks)
            self._pump(peer)

    def _next_transfer(self) -> int:
        self._transfer += 1
        return self._transfer

    def _pump(self, peer: PeerId) -> None:
        """Send what the peer's window lets through."""
        line = self._lines.get(peer)
        while line is not None and (chunk := line.outbox.next_chunk()) is not None:
            try:
                self._channel.send(peer, Lane.BULK, chunk)
                self.bytes_sent += sum(len(frame) for frame in chunk)
            except ChannelFull:
                line.outbox.put_back()
                return
            except PeerLost:
                self._lost(peer, "its connection is gone")
                return
            except ChannelClosed:
                return

    # ------------------------------------------------------------------ toward the hub

    def expect(self, peer: PeerId, announcement: Publish | Snapshot) -> None:
        """Let a peer send what it has announced, chunk by chunk as the window of all peers has room; publishes first.

        Raises FramingError for sizes that cannot be, RemoteProtocolError for a transfer that is under way.
        """
        self._line(peer).assembler.expect(announcement)
        priority = 0 if isinstance(announcement, Publish) else 1
        self._credits.ask(peer, announcement.transfer, announcement.sizes, priority)
        self._grant()

    def take_chunk(self, peer: PeerId, chunk: Chunk, frame: Buffer) -> tuple[Announcement, list[Buffer]] | None:
        """Take a chunk; return its whole transfer, announcement and frames, once all of it is here.

        Raises RemoteProtocolError for a chunk that was not granted, FramingError for one that cannot be.
        """
        line = self._lines.get(peer)
        if line is None or chunk.transfer not in line.assembler:
            return None  # of a transfer that was given up
        self._credits.arrived(peer, chunk.transfer)
        line.arrived_at = time.monotonic()
        whole = line.assembler.add(chunk, frame)
        self._grant()
        return whole

    def idle_holders(self) -> Iterator[PeerId]:
        """Give the peers that were granted chunks and have sent none for longer than they take on a slow link."""
        now = time.monotonic()
        for peer, granted in self._credits.holders.items():
            patience = GRANT_SECONDS + granted / SLOWEST_BYTES_PER_SECOND
            if peer in self._lines and now - self._lines[peer].arrived_at > patience:
                yield peer

    def forget(self, peer: PeerId) -> None:
        """Give up all that is on its way from or to a peer, and let the others have its part of the window."""
        self._credits.forget(peer)
        self._lines.pop(peer, None)
        self._grant()

    def _grant(self) -> None:
        holding = self._credits.holders
        for peer, transfer, chunks in self._credits.grants():
            if peer not in self._lines:  # lost while its credit was sent
                continue
            if peer not in holding:
                self._lines[peer].arrived_at = time.monotonic()
            self.send(peer, Credit(transfer, chunks))

    def _line(self, peer: PeerId) -> _Line:
        if peer not in self._lines:
            limit = max(OUTBOX_BYTES, self._queue_bytes())
            self._lines[peer] = _Line(Outbox(OUTBOX_WINDOW_BYTES, limit), Assembler(limit))
        return self._lines[peer]


def _messages(announcement: Aggregate | Snapshot, frames: Sequence[Buffer]) -> list[Sequence[Buffer]]:
    return [[encode_message(announcement)], *split(announcement.transfer, frames)]

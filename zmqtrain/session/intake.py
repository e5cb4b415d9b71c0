"""Let peers send what they have announced: what each is granted, and what of it has come in part.

Rule 1: what is on its way toward the hub's port, of all peers, keeps to one window, and to the shares of the port and
of each node's; what only a share keeps back is granted when its time has come.  Rule 2: nothing is held of what was not
announced, and of what was not more than was said.  Rule 3: who is granted chunks and sends none holds up the others: it
is named, and it is for others to send it away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from zmqtrain.core.types import Buffer, PeerId
from zmqtrain.protocol.framing import Assembler
from zmqtrain.protocol.groups import LATE_SECONDS
from zmqtrain.protocol.keys import Initialise, Push
from zmqtrain.protocol.messages import Announcement, Chunk, Credit, Publish, Snapshot
from zmqtrain.session.alarm import Alarm
from zmqtrain.transport.pacing import Credits
from zmqtrain.transport.reservation import RateMeter

GRANT_WINDOW_BYTES = 6 << 20
"""What is on its way toward the hub's port in all: one full chunk and a half, or several small ones, so that the port
is not idle while a grant travels (with 1 MiB in all it was, a quarter of the time), and who sends, sends almost alone.
"""
GRANT_SECONDS, SLOWEST_BYTES_PER_SECOND = 2.0, 1e6
"""A node that is granted chunks and sends none for so long, and the time they take at that rate, is sent away: what it
holds of the window is others'."""


@dataclass
class _Line:
    """What is held of one peer's transfers. arrived_at: of its last chunk, or grant; rate: how fast its link was
    seen."""

    assembler: Assembler
    arrived_at: float = 0.0
    rate: RateMeter = field(default_factory=RateMeter)


class Intake:
    """What is on its way from the peers of one hub; used by the broker's loop alone.

    most_bytes: says how much a peer may have on its way, asked when its first transfer is expected.
    send: gives a peer its credit; it may be lost by that.
    """

    def __init__(self, most_bytes: Callable[[], int], send: Callable[[PeerId, Credit], None]) -> None:
        self._most_bytes, self._send = most_bytes, send
        self._credits = Credits(GRANT_WINDOW_BYTES)
        self._lines: dict[PeerId, _Line] = {}
        self._looked = 0.0  # for idle holders
        self._again = Alarm(self._grant)

    # ------------------------------------------------------------------ shares

    def limit(self, rate: float | None) -> None:
        """Let all peers send no more than `rate` bytes per second in all; None: as much as comes."""
        self._credits.bucket.set_rate(rate)

    def limit_peer(self, peer: PeerId, rate: float | None) -> None:
        """Let one peer send no more than `rate` bytes per second, until `forget`; None: as much as comes."""
        self._credits.limit(peer, rate)

    def pay(self, size: int) -> None:
        """Take note that `size` bytes have come that nobody was granted: heads."""
        self._credits.bucket.pay(size, time.monotonic())

    def measured(self, peer: PeerId) -> float:
        """Return how fast the peer's link was seen this way, in bytes per second; 0: not enough has come yet."""
        return self._lines[peer].rate.rate if peer in self._lines else 0.0

    # ------------------------------------------------------------------ transfers

    def has_room(self, peer: PeerId, size: int) -> bool:
        """Return whether a peer may have `size` bytes more on its way; however many they are, they may alone."""
        assembler = self._line(peer).assembler
        if not assembler.expected_bytes:
            assembler.limit_bytes = max(assembler.limit_bytes, size)
        return assembler.expected_bytes + size <= assembler.limit_bytes

    def expect(self, peer: PeerId, announcement: Publish | Snapshot | Initialise | Push) -> None:
        """Let a peer send what it has announced, chunk by chunk as the window of all peers has room; deltas first.

        Raises FramingError for sizes that cannot be, RemoteProtocolError for a transfer that is under way.
        """
        self._line(peer).assembler.expect(announcement)
        priority = 0 if isinstance(announcement, Publish | Push) else 1
        self._credits.ask(peer, announcement.transfer, announcement.sizes, priority)
        self._grant()

    def has_chunk(self, peer: PeerId, chunk: Chunk) -> bool:
        """Return whether this chunk has come before, and its transfer is not whole yet."""
        return peer in self._lines and self._lines[peer].assembler.has(chunk)

    def take_chunk(self, peer: PeerId, chunk: Chunk, frame: Buffer) -> tuple[Announcement, list[Buffer]] | None:
        """Take a chunk; return its whole transfer, announcement and frames, once all of it is here.

        Raises RemoteProtocolError for a chunk that was not granted, FramingError for one that cannot be.
        """
        line = self._lines.get(peer)
        if line is None or chunk.transfer not in line.assembler:
            return None  # of a transfer that was given up
        self._credits.arrived(peer, chunk.transfer)
        now = line.arrived_at = time.monotonic()
        line.rate.over(len(frame), now, idle=peer not in self._credits.holders)
        whole = line.assembler.add(chunk, frame)
        self._grant()
        return whole

    def idle_holders(self) -> Iterator[PeerId]:
        """Give the peers that were granted chunks and have sent none for longer than they take on a slow link.

        Asked all the time: that in which nobody was here to ask does not count, as what came then waits to be heard.
        """
        now = time.monotonic()
        late, self._looked = max(0.0, now - self._looked - LATE_SECONDS), now
        for peer, granted in self._credits.holders.items():
            if (line := self._lines.get(peer)) is None:
                continue
            line.arrived_at = min(now, line.arrived_at + late)
            if now - line.arrived_at > GRANT_SECONDS + granted / SLOWEST_BYTES_PER_SECOND:
                yield peer

    def forget(self, peer: PeerId) -> None:
        """Give up all that is on its way from a peer, and let the others have its part of the window."""
        self._credits.forget(peer)
        self._lines.pop(peer, None)
        self._grant()

    def _grant(self) -> None:
        holding, now = self._credits.holders, time.monotonic()
        for peer, transfer, chunks in self._credits.grants(now):
            if peer not in self._lines:  # lost while its credit was sent
                continue
            if peer not in holding:
                self._lines[peer].arrived_at = now
            self._lines[peer].rate.begun(now)
            self._send(peer, Credit(transfer, chunks))
        self._again.set(self._credits.retry_seconds)

    def _line(self, peer: PeerId) -> _Line:
        if peer not in self._lines:
            self._lines[peer] = _Line(Assembler(self._most_bytes()))
        return self._lines[peer]

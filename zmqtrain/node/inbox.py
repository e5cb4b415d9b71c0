"""Aggregates and snapshots between the wire and the training thread, in version order, compressed as long as possible.

The codec thread fills and decodes; the training thread takes updates, and the sequences of its own offers that will
not be applied. Every stage is bounded: a node that is too far behind takes one snapshot instead of many aggregates,
and loses nothing. So does a node that received a corrupted aggregate: it drops later ones until the snapshot arrives.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zmqtrain.averaging.coder import DeltaCoder
from zmqtrain.core.errors import CodecError
from zmqtrain.core.types import Buffer, Update, Version
from zmqtrain.protocol.effects import Deliver
from zmqtrain.protocol.messages import Aggregate, Snapshot
from zmqtrain.session.environment import clock
from zmqtrain.session.hub_session import MOST_SPOILED

DECODED, MOST_DECODED = 2, 16
"""How many updates wait decoded for the training thread, and how many if all of them are small."""
DECODED_BYTES, LARGE_UPDATE_BYTES = 1 << 28, 1 << 26
"""The bytes that several decoded updates hold at most. An update larger than the second waits alone: the next one is
decoded when it is taken."""
KEPT = 32
WITHDRAWN_KEPT = 1024


class Inbox:
    """The aggregates and snapshots that have arrived at one node and are not applied.

    `arrive`, `restart` and `decode` return the error of an aggregate that came with other bytes than were sent: then
    a snapshot must be fetched. They raise CodecError for a corrupted snapshot, and for the last of `MOST_SPOILED`
    corrupted aggregates in a row.
    """

    def __init__(self) -> None:
        self._spoiled = 0  # in a row
        self._lacks_snapshot = False
        self._arrived: deque[tuple[Deliver | None, Sequence[Buffer]]] = deque()  # None: begin again from the anchor
        self._version: Version = 0  # of the last update decoded
        self._landed_unseen: list[int] = []
        self._updates: deque[Update] = deque()  # between threads, as is the next
        self._withdrawn: deque[int] = deque()
        self.decode_seconds = 0.0
        """CPU so far."""

    @property
    def full(self) -> bool:
        """True when the training thread is so far behind that a snapshot is less than what waits."""
        return len(self._arrived) >= KEPT

    def __len__(self) -> int:
        return len(self._updates)

    def peek(self) -> Update | None:
        """Return the next decoded update without taking it, or None."""
        with contextlib.suppress(IndexError):
            return self._updates[0]
        return None

    def take(self) -> Update | None:
        """Take the next decoded update, or None; `decode` must run after it."""
        with contextlib.suppress(IndexError):
            return self._updates.popleft()
        return None

    def withdraw(self, sequence: int) -> None:
        """Tell the training thread that an offer will not be applied; from any thread."""
        if len(self._withdrawn) < WITHDRAWN_KEPT:
            self._withdrawn.append(sequence)

    def take_withdrawn(self) -> Iterator[int]:
        """Give the offers that will not be applied, each once (training thread)."""
        while self._withdrawn:
            yield self._withdrawn.popleft()

    def arrive(self, coder: DeltaCoder, deliver: Deliver, frames: Sequence[Buffer]) -> CodecError | None:
        """Take in one delivery and decode as far as there is room."""
        if self._lacks_snapshot and isinstance(deliver.announcement, Aggregate):
            self.skip(deliver)
            return None
        if isinstance(deliver.announcement, Snapshot):
            self._lacks_snapshot = False
            # it contains the aggregates that still wait, and the offers that landed in them
            self._landed_unseen += [sequence for one, _ in self._arrived if one for sequence in one.landed]
            before = [waiting for waiting in self._arrived if waiting[0] is None or waiting[0].reset]
            if before and not deliver.keep:
                # pending progress that an older snapshot drops is dropped all the same
                warm = all(one is not None and one.warm for one, _ in before) and (deliver.warm or not deliver.reset)
                deliver = replace(deliver, reset=True, warm=warm)
            self._arrived = deque(before[-1:] if deliver.keep else ())
        self._arrived.append((deliver, frames))
        return self.decode(coder)

    def restart(self, coder: DeltaCoder, version: Version) -> CodecError | None:
        """Drop what is pending, after what has arrived already: training goes on from the anchor as it is then.

        version: that was applied last.
        """
        self._version = max(self._version, version)
        self._arrived.append((None, ()))
        return self.decode(coder)

    def skip(self, deliver: Deliver) -> None:
        """Drop an aggregate that a snapshot will contain; the offers that landed in it are reported with that."""
        self._landed_unseen += deliver.landed

    def decode(self, coder: DeltaCoder) -> CodecError | None:
        """Decode what has arrived, as far as the training thread's queue has room."""
        spoiled = None
        while self._arrived and self._has_room():
            deliver, frames = self._arrived.popleft()
            began = clock.thread_time()
            if deliver is None:
                coder.restart()
                update = Update(self._version, {}, {}, (), reset=True)
            elif isinstance(deliver.announcement, Aggregate):
                try:
                    update = coder.decode_aggregate(deliver.announcement, deliver.landed, frames)
                except CodecError as error:
                    self._drop_spoiled(deliver, error)
                    spoiled = error
                    continue
                self._spoiled = 0
            else:
                assert isinstance(deliver.announcement, Snapshot), "only a standby is sent a copy of the hub"
                landed = (*self._landed_unseen, *deliver.landed)
                self._landed_unseen.clear()
                update = coder.decode_snapshot(deliver.announcement, landed, frames, deliver.reset, deliver.keep)
                update = replace(update, warm=deliver.warm)
            self.decode_seconds += clock.thread_time() - began
            self._version = update.version
            self._updates.append(update)
        return spoiled

    def _drop_spoiled(self, deliver: Deliver, error: CodecError) -> None:
        """Drop a corrupted aggregate, and those behind it, which cannot be applied without it."""
        self._spoiled += 1
        if self._spoiled >= MOST_SPOILED:
            raise CodecError(
                f"{self._spoiled} aggregates in a row are not what the broker sent ({error}): the network or this PC's "
                "memory corrupts them: check both"
            ) from error
        waiting, self._arrived = self._arrived, deque(one for one in self._arrived if not _is_aggregate(one[0]))
        for one in (deliver, *(one for one, _ in waiting if one is not None and _is_aggregate(one))):
            self.skip(one)
        self._lacks_snapshot = True

    def _has_room(self) -> bool:
        waiting = self.peek()
        if waiting is None:
            return True
        size = _decoded_bytes(waiting)
        most = min(max(DECODED, DECODED_BYTES // max(1, size)), MOST_DECODED)
        return len(self._updates) < most and size <= LARGE_UPDATE_BYTES


def _is_aggregate(deliver: Deliver | None) -> bool:
    return deliver is not None and isinstance(deliver.announcement, Aggregate)


def _decoded_bytes(update: Update) -> int:
    anchor = [part.values for part in update.anchor or ()]
    parts = (*update.aggregate.values(), *update.own.values(), anchor, update.optimizer_state or ())
    return sum(4 * math.prod(array.shape) for arrays in parts for array in arrays)

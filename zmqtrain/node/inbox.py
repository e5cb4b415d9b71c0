"""Bring aggregates and snapshots from the wire to the training thread: compressed as long as can be, in version order.

Rule 1: filled and decoded by the codec thread; the training thread only takes what is decoded, and hears what of its
own will not land.
Rule 2: bounded at every stage; who is too far behind takes one snapshot instead of many aggregates, and loses nothing.
Rule 3: so does who was sent an aggregate that came spoiled: nothing behind it counts until the snapshot is here.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from zmqtrain.averaging.coder import DeltaCoder
from zmqtrain.core.errors import CodecError
from zmqtrain.core.types import Buffer, Update, Version
from zmqtrain.protocol.effects import Deliver
from zmqtrain.protocol.messages import Aggregate, Snapshot
from zmqtrain.session.hub_session import MOST_SPOILED
from zmqtrain.session.mailbox import Mailbox

DECODED, MOST_DECODED = 2, 16
"""So many updates wait decoded for the training thread, and up to so many if all of them are small."""
DECODED_BYTES, LARGE_UPDATE_BYTES = 1 << 28, 1 << 26
"""What several updates that wait decoded hold, at most; of one that holds more than the second, only that one waits:
the next is decoded when it is taken."""
KEPT = 32
WITHDRAWN_KEPT = 1024


class Inbox:
    """What has arrived at one node and is not applied.

    changed: called in the codec thread when an update can be taken.  spoiled: called there, with the reason, when an
    aggregate is not what was sent: a snapshot is to be fetched.  decode_seconds: CPU time spent so far.
    """

    def __init__(self, changed: Callable[[], None], spoiled: Callable[[CodecError], None]) -> None:
        self._changed, self._on_spoiled = changed, spoiled
        self._spoiled = 0  # in a row
        self._lacks_snapshot = False
        self._arrived: deque[tuple[Deliver | None, Sequence[Buffer]]] = deque()  # None: begin again from the anchor
        self._version: Version = 0  # of the last update decoded
        self._landed_unseen: list[int] = []
        self._updates: Mailbox[Update] = Mailbox(MOST_DECODED)
        self._withdrawn: Mailbox[int] = Mailbox(WITHDRAWN_KEPT)
        self.decode_seconds = 0.0

    @property
    def full(self) -> bool:
        """True when the training thread is so far behind that a snapshot is less than what waits."""
        return len(self._arrived) >= KEPT

    def __len__(self) -> int:
        return len(self._updates)

    def peek(self) -> Update | None:
        """Return the next decoded update without taking it, or None."""
        return self._updates.peek()

    def take(self) -> Update | None:
        """Take the next decoded update, or None; have `decode` run after it."""
        return self._updates.get_nowait()

    def withdraw(self, sequence: int) -> None:
        """Have the training thread hear that an offer will not land; from any thread."""
        self._withdrawn.put_nowait(sequence)

    def take_withdrawn(self) -> Iterator[int]:
        """Give the offers that will not land, as far as was not asked before (training thread)."""
        while (sequence := self._withdrawn.get_nowait()) is not None:
            yield sequence

    def arrive(self, coder: DeltaCoder, deliver: Deliver, frames: Sequence[Buffer]) -> None:
        """Take in one delivery and decode as far as there is room. Raises CodecError; see `decode`."""
        if self._lacks_snapshot and isinstance(deliver.announcement, Aggregate):
            return self.skip(deliver)
        if isinstance(deliver.announcement, Snapshot):
            self._lacks_snapshot = False
            # whatever aggregates still wait are in it; what landed in them has landed
            self._landed_unseen += [sequence for one, _ in self._arrived if one for sequence in one.landed]
            before = [waiting for waiting in self._arrived if waiting[0] is None or waiting[0].reset]
            if before and not deliver.keep:
                # what was to be dropped with an older snapshot still is
                warm = all(one is not None and one.warm for one, _ in before) and (deliver.warm or not deliver.reset)
                deliver = replace(deliver, reset=True, warm=warm)
            self._arrived = deque(before[-1:] if deliver.keep else ())  # who keeps its own has what it was lent
        self._arrived.append((deliver, frames))
        self.decode(coder)

    def restart(self, coder: DeltaCoder, version: Version) -> None:
        """Have what is pending dropped, behind what has arrived already: go on from the anchor as it is there then.

        version: that was applied last.
        """
        self._version = max(self._version, version)
        self._arrived.append((None, ()))
        self.decode(coder)

    def skip(self, deliver: Deliver) -> None:
        """Drop an aggregate for which a snapshot will come; what landed in it is told with that."""
        self._landed_unseen += deliver.landed

    def decode(self, coder: DeltaCoder) -> None:
        """Decode what has arrived, as far as the door to the training thread has room.

        Raises CodecError for a snapshot that was not sent so, and for the last of `MOST_SPOILED` aggregates in a row.
        """
        while self._arrived and self._has_room():
            deliver, frames = self._arrived.popleft()
            began = time.thread_time()
            if deliver is None:
                coder.restart()
                update = Update(self._version, {}, {}, (), reset=True)
            elif isinstance(deliver.announcement, Aggregate):
                try:
                    update = coder.decode_aggregate(deliver.announcement, deliver.landed, frames)
                except CodecError as error:
                    self._drop_spoiled(deliver, error)
                    continue
                self._spoiled = 0
            else:
                assert isinstance(deliver.announcement, Snapshot), "only a standby is sent a copy of the hub"
                landed = (*self._landed_unseen, *deliver.landed)
                self._landed_unseen.clear()
                update = coder.decode_snapshot(deliver.announcement, landed, frames, deliver.reset, deliver.keep)
                update = replace(update, warm=deliver.warm)
            self.decode_seconds += time.thread_time() - began
            self._version = update.version
            self._updates.put_nowait(update)
        self._changed()

    def _drop_spoiled(self, deliver: Deliver, error: CodecError) -> None:
        """Drop an aggregate that is not what was sent, and those behind it, which cannot be applied without it."""
        self._spoiled += 1
        if self._spoiled >= MOST_SPOILED:
            raise CodecError(
                f"{self._spoiled} aggregates in a row are not what the broker sent ({error}): something on the way, or "
                "this PC's memory, spoils them: check both"
            ) from error
        waiting, self._arrived = self._arrived, deque(one for one in self._arrived if not _is_aggregate(one[0]))
        for one in (deliver, *(one for one, _ in waiting if one is not None and _is_aggregate(one))):
            self.skip(one)
        self._lacks_snapshot = True
        self._on_spoiled(error)

    def _has_room(self) -> bool:
        waiting = self._updates.peek()
        if waiting is None:
            return True
        size = _decoded_bytes(waiting)
        most = min(max(DECODED, DECODED_BYTES // max(1, size)), MOST_DECODED)
        return len(self._updates) < most and size <= LARGE_UPDATE_BYTES


def _is_aggregate(deliver: Deliver | None) -> bool:
    return deliver is not None and isinstance(deliver.announcement, Aggregate)


def _decoded_bytes(update: Update) -> int:
    anchor = [part.values for part in update.anchor or ()]
    parts = (*update.aggregate.values(), *update.own.values(), anchor, update.moments or ())
    return sum(4 * math.prod(array.shape) for arrays in parts for array in arrays)

"""Keep what has come of a snapshot: a lost connection goes on with it, and what was spoiled on its way is not taken.

Rule 1: frames come in their order; what is kept is the first so many, and their digest so far.  Rule 2: nothing of a
snapshot is used before the digest of all of it is what the hub said.  Rule 3: one snapshot at a time: the last that
was announced.
"""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.averaging.digest import Digest
from zmqtrain.core.errors import FramingError
from zmqtrain.core.types import Buffer
from zmqtrain.protocol.messages import Chunk, Snapshot

MOST_SPOILED = 2
"""So many snapshots in a row with another digest than they should have are no accident; nor so many aggregates."""


class Resuming:
    """What a node has of the snapshot that it fetches. spoiled: snapshots in a row that were not what was sent."""

    def __init__(self) -> None:
        self.spoiled = 0
        self._snapshot: Snapshot | None = None
        self._frames: list[Buffer] = []
        self._digest = Digest()

    @property
    def held(self) -> tuple[str, int]:
        """The digest of the snapshot that is here in part, and how many of its first frames are; ("", 0): none."""
        if self._snapshot is None or not self._frames:
            return "", 0
        return self._snapshot.digest, len(self._frames)

    def begin(self, snapshot: Snapshot) -> Sequence[Buffer]:
        """A snapshot is announced; return the frames of it that are here already.

        Raises FramingError if it begins behind what is here.
        """
        digest, held = self.held
        if snapshot.first and (snapshot.digest, snapshot.first) != (digest, held):
            raise FramingError(f"a snapshot from its frame {snapshot.first} on; {held} of it are here")
        if not snapshot.first:
            self._frames, self._digest = [], Digest()
        self._snapshot = snapshot if snapshot.digest else None
        return self._frames

    def add(self, chunk: Chunk, frame: Buffer) -> None:
        """Take note of a frame that has come, of whatever transfer."""
        if self._snapshot is not None and chunk.transfer == self._snapshot.transfer:
            if chunk.index != len(self._frames):
                raise FramingError(f"frame {chunk.index} of a snapshot comes where {len(self._frames)} is due")
            self._frames.append(frame)
            self._digest.add(frame)

    def is_sound(self, transfer: int) -> bool:
        """Return whether a whole transfer is what was sent; one that is no snapshot with a digest always is."""
        if self._snapshot is None or transfer != self._snapshot.transfer:
            return True
        sound = self._digest.text == self._snapshot.digest
        self.spoiled = 0 if sound else self.spoiled + 1
        self.drop()
        return sound

    def drop(self) -> None:
        """Let go what is here."""
        self._snapshot, self._frames, self._digest = None, [], Digest()

"""Keep snapshots that are being fetched, and the aggregates since, so that all who fetch share one that never changes.

Rule 1: at most `MOST_KEPT` versions, each with the aggregates that lead on from it, of at most its own bytes: who is
sent it is sent these next, and is where the run is.  Rule 2: a node whose connection was lost goes on with the version
that it had, for `KEPT_SECONDS`.  Rule 3: pure: `now` is an argument; buffers are referred to, never copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zmqtrain.averaging.aggregator import Released
from zmqtrain.core.types import Buffer, Version
from zmqtrain.protocol.effects import Reduce, Serve

MOST_KEPT = 2
KEPT_SECONDS = 60.0
"""How long a version is kept after somebody began to fetch it, or went on to."""
LARGEST_LAG = 0.25
"""A newcomer is sent a version that is kept if the aggregates since have at most so many times its bytes."""


@dataclass(eq=False)
class Kept:
    """One version. frames: () while they are being made; moments: of the founder's optimizer, behind them.

    digests: of the frames, and of frames and moments.  since: what has been released after it.  waiting: who is sent
    it as soon as it is made.
    """

    version: Version
    used_at: float
    frames: Sequence[Buffer] = ()
    moments: Sequence[Buffer] = ()
    digests: tuple[str, str] = ("", "")
    since: list[tuple[Released, Reduce]] = field(default_factory=list)
    waiting: list[Serve] = field(default_factory=list)
    size: int = 0
    since_size: int = 0

    def make(self, frames: Sequence[Buffer], moments: Sequence[Buffer], digests: tuple[str, str]) -> None:
        """Take the frames, once they are made."""
        self.frames, self.moments, self.digests = frames, moments, digests
        self.size = sum(len(frame) for frame in frames)

    def leads_on_from(self, version: Version) -> bool:
        """Return whether who holds this version needs nothing but aggregates that are kept here."""
        return self.version <= version <= (self.since[-1][0].version if self.since else self.version)

    def parts_for(self, serve: Serve) -> tuple[Sequence[Buffer], Sequence[Buffer], str, int]:
        """Return the frames and moments that this node is sent, their digest, and how many of the first it has."""
        if self.leads_on_from(serve.known_version):
            return (), (), "", 0
        moments = self.moments if serve.moments else ()
        digest = self.digests[bool(moments)]
        resumes = serve.digest == digest and 0 < serve.held < len(self.frames) + len(moments)
        return self.frames, moments, digest, serve.held if resumes else 0


class Shelf:
    """The versions that are kept, oldest first."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []

    @property
    def bytes(self) -> int:
        """What is kept: snapshots and the aggregates since."""
        return sum(kept.size + kept.since_size for kept in self._kept)

    @property
    def being_made(self) -> list[Kept]:
        """The versions whose frames are not there yet."""
        return [kept for kept in self._kept if not kept.frames]

    def of(self, serve: Serve) -> Kept | None:
        """Return the version that this node should be sent: one that leads on from what it holds, the one that it has a
        part of, or one that is new enough."""
        for kept in self._kept:
            if kept.leads_on_from(serve.known_version) or (serve.digest and serve.digest in kept.digests):
                return kept
        newest = self._kept[-1] if self._kept else None
        if newest is None or (newest.frames and newest.since_size > LARGEST_LAG * newest.size):
            return None
        return newest

    def begin(self, version: Version, now: float) -> Kept:
        """Keep this version from now on; what is released from now on follows it."""
        while len(self._kept) >= MOST_KEPT:
            del self._kept[0]
        self._kept.append(Kept(version, now))
        return self._kept[-1]

    def released(self, released: Released, reduce: Reduce) -> None:
        """Take note of an aggregate."""
        size = sum(len(frame) for frames in released.frames for frame in frames)
        for kept in list(self._kept):
            kept.since.append((released, reduce))
            kept.since_size += size
            if kept.frames and kept.since_size > kept.size:  # whole again it is less
                self._kept.remove(kept)

    def forget_old(self, now: float) -> None:
        """Let go what nobody has begun to fetch for long."""
        self._kept = [kept for kept in self._kept if not kept.frames or now - kept.used_at < KEPT_SECONDS]

    def clear(self) -> None:
        """Let go of all: the run begins anew."""
        for kept in self._kept:
            kept.waiting.clear()
        self._kept.clear()

"""Be the hub that does what its record says: the arrays of a hub, founded and released in the recorded order.

Rule 1: nothing is decided here: who founds, what is added up, in which order, over how many live nodes, is read.
Rule 2: payloads come from the replayed nodes, aggregates from the aggregator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, ModelSpec, PeerId, Version
from zmqtrain.monitor.records import Record, crc_of_frames, name_of
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Aggregate, Publish, Snapshot
from zmqtrain.session.virtual import VirtualCondition, VirtualTime


class Diverged(Exception):
    """A replay does other things than its record says: the record is not of this program, or was changed."""


class ScriptedHub:
    """The arrays of a hub, released as the record says. needed: the versions of which somebody takes a snapshot."""

    def __init__(
        self, scheduler: VirtualTime, settings: RunSettings, recorded: Sequence[Record], needed: set[Version]
    ) -> None:
        self.settings, self.aggregator = settings, Aggregator(settings)
        self.founders = [PeerId(peer) for one in recorded if one["kind"] == "founding" for peer in one["peers"]]
        self.differs_at: Version | None = None
        """The first version with an aggregate of other bytes than the recorded one."""
        self._releases = [one for one in recorded if one["kind"] == "release"]
        self._needed = needed
        self._given: dict[PeerId, tuple[Sequence[Buffer], Sequence[Buffer]]] = {}
        self._moments: Sequence[Buffer] = ()
        self._offers: dict[tuple[PeerId, int], tuple[Publish, Sequence[Buffer]]] = {}
        self._released: dict[Version, tuple[Aggregate, Sequence[Buffer]]] = {}
        self._snapshots: dict[Version, Sequence[Buffer]] = {}
        self._changed = VirtualCondition(scheduler)

    @property
    def releases(self) -> int:
        """How many aggregates the record holds."""
        return len(self._releases)

    @property
    def missing(self) -> str:
        """What the next release waits for, in words; "" once all are made."""
        version = self.aggregator.version
        if version < 0:
            return f"the parameters of {', '.join(map(name_of, self.founders))}"
        if version >= len(self._releases):
            return ""
        offers = [f"offer {one['sequence']} of {one['node']}" for one in self._awaited(self._releases[version])]
        return f"version {version + 1} waits for {', '.join(offers)}"

    def found(self, peer: PeerId, model: ModelSpec, parameters: Sequence[Buffer], moments: Sequence[Buffer]) -> None:
        """Take the parameters of a founder."""
        self.aggregator.plan(model)
        self._given[peer] = (parameters, moments)
        if self.aggregator.version >= 0 or not all(founder in self._given for founder in self.founders):
            return
        frames, self._moments = self._given[self.founders[0]]
        if self.settings.initial == "mean":
            frames, why = self.aggregator.average({peer: self._given[peer][0] for peer in self.founders})
            if why:
                raise Diverged(f"the initial parameters cannot be averaged: {why}")
        self.aggregator.found(frames)
        self._keep_snapshot()
        self._go_on()
        self._changed.notify_all()

    def take(self, peer: PeerId, publish: Publish, frames: Sequence[Buffer]) -> None:
        """Take an offer that was encoded, and make the releases that are due."""
        self._offers[peer, publish.sequence] = (publish, frames)
        self._go_on()
        self._changed.notify_all()

    def aggregate(self, version: Version) -> tuple[Aggregate, Sequence[Buffer]]:
        """Return the step to a version, once it is made."""
        self._changed.wait_for(lambda: version in self._released)
        return self._released[version]

    def snapshot(self, version: Version, moments: bool) -> tuple[Snapshot, Sequence[Buffer]]:
        """Return the shared parameters as they were at a version; moments: and the founder's optimizer state."""
        self._changed.wait_for(lambda: version in self._snapshots)
        state = self._moments if moments else ()
        frames = (*self._snapshots[version], *state)
        return Snapshot(0, version, tuple(len(frame) for frame in frames), moments=len(state)), frames

    def _awaited(self, release: Record) -> Iterator[Record]:
        return (one for one in release["contributions"] if (one["peer"], one["sequence"]) not in self._offers)

    def _go_on(self) -> None:
        while 0 <= self.aggregator.version < len(self._releases):
            release = self._releases[self.aggregator.version]
            if any(self._awaited(release)):
                return
            self._release(release)

    def _release(self, release: Record) -> None:
        everybody = [(_contribution(one), one.get("left_out", False)) for one in release["contributions"]]
        contributions = tuple(one for one, left_out in everybody if not left_out)
        gone = {one.peer for one, left_out in everybody if left_out}.difference(one.peer for one in contributions)
        for one, left_out in everybody:
            offer = self._offers.pop((one.peer, one.sequence))
            if not left_out:
                self.aggregator.accumulate(one.peer, *offer)
        fragments, version = tuple(release["fragments"]), self.aggregator.version + 1
        codec, outer = release.get("broadcast_codec", ""), release.get("outer", "")
        live, dense = max(1, release["live"] - len(gone)), release["dense"]
        reduce = Reduce(version, fragments, contributions, live, dense, codec=codec, outer=outer)
        made = self.aggregator.release(reduce)
        if self.differs_at is None and crc_of_frames(made.frames) != release.get("crc"):
            self.differs_at = version
        flat = [frame for frames in made.frames for frame in frames]
        counts, sizes = tuple(len(frames) for frames in made.frames), tuple(len(frame) for frame in flat)
        announced = Aggregate(0, version, made.codec, fragments, counts, sizes, reduce.landed, reduce.live)
        self._released[version] = (announced, flat)
        self._keep_snapshot()

    def _keep_snapshot(self) -> None:
        if self.aggregator.version in self._needed:
            version, frames = self.aggregator.snapshot()
            self._snapshots[version] = frames


def _contribution(one: Record) -> Contribution:
    score = math.nan if one["score"] is None else one["score"]
    return Contribution(
        peer=PeerId(one["peer"]),
        sequence=one["sequence"],
        fragment=one["fragment"],
        samples=one["samples"],
        score=score,
        base_version=one["base_version"],
        staleness=one["staleness"],
        too_stale=one["too_stale"],
    )

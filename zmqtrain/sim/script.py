"""Be the hub and the exchange of a node that do what a record says: who waits, waits for what the record needs.

Rule 1: nothing is decided here; what a node offers and applies, and when, and what the hub adds up, in which order, is
read.  Rule 2: what is not in a record is computed anew: gradients, deltas, payloads, aggregates.
Rule 3: a node goes on as soon as what it applies next is there, so any order of running gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zmqtrain.errors import AggregateTimeout
from zmqtrain.monitor.records import Record, crc_of_frames, name_of
from zmqtrain.protocol.messages import Aggregate, Contribution, Publish, Reduce, Snapshot
from zmqtrain.runtime.aggregator import Aggregator
from zmqtrain.runtime.delta import DeltaCoder, encode_snapshot
from zmqtrain.runtime.moments import encode_moments
from zmqtrain.settings import RunSettings
from zmqtrain.sim.clock import Scheduler, VirtualCondition
from zmqtrain.types import Array, Buffer, Clock, ExchangeStatistics, Layout, ModelSpec, Offer, PeerId, Update, Version

__all__ = ["Diverged", "RecordEnds", "ScriptedHub", "NodeScript", "ScriptedExchange"]


class Diverged(Exception):
    """A replay does other things than its record says: the record is not of this program, or was changed."""


class RecordEnds(Exception):
    """The record of a node that did not end by itself ends here."""


class ScriptedHub:
    """The arrays of a hub, released as the record says. needed: the versions of which somebody takes a snapshot."""

    def __init__(
        self, scheduler: Scheduler, settings: RunSettings, recorded: Sequence[Record], needed: set[Version]
    ) -> None:
        self.settings, self.aggregator = settings, Aggregator(settings)
        self.founders = [
            PeerId(peer) for one in recorded if one["kind"] == "founding" for peer in one["peers"]
        ]  # fmt: skip
        self.differs_at: Version | None = None
        """The first version whose aggregate has other bytes than the recorded one."""
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
        contributions = tuple(_contribution(one) for one in release["contributions"])
        for one in contributions:
            self.aggregator.accumulate(one.peer, *self._offers.pop((one.peer, one.sequence)))
        fragments, version = tuple(release["fragments"]), self.aggregator.version + 1
        reduce = Reduce(version, fragments, contributions, release["live"], release["dense"])
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


class NodeScript:
    """What one node did, read from its record. samples: by step, those of all steps until then.

    ended: whether the node ended by itself.  crc: of its final parameters, None if that is not known.
    """

    def __init__(self, recorded: Sequence[Record]) -> None:
        head, ends = recorded[0], [one for one in recorded if one["kind"] == "node_end"]
        self.peer, self.name, self.run, self.data = (
            PeerId(head["peer"]),
            head["node"],
            head["run"],
            head.get("data", ""),
        )
        self.ended, self.crc = bool(ends), ends[-1].get("crc") if ends else None
        self.units: list[int] = [one["unit"] for one in recorded if one["kind"] == "unit"]
        self.events = [one for one in recorded if one["kind"] in ("application", "offer", "pace")]
        self.withdrawals = [one for one in recorded if one["kind"] == "withdrawal"]
        said = {one["step"]: one["samples"] for one in recorded if "step" in one and "samples" in one}
        self.samples: Mapping[int, int] = {0: 0, **said}
        self.steps = max(self.samples)

    def count(self, kind: str) -> int:
        """Return how many events of a kind there are."""
        return sum(event["kind"] == kind for event in self.events)


class ScriptedExchange:
    """The `Exchange` of one node that lives its record again.

    It says nothing of what it does not know: nobody evaluates, nobody else is here.
    """

    def __init__(self, scheduler: Scheduler, hub: ScriptedHub, script: NodeScript) -> None:
        self.name, self.script, self.settings = script.name, script, hub.settings
        self.clock: Clock = scheduler
        self.is_evaluator = self.wanted = False
        self.reachable = True
        self.founded = script.peer not in hub.founders
        self._scheduler, self._hub = scheduler, hub
        self._coder: DeltaCoder | None = None
        self._next = self._steps = 0
        self._applied_version: Version = -1
        self._applied: list[int] = []
        self._offered: set[int] = set()
        self._update: Update | None = None
        self._withdrawn = 0

    @property
    def left(self) -> Record | None:
        """The first event of the record that did not happen again."""
        return self.script.events[self._next] if self._next < len(self.script.events) else None

    # ------------------------------------------------------------------ joining

    @property
    def layout(self) -> Layout:
        """See Exchange."""
        return self._known_coder.layout

    @property
    def _known_coder(self) -> DeltaCoder:
        assert self._coder is not None, "join comes first"
        return self._coder

    def join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, moments: Sequence[Any] = ()
    ) -> Update | None:
        """See Exchange."""
        self._coder = DeltaCoder(model, self.settings)
        layout, founds = self._coder.layout, self.script.peer in self._hub.founders
        if founds:
            frames = encode_snapshot(layout, layout.split(leaves))
            self._hub.found(self.script.peer, model, frames, encode_moments(moments))
        self.founded = True
        if founds and self.settings.initial != "mean":
            self._applied_version = 0
            return None
        event = self.left
        if event is None:
            raise RecordEnds
        if event["kind"] != "application" or not event["snapshot"]:
            raise Diverged(f"{self.name} did not found the run, and its record does not say what it began with")
        return self._take(event)

    def compare(self, score: float) -> None:
        """See Exchange: no population is replayed."""

    def lend(self, leaves: Sequence[Any], moments: Sequence[Any] = ()) -> None:
        """See Exchange: no population is replayed."""

    # ------------------------------------------------------------------ the record

    @property
    def _draining(self) -> bool:
        return self._steps >= self.script.steps

    def _due(self, kind: str) -> Record | None:
        """Return the next event if it is of this kind, and due now."""
        event = self.left
        if event is None:
            if self._draining and not self.script.ended:
                raise RecordEnds
            return None
        due = self._draining if event["draining"] else event["step"] == self._steps + 1
        return event if due and event["kind"] == kind else None

    def _read(self, event: Record) -> Update:
        """Return the update of an event, once the hub has made it."""
        if self._update is None:
            version, landed = event["version"], event["landed"]
            if event["snapshot"]:
                announced, frames = self._hub.snapshot(version, event["moments"])
                self._update = self._known_coder.decode_snapshot(announced, landed, frames, False, event["keep"])
            else:
                aggregate, frames = self._hub.aggregate(version)
                self._update = self._known_coder.decode_aggregate(aggregate, landed, frames)
        return self._update

    def _take(self, event: Record) -> Update:
        update, self._update = self._read(event), None
        self._next += 1
        self._applied_version = update.version
        self._applied += update.landed
        self._offered.difference_update(update.landed)
        return update

    # ------------------------------------------------------------------ exchange

    def next_fragment(self) -> int | None:
        """See Exchange: the fragment that was offered at this step."""
        event = self._due("offer")
        return None if event is None else int(event["fragment"])

    def offer(
        self,
        fragment: int,
        segments: Sequence[Array],
        *,
        samples: int,
        steps: int,
        scores: tuple[Any, ...] = (),
        dense: bool = False,
    ) -> int | None:
        """See Exchange: taken if it was."""
        event = self._due("offer")
        if event is None or (event["fragment"], event["dense"]) != (fragment, dense):
            return None
        sequence = int(event["sequence"])
        if event["base_version"] != self._applied_version:
            raise Diverged(
                f"offer {sequence} of {self.name} is based on version {self._applied_version}, not on its own"
            )
        self._next += 1
        self._forget_withdrawn(sequence)
        offer = Offer(sequence, fragment, segments, samples, steps, (), tuple(self._applied), dense)
        self._applied.clear()
        encoded = self._known_coder.encode(offer)
        self._offered.add(sequence)
        sizes = tuple(len(frame) for frame in encoded.frames)
        base, codec = self._applied_version, encoded.codec
        publish = Publish(0, sequence, base, fragment, codec, sizes, samples, steps, math.nan, dense)
        self._hub.take(self.script.peer, publish, encoded.frames)
        return sequence

    def _forget_withdrawn(self, sequence: int) -> None:
        """Withdraw what the node's coder had withdrawn when it encoded this offer."""
        waiting = self.script.withdrawals[self._withdrawn :]
        for one in waiting:
            if one["encoded"] >= sequence:
                return
            self._known_coder.withdraw(one["sequence"])
            self._withdrawn += 1

    def in_flight(self) -> tuple[int, ...]:
        """See Exchange: at the end, what the node still awaited there."""
        if self._draining and self._due("application") is None:
            return ()
        return tuple(sorted(self._offered - {one["sequence"] for one in self.script.withdrawals}))

    def peek(self) -> Update | None:
        """See Exchange: what was applied at this step."""
        event = self._due("application")
        return None if event is None else self._read(event)

    def poll(self) -> Update | None:
        """See Exchange."""
        event = self._due("application")
        return None if event is None else self._take(event)

    def wait_update(self, timeout_seconds: float) -> Update:
        """See Exchange."""
        update = self.poll()
        if update is None:
            self._scheduler.sleep(timeout_seconds)
            raise AggregateTimeout(f"{self.name} applied nothing here")
        return update

    def everyone_drained(self) -> bool:
        """See Exchange: once nothing more is applied."""
        return self._due("application") is None

    def pace(self) -> tuple[float, Sequence[float]]:
        """See Exchange: as it was."""
        event = self._due("pace")
        if event is None:
            raise Diverged(f"{self.name} plans its next exchange at step {self._steps + 1}; it did not then")
        self._next += 1
        own, *rates = (math.nan if rate is None else rate for rate in (event["own"], *event["rates"]))
        return own, rates

    def report(self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int) -> None:
        """See Exchange: a step is over, and all that happened in it must have happened again."""
        event = self.left
        if event is not None and not event["draining"] and event["step"] <= step:
            raise Diverged(f"{self.name} is over step {step} without its {event['kind']} at step {event['step']}")
        recorded = self.script.samples.get(step, samples)
        if recorded != samples:
            raise Diverged(f"{self.name} has used {samples} samples in {step} steps; it was {recorded}")
        self._steps = step

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        """See Exchange: nobody listens."""

    def statistics(self) -> ExchangeStatistics:
        """See Exchange."""
        return ExchangeStatistics(self._applied_version, 1, 0, 0, 0.0, 0.0, 0, 0, None)

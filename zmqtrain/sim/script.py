"""Replays a node's recorded exchange: it offers and applies what the record says, at the same steps.

Rule 1: nothing is decided here.  Rule 2: gradients, deltas and payloads are computed again.
Rule 3: a node runs as soon as its next update is there, so any order of running gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from zmqtrain.averaging.coder import DeltaCoder, encode_snapshot
from zmqtrain.averaging.snapshot import encode_optimizer_state
from zmqtrain.core.errors import AggregateTimeout
from zmqtrain.core.interfaces import Clock, Layout
from zmqtrain.core.types import (
    Array,
    Counts,
    ExchangeState,
    ExchangeStatistics,
    ModelSpec,
    PeerId,
    StepSchedule,
    Update,
    Version,
)
from zmqtrain.monitor.records import Record
from zmqtrain.node.offers import Offers
from zmqtrain.protocol.messages import Publish
from zmqtrain.session.virtual import VirtualTime
from zmqtrain.sim.scenario import SPOILT
from zmqtrain.sim.script_hub import Diverged, ScriptedHub

EVENTS = ("application", "offer", "pace", "schedule")


class RecordEnds(Exception):
    """The record of a node that did not end by itself ends here."""


class NodeScript:
    """What one node did, read from its record. samples: by step, those of all steps until then.

    version: of the checkpoint with which the record begins, -1 for none.  ended: whether the node ended by itself.
    crc: of its final parameters, None if that is not known.  spoilt: what a simulated node's data and beginning were,
    as fields of a `SimNode`.
    """

    def __init__(self, recorded: Sequence[Record]) -> None:
        head, ends = recorded[0], [one for one in recorded if one["kind"] == "node_end"]
        self.peer, self.name, self.run, self.data = (
            PeerId(head["peer"]),
            head["node"],
            head["run"],
            head.get("data", ""),
        )
        self.version = int(head.get("version", -1))
        self.spoilt = {field: head[field] for field in SPOILT if field in head}
        self.ended, self.crc = bool(ends), ends[-1].get("crc") if ends else None
        self.units: list[int] = [one["unit"] for one in recorded if one["kind"] == "unit"]
        self.events = [one for one in recorded if one["kind"] in EVENTS]
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

    def __init__(self, scheduler: VirtualTime, hub: ScriptedHub, script: NodeScript) -> None:
        self.name, self.script, self.settings = script.name, script, hub.settings
        self.clock: Clock = scheduler
        self.population = None  # none is replayed
        self._founded = script.peer not in hub.founders
        self._scheduler, self._hub = scheduler, hub
        self._coder: DeltaCoder | None = None
        self._next = self._steps = 0
        self._offers = Offers()
        self._update: Update | None = None
        self._withdrawn = 0
        self._schedule = (0, 0)

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
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, optimizer_state: Sequence[Any] = ()
    ) -> Update | None:
        """See Exchange."""
        self._coder = DeltaCoder(model, self.settings)
        layout, founds = self._coder.layout, self.script.peer in self._hub.founders
        if founds:
            frames = encode_snapshot(layout, layout.split(leaves))
            self._hub.found(self.script.peer, model, frames, encode_optimizer_state(optimizer_state))
        self._founded = True
        if founds and self.settings.initial != "mean":
            self._offers.version = 0
            return None
        event = self.left
        if event is None:
            raise RecordEnds
        if event["kind"] != "application" or not event["snapshot"]:
            raise Diverged(f"{self.name} did not found the run, and its record does not say what it began with")
        return self._take(event)

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
        self._offers.took(update)
        return update

    # ------------------------------------------------------------------ exchange

    def next_fragments(self) -> tuple[int, ...]:
        """See Exchange: the fragments that were offered at this step."""
        if (first := self._due("offer")) is None:
            return ()
        following = takewhile(lambda one: one["kind"] == "offer", self.script.events[self._next :])
        together = [int(one["fragment"]) for one in following if one["step"] == first["step"]]
        return tuple(together if self.settings.carries_all and not self._draining else together[:1])

    def offer(self, fragment: int, segments: Sequence[Array], counts: Counts, *, dense: bool = False) -> int | None:
        """See Exchange: taken if it was."""
        event = self._due("offer")
        if event is None or (event["fragment"], event["dense"]) != (fragment, dense):
            return None
        sequence = int(event["sequence"])
        if event["base_version"] != self._offers.version:
            raise Diverged(
                f"offer {sequence} of {self.name} is based on version {self._offers.version}, not on its own"
            )
        self._next += 1
        self._forget_withdrawn(sequence)
        draft = self._offers.draft(fragment, segments, counts._replace(scores=()), dense=dense)
        offer = replace(draft, sequence=sequence)
        encoded = self._known_coder.encode(offer)
        self._offers.made(offer, self.layout.fragments)
        sizes = tuple(len(frame) for frame in encoded.frames)
        base, codec = self._offers.version, encoded.codec
        publish = Publish(0, sequence, base, fragment, codec, sizes, counts.samples, counts.steps, math.nan, dense)
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

    def state(self) -> ExchangeState:
        """See Exchange: in flight at the end is what the node still awaited there."""
        return ExchangeState(self._in_flight(), founded=self._founded)

    def _in_flight(self) -> tuple[int, ...]:
        if self._draining and self._due("application") is None:
            return ()
        withdrawn = {one["sequence"] for one in self.script.withdrawals}
        return tuple(sequence for sequence in self._offers.in_flight() if sequence not in withdrawn)

    def peek(self) -> Update | None:
        """See Exchange: what was applied at this step."""
        event = self._due("application")
        return None if event is None else self._read(event)

    def poll(self) -> Update | None:
        """See Exchange."""
        event = self._due("application")
        return None if event is None else self._take(event)

    def wait_update(self, timeout_seconds: float, sequence: int) -> Update:
        """See Exchange."""
        update = self.poll()
        if update is None:
            self._scheduler.sleep(timeout_seconds)
            raise AggregateTimeout(f"{self.name} applied nothing here")
        return update

    def everyone_drained(self, broker: int) -> bool:
        """See Exchange: once nothing more is applied."""
        return self._due("application") is None

    def schedule(self, paced: bool = False) -> StepSchedule:
        """See Exchange: as it was."""
        event = self._due("schedule")
        if event is not None:
            self._next += 1
            self._schedule = (int(event["every"]), int(event["delay"]))
            if "codec" in event:  # a record of version 0.1 has none: its codecs stood in the settings
                self._known_coder.adopt(event["codec"], event["broadcast_codec"])
        if not paced:
            return StepSchedule(*self._schedule)
        event = self._due("pace")
        if event is None:
            raise Diverged(f"{self.name} plans its next exchange at step {self._steps + 1}; it did not then")
        self._next += 1
        own, *rates = (math.nan if rate is None else rate for rate in (event["own"], *event["rates"]))
        return StepSchedule(*self._schedule, own, rates)

    def report(
        self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int, held_seconds: float = 0.0
    ) -> None:
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
        return ExchangeStatistics(self._offers.version, 1, 0, 0, 0.0, 0.0, 0, 0, None)

"""Replays a recorded run bit for bit: the same gradients, deltas and sums, in the order in which they happened.

Rule 1: from the records come orders and numbers only: which data units a node trained on, at which steps it offered and
applied what, in which order the hub added up; every array is computed again, by the code of a real run.
Rule 2: nothing is decided here.  A node runs as soon as its next update is there; one that waits for an aggregate lets
the contributors run, so any order of running gives the same bits.
Not replayed: runs in which each node keeps its own parameters (initial own, not elastic), or whose timed steps began
apart (initial best, several nodes), nodes that were preempted, brokers and nodes that were started from a checkpoint,
loops of one's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import DeltaCoder, encode_snapshot
from zmqtrain.averaging.snapshot import encode_optimizer_state
from zmqtrain.core.errors import AggregateTimeout, ConfigError, NonFiniteDelta
from zmqtrain.core.interfaces import Clock, Layout
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import (
    Array,
    Buffer,
    Counts,
    ExchangeState,
    ExchangeStatistics,
    ModelSpec,
    PeerId,
    StepSchedule,
    Update,
    Version,
)
from zmqtrain.monitor.records import Record, crc_of_frames, crc_of_leaves, name_of
from zmqtrain.node.offers import Offers
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Aggregate, Publish, Snapshot
from zmqtrain.session.virtual import VirtualCondition, VirtualTime
from zmqtrain.sim.program import NodeProgram
from zmqtrain.sim.run import load_scenario_program
from zmqtrain.sim.scenario import SPOILT, SimNode
from zmqtrain.train.leaves import host_leaves
from zmqtrain.train.loop import TrainingLoop
from zmqtrain.train.minibatch import TimedMinibatch, minibatch_from_spec
from zmqtrain.train.program import Program
from zmqtrain.train.step import LoopHooks

EVENTS = ("application", "offer", "pace", "schedule")


@dataclass(frozen=True)
class ReplayedNode:
    """One node of a replayed run. params: its final parameters, None if it did not end by itself.

    crc, recorded_crc: of these, and as the record has it; None where they are not known.
    """

    peer: PeerId
    steps: int
    offers: int
    updates: int
    params: Any
    crc: int | None
    recorded_crc: int | None


@dataclass(frozen=True)
class ReplayResult:
    """What a replayed run came to.

    params: the leaves of the shared model at `version`, float32.  crc, recorded_crc: of these, and as the broker said
    it at the end, None if it was killed before.  nodes: by name (by peer id, if several had the same name).
    difference: where the replay first differs from the record, in words; "" if it does not.
    """

    version: Version
    params: list[NDArray[np.float32]]
    crc: int
    recorded_crc: int | None
    nodes: dict[str, ReplayedNode]
    contributions: int
    difference: str

    @property
    def equal(self) -> bool:
        """Whether all that can be compared is the same, bit for bit."""
        return not self.difference


def replay(
    broker_records: Sequence[Record], node_records: Sequence[Sequence[Record]], program: Program | None = None
) -> ReplayResult:
    """Replay a run from what its broker and each of its nodes have recorded.

    program: instead of the one that the run's settings name.  A node that was killed is replayed as far as its record
    goes.  Raises ConfigError: records that do not belong together, of nodes that are missing, or of a run of a kind
    that cannot be replayed.
    """
    settings = _read_settings(broker_records)
    scripts = [_read_node(records, broker_records[0]["run"]) for records in node_records]
    _check_complete(broker_records, scripts)
    return _Replay(settings, broker_records, scripts, program).run()


class Diverged(Exception):
    """A replay does other things than its record says: the record is not of this program, or was changed."""


class RecordEnds(Exception):
    """The record of a node that did not end by itself ends here."""


# ---------------------------------------------------------------------- the records


class NodeScript:
    """What one node did, read from its record. samples: by step, those of all steps until then.

    version: of the checkpoint with which the record begins, -1 for none.  ended: whether the node ended by itself.
    crc: of its final parameters, None if that is not known.  spoilt: what a simulated node's data and beginning were,
    as fields of a `SimNode`.
    """

    def __init__(self, recorded: Sequence[Record]) -> None:
        head, ends = recorded[0], [one for one in recorded if one["kind"] == "node_end"]
        self.peer, self.name, self.run = PeerId(head["peer"]), head["node"], head["run"]
        self.data, self.version = head.get("data", ""), int(head.get("version", -1))
        self.spoilt = {field: head[field] for field in SPOILT if field in head}
        self.ended, self.crc = bool(ends), ends[-1].get("crc") if ends else None
        self.units: list[int] = [one["unit"] for one in recorded if one["kind"] == "unit"]
        self.events = [one for one in recorded if one["kind"] in EVENTS]
        self.withdrawals = [one for one in recorded if one["kind"] == "withdrawal"]
        said = {one["step"]: one["samples"] for one in recorded if "step" in one and "samples" in one}
        self.samples: Mapping[int, int] = {0: 0, **said}
        self.steps = max(self.samples)

    def count(self, kind: str) -> int:
        return sum(event["kind"] == kind for event in self.events)


def _read_settings(records: Sequence[Record]) -> RunSettings:
    head: Record = records[0] if records else {"kind": "nothing"}
    if head["kind"] != "run":
        raise ConfigError(
            f"a broker's record begins with its run, not with {head['kind']}: the broker's file comes first"
        )
    if head["version"] >= 0:
        raise ConfigError(
            f"this broker resumed {head['run']} at version {head['version']}: only a run that was recorded from its "
            "beginning can be replayed"
        )
    settings = RunSettings.from_dict(head["settings"])
    if settings.initial == "own" and settings.elastic == 1:
        raise ConfigError("a run in which each node keeps its own parameters (initial own) cannot be replayed")
    if any("turn" in one for record in records if record["kind"] == "release" for one in record["contributions"]):
        raise ConfigError("a run of pipelines cannot be replayed: `zmqtrain report` and `page` show its records")
    if settings.trains_apart and settings.minibatch.startswith("timed"):
        raise ConfigError("a run that began with timed steps apart (initial best, minibatch timed) cannot be replayed")
    return settings


def _read_node(records: Sequence[Record], run: str) -> NodeScript:
    if not records or records[0]["kind"] != "node":
        raise ConfigError("a node's record begins with the node that joined; this one holds no such line")
    script = NodeScript(records)
    if script.version >= 0:
        raise ConfigError(
            f"{script.name} went on from its checkpoint of version {script.version} when this record began: only a "
            "node that was recorded from its beginning can be replayed"
        )
    if script.run != run:
        raise ConfigError(f"{script.name} was a node of {script.run}, the broker's record is of {run}")
    if any(event["kind"] == "application" and event["reset"] for event in script.events):
        raise ConfigError(f"{script.name} was preempted in the middle of the run, which cannot be replayed")
    return script


def _check_complete(records: Sequence[Record], scripts: Sequence[NodeScript]) -> None:
    peers = [script.peer for script in scripts]
    if twice := {peer for peer in peers if peers.count(peer) > 1}:
        raise ConfigError(f"the record of {', '.join(map(name_of, twice))} is given twice")
    foundings = [record["peers"] for record in records if record["kind"] == "founding"]
    if not foundings:
        raise ConfigError("nobody has founded this run: there is nothing to replay")
    contributed = [one["peer"] for record in records if record["kind"] == "release" for one in record["contributions"]]
    if missing := dict.fromkeys(peer for peer in (*foundings[0], *contributed) if peer not in peers):
        names = ", ".join(map(name_of, missing))
        raise ConfigError(f"the records of {names} are missing: every node that contributed must have been recorded")


# ---------------------------------------------------------------------- the hub


class RecordedHub:
    """The aggregator of a hub, founded and released as the record says.

    needed: the versions of which a node takes a snapshot.
    """

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

    def take(self, peer: PeerId, publish: Publish, frames: Sequence[Buffer]) -> None:
        """Take an offer that was encoded, and make the releases that are due."""
        self._offers[peer, publish.sequence] = (publish, frames)
        self._go_on()

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

    def _awaited(self, release: Record) -> list[Record]:
        return [one for one in release["contributions"] if (one["peer"], one["sequence"]) not in self._offers]

    def _go_on(self) -> None:
        while 0 <= self.aggregator.version < len(self._releases):
            release = self._releases[self.aggregator.version]
            if self._awaited(release):
                break
            self._release(release)
        self._changed.notify_all()

    def _release(self, release: Record) -> None:
        everybody = [(_contribution(one), one.get("left_out", False)) for one in release["contributions"]]
        contributions = tuple(one for one, left_out in everybody if not left_out)
        gone = {one.peer for one, left_out in everybody if left_out}.difference(one.peer for one in contributions)
        for one, left_out in everybody:
            offer = self._offers.pop((one.peer, one.sequence))
            if not left_out:
                self.aggregator.accumulate(one.peer, *offer)
        version, live = self.aggregator.version + 1, max(1, release["live"] - len(gone))
        codec, outer = release.get("broadcast_codec", ""), release.get("outer", "")
        fragments, dense = tuple(release["fragments"]), release["dense"]
        reduce = Reduce(version, fragments, contributions, live, dense, codec=codec, outer=outer)
        made = self.aggregator.release(reduce)
        if self.differs_at is None and crc_of_frames(made.frames) != release.get("crc"):
            self.differs_at = version
        self._released[version] = (made.announce(0, reduce), [frame for frames in made.frames for frame in frames])
        self._keep_snapshot()

    def _keep_snapshot(self) -> None:
        aggregator = self.aggregator
        if aggregator.version in self._needed:
            self._snapshots[aggregator.version] = encode_snapshot(aggregator.layout, aggregator.published)


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


# ---------------------------------------------------------------------- a node


class RecordedExchange:
    """The `Exchange` of one node: it offers and applies what its record says, at the same steps.

    It says nothing of what it does not know: nobody evaluates, nobody else is here.
    """

    def __init__(self, scheduler: VirtualTime, hub: RecordedHub, script: NodeScript) -> None:
        self.name, self.script, self.settings = script.name, script, hub.settings
        self.clock: Clock = scheduler
        self.population = None  # none is replayed
        self._founded = script.peer not in hub.founders
        self._hub = hub
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
        return self.coder.layout

    @property
    def coder(self) -> DeltaCoder:
        """Of the model with which the node has joined."""
        assert self._coder is not None, "join comes first"
        return self._coder

    def join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, optimizer_state: Sequence[Any] = ()
    ) -> Update | None:
        self._coder = DeltaCoder(model, self.settings)
        self._founded = True
        if self.script.peer in self._hub.founders:
            frames = encode_snapshot(self.coder.layout, self.coder.layout.split(leaves))
            self._hub.found(self.script.peer, model, frames, encode_optimizer_state(optimizer_state))
            if self.settings.initial != "mean":
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
                self._update = self.coder.decode_snapshot(announced, landed, frames, False, event["keep"])
            else:
                aggregate, frames = self._hub.aggregate(version)
                self._update = self.coder.decode_aggregate(aggregate, landed, frames)
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
        sequence, base = int(event["sequence"]), self._offers.version
        if event["base_version"] != base:
            raise Diverged(f"offer {sequence} of {self.name} is based on version {base}, not on its own")
        self._next += 1
        self._forget_withdrawn(sequence)
        draft = self._offers.draft(fragment, segments, counts._replace(scores=()), dense=dense)
        offer = replace(draft, sequence=sequence)
        encoded = self.coder.encode(offer)
        self._offers.made(offer, self.layout.fragments)
        sizes, (samples, steps, _) = tuple(len(frame) for frame in encoded.frames), counts
        publish = Publish(0, sequence, base, fragment, encoded.codec, sizes, samples, steps, math.nan, dense)
        self._hub.take(self.script.peer, publish, encoded.frames)
        return sequence

    def _forget_withdrawn(self, sequence: int) -> None:
        """Withdraw what the node's coder had withdrawn when it encoded this offer."""
        for one in takewhile(lambda one: one["encoded"] < sequence, self.script.withdrawals[self._withdrawn :]):
            self.coder.withdraw(one["sequence"])
            self._withdrawn += 1

    def state(self) -> ExchangeState:
        """See Exchange: in flight at the end is what the node still awaited there."""
        withdrawn = {one["sequence"] for one in self.script.withdrawals}
        in_flight = tuple(sequence for sequence in self._offers.in_flight() if sequence not in withdrawn)
        over = self._draining and self._due("application") is None
        return ExchangeState(() if over else in_flight, founded=self._founded)

    def peek(self) -> Update | None:
        """See Exchange: what was applied at this step."""
        event = self._due("application")
        return None if event is None else self._read(event)

    def poll(self) -> Update | None:
        event = self._due("application")
        return None if event is None else self._take(event)

    def wait_update(self, timeout_seconds: float, sequence: int) -> Update:
        update = self.poll()
        if update is None:
            self.clock.sleep(timeout_seconds)
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
                self.coder.adopt(event["codec"], event["broadcast_codec"])
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
        return ExchangeStatistics(self._offers.version, 1, 0, 0, 0.0, 0.0, 0, 0, None)


# ---------------------------------------------------------------------- the replay


class _Replay:
    """One replay."""

    def __init__(
        self,
        settings: RunSettings,
        broker_records: Sequence[Record],
        scripts: Sequence[NodeScript],
        program: Program | None,
    ) -> None:
        self.settings, self.scripts = settings, scripts
        self.scheduler = VirtualTime()
        events = [event for script in scripts for event in script.events]
        needed = {event["version"] for event in events if event["kind"] == "application" and event["snapshot"]}
        self.hub = RecordedHub(self.scheduler, settings, broker_records, needed)
        self.contributions = sum(len(one["contributions"]) for one in broker_records if one["kind"] == "release")
        ends = [record for record in broker_records if record["kind"] == "run_end"]
        self.recorded_crc: int | None = ends[-1].get("crc") if ends else None
        self.params: dict[PeerId, Any] = {}
        self.differences: list[str] = []
        self.waiting: dict[PeerId, str] = {script.peer: script.name for script in scripts}
        self._programs: dict[str, Program] = {}
        self._program = program

    def run(self) -> ReplayResult:
        """Replay it."""
        for script in self.scripts:
            self._load(script.data)
            self.scheduler.start(script.name, partial(self._live, script))
        self.scheduler.run()
        aggregator = self.hub.aggregator
        leaves = aggregator.layout.join(aggregator.published) if aggregator.version >= 0 else []
        crc, nodes = crc_of_leaves(leaves), {}
        names = [script.name for script in self.scripts]
        for script in self.scripts:
            nodes[script.name if names.count(script.name) == 1 else script.peer] = self._ended(script)
        return ReplayResult(
            version=aggregator.version,
            params=leaves,
            crc=crc,
            recorded_crc=self.recorded_crc,
            nodes=nodes,
            contributions=self.contributions,
            difference=self._difference(crc, nodes),
        )

    def _live(self, script: NodeScript) -> None:
        exchange = RecordedExchange(self.scheduler, self.hub, script)
        program = NodeProgram(self._load(script.data), SimNode(name=script.name, **script.spoilt))
        loop = TrainingLoop(program, exchange, LoopHooks(before_part=self._deadlines(script, program)))
        used = -(-script.samples[script.steps] // program.samples_per_batch)
        batches = islice(chain.from_iterable(program.batches(unit) for unit in script.units), used)
        try:
            self.params[script.peer] = loop.run(batches).params
            if (left := exchange.left) is not None:
                self.differences.append(f"{script.name} has ended without its {left['kind']} at step {left['step']}")
        except RecordEnds:
            pass
        except (Diverged, NonFiniteDelta) as error:
            self.differences.append(str(error))
        del self.waiting[script.peer]

    def _deadlines(self, script: NodeScript, program: NodeProgram) -> Callable[[], None]:
        """Return what ends a timed step after as many parts as it had: it lets the step's time pass."""
        minibatch = minibatch_from_spec(self.settings.minibatch)
        if not isinstance(minibatch, TimedMinibatch):
            return lambda: None
        part = program.samples_per_batch // minibatch.partitions
        counts = [
            (script.samples[step] - script.samples.get(step - 1, 0)) // part for step in sorted(script.samples) if step
        ]
        ends = iter([last for count in counts for last in (*[False] * (count - 1), True)])

        def before_part() -> None:
            if next(ends, False):
                self.scheduler.sleep(minibatch.seconds)

        return before_part

    def _load(self, data: str) -> Program:
        if self._program is not None:
            return self._program
        if data not in self._programs:
            if not self.settings.program:
                raise ConfigError("this run trained loops of one's own: only a program can be replayed")
            self._programs[data] = load_scenario_program(self.settings, data)
        return self._programs[data]

    def _ended(self, script: NodeScript) -> ReplayedNode:
        params = self.params.get(script.peer)
        crc = None if params is None else crc_of_leaves(host_leaves(params))
        offers, updates = script.count("offer"), script.count("application")
        return ReplayedNode(script.peer, script.steps, offers, updates, params, crc, script.crc)

    def _difference(self, crc: int, nodes: dict[str, ReplayedNode]) -> str:
        if self.hub.differs_at is not None:
            return f"the aggregate to version {self.hub.differs_at} has other bytes"
        if self.differences:
            return self.differences[0]
        if self.hub.missing:
            waiting = f"; {', '.join(self.waiting.values())} wait" if self.waiting else ""
            return f"the replay ends at version {self.hub.aggregator.version}: {self.hub.missing}{waiting}"
        if self.waiting:
            return f"{', '.join(self.waiting.values())} wait for what was never released"
        if self.recorded_crc not in (None, crc):
            return f"the shared model has the crc {crc:08x}; {self.recorded_crc:08x} was recorded"
        for name, node in nodes.items():
            if node.recorded_crc is not None and node.crc != node.recorded_crc:
                return f"the final parameters of {name} have other bits"
        return ""

"""Live a recorded run again, bit for bit: the same gradients, deltas and sums, in the order in which they happened.

Rule 1: from the records come orders and numbers only: which data units a node trained on, at which steps it offered and
applied what, in which order the hub added up; every array is computed again, by the code of a real run.
Rule 2: one node at a time, in one process; a node that waits for an aggregate lets the contributors run.
Not replayed: runs in which each node keeps its own parameters (initial own, not elastic), or whose timed steps began
apart (initial best, several nodes), nodes that were preempted, brokers and nodes that were started from a checkpoint,
loops of one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import ConfigError, NonFiniteDelta
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import PeerId, Version
from zmqtrain.monitor.records import Record, crc_of_leaves, name_of
from zmqtrain.programs import load_program, parse_arguments, program_arguments
from zmqtrain.session.virtual import VirtualTime
from zmqtrain.sim.program import NodeProgram
from zmqtrain.sim.scenario import SimNode
from zmqtrain.sim.script import NodeScript, RecordEnds, ScriptedExchange
from zmqtrain.sim.script_hub import Diverged, ScriptedHub
from zmqtrain.train.leaves import host_leaves
from zmqtrain.train.loop import TrainingLoop
from zmqtrain.train.minibatch import TimedMinibatch, minibatch_from_spec
from zmqtrain.train.program import Program
from zmqtrain.train.step import LoopHooks


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
        self.hub = ScriptedHub(self.scheduler, settings, broker_records, needed)
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
        exchange = ScriptedExchange(self.scheduler, self.hub, script)
        program = NodeProgram(self._load(script.data), SimNode(name=script.name, **script.spoilt))
        loop = TrainingLoop(program, exchange, LoopHooks(before_part=self._deadlines(script, program)))
        try:
            self.params[script.peer] = loop.run(_batches(script, program)).params
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
            arguments: dict[str, object] = dict(parse_arguments(self.settings.program_arguments))
            if data:
                arguments["data"] = data
            if "seed" in program_arguments(self.settings.program):
                arguments.setdefault("seed", self.settings.seed)
            self._programs[data] = load_program(self.settings.program, arguments)
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


def _batches(script: NodeScript, program: NodeProgram) -> Iterator[Any]:
    """Give the batches that the node used, and no more."""
    used = -(-script.samples[script.steps] // program.samples_per_batch)
    return islice(chain.from_iterable(program.batches(unit) for unit in script.units), used)

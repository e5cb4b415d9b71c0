"""Run a scenario: real training code, real hub and codecs, virtual time.

Rule 1: everything that is random comes from the scenario's seed, so a run can be repeated bit for bit.
Rule 2: what is measured costs no virtual time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from zmqtrain.broker.broker import Broker, BrokerOptions
from zmqtrain.broker.core import BrokerAccess
from zmqtrain.chaos.schedule import Fault
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Buffer, PeerId, Version
from zmqtrain.monitor.recorder import BrokerRecorder, NodeRecorder
from zmqtrain.monitor.records import Record, record, release_facts
from zmqtrain.node.node import Node, NodeOptions
from zmqtrain.programs import load_program, parse_arguments, program_arguments
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Schedule
from zmqtrain.session.environment import enter
from zmqtrain.session.virtual import VirtualEnvironment, VirtualTime
from zmqtrain.sim.faults import NOISE_KINDS, RESTART_SECONDS, FrameNoise
from zmqtrain.sim.process import ADDRESS, CodecTimes, KnownRate, NodeProcess, SimulatedNode, hub_process, port_rate
from zmqtrain.sim.program import NodeProgram, SharedModel
from zmqtrain.sim.scenario import SPOILT, Scenario, SimNode
from zmqtrain.train.leaves import host_leaves
from zmqtrain.train.loop import TrainingLoop, TrainingResult
from zmqtrain.train.minibatch import minibatch_from_spec
from zmqtrain.train.program import Program
from zmqtrain.train.step import LoopHooks
from zmqtrain.train.sync import DelayedSync


@dataclass(frozen=True)
class SimResult:
    """What a simulated run came to.

    seconds: of virtual time.  scores: of the shared model at the end, on held-out data.  target_seconds: when the
    target loss was reached, inf if it was not.  steps, bytes_up, bytes_down: of all nodes.  params: the shared model,
    in the program's tree.  nodes: what those ended with that ended by themselves.  wall_seconds: of real time.
    """

    records: list[Record]
    scores: dict[str, float]
    version: int
    seconds: float
    target_seconds: float
    samples: int
    steps: int
    contributions: int
    refused: int
    bytes_up: int
    bytes_down: int
    params: Any
    nodes: dict[str, TrainingResult]
    wall_seconds: float

    def of_kind(self, kind: str) -> list[Record]:
        """Return the records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    def curve(self) -> list[tuple[float, int, float]]:
        """Return (seconds, samples in the model, held-out loss) of each evaluation."""
        return [(one["seconds"], one["samples"], one["loss"]) for one in self.of_kind("evaluation")]


def load_scenario_program(settings: RunSettings) -> Program:
    """Make the program that the settings name; the run's seed is its data's too, unless its arguments say another.

    Raises ConfigError and DataError.
    """
    if not settings.program:
        raise ConfigError('no program is named: say what the nodes train, as in program = "text"')
    arguments: dict[str, object] = dict(parse_arguments(settings.program_arguments))
    if "seed" in program_arguments(settings.program):
        arguments.setdefault("seed", settings.seed)
    return load_program(settings.program, arguments)


def simulate(
    scenario: Scenario,
    program: Program | None = None,
    initial_params: Any = None,
    watch: Callable[[Record], object] | None = None,
    make_sync: Callable[..., DelayedSync] = DelayedSync,
    record: Path | None = None,
) -> SimResult:
    """Simulate a run; one at a time in a process.

    program: instead of the one that the settings name; given to several runs, it is compiled once.  initial_params: a
    tree in which all nodes begin, instead of the program's own.  watch: called with each record as it is made.
    make_sync: what takes the place of `DelayedSync`, to compare with.  record: a folder for the files that a real
    broker (broker.jsonl) and real nodes (NAME.jsonl) would record; a run with initial_params or another make_sync is
    not replayed from them, for they hold neither.
    Raises ConfigError, and what a node raises.
    """
    program = load_scenario_program(scenario.settings) if program is None else program
    return _Simulation(scenario, program, initial_params, watch, make_sync, record).run()


class _NodeKeys(BrokerAccess):
    """A broker's port at which nodes come in with the keys of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._keys = {node.name: node.key for node in scenario.named_nodes()}

    def key_name(self, peer: PeerId) -> str:
        """See BrokerAccess."""
        return self._keys.get(peer.partition("#")[0], "")


class _Simulation:
    """One run of a scenario."""

    def __init__(
        self,
        scenario: Scenario,
        program: Program,
        initial_params: Any,
        watch: Callable[[Record], object] | None,
        make_sync: Callable[..., DelayedSync],
        record: Path | None,
    ) -> None:
        self.make_sync, self.folder = make_sync, record
        self.scenario, self.program, self.initial_params, self.watch = scenario, program, initial_params, watch
        self.settings = replace(scenario.settings, evaluate_seconds=0.0)  # the simulation scores the model itself
        self.scheduler = VirtualTime()
        self.recorder = None if record is None else BrokerRecorder(record / "broker.jsonl", clock=self.scheduler)
        self.recorders: dict[str, NodeRecorder] = {}
        self.process = VirtualEnvironment(self.scheduler, {})
        self.times = CodecTimes.of(scenario)
        self.model = SharedModel(program)
        self.records: list[Record] = []
        self.results: dict[str, TrainingResult] = {}
        self.processes: list[NodeProcess] = []
        self.peers: dict[str, PeerId] = {}
        self.steps: dict[tuple[str, int], int] = {}
        self.kills: dict[str, Callable[[], None]] = {}
        self.noises: dict[str, FrameNoise] = {}
        self.target_seconds = inf
        self.scores_at_end: dict[str, float] = {}
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self._decoded: OrderedDict[Any, Any] = OrderedDict()

    def run(self) -> SimResult:
        """Run it. Raises what a node raises."""
        self._began = time.perf_counter()
        try:
            self.scheduler.run(self._live)
            return self.result
        finally:
            for recorder in (*self.recorders.values(), *([self.recorder] if self.recorder else [])):
                recorder.close()

    async def _live(self) -> None:
        enter(self.process)
        link = self.scenario.hub_link
        self.channel = hub_process(self.process, self.scenario)
        options = BrokerOptions(
            run="run-simulated", events=_HubEvents(self), share=None if link is None else KnownRate(port_rate(link))
        )
        self.broker = Broker(self.channel, self.settings, options, _NodeKeys(self.scenario))
        self.hub = self.broker.hub
        self.broker.downlink.uploads.scale(port_rate(link or self.scenario.link))
        self.process.codec_seconds = lambda values: self.times.of_hub(
            values, self.hub.timetable.at(self.hub.version), max(1, len(self.hub.live))
        )
        serving = self.scheduler.spawn(self.broker.run())
        for node in self.scenario.named_nodes():
            self._add(node)
        for fault in self.scenario.faults:
            self._plan(fault)
        if self.scenario.evaluate_seconds:
            self.scheduler.call_at(0.0, self._evaluate_again)
        serving.add_done_callback(lambda _: self.scheduler.call_at(self.scheduler.now + 1.0, self.scheduler.stop))
        await self.scheduler.wait_threads(self.scenario.max_seconds)
        self.result = self._result(time.perf_counter() - self._began)
        for process in self.processes:
            process.kill()
        self.broker.stop()
        await serving

    def _plan(self, fault: Fault) -> None:
        """Have a fault befall its node; what stops, unplugs and slows it is in the node's own windows already."""

        def begin() -> None:
            self._say_membership(fault.target, fault.kind)
            if fault.kind in ("kill", "stop", "unplug", "slow"):
                if fault.kind == "kill":
                    self.kills[fault.target]()
            elif fault.kind == "drop":
                self.noises[fault.target].drop()
            else:
                self.noises[fault.target].set(fault.kind, fault.severity)
                self.scheduler.call_at(fault.ends_at, lambda: self.noises[fault.target].set(fault.kind, 0.0))

        if fault.kind not in ("stop", "unplug"):  # which are told as cuts
            self.scheduler.call_at(fault.at, begin)

    def _add(self, node: SimNode, life: int = 1) -> None:
        scheduler = self.scheduler
        peer = PeerId(f"{node.name}#simulated" if life == 1 else f"{node.name}#life-{life}")
        noise = None
        if any(fault.target == node.name and fault.kind in ("drop", *NOISE_KINDS) for fault in self.scenario.faults):
            noise = self.noises[node.name] = FrameNoise(f"{self.settings.seed}/{node.name}/{life}")
        recorder = None
        if self.folder is not None:
            spoilt = {field: getattr(node, field) for field in SPOILT}
            recorder = NodeRecorder(self.folder / f"{node.name}.jsonl", spoilt, scheduler)
            self.recorders[node.name] = recorder
        environment = VirtualEnvironment(scheduler, self.process.network)
        process = NodeProcess(environment, self.channel, noise)
        options = NodeOptions(
            peer=peer, name=node.name, addresses=(ADDRESS,), codec_on="host", events=recorder,
            share=KnownRate(port_rate(self.scenario.link)), incarnation=1,
        )  # fmt: skip
        self.processes.append(process)
        self.peers[node.name] = peer

        def train() -> None:
            self._train(node, SimulatedNode(options, process, self.times, self._decoded), process, life)

        process.begin(node.name, train, node.joins_at)

        def kill() -> bool:
            lived = process.kill()
            if lived:
                self.channel.cut(peer)
                self._say_membership(node.name, "killed")
            return lived

        def kill_and_restart() -> None:
            if not kill():
                return
            if recorder is not None:
                recorder.close()
            again = replace(node, joins_at=scheduler.now + RESTART_SECONDS, cut=tuple(_after(node.cut, scheduler.now)))
            self._add(again, life + 1)

        self.kills[node.name] = kill_and_restart
        if node.killed_at < inf:
            scheduler.call_at(node.killed_at, kill)
        for begin, end in node.cut:
            for when, happen, word in ((begin, self.channel.pause, "cut"), (end, self.channel.resume, "mended")):
                scheduler.call_at(when, partial(happen, peer))
                scheduler.call_at(when, partial(self._say_membership, node.name, word))

    def _train(self, node: SimNode, exchange: Node, process: NodeProcess, life: int) -> None:
        self._say_membership(node.name, "joined")
        program = NodeProgram(self.program, node, self.initial_params, self.scenario.score_nodes)
        before_step, before_part = self._computation(node)
        exchange.message_delay = node.induced(self.settings.seed).message_delays(node.name)
        exchange.start()
        exchange.wait(lambda: exchange.peer.settings is not None, None)
        process.welcomed(exchange.settings)
        loss_before: list[Any] = []

        def watch(number: int, loss: Any) -> None:
            self._say_steps(loss_before)
            loss_before.append((self.scheduler.now, node.name, number, loss))
            self.steps[node.name, life] = number

        hooks = LoopHooks(lambda: self.scheduler.now >= node.leaves_at, watch, before_step, before_part)
        loop = TrainingLoop(program, exchange, hooks, self.make_sync)
        batches = exchange.batches(program.batches)
        try:
            result = loop.run(islice(batches, node.steps) if node.steps else batches)
        finally:
            self._say_steps(loss_before)
        self.results[node.name] = result
        self._say_end(node, result)
        exchange.close("its training is over")

    def _computation(self, node: SimNode) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what takes a node's time: before each step its random delay, before each part of a batch its share."""
        delays, scheduler = node.induced(self.settings.seed).compute_delays(node.name), self.scheduler
        parts = getattr(minibatch_from_spec(self.settings.minibatch), "partitions", 1)
        part_seconds = node.step_seconds * node.slowness / parts

        def take(seconds: float) -> None:
            if seconds:
                scheduler.sleep(node.done_at(scheduler.now, seconds) - scheduler.now)

        return lambda: take(delays()), lambda: take(part_seconds)

    # ------------------------------------------------------------------ records

    def _record(self, record: Record) -> None:
        self.records.append(record)
        if self.watch is not None:
            self.watch(record)

    def _say_membership(self, node: str, what: str) -> None:
        self._record(record("membership", self.scheduler.now, node=node, what=what))
        if self.recorder is not None and what not in ("joined", "left"):
            self.recorder.member(self.peers[node], what, "")

    def _say_steps(self, waiting: list[Any]) -> None:
        """Record a step once its loss is there for sure: nobody waits for the device."""
        for seconds, node, number, loss in waiting:
            self._record(record("step", seconds, node=node, step=number, loss=float(loss)))
        waiting.clear()

    def _say_end(self, node: SimNode, result: TrainingResult) -> None:
        self._record(record("node_end", self.scheduler.now, node=node.name, **result.summary))
        if node.name in self.recorders:
            self.recorders[node.name].ended(result.summary, host_leaves(result.params))
        self._say_membership(node.name, "left")

    def released(self, reduce: Reduce, nodes: int) -> None:
        """The hub has made a version."""
        self._record(record("release", self.scheduler.now, **release_facts(reduce, nodes)))
        every = self.scenario.evaluate_versions
        if every and reduce.version % every == 0:
            self._evaluate()

    def _evaluate_again(self) -> None:
        self._evaluate()
        self.scheduler.call_at(self.scheduler.now + self.scenario.evaluate_seconds, self._evaluate_again)

    def _evaluate(self) -> dict[str, float]:
        version = self.broker.aggregator.version
        if version < 0:
            return {}
        if version != self._evaluated[0]:
            self._evaluated = (version, self.model.scores(self._published()))
        scores = self._evaluated[1]
        self._record(record("evaluation", self.scheduler.now, version=version, samples=self.hub.samples, **scores))
        if self.recorder is not None:
            self.recorder.evaluated(version, self.hub.samples, scores)
        if scores.get("loss", inf) <= self.scenario.target_loss and self.target_seconds == inf:
            self.target_seconds = self.scheduler.now
            self.scheduler.stop()
        return scores

    def _published(self) -> list[Any]:
        aggregator = self.broker.aggregator
        return list(aggregator.layout.join(aggregator.published)) if aggregator.version >= 0 else []

    def _result(self, wall_seconds: float) -> SimResult:
        scores, hub, now = self._evaluate(), self.hub, self.scheduler.now
        figures = {
            "version": hub.version,
            "samples": hub.samples,
            "steps": sum(self.steps.values()),
            "contributions": hub.contributions,
            "refused": hub.refused,
            "bytes_up": sum(one.node.link.bytes_sent for one in self.processes if one.node is not None),
            "bytes_down": self.broker.downlink.bytes_sent,
        }
        self._record(record("run_end", now, **{**figures, "target_seconds": self.target_seconds, **scores}))
        leaves = self._published()
        self.scores_at_end = scores
        return SimResult(
            records=self.records,
            scores=scores,
            seconds=now,
            target_seconds=self.target_seconds,
            params=self.model.params(leaves) if leaves else None,
            nodes=self.results,
            wall_seconds=wall_seconds,
            **figures,
        )


class _HubEvents:
    """The simulation and its recorder hear what happens at the hub: a `BrokerEvents`."""

    def __init__(self, simulation: _Simulation) -> None:
        self._simulation, self._recorder = simulation, simulation.recorder

    def began(self, run: str, settings: RunSettings, version: Version) -> None:
        if self._recorder is not None:
            self._recorder.began(run, settings, version)

    def member(self, peer: PeerId, what: str, text: str) -> None:
        if self._recorder is not None:
            self._recorder.member(peer, what, text)

    def averaged(self, peers: Sequence[PeerId]) -> None:
        if self._recorder is not None:
            self._recorder.averaged(peers)

    def scheduled(self, schedule: Schedule, text: str) -> None:
        if self._recorder is not None:
            self._recorder.scheduled(schedule, text)

    def founded(self, peer: PeerId) -> None:
        if self._recorder is not None:
            self._recorder.founded(peer)

    def released(
        self,
        reduce: Reduce,
        nodes: int,
        codec: str,
        frames: Sequence[Sequence[Buffer]],
        left_out: Sequence[Contribution] = (),
    ) -> None:
        if self._recorder is not None:
            self._recorder.released(reduce, nodes, codec, frames, left_out)
        self._simulation.released(reduce, nodes)

    def evaluated(self, version: Version, samples: int, scores: Mapping[str, float]) -> None:
        """See BrokerEvents: the simulation scores the model itself."""

    def ended(self, figures: Mapping[str, Any], leaves: Sequence[Array]) -> None:
        if self._recorder is not None:
            self._recorder.ended({**figures, **self._simulation.scores_at_end}, leaves)


def _after(windows: Sequence[tuple[float, float]], now: float) -> Iterator[tuple[float, float]]:
    """Give what is left of these windows from now on."""
    return ((max(begin, now), end) for begin, end in windows if end > now)

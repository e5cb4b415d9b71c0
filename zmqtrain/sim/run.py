"""Run a scenario: real training code, real hub and codecs, virtual time.

Rule 1: everything that is random comes from the scenario's seed, so a run can be repeated bit for bit.
Rule 2: what is measured costs no virtual time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from zmqtrain.chaos.schedule import Fault
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import PeerId
from zmqtrain.monitor import records
from zmqtrain.monitor.recorder import BrokerRecorder, NodeRecorder
from zmqtrain.monitor.records import Record
from zmqtrain.node.node import Node, NodeOptions
from zmqtrain.programs import load_program, parse_arguments, program_arguments
from zmqtrain.protocol.effects import Reduce
from zmqtrain.sim.clock import Scheduler
from zmqtrain.sim.exchange import SimEnvironment
from zmqtrain.sim.faults import NOISE_KINDS, RESTART_SECONDS, FrameNoise
from zmqtrain.sim.hub import CodecTimes, SimHub, port_rate
from zmqtrain.sim.program import NodeProgram, SharedModel
from zmqtrain.sim.scenario import SPOILT, Scenario, SimNode
from zmqtrain.sim.star import Wire
from zmqtrain.train.leaves import host_leaves
from zmqtrain.train.loop import TrainingLoop, TrainingResult
from zmqtrain.train.minibatch import minibatch_from_spec
from zmqtrain.train.program import Program
from zmqtrain.train.step import LoopHooks
from zmqtrain.train.sync import DelayedSync
from zmqtrain.transport.pacing import LinkShare


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
        self.scheduler = Scheduler()
        self.recorder = None if record is None else BrokerRecorder(record / "broker.jsonl", clock=self.scheduler)
        self.recorders: dict[str, NodeRecorder] = {}
        self.hub = SimHub(
            self.scheduler, self.settings, CodecTimes.of(scenario), self._released, self.recorder, scenario.hub_link
        )
        self.model = SharedModel(program)
        self.records: list[Record] = []
        self.results: dict[str, TrainingResult] = {}
        self.wires: list[Wire] = []
        self.peers: dict[str, PeerId] = {}
        self.steps: dict[tuple[str, int], int] = {}
        self.kills: dict[str, Callable[[], None]] = {}
        self.noises: dict[str, FrameNoise] = {}
        self.target_seconds = inf
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self._decoded: OrderedDict[Any, Any] = OrderedDict()

    def run(self) -> SimResult:
        """Run it. Raises what a node raises."""
        began = time.perf_counter()
        for node in self.scenario.named_nodes():
            self._add(node)
        for fault in self.scenario.faults:
            self._plan(fault)
        if self.scenario.evaluate_seconds:
            self.scheduler.call_at(0.0, self._evaluate_again)
        if self.recorder is not None:
            self.recorder.began(self.hub.hub.run, self.hub.settings, -1)
        try:
            self.scheduler.run(self.scenario.max_seconds)
            return self._result(time.perf_counter() - began)
        finally:
            for recorder in (*self.recorders.values(), *([self.recorder] if self.recorder else [])):
                recorder.close()

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
        scheduler, wire = self.scheduler, Wire(self.scheduler, self.scenario.link, self.hub.ports)
        if any(fault.target == node.name and fault.kind in ("drop", *NOISE_KINDS) for fault in self.scenario.faults):
            wire.noise = self.noises[node.name] = FrameNoise(f"{self.settings.seed}/{node.name}/{life}")
        induced = node.induced(self.settings.seed)
        late = induced.message_delays(node.name)
        recorder = None
        if self.folder is not None:
            spoilt = {field: getattr(node, field) for field in SPOILT}
            recorder = NodeRecorder(self.folder / f"{node.name}.jsonl", spoilt, scheduler)
            self.recorders[node.name] = recorder
        rate = port_rate(self.scenario.link)
        environment = SimEnvironment(scheduler, self.hub, wire, CodecTimes.of(self.scenario), self._decoded)
        peer = PeerId(f"{node.name}#simulated" if life == 1 else f"{node.name}#life-{life}")
        options = NodeOptions(
            peer=peer, name=node.name, codec_on="host", events=recorder, share=LinkShare(rate), incarnation=1
        )
        exchange = Node(options, environment)
        exchange.message_delay = late
        self.wires.append(wire)
        self.peers[node.name] = peer
        task = scheduler.start(node.name, lambda: self._train(node, exchange, life), node.joins_at)

        def kill() -> None:
            if not task.ended:
                environment.link.die()
                scheduler.kill(task)
                self._say_membership(node.name, "killed")

        def kill_and_restart() -> None:
            if task.ended:
                return
            kill()
            if recorder is not None:
                recorder.close()
            again = replace(node, joins_at=scheduler.now + RESTART_SECONDS, cut=tuple(_after(node.cut, scheduler.now)))
            self._add(again, life + 1)

        self.kills[node.name] = kill_and_restart
        if node.killed_at < inf:
            scheduler.call_at(node.killed_at, kill)
        for begin, end in node.cut:
            for when, happen, word in ((begin, wire.cut, "cut"), (end, wire.mend, "mended")):
                scheduler.call_at(when, happen)
                scheduler.call_at(when, partial(self._say_membership, node.name, word))

    def _train(self, node: SimNode, exchange: Node, life: int) -> None:
        self._say_membership(node.name, "joined")
        program = NodeProgram(self.program, node, self.initial_params, self.scenario.score_nodes)
        before_step, before_part = self._computation(node)
        exchange.start()
        exchange.wait(lambda: exchange.peer.settings is not None, None)
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
        exchange.link.close("its training is over")

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
        self._record(records.membership(self.scheduler.now, node, what))
        if self.recorder is not None:
            self.recorder.member(self.peers[node], what, "")

    def _say_steps(self, waiting: list[Any]) -> None:
        """Record a step once its loss is there for sure: nobody waits for the device."""
        for seconds, node, number, loss in waiting:
            self._record(records.step(seconds, node, number, float(loss)))
        waiting.clear()

    def _say_end(self, node: SimNode, result: TrainingResult) -> None:
        self._record(records.node_end(self.scheduler.now, node.name, result.summary))
        if node.name in self.recorders:
            self.recorders[node.name].ended(result.summary, host_leaves(result.params))
        self._say_membership(node.name, "left")

    def _released(self, reduce: Reduce) -> None:
        self._record(records.release(self.scheduler.now, reduce, len(self.hub.hub.live)))
        every = self.scenario.evaluate_versions
        if every and reduce.version % every == 0:
            self._evaluate()

    def _evaluate_again(self) -> None:
        self._evaluate()
        self.scheduler.call_later(self.scenario.evaluate_seconds, self._evaluate_again)

    def _evaluate(self) -> dict[str, float]:
        version = self.hub.aggregator.version
        if version < 0:
            return {}
        if version != self._evaluated[0]:
            self._evaluated = (version, self.model.scores(self.hub.published()))
        scores = self._evaluated[1]
        self._record(records.evaluation(self.scheduler.now, version, self.hub.hub.samples, scores))
        if self.recorder is not None:
            self.recorder.evaluated(version, self.hub.hub.samples, scores)
        if scores.get("loss", inf) <= self.scenario.target_loss and self.target_seconds == inf:
            self.target_seconds = self.scheduler.now
            self.scheduler.stop()
        return scores

    def _result(self, wall_seconds: float) -> SimResult:
        scores, hub, now = self._evaluate(), self.hub.hub, self.scheduler.now
        figures = {
            "version": hub.version,
            "samples": hub.samples,
            "steps": sum(self.steps.values()),
            "contributions": hub.contributions,
            "refused": hub.refused,
            "bytes_up": sum(wire.up for wire in self.wires),
            "bytes_down": sum(wire.down for wire in self.wires),
        }
        self._record(records.run_end(now, {**figures, "target_seconds": self.target_seconds, **scores}))
        leaves = self.hub.published()
        if self.recorder is not None:
            self.recorder.ended({**figures, **scores}, leaves)
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


def _after(windows: Sequence[tuple[float, float]], now: float) -> Iterator[tuple[float, float]]:
    """Give what is left of these windows from now on."""
    return ((max(begin, now), end) for begin, end in windows if end > now)

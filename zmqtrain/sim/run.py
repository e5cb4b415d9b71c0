"""Run a scenario: real training code, real hub, nodes and codecs, in virtual time.

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

import numpy as np

from zmqtrain.averaging.coder import DeltaCoder
from zmqtrain.broker.broker import Broker, BrokerOptions
from zmqtrain.broker.core import BrokerAccess
from zmqtrain.broker.standby import Registration, ShardPlace
from zmqtrain.chaos.schedule import Fault
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.interfaces import Channel
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings
from zmqtrain.core.types import Array, Buffer, ModelSpec, PeerId, Version
from zmqtrain.monitor.recorder import BrokerRecorder, NodeRecorder
from zmqtrain.monitor.records import Record, record, release_facts
from zmqtrain.node.node import Node, NodeOptions
from zmqtrain.node.shards import ShardedNode
from zmqtrain.planning.costs import ExchangeCosts, exchange_costs
from zmqtrain.planning.schedule import exchange_bytes, model_of
from zmqtrain.programs import load_program, parse_arguments, program_arguments
from zmqtrain.protocol.effects import Reduce
from zmqtrain.protocol.hosting import division
from zmqtrain.session.environment import enter
from zmqtrain.session.virtual import VirtualEnvironment, VirtualThread, VirtualTime
from zmqtrain.sim.program import NodeProgram, SharedModel
from zmqtrain.sim.scenario import NOISE_KINDS, RESTART_SECONDS, SPOILT, FrameNoise, Scenario, SimNode
from zmqtrain.train.leaves import host_leaves
from zmqtrain.train.loop import TrainingLoop, TrainingResult
from zmqtrain.train.minibatch import minibatch_from_spec
from zmqtrain.train.program import Program
from zmqtrain.train.step import LoopHooks, describe_model
from zmqtrain.train.sync import DelayedSync
from zmqtrain.transport.memory import LinkModel, Machine, MemoryHub
from zmqtrain.transport.pacing import LinkShare

ADDRESS = "memory://hub"
"""Of the first broker."""
NANO = 1e-9
FASTEST_BITS = 1e12
"""A plan counts on no faster link."""
DECODED_KEPT = 64


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
        return [record for record in self.records if record["kind"] == kind]

    def curve(self) -> list[tuple[float, int, float]]:
        """Return (seconds, samples in the model, held-out loss) of each evaluation."""
        return [(one["seconds"], one["samples"], one["loss"]) for one in self.of_kind("evaluation")]


def load_scenario_program(settings: RunSettings, data: str = "") -> Program:
    """Make the program that the settings name; the run's seed is its data's too, unless its arguments say another.

    data: a node's own, "" for the program's.  Raises ConfigError and DataError.
    """
    if not settings.program:
        raise ConfigError('no program is named: say what the nodes train, as in program = "text"')
    arguments: dict[str, object] = dict(parse_arguments(settings.program_arguments))
    if data:
        arguments["data"] = data
    if "seed" in program_arguments(settings.program):
        arguments.setdefault("seed", settings.seed)
    return load_program(settings.program, arguments)


def simulate(
    scenario: Scenario,
    program: Program | None = None,
    initial_params: Any = None,
    watch: Callable[[Record], object] | None = None,
    make_sync: type[DelayedSync] = DelayedSync,
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


# ---------------------------------------------------------------------- the processes of a run


def _address(shard: int) -> str:
    """Return where nodes find the broker of a shard."""
    return f"tcp://shard-{shard}:5555" if shard else ADDRESS


def _division(scenario: Scenario, program: Program) -> int:
    """Return among how many brokers the model is divided where that is auto: one, where losses are simulated."""
    model = describe_model(program.init(scenario.settings.seed))
    settings = scenario.settings
    return division(settings.start_nodes, model, settings.fragments) if scenario.may_be_divided else 1


def _port_rate(link: LinkModel) -> float:
    """Return what a plan counts on of such a port, in bytes per second."""
    return min(link.bits_per_second, FASTEST_BITS) / 8


class _KnownRate(LinkShare):
    """A port with a rate that plans know; it paces nothing, because the simulated port has that rate."""

    def limit(self, measured: float = 0.0) -> float | None:
        return None


def node_codec_seconds(scenario: Scenario, values: int, settings: RunSettings) -> float:
    """Return the seconds in which a node encodes an offer of so many values, or decodes an aggregate of them.

    settings: that hold, with the codecs.
    """
    if not scenario.codec_scale or not values:
        return NANO * scenario.node_codec_ns * values
    return _costs(scenario, values, settings, 1).node_seconds / 2


def hub_codec_seconds(scenario: Scenario, values: int, settings: RunSettings, nodes: int) -> float:
    """Return the seconds in which the hub checks or adds a delta of so many values, or releases an aggregate, the mean
    of these."""
    if not scenario.codec_scale or not values:
        return NANO * scenario.hub_codec_ns * values
    return _costs(scenario, values, settings, nodes).hub_seconds / (2 * nodes + 1)


def _costs(scenario: Scenario, values: int, settings: RunSettings, nodes: int) -> ExchangeCosts:
    scale, codec, broadcast_codec = scenario.codec_scale, settings.codec, settings.broadcast_codec
    sizes = exchange_bytes(model_of(values), codec, broadcast_codec)
    return exchange_costs(
        scale * values,
        round(scale * sizes.up),
        round(scale * sizes.down),
        codec,
        broadcast_codec,
        nodes,
        codec_on=scenario.codec_on,
        node_threads=scenario.node_threads,
        hub_threads=scenario.hub_threads,
    )


class _SharedCoder(DeltaCoder):
    """A coder that decodes what other nodes have decoded before only once: the same bytes, the same arrays."""

    def __init__(self, model: ModelSpec, settings: RunSettings, shard: int, decoded: OrderedDict[Any, Any]) -> None:
        super().__init__(model, settings, shard=shard)
        self._shard, self._decoded = shard, decoded

    def _decode(self, codec: str, fragment: int, frames: Sequence[Buffer]) -> Sequence[Array]:
        key = (codec, self._shard, fragment, *map(bytes, frames))
        if key not in self._decoded:
            self._decoded[key] = super()._decode(codec, fragment, frames)
            if len(self._decoded) > DECODED_KEPT:
                self._decoded.popitem(last=False)
        result: Sequence[Array] = self._decoded[key]
        return result


class NodeProcess:
    """One simulated node process: the `Dialer` of its node. machine: where it is.  hubs: by address.  noise: on its
    connections.  lines: its node, and those at the other brokers, if there are several."""

    def __init__(
        self, clock: VirtualTime, machine: Machine, hubs: Mapping[str, MemoryHub], noise: FrameNoise | None
    ) -> None:
        self.environment, self._machine, self._hubs, self._noise = VirtualEnvironment(clock), machine, hubs, noise
        self.lines: list[SimulatedNode] = []
        self.thread: VirtualThread | None = None

    def dial(self, address: str, peer: PeerId) -> Channel:
        channel = self._hubs[address].connect(peer, self._machine)
        channel.noise = self._noise
        return channel

    def begin(self, name: str, body: Callable[[], None], at: float) -> None:
        """Have its training thread begin at a time."""
        self.thread = self.environment.begin(name, body, at)

    def kill(self) -> bool:
        """End all its threads where they stand; return whether it still lived."""
        assert self.thread is not None
        if self.thread.ended:
            return False
        self.environment.clock.kill(self.thread)
        self.environment.kill()
        return True


class SimulatedNode(Node):
    """A node whose codec takes modelled time.

    decoded: shared by the nodes of a simulation: the aggregates decoded recently.  first: as of `Node`.
    """

    def __init__(
        self,
        options: NodeOptions,
        process: NodeProcess,
        scenario: Scenario,
        decoded: OrderedDict[Any, Any],
        first: Node | None = None,
    ) -> None:
        super().__init__(options, process, first)
        self.process, self.scenario, self.decoded = process, scenario, decoded
        process.lines.append(self)
        process.environment.codec_seconds = process.lines[0]._seconds_of

    def make_coder(self, model: ModelSpec) -> DeltaCoder:
        return _SharedCoder(model, self.settings, self.shard, self.decoded)

    @property
    def exchange_seconds(self) -> float:
        """See Node: of an offer and an aggregate, each of one fragment."""
        return 2 * self._seconds_of(self._values[0] if self._values else 0)

    def _seconds_of(self, values: int) -> float:
        """Return the time of a job that codes so many values."""
        timetable = self.peer.timetable
        settings = self.settings.at_first if timetable is None else timetable.at(self.offers.version)
        return node_codec_seconds(self.scenario, values, settings)


class SimulatedShards(ShardedNode):
    """A node of several simulated brokers. first: the node at the first of them, welcomed."""

    def __init__(self, first: SimulatedNode) -> None:
        super().__init__(first, first.process, inf)
        self._simulated = first

    def open_line(self, address: str) -> Node:
        first = self._simulated
        peer = PeerId(f"{first.name}#line-{len(first.process.lines)}")
        options = replace(first.options, peer=peer, addresses=(address,), events=None)
        line = SimulatedNode(options, first.process, first.scenario, first.decoded, first)
        line.start()
        return line


class _Access(BrokerAccess):
    """A broker's port at which nodes come in with the keys of a scenario, and from their machines.

    hosts: by shard, on which node its broker is, "" where it is on none.  dial: reaches the first broker from there.
    """

    connects = True

    def __init__(self, scenario: Scenario, hosts: Sequence[str], dial: Callable[[PeerId], Channel]) -> None:
        self._keys = {node.name: node.key for node in scenario.named_nodes()}
        self._hosts, self._dial = hosts, dial

    def key_name(self, peer: PeerId) -> str:
        return self._keys.get(peer.partition("#")[0], "")

    def host_of(self, peer: PeerId) -> str:
        name = peer.partition("#")[0]
        return name if name in self._keys else self._hosts[int(name.rpartition("-")[2])]

    def dial(self, address: str, peer: PeerId) -> Channel:
        return self._dial(peer)


class _Recorder(BrokerRecorder):
    """The recorder of the simulated broker, and the simulation's ear. path: None to write no file."""

    def __init__(self, simulation: _Simulation, path: Path | None) -> None:
        super().__init__(path, clock=simulation.scheduler)
        self._simulation = simulation

    def released(self, reduce: Reduce, nodes: int, *others: Any) -> None:
        if self.path is not None:
            super().released(reduce, nodes, *others)
        self._simulation.released(reduce, nodes)

    def evaluated(self, version: Version, samples: int, scores: Mapping[str, float]) -> None:
        """See BrokerRecorder: the simulation scores the model itself."""

    def ended(self, figures: Mapping[str, Any], leaves: Sequence[Array]) -> None:
        super().ended({**figures, **self._simulation.scores_at_end}, leaves)


# ---------------------------------------------------------------------- the run


class _Simulation:
    """One run of a scenario."""

    def __init__(
        self,
        scenario: Scenario,
        program: Program,
        initial_params: Any,
        watch: Callable[[Record], object] | None,
        make_sync: type[DelayedSync],
        record: Path | None,
    ) -> None:
        self.make_sync, self.folder = make_sync, record
        self.scenario, self.program, self.initial_params, self.watch = scenario, program, initial_params, watch
        self.settings = replace(scenario.settings, evaluate_seconds=0.0)  # the simulation scores the model itself
        if self.settings.shards == AUTO_SHARDS:  # it begins as the hub would decide
            self.settings = replace(self.settings, shards=_division(scenario, program))
        self.scheduler = VirtualTime()
        self.recorder = _Recorder(self, None if record is None else record / "broker.jsonl")
        self.recorders: dict[str, NodeRecorder] = {}
        names, shards = [node.name for node in scenario.named_nodes()], self.settings.shards
        self.machines = {name: Machine() for name in names}
        self.hosts = ["", *(names[: shards - 1] if scenario.shards_on_nodes else [""] * (shards - 1))]
        self.hubs: dict[str, MemoryHub] = {}
        self.brokers: dict[int, Broker] = {}
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
        self._evaluated: tuple[list[Version], dict[str, float]] = ([], {})
        self._decoded: OrderedDict[Any, Any] = OrderedDict()

    def run(self) -> SimResult:
        """Run it. Raises what a node raises."""
        self._began = time.perf_counter()
        try:
            self.scheduler.run(self._live)
            return self.result
        finally:
            for recorder in (*self.recorders.values(), self.recorder):
                recorder.close()

    async def _live(self) -> None:
        shards = self.settings.shards
        for shard in range(shards):
            link = None if self.hosts[shard] else self.scenario.hub_link
            self.hubs[_address(shard)] = MemoryHub(
                self.scenario.link, queue_messages=1 << 16, hub_link=link, free_heads=True,
                machine=self.machines.get(self.hosts[shard]), address=_address(shard),
            )  # fmt: skip
        self.channel = self.hubs[ADDRESS]
        enter(hub := VirtualEnvironment(self.scheduler))
        self.broker = self._make_broker(hub, 0, _Access(self.scenario, self.hosts, self.channel.connect))
        self.hub = self.broker.hub
        serving = [self.scheduler.spawn(self.broker.run())]
        serving += [self.scheduler.spawn(self._serve_shard(shard)) for shard in range(1, shards)]
        for node in self.scenario.named_nodes():
            self._add(node)
        for fault in self.scenario.faults:
            self._plan(fault)
        if self.scenario.evaluate_seconds:
            self.scheduler.call_at(0.0, self._evaluate_again)
        serving[0].add_done_callback(lambda _: self.scheduler.call_at(self.scheduler.now + 1.0, self.scheduler.stop))
        await self.scheduler.wait_threads(self.scenario.max_seconds)
        self.result = self._result(time.perf_counter() - self._began)
        for process in self.processes:
            process.kill()
        for shard in reversed(range(shards)):  # the first last
            if shard in self.brokers:
                self.brokers[shard].stop()
                await serving[shard]

    def _make_broker(
        self, process: VirtualEnvironment, shard: int, access: _Access, registration: Registration | None = None
    ) -> Broker:
        """Return a broker of the run, made in its process, which the caller has entered."""
        scenario, host = self.scenario, self.hosts[shard]
        link = None if host else scenario.hub_link
        options = BrokerOptions(
            run="run-simulated",
            events=None if shard else self.recorder,
            share=None if link is None else _KnownRate(_port_rate(link)),
            registration=registration,
        )
        settings = self.settings if registration is None else registration.settings
        broker = self.brokers[shard] = Broker(self.hubs[_address(shard)], settings, options, access)
        broker.downlink.uploads.scale(_port_rate(link or scenario.link))
        of_a_node = replace(scenario, hub_threads=1.0) if host else scenario
        hub = broker.hub
        process.codec_seconds = lambda values: hub_codec_seconds(
            of_a_node, values, hub.timetable.at(hub.version), max(1, len(hub.live))
        )
        return broker

    async def _serve_shard(self, shard: int) -> None:
        """Be the process of another broker than the first."""
        enter(process := VirtualEnvironment(self.scheduler))
        machine = self.machines.get(self.hosts[shard])
        access = _Access(self.scenario, self.hosts, lambda peer: self.channel.connect(peer, machine))
        place = ShardPlace(shard=shard, shards=self.settings.shards, first=ADDRESS)
        begun = self.scheduler.loop.create_future()
        # in a thread, as it waits for its session to begin
        process.begin(f"broker-{shard}", lambda: begun.set_result(Registration(place, _address(shard), access)))
        registration: Registration = await begun
        await registration.welcomed()
        await self._make_broker(process, shard, access, registration).run()

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
        if self.folder is not None and self.settings.shards == 1:  # else it cannot be replayed
            spoilt = {field: getattr(node, field) for field in SPOILT}
            recorder = NodeRecorder(self.folder / f"{node.name}.jsonl", spoilt, scheduler)
            self.recorders[node.name] = recorder
        process = NodeProcess(scheduler, self.machines[node.name], self.hubs, noise)
        options = NodeOptions(
            peer=peer, name=node.name, addresses=(ADDRESS,), codec_on="host", events=recorder,
            share=_KnownRate(_port_rate(self.scenario.link)), incarnation=1,
        )  # fmt: skip
        self.processes.append(process)
        self.peers[node.name] = peer

        def train() -> None:
            self._train(node, SimulatedNode(options, process, self.scenario, self._decoded), process, life)

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

    def _train(self, node: SimNode, first: SimulatedNode, process: NodeProcess, life: int) -> None:
        self._say_membership(node.name, "joined")
        program = NodeProgram(self.program, node, self.initial_params, self.scenario.score_nodes)
        before_step, before_part = self._computation(node)
        first.message_delay = node.induced(self.settings.seed).message_delays(node.name)
        first.start()
        first.wait(lambda: first.peer.settings is not None, None)
        exchange = first if first.settings.shards == 1 else SimulatedShards(first)
        loss_before: list[Any] = []

        def watch(number: int, loss: Any) -> None:
            self._say_steps(loss_before)
            loss_before.append((self.scheduler.now, node.name, number, loss))
            self.steps[node.name, life] = number

        hooks = LoopHooks(lambda: self.scheduler.now >= node.leaves_at, watch, before_step, before_part)
        loop = TrainingLoop(program, exchange, hooks, sync=self.make_sync)
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
        if what not in ("joined", "left"):
            self.recorder.member(self.peers[node], what, "")

    def _say_steps(self, waiting: list[Any]) -> None:
        """Record a step once its loss is there for sure: nobody waits for the device."""
        for seconds, node, number, loss in waiting:
            self._record(record("step", seconds, node=node, step=number, loss=float(loss)))
        waiting.clear()

    def _say_end(self, node: SimNode, result: TrainingResult) -> None:
        self._record(record("node_end", self.scheduler.now, **{"node": node.name, **result.summary}))
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
        versions = self._versions()
        if min(versions) < 0:
            return {}
        if versions != self._evaluated[0]:
            self._evaluated = (versions, self.model.scores(self._published()))
        scores = self._evaluated[1]
        facts = {"version": versions[0], "samples": self.hub.samples, **scores}
        self._record(record("evaluation", self.scheduler.now, **facts))
        self.recorder.write(self.recorder.record("evaluation", **facts))
        if scores.get("loss", inf) <= self.scenario.target_loss and self.target_seconds == inf:
            self.target_seconds = self.scheduler.now
            self.scheduler.stop()
        return scores

    def _versions(self) -> list[Version]:
        """Return the version of each broker's shard, -1 where it has none."""
        shards = map(self.brokers.get, range(self.settings.shards))
        return [-1 if broker is None else broker.aggregator.version for broker in shards]

    def _published(self) -> list[Any]:
        """Return the leaves of the shared model, of all brokers; none before each has its shard."""
        if min(self._versions()) < 0:
            return []
        parts = [one.layout.join(one.published) for one in (self.brokers[n].aggregator for n in sorted(self.brokers))]
        return [
            np.concatenate([*map(np.ravel, of_leaf)]).reshape(leaf.shape)
            for leaf, *of_leaf in zip(self.hub.model, *parts, strict=True)
        ]

    def _result(self, wall_seconds: float) -> SimResult:
        scores, hub, now, brokers = self._evaluate(), self.hub, self.scheduler.now, self.brokers.values()
        figures = {
            "version": hub.version,
            "samples": hub.samples,
            "steps": sum(self.steps.values()),
            "contributions": sum(one.hub.contributions for one in brokers),
            "refused": sum(one.hub.refused for one in brokers),
            "bytes_up": sum(line.link.bytes_sent for one in self.processes for line in one.lines),
            "bytes_down": sum(one.downlink.bytes_sent for one in brokers),
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


def _after(windows: Sequence[tuple[float, float]], now: float) -> Iterator[tuple[float, float]]:
    """Give what is left of these windows from now on."""
    return ((max(begin, now), end) for begin, end in windows if end > now)

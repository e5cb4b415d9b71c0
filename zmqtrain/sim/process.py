"""The processes of a simulated run: their environments in virtual time, and the time that their codecs take."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zmqtrain.averaging.coder import DeltaCoder
from zmqtrain.core.errors import NonFiniteDelta
from zmqtrain.core.interfaces import Channel, Clock
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Buffer, ModelSpec, PeerId
from zmqtrain.node.node import Executor, Node, NodeLink
from zmqtrain.planning.costs import ExchangeCosts, Place, exchange_costs
from zmqtrain.planning.schedule import exchange_bytes, model_of
from zmqtrain.session.hub_session import HubSession
from zmqtrain.session.virtual import VirtualCondition, VirtualEnvironment, VirtualThread
from zmqtrain.sim.faults import FrameNoise
from zmqtrain.sim.scenario import Scenario
from zmqtrain.transport.memory import LinkModel, MemoryHub
from zmqtrain.transport.pacing import LinkShare

ADDRESS = "memory://hub"
NANO = 1e-9
FASTEST_BITS = 1e12
"""A plan counts on no faster link."""
DECODED_KEPT = 64


def port_rate(link: LinkModel) -> float:
    """Return what a plan counts on of such a port, in bytes per second."""
    return min(link.bits_per_second, FASTEST_BITS) / 8


class KnownRate(LinkShare):
    """A port with a rate that plans know; it paces nothing, because the simulated port has that rate."""

    def limit(self, measured: float = 0.0) -> float | None:
        """See LinkShare."""
        return None


@dataclass(frozen=True)
class CodecTimes:
    """The time of the codec threads of a scenario. The fields are those of `Scenario`."""

    node_ns: float = 0.0
    hub_ns: float = 0.0
    scale: float = 0.0
    codec_on: Place = "host"
    hub_threads: float = 1.0

    @classmethod
    def of(cls, scenario: Scenario) -> CodecTimes:
        """Return those of a scenario."""
        times = scenario.node_codec_ns, scenario.hub_codec_ns, scenario.codec_scale
        return cls(*times, scenario.codec_on, scenario.hub_threads)

    def of_node(self, values: int, settings: RunSettings) -> float:
        """Return the seconds in which a node encodes an offer of so many values, or decodes an aggregate of them.

        settings: that hold, with the codecs.
        """
        if not self.scale or not values:
            return NANO * self.node_ns * values
        return self._costs(values, settings, 1).node_seconds / 2

    def of_hub(self, values: int, settings: RunSettings, nodes: int) -> float:
        """Return the seconds in which the hub checks or adds a delta of so many values, or releases an aggregate, the
        mean of these."""
        if not self.scale or not values:
            return NANO * self.hub_ns * values
        return self._costs(values, settings, nodes).hub_seconds / (2 * nodes + 1)

    def _costs(self, values: int, settings: RunSettings, nodes: int) -> ExchangeCosts:
        codec, broadcast_codec = settings.codec, settings.broadcast_codec
        sizes = exchange_bytes(model_of(values), codec, broadcast_codec)
        return exchange_costs(
            self.scale * values,
            round(self.scale * sizes.up),
            round(self.scale * sizes.down),
            codec,
            broadcast_codec,
            nodes,
            codec_on=self.codec_on,
            hub_threads=self.hub_threads,
        )


class _SharedCoder(DeltaCoder):
    """A coder that decodes what other nodes have decoded before only once: the same bytes, the same arrays."""

    def __init__(self, model: ModelSpec, settings: RunSettings, decoded: OrderedDict[Any, Any]) -> None:
        super().__init__(model, settings)
        self._decoded = decoded

    def _decode(self, codec: str, fragment: int, frames: Sequence[Buffer]) -> Sequence[Array]:
        key = (codec, fragment, *map(bytes, frames))
        if key not in self._decoded:
            self._decoded[key] = super()._decode(codec, fragment, frames)
            if len(self._decoded) > DECODED_KEPT:
                self._decoded.popitem(last=False)
        result: Sequence[Array] = self._decoded[key]
        return result


class NodeProcess:
    """One simulated node process: a `NodeEnvironment`.

    decoded: shared by the nodes of a simulation: the aggregates decoded recently.  noise: on its connection.
    """

    virtual = True

    def __init__(
        self,
        process: VirtualEnvironment,
        hub: MemoryHub,
        times: CodecTimes,
        decoded: OrderedDict[Any, Any],
        noise: FrameNoise | None,
    ) -> None:
        self.clock: Clock = process.clock
        self._process, self._hub, self._times, self._decoded = process, hub, times, decoded
        self._noise = noise
        self.link: HubSession | None = None
        self.thread: VirtualThread | None = None

    def condition(self) -> threading.Condition:
        """See NodeEnvironment."""
        return VirtualCondition(self._process.clock)

    def open_link(self, node: Node, share: LinkShare) -> NodeLink:
        """See NodeEnvironment."""
        self.link = HubSession(self, node.peer, ADDRESS, node, share)
        return self.link

    def dial(self, address: str, peer: PeerId) -> Channel:
        """See Dialer."""
        channel = self._hub.connect(peer)
        channel.noise = self._noise
        return channel

    def open_executor(self, node: Node) -> Executor:
        """See NodeEnvironment."""
        executor = _NodeExecutor(self._process, self._times, node)
        self._process.codec_seconds = executor.seconds_of
        return executor

    def make_coder(self, node: Node, model: ModelSpec) -> DeltaCoder:
        """See NodeEnvironment."""
        return _SharedCoder(model, node.settings, self._decoded)

    def begin(self, name: str, body: Callable[[], None], at: float) -> None:
        """Have its training thread begin at a time."""
        self.thread = self._process.begin(name, body, at)

    def welcomed(self, settings: RunSettings) -> None:
        """Tick less often than a real session, where the run's heartbeat allows it, because ticks cost real time."""
        self._process.tick_seconds = min(0.25, max(self._process.tick_seconds, settings.heartbeat_seconds / 4))

    def kill(self) -> bool:
        """End all its threads where they stand; return whether it still lived."""
        assert self.thread is not None
        if self.thread.ended:
            return False
        self._process.clock.kill(self.thread)
        self._process.kill()
        return True


class _NodeExecutor:
    """The codec thread of a simulated node."""

    def __init__(self, process: VirtualEnvironment, times: CodecTimes, node: Node) -> None:
        self._times, self._node = times, node
        self._executor = process.executor("zmqtrain-codec", 256, self._failed)

    def submit(self, job: Callable[[], None], values: int = 0) -> bool:
        """See Executor."""
        return self._executor.submit(job, values)

    def exchange_seconds(self, measured: float, values: int) -> float:
        """See Executor: an offer and an aggregate, each of one fragment."""
        return 2 * self.seconds_of(values)

    def close(self) -> object:
        """See Executor."""
        return self._executor.close()

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, NonFiniteDelta):
            self._node.on_failed(error)
        else:
            self._node.on_codec_failed(error)

    def seconds_of(self, values: int) -> float:
        """Return the time of a job that codes so many values."""
        timetable = self._node.peer.timetable
        settings = self._node.settings.at_first if timetable is None else timetable.at(self._node.offers.version)
        return self._times.of_node(values, settings)


def hub_process(process: VirtualEnvironment, scenario: Scenario) -> MemoryHub:
    """Open the channel of the simulated hub, on the links of a scenario."""
    process.make_hub = lambda: MemoryHub(scenario.link, 1 << 16, scenario.hub_link, True)
    channel = process.listen(ADDRESS)
    assert isinstance(channel, MemoryHub)
    return channel

"""The processes of a simulated run: their environments in virtual time, and the time that their codecs take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zmqtrain.averaging.coder import DeltaCoder
from zmqtrain.core.interfaces import Channel
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Buffer, ModelSpec, PeerId
from zmqtrain.node.node import Node, NodeOptions
from zmqtrain.planning.costs import ExchangeCosts, Place, exchange_costs
from zmqtrain.planning.schedule import exchange_bytes, model_of
from zmqtrain.session.virtual import VirtualEnvironment, VirtualThread
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
    """One simulated node process: the `Dialer` of its node. noise: on its connection."""

    def __init__(self, process: VirtualEnvironment, hub: MemoryHub, noise: FrameNoise | None) -> None:
        self.environment, self._hub, self._noise = process, hub, noise
        self.node: SimulatedNode | None = None
        self.thread: VirtualThread | None = None

    def dial(self, address: str, peer: PeerId) -> Channel:
        """See Dialer."""
        channel = self._hub.connect(peer)
        channel.noise = self._noise
        return channel

    def begin(self, name: str, body: Callable[[], None], at: float) -> None:
        """Have its training thread begin at a time."""
        self.thread = self.environment.begin(name, body, at)

    def welcomed(self, settings: RunSettings) -> None:
        """Tick less often than a real session, where the run's heartbeat allows it, because ticks cost real time."""
        self.environment.tick_seconds = min(0.25, max(self.environment.tick_seconds, settings.heartbeat_seconds / 4))

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

    decoded: shared by the nodes of a simulation: the aggregates decoded recently.
    """

    def __init__(
        self, options: NodeOptions, process: NodeProcess, times: CodecTimes, decoded: OrderedDict[Any, Any]
    ) -> None:
        super().__init__(options, process)
        self._times, self._decoded = times, decoded
        process.node, process.environment.codec_seconds = self, self._seconds_of

    def make_coder(self, model: ModelSpec) -> DeltaCoder:
        """See Node."""
        return _SharedCoder(model, self.settings, self._decoded)

    @property
    def exchange_seconds(self) -> float:
        """See Node: of an offer and an aggregate, each of one fragment."""
        return 2 * self._seconds_of(self._values[0] if self._values else 0)

    def _seconds_of(self, values: int) -> float:
        """Return the time of a job that codes so many values."""
        timetable = self.peer.timetable
        settings = self.settings.at_first if timetable is None else timetable.at(self.offers.version)
        return self._times.of_node(values, settings)


def hub_process(process: VirtualEnvironment, scenario: Scenario) -> MemoryHub:
    """Open the channel of the simulated hub, on the links of a scenario."""
    process.make_hub = lambda: MemoryHub(scenario.link, 1 << 16, scenario.hub_link, True)
    channel = process.listen(ADDRESS)
    assert isinstance(channel, MemoryHub)
    return channel

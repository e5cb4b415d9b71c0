"""The environment of a simulated node: virtual time, a modelled codec thread and a modelled link for a real `Node`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

from zmqtrain.averaging.coder import DeltaCoder
from zmqtrain.core.errors import NonFiniteDelta
from zmqtrain.core.interfaces import Clock
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Buffer, ModelSpec
from zmqtrain.node.node import Executor, Node, NodeLink
from zmqtrain.sim.clock import Scheduler, VirtualCondition
from zmqtrain.sim.hub import CodecThread, CodecTimes, SimHub
from zmqtrain.sim.link import SimLink
from zmqtrain.sim.star import Wire
from zmqtrain.transport.pacing import LinkShare

DECODED_KEPT = 64


class _SharedCoder(DeltaCoder):
    """A coder that decodes what other nodes have decoded before only once: the same bytes, the same arrays."""

    def __init__(self, model: ModelSpec, settings: RunSettings, decoded: OrderedDict[Any, Any]) -> None:
        super().__init__(model, settings)
        self._decoded = decoded

    def _decode(self, codec: str, fragment: int, frames: Sequence[Buffer]) -> Sequence[Array]:
        key = (codec, fragment, *map(id, frames))
        if key not in self._decoded:
            self._decoded[key] = (tuple(frames), super()._decode(codec, fragment, frames))  # the frames keep their ids
            if len(self._decoded) > DECODED_KEPT:
                self._decoded.popitem(last=False)
        result: Sequence[Array] = self._decoded[key][1]
        return result


class SimEnvironment:
    """Virtual time for one node; its codec takes no CPU that counts, but the time that the model says.

    decoded: shared by the nodes of a simulation: what was decoded recently.
    """

    virtual = True

    def __init__(
        self, scheduler: Scheduler, hub: SimHub, wire: Wire, times: CodecTimes, decoded: OrderedDict[Any, Any]
    ) -> None:
        self.clock: Clock = scheduler
        self._scheduler, self._hub, self._wire, self._times, self._decoded = scheduler, hub, wire, times, decoded

    def condition(self) -> threading.Condition:
        """See NodeEnvironment."""
        return VirtualCondition(self._scheduler)

    def open_link(self, node: Node, share: LinkShare) -> NodeLink:
        """See NodeEnvironment."""
        self.link = SimLink(self._scheduler, self._hub, self._wire, node.peer, node)
        return cast(NodeLink, self.link)

    def open_executor(self, node: Node) -> Executor:
        """See NodeEnvironment."""
        return SimExecutor(self._scheduler, self._times, node)

    def make_coder(self, node: Node, model: ModelSpec) -> DeltaCoder:
        """See NodeEnvironment."""
        return _SharedCoder(model, node.settings, self._decoded)


class SimExecutor:
    """The codec thread of a simulated node."""

    def __init__(self, scheduler: Scheduler, times: CodecTimes, node: Node) -> None:
        self._thread, self._times, self._node = CodecThread(scheduler, not (times.scale or times.node_ns)), times, node

    def submit(self, job: Callable[[], None], values: int = 0) -> bool:
        """See Executor. A job that codes nothing is done at once."""
        self._thread.do(self._seconds(values), lambda: self._do(job))
        return True

    def exchange_seconds(self, measured: float, values: int) -> float:
        """See Executor: an offer and an aggregate, each of one fragment."""
        return 2 * self._seconds(values)

    def close(self) -> None:
        """See Executor."""

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except NonFiniteDelta as error:
            self._node.on_failed(error)

    def _seconds(self, values: int) -> float:
        if not values:
            return 0.0
        timetable = self._node.peer.timetable
        settings = self._node.settings.at_first if timetable is None else timetable.at(self._node.offers.version)
        return self._times.of_node(values, settings)

"""Be a node in virtual time: an Exchange for the real training code, over the coder and inbox of a real node.

Rule 1: what a `Node` decides is decided by the same `PeerExchange`; what is modelled is time alone.
Rule 2: as on a real node, only `join`, `wait_update` and a lack of data make the training thread wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from zmqtrain.averaging.coder import DeltaCoder, Encoded
from zmqtrain.core.errors import AggregateTimeout, LocalProtocolError, NonFiniteDelta
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Buffer, ExchangeStatistics, ModelSpec, Offer, PeerId, Update, Version
from zmqtrain.node.exchange import PeerExchange
from zmqtrain.protocol.messages import Report
from zmqtrain.protocol.peer import Peer
from zmqtrain.session.events import NodeEvents
from zmqtrain.sim.clock import Scheduler, VirtualCondition
from zmqtrain.sim.hub import CodecThread, CodecTimes, SimHub
from zmqtrain.sim.link import SimLink
from zmqtrain.sim.star import Wire

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


class SimExchange(PeerExchange):
    """One simulated node: an `Exchange`, and the `Listener` of its link.

    decoded: shared by the nodes of a simulation: what has been decoded of late.  message_delay: draws one, in seconds.
    events: as for a `Node`.  link_rate: of its port, in bytes per second, which a plan (auto) counts on.
    life: which process of this name it is, the first being 1.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        hub: SimHub,
        wire: Wire,
        name: str,
        message_delay: Callable[[], float],
        times: CodecTimes,
        decoded: OrderedDict[Any, Any],
        events: NodeEvents | None = None,
        link_rate: float = 0.0,
        life: int = 1,
    ) -> None:
        peer_id = PeerId(f"{name}#simulated" if life == 1 else f"{name}#life-{life}")
        peer = Peer(peer_id, name, link=link_rate, incarnation=1)
        super().__init__(name, peer, lambda: VirtualCondition(scheduler), scheduler, events)
        self._link = self.link = SimLink(scheduler, hub, wire, self._peer, self, message_delay)
        self._scheduler, self._decoded = scheduler, decoded
        self._codec, self._times = CodecThread(scheduler, not (times.scale or times.node_ns)), times

    # ------------------------------------------------------------------ joining (training thread)

    def connect(self) -> None:
        """Say Hello and wait for the hub's Welcome. Raises JoinRefused."""
        self.link.start()
        self._wait_to_join(lambda: self._peer.settings is not None)

    def _wait_to_join(self, condition: Callable[[], bool]) -> None:
        self._waiting.wait(condition, None)

    @property
    def settings(self) -> RunSettings:
        """See Exchange."""
        if self._peer.settings is None:
            raise LocalProtocolError(f"{self.name} is not welcomed yet: call connect first")
        return self._peer.settings

    @property
    def is_evaluator(self) -> bool:
        """See Exchange: the simulation scores the shared model itself."""
        return False

    # ------------------------------------------------------------------ exchange (training thread)

    def wait_update(self, timeout_seconds: float, sequence: int) -> Update:
        """See Exchange."""
        if not self._waiting.wait(lambda: len(self._inbox) > 0, timeout_seconds):
            raise AggregateTimeout(
                f"{self.name} waited {timeout_seconds:g} s for the aggregate after version {self._offers.version}"
            )
        update = self.poll()
        assert update is not None
        return update

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        """See Exchange: what a node scores is in its result."""

    def statistics(self) -> ExchangeStatistics:
        """See Exchange. Codec times are of the model, and part of no figure here."""
        return ExchangeStatistics(
            version=self._offers.version,
            peers=len(self._peer.roster.members) if self._peer.roster else 0,
            bytes_sent=self.link.wire.up,
            bytes_received=self.link.wire.down,
            encode_seconds=0.0,
            decode_seconds=0.0,
            publishes=self.link.publishes,
            publishes_refused=self._withdrawals,
            round_trip_seconds=self._peer.round_trip_seconds,
            run_samples=self._peer.run_samples,
        )

    # ------------------------------------------------------------------ Listener (network thread)

    def make_report(self) -> Report:
        """See Listener. The loss is waited for, which costs no virtual time: a run can be repeated."""
        self._progress.settle_loss()
        wire, waiting = self.link.wire, "data units" if self.units.waiting else ""
        return self._progress.report(wire.up, wire.down, waiting, self._coded_seconds())

    def _coded_seconds(self) -> float:
        """The time of the codec thread for one exchange: an offer and an aggregate, each of one fragment."""
        if self._jobs.coder is None:
            return 0.0
        return 2 * self._seconds(sum(self._jobs.coder.layout.counts(0)))

    def _seconds(self, values: int) -> float:
        """The time of the codec thread for one job on so many values."""
        timetable = self._peer.timetable
        settings = self.settings.at_first if timetable is None else timetable.at(self._offers.version)
        return self._times.of_node(values, settings)

    # ------------------------------------------------------------------ threads

    def _in_network(self, what: Callable[[], object]) -> None:
        what()

    def _in_codec(self, what: Callable[[], None], fragments: Sequence[int] | None = ()) -> bool:
        layout = self._jobs.joined_coder.layout
        coded = range(layout.fragments) if fragments is None else fragments
        values = sum(sum(layout.counts(fragment)) for fragment in coded)
        self._codec.do(self._seconds(values), lambda: self._do(what))
        return True

    def _do(self, what: Callable[[], None]) -> None:
        try:
            what()
        except NonFiniteDelta as error:
            self.on_failed(error)

    # ------------------------------------------------------------------ codec thread

    def _make_coder(self, model: ModelSpec) -> DeltaCoder:
        return _SharedCoder(model, self.settings, self._decoded)

    def _decode_on(self) -> None:
        self._jobs.decode()

    def _publish(self, offer: Offer, base: Version, encoded: Encoded, score: float) -> None:
        self.link.publish(offer, base, encoded, score)

"""Be a node in virtual time: an Exchange for the real training code, over the coder and inbox of a real node.

Rule 1: what a `Node` decides is decided here by the same parts, in the same order; what is modelled is time alone.
Rule 2: as on a real node, only `join`, `wait_update` and a lack of data make the training thread wait.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zmqtrain.errors import AggregateTimeout, LocalProtocolError, NonFiniteDelta, ZmqTrainError
from zmqtrain.protocol.messages import Aggregate, Deliver, Report, WorkUnit
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.runtime.delta import DeltaCoder, encode_snapshot, mean_score
from zmqtrain.runtime.events import NodeEvents
from zmqtrain.runtime.inbox import Inbox
from zmqtrain.runtime.moments import encode_moments
from zmqtrain.runtime.progress import paces
from zmqtrain.runtime.units import UnitQueue
from zmqtrain.settings import RunSettings
from zmqtrain.sim.clock import Scheduler, VirtualCondition
from zmqtrain.sim.hub import CodecThread, SimHub
from zmqtrain.sim.link import REPORT_SECONDS, SimLink
from zmqtrain.sim.star import Wire
from zmqtrain.types import Array, Buffer, Clock, ExchangeStatistics, Layout, ModelSpec, Offer, PeerId, Update, Version

__all__ = ["SimExchange"]

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


class _Units(UnitQueue):
    """A unit queue whose waiting is virtual."""

    def __init__(self, scheduler: Scheduler, peer: PeerId, ask: Callable[[], None], live: Callable[[], bool]) -> None:
        super().__init__(peer, ask, live)
        self._changed = VirtualCondition(scheduler)


class SimExchange:
    """One simulated node: an `Exchange`, and the `Listener` of its link.

    decoded: shared by the nodes of a simulation: what has been decoded of late.  message_delay: draws one, in seconds.
    events: as for a `Node`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        hub: SimHub,
        wire: Wire,
        name: str,
        message_delay: Callable[[], float],
        codec_ns: float,
        decoded: OrderedDict[Any, Any],
        events: NodeEvents | None = None,
    ) -> None:
        self.name, self._events = name, events
        self.peer = Peer(PeerId(f"{name}#simulated"), name)
        self.link = SimLink(scheduler, hub, wire, self.peer, self, message_delay)
        self._scheduler, self._decoded = scheduler, decoded
        self._codec = CodecThread(scheduler, codec_ns)
        self._units = _Units(scheduler, self.peer.peer, self._ask_for_units, lambda: self.link.live)
        self._changed = VirtualCondition(scheduler)
        self._failure: ZmqTrainError | None = None
        self._coder: DeltaCoder | None = None
        self._founding: tuple[Sequence[Any], Sequence[Any]] = ((), ())
        self._asked = False
        self._sequence = 0
        self._applied_version: Version = -1
        self._applied: list[int] = []
        self._offered: set[int] = set()
        self._offers_since: dict[int, int] = {}
        self._inbox = Inbox(self._changed.notify_all)
        self._withdrawals = 0
        self._said: dict[str, Any] = {}
        self._samples_said = 0

    # ------------------------------------------------------------------ joining (training thread)

    def connect(self) -> None:
        """Say Hello and wait for the hub's Welcome. Raises JoinRefused."""
        self.link.start()
        self._wait(lambda: self.peer.settings is not None)

    def join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, moments: Sequence[Any] = ()
    ) -> Update | None:
        """See Exchange. Raises ModelMismatch, JoinRefused, NonFiniteDelta."""
        self._coder, self._founding = _SharedCoder(model, self.settings, self._decoded), (leaves, moments)
        if self._events is not None:
            self._events.joining(self.peer.peer, self.peer.run, self.settings, self.founded)
        self.link.carry_out(self.peer.join(model, self._scheduler.now, score))
        self._wait(
            lambda: (
                self.peer.state is PeerState.APART or (self.reachable and (len(self._inbox) > 0 or self.peer.confirmed))
            )
        )
        self._founding = ((), ())
        if self.peer.state is PeerState.APART:
            return None
        first = self._inbox.peek()
        if first is None or first.anchor is None:
            self._applied_version = 0
            return None
        return self.poll()

    @property
    def founded(self) -> bool:
        """See Exchange."""
        return self.peer.founded

    def compare(self, score: float) -> None:
        """See Exchange."""
        self.link.carry_out(self.peer.compare(score))

    @property
    def wanted(self) -> bool:
        """See Exchange."""
        return self._asked

    def lend(self, leaves: Sequence[Any], moments: Sequence[Any] = ()) -> None:
        """See Exchange."""
        self._asked = False
        self._codec.do(0, lambda: self._encode_founding(leaves, moments))

    @property
    def clock(self) -> Clock:
        """See Exchange: the virtual time."""
        return self._scheduler

    @property
    def settings(self) -> RunSettings:
        """See Exchange."""
        if self.peer.settings is None:
            raise LocalProtocolError(f"{self.name} is not welcomed yet: call connect first")
        return self.peer.settings

    @property
    def layout(self) -> Layout:
        """See Exchange. Raises LocalProtocolError before `join`."""
        if self._coder is None:
            raise LocalProtocolError(f"{self.name} has not joined the run yet: call join first")
        return self._coder.layout

    @property
    def is_evaluator(self) -> bool:
        """See Exchange: the simulation scores the shared model itself."""
        return False

    @property
    def reachable(self) -> bool:
        """See Exchange."""
        return self.link.live

    # ------------------------------------------------------------------ exchange (training thread)

    def next_fragment(self) -> int | None:
        """See Exchange; decided as `Node.next_fragment` does."""
        settings = self.settings
        if not self.reachable or len(self._offered) >= settings.offers_in_flight:
            return None
        if self._applied_version < 0:  # the run has just been founded, and its parameters are on their way
            return None
        starved = [f for f, since in self._offers_since.items() if since >= 2 * settings.fragments]
        if starved:
            return max(starved, key=lambda fragment: self._offers_since[fragment])
        return (self._applied_version + len(self._offered)) % settings.fragments

    def offer(
        self,
        fragment: int,
        segments: Sequence[Array],
        *,
        samples: int,
        steps: int,
        scores: tuple[Any, ...] = (),
        dense: bool = False,
    ) -> int | None:
        """See Exchange. Raises NonFiniteDelta or JoinRefused when the node cannot go on."""
        self._raise_failure()
        if self.next_fragment() is None:
            return None
        offer = Offer(self._sequence, fragment, segments, samples, steps, scores, tuple(self._applied), dense)
        base = self._applied_version
        self._codec.do(self._values(fragment), lambda: self._encode(offer, base))
        self._raise_failure()
        self._sequence += 1
        self._applied.clear()
        self._offered.add(offer.sequence)
        if self._events is not None:
            self._events.offered(offer.sequence, fragment, base, dense)
        for other in range(self.layout.fragments):
            self._offers_since[other] = 0 if other == fragment else self._offers_since.get(other, 0) + 1
        return offer.sequence

    def in_flight(self) -> tuple[int, ...]:
        """See Exchange."""
        return tuple(sorted(self._offered))

    def peek(self) -> Update | None:
        """See Exchange."""
        self._raise_failure()
        return self._inbox.peek()

    def poll(self) -> Update | None:
        """See Exchange."""
        self._raise_failure()
        update = self._inbox.take()
        if update is not None:
            assert self._coder is not None
            self._applied_version = update.version
            self._applied += update.landed
            self._offered.difference_update(update.landed)
            self._inbox.decode(self._coder)
            if self._events is not None:
                self._events.applied(update)
        return update

    def wait_update(self, timeout_seconds: float) -> Update:
        """See Exchange."""
        if not self._wait(lambda: len(self._inbox) > 0, timeout_seconds):
            raise AggregateTimeout(
                f"{self.name} waited {timeout_seconds:g} s for the aggregate after version {self._applied_version}"
            )
        update = self.poll()
        assert update is not None
        return update

    def batches(self, source: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        """Give the batches of the data units that the hub deals to this node, until the run is over."""
        while (unit := self._units.take(self._raise_failure)) is not None:
            if self._events is not None:
                self._events.began(unit)
            yield from source(unit)
            self._units.done(unit)

    def everyone_drained(self) -> bool:
        """See Exchange."""
        if not self.reachable or not self._units.drain():
            return True
        return 0 <= self._units.end_version <= self._applied_version

    def pace(self) -> tuple[float, Sequence[float]]:
        """See Exchange."""
        own, rates = paces(self.peer.roster, self.peer.peer)
        if self._events is not None:
            self._events.paced(own, rates)
        return own, rates

    def report(self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int) -> None:
        """See Exchange."""
        self._said = {
            "step": step, "samples": samples, "loss": loss, "age_steps": age_steps, "offers_refused": offers_refused
        }  # fmt: skip
        if self._events is not None:
            self._events.stepped(step, samples, loss)

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        """See Exchange: what a node scores is in its result."""

    def statistics(self) -> ExchangeStatistics:
        """See Exchange. Codec times are of the model, and part of no figure here."""
        return ExchangeStatistics(
            version=self._applied_version,
            peers=len(self.peer.roster.members) if self.peer.roster else 0,
            bytes_sent=self.link.wire.up,
            bytes_received=self.link.wire.down,
            encode_seconds=0.0,
            decode_seconds=0.0,
            publishes=self.link.publishes,
            publishes_refused=self._withdrawals,
            round_trip_seconds=self.peer.round_trip_seconds,
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait(self, condition: Callable[[], bool], timeout_seconds: float | None = None) -> bool:
        came: bool = self._changed.wait_for(lambda: condition() or self._failure is not None, timeout_seconds)
        self._raise_failure()
        return came

    # ------------------------------------------------------------------ Listener (network thread)

    def on_delivered(self, deliver: Deliver, frames: list[Buffer]) -> None:
        """See Listener."""
        assert self._coder is not None
        coder = self._coder
        if self._inbox.full and isinstance(deliver.announcement, Aggregate):
            self._codec.do(0, lambda: self._inbox.skip(deliver))
            self.link.carry_out(self.peer.resync())
        else:
            fragments = getattr(deliver.announcement, "fragments", range(self.layout.fragments))
            self._codec.do(sum(map(self._values, fragments)), lambda: self._inbox.arrive(coder, deliver, frames))

    def on_withdrawn(self, sequence: int, reason: str, text: str) -> None:
        """See Listener."""
        self._withdrawals += 1
        if reason == "non-finite":
            self.on_failed(NonFiniteDelta(f"the broker refused a delta of {self.name}, which is not finite: {text}"))
        if self._coder is not None:
            coder = self._coder
            self._codec.do(0, lambda: self._withdraw(coder, sequence, reason))
        self._offered.discard(sequence)

    def on_founding(self) -> None:
        """See Listener."""
        if self.peer.state is PeerState.APART:  # what it holds changes with every step: the training thread answers
            self._asked = True
        else:
            leaves, moments = self._founding
            self._codec.do(0, lambda: self._encode_founding(leaves, moments))

    def on_work(self, answer: WorkUnit) -> None:
        """See Listener."""
        self._units.dealt(answer)

    def on_changed(self) -> None:
        """See Listener."""
        if self.peer.state is PeerState.CONNECTING:
            self._units.reset()
            self._asked = False
        if self._units.drained:  # a hub that had lost this node has forgotten that it said so
            self._ask_for_units()
        self._changed.notify_all()

    def on_failed(self, error: ZmqTrainError) -> None:
        """See Listener."""
        self._failure = self._failure or error
        self._units.reset()
        self._changed.notify_all()

    def make_report(self) -> Report:
        """See Listener."""
        said = self._said or {
            "step": 0, "samples": 0, "loss": math.nan, "age_steps": math.nan, "offers_refused": 0,
        }  # fmt: skip
        pace = (said["samples"] - self._samples_said) / REPORT_SECONDS
        self._samples_said = said["samples"]
        return Report(
            step=said["step"],
            samples=said["samples"],
            samples_per_second=pace,
            loss=float(np.asarray(said["loss"])),
            age_steps=float(said["age_steps"]),
            offers_refused=said["offers_refused"],
            bytes_sent=self.link.wire.up,
            bytes_received=self.link.wire.down,
            waiting="data units" if self._units.waiting else "",
        )

    def _ask_for_units(self) -> None:
        if self.link.live and (request := self._units.request()) is not None:
            self.link.send(request)

    # ------------------------------------------------------------------ codec thread

    def _encode(self, offer: Offer, base: Version) -> None:
        assert self._coder is not None
        try:
            encoded = self._coder.encode(offer)
        except NonFiniteDelta as error:
            self.on_failed(NonFiniteDelta(f"{self.name}: {error}: training has diverged here", error.leaf))
            return
        if self._events is not None:
            self._events.encoded(offer.sequence)
        self.link.publish(offer, base, encoded, mean_score(offer))

    def _withdraw(self, coder: DeltaCoder, sequence: int, reason: str) -> None:
        coder.withdraw(sequence)
        if self._events is not None:
            self._events.withdrawn(sequence, reason)

    def _encode_founding(self, leaves: Sequence[Any], moments: Sequence[Any]) -> None:
        assert self._coder is not None
        layout = self._coder.layout
        try:
            frames, state = encode_snapshot(layout, layout.split(leaves)), encode_moments(moments)
        except NonFiniteDelta as error:
            self.on_failed(NonFiniteDelta(f"{self.name}: the initial parameters are not finite ({error})", error.leaf))
            return
        self.link.send_founding(frames, state)

    def _values(self, fragment: int) -> int:
        assert self._coder is not None
        return sum(self._coder.layout.counts(fragment))

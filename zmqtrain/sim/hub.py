"""Be the hub in virtual time: the Hub and the Aggregator of a real run, joined as the living broker joins them.

Rule 1: the same machines, rules and codecs, effects in the same order; what is modelled is time alone.
Rule 2: a round is released at the moment at which its rule says so, not at the next look of a loop.
Rule 3: an effect that is not modelled (standbys, groups, keys, probes, restarts) is an error, not dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, assert_never

from zmqtrain.averaging.aggregator import Aggregator, Released
from zmqtrain.averaging.gate import error_of, reason_of
from zmqtrain.averaging.snapshot import check_sizes, split_snapshot
from zmqtrain.core.errors import CodecError, ConfigError, FramingError, LocalProtocolError, RemoteProtocolError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, PeerId, Version, count_values
from zmqtrain.planning.costs import ExchangeCosts, Place, exchange_costs
from zmqtrain.planning.plans import LoadPlanner
from zmqtrain.planning.rules import canonical
from zmqtrain.planning.schedule import exchange_bytes, model_of
from zmqtrain.protocol.effects import (
    Accumulate,
    Answer,
    Average,
    Broadcast,
    Combine,
    Consult,
    Discard,
    Disconnect,
    Expect,
    Forward,
    Found,
    Hear,
    HubEffect,
    Lend,
    Propose,
    Rebase,
    Reduce,
    Replicate,
    Rewind,
    SendTo,
    Serve,
    TakeBack,
)
from zmqtrain.protocol.fencing import Stamp
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.initialization import sends_optimizer_state
from zmqtrain.protocol.messages import (
    Aggregate,
    Announcement,
    Chunk,
    Credit,
    Message,
    Publish,
    Quarantine,
    Refused,
    Schedule,
    Snapshot,
)
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.session.codec_executor import EffectQueue
from zmqtrain.session.events import BrokerEvents
from zmqtrain.sim.clock import Scheduler
from zmqtrain.sim.scenario import Scenario
from zmqtrain.sim.star import HubPorts, Wire
from zmqtrain.strategies.weights import Laggards, preemption_from_spec
from zmqtrain.transport.memory import LinkModel
from zmqtrain.transport.pacing import LinkShare

TICK_SECONDS = 0.25
NANO = 1e-9
FLOAT_BYTES = 4
FASTEST_BITS = 1e12
"""What a plan counts on where a link is faster."""


def port_rate(link: LinkModel) -> float:
    """Return what a plan counts on of such a port, in bytes per second."""
    return min(link.bits_per_second, FASTEST_BITS) / 8


def _key(peer: PeerId, announcement: Announcement) -> tuple[PeerId, int]:
    return peer, announcement.sequence if isinstance(announcement, Publish) else -1


@dataclass(frozen=True)
class CodecTimes:
    """What the codec threads of a scenario take. The fields are those of `Scenario`."""

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


class CodecThread:
    """A thread that codes one thing after the other, in virtual time. instant: nothing takes it any time."""

    def __init__(self, scheduler: Scheduler, instant: bool) -> None:
        self._scheduler, self._instant, self._free_at = scheduler, instant, 0.0

    def do(self, seconds: float, work: Callable[[], object]) -> None:
        """Do some work that takes so long; its result is there when that is over."""
        if self._instant:
            work()
            return
        self._free_at = max(self._free_at, self._scheduler.now) + seconds
        self._scheduler.call_at(self._free_at, work)


def _size_of(one: tuple[Released, Reduce]) -> int:
    return sum(len(frame) for frames in one[0].frames for frame in frames)


class Receiver(Protocol):
    """A node, as the hub reaches it."""

    @property
    def wire(self) -> Wire:
        """Its connection."""

    def take(self, message: Message, stamp: Stamp) -> None:
        """Take a head."""

    def take_payload(self, announcement: Aggregate | Snapshot, frames: Sequence[Buffer], stamp: Stamp) -> None:
        """Take an aggregate or a snapshot, whole."""


class SimHub:
    """The hub of one simulated run. released: called after each release; events: as for a `Broker`.

    link: what the hub's port can do, which a plan (auto) counts on; None: what a node's can.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: RunSettings,
        times: CodecTimes,
        released: Callable[[Reduce], object],
        events: BrokerEvents | None = None,
        link: LinkModel | None = None,
    ) -> None:
        self.settings = canonical(settings)
        rule, preemption = release_rule_from_spec(settings.release), preemption_from_spec(settings.preemption)
        laggards = None if preemption is None else Laggards(preemption)
        share = LinkShare() if link is None else LinkShare(port_rate(link))
        planner = LoadPlanner(self.settings, share, self)
        self.hub = Hub(self.settings, rule, "run-simulated", scheduler.now, laggards, planner)
        self.aggregator = Aggregator(self.settings)
        self.ports = HubPorts(link)
        self.nodes: dict[PeerId, Receiver] = {}
        self._scheduler, self._released_hook, self._events = scheduler, released, events
        self._codec, self._times = CodecThread(scheduler, not (times.scale or times.hub_ns)), times
        self._following: dict[PeerId, None] = {}
        self._whole: dict[tuple[PeerId, int], Sequence[Buffer]] = {}
        self._effects = EffectQueue[HubEffect](self._carry_out_one)
        self._moments: Sequence[Buffer] = ()  # the founder's optimizer state, until training has begun
        self._mean: Sequence[Buffer] = ()  # that the run may begin with
        self._since: deque[tuple[Released, Reduce]] = deque()  # the newest releases, of a snapshot's bytes at most
        self._transfer = 0
        self._looks_at = float("inf")
        self._tick()

    # ------------------------------------------------------------------ what comes in

    def take(self, peer: PeerId, message: Message, stamp: Stamp) -> None:
        """Take a head from a node."""
        if (instead := self.hub.judge(peer, stamp, message, self._scheduler.now)) is not None:
            return self._carry_out(instead)
        try:
            self._carry_out(self.hub.receive(peer, message, self._scheduler.now))
        except (FramingError, RemoteProtocolError) as error:
            self._expel(peer, error)

    def take_payload(self, peer: PeerId, transfer: int, frames: Sequence[Buffer], stamp: Stamp) -> None:
        """Take the whole payload of a transfer that was expected."""
        if (instead := self.hub.judge(peer, stamp, Chunk(transfer, 0), self._scheduler.now, False)) is not None:
            return self._carry_out(instead)
        self.hub.saw(peer, self._scheduler.now)
        member = self.hub.members.get(peer)
        announcement = member.open.get(transfer) if member else None
        if announcement is None:
            return  # of a transfer that was given up
        self._codec.do(self._work(announcement), lambda: self._check(peer, announcement, frames))

    def _check(self, peer: PeerId, announcement: Announcement, frames: Sequence[Buffer]) -> None:
        now, transfer = self._scheduler.now, announcement.transfer
        try:
            if isinstance(announcement, Publish):
                self.aggregator.check(announcement, frames)
            else:
                assert isinstance(announcement, Snapshot)
                self.aggregator.check_snapshot(announcement, frames)
        except CodecError as error:
            self._carry_out(self.hub.broken(peer, transfer, reason_of(error), str(error), now))
            return
        member = self.hub.members.get(peer)
        if member is not None and member.open.get(transfer) is announcement:
            if isinstance(announcement, Publish):
                judgement = self.aggregator.judge(peer, announcement, frames, self.hub.voter_of(peer))
                self.aggregator.count(announcement, judgement)
                if (refusal := error_of(judgement)) is not None:
                    self._carry_out(self.hub.broken(peer, transfer, reason_of(refusal), str(refusal), now))
                    return
            self._whole[_key(peer, announcement)] = frames
            self._carry_out(self.hub.received(peer, transfer, now))

    def gone(self, peer: PeerId, why: str) -> None:
        """The connection to a node is gone."""
        self._carry_out(self.hub.gone(peer, why, self._scheduler.now))

    def _expel(self, peer: PeerId, error: Exception) -> None:
        self._send(peer, Refused("protocol", str(error)))
        self.gone(peer, f"sent away: {error}")

    def _tick(self) -> None:
        self._carry_out(self.hub.tick(self._scheduler.now))
        self._scheduler.call_later(TICK_SECONDS, self._tick)

    def _look(self) -> None:
        """See to a round that falls due now."""
        if self._scheduler.now >= self._looks_at:
            self._looks_at = float("inf")
            self._carry_out(self.hub.tick(self._scheduler.now))

    # ------------------------------------------------------------------ carrying out effects

    def _carry_out(self, effects: Sequence[HubEffect]) -> None:
        self._effects.carry_out(effects)
        due = self.hub.rounds.due_at(self.hub.awaited)
        if due is not None and due < self._looks_at:
            self._looks_at = max(due, self._scheduler.now)
            self._scheduler.call_at(self._looks_at, self._look)

    def _carry_out_one(self, effect: HubEffect) -> None:
        match effect:
            case SendTo(peer, message, stamp):
                if isinstance(message, Quarantine) and message.seconds > 0:
                    self._say_quarantine(peer, message)
                self._send(peer, message, stamp)
            case Broadcast(message):
                if isinstance(message, Schedule) and self._events is not None:
                    why = self.hub.replanning.text
                    self._events.scheduled(message, why)
                for peer in list(self.hub.members):
                    self._send(peer, message)
            case Expect(peer, announcement):
                self._expect(peer, announcement)
            case Found(peer, announcement):
                whole, self._mean = self._mean or self._whole.pop(_key(peer, announcement)), ()
                frames, self._moments = split_snapshot(announcement, whole)
                self._whole.clear()  # what was pending in a run that is founded anew
                self._since.clear()
                self._codec.do(self._seconds(count_values(self.hub.model)), partial(self._found, frames, peer))
            case Average(snapshots):
                gathered = {peer: self._whole.pop(_key(peer, snapshot)) for peer, snapshot in snapshots}
                values = len(snapshots) * count_values(self.hub.model)
                self._codec.do(self._seconds(values), partial(self._average, snapshots, gathered))
            case Propose(peers):
                self._propose(peers)
            case Lend():
                self._lend(effect)
            case Accumulate(peer, publish):
                payload = self._whole.pop(_key(peer, publish))
                self._codec.do(self._work(publish), partial(self.aggregator.accumulate, peer, publish, payload))
            case TakeBack(peer):
                self._codec.do(0, partial(self._take_back, peer))
            case Reduce():
                if effect.back_to >= 0:
                    self._whole.clear()
                self._codec.do(
                    self._seconds(sum(map(self._of_fragment, effect.fragments))), partial(self._release, effect)
                )
            case Serve():
                self._codec.do(0, partial(self._serve, effect, self._moments if effect.moments else ()))
            case Rebase(peers, why):
                if not why:
                    self.aggregator.gate.rebase(peers)
                if self._events is not None and not why:
                    for peer in peers:
                        self._events.member(
                            peer, "acquitted", "the norm gate is made wider toward the size of its deltas"
                        )
            case Disconnect(peer, reason):
                self._following.pop(peer, None)
                if reason not in ("again", "observer", "process", "master"):
                    self.aggregator.gate.forget(peer)
                self._whole.pop((peer, -1), None)  # of its parameters: a publish that was accepted counts all the same

            case Replicate() | Hear() | Rewind() | Answer() | Forward() | Consult() | Combine() | Discard():
                raise LocalProtocolError(f"the simulated hub does not model what {effect} asks for")
            case _:
                assert_never(effect)

    def _take_back(self, peer: PeerId) -> None:
        version = self.aggregator.version_before(peer)
        if effects := self.hub.take_back(peer, version):
            if self._events is not None:
                self._events.member(peer, "taken back", f"what was published since version {version}")
            self._carry_out(effects)

    def _say_quarantine(self, peer: PeerId, quarantine: Quarantine) -> None:
        self.aggregator.gate.forget(peer, probation=True)
        if self._events is not None:
            text = f"for {quarantine.seconds:.0f} s: {quarantine.reason}: {quarantine.text}"
            self._events.member(peer, "quarantined", text)

    def _expect(self, peer: PeerId, announcement: Announcement) -> None:
        try:
            if isinstance(announcement, Snapshot):
                self.aggregator.plan(self.hub.model)
                check_sizes(announcement, self.aggregator.snapshot_bound(), sends_optimizer_state(self.settings))
            else:
                assert isinstance(announcement, Publish)
                self.aggregator.check_sizes(announcement)
        except FramingError as error:
            self._carry_out(self.hub.broken(peer, announcement.transfer, "size", str(error), self._scheduler.now))
        except ConfigError as error:
            self._carry_out(self.hub.broken(peer, announcement.transfer, "model", str(error), self._scheduler.now))
        else:
            self._send(peer, Credit(announcement.transfer, len(announcement.sizes)))

    def _average(
        self, snapshots: Sequence[tuple[PeerId, Snapshot]], gathered: Mapping[PeerId, Sequence[Buffer]]
    ) -> None:
        parts: dict[str, Sequence[Buffer]] = {
            peer: split_snapshot(snapshot, gathered[peer])[0] for peer, snapshot in snapshots
        }
        frames, why = self.aggregator.average(parts)
        if why:
            self._carry_out(self.hub.unrelated(why))
        else:
            self._mean = frames
            if self._events is not None:
                self._events.averaged([peer for peer, _ in snapshots])
            self._carry_out(self.hub.averaged())

    def _propose(self, peers: Sequence[PeerId]) -> None:
        """Send the mean to those who say how it scores; to nobody: forget it."""
        if not peers:
            self._mean = ()
        elif self._mean:
            for peer in peers:
                self._push_snapshot(peer, -1, self._mean, (), (), reset=True)

    def _lend(self, lend: Lend) -> None:
        """Pass the parameters of one of a population on to those that are to start again from them."""
        frames, moments = split_snapshot(lend.announcement, self._whole.pop(_key(lend.lender, lend.announcement)))
        for peer in lend.peers:
            if peer in self.hub.members:
                self._push_snapshot(peer, -1, frames, moments, (), reset=True)

    def _found(self, frames: Sequence[Buffer], peer: PeerId) -> None:
        self.aggregator.found(frames)
        if self._events is not None:
            self._events.founded(peer)

    def _release(self, reduce: Reduce) -> None:
        released = self.aggregator.release(reduce)
        if self._events is not None:
            left_out = [one for one, _ in released.left_out]
            self._events.released(reduce, len(self.hub.live), released.codec, released.frames, left_out)
        self._moments = ()
        self._released_hook(reduce)
        for one, judgement in released.left_out:
            reason = "enormous" if judgement.is_enormous else "norm"
            self._carry_out(self.hub.left_out(one.peer, reason, judgement.why, self._scheduler.now))
        if reduce.back_to >= 0:
            self._since.clear()
        self._since.append((released, reduce))
        while sum(map(_size_of, self._since)) > FLOAT_BYTES * count_values(self.hub.model):
            self._since.popleft()
        for peer in list(self._following):
            self._push_aggregate(peer, released, reduce)

    def _push_aggregate(self, peer: PeerId, released: Released, reduce: Reduce) -> None:
        frames = tuple(frame for frames in released.frames for frame in frames)
        self._push(peer, released.announce(self._next_transfer(), reduce), frames)

    def _serve(self, serve: Serve, moments: Sequence[Buffer]) -> None:
        if serve.peer not in self.hub.members:
            return
        version, frames = self.aggregator.snapshot()
        behind = [one for one in self._since if one[0].version > serve.known_version]
        if serve.known_version == version - len(behind):  # as the living hub's shelf: the aggregates since are enough
            version, frames, moments = serve.known_version, (), ()
        else:
            behind = []
        self._following[serve.peer] = None
        landed = tuple((sequence, at) for sequence, at in serve.landed if at <= version)
        self._push_snapshot(serve.peer, version, frames, moments, landed, serve.reset)
        for released, reduce in behind:
            self._push_aggregate(serve.peer, released, reduce)

    def _push_snapshot(
        self,
        peer: PeerId,
        version: Version,
        frames: Sequence[Buffer],
        moments: Sequence[Buffer],
        landed: tuple[tuple[int, int], ...],
        reset: bool,
    ) -> None:
        whole = (*frames, *moments)
        sizes = tuple(len(frame) for frame in whole)
        self._push(peer, Snapshot(self._next_transfer(), version, sizes, landed, len(moments), reset), whole)

    def _push(self, peer: PeerId, announcement: Aggregate | Snapshot, frames: Sequence[Buffer]) -> None:
        """Send a payload down, its announcement first, on the same lane."""
        node = self.nodes[peer]
        stamp = self.hub.stamp(peer, False)
        size = len(encode_message(announcement, stamp)) + sum(announcement.sizes)
        node.wire.payload(False, size, lambda: node.take_payload(announcement, frames, stamp))

    def _send(self, peer: PeerId, message: Message, stamp: Stamp | None = None) -> None:
        node = self.nodes.get(peer)
        if node is None or node.wire.dead:
            if peer in self.hub.members:
                self.gone(peer, "its connection is gone")
            return
        said = self.hub.stamp(peer) if stamp is None else stamp
        node.wire.head(False, len(encode_message(message, said)), lambda: node.take(message, said))

    # ------------------------------------------------------------------ sizes

    def _next_transfer(self) -> int:
        self._transfer += 1
        return self._transfer

    @property
    def port_measured(self) -> float:
        """See HubMeter: the rate of a simulated port is configured."""
        return 0.0

    def contribution_seconds(self) -> float:
        """Return the CPU time of the codec thread per contribution: to check, to add, and a share of the release."""
        nodes = max(1, len(self.hub.live))
        return (2 + 1 / nodes) * self._seconds(count_values(self.hub.model) // self.hub.fragments)

    def _seconds(self, values: int) -> float:
        """The time of the codec thread for one job on so many values."""
        return self._times.of_hub(values, self.hub.timetable.at(self.hub.version), max(1, len(self.hub.live)))

    def _work(self, announcement: Announcement) -> float:
        if isinstance(announcement, Publish):
            return self._seconds(self._of_fragment(announcement.fragment))
        return self._seconds(count_values(self.hub.model))

    def _of_fragment(self, fragment: int) -> int:
        return sum(self.aggregator.layout.counts(fragment))

    def published(self) -> list[Any]:
        """Return the leaves of the shared model as all nodes have them, [] before somebody has founded the run."""
        return list(self.aggregator.layout.join(self.aggregator.published)) if self.aggregator.version >= 0 else []

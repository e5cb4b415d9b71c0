"""Be the hub alive: a Hub on a socket, with a clock, a codec thread and a checkpoint folder.

Rule 1: one asyncio loop owns the socket (`Traffic` moves the bytes) and the machine; one codec thread owns the arrays;
jobs and their results pass between them in order.  Rule 2: whatever a peer does wrong costs that peer its membership
and nobody else anything.  Rule 3: no jax here, nor in anything that is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zmqtrain.errors import (
    ChannelClosed,
    CodecError,
    ConfigError,
    FramingError,
    RemoteProtocolError,
    ZmqTrainError,
)
from zmqtrain.interfaces import HubChannel
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
    Rebase,
    Reduce,
    Replicate,
    Rewind,
    SendTo,
    Serve,
)
from zmqtrain.protocol.fencing import Verdict
from zmqtrain.protocol.founding import takes_moments
from zmqtrain.protocol.framing import ProtocolVersionError, decode_head
from zmqtrain.protocol.group_messages import Fold, Relay, Relayed
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.keys import Initialise, Push
from zmqtrain.protocol.masters import RUN_OVER
from zmqtrain.protocol.messages import (
    Chunk,
    Credit,
    Goodbye,
    Hello,
    Probe,
    Probed,
    Quarantine,
    Refused,
    Report,
    Roster,
    Schedule,
    Snapshot,
)
from zmqtrain.protocol.rates import MESSAGES_PER_SECOND, Hearing, MessageRates
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.runtime.broker.arrivals import Arrivals
from zmqtrain.runtime.broker.jobs import Jobs
from zmqtrain.runtime.broker.keeper import Keeper
from zmqtrain.runtime.broker.loads import Loads
from zmqtrain.runtime.broker.registration import Registration
from zmqtrain.runtime.broker.replicas import OpenLine, Replicas, pack_replica
from zmqtrain.runtime.broker.serving import Serving
from zmqtrain.runtime.broker.standby import Inheritance
from zmqtrain.runtime.broker.telling import Telling
from zmqtrain.runtime.broker.traffic import Traffic
from zmqtrain.runtime.checkpoints.every import every_from_text
from zmqtrain.runtime.equation.aggregator import Aggregator, Released
from zmqtrain.runtime.equation.moments import MOMENT_MODELS, split_snapshot
from zmqtrain.runtime.events import BrokerEvents
from zmqtrain.runtime.groups.reducer import Reducers
from zmqtrain.runtime.groups.relays import Relays
from zmqtrain.runtime.parameter_server.parameter_keeper import ParameterKeeper
from zmqtrain.runtime.parameter_server.parameters import Parameters
from zmqtrain.runtime.planning.auto import LoadPlanner
from zmqtrain.runtime.rules import canonical
from zmqtrain.settings import RunSettings
from zmqtrain.strategies.selection import Laggards, preemption_from_spec
from zmqtrain.transport.reservation import LinkShare
from zmqtrain.types import VERSION, Buffer, Lane, PeerId

__all__ = ["BrokerStatistics", "Broker"]

TICK_SECONDS = 0.05
OTHER_KEYS = (
    "a master of this run, or its standby, comes in with the hub's own keys, and this one with those of a node: start "
    "it with a copy of the keys folder of the first (--keys)"
)
OUTBOX_MODELS = 3
"""So many models may queue for a peer; where optimizer state travels, a snapshot with its state besides."""


@dataclass(frozen=True)
class BrokerStatistics:
    """Running figures of a broker. bytes: payload and heads; aggregate_seconds: of the codec thread, all its work."""

    version: int
    nodes: int
    contributions: int
    refused: int
    bytes_sent: int
    bytes_received: int
    aggregate_seconds: float
    snapshots_served: int
    aggregates_dropped: int


class Broker:
    """A hub alive on `channel`.

    settings: of the run.  checkpoint: a folder to resume from and to save to, None for none.  checkpoint_every: how
    often ("60s", or "64" versions; "": as usual); checkpoint_keep: how many stay.
    watch: called in the broker's loop with every roster.  events: who is told what happens here, None for nobody.
    share: what training may use of this machine's port; None: all there is.
    registration: this broker's line to the first of several masters, welcomed, if it is another; its settings are then
    the first's.  open_line: how the broker itself reaches another.  inheritance: what a standby takes over, in place of
    what is in the checkpoint's folder.  has_our_keys: whether a peer came in with this hub's own pair, as masters and
    standbys must: they can end this broker, or have the nodes look for their parameters elsewhere.
    Raises ConfigError, CheckpointError.
    """

    def __init__(
        self,
        channel: HubChannel,
        settings: RunSettings,
        checkpoint: Path | None = None,
        checkpoint_every: str = "",
        checkpoint_keep: int = 3,
        watch: Callable[[Roster], None] | None = None,
        events: BrokerEvents | None = None,
        share: LinkShare | None = None,
        registration: Registration | None = None,
        open_line: OpenLine | None = None,
        inheritance: Inheritance | None = None,
        has_our_keys: Callable[[PeerId], bool] = lambda peer: True,
    ) -> None:
        self._registration, shard = registration, registration.place.shard if registration is not None else 0
        self.channel, self.settings, self.watch = channel, canonical(settings), watch
        run = f"run-{secrets.token_hex(4)}" if registration is None else registration.run
        self.share, self._has_our_keys = share or LinkShare(), has_our_keys
        rule = preemption_from_spec(settings.preemption)
        self.hub = Hub(
            self.settings,
            release_rule_from_spec(settings.release),
            run,
            time.monotonic(),
            None if rule is None else Laggards(rule),
            LoadPlanner(self.settings, self.share, lambda: self._loads.contribution_seconds()),
            shard,
            registration.place.first if registration is not None else "",
        )
        self._telling = Telling(self.hub, events)
        self.aggregator = Aggregator(self.settings, shard) if inheritance is None else inheritance.aggregator
        self._jobs = Jobs("zmqtrain-aggregate", self.stop)
        every = every_from_text(checkpoint_every, settings.mode == "strict")
        self.keeper = Keeper(checkpoint, self._jobs.fail, every, checkpoint_keep)
        self._moments: Sequence[Buffer] = ()
        """The founder's optimizer state, until training has begun."""
        if inheritance is None:
            self._moments = self.keeper.resume(self.hub, self.aggregator)
        else:
            self.hub.restore(inheritance.state)
            self.keeper.inherit(self.hub, self.aggregator)
        if registration is not None and registration.founded and self.hub.version < 0:
            raise ConfigError(
                f"{run} has begun, and shard {shard} of its parameters is not here: start it with its checkpoint, or "
                "all masters without"
            )
        self.traffic = Traffic(channel, self._queue_bytes, self._lost, self.hub.stamp)
        self._loads = Loads(self.hub, self.traffic, self._jobs, self.share)
        self._arrivals = Arrivals(self.hub, self.traffic, self._jobs, self.aggregator, self._telling, self._carry_out)
        self._replicas = Replicas(self.hub, self._send_standby_away, self._carry_out, open_line)
        self.rates = MessageRates()
        self._copies = Jobs("zmqtrain-snapshots", self.stop)
        self.serving = Serving(
            self.traffic,
            self._jobs,
            self._copies,
            self.aggregator,
            lambda peer: peer in self.hub.members,
            self._telling.joined,
            self._expel_deaf,
            lambda version, action: self._replicas.announce(version, action, time.monotonic()),
        )
        self._relays = Relays(self.traffic)
        self._reducers = Reducers(self._relays.forward)
        self._behind: Sequence[Buffer] = ()  # the frames behind the head that is being taken
        kept = ParameterKeeper(checkpoint, self._jobs.fail)
        name = f"keys-{secrets.token_hex(4)}"
        self.parameters = Parameters(self.traffic, self._jobs.do, name, kept, every.seconds)
        self._stop = asyncio.Event()
        self._effects: deque[HubEffect] = deque()
        self._forgotten: set[PeerId] = set()  # by the codec thread, soon
        self._carrying_out = False
        self._bytes_received = 0
        self._over_at = time.monotonic()

    # ------------------------------------------------------------------ living

    async def run(self) -> None:
        """Serve until `stop` or the end of the run; then save, say goodbye and close. Raises what went wrong here."""
        self._jobs.start()
        self._copies.start()
        self._telling.began()
        receiving = asyncio.create_task(self._receive_forever())
        try:
            while not self._stop.is_set():
                self._look_around(time.monotonic())
                self._save_when_due()
                if self._is_over():
                    break
                if receiving.done():
                    receiving.result()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), TICK_SECONDS)
        finally:
            receiving.cancel()
            reason = RUN_OVER if self.hub.ledger.finished and not self.hub.nodes else "the broker was stopped"
            for peer in list(self.hub.members):
                self.traffic.send(peer, Goodbye(reason))
            await asyncio.gather(receiving, return_exceptions=True)
            self.keeper.end()
            await asyncio.to_thread(self._replicas.close)
            try:
                await self._copies.close()
                await self._jobs.close()
                await asyncio.to_thread(self.keeper.close, self.hub.state(), self.aggregator)
                if self._jobs.failure is None:
                    await asyncio.to_thread(self.parameters.close)
            finally:
                await self.channel.close()
                self._telling.ended(self.aggregator, self._bytes_received, self.traffic.bytes_sent)
        if (failure := self._jobs.failure or self._copies.failure) is not None:
            raise failure

    def _look_around(self, now: float) -> None:
        """Do what time asks for: rounds that are due, who is silent, what waits for room."""
        self._loads.look()
        self._carry_out(self.hub.tick(now))
        self._replicas.tick(now)
        self._relays.pump_all()
        self.parameters.tick(now)
        self.serving.shelf.forget_old(now)
        for peer in list(self.traffic.intake.idle_holders()):
            text = "granted chunks, and none came for longer than they take on a slow link"
            self._expel(peer, ZmqTrainError(text), "unknown")  # a stall is no crime: it may come back

    def _is_over(self) -> bool:
        """Whether this broker's run has come to its end, and nobody is left here."""
        if self._registration is not None:
            return self._is_over_at_first(self._registration)
        if self.hub.ledger.finished and not self.hub.nodes:
            self._telling.over()
            return True
        return False

    def _is_over_at_first(self, registration: Registration) -> bool:
        if registration.failure is not None:
            raise registration.failure
        registration.remind()
        now = time.monotonic()
        if not registration.over:
            self._over_at = now
        late = now - self._over_at > self.settings.lost_seconds
        if registration.over and (late or not self.hub.nodes):
            self._telling.over(by_first=True)
            return True
        return False

    @property
    def public_address(self) -> str:
        """Where nodes look for this broker, if the first of several masters tells them; else its channel's address."""
        return self._registration.address if self._registration is not None else self.channel.address

    def stop(self) -> None:
        """End `run` soon; call it in the broker's loop."""
        self._stop.set()

    def statistics(self) -> BrokerStatistics:
        """Return the running figures."""
        return BrokerStatistics(
            self.hub.version,
            self.hub.nodes,
            self.hub.contributions,
            self.hub.refused,
            self.traffic.bytes_sent,
            self._bytes_received,
            self._jobs.seconds,
            self.serving.served,
            self.traffic.dropped,
        )

    async def _receive_forever(self) -> None:
        while True:
            try:
                peer, lane, frames = await self.channel.receive()
            except ChannelClosed:
                return
            self._bytes_received += sum(len(frame) for frame in frames)
            if lane is Lane.CONTROL and not self._is_heard(peer):
                continue
            try:
                self._take(peer, lane, frames)
            except ProtocolVersionError as error:
                self.traffic.send(peer, Refused("protocol", str(error)))
            except (FramingError, RemoteProtocolError) as error:
                self._expel(peer, error)
            except Exception as error:  # a message that we did not think of costs its sender, not the run
                self._telling.unthought_of(peer)
                self._expel(peer, error)

    def _is_heard(self, peer: PeerId) -> bool:
        """Return whether a message is read; who says too many is sent away, and may come back."""
        hearing = self.rates.take(peer, time.monotonic())
        if hearing is Hearing.TOO_MANY:
            text = f"it says more than {MESSAGES_PER_SECOND:.0f} messages a second, for long"
            self._expel(peer, ZmqTrainError(text), "unknown")
        return hearing is Hearing.HEARD

    def _take(self, peer: PeerId, lane: Lane, frames: list[Buffer]) -> None:
        now = time.monotonic()
        stamp, message = decode_head(frames[0])
        if (instead := self.hub.judge(peer, stamp, message, now, lane is Lane.CONTROL)) is not None:
            return self._carry_out(instead)
        if isinstance(message, Chunk):
            if len(frames) != 2:
                raise FramingError("a chunk is a head and one frame")
            self.hub.saw(peer, now)
            if self.traffic.intake.has_chunk(peer, message):
                return self.hub.fence.count(Verdict.DOUBLE)
            if (whole := self.traffic.intake.take_chunk(peer, message, frames[1])) is not None:
                if isinstance(whole[0], Initialise | Push):
                    self.parameters.whole(peer, whole[0], whole[1])
                else:
                    self._arrivals.arrived(peer, *whole)
        elif isinstance(message, Credit):
            self.hub.saw(peer, now)
            self.traffic.intake.pay(len(frames[0]))
            self.traffic.acknowledged(peer, message)
            self.parameters.go_on(peer)
        elif isinstance(message, Hello) and message.role in ("master", "standby") and not self._has_our_keys(peer):
            self._expel(peer, ZmqTrainError(OTHER_KEYS), "keys")
        else:
            self._behind = frames[1:]
            if isinstance(message, Probe | Relay | Fold) and sum(len(frame) for frame in self._behind) != message.size:
                raise FramingError(f"a {type(message).__name__} of {message.size} bytes has others behind it")
            self.traffic.intake.pay(sum(len(frame) for frame in frames))
            self._carry_out(self.hub.receive(peer, message, now))
            self._behind = ()
            if isinstance(message, Relayed):
                self._relays.pump(peer)
            if isinstance(message, Hello):
                self._loads.limit(peer)
            if isinstance(message, Report):
                self._telling.evaluated(message)

    def _expel(self, peer: PeerId, error: Exception, reason: str = "protocol") -> None:
        """Tell a peer that it cannot stay, and forget it; told "unknown", a node says Hello again."""
        text = self._telling.sent_away(peer, error)
        self.traffic.send(peer, Refused(reason, text))
        self._carry_out(self.hub.gone(peer, f"sent away: {text}", time.monotonic()))

    def dismiss(self, peer: PeerId, why: str) -> None:
        """Tell a peer that it may not stay, as its key was revoked, and forget it; in the broker's loop."""
        self._expel(peer, ZmqTrainError(why), "revoked")

    def _expel_deaf(self, peer: PeerId) -> None:
        self._expel(peer, ZmqTrainError("it does not read what it is sent"), "unknown")

    # ------------------------------------------------------------------ carrying out effects

    def _carry_out(self, effects: Sequence[HubEffect]) -> None:
        """Carry out effects in the order in which the hub had them, also those that carrying out one brings about."""
        self._effects.extend(effects)
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._effects:
                self._carry_out_one(self._effects.popleft())
        finally:
            self._carrying_out = False

    def _carry_out_one(self, effect: HubEffect) -> None:
        match effect:
            case SendTo(peer, message, stamp):
                if isinstance(message, Quarantine) and message.seconds > 0:
                    self._telling.quarantined(peer, message)
                    self._forget_norms(peer)  # it begins again
                self.traffic.send(peer, self.parameters.describe(message), stamp)
            case Broadcast(message):
                message = self.parameters.describe(message)
                if isinstance(message, Roster) and self.watch is not None:
                    self.watch(message)
                if isinstance(message, Schedule):
                    self._telling.scheduled(message)
                for peer in list(self.hub.members):
                    self.traffic.send(peer, message)
            case Expect(peer, announcement):
                self._arrivals.expect(peer, announcement)
            case Found(peer, announcement, model):
                self._telling.founding(peer, model)
                frames, self._moments = split_snapshot(announcement, self._arrivals.take(peer, announcement))
                self.serving.begin_anew()
                self._arrivals.clear()  # what was pending in a run that is founded anew
                self._jobs.do(partial(self._found, frames, self.hub.state(), peer, self._moments))
                if (standby := self.hub.standby) is not None:
                    self._replicate(standby.peer)
            case Average(snapshots):
                gathered = [self._arrivals.take(peer, snapshot) for peer, snapshot in snapshots]
                parts: dict[str, Sequence[Buffer]] = {
                    peer: split_snapshot(snapshot, frames)[0]
                    for (peer, snapshot), frames in zip(snapshots, gathered, strict=True)
                }
                self._jobs.do(partial(self.aggregator.average, parts), self._averaged, snapshots)
            case Lend(lender, announcement, peers):
                self._lend(lender, announcement, peers)
            case Accumulate(peer, publish):
                self._jobs.do(partial(self.aggregator.accumulate, peer, publish, self._arrivals.take(peer, publish)))
            case Reduce():
                self._jobs.do(partial(self._release, effect, len(self.hub.live)), self._released, effect)
                if self.hub.version == effect.version and self.keeper.is_due(effect.version, together=True):
                    self._jobs.do(partial(self.keeper.save, self.hub.state(), self.aggregator))
            case Serve():
                self.serving.serve(effect, self._moments)
            case Replicate(peer):
                self._replicate(peer)
            case Hear(version):
                self._replicas.holds(version, time.monotonic())
            case Rewind(version) if version < 0:
                self._telling.going_back(version)
            case Rewind(version):
                self._jobs.do(partial(self.keeper.rewind, version, self.aggregator), self._rewound)
            case Answer(peer, probe):
                self.traffic.answer(peer, Probed(probe.number, time.time(), f"zmqtrain {VERSION}"), probe.answer)
            case Forward(peer, message):
                self._relays.forward(peer, message, self._behind)
            case Consult(peer, request):
                self.parameters.take(peer, request)
            case Combine(_, rank, peers):
                try:
                    self._reducers.combine(effect, self._behind)
                except (FramingError, RemoteProtocolError) as error:
                    self._expel(peers[rank], error)
            case Rebase(rebased):
                self._telling.rebased(rebased)
                self._jobs.do(partial(self.aggregator.gate.rebase, rebased))
            case Discard(generation):
                self._reducers.discard(generation)
            case Disconnect(peer, reason, text):
                self._disconnect(peer, reason, text)

    def _forget_norms(self, peer: PeerId) -> None:
        """Have the gate take a node for a new one; however often nodes come and go, one job does it for all."""
        self._forgotten.add(peer)
        self._jobs.do_once("forget", self._forget_all_norms)

    def _forget_all_norms(self) -> None:
        while self._forgotten:
            self.aggregator.gate.forget(self._forgotten.pop())

    def _queue_bytes(self) -> int:
        models = OUTBOX_MODELS + (1 + MOMENT_MODELS if takes_moments(self.settings) else 0)
        return models * 4 * sum(leaf.values for leaf in self.hub.model)

    def _lost(self, peer: PeerId, why: str) -> None:
        self._carry_out(self.hub.gone(peer, why, time.monotonic()))

    def _disconnect(self, peer: PeerId, reason: str, text: str) -> None:
        self._telling.left(peer, reason, text)
        self.traffic.forget(peer)
        self._relays.forget(peer)
        self.serving.forget(peer)
        self.parameters.lost(peer)
        if reason not in ("again", "observer", "process", "master"):
            self._forget_norms(peer)
        self._arrivals.forget(peer)

    # ------------------------------------------------------------------ the codec thread

    def _found(self, frames: Sequence[Buffer], state: dict[str, Any], peer: PeerId, moments: Sequence[Buffer]) -> None:
        self.aggregator.found(frames)
        self._telling.founded(peer)
        # before the founder, or anybody, hears of the run
        self.keeper.save(state, self.aggregator, wait=True, moments=moments)

    def _release(self, reduce: Reduce, nodes: int) -> Released:
        released = self.aggregator.release(reduce)
        self.keeper.released(released, reduce)
        self._telling.released(reduce, nodes, released)
        return released

    def _released(self, released: Released | CodecError, reduce: Reduce) -> None:
        if isinstance(released, CodecError):
            raise released
        if released.overflowed:
            self._telling.overflowed(released.version, reduce)
        self._moments = ()
        standby = self.hub.standby
        first = standby.peer if standby is not None else ""
        self.traffic.send_aggregate(released, reduce, lambda peer: peer == first)
        to_nodes = partial(self.serving.released, released, reduce, lambda peer: peer != first)
        self._replicas.announce(released.version, to_nodes, time.monotonic())

    def _replicate(self, standby: PeerId) -> None:
        """Send the standby a copy of all there is, as it stands once the codec thread has come to it."""
        pack = partial(pack_replica, self.hub.state(), self.aggregator)
        self._jobs.do(pack, self._send_replica, standby, self.hub.version)

    def _send_replica(self, packed: tuple[list[Buffer], int], standby: PeerId, version: int) -> None:
        if standby in self.hub.members:
            self._replicas.copied()
            if not self.traffic.send_replica(standby, version, *packed):
                self._send_standby_away(standby, "it does not read what it is sent")

    def _send_standby_away(self, peer: PeerId, text: str) -> None:
        self._expel(peer, ZmqTrainError(text), "unknown")

    def _rewound(self, result: tuple[dict[str, Any], Sequence[Buffer]] | CodecError) -> None:
        assert not isinstance(result, CodecError)
        state, self._moments = result
        self.serving.begin_anew()
        self._telling.going_back(state["version"])
        self._replicas.go_back(int(state["version"]))
        self._carry_out(self.hub.rewound(state))
        if (standby := self.hub.standby) is not None:
            self._replicate(standby.peer)

    def _lend(self, lender: PeerId, announcement: Snapshot, peers: Sequence[PeerId]) -> None:
        """Pass the parameters of one of a population on to those that are to start again from them."""
        frames, moments = split_snapshot(announcement, self._arrivals.take(lender, announcement))
        here = [peer for peer in peers if peer in self.hub.members]
        for peer in here:
            self._telling.preempted(peer, lender)
        self.serving.lend(here, frames, moments)

    def _averaged(
        self, result: tuple[tuple[Buffer, ...], str] | CodecError, snapshots: Sequence[tuple[PeerId, Snapshot]]
    ) -> None:
        if isinstance(result, CodecError):
            raise result
        frames, why = result
        if why:
            self._telling.unrelated([peer for peer, _ in snapshots], why)
            self._carry_out(self.hub.unrelated(why))
        else:
            self._arrivals.put(*snapshots[0], frames)
            self._telling.averaged([peer for peer, _ in snapshots])
            self._carry_out(self.hub.averaged())

    def _save_when_due(self) -> None:
        if self.keeper.is_due(self.hub.version):
            self._jobs.do(partial(self.keeper.save, self.hub.state(), self.aggregator))

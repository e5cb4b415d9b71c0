"""The broker: a Hub on a channel, with a clock, a codec thread and a checkpoint folder, composed of services.

Rule 1: one asyncio loop owns the channel (`Receiver` receives, `Downlink` sends), the hub and the services; one codec
thread owns the arrays.  Rule 2: a peer that breaks the protocol loses its membership; no other peer is affected.
Rule 3: nothing here, nor in the modules imported here, imports jax.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from zmqtrain.averaging.aggregator import Aggregator, TakeLeaves
from zmqtrain.averaging.coder import encode_snapshot
from zmqtrain.averaging.compiling import compile_codecs
from zmqtrain.broker.admin import AdminService
from zmqtrain.broker.checkpoint import Keeper, new_run
from zmqtrain.broker.core import (
    BrokerAccess,
    BrokerCore,
    EffectHandlers,
    LoadMeter,
    MessageHandlers,
    ShardsBeside,
)
from zmqtrain.broker.deltas import PendingUploads, Receiver, ReleasePipeline
from zmqtrain.broker.snapshots import SnapshotService
from zmqtrain.broker.standby import Registration, StandbyService, TakeoverState
from zmqtrain.checkpoint.folder import every_from_text
from zmqtrain.checkpoint.model_files import Beginning
from zmqtrain.collectives.reducer import Reducers, Relays
from zmqtrain.core.errors import ConfigError, FramingError, RemoteProtocolError, ZmqTrainError
from zmqtrain.core.interfaces import HubChannel
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings
from zmqtrain.core.types import Buffer, PeerId
from zmqtrain.monitor.recorder import BrokerRecorder
from zmqtrain.parameter_server.parameters import ParameterKeeper, Parameters
from zmqtrain.planning.plans import LoadPlanner
from zmqtrain.planning.rules import canonical
from zmqtrain.protocol.effects import (
    AskPorts,
    Broadcast,
    Combine,
    Discard,
    Disconnect,
    Divide,
    FollowShard,
    Forward,
    SendTo,
    ServeShard,
    TakeShard,
    TryPort,
)
from zmqtrain.protocol.fencing import latest_incarnation
from zmqtrain.protocol.hosting import RETURN_SECONDS, Hosting
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.members import RUN_OVER
from zmqtrain.protocol.messages import Goodbye, Host, Relayed, Roster
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.session.environment import CodecExecutor, clock
from zmqtrain.strategies.weights import Laggards, preemption_from_spec
from zmqtrain.transport.address import split_key
from zmqtrain.transport.pacing import LinkShare

TICK_SECONDS = 0.05
COMEBACK_SECONDS = 10.0
"""So long a broker that is started again waits for nodes, though all data units of its run are done."""


class GroupService:
    """Relays messages between the members of groups, and reduces their chunks."""

    def __init__(self, core: BrokerCore) -> None:
        self._core, self.relays = core, Relays(core.downlink)
        self.reducers = Reducers(self.relays)
        self.messages: MessageHandlers = {Relayed: self._relayed}
        self.effects: EffectHandlers = {
            Forward: lambda effect: self.relays.forward(effect.peer, effect.message, core.behind),
            Combine: self._combine,
            Discard: lambda effect: self.reducers.discard(effect.generation),
        }

    def _relayed(self, peer: PeerId, relayed: Relayed, now: float) -> None:
        self._core.receive(peer, relayed, now)
        self.relays.pump(peer)

    def _combine(self, combine: Combine) -> None:
        try:
            self.reducers.combine(combine, self._core.behind)
        except (FramingError, RemoteProtocolError) as error:
            self._core.expel(combine.peers[combine.rank], error)


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


@dataclass(frozen=True, kw_only=True)
class BrokerOptions:
    """What a broker does besides its run's settings.

    checkpoint: a folder to resume from and to save to, None for none.  checkpoint_every: how often ("60s", or "64"
    versions; "": the default); checkpoint_keep: how many stay.  own_folder: the folder is named by the run, and made
    when there is something to save.  run: the id of a new run; "": a random one.
    watch: called in the broker's loop with every roster.  events: receives what happens here.
    share: what training may use of this machine's port; None: all of it.
    registration: for a broker that is not the first of its run, its line to the first, which has welcomed it and gives
    the settings.  takeover: what a standby takes over, in place of the checkpoint folder's state.
    beginning: the parameters that a new run begins with, None for those of its nodes.
    beside: at the first of several brokers, if nodes are to serve the other shards; None: they are started by hand.
    """

    checkpoint: Path | None = None
    checkpoint_every: str = ""
    checkpoint_keep: int = 3
    own_folder: bool = False
    run: str = ""
    watch: Callable[[Roster], None] | None = None
    events: BrokerRecorder | None = None
    share: LinkShare | None = None
    registration: Registration | None = None
    takeover: TakeoverState | None = None
    beginning: Beginning | None = None
    beside: ShardsBeside | None = None


class Broker:
    """A running hub on `channel`. settings: of the run.  access: who may do what at the channel.

    Raises ConfigError, CheckpointError.
    """

    def __init__(
        self,
        channel: HubChannel,
        settings: RunSettings,
        options: BrokerOptions | None = None,
        access: BrokerAccess | None = None,
    ) -> None:
        self.channel, self.options = channel, options or BrokerOptions()
        if settings.shards == AUTO_SHARDS and (self.options.beside is None or self.options.beginning is not None):
            settings = replace(settings, shards=1)
        self.settings = canonical(settings)
        options, registration, takeover = self.options, self.options.registration, self.options.takeover
        self.share, self.folder = options.share or LinkShare(), options.checkpoint
        self._planner = LoadPlanner(self.settings, self.share)
        self.hub = self._make_hub()
        shard = self.hub.shard
        self.aggregator = Aggregator(self.settings, shard) if takeover is None else takeover.aggregator
        self.core = BrokerCore(channel, self.hub, self.aggregator, access or BrokerAccess(), options.events)
        self.log, self.codec, self.downlink = self.core.log, self.core.codec, self.core.downlink
        self._copies = CodecExecutor("zmqtrain-snapshots", self.core.stop)
        every = every_from_text(options.checkpoint_every, self.settings.mode == "strict")
        self._open_until = -inf
        self.keeper = Keeper(self.folder, every, options.checkpoint_keep, made_late=options.own_folder)
        moments = self._resume()
        if self.aggregator.version >= 0:
            self.aggregator.came(clock.monotonic())
        self.settings = self._planner.settings = self.hub.settings
        if registration is not None and registration.peer.founded and self.hub.version < 0:
            self.keeper.release_folder()
            raise ConfigError(
                f"{self.hub.run} has begun, and shard {shard} of its parameters is not here: start it with its "
                "checkpoint, or all brokers without"
            )
        self._planner.meter = self.loads = LoadMeter(self.core, self.share)
        self.standby = StandbyService(self.core)
        self.uploads = PendingUploads(self.core)
        self.snapshots = SnapshotService(self.core, self._copies, self.loads, self.standby)
        self.snapshots.moments = moments
        beside = self._beside = options.beside or ShardsBeside()
        self.releases = ReleasePipeline(self.core, self.keeper, self.uploads, self.snapshots, self.standby, beside)
        self.groups = GroupService(self.core)
        name, keeper = f"keys-{secrets.token_hex(4)}", ParameterKeeper(self.folder)
        self.parameters = Parameters(self.downlink, self.codec, name, keeper, every.seconds)
        self.receiver = Receiver(self.core, self.uploads, self.parameters)
        self.admin = AdminService(self.core, self.loads, self.uploads, self.receiver, self.keeper, self.parameters)
        self.admin.watch = options.watch
        self.messages: MessageHandlers = {}
        self.effects: EffectHandlers = {
            Disconnect: self._disconnect,
            Divide: self._divide,
            AskPorts: self._ask_ports,
            TryPort: lambda effect: beside.try_port(effect.peer, effect.port),
            ServeShard: lambda effect: beside.serve(effect.shard),
            FollowShard: lambda effect: beside.follow(effect.shard, effect.address),
            TakeShard: lambda effect: beside.take(effect.shard),
        }
        if options.beside is not None:
            not_before = self.core.now() + RETURN_SECONDS if self.hub.version >= 0 else 0.0
            self.hub.hosting = Hosting(self.hub.shards, self.settings.start_nodes, not_before)
        self.core.dispatch_to(
            self, self.admin, self.receiver, self.uploads, self.releases, self.snapshots, self.standby, self.groups
        )

    def _make_hub(self) -> Hub:
        settings, registration = self.settings, self.options.registration
        rule = preemption_from_spec(settings.preemption)
        hub = Hub(
            settings,
            release_rule_from_spec(settings.release),
            (self.options.run or new_run()) if registration is None else registration.peer.run,
            clock.monotonic(),
            None if rule is None else Laggards(rule),
            self._planner if registration is None else None,
            registration.place.shard if registration is not None else 0,
            registration.place.first if registration is not None else "",
        )
        hub.latest_incarnation = latest_incarnation(time.time_ns())
        return hub

    def _resume(self) -> Sequence[Buffer]:
        """Bring hub and aggregator to where the run was; return the founder's optimizer state, if it is still needed.

        Raises ConfigError, CheckpointError.
        """
        moments: Sequence[Buffer] = ()
        if (takeover := self.options.takeover) is None:
            moments = self.keeper.resume(self.hub, self.aggregator)
        else:
            self.hub.restore(takeover.state)
            self.keeper.inherit(self.hub, self.aggregator)
        if (beginning := self.options.beginning) is None:
            return moments
        try:
            if self.hub.version >= 0:
                raise ConfigError(
                    f"{self.folder} has {self.hub.run} at version {self.hub.version} already: leave --from out to go "
                    f"on with that, or name another folder to begin a new run with {beginning.path}"
                )
            self.aggregator.plan(beginning.model)
            layout = self.aggregator.layout
            self.aggregator.found(encode_snapshot(layout, layout.split(beginning.leaves)))
            self.hub.begin_with(beginning.model)
            self.keeper.save(self.hub.state(), self.aggregator, wait=True)
        except BaseException:
            self.keeper.release_folder()
            raise
        return moments

    async def run(self) -> None:
        """Serve until `stop` or the end of the run; then save, say goodbye and close. Raises what ended the broker."""
        self.codec.start()
        if self.aggregator.version >= 0:
            self.codec.do(compile_codecs, self.aggregator.layout, self.settings)  # before all that is coded
        self._copies.start()
        if self.hub.units.ledger.finished:  # it was killed while nodes handed in the last they had
            self._open_until = self.core.now() + COMEBACK_SECONDS
        self.core.events.began(self.hub.run, self.hub.settings, self.hub.version)
        receiving = asyncio.create_task(self.receiver.receive_forever())
        try:
            while not self.core.stop.is_set():
                self.tick(self.core.now())
                self.releases.save_when_due()
                if self._is_over():
                    break
                if receiving.done():
                    receiving.result()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_SECONDS):
                        await self.core.stop.wait()
        finally:
            receiving.cancel()
            first = self.options.registration
            finished = self.hub.units.ledger.finished or (first is not None and first.peer.over)
            reason = RUN_OVER if finished and not self.hub.nodes else "the broker was stopped"
            for peer in list(self.hub.members):
                self.downlink.send(peer, Goodbye(reason))
            await asyncio.gather(receiving, return_exceptions=True)
            await self._close()
        if (failure := self.codec.failure or self._copies.failure) is not None:
            raise failure

    async def _close(self) -> None:
        self.releases.look_at_scores()
        self.keeper.end()
        await asyncio.to_thread(self.standby.close)
        ended = False
        try:
            await self._copies.close()
            ended = await self.codec.close()
            await asyncio.to_thread(self.keeper.close, self.hub.state(), self.aggregator if ended else None)
            if self.codec.failure is None:
                await asyncio.to_thread(self.parameters.close)
        finally:
            await self.channel.close()
            if ended:
                self.log.ended(self.aggregator, self.receiver.bytes_received, self.downlink.bytes_sent)

    def tick(self, now: float) -> None:
        """Do what time asks for: releases that are due, silent peers, what waits for room."""
        self.loads.tick()
        self.releases.look_at_scores()
        self.hub.latest_incarnation = latest_incarnation(time.time_ns())
        self.core.carry_out(self.hub.tick(now))
        if (registration := self.options.registration) is not None and (planned := registration.planned) is not None:
            self.core.carry_out(self.hub.follow(planned))
        self.standby.tick(now)
        self.groups.relays.pump_all()
        self.downlink.look_again()
        self.parameters.tick(now)
        self.snapshots.tick(now)
        for peer in list(self.downlink.uploads.idle_holders()):
            # a stall is no crime
            self.core.reconnect(peer, "granted chunks, and none came for longer than they take on a slow link")

    def _is_over(self) -> bool:
        """Return whether this broker's run has ended and no node is left here."""
        first = self.options.registration
        if self.hub.nodes:
            self._open_until = -inf
        ended = self.hub.units.ledger.finished and not self.hub.nodes and self.core.now() >= self._open_until
        over = ended if first is None else first.ends(self.hub.nodes)
        if over:
            self.log.over(by_first=first is not None)
        return over

    @property
    def public_address(self) -> str:
        """The address at which nodes look for this broker: as it was registered with the first broker, or its
        channel's."""
        registration = self.options.registration
        return registration.address if registration is not None else self.channel.address

    def stop(self) -> None:
        """End `run` soon; call it in the broker's loop."""
        self.core.stop.set()

    def give_leaves(self, take: TakeLeaves, moment: float) -> None:
        """Call `take` in the codec thread with what was published here at a moment, if that is known; call it in the
        broker's loop."""
        self.codec.do(self.aggregator.give_leaves, take, moment)

    def dismiss(self, peer: PeerId, why: str) -> None:
        """Expel a peer whose key was revoked; call it in the broker's loop."""
        self.core.expel(peer, ZmqTrainError(why), "revoked")

    def authorised(self, names: Mapping[str, str]) -> None:
        """Let these keys in from now on; call it in the broker's loop."""
        if self.hub.hosting is not None:
            self.core.carry_out(self.hub.hosting.authorise(names))

    def port_tried(self, peer: PeerId, reached: bool) -> None:
        """Record whether this machine reaches a port of a node's; call it in the broker's loop."""
        if self.hub.hosting is not None:
            self.hub.hosting.trials.tried(peer, reached)

    def shard_reached(self, shard: int, address: str) -> None:
        """Let nodes hear where a shard is served, as this machine reaches it there; call it in the broker's loop."""
        if self.hub.hosting is not None:
            self.hub.hosting.reached(shard, address)
            self.core.carry_out([Broadcast(self.hub.roster(self.core.now()))])

    def shard_out_of_reach(self, shard: int, address: str) -> bool:
        """Send the broker of a shard away that this machine does not reach at its address, unless it did before; return
        whether it was. Call it in the broker's loop."""
        hosting = self.hub.hosting
        if hosting is None or (holder := hosting.out_of_reach(shard, address)) is None:
            return False
        where, _ = split_key(address)
        self.core.expel(holder, ZmqTrainError(f"the first broker does not reach it at {where}"), "shard")
        return True

    def statistics(self) -> BrokerStatistics:
        return BrokerStatistics(
            self.hub.version,
            self.hub.nodes,
            self.hub.contributions,
            self.hub.refused,
            self.downlink.bytes_sent,
            self.receiver.bytes_received,
            self.codec.seconds,
            self.snapshots.served,
            self.downlink.dropped,
        )

    def _divide(self, effect: Divide) -> None:
        self.settings = self.aggregator.settings = self._planner.settings = self.hub.settings
        self.log.divided(effect.shards, effect.why)

    def _ask_ports(self, effect: AskPorts) -> None:
        question = Host(0, port=self._beside.open_port())
        self.core.carry_out([SendTo(peer, question) for peer in effect.peers])

    def _disconnect(self, effect: Disconnect) -> None:
        peer = effect.peer
        self.log.left(peer, effect.reason, effect.text)
        self.downlink.forget(peer)
        self.groups.relays.forget(peer)
        self.snapshots.forget(peer)
        self.parameters.lost(peer)
        if effect.reason not in ("again", "observer", "process", "broker"):
            self.uploads.forget_norms(peer)
        self.uploads.forget(peer)

"""Be the hub alive: a Hub on a socket, with a clock, a codec thread and a checkpoint folder.

Rule 1: one asyncio loop owns the socket (`Receiver` takes what comes, `Traffic` sends) and the machine; one codec
thread owns the arrays (`Versions`, `Arrivals`); jobs and their results pass between them in order.  Rule 2: what a peer
does wrong costs that peer its membership, and nobody else anything.  Rule 3: here its rooms are made, and each effect
of the hub is given to the one that does it.  Rule 4: no jax here, nor in anything that is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.delta import encode_snapshot
from zmqtrain.averaging.moments import MOMENT_MODELS
from zmqtrain.broker.arrivals import Arrivals
from zmqtrain.broker.jobs import Jobs
from zmqtrain.broker.keeper import Keeper
from zmqtrain.broker.loads import Loads
from zmqtrain.broker.receiver import Receiver
from zmqtrain.broker.registration import Registration
from zmqtrain.broker.replicas import OpenLine, Replicas
from zmqtrain.broker.run_folders import new_run
from zmqtrain.broker.serving import Serving
from zmqtrain.broker.standby import Inheritance
from zmqtrain.broker.telling import Telling
from zmqtrain.broker.versions import Versions
from zmqtrain.checkpoint.every import every_from_text
from zmqtrain.checkpoint.model_files import Beginning
from zmqtrain.collectives.reducer import Reducers
from zmqtrain.collectives.relays import Relays
from zmqtrain.core.errors import ConfigError, FramingError, RemoteProtocolError, ZmqTrainError
from zmqtrain.core.interfaces import HubChannel
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import VERSION, Buffer, PeerId
from zmqtrain.parameter_server.parameter_keeper import ParameterKeeper
from zmqtrain.parameter_server.parameters import Parameters
from zmqtrain.planning.auto import LoadPlanner
from zmqtrain.planning.rules import canonical
from zmqtrain.protocol.effects import (
    Answer,
    Broadcast,
    Combine,
    Consult,
    Discard,
    Disconnect,
    Expect,
    Forward,
    Hear,
    HubEffect,
    Rebase,
    SendTo,
)
from zmqtrain.protocol.fencing import latest_incarnation
from zmqtrain.protocol.founding import takes_moments
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.masters import RUN_OVER
from zmqtrain.protocol.messages import Goodbye, Message, Probed, Quarantine, Refused, Roster, Scalar, Schedule
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.session.effect_queue import EffectQueue
from zmqtrain.session.events import BrokerEvents
from zmqtrain.session.traffic import Traffic
from zmqtrain.strategies.noise import gains
from zmqtrain.strategies.selection import Laggards, preemption_from_spec
from zmqtrain.transport.reservation import LinkShare

TICK_SECONDS = 0.05
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
    standbys must: they can end this broker, or have the nodes look for their parameters elsewhere.  key_name: of the
    key with which a peer came in, "" where there are none: a node's id stays that key's.  turned_away: how many
    connections and messages the channel has refused in the last minute.
    run: the id of the run, if it is new; "": one is drawn.  own_folder: the checkpoint's folder is named by the run,
    and made when there is something to keep.  is_operator: whether a peer may end the run (`zmqtrain stop`).
    beginning: the parameters that a new run begins with, None for those of its nodes.
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
        key_name: Callable[[PeerId], str] = lambda peer: "",
        turned_away: Callable[[], int] = lambda: 0,
        run: str = "",
        own_folder: bool = False,
        is_operator: Callable[[PeerId], bool] = lambda peer: False,
        beginning: Beginning | None = None,
    ) -> None:
        self._registration, shard = registration, registration.place.shard if registration is not None else 0
        self.channel, self.settings, self.watch = channel, canonical(settings), watch
        run = (run or new_run()) if registration is None else registration.run
        self.share, self._turned_away = share or LinkShare(), turned_away
        rule = preemption_from_spec(settings.preemption)
        self.hub = Hub(
            self.settings,
            release_rule_from_spec(settings.release),
            run,
            time.monotonic(),
            None if rule is None else Laggards(rule),
            LoadPlanner(
                self.settings,
                self.share,
                lambda: self._loads.contribution_seconds(),
                lambda: self.traffic.port_measured,
            ),
            shard,
            registration.place.first if registration is not None else "",
        )
        self.hub.latest_incarnation = latest_incarnation(time.time_ns())
        self._telling = Telling(self.hub, events)
        self._carry_out = EffectQueue[HubEffect](self._carry_out_one).carry_out
        self.aggregator = Aggregator(self.settings, shard) if inheritance is None else inheritance.aggregator
        self._jobs = Jobs("zmqtrain-aggregate", self.stop)
        every = every_from_text(checkpoint_every, settings.mode == "strict")
        self.folder = checkpoint
        """Where the run is kept; None: nowhere."""
        self.keeper = Keeper(checkpoint, every, checkpoint_keep, made_late=own_folder)
        moments: Sequence[Buffer] = ()
        if inheritance is None:
            moments = self.keeper.resume(self.hub, self.aggregator)
        else:
            self.hub.restore(inheritance.state)
            self.keeper.inherit(self.hub, self.aggregator)
        if beginning is not None:
            self._begin_with(beginning)
        if registration is not None and registration.founded and self.hub.version < 0:
            raise ConfigError(
                f"{run} has begun, and shard {shard} of its parameters is not here: start it with its checkpoint, or "
                "all masters without"
            )
        self.traffic = Traffic(channel, self._queue_bytes, self._lost, self._unreachable, self.hub.stamp)
        self._loads = Loads(self.hub, self.traffic, self._jobs, self.share)
        self._arrivals = Arrivals(self.hub, self.traffic, self._jobs, self.aggregator, self._telling, self._carry_out)
        self._replicas = Replicas(self.hub, self._send_to_come_again, self._carry_out, open_line)
        self._copies = Jobs("zmqtrain-snapshots", self.stop)
        self.serving = Serving(
            self.traffic,
            self._jobs,
            self._copies,
            self.aggregator,
            lambda peer: peer in self.hub.members,
            self._telling.joined,
            self._send_to_come_again,
            lambda version, action: self._replicas.announce(version, action, time.monotonic()),
            lambda peer: self.hub.records.landed(peer),
            self._model_bytes,
            self._loads.port_rate,
        )
        self.versions = Versions(
            self.hub,
            self.aggregator,
            self._jobs,
            self.keeper,
            self._arrivals,
            self.traffic,
            self.serving,
            self._replicas,
            self._telling,
            self._carry_out,
            moments,
        )
        self._relays = Relays(self.traffic)
        self._reducers = Reducers(self._relays.forward)
        kept = ParameterKeeper(checkpoint)
        name = f"keys-{secrets.token_hex(4)}"
        self.parameters = Parameters(self.traffic, self._jobs.do, name, kept, every.seconds)
        self._stop = asyncio.Event()
        self.receiver = Receiver(
            channel,
            self.hub,
            self.traffic,
            self._arrivals,
            self.parameters,
            self._relays,
            self._loads,
            self._telling,
            self._carry_out,
            self._expel,
            has_our_keys,
            key_name,
            is_operator,
        )

    def _begin_with(self, beginning: Beginning) -> None:
        """Be at version 0 with these parameters. Raises ConfigError where the folder has a run that has begun."""
        if self.hub.version >= 0:
            self.keeper.release_folder()
            raise ConfigError(
                f"{self.folder} has {self.hub.run} at version {self.hub.version} already: leave --from out to go on "
                f"with that, or name another folder to begin a new run with {beginning.path}"
            )
        try:
            self.aggregator.plan(beginning.model)
            self.aggregator.found(
                encode_snapshot(self.aggregator.layout, self.aggregator.layout.split(beginning.leaves))
            )
            self.hub.begin_with(beginning.model)
            self.keeper.save(self.hub.state(), self.aggregator, wait=True)
        except BaseException:
            self.keeper.release_folder()
            raise

    # ------------------------------------------------------------------ living

    async def run(self) -> None:
        """Serve until `stop` or the end of the run; then save, say goodbye and close. Raises what went wrong here."""
        self._jobs.start()
        self._copies.start()
        self._telling.began()
        receiving = asyncio.create_task(self.receiver.receive_forever())
        try:
            while not self._stop.is_set():
                self._look_around(time.monotonic())
                self.versions.save_when_due()
                if self._is_over():
                    break
                if receiving.done():
                    receiving.result()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_SECONDS):
                        await self._stop.wait()
        finally:
            receiving.cancel()
            reason = RUN_OVER if self.hub.ledger.finished and not self.hub.nodes else "the broker was stopped"
            for peer in list(self.hub.members):
                self.traffic.send(peer, Goodbye(reason))
            await asyncio.gather(receiving, return_exceptions=True)
            self.versions.look_at_scores()
            self.keeper.end()
            await asyncio.to_thread(self._replicas.close)
            ended = False
            try:
                await self._copies.close()
                ended = await self._jobs.close()
                await asyncio.to_thread(self.keeper.close, self.hub.state(), self.aggregator if ended else None)
                if self._jobs.failure is None:
                    await asyncio.to_thread(self.parameters.close)
            finally:
                await self.channel.close()
                if ended:
                    self._telling.ended(self.aggregator, self.receiver.bytes_received, self.traffic.bytes_sent)
        if (failure := self._jobs.failure or self._copies.failure) is not None:
            raise failure

    def _look_around(self, now: float) -> None:
        """Do what time asks for: rounds that are due, who is silent, what waits for room."""
        self._loads.look()
        self.versions.look_at_scores()
        self.hub.latest_incarnation = latest_incarnation(time.time_ns())
        self._carry_out(self.hub.tick(now))
        self._replicas.tick(now)
        self._relays.pump_all()
        self.traffic.look_again()
        self.parameters.tick(now)
        self.serving.tick(now)
        for peer in list(self.traffic.intake.idle_holders()):
            # a stall is no crime
            self._send_to_come_again(peer, "granted chunks, and none came for longer than they take on a slow link")

    def _is_over(self) -> bool:
        """Whether this broker's run has come to its end, and nobody is left here."""
        first = self._registration
        over = self.hub.ledger.finished and not self.hub.nodes if first is None else first.ends(self.hub.nodes)
        if over:
            self._telling.over(by_first=first is not None)
        return over

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
            self.receiver.bytes_received,
            self._jobs.seconds,
            self.serving.served,
            self.traffic.dropped,
        )

    def _expel(self, peer: PeerId, error: Exception, reason: str = "protocol") -> None:
        """Tell a peer that it cannot stay, and forget it; told "unknown", a node says Hello again."""
        text = self._telling.sent_away(peer, error)
        self.traffic.send(peer, Refused(reason, text))
        self._carry_out(self.hub.gone(peer, f"sent away: {text}", time.monotonic()))

    def dismiss(self, peer: PeerId, why: str) -> None:
        """Tell a peer that it may not stay, as its key was revoked, and forget it; in the broker's loop."""
        self._expel(peer, ZmqTrainError(why), "revoked")

    def _send_to_come_again(self, peer: PeerId, why: str = "it does not read what it is sent") -> None:
        self._expel(peer, ZmqTrainError(why), "unknown")

    # ------------------------------------------------------------------ carrying out effects

    def _carry_out_one(self, effect: HubEffect) -> None:
        match effect:
            case SendTo(peer, message, stamp):
                if isinstance(message, Quarantine) and message.seconds > 0:
                    self._telling.quarantined(peer, message)
                    self._arrivals.forget_norms(peer, probation=True)  # it begins again
                self.traffic.send(peer, self._describe(message), stamp)
            case Broadcast(message):
                message = self._describe(message)
                if isinstance(message, Roster) and self.watch is not None:
                    self.watch(message)
                if isinstance(message, Schedule):
                    self._telling.scheduled(message)
                for peer in list(self.hub.members):
                    self.traffic.send(peer, message)
            case Expect(peer, announcement):
                self._arrivals.expect(peer, announcement)
            case Hear(version):
                self._replicas.holds(version, time.monotonic())
            case Answer(peer, probe):
                self.traffic.answer(peer, Probed(probe.number, time.time(), f"zmqtrain {VERSION}"), probe.answer)
            case Forward(peer, message):
                self._relays.forward(peer, message, self.receiver.behind)
            case Consult(peer, request):
                self.parameters.take(peer, request)
            case Combine(_, rank, peers):
                try:
                    self._reducers.combine(effect, self.receiver.behind)
                except (FramingError, RemoteProtocolError) as error:
                    self._expel(peers[rank], error)
            case Rebase(rebased, why):
                self._telling.rebased(rebased, why)
                if not why:
                    self._arrivals.rebase(rebased)
            case Discard(generation):
                self._reducers.discard(generation)
            case Disconnect(peer, reason, text):
                self._disconnect(peer, reason, text)
            case _:
                self.versions.do(effect)

    def _describe(self, message: Message) -> Message:
        return self.describe(message) if isinstance(message, Roster) else message

    def describe(self, roster: Roster) -> Roster:
        """Return a roster of the hub's with what only the living half knows."""
        here: dict[str, Scalar] = {"refused": self.hub.refused, "turned_away": self._turned_away()}
        here |= {"waits_for_room": self.keeper.waits_for_room, "unsaved": self.keeper.writer.unsaved}
        if (noise := self.aggregator.meter.noise) is not None and roster.members:
            here["noise"] = noise
            here["gain_next"], here["gain_last"] = gains(len(roster.members), noise)
        return self.parameters.describe(replace(roster, hub=roster.hub | here))

    def _queue_bytes(self) -> int:
        models = OUTBOX_MODELS + (1 + MOMENT_MODELS if takes_moments(self.settings) else 0)
        return models * self._model_bytes()

    def _model_bytes(self) -> int:
        return 4 * sum(leaf.values for leaf in self.hub.model)

    def _lost(self, peer: PeerId, why: str) -> None:
        self._carry_out(self.hub.gone(peer, why, time.monotonic()))

    def _unreachable(self, peer: PeerId) -> None:
        self.hub.unreachable(peer, time.monotonic())

    def _disconnect(self, peer: PeerId, reason: str, text: str) -> None:
        self._telling.left(peer, reason, text)
        self.traffic.forget(peer)
        self._relays.forget(peer)
        self.serving.forget(peer)
        self.parameters.lost(peer)
        if reason not in ("again", "observer", "process", "master"):
            self._arrivals.forget_norms(peer)
        self._arrivals.forget(peer)

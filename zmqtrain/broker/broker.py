"""The hub alive: a Hub on a channel, with a clock, a codec thread and a checkpoint folder."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import encode_snapshot
from zmqtrain.averaging.snapshot import OPTIMIZER_STATE_MODELS
from zmqtrain.broker.checkpoint import Keeper, new_run
from zmqtrain.broker.codec_executor import CodecExecutor
from zmqtrain.broker.deltas import PendingUploads, ReleasePipeline
from zmqtrain.broker.log import BrokerLog
from zmqtrain.broker.snapshots import SnapshotService
from zmqtrain.broker.standby import OpenLine, Registration, Replicas, TakeoverState
from zmqtrain.checkpoint.folder import every_from_text
from zmqtrain.checkpoint.model_files import Beginning
from zmqtrain.collectives.reducer import Reducers, Relays
from zmqtrain.core.errors import ChannelClosed, ConfigError, FramingError, RemoteProtocolError, ZmqTrainError
from zmqtrain.core.interfaces import HubChannel
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import VERSION, Buffer, Lane, PeerId
from zmqtrain.parameter_server.parameters import ParameterKeeper, Parameters
from zmqtrain.planning.auto import ASSUMED_BITS, LoadPlanner, typical_rate
from zmqtrain.planning.rules import canonical
from zmqtrain.planning.schedule import payload_rate
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
from zmqtrain.protocol.fencing import Verdict, latest_incarnation
from zmqtrain.protocol.framing import ProtocolVersionError, open_head, read_fields
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.initialization import sends_optimizer_state
from zmqtrain.protocol.limits import (
    FAULT_SECONDS,
    LOOP_SHARE,
    MESSAGES_PER_SECOND,
    Hearing,
    LoopBudgets,
    MessageRates,
    cost_of,
)
from zmqtrain.protocol.members import RUN_OVER
from zmqtrain.protocol.messages import (
    Chunk,
    Credit,
    Fold,
    Goodbye,
    Hello,
    Initialise,
    Message,
    Probe,
    Probed,
    Push,
    Quarantine,
    Refused,
    Relay,
    Relayed,
    Report,
    Roster,
    Scalar,
    Schedule,
    Stop,
)
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.session.downlink import Downlink
from zmqtrain.session.effect_queue import EffectQueue
from zmqtrain.session.events import BrokerEvents
from zmqtrain.strategies.noise import gains
from zmqtrain.strategies.selection import Laggards, preemption_from_spec
from zmqtrain.transport.pacing import LinkShare

RATE_NEWS = 1.05
"""A link is said to be faster than it was said to be when it was seen so many times as fast."""
CONTRIBUTIONS_WARM, CONTRIBUTIONS_MEASURED = 8, 32
"""What a contribution costs here is measured over so many, once the first ones are over, for which code is compiled."""


class Loads:
    """The loads of one broker. share: what training may use of this machine's port."""

    def __init__(self, hub: Hub, downlink: Downlink, jobs: CodecExecutor, share: LinkShare) -> None:
        self._hub, self._downlink, self._jobs, self._share = hub, downlink, jobs, share
        self._contributions_before = hub.contributions
        self._measured_from: tuple[int, float] | None = None
        self._limited: float | None = share.limit()
        downlink.limit(self._limited)

    def look(self) -> None:
        """Tell the hub how fast its nodes' links were seen, and keep to shares of what was not told."""
        for peer, member in self._hub.members.items():
            measured = self._downlink.measured(peer)
            if measured > RATE_NEWS * member.measured:
                self._hub.measured(peer, measured)
                self.limit(peer)
        if (limit := self._share.limit(typical_rate(self._hub.members.values()))) != self._limited:
            self._limited = limit
            self._downlink.limit(limit)

    def limit(self, peer: PeerId) -> None:
        """Keep to what this peer gives of its link."""
        if (member := self._hub.members.get(peer)) is not None:
            self._downlink.limit_peer(peer, LinkShare(member.link, member.share).limit(member.measured))

    def port_rate(self) -> float:
        """Return what this machine's port is taken to carry, in bytes per second: its rate, or a typical one of the
        nodes that have contributed."""
        known = typical_rate(member for member in self._hub.members.values() if member.contributions)
        return self._share.usable(known or payload_rate(ASSUMED_BITS))

    def contribution_seconds(self) -> float:
        """The CPU of the codec thread for one contribution, all its work; 0 as long as too few were seen."""
        count, seconds = self._hub.contributions, self._jobs.seconds
        if self._measured_from is None and count >= self._contributions_before + CONTRIBUTIONS_WARM:
            self._measured_from = (count, seconds)
        before, seconds_before = self._measured_from or (count, seconds)
        here = count - before
        return (seconds - seconds_before) / here if here >= CONTRIBUTIONS_MEASURED else 0.0


OTHER_KEYS = (
    "a master of this run, or its standby, comes in with the hub's own keys, and this one with those of a node: start "
    "it with a copy of the keys folder of the first (--keys)"
)
NO_OPERATOR = (
    "only an operator can end the run. Say `zmqtrain stop` on the hub's own PC, or, where the hub has keys, with its "
    "own pair (--keys hub.key_secret, from its keys folder); a node ends itself with Ctrl-C"
)


class _Collecting:
    """CPU seconds that the garbage collector has taken in the thread that made this."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        self._thread = threading.get_ident()

    def note(self, phase: str, facts: object) -> None:
        """See gc.callbacks."""
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._began


class Receiver:
    """The way of what peers say to one broker.

    carry_out: does what the hub wishes.  send_away: tells a peer, with an error and a code, that it cannot stay.
    has_our_keys: whether a peer came in with this hub's own pair.  key_name: of the key it came in with, "" where none
    are asked for.  is_operator: whether a peer may end the run.  The rest: of the broker.
    rates, budgets: of each peer's messages, and of the time that they take.  bytes_received: payload and heads.
    behind: the frames behind the head that is being taken.
    """

    def __init__(
        self,
        channel: HubChannel,
        hub: Hub,
        downlink: Downlink,
        arrivals: PendingUploads,
        parameters: Parameters,
        relays: Relays,
        loads: Loads,
        telling: BrokerLog,
        carry_out: Callable[[Sequence[HubEffect]], None],
        send_away: Callable[[PeerId, Exception, str], None],
        has_our_keys: Callable[[PeerId], bool],
        key_name: Callable[[PeerId], str],
        is_operator: Callable[[PeerId], bool],
    ) -> None:
        self._channel, self._hub, self._downlink, self._arrivals = channel, hub, downlink, arrivals
        self._parameters, self._relays, self._loads, self._telling = parameters, relays, loads, telling
        self._carry_out, self._send_away, self._has_our_keys = carry_out, send_away, has_our_keys
        self._key_name, self._is_operator = key_name, is_operator
        self.rates, self.budgets = MessageRates(), LoopBudgets()
        self._collecting = _Collecting()
        self.bytes_received = 0
        self.behind: Sequence[Buffer] = ()

    async def receive_forever(self) -> None:
        """Take what comes until the channel is closed."""
        gc.callbacks.append(self._collecting.note)
        try:
            await self._receive()
        finally:
            gc.callbacks.remove(self._collecting.note)

    async def _receive(self) -> None:
        while True:
            try:
                peer, lane, frames = await self._channel.receive()
            except ChannelClosed:
                return
            self.bytes_received += sum(len(frame) for frame in frames)
            if not self._is_heard(peer, lane):
                continue
            began, fault = self._own_time(), 0.0
            try:
                self._take(peer, lane, frames)
            except ProtocolVersionError as error:
                self._downlink.send(peer, Refused("protocol", str(error)))
            except (FramingError, RemoteProtocolError) as error:
                fault = FAULT_SECONDS
                self._send_away(peer, error, "protocol")
            except Exception as error:  # a message that we did not think of costs its sender, not the run
                fault = FAULT_SECONDS
                self._telling.unthought_of(peer)
                self._send_away(peer, error, "protocol")
            self._count_time(peer, cost_of(self._own_time() - began, len(frames[0])) + fault)

    def _own_time(self) -> float:
        """The CPU seconds of this thread, but for those of Python's garbage collector, which are no peer's fault."""
        return time.thread_time() - self._collecting.seconds

    def _is_heard(self, peer: PeerId, lane: Lane) -> bool:
        """Return whether a message is read; a peer that says too many is shown out, and may come back."""
        now = time.monotonic()
        if not self.budgets.is_heard(peer, now):
            self._channel.dismiss(peer)  # again, on a new connection
            return False
        hearing = Hearing.HEARD if lane is Lane.BULK else self.rates.take(peer, now)
        if hearing is Hearing.TOO_MANY:
            self._show_out(peer, f"it says more than {MESSAGES_PER_SECOND:.0f} messages a second, for long")
        return hearing is Hearing.HEARD

    def _count_time(self, peer: PeerId, seconds: float) -> None:
        """Count the time that a message of this peer took; a peer that takes too much is shown out likewise."""
        if self.budgets.take(peer, seconds, time.monotonic()):
            self._show_out(peer, f"its messages take more than {LOOP_SHARE:.0%} of the broker's time, for long")

    def _show_out(self, peer: PeerId, text: str) -> None:
        """Send a peer away and end its connections; what is queued there is not heard."""
        self._send_away(peer, ZmqTrainError(text), "unknown")
        self._channel.dismiss(peer)

    def _take(self, peer: PeerId, lane: Lane, frames: list[Buffer]) -> None:
        now, head = time.monotonic(), open_head(frames[0])
        stamp = head.stamp
        if (instead := self._hub.screen(peer, stamp, head.kind, len(frames[0]))) is not None:
            return self._carry_out(instead)
        message = read_fields(head)
        if (instead := self._hub.judge(peer, stamp, message, now, lane is Lane.CONTROL)) is not None:
            return self._carry_out(instead)
        if isinstance(message, Chunk):
            self._take_chunk(peer, message, frames, now)
        elif isinstance(message, Credit):
            self._hub.saw(peer, now)
            self._downlink.uploads.pay(len(frames[0]))
            self._downlink.acknowledged(peer, message)
            self._parameters.go_on(peer)
        elif isinstance(message, Hello) and message.role in ("master", "standby") and not self._has_our_keys(peer):
            self._send_away(peer, ZmqTrainError(OTHER_KEYS), "keys")
        elif isinstance(message, Stop) and not self._is_operator(peer):
            self._send_away(peer, ZmqTrainError(NO_OPERATOR), "keys")
        else:
            self.behind = frames[1:]
            if isinstance(message, Probe | Relay | Fold) and sum(len(frame) for frame in self.behind) != message.size:
                raise FramingError(f"a {type(message).__name__} of {message.size} bytes has others behind it")
            self._downlink.uploads.pay(sum(len(frame) for frame in frames))
            nodes = self._hub.nodes if isinstance(message, Stop) else 0
            try:
                self._carry_out(self._hub.receive(peer, message, now))
            finally:
                self.behind = ()
            if isinstance(message, Stop) and self._hub.stopped_at == now:
                self._telling.stopping(peer, nodes)
            if isinstance(message, Relayed):
                self._relays.pump(peer)
            if isinstance(message, Hello):
                self._loads.limit(peer)
                if (member := self._hub.members.get(peer)) is not None:
                    member.voter = f"key {name}" if (name := self._key_name(peer)) else ""
                self._hub.records.own(peer, self._key_name(peer))
            if isinstance(message, Report):
                self._telling.reported(peer, message)
            if isinstance(message, Report) and self._hub.believes(peer, message):
                self._telling.evaluated(message)

    def _take_chunk(self, peer: PeerId, chunk: Chunk, frames: list[Buffer], now: float) -> None:
        if len(frames) != 2:
            raise FramingError("a chunk is a head and one frame")
        self._hub.saw(peer, now)
        if self._downlink.uploads.has_chunk(peer, chunk):
            return self._hub.fence.count(Verdict.DUPLICATE)
        if (whole := self._downlink.uploads.take_chunk(peer, chunk, frames[1])) is not None:
            if isinstance(whole[0], Initialise | Push):
                self._parameters.whole(peer, whole[0], whole[1])
            else:
                self._arrivals.arrived(peer, *whole)


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
        inheritance: TakeoverState | None = None,
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
                lambda: self.downlink.port_measured,
            ),
            shard,
            registration.place.first if registration is not None else "",
        )
        self.hub.latest_incarnation = latest_incarnation(time.time_ns())
        self._telling = BrokerLog(self.hub, events)
        self._carry_out = EffectQueue[HubEffect](self._carry_out_one).carry_out
        self.aggregator = Aggregator(self.settings, shard) if inheritance is None else inheritance.aggregator
        self._jobs = CodecExecutor("zmqtrain-aggregate", self.stop)
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
        self.downlink = Downlink(channel, self._queue_bytes, self._lost, self._unreachable, self.hub.stamp)
        self._loads = Loads(self.hub, self.downlink, self._jobs, self.share)
        self._arrivals = PendingUploads(
            self.hub, self.downlink, self._jobs, self.aggregator, self._telling, self._carry_out
        )
        self._replicas = Replicas(self.hub, self._send_to_come_again, self._carry_out, open_line)
        self._copies = CodecExecutor("zmqtrain-snapshots", self.stop)
        self.serving = SnapshotService(
            self.downlink,
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
        self.versions = ReleasePipeline(
            self.hub,
            self.aggregator,
            self._jobs,
            self.keeper,
            self._arrivals,
            self.downlink,
            self.serving,
            self._replicas,
            self._telling,
            self._carry_out,
            moments,
        )
        self._relays = Relays(self.downlink)
        self._reducers = Reducers(self._relays.forward)
        kept = ParameterKeeper(checkpoint)
        name = f"keys-{secrets.token_hex(4)}"
        self.parameters = Parameters(self.downlink, self._jobs.do, name, kept, every.seconds)
        self._stop = asyncio.Event()
        self.receiver = Receiver(
            channel,
            self.hub,
            self.downlink,
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
                self.downlink.send(peer, Goodbye(reason))
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
                    self._telling.ended(self.aggregator, self.receiver.bytes_received, self.downlink.bytes_sent)
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
        self.downlink.look_again()
        self.parameters.tick(now)
        self.serving.tick(now)
        for peer in list(self.downlink.uploads.idle_holders()):
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
            self.downlink.bytes_sent,
            self.receiver.bytes_received,
            self._jobs.seconds,
            self.serving.served,
            self.downlink.dropped,
        )

    def _expel(self, peer: PeerId, error: Exception, reason: str = "protocol") -> None:
        """Tell a peer that it cannot stay, and forget it; told "unknown", a node says Hello again."""
        text = self._telling.sent_away(peer, error)
        self.downlink.send(peer, Refused(reason, text))
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
                self.downlink.send(peer, self._describe(message), stamp)
            case Broadcast(message):
                message = self._describe(message)
                if isinstance(message, Roster) and self.watch is not None:
                    self.watch(message)
                if isinstance(message, Schedule):
                    self._telling.scheduled(message)
                for peer in list(self.hub.members):
                    self.downlink.send(peer, message)
            case Expect(peer, announcement):
                self._arrivals.expect(peer, announcement)
            case Hear(version):
                self._replicas.holds(version, time.monotonic())
            case Answer(peer, probe):
                self.downlink.answer(peer, Probed(probe.number, time.time(), f"zmqtrain {VERSION}"), probe.answer)
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
        models = OUTBOX_MODELS + (1 + OPTIMIZER_STATE_MODELS if sends_optimizer_state(self.settings) else 0)
        return models * self._model_bytes()

    def _model_bytes(self) -> int:
        return 4 * sum(leaf.values for leaf in self.hub.model)

    def _lost(self, peer: PeerId, why: str) -> None:
        self._carry_out(self.hub.gone(peer, why, time.monotonic()))

    def _unreachable(self, peer: PeerId) -> None:
        self.hub.unreachable(peer, time.monotonic())

    def _disconnect(self, peer: PeerId, reason: str, text: str) -> None:
        self._telling.left(peer, reason, text)
        self.downlink.forget(peer)
        self._relays.forget(peer)
        self.serving.forget(peer)
        self.parameters.lost(peer)
        if reason not in ("again", "observer", "process", "master"):
            self._arrivals.forget_norms(peer)
        self._arrivals.forget(peer)

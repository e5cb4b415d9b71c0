"""The way of a broker's messages and deltas: received, checked, added and released; the run founded, saved, taken back.

The codec thread owns the arrays.  A job that fails for a reason of our own ends the broker (`CodecExecutor`).
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from zmqtrain.averaging.aggregator import Released
from zmqtrain.averaging.compiling import compile_codecs
from zmqtrain.averaging.gate import error_of, reason_of
from zmqtrain.averaging.snapshot import split_snapshot
from zmqtrain.broker.checkpoint import Keeper
from zmqtrain.broker.core import BrokerCore, EffectHandlers, MessageHandlers, ShardsBeside
from zmqtrain.broker.snapshots import SnapshotService
from zmqtrain.broker.standby import StandbyService
from zmqtrain.core.errors import ChannelClosed, CodecError, ConfigError, FramingError, RemoteProtocolError
from zmqtrain.core.types import Buffer, Lane, ModelSpec, PeerId, Version, count_values
from zmqtrain.parameter_server.parameters import Parameters
from zmqtrain.protocol.effects import (
    Accumulate,
    Average,
    Consult,
    Dismiss,
    Expect,
    Found,
    Lend,
    Propose,
    Rebase,
    Reduce,
    Rewind,
    TakeBack,
)
from zmqtrain.protocol.fencing import Verdict
from zmqtrain.protocol.framing import ProtocolVersionError, open_head, read_fields
from zmqtrain.protocol.limits import (
    FAULT_SECONDS,
    LOOP_SHARE,
    MESSAGES_PER_SECOND,
    Hearing,
    LoopBudgets,
    MessageRates,
    cost_of,
)
from zmqtrain.protocol.messages import (
    Announcement,
    Chunk,
    Credit,
    Initialise,
    Probe,
    Publish,
    Push,
    ReduceChunk,
    Relay,
    Snapshot,
)
from zmqtrain.session.environment import clock, spawn
from zmqtrain.strategies.norms import Judgement

Frames = Sequence[Buffer]

ASK_SECONDS = 1.0
"""How often the shards are asked for their parts of the best version, until they have given them."""

MODELS_HELD = 5
"""A hub holds at least so many copies of a model in float32: the parameters, what is published, a round's sum, an outer
optimizer's state, and a snapshot in flight."""


def check_capacity(model: ModelSpec, memory_bytes: int | None = None) -> None:
    """Raise ConfigError if a hub of this model needs more memory than there is; asked before anything is allocated.

    memory_bytes: None for this machine's.
    """
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    values = count_values(model)
    if 4 * MODELS_HELD * values > memory_bytes:
        raise ConfigError(
            f"a model of {values:,} values needs {4 * MODELS_HELD * values / 2**30:.0f} GiB at its hub, which has "
            f"{memory_bytes / 2**30:.0f}: divide it among brokers, each on a machine of its own"
        )


class PendingUploads:
    """Uploads that are announced, and those that are checked and not yet used.

    A delta counts once all of it is checked, by the norm gate too. A peer's upload on a connection that it has left
    does not count, whatever it has announced since.
    whole: by peer and sequence (-1 for its parameters), what is accepted and not yet added.
    """

    def __init__(self, core: BrokerCore) -> None:
        self._core, self._hub, self._codec, self._aggregator = core, core.hub, core.codec, core.aggregator
        self.messages: MessageHandlers = {}
        self.effects: EffectHandlers = {Expect: self._expect, Rebase: self._rebase}
        self.whole: dict[tuple[PeerId, int], Frames] = {}
        self._forgotten: dict[PeerId, bool] = {}  # by the gate, soon; whether for a quarantine
        self._forgetting = False  # whether the job that does it is still to begin

    def _expect(self, expect: Expect) -> None:
        """Let a peer send what it has announced; an upload of an impossible size is refused before it is sent."""
        peer, announcement = expect.peer, expect.announcement
        assert isinstance(announcement, Publish | Snapshot)
        try:
            if isinstance(announcement, Snapshot):
                if self._hub.settings.shards == 1:  # of several each has a share
                    check_capacity(self._hub.model)
                self._aggregator.plan(self._hub.model)
            member = self._hub.members.get(peer)
            self._aggregator.check_sizes(announcement, None if member is None else member.holds)
            self._core.downlink.uploads.expect(peer, announcement)
        except (FramingError, ConfigError) as error:
            reason = "size" if isinstance(error, FramingError) else "model"
            self._core.carry_out(self._hub.broken(peer, announcement.transfer, reason, str(error), self._core.now()))

    def arrived(self, peer: PeerId, announcement: Announcement, frames: Frames) -> None:
        spawn(self._check(peer, announcement, frames))

    async def _check(self, peer: PeerId, announcement: Announcement, frames: Frames) -> None:
        error: CodecError | None
        try:
            if isinstance(announcement, Publish):
                voter = self._hub.voter_of(peer)
                values = self._aggregator.values_of((announcement.fragment,))
                judgement = await self._codec(self._judge, peer, announcement, frames, voter, values=values)
                error = error_of(judgement)
            else:
                assert isinstance(announcement, Snapshot)
                judgement = None
                values = count_values(self._hub.model)
                here = self._hub.members.get(peer)
                share = None if here is None else here.holds
                error = await self._codec(self._aggregator.check_snapshot, announcement, frames, share, values=values)
        except CodecError as unsound:
            judgement, error = None, unsound
        now = self._core.now()
        member = self._hub.members.get(peer)
        if member is None or member.open.get(announcement.transfer) is not announcement:
            return  # the node has left, or came back and uses the number again: earlier uploads do not count
        if judgement is not None and isinstance(announcement, Publish):
            self._codec.do(self._aggregator.count, announcement, judgement)
        if error is not None:
            self._core.log.refused(peer, error)
            effects = self._hub.broken(peer, announcement.transfer, reason_of(error), str(error), now)
        else:
            self.whole[_key(peer, announcement)] = frames
            effects = self._hub.received(peer, announcement.transfer, now)
        self._core.carry_out(effects)

    def _judge(self, peer: PeerId, publish: Publish, frames: Frames, voter: str) -> Judgement:
        self._aggregator.check(publish, frames)
        return self._aggregator.judge(peer, publish, frames, voter)

    def take(self, peer: PeerId, announcement: Announcement) -> Frames:
        return self.whole.pop(_key(peer, announcement))

    def dismiss(self, peer: PeerId, publish: Publish) -> None:
        """Drop an accepted publish that will not land."""
        self.whole.pop(_key(peer, publish), None)

    def forget(self, peer: PeerId) -> None:
        """Forget a peer that has left; its accepted publishes still count, unless the mode is synchronous."""
        self.whole.pop((peer, -1), None)
        if self._hub.exchange and peer not in self._hub.members:
            self.whole = {key: frames for key, frames in self.whole.items() if key[0] != peer}

    # ------------------------------------------------------------------ the norm gate

    def forget_norms(self, peer: PeerId, probation: bool = False) -> None:
        """Have the gate treat a node as a new one; one job does it for all nodes that come and go meanwhile.

        probation: because it is quarantined.
        """
        self._forgotten[peer] = probation or self._forgotten.get(peer, False)
        if not self._forgetting:
            self._forgetting = True
            self._codec.do(self._forget_all_norms)

    def _forget_all_norms(self) -> None:
        self._forgetting = False  # before it looks: who comes from now on may come too late for it
        while self._forgotten:
            self._aggregator.gate.forget(*self._forgotten.popitem())

    def _rebase(self, rebase: Rebase) -> None:
        self._core.log.rebased(rebase.peers, rebase.why)
        if not rebase.why:
            self._codec.do(self._aggregator.gate.norms.rebase, rebase.peers)


def _key(peer: PeerId, announcement: Announcement) -> tuple[PeerId, int]:
    """Return the key of a pending upload; a transfer's number may be used again, a sequence may not."""
    return peer, announcement.sequence if isinstance(announcement, Publish) else -1


class _Collecting:
    """CPU seconds that the garbage collector has taken in the thread that made this."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        self._thread = threading.get_ident()

    def note(self, phase: str, facts: object) -> None:
        """Count the time of a collection: one of `gc.callbacks`."""
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = clock.thread_time()
        else:
            self.seconds += clock.thread_time() - self._began


class Receiver:
    """Receives messages and gives each to the service that handles its type; the others go to the hub.

    Rule 1: a peer that breaks the protocol is expelled.  Rule 2: a peer that sends too many messages, or whose messages
    take too much of this loop's time, is disconnected, and its queued messages are dropped unread.
    rates, budgets: of each peer's messages, and of the time that they take.  bytes_received: payload and heads.
    """

    def __init__(self, core: BrokerCore, uploads: PendingUploads, parameters: Parameters) -> None:
        self._core, self._channel, self._hub, self._downlink = core, core.channel, core.hub, core.downlink
        self._uploads, self._parameters = uploads, parameters
        self.messages: MessageHandlers = {Chunk: self._chunk, Credit: self._credit}
        self.effects: EffectHandlers = {Consult: lambda effect: parameters.take(effect.peer, effect.request)}
        self.rates, self.budgets = MessageRates(), LoopBudgets()
        self._collecting = _Collecting()
        self.bytes_received = 0

    async def receive_forever(self) -> None:
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
                self._downlink.refuse_version(peer, error)
                self._core.log.other_version(peer, error)
            except (FramingError, RemoteProtocolError) as error:
                fault = FAULT_SECONDS
                self._core.expel(peer, error)
            except Exception as error:  # a bug of ours on this message costs its sender, not the run
                fault = FAULT_SECONDS
                self._core.log.message_failed(peer)
                self._core.expel(peer, error)
            self._count_time(peer, cost_of(self._own_time() - began, len(frames[0])) + fault)

    def _own_time(self) -> float:
        """Return the CPU seconds of this thread without those of Python's garbage collector, which no peer causes."""
        return clock.thread_time() - self._collecting.seconds

    def _is_heard(self, peer: PeerId, lane: Lane) -> bool:
        """Return whether a message is read; a peer that sends too many is disconnected, and may come back."""
        now = self._core.now()
        if not self.budgets.is_heard(peer, now):
            self._channel.dismiss(peer)  # again, on a new connection
            return False
        hearing = Hearing.HEARD if lane is Lane.BULK else self.rates.take(peer, now)
        if hearing is Hearing.TOO_MANY:
            self._disconnect(peer, f"it says more than {MESSAGES_PER_SECOND:.0f} messages a second, for long")
        return hearing is Hearing.HEARD

    def _count_time(self, peer: PeerId, seconds: float) -> None:
        if self.budgets.take(peer, seconds, self._core.now()):
            self._disconnect(peer, f"its messages take more than {LOOP_SHARE:.0%} of the broker's time, for long")

    def _disconnect(self, peer: PeerId, text: str) -> None:
        self._core.reconnect(peer, text)
        self._channel.dismiss(peer)

    def _take(self, peer: PeerId, lane: Lane, frames: list[Buffer]) -> None:
        now, head = self._core.now(), open_head(frames[0])
        if (instead := self._hub.screen(peer, head.stamp, head.kind, len(frames[0]))) is not None:
            return self._core.carry_out(instead)
        message = read_fields(head)
        if (instead := self._hub.judge(peer, head.stamp, message, now, lane is Lane.CONTROL)) is not None:
            return self._core.carry_out(instead)
        self._core.behind = frames[1:]
        try:
            if not isinstance(message, Chunk):
                size = sum(len(frame) for frame in frames)
                if isinstance(message, Probe | Relay | ReduceChunk) and size != len(frames[0]) + message.size:
                    raise FramingError(f"a {type(message).__name__} of {message.size} bytes has others behind it")
                self._downlink.uploads.pay(size)
            self._core.messages.get(type(message), self._core.receive)(peer, message, now)
        finally:
            self._core.behind = ()

    def _credit(self, peer: PeerId, credit: Credit, now: float) -> None:
        self._hub.saw(peer, now)
        self._downlink.acknowledged(peer, credit)
        self._parameters.go_on(peer)

    def _chunk(self, peer: PeerId, chunk: Chunk, now: float) -> None:
        if len(self._core.behind) != 1:
            raise FramingError("a chunk is a head and one frame")
        self._hub.saw(peer, now)
        if self._downlink.uploads.has_chunk(peer, chunk):
            return self._hub.fence.count(Verdict.DUPLICATE)
        if (whole := self._downlink.uploads.take_chunk(peer, chunk, self._core.behind[0])) is not None:
            if isinstance(whole[0], Initialise | Push):
                self._parameters.whole(peer, whole[0], whole[1])
            else:
                self._uploads.arrived(peer, *whole)


class ReleasePipeline:
    """The versions of one run: founded, released, saved, taken back.

    A node hears of a version only when a restarted broker, and the standby, would know it: a release goes to the
    journal first, then to the standby, then to the nodes.
    """

    def __init__(
        self,
        core: BrokerCore,
        keeper: Keeper,
        uploads: PendingUploads,
        snapshots: SnapshotService,
        standby: StandbyService,
        beside: ShardsBeside,
    ) -> None:
        self._core, self._hub, self._aggregator, self._codec = core, core.hub, core.aggregator, core.codec
        self._keeper, self._uploads, self._snapshots, self._standby = keeper, uploads, snapshots, standby
        self._beside = beside
        self.messages: MessageHandlers = {}
        self.effects: EffectHandlers = {
            Found: self._found,
            Average: lambda effect: spawn(self._average(effect.snapshots)),
            Propose: self._propose,
            Lend: self._lend,
            Accumulate: self._accumulate,
            Dismiss: lambda effect: uploads.dismiss(effect.peer, effect.publish),
            Reduce: self._reduce,
            TakeBack: lambda effect: spawn(self._take_back(effect.peer)),
            Rewind: self._rewind,
        }
        self._mean: Frames | None = None  # that the run may begin with
        self._looked_at_score, self._ask_at = self._hub.score_version, 0.0

    def save_when_due(self, together: bool = False) -> None:
        """Save the version that the hub is at, if it is time to. together: as in `Keeper.is_due`."""
        if self._keeper.is_due(self._hub.version, together):
            self._codec.do(self._keeper.save, self._hub.state(), self._aggregator)

    def look_at_scores(self) -> None:
        """Keep the version that was evaluated, if it is the best so far and the whole model is on this machine."""
        self._ask_again()
        version, loss = self._hub.score_version, self._hub.scores.get("loss", nan)
        settings = self._hub.settings
        elsewhere = settings.shards > 1 and self._hub.hosting is None
        if version <= self._looked_at_score or elsewhere or settings.mode == "strict" or not isfinite(loss):
            return
        self._looked_at_score = version
        if self._keeper.is_best(version, loss):
            self._ask_at = self._core.now() + ASK_SECONDS
            self._codec.do(self._keep_best, version, dict(self._hub.scores), self._hub.samples)

    def _keep_best(self, version: Version, scores: Mapping[str, float], samples: int) -> None:
        if self._keeper.keep_best(version, scores, samples, self._aggregator):
            self._ask_for_parts()

    def _ask_for_parts(self) -> None:
        self._keeper.ask_for_parts(self._beside.give_leaves)

    def _ask_again(self) -> None:
        """Ask the shards again that have given no part of the best version: one may have changed hands meanwhile."""
        if self._keeper.lacks_parts and (now := self._core.now()) >= self._ask_at:
            self._ask_at = now + ASK_SECONDS
            self._codec.do(self._ask_for_parts)

    # ------------------------------------------------------------------ version 0

    def _found(self, found: Found) -> None:
        peer, announcement = found.peer, found.announcement
        self._core.log.founding(peer, found.model)
        whole, self._mean = self._mean, None
        frames, moments = split_snapshot(announcement, whole or self._uploads.take(peer, announcement))
        for other, snapshot in found.others:
            frames = (*frames, *self._uploads.take(other, snapshot))
        self._snapshots.restart(moments)
        self._looked_at_score = -1
        self._uploads.whole.clear()  # of the run before, if this one is founded again
        self._codec.do(self._begin, frames, self._hub.state(), peer, moments, values=count_values(found.model))
        self._standby.replicate()

    def _begin(self, frames: Frames, state: dict[str, Any], peer: PeerId, moments: Frames) -> None:
        compile_codecs(self._aggregator.layout, self._hub.settings)
        self._aggregator.found(frames)
        self._aggregator.came(clock.monotonic())
        self._keeper.forget_best()  # here, after what was still to be kept of a run before
        self._core.events.founded(peer)
        # before the founder, or anybody, hears of the run
        self._keeper.save(state, self._aggregator, wait=True, moments=moments)

    async def _average(self, snapshots: Sequence[tuple[PeerId, Snapshot]]) -> None:
        peers = [peer for peer, _ in snapshots]
        parts = {peer: split_snapshot(one, self._uploads.take(peer, one))[0] for peer, one in snapshots}
        frames, why = await self._codec(self._aggregator.average, parts, values=count_values(self._hub.model))
        if why:
            self._core.log.unrelated(peers, why)
            self._core.carry_out(self._hub.unrelated(why))
        else:
            self._mean = frames
            self._core.events.averaged(peers)
            self._core.carry_out(self._hub.averaged())

    def _propose(self, propose: Propose) -> None:
        if not propose.peers:
            self._mean = None
        elif self._mean is not None:
            self._snapshots.lend(propose.peers, self._mean, ())

    def _lend(self, lend: Lend) -> None:
        """Send one node's parameters to those of its population that start again from them."""
        frames, moments = split_snapshot(lend.announcement, self._uploads.take(lend.lender, lend.announcement))
        here = [peer for peer in lend.peers if peer in self._hub.members]
        for peer in here:
            self._core.log.preempted(peer, lend.lender)
        self._snapshots.lend(here, frames, moments)

    # ------------------------------------------------------------------ releases

    def _accumulate(self, effect: Accumulate) -> None:
        frames = self._uploads.take(effect.peer, effect.publish)
        values = self._aggregator.values_of((effect.publish.fragment,))
        self._codec.do(self._aggregator.accumulate, effect.peer, effect.publish, frames, values=values)

    def _reduce(self, reduce: Reduce) -> None:
        if reduce.back_to >= 0:  # no snapshot of what is taken back, no delta that was made on it
            self._snapshots.restart(())
            self._uploads.whole.clear()
        strict = self._hub.settings.mode == "strict"  # there the nodes say what they have reached
        spawn(self._release(reduce, len(self._hub.live), {} if strict else self._hub.units.ledger.state()))
        if self._hub.version == reduce.version:
            self.save_when_due(together=True)

    async def _release(self, reduce: Reduce, nodes: int, ledger: dict[str, Any]) -> None:
        values = self._aggregator.values_of(reduce.fragments)
        released = await self._codec(self._make_release, reduce, nodes, ledger, values=values)
        if released.overflowed:
            self._core.log.overflowed(released.version, reduce)
        for one, judgement in released.left_out:
            error = error_of(judgement)
            assert error is not None
            self._core.log.refused(one.peer, error)
            self._core.carry_out(self._hub.left_out(one.peer, reason_of(error), judgement.why, self._core.now()))
        self._snapshots.moments = ()
        standby = self._hub.standby.peer if self._hub.standby is not None else ""
        self._core.downlink.send_aggregate(released, reduce, lambda peer: peer == standby, whole=True)
        await self._standby.announced(released.version, sum(len(frame) for one in released.frames for frame in one))
        self._snapshots.cache.released(released, reduce)
        self._core.downlink.send_aggregate(released, reduce, lambda peer: peer != standby)

    def _make_release(self, reduce: Reduce, nodes: int, ledger: dict[str, Any]) -> Released:
        released = self._aggregator.release(reduce)
        self._aggregator.came(clock.monotonic())
        self._keeper.released(released, reduce, ledger)
        left_out = [one for one, _ in released.left_out]
        self._core.events.released(reduce, nodes, released.codec, released.frames, left_out)
        return released

    # ------------------------------------------------------------------ going back

    async def _take_back(self, peer: PeerId) -> None:
        """Take back all releases since the first one that a diverged node has contributed to."""
        version = await self._codec(self._aggregator.version_before, peer)
        before = self._hub.version
        if effects := self._hub.take_back(peer, version):
            self._core.log.taking_back(peer, version, before)
            self._core.carry_out(effects)

    def _rewind(self, rewind: Rewind) -> None:
        if rewind.version < 0:
            self._core.log.going_back(rewind.version)
        else:
            spawn(self._go_back(rewind.version))

    async def _go_back(self, version: Version) -> None:
        state, moments = await self._codec(self._keeper.rewind, version, self._aggregator)
        self._snapshots.restart(moments)
        self._core.log.going_back(state["version"])
        self._standby.go_back(int(state["version"]))
        self._core.carry_out(self._hub.rewound(state))
        self._standby.replicate()

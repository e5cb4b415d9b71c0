"""Deltas and versions of a broker's run: checking uploads, adding them, releasing, going back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite, nan
from typing import Any

from zmqtrain.averaging.aggregator import Aggregator, Released
from zmqtrain.averaging.gate import error_of, reason_of
from zmqtrain.averaging.snapshot import check_sizes, split_snapshot
from zmqtrain.broker.checkpoint import Keeper
from zmqtrain.broker.codec_executor import CodecExecutor
from zmqtrain.broker.log import BrokerLog
from zmqtrain.broker.snapshots import SnapshotService
from zmqtrain.broker.standby import Replicas, pack_replica
from zmqtrain.core.errors import CodecError, ConfigError, FramingError
from zmqtrain.core.types import Buffer, ModelSpec, PeerId, count_values
from zmqtrain.protocol.effects import (
    Accumulate,
    Average,
    Found,
    HubEffect,
    Lend,
    Propose,
    Reduce,
    Replicate,
    Rewind,
    Serve,
    TakeBack,
)
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.initialization import sends_optimizer_state
from zmqtrain.protocol.messages import Announcement, Publish, Snapshot
from zmqtrain.session.downlink import Downlink
from zmqtrain.strategies.norms import Judgement

VersionEffect = Found | Average | Propose | Lend | Accumulate | Reduce | TakeBack | Rewind | Serve | Replicate

Frames = Sequence[Buffer]


class ReleasePipeline:
    """The versions of one run.

    moments: the founder's optimizer state, until training has begun; of a run that is resumed, as it was kept.
    carry_out: does what the hub wishes.  The rest: of the broker.
    """

    def __init__(
        self,
        hub: Hub,
        aggregator: Aggregator,
        jobs: CodecExecutor,
        keeper: Keeper,
        arrivals: PendingUploads,
        downlink: Downlink,
        serving: SnapshotService,
        replicas: Replicas,
        telling: BrokerLog,
        carry_out: Callable[[Sequence[HubEffect]], None],
        moments: Frames,
    ) -> None:
        self.moments = moments
        self._hub, self._aggregator, self._jobs, self._keeper = hub, aggregator, jobs, keeper
        self._arrivals, self._downlink, self._serving, self._replicas = arrivals, downlink, serving, replicas
        self._telling, self._carry_out = telling, carry_out
        self._mean: Frames | None = None  # that the run may begin with
        self._looked_at_score = hub.score_version

    def do(self, effect: VersionEffect) -> None:
        """Do what the hub wishes; jobs are done in the order in which it wished them."""
        match effect:
            case Found():
                self._found(effect)
            case Average(snapshots):
                self._average(snapshots)
            case Propose(peers):
                self._propose(peers)
            case Lend(lender, announcement, peers):
                self._lend(lender, announcement, peers)
            case Accumulate(peer, publish):
                frames = self._arrivals.take(peer, publish)
                self._jobs.do(partial(self._aggregator.accumulate, peer, publish, frames))
            case TakeBack(peer):
                self._jobs.do(partial(self._aggregator.version_before, peer), self._found_before, peer)
            case Reduce():
                if effect.back_to >= 0:  # no snapshot of what is taken back, no delta that was made on it
                    self._serving.begin_anew(())
                    self._arrivals.clear()
                self._jobs.do(partial(self._release, effect, len(self._hub.live)), self._released, effect)
                if self._hub.version == effect.version:
                    self.save_when_due(together=True)
            case Rewind(version) if version < 0:
                self._telling.going_back(version)
            case Rewind(version):
                self._jobs.do(partial(self._keeper.rewind, version, self._aggregator), self._rewound)
            case Serve():
                self._serving.serve(effect, self.moments)
            case Replicate(standby):
                self._replicate(standby)

    def save_when_due(self, together: bool = False) -> None:
        """Save the version that the hub is at, if it is time to. together: as in `Keeper.is_due`."""
        if self._keeper.is_due(self._hub.version, together):
            self._jobs.do(partial(self._keeper.save, self._hub.state(), self._aggregator))

    def look_at_scores(self) -> None:
        """Have the keeper keep what was evaluated, if it is the best so far; where one master has all of the model."""
        version, loss = self._hub.score_version, self._hub.scores.get("loss", nan)
        settings = self._hub.settings
        if version <= self._looked_at_score or settings.masters > 1 or settings.mode == "strict" or not isfinite(loss):
            return
        self._looked_at_score = version
        if self._keeper.is_best(version, loss):
            scores, samples = dict(self._hub.scores), self._hub.samples
            self._jobs.do(partial(self._keeper.keep_best, version, scores, samples, self._aggregator))

    # ------------------------------------------------------------------ version 0

    def _found(self, found: Found) -> None:
        peer, announcement = found.peer, found.announcement
        self._telling.founding(peer, found.model)
        whole, self._mean = self._mean, None
        frames, self.moments = split_snapshot(announcement, whole or self._arrivals.take(peer, announcement))
        self._serving.begin_anew(self.moments)
        self._keeper.forget_best()
        self._looked_at_score = -1
        self._arrivals.clear()  # what was pending in a run that is founded anew
        self._jobs.do(partial(self._begin, frames, self._hub.state(), peer, self.moments))
        if (standby := self._hub.standby) is not None:
            self._replicate(standby.peer)

    def _begin(self, frames: Frames, state: dict[str, Any], peer: PeerId, moments: Frames) -> None:
        self._aggregator.found(frames)
        self._telling.founded(peer)
        # before the founder, or anybody, hears of the run
        self._keeper.save(state, self._aggregator, wait=True, moments=moments)

    def _average(self, snapshots: Sequence[tuple[PeerId, Snapshot]]) -> None:
        gathered = [self._arrivals.take(peer, snapshot) for peer, snapshot in snapshots]
        parts: dict[str, Frames] = {
            peer: split_snapshot(snapshot, frames)[0]
            for (peer, snapshot), frames in zip(snapshots, gathered, strict=True)
        }
        self._jobs.do(partial(self._aggregator.average, parts), self._averaged, snapshots)

    def _averaged(
        self, result: tuple[tuple[Buffer, ...], str] | CodecError, snapshots: Sequence[tuple[PeerId, Snapshot]]
    ) -> None:
        if isinstance(result, CodecError):
            raise result
        frames, why = result
        if why:
            self._telling.unrelated([peer for peer, _ in snapshots], why)
            self._carry_out(self._hub.unrelated(why))
        else:
            self._mean = frames
            self._telling.averaged([peer for peer, _ in snapshots])
            self._carry_out(self._hub.averaged())

    def _propose(self, peers: Sequence[PeerId]) -> None:
        if not peers:
            self._mean = None
        elif self._mean is not None:
            self._serving.lend(peers, self._mean, ())

    def _lend(self, lender: PeerId, announcement: Snapshot, peers: Sequence[PeerId]) -> None:
        """Pass the parameters of one of a population on to those that are to start again from them."""
        frames, moments = split_snapshot(announcement, self._arrivals.take(lender, announcement))
        here = [peer for peer in peers if peer in self._hub.members]
        for peer in here:
            self._telling.preempted(peer, lender)
        self._serving.lend(here, frames, moments)

    # ------------------------------------------------------------------ those that follow

    def _release(self, reduce: Reduce, nodes: int) -> Released:
        released = self._aggregator.release(reduce)
        self._keeper.released(released, reduce)
        self._telling.released(reduce, nodes, released)
        return released

    def _released(self, released: Released | CodecError, reduce: Reduce) -> None:
        if isinstance(released, CodecError):
            raise released
        if released.overflowed:
            self._telling.overflowed(released.version, reduce)
        for one, judgement in released.left_out:
            error = error_of(judgement)
            assert error is not None
            self._telling.refused(one.peer, error)
            self._carry_out(self._hub.left_out(one.peer, reason_of(error), judgement.why, time.monotonic()))
        self.moments = ()
        standby = self._hub.standby
        first = standby.peer if standby is not None else ""
        self._downlink.send_aggregate(released, reduce, lambda peer: peer == first, whole=True)
        to_nodes = partial(self._serving.released, released, reduce, lambda peer: peer != first)
        size = sum(len(frame) for frames in released.frames for frame in frames)
        self._replicas.announce(released.version, to_nodes, time.monotonic(), size)

    # ------------------------------------------------------------------ an earlier one

    def _found_before(self, version: int | CodecError, peer: PeerId) -> None:
        """A node was found to diverge; what it contributed since this version was a part of that."""
        assert isinstance(version, int)
        before = self._hub.version
        effects = self._hub.take_back(peer, version)
        if effects:
            self._telling.taking_back(peer, version, before)
            self._carry_out(effects)

    def _rewound(self, result: tuple[dict[str, Any], Frames] | CodecError) -> None:
        assert not isinstance(result, CodecError)
        state, self.moments = result
        self._serving.begin_anew(self.moments)
        self._telling.going_back(state["version"])
        self._replicas.go_back(int(state["version"]))
        self._carry_out(self._hub.rewound(state))
        if (standby := self._hub.standby) is not None:
            self._replicate(standby.peer)

    # ------------------------------------------------------------------ all that there is

    def _replicate(self, standby: PeerId) -> None:
        """Send the standby a copy of all there is, as it stands once the codec thread has come to it."""
        pack = partial(pack_replica, self._hub.state(), self._aggregator)
        self._jobs.do(pack, self._send_replica, standby, self._hub.version)

    def _send_replica(self, packed: tuple[list[Buffer], int], standby: PeerId, version: int) -> None:
        if standby in self._hub.members:
            self._replicas.copied()
            if not self._downlink.send_replica(standby, version, *packed):
                self._replicas.send_away(standby, "it does not read what it is sent")


class PendingUploads:
    """What has come to one broker and is not used yet. carry_out: does what the hub wishes."""

    def __init__(
        self,
        hub: Hub,
        downlink: Downlink,
        jobs: CodecExecutor,
        aggregator: Aggregator,
        telling: BrokerLog,
        carry_out: Callable[[Sequence[HubEffect]], None],
    ) -> None:
        self._hub, self._downlink, self._jobs, self._aggregator = hub, downlink, jobs, aggregator
        self._telling, self._carry_out = telling, carry_out
        self.whole: dict[tuple[PeerId, int], Frames] = {}
        """By peer and sequence (of its parameters -1): accepted, and not yet added."""
        self._forgotten: dict[PeerId, bool] = {}  # by the gate, soon; whether for a quarantine

    def expect(self, peer: PeerId, announcement: Announcement) -> None:
        """Let a peer send what it has announced, or have the hub refuse it."""
        now = time.monotonic()
        try:
            if isinstance(announcement, Snapshot):
                if self._hub.settings.masters == 1:  # of several each has a share
                    check_capacity(self._hub.model)
                self._aggregator.plan(self._hub.model)
                check_sizes(announcement, self._aggregator.snapshot_bound(), sends_optimizer_state(self._hub.settings))
            else:
                assert isinstance(announcement, Publish)
                self._aggregator.check_sizes(announcement)
            self._downlink.uploads.expect(peer, announcement)
        except FramingError as error:
            self._carry_out(self._hub.broken(peer, announcement.transfer, "size", str(error), now))
        except ConfigError as error:
            self._carry_out(self._hub.broken(peer, announcement.transfer, "model", str(error), now))

    def arrived(self, peer: PeerId, announcement: Announcement, frames: Frames) -> None:
        """All of a transfer is here: have it checked, and the hub told of what comes out."""
        voter = self._hub.voter_of(peer)
        self._jobs.do(lambda: self._check(peer, announcement, frames, voter), self._checked, peer, announcement, frames)

    def take(self, peer: PeerId, announcement: Announcement) -> Frames:
        """Return what is used now, and hold it no more."""
        return self.whole.pop(_key(peer, announcement))

    def clear(self) -> None:
        """Hold nothing any more: the run begins anew."""
        self.whole.clear()

    def forget(self, peer: PeerId) -> None:
        """Take note that a peer has gone: a publish that was accepted counts all the same, but of one in lockstep."""
        self.whole.pop((peer, -1), None)
        if self._hub.exchange and peer not in self._hub.members:
            self.whole = {key: frames for key, frames in self.whole.items() if key[0] != peer}

    # ------------------------------------------------------------------ the norm gate

    def forget_norms(self, peer: PeerId, probation: bool = False) -> None:
        """Have the gate take a node for a new one; however often nodes come and go, one job does it for all.

        probation: because it is quarantined.
        """
        self._forgotten[peer] = probation or self._forgotten.get(peer, False)
        self._jobs.do_once("forget", self._forget_all_norms)

    def rebase(self, peers: Sequence[PeerId]) -> None:
        """Have the gate take the size of these nodes' deltas for usual."""
        self._jobs.do(lambda: self._aggregator.gate.rebase(peers))

    def _forget_all_norms(self) -> None:
        while self._forgotten:
            self._aggregator.gate.forget(*self._forgotten.popitem())

    # ------------------------------------------------------------------ the codec thread

    def _check(self, peer: PeerId, announcement: Announcement, frames: Frames, voter: str) -> Judgement | None:
        if isinstance(announcement, Publish):
            self._aggregator.check(announcement, frames)
            return self._aggregator.judge(peer, announcement, frames, voter)
        assert isinstance(announcement, Snapshot)
        self._aggregator.check_snapshot(announcement, frames)
        return None

    def _checked(
        self, result: Judgement | CodecError | None, peer: PeerId, announcement: Announcement, frames: Frames
    ) -> None:
        now = time.monotonic()
        member = self._hub.members.get(peer)
        if member is None or member.open.get(announcement.transfer) is not announcement:
            return  # its node has left, or came back (and uses the number again): what it sent before does not count
        error = result
        if isinstance(announcement, Publish) and isinstance(result, Judgement):
            self._jobs.do(partial(self._aggregator.count, announcement, result))
            error = error_of(result)
        if isinstance(error, CodecError):
            self._telling.refused(peer, error)
            self._carry_out(self._hub.broken(peer, announcement.transfer, reason_of(error), str(error), now))
        else:
            self.whole[_key(peer, announcement)] = frames
            self._carry_out(self._hub.received(peer, announcement.transfer, now))


def _key(peer: PeerId, announcement: Announcement) -> tuple[PeerId, int]:
    """What tells the publishes of a peer apart while they wait: it may use a transfer's number again, no sequence."""
    return peer, announcement.sequence if isinstance(announcement, Publish) else -1


MODELS_HELD = 5
"""What a hub holds of a model at least, in float32: the parameters, what is published, a round's sum, an outer
optimizer's state, and a snapshot on its way."""


def check_capacity(model: ModelSpec, memory_bytes: int | None = None) -> None:
    """Raise ConfigError if a hub of this model needs more memory than there is.

    memory_bytes: None for this machine's.
    """
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    values = count_values(model)
    if 4 * MODELS_HELD * values > memory_bytes:
        raise ConfigError(
            f"a model of {values:,} values needs {4 * MODELS_HELD * values / 2**30:.0f} GiB at its hub, which has "
            f"{memory_bytes / 2**30:.0f}: divide it among masters, each on a machine of its own"
        )

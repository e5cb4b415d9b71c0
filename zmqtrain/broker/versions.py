"""Make the versions of a broker's run: found it, close its rounds, save it, go back in it, copy it to the standby.

Rule 1: the arrays are the codec thread's; each thing that is done stands here in both its halves: the job, and what the
loop does with what comes out.  Rule 2: nobody hears of a version that a broker which is started again, or the standby,
would not know: it is in the journal first, then with the standby, then with the nodes.
Rule 3: a job that fails for a reason of our own ends the broker (`Jobs`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite, nan
from typing import Any

from zmqtrain.averaging.aggregator import Aggregator, Released
from zmqtrain.averaging.gate import error_of, reason_of
from zmqtrain.averaging.moments import split_snapshot
from zmqtrain.broker.arrivals import Arrivals
from zmqtrain.broker.jobs import Jobs
from zmqtrain.broker.keeper import Keeper
from zmqtrain.broker.replicas import Replicas, pack_replica
from zmqtrain.broker.serving import Serving
from zmqtrain.broker.telling import Telling
from zmqtrain.core.errors import CodecError
from zmqtrain.core.types import Buffer, PeerId
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
from zmqtrain.protocol.messages import Snapshot
from zmqtrain.session.traffic import Traffic

VersionEffect = Found | Average | Propose | Lend | Accumulate | Reduce | TakeBack | Rewind | Serve | Replicate

Frames = Sequence[Buffer]


class Versions:
    """The versions of one run.

    moments: the founder's optimizer state, until training has begun; of a run that is resumed, as it was kept.
    carry_out: does what the hub wishes.  The rest: of the broker.
    """

    def __init__(
        self,
        hub: Hub,
        aggregator: Aggregator,
        jobs: Jobs,
        keeper: Keeper,
        arrivals: Arrivals,
        traffic: Traffic,
        serving: Serving,
        replicas: Replicas,
        telling: Telling,
        carry_out: Callable[[Sequence[HubEffect]], None],
        moments: Frames,
    ) -> None:
        self.moments = moments
        self._hub, self._aggregator, self._jobs, self._keeper = hub, aggregator, jobs, keeper
        self._arrivals, self._traffic, self._serving, self._replicas = arrivals, traffic, serving, replicas
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
        self._traffic.send_aggregate(released, reduce, lambda peer: peer == first, whole=True)
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
            if not self._traffic.send_replica(standby, version, *packed):
                self._replicas.send_away(standby, "it does not read what it is sent")

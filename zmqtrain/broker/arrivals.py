"""Hold what peers have sent until it is used: announced, checked by the codec thread, whole.

Rule 1: nothing is expected that is larger than it can be, and nothing counts before all of it is checked: a delta by
the norm gate, too, which is used by the codec thread alone, and is moved only by what is still welcome then.
Rule 2: what a peer announced on a connection that it has left does not count, whatever it has announced since.
Rule 3: used by the broker's loop alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.gate import error_of, reason_of
from zmqtrain.averaging.moments import check_sizes
from zmqtrain.broker.capacity import check_capacity
from zmqtrain.broker.jobs import Jobs
from zmqtrain.broker.telling import Telling
from zmqtrain.core.errors import CodecError, ConfigError, FramingError
from zmqtrain.core.types import Buffer, PeerId
from zmqtrain.protocol.effects import HubEffect
from zmqtrain.protocol.founding import takes_moments
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.messages import Announcement, Publish, Snapshot
from zmqtrain.session.traffic import Traffic
from zmqtrain.strategies.norms import Judgement

Frames = Sequence[Buffer]


class Arrivals:
    """What has come to one broker and is not used yet. carry_out: does what the hub wishes."""

    def __init__(
        self,
        hub: Hub,
        traffic: Traffic,
        jobs: Jobs,
        aggregator: Aggregator,
        telling: Telling,
        carry_out: Callable[[Sequence[HubEffect]], None],
    ) -> None:
        self._hub, self._traffic, self._jobs, self._aggregator = hub, traffic, jobs, aggregator
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
                check_sizes(announcement, self._aggregator.snapshot_bound(), takes_moments(self._hub.settings))
            else:
                assert isinstance(announcement, Publish)
                self._aggregator.check_sizes(announcement)
            self._traffic.intake.expect(peer, announcement)
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

"""Measure what a broker's links and its codec thread carry, and hold both to their shares.

Rule: what is said by the settings or by a node is kept to; what nobody said is measured by what crosses anyway.
"""

from __future__ import annotations

from zmqtrain.broker.jobs import Jobs
from zmqtrain.core.types import PeerId
from zmqtrain.planning.auto import ASSUMED_BITS, typical_rate
from zmqtrain.planning.schedule import payload_rate
from zmqtrain.protocol.hub import Hub
from zmqtrain.session.traffic import Traffic
from zmqtrain.transport.reservation import LinkShare

RATE_NEWS = 1.05
"""A link is said to be faster than it was said to be when it was seen so many times as fast."""
CONTRIBUTIONS_WARM, CONTRIBUTIONS_MEASURED = 8, 32
"""What a contribution costs here is measured over so many, once the first ones are over, for which code is compiled."""


class Loads:
    """The loads of one broker. share: what training may use of this machine's port."""

    def __init__(self, hub: Hub, traffic: Traffic, jobs: Jobs, share: LinkShare) -> None:
        self._hub, self._traffic, self._jobs, self._share = hub, traffic, jobs, share
        self._contributions_before = hub.contributions
        self._measured_from: tuple[int, float] | None = None
        self._limited: float | None = share.limit()
        traffic.limit(self._limited)

    def look(self) -> None:
        """Tell the hub how fast its nodes' links were seen, and keep to shares of what was not told."""
        for peer, member in self._hub.members.items():
            measured = self._traffic.measured(peer)
            if measured > RATE_NEWS * member.measured:
                self._hub.measured(peer, measured)
                self.limit(peer)
        if (limit := self._share.limit(typical_rate(self._hub.members.values()))) != self._limited:
            self._limited = limit
            self._traffic.limit(limit)

    def limit(self, peer: PeerId) -> None:
        """Keep to what this peer gives of its link."""
        if (member := self._hub.members.get(peer)) is not None:
            self._traffic.limit_peer(peer, LinkShare(member.link, member.share).limit(member.measured))

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

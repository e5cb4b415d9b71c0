"""Give a running run its k and d (auto): from what its hub has been told and has measured, to a load that is fitted.

Rule 1: no clock, no socket: what is measured comes with the members.
Rule 2: what is typical counts, not what is worst, unless the run waits for its slowest: one node with a broken cable,
or one that lies, does not decide for all; and no number that a node says can end the hub.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from math import isfinite

import numpy as np

from zmqtrain.protocol.members import Member, MemberState
from zmqtrain.protocol.rounds import AfterCount, Immediately, release_rule_from_spec
from zmqtrain.protocol.schedules import Plan
from zmqtrain.quantities import parse_rate
from zmqtrain.runtime.planning.schedule import PAYLOAD_SHARE, Load, exchange_bytes, fit, payload_rate
from zmqtrain.settings import AUTO_DELAY, AUTO_EVERY, RunSettings
from zmqtrain.train.minibatch import REFERENCE_PERCENTILE
from zmqtrain.transport.reservation import LinkShare
from zmqtrain.types import ModelSpec

__all__ = ["ASSUMED_BITS", "link_share", "typical_rate", "LoadPlanner"]

ASSUMED_BITS = 1e9
"""The rate of a port of which nothing is known yet: a run whose exchanges are too small to measure it hardly cares."""

LEAST_RATE = 1e3
STEP_SECONDS = (1e-6, 1e5)
MOST_EXCHANGE_SECONDS = 1e4
"""What is not within these is no PC's: bytes per second, seconds of a step, CPU seconds of an exchange."""


def link_share(link: str, share: float) -> LinkShare:
    """Return what training may use of a port. link: as people write it, "1gbit"; "": as it is measured.

    Raises ConfigError.
    """
    return LinkShare(payload_rate(parse_rate(link, "link")) if link else 0.0, share)


def typical_rate(members: Iterable[Member]) -> float:
    """Return the median rate of the ports of those who train, in bytes per second; 0: none is known.

    It stands for a hub's port of which nobody has told the rate: all hang on one switch.
    """
    live = (member for member in members if member.state is MemberState.LIVE)
    rates = [max(LEAST_RATE, member.link_rate) for member in live if member.link_rate > 0]
    return statistics.median(rates) if rates else 0.0


class LoadPlanner:
    """A `Planner`: fits k and d to the load of a run.

    share: of the hub's own port; its rate, where it is not told, is a typical node's.  contribution_seconds: gives
    the CPU that the hub takes for one contribution, of late.
    """

    def __init__(
        self, settings: RunSettings, share: LinkShare, contribution_seconds: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.settings, self.share, self._contribution_seconds = settings, share, contribution_seconds
        self._rule = release_rule_from_spec(settings.release)

    def __call__(self, model: ModelSpec, members: Sequence[Member]) -> Plan | None:
        """See Planner. None until a node has said how fast it is."""
        steps = [seconds for member in members if (seconds := _step_seconds(member)) > 0]
        if not steps:
            return None
        load = self.load(model, members, steps)
        fitting = fit(load)
        every = fitting.every if self.settings.every == AUTO_EVERY else self.settings.every
        delay = fitting.delay if self.settings.delay == AUTO_DELAY else self.settings.delay
        bits = 8 * load.hub_rate / PAYLOAD_SHARE / self.share.share
        text = (
            f"{load.nodes} node{'s' * (load.nodes != 1)}, {_amount(bits, 'b')}/s x {self.share.share:g}, "
            f"{_amount(load.bytes_up, 'B')} up and {_amount(load.bytes_down, 'B')} down, "
            f"step {1e3 * load.step_seconds:.3g} ms"
        )
        return Plan(every, delay, text)

    def load(self, model: ModelSpec, members: Sequence[Member], steps: Sequence[float]) -> Load:
        """Return the load of these live nodes. steps: the seconds of a step, of those that have said it."""
        settings, nodes = self.settings, len(members)
        sizes = exchange_bytes(model, settings.codec, settings.broadcast_codec, settings.fragments)
        slowest_counts = settings.waits or self._rule.one_each
        shares = [(LinkShare(one.link, one.share), one.measured) for one in members if one.link_rate > 0]
        rates = [max(LEAST_RATE, share.usable(measured)) for share, measured in shares]
        typical = (min(rates) if slowest_counts else statistics.median(rates)) if rates else payload_rate(ASSUMED_BITS)
        # where each node's k follows from its speed, k is that of the reference (dynamic_every)
        percentile = 100 - REFERENCE_PERCENTILE if settings.follows_speed else 50.0
        said = [member.report.exchange_seconds for member in members if member.report is not None]
        codecs = [seconds for seconds in said if 0 < seconds < MOST_EXCHANGE_SECONDS]
        return Load(
            nodes=nodes,
            step_seconds=float(np.percentile(steps, percentile)),
            bytes_up=sizes.up,
            bytes_down=round(sizes.down * self._aggregates(nodes)),
            node_rate=typical,
            hub_rate=self.share.usable(typical_rate(members) or payload_rate(ASSUMED_BITS)),
            fragments=settings.fragments,
            node_seconds=statistics.median(codecs) if codecs else 0.0,
            hub_seconds=nodes * self._contribution_seconds(),
        )

    def _aggregates(self, nodes: int) -> float:
        """Return how many aggregates there are for one offer of each node."""
        match self._rule:
            case Immediately():
                return nodes
            case AfterCount(contributions):
                return nodes / contributions
        return 1.0


def _amount(value: float, unit: str) -> str:
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _step_seconds(member: Member) -> float:
    """Return the seconds of a step of this node, 0 where they are not known."""
    report = member.report
    if report is None or report.step < 1 or report.samples < 1:
        return 0.0
    pace = report.samples_per_second
    if not (isfinite(pace) and pace > 0):
        return 0.0
    least, most = STEP_SECONDS
    return min(max(report.samples / report.step / pace, least), most)

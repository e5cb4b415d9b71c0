"""Give a running run what is auto in its settings: from what its hub was told and has measured, by the time to a loss.

Rule 1: no clock, no socket: what is measured comes with the members.
Rule 2: what is typical counts, not what is worst, unless the run waits for its slowest: one node with a broken cable,
or one that lies, does not decide for all; and no number that a node says can end the hub.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Protocol

import numpy as np

from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.core.settings import AUTO, RunSettings
from zmqtrain.core.specs import parse_rate
from zmqtrain.core.types import ModelSpec, count_values
from zmqtrain.planning.costs import exchange_costs
from zmqtrain.planning.schedule import (
    CODECS,
    PAYLOAD_SHARE,
    Load,
    Option,
    Schedule,
    best_option,
    exchange_bytes,
    judge_option,
    payload_rate,
)
from zmqtrain.protocol.members import Member, MemberState
from zmqtrain.protocol.rounds import AfterCount, Immediately, release_rule_from_spec
from zmqtrain.protocol.schedules import Plan
from zmqtrain.train.minibatch import REFERENCE_PERCENTILE
from zmqtrain.transport.pacing import LinkShare

ASSUMED_BITS = 1e9
"""The rate of a port that was not measured yet; a run whose exchanges are too small to measure it is not affected."""

LEAST_MEASURED_BYTES = 1 << 20
"""A model of so many bytes or more fills a link when it is fetched: nothing is planned before that was measured."""
FLOAT_BYTES = 4
LEAST_STEP_SHARE = 0.2
"""What a step takes at least of the time in which it was measured, exchanges aside."""

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
    """Return the rate of the ports of those who train, in bytes per second; 0: none is known.

    The median of the rates that are configured; where none is, the highest that was measured: a node's port is measured
    too low while it shares the hub's with others, and never too high.  It stands for a hub's port of which nobody has
    told the rate: all hang on one switch.
    """
    live = [member for member in members if member.state is MemberState.LIVE]
    if configured := [max(LEAST_RATE, member.link) for member in live if member.link > 0]:
        return statistics.median(configured)
    return max((max(LEAST_RATE, member.measured) for member in live if member.measured > 0), default=0.0)


class HubMeter(Protocol):
    """What a hub measures of its own work."""

    def contribution_seconds(self) -> float:
        """Return the hub's recent CPU time for one contribution; 0: not known."""

    @property
    def port_measured(self) -> float:
        """The bytes per second that the hub's port was seen to carry; 0: not known."""


class LoadPlanner:
    """A `Planner`: chooses k, d, codecs and outer optimizer, where they are auto, by the predicted time to a loss.

    share: of the hub's own port; its rate, where none is configured, is a typical node's, or the measured one if that
    is more.  meter: of the hub; None: nothing is measured yet.
    """

    def __init__(self, settings: RunSettings, share: LinkShare, meter: HubMeter | None = None) -> None:
        self.settings, self.share, self.meter = settings, share, meter
        self._rule = release_rule_from_spec(settings.release)

    def __call__(self, model: ModelSpec, members: Sequence[Member], now: RunSettings) -> Plan | None:
        """See Planner. None until a node has said how fast it is, and until a link is known that a model fills."""
        steps = [seconds for member in members if (seconds := _step_seconds(member)) > 0]
        known = self.share.rate > 0 or any(member.link_rate > 0 for member in members)
        if not steps or not (known or FLOAT_BYTES * count_values(model) < LEAST_MEASURED_BYTES):
            return None
        held = self._held(members, now)

        def load(codec: str, broadcast_codec: str) -> Load:
            return self.load(model, members, steps, now, codec, broadcast_codec, held)

        given = self.settings
        ways = [(codec, broadcast) for codec in self._codecs() for broadcast in self._broadcast_codecs(codec)]
        every, delay = given.every, given.delay  # 0, -1: auto
        best = best_option(((*way, load(*way)) for way in ways), every, delay)
        holding = (now.codec, now.broadcast_codec)
        present = judge_option(*holding, load(*holding), Schedule(now.every, now.delay))
        return Plan(
            best.schedule.every,
            best.schedule.delay,
            self._text(best),
            best.codec,
            best.broadcast_codec,
            best.outer,
            present.time / best.time,
        )

    def _codecs(self) -> Sequence[str]:
        given = self.settings.codec
        return [coding_from_spec(codec).name for codec in CODECS] if given == AUTO else [given]

    def _broadcast_codecs(self, codec: str) -> Sequence[str]:
        given = self.settings.broadcast_codec
        return [codec if given == AUTO else given]

    def _text(self, option: Option) -> str:
        load = option.load
        bits = 8 * load.hub_rate / PAYLOAD_SHARE / self.share.share
        share = 100 / option.time
        return (
            f"{load.nodes} node{'s' * (load.nodes != 1)}, {_amount(bits, 'b')}/s x {self.share.share:g}, "
            f"{_amount(load.bytes_up, 'B')} up and {_amount(load.bytes_down, 'B')} down an exchange, "
            f"step {1e3 * load.step_seconds:.3g} ms; predicted: {share:.0f} % of the speed of a free network, and "
            f"{option.prediction.busiest} is the limit"
        )

    def _held(self, members: Sequence[Member], now: RunSettings) -> float:
        """Return how long an exchange holds a training thread, the median of what the nodes say."""
        said = [member.report.held_seconds for member in members if member.report is not None]
        sound = [seconds for seconds in said if 0 < seconds < MOST_EXCHANGE_SECONDS]
        return statistics.median(sound) if sound else 0.0

    def load(
        self,
        model: ModelSpec,
        members: Sequence[Member],
        steps: Sequence[float],
        now: RunSettings,
        codec: str,
        broadcast_codec: str,
        held: float,
    ) -> Load:
        """Return the load of these live nodes with these codecs.

        steps: the seconds of a step, of those that have said it.  now: what holds, and was measured.  held: seconds.
        """
        settings, nodes, values = self.settings, len(members), count_values(model)
        fragments = settings.fragments_of(values)
        at_once = fragments if settings.carries_all else 1
        sizes = exchange_bytes(model, codec, broadcast_codec, fragments)
        slowest_counts = settings.waits or self._rule.one_each
        fastest = max((one.measured for one in members), default=0.0)
        shares = [LinkShare(one.link, one.share) for one in members if one.link_rate > 0]
        rates = [max(LEAST_RATE, share.usable(fastest)) for share in shares]
        typical = (min(rates) if slowest_counts else statistics.median(rates)) if rates else payload_rate(ASSUMED_BITS)
        # where each node's k follows from its speed, k is that of the reference (dynamic_every)
        percentile = 100 - REFERENCE_PERCENTILE if settings.follows_speed else 50.0
        measured_step = float(np.percentile(steps, percentile))
        said = [member.report.exchange_seconds for member in members if member.report is not None]
        coded = [seconds for seconds in said if 0 < seconds < MOST_EXCHANGE_SECONDS]
        here = exchange_costs(values / fragments, sizes.up, sizes.down, codec, broadcast_codec, nodes, codec_on="host")
        holding = exchange_bytes(model, now.codec, now.broadcast_codec, fragments)
        there = exchange_costs(
            values / fragments, holding.up, holding.down, now.codec, now.broadcast_codec, nodes, codec_on="host"
        )
        # what was measured is of the codec that holds; the table says how another compares with it
        node_seconds = statistics.median(coded) * here.node_seconds / there.node_seconds if coded else 0.0
        contribution, port = (
            (0.0, 0.0)
            if self.meter is None
            else (
                self.meter.contribution_seconds(),
                self.meter.port_measured,
            )
        )
        hub_seconds = nodes * contribution * here.hub_seconds / there.hub_seconds
        return Load(
            nodes=nodes,
            step_seconds=max(measured_step - held / now.every, LEAST_STEP_SHARE * measured_step),
            bytes_up=at_once * sizes.up,
            bytes_down=round(at_once * sizes.down * self._aggregates(nodes)),
            node_rate=typical,
            hub_rate=self.share.usable(max(typical_rate(members), port) or payload_rate(ASSUMED_BITS)),
            fragments=1 if settings.carries_all else fragments,
            pieces=fragments if settings.carries_all else 0,
            node_seconds=at_once * node_seconds,
            hub_seconds=at_once * hub_seconds,
            held_seconds=held,
        )

    def _aggregates(self, nodes: int) -> float:
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

"""Plans of a run: before it begins, from a wish (`make_plan`); while it goes on, from its members (`LoadPlanner`).

Rule 1: the plan with the least predicted time to a loss: steps lost by exchanges, times the slow-down of learning.
Rule 2: what is configured is kept; the rest is chosen, by the same rules before and during a run.
Rule 3: pure: no clock, no socket: measurements come with the members.
Rule 4: typical figures count, not the worst, unless the run waits for its slowest: one node with a broken cable, or one
that lies, does not decide for all; and no number that a node reports can end the hub.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from typing import Protocol

import numpy as np

from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO, RunSettings, pieces_of
from zmqtrain.core.specs import parse_rate
from zmqtrain.core.types import ModelSpec, count_values
from zmqtrain.planning.costs import NODE_LOCKED, Place, exchange_costs, slab_threads
from zmqtrain.planning.schedule import (
    CODECS,
    NODE_BATCHES,
    PAYLOAD_SHARE,
    Load,
    Option,
    Schedule,
    averaging_gain,
    best_option,
    crowding,
    exchange_bytes,
    fitting_delay,
    held_seconds,
    ideal_speedup,
    judge_option,
    least_period,
    model_of,
    nicer_slowdown,
    payload_rate,
)
from zmqtrain.protocol.hosting import MOST_SHARDS
from zmqtrain.protocol.members import Member, MemberState
from zmqtrain.protocol.rounds import AfterCount, Immediately, release_rule_from_spec
from zmqtrain.protocol.schedules import OfferFigures, Plan
from zmqtrain.train.minibatch import REFERENCE_PERCENTILE
from zmqtrain.transport.pacing import LinkShare

SCHEDULES_TRIED = 4
"""Until what is in flight and the schedule agree."""

SHARDS, HUB_BITS = (1, 2, 4), (2.5e9, 10e9)
"""What `variants` puts in the place of what is wished."""

MOST_PARAMETERS, LEAST_STEP_SECONDS = 10**12, 1e-5
"""Larger or smaller numbers are typing mistakes."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a run is to be. Raises ConfigError for numbers that cannot be.

    parameters: of the model.  node_bits, hub_bits: rate of a node's port and of each broker's, bits per second; share:
    of them that training may take.  codec, broadcast_codec: "": chosen, and as the way up.  fragments: 0: an exchange
    carries the whole model.  every, delay: 0: chosen.  node_batches: the critical batch
    size, in batches of one node.
    step_on: a card ("device") or the processor trains.  cores: of a node's machine.  hub_cores: of the hub's, idle.
    node_ns, hub_ns, held_seconds: as for `exchange_costs`; None: the table's.
    """

    parameters: int
    nodes: int
    step_seconds: float
    node_bits: float = 1e9
    hub_bits: float = 1e9
    share: float = 0.8
    shards: int = 1
    on_nodes: bool = False
    codec: str = ""
    broadcast_codec: str = ""
    fragments: int = 0
    every: int = 0
    delay: int = 0
    node_batches: float = NODE_BATCHES
    step_on: Place = "device"
    codec_on: Place = "device"
    cores: float = 4.0
    hub_cores: float = 4.0
    node_ns: float | None = None
    hub_ns: float | None = None
    held_seconds: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is what training may take of the link, in 0 < share <= 1, got {self.share:g}")
        if not 1 <= self.parameters <= MOST_PARAMETERS:
            raise ConfigError(f"a model has 1 to {MOST_PARAMETERS:.0e} parameters, not {self.parameters:g}")
        if not 1 <= self.shards <= MOST_SHARDS:
            raise ConfigError(f"a run has 1 to {MOST_SHARDS} brokers, not {self.shards}")
        if not LEAST_STEP_SECONDS <= self.step_seconds < inf:
            raise ConfigError(f"a step takes at least {1e3 * LEAST_STEP_SECONDS:g} ms, not {1e3 * self.step_seconds:g}")
        for cores in (self.cores, self.hub_cores):
            if not 0 < cores < inf:
                raise ConfigError(f"a machine has some cores, not {cores:g}")
        if self.fragments < 0 or self.every < 0 or self.delay < 0:
            raise ConfigError("fragments, every and delay are at least 1, or 0: chosen")
        if not 0 < self.node_batches < inf:
            raise ConfigError(f"node_batches must be a positive number, got {self.node_batches:g}")

    @property
    def carries_all(self) -> bool:
        """Whether an exchange carries all fragments of the model, as in `RunSettings`."""
        return self.fragments == 0


@dataclass(frozen=True, kw_only=True)
class RunPlan(Option):
    """What a run should be set to, and what it then does. wish: what was asked.  fragments: of the model."""

    wish: Wish
    fragments: int

    @property
    def ideal(self) -> float:
        """How many times as fast as one PC so many would reach a loss on a free network."""
        return ideal_speedup(self.wish.nodes, self.wish.node_batches)

    @property
    def speedup(self) -> float:
        """How many times as fast as one PC these reach a loss, as predicted."""
        return self.ideal * averaging_gain(self.wish.nodes) / self.time


def load_of(wish: Wish, codec: str, broadcast_codec: str, fragments: int, in_flight: int = 0) -> Load:
    """Return what the wished run asks of links and machines with these codecs and so many fragments.

    in_flight: earlier deltas of a fragment that a node has in flight when it encodes the next (`exchange_costs`).
    """
    sizes = exchange_bytes(model_of(wish.parameters), codec, broadcast_codec, fragments, wish.shards)
    step_cores = wish.cores if wish.step_on == "host" else 1.0
    costs = exchange_costs(
        wish.parameters / fragments,
        sizes.up,
        sizes.down,
        codec,
        broadcast_codec,
        wish.nodes,
        wish.shards,
        step_on=wish.step_on,
        codec_on=wish.codec_on,
        in_flight=in_flight,
        node_ns=wish.node_ns,
        hub_ns=wish.hub_ns,
        node_threads=slab_threads(wish.cores - step_cores, NODE_LOCKED),
        hub_threads=slab_threads(wish.hub_cores),
        held_seconds=0.0,
    )
    at_once = fragments if wish.carries_all else 1
    whole = exchange_costs(
        wish.parameters * at_once / fragments,
        0,
        0,
        codec,
        broadcast_codec,
        wish.nodes,
        step_on=wish.step_on,
        codec_on=wish.codec_on,
        held_seconds=wish.held_seconds,
    )
    return Load(
        nodes=wish.nodes,
        step_seconds=wish.step_seconds,
        bytes_up=at_once * sizes.up,
        bytes_down=at_once * sizes.down,
        node_rate=payload_rate(wish.node_bits, wish.share),
        hub_rate=payload_rate(wish.hub_bits, wish.share),
        fragments=fragments // at_once,
        shards=wish.shards,
        node_seconds=at_once * costs.node_seconds * nicer_slowdown(wish.cores, step_cores),
        hub_seconds=at_once * costs.hub_seconds,
        held_seconds=held_seconds(whole.thread_seconds, at_once * costs.node_seconds, wish.cores, step_cores),
        on_nodes=wish.on_nodes,
        pieces=fragments if wish.carries_all else 0,
    )


def make_plan(wish: Wish) -> RunPlan:
    """Return the plan of a wish with the least predicted time to a loss, of equal ones that with the fewest bytes.

    Raises ConfigError for a codec, or a number of fragments, that cannot be.
    """
    codecs = (wish.codec,) if wish.codec else CODECS
    fragments = wish.fragments or pieces_of(-(-wish.parameters // wish.shards))
    plans = (_plan(wish, codec, fragments) for codec in codecs)
    return min(plans, key=lambda plan: plan.rank)


def variants(wish: Wish) -> Iterator[RunPlan]:
    """Yield the plans of the same wish with 1, 2 and 4 brokers, and with hubs at 2.5 and 10 Gb/s (one, in place of
    brokers on nodes)."""
    for shards in SHARDS:
        if not wish.on_nodes or shards <= wish.nodes:
            yield make_plan(replace(wish, shards=shards))
    for bits in HUB_BITS:
        shards = 1 if wish.on_nodes else wish.shards
        yield make_plan(replace(wish, hub_bits=bits, shards=shards, on_nodes=False))


def _plan(wish: Wish, codec: str, fragments: int) -> RunPlan:
    """Return the plan of this cut. What is in flight when a node encodes follows from the schedule, and the schedule
    from the time that this takes: once more, for as long as there is more in flight, a few times at most."""
    broadcast_codec, in_flight = wish.broadcast_codec or codec, 0
    for _ in range(SCHEDULES_TRIED):
        load = load_of(wish, codec, broadcast_codec, fragments, in_flight)
        option = best_option([(codec, broadcast_codec, load)], wish.every, wish.delay or -1)
        of_one = option.schedule.deltas_in_flight(load.fragments)
        if of_one <= in_flight:
            break
        in_flight = of_one
    return RunPlan(**vars(option), wish=wish, fragments=fragments)


ASSUMED_BITS = 1e9
"""The rate of a port that was not measured yet; a run with exchanges too small to measure it is not affected."""

ASSUMED_STEP_SECONDS = 0.1
"""The time of a step until the first node has reported its own: so a run on a thin link begins with a sparse code."""
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

    @property
    def shards_on_nodes(self) -> bool:
        """Whether brokers of the run share the ports of its nodes."""


class LoadPlanner:
    """A `Planner`: chooses k, d, codecs and outer optimizer, where they are auto, by the predicted time to a loss.

    share: of the hub's own port; its rate, where none is configured, is a typical node's, or the measured one if that
    is more.  meter: of the hub; None: nothing is measured yet.
    """

    def __init__(self, settings: RunSettings, share: LinkShare, meter: HubMeter | None = None) -> None:
        self.settings, self.share, self.meter = settings, share, meter
        self._rule = release_rule_from_spec(settings.release)

    def __call__(
        self, model: ModelSpec, members: Sequence[Member], now: RunSettings, crowded: OfferFigures | None = None
    ) -> Plan | None:
        """See Planner. None until a link is known that a model fills."""
        measured = [seconds for member in members if (seconds := _step_seconds(member)) > 0]
        steps = measured or [ASSUMED_STEP_SECONDS]
        known = self.share.rate > 0 or any(member.link_rate > 0 for member in members)
        if not (known or FLOAT_BYTES * count_values(model) < LEAST_MEASURED_BYTES):
            return None
        held = _median_seconds(one.report.held_seconds for one in members if one.report is not None)
        plain, given = self.loads(model, members, steps, now, held), self.settings
        times, seen, coded = 1.0, inf, ("", "")
        if crowded is not None:
            then = crowded.settings
            coded = then.codec, then.broadcast_codec
            seen = crowded.age_steps * plain(*coded).step_seconds
            late = seen if crowded.age_steps > then.delay + 1 else nan  # else d says how old it is, and nothing more
            times = crowding(plain(*coded), Schedule(then.every, then.delay), crowded.seconds, late)

        def load(*way: str) -> Load:
            return replace(plain(*way).slower(times), longest_seconds=seen if way == coded and seen > 0 else inf)

        ways = [(codec, broadcast) for codec in self._codecs() for broadcast in self._broadcast_codecs(codec)]
        every, delay = given.every, given.delay  # 0, -1: auto
        best = best_option(((*way, load(*way)) for way in ways), every, delay)
        fits = (least_period(best.load), fitting_delay(best.load))
        if 0 < every < fits[0]:  # a longer d would only let more offers wait before the stage that is too slow for k
            best, times = best_option(((*way, plain(*way)) for way in ways), every, delay), 1.0
        holding = (now.codec, now.broadcast_codec)
        present = judge_option(*holding, load(*holding), Schedule(now.every, now.delay))
        return Plan(
            best.schedule.every,
            best.schedule.delay,
            self._text(best, bool(measured), times),
            best.codec,
            best.broadcast_codec,
            best.outer,
            present.time / best.time,
            provisional=not measured,
            fits=fits,
        )

    def _codecs(self) -> Sequence[str]:
        given = self.settings.codec
        return [coding_from_spec(codec).name for codec in CODECS] if given == AUTO else [given]

    def _broadcast_codecs(self, codec: str) -> Sequence[str]:
        given = self.settings.broadcast_codec
        return [codec if given == AUTO else given]

    def _text(self, option: Option, measured: bool, times: float) -> str:
        load = option.load
        bits = 8 * times * load.hub_rate / PAYLOAD_SHARE / self.share.share
        share = 100 / option.time
        slower = f"; an exchange takes {times:.2g} times as long as its parts, as offers showed that were put off"
        return (
            f"{load.nodes} node{'s' * (load.nodes != 1)}, {_amount(bits, 'b')}/s x {self.share.share:g}, "
            f"{_amount(load.bytes_up, 'B')} up and {_amount(load.bytes_down, 'B')} down an exchange, "
            f"step {1e3 * load.step_seconds:.3g} ms{'' if measured else ' (assumed)'}; "
            f"predicted: {share:.0f} % of the speed of a free network, and "
            f"{option.prediction.busiest} is the limit{slower if times > 1 else ''}"
        )

    def loads(
        self, model: ModelSpec, members: Sequence[Member], steps: Sequence[float], now: RunSettings, held: float
    ) -> Callable[[str, str], Load]:
        """Return the function that gives the load of these live nodes, with one codec up and one down.

        steps: the seconds of a step, of those that have said it.  now: what holds, and was measured.  held: seconds.
        """
        settings, nodes, values, shards = self.settings, len(members), count_values(model), self.settings.shards
        fragments = settings.fragments_of(model)
        at_once = fragments if settings.carries_all else 1
        slowest_counts = settings.waits or self._rule.one_each
        fastest = max((one.measured for one in members), default=0.0)
        shares = [LinkShare(one.link, one.share) for one in members if one.link_rate > 0]
        rates = [max(LEAST_RATE, share.usable(fastest)) for share in shares]
        typical = (min(rates) if slowest_counts else statistics.median(rates)) if rates else payload_rate(ASSUMED_BITS)
        # where each node's k follows from its speed, k is that of the reference (dynamic_every)
        percentile = 100 - REFERENCE_PERCENTILE if settings.follows_speed else 50.0
        measured_step = float(np.percentile(steps, percentile))
        coded = _median_seconds(one.report.exchange_seconds for one in members if one.report is not None)
        holding = exchange_bytes(model, now.codec, now.broadcast_codec, fragments, shards)
        ways = now.codec, now.broadcast_codec, nodes, shards
        there = exchange_costs(values / fragments, holding.up, holding.down, *ways, codec_on="host")
        meter = self.meter
        contribution, port = (0.0, 0.0) if meter is None else (meter.contribution_seconds(), meter.port_measured)
        aggregates = self._aggregates(nodes)
        base = Load(
            nodes=nodes,
            step_seconds=max(measured_step - held / now.every, LEAST_STEP_SHARE * measured_step),
            bytes_up=0,
            bytes_down=0,
            node_rate=typical,
            hub_rate=self.share.usable(max(typical_rate(members), port) or payload_rate(ASSUMED_BITS)),
            fragments=1 if settings.carries_all else fragments,
            shards=shards,
            on_nodes=meter is not None and meter.shards_on_nodes and 1 < shards <= nodes + 1,
            pieces=fragments if settings.carries_all else 0,
            held_seconds=held,
        )

        def load(codec: str, broadcast_codec: str) -> Load:
            sizes = exchange_bytes(model, codec, broadcast_codec, fragments, shards)
            ways = codec, broadcast_codec, nodes, shards
            here = exchange_costs(values / fragments, sizes.up, sizes.down, *ways, codec_on="host")
            # what was measured is of the codec that holds, and of this broker's shard; the table says how another
            # codec compares with it
            return replace(
                base,
                bytes_up=at_once * sizes.up,
                bytes_down=round(at_once * sizes.down * aggregates),
                node_seconds=at_once * shards * coded * here.node_seconds / there.node_seconds,
                hub_seconds=at_once * nodes * contribution * here.hub_seconds / there.hub_seconds,
            )

        return load

    def _aggregates(self, nodes: int) -> float:
        match self._rule:
            case Immediately():
                return nodes
            case AfterCount(contributions):
                return nodes / contributions
        return 1.0


def _median_seconds(said: Iterable[float]) -> float:
    """Return the median of the seconds of an exchange that nodes can have measured; 0: not known."""
    sound = [seconds for seconds in said if 0 < seconds < MOST_EXCHANGE_SECONDS]
    return statistics.median(sound) if sound else 0.0


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

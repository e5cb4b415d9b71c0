"""Plan a run before it begins: codec, fragments, k and d from what is known of its model, machines and links (pure).

Rule 1: the densest codec whose turns of the whole model stay short enough; the wire that is there is spent.
Rule 2: what is given is kept, what is left out is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from zmqtrain.codecs.fragment import BLOCK_VALUES
from zmqtrain.errors import ConfigError
from zmqtrain.protocol.rounds import FIRST_GRACE_SECONDS
from zmqtrain.runtime.planning.costs import COSTS, exchange_costs
from zmqtrain.runtime.planning.memory import Place
from zmqtrain.runtime.planning.schedule import (
    Load,
    Prediction,
    Schedule,
    exchange_bytes,
    fit,
    held_seconds,
    model_of,
    nicer_slowdown,
    payload_rate,
    predict,
    stages,
)

__all__ = ["PERIOD_STEPS", "Wish", "Plan", "load_of", "make_plan", "variants"]

PERIOD_STEPS = 32
"""In so many steps every parameter should have had its turn (measured: docs/results.md)."""

FRAGMENTS_TRIED = (1, 2, 4, 8, 16, 32, 64)
SLOWER = 1.1
"""What a turn of the whole model may take longer, for the sake of younger aggregates."""

SCHEDULES_TRIED = 4
"""Until what is on its way and the schedule agree."""

MASTERS, HUB_BITS = (1, 2, 4), (2.5e9, 10e9)
"""What `variants` puts in the place of what is wished."""

MOST_PARAMETERS, MOST_MASTERS, LEAST_STEP_SECONDS = 10**12, 256, 1e-5
"""What is no mistake of who typed it."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a run is to be. Raises ConfigError for numbers that cannot be.

    parameters: of the model.  node_bits, hub_bits: rate of a node's port and of each master's, bits per second; share:
    of them that training may take.  codec, broadcast_codec: "": chosen, and as the way up.  fragments: 0: chosen.
    every, delay: 0: chosen.  period_steps: in so many steps the whole model is to have had its turn.
    step_on: a card ("device") or the processor trains.  cores: of a node's machine.
    node_ns, hub_ns, held_seconds: as for `exchange_costs`; None: the table's.
    """

    parameters: int
    nodes: int
    step_seconds: float
    node_bits: float = 1e9
    hub_bits: float = 1e9
    share: float = 0.8
    masters: int = 1
    on_nodes: bool = False
    codec: str = ""
    broadcast_codec: str = ""
    fragments: int = 0
    every: int = 0
    delay: int = 0
    period_steps: float = PERIOD_STEPS
    step_on: Place = "device"
    codec_on: Place = "device"
    cores: float = 4.0
    node_ns: float | None = None
    hub_ns: float | None = None
    held_seconds: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is what training may take of the link, in 0 < share <= 1, got {self.share:g}")
        if not 1 <= self.parameters <= MOST_PARAMETERS:
            raise ConfigError(f"a model has 1 to {MOST_PARAMETERS:.0e} parameters, not {self.parameters:g}")
        if not 1 <= self.masters <= MOST_MASTERS:
            raise ConfigError(f"a run has 1 to {MOST_MASTERS} masters, not {self.masters}")
        if not LEAST_STEP_SECONDS <= self.step_seconds < inf:
            raise ConfigError(f"a step takes at least {1e3 * LEAST_STEP_SECONDS:g} ms, not {1e3 * self.step_seconds:g}")
        if not 0 < self.cores < inf:
            raise ConfigError(f"a machine has some cores, not {self.cores:g}")
        if self.fragments < 0 or self.every < 0 or self.delay < 0:
            raise ConfigError("fragments, every and delay are at least 1, or 0: chosen")
        if not self.period_steps >= 1:
            raise ConfigError(f"period_steps must be at least 1, got {self.period_steps:g}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run should be set to, and what it then does. wish: what was asked."""

    wish: Wish
    codec: str
    broadcast_codec: str
    load: Load
    schedule: Schedule
    prediction: Prediction

    @property
    def fragments(self) -> int:
        """In how many parts the model travels."""
        return self.load.fragments


def load_of(wish: Wish, codec: str, broadcast_codec: str, fragments: int, on_the_way: int = 0) -> Load:
    """Return what the wished run asks of links and machines with these codecs and so many fragments.

    on_the_way: as for `exchange_costs`.
    """
    sizes = exchange_bytes(model_of(wish.parameters), codec, broadcast_codec, fragments, wish.masters)
    costs = exchange_costs(
        wish.parameters / fragments,
        sizes.up,
        sizes.down,
        codec,
        broadcast_codec,
        wish.nodes,
        wish.masters,
        step_on=wish.step_on,
        codec_on=wish.codec_on,
        on_the_way=on_the_way,
        node_ns=wish.node_ns,
        hub_ns=wish.hub_ns,
        held_seconds=wish.held_seconds,
    )
    step_cores = wish.cores if wish.step_on == "host" else 1.0
    return Load(
        nodes=wish.nodes,
        step_seconds=wish.step_seconds,
        bytes_up=sizes.up,
        bytes_down=sizes.down,
        node_rate=payload_rate(wish.node_bits, wish.share),
        hub_rate=payload_rate(wish.hub_bits, wish.share),
        fragments=fragments,
        masters=wish.masters,
        node_seconds=costs.node_seconds * nicer_slowdown(wish.cores, step_cores),
        hub_seconds=costs.hub_seconds,
        held_seconds=held_seconds(costs.thread_seconds, costs.node_seconds, wish.cores, step_cores),
        on_nodes=wish.on_nodes,
    )


def make_plan(wish: Wish) -> Plan:
    """Return the plan of a wish: the densest codec that keeps to `period_steps`, else the smallest one.

    Raises ConfigError for a codec, or a number of fragments, that cannot be.
    """
    if wish.codec:
        return _best_cut(wish, wish.codec)
    for codec in COSTS:
        plan = _best_cut(wish, codec)
        if plan.prediction.model_period_steps <= wish.period_steps:
            return plan
    return plan


def variants(wish: Wish) -> Iterator[Plan]:
    """Give the plans of the same wish with 1, 2 and 4 masters, and with hubs at 2.5 and 10 Gb/s."""
    for masters in MASTERS:
        if not wish.on_nodes or masters <= wish.nodes:
            yield make_plan(replace(wish, masters=masters))
    for bits in HUB_BITS:
        yield make_plan(replace(wish, hub_bits=bits, on_nodes=False))


def _best_cut(wish: Wish, codec: str) -> Plan:
    """Return the plan with the youngest aggregates, of those whose turns of the whole model are about the shortest.

    Of those, if there are any, whose deltas all come within the first grace of a quorum's round: else the round closes
    without the last of them, and from then on nodes are at different fragments, and aggregates hold several.
    """
    blocks = -(-wish.parameters // BLOCK_VALUES)
    tried = (wish.fragments,) if wish.fragments else tuple(n for n in FRAGMENTS_TRIED if n <= blocks)
    plans = [_plan(wish, codec, fragments) for fragments in tried]
    shortest = min(plan.prediction.model_period_steps for plan in plans)
    together = [plan for plan in plans if _spread_seconds(plan.load) <= FIRST_GRACE_SECONDS]
    if together and not wish.fragments:
        plans, shortest = together, min(plan.prediction.model_period_steps for plan in together)
    short = [plan for plan in plans if plan.prediction.model_period_steps <= SLOWER * shortest]
    return min(short, key=lambda plan: plan.prediction.age_steps)  # the first, of equal ones: the fewest fragments


def _spread_seconds(load: Load) -> float:
    """Return in what time the second half of the deltas of nodes that offer together reach the hub, and are checked."""
    seconds = stages(load)
    return max(seconds["the hub's port, up"], seconds["the hub's codec"]) / 2


def _plan(wish: Wish, codec: str, fragments: int) -> Plan:
    """Return the plan of this cut. What is on its way when a node encodes follows from the schedule, and the schedule
    from the time that this takes: once more, for as long as there is more on its way, a few times at most."""
    broadcast_codec, on_the_way = wish.broadcast_codec or codec, 0
    for _ in range(SCHEDULES_TRIED):
        load = load_of(wish, codec, broadcast_codec, fragments, on_the_way)
        schedule = _schedule(wish, load)
        if schedule.on_the_way(fragments) <= on_the_way:
            break
        on_the_way = schedule.on_the_way(fragments)
    return Plan(
        wish=wish,
        codec=codec,
        broadcast_codec=broadcast_codec,
        load=load,
        schedule=schedule,
        prediction=predict(load, schedule),
    )


def _schedule(wish: Wish, load: Load) -> Schedule:
    fitting = fit(load)
    return Schedule(wish.every or fitting.every, wish.delay or fitting.delay)

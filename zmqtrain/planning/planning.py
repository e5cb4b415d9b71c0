"""The plan of a run before it begins: codec, fragments, k and d from its model, machines and links (pure).

Rule 1: the plan with the least predicted time to a loss: steps lost by exchanges, times the slow-down of learning.
Rule 2: what is given is kept, what is left out is chosen, from what a running hub would choose from (auto).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from zmqtrain.codecs.fragment import BLOCK_VALUES
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import pieces_of
from zmqtrain.planning.costs import Place, exchange_costs, hub_threads
from zmqtrain.planning.schedule import (
    CODECS,
    NODE_BATCHES,
    Load,
    Option,
    Prediction,
    Schedule,
    averaging_gain,
    best_option,
    exchange_bytes,
    held_seconds,
    ideal_speedup,
    model_of,
    nicer_slowdown,
    payload_rate,
)

FRAGMENTS_TRIED = (1, 2, 4, 8, 16, 32, 64)
"""With several masters, where an exchange carries one fragment of each."""

SCHEDULES_TRIED = 4
"""Until what is in flight and the schedule agree."""

MASTERS, HUB_BITS = (1, 2, 4), (2.5e9, 10e9)
"""What `variants` puts in the place of what is wished."""

MOST_PARAMETERS, MOST_MASTERS, LEAST_STEP_SECONDS = 10**12, 256, 1e-5
"""Larger or smaller numbers are typing mistakes."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a run is to be. Raises ConfigError for numbers that cannot be.

    parameters: of the model.  node_bits, hub_bits: rate of a node's port and of each master's, bits per second; share:
    of them that training may take.  codec, broadcast_codec: "": chosen, and as the way up.  fragments: 0: an exchange
    carries the whole model (with several masters: chosen).  every, delay: 0: chosen.  node_batches: the critical batch
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
    masters: int = 1
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
        if not 1 <= self.masters <= MOST_MASTERS:
            raise ConfigError(f"a run has 1 to {MOST_MASTERS} masters, not {self.masters}")
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
        return self.fragments == 0 and self.masters == 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run should be set to, and what it then does. wish: what was asked.  fragments: of the model."""

    wish: Wish
    option: Option
    fragments: int

    @property
    def codec(self) -> str:
        """How deltas are coded."""
        return self.option.codec

    @property
    def broadcast_codec(self) -> str:
        """How aggregates are coded."""
        return self.option.broadcast_codec

    @property
    def load(self) -> Load:
        """What it asks of links and machines."""
        return self.option.load

    @property
    def schedule(self) -> Schedule:
        """Its k and d."""
        return self.option.schedule

    @property
    def prediction(self) -> Prediction:
        """What it does."""
        return self.option.prediction

    @property
    def ideal(self) -> float:
        """How many times as fast as one PC so many would reach a loss on a free network."""
        return ideal_speedup(self.wish.nodes, self.wish.node_batches)

    @property
    def speedup(self) -> float:
        """How many times as fast as one PC these reach a loss, as predicted."""
        return self.ideal * averaging_gain(self.wish.nodes) / self.option.time


def load_of(wish: Wish, codec: str, broadcast_codec: str, fragments: int, in_flight: int = 0) -> Load:
    """Return what the wished run asks of links and machines with these codecs and so many fragments.

    in_flight: earlier deltas of a fragment that a node has in flight when it encodes the next (`exchange_costs`).
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
        in_flight=in_flight,
        node_ns=wish.node_ns,
        hub_ns=wish.hub_ns,
        hub_threads=hub_threads(wish.hub_cores),
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
    step_cores = wish.cores if wish.step_on == "host" else 1.0
    return Load(
        nodes=wish.nodes,
        step_seconds=wish.step_seconds,
        bytes_up=at_once * sizes.up,
        bytes_down=at_once * sizes.down,
        node_rate=payload_rate(wish.node_bits, wish.share),
        hub_rate=payload_rate(wish.hub_bits, wish.share),
        fragments=fragments // at_once,
        masters=wish.masters,
        node_seconds=at_once * costs.node_seconds * nicer_slowdown(wish.cores, step_cores),
        hub_seconds=at_once * costs.hub_seconds,
        held_seconds=held_seconds(whole.thread_seconds, at_once * costs.node_seconds, wish.cores, step_cores),
        on_nodes=wish.on_nodes,
        pieces=fragments if wish.carries_all else 0,
    )


def make_plan(wish: Wish) -> Plan:
    """Return the plan of a wish with the least predicted time to a loss.

    Raises ConfigError for a codec, or a number of fragments, that cannot be.
    """
    codecs = (wish.codec,) if wish.codec else CODECS
    plans = (_plan(wish, codec, fragments) for codec in codecs for fragments in _fragments(wish))
    return min(plans, key=lambda plan: plan.option.time)  # the first, of equal ones: the densest codec


def variants(wish: Wish) -> Iterator[Plan]:
    """Give the plans of the same wish with 1, 2 and 4 masters, and with hubs at 2.5 and 10 Gb/s."""
    for masters in MASTERS:
        if not wish.on_nodes or masters <= wish.nodes:
            yield make_plan(replace(wish, masters=masters))
    for bits in HUB_BITS:
        yield make_plan(replace(wish, hub_bits=bits, on_nodes=False))


def _fragments(wish: Wish) -> Sequence[int]:
    if wish.fragments:
        return (wish.fragments,)
    if wish.carries_all:
        return (pieces_of(wish.parameters),)
    blocks = -(-wish.parameters // BLOCK_VALUES)
    return [fragments for fragments in FRAGMENTS_TRIED if fragments * wish.masters <= max(blocks, wish.masters)]


def _plan(wish: Wish, codec: str, fragments: int) -> Plan:
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
    return Plan(wish=wish, option=option, fragments=fragments)

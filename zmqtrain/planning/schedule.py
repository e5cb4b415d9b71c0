"""How often a run can exchange, how late an aggregate may be applied, and what both cost the time to a loss (pure).

    node      encode | hub's port up: N deltas | hub's codec | hub's port down: N aggregates | decode      node
    time to a loss = time without a network * slowdown / efficiency

Rule 1: use the whole link: k is the smallest whose exchange fits every port and every codec, and d the smallest at
which an aggregate is there if all nodes offer together.  Rule 2: stages work side by side, each on another exchange:
the slowest one sets k, the sum of all sets d; so d may exceed k, and several exchanges are in flight.
Rule 3: bytes are counted, not guessed: by the codecs' own layout, with heads, chunk by chunk.
Rule 4: `slowdown` counts steps: how many times the steps of exact synchronous training a run needs to a loss.  The
efficiency is the schedule's: how much of its speed a PC keeps. Every coefficient stands here, with the runs that it is
fitted to: the text program (286,728 values, 4 nodes x 4 x 64 bytes a step, AdamW at a rate of .004), seed 0,
steps to a held-out loss of 2.05 on a link that costs nothing. Seeds 6 and 7, and a smaller model (width 64, 117,000
values, the same seeds), were measured besides; the coefficients were not changed. To make such a run again:
`bench/time_to_loss.py --simulated --link 1000gbit --seeds 1 --rate 4e-3 --only late --row
"name=late|codec=float32|every=1|delay=4|fragments=1|outer=sgd:rate=1"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, hypot, inf, isfinite, log

from zmqtrain.codecs.base import Coding, coding_from_spec
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import plan_payload
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.priority import NICENESS
from zmqtrain.core.settings import require
from zmqtrain.core.types import LeafSpec, ModelSpec
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.messages import Aggregate, Chunk, Credit, Message, Publish

DENSITIES = (
    *(0.1, 0.08, 0.065, 0.05, 0.04, 0.03, 0.025, 0.02, 0.015, 0.0125),
    *(0.01, 0.008, 0.0065, 0.005, 0.004, 0.003, 0.002, 0.0015, 0.001),
)
CODECS = ("int8", "int4", "ternary", *(f"topk:density={density:g}+sign" for density in DENSITIES))
"""The codecs that auto chooses from, the densest first. The same one is used up and down."""

FREE_DENSITY, FREE_NODES, FREE_POWER = 0.05, 4, 1.6
SPARSE = 0.12
"""top-k + sign: SPARSE * log(free / density)^2 more steps, where density is the share of the values that is sent in a
step (that of an exchange over the steps of a turn), and free the density that costs nothing. It grows with the nodes,
because an aggregate carries what all have sent: FREE_DENSITY * (nodes / FREE_NODES)^FREE_POWER; with fewer nodes than
FREE_NODES it was not measured, and is taken to be the same.  With 4 nodes 1.01, 1.10 and 1.31 times the steps at .05,
.02 and .01 (seed 0; seeds 6 and 7: .97, 1.06, 1.26; at a width of 64: .94, 1.05, 1.16); with 8, 1.20 and 1.32 times at
.05 and .025. Half the density in each step does what the same density in each second step does: seconds to 2.10 with 4
nodes at (k, d) = (1, 2) and (2, 2), a ring of 5 steps, seed 0: .1: 27.0 and 27.0, .05: 26.1 and 28.4, .02: 29.2 and
33.8, .01 at k = 1: 33.5."""
CODED, QUANTISED = 0.01, 0.02
"""What a sparse code and a dense lossy one are taken to cost at least. Ternary and top-5 % + sign were 0 to 2 %; at
k = 1 ternary took 1.07 and .99 times the seconds of top-5 % + sign (seeds 0 and 1, a ring of 5 steps)."""
LATE, LATE_FREE, LATE_POWER = 0.14, 2.0, 0.9
"""Progress of others that is `age` steps old when it is applied: LATE * (age - LATE_FREE)^LATE_POWER more steps.  With
k steps between exchanges it is (k - 1) / 2 steps older than its offer.  float32, seed 0: 1.00 times the steps at (k, d)
= (1, 0), (1, 2), (2, 0) and (4, 0), 1.10 at (2, 2), 1.27 at (1, 4), 1.50 at (4, 4) and (8, 4): age counts, k by itself
does not. Seeds 6 and 7: 1.14, 1.30 and 1.45 at (2, 2), (1, 4) and (4, 4); at a width of 64: 1.06, 1.10 and 1.28."""
FRESH = 0.004
"""What each step of age costs below LATE_FREE, too: less than seeds differ by, but of two the fresher is taken."""
SPREAD = 0.1
"""How far a prediction is trusted, as a share of it: other models, rates and data were not measured."""
NODE_BATCHES = 16.6
"""The critical batch size in batches of one node, where none is configured: on a free network 2, 4 and 8 nodes were
1.85, 3.47 and 5.7 times as fast as one to the last loss of that task (docs/results.md, seeds 0 to 5; of 8 nodes 3)."""
AVERAGED, AVERAGED_POWER = 0.22, 1.5
"""Nodes that average deltas of AdamW, at a rate tuned for that, need fewer steps than exact synchronous training at its
own best rate: 1 + AVERAGED * (2 / nodes)^AVERAGED_POWER times as few. Measured over the other terms: 1.22, 1.09 and
about 1.0 times with 2, 4 and 8 nodes (the same runs)."""


@lru_cache(maxsize=256)
def density_of(spec: str) -> float:
    """Return the share of the values that the codec of most leaves sends; 1 where it sends all.

    Raises ConfigError for a spec that cannot be read.
    """
    name = coding_from_spec(spec).default.name
    density = 1.0
    for stage in re.split(r"\+(?=[a-z])", name):
        if found := re.match(r"(?:topk|randomk):density=([0-9.e-]+)", stage):
            density *= float(found[1])
        elif found := re.match(r"blocktopk:keep=([0-9]+)", stage):
            density *= int(found[1]) / 256
    return density


def _coded(spec: str, nodes: int, turn_steps: float) -> float:
    if coding_from_spec(spec).default.name in ("float32", "bf16"):
        return 0.0
    if (density := density_of(spec)) == 1:
        return QUANTISED
    sent, free = density / max(1.0, turn_steps), min(FREE_DENSITY * max(1.0, nodes / FREE_NODES) ** FREE_POWER, 1.0)
    return CODED + SPARSE * log(max(1.0, free / sent)) ** 2


def slowdown(nodes: int, turn_steps: float, age_steps: float, codec: str, broadcast_codec: str) -> float:
    """Return how many times the steps of exact synchronous training a run needs to a loss, at least 1.

    turn_steps: until the whole model has been exchanged once.  age_steps: from an offer to its application.  Both
    together cost less than their product: 1.49 times the steps with top-5 % + sign in 4 fragments, d = 4 (1.45, 1.24).
    """
    age = age_steps + (turn_steps - 1) / 2
    late = FRESH * age + LATE * max(0.0, age - LATE_FREE) ** LATE_POWER
    coded = max(_coded(spec, nodes, turn_steps) for spec in (codec, broadcast_codec))
    return 1 + hypot(late, coded)


def ideal_speedup(nodes: int, node_batches: float = NODE_BATCHES) -> float:
    """Return how many times as fast as one PC `nodes` PCs reach a loss that exchange gradients exactly and for nothing.

    node_batches: the critical batch size, in batches of one node: where N times the batch halves what a sample teaches.
    Source: McCandlish et al. 2018, An Empirical Model of Large-Batch Training, eq. 2.11.
    """
    return nodes * (1 + node_batches) / (nodes + node_batches)


def averaging_gain(nodes: int) -> float:
    """Return how many times fewer steps averaged deltas need than exact synchronous training; 1 for one node."""
    return 1.0 if nodes == 1 else 1.0 + AVERAGED * (2 / nodes) ** AVERAGED_POWER


PAYLOAD_SHARE = 0.956
"""What plain TCP carries of a port's rate at an MTU of 1,500: 956 of 1,000 Mb/s, measured."""

BUSIEST, BUSIEST_OF_FEW, FEW_NODES = 0.8, 0.985, 8
"""No stage may be busy for a larger share of the time; the second is for so few nodes.  A stage that is nearly full
makes a queue of every hesitation: in the simulator, runs of 64 nodes at 0.9 fell behind their plans
(bench/sim_scale.py), runs of 4 kept theirs: at 0.95 they reached a loss 2 to 3 % sooner than at 0.92 (as 25M, seeds 3
to 5), and at 0.985 sooner by 4 % than at 0.95 where a float32 ring takes 100 steps (docs/results.md)."""

ROUNDING = 1e-6
TIME_DIGITS = 3
"""Predicted times that are equal to so many digits are equal."""

USUAL_SLACK = 1.25
"""What an exchange may take of its usual time before it comes too late for d."""

HELD = 0.03
"""The largest share of its time that training may lose to exchanges, if a larger k can help it."""

PERIOD_FACTORS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)
"""Multiples of the smallest k that are looked at."""

OFTEN_OUTER, RARE_OUTER, RARE_TURN_STEPS = "sgd:rate=1", "nesterov:rate=0.8,momentum=0.5", 8
"""The outer optimizers that auto chooses: the second where a turn of the model takes so many steps or more
(docs/strategies.md#outer)."""

CODEC_WEIGHT = 1.25**-NICENESS
"""Of a codec's thread at a core, to that of a thread that trains."""

MOST_CROWDING = 16.0
"""More than that is no crowding, but something that has stood still."""

_LEAF_VALUES = 1 << 20
_ZMQ_FRAME_BYTES = 9
_MESSAGE_PARTS = 2
"""A ZeroMQ message of two parts: each has a flag and a length of at most 8 bytes."""
_SHARD_BYTES = 256
"""What one more broker costs an exchange each way: an announcement of its own."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a run asks of its links and machines. Raises ConfigError for what no run can have.

    nodes: live ones.  step_seconds: of a node's training step (median over the nodes).
    bytes_up, bytes_down: of one exchange (one fragment) of one node, over all brokers; where a period has several
    aggregates (release rule "immediately": one for each node), bytes_down is of all of them.
    node_rate, hub_rate: bytes per second, one way, that may be used of a node's port and of each broker's port: what
    the reserved share leaves.  fragments: of the model.  brokers: brokers with equal shares of every exchange.
    node_seconds: that a node's codec takes for one exchange, encode and decode, beside the training.
    hub_seconds: CPU of a broker for one exchange, all contributions of it.
    held_seconds: that training loses to one exchange: see `held_seconds`.
    on_nodes: the brokers run on nodes, and share their ports, but for the first of one more than there are nodes; else
    each has a port of its own.
    pieces: an exchange carries the whole model in so many fragments, one after the other (`fragments` is 1 then); 0: it
    carries one fragment.
    longest_seconds: an exchange was seen to take no longer, although offers waited for each other; inf: not known.
    """

    nodes: int
    step_seconds: float
    bytes_up: int
    bytes_down: int
    node_rate: float
    hub_rate: float
    fragments: int = 1
    shards: int = 1
    node_seconds: float = 0.0
    hub_seconds: float = 0.0
    held_seconds: float = 0.0
    on_nodes: bool = False
    pieces: int = 0
    longest_seconds: float = inf

    def slower(self, times: float) -> Load:
        """Return this load where every stage takes so many times as long."""
        return replace(
            self,
            node_rate=self.node_rate / times,
            hub_rate=self.hub_rate / times,
            node_seconds=self.node_seconds * times,
            hub_seconds=self.hub_seconds * times,
        )

    def __post_init__(self) -> None:
        for name in ("nodes", "fragments", "shards"):
            require(name, getattr(self, name), 1)
        for name in ("step_seconds", "node_rate", "hub_rate"):
            if not (getattr(self, name) > 0 and isfinite(getattr(self, name))):
                raise ConfigError(f"{name} must be a positive number, got {getattr(self, name)}")
        for name in ("bytes_up", "bytes_down", "node_seconds", "hub_seconds", "held_seconds"):
            if not (getattr(self, name) >= 0 and isfinite(getattr(self, name))):
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.on_nodes and self.shards > self.nodes + 1:
            raise ConfigError(f"{self.shards} brokers do not find a node each among {self.nodes}, beside the hub")


@dataclass(frozen=True)
class Schedule:
    """every: k, steps between two offers of a node.  delay: d, steps from an offer to its aggregate's application."""

    every: int
    delay: int

    def in_flight(self, load: Load) -> int:
        """Return how many offers of a node may be in flight: one more than d asks for where an exchange carries all."""
        return max(1, -(-self.delay // self.every)) + (load.pieces > 0)

    def deltas_in_flight(self, fragments: int) -> int:
        """Return how many earlier deltas of a fragment are in flight when a node offers the next."""
        return max(0, -(-self.delay // (fragments * self.every)) - 1)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a run does under a schedule.

    efficiency: steps per second, to those without any exchange.  period_steps: between two aggregates of a node.
    model_period_steps: until every fragment has had its turn.  age_steps: of an aggregate when it is applied.
    latency_seconds: from an offer to its decoded aggregate.  busiest: the stage that is busy for most of the time.
    port_up, port_down: the share of `hub_rate` that is used of a broker's port, toward it and away from it.
    node_port: the same of `node_rate`, the busier way.  mb_up, mb_down: 10^6 bytes of a node per step.
    """

    efficiency: float
    period_steps: float
    model_period_steps: float
    age_steps: float
    latency_seconds: float
    busiest: str
    port_up: float
    port_down: float
    node_port: float
    mb_up: float
    mb_down: float


@dataclass(frozen=True, slots=True)
class ExchangeBytes:
    """What one exchange of one node moves, with heads and credits, each way."""

    up: int
    down: int


def crowding(load: Load, schedule: Schedule, seconds: float, age_seconds: float) -> float:
    """Return how many times as long an exchange takes as its stages say, where offers are put off; at least 1.

    seconds: between two exchanges then: the time of the slowest stage, or that of a whole exchange over the number that
    may be in flight.  age_seconds: from an offer to its application (NaN: not known): no exchange takes longer.
    Source: Little 1961, L = lambda W.
    """
    whole = latency_seconds(load)
    expected = max(*stages(load).values(), whole / schedule.in_flight(load))
    longer = seconds / expected if expected else 1.0
    if whole and isfinite(age_seconds):
        longer = min(longer, age_seconds / whole)
    return min(max(1.0, longer), MOST_CROWDING)


def payload_rate(bits_per_second: float, share: float = 1.0) -> float:
    """Return the bytes of payload per second, one way, that a `share` of a port of this rate carries."""
    return PAYLOAD_SHARE * share * bits_per_second / 8


def model_of(parameters: int) -> ModelSpec:
    """Return a model of so many float32 parameters, in leaves of about a million: stands for one that is not known yet.

    How a model is cut in leaves hardly matters to its bytes: a leaf costs a short slab and a short block at its end.
    """
    if parameters < 1:
        raise ConfigError(f"a model has at least one parameter, got {parameters}")
    whole, rest = divmod(parameters, _LEAF_VALUES)
    sizes = [_LEAF_VALUES] * whole + [rest] * bool(rest)
    return tuple(LeafSpec(f"leaf{number}", (size,), "float32") for number, size in enumerate(sizes))


@lru_cache(maxsize=256)
def exchange_bytes(
    model: ModelSpec, codec: str, broadcast_codec: str, fragments: int = 1, shards: int = 1
) -> ExchangeBytes:
    """Return what one exchange moves, the mean over the fragments, rounded up: frames, heads, chunk heads, credits.

    To within 0.1 % of what a node's sockets count, heartbeats and reports aside.  Raises ConfigError for a codec that
    cannot be, or for more fragments than blocks.
    """
    layout = Layout(model, fragments)
    up = down = 0
    for fragment in range(fragments):
        sizes = _frame_sizes(coding_from_spec(codec), layout, fragment)
        head = Publish(2**31, 2**31, 2**31, fragment, codec, sizes, 2**31, 2**16, 0.5)
        up += _transfer_bytes(head, sizes)
        answer = _frame_sizes(coding_from_spec(broadcast_codec), layout, fragment)
        aggregate = Aggregate(
            2**31, 2**31, broadcast_codec, (fragment,), (len(answer),), answer, (("pc-1#0123456789", 2**31),), 1
        )
        down += _transfer_bytes(aggregate, answer)
        # a chunk is granted or acknowledged by its receiver, on the other way
        up += len(answer) * _message_bytes(Credit(2**31, 1))
        down += len(sizes) * _message_bytes(Credit(2**31, 1))
    more_heads = (shards - 1) * fragments * _SHARD_BYTES
    return ExchangeBytes(-(-(up + more_heads) // fragments), -(-(down + more_heads) // fragments))


def _frame_sizes(coding: Coding, layout: Layout, fragment: int) -> tuple[int, ...]:
    plan = plan_payload(coding.of_fragment(layout, fragment), layout.counts(fragment))
    return tuple(frame.size for frame in plan.frames)


def _transfer_bytes(announcement: Message, sizes: tuple[int, ...]) -> int:
    chunk = len(encode_message(Chunk(2**31, 2**8))) + _MESSAGE_PARTS * _ZMQ_FRAME_BYTES
    return _message_bytes(announcement) + sum(sizes) + len(sizes) * chunk


def _message_bytes(message: Message) -> int:
    return len(encode_message(message)) + _ZMQ_FRAME_BYTES


def held_seconds(thread_seconds: float, codec_seconds: float, cores: float, step_cores: float) -> float:
    """Return what training loses to one exchange: what its thread is held, and what the codec takes of its cores.

    cores: of a node's machine.  step_cores: how many of them a step keeps busy: about 1 where a GPU computes. With more
    than `cores` wanted, step and codec slow each other down for as long as the codec runs.
    """
    if cores <= 0 or min(step_cores, thread_seconds, codec_seconds) < 0:
        raise ConfigError(
            f"a machine has cores (not {cores:g}), and a step keeps none or some busy (not {step_cores:g})"
        )
    return thread_seconds + codec_seconds * max(0.0, (step_cores + 1) / cores - 1)


def nicer_slowdown(cores: float, step_cores: float) -> float:
    """Return how many times its CPU time a codec takes beside a step whose threads all weigh more (CODEC_WEIGHT).

    1 where a core is left for it. cores, step_cores: as for `held_seconds`.

    Source: sched(7), weights of nice values.
    """
    if step_cores + 1 <= cores:
        return 1.0
    return max(1.0, (step_cores + CODEC_WEIGHT) / (cores * CODEC_WEIGHT))


def stages(load: Load) -> dict[str, float]:
    """Return how long each stage works on one exchange of all nodes, in seconds.

    The two ways of a port are stages of their own. Where brokers run on nodes, a port carries what its node sends to
    and gets from the other brokers besides.
    """
    nodes, shards = load.nodes, load.shards
    up, down = load.bytes_up, load.bytes_down
    if load.on_nodes:
        into = ((nodes - 1) * up + (shards - 1) * down) / shards
        out = ((shards - 1) * up + (nodes - 1) * down) / shards
    else:
        into, out = nodes * up / shards, nodes * down / shards
    return {
        "the hub's port, up": into / load.hub_rate,
        "the hub's port, down": out / load.hub_rate,
        "a node's port, up": up / load.node_rate,
        "a node's port, down": down / load.node_rate,
        "a node's codec": load.node_seconds,
        "the hub's codec": load.hub_seconds,
    }


def latency_seconds(load: Load) -> float:
    """Return how long it takes from an offer until its aggregate is decoded, if all nodes offer together.

    In several pieces, the aggregate of one goes down while the next comes up: only the slowest stage works on all of
    them before the last piece is through the others.
    """
    seconds = stages(load)
    up = max(seconds["the hub's port, up"], seconds["a node's port, up"])
    down = max(seconds["the hub's port, down"], seconds["a node's port, down"])
    all_stages = (up, down, load.node_seconds, load.hub_seconds)
    slowest, pieces = max(all_stages), max(1, load.pieces)
    return slowest + (sum(all_stages) - slowest) / pieces


def busiest_allowed(nodes: int) -> float:
    """Return the largest share of the time for which a stage may be busy."""
    return BUSIEST_OF_FEW if nodes <= FEW_NODES else BUSIEST


def fit(load: Load) -> Schedule:
    """Return the smallest k whose exchange fits, and the d after which its aggregate is there.

    k: no stage is busy for more than `busiest_allowed` of k steps, and training loses no more than HELD.  d: the sum of
    the stages, USUAL_SLACK times, and one step by which nodes that offer together are apart; as many exchanges are in
    flight as that takes.
    """
    busy = max(stages(load).values()) / busiest_allowed(load.nodes)
    every = max(1, _up(max(busy, load.held_seconds / HELD) / load.step_seconds))
    return Schedule(every, fitting_delay(load))


def fitting_delay(load: Load) -> int:
    """Return the d after which an aggregate is there.

    Where an exchange carries all, one more may be in flight than d asks for, so d is the step boundary that is nearest
    to when an aggregate usually comes; else a d that is too small would put offers off.
    """
    steps, apart = latency_seconds(load) / load.step_seconds, 0
    if load.pieces:
        usual = _up(steps - 0.5)
    else:
        apart = 1 if load.nodes > 1 else 0
        usual = _up(USUAL_SLACK * steps) + apart
    if isfinite(load.longest_seconds):
        usual = min(usual, _up(load.longest_seconds / load.step_seconds) + apart)
    return max(1, usual)


def least_period(load: Load) -> int:
    """Return the smallest k at which no stage is too busy."""
    return max(1, _up(max(stages(load).values()) / busiest_allowed(load.nodes) / load.step_seconds))


def fitting_periods(load: Load) -> tuple[int, ...]:
    """Return the k that are worth a look: the smallest at which no stage is too busy, and multiples of it."""
    least = least_period(load)
    return tuple(dict.fromkeys(max(least, round(least * factor)) for factor in PERIOD_FACTORS))


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to set a run, and what it does. codec, broadcast_codec, outer: specs.

    slowdown: how many times the steps of exact synchronous training to a loss.  time: how many times the seconds that a
    free network would take; the option with the least is chosen.
    """

    codec: str
    broadcast_codec: str
    outer: str
    load: Load
    schedule: Schedule
    prediction: Prediction
    slowdown: float
    time: float

    @property
    def rank(self) -> tuple[float, float]:
        """What the best of several has least of: the time to a loss and, where that is equal, the bytes per step."""
        return round(self.time, TIME_DIGITS), self.prediction.mb_up + self.prediction.mb_down


def judge_option(codec: str, broadcast_codec: str, load: Load, schedule: Schedule) -> Option:
    prediction = predict(load, schedule)
    turn = prediction.model_period_steps
    age = max(float(schedule.delay), prediction.latency_seconds / load.step_seconds + 0.5)
    busy = stages(load)[prediction.busiest] / (prediction.period_steps * load.step_seconds)
    if busy > busiest_allowed(load.nodes) + ROUNDING:
        # offers wait for each other: as many as may be in flight, by Little's law
        age = max(age, schedule.in_flight(load) * prediction.period_steps)
    slow = slowdown(load.nodes, turn, age, codec, broadcast_codec)
    outer = RARE_OUTER if turn >= RARE_TURN_STEPS else OFTEN_OUTER
    return Option(
        codec=codec,
        broadcast_codec=broadcast_codec,
        outer=outer,
        load=load,
        schedule=schedule,
        prediction=prediction,
        slowdown=slow,
        time=slow / prediction.efficiency,
    )


def best_option(loads: Iterable[tuple[str, str, Load]], every: int = 0, delay: int = -1) -> Option:
    """Return the option with the least time to a loss, of equal ones that with the fewest bytes.

    loads: (codec, broadcast_codec, load) of each way to code.  every, delay: as configured; 0, -1: chosen.
    """
    options = (
        judge_option(codec, broadcast_codec, load, Schedule(k, fitting_delay(load) if delay < 0 else delay))
        for codec, broadcast_codec, load in loads
        for k in ((every,) if every else fitting_periods(load))
    )
    return min(options, key=lambda option: option.rank)


def predict(load: Load, schedule: Schedule) -> Prediction:
    """Return what a run does under a schedule, which need not be `fit`'s.

    An exchange that does not fit makes the period longer, not the steps: offers are put off, a whole k each time.
    """
    seconds, latency = stages(load), latency_seconds(load)
    in_flight = schedule.in_flight(load)
    turns = max(1, _up(latency / (schedule.every * load.step_seconds)))
    busiest = max(seconds, key=lambda stage: seconds[stage])
    period = max(schedule.every * max(1.0, turns / in_flight), seconds[busiest] / load.step_seconds)
    period_seconds = period * load.step_seconds
    return Prediction(
        efficiency=period_seconds / (period_seconds + load.held_seconds),
        period_steps=period,
        model_period_steps=period * load.fragments,
        age_steps=max(schedule.delay, _up(latency / load.step_seconds)),
        latency_seconds=latency,
        busiest=busiest,
        port_up=seconds["the hub's port, up"] / period_seconds,
        port_down=seconds["the hub's port, down"] / period_seconds,
        node_port=max(seconds["a node's port, up"], seconds["a node's port, down"]) / period_seconds,
        mb_up=load.bytes_up / period / 1e6,
        mb_down=load.bytes_down / period / 1e6,
    )


def _up(number: float) -> int:
    """Round up, but for what a float's rounding has added."""
    return ceil(number - 1e-9)

"""Say beforehand what a star does whose hosts share one machine's cores: `zmqtrain plan`'s formula, told of the cores.

Rule 1: bytes, stages, k and d are the plan's (planning).  Rule 2: so are its costs, but that these are of one
core in a good hour with nothing beside it: what an exchange costs these cores when all hosts make theirs at once, and
nobody trains, can be measured beside a run, and then takes the place of the package's table; with it, how many deltas
are in an aggregate (a quorum may close a round without the last of them: there are more aggregates then).
Rule 3: the codecs, subtractions and rebases of all hosts are work for the same cores: no period is shorter than that,
and no exchange.
Rule 4: what a training thread does itself takes longer the busier the cores are: in the mean as long as a job of a
queue of several servers is there, 1 + C / (c (1 - b)) times its length, with C the chance that all c cores are taken
(Erlang's formula C) and b the share of them that is busy; codec threads, which are nicer, count by their weight.
Rule 5: a step ends with a thread that wakes: it waits for the turns of those before it, C / (c (1 - b)) times half a
turn, as in a queue of jobs of equal lengths.
Rule 6: what the training thread does in an exchange, it does beside its own rebase, which takes all cores: for as long
as that lasts, c cores are shared by c + 1 threads.
A later step makes the period longer and the cores less busy: both are solved for together.
Source: Kleinrock 1975, Queueing Systems, vol. I, sec. 3.5 (M/M/m), 5.6 (half, for jobs of equal lengths); weights:
Linux, sched(7): a nice value makes 1.25 times the difference.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, factorial
from typing import NamedTuple

from zmqtrain.planning.costs import DISPATCH_SECONDS, ExchangeCosts, exchange_costs
from zmqtrain.planning.plans import Wish, load_of
from zmqtrain.planning.schedule import CODEC_WEIGHT, Load, Prediction, Schedule, busiest_allowed, fit, predict

__all__ = ["Shared", "Work", "fit_on", "load_on", "predict_on", "slowdown", "work_of"]

FULL = 0.999
ROUNDS = 60
"""Of the two that depend on each other, each half a step towards the other: settled long before."""

TURN_SECONDS = 0.004
"""How long a thread runs before another's turn: Linux looks at each tick, and there are 250 a second here."""


class Work(NamedTuple):
    """CPU seconds of one exchange. codec: of a node's codec thread.  sockets: of the rest of a node but its training.
    rebase: of one node, where a processor subtracts and rebases.  hub: of a broker's codec thread, all contributions.
    hub_sockets: of the rest of it.  deltas: in one aggregate; 0: as many as there are nodes."""

    codec: float
    sockets: float
    rebase: float
    hub: float
    hub_sockets: float
    deltas: float = 0.0

    def of_all(self, nodes: int, shards: int = 1, weight: float = 1.0) -> float:
        """Return what one exchange of all hosts costs, but for what the training threads do themselves.

        weight: that the work of codec threads is counted with.
        """
        in_nodes = nodes * (weight * self.codec + self.sockets + self.rebase)
        return in_nodes + shards * (weight * self.hub + self.hub_sockets)


class Shared(NamedTuple):
    """What a star is expected to do. busy: share of the cores."""

    prediction: Prediction
    busy: float


def work_of(wish: Wish, codec: str, fragments: int, in_flight: int = 0) -> Work:
    """Return what an exchange of one fragment costs by the package's table. in_flight: as for `exchange_costs`."""
    broadcast_codec = wish.broadcast_codec or codec
    load = load_of(wish, codec, broadcast_codec, fragments)

    def costs(bytes_up: int, bytes_down: int) -> ExchangeCosts:
        return exchange_costs(
            wish.parameters / fragments, bytes_up, bytes_down, codec, broadcast_codec, wish.nodes, wish.shards,
            step_on="host", codec_on="host", in_flight=in_flight,
        )  # fmt: skip

    with_bytes, without = costs(load.bytes_up, load.bytes_down), costs(0, 0)
    return Work(
        codec=without.node_seconds,
        sockets=with_bytes.node_seconds - without.node_seconds,
        rebase=without.thread_seconds - DISPATCH_SECONDS,
        hub=without.hub_seconds,
        hub_sockets=with_bytes.hub_seconds - without.hub_seconds,
    )


def load_on(wish: Wish, codec: str, fragments: int, cores: int, work: Work) -> Load:
    """Return what the wished run asks of links and of `cores` shared by all. Its held_seconds are what a training
    thread does itself, as a node with a card has them; its node_seconds are with all that those cores do meanwhile.

    work: of one exchange of one fragment, measured or of the package's table.
    """
    load = load_of(replace(wish, share=1.0), codec, wish.broadcast_codec or codec, fragments)
    hub = work.hub + work.hub_sockets
    node = max(work.codec + work.sockets, work.of_all(wish.nodes, wish.shards) / cores - hub)
    return replace(load, node_seconds=node, hub_seconds=hub, held_seconds=DISPATCH_SECONDS)


def fit_on(load: Load, work: Work, cores: int) -> Schedule:
    """Return the k and d that a plan takes, if the cores, too, are to be busy for no more than it lets any stage be."""
    fitting, total = fit(load), work.of_all(load.nodes, load.shards)
    return replace(
        fitting, every=max(fitting.every, ceil(total / cores / busiest_allowed(load.nodes) / load.step_seconds))
    )


def slowdown(busy: float, cores: int) -> float:
    """Return how many times its length a job is there, of a machine whose cores are busy for this share (below 1)."""
    offered = busy * cores
    waiting = offered**cores / factorial(cores) / (1 - busy)
    all_taken = waiting / (sum(offered**n / factorial(n) for n in range(cores)) + waiting)
    return 1 + all_taken / (cores * (1 - busy))


def predict_on(load: Load, work: Work, schedule: Schedule, cores: int, step_cpu_seconds: float) -> Shared:
    """Return what a star does under a schedule. load: of `load_on`, with the same work.

    step_cpu_seconds: what a step itself asks of the cores, besides sleeping: an efficiency is over a step that only
    sleeps.
    """
    plain = predict(replace(load, held_seconds=0.0), schedule)
    total = work.of_all(load.nodes, load.shards)
    apart = min(1.0, (work.deltas or load.nodes) / load.nodes)
    period = max(plain.period_steps * apart, total / cores / load.step_seconds)
    in_steps, held = period * step_cpu_seconds, load.held_seconds
    beside_rebase = min(held, work.rebase / cores) / cores
    own, waking = in_steps + held, period * TURN_SECONDS / 2
    heard = work.of_all(load.nodes, load.shards, CODEC_WEIGHT) + load.nodes * own
    asleep, late = period * load.step_seconds, held
    for _ in range(ROUNDS):
        more = slowdown(min(FULL, heard / (asleep + late) / cores), cores) - 1
        late = (late + own + beside_rebase + (own + waking) * more) / 2
    rarer = plain.period_steps / period
    return Shared(
        replace(
            plain,
            efficiency=asleep / (asleep + late),
            period_steps=period,
            model_period_steps=period * load.fragments,
            port_up=rarer * plain.port_up,
            port_down=rarer * plain.port_down,
            node_port=rarer * plain.node_port,
            mb_up=rarer * plain.mb_up,
            mb_down=rarer * plain.mb_down,
        ),
        busy=min(1.0, (total + load.nodes * own) / (asleep + late) / cores),
    )

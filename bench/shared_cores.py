"""Say beforehand what a star does whose hosts share one machine's cores: `zmqtrain plan`'s formula, told of the cores.

Rule 1: bytes, stages, k and d are the plan's (runtime/planning).  Rule 2: so are its costs, but that these are of one
core in a good hour with nothing beside it: what an exchange costs these cores when all hosts make theirs at once, and
nobody trains, can be measured beside a run, and then takes the place of the package's table.
Rule 3: the codecs, subtractions and rebases of all hosts are work for the same cores: no period is shorter than that.
Rule 4: what a training thread does itself takes longer the busier the cores are: in the mean as long as a job of a
queue of several servers is there, 1 + C / (c (1 - b)) times its length, with C the chance that all c cores are taken
(Erlang's formula C) and b the share of them that is busy.  Rule 5: a step ends with a thread that wakes: it waits for
the slices of those before it, C / (c (1 - b)) times half a slice, as in a queue of jobs of equal lengths.
A later step makes the period longer and the cores less busy: both are solved for together.
Source: Kleinrock 1975, Queueing Systems, vol. I, sec. 3.5 (M/M/m), 5.6 (half, for jobs of equal lengths).
"""

from __future__ import annotations

from dataclasses import replace
from math import factorial
from typing import NamedTuple

from zmqtrain.runtime.planning.costs import DISPATCH_SECONDS, exchange_costs
from zmqtrain.runtime.planning.planning import Wish, load_of
from zmqtrain.runtime.planning.schedule import Load, Prediction, Schedule, predict

__all__ = ["Shared", "Work", "load_on", "predict_on", "slowdown", "work_of"]

ROUNDS = 60
"""Of the two that depend on each other, each half a step towards the other: settled long before."""

SLICE_SECONDS = 0.0014
"""How long Linux lets a thread run before another's turn, on two cores: 0.7 ms times 1 + log2 of the cores."""


class Work(NamedTuple):
    """CPU seconds of one exchange. node: of one node, its codec and sockets.  rebase: of one node, where a processor
    subtracts and rebases.  hub: of a master, all contributions."""

    node: float
    rebase: float
    hub: float

    def of_all(self, nodes: int, masters: int = 1) -> float:
        """Return what one exchange of all hosts costs, but for what the training threads do themselves."""
        return nodes * (self.node + self.rebase) + masters * self.hub


class Shared(NamedTuple):
    """What a star is expected to do. busy: share of the cores."""

    prediction: Prediction
    busy: float


def work_of(wish: Wish, codec: str, fragments: int, on_the_way: int = 0) -> Work:
    """Return what an exchange of one fragment costs by the package's table. on_the_way: as for `exchange_costs`."""
    broadcast_codec = wish.broadcast_codec or codec
    load = load_of(wish, codec, broadcast_codec, fragments)
    costs = exchange_costs(
        wish.parameters / fragments, load.bytes_up, load.bytes_down, codec, broadcast_codec, wish.nodes, wish.masters,
        step_on="host", codec_on="host", on_the_way=on_the_way,
    )  # fmt: skip
    return Work(costs.node_seconds, costs.thread_seconds - DISPATCH_SECONDS, costs.hub_seconds)


def load_on(wish: Wish, codec: str, fragments: int, cores: int, work: Work) -> Load:
    """Return what the wished run asks of links and of `cores` shared by all. Its held_seconds are what a training
    thread does itself, as a node with a card has them.

    work: of one exchange of one fragment, measured or of the package's table.
    """
    load = load_of(replace(wish, share=1.0), codec, wish.broadcast_codec or codec, fragments)
    node = max(work.node, work.of_all(wish.nodes, wish.masters) / cores)
    return replace(load, node_seconds=node, hub_seconds=work.hub, held_seconds=DISPATCH_SECONDS)


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
    asleep = plain.period_steps * load.step_seconds
    in_steps = plain.period_steps * step_cpu_seconds
    waking = plain.period_steps * SLICE_SECONDS / 2
    own = in_steps + load.held_seconds
    in_all = work.of_all(load.nodes, load.masters) + load.nodes * own
    late = load.held_seconds
    for _ in range(ROUNDS):
        busy = min(0.999, in_all / (asleep + late) / cores)
        more = slowdown(busy, cores) - 1
        late = (late + own + (own + waking) * more) / 2
    return Shared(replace(plain, efficiency=asleep / (asleep + late)), busy)

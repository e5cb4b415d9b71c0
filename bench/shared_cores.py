"""Say beforehand what a star does whose hosts share one machine's cores: `zmqtrain plan`'s formula, told of the cores.

Rule 1: bytes, stages, k and d are the plan's (runtime/planning); its costs are of a core that does nothing else.
Rule 2: the codecs, subtractions and rebases of all hosts are work for the same cores: no period is shorter than that.
Rule 3: what a training thread does itself takes longer the busier the cores are: in the mean as long as a job of a
queue of several servers is there, 1 + C / (c (1 - b)) times its length, with C the chance that all c cores are taken
(Erlang's formula C) and b the share of them that is busy. A later step makes the period longer and the cores less busy:
both are solved for together.
Rule 4: the package's costs are of a good hour of one machine. How many times as long the codec takes here and now, on
all cores at once (they share the memory's bandwidth, too), is measured beside a run; every cost is taken to be that
many times the package's.
Source: Kleinrock 1975, Queueing Systems, vol. I, sec. 3.5 (M/M/m).
"""

from __future__ import annotations

import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from math import factorial
from typing import NamedTuple

from zmqtrain.runtime.planning.costs import costs_of, exchange_costs
from zmqtrain.runtime.planning.planning import Wish, load_of
from zmqtrain.runtime.planning.schedule import Load, Prediction, Schedule, predict

from costs import measure

__all__ = ["Shared", "load_on", "measure_pace", "predict_on", "slowdown"]

ROUNDS = 60
"""Of the two that depend on each other, each half a step towards the other: settled long before."""

PACE_VALUES, PACE_ROUNDS = 10_000_000, 4
"""What the pace of a machine is measured with: far more than its caches hold."""


class Shared(NamedTuple):
    """What a star is expected to do. busy: share of the cores."""

    prediction: Prediction
    busy: float


def measure_pace(codec: str, cores: int) -> float:
    """Return how many times what the package's table says the codec's work takes here and now, on so many cores at once
    (CPU time)."""
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        measured = [pool.submit(measure, codec, PACE_VALUES, PACE_ROUNDS, seed) for seed in range(cores)]
        took = statistics.fmean(sum(astuple(one.result())) for one in measured)
    return took / sum(astuple(costs_of(codec)))


def load_on(wish: Wish, codec: str, fragments: int, cores: int, pace: float) -> tuple[Load, float]:
    """Return what the wished run asks of links and of `cores` shared by all, and the CPU seconds of one exchange of all
    hosts. Its held_seconds are what a training thread does itself, as a node with a card has them.

    pace: as `measure_pace` returns it; 1: of the package's table.
    """
    here = replace(wish, step_on="host", codec_on="host", share=1.0, cores=float(cores))
    load = load_of(here, codec, wish.broadcast_codec or codec, fragments)
    on_host, on_card = (
        exchange_costs(
            wish.parameters / fragments, load.bytes_up, load.bytes_down, codec, wish.broadcast_codec or codec,
            wish.nodes, wish.masters, step_on=place, codec_on="host",
        )
        for place in ("host", "device")
    )  # fmt: skip
    node, hub, held = pace * load.node_seconds, pace * load.hub_seconds, pace * on_card.thread_seconds
    work = wish.nodes * (node + pace * on_host.thread_seconds) + wish.masters * hub
    return replace(load, node_seconds=max(node, work / cores), hub_seconds=hub, held_seconds=held), work


def slowdown(busy: float, cores: int) -> float:
    """Return how many times its length a job is there, of a machine whose cores are busy for this share (below 1)."""
    offered = busy * cores
    waiting = offered**cores / factorial(cores) / (1 - busy)
    all_taken = waiting / (sum(offered**n / factorial(n) for n in range(cores)) + waiting)
    return 1 + all_taken / (cores * (1 - busy))


def predict_on(load: Load, work_seconds: float, schedule: Schedule, cores: int, step_cpu_seconds: float) -> Shared:
    """Return what a star does under a schedule. load, work_seconds: of `load_on`.

    step_cpu_seconds: what a step itself asks of the cores, besides sleeping.
    """
    plain = predict(replace(load, held_seconds=0.0), schedule)
    asleep = plain.period_steps * load.step_seconds
    in_steps = plain.period_steps * step_cpu_seconds
    late = load.held_seconds
    for _ in range(ROUNDS):
        busy = min(0.999, (work_seconds + load.nodes * in_steps) / (asleep + late) / cores)
        slower = slowdown(busy, cores)
        late = (late + load.held_seconds * slower + in_steps * (slower - 1)) / 2
    return Shared(replace(plain, efficiency=asleep / (asleep + late)), busy)

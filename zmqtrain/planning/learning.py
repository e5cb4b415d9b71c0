"""Predict what a codec, k and late aggregates cost the time to a loss, by coefficients fitted to runs (pure).

    time to a loss = time without a network * slowdown / efficiency

Rule 1: `slowdown` counts steps: how many times the steps of exact synchronous training a run needs to a loss.  The
efficiency is the schedule's: how much of its speed a PC keeps.
Rule 2: every coefficient stands here, with the runs that it is fitted to.

The runs: the text program (286,728 values, 4 nodes x 4 x 64 bytes a step, AdamW at a rate of .004), one seed (0), steps
to a held-out loss of 2.05 on a link that costs nothing; no other model was measured. To make such a run again:
`bench/time_to_loss.py --simulated --link 1000gbit --seeds 1 --rate 4e-3 --only late --row
"name=late|codec=float32|every=1|delay=4|fragments=1|outer=sgd:rate=1"`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import log

from zmqtrain.codecs.base import coding_from_spec

CODECS = (
    "int8",
    "int4",
    "ternary",
    *(
        f"topk:density={density:g}+sign"
        for density in (0.1, 0.07, 0.05, 0.035, 0.025, 0.018, 0.0125, 0.009, 0.006, 0.004, 0.0025, 0.0015, 0.001)
    ),
)
"""The codecs that auto chooses from, the densest first. The same one is used up and down."""

FREE_DENSITY, FREE_NODES, FREE_POWER = 0.05, 4, 1.6
SPARSE = 0.12
"""top-k + sign: SPARSE * log(free / density)^2 more steps, where free is the density that costs nothing. It grows with
the nodes, because an aggregate carries what all have sent: FREE_DENSITY * (nodes / FREE_NODES)^FREE_POWER.  With 4
nodes 1.01, 1.10 and 1.31 times the steps at .05, .02 and .01; with 8, 1.20 and 1.32 times at .05 and .025."""
CODED = 0.01
"""What any lossy codec is taken to cost at least; ternary and top-5 % + sign were 0 to 2 %."""
LATE, LATE_FREE, LATE_POWER = 0.14, 2.0, 0.9
"""Progress of others that is `age` steps old when it is applied: LATE * (age - LATE_FREE)^LATE_POWER more steps.  With
k steps between exchanges it is (k - 1) / 2 steps older than its offer.  float32, seed 0: 1.00 times the steps at (k, d)
= (1, 0), (1, 2), (2, 0) and (4, 0), 1.10 at (2, 2), 1.27 at (1, 4), 1.50 at (4, 4) and (8, 4): age counts, k by itself
does not."""
FRESH = 0.004
"""What each step of age costs below LATE_FREE, too: less than seeds differ by, but of two the fresher is taken."""
SPREAD = 0.05
"""How far a prediction is trusted, as a share of it: other models, rates and data were not measured."""
NODE_BATCHES = 26.0
"""The critical batch size in batches of one node that a speed-up is said for, where it is not told: four nodes were 3.6
times as fast as one to the last loss of that task when they had a free network."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What a schedule does to learning. turn_steps: steps until the whole model has been exchanged once.

    age_steps: from an offer to its application.  codec, broadcast_codec: specs.
    """

    nodes: int
    turn_steps: float
    age_steps: float
    codec: str
    broadcast_codec: str


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


def _coded(spec: str, nodes: int) -> float:
    density, free = density_of(spec), min(FREE_DENSITY * (nodes / FREE_NODES) ** FREE_POWER, 1.0)
    if density >= free:
        return 0.0 if coding_from_spec(spec).default.name in ("float32", "bf16") else CODED * (1.5 - min(density, 1.0))
    return CODED * (1.5 - density) + SPARSE * log(free / density) ** 2


def slowdown(learning: Learning) -> float:
    """Return how many times the steps of exact synchronous training a run needs to a loss, at least 1."""
    age = learning.age_steps + (learning.turn_steps - 1) / 2
    late = FRESH * age + LATE * max(0.0, age - LATE_FREE) ** LATE_POWER
    coded = max(_coded(spec, learning.nodes) for spec in (learning.codec, learning.broadcast_codec))
    return float((1 + late) * (1 + coded))


def ideal_speedup(nodes: int, node_batches: float = NODE_BATCHES) -> float:
    """Return how many times as fast as one PC `nodes` PCs reach a loss that exchange gradients exactly and for nothing.

    node_batches: the critical batch size, in batches of one node: where N times the batch halves what a sample teaches.
    Source: McCandlish et al. 2018, An Empirical Model of Large-Batch Training, eq. 2.11.
    """
    return nodes * (1 + node_batches) / (nodes + node_batches)

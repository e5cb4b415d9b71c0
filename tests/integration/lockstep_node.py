"""One process that trains the regression of tests/train/lockstep.py in a run, as `zmqtrain-node --exchange` would.

python lockstep_node.py HUB NAME EXCHANGE OUTPUT: writes the steps, samples and parameters that it ends with. Before
step HELD_BEFORE_STEP it waits for a line on its standard input.
"""

from __future__ import annotations

import itertools
import logging
import sys
from functools import partial

import jax
import numpy as np

from tests.train.lockstep import REGRESSION
from zmqtrain.runtime.lockstep.lockstep import open_gradients, read_exchange, unit_wait_seconds
from zmqtrain.runtime.node.connect import connect
from zmqtrain.train.gradients import GradientLoop

HELD_BEFORE_STEP = 8


def train(hub, name, exchange, **options):
    """Train to the end of the run; return the result."""
    choice = read_exchange(exchange)
    assert choice is not None
    with connect(hub, name, exchange=choice.name, timeout_seconds=60.0) as node:
        batches = node.batches_as_they_come(REGRESSION, unit_wait_seconds(node.settings))
        gradients = partial(open_gradients, choice, node, None)
        return GradientLoop(REGRESSION, node, gradients, **{"bucket_bytes": 100} | options).run(batches)


def hold():
    """Return what waits for a line on the standard input when it is called for the HELD_BEFORE_STEP-th time."""
    calls = itertools.count(1)
    return lambda: sys.stdin.readline() if next(calls) == HELD_BEFORE_STEP else None


if __name__ == "__main__":
    hub, name, exchange, output = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    result = train(hub, name, exchange, before_step=hold())
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result.params)]
    np.savez(output, *leaves, steps=result.statistics.steps, samples=result.samples)

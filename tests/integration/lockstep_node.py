"""One process that trains the regression of tests/train/lockstep.py in a run, as `zmqtrain-node --exchange` would.

python lockstep_node.py HUB NAME EXCHANGE OUTPUT: writes the steps, samples and parameters that it ends with.
"""

from __future__ import annotations

import logging
import sys
import time
from functools import partial

import jax
import numpy as np

from tests.train.lockstep import REGRESSION
from zmqtrain.runtime.lockstep import open_gradients, read_exchange, unit_wait_seconds
from zmqtrain.runtime.node import connect
from zmqtrain.train.gradients import GradientLoop

STEP_SECONDS = 0.02


def train(hub, name, exchange, *, step_seconds=0.0, **options):
    """Train to the end of the run; return the result."""
    choice = read_exchange(exchange)
    assert choice is not None
    with connect(hub, name, exchange=choice.name) as node:
        batches = node.batches_as_they_come(REGRESSION, unit_wait_seconds(node.settings))
        gradients = partial(open_gradients, choice, node, None)
        options = {"bucket_bytes": 100, "before_step": lambda: time.sleep(step_seconds)} | options
        return GradientLoop(REGRESSION, node, gradients, **options).run(batches)


if __name__ == "__main__":
    hub, name, exchange, output = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    result = train(hub, name, exchange, step_seconds=STEP_SECONDS)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result.params)]
    np.savez(output, *leaves, steps=result.statistics.steps, samples=result.samples)

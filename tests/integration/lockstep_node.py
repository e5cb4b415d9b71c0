"""One process that trains the regression of tests/train/processes.py in a run, as `zmqtrain-node --exchange` would.

python lockstep_node.py HUB NAME EXCHANGE OUTPUT [held]: writes the steps, samples and parameters that it ends with. One
that is held stands still before step HELD_BEFORE_STEP, until whoever started it is gone, and takes no turn without data
before it: so the others, who wait for it in each of theirs, cannot come to the end without it.
"""

from __future__ import annotations

import itertools
import logging
import sys

import jax
import numpy as np

from tests.train.processes import REGRESSION
from zmqtrain.node.connect import connect
from zmqtrain.synchronous.exchanges import GradientAccess, read_exchange, unit_wait_seconds
from zmqtrain.train.gradients import GradientLoop, GradientOptions
from zmqtrain.train.step import LoopHooks

HELD_BEFORE_STEP = 8
DATA_SECONDS = 60.0


def train(hub, name, exchange, data_seconds=None, **options):
    """Train to the end of the run; return the result. data_seconds: how long it waits for data before a turn without.

    None: as long as a node waits.
    """
    choice = read_exchange(exchange)
    assert choice is not None
    with connect(hub, name, exchange=choice.name, timeout_seconds=60.0) as node:
        batches = node.batches_as_they_come(REGRESSION, data_seconds or unit_wait_seconds(node.settings))
        gradients = GradientAccess(choice, node)
        return GradientLoop(REGRESSION, node, gradients, GradientOptions(100), LoopHooks(**options)).run(batches)


def hold():
    """Return what reads the standard input to its end when it is called for the HELD_BEFORE_STEP-th time."""
    calls = itertools.count(1)
    return lambda: sys.stdin.read() if next(calls) == HELD_BEFORE_STEP else None


if __name__ == "__main__":
    hub, name, exchange, output, *held = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    options = {"before_step": hold(), "data_seconds": DATA_SECONDS} if held else {}
    result = train(hub, name, exchange, **options)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result.params)]
    np.savez(output, *leaves, steps=result.statistics.steps, samples=result.samples)

"""A node that trains the tiny model, and scores the shared one, until it is killed: `python page_node.py HUB NAME`."""

from __future__ import annotations

import itertools
import sys

import numpy as np
from runs import batches, loss, parameters, sgd

from zmqtrain.cli.node import paced
from zmqtrain.node.connect import connect
from zmqtrain.train.sync import DelayedSync

STEP_SECONDS, SCORE_STEPS = 0.02, 25
HELD_OUT = np.random.default_rng(99).normal(size=(64, 40)).astype(np.float32)


def train(address: str, name: str) -> None:
    """Train for ever. A step takes STEP_SECONDS at least; every SCORE_STEPS steps the evaluator scores."""
    with connect(address, name, timeout_seconds=30.0) as node:
        sync = DelayedSync(node, parameters())
        params = sync.params
        for number, batch in enumerate(
            paced(itertools.chain.from_iterable(map(batches, itertools.count())), STEP_SECONDS)
        ):
            params, value = sgd(params, batch)
            params = sync.step(params, score=value, samples=16)
            if number % SCORE_STEPS == 0 and node.state().is_evaluator:
                node.report_scores({"loss": float(loss(params, HELD_OUT))}, sync.version)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2])

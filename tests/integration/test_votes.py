"""Three of five nodes send deltas of 2,600 times the usual norm, with one key and with two: the others' run stands."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest
from runs import Trainer, batches, broker, loss, parameters

from tests.fixed import fixed_run
from zmqtrain.transport.key_folder import KeyFolder

SETTINGS = fixed_run(
    every=2, delay=1, release="immediately", codec="ternary", start_nodes=5, initial="founder", lost_seconds=60.0
)
TIMES, OFFERS = 2600.0, 16


class Attack:
    """What a bad node does once all attack: each step moves one way, so many times as far as its first ones."""

    def __init__(self, attacks, over):
        self.attacks, self.over, self.usual = attacks, over, 0.0
        random = np.random.default_rng(0)
        self.way = {name: random.normal(size=leaf.shape).astype(np.float32) for name, leaf in parameters().items()}

    def move(self, before, after):
        if self.over.is_set():
            raise EOFError("the attack is over")
        if not self.attacks.is_set():
            self.usual = max(self.usual, norm(jax.tree.map(np.subtract, after, before)))
            return after
        factor = np.float32(TIMES * self.usual / norm(self.way))
        return {name: leaf + factor * self.way[name] for name, leaf in before.items()}


def norm(tree):
    return float(np.sqrt(sum(np.square(leaf).sum() for leaf in tree.values())))


@pytest.mark.parametrize("keys", [("lab", "lab", "lab"), ("lab", "lab", "other")])
def test_deltas_of_2600_times_the_usual_norm_of_three_of_five_nodes_ruin_nobody(tmp_path, keys):
    files = {path.stem: path for path in KeyFolder(tmp_path).new(["good-0", "good-1", *sorted(set(keys))])}
    attacks, over = threading.Event(), threading.Event()
    with broker(SETTINGS, keys=KeyFolder(tmp_path)) as hub:
        good = [Trainer(hub.address, name, keys=files[name]) for name in ("good-0", "good-1")]
        bad = [
            Trainer(hub.address, f"bad-{number}", keys=files[key], move=Attack(attacks, over).move)
            for number, key in enumerate(keys)
        ]

        def each(trainers, done):
            good[0].wait_until(lambda: all(one.node is not None and done(one.node.statistics()) for one in trainers))

        each(good + bad, lambda node: node.publishes - node.publishes_refused >= OFFERS)
        begun = [len(one.losses) for one in good]
        attacks.set()
        each(bad, lambda node: node.publishes_refused >= 3)
        enough = [len(one.losses) + 100 for one in good]
        for one, steps in zip(good, enough, strict=True):
            one.wait_until(lambda one=one, steps=steps: len(one.losses) >= steps)
        over.set()
        for one in bad:
            one.thread.join(60.0)
            assert isinstance(one.failure, EOFError)
        for one in good:
            one.stop.set()
        ended = [one.join() for one in good]
    for one, at, params in zip(good, begun, ended, strict=True):
        assert max(one.losses[at:]) < one.losses[0], "its parameters were ruined for a while"
        assert loss(params, next(batches(10**6))) < one.losses[0] / 10

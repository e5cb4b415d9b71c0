"""Two nodes that train on the same batches are told from two that do not, by their first step."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tests.train.scripted_exchange import ScriptedExchange, add, tree
from zmqtrain.core.types import Part
from zmqtrain.train import first_step as room
from zmqtrain.train.first_step import FirstStep
from zmqtrain.train.sync import DelayedSync


class Described(ScriptedExchange):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.devices, self.digests = [], []

    def describe(self, *, device=None, first_step=None):
        self.devices += [] if device is None else [device]
        self.digests += [] if first_step is None else [first_step]


def first(amount=1.0, score=0.5, begin=0.0, take_start=False, anchor=None):
    """Return what a node says of its first step, which adds `amount` to parameters of `begin`."""
    exchange = Described(anchor)
    sync = DelayedSync(exchange, tree(begin))
    params = sync.start if take_start else tree(begin)
    params = sync.step(add(params, amount), score=score)
    sync.step(add(params, amount), score=score)
    (digest,) = exchange.digests
    return digest


def test_the_same_step_from_the_same_parameters_has_one_digest_and_any_other_another():
    same = first()
    assert len(same) == 32 and first(score=jnp.float32(0.5)) == same
    others = {first(amount=1.0001), first(score=0.25), first(begin=1.0), first(score=None)}
    assert len(others) == 4 and same not in others


def test_a_step_that_moved_nothing_says_nothing():
    assert first(amount=0.0) == ""
    lent = [Part(0, 0, np.full((2,), 3.0, np.float32)), Part(1, 0, np.full((2, 3), 3.0, np.float32))]
    assert first(amount=0.0, take_start=True, anchor=lent) == ""
    assert first(amount=1.0, take_start=True, anchor=lent) != ""


def test_only_the_smallest_leaves_are_read_and_one_at_least(monkeypatch):
    monkeypatch.setattr(room, "MOST_VALUES", 4)
    leaves = [jnp.zeros(100), jnp.zeros(3), jnp.zeros(2)]
    step = FirstStep(leaves)
    assert step.digest([leaves[0] + 1, leaves[1], leaves[2]], 0.5) == ""
    assert step.digest([leaves[0], leaves[1] + 1, leaves[2]], 0.5) != ""
    assert FirstStep(leaves[:1]).digest([leaves[0] + 1], 0.5) != ""


def test_a_node_says_once_on_what_it_trains():
    exchange = Described()
    DelayedSync(exchange, tree())
    (device,) = exchange.devices
    assert device.startswith("cpu")

"""What `--induce` says reaches the steps of the node and its deltas: no time passes here, and no network is there."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train.scripted_exchange import ScriptedExchange
from zmqtrain.cli.node import Interruption, main
from zmqtrain.train.induce import induced_from_spec

SPEC, SEED, STEPS = "cedar,message=0.05", 3, 6


class Mean:
    """One value, which is to be the mean of the data."""

    name, sample_word, samples_per_batch, units_per_epoch = "mean", "numbers", 4, None

    def init(self, seed):
        return {"mean": jnp.zeros(())}

    def loss(self, params, batch):
        return jnp.mean(jnp.square(params["mean"] - batch["x"]))

    def optimizer(self):
        return optax.sgd(0.1)

    def batches(self, unit):
        return iter([{"x": np.ones(4, np.float32)}] * STEPS)

    def evaluate(self, params):
        return {}


class Node(ScriptedExchange):
    """What the command has of a node: an exchange whose hub takes everything at once."""

    address, roster, message_delay, alone = "tcp://127.0.0.1:5555", None, None, None
    run, ended_with_run = "run-1", True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def close(self):
        pass

    def batches(self, program):
        return program.batches(0)


@pytest.fixture
def node(monkeypatch):
    made = Node(seed=SEED)
    made.lands_at_once = True
    monkeypatch.setattr(Interruption, "install", lambda self: None)
    monkeypatch.setattr("zmqtrain.cli.node.connect", lambda *_, **__: made)
    monkeypatch.setattr("zmqtrain.cli.node.load_run_program", lambda *_: Mean())
    return made


@pytest.fixture
def slept(monkeypatch):
    asked, now = [], lambda: 100.0
    monkeypatch.setattr("zmqtrain.cli.node.time", SimpleNamespace(time=now, monotonic=now, sleep=asked.append))
    return asked


def drawn(draw, count):
    return [draw() for _ in range(count)]


def test_each_step_and_each_delta_is_late_by_a_draw_for_this_node_and_this_run(node, slept):
    assert main([node.address, "--induce", SPEC]) == 0
    expected = induced_from_spec(SPEC, SEED)
    assert slept == drawn(expected.compute_delays(node.name), STEPS) and max(slept) > 0
    assert drawn(node.message_delay, 3) == drawn(expected.message_delays(node.name), 3)


def test_who_is_not_told_to_be_slow_is_not(node, slept):
    assert main([node.address]) == 0
    assert not any(slept) and node.message_delay is None

"""A program of 24 parameters, and scenarios of it: real training, in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.fixed import fixed_run
from zmqtrain.sim import Scenario, SimNode


@dataclass(eq=False)
class Line:
    """Linear regression on 22 features: two leaves, 24 values, batches of 8 noisy samples."""

    rate: float = 0.05
    batches_per_unit: int = 4
    seed: int = 0
    width: int = 22

    name = "line"
    sample_word = "points"
    units_per_epoch = None
    samples_per_batch = 8

    def __post_init__(self):
        self.true = np.random.default_rng(7).normal(size=(self.width,)).astype(np.float32)

    def init(self, seed):
        return {
            "bias": jnp.zeros((2,)),
            "weights": jnp.asarray(np.random.default_rng(seed).normal(size=self.width), jnp.float32),
        }

    def loss(self, params, batch):
        wrong = batch["x"] @ params["weights"] + jnp.sum(params["bias"]) - batch["label"]
        return jnp.mean(jnp.square(wrong))

    def optimizer(self):
        return optax.sgd(self.rate)

    def batches(self, unit):
        random = np.random.default_rng((self.seed, unit))
        for _ in range(self.batches_per_unit):
            x = (random.normal(size=(8, self.width)) * (22 / self.width) ** 0.5).astype(np.float32)
            yield {"x": x, "label": (x @ self.true + 0.1 * random.normal(size=8)).astype(np.float32)}

    def evaluate(self, params):
        wrong = np.asarray(params["weights"]) - self.true
        return {"loss": float(np.sum(wrong**2) + np.sum(np.asarray(params["bias"])) ** 2)}


@pytest.fixture(scope="session")
def program():
    """One object for all tests: it is compiled once."""
    return Line()


@pytest.fixture
def scenario():
    """A function that makes a scenario: settings by name, nodes as `SimNode`s or a number of equal ones."""

    def make(nodes=3, *, of_scenario=(), **settings):
        if isinstance(nodes, int):
            nodes = [SimNode() for _ in range(nodes)]
        plain = {"every": 4, "delay": 2, "initial": "founder", "local_updates": "fixed"}
        whole = {"units": 6 * len(nodes), "start_nodes": len(nodes), **plain, **settings}
        return Scenario(settings=fixed_run(**whole), nodes=tuple(nodes), **dict(of_scenario))

    return make

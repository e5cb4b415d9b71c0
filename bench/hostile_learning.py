"""Measure what nodes whose training diverges cost the others: rates of 3, 30 and 3,000 where all others have .1.

    python bench/hostile_learning.py                  (or as the last rows of bench/hostile.py)

Rule 1: virtual time, and real training code, hub and codecs: the handwritten digits of scikit-learn, a network of one
hidden layer, plain SGD, the settings that a run has if nobody sets any.  Rule 2: each row is compared with the run of
its healthy nodes alone: their held-out loss may be at most BAR times that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zmqtrain.errors import NonFiniteDelta
from zmqtrain.programs.datasets import load_digits
from zmqtrain.settings import RunSettings
from zmqtrain.sim.run import SimResult, simulate
from zmqtrain.sim.scenario import Scenario, SimNode
from zmqtrain.train.sync import DelayedSync

__all__ = ["BAR", "Case", "Digits", "run_of"]

BAR = 1.10
RATE = 0.1
BATCH = 32
OUTER = "nesterov:rate=0.8,momentum=0.5"


class Digits:
    """A network of one hidden layer on the digits, by plain SGD: a `Program`."""

    name, sample_word, samples_per_batch, units_per_epoch = "digits", "images", BATCH, None

    def __init__(self, hidden: int = 32, seed: int = 0) -> None:
        self.hidden, self.seed = hidden, seed
        images = load_digits()
        self._x, self._y = _flat(images.training_images), np.asarray(images.training_labels)
        self._held = _flat(images.held_out_images), np.asarray(images.held_out_labels)
        self._scores = jax.jit(self._score_all)

    def init(self, seed: int) -> Any:
        """See Program."""
        random = np.random.default_rng(seed)
        shapes = {"w1": (64, self.hidden), "w2": (self.hidden, 10)}
        drawn = {name: random.standard_normal(shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}
        zeros = {"b1": np.zeros(self.hidden), "b2": np.zeros(10)}
        return {name: jnp.asarray(value, jnp.float32) for name, value in {**drawn, **zeros}.items()}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """See Program."""
        images, labels = batch
        hidden = jnp.tanh(images @ params["w1"] + params["b1"])
        logits = hidden @ params["w2"] + params["b2"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def optimizer(self) -> optax.GradientTransformation:
        """See Program."""
        return optax.sgd(RATE)

    def batches(self, unit: int) -> Iterator[Any]:
        """See Program: drawn without end."""
        random = np.random.default_rng((self.seed, unit))
        for _ in range(4):
            chosen = random.integers(len(self._y), size=BATCH)
            yield self._x[chosen], self._y[chosen]

    def evaluate(self, params: Any) -> dict[str, float]:
        """See Program."""
        loss, right = self._scores(params)
        return {"loss": float(loss), "accuracy": 100 * float(right)}

    def _score_all(self, params: Any) -> tuple[jax.Array, jax.Array]:
        images, labels = self._held
        hidden = jnp.tanh(images @ params["w1"] + params["b1"])
        right = jnp.argmax(hidden @ params["w2"] + params["b2"], axis=1) == labels
        return self.loss(params, (images, labels)), right.mean()


def _flat(images: Any) -> np.ndarray:
    return (np.asarray(images, np.float32) / 255).reshape(len(images), -1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. rate: of the bad nodes, where all others have RATE; bad, nodes: how many.

    begins: "start": the bad ones have that rate from their first step; "middle": from half of their steps on; "joins":
    they come when the others have made half of theirs, with that rate.  steps: of each healthy node.
    """

    rate: float
    bad: int = 1
    nodes: int = 3
    begins: str = "start"
    steps: int = 600
    seed: int = 0


def _sync_of(case: Case) -> Any:
    """Return what makes the DelayedSync of a node: a bad one makes longer steps."""
    factor = case.rate / RATE

    class Faster(DelayedSync):
        def __init__(self, exchange: Any, params: Any, **named: Any) -> None:
            super().__init__(exchange, params, **named)
            self._last: Any = None
            self._ended = False

        def step(self, params: Any, *arguments: Any, **named: Any) -> Any:
            is_bad = self.exchange.name.startswith("bad")
            late = case.begins == "middle" and self.steps < case.steps // 2
            if self._ended:
                return params
            if is_bad and not late and self._last is not None:
                params = jax.tree.map(lambda new, old: old + factor * (new - old), params, self._last)
            try:
                params = super().step(params, *arguments, **named)
            except NonFiniteDelta:  # its process ends
                self._ended = True
                self.exchange.link.die()
            self._last = jax.tree.map(jnp.copy, params) if is_bad else None
            return params

        def finish(self, params: Any, *arguments: Any, **named: Any) -> Any:
            return params if self._ended else super().finish(params, *arguments, **named)

    return Faster


def run_of(case: Case, healthy_only: bool = False, **settings: Any) -> SimResult:
    """Simulate a case; healthy_only: without its bad nodes."""
    healthy = case.nodes - case.bad
    joins = 0.05 * case.steps / 2 if case.begins == "joins" else 0.0
    nodes = [SimNode(name=f"good-{number}", steps=case.steps) for number in range(healthy)]
    if not healthy_only:
        bad_steps = case.steps if case.begins != "joins" else case.steps // 2
        nodes += [SimNode(name=f"bad-{number}", steps=bad_steps, joins_at=joins) for number in range(case.bad)]
    start = healthy if healthy_only or case.begins == "joins" else case.nodes
    plain = {"every": 8, "delay": 4, "codec": "ternary", "broadcast_codec": "ternary", "outer": OUTER, "fragments": 1}
    run = RunSettings(start_nodes=start, initial="founder", local_updates="fixed", **(plain | settings))
    return simulate(Scenario(settings=run, nodes=tuple(nodes)), _program(case.seed), make_sync=_sync_of(case))


@cache
def _program(seed: int) -> Digits:
    return Digits(seed=seed)

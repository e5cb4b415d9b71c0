"""Measure what nodes whose training diverges cost the others: rates of 3, 30 and 3,000 where all others have .1;
and several names of one key that would have the norm gate take deltas of 2,600 times the usual size.

    python bench/hostile_learning.py                  (or as the last rows of bench/hostile.py)

Rule 1: virtual time, and real training code, hub and codecs: the handwritten digits of scikit-learn, a network of one
hidden layer, plain SGD, the settings that a run has if nobody sets any.  Rule 2: each row is compared with the run of
its healthy nodes alone: their held-out loss may be at most BAR times that.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zmqtrain.core.errors import NonFiniteDelta
from zmqtrain.core.settings import RunSettings
from zmqtrain.programs.datasets import load_digits
from zmqtrain.sim.run import SimResult, simulate
from zmqtrain.sim.scenario import Scenario, SimNode
from zmqtrain.train.sync import DelayedSync

from report import print_table, write_json

__all__ = ["BAR", "CASES", "TITLE", "Case", "Digits", "judge", "main", "measure", "run_of"]

BAR = 1.10
RATE = 0.1
BATCH = 32
STEP_SECONDS = SimNode().step_seconds
USUAL_MOVE = 5e-4
"""By which one step moves a value, in the middle of a run."""
TITLE = "digits, held-out loss with nodes that diverge and without them"
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
    they come when the others have made half of theirs, with that rate.  scale: in place of a rate: from half of their
    steps on the bad ones move at random, by so many times what a step moves by then.  key: the name of the key of all
    bad ones, "" for one each.  steps: of each healthy node.
    """

    rate: float = RATE
    bad: int = 1
    nodes: int = 3
    begins: str = "start"
    scale: float = 0.0
    key: str = ""
    steps: int = 600
    seed: int = 0

    @property
    def name(self) -> str:
        """What is wrong, in a few words."""
        what = f"deltas times {self.scale:g}" if self.scale else f"rate {self.rate:g}"
        when = {"start": "from the start", "middle": "from the middle", "joins": "joining late"}[self.begins]
        return f"{what} {when}" + (", one key" if self.key else "")


RATES = (3.0, 30.0, 3000.0)
CASES = (
    *(
        Case(rate=rate, begins=begins, nodes=nodes, bad=bad)
        for nodes, bad in ((3, 1), (5, 2))
        for begins in ("start", "middle", "joins")
        for rate in RATES
    ),
    Case(scale=2600.0, begins="middle", nodes=5, bad=3, key="lab"),
    Case(scale=2600.0, begins="middle", nodes=5, bad=2),
)


def measure(cases: Sequence[Case], **settings: Any) -> list[dict[str, Any]]:
    """Run these cases, and their healthy nodes alone; return a row each. settings: other ones than a run's own."""
    alone: dict[tuple[int, int, int], SimResult] = {}
    rows = []
    for case in cases:
        healthy = (case.nodes - case.bad, case.steps, case.seed)
        if healthy not in alone:
            alone[healthy] = run_of(case, healthy_only=True, **settings)
        result, best = run_of(case, **settings), alone[healthy]
        loss, without = result.scores["loss"], best.scores["loss"]
        row: dict[str, Any] = {"case": case.name, "bad": f"{case.bad} of {case.nodes}", "loss": loss}
        row |= {"without": without, "ratio": loss / without, "accuracy": result.scores["accuracy"]}
        row |= {"refused": result.refused, "contributions": result.contributions}
        rows.append(row | {"bar": "met" if row["ratio"] <= BAR else "MISSED"})
    return rows


def judge(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say what is wrong in these rows; nothing: all is as Rule 2 says."""
    return [
        f"{row['case']}, {row['bad']}: a loss of {row['loss']:.3g}, {row['ratio']:.2f} times {row['without']:.3g}"
        for row in rows
        if not row["ratio"] <= BAR
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases and print them. Raises SystemExit if a row is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=Case().steps, help="of a healthy node (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the data (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args(arguments)
    logging.getLogger("zmqtrain").setLevel(logging.CRITICAL)  # of what it refuses
    rows = measure([replace(case, steps=options.steps, seed=options.seed) for case in CASES])
    print_table(rows, TITLE)
    if options.json:
        write_json(options.json, rows)
    if wrong := judge(rows):
        raise SystemExit("hostile_learning: " + "\n                  ".join(wrong))


# ---------------------------------------------------------------------- one run


def run_of(case: Case, healthy_only: bool = False, **settings: Any) -> SimResult:
    """Simulate a case; healthy_only: without its bad nodes."""
    healthy, late = case.nodes - case.bad, case.begins == "joins"
    nodes = [SimNode(name=f"good-{number}", steps=case.steps) for number in range(healthy)]
    if not healthy_only:
        joins, steps = (STEP_SECONDS * case.steps / 2, case.steps // 2) if late else (0.0, case.steps)
        nodes += [
            SimNode(name=f"bad-{number}", steps=steps, joins_at=joins, key=case.key) for number in range(case.bad)
        ]
    start = healthy if healthy_only or late else case.nodes
    plain = {"every": 8, "delay": 4, "codec": "ternary", "broadcast_codec": "ternary", "outer": OUTER, "fragments": 1}
    run = RunSettings(start_nodes=start, initial="founder", shards=1, local_updates="fixed", **(plain | settings))
    return simulate(Scenario(settings=run, nodes=tuple(nodes)), _program(case.seed), make_sync=_sync_of(case))


@cache
def _program(seed: int) -> Digits:
    return Digits(seed=seed)


def _sync_of(case: Case) -> Any:
    """Return what makes the DelayedSync of a node: a bad one makes longer steps."""

    class Bad(DelayedSync):
        def __init__(self, exchange: Any, params: Any, **named: Any) -> None:
            super().__init__(exchange, params, **named)
            self._is_bad, self._ended, self._last = "bad" in exchange.name, False, None
            self._random = np.random.default_rng(case.seed)

        def step(self, params: Any, *arguments: Any, **named: Any) -> Any:
            if self._ended:
                return params
            if (
                self._is_bad
                and self._last is not None
                and not (case.begins == "middle" and 2 * self.steps < case.steps)
            ):
                params = self._spoil(params)
            try:
                params = super().step(params, *arguments, **named)
            except NonFiniteDelta:  # its process ends
                self._ended = True
                self.exchange.close("its training diverged")
            self._last = jax.tree.map(jnp.copy, params) if self._is_bad else None
            return params

        def finish(self, params: Any, *arguments: Any, **named: Any) -> Any:
            return params if self._ended else super().finish(params, *arguments, **named)

        def _spoil(self, params: Any) -> Any:
            if not case.scale:
                factor = case.rate / RATE
                return jax.tree.map(lambda new, old: old + factor * (new - old), params, self._last)

            def wander(old: Any) -> Any:
                moved = self._random.standard_normal(old.shape) * case.scale * USUAL_MOVE
                return old + jnp.asarray(moved, jnp.float32)

            return jax.tree.map(wander, self._last)

    return Bad


if __name__ == "__main__":
    main()

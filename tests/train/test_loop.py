"""The loop for a program: it trains, reports, drains, scores, and stops when it is told to."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax

from tests.train.scripted_exchange import ScriptedExchange
from zmqtrain.train.loop import TrainingLoop
from zmqtrain.train.step import LoopHooks


class Line:
    """A program with one parameter that falls by one in a step."""

    name, samples_per_batch, sample_word, units_per_epoch = "line", 4, "points", None

    def init(self, seed):
        return {"w": jnp.full((3,), float(seed))}

    def loss(self, params, batch):
        return jnp.sum(params["w"]) * batch

    def optimizer(self):
        return optax.sgd(1.0)

    def batches(self, unit):
        yield np.float32(1.0)

    def evaluate(self, params):
        return {"loss": float(params["w"][0])}


def test_the_loop_trains_reports_drains_and_scores():
    exchange = ScriptedExchange(every=4, seed=10, evaluate_seconds=0.0)
    exchange.lands_at_once = True
    watched = []
    result = TrainingLoop(
        Line(), exchange, LoopHooks(watch=lambda step, loss: watched.append((step, float(loss))))
    ).run(np.ones(6, np.float32))
    np.testing.assert_array_equal(result.params["w"], [4.0, 4.0, 4.0])
    assert result.scores == {"loss": 4.0} and exchange.scores == [({"loss": 4.0}, exchange.version)]
    assert watched == [(step, 3.0 * (11.0 - step)) for step in range(1, 7)]
    assert result.samples == 24 and result.statistics.steps == 6


def test_the_loop_stops_when_it_is_told_to():
    exchange = ScriptedExchange(every=4)
    exchange.lands_at_once = True
    told = iter([False, False, True])
    assert (
        TrainingLoop(Line(), exchange, LoopHooks(stop=lambda: next(told))).run(np.ones(9, np.float32)).statistics.steps
        == 2
    )


def test_the_evaluator_scores_the_shared_parameters_not_its_own():
    exchange = ScriptedExchange(every=100, seed=10, evaluate_seconds=1e-9)
    exchange.is_evaluator = exchange.lands_at_once = True
    TrainingLoop(Line(), exchange).run(np.ones(2, np.float32))
    assert exchange.scores[0] == ({"loss": 10.0}, 0)


def test_an_exchange_that_can_is_told_which_data_a_program_has():
    class Describing(ScriptedExchange):
        def describe(self, *, data=None, **others):
            self.described = data or getattr(self, "described", None)

    exchange = Describing(every=4, fragments=1, delay=1, codec="float32", broadcast_codec="float32", outer="sgd:rate=1")
    exchange.lands_at_once = True
    program = Line()
    program.data_digests = "aa/11"
    TrainingLoop(program, exchange).run(np.ones(4, np.float32))
    assert exchange.described == "aa/11"

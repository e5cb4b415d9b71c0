"""One of a population in a loop of one's own: what it says of its own parameters, and what it adopts of others'."""

from __future__ import annotations

import logging
import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.scripted_exchange import ScriptedExchange, add, tree, value
from zmqtrain.core.types import Part, Update
from zmqtrain.train.sync import DelayedSync

FIXED = {"fragments": 1, "codec": "float32", "broadcast_codec": "float32", "outer": "sgd:rate=1"}


def population(judge=None, **settings):
    exchange = ScriptedExchange(initial="own", apart_steps=4, every=2, **{"delay": 1, **FIXED, **settings})
    exchange.next_fragments = lambda: ()
    return exchange, DelayedSync(exchange, tree(1.0), judge=judge)


def lend(exchange, of):
    parts = [Part(0, 0, np.full((2,), of, np.float32)), Part(1, 0, np.full((2, 3), of, np.float32))]
    exchange.landing.append(Update(-1, {}, {}, anchor=parts, reset=True))


def of_value(params):
    return abs(value(params))


def test_a_loop_of_ones_own_is_compared_by_the_losses_that_it_tells():
    exchange, sync = population()
    params = tree(1.0)
    for loss in (4.0, 3.0, 2.0, 1.0, 8.0, 8.0, 8.0, 4.0):
        params = sync.step(params, score=jnp.float32(loss))
    assert exchange.compared == [2.5, 7.0]
    exchange.founded = True
    for _ in range(8):
        params = sync.step(params, score=1.0)
    assert exchange.compared == [2.5, 7.0]


def test_or_by_what_judges_its_parameters():
    exchange, sync = population(of_value)
    params = tree(1.0)
    for _ in range(4):
        params = sync.step(add(params, 1.0), score=100.0)
    assert exchange.compared == [5.0]


def test_one_whose_training_has_diverged_scores_worse_than_all_and_one_that_tells_nothing_is_unknown():
    exchange, sync = population()
    for loss in (1.0, math.nan, 1.0, 1.0):
        sync.step(tree(1.0), score=loss)
    assert exchange.compared == [math.inf]
    exchange, sync = population()
    for _ in range(4):
        sync.step(tree(1.0))
    assert math.isnan(exchange.compared[0])


@pytest.mark.parametrize(("lent", "adopts"), [(0.5, True), (1.0, True), (1.5, False), (280.0, False)])
def test_what_is_lent_is_adopted_only_if_it_is_no_worse_by_this_nodes_own_data(lent, adopts, caplog):
    caplog.set_level(logging.WARNING)
    exchange, sync = population(of_value)
    lend(exchange, lent)
    params = sync.step(tree(1.0), score=1.0)
    assert value(params) == (lent if adopts else 1.0)
    assert exchange.compared == ([] if adopts else [(1.0, True)])
    assert ("keeps its own, which score 1" in caplog.text) is not adopts
    assert (sync.take_adoption() is not None) is adopts


@pytest.mark.parametrize("judge", [None, lambda params: abs(float(params["b"][0]))])
def test_parameters_that_are_not_finite_are_adopted_by_nobody(judge):
    exchange, sync = population(judge)
    params = sync.step(tree(1.0), score=1.0)
    lend(exchange, math.inf)
    assert value(sync.step(params, score=1.0)) == 1.0
    assert exchange.compared == [(1.0, True)]


def test_who_has_nothing_to_judge_by_adopts_what_the_hub_has_compared():
    exchange, sync = population()
    lend(exchange, 7.0)
    assert value(sync.step(tree(1.0), score=1.0)) == 7.0

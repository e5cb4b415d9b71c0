"""What a node offers with every=k: when, how much, and what the figures tell of it."""

from __future__ import annotations

import math

import jax.numpy as jnp

from tests.train.scripted_exchange import ScriptedExchange, add, run, tree, value
from zmqtrain.train.sync import DelayedSync


def test_an_offer_is_made_every_k_steps_and_holds_all_that_is_pending():
    exchange = ScriptedExchange(every=3, delay=9)
    run(DelayedSync(exchange, tree()), tree(), 7)
    assert [float(o.u[0]) for o in exchange.offers.values()] == [3.0, 6.0]
    assert [(o.samples, o.steps) for o in exchange.offers.values()] == [(3, 3), (3, 3)]


def test_an_offer_that_is_not_taken_is_in_the_next():
    exchange = ScriptedExchange()
    exchange.refuse = 2
    sync = DelayedSync(exchange, tree())
    run(sync, tree(), 6)
    (offer,) = exchange.offers.values()
    assert (float(offer.u[0]), offer.samples, offer.steps) == (6.0, 6, 6)
    assert sync.statistics().offers == 1
    assert not sync.statistics().offers_refused, "none was put off for another, which would have had to land first"


def test_with_too_much_on_the_way_nothing_is_computed_or_queued():
    exchange = ScriptedExchange(delay=1)
    sync = DelayedSync(exchange, tree())
    run(sync, tree(), 8)
    assert len(exchange.offers) == 1 and sync.statistics().offers_refused == 3


def test_a_withdrawn_offer_stays_pending():
    exchange = ScriptedExchange()
    sync = DelayedSync(exchange, tree())
    params = run(sync, tree(), 2)
    exchange.withdraw(0)
    params = run(sync, params, 2)
    assert [float(o.u[0]) for o in exchange.offers.values()] == [2.0, 4.0] and value(params) == 4.0


def test_the_figures_tell_what_happened():
    exchange = ScriptedExchange(every=2, delay=1)
    offer, take_in = exchange.offer, exchange.clock.sleep

    def offer_slowly(*offered, **facts):
        take_in(0.25)
        return offer(*offered, **facts)

    exchange.offer = offer_slowly
    sync = DelayedSync(exchange, tree())
    assert math.isnan(sync.statistics().age_steps)
    params = run(sync, tree(), 2)
    exchange.land(0)
    params = run(sync, params, 2)
    figures = sync.statistics()
    assert (figures.steps, figures.offers, figures.offers_refused, figures.aggregates_applied) == (4, 2, 0, 1)
    assert (figures.age_steps, figures.version, figures.peers) == (1.0, 1, 3)
    assert (figures.bytes_sent, figures.bytes_received) == (10, 20) and figures.held_seconds == 0.5
    last = exchange.reports[-1]
    assert (last["step"], last["samples"], last["age_steps"], last["offers_refused"]) == (4, 4, 1.0, 0)
    assert last["held_seconds"] == 0.25, "of one exchange"


def test_samples_and_the_score_go_with_the_offer():
    exchange = ScriptedExchange(every=2)
    sync = DelayedSync(exchange, tree())
    loss = jnp.float32(0.5)
    for _ in range(2):
        sync.step(tree(), score=loss, samples=16)
    assert exchange.offers[0].samples == 32 and exchange.offers[0].scores == (loss, loss)
    assert exchange.reports[-1]["loss"] is loss and exchange.reports[-1]["samples"] == 32


def test_a_slower_node_of_a_run_with_dynamic_local_updates_offers_after_fewer_steps_and_applies_sooner():
    exchange = ScriptedExchange(every=8, delay=4, local_updates="dynamic")
    exchange.pace = lambda: (25.0, [100.0, 100.0, 100.0, 25.0])
    sync = DelayedSync(exchange, tree())
    made = []
    params = tree()
    for step in range(1, 15):
        before = len(exchange.offers)
        params = sync.step(add(params, 1.0))
        if len(exchange.offers) > before:
            made.append(step)
            exchange.land(len(exchange.offers) - 1)
    assert made == [8, 10, 12, 14]
    assert sync.statistics().age_steps == 1

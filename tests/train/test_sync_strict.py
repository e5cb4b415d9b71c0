"""Strict mode: an aggregate is applied at exactly its step, however soon or late it comes."""

from __future__ import annotations

import pytest

from tests.train.scripted_exchange import ScriptedExchange, add, run, tree, value
from zmqtrain.core.errors import AggregateTimeout
from zmqtrain.train.sync import DelayedSync


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_in_strict_mode_an_aggregate_is_applied_at_exactly_k_plus_d(delay):
    exchange = ScriptedExchange(every=2, delay=delay, mode="strict", release="all")
    sync = DelayedSync(exchange, tree())
    waited_at = []

    def late():
        waited_at.append(sync.statistics().steps)
        exchange.land(min(exchange.on_the_way), others=10.0)

    exchange.while_waiting = late
    params = tree()
    for _ in range(8):
        params = sync.step(add(params))
    assert waited_at == [at + delay for at in (2, 4, 6, 8) if at + delay <= 8]


def test_in_strict_mode_what_comes_early_waits_for_its_step():
    exchange = ScriptedExchange(every=2, delay=2, mode="strict", release="all")
    sync = DelayedSync(exchange, tree())
    params = run(sync, tree(), 2)
    exchange.land(0, others=10.0)
    params = run(sync, params, 1)
    assert value(params) == 3.0
    assert value(run(sync, params, 1)) == 14.0


def test_in_strict_mode_a_withdrawn_offer_is_not_waited_for():
    exchange = ScriptedExchange(every=2, delay=1, mode="strict", release="all")
    sync = DelayedSync(exchange, tree())
    params = run(sync, tree(), 2)
    exchange.while_waiting = lambda: exchange.withdraw(0)
    assert value(run(sync, params, 1)) == 3.0


def test_in_strict_mode_a_wait_without_end_is_an_error_that_says_for_what(monkeypatch):
    monkeypatch.setattr("zmqtrain.train.sync.STRICT_WAIT_SECONDS", 0.0)
    exchange = ScriptedExchange(every=2, delay=1, mode="strict", release="all")
    sync = DelayedSync(exchange, tree())
    params = run(sync, tree(), 2)
    with pytest.raises(AggregateTimeout, match="waited for the others"):
        run(sync, params, 1)

"""The end of a node's training: every fragment is drained, or it gives up without an error."""

from __future__ import annotations

from tests.train.scripted_exchange import ScriptedExchange, run, tree, value
from zmqtrain.train.sync import DelayedSync


def test_finish_drains_every_fragment_uncompressed(donate):
    exchange = ScriptedExchange(every=100, fragments=2)
    sync = DelayedSync(exchange, tree(), donate=donate)
    params = run(sync, tree(), 5)
    exchange.lands_at_once = True
    params = sync.finish(params)
    assert value(params) == value(sync.params) == 5.0
    assert [(o.fragment, o.dense, float(o.u[0])) for o in exchange.offers.values()] == [(0, True, 5.0), (1, True, 5.0)]
    assert [o.samples for o in exchange.offers.values()] == [5, 0]


def test_finish_first_waits_for_what_is_on_its_way():
    exchange = ScriptedExchange(every=2, delay=9)
    sync = DelayedSync(exchange, tree())
    params = run(sync, tree(), 3)
    exchange.land(0, others=10.0)
    exchange.lands_at_once = True
    assert value(sync.finish(params)) == 13.0
    assert float(exchange.offers[1].u[0]) == 1.0


def test_what_is_refused_or_lost_while_finishing_is_sent_again():
    exchange = ScriptedExchange(every=100)
    sync = DelayedSync(exchange, tree())
    params = run(sync, tree(), 5)
    exchange.refuse = 1
    taken = exchange.offer

    def lose_the_first(*arguments, **more):
        exchange.lands_at_once = bool(exchange.offers)
        sequence = taken(*arguments, **more)
        if sequence == 0:
            exchange.withdraw(0)
        return sequence

    exchange.offer = lose_the_first
    assert value(sync.finish(params)) == value(sync.params) == 5.0
    assert len(exchange.offers) == 2


def test_finish_takes_what_the_others_still_drain():
    exchange = ScriptedExchange(every=100)
    sync = DelayedSync(exchange, tree())
    params = run(sync, tree(), 5)
    exchange.lands_at_once = True

    def drained():
        if exchange.version == 1:
            exchange.land(others=10.0)
            return False
        return True

    exchange.others_drained = drained
    assert value(sync.finish(params)) == value(sync.params) == 15.0


def test_finish_gives_up_without_an_error_and_keeps_what_has_not_landed():
    exchange = ScriptedExchange(every=100)
    sync = DelayedSync(exchange, tree())
    params = run(sync, tree(), 5)
    assert value(sync.finish(params, timeout_seconds=0.0)) == 5.0 and value(sync.params) == 0.0


def test_a_run_that_cannot_be_reached_any_more_does_not_hold_up_the_end():
    exchange = ScriptedExchange(every=100)
    sync = DelayedSync(exchange, tree())
    params = run(sync, tree(), 5)
    exchange.refuse, exchange.unreachable = 1 << 30, (0,)
    assert value(sync.finish(params)) == 5.0


def test_a_node_that_made_no_step_drains_nothing():
    exchange = ScriptedExchange(every=100)
    sync = DelayedSync(exchange, tree())
    exchange.lands_at_once = True
    sync.finish(sync.params)
    assert not exchange.offers

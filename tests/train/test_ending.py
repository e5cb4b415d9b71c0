"""The end of a loop of one's own: `finish`, `close` and a `with` block, and what is refused after them."""

from __future__ import annotations

import logging

import jax
import pytest

from tests.train.scripted_exchange import ScriptedExchange, add, run, tree, value
from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.train.sync import DelayedSync


class ClosingExchange(ScriptedExchange):
    closed = 0

    def close(self, reason=""):
        self.closed += 1


def begun(**settings):
    exchange = ClosingExchange(**({"every": 100} | settings))
    exchange.lands_at_once = True
    return exchange, DelayedSync(exchange, tree())


@pytest.mark.parametrize("end", ["finish", "close"])
def test_step_after_the_end_says_which_call_ended_it_and_what_to_do(end):
    _, sync = begun()
    params = run(sync, tree(), 3)
    sync.finish(params) if end == "finish" else sync.close()
    with pytest.raises(LocalProtocolError, match=f"`step` was called after `{end}`.*pc-1.*connect again"):
        sync.step(params)


def test_finish_after_close_is_refused_and_finish_after_finish_is_not():
    exchange, sync = begun()
    params = sync.finish(run(sync, tree(), 3))
    assert value(sync.finish(params)) == 3.0 and exchange.closed == 0
    sync.close()
    sync.close()
    assert exchange.closed == 1
    with pytest.raises(LocalProtocolError, match="`finish` was called after `close`"):
        sync.finish(params)


def test_a_with_block_finishes_with_the_last_parameters_and_closes_the_node():
    exchange, sync = begun()
    with sync as entered:
        assert entered is sync
        run(sync, tree(), 5)
    assert value(sync.params) == 5.0
    assert [(one.dense, float(one.u[0])) for one in exchange.offers.values()] == [(True, 5.0)]
    assert exchange.closed == 1


def test_a_with_block_whose_loop_has_finished_does_not_finish_again():
    exchange, sync = begun()
    with sync:
        params = run(sync, tree(), 5)
        sync.finish(params)
        exchange.lands_at_once = False
    assert len(exchange.offers) == 1 and exchange.closed == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_closes_without_finishing(error):
    exchange, sync = begun()
    with pytest.raises(error), sync:
        run(sync, tree(), 5)
        raise error
    assert exchange.offers == {} and exchange.closed == 1


def test_a_with_block_without_a_step_only_closes():
    exchange, sync = begun()
    with sync:
        pass
    assert exchange.offers == {} and exchange.closed == 1


def test_parameters_that_were_donated_after_the_last_step_are_not_finished_with_and_that_is_said(caplog):
    exchange, sync = begun()
    with caplog.at_level(logging.WARNING, "zmqtrain"), sync:
        params = sync.step(add(tree()))
        for leaf in jax.tree.leaves(params):
            leaf.delete()
    assert exchange.offers == {} and exchange.closed == 1
    assert "leaves without `finish`" in caplog.text and "sync.finish(params)" in caplog.text


def test_outside_a_with_block_no_parameters_are_kept():
    _, sync = begun()
    sync.step(add(tree()))
    assert sync._last is None

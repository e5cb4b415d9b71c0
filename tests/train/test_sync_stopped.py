"""A run that an operator ends: a loop that takes no data units hears it from `step`, and what is pending is sent."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.scripted_exchange import ScriptedExchange
from zmqtrain.core.errors import RunStopped
from zmqtrain.train.sync import DelayedSync


def exchange_of():
    exchange = ScriptedExchange()
    exchange.stopped, exchange.lands_at_once = False, True
    exchange.everyone_drained = lambda broker: True
    return exchange


def begun(exchange, sync, params):
    for _ in range(4):
        params = sync.step({"w": params["w"] + 1}, samples=8)
    exchange.stopped = True
    return {"w": params["w"] + 1}  # of a further step


def shared(exchange):
    return np.sum([np.sum(one.u) for one in exchange.offers.values()])


def test_step_says_that_the_run_is_ended_and_finish_sends_what_is_pending(caplog):
    exchange, params = exchange_of(), {"w": jnp.zeros(3)}
    sync = DelayedSync(exchange, params)
    params = begun(exchange, sync, params)
    for _ in range(2):  # whoever asks again is told again
        with pytest.raises(RunStopped, match=r"an operator has ended the run of pc-1 \(zmqtrain stop\)"):
            sync.step(params, samples=8)
    sync.finish(params)
    assert shared(exchange) == 3 * 5


def test_a_with_block_ends_as_if_the_data_had(caplog):
    exchange, params = exchange_of(), {"w": jnp.zeros(3)}
    with DelayedSync(exchange, params) as sync:
        params = begun(exchange, sync, params)
        sync.step(params, samples=8)
        raise AssertionError("the run is ended")
    assert shared(exchange) == 3 * 5 and "What is pending is sent first" in caplog.text
    np.testing.assert_array_equal(sync.params["w"], np.full(3, 5.0))


def test_an_exception_of_the_loops_own_is_none_of_the_runs():
    exchange, params = exchange_of(), {"w": jnp.zeros(3)}
    with pytest.raises(KeyboardInterrupt), DelayedSync(exchange, params) as sync:
        begun(exchange, sync, params)
        raise KeyboardInterrupt
    assert shared(exchange) < 3 * 5

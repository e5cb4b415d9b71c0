"""Which trees a node exchanges, in which numbers, and that they stay whose they were."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.scripted_exchange import ScriptedExchange, run, tree, value
from zmqtrain.errors import ModelMismatch
from zmqtrain.train.sync import DelayedSync


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_leaves_of_half_precision_are_exchanged_as_float32(dtype, donate):
    exchange = ScriptedExchange(every=2, delay=1)
    sync = DelayedSync(exchange, tree(0.0, dtype), donate=donate)
    params = run(sync, tree(0.0, dtype), 2)
    assert exchange.offers[0].u.dtype == np.float32
    exchange.land(0, others=10.0)
    params = run(sync, params, 1)
    assert value(params) == 13.0 and params["b"].dtype == dtype


def test_a_leaf_of_whole_numbers_is_refused_by_name():
    with pytest.raises(ModelMismatch, match=r"count int32\[\]") as caught:
        DelayedSync(ScriptedExchange(), {"w": jnp.ones(3), "count": jnp.int32(0)})
    assert caught.value.leaf == "count"


def test_a_step_with_another_tree_is_refused():
    sync = DelayedSync(ScriptedExchange(), tree())
    with pytest.raises(ModelMismatch, match="the tree given to step"):
        sync.step([jnp.ones(3)])


def test_parameters_that_were_not_given_away_are_still_there():
    sync = DelayedSync(exchange := ScriptedExchange(every=4), tree(), donate=False)
    mine = tree(3.0)
    exchange.land(others=1.0)
    assert value(sync.step(mine)) == 4.0 and value(mine) == 3.0

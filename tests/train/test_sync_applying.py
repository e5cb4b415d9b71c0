"""What a node applies with delay=d: aggregates, snapshots and resets, and what of its own is kept."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.scripted_exchange import ScriptedExchange, add, run, tree, value
from zmqtrain.core.types import Part, Update
from zmqtrain.train.sync import DelayedSync


def leaves_at(value):
    return [np.full((2,), value, np.float32), np.full((2, 3), value, np.float32)]


def parts_at(value):
    return [Part(i, 0, leaf) for i, leaf in enumerate(leaves_at(value))]


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_what_holds_an_own_offer_is_applied_at_the_first_boundary_d_after_it(delay, donate):
    exchange = ScriptedExchange(every=2, delay=delay)
    sync = DelayedSync(exchange, tree(), donate=donate)
    params = run(sync, tree(), 2)
    exchange.land(0, others=10.0)  # 12 for the node's 2
    for step in range(3, 8):
        params = sync.step(add(params))
        applied = step >= 2 + max(delay, 1)
        assert value(params) == (step + 10.0 if applied else step), step
        assert value(sync.params) == (12.0 if applied else 0.0)


def test_an_aggregate_of_others_alone_is_applied_at_once(donate):
    exchange = ScriptedExchange(every=4, delay=3)
    sync = DelayedSync(exchange, tree(), donate=donate)
    params = run(sync, tree(), 1)
    exchange.land(others=10.0)
    assert value(sync.step(add(params))) == 12.0


def test_an_aggregate_that_is_not_due_holds_up_those_behind_it():
    exchange = ScriptedExchange(every=2, delay=3)
    sync = DelayedSync(exchange, tree())
    params = run(sync, tree(), 2)
    exchange.land(0)
    exchange.land(others=10.0)
    params = run(sync, params, 1)
    assert exchange.version == 2 and len(exchange.landing) == 2
    assert value(run(sync, params, 2)) == 15.0


@pytest.mark.parametrize(("fragments", "calls"), [((0, 1), 1), ((0, 0), 2)], ids=["others", "the same twice"])
def test_updates_that_are_due_together_are_applied_in_one_move_if_they_are_of_other_fragments(
    fragments, calls, donate, monkeypatch
):
    exchange = ScriptedExchange(every=8, delay=2, fragments=2)
    model = {"w": jnp.zeros(2 * 4096)}  # a block of each fragment
    sync, moves = DelayedSync(exchange, model, donate=donate), []
    apply = type(sync._moves).apply
    monkeypatch.setattr(type(sync._moves), "apply", lambda *given: moves.append(given) or apply(*given))
    params = run(sync, model, 2)
    for fragment in fragments:
        counts = exchange.layout.counts(fragment)
        step = {fragment: [np.full(count, 10.0, np.float32) for count in counts]}
        exchange.version += 1
        exchange.landing.append(Update(exchange.version, step, {}))
    params = run(sync, params, 1)
    assert len(moves) == calls
    each = [3.0 + 10.0 * fragments.count(fragment) for fragment in (0, 1)]
    np.testing.assert_array_equal(np.asarray(params["w"])[[0, 4096]], each)


def test_at_a_step_without_an_exchange_a_loop_has_back_what_it_gave():
    exchange = ScriptedExchange(every=3, delay=1)
    sync = DelayedSync(exchange, tree())
    assert run(sync, tree(), 1) is not None
    given = add(tree())
    assert sync.step(given) is given
    assert sync.step(given := add(given)) is not given  # an offer


def test_local_progress_since_the_offer_is_kept_exactly(donate):
    exchange = ScriptedExchange(every=2, delay=2)
    sync = DelayedSync(exchange, tree(), donate=donate)
    params = run(sync, tree(), 2)
    exchange.land(0, others=6.0, nodes=4)  # (2 + 6) / 4
    params = run(sync, params, 2)
    assert value(sync.params) == 2.0 and value(params) == 2.0 + 2.0
    assert float(exchange.offers[1].u[0]) == 2.0


def test_a_snapshot_keeps_what_is_pending(donate):
    exchange = ScriptedExchange(every=2, delay=1)
    sync = DelayedSync(exchange, tree(), donate=donate)
    params = run(sync, tree(), 2)
    own = {0: [np.full(n, 2.0, np.float32) for n in exchange.layout.counts(0)]}
    exchange.landing.append(Update(7, {}, own, (0,), anchor=parts_at(50.0)))
    params = run(sync, params, 1)
    assert value(sync.params) == 50.0 and value(params) == 51.0
    exchange.landing.append(Update(8, {}, {}, anchor=parts_at(60.0)))
    assert value(run(sync, params, 1)) == 62.0


def test_a_reset_drops_what_is_pending(donate):
    exchange = ScriptedExchange(every=4)
    sync = DelayedSync(exchange, tree(), donate=donate)
    params = run(sync, tree(), 3)
    exchange.landing.append(Update(7, {}, {}, anchor=parts_at(50.0), reset=True))
    assert value(run(sync, params, 1)) == 50.0
    assert float(exchange.offers[0].u[0]) == 0.0


def test_a_newcomer_gets_the_runs_parameters_at_its_first_step():
    exchange = ScriptedExchange(anchor=parts_at(30.0))
    sync = DelayedSync(exchange, tree(5.0))
    params = sync.step(add(tree(5.0)))
    assert value(params) == 30.0
    params = run(sync, params, 1)
    assert value(params) == 31.0
    (offer,) = exchange.offers.values()
    assert (float(offer.u[0]), offer.samples, offer.steps) == (1.0, 1, 1)


def test_a_newcomer_that_takes_the_parameters_before_the_loop_loses_no_step():
    exchange = ScriptedExchange(anchor=parts_at(30.0))
    sync = DelayedSync(exchange, tree(5.0))
    assert value(run(sync, sync.params, 1)) == 31.0


def test_the_founder_keeps_its_own_and_hands_them_over_in_float32():
    exchange = ScriptedExchange()
    sync = DelayedSync(exchange, tree(5.0, jnp.bfloat16))
    assert [leaf.dtype for leaf in exchange.founding] == [np.float32, np.float32]
    params = sync.step(tree(5.0, jnp.bfloat16))
    assert value(params) == 5.0 and params["w"].dtype == jnp.bfloat16


class Shelf:
    """A Keeping in memory, always due; `saved` is what it was given last."""

    saved = due = None

    def take(self):
        saved, self.saved = self.saved, None
        return saved

    def is_due(self):
        return bool(self.due)

    def save(self, state, arrays, wait=False):
        self.saved = json.loads(json.dumps(state)), arrays


def test_a_checkpoint_of_the_step_in_which_a_node_began_again_says_so_for_the_optimizers_state_is_of_before():
    exchange = ScriptedExchange(parts_at(0.0))
    exchange.checkpoint = shelf = Shelf()
    sync = DelayedSync(exchange, tree())
    assert sync.take_adoption() is not None
    params, shelf.due = sync.step(sync.start, state=jnp.float32(jnp.nan)), True
    exchange.landing.append(Update(7, {}, {}, anchor=parts_at(50.0), reset=True))
    params = sync.step(params, state=jnp.float32(jnp.nan))
    again = DelayedSync(exchange, params, state=jnp.float32(0))
    assert again.resumed and again.take_adoption() is not None and again.take_adoption() is None
    assert sync.take_adoption() is not None
    sync.step(params, state=jnp.float32(1))
    assert DelayedSync(exchange, params, state=jnp.float32(0)).take_adoption() is None

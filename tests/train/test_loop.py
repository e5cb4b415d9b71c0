"""The loop with every=k, delay=d, against an exchange that does what the test says: no network, no clock."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zmqtrain.codecs.fragment import Layout
from zmqtrain.errors import AggregateTimeout, ModelMismatch
from zmqtrain.settings import RunSettings
from zmqtrain.train.loop import TrainingLoop
from zmqtrain.train.sync import DelayedSync
from zmqtrain.types import ExchangeStatistics, Part, Update


@dataclass
class Offered:
    fragment: int
    u: np.ndarray
    samples: int
    steps: int
    scores: object
    dense: bool


class ScriptedExchange:
    """An Exchange whose hub is the test: `land` makes an aggregate of offers, and others' progress."""

    clock = time
    name = "pc-1"
    is_evaluator = False
    unreachable = ()
    wanted = False

    def __init__(self, anchor=None, **settings):
        settings = {"every": 2, "delay": 1, "lost_seconds": 0.1, "heartbeat_seconds": 0.05} | settings
        self.settings = RunSettings(**settings)
        self.anchor, self.version = anchor, 0
        self.offers, self.landing, self.reports, self.scores = {}, deque(), [], []
        self.on_the_way = set()
        self.refuse = 0
        self.lands_at_once = False
        self.while_waiting = lambda: None
        self.others_drained = lambda: True
        self.layout = self.founding = self.lent = None
        self.founded, self.compared, self.joined = anchor is not None, [], {}

    def join(self, model, leaves, *, score=math.nan, moments=()):
        self.layout, self.founding = Layout(model, self.settings.fragments), leaves
        self.score, self.moments, self.founded = score, moments, self.settings.initial != "own"
        return None if self.anchor is None else Update(self.version, {}, {}, anchor=self.anchor, **self.joined)

    def compare(self, score):
        self.compared.append(score)

    def lend(self, leaves, moments=()):
        self.wanted, self.lent = False, (leaves, moments)

    def pace(self):
        return math.nan, ()

    def next_fragments(self):
        if len(self.on_the_way) >= self.settings.offers_in_flight:
            return ()
        return (len(self.offers) % self.settings.fragments,)

    def offer(self, fragment, segments, tally, *, dense=False):
        if self.refuse:
            self.refuse -= 1
            return None
        sequence = len(self.offers)
        u = np.concatenate([np.array(segment) for segment in segments])
        self.offers[sequence] = Offered(fragment, u, *tally, dense)
        self.on_the_way.add(sequence)
        if self.lands_at_once:
            self.land(sequence)
        return sequence

    def land(self, *sequences, others=0.0, nodes=1):
        """Others' progress is `others` in every value; the mean is over `nodes`."""
        own, aggregate = {}, {}
        for f in sorted({self.offers[s].fragment for s in sequences}) or [0]:
            counts = self.layout.counts(f)
            u = sum((self.offers[s].u for s in sequences if self.offers[s].fragment == f), np.zeros(sum(counts)))
            ends = np.cumsum(counts)[:-1]
            aggregate[f] = np.split(((u + others) / nodes).astype(np.float32), ends)
            if sequences:
                own[f] = np.split(u.astype(np.float32), ends)
        self.version += 1
        self.landing.append(Update(self.version, aggregate, own, sequences))

    def withdraw(self, sequence):
        self.on_the_way.discard(sequence)

    def in_flight(self):
        return tuple(sorted(self.on_the_way))

    def peek(self):
        return self.landing[0] if self.landing else None

    def poll(self):
        if not self.landing:
            return None
        update = self.landing.popleft()
        self.on_the_way.difference_update(update.landed)
        return update

    def wait_update(self, timeout_seconds, sequence):
        self.while_waiting()
        update = self.poll()
        if update is None:
            raise AggregateTimeout("waited for the others")
        return update

    def everyone_drained(self, master):
        return self.others_drained()

    def report(self, **figures):
        self.reports.append(figures)

    def report_scores(self, scores, version):
        self.scores.append((scores, version))

    def statistics(self):
        return ExchangeStatistics(self.version, 3, 10, 20, 0.5, 0.25, len(self.offers), 0, None)


def tree(value=0.0, dtype=jnp.float32):
    return {"b": jnp.full((2,), value, dtype), "w": jnp.full((2, 3), value, dtype)}


def leaves_at(value):
    return [np.full((2,), value, np.float32), np.full((2, 3), value, np.float32)]


def parts_at(value):
    return [Part(i, 0, leaf) for i, leaf in enumerate(leaves_at(value))]


def value(params):
    """The one value that all of the tree has."""
    values = np.concatenate([np.asarray(leaf, np.float32).reshape(-1) for leaf in jax.tree.leaves(params)])
    assert np.ptp(values) == 0, values
    return float(values[0])


def add(params, amount=1.0):
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(amount, leaf.dtype), params)


def run(sync, params, steps, amount=1.0):
    for _ in range(steps):
        params = sync.step(add(params, amount))
    return params


@pytest.fixture(params=[True, False], ids=["donated", "kept"])
def donate(request):
    return request.param


# ---------------------------------------------------------------------- offering


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
    assert sync.statistics().offers_refused == 2 and sync.statistics().offers == 1


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


# ---------------------------------------------------------------------- applying


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


# ---------------------------------------------------------------------- strict


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


# ---------------------------------------------------------------------- dtypes and trees


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


# ---------------------------------------------------------------------- figures


def test_the_figures_tell_what_happened():
    exchange = ScriptedExchange(every=2, delay=1)
    sync = DelayedSync(exchange, tree())
    assert math.isnan(sync.statistics().age_steps)
    params = run(sync, tree(), 2)
    exchange.land(0)
    params = run(sync, params, 2)
    figures = sync.statistics()
    assert (figures.steps, figures.offers, figures.offers_refused, figures.aggregates_applied) == (4, 2, 0, 1)
    assert (figures.age_steps, figures.version, figures.peers) == (1.0, 1, 3)
    assert (figures.bytes_sent, figures.bytes_received) == (10, 20) and figures.held_seconds > 0
    last = exchange.reports[-1]
    assert (last["step"], last["samples"], last["age_steps"], last["offers_refused"]) == (4, 4, 1.0, 0)


def test_samples_and_the_score_go_with_the_offer():
    exchange = ScriptedExchange(every=2)
    sync = DelayedSync(exchange, tree())
    loss = jnp.float32(0.5)
    for _ in range(2):
        sync.step(tree(), score=loss, samples=16)
    assert exchange.offers[0].samples == 32 and exchange.offers[0].scores == (loss, loss)
    assert exchange.reports[-1]["loss"] is loss and exchange.reports[-1]["samples"] == 32


# ---------------------------------------------------------------------- the end


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


# ---------------------------------------------------------------------- the loop for a program


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
    result = TrainingLoop(Line(), exchange, watch=lambda step, loss: watched.append((step, float(loss)))).run(
        np.ones(6, np.float32)
    )
    np.testing.assert_array_equal(result.params["w"], [4.0, 4.0, 4.0])
    assert result.scores == {"loss": 4.0} and exchange.scores == [({"loss": 4.0}, exchange.version)]
    assert watched == [(step, 3.0 * (11.0 - step)) for step in range(1, 7)]
    assert result.samples == 24 and result.statistics.steps == 6


def test_the_loop_stops_when_it_is_told_to():
    exchange = ScriptedExchange(every=4)
    exchange.lands_at_once = True
    told = iter([False, False, True])
    assert TrainingLoop(Line(), exchange, stop=lambda: next(told)).run(np.ones(9, np.float32)).statistics.steps == 2


def test_the_evaluator_scores_the_shared_parameters_not_its_own():
    exchange = ScriptedExchange(every=100, seed=10, evaluate_seconds=1e-9)
    exchange.is_evaluator = exchange.lands_at_once = True
    TrainingLoop(Line(), exchange).run(np.ones(2, np.float32))
    assert exchange.scores[0] == ({"loss": 10.0}, 0)


def test_a_node_that_made_no_step_drains_nothing():
    exchange = ScriptedExchange(every=100)
    sync = DelayedSync(exchange, tree())
    exchange.lands_at_once = True
    sync.finish(sync.params)
    assert not exchange.offers


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

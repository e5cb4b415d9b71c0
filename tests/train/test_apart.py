"""How a node begins: apart, from its own seed, on its own units; what it adopts, and what it says meanwhile."""

from __future__ import annotations

import logging
import math
import time
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.fixed import fixed_run
from tests.stated import Stated
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.errors import JoinRefused
from zmqtrain.core.types import LOCAL_UNITS, Part, Update, first_local_unit
from zmqtrain.train.loop import begin, follow, own_seed, pack_optimizer_state, train_apart, unpack_optimizer_state
from zmqtrain.train.step import LoopHooks, MinibatchStep, TrainState
from zmqtrain.train.sync import DelayedSync


class Program:
    """Three weights that go to 1, whatever the data."""

    samples_per_batch, sample_word, units_per_epoch, name = 4, "rows", None, "weights"

    def __init__(self):
        self.units = []

    def init(self, seed):
        return {"w": jax.random.normal(jax.random.PRNGKey(seed), (3,))}

    def loss(self, params, batch):
        return jnp.mean((params["w"] - 1 + 0 * batch) ** 2)

    def optimizer(self):
        return optax.adam(0.1)

    def batches(self, unit):
        self.units.append(unit)
        for _ in range(2):
            yield np.float32(unit % 7)

    def evaluate(self, params):
        return {"loss": float(self.loss(params, 0.0))}

    def score(self, params):
        return self.loss(params, 0.0)


class Exchange(Stated):
    """What a node hears of its hub: `update` when it joins; what it says is kept."""

    clock = time

    def __init__(self, update=None, founded=False, name="pc-1", **settings):
        self.settings = fixed_run(**{"apart_steps": 6, "start_nodes": 2, **settings})
        self.update, self.founded, self.name = update, founded, name
        self.compared, self.lent, self.coming = [], [], []

    def join(self, model, leaves, *, score=math.nan, optimizer_state=()):
        self.layout, self.leaves, self.score, self.optimizer_state = Layout(model, 1), leaves, score, optimizer_state
        return self.update

    def compare(self, score, *, declined=False):
        self.compared.append(score)

    def lend(self, leaves, optimizer_state=()):
        self.wanted = False
        self.lent.append((leaves, optimizer_state))

    def next_fragments(self):
        return ()

    def peek(self):
        return self.coming[0] if self.coming else None

    def poll(self):
        return self.coming.pop(0)

    def report(self, **figures):
        pass


def stepper(program, **hooks):
    return MinibatchStep(program, hooks=LoopHooks(**hooks))


def started(exchange, program=None):
    program = program or Program()
    return program, *begin(exchange, stepper(program))


def weights(params):
    return np.asarray(params["w"])


def other(value=0.5):
    return [Part(0, 0, np.full(3, value, np.float32))]


# ---------------------------------------------------------------------- whose parameters


def test_a_founder_begins_from_the_runs_seed_and_trains_nothing_before_it_joins():
    program, sync, state = started(Exchange(seed=3, initial="founder"))
    assert (weights(state.params) == weights(Program().init(3))).all()
    assert program.units == [0] and math.isnan(sync.exchange.score) and sync.exchange.optimizer_state == ()


def test_seeds_apart_differ_by_name_and_are_the_same_every_time():
    settings = [fixed_run(initial="best", start_nodes=2, seed=seed) for seed in (0, 1)]
    seeds = [own_seed(one, name) for one in settings for name in ("pc-1", "pc-2")]
    assert len(set(seeds)) == 4 and seeds == [own_seed(one, name) for one in settings for name in ("pc-1", "pc-2")]
    assert own_seed(fixed_run(seed=9), "pc-1") == 9
    assert own_seed(fixed_run(initial="best", seed=9), "pc-1") == 9, "a run of one node compares it with nobody"


def test_who_is_compared_trains_apart_on_its_own_units_and_says_how_it_scores():
    program, sync, state = started(Exchange(initial="best"))
    assert program.units == [0, *range(first_local_unit("pc-1"), first_local_unit("pc-1") + 3)]
    assert program.units[1] >= LOCAL_UNITS
    alone = stepper(program).init(own_seed(sync.settings, "pc-1"))
    alone = train_apart(stepper(program), alone, iter([np.float32(0)] * 9), 6, lambda: False)
    assert (sync.exchange.leaves[0] == weights(alone.params)).all()
    assert sync.exchange.score == pytest.approx(float(program.loss(alone.params, 0.0)))
    for ours, theirs in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(alone.opt_state), strict=True):
        assert (np.asarray(ours) == np.asarray(theirs)).all()


def test_who_comes_to_a_founded_run_skips_the_tournament_and_begins_a_fresh_optimizer():
    exchange = Exchange(Update(4, {}, {}, anchor=other()), founded=True, initial="best")
    program, _, state = started(exchange)
    assert program.units == [0] and math.isnan(exchange.score)
    assert (weights(state.params) == 0.5).all()
    assert int(state.opt_state[0].count) == 0


def test_training_apart_ends_when_it_is_told_to():
    program = Program()
    step = stepper(program, stop=lambda: len(program.units) > 3)
    begin(Exchange(initial="best", apart_steps=1000), step)
    assert len(program.units) < 6


# ---------------------------------------------------------------------- optimizer state


def trained(steps=5):
    program = Program()
    state = stepper(program).init(1)
    return train_apart(stepper(program), state, iter([np.float32(0)] * steps), steps, lambda: False)


def test_an_optimizers_state_comes_out_as_it_went_in():
    state = trained()
    fresh = optax.adam(0.1).init(state.params)
    packed = pack_optimizer_state(state.opt_state)
    assert all(array.dtype == np.float32 and array.ndim == 1 for array in packed)
    restored = unpack_optimizer_state(fresh, [np.concatenate(packed)])
    for before, after in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(restored), strict=True):
        assert before.dtype == after.dtype and (np.asarray(before) == np.asarray(after)).all()


def test_a_large_count_and_narrow_floats_are_not_rounded_on_their_way():
    state = {"count": jnp.array(2**31 - 1, jnp.int32), "flag": jnp.array(True), "m": jnp.array([0.1], jnp.bfloat16)}
    restored = unpack_optimizer_state(jax.tree.map(jnp.zeros_like, state), pack_optimizer_state(state))
    assert int(restored["count"]) == 2**31 - 1 and bool(restored["flag"])
    assert restored["m"].dtype == jnp.bfloat16 and restored["m"] == state["m"]


def test_an_optimizers_state_that_cannot_travel_does_not():
    assert pack_optimizer_state({"key": jax.random.key(0), "m": jnp.zeros(2)}) == []
    assert pack_optimizer_state({"m": jnp.array([jnp.inf])}) == []
    assert pack_optimizer_state(optax.sgd(0.1).init({"w": jnp.zeros(3)})) == []


@pytest.mark.parametrize("values", [0, 3, 9, 30])
def test_the_state_of_another_optimizer_is_not_taken_over(values):
    fresh = optax.adam(0.1).init({"w": jnp.zeros(3)})
    assert unpack_optimizer_state(fresh, [np.zeros(values, np.float32)]) is None


@pytest.mark.parametrize("adopt", [True, False])
def test_who_adopts_the_best_goes_on_with_its_optimizer_state_or_a_fresh_one(adopt):
    state = trained()
    update = Update(0, {}, {}, anchor=other(), optimizer_state=[np.concatenate(pack_optimizer_state(state.opt_state))])
    _, sync, begun = started(Exchange(update, initial="best", fresh_moments=not adopt))
    assert (weights(begun.params) == 0.5).all()
    assert int(begun.opt_state[0].count) == (5 if adopt else 0)
    assert bool(len(sync.exchange.optimizer_state)) == adopt
    assert sync.take_adoption() is None


def test_a_state_that_does_not_fit_is_said_and_a_fresh_one_begun(caplog):
    update = Update(0, {}, {}, anchor=other(), optimizer_state=[np.zeros(4, np.float32)])
    _, _, begun = started(Exchange(update, initial="best", fresh_moments=False))
    assert int(begun.opt_state[0].count) == 0 and "not of this node's optimizer" in caplog.text


# ---------------------------------------------------------------------- the mean


@pytest.mark.parametrize(("mean", "said"), [(40.0, True), (1.0, False)])
def test_a_mean_that_is_far_worse_than_the_own_parameters_is_said(caplog, mean, said):
    caplog.set_level(logging.WARNING)
    _, _, state = started(Exchange(Update(0, {}, {}, anchor=other(mean)), initial="mean"))
    assert (weights(state.params) == mean).all() and ("different valleys" in caplog.text) == said


class Voting(Exchange):
    """The hub lends the mean before the run begins. then: what comes when it has heard how that scores."""

    def __init__(self, mean, then, **settings):
        super().__init__(Update(-1, {}, {}, anchor=other(mean), reset=True), initial="mean", **settings)
        self.then, self.votes = then, []

    def vote(self, score):
        self.votes.append(score)
        if isinstance(self.then, Exception):
            raise self.then
        return self.then


def test_a_node_says_its_own_score_then_that_of_the_mean_and_begins_with_what_the_run_begins_with():
    exchange = Voting(1.5, Update(0, {}, {}, anchor=other(1.0)))
    program, _, state = started(exchange)
    own = {"w": jnp.asarray(exchange.leaves[0])}
    assert exchange.score == pytest.approx(float(program.loss(own, 0.0))) and exchange.votes == [0.25]
    assert (weights(state.params) == 1.0).all() and int(state.opt_state[0].count) == 0


def test_a_mean_that_the_nodes_refuse_is_said_to_the_caller_and_nothing_of_it_is_adopted():
    exchange = Voting(40.0, JoinRefused("they lie in different valleys", "initial"))
    with pytest.raises(JoinRefused, match="different valleys"):
        started(exchange)
    assert exchange.votes == [39.0**2]


def test_a_loop_that_cannot_score_other_parameters_says_so_and_waits_for_the_others():
    exchange = Voting(1.5, Update(0, {}, {}, anchor=other(1.0)))
    sync = DelayedSync(exchange, {"w": jnp.zeros(3)}, score=0.5)
    assert len(exchange.votes) == 1 and math.isnan(exchange.votes[0])
    assert (weights(sync.params) == 1.0).all()


# ---------------------------------------------------------------------- a population


def go(program, sync, state, steps):
    local = stepper(program)
    for batch in islice((np.float32(0) for _ in range(steps)), steps):
        state, loss, samples = local.step(state, iter([batch]))
        params = sync.step(state.params, loss, samples, lambda state=state: pack_optimizer_state(state.opt_state))
        state = follow(program, sync, TrainState(params, state.opt_state))
    return state


def test_one_of_a_population_goes_on_from_its_own_and_says_its_score_every_apart_steps():
    exchange = Exchange(initial="own")
    program, sync, state = started(exchange)
    assert (weights(state.params) == exchange.leaves[0]).all()
    state = go(program, sync, state, 13)
    assert len(exchange.compared) == 2 and exchange.compared[0] < exchange.score
    exchange.founded = True
    go(program, sync, state, 12)
    assert len(exchange.compared) == 2


def test_who_is_asked_for_its_parameters_lends_those_of_that_step_with_its_moments():
    exchange = Exchange(initial="own")
    program, sync, state = started(exchange)
    exchange.wanted = True
    state = go(program, sync, state, 1)
    ((leaves, optimizer_state),) = exchange.lent
    assert (leaves[0] == weights(state.params)).all()
    assert (np.concatenate(optimizer_state) == np.concatenate(pack_optimizer_state(state.opt_state))).all()


@pytest.mark.parametrize("adopt", [True, False])
def test_who_is_preempted_goes_on_from_the_best_and_its_optimizer_state_or_a_fresh_one(adopt):
    exchange = Exchange(initial="own", fresh_moments=not adopt)
    program, sync, state = started(exchange)
    lent = trained(steps=9).opt_state
    exchange.coming.append(
        Update(-1, {}, {}, anchor=other(0.95), reset=True, optimizer_state=pack_optimizer_state(lent))
    )
    state = go(program, sync, state, 1)
    assert np.allclose(weights(state.params), 0.95) and int(state.opt_state[0].count) == (9 if adopt else 0)
    assert np.allclose(weights(sync.params), 0.95)


def test_when_the_population_agrees_a_node_keeps_its_own_and_the_difference_is_pending():
    exchange = Exchange(initial="own")
    _, sync, state = started(exchange)
    exchange.coming.append(Update(0, {}, {}, anchor=other(), keep=True))
    before = np.array(weights(state.params))
    sync.step(state.params)
    assert (weights(state.params) == before).all() and (weights(sync.params) == 0.5).all()


# ---------------------------------------------------------------------- elastic


def test_an_elastic_node_begins_from_its_own_parameters_around_the_shared_ones():
    exchange = Exchange(Update(3, {}, {}, anchor=other(), keep=True), founded=True, initial="own", elastic=0.25)
    program, sync, state = started(exchange)
    assert (weights(state.params) == exchange.leaves[0]).all() and program.units == [0]
    assert (weights(sync.params) == 0.5).all()
    assert (weights(sync.step(state.params)) == exchange.leaves[0]).all()


class Landing(Exchange):
    """An exchange of one node: what it offers is the aggregate."""

    def __init__(self, **settings):
        super().__init__(None, True, every=1, delay=0, lost_seconds=0.1, heartbeat_seconds=0.05, **settings)
        self.offers = []

    def next_fragments(self):
        return (0,)

    def offer(self, fragment, segments, counts, *, dense=False):
        self.offers.append((np.concatenate([np.array(segment) for segment in segments]), dense))
        landed = {0: [np.array(segment) for segment in segments]}
        self.coming.append(Update(len(self.offers), landed, landed, (len(self.offers) - 1,)))
        return len(self.offers) - 1

    def poll(self):
        return self.coming.pop(0) if self.coming else None

    def everyone_drained(self, broker):
        return True


def test_an_elastic_node_offers_its_share_of_what_is_pending_and_nothing_is_lost():
    exchange = Landing(elastic=0.25)
    sync = DelayedSync(exchange, {"w": jnp.zeros(3)})
    params = {"w": jnp.full(3, 8.0)}
    pending = 8.0
    for _ in range(4):
        params = sync.step(params)
        assert float(exchange.offers[-1][0][0]) == 0.25 * pending
        pending *= 0.75
        np.testing.assert_array_equal(weights(params), 8.0)  # anchor + pending, whatever has landed
        np.testing.assert_array_equal(weights(sync.params), 8.0 - pending)
    params = sync.finish(params)
    assert exchange.offers[-1][1] and float(exchange.offers[-1][0][0]) == pending  # a drain takes all
    np.testing.assert_array_equal(weights(sync.params), 8.0)

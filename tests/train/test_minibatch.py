"""A step is made of what its minibatch says: whole batches, or as many parts of batches as there is time for."""

from __future__ import annotations

import statistics
import subprocess
import sys
from functools import cache
from itertools import cycle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.clocks import VirtualClock
from tests.grids import examples
from zmqtrain.core.errors import ConfigError
from zmqtrain.train.minibatch import (
    IMPROBABLE,
    FixedMinibatch,
    TimedMinibatch,
    dynamic_every,
    minibatch_from_spec,
)
from zmqtrain.train.step import LoopHooks, MinibatchStep, TrainState


class Line:
    """A linear model: the mean squared error over a batch of 8 points."""

    name, samples_per_batch, sample_word, units_per_epoch = "line", 8, "points", None

    def __init__(self, optimizer=None, dtype=jnp.float32):
        self._optimizer, self._dtype = optimizer or optax.adamw(0.1), dtype

    def init(self, seed):
        return {"w": jax.random.normal(jax.random.key(seed), (3,)).astype(self._dtype), "b": jnp.zeros((), self._dtype)}

    def loss(self, params, batch):
        x, y = batch
        return jnp.mean(jnp.square(x @ params["w"].astype(jnp.float32) + params["b"] - y))

    def optimizer(self):
        return self._optimizer

    def batches(self, unit):
        random = np.random.default_rng(unit)
        while True:
            yield random.standard_normal((8, 3)).astype(np.float32), random.standard_normal(8).astype(np.float32)

    def evaluate(self, params):
        return {"loss": 0.0}


def batches_of(program, count, unit=0):
    """The first so many batches of a unit."""
    return [batch for batch, _ in zip(program.batches(unit), range(count), strict=False)]


def joined(parts):
    """The batch that holds the samples of all these."""
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def equal(first, second):
    return jax.tree.structure(first) == jax.tree.structure(second) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


def close(first, second, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), first, second)


def stepper(text, program=None, part_seconds=0.0, step_seconds=0.0):
    """A step under a virtual clock on which a part and the beginning of a step take so long."""
    clock = VirtualClock()
    step = MinibatchStep(
        program or Line(),
        minibatch_from_spec(text),
        clock,
        LoopHooks(before_step=lambda: clock.sleep(step_seconds), before_part=lambda: clock.sleep(part_seconds)),
    )
    return step, clock


def alone(program, state, batch):
    """One gradient and one update of the optimizer, as a program would train by itself."""

    @jax.jit
    def one(state):
        value, gradient = jax.value_and_grad(program.loss)(state.params, batch)
        updates, opt_state = program.optimizer().update(gradient, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), value

    return one(state)


# ---------------------------------------------------------------------- specs


def test_a_spec_says_what_a_step_is_made_of():
    assert minibatch_from_spec("fixed") == minibatch_from_spec("fixed:batches=1") == FixedMinibatch(1)
    assert minibatch_from_spec("timed") == TimedMinibatch(0.3, 8)
    assert minibatch_from_spec("timed:partitions=2,seconds=1") == TimedMinibatch(1.0, 2)


@pytest.mark.parametrize("text", ["fixed:batches=4", "timed:seconds=0.2,partitions=3"])
def test_the_canonical_name_reads_back_as_the_same_minibatch(text):
    assert minibatch_from_spec(text).name == text
    assert minibatch_from_spec(minibatch_from_spec(text).name) == minibatch_from_spec(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time", "choose one of fixed:batches=1, timed:seconds=0.3,partitions=8"),
        ("fixed:seconds=1", "fixed takes batches=1"),
        ("fixed:batches=0", "'fixed:batches=0': a step is made of at least one batch, got 0"),
        ("timed:seconds=0", "more than 0 seconds, got 0"),
        ("timed:seconds=-1", "more than 0 seconds, got -1"),
        ("timed:partitions=0", "at least one part, got 0"),
        ("timed:partitions=1.5", "is not a whole number"),
    ],
)
def test_a_spec_that_cannot_be_used_is_refused_with_the_choices(text, words):
    with pytest.raises(ConfigError, match=words):
        minibatch_from_spec(text)


def test_the_specs_can_be_read_without_jax():
    code = (
        "import sys; from zmqtrain.train.minibatch import minibatch_from_spec as m; from zmqtrain.train.induce import "
        "induced_from_spec as i; m('timed'), i('cedar'); print('jax' in sys.modules, 'optax' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert found.stdout.strip() == "False False"


# ---------------------------------------------------------------------- fixed


def test_one_batch_is_the_very_step_of_a_program_alone_bit_for_bit():
    program, (step, _) = Line(), stepper("fixed")
    ours, theirs = step.init(0), step.init(0)
    following = iter(batches_of(program, 5))
    for batch in batches_of(program, 5):
        ours, loss, samples = step.step(ours, following)
        theirs, expected = alone(program, theirs, batch)
        assert samples == 8 and np.array_equal(loss, expected)
    assert equal(ours, theirs)
    assert step.step(ours, following) is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_several_batches_give_the_step_of_their_samples_together(dtype):
    program = Line(optax.sgd(0.1), dtype)
    step, _ = stepper("fixed:batches=4", program)
    given = batches_of(program, 8)
    following, ours, theirs = iter(given), step.init(0), step.init(0)
    for four in (given[:4], given[4:]):
        ours, loss, samples = step.step(ours, following)
        theirs, expected = alone(program, theirs, joined(four))
        assert samples == 32
        close(loss, expected, 1e-5 if dtype == jnp.float32 else 1e-2)
    assert ours.params["w"].dtype == dtype
    close(*(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state.params) for state in (ours, theirs)), 1e-2)
    if dtype == jnp.float32:
        close(ours, theirs)


def test_data_that_ends_within_a_step_makes_it_a_smaller_one():
    program = Line(optax.sgd(0.1))
    step, _ = stepper("fixed:batches=4", program)
    given = batches_of(program, 6)
    following, state = iter(given), step.init(0)
    state, _, _ = step.step(state, following)
    expected, _ = alone(program, TrainState(*jax.tree.map(jnp.copy, tuple(state))), joined(given[4:]))
    state, _, samples = step.step(state, following)
    assert samples == 16
    close(state, expected)
    assert step.step(state, following) is None


def test_the_state_that_was_given_is_used_up():
    for text in ("fixed:batches=1", "fixed:batches=2", "timed:partitions=4"):
        step, _ = stepper(text, part_seconds=1.0)
        state = step.init(0)
        step.step(state, iter(batches_of(Line(), 2)))
        assert state.params["w"].is_deleted()


# ---------------------------------------------------------------------- timed


def test_as_many_parts_are_used_as_can_be_begun_in_time():
    program = Line(optax.sgd(0.1))
    step, clock = stepper("timed:seconds=1,partitions=4", program, part_seconds=0.25)
    given = batches_of(program, 9)
    following, state, expected, used = iter(given), step.init(0), step.init(0), 0
    whole = joined(given)
    for number, cost in enumerate([0.3, 0.25, 0.4, 5.0, 0.11], start=1):  # a part is begun while less than 1 s is over
        step.hooks = LoopHooks(before_part=lambda cost=cost: clock.sleep(cost))
        parts = {1: 4, 2: 4, 3: 3, 4: 1, 5: 10}[number]
        began = clock.now
        state, loss, samples = step.step(state, following)
        assert samples == 2 * parts  # a batch of 8 points in 4 parts
        assert clock.now - began == pytest.approx(parts * cost)
        taken = tuple(array[used : used + samples] for array in whole)  # what was left of a batch comes first
        expected, loss_expected = alone(program, expected, taken)
        used += samples
        close(state, expected)
        close(loss, loss_expected)


def test_a_delay_before_the_step_counts_against_its_time():
    step, _ = stepper("timed:seconds=1,partitions=4", part_seconds=0.1, step_seconds=0.75)
    assert step.step(step.init(0), iter(batches_of(Line(), 9)))[2] == 2 * 3


def test_a_step_that_is_late_before_it_begins_uses_one_part_still():
    step, clock = stepper("timed:seconds=1,partitions=4", step_seconds=7.0)
    assert step.step(step.init(0), iter(batches_of(Line(), 9)))[2] == 2
    assert clock.now == 107.0


@pytest.mark.parametrize("text", ["timed:seconds=1,partitions=4", "timed:seconds=1,partitions=1"])
def test_a_timed_step_ends_cleanly_with_the_data(text):
    step, _ = stepper(text, part_seconds=0.01)
    following, state = iter(batches_of(Line(), 3)), step.init(0)
    state, _, samples = step.step(state, following)
    assert samples == 24
    assert step.step(state, following) is None
    assert step.step(state, following) is None and not state.params["w"].is_deleted()


class Tally(Line):
    """A program whose step of rate 1 takes the mean of the samples, rows of the identity, from the parameters."""

    def init(self, seed):
        return jnp.zeros(32)

    def loss(self, params, batch):
        return jnp.mean(batch @ params)


tally_stepper = cache(lambda partitions: stepper(f"timed:seconds=1,partitions={partitions}", Tally(optax.sgd(1.0))))


@settings(max_examples=examples(30))
@given(costs=st.lists(st.floats(0.05, 3.0), min_size=1, max_size=6), partitions=st.sampled_from([1, 4]))
def test_every_sample_is_used_once_and_in_order_whatever_the_parts_cost(costs, partitions):
    step, clock = tally_stepper(partitions)
    costs_of_parts = cycle(costs)
    step.hooks = LoopHooks(before_part=lambda: clock.sleep(next(costs_of_parts)))
    following, state, used = iter(np.eye(32, dtype=np.float32).reshape(4, 8, 32)), step.init(0), 0
    before = np.zeros(32)
    while (result := step.step(state, following)) is not None:
        state, _, samples = result
        taken = samples * (before - np.array(state.params))
        before = np.array(state.params)
        np.testing.assert_allclose(taken, [used <= index < used + samples for index in range(32)], atol=1e-5)
        used += samples
    assert used == 32


def test_a_batch_that_cannot_be_cut_names_the_array():
    program = Line()
    step, _ = stepper("timed:seconds=1,partitions=4", program)
    bad = {"text": np.zeros((8, 3), np.float32), "more": {"label": np.zeros(6, np.int32)}}
    with pytest.raises(
        ConfigError, match=r"partitions=4': the batch's more/label has the shape \[6\], .* 4 equal parts"
    ):
        step.step(step.init(0), iter([bad]))
    with pytest.raises(ConfigError, match=r"the batch's array has the shape \[\]"):
        step.step(step.init(0), iter([np.float32(1.0)]))
    with pytest.raises(ConfigError, match=r"a batch of 8 points cannot be cut into 3 equal parts; change partitions"):
        stepper("timed:partitions=3", program)


@pytest.mark.parametrize("text", ["fixed:batches=1", "fixed:batches=3", "timed:seconds=1,partitions=4"])
def test_compiling_changes_nothing_and_leaves_nothing_to_compile(text, caplog):
    program = Line()
    step, clock = stepper(text, program, part_seconds=0.4)
    state = step.init(0)
    before = jax.tree.map(np.array, state)
    assert step.compile(state, batches_of(program, 1)[0]) >= 0
    assert equal(before, state) and clock.now == 100.0
    following = iter(batches_of(program, 9))
    with jax.log_compiles():
        for _ in range(2):
            state, _, _ = step.step(state, following)
    assert not [record for record in caplog.records if "XLA compilation" in record.getMessage()]


# ---------------------------------------------------------------------- k by speed


@pytest.mark.parametrize(
    ("own", "rates", "expected"),
    [
        (10.0, [10.0, 10.0, 10.0], 32),
        (5.0, [10.0] * 9 + [5.0], 16),
        (1.0, [10.0] * 9 + [1.0], 3),
        (0.01, [10.0] * 9, 1),
        (10.0, [float("nan"), 0.0, 10.0, float("inf"), -1.0], 32),
        (float("nan"), [10.0, 20.0], 32),
        (0.0, [10.0, 20.0], 32),
        (10.0, [], 32),
        (10.0, [float("nan")], 32),
        (10.0, [10.0, 1e300], 32),
        (10.0, [10.0, 10.0, 10.0, 1e300], 32),
    ],
)
def test_a_slower_node_makes_fewer_steps_and_an_unknown_rate_changes_nothing(own, rates, expected):
    assert dynamic_every(32, own, rates) == expected


def test_one_exceptional_node_of_eleven_or_more_does_not_shrink_the_k_of_the_others():
    rates = [10.0] * 19 + [1000.0]
    assert dynamic_every(32, 10.0, rates) == 32
    assert dynamic_every(32, 10.0, [10.0] * 10 + [40.0]) == 32
    with pytest.raises(ConfigError, match="every must be at least 1, got 0"):
        dynamic_every(0, 1.0, rates)


def test_among_fewer_than_eleven_nodes_an_exceptional_one_does_shrink_the_k_of_the_others():
    assert dynamic_every(32, 10.0, [10.0] * 3 + [40.0]) == 10
    assert dynamic_every(32, 10.0, [10.0] * 9 + [40.0]) == 25


@given(every=st.integers(1, 200), rates=st.lists(st.floats(0.1, 1e3), min_size=1, max_size=12), scale=st.floats(0.1, 9))
def test_only_the_ratios_of_the_rates_count(every, rates, scale):
    most = IMPROBABLE * statistics.median_low(rates)
    assume(all(abs(rate - most) > 1e-9 * most for rate in rates))  # else rounding says which of them are improbable
    ours = dynamic_every(every, rates[0], rates)
    scaled = dynamic_every(every, rates[0] * scale, [rate * scale for rate in rates])
    assert abs(ours - scaled) <= 1 and ours >= 1  # rounding, at a half

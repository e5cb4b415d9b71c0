"""Outer optimizers: the formula, slab by slab, and their names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.core.errors import ConfigError
from zmqtrain.strategies.outer import OUTER_OPTIMIZERS, adam, delayed_nesterov, nesterov, outer_from_spec, sgd


def gradients(rounds, count):
    return np.random.default_rng(0).standard_normal((rounds, count)).astype(np.float32)


def test_sgd_with_rate_one_is_plain_averaging():
    optimizer, (gradient,) = outer_from_spec("sgd"), gradients(1, 10)
    assert optimizer.init(10) == {}
    np.testing.assert_array_equal(optimizer.update(gradient, {}, True), gradient)


def test_nesterov_follows_its_formula():
    optimizer = nesterov(rate=0.7, momentum=0.9)
    state, m = optimizer.init(150_000), np.zeros(150_000)
    for g in gradients(5, 150_000):
        before = g.copy()
        step = optimizer.update(g, state, True)
        m = 0.9 * m + g
        assert step.dtype == np.float32 and step is not g
        np.testing.assert_allclose(step, 0.7 * (g + 0.9 * m), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(g, before)


@pytest.mark.parametrize("spec", ["sgd:rate=0.5", "nesterov", "delayed_nesterov", "delayed_nesterov:share=0.3", "adam"])
def test_stepping_part_by_part_gives_the_same_bits_and_the_same_state(spec):
    optimizer = outer_from_spec(spec)
    whole, parts = optimizer.init(1000), optimizer.init(1000)
    for g, turn in zip(gradients(4, 1000), (False, True, True, False), strict=True):
        steps = [
            optimizer.update(g[i : i + 300], {name: array[i : i + 300] for name, array in parts.items()}, turn)
            for i in range(0, 1000, 300)
        ]
        np.testing.assert_array_equal(np.concatenate(steps), optimizer.update(g, whole, turn))
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])


counts = st.integers(1, 6)
momenta = st.floats(0, 0.9375, width=32)
shares = st.sampled_from([0.0, 0.25, 0.7, 1.0])


@given(counts, counts, momenta, shares)
@settings(max_examples=examples(30))
def test_n_equal_arrivals_under_delayed_nesterov_are_one_nesterov_step_on_their_mean(nodes, turns, momentum, share):
    delayed, plain = delayed_nesterov(0.8, momentum, share), nesterov(0.8, momentum)
    state, expected = delayed.init(50), plain.init(50)
    for u in gradients(turns, 50):
        moved = sum(delayed.update(u / np.float32(nodes), state, arrival == nodes) for arrival in range(1, nodes + 1))
        np.testing.assert_allclose(moved, plain.update(u, expected, True), rtol=1e-4, atol=1e-5)


@given(counts, st.randoms(use_true_random=False), shares)
@settings(max_examples=examples(30))
def test_the_order_and_the_grouping_of_arrivals_within_a_turn_do_not_matter_to_delayed_nesterov(nodes, random, share):
    optimizer = delayed_nesterov(0.8, 0.5, share)
    states, arrivals = [optimizer.init(50) for _ in range(2)], gradients(3 * nodes, 50) / np.float32(nodes)
    for of_turn in np.split(arrivals, 3):
        shuffled = random.sample(list(of_turn), nodes)
        cut = random.randint(1, nodes)
        releases = [sum(shuffled[:cut]), sum(shuffled[cut:])] if cut < nodes else [sum(shuffled)]
        moved = [
            sum(optimizer.update(g, state, g is groups[-1]) for g in groups)
            for groups, state in zip((list(of_turn), releases), states, strict=True)
        ]
        np.testing.assert_allclose(moved[0], moved[1], rtol=1e-4, atol=1e-5)


def test_before_the_turn_delayed_nesterov_makes_plain_steps_and_its_momentum_stands():
    optimizer = delayed_nesterov(rate=0.8, momentum=0.5)
    state = optimizer.init(10)
    m, b = np.zeros(10), np.zeros(10)
    for g, turn in zip(gradients(9, 10), [False, False, True] * 3, strict=True):
        b = b + g
        m, b = (0.5 * m + b, 0 * b) if turn else (m, b)
        step = optimizer.update(g, state, turn)
        np.testing.assert_allclose(step, 0.8 * (g + 0.5 * m * turn), rtol=1e-4, atol=1e-5)


def test_a_share_gives_the_momentums_step_earlier_and_costs_one_more_array():
    assert set(delayed_nesterov().init(3)) == {"gathered"}
    early, late = delayed_nesterov(1, 0.5, share=1), delayed_nesterov(1, 0.5)
    ahead, behind, g = early.init(3), late.init(3), np.ones(3, np.float32)
    assert set(ahead) == {"gathered", "ahead"}
    steps = [(early.update(g, ahead, turn)[0], late.update(g, behind, turn)[0]) for turn in (False, False, True)]
    assert steps == [(1.5, 1), (1.5, 1), (1.5, 2.5)]


def test_adam_follows_its_formula():
    optimizer = adam(rate=0.1, beta1=0.8, beta2=0.9, epsilon=0.01)
    state, m, v = optimizer.init(150_000), np.zeros(150_000), np.full(150_000, 1e-4)
    for g in gradients(5, 150_000):
        before = g.copy()
        step = optimizer.update(g, state, True)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * np.square(g, dtype=np.float64)
        assert step.dtype == np.float32
        np.testing.assert_allclose(step, 0.1 * m / (np.sqrt(v) + 0.01), rtol=1e-3, atol=1e-6)
        np.testing.assert_array_equal(g, before)


def test_adam_outlives_a_gradient_whose_square_is_no_float32():
    optimizer = adam()
    state = optimizer.init(4)
    huge = np.array([1e30, -3e38, 1, 0], np.float32)
    for g in (huge, -huge, huge):
        assert np.isfinite(optimizer.update(g, state, True)).all()
    assert all(np.isfinite(array).all() for array in state.values())


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS.defaults)
def test_no_gradient_from_the_beginning_is_no_step(name):
    optimizer = outer_from_spec(name)
    state, nothing = optimizer.init(5), np.zeros(5, np.float32)
    for turn in (False, True):
        np.testing.assert_array_equal(optimizer.update(nothing, state, turn), nothing)


def test_names_are_canonical_and_name_the_same_optimizer():
    assert outer_from_spec("sgd").name == sgd().name == sgd(1).name == "sgd:rate=1"
    assert outer_from_spec("nesterov:momentum=0.5").name == nesterov().name == "nesterov:rate=0.8,momentum=0.5"
    assert delayed_nesterov().name == "delayed_nesterov:rate=0.8,momentum=0.5,share=0"
    assert adam().name == "adam:rate=0.01,beta1=0.9,beta2=0.99,epsilon=0.001"
    for spec in (
        "sgd:rate=0.1",
        "sgd:rate=1e-07",
        "nesterov:rate=0.3,momentum=0",
        "delayed_nesterov:rate=1,momentum=0.3,share=1",
        "adam:rate=1,beta1=0,beta2=0,epsilon=1e-12",
    ):
        assert outer_from_spec(outer_from_spec(spec).name) == outer_from_spec(spec)
        assert outer_from_spec(spec).name == spec


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("adamw", "sgd:rate=1, nesterov:rate=0.8,momentum=0.5, delayed_nesterov:.*, adam:"),
        ("sgd:rate=fast", "'fast' in 'rate=fast' is not a finite number"),
        ("sgd:rate=nan", "not a finite number"),
        ("sgd:rate=0", "rate=0 is not in 0 < rate <= 1000"),
        ("sgd:rate=1e300", "rate=1e\\+300 is not in"),
        ("nesterov:momentum=1", "momentum=1 is not in"),
        ("nesterov:momentum=-0.1", "momentum=-0.1 is not in"),
        ("delayed_nesterov:share=1.1", "share=1.1 is not in 0 <= share <= 1"),
        ("delayed_nesterov:share=-0.1", "share=-0.1 is not in"),
        ("delayed_nesterov:momentum=1", "momentum=1 is not in 0 <= momentum < 1"),
        ("adam:rate=0", "rate=0 is not in"),
        ("adam:beta1=1", "beta1=1 is not in 0 <= beta1 < 1"),
        ("adam:beta2=-1", "beta2=-1 is not in"),
        ("adam:epsilon=0", "epsilon=0 is not in 1e-12 <= epsilon <= 1"),
        ("sgd:momentum=0.5", "sgd takes rate=1"),
        ("nesterov:rate=1,rate=1", "given twice"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_place_and_the_choices(spec, place):
    with pytest.raises(ConfigError, match=place):
        outer_from_spec(spec)

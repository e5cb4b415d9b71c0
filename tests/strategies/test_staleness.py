"""What late progress weighs, and what it should have been."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.grids import examples
from zmqtrain.core.errors import ConfigError, LocalProtocolError
from zmqtrain.strategies.weights import compensate, compensation, constant, polynomial, staleness_from_spec

SPECS = ("constant", "polynomial:power=0.5", "compensation:strength=0.1,versions=8")

any_float = st.floats(allow_nan=False, allow_infinity=False, width=32)
pairs = st.integers(0, 6).flatmap(
    lambda size: st.tuples(*[arrays(np.float32, size, elements=any_float) for _ in range(2)])
)
strengths = st.sampled_from([0.0, 0.01, 0.1, 1.0])


@pytest.mark.parametrize("spec", SPECS)
@given(st.integers(0, 10**9))
@settings(max_examples=examples(30))
def test_damping_is_one_in_time_and_never_grows_or_reaches_zero(spec, staleness):
    damping = staleness_from_spec(spec).damping
    assert damping(0) == 1
    assert 0 < damping(staleness + 1) <= damping(staleness) <= 1


def test_only_the_polynomial_damps():
    assert polynomial(0.5).damping(3) == 0.5
    assert polynomial(2).damping(3) == 1 / 16
    assert constant().damping(1000) == compensation().damping(1000) == 1


def test_only_compensation_asks_for_old_versions():
    assert [(rule.strength, rule.versions) for rule in map(staleness_from_spec, SPECS)] == [(0, 0), (0, 0), (0.1, 8)]


@pytest.mark.parametrize("spec", SPECS)
def test_a_contribution_from_the_future_is_refused(spec):
    with pytest.raises(LocalProtocolError, match="-1 versions late"):
        staleness_from_spec(spec).damping(-1)


@given(pairs, strengths)
@settings(max_examples=examples(80))
def test_compensation_turns_no_sign_and_at_most_doubles(pair, strength):
    u, moved = pair
    before = [one.copy() for one in pair]
    result = compensate(u, moved, strength)
    assert result.dtype == np.float32 and not np.shares_memory(result, u)
    assert (result * np.sign(u) >= 0).all()
    assert (np.abs(result.astype(np.float64)) <= 2 * np.abs(u.astype(np.float64)) * (1 + 1e-6)).all()
    np.testing.assert_array_equal(pair, before)


@given(pairs, st.sampled_from([0.01, 0.1, 1.0]))
@settings(max_examples=examples(60))
def test_progress_is_shorter_where_the_parameters_have_moved_its_way_and_longer_where_against_it(pair, strength):
    u, moved = pair
    result, way = compensate(u, moved, strength), np.sign(u) * np.sign(moved)
    assert (np.abs(result[way > 0]) <= np.abs(u[way > 0])).all()
    assert (np.abs(result[way < 0]) >= np.abs(u[way < 0])).all()
    np.testing.assert_array_equal(result[way == 0], u[way == 0])


@given(pairs)
@settings(max_examples=examples(30))
def test_without_strength_or_movement_progress_stays_as_it_is(pair):
    u, moved = pair
    np.testing.assert_array_equal(compensate(u, moved, 0.0), u)
    np.testing.assert_array_equal(compensate(u, np.zeros_like(moved), 0.1), u)


def test_where_progress_is_usual_the_strength_is_the_share_of_a_displacement_that_is_undone():
    u, moved = np.float32([0.01, -0.01, 0.01, -0.01]), np.float32([0.02, 0.02, -0.02, 0.0])
    np.testing.assert_allclose(compensate(u, moved, 0.1), u - 0.1 * moved, rtol=1e-6)


def test_a_long_vector_is_compensated_by_the_mean_square_of_all_of_it():
    u, moved = np.random.default_rng(0).standard_normal((2, 150_000)).astype(np.float32) * np.float32(0.01)
    u[:70_000] *= 3
    factor = np.clip(1 - 0.1 * u.astype(np.float64) * moved / np.mean(np.square(u, dtype=np.float64)), 0, 2)
    np.testing.assert_allclose(compensate(u, moved, 0.1), u * factor, rtol=1e-5)


@pytest.mark.parametrize("units", [1e-6, 1e3])
def test_compensation_does_not_depend_on_units(units):
    u, moved = np.random.default_rng(0).standard_normal((2, 500)).astype(np.float32)
    scaled = compensate(u * np.float32(units), moved * np.float32(units), 0.1)
    np.testing.assert_allclose(scaled / units, compensate(u, moved, 0.1), rtol=1e-4, atol=1e-6)


def test_on_a_quadratic_compensated_progress_is_closer_to_what_the_new_place_would_have_given():
    draw = np.random.default_rng(1)
    root = draw.uniform(0.5, 1.5, 4000)  # of the curvature: gradients are as large as noise times this
    start, moved = draw.standard_normal((2, 4000)) * 0.1
    noise = root * draw.standard_normal(4000)
    stale, fresh = -0.1 * (root**2 * start + noise), -0.1 * (root**2 * (start + moved) + noise)
    compensated = compensate(stale.astype(np.float32), moved.astype(np.float32), 0.1 / 3)
    assert np.linalg.norm(compensated - fresh) < 0.85 * np.linalg.norm(stale - fresh)


def test_names_are_canonical_and_name_the_same_rule():
    for spec in SPECS:
        assert staleness_from_spec(spec).name == spec
        assert staleness_from_spec(spec) is staleness_from_spec(spec.partition(":")[0])


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("hinge", "constant, polynomial:power=0.5, compensation:strength=0.1,versions=8"),
        ("polynomial:power=0", "power=0 is not in 0 < power <= 10"),
        ("polynomial:power=11", "power=11 is not in"),
        ("compensation:strength=0", "strength=0 is not in 0 < strength <= 1"),
        ("compensation:strength=2", "strength=2 is not in"),
        ("compensation:versions=0", "versions=0 is not in 1 <= versions <= 1024"),
        ("compensation:versions=1.5", "not a whole number"),
        ("constant:power=1", "constant takes no arguments"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_place_and_the_choices(spec, place):
    with pytest.raises(ConfigError, match=place):
        staleness_from_spec(spec)

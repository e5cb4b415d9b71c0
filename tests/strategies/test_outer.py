"""Outer optimizers: the formula, slab by slab, and their names."""

from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.strategies.outer import nesterov, outer_from_spec, sgd


def gradients(rounds, count):
    return np.random.default_rng(0).standard_normal((rounds, count)).astype(np.float32)


def test_sgd_with_rate_one_is_plain_averaging():
    optimizer, (gradient,) = outer_from_spec("sgd"), gradients(1, 10)
    assert optimizer.init(10) == {}
    np.testing.assert_array_equal(optimizer.update(gradient, {}), gradient)


def test_nesterov_follows_its_formula():
    optimizer = nesterov(rate=0.7, momentum=0.9)
    state, m = optimizer.init(150_000), np.zeros(150_000)
    for g in gradients(5, 150_000):
        before = g.copy()
        step = optimizer.update(g, state)
        m = 0.9 * m + g
        assert step.dtype == np.float32 and step is not g
        np.testing.assert_allclose(step, 0.7 * (g + 0.9 * m), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(g, before)


@pytest.mark.parametrize("spec", ["sgd:rate=0.5", "nesterov"])
def test_stepping_part_by_part_gives_the_same_bits_and_the_same_state(spec):
    optimizer = outer_from_spec(spec)
    whole, parts = optimizer.init(1000), optimizer.init(1000)
    for g in gradients(4, 1000):
        steps = [
            optimizer.update(g[i : i + 300], {name: array[i : i + 300] for name, array in parts.items()})
            for i in range(0, 1000, 300)
        ]
        np.testing.assert_array_equal(np.concatenate(steps), optimizer.update(g, whole))
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])


def test_names_are_canonical_and_name_the_same_optimizer():
    assert outer_from_spec("sgd").name == sgd().name == sgd(1).name == "sgd:rate=1"
    assert outer_from_spec("nesterov:momentum=0.5").name == nesterov().name == "nesterov:rate=0.8,momentum=0.5"
    for spec in ("sgd:rate=0.1", "sgd:rate=1e-07", "nesterov:rate=0.3,momentum=0"):
        assert outer_from_spec(outer_from_spec(spec).name) == outer_from_spec(spec)
        assert outer_from_spec(spec).name == spec


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("adam", "sgd:rate=1, nesterov:rate=0.8,momentum=0.5"),
        ("sgd:rate=fast", "'fast' in 'rate=fast' is not a finite number"),
        ("sgd:rate=nan", "not a finite number"),
        ("sgd:rate=0", "rate=0 is not in 0 < rate <= 1000"),
        ("sgd:rate=1e300", "rate=1e\\+300 is not in"),
        ("nesterov:momentum=1", "momentum=1 is not in"),
        ("nesterov:momentum=-0.1", "momentum=-0.1 is not in"),
        ("sgd:momentum=0.5", "sgd takes rate=1"),
        ("nesterov:rate=1,rate=1", "given twice"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_place_and_the_choices(spec, place):
    with pytest.raises(ConfigError, match=place):
        outer_from_spec(spec)

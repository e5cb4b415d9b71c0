"""The server's steps are optax's, in any pieces, in either dtype."""

from __future__ import annotations

import numpy as np
import optax
import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.parameter_server.store import OPTIMIZERS as FAMILIES
from zmqtrain.parameter_server.store import optimizer_from_spec

CASES = {
    "sgd:rate=0.1": optax.sgd(0.1),
    "momentum:rate=0.05,momentum=0.9": optax.sgd(0.05, momentum=0.9),
    "momentum:rate=0.05,momentum=0.5,nesterov=1": optax.sgd(0.05, momentum=0.5, nesterov=True),
    "adam:rate=0.01": optax.adam(0.01),
    "adam:rate=0.1,beta1=0.5,beta2=0.9,epsilon=0.001": optax.adam(0.1, 0.5, 0.9, 0.001),
}


def gradients(steps, count):
    return np.random.default_rng(1).standard_normal((steps, count)).astype(np.float32)


def step_all(spec, values, pushed, pieces=1):
    optimizer = optimizer_from_spec(spec)
    state = {slot: np.zeros_like(values) for slot in optimizer.slots}
    for step, gradient in enumerate(pushed, 1):
        for place in np.array_split(np.arange(values.size), pieces):
            part = slice(place[0], place[-1] + 1)
            views = {slot: array[part] for slot, array in state.items()}
            optimizer.update(values[part], gradient[part].astype(values.dtype), views, step)
    return values


@pytest.mark.parametrize("spec", CASES)
def test_the_steps_are_those_of_optax(spec):
    theirs = optax_steps(CASES[spec], np.linspace(-1, 1, 100, dtype=np.float32), gradients(20, 100))
    ours = step_all(spec, np.linspace(-1, 1, 100, dtype=np.float32), gradients(20, 100))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


def optax_steps(optimizer, values, pushed):
    state = optimizer.init(values)
    for gradient in pushed:
        updates, state = optimizer.update(gradient, state, values)
        values = optax.apply_updates(values, updates)
    return np.asarray(values)


@pytest.mark.parametrize("spec", [spec for spec in CASES if not spec.startswith("adam")])
def test_without_bias_correction_they_are_so_bit_for_bit(spec):
    theirs = optax_steps(CASES[spec], np.ones(100, np.float32), gradients(20, 100))
    np.testing.assert_array_equal(step_all(spec, np.ones(100, np.float32), gradients(20, 100)), theirs)


@pytest.mark.parametrize("spec", CASES)
def test_pieces_are_stepped_as_the_whole_is(spec):
    whole = step_all(spec, np.ones(100, np.float32), gradients(5, 100))
    np.testing.assert_array_equal(step_all(spec, np.ones(100, np.float32), gradients(5, 100), 7), whole)


@pytest.mark.parametrize("spec", CASES)
def test_double_precision_stays_double(spec):
    values = step_all(spec, np.ones(100), gradients(5, 100))
    assert values.dtype == np.float64
    np.testing.assert_allclose(values, step_all(spec, np.ones(100, np.float32), gradients(5, 100)), rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_name_is_canonical(name):
    optimizer = optimizer_from_spec(name)
    assert optimizer_from_spec(optimizer.name).name == optimizer.name


@pytest.mark.parametrize(
    "text", ["sgd:rate=0", "momentum:momentum=1", "adam:beta2=1", "adam:epsilon=0", "momentum:nesterov=2", "lamb"]
)
def test_what_is_no_optimizer_is_refused(text):
    with pytest.raises(ConfigError):
        optimizer_from_spec(text)

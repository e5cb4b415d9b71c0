"""Delays are drawn as the mixture says, and the same at each repetition."""

from __future__ import annotations

from math import erf, exp, pi, sqrt

import numpy as np
import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.train.induce import MIXTURES, Induced, induced_from_spec


def mean_of(mixture):
    """The mean of a mixture of folded normals, in closed form."""

    def component(mean, deviation):
        if deviation == 0:
            return abs(mean)
        z = mean / deviation
        return mean * erf(z / sqrt(2)) + deviation * exp(-z * z / 2) * sqrt(2 / pi)

    return sum(w * component(m, s) for m, s, w in mixture) / sum(w for *_, w in mixture)


def draws(delays, count):
    return np.array([delays() for _ in range(count)])


def test_the_named_mixtures_are_those_of_the_anytime_minibatch_code():
    assert MIXTURES == {
        "niagara": ((0, 0, 0.4), (0, 0.4, 0.3), (2, 0.3, 0.2), (5, 0.3, 0.1)),
        "cedar": ((0, 0, 0.4), (0.05, 0.04, 0.3), (0.15, 0.03, 0.2), (0.25, 0.03, 0.1)),
    }
    assert mean_of(MIXTURES["niagara"]) == pytest.approx(0.996, abs=1e-3)


@pytest.mark.parametrize("spec", ["niagara", "cedar", "mixture=0.1:0.02:0.8/0.3:0.05:0.2", "mixture=1:0:3/5:0:1"])
def test_the_draws_have_the_mean_of_the_mixture_and_none_is_negative(spec):
    induced = induced_from_spec(spec)
    found = draws(induced.compute_delays("pc-1"), 20_000)
    assert found.min() >= 0
    assert found.mean() == pytest.approx(mean_of(induced.compute), abs=4 * found.std() / sqrt(len(found)))


def test_each_component_is_drawn_as_often_as_its_weight_says():
    found = draws(induced_from_spec("mixture=1:0:3/5:0:1").compute_delays("pc-1"), 4000)
    assert set(found) == {1.0, 5.0}
    assert (found == 1.0).mean() == pytest.approx(0.75, abs=0.03)


def test_message_delays_are_the_absolute_value_of_a_gaussian():
    found = draws(induced_from_spec("message=0.05").message_delays("pc-1"), 20_000)
    assert found.min() >= 0
    assert found.mean() == pytest.approx(0.05 * sqrt(2 / pi), rel=0.03)
    assert np.sqrt(np.mean(found**2)) == pytest.approx(0.05, rel=0.03)


def test_the_draws_depend_on_the_seed_and_the_name_and_on_nothing_else():
    induced = induced_from_spec("cedar,message=0.05", seed=3)
    compute, messages = draws(induced.compute_delays("pc-1"), 20), induced.message_delays("pc-1")
    again = induced_from_spec("message=0.05,cedar", seed=3)
    mixed = again.compute_delays("pc-1")
    between = again.message_delays("pc-1")
    interleaved = np.array([(mixed(), between()) for _ in range(20)])
    np.testing.assert_array_equal(interleaved, np.stack([compute, draws(messages, 20)], axis=1))
    for other in (again.compute_delays("pc-2"), induced_from_spec("cedar", seed=4).compute_delays("pc-1")):
        assert not np.array_equal(draws(other, 20), compute)


def test_the_scale_is_the_mixtures_alone():
    scaled = induced_from_spec("niagara,scale=0.1,message=0.05")
    assert scaled.compute == tuple((pytest.approx(m / 10), pytest.approx(s / 10), w) for m, s, w in MIXTURES["niagara"])
    assert scaled.message_sigma == 0.05
    whole = draws(induced_from_spec("niagara").compute_delays("a"), 50)
    np.testing.assert_allclose(draws(scaled.compute_delays("a"), 50), whole / 10, atol=1e-12)


def test_without_a_mixture_or_a_deviation_nothing_is_late():
    assert draws(induced_from_spec("message=0.05").compute_delays("a"), 3).tolist() == [0, 0, 0]
    assert draws(induced_from_spec("cedar").message_delays("a"), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", r"nothing stands where a piece should; the choices are niagara, cedar, mixture=.*scale=.*message="),
        ("ceder", r"cannot read 'ceder'; the choices are niagara, cedar"),
        ("cedar=3", r"cannot read 'cedar=3'; the choices are"),
        ("cedar,niagara", "'niagara' is a second mixture; leave one out"),
        ("cedar,", "nothing stands where a piece should"),
        ("scale=0.1", "none is named; as in 'cedar,scale=0.1'"),
        ("cedar,message=1,message=2", "message is given twice"),
        ("mixture=1:2", r"cannot read '1:2'; a component is mean:deviation:weight"),
        ("mixture=1:2:x", "'x' in '1:2:x' is not a finite number"),
        ("mixture=1:-2:1", "deviation >= 0 and weight > 0, got 1:-2:1"),
        ("mixture=1:2:0", "deviation >= 0 and weight > 0, got 1:2:0"),
        ("mixture=1e999:2:1", "deviation >= 0 and weight > 0, got inf:2:1"),
        ("cedar,message=nan", "'nan' in 'message=nan' is not a finite number"),
        ("cedar,message=-1", "deviation of a delta's delay must be at least 0 s, got -1"),
        ("cedar,scale=-1", "scale must be a finite number of at least 0, got -1"),
        ("cedar,scale=1e999", "scale must be a finite number of at least 0, got inf"),
    ],
)
def test_a_spec_that_cannot_be_read_is_refused_with_the_choices(spec, words):
    with pytest.raises(ConfigError, match=words):
        induced_from_spec(spec)


def test_a_negative_seed_is_refused():
    with pytest.raises(ConfigError, match="seed of induced delays must be at least 0, got -1"):
        Induced(seed=-1)

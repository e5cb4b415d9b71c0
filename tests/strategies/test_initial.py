"""Whether parameters descend from one beginning, and whose to begin with."""

from __future__ import annotations

from math import inf, isnan, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.strategies.measures import (
    are_related,
    explain_unrelated,
    relatedness,
)


def fresh(seed: int, *, dtype=np.float32):
    """A model of two layers: He initialised matrices, biases at 0, scales at 1."""
    draw = np.random.default_rng(seed)
    shapes = (30, 50), (50, 10)
    weights = [(draw.standard_normal(shape) * np.sqrt(2 / shape[0])).astype(dtype) for shape in shapes]
    return [leaf for weight in weights for leaf in (weight, np.zeros(len(weight[0]), dtype), np.ones(8, dtype))]


@pytest.mark.parametrize("seed", range(5))
def test_parameters_that_began_independently_are_unrelated_whatever_constants_they_share(seed):
    cosine = relatedness(fresh(2 * seed), fresh(2 * seed + 1))
    assert abs(cosine) < 0.1 and not are_related(cosine)


def test_parameters_that_went_some_way_from_one_beginning_are_related():
    begun = fresh(0)
    ends = [[a + b for a, b in zip(begun, fresh(seed), strict=True)] for seed in (1, 2)]  # each as far as it began
    assert relatedness(begun, begun) == pytest.approx(1)
    assert are_related(relatedness(*ends))


@given(st.integers(0, 5), st.floats(0.01, 100), st.floats(-100, 100))
@settings(max_examples=examples(30))
def test_scale_and_shift_of_a_whole_model_change_nothing_and_the_two_sides_are_alike(seed, scale, shift):
    a, b = fresh(seed, dtype=np.float64), fresh(seed + 1, dtype=np.float64)
    moved = [scale * leaf + shift for leaf in b]
    assert relatedness(a, moved) == pytest.approx(relatedness(a, b), abs=1e-6)
    assert relatedness(moved, a) == pytest.approx(relatedness(a, moved), abs=1e-12)


def test_a_model_of_vectors_alone_is_compared_by_them():
    a, b = ([np.random.default_rng(seed).standard_normal(400).astype(np.float32)] for seed in (0, 1))
    assert relatedness(a, a) == pytest.approx(1)
    assert abs(relatedness(a, b)) < 0.2


def test_parameters_that_begin_at_constants_show_no_different_beginnings():
    constants = [np.full((300, 300), 0.1, np.float32), np.zeros((4, 4), np.float32)]
    assert relatedness(constants, [leaf.copy() for leaf in constants]) == 1
    assert relatedness(constants, [leaf + np.eye(*leaf.shape, dtype=np.float32) for leaf in constants]) == 1
    assert relatedness([], []) == 1


def test_leaves_larger_than_a_piece_are_compared_whole():
    a = np.random.default_rng(0).standard_normal((500, 500)).astype(np.float32)
    b = a.copy()
    b[250:] *= -1
    a_centred, b_centred = a - a.mean(), b - b.mean()
    expected = (a_centred * b_centred).sum() / np.sqrt((a_centred**2).sum() * (b_centred**2).sum())
    assert relatedness([a], [b]) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_parameters_that_are_not_finite_are_unrelated_to_any(value):
    broken = fresh(0)
    broken[0][0, 0], broken[0][1, 1] = value, -value
    cosine = relatedness(broken, fresh(0))
    assert isnan(cosine) and not are_related(cosine)


def test_huge_parameters_are_compared():
    huge = [leaf * np.float32(1e37) for leaf in fresh(0)]
    assert relatedness(huge, fresh(0)) == pytest.approx(1)


def test_models_of_different_shapes_cannot_be_compared():
    with pytest.raises(LocalProtocolError, match=r"different models.*\(30, 50\)"):
        relatedness(fresh(0), fresh(0)[:-1])
    with pytest.raises(LocalProtocolError, match="different models"):
        relatedness([np.ones((2, 3))], [np.ones((3, 2))])


def test_the_explanation_names_the_nodes_the_reason_and_what_to_type():
    one = explain_unrelated(["pc-2"], [0.012])
    assert one.startswith("the parameters of pc-2 (cosine 0.01) are unrelated to the run's (")
    assert "--initial best" in one and "--initial founder" in one and "same checkpoint" in one
    assert "a, b and c" in explain_unrelated(["a", "b", "c"], [0.0, nan, -0.1]).replace(" (cosine 0.00)", "").replace(
        " (cosine nan)", ""
    ).replace(" (cosine -0.10)", "")
    for names, cosines in (([], []), (["a"], [])):
        with pytest.raises(LocalProtocolError, match="unrelated nodes"):
            explain_unrelated(names, cosines)

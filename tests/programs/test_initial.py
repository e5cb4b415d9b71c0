"""Draws fill a model, each leaf as its layout says: one for all, or one for each leaf of a large model."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from zmqtrain.programs import initial
from zmqtrain.programs.initial import Initial, draw_params

LAYOUT = {"a": {"w": Initial((50, 40), 0.5), "b": Initial((3,), value=1)}, "z": Initial((50, 40), 2.0)}


@pytest.fixture(params=[initial.MOST_AT_ONCE, 0])
def params(request, monkeypatch):
    monkeypatch.setattr(initial, "MOST_AT_ONCE", request.param)
    return draw_params(jax.random.key(0), LAYOUT)


def test_the_tree_the_shapes_and_the_type_are_those_of_the_layout(params):
    shapes = jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype.name), params, is_leaf=lambda leaf: hasattr(leaf, "shape")
    )
    assert shapes == {
        "a": {"w": ((50, 40), "float32"), "b": ((3,), "float32")},
        "z": ((50, 40), "float32"),
    }


def test_each_leaf_has_its_own_deviation_and_its_own_values(params):
    assert np.std(params["a"]["w"]) == pytest.approx(0.5, rel=0.1)
    assert np.std(params["z"]) == pytest.approx(2.0, rel=0.1)
    assert np.asarray(params["a"]["b"]).tolist() == [1, 1, 1]
    drawn = np.concatenate([np.ravel(params["a"]["w"]) / 0.5, np.ravel(params["z"]) / 2.0])
    assert len(np.unique(drawn)) > 0.99 * len(drawn)


def test_of_a_large_model_only_those_leaves_are_drawn_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(initial, "MOST_AT_ONCE", 0)
    alone = jax.jit(lambda key: draw_params(key, LAYOUT)["z"])
    key = jax.random.key(0)
    assert np.asarray(alone(key)).tobytes() == np.asarray(draw_params(key, LAYOUT)["z"]).tobytes()
    whole = jax.jit(lambda key: draw_params(key, LAYOUT))
    operations = [compiled.lower(key).compile().cost_analysis()["flops"] for compiled in (alone, whole)]
    assert operations[0] < 0.7 * operations[1]

"""One draw fills a whole model, each leaf as its layout says."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from zmqtrain.programs.initial import Initial, draw_params


@pytest.fixture(scope="module")
def params():
    layout = {"a": {"w": Initial((50, 40), 0.5), "b": Initial((3,), value=1)}, "z": Initial((30, 100), 2.0)}
    return jax.jit(lambda key: draw_params(key, layout))(jax.random.key(0))


def test_the_tree_the_shapes_and_the_type_are_those_of_the_layout(params):
    shapes = jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype.name), params, is_leaf=lambda leaf: hasattr(leaf, "shape")
    )
    assert shapes == {
        "a": {"w": ((50, 40), "float32"), "b": ((3,), "float32")},
        "z": ((30, 100), "float32"),
    }


def test_each_leaf_has_its_own_deviation_and_its_own_values(params):
    assert np.std(params["a"]["w"]) == pytest.approx(0.5, rel=0.1)
    assert np.std(params["z"]) == pytest.approx(2.0, rel=0.1)
    assert np.asarray(params["a"]["b"]).tolist() == [1, 1, 1]
    drawn = np.concatenate([np.ravel(params["a"]["w"]) / 0.5, np.ravel(params["z"]) / 2.0])
    assert len(np.unique(drawn)) > 0.99 * len(drawn)

"""What a loop trains comes back from the host to the very bits, whatever its leaves are, and where it was."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zmqtrain.core.errors import ModelMismatch
from zmqtrain.train.leaves import describe_tree, kept_leaves, pack_tree, pack_trees, unpack_tree

PARAMS = {"w": jnp.arange(12.0).reshape(3, 4) / 7, "half": jnp.array([1.5, -0.1], jnp.bfloat16)}


def tree_of(shift):
    moved = jax.tree.map(lambda leaf: leaf + jnp.asarray(shift, leaf.dtype), PARAMS)
    return {
        "optimizer": optax.adamw(0.1).init(moved),
        "params": moved,
        "key": jax.random.key(7 + shift),
        "raw_key": jax.random.PRNGKey(shift),
        "numbers": (3 + shift, 0.1 + shift, shift > 0),
        "numpy": np.full((2, 2), shift, np.int16),
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(shift),
    }


def bits(tree):
    leaves = [jax.random.key_data(leaf) if jnp.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key) else leaf
              for leaf in jax.tree.leaves(tree)]  # fmt: skip
    return [(np.asarray(leaf).tobytes(), np.shape(leaf), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves]


def test_every_kind_of_leaf_comes_back_to_the_very_bits():
    saved = tree_of(1)
    arrays = pack_tree(saved)
    assert all(array.dtype.kind in "biuf" and array.dtype != object for array in arrays)
    again = unpack_tree(tree_of(0), describe_tree(saved), arrays, "loop's state")
    assert bits(again) == bits(saved)
    assert type(again["numbers"][0]) is int and type(again["numpy"]) is np.ndarray


def test_what_is_packed_is_a_copy_that_no_later_step_can_touch():
    donated = jnp.ones(1000)
    (packed,) = pack_tree([donated])
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated).block_until_ready()
    np.testing.assert_array_equal(packed, np.ones(1000, np.float32))


def test_another_form_is_refused_with_the_leaf():
    saved = {"a": jnp.zeros(3)}
    with pytest.raises(ModelMismatch, match="state are not this program's: the leaf a") as refused:
        unpack_tree({"a": jnp.zeros(4)}, describe_tree(saved), pack_tree(saved), "state")
    assert refused.value.leaf == "a"
    with pytest.raises(ModelMismatch, match="is no array and no number"):
        pack_tree({"a": "words"})


def test_paths_that_come_twice_are_told_apart():
    tree = {"a/b": 1, "a": {"b": 2}}
    assert len({leaf.path for leaf in describe_tree(tree)}) == 2


def test_several_trees_are_kept_by_their_names():
    trees = {"params": {"w": jnp.ones(3)}, "anchor": {"w": jnp.zeros(3)}, "state": tree_of(2)}
    described, arrays = pack_trees(trees)
    for name, tree in trees.items():
        again = unpack_tree(tree, *kept_leaves(name, json.loads(json.dumps(described)), arrays), name)
        assert bits(again) == bits(tree)

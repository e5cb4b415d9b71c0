"""A state on the host, and back where it was."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zmqtrain.train.leaves import host_leaves, placed_like


def test_leaves_come_in_their_order_shape_and_dtype():
    one, other = host_leaves({"b": jnp.ones((2, 3), jnp.bfloat16), "a": jnp.arange(3)})
    assert (one.shape, one.dtype.name, other.shape, other.dtype.name) == ((3,), "int32", (2, 3), "bfloat16")


def test_a_state_of_counts_halves_and_keys_comes_back_to_the_bit():
    params = {"w": jnp.array([1.5, -2.25], jnp.bfloat16), "empty": jnp.zeros((0, 3))}
    state = (params, optax.adam(0.1).init(params), jax.random.key(7), 5)
    like = (
        jax.tree.map(jnp.zeros_like, params), optax.adam(0.1).init(params), jax.random.key(0), 0
    )  # fmt: skip
    back = placed_like(like, host_leaves(state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for one, other in zip(host_leaves(back), host_leaves(state), strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_equal(one, other)
    assert jax.random.uniform(back[2]) == jax.random.uniform(state[2])
    assert [leaf.dtype for leaf in jax.tree.leaves(back[:2])] == [leaf.dtype for leaf in jax.tree.leaves(state[:2])]


def test_what_was_put_on_a_device_stays_there():
    device = jax.devices()[0]
    put = jax.device_put(jnp.zeros(3), device)
    back = placed_like(put, [np.arange(3, dtype=np.float32)])
    assert back.committed and back.sharding == put.sharding and back.tolist() == [0, 1, 2]

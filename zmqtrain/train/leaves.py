"""Bring trees of arrays to the host, for whoever speaks no jax, and back: leaves in their flattening order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

__all__ = ["host_leaves", "host_state", "placed_like"]


def host_leaves(params: Any) -> list[NDArray[Any]]:
    """Return the leaves of a tree as numpy arrays, each in its own shape and dtype."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def host_state(state: Any) -> list[NDArray[Any]]:
    """Return the leaves of any state as numpy arrays; typed random keys as the numbers that they are made of."""
    return [np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf) for leaf in jax.tree.leaves(state)]


def placed_like(state: Any, arrays: Sequence[Any]) -> Any:
    """Return a tree like `state` of what `host_state` made of another, in the shapes, dtypes and places of its own."""
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [_like(leaf, new) for leaf, new in zip(leaves, arrays, strict=True)])


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(leaf: Any, values: Any) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(values), impl=jax.random.key_impl(leaf))
    like = np.asarray(leaf)
    values = np.array(values, like.dtype).reshape(like.shape)
    tied = isinstance(leaf, jax.Array) and leaf.committed
    return jax.device_put(values, leaf.sharding) if tied else jnp.asarray(values)

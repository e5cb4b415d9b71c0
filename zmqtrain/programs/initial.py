"""The first values of a model, drawn from one seed as its layout says.

Rule 1: one draw serves all leaves, in the order of the tree: one compilation, however many leaves there are.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Constant(NamedTuple):
    """A leaf that starts with one value everywhere."""

    shape: tuple[int, ...]
    value: float


class Normal(NamedTuple):
    """A leaf that starts with normal values of mean 0."""

    shape: tuple[int, ...]
    deviation: float


def draw_params(key: jax.Array, layout: Any) -> Any:
    """Return the float32 arrays that `layout` describes, in a tree like it.

    layout: nested dicts with leaves `Normal` and `Constant`.  Pure; to be called inside a jitted function.
    """
    leaves, tree = jax.tree.flatten(layout, is_leaf=lambda node: isinstance(node, Normal | Constant))
    sizes = [prod(leaf.shape) if isinstance(leaf, Normal) else 0 for leaf in leaves]
    values = jax.random.normal(key, (sum(sizes),), jnp.float32)
    arrays, offset = [], 0
    for leaf, size in zip(leaves, sizes, strict=True):
        if isinstance(leaf, Normal):
            arrays.append(leaf.deviation * values[offset : offset + size].reshape(leaf.shape))
        else:
            arrays.append(jnp.full(leaf.shape, leaf.value, jnp.float32))
        offset += size
    return jax.tree.unflatten(tree, arrays)

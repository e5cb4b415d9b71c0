"""The first values of a model, drawn from one seed as its layout says.

Rule 1: one draw serves all leaves, in the order of the tree: one compilation, however many leaves there are.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Initial(NamedTuple):
    """How a leaf starts: with normal values of mean 0, or, without a deviation, with one value everywhere."""

    shape: tuple[int, ...]
    deviation: float = 0.0
    value: float = 0.0


def draw_params(key: jax.Array, layout: Any) -> Any:
    """Return the float32 arrays that `layout` describes, in a tree like it.

    layout: nested dicts with leaves `Initial`.  Pure; to be called inside a jitted function.
    """
    leaves, tree = jax.tree.flatten(layout, is_leaf=lambda node: isinstance(node, Initial))
    ends = [*accumulate((prod(leaf.shape) if leaf.deviation else 0 for leaf in leaves), initial=0)]
    values = jax.random.normal(key, (ends[-1],), jnp.float32)
    arrays = [
        leaf.deviation * values[start:end].reshape(leaf.shape)
        if leaf.deviation
        else jnp.full(leaf.shape, leaf.value, jnp.float32)
        for leaf, (start, end) in zip(leaves, pairwise(ends), strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)

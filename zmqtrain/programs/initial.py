"""The first values of a model, drawn from one seed as its layout says.

Rule 1: one draw serves all leaves of a small model, in the order of the tree: one compilation, however many there are.
Rule 2: each leaf of a large model is drawn by itself, with a key of its own. A draw needs four times the memory of what
it gives, and a stage of a pipeline has room for its own leaves only. Leaves of one shape are compiled once.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MOST_AT_ONCE = 1 << 24
"""Values of the largest model that one draw fills: 64 MB."""


class Initial(NamedTuple):
    """How a leaf starts: with normal values of mean 0, or, without a deviation, with one value everywhere."""

    shape: tuple[int, ...]
    deviation: float = 0.0
    value: float = 0.0

    @property
    def drawn(self) -> int:
        """How many of its values are drawn."""
        return prod(self.shape) if self.deviation else 0


def draw_params(key: jax.Array, layout: Any) -> Any:
    """Return the float32 arrays that `layout` describes, in a tree like it. layout: nested dicts with leaves `Initial`.

    Pure, compiled by itself. Within a compiled function that gives some leaves of a large model only these are drawn.
    """
    leaves, tree = jax.tree.flatten(layout, is_leaf=lambda node: isinstance(node, Initial))
    if sum(leaf.drawn for leaf in leaves) <= MOST_AT_ONCE:
        return jax.tree.unflatten(tree, _all_at_once(key, tuple(leaves)))
    return jax.tree.unflatten(tree, [_one_leaf(key, number, leaf) for number, leaf in enumerate(leaves)])


@partial(jax.jit, static_argnames="leaves")
def _all_at_once(key: jax.Array, leaves: tuple[Initial, ...]) -> list[jax.Array]:
    ends = [*accumulate((leaf.drawn for leaf in leaves), initial=0)]
    values = jax.random.normal(key, (ends[-1],), jnp.float32)
    return [
        leaf.deviation * values[start:end].reshape(leaf.shape)
        if leaf.deviation
        else jnp.full(leaf.shape, leaf.value, jnp.float32)
        for leaf, (start, end) in zip(leaves, pairwise(ends), strict=True)
    ]


@partial(jax.jit, static_argnames="leaf")
def _one_leaf(key: jax.Array, number: Any, leaf: Initial) -> jax.Array:
    if not leaf.deviation:
        return jnp.full(leaf.shape, leaf.value, jnp.float32)
    return leaf.deviation * jax.random.normal(jax.random.fold_in(key, number), leaf.shape, jnp.float32)

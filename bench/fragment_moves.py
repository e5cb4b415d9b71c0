"""Make the moves of one fragment of a federation, jitted: what goes up, the hub's step, what goes down, and landing.

Rule 1: a codec sees slabs, as the product's does; those of one codec and one size are stacked and coded together.
Rule 2: what is compiled is kept by layout, fragment and codecs, for all nodes and runs that share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zmqtrain.codecs.base import Codec, coding_from_spec
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import payload_size

__all__ = ["Group", "groups", "gather", "Moves", "compiled_moves", "initial_state", "spread", "through_all"]

Leaves = list[jax.Array]


class Group(NamedTuple):
    """Slabs of one fragment that have one codec and one size, and where they start in the fragment's flat vector."""

    codec: Codec
    size: int
    starts: tuple[int, ...]


def groups(codecs: Sequence[Codec], counts: Sequence[int]) -> tuple[Group, ...]:
    """Return the slabs of segments of so many values, each with its codec, by codec and size."""
    starts: dict[tuple[Codec, int], list[int]] = {}
    first = 0
    for codec, count in zip(codecs, counts, strict=True):
        for start in range(0, count, codec.slab):
            starts.setdefault((codec, min(codec.slab, count - start)), []).append(first + start)
        first += count
    return tuple(Group(codec, size, tuple(places)) for (codec, size), places in starts.items())


def initial_state(group: Group, rows: int) -> Any:
    """Return the codec's state for each slab of the group in each of `rows` vectors, stacked."""
    slabs = rows * len(group.starts)
    state = group.codec.init(group.size)
    return jax.tree.map(lambda leaf: jnp.array(jnp.broadcast_to(leaf, (slabs, *jnp.shape(leaf)))), state)


def gather(flat: jax.Array, of_groups: Sequence[Group]) -> list[jax.Array]:
    """Return per group its slabs, float32[rows * slabs, size], of flat, float32[rows, values]."""
    slabs = [jnp.stack([flat[:, start : start + g.size] for start in g.starts], axis=1) for g in of_groups]
    return [stacked.reshape(-1, stacked.shape[-1]) for stacked in slabs]


def spread(slabs: Sequence[jax.Array], of_groups: Sequence[Group]) -> jax.Array:
    """Return float32[rows, values]: what `gather` took apart."""
    pieces: dict[int, jax.Array] = {}
    for stacked, group in zip(slabs, of_groups, strict=True):
        apart = stacked.reshape(-1, len(group.starts), group.size)
        pieces |= {start: apart[:, number] for number, start in enumerate(group.starts)}
    return jnp.concatenate([pieces[start] for start in sorted(pieces)], axis=1)


@partial(jax.jit, static_argnums=0)
def _through(codec: Codec, slabs: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """Return what arrives of float32[slabs, size], each slab encoded and decoded on its own; and the new state.

    Compiled on its own, so that once is enough for all fragments and runs that have as many slabs of that size.
    """
    buffers, state = jax.vmap(codec.encode)(slabs, state)
    return jax.vmap(lambda of_slab: codec.decode(of_slab, slabs.shape[1]))(buffers), state


class Moves:
    """The jitted moves of one fragment. Anchor, hub and momentum are flat, float32[values]: segment after segment;
    a node's parameters are leaves in their shapes, those that the fragment touches."""

    def __init__(self, layout: Layout, fragment: int, codec: str, broadcast_codec: str) -> None:
        self.layout, self.fragment = layout, fragment
        self.leaves, self.counts = layout.leaves(fragment), layout.counts(fragment)
        up = coding_from_spec(codec).of_fragment(layout, fragment)
        down = coding_from_spec(broadcast_codec).of_fragment(layout, fragment)
        self.up, self.down = groups(up, self.counts), groups(down, self.counts)
        self.bytes_up, self.bytes_down = payload_size(up, self.counts), payload_size(down, self.counts)
        self.pending = jax.jit(self._pending)
        self.step = jax.jit(self._step, donate_argnums=(1, 2))
        self.publish = jax.jit(self._publish, donate_argnums=0)
        self.land = jax.jit(self._land, donate_argnums=0)

    def _pending(self, params: Sequence[Leaves], anchor: jax.Array) -> list[jax.Array]:
        """Return params - anchor of all nodes, as the slabs that go up."""
        rows = [
            jnp.concatenate([self.layout.take(p, i, self.fragment) for p, i in zip(node, self.leaves, strict=True)])
            for node in params
        ]
        return gather(jnp.stack(rows) - anchor, self.up)

    def _step(
        self, anchor: jax.Array, hub: jax.Array, momentum: jax.Array, sent: list[jax.Array], rate: Any, mu: Any
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Return the hub's new parameters and momentum, and what is not published of them, as slabs that go down."""
        rows = spread(sent, self.up)
        gradient = jnp.sum(rows, axis=0) / rows.shape[0]
        momentum = mu * momentum + gradient
        hub = hub + rate * (gradient + mu * momentum)
        return hub, momentum, gather((hub - anchor)[None], self.down)

    def _publish(
        self, anchor: jax.Array, sent: list[jax.Array], aggregate: list[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Return anchor + D(U), and of every node D(U) - D(u), float32[nodes, values]."""
        arrived = spread(aggregate, self.down)[0]
        return anchor + arrived, arrived - spread(sent, self.up)

    def _land(self, params: Leaves, steps: jax.Array, node: Any) -> Leaves:
        """Return params + D(U) - D(u) of one node."""
        ends = np.cumsum(self.counts).tolist()
        return [
            self.layout.add(leaf, index, self.fragment, steps[node, end - count : end])
            for leaf, index, end, count in zip(params, self.leaves, ends, self.counts, strict=True)
        ]


def through_all(
    of_groups: Sequence[Group], slabs: Sequence[jax.Array], states: Sequence[Any]
) -> tuple[list[jax.Array], list[Any]]:
    passed = [_through(g.codec, stacked, state) for g, stacked, state in zip(of_groups, slabs, states, strict=True)]
    return [arrived for arrived, _ in passed], [state for _, state in passed]


compiled_moves = lru_cache(maxsize=512)(Moves)
"""The moves of a layout's fragment with these codecs: compiled once."""

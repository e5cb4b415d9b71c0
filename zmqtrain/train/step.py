"""Hold the jitted halves of a step: the local one of the program, and the two that the exchange needs.

    params = anchor + pending          pending(f) leaves for the hub, rebase brings back what landed

Rule 1: pure functions of arrays; no clock, no exchange.  Rule 2: the anchor is float32 whatever the parameters are, and
is only ever added to, in version order: so it is the same on all nodes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zmqtrain.train.program import Program
from zmqtrain.types import Layout, LeafSpec, ModelSpec

__all__ = ["TrainState", "LocalStep", "Rebase", "describe_model"]

Leaves = list[jax.Array]
Segments = Mapping[int, Sequence[jax.Array]]


def describe_model(params: Any) -> ModelSpec:
    """Return path, shape and dtype of every leaf of a pytree, in its flattening order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return tuple(
        LeafSpec(
            jax.tree_util.keystr(path, simple=True, separator="/"), tuple(jnp.shape(leaf)), jnp.result_type(leaf).name
        )
        for path, leaf in leaves
    )


class TrainState(NamedTuple):
    """What a node holds on its device besides the anchor."""

    params: Any
    opt_state: optax.OptState


class LocalStep:
    """A program's own step, as it would train alone: one gradient, one optimizer update, the old buffers donated."""

    def __init__(self, program: Program) -> None:
        self.program, self.optimizer = program, program.optimizer()
        self._step = jax.jit(self._one, donate_argnums=0)

    def init(self, seed: int) -> TrainState:
        """Return fresh parameters and optimizer state."""
        params = self.program.init(seed)
        return TrainState(params, self.optimizer.init(params))

    def compile(self, state: TrainState, batch: Any) -> None:
        """Have the step compiled, on a copy: a node that joins can then train at once. `state` stays as it is."""
        self.step(jax.tree.map(jnp.copy, state), batch)[1].block_until_ready()

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        """Take one batch; return the new state and the loss before it (a device scalar). `state` is used up."""
        result: tuple[TrainState, jax.Array] = self._step(state, batch)
        return result

    def _one(self, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        loss, gradient = jax.value_and_grad(self.program.loss)(state.params, batch)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss


class Rebase:
    """The moves of the one equation on the device, for one model. donate: the caller's parameters may be used up."""

    def __init__(self, layout: Layout, donate: bool) -> None:
        self.layout = layout
        self._pending = jax.jit(self._take, static_argnums=2)
        self._move = jax.jit(self._add, static_argnums=2, donate_argnums=0)
        self._move_kept = self._move if donate else jax.jit(self._add, static_argnums=2)
        self._less = jax.jit(partial(jax.tree.map, jnp.subtract))
        self._negated = jax.jit(partial(jax.tree.map, jnp.negative))
        self._replace = jax.jit(self._adopt, donate_argnums=(0, 1) if donate else (1,))

    def warm_up(self, params: Leaves, anchor: Leaves) -> None:
        """Have all that an exchange needs compiled, on copies: later, none holds training up for a compiler."""
        params, anchor = [jnp.copy(leaf) for leaf in params], [jnp.copy(leaf) for leaf in anchor]
        for fragment in range(self.layout.fragments):
            still = {fragment: [jnp.zeros_like(segment) for segment in self.pending(params, anchor, fragment)]}
            params, anchor = self.apply(params, anchor, still, still)
        jax.tree.map(lambda leaf: leaf.block_until_ready(), (params, anchor))

    def pending(self, params: Leaves, anchor: Leaves, fragment: int) -> list[jax.Array]:
        """Return params - anchor of one fragment: one flat float32 array per leaf that it touches."""
        touched = self.layout.leaves(fragment)
        result: Leaves = self._pending([params[i] for i in touched], [anchor[i] for i in touched], fragment)
        return result

    def apply(self, params: Leaves, anchor: Leaves, aggregate: Segments, own: Segments) -> tuple[Leaves, Leaves]:
        """Return params + D(U) - D(u) and anchor + D(U). The anchor's buffers are used up.

        Fragment by fragment, and with the same compiled function for both: whatever mixture of fragments and own parts
        an update holds, nothing is compiled that was compiled before (a fragment of 109 leaves takes about a second).
        """
        for fragment in sorted({*aggregate, *own}):
            own_step = jax.device_put(list(own.get(fragment, ())))
            if fragment in aggregate:
                shared = jax.device_put(list(aggregate[fragment]))
                anchor = self._moved(self._move, anchor, shared, fragment)
                step = self._less(shared, own_step) if fragment in own else shared
            else:
                step = self._negated(own_step)
            params = self._moved(self._move_kept, params, step, fragment)
        return list(params), anchor

    def _moved(self, move: Callable[..., Leaves], leaves: Leaves, step: Leaves, fragment: int) -> Leaves:
        touched = self.layout.leaves(fragment)
        moved = dict(zip(touched, move([leaves[i] for i in touched], step, fragment), strict=True))
        return [moved.get(i, leaf) for i, leaf in enumerate(leaves)]

    def adopt(self, params: Leaves, anchor: Leaves, new: Sequence[Any], own: Segments) -> tuple[Leaves, Leaves]:
        """Return new + (params - anchor - D(u)) and a copy of the new anchor: what is pending stays pending."""
        result: tuple[Leaves, Leaves] = self._replace(params, anchor, list(new), dict(own))
        return result

    def _take(self, params: Leaves, anchor: Leaves, fragment: int) -> list[jax.Array]:
        take = self.layout.take
        return [
            take(p, i, fragment).astype(jnp.float32) - take(a, i, fragment)
            for p, a, i in zip(params, anchor, self.layout.leaves(fragment), strict=True)
        ]

    def _shift(self, params: Leaves, segments: Segments, sign: float) -> Leaves:
        moved = [leaf.astype(jnp.float32) for leaf in params]
        for fragment, parts in segments.items():
            for i, part in zip(self.layout.leaves(fragment), parts, strict=True):
                moved[i] = self.layout.add(moved[i], i, fragment, part if sign > 0 else -part)
        return [leaf.astype(old.dtype) for leaf, old in zip(moved, params, strict=True)]

    def _add(self, leaves: Leaves, step: Leaves, fragment: int) -> Leaves:
        touched = self.layout.leaves(fragment)
        return [self.layout.add(leaf, i, fragment, part) for leaf, i, part in zip(leaves, touched, step, strict=True)]

    def _adopt(self, params: Leaves, anchor: Leaves, new: Leaves, own: Segments) -> tuple[Leaves, Leaves]:
        pending = self._shift([p.astype(jnp.float32) - a for p, a in zip(params, anchor, strict=True)], own, -1.0)
        adopted = [(n + rest).astype(p.dtype) for n, rest, p in zip(new, pending, params, strict=True)]
        return adopted, [jnp.copy(n) for n in new]

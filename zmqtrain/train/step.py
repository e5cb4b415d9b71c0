"""Hold the jitted halves of a step: the local one of the program, and the two that the exchange needs.

    params = anchor + pending          pending(f) leaves for the hub, rebase brings back what landed

Rule 1: pure functions of arrays; no clock, no exchange.  Rule 2: the anchor is float32 whatever the parameters are, and
is only ever added to, in version order: so it is the same on all nodes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        self._apply = jax.jit(self._add, donate_argnums=(0, 1) if donate else (1,))
        self._replace = jax.jit(self._adopt, donate_argnums=(0, 1) if donate else (1,))

    def pending(self, params: Leaves, anchor: Leaves, fragment: int) -> list[jax.Array]:
        """Return params - anchor of one fragment: one flat float32 array per leaf that it touches."""
        touched = self.layout.leaves(fragment)
        result: Leaves = self._pending([params[i] for i in touched], [anchor[i] for i in touched], fragment)
        return result

    def apply(self, params: Leaves, anchor: Leaves, aggregate: Segments, own: Segments) -> tuple[Leaves, Leaves]:
        """Return params + D(U) - D(u) and anchor + D(U). The anchor's buffers are used up."""
        result: tuple[Leaves, Leaves] = self._apply(params, anchor, dict(aggregate), dict(own))
        return result

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

    def _add(self, params: Leaves, anchor: Leaves, aggregate: Segments, own: Segments) -> tuple[Leaves, Leaves]:
        both = {  # one pass over the parameters where a fragment is in both
            f: [u - v for u, v in zip(aggregate[f], own[f], strict=True)] if f in own else aggregate[f]
            for f in aggregate
        }
        params = self._shift(params, both, 1.0)
        params = self._shift(params, {f: parts for f, parts in own.items() if f not in aggregate}, -1.0)
        return params, self._shift(anchor, aggregate, 1.0)

    def _adopt(self, params: Leaves, anchor: Leaves, new: Leaves, own: Segments) -> tuple[Leaves, Leaves]:
        pending = self._shift([p.astype(jnp.float32) - a for p, a in zip(params, anchor, strict=True)], own, -1.0)
        adopted = [(n + rest).astype(p.dtype) for n, rest, p in zip(new, pending, params, strict=True)]
        return adopted, [jnp.copy(n) for n in new]

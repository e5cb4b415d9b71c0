"""Hold the jitted halves of a step: the local one of the program, and the two that the exchange needs.

    params = anchor + pending          pending(f) leaves for the hub, rebase brings back what landed

Rule 1: pure functions of arrays; no exchange, and no clock but the one that a timed step is given.
Rule 2: the anchor is float32 whatever the parameters are, and is only ever added to, in version order: so it is the
same on all nodes, bit for bit.
Rule 3: a step is one update of the optimizer, of whatever many gradients it is made.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from zmqtrain.core.errors import ConfigError, ModelMismatch
from zmqtrain.core.interfaces import Clock, Layout
from zmqtrain.core.types import LeafSpec, ModelSpec
from zmqtrain.train.blocks import ahead, moved
from zmqtrain.train.minibatch import FixedMinibatch, Minibatch
from zmqtrain.train.program import Program

COMPILED_KEPT = 16
"""What is compiled is kept for so many programs, and so many layouts, of one process."""

Leaves = list[jax.Array]
Segments = Mapping[int, Sequence[jax.Array]]


def describe_model(params: Any) -> ModelSpec:
    """Return path, shape and dtype of every leaf of a pytree, in its flattening order.

    Raises ModelMismatch, naming the leaf, for one that is no array of numbers: it cannot be exchanged.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return tuple(_describe_leaf(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves)


def _describe_leaf(path: str, leaf: Any) -> LeafSpec:
    named = f"the leaf {path}" if path else "what was given as parameters"
    try:
        if not callable(leaf) and not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return LeafSpec(path, tuple(jnp.shape(leaf)), jnp.result_type(leaf).name)
    except (TypeError, ValueError):  # jax knows no dtype or shape of it
        raise ModelMismatch(
            f"{named} is no array, but of type {type(leaf).__name__} ({reprlib.repr(leaf)}), and cannot be exchanged: "
            "keep it out of the tree of parameters",
            path,
        ) from None
    if not callable(leaf):
        raise ModelMismatch(
            f"{named} is a random key, and cannot be exchanged: every node draws its own numbers. Keep it out of the "
            "tree of parameters (give it as a part of state=, and it is in the checkpoints)",
            path,
        )
    name = getattr(leaf, "__name__", type(leaf).__name__)
    raise ModelMismatch(
        f"{named} is a function or a module ({name}), no array, and cannot be exchanged: give the model's "
        "arrays alone. Of an equinox model: params, static = eqx.partition(model, eqx.is_inexact_array), and "
        "eqx.combine(params, static) in the loss; of a flax one: its params, or nnx.split(model, nnx.Param, ...)",
        path,
    )


class TrainState(NamedTuple):
    """What a node holds on its device besides the anchor."""

    params: Any
    opt_state: optax.OptState


class _Sum(NamedTuple):
    """What the parts of one step add up to: their mean losses and their mean gradients, float32."""

    loss: jax.Array
    gradient: Any


class Gradient(NamedTuple):
    """The gradient of so many parts of one size. total: the sums of the parts' mean losses and mean gradients."""

    total: Any
    parts: int
    samples: int


class _Functions:
    """The jitted functions of one loss and one optimizer."""

    def __init__(self, loss: Callable[..., jax.Array], optimizer: Callable[[], optax.GradientTransformation]) -> None:
        self.loss, self.optimizer = loss, optimizer()
        self.one = jax.jit(self._one, donate_argnums=0)
        self.first = jax.jit(self._first)
        self.next = jax.jit(self._next, donate_argnums=0)
        self.finish = jax.jit(self._finish, donate_argnums=0)

    def _one(self, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        loss, gradient = jax.value_and_grad(self.loss)(state.params, batch)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss

    def _first(self, params: Any, part: Any) -> tuple[_Sum, jax.Array]:
        loss, gradient = jax.value_and_grad(self.loss)(params, part)
        return _Sum(loss.astype(jnp.float32), jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)), loss

    def _next(self, total: _Sum, params: Any, part: Any) -> tuple[_Sum, jax.Array]:
        more, loss = self._first(params, part)
        return jax.tree.map(jnp.add, total, more), loss

    def _finish(self, state: TrainState, total: _Sum, parts: Any) -> tuple[TrainState, jax.Array]:
        gradient = jax.tree.map(lambda g, p: (g / parts).astype(p.dtype), total.gradient, state.params)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), total.loss / parts


_functions = lru_cache(maxsize=COMPILED_KEPT)(_Functions)


class LocalStep:
    """A program's own step, as it would train alone: one gradient, one optimizer update, the old buffers donated.

    Steps of one loss and one optimizer (the program's very methods) are compiled once, whoever makes them.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._functions = _functions(program.loss, program.optimizer)

    def init(self, seed: int) -> TrainState:
        """Return fresh parameters and optimizer state."""
        params = self.program.init(seed)
        return TrainState(params, self._functions.optimizer.init(params))

    def compile(self, state: TrainState, batch: Any) -> int:
        """Have the step compiled: a node that joins can then train at once. Return the bytes it works in.

        state: stays as it is; shapes and dtypes alone (`jax.ShapeDtypeStruct`) will do.  The bytes are those of a
        device while it makes a step, besides the state and the batch: activations, gradients; 0 if it does not say.
        """
        return _working_bytes(self._functions.one.lower(state, batch).compile())

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        """Take one batch; return the new state and the loss before it (a device scalar). `state` is used up."""
        result: tuple[TrainState, jax.Array] = self._functions.one(state, batch)
        return result


def _shape_at(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _working_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


class MinibatchStep:
    """A program's own step of as many gradients as the run's `minibatch` says, and one optimizer update.

    A *part* is what one gradient is taken of: a batch, or (timed) one of the equal parts of a batch. All parts hold
    as many samples, so the mean of their gradients is the gradient of all their samples. Of one batch, it is
    `LocalStep`'s very step.
    before_step, before_part: called once in each step, and before each gradient: there, an experiment makes this node
    slow (the time of both counts against a timed step's), and a simulation moves its clock, which nothing else does.
    Raises ConfigError: batches that cannot be cut into as many equal parts.
    Source: Anytime Minibatch, Ferdinand et al. 2019; Async-Timed, Al-Lawati et al., JSAIT 2021.
    """

    def __init__(
        self,
        program: Program,
        minibatch: Minibatch,
        clock: Clock,
        *,
        before_step: Callable[[], None] = lambda: None,
        before_part: Callable[[], None] = lambda: None,
    ) -> None:
        self.program, self.minibatch, self.clock = program, minibatch, clock
        self.before_step, self.before_part = before_step, before_part
        self._partitions, self._most_parts, self._seconds = 1, inf, inf
        if isinstance(minibatch, FixedMinibatch):
            self._most_parts = minibatch.batches
        else:
            self._partitions, self._seconds = minibatch.partitions, minibatch.seconds
        self._part_samples, rest = divmod(program.samples_per_batch, self._partitions)
        if rest:
            raise ConfigError(
                f"minibatch = {minibatch.name!r}: a batch of {program.samples_per_batch} {program.sample_word} cannot "
                f"be cut into {self._partitions} equal parts; change partitions, or the program's batch"
            )
        self._left: deque[Any] = deque()
        self._local, self._functions = LocalStep(program), _functions(program.loss, program.optimizer)

    def init(self, seed: int) -> TrainState:
        """Return fresh parameters and optimizer state."""
        return self._local.init(seed)

    def compile(self, state: TrainState, batch: Any) -> int:
        """Have the step compiled: see `LocalStep.compile`. The sum of several gradients is not among its bytes."""
        if self._most_parts == 1:
            return self._local.compile(state, batch)
        first, then, total = self._compile_parts(state, batch)
        last = self._functions.finish.lower(state, total, np.float32(2)).compile()
        return max(_working_bytes(compiled) for compiled in (first, then, last))

    def compile_gradient(self, state: TrainState, batch: Any) -> int:
        """Have compiled what `gradient` uses; see `compile`."""
        if self._most_parts == 1:
            return _working_bytes(self._functions.first.lower(state.params, batch).compile())
        first, then, _ = self._compile_parts(state, batch)
        return max(_working_bytes(first), _working_bytes(then))

    def _compile_parts(self, state: TrainState, batch: Any) -> tuple[Any, Any, Any]:
        """Return the compiled gradient of a first part, and of a further one, and the shapes of their sum."""
        functions, part = self._functions, self._cut(batch)[0]
        first = functions.first.lower(state.params, part).compile()
        total = jax.eval_shape(functions.first, state.params, part)[0]
        if any(isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in jax.tree.leaves(state.params)):
            total = jax.tree.map(_shape_at, total, first.output_shardings[0])  # where the gradients will be
        return first, functions.next.lower(total, state.params, part).compile(), total

    def step(self, state: TrainState, batches: Iterator[Any]) -> tuple[TrainState, jax.Array, int] | None:
        """Take one step; return the new state, the mean loss before it (a device scalar) and how many samples it used.

        None when the data has ended; data that ends within a step makes it a smaller one. `state` is used up. What is
        left of a batch when the time is up, the next step begins with.
        A gradient is always begun before the one ahead of it is waited for, so that the device is never idle; what was
        begun when the time is up is finished, and counts: a timed step ends less than two parts late.
        """
        if self._most_parts == 1:
            if (part := self._next_part(batches)) is None:
                return None
            self.before_step()
            self.before_part()
            return *self._local.step(state, part), self._part_samples
        gradient = self.gradient(state.params, batches)
        if gradient is None:
            return None
        state, mean = self._functions.finish(state, gradient.total, np.float32(gradient.parts))
        return state, mean, gradient.samples

    def gradient(
        self, params: Any, batches: Iterator[Any], most: float = inf, *, begins: bool = True
    ) -> Gradient | None:
        """Return the gradient of one step, or of at most so many parts of it; None when there is no data.

        It is on its way: nothing is waited for but, in a step of several parts, the parts before its last.
        begins: a step begins with these parts.
        """
        until = self.clock.monotonic() + self._seconds
        part = self._next_part(batches)
        if part is None:
            return None
        if begins:
            self.before_step()
        self.before_part()
        total, previous = self._functions.first(params, part)
        parts, most = 1, min(most, self._most_parts)
        while parts < most and self.clock.monotonic() < until:
            if (part := self._next_part(batches)) is None:
                break
            self.before_part()
            total, loss = self._functions.next(total, params, part)
            parts += 1
            previous.block_until_ready()
            previous = loss
        return Gradient(total, parts, parts * self._part_samples)

    def _next_part(self, batches: Iterator[Any]) -> Any | None:
        if not self._left:
            batch = next(batches, None)
            if batch is None:
                return None
            self._left.extend(self._cut(batch))
        return self._left.popleft()

    def _cut(self, batch: Any) -> list[Any]:
        """The parts of one batch: views of its arrays, equal pieces along the first axis."""
        if self._partitions == 1:
            return [batch]
        leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
        for path, leaf in leaves:
            shape = np.shape(leaf)
            if not shape or shape[0] % self._partitions:
                raise ConfigError(
                    f"minibatch = {self.minibatch.name!r}: the batch's "
                    f"{jax.tree_util.keystr(path, simple=True, separator='/') or 'array'} has the shape "
                    f"[{','.join(map(str, shape))}], whose first axis cannot be cut into {self._partitions} equal "
                    "parts; change partitions, or the program's batch"
                )
        cut = [np.split(np.asarray(leaf), self._partitions) for _, leaf in leaves]
        return [jax.tree.unflatten(tree, pieces) for pieces in zip(*cut, strict=True)]


class Rebase:
    """The moves of the one equation on the device, for one model.

    donate: the caller's parameters may be used up.  elastic: the share of what is pending that is offered; under 1 each
    node's parameters stay its own, and are pulled toward the others' (Zhang et al. 2015, Deep learning with elastic
    averaging SGD, with both pulls in the one equation).
    """

    def __init__(self, layout: Layout, donate: bool, elastic: float = 1.0) -> None:
        self.layout, self.elastic = layout, elastic
        self._pending = jax.jit(self._take, static_argnums=(2, 3))
        self._move = jax.jit(self._both, static_argnums=4, donate_argnums=(0, 1) if donate else (1,))
        self._replace = jax.jit(self._adopt, donate_argnums=(0, 1) if donate else (1,))

    def warm_up(self, params: Leaves, anchor: Leaves) -> None:
        """Have all that an exchange needs compiled: later, none holds training up for a compiler. Nothing is moved."""
        for fragment in range(self.layout.fragments):
            touched = self.layout.leaves(fragment)
            ours, shared = ([leaves[i] for i in touched] for leaves in (params, anchor))
            for share in {1.0, self.elastic}:
                pending = self._pending.lower(ours, shared, fragment, share)
                pending.compile()
            segments = [
                _shape_at(segment, _tied_to(leaf)) for segment, leaf in zip(pending.out_info, ours, strict=True)
            ]
            for own in (segments, [None] * len(touched)):
                self._move.lower(ours, shared, segments, own, fragment).compile()

    def pending(self, params: Leaves, anchor: Leaves, fragment: int, *, whole: bool = False) -> list[jax.Array]:
        """Return params - anchor of one fragment, or the elastic share of it: one flat float32 array per leaf.

        whole: all of it, also where nodes are elastic.
        """
        touched, share = self.layout.leaves(fragment), 1.0 if whole else self.elastic
        result: Leaves = self._pending([params[i] for i in touched], [anchor[i] for i in touched], fragment, share)
        return result

    def apply(self, params: Leaves, anchor: Leaves, aggregate: Segments, own: Segments) -> tuple[Leaves, Leaves]:
        """Return params + D(U) - D(u) and anchor + D(U). The anchor's buffers are used up.

        Fragment by fragment, and each by one compiled function, with an own part or without: whatever mixture of
        fragments and own parts an update holds, nothing is compiled that was compiled before (a fragment of 109 leaves
        takes about a second). An own part that comes without an aggregate, as none does by itself, meets zeros there.
        """
        for fragment in sorted({*aggregate, *own}):
            touched = self.layout.leaves(fragment)
            shared, mine = ([*segments.get(fragment, ())] for segments in (aggregate, own))
            forward, behind = self._move(
                [params[i] for i in touched],
                [anchor[i] for i in touched],
                shared or [np.zeros(segment.shape, np.float32) for segment in mine],
                mine or [None] * len(touched),
                fragment,
            )
            params, anchor = self._placed(params, forward, touched), self._placed(anchor, behind, touched)
        return list(params), anchor

    @staticmethod
    def _placed(leaves: Leaves, moved: Leaves, touched: Sequence[int]) -> Leaves:
        new = dict(zip(touched, moved, strict=True))
        return [new.get(i, leaf) for i, leaf in enumerate(leaves)]

    def adopt(self, params: Leaves, anchor: Leaves, new: Sequence[Any], own: Segments) -> tuple[Leaves, Leaves]:
        """Return new + (params - anchor - D(u)) and a copy of the new anchor: what is pending stays pending."""
        result: tuple[Leaves, Leaves] = self._replace(params, anchor, list(new), dict(own))
        return result

    def _take(self, params: Leaves, anchor: Leaves, fragment: int, share: float) -> list[jax.Array]:
        pending = [
            ahead(self.layout, p, a, i, fragment)
            for p, a, i in zip(params, anchor, self.layout.leaves(fragment), strict=True)
        ]
        return pending if share == 1 else [share * segment for segment in pending]

    def _shift(self, params: Leaves, segments: Segments, sign: float) -> Leaves:
        moved = [leaf.astype(jnp.float32) for leaf in params]
        for fragment, parts in segments.items():
            for i, part in zip(self.layout.leaves(fragment), parts, strict=True):
                moved[i] = self.layout.add(moved[i], i, fragment, part if sign > 0 else -part)
        return [leaf.astype(old.dtype) for leaf, old in zip(moved, params, strict=True)]

    def _both(
        self, params: Leaves, anchor: Leaves, shared: Leaves, own: Sequence[jax.Array | None], fragment: int
    ) -> tuple[Leaves, Leaves]:
        both = [
            moved(self.layout, p, a, ours, mine, i, fragment)
            for p, a, ours, mine, i in zip(params, anchor, shared, own, self.layout.leaves(fragment), strict=True)
        ]
        return [p for p, _ in both], [a for _, a in both]

    def _adopt(self, params: Leaves, anchor: Leaves, new: Leaves, own: Segments) -> tuple[Leaves, Leaves]:
        pending = self._shift([p.astype(jnp.float32) - a for p, a in zip(params, anchor, strict=True)], own, -1.0)
        adopted = [(n + rest).astype(p.dtype) for n, rest, p in zip(new, pending, params, strict=True)]
        return adopted, [jnp.copy(n) for n in new]


def _tied_to(leaf: Any) -> Any:
    """Return the sharding of a leaf that its caller has tied to its device; None for any other."""
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None


rebase_of = lru_cache(maxsize=COMPILED_KEPT)(Rebase)
"""Return the `Rebase` of these arguments: it has no state, and is compiled once, whoever asks."""

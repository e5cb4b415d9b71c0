"""The jitted step of a program: gradients of as many batches as the run says, one optimizer update; what that takes.

Rule 1: pure functions of arrays; no exchange, and no clock but the one that a timed step is given.
Rule 2: a step is one update of the optimizer, of any number of gradients.
Rule 3: `measure_footprint` traces shapes and compiles functions, and computes nothing; what it cannot know is 0.
"""

from __future__ import annotations

import reprlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, Sharding

from zmqtrain.core.errors import ConfigError, ModelMismatch
from zmqtrain.core.interfaces import Clock
from zmqtrain.core.types import LeafSpec, ModelSpec
from zmqtrain.train.minibatch import FixedMinibatch, Minibatch
from zmqtrain.train.program import Program

COMPILED_KEPT = 16
"""What is compiled is kept for so many programs of one process."""


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


class _Functions(NamedTuple):
    optimizer: optax.GradientTransformation
    one: Any
    first: Any
    next: Any
    finish: Any


@lru_cache(maxsize=COMPILED_KEPT)
def _functions(loss: Callable[..., jax.Array], optimizer_of: Callable[[], optax.GradientTransformation]) -> _Functions:
    optimizer = optimizer_of()

    def update(state: TrainState, gradient: Any) -> TrainState:
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state)

    def one(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(state.params, batch)
        return update(state, gradient), value

    def first(params: Any, part: Any) -> tuple[_Sum, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, part)
        return _Sum(value.astype(jnp.float32), jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)), value

    def then(total: _Sum, params: Any, part: Any) -> tuple[_Sum, jax.Array]:
        more, value = first(params, part)
        return jax.tree.map(jnp.add, total, more), value

    def finish(state: TrainState, total: _Sum, parts: Any) -> tuple[TrainState, jax.Array]:
        gradient = jax.tree.map(lambda g, p: (g / parts).astype(p.dtype), total.gradient, state.params)
        return update(state, gradient), total.loss / parts

    donating = [jax.jit(function, donate_argnums=0) for function in (one, then, finish)]
    return _Functions(optimizer, donating[0], jax.jit(first), donating[1], donating[2])


def _shape_at(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _working_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


@dataclass(frozen=True)
class LoopHooks:
    """Functions of the caller that a training loop calls.

    stop: asks whether this node is to leave; where all nodes of a synchronous run are asked, it ends in order.
    watch: called after each step with its number and its loss (a device scalar that may not be ready).
    before_step, before_part: called once in each step, and before each gradient: there, an experiment makes this node
    slow (the time of both counts against a timed step's), and a simulation moves its clock, which nothing else does.
    """

    stop: Callable[[], bool] = lambda: False
    watch: Callable[[int, jax.Array], None] = lambda number, loss: None
    before_step: Callable[[], None] = lambda: None
    before_part: Callable[[], None] = lambda: None


NO_HOOKS = LoopHooks()


class MinibatchStep:
    """A program's own step of as many gradients as the run's `minibatch` says, and one optimizer update.

    A *part* is what one gradient is taken of: a batch, or (timed) one of the equal parts of a batch. All parts hold
    as many samples, so the mean of their gradients is the gradient of all their samples. Of one batch, it is the step
    that the program would make alone: one gradient, one optimizer update, the old buffers donated.
    Steps of one loss and one optimizer (the program's very methods) are compiled once for all who make them.
    Raises ConfigError: batches that cannot be cut into as many equal parts.
    Source: Anytime Minibatch, Ferdinand et al. 2019; Async-Timed, Al-Lawati et al., JSAIT 2021.
    """

    def __init__(
        self,
        program: Program,
        minibatch: Minibatch = FixedMinibatch(),  # noqa: B008
        clock: Clock = time,
        hooks: LoopHooks = NO_HOOKS,
    ) -> None:
        self.program, self.minibatch, self.clock, self.hooks = program, minibatch, clock, hooks
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
        self._functions = _functions(program.loss, program.optimizer)

    def init(self, seed: int) -> TrainState:
        params = self.program.init(seed)
        return TrainState(params, self._functions.optimizer.init(params))

    def compile(self, state: TrainState, batch: Any) -> int:
        """Compile the step, so that a node that joins can train at once. Return the bytes it works in.

        state: stays as it is; shapes and dtypes alone (`jax.ShapeDtypeStruct`) will do.  The bytes are those of a
        device while it makes a step, besides the state and the batch: activations, gradients, but not the sum of
        several gradients; 0 if it does not say.
        """
        if self._most_parts == 1:
            return _working_bytes(self._functions.one.lower(state, batch).compile())
        first, then, total = self._compile_parts(state, batch)
        last = self._functions.finish.lower(state, total, np.float32(2)).compile()
        return max(_working_bytes(compiled) for compiled in (first, then, last))

    def compile_gradient(self, state: TrainState, batch: Any) -> int:
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
            self.hooks.before_step()
            self.hooks.before_part()
            return *self._functions.one(state, part), self._part_samples
        gradient = self.gradient(state.params, batches)
        if gradient is None:
            return None
        state, mean = self._functions.finish(state, gradient.total, np.float32(gradient.parts))
        return state, mean, gradient.samples

    def gradient(
        self, params: Any, batches: Iterator[Any], most: float = inf, *, begins: bool = True
    ) -> Gradient | None:
        """Return the gradient of one step, or of at most so many parts of it; None when there is no data.

        Nothing is waited for but, in a step of several parts, the parts before its last.
        begins: a step begins with these parts.
        """
        until = self.clock.monotonic() + self._seconds
        part = self._next_part(batches)
        if part is None:
            return None
        if begins:
            self.hooks.before_step()
        self.hooks.before_part()
        total, previous = self._functions.first(params, part)
        parts, most = 1, min(most, self._most_parts)
        while parts < most and self.clock.monotonic() < until:
            if (part := self._next_part(batches)) is None:
                break
            self.hooks.before_part()
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


_UNTRACEABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


@dataclass(frozen=True)
class Footprint:
    """What one device holds. activation_bytes: what a gradient needs besides itself; 0: the compiler does not say."""

    model: ModelSpec
    opt_state_bytes: int
    activation_bytes: int


def measure_footprint(
    program: Program, minibatch: Minibatch, seed: int = 0, sharding: Sharding | None = None
) -> Footprint:
    """Return what training takes of each device that holds the whole model; the step is compiled for it.

    sharding: where the state will be, None for the default device.  A program whose `init` cannot be traced by jax is
    asked for parameters, and they are dropped.
    """
    step = MinibatchStep(program, minibatch, time)
    try:
        state = jax.eval_shape(lambda: step.init(seed))
    except _UNTRACEABLE:
        state = jax.eval_shape(lambda kept: kept, step.init(seed))
    state = TrainState(*jax.tree.map(lambda leaf: _shape_at(leaf, sharding), tuple(state)))
    model, gradients = describe_model(state.params), _bytes_of(state.params)
    working = step.compile(state, next(iter(program.batches(0))))
    return Footprint(model, _bytes_of(state.opt_state), max(0, working - gradients))


def card_bytes() -> int | None:
    """Return how much of its memory the smallest of this process's devices gives to jax; None if none says it."""
    said = [device.memory_stats() or {} for device in jax.local_devices()]
    return min((one["bytes_limit"] for one in said if "bytes_limit" in one), default=None)


def trains_on_processor() -> bool:
    """Return whether this process trains on the processor itself, for want of another device."""
    return jax.default_backend() == "cpu"


def _bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

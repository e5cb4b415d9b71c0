"""Measure what a program's training takes of a device, before anything of it is there.

Rule: shapes are traced and functions compiled, nothing is computed; what cannot be known so is said to be unknown (0).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from zmqtrain.core.types import ModelSpec
from zmqtrain.train.minibatch import Minibatch
from zmqtrain.train.program import Program
from zmqtrain.train.step import MinibatchStep, TrainState, describe_model

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
    state = TrainState(*jax.tree.map(lambda leaf: _shape_of(leaf, sharding), tuple(state)))
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


def _shape_of(leaf: Any, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

"""The beginning of a run: own parameters, trained apart for a while where nodes are compared, then shared ones.

    begin    initialise, train apart, join, adopt what the run begins with
    follow   after each step: the optimizer state of the node that this one has adopted

Rule 1: apart, a node trains on local units: no dealt one is lost.  Rule 2: own seeds, units and scores follow from the
run's seed and the node's name alone: the same nodes begin with the same bits.
Source: a short tournament from different initial parameters; population-based training, Jaderberg et al. 2017.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, Protocol

import jax
import numpy as np

from zmqtrain.core.interfaces import Exchange
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, first_local_unit, is_barrier
from zmqtrain.train.program import Program, score_of
from zmqtrain.train.step import TrainState
from zmqtrain.train.sync import Adoption, DelayedSync

logger = logging.getLogger(__name__)


class Step(Protocol):
    """One local step: see `zmqtrain.train.step.MinibatchStep`, which is one."""

    def init(self, seed: int) -> TrainState:
        """Return fresh parameters and optimizer state."""

    def compile(self, state: TrainState, batch: Any) -> int:
        """Compile the step; `state` stays as it is."""

    def step(self, state: TrainState, batches: Iterator[Any]) -> tuple[TrainState, jax.Array, int] | None:
        """Take one step: the new state, the loss before it, and how many samples it used; None at the data's end."""


def own_seed(settings: RunSettings, name: str) -> int:
    """Return the seed of this node's initial parameters: the run's, or one of its own where nodes begin apart."""
    if settings.initial == "founder" or (settings.initial == "best" and not settings.trains_apart):
        return settings.seed
    return zlib.crc32(f"{settings.seed}/{name}".encode()) & 0x7FFF_FFFF


def train_apart(
    step: Step, state: TrainState, batches: Iterator[Any], steps: int, stop: Callable[[], bool]
) -> TrainState:
    """Return the state after so many steps, fewer if `stop` says so or the data ends. `state` is used up."""
    for _ in range(steps):
        if stop() or (result := step.step(state, batches)) is None:
            return state
        state, loss, _ = result
        loss.block_until_ready()  # or the host would run all of them ahead of the device
    return state


def pack_optimizer_state(opt_state: Any) -> list[Array]:
    """Return an optimizer's state as flat float32 arrays, one a leaf; [] if it holds what cannot travel.

    Floats as they are (float64 in single precision); integers and the rest byte by byte, so that no count is rounded.
    """
    packed: list[Array] = []
    for leaf in jax.tree.leaves(opt_state):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.extended):
            return []  # a typed random key
        values = np.asarray(leaf)
        if not jax.numpy.issubdtype(values.dtype, jax.numpy.floating):
            values = np.frombuffer(values.tobytes(), np.uint8)
        packed.append(np.array(values, np.float32).reshape(-1))
    return packed if all(np.isfinite(values).all() for values in packed) else []


def unpack_optimizer_state(opt_state: Any, optimizer_state: Sequence[Array]) -> Any | None:
    """Return the state that `pack_optimizer_state` made flat, in the form of `opt_state`; None if it does not fit."""
    flat = np.concatenate(
        [np.asarray(values, np.float32).reshape(-1) for values in optimizer_state] or [np.zeros(0, np.float32)]
    )
    leaves, tree = jax.tree.flatten(opt_state)
    filled = []
    for leaf in leaves:
        like = np.asarray(leaf)
        floating = jax.numpy.issubdtype(like.dtype, jax.numpy.floating)
        values, flat = np.split(flat, [like.size if floating else like.nbytes])
        if not floating:
            values = (
                np.frombuffer(values.astype(np.uint8).tobytes(), like.dtype) if values.size == like.nbytes else values
            )
        if values.size != like.size:
            return None
        values = np.array(values.reshape(like.shape), like.dtype)
        tied = isinstance(leaf, jax.Array) and leaf.committed
        filled.append(jax.device_put(values, leaf.sharding) if tied else jax.numpy.asarray(values))
    return jax.tree.unflatten(tree, filled) if flat.size == 0 else None


def begin(
    program: Program,
    exchange: Exchange,
    step: Step,
    stop: Callable[[], bool] = lambda: False,
    make_sync: Callable[..., DelayedSync] = DelayedSync,
) -> tuple[DelayedSync, TrainState]:
    """Join the run as its setting `initial` says; return what keeps in step with it, and the state to go on with.

    stop: ends the training apart, not the joining.  make_sync: makes the `DelayedSync`.
    Where the run begins with a mean, this node says how that scores before it is the run's.
    Raises what `DelayedSync` does: ModelMismatch, JoinRefused (text: why parameters cannot be averaged) among others.
    """
    settings = exchange.settings
    state = step.init(own_seed(settings, exchange.name))
    step.compile(state, next(iter(program.batches(0))))
    compared = settings.trains_apart
    score = float("nan")
    if compared and not exchange.state().founded:
        units = count(first_local_unit(exchange.name))
        batches = (batch for unit in units for batch in program.batches(unit))
        alone = settings.apart_steps
        state = train_apart(step, state, batches, alone, lambda: stop() or exchange.state().founded)
        score = score_of(program, state.params)
        logger.info("%s trained apart for %d steps, and scores %.4g", exchange.name, alone, score)
    if settings.initial == "mean":
        score = score_of(program, state.params)
    optimizer_state = pack_optimizer_state(state.opt_state) if compared and not settings.fresh_moments else ()
    judge = partial(score_of, program)
    sync = make_sync(
        exchange,
        state.params,
        donate=True,
        score=score,
        optimizer_state=optimizer_state,
        state=state.opt_state,
        judge=judge,
    )
    adoption = sync.take_adoption()
    if adoption is None:
        return sync, TrainState(sync.start, sync.state)
    del state  # or a card would hold both
    state = _adopt(program, settings, sync.start, adoption)
    if settings.initial == "mean":
        _warn_of_barrier(exchange.name, score, score_of(program, state.params))
    return sync, state


def follow(program: Program, sync: DelayedSync, state: TrainState) -> TrainState:
    """Return the state to go on with after `sync.step` has made its `params`.

    One of a population that was preempted goes on with the optimizer state of whom it has adopted, or a fresh one
    (`fresh_moments`).
    """
    settings, adoption = sync.settings, sync.take_adoption()
    if adoption is not None:
        return _adopt(program, settings, state.params, adoption)
    return state


def _adopt(program: Program, settings: RunSettings, params: Any, adoption: Adoption) -> TrainState:
    fresh = program.optimizer().init(params)
    if adoption.optimizer_state is None or settings.fresh_moments:
        return TrainState(params, fresh)
    opt_state = unpack_optimizer_state(fresh, adoption.optimizer_state)
    if opt_state is None:
        logger.warning("the optimizer state that came is not of this node's optimizer: it begins a fresh one")
    return TrainState(params, fresh if opt_state is None else opt_state)


def _warn_of_barrier(name: str, own: float, mean: float) -> None:
    if is_barrier(own, mean):
        text = (
            "%s: the mean of the initial parameters scores %.4g, its own scored %.4g: they lie in different valleys. "
        )
        logger.warning(text + "Begin with --initial best, or give all nodes the same checkpoint", name, mean, own)

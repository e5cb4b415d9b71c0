"""Trains a Program through an exchange, from joining the run to the last score.

    begin    initialise, train apart where nodes are compared, join, adopt what the run begins with
    follow   after each step: the optimizer state of the node that this one has adopted

Rule 1: apart, a node trains on local units: no dealt one is lost.  Rule 2: own seeds, units and scores follow from the
run's seed and the node's name alone: the same nodes begin with the same bits.
Source: a short tournament from different initial parameters; population-based training, Jaderberg et al. 2017.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import jax
import numpy as np

from zmqtrain.core.interfaces import Describes, Exchange
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, first_local_unit, is_barrier
from zmqtrain.train.anchor import AnchorOn
from zmqtrain.train.leaves import placed_like
from zmqtrain.train.minibatch import minibatch_from_spec
from zmqtrain.train.program import Program, data_of, score_of
from zmqtrain.train.step import NO_HOOKS, LoopHooks, MinibatchStep, TrainState
from zmqtrain.train.sync import Adoption, DelayedSync, SyncStatistics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingResult:
    """What `TrainingLoop.run` ends with. scores: of the final parameters on held-out data."""

    params: Any
    scores: dict[str, float]
    statistics: SyncStatistics
    seconds: float
    samples: int

    @property
    def summary(self) -> dict[str, Any]:
        """What a record says of it at the end: steps, samples, offers, bytes, ... and the scores."""
        figures = self.statistics
        return {
            "steps": figures.steps,
            "samples": self.samples,
            "offers": figures.offers,
            "offers_refused": figures.offers_refused,
            "aggregates_applied": figures.aggregates_applied,
            "age_steps": figures.age_steps,
            "bytes_up": figures.bytes_sent,
            "bytes_down": figures.bytes_received,
            **self.scores,
        }


class TrainingLoop:
    """Train a Program through an exchange until its data ends or `stop` says so.

    anchor: where this node keeps the shared parameters.  sync: a kind of `DelayedSync`, to compare with.
    """

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        hooks: LoopHooks = NO_HOOKS,
        anchor: AnchorOn = "device",
        sync: type[DelayedSync] = DelayedSync,
    ) -> None:
        self.program, self.exchange, self.hooks, self.anchor, self.sync = program, exchange, hooks, anchor, sync

    def run(self, batches: Iterable[Any]) -> TrainingResult:
        """Join, train, drain what is pending, score the result. Raises what joining, offering and the program raise."""
        began = self.exchange.clock.monotonic()
        settings, program = self.exchange.settings, self.program
        local = MinibatchStep(program, minibatch_from_spec(settings.minibatch), self.exchange.clock, self.hooks)
        if isinstance(self.exchange, Describes) and (digests := data_of(program)):
            self.exchange.describe(data=digests)
        sync, state = begin(self.exchange, local, self.anchor, self.sync)
        if settings.mode == "strict" and not sync.resumed:
            sync.save(state.params, state.opt_state, wait=True)
        coming, number, trained, evaluated = self._until_stopped(batches), 0, 0, -1.0
        while (result := local.step(state, coming)) is not None:
            state, loss, samples = result
            number, trained = number + 1, trained + samples
            optimizer_state = partial(pack_optimizer_state, state.opt_state) if not settings.fresh_moments else tuple
            params = sync.step(
                state.params, score=loss, samples=samples, optimizer_state=optimizer_state, state=state.opt_state
            )
            state = follow(program, sync, TrainState(params, state.opt_state))
            self.hooks.watch(number, loss)
            if self._evaluation_due(evaluated):
                self.exchange.report_scores(self.program.evaluate(sync.params), sync.version)
                evaluated = self.exchange.clock.monotonic()
        params = sync.finish(state.params)
        sync.save(params, state.opt_state, wait=True)
        scores = self.program.evaluate(params)
        self.exchange.report_scores(scores, sync.version)
        figures = sync.statistics()
        return TrainingResult(params, scores, figures, self.exchange.clock.monotonic() - began, trained)

    def _until_stopped(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            if self.hooks.stop():
                return
            yield batch

    def _evaluation_due(self, evaluated: float) -> bool:
        every = self.exchange.settings.evaluate_seconds
        return every > 0 and self.exchange.clock.monotonic() - evaluated >= every and self.exchange.state().is_evaluator


# ---------------------------------------------------------------------- the beginning of a run


def own_seed(settings: RunSettings, name: str) -> int:
    """Return the seed of this node's initial parameters: the run's, or one of its own where nodes begin apart."""
    if settings.initial == "founder" or (settings.initial == "best" and not settings.trains_apart):
        return settings.seed
    return zlib.crc32(f"{settings.seed}/{name}".encode()) & 0x7FFF_FFFF


def train_apart(
    step: MinibatchStep, state: TrainState, batches: Iterator[Any], steps: int, stop: Callable[[], bool]
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
    filled = []
    for leaf in jax.tree.leaves(opt_state):
        like = np.asarray(leaf)
        floating = jax.numpy.issubdtype(like.dtype, jax.numpy.floating)
        values, flat = np.split(flat, [like.size if floating else like.nbytes])
        if not floating and values.size == like.nbytes:
            values = np.frombuffer(values.astype(np.uint8).tobytes(), like.dtype)
        if values.size != like.size:
            return None
        filled.append(values)
    return placed_like(opt_state, filled) if flat.size == 0 else None


def begin(
    exchange: Exchange, step: MinibatchStep, anchor: AnchorOn = "device", sync: type[DelayedSync] = DelayedSync
) -> tuple[DelayedSync, TrainState]:
    """Join the run as its setting `initial` says; return what keeps in step with it, and the state to go on with.

    step: its hook `stop` ends the training apart, not the joining.  anchor, sync: as for `TrainingLoop`.
    Where the run begins with a mean, this node says how that scores before it is the run's.
    Raises what `DelayedSync` does: ModelMismatch, JoinRefused (text: why parameters cannot be averaged) among others.
    """
    settings, program = exchange.settings, step.program
    state = step.init(own_seed(settings, exchange.name))
    step.compile(state, next(iter(program.batches(0))))
    compared = settings.trains_apart
    score = float("nan")
    if compared and not exchange.state().founded:
        units = count(first_local_unit(exchange.name))
        batches = (batch for unit in units for batch in program.batches(unit))
        alone = settings.apart_steps
        state = train_apart(step, state, batches, alone, lambda: step.hooks.stop() or exchange.state().founded)
        score = score_of(program, state.params)
        logger.info("%s trained apart for %d steps, and scores %.4g", exchange.name, alone, score)
    if settings.initial == "mean":
        score = score_of(program, state.params)
    joined = sync(
        exchange,
        state.params,
        donate=True,
        score=score,
        optimizer_state=pack_optimizer_state(state.opt_state) if compared and not settings.fresh_moments else (),
        anchor=anchor,
        state=state.opt_state,
        judge=partial(score_of, program),
    )
    adoption = joined.take_adoption()
    if adoption is None:
        return joined, TrainState(joined.start, joined.state)
    del state  # or a card would hold both
    state = _adopt(program, settings, joined.start, adoption)
    if settings.initial == "mean":
        _warn_of_barrier(exchange.name, score, score_of(program, state.params))
    return joined, state


def follow(program: Program, sync: DelayedSync, state: TrainState) -> TrainState:
    """Return the state to go on with after `sync.step` has made its `params`.

    One of a population that was preempted goes on with the optimizer state of whom it has adopted, or a fresh one
    (`fresh_moments`).
    """
    adoption = sync.take_adoption()
    return state if adoption is None else _adopt(program, sync.settings, state.params, adoption)


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

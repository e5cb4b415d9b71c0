"""Trains a Program through an exchange, from joining the run to the last score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from zmqtrain.core.interfaces import Describes, Exchange
from zmqtrain.train.apart import begin, follow, pack_optimizer_state
from zmqtrain.train.minibatch import minibatch_from_spec
from zmqtrain.train.program import Program, data_of
from zmqtrain.train.step import NO_HOOKS, LoopHooks, MinibatchStep, TrainState
from zmqtrain.train.sync import DelayedSync, SyncStatistics


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

    make_sync: makes another `DelayedSync`, to compare with.
    """

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        hooks: LoopHooks = NO_HOOKS,
        make_sync: Callable[..., DelayedSync] = DelayedSync,
    ) -> None:
        self.program, self.exchange, self.hooks, self.make_sync = program, exchange, hooks, make_sync

    def run(self, batches: Iterable[Any]) -> TrainingResult:
        """Join, train, drain what is pending, score the result. Raises what joining, offering and the program raise."""
        began = self.exchange.clock.monotonic()
        settings, program = self.exchange.settings, self.program
        local = MinibatchStep(program, minibatch_from_spec(settings.minibatch), self.exchange.clock, self.hooks)
        if isinstance(self.exchange, Describes) and (digests := data_of(program)):
            self.exchange.describe(data=digests)
        sync, state = begin(program, self.exchange, local, self.hooks.stop, self.make_sync)
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

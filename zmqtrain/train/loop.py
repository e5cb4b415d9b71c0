"""Train as one would alone, and exchange every k steps without waiting: `DelayedSync` for a loop of one's own,
`TrainingLoop` for a Program.

Rule 1: knows an Exchange, not a network.  Rule 2: in the default mode nothing here waits for another node; in strict
mode an aggregate is applied at exactly k + d, waiting if it must.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from zmqtrain.errors import AggregateTimeout, ModelMismatch
from zmqtrain.train.program import Program
from zmqtrain.train.step import LocalStep, Rebase, TrainState, describe_model
from zmqtrain.types import Exchange, Update, Version

__all__ = ["SyncStatistics", "DelayedSync", "TrainingLoop", "TrainingResult"]

Params = TypeVar("Params")

STRICT_WAIT_SECONDS = 600.0
STRICT_LOOK_SECONDS = 10.0
"""After so long without an aggregate, strict mode looks again whether it still has one to wait for."""
FLUSH_SECONDS = 30.0
LANDING_LOOK_SECONDS = 0.005
AGES_KEPT = 1024


@dataclass(frozen=True)
class SyncStatistics:
    """Running figures of one node. age_steps: median, offer to application; held_seconds: of the training thread."""

    steps: int
    offers: int
    offers_refused: int
    aggregates_applied: int
    age_steps: float
    held_seconds: float
    bytes_sent: int
    bytes_received: int
    encode_seconds: float
    decode_seconds: float
    version: Version
    peers: int


class _Offered(NamedTuple):
    """An offer on its way: the step at which it was made, and the samples and steps it stands for."""

    step: int
    samples: int
    steps: int


class DelayedSync:
    """Keep a training loop's parameters in step with the run: offer every k steps, apply d steps later.

        sync = DelayedSync(node, params)
        for batch in batches:
            params, opt_state, loss = train_step(params, opt_state, batch)
            params = sync.step(params, score=loss)

    params: any pytree of float arrays. The first node's founds the run; at any other node the first `step` returns the
    run's parameters (or take `sync.params` before the loop).  donate: `step` may use up the buffers it is given.
    Raises ModelMismatch when the run has another model.  k, d and the rest are `exchange.settings`: the broker's.
    """

    def __init__(self, exchange: Exchange, params: Any, *, donate: bool = False) -> None:
        self.exchange, self.settings = exchange, exchange.settings
        self._tree: Any
        leaves, self._tree = jax.tree.flatten(params)
        model = describe_model(params)
        for spec in model:
            if not jax.numpy.issubdtype(np.dtype(jax.numpy.dtype(spec.dtype)), jax.numpy.floating):
                raise ModelMismatch(
                    f"the leaf {spec} is not a float array and cannot be exchanged; keep it out of the tree that is "
                    "given to DelayedSync (counters and keys belong to the node)",
                    spec.path,
                )
        update = exchange.join(model, [np.asarray(leaf, np.float32) for leaf in leaves])
        self._rebase = Rebase(exchange.layout, donate)
        start = leaves if update is None or update.anchor is None else update.anchor
        self._dtypes = [jax.numpy.dtype(spec.dtype) for spec in model]
        self._anchor = [jax.numpy.array(leaf, jax.numpy.float32) for leaf in start]
        self._adopted = update is not None
        self._rebase.warm_up([a.astype(d) for a, d in zip(self._anchor, self._dtypes, strict=True)], self._anchor)
        self._step = self._samples = 0
        self._unsaid = (0, 0)  # samples and steps that no offer on its way, or landed, stands for
        self._offers = self._refused = self._applied = 0
        self._offered: dict[int, _Offered] = {}
        self._ages: list[int] = []
        self._held_seconds = 0.0
        self._score_before: Any = None

    @property
    def params(self) -> Any:
        """A copy of the shared parameters as this node has them (the anchor), in the caller's tree and dtypes."""
        leaves = [jax.numpy.array(leaf, dtype) for leaf, dtype in zip(self._anchor, self._dtypes, strict=True)]
        self._adopted = False
        return jax.tree.unflatten(self._tree, leaves)

    @property
    def version(self) -> Version:
        """The version of the anchor."""
        return self.exchange.statistics().version

    def step(self, params: Params, score: Any = None, samples: int = 1) -> Params:
        """Mark a step boundary: apply what is due, offer when k steps are over, return the parameters to go on with.

        score: the loss of this step, lower is better. A device scalar is not waited for; the one of the step before is:
        a loop that ran a hundred steps ahead of its device would apply everything a hundred steps late.
        samples: in this step.
        Raises NonFiniteDelta when training has diverged here, AggregateTimeout in strict mode.
        """
        if isinstance(self._score_before, jax.Array) and not self._score_before.is_deleted():
            self._score_before.block_until_ready()
        self._score_before = score
        began = time.perf_counter()
        self._step += 1
        self._samples += samples
        self._unsaid = (self._unsaid[0] + samples, self._unsaid[1] + 1)
        if self._adopted:  # a newcomer: what it did before it had the run's parameters does not count
            params, self._unsaid = self.params, (0, 0)
        leaves = self._apply_due(self._flatten(params))
        if self._step % self.settings.every == 0:
            leaves = self._offer(leaves, score)
        self.exchange.report(
            step=self._step,
            samples=self._samples,
            loss=float("nan") if score is None else score,
            age_steps=float(self._ages[-1]) if self._ages else float("nan"),
            offers_refused=self._refused,
        )
        self._held_seconds += time.perf_counter() - began
        result: Params = jax.tree.unflatten(self._tree, leaves)
        return result

    def finish(self, params: Params, timeout_seconds: float = FLUSH_SECONDS) -> Params:
        """Drain what is pending: wait for what is on its way, then send the rest uncompressed, and wait for that.

        Returns the parameters, which are then the anchor but for rounding; at the end of a run, the same on all nodes.
        What is refused or lost is sent again. Gives up, without error, after the time, or when the run cannot be
        reached for `lost_seconds`: what has not landed by then stays in the returned parameters alone.
        """
        until = time.monotonic() + timeout_seconds
        leaves = self._await_landing(self._flatten(params), until)
        # who never made a step has nothing to drain, and an empty round would only move the outer momentum on
        for fragment in range(self.exchange.layout.fragments if self._step else 0):
            leaves = self._drain(leaves, fragment, until)
        while not self.exchange.everyone_drained() and time.monotonic() < until:
            time.sleep(LANDING_LOOK_SECONDS)
            leaves = self._await_landing(leaves, until)
        result: Params = jax.tree.unflatten(self._tree, leaves)
        return result

    def statistics(self) -> SyncStatistics:
        """Return the running figures."""
        exchange = self.exchange.statistics()
        return SyncStatistics(
            steps=self._step,
            offers=self._offers,
            offers_refused=self._refused,
            aggregates_applied=self._applied,
            age_steps=float(statistics.median(self._ages)) if self._ages else float("nan"),
            held_seconds=self._held_seconds,
            bytes_sent=exchange.bytes_sent,
            bytes_received=exchange.bytes_received,
            encode_seconds=exchange.encode_seconds,
            decode_seconds=exchange.decode_seconds,
            version=exchange.version,
            peers=exchange.peers,
        )

    # ------------------------------------------------------------------ the moves

    def _flatten(self, params: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(params)
        if tree != self._tree:
            raise ModelMismatch(f"the tree given to step is {tree}, the one that joined the run is {self._tree}")
        return leaves

    def _offer(self, leaves: list[Any], score: Any) -> list[Any]:
        fragment = self.exchange.next_fragment()
        if fragment is None or self._offer_fragment(leaves, fragment, score) is None:
            self._refused += 1
            return leaves
        return self._apply_due(leaves) if self.settings.delay == 0 else leaves

    def _offer_fragment(self, leaves: list[Any], fragment: int, score: Any = None, dense: bool = False) -> int | None:
        self._take_back_withdrawn()
        segments = self._rebase.pending(leaves, self._anchor, fragment)
        samples, steps = self._unsaid
        sequence = self.exchange.offer(fragment, segments, samples=samples, steps=steps, score=score, dense=dense)
        if sequence is not None:
            self._offers += 1
            self._offered[sequence] = _Offered(self._step, samples, steps)
            self._unsaid = (0, 0)
        return sequence

    def _take_back_withdrawn(self) -> None:
        """What a withdrawn offer stood for is still pending: the next offer stands for it too."""
        for sequence in self._offered.keys() - set(self.exchange.in_flight()):
            withdrawn = self._offered.pop(sequence)
            self._unsaid = (self._unsaid[0] + withdrawn.samples, self._unsaid[1] + withdrawn.steps)

    def _apply_due(self, leaves: list[Any]) -> list[Any]:
        while (update := self.exchange.peek()) is not None and self._is_due(update):
            taken = self.exchange.poll()
            assert taken is update
            leaves = self._apply(leaves, update)
        return self._await_due(leaves) if self.settings.mode == "strict" else leaves

    def _await_due(self, leaves: list[Any]) -> list[Any]:
        """Wait for what must be applied now; an offer that is withdrawn meanwhile is not waited for any longer."""
        until = time.monotonic() + STRICT_WAIT_SECONDS
        while any(
            self._step >= self._offered[s].step + self.settings.delay
            for s in self.exchange.in_flight()
            if s in self._offered
        ):
            try:
                leaves = self._apply(leaves, self.exchange.wait_update(STRICT_LOOK_SECONDS))
            except AggregateTimeout as error:
                if time.monotonic() >= until:
                    raise AggregateTimeout(f"nothing came for {STRICT_WAIT_SECONDS:g} s. {error}") from None
        return leaves

    def _is_due(self, update: Update) -> bool:
        offered = [self._offered[sequence] for sequence in update.landed if sequence in self._offered]
        return all(self._step >= one.step + self.settings.delay for one in offered)

    def _apply(self, leaves: list[Any], update: Update) -> list[Any]:
        if update.reset:
            assert update.anchor is not None
            self._anchor = [jax.numpy.array(leaf, jax.numpy.float32) for leaf in update.anchor]
            leaves = [jax.numpy.array(leaf, d) for leaf, d in zip(update.anchor, self._dtypes, strict=True)]
        elif update.anchor is not None:
            leaves, self._anchor = self._rebase.adopt(leaves, self._anchor, update.anchor, update.own)
        else:
            leaves, self._anchor = self._rebase.apply(leaves, self._anchor, update.aggregate, update.own)
        self._applied += 1
        for sequence in update.landed:
            if sequence in self._offered:
                self._ages.append(self._step - self._offered.pop(sequence).step)
        del self._ages[:-AGES_KEPT]
        return leaves

    def _drain(self, leaves: list[Any], fragment: int, until: float) -> list[Any]:
        taken_at = time.monotonic()
        while True:
            sequence = self._offer_fragment(leaves, fragment, dense=True)
            leaves = self._await_landing(leaves, until)
            now = time.monotonic()
            if sequence is not None:
                taken_at = now
                if sequence not in self._offered:
                    return leaves
            if now >= until or now >= taken_at + self.settings.lost_seconds:
                return leaves
            if sequence is None:
                time.sleep(LANDING_LOOK_SECONDS)

    def _await_landing(self, leaves: list[Any], until: float) -> list[Any]:
        reached_at = time.monotonic()
        while True:
            while (update := self.exchange.poll()) is not None:
                leaves = self._apply(leaves, update)
            now = time.monotonic()
            reached_at = now if self.exchange.reachable else reached_at
            gone = now - reached_at >= self.settings.lost_seconds
            if not self.exchange.in_flight() or now >= until or gone:
                return leaves
            time.sleep(min(LANDING_LOOK_SECONDS, until - now))


@dataclass(frozen=True)
class TrainingResult:
    """What `TrainingLoop.run` ends with. scores: of the final parameters on held-out data."""

    params: Any
    scores: dict[str, float]
    statistics: SyncStatistics
    seconds: float
    samples: int


class TrainingLoop:
    """Train a Program through an exchange until its data ends or `stop` says so.

    evaluate: whether this node may be asked to score the shared model.  watch: called after each step with the step's
    number and its loss (a device scalar that may not be ready).
    """

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        *,
        stop: Callable[[], bool] = lambda: False,
        watch: Callable[[int, jax.Array], None] | None = None,
    ) -> None:
        self.program, self.exchange, self.stop, self.watch = program, exchange, stop, watch

    def run(self, batches: Iterable[Any]) -> TrainingResult:
        """Join, train, drain what is pending, score the result. Raises what joining, offering and the program raise."""
        began = time.monotonic()
        local = LocalStep(self.program)
        state = local.init(self.exchange.settings.seed)
        local.compile(state, next(iter(self.program.batches(0))))
        sync = DelayedSync(self.exchange, state.params, donate=True)
        state = TrainState(sync.params, state.opt_state)
        evaluated = -1.0
        for number, batch in enumerate(self._until_stopped(batches), start=1):
            state, loss = local.step(state, batch)
            state = TrainState(
                sync.step(state.params, score=loss, samples=self.program.samples_per_batch), state.opt_state
            )
            if self.watch is not None:
                self.watch(number, loss)
            if self._evaluation_due(evaluated):
                self.exchange.report_scores(self.program.evaluate(sync.params), sync.version)
                evaluated = time.monotonic()
        params = sync.finish(state.params)
        scores = self.program.evaluate(params)
        self.exchange.report_scores(scores, sync.version)
        figures = sync.statistics()
        return TrainingResult(
            params, scores, figures, time.monotonic() - began, figures.steps * self.program.samples_per_batch
        )

    def _until_stopped(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            if self.stop():
                return
            yield batch

    def _evaluation_due(self, evaluated: float) -> bool:
        every = self.exchange.settings.evaluate_seconds
        return every > 0 and time.monotonic() - evaluated >= every and self.exchange.is_evaluator

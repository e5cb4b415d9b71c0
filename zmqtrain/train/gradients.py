"""Train a Program synchronously: each step one update by the mean gradient of all processes, on equal parameters.

    g = sum over processes and their micro-batches of (samples / samples of all) * gradient;  params = optimizer(g)

Rule 1: knows a `GradientExchange`, not a network; the run itself (settings, data units, reports, the first and the last
parameters) is the `Exchange`'s, as in `TrainingLoop`.
Rule 2: parameters are equal on all processes, bit for bit, after every step. They begin so (one of them gives all its
state), take the same step of the same mean, and their checksums are compared at the end, and when it is asked for.
Rule 3: nothing is decided by time: who has no data takes part with weight 0, and all end together when all have said
that they never will have any more.
Rule 4: a step is completed or repeated: if a process is lost during one, those that have completed it give the others
their state; if nobody has, the others repeat it with their own gradients.
Rule 5: gradients travel in buckets, each one flat array. A bucket holds whole leaves; one that is larger than a bucket
should be has one for itself. Last layers first: their gradients are ready first, and a bucket's exchange begins while
the next one is still copied from the device.
Source: synchronous SGD with large minibatches, Goyal et al. 2017; gradient bucketing, Li et al. 2020, PyTorch
Distributed, sec. 3.2.3.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zmqtrain.core.checksum import crc32
from zmqtrain.core.errors import ConfigError, NonFiniteDelta, PeerLost, ReplicasDiffer
from zmqtrain.core.interfaces import Exchange, GradientExchange
from zmqtrain.core.types import Array, ModelSpec, Turn, Version
from zmqtrain.train.anchor import AnchorOn
from zmqtrain.train.leaves import host_leaves, placed_like
from zmqtrain.train.loop import TrainingResult, begin
from zmqtrain.train.minibatch import FixedMinibatch, minibatch_from_spec
from zmqtrain.train.program import Program
from zmqtrain.train.step import COMPILED_KEPT, NO_HOOKS, Gradient, LoopHooks, MinibatchStep, TrainState, describe_model
from zmqtrain.train.sync import FLUSH_SECONDS, DelayedSync, SyncStatistics
from zmqtrain.train.synchronous import BUCKET_BYTES, Overlap

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Who was asked to stop waits so long for the others to be asked too; then it leaves them."""
ALONE_SECONDS = 10.0
"""So long a process that was asked to stop waits for the run to take its parameters, which takes all processes."""
FLOAT_BYTES = 4


@dataclass(frozen=True)
class GradientOptions:
    """How gradients are exchanged.

    bucket_bytes: gradients travel in pieces of about so many bytes: one is on the wire while the next comes from the
    device.
    overlap: "none" exchanges the mean of a step's m micro-batches when the last one is computed. With C the time of one
    and X that of an exchange, a step takes m C + X, and its gradients travel once. To exchange each micro-batch's
    gradient beside the next one's computation would send m times the bytes and gain nothing: the last one still takes
    X, and where X > C the others wait for the wire as well (C + m X).  "next" exchanges the earlier micro-batches
    beside the last one: a step takes (m - 1) C + max(C, X), as many bytes travel, and up to C is hidden. The price: the
    last micro-batch's gradient counts in the next step, one step late (with m = 1, every one).
    check_steps: compare checksums every so many steps; 0: at the end alone.
    """

    bucket_bytes: int = BUCKET_BYTES
    overlap: Overlap = "none"
    check_steps: int = 0


DEFAULTS = GradientOptions()


class GradientOpener(Protocol):
    """How a node comes to the others of its run, to exchange gradients."""

    def open(self, model: ModelSpec, version: Version) -> GradientExchange:
        """Open the exchange, once the node has joined the run, for its model, at the version of its parameters."""


class GradientLoop:
    """Trains a Program synchronously with the other nodes of its run, until the data of all has ended.

    gradients: opens the exchange with the others; the loop closes it.  anchor: as for `TrainingLoop`.
    """

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        gradients: GradientOpener,
        options: GradientOptions = DEFAULTS,
        hooks: LoopHooks = NO_HOOKS,
        anchor: AnchorOn = "device",
    ) -> None:
        self.program, self.exchange, self.gradients = program, exchange, gradients
        self.options, self.hooks, self.anchor = options, hooks, anchor
        settings = exchange.settings
        if settings.initial == "own" or settings.elastic < 1:
            raise ConfigError(
                "nodes that train synchronously have the same parameters, and this run's settings let each keep its "
                f"own (initial {settings.initial!r}, elastic {settings.elastic:g}): start the broker with --initial "
                "best and --elastic 1, or the nodes without --exchange"
            )
        minibatch = minibatch_from_spec(settings.minibatch)
        if options.overlap == "next" and not isinstance(minibatch, FixedMinibatch):
            raise ConfigError(
                f"overlap=next needs steps of a fixed number of micro-batches, and this run's minibatch is "
                f"{settings.minibatch!r}: say --minibatch fixed:batches=4 where the broker is started, or overlap=none"
            )
        self.early_batches = minibatch.batches - 1 if isinstance(minibatch, FixedMinibatch) else 0
        self.local = _GradientStep(program, minibatch, exchange.clock, hooks)
        self.local.trains_apart = settings.trains_apart

    def run(self, batches: Iterable[Any | None]) -> TrainingResult:
        """Join, train synchronously, compare, give the run the final parameters, score them.

        batches: None among them says that there is none now, and may be one later.
        Raises what joining, the program and the exchange raise; NonFiniteDelta if a gradient of this process is not
        finite (nothing of it is sent, and the others go on without it); ReplicasDiffer if parameters are not the same
        on all processes (what they have learnt is in the run, as the mean of all).
        """
        began = self.exchange.clock.monotonic()
        sync, state = begin(self.exchange, self.local, self.anchor)
        gradients = self.gradients.open(describe_model(state.params), sync.version)
        try:
            process = _SynchronousRun(self, sync, gradients, state, _Coming(batches, self.hooks))
            del state
            ended = process.train()
        finally:
            gradients.close()
        params = process.state.params
        if ended:
            sync.made_steps(process.steps, process.samples)
            # through a server nobody knows whether the others were asked to stop as well
            seconds = ALONE_SECONDS if gradients.gives_weights and self.hooks.stop() else FLUSH_SECONDS
            before = sync.version
            params = sync.finish(params, seconds, moved=process.moved)
            if process.steps and sync.version == before:
                logger.warning(
                    "%s: the run has not taken the parameters of these %d steps: its broker was not there, or not all "
                    "others were; the run keeps those it had before",
                    self.exchange.name,
                    process.steps,
                )
        scores = self.program.evaluate(params)
        if ended:
            self.exchange.report_scores(scores, sync.version)
        if process.difference is not None:
            raise process.difference
        seconds = self.exchange.clock.monotonic() - began
        return TrainingResult(params, scores, process.statistics(), seconds, process.samples)


class _GradientStep(MinibatchStep):
    """A step that exchanges its gradient before the optimizer has it. trains_apart: it is a usual one before that."""

    trains_apart = False

    def compile(self, state: TrainState, batch: Any) -> int:
        working = self.compile_gradient(state, batch)
        return max(working, super().compile(state, batch)) if self.trains_apart else working


class _Coming:
    """Batches as they come: None when there is none now; over: when there will be none."""

    def __init__(self, batches: Iterable[Any | None], hooks: LoopHooks) -> None:
        self._batches, self._hooks, self.over = iter(batches), hooks, False

    def __iter__(self) -> Iterator[Any | None]:
        return self

    def __next__(self) -> Any | None:
        if not self.over:
            batch = next(self._batches, StopIteration)
            self.over = batch is StopIteration or self._hooks.stop()
            if not self.over:
                return batch
        raise StopIteration


class Buckets:
    """The buckets of one model. leaves: by bucket the numbers of its leaves, falling.

    bucket_bytes: of float32, that a bucket has at most unless one leaf has more.  Raises ConfigError if it is not
    positive.
    """

    def __init__(self, model: ModelSpec, bucket_bytes: int = BUCKET_BYTES) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"a bucket has at least one byte, got {bucket_bytes}")
        self.model, self.leaves, held = model, list[list[int]](), 0
        for number in reversed(range(len(model))):
            size = FLOAT_BYTES * model[number].values
            if not self.leaves or held + size > bucket_bytes:
                self.leaves.append([])
                held = 0
            self.leaves[-1].append(number)
            held += size

    def zeros(self) -> list[Array]:
        return [np.zeros(sum(self.model[leaf].values for leaf in bucket), np.float32) for bucket in self.leaves]

    def join(self, leaves: Sequence[Array]) -> list[jax.Array]:
        """Return the buckets of a model's leaves: one flat float32 array each (may be traced by jax)."""
        return [
            jnp.concatenate([leaves[leaf].reshape(-1).astype(jnp.float32) for leaf in bucket]) for bucket in self.leaves
        ]

    def split(self, buckets: Sequence[Array]) -> list[Array]:
        """Return the leaves that are in the buckets, float32 in their shapes (numpy, jax, or traced by jax)."""
        leaves: list[Array] = [None] * len(self.model)
        for numbers, flat in zip(self.leaves, buckets, strict=True):
            ends = accumulate(self.model[leaf].values for leaf in numbers)
            for leaf, end in zip(numbers, ends, strict=True):
                leaves[leaf] = flat[end - self.model[leaf].values : end].reshape(self.model[leaf].shape)
        return leaves


class _Functions:
    """What is compiled for one model and one optimizer."""

    def __init__(self, model: ModelSpec, bucket_bytes: int, optimizer: optax.GradientTransformation) -> None:
        self.buckets, self.optimizer = Buckets(model, bucket_bytes), optimizer
        self.add = jax.jit(lambda one, other: jax.tree.map(jnp.add, one, other), donate_argnums=0)
        self.share = jax.jit(self._share)
        self.step = jax.jit(self._step, donate_argnums=0)
        self.adopt = jax.jit(self._adopt, donate_argnums=0)

    def _share(self, total: Any, share: Any, parts: Any) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """The buckets of `share` times a sum of gradients, whether they are finite, and the mean loss of its parts."""
        flats = [share * flat for flat in self.buckets.join(jax.tree.leaves(total.gradient))]
        return flats, jnp.stack([jnp.isfinite(flat).all() for flat in flats]).all(), total.loss / parts

    def _step(self, state: TrainState, means: Sequence[Array]) -> TrainState:
        leaves, tree = jax.tree.flatten(state.params)
        gradient = [mean.astype(leaf.dtype) for mean, leaf in zip(self.buckets.split(means), leaves, strict=True)]
        updates, opt_state = self.optimizer.update(jax.tree.unflatten(tree, gradient), state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state)

    def _adopt(self, params: Any, weights: Sequence[Array]) -> Any:
        leaves, tree = jax.tree.flatten(params)
        new = [weight.astype(leaf.dtype) for weight, leaf in zip(self.buckets.split(weights), leaves, strict=True)]
        return jax.tree.unflatten(tree, new)


@lru_cache(maxsize=COMPILED_KEPT)
def _functions(model: ModelSpec, bucket_bytes: int, optimizer_of: Callable[[], Any]) -> _Functions:
    return _Functions(model, bucket_bytes, optimizer_of())


class _SynchronousRun:
    """One process of a synchronous run. difference: found between processes' parameters; moved: it adopted others'."""

    def __init__(
        self, loop: GradientLoop, sync: DelayedSync, gradients: GradientExchange, state: TrainState, coming: _Coming
    ) -> None:
        self.loop, self.sync, self.gradients, self.state = loop, sync, gradients, state
        self.steps = self.samples = 0
        self.difference: ReplicasDiffer | None = None
        self._coming, self._clock = coming, loop.exchange.clock
        self._model = describe_model(state.params)
        self._functions = _functions(self._model, loop.options.bucket_bytes, loop.program.optimizer)
        self._work: Gradient | None = None  # drawn, and not in a completed step
        self._late: Gradient | None = None  # of the last micro-batch, where that counts in the next step
        self._loss: Any = float("nan")
        self._in_step = self.moved = False
        self._held_seconds = 0.0
        self._asked_at: float | None = None
        self._evaluated = -1.0

    def train(self) -> bool:
        """Train until all have ended together: True; False: this process leaves before the others."""
        aligned = False
        while True:
            try:
                if not aligned:
                    self._align()
                    aligned = True
                if self._is_leaving():
                    logger.info("%s was asked to stop, and leaves the others", self.loop.exchange.name)
                    return False
                if not self._take_turn():
                    break
            except PeerLost as lost:
                if lost.rank == self.gradients.rank and not self.gradients.gives_weights:
                    text = "; the others go on without it, and nobody joins them in the middle of a run"
                    raise PeerLost(lost.peer, lost.why + text, lost.rank) from None
                self.gradients.recover(lost)
                logger.warning("%s; the others go on from step %d", lost, self.steps)
                logger.info("%d are left: %s", len(self.gradients.names), ", ".join(self.gradients.names))
                aligned = False
        with contextlib.suppress(PeerLost):  # nobody leaves before all have compared
            self.gradients.gather([0])
        return True

    def statistics(self) -> SyncStatistics:
        """The figures of `DelayedSync`, with those of the steps in the place of the aggregates'."""
        figures, (sent, received) = self.sync.statistics(), self.gradients.traffic()
        return replace(
            figures,
            steps=self.steps,
            aggregates_applied=self.steps,
            age_steps=float(self.loop.options.overlap == "next"),
            held_seconds=self._held_seconds,
            bytes_sent=figures.bytes_sent + sent,
            bytes_received=figures.bytes_received + received,
        )

    # ------------------------------------------------------------------ a step

    def _take_turn(self) -> bool:
        """Take part in a step, with data or without; False when all have ended, or differ."""
        if self._work is None:
            self._work = self._next_gradient()
        work = self._work
        began = time.perf_counter()
        over = self._coming.over and work is None and self._late is None
        turn = self.gradients.agree(0 if work is None else work.samples, over)
        self._held_seconds += time.perf_counter() - began
        if turn.over:
            if self.gradients.gives_weights:
                self._align()  # to what all have made of them
            self._compare()
        if turn.samples == 0:
            return not turn.over
        answers = self._exchange(work, turn)
        if self.gradients.gives_weights:
            self.state = TrainState(self._functions.adopt(self.state.params, answers), self.state.opt_state)
        else:
            self.state = self._functions.step(self.state, answers)
        self._completed(self.steps + 1)
        self._say()
        every = self.loop.options.check_steps
        return not (every and self.steps % every == 0) or self._compare()

    def _next_gradient(self) -> Gradient | None:
        """Begin to compute what is exchanged next; None when there is no data now."""
        local, params = self.loop.local, self.state.params
        if self.loop.options.overlap == "none":
            return local.gradient(params, self._coming)
        early = local.gradient(params, self._coming, self.loop.early_batches) if self.loop.early_batches else None
        work, self._late = self._late, local.gradient(params, self._coming, 1, begins=early is None)
        if work is None or early is None:
            return work or early
        return Gradient(
            self._functions.add(work.total, early.total), work.parts + early.parts, work.samples + early.samples
        )

    def _exchange(self, work: Gradient | None, turn: Turn) -> list[Array]:
        """Return the mean gradients of all, or what a server made of them, in buckets."""
        buckets = self._functions.buckets
        if work is None:
            flats = buckets.zeros()
        else:
            share = np.float32(work.samples / work.parts / turn.samples)
            flats, finite, self._loss = self._functions.share(work.total, share, np.float32(work.parts))
            for flat in flats:
                flat.copy_to_host_async()
            if not finite:
                self._refuse(flats)
        began = time.perf_counter()
        for leaves, flat in zip(buckets.leaves, flats, strict=True):
            self.gradients.begin(leaves, np.asarray(flat))
        answers = self.gradients.finish()
        self._held_seconds += time.perf_counter() - began
        return answers

    def _refuse(self, flats: Sequence[Array]) -> None:
        leaves = self._functions.buckets.split([np.asarray(flat) for flat in flats])
        leaf = next(spec.path for spec, leaf in zip(self._model, leaves, strict=True) if not np.isfinite(leaf).all())
        raise NonFiniteDelta(
            f"{self.loop.exchange.name}: the gradient of {leaf} in step {self.steps + 1} is not finite: training has "
            "diverged here, and nothing of it was sent. Begin again with a smaller learning rate, and look at this "
            "node's data",
            leaf,
        )

    def _completed(self, steps: int) -> None:
        self.steps = steps
        self.samples += 0 if self._work is None else self._work.samples
        self._work = None

    def _say(self) -> None:
        exchange = self.loop.exchange
        exchange.report(step=self.steps, samples=self.samples, loss=self._loss, age_steps=0.0, offers_refused=0)
        self.loop.hooks.watch(self.steps, self._loss)
        every, now = exchange.settings.evaluate_seconds, self._clock.monotonic()
        if every > 0 and now - self._evaluated >= every and exchange.state().is_evaluator:
            exchange.report_scores(self.loop.program.evaluate(self.state.params), self.sync.version)
            self._evaluated = self._clock.monotonic()

    def _is_leaving(self) -> bool:
        """Return whether this process was asked to stop, and the others were not for so long that it leaves them."""
        if not self.loop.hooks.stop():
            return False
        now = self._clock.monotonic()
        self._asked_at = now if self._asked_at is None else self._asked_at
        return now - self._asked_at >= STOP_SECONDS

    # ------------------------------------------------------------------ equal on all

    def _compare(self) -> bool:
        """Return False: it is over; or True, to go on. Notes where parameters are not the same on all processes."""
        sums = self.gradients.gather(
            [crc32(leaf.reshape(-1).view(np.uint8).data) for leaf in host_leaves(self.state.params)]
        )
        for spec, of_leaf in zip(self._model, zip(*sums, strict=True), strict=True):
            usual, _ = Counter(of_leaf).most_common(1)[0]
            ranks = tuple(rank for rank, one in enumerate(of_leaf) if one != usual)
            if ranks:
                who = ", ".join(f"{self.gradients.names[rank]} (rank {rank})" for rank in ranks)
                text = (
                    f"after step {self.steps} the leaf {spec.path} of {who} is not that of the others, bit for bit. Do "
                    "all have the same jax and the same kind of device? Others may round otherwise: such PCs train "
                    "together without --exchange"
                )
                self.difference = ReplicasDiffer(text, spec.path, ranks)
                break
        return self.difference is None

    def _align(self) -> None:
        """Take the state of the process that has made most steps; at the very beginning, of the first process."""
        step, arrays = self.gradients.align(self.steps if self._in_step else -1, lambda: host_leaves(self._shared()))
        if arrays is not None:
            self._adopt(arrays)
        if self._in_step and step > self.steps:  # what this process had drawn is in that step
            self._completed(step)
        self._in_step = True

    def _shared(self) -> Any:
        return self.state.params if self.gradients.gives_weights else self.state

    def _adopt(self, arrays: Sequence[Array]) -> None:
        self.moved |= any((new != old).any() for new, old in zip(arrays, host_leaves(self._shared()), strict=True))
        adopted = placed_like(self._shared(), arrays)
        self.state = self.state._replace(params=adopted) if self.gradients.gives_weights else adopted

"""Keeps the parameters of a training loop in step with the run: exchange every k steps, without waiting.

It knows an Exchange, not a network; time is the exchange's. It waits for other nodes only if the settings say so
(strict mode, bounded staleness): then an aggregate is applied at exactly k + d.
"""

from __future__ import annotations

import logging
import math
import operator
import reprlib
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from zmqtrain.core.errors import AggregateTimeout, ConfigError, LocalProtocolError, ModelMismatch, RunStopped
from zmqtrain.core.interfaces import Agrees, Closes, Describes, Exchange, Keeps, OffersTogether, PinnedSegments
from zmqtrain.core.types import Array, ExchangeState, ModelSpec, Update, Version, describe_mismatch, number_of
from zmqtrain.train.anchor import AnchorOn, moves_of
from zmqtrain.train.contributions import ContributionTracker, Drain, SyncSchedule
from zmqtrain.train.first_step import FirstStep
from zmqtrain.train.leaves import kept_leaves, pack_trees, unpack_tree, whole_leaves
from zmqtrain.train.processes import spans_processes, whole_leaf
from zmqtrain.train.seen import say_device
from zmqtrain.train.step import describe_model

Params = TypeVar("Params")

logger = logging.getLogger(__name__)

STRICT_WAIT_SECONDS = 600.0
STRICT_LOOK_SECONDS = 10.0
"""How often strict mode, without an aggregate, checks that it still has one to wait for."""
FLUSH_SECONDS = 30.0
LANDING_LOOK_SECONDS = 0.005
HELD_KEPT = 15
"""The time for which an exchange holds the training thread is the median of so many; the first ones compile."""


@dataclass(frozen=True)
class SyncStatistics:
    """Running figures of one node. offers: of several brokers each counts.  offers_refused: put off, because others had
    to land first.  age_steps: median, offer to application.  held_seconds: of the training thread."""

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


class Adoption(NamedTuple):
    """This node has another's parameters. optimizer_state: None if it did not come with them."""

    optimizer_state: Sequence[Array] | None


class _StepParams:
    """The parameters that a step was given. leaves: None until somebody flattens them, or has others in their place:
    most steps touch none of them, and return what they were given."""

    def __init__(self, params: Any, flatten: Callable[[Any], list[Any]]) -> None:
        self._params, self._flatten = params, flatten
        self.leaves: list[Any] | None = None

    def flatten(self) -> list[Any]:
        """Return the leaves of now. Raises ModelMismatch where they are not those of the run."""
        if self.leaves is None:
            self.leaves = self._flatten(self._params)
        return self.leaves


class DelayedSync:
    """Keeps a training loop's parameters in step with the run: offers every k steps, applies d steps later.

        with zt.DelayedSync(node, params) as sync:
            for batch in node.batches(batches_of):
                params, opt_state, loss = train_step(params, opt_state, batch)
                params = sync.step(params, score=loss, samples=len(batch))
            params = sync.finish(params)

    `step` after each step of the loop: without it the node trains alone. `score`: without it the node reports no loss,
    and nodes that begin apart cannot be compared. `samples`: without it each step counts as one sample, and samples per
    second, weighted means and the noise scale are wrong. `finish` after the loop: without it the progress since the
    last aggregate that contains this node's delta (up to k + d steps) is lost, and the returned parameters are this
    node's, not the run's.

    At the end of a `with` block that no exception ends, `finish` is called with what the last `step` returned, unless
    the loop has called it; `params` of this object are the run's parameters then. In both cases the node is closed.
    RunStopped, of a run that an operator has ended, ends the block in the same way. Any other exception (Ctrl-C is one)
    closes the node without `finish`: what it had not sent is lost, and the others do not wait for it. `step` after
    `finish` or `close` raises LocalProtocolError.

    params: any pytree of float arrays, on one device or, by any sharding, on several of this PC (or of several
    processes, at a node of `connect_as_one`): each keeps its own part, and what `step` returns lies as what it was
    given. The first node's founds the run; at any other node the
    first `step` returns the run's parameters (or take `sync.start` before the loop).  donate: `step` may use up the
    buffers it is given.  anchor: where the shared parameters are kept: "device" (where `params` are) or "host".
    score: of `params` on training data that was held out, where the run begins with the best or the mean (NaN: not
    known).  judge: scores any parameters so: to decide whether the run may begin with the mean, and, where each node
    keeps its own (initial own), whether to adopt those that it is lent. None: other nodes judge the mean; its own are
    compared by the `score` of its steps.
    optimizer_state: the optimizer's state as float32 arrays, for nodes that adopt these parameters.
    state: the rest of the loop's state for a checkpoint, where the node keeps one (`connect(..., checkpoint=...)`): any
    pytree of arrays and numbers, as the optimizer's state and random keys. If the node goes on from a checkpoint,
    `start` and `state` are the checkpoint's.
    Raises ModelMismatch when the run has another model.  k, d and the rest are `exchange.settings`: the broker's.
    """

    def __init__(
        self,
        exchange: Exchange,
        params: Any,
        *,
        donate: bool = False,
        score: float = float("nan"),
        optimizer_state: Sequence[Array] = (),
        anchor: AnchorOn = "device",
        state: Any = (),
        judge: Callable[[Any], float] | None = None,
    ) -> None:
        if not callable(getattr(exchange, "next_fragments", None)):
            raise ConfigError(
                f"DelayedSync takes the node that `connect` returns, and then the parameters: got a "
                f'{type(exchange).__name__} first. For example: sync = DelayedSync(connect("tcp://192.168.1.10:5555"), '
                "params)"
            )
        self.state = state
        """As given, or that of the checkpoint that this node goes on from."""
        self._keeping = exchange.checkpoint if isinstance(exchange, Keeps) else None
        self.exchange, self.settings, self._clock = exchange, exchange.settings, exchange.clock
        self._tree: Any
        leaves, self._tree = jax.tree.flatten(params)
        model = _describe_floats(params)
        _check_connected(exchange, model, leaves)
        self._shapes = [spec.shape for spec in model]
        self._first_step: FirstStep | None = None
        if isinstance(exchange, Describes):
            exchange.describe(device=say_device(exchange.name, leaves))
            self._first_step = FirstStep(leaves)
        update = exchange.join(model, _to_host(leaves), score=score, optimizer_state=optimizer_state)
        self.settings = exchange.settings  # of which the number of brokers may be decided by now
        self._model, elastic, self._judge = model, self.settings.elastic, judge
        self._each = exchange.layout.fragments // self.settings.shards  # fragments of one broker
        self._moves = moves_of(exchange.layout, model, leaves, donate=donate, elastic=elastic, anchor=anchor)
        population = exchange.population
        while update is not None and update.version < 0 and self.settings.initial == "mean" and population is not None:
            update = population.vote(float("nan") if judge is None else judge(self._tree_of(update)))
        start = leaves if update is None or update.anchor is None else whole_leaves(model, update.anchor)
        self._anchor = self._moves.place(start)
        self._own = leaves if update is not None and update.keep else None
        self._adopted = update is not None and not update.keep
        self._adoption = Adoption(update.optimizer_state) if update is not None and self._adopted else None
        self._moves.warm_up(leaves, self._anchor)
        self._tracker, self._schedule = ContributionTracker(self.settings.shards), SyncSchedule(exchange)
        self._held_seconds = self._held_before = self._held_each = 0.0
        self._held: deque[float] = deque(maxlen=HELD_KEPT)  # of the newest exchanges
        self._score_before: Any = None
        self._recent: deque[Any] = deque(maxlen=self.settings.apart_steps)
        self.resumed = self._untaken = False
        """resumed: whether this node goes on from a checkpoint."""
        self._ended = ""  # by which call this node's part in the run is over
        self._keeps_last = False
        self._last: Any = None  # inside a `with` block: what the last step returned
        if self._keeping is not None and (saved := self._keeping.take()) is not None:
            self._go_on_from(leaves, *saved)
        elif self._keeping is not None and self.settings.mode == "strict":
            begun = self._own or self._moves.parameters(self._anchor)  # or there might be none that all can go back to
            self.save(jax.tree.unflatten(self._tree, begun), state, wait=True)

    @property
    def params(self) -> Any:
        """A copy of the shared parameters as this node has them (the anchor), in the caller's tree and dtypes."""
        self._adopted = False
        leaves = self._moves.parameters(self._anchor)
        if self._first_step is not None:
            self._first_step.begins_with(leaves)
        return jax.tree.unflatten(self._tree, leaves)

    @property
    def start(self) -> Any:
        """A copy of the parameters to begin with: the shared ones, or the node's own where each node keeps its own, or
        goes on from a checkpoint."""
        self._untaken = False
        if self._own is None:
            return self.params
        return jax.tree.unflatten(self._tree, [jax.numpy.array(leaf) for leaf in self._own])

    def take_adoption(self) -> Adoption | None:
        """Return, once, that this node has adopted another's parameters since the last call.

        Its optimizer then begins afresh, or goes on from the other's state.
        """
        adoption, self._adoption = self._adoption, None
        return adoption

    @property
    def steps(self) -> int:
        """How many step boundaries there have been."""
        return self._tracker.step

    @property
    def run_samples(self) -> int:
        """The samples of all nodes that are in the shared parameters, as the hub last reported (once a second).

        A learning rate that follows this is right at a node that joins later, too: docs/examples/schedule_loop.py.
        """
        return self.exchange.statistics().run_samples

    @property
    def version(self) -> Version:
        """The version of the anchor."""
        return self.exchange.statistics().version

    def step(
        self,
        params: Params,
        score: Any = None,
        samples: int = 1,
        optimizer_state: Callable[[], Sequence[Array]] = tuple,
        state: Any = (),
    ) -> Params:
        """Mark a step boundary: apply what is due, offer when k steps are over, save when that is due; return the
        parameters to go on with.

        score: the loss of this step, lower is better; an offer's score is the mean of those since the last offer.
        A device scalar is not waited for, but that of the step before is: a loop that ran a hundred steps ahead of its
        device would apply everything a hundred steps late.
        samples: in this step.  optimizer_state: gives it as float32 arrays, if another node is to have it.
        state: what else a checkpoint holds, should one be due; it is copied.
        Raises NonFiniteDelta when training diverges here again and again, AggregateTimeout in strict mode,
        LocalProtocolError after `finish` or `close`; RunStopped when an operator has ended the run (`zmqtrain stop`),
        in a loop that is not over `node.batches`, which ends by itself: a `with` block then ends as if the data had;
        any other loop calls `finish(params)`.
        """
        self._check_open("step")
        given, state_now = _StepParams(params, self._flatten), self.exchange.state()
        if not self.steps:
            given.flatten()  # a loop that gives another tree hears it at once; later, when something is exchanged
        samples = _check_figures(score, samples)
        self._check_stopped(state_now, params, samples)
        self._last = None  # before more memory is needed
        if isinstance(self._score_before, jax.Array) and not self._score_before.is_deleted():
            self._score_before.block_until_ready()
        self._score_before = score
        began = self._clock.monotonic()
        if self._first_step is not None:
            self._tell_first_step(given.flatten(), score, self._first_step)
        self._tracker.made_steps(1, samples)
        if self._adopted:  # a newcomer: what it did before it had the run's parameters does not count
            given.leaves = jax.tree.leaves(self.params)
            self._tracker.forget_unsent()
        if self._untaken:  # likewise, before it had those of its checkpoint
            given.leaves = jax.tree.leaves(self.start)
        self._own = None
        if self.settings.waits or self._next_due() is not None:
            given.leaves = self._apply_due(given.flatten())
            state_now = self.exchange.state()
        self._schedule.follow()
        if state_now.wanted and self.exchange.population is not None:
            self.exchange.population.lend(_to_host(given.flatten()), optimizer_state())
            self._tracker.forget_unsent()  # what has been computed so far is in what others begin with
        if score is not None:
            self._tracker.scored(score)
            self._recent.append(score)
        is_apart = self.settings.initial == "own" and self.settings.elastic == 1 and not state_now.founded
        if is_apart and self._adoption is None and self.steps % self.settings.apart_steps == 0:
            self._compare(given.flatten())
        if is_due := self._schedule.is_due(self.steps):
            given.leaves = self._offer(given.flatten())
            self._schedule.offered(self.steps)
        self.exchange.report(
            step=self.steps,
            samples=self._tracker.samples,
            loss=float("nan") if score is None else score,
            age_steps=float(self._tracker.ages[-1]) if self._tracker.ages else float("nan"),
            offers_refused=self._tracker.put_off,
            held_seconds=self._held_each,
        )
        result: Params = params if given.leaves is None else jax.tree.unflatten(self._tree, given.leaves)
        if self._keeping is not None and self._keeping.is_due():
            self.save(result, state)
        self._held_seconds += self._clock.monotonic() - began
        if is_due:
            self._held.append(self._held_seconds - self._held_before)
            self._held_before, self._held_each = self._held_seconds, statistics.median(self._held)
        if self._keeps_last:
            self._last = result
        return result

    def save(self, params: Any, state: Any = (), wait: bool = False) -> None:
        """Save a checkpoint now, where the node keeps one; holds the loop for the copy of all to the host.

        params, state: as for `step`.  wait: until it is written.  Raises ModelMismatch for what is no array, and for
        parameters of another tree.
        """
        if self._keeping is None or not self.exchange.state().founded:
            return
        self._flatten(params)  # what is no tree of this run is not kept
        self._tracker.take_back(self.exchange.state().in_flight)
        anchor, adopted = jax.tree.unflatten(self._tree, self._anchor), self._adoption is not None
        self._keeping.save(*pack_loop(params, anchor, state, self._tracker, self._schedule, adopted), wait)

    def _go_on_from(self, leaves: list[Any], facts: dict[str, Any], arrays: Mapping[str, Array]) -> None:
        trees, params = facts["trees"], jax.tree.unflatten(self._tree, leaves)
        self._own = jax.tree.leaves(unpack_tree(params, *kept_leaves("params", trees, arrays), "parameters"))
        self._anchor = self._moves.place(kept_leaves("anchor", trees, arrays)[1])
        what = "loop's state (its optimizer's, for one)"
        self.state = unpack_tree(self.state, *kept_leaves("state", trees, arrays), what)
        self._adopted = False  # of an adoption that was not taken yet, the state is still that of before
        self._adoption = Adoption(None) if facts["adopted"] else None
        self._tracker = ContributionTracker.from_plain(facts["account"])
        self._schedule.restore(facts["rhythm"])
        self.resumed = self._untaken = True

    def _tell_first_step(self, leaves: list[Any], score: Any, first_step: FirstStep) -> None:
        self._first_step = None
        if isinstance(self.exchange, Describes) and not (self.steps or self.resumed):
            self.exchange.describe(first_step=first_step.digest(leaves, score))

    def made_steps(self, steps: int, samples: int) -> None:
        """Record steps that were made without an exchange: their change is pending."""
        self._tracker.made_steps(steps, samples)

    def finish(self, params: Params, timeout_seconds: float = FLUSH_SECONDS, *, moved: bool = False) -> Params:
        """Drain what is pending: wait for the offers in flight, then send the rest uncompressed, and wait for that.

        Returns the parameters, which are then the anchor but for rounding; at the end of a run, the same on all nodes.
        A refused or lost offer is sent again. Gives up, without error, after the time, or when the run cannot be
        reached for `lost_seconds`: progress that has not landed by then is in the returned parameters alone.
        moved: this node's parameters have changed without a step of its own, and not by this exchange.
        Raises LocalProtocolError after `close`.
        """
        if self._ended == "close":
            self._check_open("finish")
        leaves = self._flatten(params)
        self._ended, self._last = "finish", None
        until = self._agreed_time() + timeout_seconds
        # a node without a step has nothing to drain, unless its parameters have moved otherwise, or were its own from
        # the beginning; an empty round would only advance the outer momentum
        begun = self.exchange.state().founded and (self.steps or moved or self._own is not None)
        each, shards = self._each if begun else 0, range(self.settings.shards)
        leaves = self._drain(leaves, [range(each * broker, each * (broker + 1)) for broker in shards], until)
        while not all([self.exchange.everyone_drained(m) for m in shards]) and self._agreed_time() < until:
            self._clock.sleep(LANDING_LOOK_SECONDS)
            leaves = self._take_all(leaves, set())
        leaves = self._take_all(leaves, set())
        result: Params = jax.tree.unflatten(self._tree, leaves)
        return result

    def catch_up(self, params: Params, version: Version, timeout_seconds: float = FLUSH_SECONDS) -> Params:
        """Apply, after `finish`, what else has come, and wait for this version at most for that time."""
        leaves = self._take_all(self._flatten(params), set())
        until = self._clock.monotonic() + timeout_seconds
        while self.version < version and self._clock.monotonic() < until:
            self._clock.sleep(LANDING_LOOK_SECONDS)
            leaves = self._take_all(leaves, set())
        result: Params = jax.tree.unflatten(self._tree, leaves)
        return result

    def close(self) -> None:
        """Leave the run without `finish`: close the node. What it had not sent is lost. Safe to call twice."""
        if self._ended != "close":
            self._ended, self._last = "close", None
            if isinstance(self.exchange, Closes):
                self.exchange.close()

    def __enter__(self) -> DelayedSync:
        self._keeps_last = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        stopped = isinstance(error, RunStopped)
        if stopped:
            logger.warning("%s. What is pending is sent first", error)
        try:
            if (kind is None or stopped) and not self._ended and self.steps:
                self._finish_last()
        finally:
            self.close()
        return stopped

    def _finish_last(self) -> None:
        if any(_is_deleted(leaf) for leaf in jax.tree.leaves(self._last)):
            text = (
                "%s leaves without `finish`: the parameters that the last `step` returned were donated to another "
                "computation. Call `sync.finish(params)` after the loop, with the parameters of then"
            )
            logger.warning(text, self.exchange.name)
        else:
            self.finish(self._last)

    def _check_stopped(self, state: ExchangeState, params: Any, samples: int) -> None:
        """Raise RunStopped if an operator has ended the run; nothing has changed by it, and `finish` may be called."""
        if not state.stopped:
            return
        if not (self._adopted or self._untaken):
            self._tracker.made_steps(1, samples)
            self._last = params if self._keeps_last else None
        raise RunStopped(
            f"an operator has ended the run of {self.exchange.name} (zmqtrain stop), and its broker saves the model. "
            "`with zmqtrain.DelayedSync(...)` sends what is pending here; else catch zmqtrain.RunStopped and call "
            "sync.finish(params). A loop over node.batches(...) ends by itself",
            "stopped",
        )

    def _agreed_time(self) -> float:
        """Return the time for what several processes of one node must decide alike."""
        return self.exchange.agreed_time() if isinstance(self.exchange, Agrees) else self._clock.monotonic()

    def _check_open(self, call: str) -> None:
        if self._ended:
            raise LocalProtocolError(
                f"`{call}` was called after `{self._ended}`: the part of {self.exchange.name} in this run is over. "
                f"Call `{self._ended}` after the loop's last step; to train on, connect again (zmqtrain.connect) and "
                "make another DelayedSync"
            )

    def statistics(self) -> SyncStatistics:
        """Return the running figures."""
        exchange, tracker = self.exchange.statistics(), self._tracker
        return SyncStatistics(
            steps=tracker.step,
            offers=tracker.offers,
            offers_refused=tracker.put_off,
            aggregates_applied=tracker.applied,
            age_steps=float(statistics.median(tracker.ages)) if tracker.ages else float("nan"),
            held_seconds=self._held_seconds,
            bytes_sent=exchange.bytes_sent,
            bytes_received=exchange.bytes_received,
            encode_seconds=exchange.encode_seconds,
            decode_seconds=exchange.decode_seconds,
            version=exchange.version,
            peers=exchange.peers,
        )

    # ------------------------------------------------------------------ the moves

    def _tree_of(self, update: Update) -> Any:
        leaves = self._moves.parameters(whole_leaves(self._model, update.anchor or ()))
        return jax.tree.unflatten(self._tree, leaves)

    def _flatten(self, params: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(params)
        if tree != self._tree or any(
            getattr(leaf, "shape", ()) != shape for leaf, shape in zip(leaves, self._shapes, strict=True)
        ):
            path, what = describe_mismatch(self._model, describe_model(params)) or ("", "its containers are others")
            raise ModelMismatch(
                f"the parameters that the loop gave are not those of this node's run: {what}. Give `step` and `finish` "
                "the tree with which DelayedSync was made: the same leaves, each in its shape",
                path,
            )
        self._anchor = self._moves.settle(leaves, self._anchor)
        return leaves

    def _offer(self, leaves: list[Any]) -> list[Any]:
        """Offer to each broker one of its fragments, or all of them; those are put off for which others must land."""
        fragments, state = self.exchange.next_fragments(), self.exchange.state()
        self._tracker.take_back(state.in_flight)
        waiting = self._tracker.waiting(state.unreachable)
        taken = [fragment // self._each for fragment in fragments if self._offer_fragment(leaves, fragment) is not None]
        carried = self._each if self.settings.carries_all else 1
        self._tracker.put_off += sum(max(0, carried - taken.count(broker)) for broker in waiting)
        return self._apply_due(leaves) if taken and self._schedule.delay == 0 else leaves

    def _offer_fragment(self, leaves: list[Any], fragment: int, dense: bool = False) -> int | None:
        self._tracker.take_back(self.exchange.state().in_flight)
        segments = self._moves.offered(leaves, self._anchor, fragment, whole=dense)
        broker = fragment // self._each
        sequence = self.exchange.offer(fragment, segments, self._tracker.unsent(broker), dense=dense)
        if sequence is not None and isinstance(segments, PinnedSegments):
            segments.settle()
        self._tracker.offered(sequence, broker)
        return sequence

    def _apply_due(self, leaves: list[Any]) -> list[Any]:
        steps: list[Update] = []  # of several fragments, which are applied together
        while update := self._next_due():
            taken = self.exchange.poll()
            assert taken is update
            if steps and not _go_together(steps, update):
                leaves, steps = self._apply(leaves, *steps), []
            steps.append(update)
        if steps:
            leaves = self._apply(leaves, *steps)
        return self._await_due(leaves) if self.settings.waits else leaves

    def _next_due(self) -> Update | None:
        update = self.exchange.peek()
        return update if update and self._tracker.is_due(update.landed, self._schedule.delay) else None

    def _await_due(self, leaves: list[Any]) -> list[Any]:
        """Wait for the updates that must be applied now, except for offers that are withdrawn meanwhile, and (but in
        strict mode) for a hub that cannot be reached: the node trains on alone."""
        strict, until = self.settings.mode == "strict", math.inf
        look_seconds = STRICT_LOOK_SECONDS if strict else self.settings.lost_seconds
        while due := [s for s in self.exchange.state().in_flight if self._is_awaited(s, strict)]:
            try:
                leaves = self._apply(leaves, self.exchange.wait_update(look_seconds, due[0]))
            except AggregateTimeout as error:
                now = self._agreed_time()
                until = min(until, now - look_seconds + STRICT_WAIT_SECONDS)
                if strict and now >= until:
                    raise AggregateTimeout(f"nothing came for {STRICT_WAIT_SECONDS:g} s. {error}") from None
        return leaves

    def _is_awaited(self, sequence: int, strict: bool) -> bool:
        if not self._tracker.is_old(sequence, self._schedule.delay):
            return False
        return strict or self._tracker.shard_of(sequence) not in self.exchange.state().unreachable

    def _apply(self, leaves: list[Any], update: Update, *others: Update) -> list[Any]:
        """Apply an update, and others that go with it (`_go_together`)."""
        if update.reset and update.version < 0 and self._declines(leaves, update):
            return leaves
        if update.reset:
            if update.anchor is not None:
                self._anchor = self._moves.place(whole_leaves(self._model, update.anchor, self._anchor))
            leaves = self._moves.parameters(self._anchor)
            if not update.warm:
                self._adoption = Adoption(update.optimizer_state)
            self._tracker.forget_pending()
        elif update.keep:
            assert update.anchor is not None
            self._anchor = self._moves.place(whole_leaves(self._model, update.anchor))
        elif update.anchor is not None:
            new = whole_leaves(self._model, update.anchor, self._anchor)
            leaves, self._anchor = self._moves.adopt(leaves, self._anchor, new, update.own)
        else:
            updates = (update, *others)
            aggregate = {fragment: parts for one in updates for fragment, parts in one.aggregate.items()}
            own = {fragment: parts for one in updates for fragment, parts in one.own.items()}
            leaves, self._anchor = self._moves.apply(leaves, self._anchor, aggregate, own)
        for one in (update, *others):
            self._tracker.landed(one.landed)
        return leaves

    def _declines(self, leaves: list[Any], update: Update) -> bool:
        """Return whether the parameters that this node of a population is lent are not finite, or worse than its own on
        its own held-out data; it then keeps its own, and reports so."""
        if self.settings.initial != "own":
            return False
        lent, own = self._score(self._tree_of(update)), self._score(jax.tree.unflatten(self._tree, leaves))
        finite = all(bool(np.isfinite(part.values).all()) for part in update.anchor or ())
        worse = math.isfinite(own) and not lent <= own
        if finite and not (worse or math.isinf(lent)):
            return False
        text = "%s was lent parameters that score %.6g on its own held-out data; it keeps its own, which score %.6g"
        logger.warning(text, self.exchange.name, lent, own)
        assert self.exchange.population is not None
        self.exchange.population.compare(own if math.isfinite(own) else self._recent_score(), declined=True)
        return True

    def _compare(self, leaves: list[Any]) -> None:
        """Report how this node's own parameters score: by `judge`, or else by the losses of its last steps."""
        score = self._score(jax.tree.unflatten(self._tree, leaves))
        assert self.exchange.population is not None
        self.exchange.population.compare(self._recent_score() if math.isnan(score) else score)

    def _score(self, params: Any) -> float:
        return math.nan if self._judge is None else float(self._judge(params))

    def _recent_score(self) -> float:
        """Return the mean loss of the last steps, NaN if there is none; infinite where training has diverged."""
        scores = [number_of(one) for one in self._recent if not _is_deleted(one)]
        if not scores:
            return math.nan
        return statistics.fmean(scores) if all(map(math.isfinite, scores)) else math.inf

    def _drain(self, leaves: list[Any], fragments: Sequence[Iterable[int]], until: float) -> list[Any]:
        """Wait for the offers in flight to each broker, then send what is pending of its fragments, uncompressed.

        All brokers at once: a round may wait for all nodes, so a node that waited for one broker would hold up another.
        """
        began, landed = self._agreed_time(), set[int]()
        joined = self.exchange if isinstance(self.exchange, OffersTogether) else None
        left = {n: Drain(one, began, at_once=joined is not None) for n, one in enumerate(fragments)}
        while left:
            leaves = self._take_all(leaves, landed)
            now, state = self._agreed_time(), self.exchange.state()
            in_flight = {self._tracker.shard_of(sequence) for sequence in state.in_flight}
            for broker, drain in list(left.items()):
                if broker not in in_flight:
                    if joined is not None:
                        joined.together()
                    for fragment in drain.next_fragments(landed):
                        drain.offered(fragment, self._offer_fragment(leaves, fragment, dense=True), now)
                elif broker not in state.unreachable:
                    drain.reached(now)
                if not (drain.left or broker in in_flight):
                    self.exchange.everyone_drained(broker)
                    del left[broker]
                elif now >= until or drain.gives_up(now, self.settings.lost_seconds):
                    del left[broker]
            if left:
                self._clock.sleep(min(LANDING_LOOK_SECONDS, max(0.0, until - now)))
        return leaves

    def _take_all(self, leaves: list[Any], landed: set[int]) -> list[Any]:
        """Apply all updates that are here; add this node's offers that landed in them to `landed`."""
        while (update := self.exchange.poll()) is not None:
            leaves = self._apply(leaves, update)
            landed.update(update.landed)
        return leaves


def pack_loop(
    params: Any, anchor: Any, state: Any, tracker: ContributionTracker, schedule: SyncSchedule, adopted: bool
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return what a checkpoint is to hold of a loop, as `Keeping.save` takes it: copies of all, on the host.

    params, anchor: in the caller's tree.  adopted: whether `state` is of before parameters that were adopted.
    Raises ModelMismatch for what is no array.
    """
    trees, arrays = pack_trees({"params": params, "anchor": anchor, "state": state})
    facts = {"trees": trees, "account": tracker.to_plain(), "rhythm": schedule.to_plain(), "adopted": adopted}
    return facts, arrays


def _go_together(steps: Sequence[Update], update: Update) -> bool:
    """Return whether an update is a step of other fragments than these steps."""
    each = [*steps, update]
    fragments = [fragment for one in each for fragment in {*one.aggregate, *one.own}]
    is_step = all(one.anchor is None and not (one.reset or one.keep) for one in each)
    return is_step and len(fragments) == len(set(fragments))


def _is_deleted(score: Any) -> bool:
    return isinstance(score, jax.Array) and score.is_deleted()


def _check_figures(score: Any, samples: Any) -> int:
    """Return how many samples a step had. Raises ConfigError for what is no count, and a score that is no number."""
    if score is not None and (np.shape(score) != () or isinstance(score, str | bytes)):
        what = f"an array of shape {list(np.shape(score))}" if np.shape(score) else repr(score)
        raise ConfigError(
            f"score is one number, the mean loss of the step, got {what}: give score=losses.mean(), for example"
        )
    try:
        return operator.index(samples)
    except TypeError:
        raise ConfigError(f"samples is how many there were in the step, a whole number, got {samples!r}") from None


def _describe_floats(params: Any) -> ModelSpec:
    """Return what the leaves of a tree of parameters are. Raises ModelMismatch for one that cannot be exchanged, and
    where there is none."""
    model = describe_model(params)
    if not model:
        raise ModelMismatch(f"the parameters given to DelayedSync hold no array (they are {reprlib.repr(params)})")
    for spec in model:
        if not jax.numpy.issubdtype(np.dtype(jax.numpy.dtype(spec.dtype)), jax.numpy.floating):
            raise ModelMismatch(
                f"the leaf {spec} is not a float array and cannot be exchanged; keep it out of the tree that is "
                "given to DelayedSync (counters and keys belong to the node)",
                spec.path,
            )
    return model


def _check_connected(exchange: Exchange, model: ModelSpec, leaves: Sequence[Any]) -> None:
    """Raise ModelMismatch for leaves of several processes at a node that is one process."""
    if isinstance(exchange, Agrees):
        return
    for spec, leaf in zip(model, leaves, strict=True):
        if spans_processes(leaf):
            raise ModelMismatch(
                f"the leaf {spec} lies on the devices of several processes, and the node of `connect` is one process. "
                "Call zmqtrain.connect_as_one in all of them: they are one node then",
                spec.path,
            )


def _to_host(leaves: Sequence[Any]) -> list[Any]:
    return [whole_leaf(leaf) if spans_processes(leaf) else np.array(leaf, np.float32) for leaf in leaves]

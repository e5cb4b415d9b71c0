"""A pipeline that survives lost PCs: each stage has a copy at the next stage's PC, and the others cut the model again.

    with zt.Communicator.create("tcp://hub:5555", size=4) as comm:
        pipeline = zt.ElasticPipeline.create(comm, loss_fn, init_fn, optax.adamw(1e-3), batch, micro_batches=16)
        for loss in pipeline.steps(batches):
            ...

Rule 1: every `copy_every` steps a stage sends what its parameters have changed since the last time, encoded, to the PC
of the next stage, which adds it to its copy: stage and neighbour then hold the same copy, bit for bit. What the code
leaves out is sent the next time (error feedback). Three vectors of the size of a stage, and up to four encoded changes,
are on each PC's host.
Rule 2: when a PC is lost, the others take the newest version that all of them can make, plan without the PC, and fetch
the leaves of their new stages from copies. The batches since that version are trained on again: no step is left out.
Rule 3: moments of the optimizer, and the counts beside them, start from zero. Counts of schedules (a warm-up of the
rate) are those of the version.
Rule 4: nobody uses new stages before all have them. A PC that is lost meanwhile costs another round of Rule 2.
Rule 5: two PCs of neighbouring stages that are lost at once take a stage with them: StageLost.
Source: Wang et al. 2023 (Gemini: checkpoints in the memory of other PCs); Seide et al. 2014 (error feedback).
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.codecs.codec import Codec
from zmqtrain.codecs.payload import decode_payload, encode_payload
from zmqtrain.collectives.communicator import Communicator
from zmqtrain.collectives.group import Request
from zmqtrain.core.errors import ConfigError, NonFiniteDelta, PeerLost, StageLost
from zmqtrain.pipeline.local_values import Rows
from zmqtrain.pipeline.pipeline import Pipeline
from zmqtrain.pipeline.placement import Placement, Training
from zmqtrain.pipeline.schedule import ScheduleName, as_schedule
from zmqtrain.pipeline.stage import HeldLeaf, Stage
from zmqtrain.pipeline.trace import Loss

logger = logging.getLogger(__name__)

Vector = npt.NDArray[np.float32]
Frames = list[npt.NDArray[np.uint8]]

_COPY, _LEAF = 6 << 40, 7 << 40
"""Tags of changes of a copy, and of leaves of a new stage, beside those of `Pipeline`."""
_COPIES = 5
"""Vectors of the size of a stage on its PC's host, at most: two copies, what was sent last, and changes."""
_KEPT = 2
"""So many changes are kept beside a copy: stages are at most two versions apart."""


class Recovery(NamedTuple):
    """What lost PCs have cost. lost: their names.  again: steps that are trained on again.  seconds: from the error
    until training goes on; compile_seconds: of these, those in which the new stage was compiled."""

    lost: tuple[str, ...]
    again: int
    seconds: float
    compile_seconds: float


class _Copy:
    """The parameters of a stage on the host, flat, at a version; and the changes that came after it."""

    def __init__(self, values: Vector, version: int) -> None:
        self.values, self.version, self.changes = values, version, deque[Frames]()

    @property
    def newest(self) -> int:
        """The newest version that it can make; the oldest is `version`."""
        return self.version + len(self.changes)

    def add(self, change: Frames, codec: Codec) -> None:
        """Keep a change; the oldest is added to the values when there are too many."""
        self.changes.append(change)
        while len(self.changes) > _KEPT:
            self._apply(codec)

    def at(self, version: int, codec: Codec) -> Vector:
        """Return the values of a version, and forget what came later."""
        while self.version < version:
            self._apply(codec)
        self.changes.clear()
        return self.values

    def _apply(self, codec: Codec) -> None:
        _add(self.changes.popleft(), codec, self.values)
        self.version += 1


@dataclass(kw_only=True)
class _Layout:
    """Who has what, of one set of PCs. epoch: counts the layouts.  comm: of those PCs.  measured_ranks: of each of its
    ranks, that with which it was measured.  own: the copy of the own stage; before: of the stage before it, None if
    there is one PC only."""

    epoch: int
    comm: Communicator
    measured_ranks: tuple[int, ...]
    placement: Placement
    own: _Copy
    before: _Copy | None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the PCs, by rank."""
        return tuple(self.placement.measured.pcs[place].name for place in self.measured_ranks)

    @property
    def number(self) -> int:
        """Of the own stage."""
        return self.placement.ranks.index(self.comm.rank)

    @property
    def number_before(self) -> int:
        """Of the stage before it, which has its copy here."""
        return (self.number - 1) % self.comm.size


class ElasticPipeline:
    """A `Pipeline` that outlives its PCs. Made by `create`; all ranks call the same methods."""

    def __init__(
        self,
        layout: _Layout,
        optimizer: optax.GradientTransformation | None,
        copy_every: int,
        copy_codec: str,
        settings: dict[str, Any],
    ) -> None:
        self._layout, self._optimizer, self._settings = layout, optimizer, settings
        self._every, self._codec = copy_every, codec_from_spec(copy_codec)
        self._copier = ThreadPoolExecutor(1, "zmqtrain-pipeline-copier")
        self._steps_done, self._loss = 0, 0.0
        """Steps done, and the loss of the last."""
        self._replay_from, self._replay = 0, deque[Any]()
        """The batches that may be trained on again, and the step of the first of them."""
        self._sent = layout.own.values.copy()
        """The newest version of the own copy: what the next change starts from."""
        self._sending: Future[Request[None]] | None = None
        self._receiving: Request[Any] | None = None
        self._comm = layout.comm
        """The newest communicator: that of the layout, or one of those that prepare the next."""
        self._prepared: _Layout | None = None
        self._acts, self._acts_of_all, self._result = 0, 0, None
        """Calls that need all PCs: how many ended here, and on any PC; and the last result here."""
        self._broken: tuple[float, int, tuple[str, ...]] | None = None
        """Of a loss that is not made good: when it was seen, the steps done by then, and the PCs before it."""
        self.recoveries: list[Recovery] = []
        """What lost PCs have cost so far."""
        self._pipeline: Pipeline | None = self._build()

    @classmethod
    def create(
        cls,
        comm: Communicator,
        loss_fn: Loss,
        init_fn: Callable[[Any], Any],
        optimizer: optax.GradientTransformation | None,
        batch: Any,
        *,
        micro_batches: int,
        key: Any = None,
        uncut: Collection[str] = (),
        memory_bytes: int | None = None,
        schedule: ScheduleName = "1f1b",
        copy_every: int = 4,
        copy_codec: str = "int8",
        **settings: Any,
    ) -> ElasticPipeline:
        """Measure, plan and make the own parameters, as `Pipeline.create` does, and a copy of the stage before.

        copy_every: steps between two copies: so many, and those in flight, are trained on again after a loss.
        copy_codec: of the changes.  settings: as of `Pipeline`: codec, clip_norm, optimizer_on.
        Raises ConfigError for the schedule 2bw, whose stages hold two versions, and as `Pipeline.create` does.
        """
        rule = as_schedule(schedule)
        if not rule.flushes:
            raise ConfigError(f"an elastic pipeline ends each step on all stages, and {rule.name} does not: take 1f1b")
        if copy_every < 1:
            raise ConfigError(f"copy_every is a number of steps, 1 or more, got {copy_every}")
        training = Training(
            loss_fn=loss_fn, init_fn=init_fn, optimizer=optimizer, batch=batch, micro_batches=micro_batches, key=key,
            uncut=uncut, memory_bytes=memory_bytes, schedule=rule, codec=settings.get("codec", "bf16"),
            optimizer_on=settings.get("optimizer_on", "device"),
        )  # fmt: skip
        placement = training.place(comm, copies=_COPIES)
        number, stages = placement.ranks.index(comm.rank), placement.stages
        before = None
        if comm.size > 1:  # first, so that both stages are never on the card at the same time
            before = _Copy(flat(training.init(stages[(number - 1) % comm.size])), 0)
        own = _Copy(flat(training.init(stages[number])), 0)
        measured_ranks = tuple(range(comm.size))
        layout = _Layout(epoch=0, comm=comm, measured_ranks=measured_ranks, placement=placement, own=own, before=before)
        logger.info("%s", placement)
        return cls(layout, optimizer, copy_every, copy_codec, settings)

    # ------------------------------------------------------------------ training

    def step(self, batch: Any) -> float:
        """Train on one whole batch, which the caller leaves as it is; return its loss, on all ranks.

        Raises PeerLost if it is this PC that was lost, StageLost if a stage was lost with its copy, DoesNotFit if the
        PCs that are left cannot hold the model; CollectiveTimeout, ModelMismatch, NonFiniteDelta as `Pipeline.step`.
        """
        self._layout.placement.stages.parts(batch)  # refused before it is kept
        self._replay.append(batch)
        self._retry_after_loss(lambda _: None, self._replay_from + len(self._replay))
        return self._loss

    def steps(self, batches: Iterable[Any]) -> Iterator[float]:
        """Train on whole batches, and yield the loss of each."""
        return map(self.step, batches)

    @property
    def placement(self) -> Placement:
        """Which PC has what now."""
        return self._layout.placement

    @property
    def comm(self) -> Communicator:
        """The communicator of the PCs that are left."""
        return self._layout.comm

    @property
    def stage(self) -> Stage:
        """The stage of this PC."""
        return self._layout.placement.stages[self._layout.number]

    def gather(self, root: int = 0) -> Any:
        """Return the whole tree of parameters on one rank of those that are left (the last, if there are fewer), as
        `Pipeline.gather` does."""
        return self._with_all(lambda pipeline: pipeline.gather(min(root, pipeline.comm.size - 1)))

    def save(self, path: str | Path, root: int = 0) -> None:
        """Write all parameters to one model file on one rank of those that are left (the last, if there are fewer), as
        `Pipeline.save` does."""
        self._with_all(lambda pipeline: pipeline.save(path, min(root, pipeline.comm.size - 1)))

    def close(self) -> None:
        """End the threads. The communicator stays open."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._copier.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> ElasticPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _with_all(self, act: Callable[[Pipeline], Any]) -> Any:
        """Do something that needs all PCs, once. Who has passed the barrier behind it knows that all have done it, and
        says so if a PC is lost before all others have passed it."""
        number = self._acts + 1

        def whole(pipeline: Pipeline) -> None:
            if self._acts_of_all < number:
                self._result = act(pipeline)
                pipeline.comm.barrier()

        self._retry_after_loss(whole, self._steps_done)
        self._acts = number
        result, self._result = self._result, None
        return result

    def _retry_after_loss(self, act: Callable[[Pipeline], None], steps: int) -> None:
        """Train until so many steps are done, and then do something; again on those that are left if a PC is lost."""
        while True:
            try:
                pipeline = self._pipeline or self._recover()
                while self._steps_done < steps:
                    self._loss = pipeline.step(self._replay[self._steps_done - self._replay_from])
                    self._steps_done += 1
                    if self._steps_done % self._every == 0:
                        self._copy(pipeline)
                return act(pipeline)
            except PeerLost as error:
                if error.rank == self._comm.rank or NonFiniteDelta.__name__ in error.why:
                    raise  # this PC is the lost one; or the model is, and would be lost again
                self._abort(error)

    def _build(self) -> Pipeline:
        """Make the pipeline of the layout."""
        layout, stage = self._layout, self.stage
        own, placement = tree_of(stage, layout.own.values), layout.placement
        pipeline = Pipeline(
            layout.comm, placement.stages, own, self._optimizer, schedule=placement.measured.schedule, **self._settings
        )
        pipeline.placement = placement
        if self._steps_done and pipeline.run.optimizer is not None:
            pipeline.run.optimizer.restart(pipeline.own, self._steps_done)
        return pipeline

    # ------------------------------------------------------------------ copies

    def _copy(self, pipeline: Pipeline) -> None:
        """Begin to send what has changed since the last copy to the next stage's PC."""
        layout = self._layout
        if layout.before is None:  # nobody else is left: nothing is trained on again
            while self._replay_from < self._steps_done:
                self._replay.popleft()
                self._replay_from += 1
            return
        self._wait_for_copies()
        ranks = layout.placement.ranks
        values = flat(pipeline.own)  # copied now, for the next update is in place
        self._receiving = layout.comm.irecv(ranks[layout.number_before], _COPY)
        after = ranks[(layout.number + 1) % len(ranks)]
        self._sending = self._copier.submit(self._send_change, layout, after, values)
        oldest = (self._steps_done // self._every - 1 - _KEPT) * self._every  # nobody goes back further
        while self._replay_from < oldest:
            self._replay.popleft()
            self._replay_from += 1

    def _send_change(self, layout: _Layout, after: int, values: Vector) -> Request[None]:
        """Encode a change and send it (in the copier's thread)."""
        np.subtract(values, self._sent, out=values)
        change = [np.frombuffer(frame, np.uint8) for frame in encode_payload((self._codec,), (values,))]
        _add(change, self._codec, self._sent)
        layout.own.add(change, self._codec)
        return layout.comm.isend(change, after, _COPY)

    def _wait_for_copies(self) -> None:
        """Wait until the neighbour has the last change, and this PC that of the stage before."""
        if self._receiving is not None and self._layout.before is not None:
            change, self._receiving = self._receiving.wait(), None
            self._layout.before.add([np.asarray(one) for one in change], self._codec)
        if self._sending is not None:
            sending, self._sending = self._sending, None
            sending.result().wait()

    # ------------------------------------------------------------------ a lost PC

    def _abort(self, error: PeerLost) -> None:
        """End what was in flight. A change that has arrived whole is kept."""
        logger.warning("%s; the others go on without", error)
        self._broken = self._broken or (time.monotonic(), self._steps_done, self._layout.names)
        traceback.clear_frames(error.__traceback__)  # gradients may be in them
        if self._pipeline is not None:
            self._pipeline.discard()
            self._pipeline = None
        if self._sending is not None:
            self._sending.exception()  # waits for the copier
        with contextlib.suppress(PeerLost):
            self._wait_for_copies()
        self._sending = self._receiving = None

    def _recover(self) -> Pipeline:
        """Agree with the PCs that are left, fetch the leaves of new stages, and begin with them. Raises PeerLost if
        another PC is lost meanwhile, StageLost, DoesNotFit."""
        comm = self._comm = self._comm.shrink()
        epoch, self._acts_of_all = (
            max(map(int, column))
            for column in zip(*comm.allgather(np.array([self._layout.epoch, self._acts])), strict=True)
        )
        if epoch > self._layout.epoch:
            self._commit()  # others have, before a further PC was lost: so all were prepared
        old, self._prepared = self._layout, None
        own_and_before = [old.own, *([] if old.before is None else [old.before])]
        told = comm.allgather(np.array([old.comm.rank, min(copy.newest for copy in own_and_before)]))
        was = [int(rank) for rank, _ in told]
        version = min(int(newest) for _, newest in told)
        for copy in own_and_before:
            copy.at(version, self._codec)
        holders = [self._holder(old, was, stage.number) for stage in old.placement.stages]
        left = [old.placement.measured.pcs[old.measured_ranks[rank]] for rank in was]
        placement = old.placement.measured.placed(left)
        self._prepared = self._fetched(old, comm, was, placement, holders, version)
        comm.barrier()
        self._commit()
        pipeline = self._build()
        compiling = time.monotonic()
        pipeline.run.compile()
        compiled = time.monotonic()
        self._pipeline = pipeline
        assert self._broken is not None
        (begun, steps, names), self._broken = self._broken, None
        lost = tuple(name for name in names if name not in self._layout.names)
        recovery = Recovery(lost, steps - self._steps_done, time.monotonic() - begun, compiled - compiling)
        self.recoveries.append(recovery)
        others = f"{comm.size} PCs go on" if comm.size > 1 else "one PC goes on"
        words = f"{', '.join(lost)} lost: {others} from step {self._steps_done}"
        logger.warning("%s, %d steps are trained on again\n%s", words, recovery.again, placement)
        return pipeline

    def _commit(self) -> None:
        """Take the prepared layout: from now on it is what there is."""
        assert self._prepared is not None
        self._layout, self._prepared = self._prepared, None
        self._sent = self._layout.own.values.copy()
        self._steps_done = self._layout.own.version * self._every

    def _fetched(
        self,
        old: _Layout,
        comm: Communicator,
        was: Sequence[int],
        placement: Placement,
        holders: Sequence[tuple[int, _Copy]],
        version: int,
    ) -> _Layout:
        """Send the leaves of old stages to those that hold them now, and return the new layout."""
        size, me = comm.size, comm.rank
        number = placement.ranks.index(me)
        numbers = dict.fromkeys((number, (number - 1) % size))
        held = {one: np.empty(values_of(placement.stages[one]), np.float32) for one in numbers}
        sends = []
        for stage in old.placement.stages:
            holder, copy = holders[stage.number]
            for new in placement.stages:
                for taker in dict.fromkeys((placement.ranks[new.number], placement.ranks[(new.number + 1) % size])):
                    for source, target in common(stage, new):
                        if holder == taker == me:
                            held[new.number][target] = copy.values[source]
                        elif holder == me:
                            sends.append(comm.isend(copy.values[source], taker, _LEAF))
                        elif taker == me:
                            held[new.number][target] = comm.recv(holder, _LEAF)
        for request in sends:
            request.wait()
        copies = [_Copy(held[one], version) for one in held]
        measured_ranks = tuple(old.measured_ranks[rank] for rank in was)
        return _Layout(
            epoch=old.epoch + 1, comm=comm, measured_ranks=measured_ranks, placement=placement, own=copies[0],
            before=copies[1] if size > 1 else None,
        )  # fmt: skip

    def _holder(self, old: _Layout, was: Sequence[int], number: int) -> tuple[int, _Copy]:
        """Return the rank, now, that has the leaves of an old stage, and the copy in which it has them (of this PC, if
        it is that rank). Raises StageLost."""
        ranks = old.placement.ranks
        if ranks[number] in was:
            return was.index(ranks[number]), old.own
        if (after := ranks[(number + 1) % len(ranks)]) not in was or old.before is None:
            pcs = " and ".join(old.names[rank] for rank in (ranks[number], after))
            raise StageLost(
                f"stage {number} is lost: {pcs}, which held it and its copy, were lost at once. Start again from the "
                "last model file"
            )
        return was.index(after), old.before


def _add(change: Frames, codec: Codec, values: Vector) -> None:
    """Add an encoded change to a flat vector."""
    decode_payload((codec,), [frame.data for frame in change], (values.size,), values, add=True)


# ---------------------------------------------------------------------- stages as flat vectors


def flat(own: Any) -> Vector:
    """Return a stage's own parameters one after the other: a copy on the host."""
    parts = [np.asarray(leaf, np.float32).reshape(-1) for leaf in jax.tree.leaves(own)]
    return np.concatenate([np.zeros(0, np.float32), *parts])  # a stage may hold nothing


def tree_of(stage: Stage, values: Vector) -> Any:
    """Return the own parameters of a stage out of a flat vector."""
    leaves, structure = jax.tree.flatten(stage.own_shapes)
    ends = np.cumsum([leaf.size for leaf in leaves], dtype=int)
    parts = [values[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]
    made = [jnp.array(part, leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, made)


def values_of(stage: Stage) -> int:
    """Return how many values a stage's own parameters have."""
    return sum(prod(leaf.shape) for leaf in stage.held)


def common(source: Stage, target: Stage) -> Iterator[tuple[slice, slice]]:
    """Yield where the values that two stages both hold are in the flat vector of the one and of the other."""
    measured_ranks = {leaf.number: (leaf, start) for leaf, start in _starts(target)}
    for leaf, start in _starts(source):
        if leaf.number not in measured_ranks:
            continue
        other, other_start = measured_ranks[leaf.number]
        row, mine, others = prod(leaf.whole.shape[1:]), _rows(leaf), _rows(other)
        first, last = max(mine.start, others.start), min(mine.stop, others.stop)
        if first < last:
            yield (
                slice(start + row * (first - mine.start), start + row * (last - mine.start)),
                slice(other_start + row * (first - others.start), other_start + row * (last - others.start)),
            )


def _starts(stage: Stage) -> Iterator[tuple[HeldLeaf, int]]:
    start = 0
    for leaf in stage.held:
        yield leaf, start
        start += prod(leaf.shape)


def _rows(leaf: HeldLeaf) -> Rows:
    """The rows that are held; a scalar has one."""
    return leaf.rows or Rows(0, leaf.whole.shape[0] if leaf.whole.shape else 1)

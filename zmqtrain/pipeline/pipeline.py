"""One stage of a pipeline on this PC; the other stages are the other ranks of a communicator.

    with zt.Communicator.create("tcp://hub:5555", size=4) as comm:
        pipeline = zt.Pipeline.create(comm, loss_fn, init_fn, optax.adamw(1e-3), batch, micro_batches=16)
        print(pipeline.placement)                                   # which PC has what, and what is predicted
        for batch in batches:                                       # whole batches, the same on all PCs
            loss = pipeline.step(batch)

or, with cuts of one's own:

    stages = zt.split(loss_fn, shapes, batch, cuts=3, micro_batches=16)
    own = stages[comm.rank].init(init_fn, jax.random.key(0))        # no PC has the whole model
    pipeline = zt.Pipeline(comm, stages, own, optax.adamw(1e-3))

Rule 1: each rank computes one stage. Carries and cotangents go from PC to PC, in the order of the micro-batches.
Rule 2: the training thread never encodes, decodes or sends. A sending thread encodes a result and sends it, while the
next task computes; at most K_s results are with it. A receiving thread decodes arriving messages.
Rule 3: receives are posted ahead, so that a carry travels while its receiver computes.
Rule 4: each wait has an end, and its error names stage, micro-batch and peer.
Rule 5: losses and parameters are those of `LocalPipeline` with the same codec, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zmqtrain.checkpoint.model_files import write_model_in_parts
from zmqtrain.collectives.communicator import Communicator
from zmqtrain.collectives.group import Request
from zmqtrain.core.errors import CollectiveTimeout, ConfigError, ModelMismatch, PeerLost, ZmqTrainError
from zmqtrain.monitor.records import record
from zmqtrain.pipeline.boundary import Boundary, Values
from zmqtrain.pipeline.coupling import check_clip_norm, check_separable
from zmqtrain.pipeline.placement import Placement, Training, check_terms, terms_of
from zmqtrain.pipeline.schedule import (
    NO_MICRO_BATCH,
    Schedule,
    ScheduleName,
    StageMachine,
    Task,
    as_schedule,
    steps_in_flight,
)
from zmqtrain.pipeline.split import Split
from zmqtrain.pipeline.stage import HeldLeaf, check_form
from zmqtrain.pipeline.stage_optimizer import OptimizerOn
from zmqtrain.pipeline.stage_run import StageRun
from zmqtrain.pipeline.trace import Loss
from zmqtrain.train.leaves import describe_tree

logger = logging.getLogger(__name__)

_Kind = Literal["carry", "cotangent", "loss", "tied", "own", "squares"]
_TAGS: dict[_Kind, int] = {
    "carry": 1 << 40, "cotangent": 2 << 40, "loss": 3 << 40, "tied": 4 << 40, "own": 5 << 40, "squares": 11 << 40,
}  # fmt: skip
"""Tags of a pipeline's messages; a user of the same communicator takes smaller ones."""
LATE_GRADIENTS = (
    "2bw: the first micro-batches of a step lack the update before it ({late} of {all} here). In 600 steps of the "
    "program text, with 5 late ones of 12, that has cost 0.8 % with AdamW and 0.2 % with Muon, in held-out loss beside "
    "1f1b; where all are late, 2.5 % and 0.8 %. Watch the loss (bench/pipeline.py --learning)"
)
"""What a run without flush is told: see docs/results.md."""
_AHEAD = 4
"""Receives posted before their messages are needed."""
_SAY_SECONDS = 10.0
"""A wait that lasts so long is said in the log, with what it is for."""


class Span(NamedTuple):
    """What a stage did, and when. kind: of a task, or "wait".  begin, end: seconds, of the monotonic clock."""

    kind: str
    step: int
    micro_batch: int
    begin: float
    end: float


@dataclass
class PipelineStatistics:
    """What a stage has done so far. waited_seconds: with no task to do; bytes: of carries and cotangents, encoded."""

    steps: int = 0
    waited_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0


class _Arrived(NamedTuple):
    """A message, decoded: of which kind, and its number among those of that kind."""

    kind: _Kind
    number: int
    value: Any


class Pipeline:
    """The stage of this PC. All ranks make one, with the same stages and settings, and call the same methods.

    comm: as many ranks as there are stages; the caller closes it, and its timeout is that of each wait.
    stages: stage r is at rank r, or as `Split.at_ranks` has said.  own: the stage's own parameters
    (`stages[comm.rank].init`, or `.own` of a whole tree).  optimizer: of the own parameters; None: they stay.
    schedule: "1f1b", "gpipe", "2bw", or a `Schedule`.  codec: of what travels: "bf16", "int8", "int4", or "float32",
    which changes nothing.  clip_norm: the largest norm of the gradients of all stages together, as
    optax.clip_by_global_norm has it; 0: they are not clipped.  optimizer_on: where the optimizer's state lies:
    "device", with the parameters; "host", in the PC's memory, which leaves a card to parameters and gradients; or a
    folder, in whose file it takes no memory.

    Raises ConfigError for another number of ranks, for settings in which the ranks differ, for an optimizer that looks
    at several leaves at once, and as `Split` and `Schedule` do; ModelMismatch for other parameters than the stage's;
    CheckpointError for a folder that cannot be written.
    """

    placement: Placement | None = None
    """The plan, if `create` has made one."""

    def __init__(
        self,
        comm: Communicator,
        stages: Split,
        own: Any,
        optimizer: optax.GradientTransformation | None = None,
        *,
        schedule: ScheduleName | Schedule = "1f1b",
        codec: str = "bf16",
        clip_norm: float = 0.0,
        optimizer_on: OptimizerOn = "device",
    ) -> None:
        if comm.size != len(stages):
            raise ConfigError(
                f"{comm.size} processes are to run {len(stages)} stages: cut the loss {comm.size - 1} times "
                f"(zt.split(..., cuts={comm.size - 1})), or start {len(stages)} processes"
            )
        if optimizer is not None:
            check_separable(optimizer, stages.traced.params)
        self.ranks = tuple(range(comm.size)) if stages.ranks is None else stages.ranks
        if sorted(self.ranks) != list(range(comm.size)):
            raise ConfigError(f"at_ranks names each rank from 0 to {comm.size - 1} once, got {list(self.ranks)}")
        self.comm, self.stages, self.stage = comm, stages, stages[self.ranks.index(comm.rank)]
        self.schedule, self.boundary = as_schedule(schedule), Boundary(codec)
        self._clip_norm = check_clip_norm(clip_norm)
        flushes = self.schedule.flushes
        predicts = self.schedule.predicts and not flushes
        words = f"schedule {self.schedule.name}, depth {self.schedule.depth}, codec {self.boundary.codec}"
        words += f", clip_norm {self._clip_norm:g}" + ", predicts" * predicts
        check_terms(comm, f"{words}, {terms_of(stages)}, stages at {' '.join(map(str, self.ranks))}")
        self._check_own(own)
        own = jax.tree.map(jnp.array, own)  # a copy, for the updates are in place
        if not flushes and comm.rank == 0:
            late = self.schedule.late(comm.size, stages.micro_batches)
            logger.warning("%s", LATE_GRADIENTS.format(late=late, all=stages.micro_batches))
        in_place = flushes or predicts
        self.run = StageRun(
            self.stage, own, stages.micro_batches, optimizer, in_place=in_place, predicts=predicts,
            optimizer_on=optimizer_on,
        )  # fmt: skip
        """What computes; it knows no wire."""
        self.statistics = PipelineStatistics()
        self.spans: list[Span] | None = None
        """Tasks and waits, with their times, since `record` was called."""
        self._counted = stages.counted_rows(self.stage.number) if self._clip_norm else ()
        self._machine = StageMachine(self.schedule, self.stage.number, comm.size, stages.micro_batches)
        self._sender = ThreadPoolExecutor(1, "zmqtrain-pipeline-sender")
        self._receiver = ThreadPoolExecutor(1, "zmqtrain-pipeline-receiver")
        self._arrivals = queue.SimpleQueue[_Arrived | BaseException]()
        self._mail: dict[tuple[_Kind, int], Any] = {}
        self._posted: dict[_Kind, int] = dict.fromkeys(_TAGS, 0)
        self._taken: dict[_Kind, int] = dict.fromkeys(_TAGS, 0)
        self._steps, self._updated = 0, 0
        self._losses: dict[int, float] = {}

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
        **settings: Any,
    ) -> Pipeline:
        """Measure the segments of a loss on all PCs of a communicator, cut it by the plan that this gives, make the own
        parameters, and return the pipeline. All ranks call it, with the same arguments but `memory_bytes`.

        loss_fn(params, batch) -> a scalar.  init_fn(key) -> the parameters; it is compiled for the own leaves only.
        batch: a whole batch, or shapes.  key: `jax.random.key(0)` if None.  memory_bytes: what a stage may use on this
        PC; None: nine tenths of what its card has, or of what is free.  settings: as of `Pipeline`.
        Raises DoesNotFit if these PCs cannot hold the model, ConfigError as `split` and `Pipeline`.
        """
        training = Training(
            loss_fn=loss_fn, init_fn=init_fn, optimizer=optimizer, batch=batch, micro_batches=micro_batches, key=key,
            uncut=uncut, memory_bytes=memory_bytes, schedule=as_schedule(settings.pop("schedule", "1f1b")),
            codec=settings.get("codec", "bf16"), optimizer_on=settings.get("optimizer_on", "device"),
        )  # fmt: skip
        placement = training.place(comm)
        logger.info("%s", placement)
        own = training.init(placement.stages[placement.ranks.index(comm.rank)])
        schedule = placement.measured.schedule
        pipeline = cls(comm, placement.stages, own, optimizer, schedule=schedule, **settings)
        pipeline.placement = placement
        return pipeline

    # ------------------------------------------------------------------ training

    def step(self, batch: Any) -> float:
        """Train on one whole batch; return its loss, on all ranks. Under `2bw` use `steps`: one step begins before the
        one before has ended.

        Raises ModelMismatch for a batch of another form, PeerLost, CollectiveTimeout, NonFiniteDelta.
        """
        (loss,) = self.steps([batch])
        return loss

    def steps(self, batches: Iterable[Any]) -> Iterator[float]:
        """Train on whole batches, and yield the loss of each. Under `2bw` a step begins while the one before is in
        flight, and its late micro-batches lack that one's update."""
        return steps_in_flight(self.schedule, batches, self._begin, self._finish)

    @property
    def own(self) -> Any:
        """The newest version of this stage's own parameters, valid until the next step: copy what you keep."""
        return self.run.own

    def gather(self, root: int = 0) -> Any:
        """Return the whole tree of parameters, as numpy arrays, on one rank, which must have room for it; None on the
        others. All ranks call it, between steps."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self.own)]
        if self.comm.rank != root:
            self.comm.send(leaves, root, _TAGS["own"])
            return None
        trees = []
        for stage in self.stages:
            sent = leaves if stage is self.stage else self._receive(stage.number, "own")
            trees.append(jax.tree.unflatten(jax.tree.structure(stage.own_shapes), sent))
        return jax.tree.map(np.asarray, self.stages.gather(trees))

    def save(self, path: str | Path, root: int = 0) -> None:
        """Write all parameters to one model file on the disk of one rank, leaf by leaf: no PC holds the whole model.
        All ranks call it, between steps. `zt.load_model` reads it. Raises CheckpointError at the root."""
        own = jax.tree.leaves(self.own)
        if self.comm.rank != root:
            for position, _ in _written(self.stages, self.stage.number):
                self.comm.send(np.asarray(own[position], np.float32), root, _TAGS["own"])
            return
        spec = tuple(describe_tree(self.stages.traced.params))
        with write_model_in_parts(Path(path), spec) as write:
            for stage in self.stages:
                for position, leaf in _written(self.stages, stage.number):
                    is_own = stage is self.stage
                    values = np.asarray(own[position], np.float32) if is_own else self._receive(stage.number, "own")
                    write(leaf.whole.path, 0 if leaf.rows is None else leaf.rows.start, values)

    def record(self) -> None:
        """Keep `spans` from now on."""
        self.spans = []

    def write_record(self, path: str | Path) -> None:
        """Write the recorded tasks, a line of JSON each, as `zmqtrain sim --json` does: `zmqtrain page FOLDER` draws
        them. Raises ConfigError if nothing was recorded, OSError."""
        if self.spans is None:
            raise ConfigError("nothing was recorded: call pipeline.record() before the steps")
        offset = time.time() - time.monotonic()
        with open(path, "w", encoding="utf-8") as file:
            for span in self.spans:
                if span.kind != "wait":
                    facts = {"pipeline": 0, "stage": self.stage.number, "end": span.end + offset, "what": span.kind}
                    facts |= {"step": span.step, "micro_batch": span.micro_batch}
                    file.write(json.dumps(record("task", span.begin + offset, **facts)) + "\n")

    def close(self) -> None:
        """Wait until what was computed is sent, end the threads, and let go of the optimizer's state. The parameters
        and the communicator stay."""
        self._sender.shutdown(wait=True)
        self._receiver.shutdown(wait=True)
        if hasattr(self, "run"):  # else it was discarded
            self.run.close()

    def discard(self) -> None:
        """Close, and let go of parameters, gradients and optimizer state: the traceback of an error may still hold this
        pipeline."""
        self.close()
        self._mail.clear()
        del self.run

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the loop

    def _check_own(self, own: Any) -> None:
        """Raise ModelMismatch if these are not the parameters of this stage."""
        try:
            check_form(own, self.stage.own_shapes, "parameter", "parameters")
        except ModelMismatch as error:
            raise ModelMismatch(
                f"rank {self.comm.rank} computes stage {self.stage.number}, and got other parameters than that has: "
                f"give it the leaves of stages[ranks.index(comm.rank)] ({error})"
            ) from error

    def _begin(self, batch: Any) -> int:
        self.run.take_batch(self._steps, self.stages.parts(batch))
        self._machine.batch_arrived(self._steps)
        self._steps += 1
        self._post_receives()
        return self._steps - 1

    def _finish(self, step: int) -> float:
        while True:
            while not self._arrivals.empty():
                self._take(self._arrivals.get())
            if step < self._updated and step in self._losses:
                return self._losses.pop(step)
            if (task := self._machine.next_task()) is not None:
                self._do(task)
            else:
                self._wait()

    def _do(self, task: Task) -> None:
        begun = time.monotonic()
        if task.kind == "update":
            self._update(task)
        else:
            self._pass(task)
        self._note(Span(task.kind, task.step, task.micro_batch, begun, time.monotonic()))

    def _pass(self, task: Task) -> None:
        """Go forward or backward with one micro-batch, and hand the result to the sending thread."""
        is_forward = task.kind == "forward"
        number = task.step * self.stages.micro_batches + task.micro_batch
        arrived: Values = self._mail.pop(("carry" if is_forward else "cotangent", number), ())
        result = self.run.forward(task, arrived) if is_forward else self.run.backward(task, arrived)
        self._machine.done(task)
        if (receiver := self._machine.receiver(task)) is not None:
            self._submit(self._send_result, task, receiver, result)

    def _update(self, task: Task) -> None:
        gradients = self.run.take_gradients(task.step)
        if self.stage.is_last:
            loss = self._losses[task.step] = float(self.run.take_loss(task.step))
            for stage in range(self.stage.number):
                self._submit(self._send, "loss", stage, loss)
        if others := self.stages.tied_with(self.stage.number):
            own = self.stages.tied_parts(self.stage.number, gradients)
            parts = {self.stage.number: {number: np.asarray(part) for number, part in own.items()}}
            for other in others:
                shared = self._shared_with(other, parts[self.stage.number])
                self._submit(self._send, "tied", other, list(shared.values()))
            for other in others:
                numbers = self._shared_with(other, parts[self.stage.number])
                parts[other] = dict(zip(numbers, self._receive(other, "tied"), strict=True))
            gradients = self.stages.with_tied(self.stage.number, gradients, parts)
        if self._clip_norm:
            gradients = self._clipped(gradients)
        self.run.update(task.version, gradients)
        self._machine.done(task)
        self.run.drop_versions(self._machine.versions)
        self._updated = task.step + 1
        self.statistics.steps += 1

    def _clipped(self, gradients: Any) -> Any:
        """Return the gradients, clipped by the norm of those of all stages, which tell each other their squares."""
        number = self.stage.number
        squares = {number: self.run.squares(gradients, self._counted)}
        others = [stage for stage in range(self.comm.size) if stage != number]
        for other in others:
            self._submit(self._send, "squares", other, squares[number])
        for other in others:
            squares[other] = float(self._receive(other, "squares"))
        return self.run.clipped(gradients, [squares[stage] for stage in sorted(squares)], self._clip_norm)

    def _shared_with(self, other: int, parts: dict[int, Any]) -> dict[int, Any]:
        return {number: part for number, part in parts.items() if other in self.stages.tied[number].stages}

    # ------------------------------------------------------------------ what is sent (in the sending thread)

    def _submit(self, send: Any, *arguments: Any) -> None:
        self._sender.submit(send, *arguments).add_done_callback(self._submitted)

    def _submitted(self, sent: Future[Any]) -> None:
        if (error := sent.exception()) is not None:
            self._arrivals.put(error)

    def _send_result(self, task: Task, receiver: int, result: Values) -> None:
        kind: _Kind = "carry" if task.kind == "forward" else "cotangent"
        forms = self.stage.carry_out if kind == "carry" else self.stage.cotangents_out
        what = f"the {kind} of micro-batch {task.micro_batch} of step {task.step} from {self._name(self.stage.number)}"
        wire = self.boundary.pack(result, forms, "forward" if kind == "carry" else "backward", what)
        self.statistics.bytes_sent += self.boundary.nbytes(wire)
        self._send(kind, receiver, wire)

    def _send(self, kind: _Kind, stage: int, values: Any) -> None:
        request = self.comm.isend(values, self.ranks[stage], _TAGS[kind])
        request.add_done_callback(self._sent)

    def _sent(self, request: Request[Any]) -> None:
        try:
            request.wait(0)
        except ZmqTrainError as error:
            self._arrivals.put(error)

    # ------------------------------------------------------------------ what is received

    def _post_receives(self) -> None:
        """Post receives for what will come of the steps that have begun, a few ahead of what was taken."""
        number, micro_batches = self.stage.number, self._steps * self.stages.micro_batches
        if number > 0:
            self._post("carry", number - 1, min(micro_batches, self._taken["carry"] + _AHEAD))
        if not self.stage.is_last:
            self._post("cotangent", number + 1, min(micro_batches, self._taken["cotangent"] + _AHEAD))
            self._post("loss", self.comm.size - 1, self._steps)

    def _post(self, kind: _Kind, stage: int, most: int) -> None:
        while self._posted[kind] < most:
            number = self._posted[kind]
            self._posted[kind] += 1
            request = self.comm.irecv(self.ranks[stage], _TAGS[kind])
            request.add_done_callback(partial(self._arrived, kind, number))

    def _arrived(self, kind: _Kind, number: int, request: Request[Any]) -> None:
        """A receive is over (in the port's thread, which must not wait)."""
        with contextlib.suppress(RuntimeError):  # this stage has ended: nobody takes it any more
            self._receiver.submit(self._decode, kind, number, request).add_done_callback(self._submitted)

    def _decode(self, kind: _Kind, number: int, request: Request[Any]) -> None:
        """Decode a message (in the receiving thread), and hand it to the training thread."""
        value = request.wait(0)
        if kind != "loss":
            self.statistics.bytes_received += self.boundary.nbytes(value)
            forms = self.stage.carry_in if kind == "carry" else self.stage.cotangents_in
            value = self.boundary.unpack(value, forms, "forward" if kind == "carry" else "backward")
        self._arrivals.put(_Arrived(kind, number, value))

    def _take(self, arrived: _Arrived | BaseException) -> None:
        """Tell the machine of an arrival. Raises the error of a failed message."""
        try:
            if isinstance(arrived, BaseException):
                raise arrived
        except PeerLost as error:
            error.add_note(self._awaited()[0])
            raise
        kind, number, value = arrived
        self._taken[kind] += 1
        if kind == "loss":
            self._losses[number] = value
            return
        self._mail[kind, number] = value
        step, micro_batch = divmod(number, self.stages.micro_batches)
        if kind == "carry":
            self._machine.carry_arrived(step, micro_batch)
        else:
            self._machine.cotangent_arrived(step, micro_batch)
        self._post_receives()

    def _wait(self) -> None:
        """Wait for the next message. Raises CollectiveTimeout, and PeerLost, naming what is waited for."""
        begun, said = time.monotonic(), False
        try:
            while True:
                left = begun + self.comm.timeout_seconds - time.monotonic()
                try:
                    arrived = self._arrivals.get(timeout=max(0.0, left if said else min(left, _SAY_SECONDS)))
                    break
                except queue.Empty:
                    waiting, ranks = self._awaited()
                    if time.monotonic() >= begun + self.comm.timeout_seconds:
                        raise CollectiveTimeout(
                            f"{waiting}, and nothing came for {self.comm.timeout_seconds:g} s: is that process stuck, "
                            "or does it not train on as many batches?",
                            ranks,
                        ) from None
                    logger.warning("%s (%.0f s so far)", waiting, time.monotonic() - begun)
                    said = True
        finally:
            ended = time.monotonic()
            self.statistics.waited_seconds += ended - begun
            self._note(Span("wait", self._updated, NO_MICRO_BATCH, begun, ended))
        self._take(arrived)

    def _awaited(self) -> tuple[str, tuple[int, ...]]:
        """Return in words what this stage waits for, and from which ranks."""
        awaited = [one for one in self._machine.awaited() if one.kind != "batch"]
        if not awaited:
            last = self.comm.size - 1
            words = f"stage {self.stage.number} waits for the loss of step {self._taken['loss']} from stage {last}"
            return f"{words} ({self._name(last)})", (self.ranks[last],)
        words = "; ".join(f"{one} ({self._name(one.sender)})" for one in awaited)
        return words, tuple(self.ranks[one.sender] for one in awaited)

    def _receive(self, stage: int, kind: _Kind) -> Any:
        return self.comm.recv(self.ranks[stage], _TAGS[kind])

    def _name(self, stage: int) -> str:
        """Return the name of the PC that computes a stage."""
        return self.comm.names[self.ranks[stage]]

    def _note(self, span: Span) -> None:
        if self.spans is not None:
            self.spans.append(span)


def _written(stages: Split, number: int) -> Iterator[tuple[int, HeldLeaf]]:
    """The leaves that a stage writes to a model file, and their places in its tree: of tied rows, the first stage's."""
    before: dict[int, list[HeldLeaf]] = {}
    for stage in stages[:number]:
        for leaf in stage.held:
            before.setdefault(leaf.number, []).append(leaf)
    for position, leaf in enumerate(stages[number].held):
        others = before.get(leaf.number, [])
        if not any(one.rows is None or one.rows == leaf.rows for one in others):
            yield position, leaf

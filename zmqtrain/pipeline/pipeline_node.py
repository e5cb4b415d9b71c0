"""A pipeline that is one node of a run: several PCs, each with a stage, train data parallel with other pipelines.

    node = zt.PipelineNode.join("tcp://hub:5555", 2, loss_fn, init_fn, optax.adamw(1e-3), batch, micro_batches=16)
    for batch in node.batches(batches_of):                        # or any batches that all PCs of the pipeline have
        loss = node.step(batch)
    node.finish()

Rule 1: a PC has a connection of its own to the hub, and exchanges the parts of its stage over it: no PC has the whole
model, and each port carries its own share.
Rule 2: at each step boundary the PC of the first stage, the *leader*, decides for all whether they offer, and which
version they apply; each has told it its next version. So their offers of one step are one delta (a *turn*), which the
hub takes whole or not at all, and all stages have the parameters of one version.
Rule 3: the leader's decision needs no wait of its own: in a schedule with flush the first stage ends a step last, and
the others wait for its next micro-batch anyway.
Rule 4: a stage that borrows rows of a leaf takes them from the stage that exchanges them, each time these are applied.
Rule 5: when a PC is lost, the others plan again, and join as a new pipeline: they take the shared parameters, and the
optimizer begins fresh. At most the steps since the last offer that the hub has taken are lost, of this pipeline alone.
Rule 6: a PC that is told to leave has all send what is pending first: nothing is lost then. So it is when PCs wait for
a pipeline and this one has fewer than it should: it ends, and all of them meet again.
Source: Narayanan et al. 2021 (2BW: data parallel pipelines); Ryabinin et al. 2023 (SWARM: stages with peers of theirs).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import secrets
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from zmqtrain.collectives.communicator import Communicator
from zmqtrain.core.errors import (
    CollectiveTimeout,
    ConfigError,
    DoesNotFit,
    HubUnreachable,
    LocalProtocolError,
    NonFiniteDelta,
    PeerLost,
    ZmqTrainError,
)
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import (
    Array,
    Counts,
    ExchangeState,
    ExchangeStatistics,
    ModelSpec,
    Part,
    Piece,
    StepSchedule,
    Update,
    Version,
)
from zmqtrain.node.connect import connect
from zmqtrain.node.joint import check_joint, hear, lead, shared_batches
from zmqtrain.node.node import Node
from zmqtrain.node.units import Batch, Source
from zmqtrain.pipeline.pieces import (
    Borrowed,
    StageLayout,
    borrowed,
    layout_of_stage,
    parts_of_segments,
    span_of,
    spec_of,
)
from zmqtrain.pipeline.pipeline import Pipeline
from zmqtrain.pipeline.placement import Placement, Training
from zmqtrain.pipeline.schedule import ScheduleName, as_schedule
from zmqtrain.pipeline.stage import Stage
from zmqtrain.pipeline.trace import Loss
from zmqtrain.protocol.messages import Roster
from zmqtrain.protocol.pipelines import Share
from zmqtrain.train.leaves import describe_tree
from zmqtrain.train.seen import say_device
from zmqtrain.train.sync import FLUSH_SECONDS, DelayedSync
from zmqtrain.transport.address import answers, parse_addresses
from zmqtrain.transport.key_folder import Access, find_access
from zmqtrain.transport.zmq_keys import GivenKeys, GivenServerKey

logger = logging.getLogger(__name__)

_TOLD, _REPORT, _BORROWED, _CHECK = 8 << 40, 9 << 40, 10 << 40, 12 << 40
"""Tags of the leader's decisions, of what it hears, and of borrowed rows, beside those of `Pipeline`."""
MOST_PARTS = 32
"""A model is exchanged in at most so many parts: stages are made of whole ones, and each costs its heads."""
AGAIN_SECONDS = 0.05
"""What a drain has offered in vain is offered again after so long."""
LOOK_SECONDS = 0.5
"""How often a stage that waits for a version looks whether its hub is still there."""
MEET_SECONDS = 20.0
"""PCs of a pipeline that has ended wait so long for others, and then go on alone."""
WAIT_SECONDS = 1.0
"""How often the leader tells the others that it still waits for the end of the run."""


class StageLine:
    """The PCs of a pipeline, for messages of the leader. leader: its rank."""

    def __init__(self, comm: Communicator, leader: int) -> None:
        self._comm, self._leader = comm, leader

    @property
    def count(self) -> int:
        return self._comm.size

    @property
    def index(self) -> int:
        return self._comm.rank

    @property
    def is_first(self) -> bool:
        """Whether this is the leader."""
        return self.index == self._leader

    def tell(
        self, message: Mapping[str, Any] | None = None, arrays: Sequence[Array] = ()
    ) -> tuple[Any, Sequence[Array]]:
        """Return what the leader tells: what JSON can hold. All call it, the leader with the message."""
        if not self.is_first:
            return json.loads(bytes(self._comm.recv(self._leader, _TOLD)[0])), ()
        text = np.frombuffer(json.dumps(message).encode(), np.uint8)
        for request in [self._comm.isend([text], rank, _TOLD) for rank in self._others]:
            request.wait()
        return message, ()

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all at the leader, by rank; nothing elsewhere. All call it."""
        own = list(numbers)
        if not self.is_first:
            self._comm.send([np.array(own, np.int64)], self._leader, _REPORT)
            return []
        return [own if rank == self.index else self._comm.recv(rank, _REPORT)[0].tolist() for rank in range(self.count)]

    def check(self) -> None:
        """Raise PeerLost if one of the PCs is lost; nothing is waited for."""
        self._comm.iprobe(tag=_CHECK)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.count) if rank != self.index]


class StageExchange:
    """The exchange of one stage with the hub, as its `DelayedSync` uses it: see `Exchange`.

    node: its connection.  line: to the others.  pieces: of the parts that it exchanges.
    """

    def __init__(self, node: Node, line: StageLine, stage: Stage, pieces: Sequence[Sequence[Piece]]) -> None:
        self.node, self._line, self._stage, self._pieces = node, line, stage, pieces
        self.name, self.settings, self.clock = node.name, node.settings, node.clock
        self.population = None
        self._layout = layout_of_stage(stage, pieces)
        self.target: Version = -1
        """The version that all stages apply now."""
        self._schedule = StepSchedule(self.settings.every, self.settings.delay)
        self._offers = self._stopped = self._draining = self._offered = False
        self.leaves = self.leaving = self.meets = False
        """Whether this PC is to leave, whether any of its pipeline is, and whether all end it to meet again."""
        self.others_wait: Callable[[], bool] = lambda: False
        """Asked of the leader: whether other PCs wait for a pipeline, and this one has too few."""
        self._mapped: tuple[Update, Update] | None = None

    @property
    def layout(self) -> StageLayout:
        """See Exchange."""
        return self._layout

    # ------------------------------------------------------------------ what all stages do alike

    def agree(self, step: int) -> bool:
        """Hear, at a step boundary, from the leader what all stages do now; return whether a version is applied. All
        call it, with the number of the step."""
        node = self.node
        node.turn = step
        update, state = node.peek(), node.state()
        ready = len(node.next_fragments()) == self._layout.fragments
        reports = self._line.gather([-1 if update is None else update.version, int(ready), int(self.leaves)])

        def decided() -> dict[str, Any]:
            versions = [version for version, _, _ in reports]
            every, delay, pace, paces = node.schedule(paced=self.settings.follows_speed)
            return {
                "version": max(versions) if min(versions) >= 0 else -1,
                "offers": all(ready for _, ready, _ in reports),
                "stopped": state.stopped,
                "schedule": [every, delay, pace, list(paces)],
                "leaving": any(leaves for _, _, leaves in reports),
                "meets": self.others_wait(),
            }

        if self._line.is_first:
            told = lead(self._line, decided)
            self._line.tell(told)
        else:
            told, _ = hear(self._line)
            if self.settings.is_planned:
                node.schedule()  # which adopts other codecs
        every, delay, pace, paces = told["schedule"]
        self._schedule = StepSchedule(every, delay, pace, tuple(paces))
        self._offers, self._stopped = told["offers"], told["stopped"]
        self.leaving, self.meets = told["leaving"], told["meets"]
        self.target = max(self.target, told["version"])
        return bool(told["version"] >= 0)

    def has_applied(self, before: Version) -> bool:
        """Return whether any stage has applied a version since `before`, where stages wait for each within a step. All
        call it."""
        reports = self._line.gather([self.node.offers.version])
        if self._line.is_first:
            told, _ = self._line.tell({"applied": any(version != before for (version,) in reports)})
        else:
            told, _ = hear(self._line)
        return bool(told["applied"])

    def together(self) -> None:
        """See OffersTogether: at the end each attempt is a turn of its own, and versions are applied as they come.
        Raises PeerLost."""
        if not self._draining:
            self._draining = self._offered = True
        self._line.check()
        if self._offered:  # and refused: else all PCs would not count alike
            self.node.turn += 1
            self.clock.sleep(AGAIN_SECONDS)
        self._offered = False

    # ------------------------------------------------------------------ exchange

    def join(
        self, model: ModelSpec, leaves: Sequence[Array], *, score: float = math.nan, optimizer_state: Sequence[Any] = ()
    ) -> Update | None:
        """See Exchange. What the hub is told is the parts, and not the leaves of this stage. Raises PeerLost, too."""
        pieces = [piece for part in self._pieces for piece in part]
        spec, values = spec_of(self._stage, pieces), []
        for piece, leaf in zip(pieces, spec, strict=True):
            span = span_of(self._stage, piece.number, piece.rows)
            flat = (
                np.asarray(leaves[span.place], np.float32).reshape(-1)[span.start : span.end] if span else np.empty(0)
            )
            values.append(np.asarray(flat, np.float32).reshape(leaf.shape))
        self.node.begin_join(spec, values, score=score, optimizer_state=optimizer_state)
        while not self.node.wait(self.node.has_joined, LOOK_SECONDS):
            self._line.check()  # the hub waits for all of this pipeline
        return self._as_own(self.node.end_join())

    def state(self) -> ExchangeState:
        return self.node.state()._replace(stopped=self._stopped)

    def schedule(self, paced: bool = False) -> StepSchedule:
        return self._schedule

    def next_fragments(self) -> tuple[int, ...]:
        return tuple(range(self._layout.fragments)) if self._offers or self._draining else ()

    def offer(self, fragment: int, segments: Sequence[Array], counts: Counts, *, dense: bool = False) -> int | None:
        sequence = self.node.offer(fragment, segments, counts, dense=dense)
        self._offered |= sequence is not None
        return sequence

    def settle(self, version: Version) -> None:
        """After the drain: apply up to this version."""
        self._draining, self.target = False, version

    def peek(self) -> Update | None:
        """See Exchange. Waits for the version that all apply, unless the hub is lost here."""
        node = self.node
        while node.offers.version < self.target and node.peek() is None and node.live:
            node.wait(lambda: len(node.inbox) > 0, LOOK_SECONDS)
        update = node.peek()
        if update is None or not (self._draining or update.version <= self.target):
            return None
        return self._as_own(update)

    def poll(self) -> Update | None:
        return self._as_own(self.node.poll())

    def wait_update(self, timeout_seconds: float, sequence: int) -> Update:
        update = self._as_own(self.node.wait_update(timeout_seconds, sequence))
        assert update is not None
        self.target = max(self.target, update.version)
        return update

    def everyone_drained(self, shard: int) -> bool:
        """See Exchange: what follows the drain is `PipelineNode.finish`'s."""
        return True

    def report(
        self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int, held_seconds: float = 0.0
    ) -> None:
        own = samples if self._line.is_first else 0  # they are one pipeline's
        self.node.report(
            step=step, samples=own, loss=loss, age_steps=age_steps, offers_refused=offers_refused,
            held_seconds=held_seconds,
        )  # fmt: skip

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        self.node.report_scores(scores, version)

    def statistics(self) -> ExchangeStatistics:
        return self.node.statistics()

    def _as_own(self, update: Update | None) -> Update | None:
        """Return an update with its parameters in the places of this stage's leaves."""
        if update is None or update.anchor is None:
            return update
        if self._mapped is None or self._mapped[0] is not update:
            pieces = [piece for part in self._pieces for piece in part]
            parts = []
            for part in update.anchor:
                span = span_of(self._stage, pieces[part.leaf].number, pieces[part.leaf].rows)
                if span is not None:
                    parts.append(Part(span.place, span.start + part.start, np.asarray(part.values).reshape(-1)))
            self._mapped = update, replace(update, anchor=parts)
        return self._mapped[1]


class Meeting(NamedTuple):
    """Where the PCs of a pipeline meet: so many of those that say the same group, at a hub, the first of its addresses
    that answers. name: of this PC; None: the host's.  timeout_seconds: of each wait.  patient: others are waited for
    again and again."""

    hub: str
    access: Access
    name: str | None
    group: str
    size: int
    timeout_seconds: float
    patient: bool

    def meet(self, group: str, size: int, timeout_seconds: float) -> Communicator:
        """Return the communicator of so many PCs of a group. Raises CollectiveTimeout, and as it does."""
        hub_key, pair = self.access.credentials
        first, *others = parse_addresses(self.hub)
        here = next((one for one in (first, *others) if others and answers(one, LOOK_SECONDS)), first)
        comm = Communicator.create(
            here, size, group=group, name=self.name, server_key=hub_key, keys=pair, timeout_seconds=timeout_seconds,
            repeated=True,
        )  # fmt: skip
        comm.timeout_seconds = self.timeout_seconds
        return comm


class PipelineNode:
    """One node of a run that is a pipeline of several PCs. Made by `join`; all of its PCs call the same methods, with
    the same batches. `recoveries` says how often it has gone on without a PC."""

    def __init__(
        self,
        training: Training,
        meeting: Meeting,
        node_options: Callable[[], dict[str, Any]],
        settings: dict[str, Any],
    ) -> None:
        self._training, self._meeting, self._settings = training, meeting, settings
        self._node_options, self._optimizer = node_options, training.optimizer
        self._leaves = self._ended = False
        self._attempt, self._abandoned, self._passed = 0, False, True
        """The number of the step that is made, or was made last; whether its batch is left out after a loss; and
        whether this PC has no step that it could repeat then."""
        self._lost: PeerLost | None = None
        """A PC that is lost, until the others have planned again."""
        self._node: Node | None = None
        self._pipeline: Pipeline | None = None
        self._built = 0
        """How many pipelines this PC has been one of."""
        self.run, self.last_version, self.ended_with_run = "", -1, False
        """The id of the run, the version with which this PC has left it (-1: it has not), and whether the run is over
        and this PC has its last parameters."""
        self.recoveries: list[tuple[str, ...]] = []
        """The names of the PCs that were lost, each time."""
        self._wait_for_others()
        try:
            self._retry_after_loss(self._build)
        except BaseException:
            self.close()
            raise

    def _wait_for_others(self) -> None:
        """Meet as many PCs as make a pipeline. Raises CollectiveTimeout, HubUnreachable unless this is patient."""
        meeting = self._meeting
        self._meet_one_of(((meeting.group, meeting.size),), meeting.timeout_seconds, meeting.patient)

    def _begin_with(self, comm: Communicator) -> None:
        """Measure and plan with PCs that have just met."""
        self._comm = self._planned_comm = comm
        """The PCs that are left, and those with which the placement was made."""
        try:
            self._placement = self._training.place(comm, most_segments=MOST_PARTS)
            self._attempt = max(int(attempt) for (attempt,) in comm.allgather(np.array([self._attempt], np.int64)))
        except BaseException:
            comm.close()
            raise
        self._left = tuple(range(comm.size))  # of the PCs that were measured, those that are here
        self._parts = parts_of_segments(self._placement.measured.segments)

    @classmethod
    def join(
        cls,
        hub: str,
        size: int,
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
        group: str = "pipeline",
        name: str | None = None,
        server_key: GivenServerKey = None,
        keys: GivenKeys | Access = None,
        timeout_seconds: float = 60.0,
        patient: bool = False,
        node_options: Callable[[], dict[str, Any]] | None = None,
        **settings: Any,
    ) -> PipelineNode:
        """Meet `size` PCs at a broker, plan with them who computes what, and join its run as one node. Each PC calls
        it.

        hub: the broker's address.  loss_fn(params, batch) -> a scalar, init_fn(key) -> the parameters, optimizer,
        batch, micro_batches, key, uncut, memory_bytes: as of `Pipeline.create`; a batch is the whole pipeline's.
        group: PCs that say the same meet, `size` at a time.  name, server_key, keys: as of `zt.connect`.
        timeout_seconds: of each wait for another PC.  patient: until there are enough, wait without end.
        node_options: gives further arguments of `zt.connect`, each time that this PC joins.  settings: as of
        `Pipeline`: codec, clip_norm, optimizer_on.
        Raises ConfigError for a run that pipelines cannot take part in and for the schedule 2bw, which has two versions
        of the parameters at a time; JoinRefused, HubUnreachable, CollectiveTimeout, DoesNotFit; and as
        `Pipeline.create`.
        """
        rule = as_schedule(schedule)
        if not rule.flushes:
            raise ConfigError(
                f"a pipeline with a hub ends each step on all stages, and {rule.name} does not: take 1f1b"
            )
        training = Training(
            loss_fn=loss_fn, init_fn=init_fn, optimizer=optimizer, batch=batch, micro_batches=micro_batches, key=key,
            uncut=uncut, memory_bytes=memory_bytes, schedule=rule, codec=settings.get("codec", "bf16"),
            optimizer_on=settings.get("optimizer_on", "device"),
        )  # fmt: skip
        access = find_access(hub, server_key, keys)
        meeting = Meeting(hub, access, name, group, size, timeout_seconds, patient)
        return cls(training, meeting, node_options or dict, settings)

    # ------------------------------------------------------------------ training

    def step(self, batch: Any) -> float:
        """Train on one whole batch, and exchange with the hub when that is due; return the loss, on all PCs.

        After a loss of a PC: NaN for a batch that the others have not trained on.
        Raises RunStopped when an operator has ended the run, in a loop that is not over `batches`: call `finish` then.
        PeerLost if this PC is the lost one, DoesNotFit if the PCs that are left cannot hold the model; and as
        `Pipeline.step`.
        """
        if self._ended:
            raise LocalProtocolError("`step` was called after `finish`: this pipeline's part in the run is over")
        self._attempt += 1
        loss = math.nan

        def trained() -> None:
            nonlocal loss
            if self._pipeline is None:
                self._build()
            if self._abandoned or self._passed:
                return
            loss, self._passed = self._step(batch), True
            if self._exchange.leaving or self._exchange.meets:
                self._drain(FLUSH_SECONDS)
                self._part()

        self._abandoned = self._passed = False
        self._retry_after_loss(trained)
        self._passed = True
        return loss

    def batches(self, source: Source[Batch]) -> Iterator[Batch]:
        """Give the batches of the data units that the broker deals to this pipeline, until the run is over: the same on
        all of its PCs. source: from a unit's number to its batches, or a program."""
        while not self._ended:
            built = self._built
            leader = self._node if self._line.is_first else None
            coming = shared_batches(self._line, leader, source, self.name)
            while True:
                try:
                    batch = next(coming, None)
                except PeerLost as error:
                    self._abort(error)
                    self._retry_after_loss(self._build)
                    break
                if batch is None:
                    return
                yield batch
                if self._built != built or self._ended:
                    break

    def finish(self, timeout_seconds: float = FLUSH_SECONDS) -> None:
        """Send what is pending, wait for the others where the run has an end, and leave the run. `gather` and `save`
        still work, and have the run's parameters. Raises as `step`."""
        if self._ended:
            return

        self._passed = True

        def drained() -> None:
            if self._pipeline is None:
                self._build()
            until = time.monotonic() + timeout_seconds
            self._drain(timeout_seconds)
            self._take_over(self._until_all_drained(self._running.own, until), True)

        self._retry_after_loss(drained)
        self._ended = True
        self._close_node("")

    def leave(self) -> None:
        """Have this PC leave after the present step: all send what is pending, and the others go on without it. `step`
        returns then, and `ended` is true. From any thread, and a signal handler."""
        self._leaves = True
        if (exchange := getattr(self, "_exchange", None)) is not None:
            exchange.leaves = True

    @property
    def ended(self) -> bool:
        """Whether this PC's part in the run is over."""
        return self._ended

    @property
    def roster(self) -> Roster | None:
        """The members of the run, as the hub last listed them."""
        return None if self._node is None else self._node.roster

    def _others_wait(self) -> bool:
        """Return, at the leader, whether so many PCs wait that a pipeline with them and these is as large as it should
        be."""
        roster, size = self.roster, self._comm.size
        if roster is None or size >= self._meeting.size:
            return False
        waiting = roster.hub.get(f"group {self._meeting.group}", 0)
        return isinstance(waiting, int) and waiting + size >= self._meeting.size

    def gather(self, root: int = 0) -> Any:
        """Return the whole tree of parameters on one PC, as `Pipeline.gather`."""
        return self._running.gather(min(root, self._comm.size - 1))

    def save(self, path: str | Path, root: int = 0) -> None:
        """Write all parameters to one model file on one PC, as `Pipeline.save`."""
        self._running.save(path, min(root, self._comm.size - 1))

    def close(self) -> None:
        """Leave the run and the other PCs. What was not sent is lost without `finish`."""
        self._close_node("")
        if self._pipeline is not None:
            self._pipeline.close()
        self._comm.close()

    def __enter__(self) -> PipelineNode:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    @property
    def name(self) -> str:
        """The name of this PC."""
        return self._comm.names[self._comm.rank]

    @property
    def comm(self) -> Communicator:
        """The PCs of this pipeline that are left."""
        return self._comm

    @property
    def placement(self) -> Placement:
        """Which PC computes what."""
        return self._placement

    @property
    def settings(self) -> RunSettings:
        """The run's settings."""
        return self._exchange.settings

    @property
    def version(self) -> Version:
        """The version of the shared parameters here."""
        return self._exchange.statistics().version

    @property
    def own(self) -> Any:
        """This stage's own parameters, valid until the next step."""
        return self._running.own

    @property
    def _running(self) -> Pipeline:
        assert self._pipeline is not None
        return self._pipeline

    def _step(self, batch: Any) -> float:
        loss, before = self._running.step(batch), self.version
        applied = self._exchange.agree(self._attempt)
        own = self._sync.step(self._running.own, score=loss, samples=self._samples)
        if self.settings.waits:
            applied = self._exchange.has_applied(before)
        self._take_over(own, applied)
        return loss

    def _drain(self, timeout_seconds: float) -> None:
        """Send all that is pending, and wait for it."""
        self._take_over(self._sync.finish(self._running.own, timeout_seconds), True)

    def _part(self) -> None:
        """End this pipeline, of which nothing is pending. The PCs that are told to leave go; the others go on together,
        or meet those that wait."""
        self._close_node("its pipeline ends, and its PCs go on as another")
        if self._leaves:
            self._ended = True
            self._comm.barrier()  # all have drained
            self._comm.close()
        elif self._exchange.leaving:
            self._comm.barrier()
            self._comm.barrier()  # ends with PeerLost when those that leave have gone
        else:
            self._comm.barrier()
            self._running.discard()
            self._pipeline = None
            self._meet_again()
            self._build()

    def _meet_again(self) -> None:
        """Meet the PCs that wait for a pipeline; if they have gone meanwhile, those of this one alone, or as many of
        them as are left."""
        size, meeting = self._comm.size, self._meeting
        self._comm.close()
        # a group has one size: who asks for another ends it for all who wait
        fewer = [(f"{meeting.group} {self._pipeline_id} {left}", left) for left in range(size, 0, -1)]
        self._meet_one_of(((meeting.group, meeting.size), *fewer), MEET_SECONDS, True)

    def _meet_one_of(self, groups: Sequence[tuple[str, int]], seconds: float, patient: bool) -> None:
        """Meet as many PCs as make one of these groups, and plan with them; try one after the other. Raises DoesNotFit
        if even a whole pipeline cannot hold the model; CollectiveTimeout, HubUnreachable unless this is patient."""
        for group, size in itertools.cycle(groups):
            try:
                return self._begin_with(self._meeting.meet(group, size, seconds))
            except (CollectiveTimeout, HubUnreachable, DoesNotFit) as error:
                if not patient or (isinstance(error, DoesNotFit) and size == self._meeting.size):
                    raise
                logger.warning("%s. This PC goes on waiting", error)
            except PeerLost as error:  # while they measured
                logger.warning("%s, before the pipeline had begun: its PCs meet again", error)

    def _take_over(self, own: Any, applied: bool) -> None:
        """Train on with these parameters. applied: some of them are other pipelines' work."""
        run = self._running.run
        run.go_on_from(self._with_borrowed(own) if applied else own)
        if self._sync.take_adoption() is not None and run.optimizer is not None:
            run.optimizer.restart(run.own)

    def _with_borrowed(self, own: Any) -> Any:
        """Return the parameters with the rows that this stage borrows, as their lenders have them."""
        leaves, tree = jax.tree.flatten(own)
        ranks, me = self._placement.ranks, self._stage.number
        lent = [one for one in self._borrowed if one.lender == me]
        sends = [
            self._comm.isend(
                [np.asarray(leaves[one.source.place]).reshape(-1)[one.source.start : one.source.end]],
                ranks[one.borrower],
                _BORROWED,
            )
            for one in lent
        ]
        for one in self._borrowed:
            if one.borrower == me:
                (values,) = self._comm.recv(ranks[one.lender], _BORROWED)
                leaf = leaves[one.target.place]
                flat = leaf.reshape(-1).at[one.target.start : one.target.end].set(values.astype(leaf.dtype))
                leaves[one.target.place] = flat.reshape(leaf.shape)
        for request in sends:
            request.wait()
        return jax.tree.unflatten(tree, leaves)

    def _until_all_drained(self, own: Any, until: float) -> Any:
        """Wait, where the run has an end, until all nodes have drained, and take its last version; all stages the
        same."""
        sync, line, node = self._sync, self._line, self._node
        assert node is not None
        if line.is_first:
            told_at = time.monotonic()
            while not node.everyone_drained(0) and time.monotonic() < until:
                own = sync.catch_up(own, -1)
                if time.monotonic() - told_at > WAIT_SECONDS:
                    line.tell({"waits": True})
                    told_at = time.monotonic()
                time.sleep(0.01)
            told, _ = line.tell({"over": node.ended_with_run})
        else:
            told, _ = hear(line)
        self.ended_with_run = told["over"]
        newest = max(int(version) for (version,) in self._comm.allgather(np.array([self.version], np.int64)))
        self._exchange.settle(newest)
        return sync.catch_up(own, newest)

    # ------------------------------------------------------------------ building, and a lost PC

    def _build(self) -> None:
        """Join the run with the stages of the placement, planned again if a PC was lost."""
        self._close_node("a PC of its pipeline is lost: the others go on as another")
        if self._lost is not None:
            self._plan_again()
        comm, placement, parts = self._comm, self._placement, self._parts
        plan = placement.plan.stages
        self._stage = stage = placement.stages[placement.ranks.index(comm.rank)]
        self._line = StageLine(comm, placement.ranks[0])
        told, _ = self._line.tell({"pipeline": secrets.token_hex(16)} if self._line.is_first else None)
        self._pipeline_id: str = told["pipeline"]
        shares = [parts.share(self._pipeline_id, one.begin, one.end) for one in plan]
        self._borrowed: list[Borrowed] = list(borrowed(parts, placement.stages, shares))
        share = shares[stage.number]
        own = self._training.init(stage)
        self._node = node = self._connected(share)
        self.run = node.run
        node.describe(device=say_device(node.name, jax.tree.leaves(own)))
        self._exchange = StageExchange(node, self._line, stage, parts.pieces[share.first : share.end])
        self._exchange.leaves, self._exchange.others_wait = self._leaves, self._others_wait
        self._sync = DelayedSync(self._exchange, own, donate=True)
        self._samples = _rows(placement)
        begun = self._with_borrowed(self._sync.start)
        self._sync.take_adoption()
        self._pipeline = Pipeline(
            comm, placement.stages, begun, self._optimizer, schedule=placement.measured.schedule, **self._settings
        )
        self._pipeline.placement = placement
        self._built += 1
        logger.info("%s", placement)

    def _connected(self, share: Share) -> Node:
        """Connect to the hub with all PCs of the pipeline; a patient one waits for a hub that does not answer. Raises
        what keeps this PC from it, or says that another cannot."""
        meeting, comm = self._meeting, self._comm
        while True:
            node, failure = None, None
            try:
                named = meeting.name or comm.names[comm.rank]
                found = connect(meeting.hub, named, keys=meeting.access, holds=share, **self._node_options())
                assert isinstance(found, Node)
                node = found
                check_joint(node.settings)
            except ZmqTrainError as error:
                failure = error
            waits = meeting.patient and isinstance(failure, HubUnreachable)
            told = comm.allgather(np.array([failure is not None, waits], np.int64))
            if node is not None and failure is None and not any(failed for failed, _ in told):
                return node
            if node is not None:
                node.close("a PC of its pipeline cannot join now")
            if all(waits for failed, waits in told if failed):
                logger.warning(
                    "%s. This PC goes on trying", failure or "a PC of this pipeline does not reach the broker"
                )
                continue
            if failure is not None:
                raise failure
            which = ", ".join(name for name, (failed, _) in zip(comm.names, told, strict=True) if failed)
            raise ConfigError(f"this pipeline cannot join the run, as {which} cannot: what is said there says why")

    def _plan_again(self) -> None:
        """Agree with the PCs that are left about the step, and plan without the lost ones."""
        comm = self._comm = self._comm.shrink()
        place, before = self._left[self._planned_comm.rank], self._left
        told = comm.allgather(np.array([place, self._attempt, self._passed], np.int64))
        passed, newest = any(passed for _, _, passed in told), max(int(attempt) for _, attempt, _ in told)
        # a step that one PC has passed is not repeated; else those that are in an earlier one come to the newest
        self._abandoned = passed or self._attempt < newest
        self._attempt = newest if passed or self._attempt == newest else newest - 1
        measured = self._placement.measured
        left = tuple(int(place) for place, _, _ in told)
        lost = tuple(measured.pcs[place].name for place in before if place not in left)
        self.recoveries.append(lost)
        self._lost = None
        try:
            self._placement = measured.placed([measured.pcs[place] for place in left])
        except DoesNotFit as error:
            logger.warning("%s lost, and the others wait for another PC: %s", ", ".join(lost), error)
            comm.close()
            self._abandoned = True
            return self._wait_for_others()
        self._left, self._planned_comm = left, comm
        text = "%s lost: %s from the shared parameters"
        logger.warning(text, ", ".join(lost), f"{comm.size} PCs go on" if comm.size > 1 else "one PC goes on")

    def _retry_after_loss(self, act: Callable[[], None]) -> None:
        """Do something with all PCs; again on those that are left if one is lost."""
        while True:
            try:
                return act()
            except PeerLost as error:
                if error.rank == self._comm.rank or NonFiniteDelta.__name__ in error.why:
                    raise
                self._abort(error)

    def _abort(self, error: PeerLost) -> None:
        """End what was in flight."""
        logger.warning("%s; the others go on without", error)
        self._lost = error
        traceback.clear_frames(error.__traceback__)
        if self._pipeline is not None:
            self._pipeline.discard()
            self._pipeline = None

    def _close_node(self, reason: str) -> None:
        if self._node is not None:
            self.last_version = self._node.offers.version
            self._node.close(reason)
            self._node = None


def _rows(placement: Placement) -> int:
    """Return how many samples a batch has: the first axis of its leaves."""
    batches = placement.measured.batches
    paths = zip(describe_tree(batches.batch), jax.tree.leaves(batches.batch), strict=True)
    return next((int(leaf.shape[0]) for spec, leaf in paths if leaf.shape and spec.path not in batches.uncut), 1)

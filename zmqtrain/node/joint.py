"""A node of several processes: those of one `jax.distributed` program, as on a small cluster with a fast network.

The first process speaks with the hub. All processes have a `JointNode`, and make the same calls of it in the same
order, as they do with the functions that JAX compiles for all of them.
Rule 1: the first process asks the exchange and sends each answer to all. So all processes do the same, and none waits
for a call that another one does not make. An error of the exchange, too, is raised in all processes.
Rule 2: an aggregate is sent decoded, in float32 and bit for bit, so that the anchor is the same in all processes.
Rule 3: joining, a data unit or an aggregate in strict mode may take minutes, and JAX counts a collective of minutes as
failed. Therefore the first process sends, once a second, that it still waits.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Protocol, TypeVar

import numpy as np

from zmqtrain.codecs.fragment import layout_of
from zmqtrain.core import errors
from zmqtrain.core.errors import (
    AggregateTimeout,
    ConfigError,
    DataError,
    LocalProtocolError,
    ModelMismatch,
    ZmqTrainError,
)
from zmqtrain.core.interfaces import Describes, Exchange, Layout, Population
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import (
    Array,
    Counts,
    ExchangeState,
    ExchangeStatistics,
    ModelSpec,
    Part,
    StepSchedule,
    Update,
    Version,
    spec_to_plain,
)
from zmqtrain.node.codec import CodecOn
from zmqtrain.node.connect import connect
from zmqtrain.node.node import Node
from zmqtrain.node.units import Batch, Source
from zmqtrain.session.environment import environment
from zmqtrain.train.processes import Processes
from zmqtrain.transport.key_folder import Access
from zmqtrain.transport.zmq_keys import GivenKeys, GivenServerKey

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

Packed = tuple[dict[str, Any], Sequence[Array]]
"""An answer as it is sent: its facts, as JSON can hold them, and its arrays."""

END: Any = object()
"""In the place of a batch: there are no more."""

TELL_SECONDS = 1.0
"""How often the others hear that there is nothing yet, and for how long a data unit is awaited at a time."""


class Line(Protocol):
    """The processes of one node, as `JointNode` uses them: see `train.processes.Processes`."""

    @property
    def count(self) -> int: ...

    @property
    def index(self) -> int: ...

    @property
    def is_first(self) -> bool: ...

    def tell(
        self, message: Mapping[str, Any] | None = None, arrays: Sequence[Array] = ()
    ) -> tuple[Any, Sequence[Array]]: ...

    def gather(self, numbers: Sequence[int]) -> list[list[int]]: ...


class Leader(Exchange, Describes, Protocol):
    """The node that speaks with the hub, as `JointNode` uses it."""

    def batches_as_they_come(self, source: Source[Batch], wait_seconds: float) -> Iterator[Batch | None]: ...

    def close(self, reason: str = "") -> None: ...


def connect_as_one(
    address: str,
    name: str | None = None,
    server_key: GivenServerKey = None,
    keys: GivenKeys | Access = None,
    timeout_seconds: float = 10.0,
    codec_on: CodecOn = "auto",
    link: str = "",
    share: float = 1.0,
) -> JointNode:
    """Connect all processes of a `jax.distributed` program to the broker at `address`, as one node.

    Called by all processes after `jax.distributed.initialize`. The first process connects, with the keys of its PC;
    the others need neither keys nor a way to the hub. Give the `JointNode` to `DelayedSync` in all processes. With one
    process it is an ordinary node.
    The arguments are those of `connect`; the first process's count. Such a node keeps no checkpoint of its own.
    Raises what `connect` does, in all processes, and ConfigError for a run with several brokers, or one in which nodes
    are compared before they have common parameters (`initial`).
    """
    processes = Processes()

    def opened() -> Node:
        node = connect(address, name, server_key, keys, timeout_seconds=timeout_seconds, codec_on=codec_on, link=link,
                       share=share, whole=True)  # fmt: skip
        try:
            check_joint(node.settings)
            assert isinstance(node, Node)
        except BaseException:
            node.close()
            raise
        return node

    node = lead(processes, opened, waits=True) if processes.is_first else None
    joint = JointNode(node, processes)
    if node is not None and joint.count > 1:
        text = "%s is %d processes: this one speaks with the hub, and tells the others"
        logger.info(text, joint.name, joint.count)
    return joint


def check_joint(settings: RunSettings) -> None:
    """Raise ConfigError for a run of which no node can be several processes."""
    why = ""
    if settings.shards > 1:
        why = f"has {settings.shards} brokers (--shards)"
    elif settings.trains_apart or settings.initial in ("mean", "own"):
        why = f"compares nodes before they have common parameters (--initial {settings.initial})"
    if why:
        raise ConfigError(
            f"a node of several processes cannot take part in this run, which {why}. Start the broker with one shard "
            "and --initial founder, or make each process a node of its own (zmqtrain.connect, without "
            "jax.distributed.initialize)"
        )


def lead(line: Line, call: Callable[[], Answer], waits: bool = False) -> Answer:
    """Return what a call gives, in the first process. What it raises is told to the others, and raised here too.

    waits: the call may take long: the others hear once a second that there is nothing yet.
    """
    try:
        return _patiently(line, call) if waits and line.count > 1 else call()
    except BaseException as error:
        line.tell({"raised": [type(error).__name__, str(error)]})
        raise


def _patiently(line: Line, call: Callable[[], Answer]) -> Answer:
    answers: list[Answer] = []
    raised: list[BaseException] = []

    def answer() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=answer, name="zmqtrain-waits", daemon=True)
    thread.start()
    thread.join(TELL_SECONDS)
    while thread.is_alive():
        line.tell({"waits": True})
        thread.join(TELL_SECONDS)
    if raised:
        raise raised[0]
    return answers[0]


def hear(line: Line) -> tuple[dict[str, Any], Sequence[Array]]:
    """Return the next thing that the first process tells. Raises what it has raised."""
    while True:
        message, arrays = line.tell()
        if "raised" in message:
            raise _error(*message["raised"])
        if "waits" not in message:
            return message, arrays


def _error(kind: str, text: str) -> ZmqTrainError:
    """Return the error that the first process has told: of its own class, if that is one of ours."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, ZmqTrainError):
        try:
            error = found(text)
        except TypeError:
            return ZmqTrainError(text)
        return error if str(error) == text else ZmqTrainError(text)  # some are made of other facts than a message
    return ZmqTrainError(f"the first process of this node has ended: {kind}{': ' if text else ''}{text}")


class JointNode:
    """One node, as each of its processes has it: an `Exchange`. See `connect_as_one`.

    leader: the node that speaks with the hub, in the first process; None in the others.  line: the processes.
    """

    def __init__(self, leader: Leader | None, line: Line) -> None:
        self.leader, self._line = leader, line
        self.clock = environment().clock if leader is None else leader.clock
        self.population: Population | None = None
        """See Exchange: no population has such a node."""
        if leader is not None:
            told, _ = line.tell({"name": leader.name, "settings": leader.settings.to_dict()})
        else:
            told, _ = hear(line)
        self.name: str = told["name"]
        self.settings = RunSettings.from_dict(told["settings"])
        self._layout: Layout | None = None
        self._update: Update | None = None  # seen, and not polled yet
        self._state, self._figures = ExchangeState(), ExchangeStatistics(-1, 0, 0, 0, 0.0, 0.0, 0, 0, None)
        self._schedule, self._fragments = StepSchedule(self.settings.every, self.settings.delay), tuple[int, ...]()

    @property
    def count(self) -> int:
        """How many processes this node is."""
        return self._line.count

    @property
    def is_first(self) -> bool:
        """Whether this is the process that speaks with the hub."""
        return self._line.is_first

    def close(self, reason: str = "") -> None:
        """Say goodbye to the hub, in the first process; safe to call twice. The other processes are not waited for."""
        if self.leader is not None:
            self.leader.close(reason)

    def __enter__(self) -> JointNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ telling

    def _exchange(
        self, ask: Callable[[Leader], Any], *, waits: bool = False, pack: Callable[[Any], Packed] | None = None
    ) -> tuple[Any, dict[str, Any], Sequence[Array]]:
        """Have the first process ask its node, and send all processes the answer and the state after it.

        Returns (the answer, in the first process only; its facts; its arrays).  pack: makes facts and arrays of an
        answer; without it the answer itself is the fact.
        Nothing that can fail stands between asking and sending: the others would wait for an answer for ever.
        """
        leader = self.leader
        if leader is None:
            told, arrays = hear(self._line)
            self._look(told["stands"])
            return None, told["facts"], arrays

        def asked() -> tuple[Any, Packed, dict[str, Any]]:
            answer = ask(leader)
            return answer, ({"answer": answer}, ()) if pack is None else pack(answer), _stands(leader, self.settings)

        answer, (facts, own), stands = lead(self._line, asked, waits)
        self._line.tell({"stands": stands, "facts": facts}, own)
        self._look(stands)
        return answer, facts, own

    def _look(self, stands: Mapping[str, Any]) -> None:
        in_flight, unreachable, *rest = stands["state"]
        self._state = ExchangeState(tuple(in_flight), tuple(unreachable), *rest)
        every, delay, pace, paces = stands["schedule"]
        self._schedule = StepSchedule(every, delay, pace, tuple(paces))
        self._fragments = tuple(stands["fragments"])
        self._figures = ExchangeStatistics(*stands["figures"])

    # ------------------------------------------------------------------ exchange

    @property
    def layout(self) -> Layout:
        """See Exchange. Raises LocalProtocolError before `join`."""
        if self._layout is None:
            raise LocalProtocolError(f"{self.name} has not joined the run yet: call join first")
        return self._layout

    def join(
        self, model: ModelSpec, leaves: Sequence[Array], *, score: float = math.nan, optimizer_state: Sequence[Any] = ()
    ) -> Update | None:
        """See Exchange. Raises ModelMismatch where the processes do not give the same parameters."""
        self._check_alike(model, leaves)
        update, facts, arrays = self._exchange(
            lambda leader: leader.join(model, leaves, score=score, optimizer_state=optimizer_state),
            waits=True,
            pack=_packed,
        )
        self._layout = layout_of(model, self.settings)
        return update if self.leader is not None else _unpacked(facts, arrays)

    def _check_alike(self, model: ModelSpec, leaves: Sequence[Array]) -> None:
        """Compare what the processes begin with. The trees first, so that all have as many leaves to compare."""
        tree = json.dumps(spec_to_plain(model)).encode()
        sums = [zlib.crc32(np.ascontiguousarray(leaf).data) & 0x7FFF_FFFF for leaf in leaves]
        for of_leaves, own in ((False, [zlib.crc32(tree) & 0x7FFF_FFFF]), (True, sums)):
            ours, *others = self._line.gather(own)
            for process, theirs in enumerate(others, 1):
                if theirs == ours:
                    continue
                leaf = next(number for number, one in enumerate(theirs) if one != ours[number])
                what, path = "the tree of the parameters", ""
                if of_leaves:
                    what, path = f"the leaf {model[leaf]}", model[leaf].path
                raise ModelMismatch(
                    f"{what} of process {process} is not that of process 0: begin with the same parameters in all "
                    "processes of a node, from the same seed or the same file",
                    path,
                )

    def state(self) -> ExchangeState:
        return self._state

    def schedule(self, paced: bool = False) -> StepSchedule:
        return self._schedule

    def next_fragments(self) -> tuple[int, ...]:
        return self._fragments

    def statistics(self) -> ExchangeStatistics:
        """See Exchange: the same in all processes, as of the last exchange."""
        return self._figures

    def offer(self, fragment: int, segments: Sequence[Array], counts: Counts, *, dense: bool = False) -> int | None:
        _, facts, _ = self._exchange(lambda leader: leader.offer(fragment, segments, counts, dense=dense))
        sequence: int | None = facts["answer"]
        return sequence

    def peek(self) -> Update | None:
        """See Exchange. An update is sent to the other processes when the first one sees it first."""
        known = self._update

        def pack(update: Update | None) -> Packed:
            return ({"known": True}, ()) if update is not None and update is known else _packed(update)

        update, facts, arrays = self._exchange(lambda leader: leader.peek(), pack=pack)
        if "known" not in facts:
            self._update = update if self.leader is not None else _unpacked(facts, arrays)
        return self._update

    def poll(self) -> Update | None:
        update, self._update = self.peek(), None
        if update is not None:
            taken, _, _ = self._exchange(lambda leader: leader.poll(), pack=lambda update: ({}, ()))
            assert self.leader is None or taken is update
        return update

    def wait_update(self, timeout_seconds: float, sequence: int) -> Update:
        def awaited(leader: Leader) -> Update | AggregateTimeout:
            try:
                return leader.wait_update(timeout_seconds, sequence)
            except AggregateTimeout as error:  # an answer like any other: the offer may have been withdrawn meanwhile
                return error

        def pack(answer: Update | AggregateTimeout) -> Packed:
            return ({"late": str(answer)}, ()) if isinstance(answer, AggregateTimeout) else _packed(answer)

        update, facts, arrays = self._exchange(awaited, waits=True, pack=pack)
        if "late" in facts:
            raise AggregateTimeout(facts["late"])
        self._update = None
        found = update if self.leader is not None else _unpacked(facts, arrays)
        assert found is not None
        return found

    def everyone_drained(self, shard: int) -> bool:
        _, facts, _ = self._exchange(lambda leader: leader.everyone_drained(shard))
        return bool(facts["answer"])

    def agreed_time(self) -> float:
        """See Agrees."""
        _, facts, _ = self._exchange(lambda leader: leader.clock.monotonic())
        return float(facts["answer"])

    # ------------------------------------------------------------------ what the first process alone does

    def describe(self, *, data: str | None = None, device: str | None = None, first_step: str | None = None) -> None:
        """See Describes."""
        if self.leader is not None:
            self.leader.describe(data=data, device=device, first_step=first_step)

    def report(
        self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int, held_seconds: float = 0.0
    ) -> None:
        if self.leader is not None:
            self.leader.report(
                step=step, samples=samples, loss=loss, age_steps=age_steps, offers_refused=offers_refused,
                held_seconds=held_seconds,
            )  # fmt: skip

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        if self.leader is not None:
            self.leader.report_scores(scores, version)

    # ------------------------------------------------------------------ data

    def batches(self, source: Source[Batch]) -> Iterator[Batch]:
        """Give the batches of the data units that the broker deals to this node, until the run is over.

        source: from a unit's number to its batches, as this process has them: its part of each batch, or an array over
        the devices of all processes. Each process has its own source; all have as many batches in a unit.
        Raises DataError where this process has fewer, or more, batches in a unit than the first.
        """
        return shared_batches(self._line, self.leader, source, self.name)


def shared_batches(line: Line, leader: Leader | None, source: Source[Batch], name: str) -> Iterator[Batch]:
    """Give the batches of the data units that the broker deals to a node of several processes, in all of them; see
    `JointNode.batches`. leader: in the first process.  name: of the node."""
    batches_of: Callable[[int], Iterator[Batch]] = source.batches if hasattr(source, "batches") else source
    return _batches_heard(line, batches_of, name) if leader is None else _batches_told(line, leader, batches_of)


def _batches_told(line: Line, leader: Leader, batches_of: Callable[[int], Iterator[Batch]]) -> Iterator[Batch]:
    current = -1

    def of_unit(unit: int) -> Iterator[Batch]:
        nonlocal current
        current = unit
        yield from batches_of(unit)

    coming = leader.batches_as_they_come(of_unit, TELL_SECONDS)
    while (batch := lead(line, lambda: next(coming, END))) is not END:
        if batch is None:
            line.tell({"waits": True})
        else:
            line.tell({"unit": current})
            yield batch
    line.tell({"unit": None})


def _batches_heard(line: Line, batches_of: Callable[[int], Iterator[Batch]], name: str) -> Iterator[Batch]:
    def uneven(unit: int, how: str) -> DataError:
        return DataError(
            f"process {line.index} of {name} has {how} batches in data unit {unit} than process 0: give all "
            "processes as many, each its part of the same batches"
        )

    current = -1
    coming: Iterator[Batch] = iter(())
    while (unit := hear(line)[0]["unit"]) is not None:
        if unit != current:
            if next(coming, END) is not END:
                raise uneven(current, "more")
            current, coming = unit, iter(batches_of(unit))
        if (batch := next(coming, END)) is END:
            raise uneven(unit, "fewer")
        yield batch


# ---------------------------------------------------------------------- messages of the first process


def _stands(leader: Leader, settings: RunSettings) -> dict[str, Any]:
    """Return how the exchange stands now, as JSON can hold it."""
    schedule = StepSchedule(settings.every, settings.delay)
    if settings.is_planned or settings.follows_speed:
        schedule = leader.schedule(paced=settings.follows_speed)
    every, delay, pace, paces = schedule
    return {
        "state": list(leader.state()),
        "schedule": [every, delay, pace, list(paces)],
        "fragments": list(leader.next_fragments()),
        "figures": list(astuple(leader.statistics())),
    }


def _packed(update: Update | None) -> Packed:
    """Return the facts of an update, and all its arrays in one row."""
    if update is None:
        return {"update": None}, ()
    arrays: list[Array] = []

    def laid(segments: Mapping[int, Sequence[Array]]) -> list[list[int]]:
        """Put all segments in the row; return each fragment with how many it has."""
        for fragment in segments:
            arrays.extend(np.asarray(segment) for segment in segments[fragment])
        return [[fragment, len(segments[fragment])] for fragment in segments]

    facts: dict[str, Any] = {
        "version": update.version,
        "landed": list(update.landed),
        "flags": [update.reset, update.keep, update.warm],
        "aggregate": laid(update.aggregate),
        "own": laid(update.own),
        "anchor": None,
        "optimizer_state": None,
    }
    if update.anchor is not None:
        facts["anchor"] = [[part.leaf, part.start, list(np.shape(part.values))] for part in update.anchor]
        arrays += [part.values for part in update.anchor]
    if update.optimizer_state is not None:
        facts["optimizer_state"] = len(update.optimizer_state)
        arrays += update.optimizer_state
    return {"update": facts}, arrays


def _unpacked(told: Mapping[str, Any], arrays: Sequence[Array]) -> Update | None:
    """Return the update of what `_packed` gave."""
    facts = told["update"]
    if facts is None:
        return None
    row = iter(arrays)

    def taken(laid: Sequence[Sequence[int]]) -> dict[int, list[Array]]:
        return {fragment: [next(row) for _ in range(count)] for fragment, count in laid}

    reset, keep, warm = facts["flags"]
    aggregate, own, anchor = taken(facts["aggregate"]), taken(facts["own"]), None
    if facts["anchor"] is not None:
        anchor = [Part(leaf, start, next(row).reshape(shape)) for leaf, start, shape in facts["anchor"]]
    optimizer_state = None
    if facts["optimizer_state"] is not None:
        optimizer_state = [next(row) for _ in range(facts["optimizer_state"])]
    return Update(facts["version"], aggregate, own, tuple(facts["landed"]), anchor, reset, keep, optimizer_state, warm)

"""The half of a communicator that runs in its port's thread: requests, groups, and the endpoint that all groups share.

1. Groups and the endpoint run in the port's thread only; other threads enter by `Endpoint.port.call`.
2. An error that ends a communicator ends it on all ranks: the first rank that knows tells the others (BROKEN), and
   every pending or later call raises the same error.
3. A rank that has closed its communicator is not lost: only calls that need it fail.
4. Every wait ends: with a result, an error that names the lost or different rank, or CollectiveTimeout, which names the
   ranks waited for and what they did last. A timeout ends nothing: the request goes on and can be waited for again.
5. Results are made in the thread that waits. Callbacks run in the port's thread and must not wait; one that fails is
   logged.
6. The context of a message names its communicator. Messages for a communicator that this process does not have yet are
   kept; messages for one that has ended are dropped.
7. Survivors agree before they go on: each sends the ranks it knows to be lost, adds those the others know, and gets its
   new communicator once all living ranks have sent the same list. Its context follows from its members.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from zmqtrain.collectives.algorithms import HUB, Traffic
from zmqtrain.collectives.arrays import dtype_of_code
from zmqtrain.collectives.calls import Call, Calls, Phases
from zmqtrain.collectives.matching import ANY_SOURCE, ANY_TAG, CLOSING, Matching, Receiving, Sending, Status, Transfer
from zmqtrain.collectives.wire import COPIED_BELOW_BYTES, NOTHING, Head, Kind, digest, pack, unpack
from zmqtrain.core.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    FramingError,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    ZmqTrainError,
)
from zmqtrain.core.interfaces import HubPort, Port
from zmqtrain.core.types import Buffer, HubChunk

logger = logging.getLogger(__name__)


Result = TypeVar("Result")

GRACE_SECONDS = 5.0
"""For the port's own thread to answer."""

_EMPTY = Status(ANY_SOURCE, ANY_TAG, (), "", 0, 0)
"""Of what is over and has received no message: a send, a collective."""


class Request(Generic[Result]):
    """A message or a collective in flight. Made by a communicator.

    group: of the communicator.  what: in words.  timeout_seconds: the default of `wait`.  doing: the machine's side of
    it; known once it is over.
    """

    def __init__(self, group: Group, what: str, timeout_seconds: float) -> None:
        self.what, self.timeout_seconds = what, timeout_seconds
        self.doing: Call | Transfer | None = None
        self._group = group
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Request[Result]], object]] = []
        self._error: ZmqTrainError | None = None
        self._result: Any = None
        self._made = False

    def __repr__(self) -> str:
        state = ("failed" if self._error else "over") if self._over.is_set() else "in flight"
        return f"<Request {self.what}: {state}>"

    def test(self) -> bool:
        """Tell whether it is over, well or not; never waits."""
        return self._over.is_set()

    @property
    def status(self) -> Status | None:
        """The status of the message that a receive has got: source, tag, count and so on.

        None as long as it is not over, where it failed, and of every other request.
        """
        receiving, over = self.doing, self._over.is_set() and self._error is None
        if not over or not isinstance(receiving, Receiving) or receiving.envelope is None:
            return None
        return receiving.envelope.status

    def get_status(self) -> Status | None:
        """Return the status of a request that is over, None as long as it is not; never waits, and changes nothing.

        It is `MPI_Request_get_status`. A send and a collective have the empty status: source ANY_SOURCE, tag ANY_TAG,
        count 0. Raises what `wait` raises if the request has failed or was cancelled.
        """
        if not self._over.is_set():
            return None
        self.wait()
        return self.status or _EMPTY

    def wait(self, timeout_seconds: float | None = None) -> Result:
        """Wait until it is over; return its result: of a receive or a collective what came of it, else None.

        timeout_seconds: the communicator's if None.  Raises PeerLost if a rank was lost, CollectiveMismatch if ranks
        made different calls, CollectiveTimeout when the time is up: it may be waited for again.
        """
        self._wait_until_over(self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if not self._made:
                assert self.doing is not None
                self._result, self._made = self.doing.result(), True
            made: Result = self._result
            return made

    def cancel(self) -> bool:
        """Take it back: True if it was over before anybody else took part in it, and had no effect.

        A receive that nothing has come for can be; a send that its receiver has not matched, if it is too large to have
        been sent already; a collective never. `wait` of what was cancelled raises LocalProtocolError.
        """
        endpoint, transfer, settled = self._group.endpoint, self.doing, threading.Event()
        endpoint.check_may_wait()
        if not isinstance(transfer, Transfer) or transfer.ended:
            return False

        def cancel() -> None:
            if isinstance(transfer, Sending):
                transfer.answered = settled.set
            self._group.matching.cancel(transfer)
            self._group.settle()
            if not isinstance(transfer, Sending) or transfer.taken:
                settled.set()

        self.add_done_callback(lambda _: settled.set())
        endpoint.port.call(cancel)
        settled.wait(self.timeout_seconds)
        return transfer.cancelled

    def add_done_callback(self, call: Callable[[Request[Result]], object]) -> None:
        """Have `call(request)` called once it is over, in the port's thread, where it must not wait; or at once."""
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(call)
                return
        call(self)

    def complete(self, error: ZmqTrainError | None) -> None:
        """Record that it is over; for the communicator."""
        with self._lock:
            if self._over.is_set():
                return
            self._error = error
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            try:
                call(self)
            except Exception:
                logger.exception("a callback of %s failed", self.what)

    def explain(self, waited_seconds: float) -> CollectiveTimeout | None:
        """Ask the other ranks, and say in an error why this is not over; None: it is, by now."""
        answers = queue.SimpleQueue[CollectiveTimeout | None]()
        self._group.endpoint.port.call(lambda: self._group.explain(self, waited_seconds, answers))
        try:
            return answers.get(timeout=GRACE_SECONDS)
        except queue.Empty:
            return CollectiveTimeout(f"{self.what} has waited {waited_seconds:.3g} s, and the port does not answer")

    def _wait_until_over(self, timeout_seconds: float) -> None:
        if self._over.is_set():
            return
        self._group.endpoint.check_may_wait()
        started = time.monotonic()
        if not self._over.wait(max(0.0, timeout_seconds)):
            error = self.explain(time.monotonic() - started)
            if error is not None and not self._over.is_set():
                raise error


def wait_all(requests: Sequence[Request[Any]], timeout_seconds: float | None = None) -> list[Any]:
    """Wait until all are over; return their results in order.

    timeout_seconds: for all together; the longest of their communicators' if None.  Raises as `Request.wait` does, for
    the first in order that failed.
    """
    if not requests:
        return []
    seconds = max(request.timeout_seconds for request in requests) if timeout_seconds is None else timeout_seconds
    until = time.monotonic() + seconds
    return [request.wait(max(0.0, until - time.monotonic())) for request in requests]


def wait_any(requests: Sequence[Request[Any]], timeout_seconds: float | None = None) -> int:
    """Wait until one is over, well or not; return its index, the lowest if several are.

    timeout_seconds: the longest of their communicators' if None.  Raises CollectiveTimeout for the first one if none
    is, and ValueError if there is none to wait for.
    """
    if not requests:
        raise ValueError("wait_any needs at least one request")
    seconds = max(request.timeout_seconds for request in requests) if timeout_seconds is None else timeout_seconds
    some = threading.Event()
    for request in requests:
        request.add_done_callback(lambda _: some.set())
    if not any(request.test() for request in requests):
        requests[0]._group.endpoint.check_may_wait()
        if not some.wait(max(0.0, seconds)):
            requests[0]._wait_until_over(0.0)
    return next(index for index, request in enumerate(requests) if request.test())


EXPLAIN_SECONDS = 0.5
"""So long a wait that ran out waits for the others to say what they do."""

_OF_CALLS = frozenset((Kind.PART, Kind.CONSUMED, Kind.CALLED, Kind.WAITING, Kind.DOING, Kind.FAILED))
_LEFT = "it has closed its communicator"
_LONGEST_REASON = 400


@dataclass(slots=True)
class CommunicatorStatistics(Traffic):
    """Running figures of a communicator.

    bytes: of messages with their heads; values: bytes of arrays alone.  relayed: ranks that the hub passes messages to.
    """

    values_sent: int = 0
    values_received: int = 0
    relayed: tuple[int, ...] = ()

    @property
    def messages(self) -> int:
        """Messages both ways."""
        return self.messages_sent + self.messages_received

    def count_sent(self, size: int, values: int) -> None:
        self.messages_sent += 1
        self.bytes_sent += size
        self.values_sent += values

    def count_received(self, head: int, values: int) -> None:
        self.messages_received += 1
        self.bytes_received += head + values
        self.values_received += values


@dataclass(slots=True)
class _Question:
    request: Request[Any]
    waited_seconds: float
    unanswered: set[int]
    answers: queue.SimpleQueue[CollectiveTimeout | None]
    until: float | None = None
    asked: int = 0  # which time of asking is for it: answers to earlier ones say nothing of now


class Group:
    """One communicator of an endpoint.

    context: tells its messages from those of others on the same port.  members: the port's ranks, by rank here.
    names: what people call them.
    """

    def __init__(
        self, endpoint: Endpoint, context: int, members: tuple[int, ...], rank: int, names: tuple[str, ...]
    ) -> None:
        self.context, self.members, self.size, self.rank, self.names = context, members, len(members), rank, names
        self.endpoint = endpoint
        self.others = [other for other in range(self.size) if other != rank]
        self.traffic = CommunicatorStatistics()
        self.broken: ZmqTrainError | None = None
        self.calls = Calls(self.rank, self.size, self)
        self.matching = Matching(self.rank, self)
        self._gone: dict[int, PeerLost] = {}  # who has closed its communicator; the hub
        self._closing: dict[int, PeerLost] = {}  # who refuses messages, for it is about to close
        self._last = ""
        self._doing: Call | Transfer | None = None  # what it did last, as long as that goes on
        self._questions: list[_Question] = []

    def name(self, rank: int) -> str:
        """Return what people call a rank."""
        return f"rank {rank} ({self.names[rank]})" if 0 <= rank < self.size else "the hub"

    def lost(self, rank: int, why: str) -> PeerLost:
        """Return the error of calls that need a lost rank, or the hub."""
        return PeerLost("the hub" if rank == HUB else self.names[rank], why, rank)

    def who_left(self) -> PeerLost | None:
        """Return the error of a rank that has closed its communicator, or does, if there is one; from any thread."""
        left = [*self._gone.items(), *self._closing.items()]
        return next((error for rank, error in left if rank != HUB), None)

    def go_on_without(self, error: PeerLost) -> None:
        """End this communicator, for a rank has left."""
        self.endpoint.note_lost(self.members[error.rank], error.why)
        self.break_off(error)

    # ------------------------------------------------------------------ what this rank asks for

    def begin(self, request: Request[Any], text: str, phases: Phases, confirm: bool, operation: str) -> None:
        if self.broken is not None:
            request.complete(self.broken)
            return
        try:
            call = request.doing = self.calls.begin(text, phases, request, confirm=confirm, operation=operation)
            self._last, self._doing = f"{text} (call number {call.number})", call
        except Exception as error:
            self._fail(error, f"call number {self.calls.number}, {text}")
        self.settle()

    def post(self, request: Request[Any], transfer: Transfer, post: Callable[[], object]) -> None:
        """Have the matching do something with a transfer of this request's."""
        transfer.owner = request
        if self.broken is not None:
            request.complete(self.broken)
            return
        self._last, self._doing = request.what, transfer
        post()
        self.settle()

    def settle(self) -> None:
        """Send what is to be sent, and say what is over."""
        calls, matching = self.calls, self.matching
        while calls.outgoing or matching.outgoing or calls.finished or matching.finished:
            for machine in (calls, matching):
                outgoing, machine.outgoing = machine.outgoing, []
                for to, head, values in outgoing:
                    self._send(to, head, values)
            calls_finished, calls.finished = calls.finished, []
            matching_finished, matching.finished = matching.finished, []
            finished: list[Call | Transfer] = [*calls_finished, *matching_finished]
            for over in finished:
                owner, over.owner = over.owner, None
                if self._doing is over:
                    self._doing = None
                if owner is not None:
                    owner.complete(over.error)
        if self._gone and self.broken is None:
            for call in calls.pending:
                for rank in call.waits_for:
                    if rank in self._gone:
                        self.break_off(self._gone[rank])
                        return

    def _send(self, to: int, head: Head, values: memoryview = NOTHING) -> None:
        if to != self.rank:
            if to == HUB:
                size = self.endpoint.reduce(self.context, head, values)
            else:
                size = self.endpoint.send(self.members[to], self.context, head, values)
            self.traffic.count_sent(size, values.nbytes)
            return
        if values.nbytes < COPIED_BELOW_BYTES:
            values = memoryview(bytes(values))
        self.matching.hear(self.rank, head, values)

    # ------------------------------------------------------------------ received messages

    def hear(self, source: int, head: Head, values: memoryview) -> None:
        kind = head.kind
        try:
            if kind == Kind.BROKEN:
                self._hear_broken(head)
            elif self.broken is not None:
                return
            elif kind in _OF_CALLS:
                self.calls.hear(source, head, values)
                if kind == Kind.DOING:
                    self._hear_answer(source)
            elif kind == Kind.LEAVING:
                why = f"{_LEFT} after {head.text}" if head.text else _LEFT
                self.endpoint.note_lost(self.members[source], why)
                error = self._gone[source] = self.lost(source, why)
                self.matching.lose(source, error, alone=all(rank in self._gone for rank in self.others))
            elif kind == Kind.TAKE and head.flag == CLOSING:
                error = self._closing[source] = self.lost(source, _LEFT)
                self.matching.refused(source, head.number, error)
            else:
                self.matching.hear(source, head, values)
        except FramingError as error:
            self.break_off(RemoteProtocolError(self.name(source), "in a communicator", str(error)))
        except Exception as error:
            self._fail(error, f"{Kind(kind).name} of {self.name(source)}")
        self.settle()

    def on_lost(self, rank: int, why: str) -> None:
        """Handle the loss of a rank (this one, if it is cut off), or of the hub, which ends calls that it reduces."""
        if rank == HUB:
            self._gone[HUB] = self.lost(HUB, why)
            self.settle()
        elif rank not in self._gone:
            self.break_off(self.lost(rank, why))

    def on_tick(self, now: float) -> None:
        if self.broken is None:
            self.calls.tick(now)
            self.settle()
        for question in list(self._questions):
            if question.until is None:
                question.until = now + EXPLAIN_SECONDS
            elif now >= question.until:
                self._answer(question)

    def _hear_broken(self, head: Head) -> None:
        if head.flag or head.place == HUB:
            self.endpoint.note_difference(self.context)
            self.break_off(CollectiveMismatch(head.text) if head.flag else self.lost(HUB, head.text), tell=False)
        elif 0 <= head.place < self.size:
            self.endpoint.note_lost(self.members[head.place], head.text)
            self.break_off(self.lost(head.place, head.text), tell=False)

    # ------------------------------------------------------------------ the end of it

    def _fail(self, error: Exception, where: str) -> None:
        if not isinstance(error, ZmqTrainError):
            logger.error("%s failed", where, exc_info=error)
            failure = CollectiveMismatch(f"{where} failed on {self.name(self.rank)}: {error!r}")
            failure.__cause__ = error
            error = failure
        self.break_off(error)

    def break_off(self, error: ZmqTrainError, tell: bool = True) -> None:
        """End the communicator with this error, and tell the others."""
        if self.broken is not None:
            return
        self.broken = error
        self.settle()  # what was to be said before
        self.calls.fail(error)
        self.matching.fail(error)
        if tell:
            lost = isinstance(error, PeerLost)
            if not lost or error is self._gone.get(HUB):
                self.endpoint.note_difference(self.context)
            head = Head(
                Kind.BROKEN,
                flag=0 if lost else 1,
                place=error.rank if isinstance(error, PeerLost) else -1,
                text=(error.why if isinstance(error, PeerLost) else str(error))[:4096],
            )
            for to in self.others:
                if to not in self._gone:
                    self._send(to, head)
        self.settle()
        for question in list(self._questions):
            self._answer(question)

    def stop_receiving(self) -> None:
        """Refuse messages that no receive has matched: this rank is about to leave."""
        self.matching.stop_receiving()
        self.settle()

    def leave(self, error: BaseException | None) -> None:
        """Tell the others that this rank leaves. error: the exception that ended its work, if any."""
        said = "" if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")[:_LONGEST_REASON]
        text = "".join(character if character.isprintable() else " " for character in said)
        for to in self.others:
            self._send(to, Head(Kind.LEAVING, text=text))
        if self.broken is None:
            self.broken = self.lost(self.rank, _LEFT)
            self.calls.fail(self.broken)
            self.matching.fail(self.broken)
            self.settle()

    def abandon(self, error: ZmqTrainError) -> None:
        """End all pending requests; from any thread, once the port's thread has ended."""
        self.broken = self.broken or error
        for machine in (self.calls, self.matching):
            machine.fail(error)
            machine.outgoing.clear()
        self.settle()

    # ------------------------------------------------------------------ why it takes so long

    def explain(
        self, request: Request[Any], waited_seconds: float, answers: queue.SimpleQueue[CollectiveTimeout | None]
    ) -> None:
        """Ask all others what they do, then put an error in `answers` that says why a request is not over."""
        others = {rank for rank in self.others if rank not in self._gone}
        question = _Question(request, waited_seconds, others, answers)
        self._questions.append(question)
        if not others or self.broken is not None or request.test():
            self._answer(question)
            return
        doing = request.doing
        self.calls.ask(doing if isinstance(doing, Call) else None)
        question.asked = self.calls.asked
        self.settle()

    def _hear_answer(self, source: int) -> None:
        for question in list(self._questions):
            if self.calls.answered[source] >= question.asked:
                question.unanswered.discard(source)
            if not question.unanswered:
                self._answer(question)

    def _answer(self, question: _Question) -> None:
        self._questions.remove(question)
        request, doing = question.request, question.request.doing
        if request.test() or doing is None:
            question.answers.put(None)
            return
        if isinstance(doing, Call):
            what = f"{request.what} (call number {doing.number})"
            ranks = self._behind(doing, question.unanswered) or doing.waits_for
        else:
            what = request.what
            ranks = (doing.peer,) if doing.peer != ANY_SOURCE else tuple(self.others)
        whom = "; ".join(self._describe(rank, doing, question.unanswered) for rank in ranks) or "nobody"
        said = f"{what} on {self.name(self.rank)} has waited {question.waited_seconds:.3g} s for {whom}"
        question.answers.put(CollectiveTimeout(said, tuple(ranks)))

    def _behind(self, call: Call, unanswered: set[int]) -> tuple[int, ...]:
        others = self.calls.others
        return tuple(r for r, (number, _) in sorted(others.items()) if number < call.number and r not in unanswered)

    def _describe(self, rank: int, doing: Call | Transfer, unanswered: set[int]) -> str:
        if rank == self.rank or not 0 <= rank < self.size:
            return self.name(rank)
        if rank in unanswered or rank not in self.calls.others:
            return f"{self.name(rank)}, which does not answer"
        number, did = self.calls.others[rank]
        missing = "which has not made this call; " if isinstance(doing, Call) and number < doing.number else ""
        return f"{self.name(rank)}, {missing}the last it did: {did}"

    def doing(self) -> str:
        if self._doing is None:
            return f"{self._last}, which has ended" if self._last else "nothing yet"
        ranks = self._doing.waits_for if isinstance(self._doing, Call) else ()
        whom = f" and waits for {', '.join(map(self.name, ranks))}" if ranks else ""
        return f"{self._last}, which goes on{whom}"


_EARLY_MESSAGES = 65_536
"""How many messages may wait for a communicator that this process does not have yet."""


Answers = queue.SimpleQueue[Group | CollectiveTimeout | None]
"""Where a thread that shrinks gets the communicator of the survivors, None if it is cut off, or why it must wait."""


class Endpoint:
    """The `PortListener` of a port, with its communicators."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.thread: int | None = None
        self._groups: dict[int, Group] = {}
        self._over: set[int] = set()
        self._early: list[tuple[int, Head, memoryview]] = []
        self._lost: dict[int, str] = {}
        self._differed: set[int] = set()  # contexts
        self._said: dict[int, str] = {}  # by rank of the port: the survivors' last words
        self._shrinking: list[Answers] = []

    def start(self) -> Group:
        """Start the port; return the communicator of all."""
        group = self._add(tuple(range(len(self.port.names))))
        self.port.call(self._remember_thread)
        self.port.start(self)
        return group

    def _remember_thread(self) -> None:
        self.thread = threading.get_ident()

    def _add(self, members: tuple[int, ...]) -> Group:
        text = f"{members} {sorted(self._differed)}"
        context = digest(text) & 0xFFFFFFFF
        rank, names = members.index(self.port.rank), tuple(self.port.names[member] for member in members)
        group = self._groups[context] = Group(self, context, members, rank, names)
        return group

    def check_may_wait(self) -> None:
        """Raise LocalProtocolError in the port's own thread: what it waits for could not come about."""
        if threading.get_ident() == self.thread:
            raise LocalProtocolError("a callback of a request must not wait: hand the work to another thread")

    # ------------------------------------------------------------------ the port's thread

    def send(self, rank: int, context: int, head: Head, values: memoryview = NOTHING) -> int:
        """Send one message to a rank of the port; return its bytes."""
        packed = pack(head, context)
        self.port.send(rank, [packed, values] if values.nbytes else [packed])
        return len(packed) + values.nbytes

    def reduce(self, context: int, head: Head, values: memoryview) -> int:
        """Have the hub reduce a part of a call; return the message's bytes."""
        packed = pack(head, context)
        key = digest(f"{context} {head.number} {head.digest}") >> 1  # calls that differ do not meet
        port = cast(HubPort, self.port)
        port.reduce(HubChunk(key, head.text, dtype_of_code(head.flag).name), [packed, values])
        return len(packed) + values.nbytes

    def on_message(self, rank: int, frames: list[Buffer]) -> None:
        try:
            head, values = unpack(frames)
        except FramingError as error:
            logger.warning("%s sent what is no message: %s", self._name(rank), error)
            return
        group = self._groups.get(head.context)
        if head.kind == Kind.SURVIVORS:
            self._hear_survivors(rank, head.text)
        elif group is not None and (rank == HUB or rank in group.members):
            group.traffic.count_received(len(frames[0]), values.nbytes)
            group.hear(rank if rank == HUB else group.members.index(rank), head, values)
        elif group is None and head.context not in self._over and len(self._early) < _EARLY_MESSAGES:
            self._early.append((rank, head, values))

    def on_lost(self, rank: int, why: str) -> None:
        if rank == HUB:
            for group in list(self._groups.values()):
                group.on_lost(HUB, why)
        elif rank not in self._lost:
            self._lost[rank] = why
            for group in list(self._groups.values()):
                if rank in group.members:
                    group.on_lost(group.members.index(rank), why)
            self._look_who_survives()

    def on_tick(self, now: float) -> None:
        for group in list(self._groups.values()):
            group.on_tick(now)

    def _name(self, rank: int) -> str:
        return "the hub" if rank == HUB else self.port.names[rank]

    def note_lost(self, rank: int, why: str) -> None:
        """Record that a rank is lost: another rank reports it, or it has closed its communicator."""
        if rank != self.port.rank and rank not in self._lost:
            self._lost[rank] = why
            self._look_who_survives()

    def note_difference(self, context: int) -> None:
        """Record that a communicator ended though all its members live, so that the next one gets another context."""
        self._differed.add(context)

    def retire(self, group: Group) -> None:
        self._groups.pop(group.context, None)
        self._over.add(group.context)

    # ------------------------------------------------------------------ who goes on

    def shrink(self, answers: Answers) -> None:
        """Answer with the communicator of the survivors, once they agree, or None if this rank is cut off."""
        self._shrinking.append(answers)
        self._look_who_survives(say=True)

    def stop_shrinking(self, answers: Answers, seconds: float) -> None:
        """Stop waiting: unless that was answered, answer with an error that names the missing ranks."""
        if answers in self._shrinking:
            self._shrinking.remove(answers)
            missing = self._unheard()
            whom = ", ".join(f"{self.port.names[rank]} (rank {rank} at first)" for rank in missing)
            answers.put(CollectiveTimeout(f"shrink has waited {seconds:.3g} s for {whom}", missing))

    def _unheard(self) -> tuple[int, ...]:
        """Return the living ranks of the port that have not sent the same list as this one."""
        own = self._last_words()
        return tuple(r for r in self._living() if r != self.port.rank and self._said.get(r) != own)

    def _living(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(len(self.port.names)) if rank not in self._lost)

    def _last_words(self) -> str:
        return f"{','.join(map(str, sorted(self._lost)))};{','.join(map(str, sorted(self._differed)))}"

    def _hear_survivors(self, rank: int, text: str) -> None:
        try:
            lost, differed = ([int(word) for word in part.split(",") if word] for part in text.split(";"))
        except ValueError:
            logger.warning("%s sent what is no message of a survivor", self.port.names[rank])
            return
        self._said[rank] = text
        self._differed.update(differed)
        for other in lost:
            if other != self.port.rank and 0 <= other < len(self.port.names):
                self.on_lost(other, f"{self.port.names[rank]} has lost it")
        self._look_who_survives()

    def _look_who_survives(self, say: bool = False) -> None:
        """Send the list of survivors, if it is wanted and new; go on once all survivors have sent the same."""
        if not self._shrinking:
            return
        if self.port.rank in self._lost:
            return self._answer_shrinking(None)
        words = self._last_words()
        if say or self._said.get(self.port.rank) != words:
            self._said[self.port.rank] = words
            for rank in self._living():
                if rank != self.port.rank:
                    self.send(rank, 0, Head(Kind.SURVIVORS, text=words))
        if self._unheard():
            return
        for group in list(self._groups.values()):
            if group.broken is not None:
                self.retire(group)
        group = self._add(self._living())
        self._answer_shrinking(group)
        early, self._early = self._early, []
        for rank, head, values in early:
            if head.context == group.context and rank in group.members:
                group.hear(group.members.index(rank), head, values)
            elif head.context not in self._over:
                self._early.append((rank, head, values))

    def _answer_shrinking(self, answer: Group | None) -> None:
        shrinking, self._shrinking = self._shrinking, []
        for answers in shrinking:
            answers.put(answer)

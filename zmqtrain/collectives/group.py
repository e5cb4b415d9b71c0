"""Be the half of a communicator that lives in its port's thread: what comes, who is lost, what differs.

Rule 1: all of it happens in the port's thread; other threads come in by `Endpoint.port.call`.
Rule 2: what ends a communicator ends it on all ranks: who knows first tells the others, whatever it is (BROKEN), and
all that is pending or comes later raises the same.
Rule 3: who has closed its communicator is not lost: only who needs it from then on fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.collectives.calls import Call, Calls, Phases
from zmqtrain.collectives.matching import CLOSING, Matching
from zmqtrain.collectives.requests import Request
from zmqtrain.collectives.steps import HUB
from zmqtrain.collectives.transfers import ANY_SOURCE, Transfer
from zmqtrain.collectives.wire import COPIED_BELOW_BYTES, Head, Kind
from zmqtrain.core.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    FramingError,
    PeerLost,
    RemoteProtocolError,
    ZmqTrainError,
)

logger = logging.getLogger(__name__)

EXPLAIN_SECONDS = 0.5
"""So long a wait that ran out waits for the others to say what they do."""

_OF_CALLS = frozenset((Kind.PART, Kind.CONSUMED, Kind.CALLED, Kind.WAITING, Kind.DOING, Kind.FAILED))
_LEFT = "it has closed its communicator"
_LONGEST_REASON = 400


class Post(Protocol):
    """What a group needs of its endpoint."""

    def send(self, rank: int, context: int, head: Head, values: memoryview | None) -> int:
        """Send one message to a rank of the port; return its bytes."""

    def reduce(self, context: int, head: Head, values: memoryview) -> int:
        """Have the hub reduce a part of a call; return the message's bytes."""

    def note_lost(self, rank: int, why: str) -> None:
        """Count a rank of the port among the lost."""

    def note_difference(self, context: int) -> None:
        """Remember that a communicator ended though all who are in it live."""


@dataclass(slots=True)
class Traffic:
    """What a communicator has moved. bytes: of messages with their heads; values: bytes of arrays alone."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    values_sent: int = 0
    values_received: int = 0

    def count_sent(self, size: int, values: int) -> None:
        """Count a message of so many bytes."""
        self.messages_sent += 1
        self.bytes_sent += size
        self.values_sent += values

    def count_received(self, head: int, values: int) -> None:
        """Count a message of so many bytes of head and of values."""
        self.messages_received += 1
        self.bytes_received += head + values
        self.values_received += values


@dataclass(slots=True)
class _Question:
    request: Request
    waited_seconds: float
    unanswered: set[int]
    until: float | None
    answer: Callable[[CollectiveTimeout | None], object]
    asked: int = 0  # which time of asking is for it: answers to earlier ones say nothing of now


class Group:
    """One communicator of an endpoint.

    context: tells its messages from those of others on the same port.  members: the port's ranks, by rank here.
    names: what people call them.
    """

    def __init__(self, post: Post, context: int, members: tuple[int, ...], rank: int, names: tuple[str, ...]) -> None:
        self.context, self.members, self.size, self.rank, self.names = context, members, len(members), rank, names
        self._endpoint = post
        self.traffic = Traffic()
        self.broken: ZmqTrainError | None = None
        self.calls = Calls(self.rank, self.size, self.name, self._say_doing)
        self.matching = Matching(self.rank, self.name)
        self._gone: dict[int, PeerLost] = {}  # who has closed its communicator; the hub
        self._last = ""
        self._doing: Call | Transfer | None = None  # what it did last, as long as that goes on
        self._questions: list[_Question] = []

    def name(self, rank: int) -> str:
        """Return what people call a rank."""
        return f"rank {rank} ({self.names[rank]})" if 0 <= rank < self.size else "the hub"

    # ------------------------------------------------------------------ what this rank asks for

    def begin(self, request: Request, text: str, phases: Phases, confirm: bool, operation: str) -> None:
        """Make the next collective call."""
        if self.broken is not None:
            request.complete(self.broken)
            return
        try:
            call = request.doing = self.calls.begin(text, phases, request, confirm=confirm, operation=operation)
            self._last, self._doing = f"{text} (call number {call.number})", call
        except Exception as error:
            self._fail(error, f"call number {self.calls.number}, {text}")
        self.settle()

    def post(self, request: Request, transfer: Transfer, post: Callable[[], object]) -> None:
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

    def _send(self, to: int, head: Head, values: memoryview | None) -> None:
        if to != self.rank:
            if to == HUB:
                assert values is not None
                size = self._endpoint.reduce(self.context, head, values)
            else:
                size = self._endpoint.send(self.members[to], self.context, head, values)
            self.traffic.count_sent(size, 0 if values is None else values.nbytes)
            return
        if values is not None and values.nbytes < COPIED_BELOW_BYTES:
            values = memoryview(bytes(values))
        self.matching.hear(self.rank, head, values)

    # ------------------------------------------------------------------ what comes

    def hear(self, source: int, head: Head, values: memoryview | None) -> None:
        """Take a message of another rank in."""
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
                self._endpoint.note_lost(self.members[source], why)
                error = self._gone[source] = PeerLost(self.names[source], why, source)
                alone = all(rank in self._gone for rank in range(self.size) if rank != self.rank)
                self.matching.lose(source, error, alone)
            elif kind == Kind.TAKE and head.flag == CLOSING:
                self.matching.refused(source, head.number, PeerLost(self.names[source], _LEFT, source))
            else:
                self.matching.hear(source, head, values)
        except FramingError as error:
            self.break_off(RemoteProtocolError(self.name(source), "in a communicator", str(error)))
        except Exception as error:
            self._fail(error, f"{Kind(kind).name} of {self.name(source)}")
        self.settle()

    def on_lost(self, rank: int, why: str) -> None:
        """That rank is gone; this one itself is if it is cut off. The hub's loss is one to those who have it reduce."""
        if rank == HUB:
            self._gone[HUB] = PeerLost(self.name(HUB), why, HUB)
            self.settle()
        elif rank not in self._gone:
            self.break_off(PeerLost(self.names[rank], why, rank))

    def on_tick(self, now: float) -> None:
        """Let time pass."""
        if self.broken is None:
            self.calls.tick(now)
            self.settle()
        for question in list(self._questions):
            if question.until is None:
                question.until = now + EXPLAIN_SECONDS
            elif now >= question.until:
                self._answer(question)

    def _hear_broken(self, head: Head) -> None:
        if head.flag:
            self._endpoint.note_difference(self.context)
            self.break_off(CollectiveMismatch(head.text), tell=False)
        elif head.place == HUB:
            self._endpoint.note_difference(self.context)
            self.break_off(PeerLost(self.name(HUB), head.text, HUB), tell=False)
        elif 0 <= head.place < self.size:
            self._endpoint.note_lost(self.members[head.place], head.text)
            self.break_off(PeerLost(self.names[head.place], head.text, head.place), tell=False)

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
                self._endpoint.note_difference(self.context)
            head = Head(
                Kind.BROKEN,
                flag=0 if lost else 1,
                place=error.rank if isinstance(error, PeerLost) else -1,
                text=(error.why if isinstance(error, PeerLost) else str(error))[:4096],
            )
            for to in range(self.size):
                if to != self.rank and to not in self._gone:
                    self._send(to, head, None)
        self.settle()
        for question in list(self._questions):
            self._answer(question)

    def stop_receiving(self) -> None:
        """Refuse the messages that nobody here has asked for: this rank is about to leave."""
        self.matching.stop_receiving()
        self.settle()

    def leave(self, error: BaseException | None) -> None:
        """Tell the others that nothing comes from this rank any more. error: what ended its work, if anything did."""
        said = "" if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")[:_LONGEST_REASON]
        text = "".join(character if character.isprintable() else " " for character in said)
        for to in range(self.size):
            if to != self.rank:
                self._send(to, Head(Kind.LEAVING, text=text), None)
        if self.broken is None:
            self.broken = PeerLost(self.names[self.rank], _LEFT, self.rank)
            self.calls.fail(self.broken)
            self.matching.fail(self.broken)
            self.settle()

    def abandon(self, error: ZmqTrainError) -> None:
        """End what waits for anything here; once the port's thread has ended, from any thread."""
        self.broken = self.broken or error
        for machine in (self.calls, self.matching):
            machine.fail(error)
            machine.outgoing.clear()
        self.settle()

    # ------------------------------------------------------------------ why it takes so long

    def explain(
        self, request: Request, waited_seconds: float, answer: Callable[[CollectiveTimeout | None], object]
    ) -> None:
        """Ask all others what they do, and have `answer` called with an error that says why a request is not over."""
        others = {rank for rank in range(self.size) if rank != self.rank and rank not in self._gone}
        question = _Question(request, waited_seconds, others, None, answer)
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
            question.answer(None)
            return
        if isinstance(doing, Call):
            what = f"{request.what} (call number {doing.number})"
            ranks = self._behind(doing, question.unanswered) or doing.waits_for
        else:
            what = request.what
            ranks = (doing.peer,) if doing.peer != ANY_SOURCE else tuple(r for r in range(self.size) if r != self.rank)
        whom = "; ".join(self._describe(rank, doing, question.unanswered) for rank in ranks) or "nobody"
        question.answer(
            CollectiveTimeout(
                f"{what} on {self.name(self.rank)} has waited {question.waited_seconds:.3g} s for {whom}", tuple(ranks)
            )
        )

    def _behind(self, call: Call, unanswered: set[int]) -> tuple[int, ...]:
        """Return the ranks that have not made this call yet."""
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

    def _say_doing(self) -> str:
        if self._doing is None:
            return f"{self._last}, which has ended" if self._last else "nothing yet"
        ranks = self._doing.waits_for if isinstance(self._doing, Call) else ()
        whom = f" and waits for {', '.join(map(self.name, ranks))}" if ranks else ""
        return f"{self._last}, which goes on{whom}"

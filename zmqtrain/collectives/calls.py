"""One rank's part of all collectives in flight (pure: no clock, no sockets, no thread).

1. The n-th collective call of a rank corresponds to the n-th of every other rank. A call has a text that describes it;
   its messages carry the digest of that text. A rank that sees another digest sends its own text, so both know.
2. A rank that waits tells all others after a while, with the text of its call. So two ranks that only wait for each
   other find out too, and all know what the others do.
3. What `hear` and `begin` raise ends all calls. If a caller's operation fails, only its own call ends, on all ranks
   (FAILED); the others go on.
4. Each call has its own windows: at most WINDOW_BYTES of a call are in flight to a rank, so the order in which ranks
   wait cannot block a call. The hub has a window of its own for each rank, which all calls share one after another.
5. A call ends when its algorithm has ended and the receivers have taken all memory that was sent without a copy. With
   `confirm` it ends when they have taken everything: otherwise a rank could end before it hears that calls differ.
6. Messages to send are appended to `outgoing`, ended calls to `finished`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.collectives.algorithms import HUB, Receive, Send, Steps
from zmqtrain.collectives.arrays import as_bytes, dtype_code
from zmqtrain.collectives.matching import Member, Outgoing
from zmqtrain.collectives.wire import CONFIRM, COPIED_BELOW_BYTES, NOTHING, Head, Kind, digest
from zmqtrain.core.errors import CollectiveMismatch, FramingError, OperationError, ZmqTrainError
from zmqtrain.core.types import MAX_FRAME_BYTES

PART_BYTES = MAX_FRAME_BYTES
"""Longer messages are cut."""

WINDOW_BYTES = 4 * PART_BYTES
REPORT_BYTES = WINDOW_BYTES // 2
"""The most bytes in flight to a rank, and after how many more the receiver reports that it has taken them."""


class Part(NamedTuple):
    """A part of something sent. total: bytes of the whole.  start: where in it the part begins.  code: of the values'
    dtype."""

    values: memoryview
    total: int
    start: int
    code: int


@dataclass(slots=True)
class Outflow:
    """What is sent to one rank, in order.

    bounded: there is room for WINDOW_BYTES; else always.  confirm: whatever is sent counts as lent.
    sent, taken: bytes so far; lent: up to here the sender's memory may be in flight.
    """

    bounded: bool = True
    confirm: bool = False
    sent: int = 0
    taken: int = 0
    lent: int = 0
    _waiting: deque[Part] = field(default_factory=deque)

    def put(self, values: memoryview, code: int) -> None:
        """Send these bytes when there is room. code: of their dtype, which may be another by then."""
        total = values.nbytes
        for start in range(0, total or 1, PART_BYTES):
            self._waiting.append(Part(values[start : start + PART_BYTES], total, start, code))

    def next(self) -> Part | None:
        """Return what is sent now; None: nothing waits, or there is no room."""
        if not self._waiting or (self.bounded and self.sent - self.taken >= WINDOW_BYTES):
            return None
        part = self._waiting.popleft()
        self.sent += part.values.nbytes
        if self.bounded and (part.values.nbytes >= COPIED_BELOW_BYTES or self.confirm):
            self.lent = self.sent
        return part

    @property
    def is_done(self) -> bool:
        """Whether all is sent, and none of the sender's memory is in flight."""
        return self.taken >= self.lent and not self._waiting


@dataclass(slots=True)
class Inflow:
    """Parts received from one rank and not yet taken: (values, bytes of the whole, code of their dtype).

    digest: of the sender's call.  reports: the sender is told what is taken (the hub is not).
    """

    digest: int
    reports: bool = True
    parts: deque[tuple[memoryview, int, int]] = field(default_factory=deque)
    taken: int = 0
    _reported: int = 0
    _is_awaited: bool = False

    def put(self, values: memoryview, total: int, code: int, confirm: bool) -> None:
        """Keep a received part. confirm: the sender waits until it is taken, whatever its length."""
        self.parts.append((values, total, code))
        self._is_awaited |= (values.nbytes >= COPIED_BELOW_BYTES or confirm) and self.reports

    def take(self, nbytes: int) -> bool:
        """Count so many bytes as taken; return whether to report the total to the sender now."""
        self.taken += nbytes
        return self._report(self.reports and self.taken - self._reported >= REPORT_BYTES)

    def finish(self) -> bool:
        """Return whether to report to the sender how much was taken, because nothing more will be."""
        return self._report(self._is_awaited and self._reported < self.taken)

    def _report(self, due: bool) -> bool:
        if due:
            self._reported = self.taken
        return due


ASK_AFTER_SECONDS, ASK_AGAIN_SECONDS = 0.25, 1.0
"""When a rank says that it waits, and how often it says so again."""

_REMEMBERED = 256  # ended calls with their text
_AHEAD = 1 << 16  # how far ahead of this rank's last call another one may be

Phase = tuple[Steps, np.dtype[Any]]
Phases = Generator[Phase, None, Callable[[], Any] | None]
"""The algorithms that a call plays one after another, each with the dtype of what it sends and receives. What their
generator returns makes the call's result, in the thread that asks for it; None: the result is None."""


def what_calls_share(*texts: str) -> str:
    """Return what the arrays of calls must have in common, by the calls' texts or names."""
    names = {text.partition("(")[0] for text in texts}
    if names <= {"gatherv", "scatterv", "all_to_allv"}:
        return "arrays of one dtype that differ along the first axis only"
    (name, *others) = names
    uneven = f" ({name}v takes arrays of different lengths)" if not others and name in ("gather", "all_to_all") else ""
    return f"arrays of one shape and dtype{uneven}"


@dataclass(slots=True, eq=False)
class Call:
    """One collective on one rank.

    confirm: it ends only after all receivers of its messages.  text: its description, "" until this rank has made the
    call.  operation: of the hub, if it reduces.  ended: it is over, well or not.  error: why not well.  owner: set by
    the caller.
    """

    number: int
    text: str = ""
    digest: int = 0
    confirm: bool = False
    operation: str = ""
    ended: bool = False
    error: ZmqTrainError | None = None
    owner: Any = None
    _make: Callable[[], Any] | None = field(default=None, init=False)
    _phases: Phases | None = field(default=None, init=False)
    _steps: Steps | None = field(default=None, init=False)
    _dtype: np.dtype[Any] | None = field(default=None, init=False)
    _code: int = field(default=0, init=False)
    _wanted: Receive | None = field(default=None, init=False)
    _filled: int = field(default=0, init=False)
    _filling: NDArray[np.uint8] | None = field(default=None, init=False)
    _sources: dict[int, Inflow] = field(default_factory=dict, init=False)
    _streams: dict[int, Outflow] = field(default_factory=dict, init=False)
    _moved: bool = field(default=True, init=False)
    _ask_at: float = field(default=0.0, init=False)

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The ranks that it cannot go on, or end, without."""
        if self._wanted is not None:
            return (self._wanted.source,)
        return tuple(to for to, stream in self._streams.items() if not stream.is_done)

    def result(self) -> Any:
        """Make the result of a call that has ended well, once: what it was made of is freed."""
        made = None if self._make is None else self._make()
        self._make = None
        return made


class Calls:
    """One rank's part of the collectives of a communicator, its `member`."""

    def __init__(self, rank: int, size: int, member: Member) -> None:
        self.rank = rank
        self.outgoing: list[Outgoing] = []
        self.finished: list[Call] = []
        self.number = 0
        """Of this rank's last call; the first one is 1."""
        self.others: dict[int, tuple[int, str]] = {}
        """By rank the number of its last call, and what it did last, as far as it was asked."""
        self.asked = 0
        """How often all others were asked; each answers each time, in order."""
        self.answered: dict[int, int] = {}
        """By rank, how often it has."""
        self._name, self._doing = member.name, member.doing
        self._other_ranks = [other for other in range(size) if other != rank]
        self._calls: dict[int, Call] = {}
        self._texts: dict[int, str] = {}
        self._theirs: dict[int, dict[int, str]] = {}  # by number and rank: calls that this rank has not made yet
        self._failed: dict[int, tuple[int, int, OperationError]] = {}  # by number the rank, the digest, and why
        self._at_hub: deque[Call] = deque()  # those that the hub reduces for: it is the first one's turn

    @property
    def pending(self) -> list[Call]:
        """The calls that this rank has made and that have not ended."""
        return [call for call in self._calls.values() if call.text]

    def begin(
        self, text: str, phases: Phases, owner: Any = None, *, confirm: bool = False, operation: str = ""
    ) -> Call:
        """Make the next call. Raise CollectiveMismatch if another rank's call of this number is known to differ."""
        self.number += 1
        call = self._calls.setdefault(self.number, Call(self.number))
        call.text, call.digest, call.owner, call._phases = text, digest(text), owner, phases
        call.confirm, call.operation = confirm, operation
        self._texts[self.number] = text
        self._forget_old_texts()
        for source, theirs in self._theirs.pop(self.number, {}).items():
            self._compare(self.number, source, theirs)
        different = [rank for rank, source in call._sources.items() if source.digest != call.digest]
        for rank in different:
            self._tell(rank, call.number)  # the answer ends this call
        if self.number in self._failed:
            different += self._hear_failed(*self._failed.pop(self.number), self.number)
        if not different and not call.ended:
            self._advance(call)
        return call

    def _forget_old_texts(self) -> None:
        if len(self._texts) > 2 * _REMEMBERED:
            kept = self.number - _REMEMBERED
            self._texts = {n: text for n, text in self._texts.items() if n > kept or n in self._calls}
            self._failed = {n: failed for n, failed in self._failed.items() if n > kept}

    def fail(self, error: ZmqTrainError) -> None:
        for call in self.pending:
            self._end(call, error)
        self._calls.clear()
        self._at_hub.clear()

    def tick(self, now: float) -> None:
        """Let time pass: calls in which nothing has moved for a while tell the others what they wait for."""
        for call in self.pending:
            if call._moved:
                call._moved, call._ask_at = False, now + ASK_AFTER_SECONDS
            elif now >= call._ask_at:
                call._ask_at = now + ASK_AGAIN_SECONDS
                self.ask(call)

    def ask(self, call: Call | None) -> None:
        """Ask all others what they do; tell them that this call waits, if one is given."""
        place = min(call.waits_for, default=-1) if call else -1
        head = Head(Kind.WAITING, number=call.number if call else 0, place=place, text=call.text if call else "")
        self.asked += 1
        self._say_to_all(head)

    # ------------------------------------------------------------------ received messages

    def hear(self, source: int, head: Head, values: memoryview = NOTHING) -> None:
        """Handle a message of another rank.

        Raise CollectiveMismatch if its call differs from this rank's, FramingError for an invalid message, and what an
        algorithm raises.
        """
        kind, number = head.kind, head.number
        if kind == Kind.PART:
            self._hear_part(source, head, values)
        elif kind == Kind.CONSUMED:
            if (call := self._calls.get(number)) is not None and source in call._streams:
                stream = call._streams[source]
                stream.taken = head.size
                call._moved = True
                self._pump(call, source, stream)
                self._look_whether_ended(call)
        elif kind == Kind.DOING:
            self.others[source] = (number, head.text)
            self.answered[source] = self.answered.get(source, 0) + 1
        elif kind == Kind.CALLED:
            self._compare(number, source, head.text)
        elif kind == Kind.FAILED:
            error = OperationError(head.text)
            if self.number < number <= self.number + _AHEAD:
                self._failed[number] = source, head.digest, error
            elif number <= self.number:
                self._hear_failed(source, head.digest, error, number)
        elif kind == Kind.WAITING:
            if number:
                self._compare(number, source, head.text)
            self.outgoing.append((source, Head(Kind.DOING, number=self.number, text=self._doing()), NOTHING))

    def _hear_failed(self, source: int, theirs: int, error: OperationError, number: int) -> list[int]:
        """End a call in which the operation failed on another rank; return that rank if its call differs."""
        call = self._calls.get(number)
        if call is None or not call.text:  # it has ended here
            return []
        if theirs != call.digest:
            self._tell(source, number)  # the answer ends this call
            return [source]
        self._end_alone(call, error)
        return []

    def _give_up(self, call: Call, error: OperationError) -> None:
        """The caller's operation failed here: end this call, here and on all others."""
        head = Head(Kind.FAILED, number=call.number, digest=call.digest, text=f"{error} (on {self._name(self.rank)})")
        self._say_to_all(head)
        self._end_alone(call, error)

    def _end_alone(self, call: Call, error: OperationError) -> None:
        self._failed[call.number] = self.rank, call.digest, error
        self._calls.pop(call.number, None)
        self._end(call, error)

    def _hear_part(self, source: int, head: Head, values: memoryview) -> None:
        number = head.number
        call = self._calls.get(number)
        if call is None:
            if number <= self.number:
                if number not in self._texts:  # so long ago that nobody knows
                    return
                if number in self._failed and self._failed[number][1] == head.digest:
                    return
                if digest(self._texts[number]) == head.digest:
                    raise FramingError(f"{self._name(source)} sent more of call {number} than it consists of")
                return self._tell(source, number)
            if number > self.number + _AHEAD:
                raise FramingError(f"{self._name(source)} is at call {number}, this rank at {self.number}")
            call = self._calls[number] = Call(number)
        if call.text and head.digest != call.digest:
            return self._tell(source, number)
        if values.nbytes > head.size or (head.size and not values.nbytes):
            raise FramingError(f"a part of {values.nbytes} bytes of {head.size} of {self._name(source)}")
        from_source = call._sources.get(source)
        if from_source is None:
            from_source = call._sources[source] = Inflow(head.digest, reports=source != HUB)
        from_source.put(values, head.size, head.flag & ~CONFIRM, confirm=head.flag >= CONFIRM)
        if call._wanted is not None and call._wanted.source == source:
            self._advance(call)

    def _compare(self, number: int, source: int, theirs: str) -> None:
        if number > self.number:
            if number <= self.number + _AHEAD:
                self._theirs.setdefault(number, {})[source] = theirs
            return
        ours = self._texts.get(number)
        if ours is None or ours == theirs:
            return
        self._tell(source, number)
        first, second = sorted(((self.rank, ours), (source, theirs)))
        raise CollectiveMismatch(
            f"call number {number} is {first[1]} on {self._name(first[0])} and {second[1]} on {self._name(second[0])}: "
            f"all ranks make the same calls in the same order, with {what_calls_share(ours, theirs)}"
        )

    def _say_to_all(self, head: Head) -> None:
        self.outgoing += [(to, head, NOTHING) for to in self._other_ranks]

    def _tell(self, to: int, number: int) -> None:
        self.outgoing.append((to, Head(Kind.CALLED, number=number, text=self._texts[number]), NOTHING))

    # ------------------------------------------------------------------ the moves

    def _advance(self, call: Call) -> None:
        lent: Any = None
        call._moved = True
        if call._wanted is not None:
            done, lent = self._take(call, call._wanted)
            if not done:
                return
        while True:
            if call._steps is None and not self._next_phase(call):
                break
            assert call._steps is not None
            try:
                step = call._steps.send(lent)
            except StopIteration:
                call._steps = lent = None
                continue
            except OperationError as error:
                return self._give_up(call, error)
            lent = None
            if isinstance(step, Send):
                self._send(call, step)
                continue
            call._wanted = step
            done, lent = self._take(call, step)
            if not done:
                return
        if not call.ended:
            self._look_whether_ended(call)

    def _next_phase(self, call: Call) -> bool:
        assert call._phases is not None
        try:
            call._steps, call._dtype = next(call._phases)
        except StopIteration as end:
            call._make = end.value
            for rank, source in call._sources.items():
                if source.finish():
                    self._report(call, rank, source)
            if self._at_hub and self._at_hub[0] is call:
                self._at_hub.popleft()
                if self._at_hub:
                    self._pump(self._at_hub[0], HUB, self._at_hub[0]._streams[HUB])
            return False
        call._code = dtype_code(call._dtype)
        return True

    def _take(self, call: Call, wanted: Receive) -> tuple[bool, Any]:
        """Take the awaited message: (whether all of it was there, the values for the generator)."""
        source = call._sources.get(wanted.source)
        if source is None or not source.parts:
            return False, None
        assert call._dtype is not None
        nbytes = wanted.values * call._dtype.itemsize
        values, total, code = source.parts[0]
        if total != nbytes or code != call._code:
            raise CollectiveMismatch(
                f"call number {call.number}, {call.text}: {self._name(wanted.source)} sent {total} bytes, other than"
                f" the {nbytes} of {call._dtype} that {self._name(self.rank)} awaits"
            )
        if call._filling is not None or values.nbytes < total:
            return self._fill(call, wanted, source, total)
        source.parts.popleft()
        call._wanted = None
        self._consume(call, wanted.source, source, total)
        if wanted.into is None:
            return True, np.frombuffer(values, call._dtype)
        wanted.into.view(np.uint8)[:] = np.frombuffer(values, np.uint8)
        return True, None

    def _fill(self, call: Call, wanted: Receive, source: Inflow, total: int) -> tuple[bool, Any]:
        """Take the received parts of a message that was cut."""
        if call._filling is None:
            room = np.empty(wanted.values, call._dtype) if wanted.into is None else wanted.into
            call._filling, call._filled = room.view(np.uint8), 0
        filling, start = call._filling, call._filled
        while source.parts and start < total:
            values, size, _ = source.parts.popleft()
            if size != total or start + values.nbytes > total:
                raise FramingError(f"{self._name(wanted.source)} sent parts that do not fit in {call.text}")
            filling[start : start + values.nbytes] = np.frombuffer(values, np.uint8)
            start += values.nbytes
            self._consume(call, wanted.source, source, values.nbytes)
        call._filled = start
        if start < total:
            return False, None
        call._wanted = call._filling = None
        if wanted.into is not None:
            return True, None
        filling.flags.writeable = False
        return True, filling.view(call._dtype)

    def _consume(self, call: Call, rank: int, source: Inflow, nbytes: int) -> None:
        if source.take(nbytes):
            self._report(call, rank, source)

    def _report(self, call: Call, rank: int, source: Inflow) -> None:
        self.outgoing.append((rank, Head(Kind.CONSUMED, number=call.number, size=source.taken), NOTHING))

    def _send(self, call: Call, step: Send) -> None:
        to = step.to
        stream = call._streams.get(to)
        if stream is None:
            stream = call._streams[to] = Outflow(bounded=to != HUB, confirm=call.confirm)
            if to == HUB:
                self._at_hub.append(call)
        stream.put(as_bytes(step.values), call._code)
        self._pump(call, to, stream)

    def _pump(self, call: Call, to: int, stream: Outflow) -> None:
        """Send what there is room for; to the hub when it is this call's turn."""
        if to == HUB and self._at_hub[0] is not call:
            return
        confirm = CONFIRM if call.confirm else 0
        text = call.operation if to == HUB else ""
        while (part := stream.next()) is not None:
            head = Head(Kind.PART, call.number, part.total, part.start, call.digest, part.code | confirm, text)
            self.outgoing.append((to, head, part.values))

    def _look_whether_ended(self, call: Call) -> None:
        """End a call after its algorithm, if none of its memory is in flight."""
        if call._wanted is not None or call._steps is not None or not call.text:
            return
        if all(stream.is_done for stream in call._streams.values()):
            for rank, source in call._sources.items():
                if source.parts:
                    raise FramingError(f"{self._name(rank)} sent more of call {call.number} than it consists of")
            self._calls.pop(call.number, None)
            self._end(call, None)

    def _end(self, call: Call, error: ZmqTrainError | None) -> None:
        call.ended, call.error = True, error
        call._sources.clear()
        call._streams.clear()
        call._phases = call._steps = call._wanted = call._filling = None
        self.finished.append(call)

"""The graph of operations and the variables that they share, and the trace of a run (pure: no thread, clock or lock).

1. The graph ends in the state of the serial execution: operations that share a variable which one of them changes run
   in the order in which they were pushed; all others may run at the same time.
2. Of the operations that may run, the highest priority is taken first, and of equals the one pushed first.
3. A failed operation leaves its failure in the variables that it would have changed. An operation that reads or changes
   one of these does not run, and leaves the failure in its own. A variable stays failed until it is given a value.
4. The graph never calls an operation's work: it hands it out (`take`) and is told how it ended (`finish`).
5. A trace is JSON in the Trace Event Format, for chrome://tracing and ui.perfetto.dev. An operation that ran on a
   thread is on that thread's track. One that ended later (`push_async`) is on a track of its category, as many as ran
   at once. An arrow leads from each operation to those that waited for it. Times are of the monotonic clock.
Source: the dependency engine of MXNet (Chen et al. 2015, sec. 3.2; its `src/engine/threaded_engine.h`). Rule 3 is
Legion's poison and Ray's object errors, not MXNet's, where the first wait clears a failure. Trace Event Format (Google,
2016), sections "Complete Events", "Metadata Events" and "Flow Events".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

from zmqtrain.core.errors import EngineError

UNTOLD_FAILURES = 64
"""So many failures that nobody was told of are kept, the earliest: a traceback holds all that its frames hold."""


class State(Enum):
    """Where an operation is; the values are for sentences."""

    WAITING = "waiting for others"
    READY = "ready to run"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, and in which operation: `number` is its place in the order of pushing.

    traceback: the error's own, of where it happened, however often it is raised.
    """

    number: int
    operation: str
    error: BaseException
    traceback: TracebackType | None = None


class VariableOwner(Protocol):
    """Who decides whether a variable may be looked at now: the graph, or the engine around it."""

    def read_value(self, variable: Variable) -> Any:
        """Return the value; raise EngineError if the caller may not read it now, or the error it failed with."""

    def write_value(self, variable: Variable, value: Any) -> None:
        """Set the value; raise EngineError if the caller may not change it now."""


class Variable:
    """What operations read and change: a value, or only a name for something that lies elsewhere (a file, a wire).

    name: for messages and traces.  version: how many operations that change it have run, and values were given to it.
    """

    __slots__ = ("__weakref__", "failure", "held", "name", "owner", "readers", "version", "writer")

    def __init__(self, owner: VariableOwner, value: Any, name: str) -> None:
        self.owner, self.held, self.name, self.version = owner, value, name, 0
        self.failure: Failure | None = None
        self.writer: Operation | None = None
        """The last operation pushed that changes it, while that is not done."""
        self.readers: dict[Operation, None] = {}
        """The operations pushed since then that read it and are not done, in order."""

    @property
    def value(self) -> Any:
        """The value. An operation sees those of the variables that it has declared, and sets those it has declared to
        change; outside of operations it is seen when nothing that changes it is unfinished, and set when nothing that
        reads or changes it is. Reading a failed variable raises what it failed with; setting it mends it.

        Raise EngineError where this does not hold.
        """
        return self.owner.read_value(self)

    @value.setter
    def value(self, value: Any) -> None:
        self.owner.write_value(self, value)

    def __repr__(self) -> str:
        return f"<variable {self.name}, version {self.version}{', failed' if self.failure else ''}>"


@dataclass(eq=False, repr=False, slots=True)
class Operation:
    """One pushed piece of work. read, mutate: each variable once, and in `mutate` only if it is in both.

    after: the numbers of the operations that it had to wait for when it was pushed.  holds: how many of them are not
    done.  work: never called here.
    """

    number: int
    work: Any
    read: tuple[Variable, ...]
    mutate: tuple[Variable, ...]
    priority: float
    name: str
    category: str
    state: State = State.WAITING
    after: tuple[int, ...] = ()
    followers: list[Operation] = field(default_factory=list)
    holds: int = 0
    failure: Failure | None = None

    def is_done(self) -> bool:
        return self.state is State.DONE

    def __lt__(self, other: Operation) -> bool:
        return (-self.priority, self.number) < (-other.priority, other.number)

    def __repr__(self) -> str:
        return f"<operation {self.name}, {self.state.value}>"


class Graph:
    """The operations that were pushed and are not done, and what each waits for."""

    def __init__(self) -> None:
        self.unfinished: dict[int, Operation] = {}
        """By number, in the order of pushing."""
        self.ready: list[Operation] = []
        """A heap of those that may be taken now."""
        self.pushed = 0
        """How many operations were pushed so far: the number of the next one."""
        self._failed: WeakSet[Variable] = WeakSet()
        self._untold: dict[int, Failure] = {}

    def push(
        self,
        work: Any,
        read: Iterable[Variable] = (),
        mutate: Iterable[Variable] = (),
        priority: float = 0,
        name: str | None = None,
        category: str = "compute",
    ) -> Operation:
        """Add an operation after all that were pushed before it, and return it (done already, if it cannot run for the
        failure of a variable). Cost: what it has to wait for.
        """
        changed = tuple(dict.fromkeys(mutate))
        seen = tuple(variable for variable in dict.fromkeys(read) if variable not in changed)
        operation = Operation(self.pushed, work, seen, changed, priority, name or f"operation {self.pushed}", category)
        self.pushed += 1
        self.unfinished[operation.number] = operation
        before: dict[Operation, None] = {}
        for variable in seen:
            if variable.writer is not None:
                before[variable.writer] = None
            variable.readers[operation] = None
        for variable in changed:
            before |= variable.readers
            if variable.writer is not None:
                before[variable.writer] = None
            variable.writer = operation
            variable.readers = {}
        for earlier in before:
            earlier.followers.append(operation)
        operation.after = tuple(sorted(earlier.number for earlier in before))
        operation.holds = len(before)
        if not before:
            self._release([operation])
        return operation

    def take(self) -> Operation | None:
        """Return the operation to run next, which is running from now on; None if there is none that may run."""
        if not self.ready:
            return None
        operation = heappop(self.ready)
        operation.state = State.RUNNING
        return operation

    def finish(
        self, operation: Operation, error: BaseException | None = None, value: Any = None
    ) -> tuple[Operation, ...]:
        """Say that a running operation has ended, and how: `value`, unless None, is the new one of the first variable
        that it changes. Return what is done by it: itself, and what cannot run because it failed.
        """
        for variable in operation.mutate:
            variable.version += 1
        if error is not None:
            self._fail(operation, error)
        elif value is not None and operation.mutate:
            operation.mutate[0].held = value
        return (operation, *self._release(self._retire(operation)))

    def drop(self, error: BaseException) -> tuple[Operation, ...]:
        """Give up all operations that do not run yet, and return them: they have failed with this error, of which
        nobody needs to be told but who asks for what they would have changed."""
        dropped = tuple(each for each in self.unfinished.values() if each.state is not State.RUNNING)
        self.ready.clear()
        for operation in dropped:
            operation.failure = Failure(operation.number, operation.name, error)
        for operation in self.unfinished.values():
            operation.followers = []
        for operation in dropped:
            self._retire(operation)
        return dropped

    def holding_up(self, waited_for: Sequence[Operation]) -> list[Operation]:
        """Return those running or ready that all of `waited_for` waits for, in the order of pushing."""
        wanted = {operation.number for operation in waited_for}
        for operation in reversed(self.unfinished.values()):  # what waits for something was pushed after it
            if any(later.number in wanted for later in operation.followers):
                wanted.add(operation.number)
        return [
            operation
            for operation in self.unfinished.values()
            if operation.number in wanted and operation.state is not State.WAITING
        ]

    def read_value(self, variable: Variable) -> Any:
        if variable.writer is not None:
            raise EngineError(
                f"{variable.name} is about to be changed by {variable.writer.name} ({variable.writer.state.value}): "
                f"call engine.wait(variable) before you look at it, or look at it in an operation that reads it"
            )
        if variable.failure is not None:
            raise self.tell(variable.failure)
        return variable.held

    def write_value(self, variable: Variable, value: Any) -> None:
        busy = variable.writer or next(iter(variable.readers), None)
        if busy is not None:
            raise EngineError(
                f"{variable.name} is in use by {busy.name} ({busy.state.value}): set it in an operation that mutates "
                f"it, or call engine.wait_all() before"
            )
        variable.held, variable.failure = value, None
        variable.version += 1
        self._failed.discard(variable)

    def tell(self, failure: Failure) -> BaseException:
        """Return the error to raise for a failure; `wait_all` need not raise it once more for who has handled it."""
        self._untold.pop(failure.number, None)
        return failure.error.with_traceback(failure.traceback)

    def tell_all(self) -> BaseException | None:
        """Return the error of the first operation that failed, of all that some variable still carries or nobody was
        told of; None if all is well. From now on everybody was told."""
        failures = self._untold | {each.failure.number: each.failure for each in self._failed if each.failure}
        self._untold.clear()
        return self.tell(failures[min(failures)]) if failures else None

    def _fail(self, operation: Operation, error: BaseException) -> None:
        operation.failure = Failure(operation.number, operation.name, error, error.__traceback__)
        if len(self._untold) < UNTOLD_FAILURES:
            self._untold[operation.number] = operation.failure

    def _retire(self, operation: Operation) -> list[Operation]:
        operation.state = State.DONE
        del self.unfinished[operation.number]
        for variable in operation.read:
            variable.readers.pop(operation, None)
        for variable in operation.mutate:
            if variable.writer is operation:
                variable.writer = None
            if operation.failure is not None:
                variable.failure = operation.failure
                self._failed.add(variable)
        freed = []
        for follower in operation.followers:
            follower.holds -= 1
            if follower.holds == 0:
                freed.append(follower)
        operation.followers = []
        operation.work = None
        return freed

    def _release(self, freed: list[Operation]) -> list[Operation]:
        """Make ready what nothing holds any more; return what is done instead, since a variable of it has failed."""
        skipped = []
        for operation in freed:  # grows meanwhile: what waited for a skipped one may be free now
            failures = [each.failure for each in (*operation.read, *operation.mutate) if each.failure is not None]
            if failures:
                operation.failure = min(failures, key=lambda failure: failure.number)
                skipped.append(operation)
                freed += self._retire(operation)
            else:
                operation.state = State.READY
                heappush(self.ready, operation)
        return skipped


JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """When one operation ran, in seconds.

    number: its place in the order of pushing.  track: the thread's name; None if its end was told later.
    after: the numbers of those it waited for.  facts: what else a viewer shows of it.
    """

    number: int
    name: str
    category: str
    track: str | None
    start_seconds: float
    end_seconds: float
    after: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def chrome_trace(spans: Iterable[Span], process_name: str, process: int = 0) -> JsonObject:
    """Return the trace of one process as an object of the Trace Event Format.

    process: tells processes apart in a trace of several; their names and tracks come with it.
    """
    in_order = sorted(spans, key=lambda span: (span.start_seconds, span.number))
    tracks = _tracks(in_order)
    threads = {name: thread for thread, name in enumerate(sorted(set(tracks.values())), start=1)}
    events: list[JsonObject] = [_metadata(process, 0, "process_name", {"name": process_name})]
    for name, thread in threads.items():
        events.append(_metadata(process, thread, "thread_name", {"name": name}))
        events.append(_metadata(process, thread, "thread_sort_index", {"sort_index": thread}))
    ended: dict[int, Span] = {span.number: span for span in in_order}
    for span in in_order:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                "pid": process,
                "tid": threads[tracks[span.number]],
                "ts": _microseconds(span.start_seconds),
                "dur": _microseconds(span.end_seconds) - _microseconds(span.start_seconds),
                "args": {"operation": span.number, **span.facts},
            }
        )
        for number in span.after:
            if (earlier := ended.get(number)) is not None:
                events += _arrow(process, earlier, threads[tracks[number]], span, threads[tracks[span.number]])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def merge_traces(traces: Sequence[JsonObject]) -> JsonObject:
    """Return one trace of several, of one machine: each becomes a process of its own, in their order."""
    events = [event | {"pid": process} for process, trace in enumerate(traces) for event in trace["traceEvents"]]
    for event in events:
        if "id" in event:
            event["id"] = f"{event['pid']}.{event['id']}"
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, trace: JsonObject) -> None:
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def _tracks(in_order: Sequence[Span]) -> dict[int, str]:
    """Return the name of each operation's track; those without a thread get the first free one of their category."""
    tracks: dict[int, str] = {}
    free_from: dict[str, list[float]] = {}
    for span in in_order:
        if span.track is not None:
            tracks[span.number] = span.track
            continue
        lanes = free_from.setdefault(span.category, [])
        lane = next((lane for lane, free in enumerate(lanes) if free <= span.start_seconds), len(lanes))
        lanes[lane : lane + 1] = [span.end_seconds]
        tracks[span.number] = f"{span.category} {lane}"
    return tracks


def _arrow(process: int, earlier: Span, from_thread: int, span: Span, to_thread: int) -> list[JsonObject]:
    shared = {"name": "waits for", "cat": "dependency", "id": f"{earlier.number}-{span.number}", "pid": process}
    start, end = _microseconds(earlier.start_seconds), _microseconds(earlier.end_seconds)
    return [  # the arrow begins inside the slice that it comes from: at its very end it would be of the next one
        {"ph": "s", **shared, "tid": from_thread, "ts": max(start, end - 1e-3)},
        {"ph": "f", "bp": "e", **shared, "tid": to_thread, "ts": _microseconds(span.start_seconds)},
    ]


def _metadata(process: int, thread: int, name: str, facts: JsonObject) -> JsonObject:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": facts}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)

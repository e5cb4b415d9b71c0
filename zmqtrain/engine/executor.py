"""Runs what a graph allows on threads: push operations, wait for variables, write a trace.

1. One lock guards the graph; an operation runs outside of it, and nothing waits inside an operation.
2. An operation touches the values of the variables that it declares, and of no others.
3. An exception is raised, unchanged, to the callers that wait for a variable that it kept from being changed.
4. `on_complete` of an asynchronous operation may come from any thread; the first call counts, a second one raises.
Source: MXNet's engine (Chen et al. 2015, sec. 3.2): `Push`, `PushAsync` with `on_complete`, `WaitForVar`, `WaitForAll`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from zmqtrain.core.errors import ConfigError, EngineError, EngineTimeout
from zmqtrain.engine.graph import Graph, Operation, Span, State, Variable, chrome_trace, write_trace


class Request(Protocol):
    """A request in flight, as a communicator's non-blocking calls return it."""

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        """Have `call(request)` called once it is over."""

    def wait(self) -> Any:
        """Return its result, or raise what it failed with."""


class Completion:
    """What an operation of `push_async` calls when it has ended, once, from any thread: with an error, or with a value
    for its first changed variable. The first call counts."""

    def __init__(self, engine: Engine, operation: Operation) -> None:
        self._engine, self._operation = engine, operation
        self._once = threading.Lock()  # acquired by the first call, for good

    def __call__(self, error: object = None, value: Any = None) -> None:
        if error is None or isinstance(error, BaseException):
            is_first = self.end(error, value)
        else:
            what = f"on_complete got {error!r} for an error: pass an exception, or on_complete(value=...)"
            is_first = self.end(EngineError(what))
        if not is_first:
            raise EngineError(f"on_complete of {self._operation.name} was called twice")

    def end(self, error: BaseException | None, value: Any = None) -> bool:
        """End the operation; False if it has ended before."""
        if not self._once.acquire(blocking=False):
            return False
        self._engine.finish(self._operation, error, value)
        return True


def end_with_request(begin: Callable[[], Request], on_complete: Completion) -> None:
    """Begin a request, and end the operation when it is over, as it ends."""

    def over(request: Request) -> None:
        try:
            value = request.wait()
        except BaseException as error:
            on_complete(error)
        else:
            on_complete(value=value)

    begin().add_done_callback(over)


logger = logging.getLogger(__name__)

TRACED_OPERATIONS = 100_000
"""A trace holds so many operations, the latest: some 75 MB of memory, and 100 MB of JSON."""

NAMED_IN_TIMEOUT = 4


class Engine:
    """Runs pushed operations on `workers` threads, in an order that leaves what pushing order would have left.

    workers: as many threads (by default one for each core, at least two).  name: of the threads, and of the process in
    a trace.  trace: keep what ran when (the last 100,000 operations), for `write_trace`.
    Raise ConfigError if workers is less than 1.
    """

    def __init__(self, workers: int | None = None, *, name: str = "engine", trace: bool = False) -> None:
        count = max(2, os.cpu_count() or 1) if workers is None else workers
        if count < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        self.name = name
        self._graph = Graph()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._waiters: dict[Operation, list[threading.Event]] = {}
        self._variables = 0
        self._closed = self._stopped = False
        self._inside = threading.local()
        self._started: dict[Operation, float] = {}
        self._spans: deque[Span] | None = deque(maxlen=TRACED_OPERATIONS) if trace else None
        self._threads = [
            threading.Thread(target=self._run_worker, name=f"{name} worker {index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def variable(self, value: Any = None, name: str | None = None) -> Variable:
        """Make a variable of this engine; without a value it stands for something that lies elsewhere."""
        with self._lock:
            self._variables += 1
            return Variable(self, value, name or f"variable {self._variables - 1}")

    def push(
        self,
        fn: Callable[[], Any],
        read: Iterable[Variable] = (),
        mutate: Iterable[Variable] = (),
        priority: float = 0,
        name: str | None = None,
        category: str = "compute",
    ) -> None:
        """Have `fn()` run after all that was pushed before and changes what it reads, or uses what it changes.

        read, mutate: the variables that it looks at and that it changes; one in both is changed, one named twice counts
        once. What it returns, unless None, becomes the value of the first of `mutate`.
        priority: of what may run, the highest goes first.  name, category: for messages and the trace.
        From any thread, and from inside operations; it never waits.
        Raise EngineError if the engine is closed, or for a variable of another one.
        """
        self._push(fn, read, mutate, priority, name, category, is_async=False)

    def push_async(
        self,
        fn: Callable[[Completion], Any],
        read: Iterable[Variable] = (),
        mutate: Iterable[Variable] = (),
        priority: float = 0,
        name: str | None = None,
        category: str = "network",
    ) -> None:
        """Have `fn(on_complete)` begin what ends later, when `on_complete` is called: it holds no thread meanwhile.

        `on_complete()`, `on_complete(value=...)` or `on_complete(error)`: once, from any thread, also before `fn`
        returns. An exception of `fn` itself ends the operation too. The rest is as for `push`.
        """
        self._push(fn, read, mutate, priority, name, category, is_async=True)

    def push_request(
        self,
        fn: Callable[[], Request],
        read: Iterable[Variable] = (),
        mutate: Iterable[Variable] = (),
        priority: float = 0,
        name: str | None = None,
        category: str = "network",
    ) -> None:
        """Have `fn()` begin a request, as those of a communicator are: the operation ends when that is over, with its
        result or its error, and holds no thread meanwhile. The rest is as for `push`.
        """
        _check_function(fn)
        self._push(partial(end_with_request, fn), read, mutate, priority, name, category, is_async=True)

    def wait(self, variable: Variable, timeout_seconds: float | None = None) -> Any:
        """Wait until all that was pushed so far and changes this variable is done; return its value.

        What is pushed meanwhile, by another thread or an operation, is not waited for: it may be changing that value.
        Raise the exception of the operation that kept it from being changed (each time, until it is given a value),
        EngineTimeout, or EngineError: inside an operation, for a variable of another engine, or if the engine was
        closed before that operation ran.
        """
        self._check([variable])
        self._refuse_inside(f"wait for {variable.name}")
        with self._lock:
            operation = variable.writer
        if operation is not None:
            self._wait([operation], _deadline(timeout_seconds), variable.name)
        with self._lock:
            failure = variable.failure if operation is None else operation.failure
            if failure is not None:
                raise self._graph.tell(failure)
            return variable.held

    def wait_all(self, timeout_seconds: float | None = None) -> None:
        """Wait until all that was pushed so far is done.

        Raise the exception of the first operation, in the order of pushing, that failed: as long as a variable carries
        it, and once more for what nobody was told of. Raise EngineTimeout, and EngineError inside an operation.
        """
        self._refuse_inside("wait_all")
        self._wait_pushed(_deadline(timeout_seconds))
        with self._lock:
            error = self._graph.tell_all()
        if error is not None:
            raise error

    def close(self, *, drop: bool = False, timeout_seconds: float | None = None) -> None:
        """Take nothing more, wait for all that was pushed as `wait_all` does, and end the threads; twice is once.

        drop: wait for nothing; what does not run yet never does, and what runs goes on by itself. So it is too when the
        time is up, and when a `with` is left by an exception.
        Raise what `wait_all` raises.
        """
        self._refuse_inside("close")
        with self._lock:
            if self._stopped:
                return
            self._closed = True
        finished = False
        try:
            if not drop:
                self._wait_pushed(_deadline(timeout_seconds))
                finished = True
        finally:
            self._stop()
        if finished:
            for thread in self._threads:
                thread.join()
            with self._lock:
                error = self._graph.tell_all()
            if error is not None:
                raise error

    def write_trace(self, path: str | Path) -> None:
        """Write what ran when to a file that chrome://tracing and ui.perfetto.dev open. Raise ConfigError if it was not
        kept (`Engine(trace=True)`)."""
        if self._spans is None:
            raise ConfigError("this engine keeps no trace: make it with Engine(trace=True)")
        with self._lock:
            spans = list(self._spans)
        write_trace(path, chrome_trace(spans, self.name, os.getpid()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(drop=error is not None)

    def read_value(self, variable: Variable) -> Any:
        operation = self._inside_now()
        if operation is None:
            with self._lock:
                return self._graph.read_value(variable)
        if variable not in operation.read and variable not in operation.mutate:
            raise EngineError(f"{operation.name} looks at {variable.name}, which is neither in its read nor its mutate")
        return variable.held

    def write_value(self, variable: Variable, value: Any) -> None:
        operation = self._inside_now()
        if operation is None:
            with self._lock:
                self._graph.write_value(variable, value)
            return
        if variable not in operation.mutate:
            raise EngineError(f"{operation.name} sets {variable.name}, which is not in its mutate")
        variable.held = value

    # Pushing, and the ways in which an operation ends.

    def _push(
        self,
        fn: Callable[..., Any],
        read: Iterable[Variable],
        mutate: Iterable[Variable],
        priority: float,
        name: str | None,
        category: str,
        *,
        is_async: bool,
    ) -> None:
        _check_function(fn)
        if not isinstance(priority, int | float) or priority != priority:
            raise EngineError(f"a priority is a number, higher for what goes first, not {priority!r}")
        read, mutate = _listed("read", read), _listed("mutate", mutate)
        self._check([*read, *mutate])
        with self._lock:
            if self._closed:
                raise EngineError(f"{name or repr(fn)} was pushed to an engine that is closed: push before close()")
            operation = self._graph.push((fn, is_async), read, mutate, priority, name, category)
            if operation.state is State.READY:
                self._work.notify()

    def _run_worker(self) -> None:
        while True:
            with self._lock:
                while (operation := self._graph.take()) is None:
                    if self._stopped:
                        return
                    self._work.wait()
                work, self._started[operation] = operation.work, time.monotonic()
            self._perform(operation, *work)
            del operation, work  # an idle thread holds nothing back

    def _perform(self, operation: Operation, fn: Callable[..., Any], is_async: bool) -> None:
        self._inside.operation = operation
        error: BaseException | None = None
        value = None
        completion = Completion(self, operation) if is_async else None
        try:
            value = fn(completion) if is_async else fn()
        except BaseException as raised:
            error = raised
        finally:
            self._inside.operation = None
        if completion is None:
            self.finish(operation, error, value, track=threading.current_thread().name)
        elif error is not None and not completion.end(error):
            logger.error("%s raised after it had called on_complete", operation.name, exc_info=error)
        error = None  # its traceback holds this frame: without a circle both go when nobody holds the error

    def finish(
        self, operation: Operation, error: BaseException | None, value: Any, *, track: str | None = None
    ) -> None:
        """End an operation. track: the name of the thread that ran it; None if it ended later."""
        ended = time.monotonic()
        if error is not None and not getattr(error, "__notes__", ()):
            error.add_note(f"in {operation.name}, an operation of {self.name}")
        _kept = operation.work, [variable.held for variable in operation.mutate[:1]]  # what it frees, without the lock
        with self._lock:
            started = self._started.pop(operation)
            done = self._graph.finish(operation, error, value)
            if self._spans is not None:
                self._spans.append(_span(operation, track, started, ended))
            self._work.notify(len(self._graph.ready))
            self._wake(done)

    def _wake(self, done: Iterable[Operation]) -> None:
        if self._waiters:
            for operation in done:
                for event in self._waiters.pop(operation, ()):
                    event.set()

    # Waiting.

    def _wait_pushed(self, deadline: float | None) -> None:
        with self._lock:
            pushed = list(self._graph.unfinished.values())
        self._wait(pushed, deadline, "all that was pushed")

    def _wait(self, operations: Sequence[Operation], deadline: float | None, what: str) -> None:
        began = time.monotonic()
        for operation in operations:
            with self._lock:
                if operation.is_done():
                    continue
                event = threading.Event()
                self._waiters.setdefault(operation, []).append(event)
            if event.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                continue
            with self._lock:
                if operation.is_done():
                    continue
                self._waiters[operation].remove(event)
                raise self._timeout(operations, what, time.monotonic() - began)

    def _timeout(self, operations: Sequence[Operation], what: str, waited_seconds: float) -> EngineTimeout:
        now = time.monotonic()
        holding = self._graph.holding_up(operations)
        holding.sort(key=lambda operation: operation.state is not State.RUNNING)
        sentences = []
        for operation in holding[:NAMED_IN_TIMEOUT]:
            if operation.state is State.RUNNING:
                is_async = operation.work[1]
                ends = " and on_complete was not called" if is_async else ""
                sentences.append(f"{operation.name} has run for {now - self._started[operation]:.1f} s{ends}")
            else:
                sentences.append(f"{operation.name} has no free worker of {len(self._threads)}")
        more = len(holding) - len(sentences)
        message = f"waited {waited_seconds:.1f} s for {what}: {'; '.join(sentences)}{f'; {more} more' * (more > 0)}"
        return EngineTimeout(message, tuple(operation.name for operation in holding))

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            dropped = self._graph.drop(EngineError(f"{self.name} was closed before this was run"))
            self._wake(dropped)
            self._work.notify_all()

    # Who asks.

    def _inside_now(self) -> Operation | None:
        operation: Operation | None = getattr(self._inside, "operation", None)
        return operation

    def _refuse_inside(self, what: str) -> None:
        if (operation := self._inside_now()) is not None:
            raise EngineError(
                f"{operation.name} calls {what}: to wait inside an operation may block all workers for ever; declare "
                f"the variable in read and the engine waits for it, or push the rest as an operation"
            )

    def _check(self, variables: Iterable[Variable]) -> None:
        for variable in variables:
            if not isinstance(variable, Variable):
                raise EngineError(f"{variable!r} is no variable: make one with engine.variable(value)")
            if variable.owner is not self:
                raise EngineError(f"{variable.name} is a variable of another engine")


def _span(operation: Operation, track: str | None, started: float, ended: float) -> Span:
    facts = {
        "read": [variable.name for variable in operation.read],
        "mutate": [variable.name for variable in operation.mutate],
        "priority": operation.priority,
    }
    if operation.failure is not None:
        facts["error"] = repr(operation.failure.error)
    number, after = operation.number, operation.after
    return Span(number, operation.name, operation.category, track, started, ended, after, facts)


def _check_function(fn: object) -> None:
    if not callable(fn) or iscoroutinefunction(fn):
        raise EngineError(f"{fn!r} cannot be pushed: a plain function is expected, that does its work when called")


def _listed(what: str, variables: Iterable[Variable] | Variable) -> list[Variable]:
    if isinstance(variables, Variable):
        raise EngineError(f"{what} is a list: {what}=[...] with {variables.name} in it")
    return list(variables)


def _deadline(timeout_seconds: float | None) -> float | None:
    return None if timeout_seconds is None else time.monotonic() + timeout_seconds

"""The environment of a process: its time and its threads; and the order of what its loop and its threads do.

Brokers and nodes take time and threads from here alone, so that the same classes run for real (`RealEnvironment`) and
in virtual time (`session.virtual`).  `environment` returns that of the running context: a virtual run sets it for its
tasks and threads; everywhere else it is the real one.

Jobs of a codec thread run in the order in which they are submitted, and their results come to the loop in that order.
A service writes `result = await codec(function, ...)` in a coroutine given to `spawn`: it runs at once up to its first
await, and goes on in the loop when the job is done.  A CodecError of a job is raised at the await, because a peer sent
unsound data.  Any other exception is a bug of our own: it ends the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from zmqtrain.core.errors import CodecError, ZmqTrainError
from zmqtrain.core.interfaces import Channel, Clock, Environment, Executor, JobOwner, LoopThread
from zmqtrain.core.priority import stand_back
from zmqtrain.core.types import PeerId
from zmqtrain.transport.key_folder import Access
from zmqtrain.transport.zmq_channels import DealerChannel

logger = logging.getLogger(__name__)

MOST_JOBS = 1 << 17
"""More than all that peers may have open at once: two for each of the most publishes of the most members."""
CLOSE_SECONDS = 60.0

T = TypeVar("T")
Effect = TypeVar("Effect")
Resume = Callable[[Any], None]


# ---------------------------------------------------------------------- the environments


class Worker:
    """One thread that does jobs in the order in which they were submitted: the codec thread of a node and of the hub.

    owner: told of jobs that raised; the worker goes on.  seconds: as in `Executor`.
    """

    def __init__(self, name: str, capacity: int, owner: JobOwner) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: the last
        self._capacity, self._owner = capacity, owner
        self._lock, self._closed = threading.Lock(), False
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], values: int = 0) -> bool:
        with self._lock:
            if self._closed or self._jobs.qsize() >= self._capacity:
                return False
            self._jobs.put(job)
            return True

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Finish the submitted jobs and end; return whether the thread has ended in time."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        stand_back()
        while (job := self._jobs.get()) is not None:
            began = time.thread_time()
            try:
                job()
            except BaseException as error:
                self._owner.on_job_failed(error)
            finally:
                self.seconds += time.thread_time() - began
            del job  # with what it holds, while there is no other


class RealEnvironment:
    """The real time and real threads; a `Dialer` over ZeroMQ. access: this process's keys; None: no keys."""

    clock: Clock = time
    virtual = False
    cpu_seconds = staticmethod(time.thread_time)
    event, condition = threading.Event, threading.Condition
    executor = Worker

    def __init__(self, access: Access | None = None) -> None:
        self._access = access

    def start(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> LoopThread:
        thread = threading.Thread(target=lambda: asyncio.run(main()), name=name, daemon=True)
        thread.start()
        return thread

    def dial(self, address: str, peer: PeerId) -> Channel:
        return DealerChannel(address, peer=peer, access=self._access)


_current: ContextVar[Environment] = ContextVar("environment", default=RealEnvironment())  # noqa: B039


def environment() -> Environment:
    """Return the environment of the running context."""
    return _current.get()


def enter(one: Environment) -> None:
    """Have the running context, and the tasks that it makes from now on, live in this environment."""
    _current.set(one)


class _Clock:
    """The time of the running context: a `Clock`."""

    def monotonic(self) -> float:
        return _current.get().clock.monotonic()

    def sleep(self, seconds: float, /) -> None:
        _current.get().clock.sleep(seconds)

    def thread_time(self) -> float:
        """Return the CPU seconds that the running thread has taken; in virtual time always 0."""
        return _current.get().cpu_seconds()


clock = _Clock()
"""What brokers and sessions use in place of the module `time`."""


# ---------------------------------------------------------------------- the order of effects and jobs


class EffectQueue(Generic[Effect]):
    """The effects of one machine, carried out in order: those that one effect causes come after all earlier ones."""

    def __init__(self, carry_out_one: Callable[[Effect], None]) -> None:
        self._carry_out_one = carry_out_one
        self._effects: deque[Effect] = deque()
        self._carrying_out = False

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carry out these effects; if others are being carried out, later."""
        self._effects.extend(effects)
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._effects:
                self._carry_out_one(self._effects.popleft())
        finally:
            self._carrying_out = False


class Suspension(Generic[T]):
    """What a spawned coroutine awaits. begin: called with `resume`; `resume(result)` lets the coroutine go on."""

    def __init__(self, begin: Callable[[Resume], None]) -> None:
        self.begin = begin

    def __await__(self) -> Generator[Any, Any, T]:
        result: T = yield self
        return result


def spawn(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that awaits nothing but `Suspension`s: now, up to the first one, and on from each."""

    def resume(result: Any = None) -> None:
        try:
            suspension = coroutine.throw(result) if isinstance(result, CodecError) else coroutine.send(result)
        except StopIteration:
            return
        suspension.begin(resume)

    resume()


class CodecExecutor:
    """One thread for the jobs of a broker. stop: set, in the loop, once a job has failed and the broker must end.

    failure: why, if so.
    """

    def __init__(self, name: str, stop: asyncio.Event) -> None:
        self.failure: BaseException | None = None
        self._stop = stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._worker: Executor = environment().executor(name, MOST_JOBS, self)

    @property
    def seconds(self) -> float:
        return self._worker.seconds

    def start(self) -> None:
        """Send results to the running loop."""
        self._loop = asyncio.get_running_loop()

    def __call__(self, work: Callable[..., T], *facts: Any, values: int = 0) -> Suspension[T]:
        """Return what waits for `work(*facts)` in the codec thread; the job is submitted when it is awaited.

        values: as in `Executor.submit`.
        """
        return Suspension(lambda resume: self.submit(partial(work, *facts), resume, values))

    def do(self, work: Callable[..., object], *facts: Any, values: int = 0) -> None:
        """Do `work(*facts)` in the codec thread; nobody waits for it, and a CodecError is ignored."""
        self.submit(partial(work, *facts), None, values)

    def submit(self, work: Callable[[], object], resume: Resume | None, values: int = 0) -> None:
        """Do `work` in the codec thread, then `resume(result or CodecError)` in the loop; both in order."""

        def job() -> None:
            if self.failure is not None:  # what follows a job that failed would be built on nothing
                return
            result: object
            try:
                result = work()
            except CodecError as error:
                result = error
            if resume is not None:
                self._call(partial(self._finish, resume, result))

        # while closing, a copy that has ended may still give the other thread a job
        if not self._worker.submit(job, values) and not self._closing:
            self.on_job_failed(ZmqTrainError(f"the codec thread cannot keep up: {MOST_JOBS} jobs wait"))

    def on_job_failed(self, error: BaseException) -> None:
        """End the broker with this error, because one of its own jobs failed; what is saved stays saved."""
        logger.error("the broker stops: %s", "lack of memory" if isinstance(error, MemoryError) else repr(error))
        self.failure = self.failure or error
        self._call(self._stop.set)

    async def close(self) -> bool:
        """Let the thread finish its jobs and drop their results; return whether it has.

        If not, that is the failure, and the arrays of its last job stay its own.
        """
        self._closing = True
        if await asyncio.to_thread(self._worker.close, CLOSE_SECONDS):
            return True
        why = ZmqTrainError(f"the codec thread has not ended within {CLOSE_SECONDS:g} s: its last job goes on")
        logger.error("%s", why)
        self.failure = self.failure or why
        return False

    def _finish(self, resume: Resume, result: object) -> None:
        if self._closing:
            return
        try:
            resume(result)
        except Exception as error:
            self.on_job_failed(error)

    def _call(self, what: Callable[[], object]) -> None:
        assert self._loop is not None, "jobs are given once the broker runs"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the results of the last jobs
            self._loop.call_soon_threadsafe(what)

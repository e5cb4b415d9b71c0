"""Virtual time for whole processes: their loops are tasks of one virtual loop, their threads run one at a time.

Time stands still while there is something to do, and then jumps to the next timer: minutes run in milliseconds.
A thread runs until it sleeps, waits or ends; then the loop goes on.  So a run is a sequence: the same seeds give the
same bits.  Executors do their jobs inline in the loop, at the end of the time that the job is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass
from math import inf
from typing import Any

from zmqtrain.core.interfaces import Executor, JobOwner, LoopThread
from zmqtrain.session.environment import enter

LOOK_SECONDS = 0.5


class NothingLeft(RuntimeError):
    """Every task waits and no timer is set: a real loop would hang for ever."""


class VirtualClockLoop(asyncio.BaseEventLoop):
    """An event loop whose time starts at 0 and jumps to the next timer when nothing else is left to do.

    `asyncio.Runner(loop_factory=VirtualClockLoop)` runs a coroutine under it.  It has no sockets.  What it is given for
    an executor (`asyncio.to_thread`) is done at once and takes no virtual time.  Raises NothingLeft where a real loop
    would hang for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._set = 0

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._set += 1
        heapq.heappush(self._timers, (when, self._set, timer))
        return timer

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See AbstractEventLoop: only one thread of a virtual run runs at a time."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """See AbstractEventLoop: done at once."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def advance(self, seconds: float) -> bool:
        """Let so much time pass, if nothing else would happen in it; return whether it has."""
        when = self._now + seconds
        if self._stopping or self._ready or (self._timers and self._timers[0][0] <= when):  # type: ignore[attr-defined]
            return False
        self._now = when
        return True

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        if not ready:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise NothingLeft("every task waits, and no timer is set: this would hang for ever")
            self._now = max(self._now, timers[0][0])
            while timers and timers[0][0] <= self._now:
                ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """See BaseEventLoop: a cancelled timer is dropped when its time comes."""

    def _write_to_self(self) -> None:
        """See BaseEventLoop: there is no selector to wake."""

    def __del__(self) -> None:
        """See BaseEventLoop: one that is not closed holds nothing."""


class Ended(BaseException):
    """Unwinds a thread that is killed, or left over at the end of the run; nothing in a thread may catch it."""


class VirtualThread:
    """One thread of a virtual run. token: of its next waking; a waking with another token is obsolete."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread: threading.Thread | None = None
        self.turn = threading.Lock()
        self.turn.acquire()
        self.token = 0
        self.waits = self.ended = self.killed = False


class VirtualTime:
    """The clock, the loop and the threads of one virtual run: a `Clock`."""

    def __init__(self) -> None:
        self.loop = VirtualClockLoop()
        self._turn = threading.Lock()  # the loop's
        self._turn.acquire()
        self._running: VirtualThread | None = None
        self._threads: list[VirtualThread] = []
        self._failure: BaseException | None = None
        self._over = self.loop.create_future()

    @property
    def now(self) -> float:
        return self.loop.time()

    def monotonic(self) -> float:
        return self.loop.time()

    def call_at(self, when: float, what: Callable[[], object]) -> None:
        self.loop.call_at(when, what)

    # ------------------------------------------------------------------ a thread's side

    @property
    def current(self) -> VirtualThread:
        assert self._running is not None, "only a thread of the run waits"
        return self._running

    def sleep(self, seconds: float, /) -> None:
        if not self.loop.advance(max(0.0, seconds)):
            self._wait(seconds)

    def wait(self, seconds: float) -> None:
        """Wait until `wake` is called for the running thread, at most `seconds`."""
        thread = self.current
        thread.waits = True
        try:
            self._wait(seconds)
        finally:
            thread.waits = False

    def _wait(self, seconds: float) -> None:
        thread = self.current
        if seconds < inf:
            self.loop.call_at(self.now + max(0.0, seconds), self._resume, thread, thread.token)
        self._running = None
        self._turn.release()
        thread.turn.acquire()
        if thread.killed:
            raise Ended

    def wake(self, thread: VirtualThread) -> None:
        """End a `wait` of a thread."""
        if thread.waits:
            self.loop.call_soon(self._resume, thread, thread.token)

    # ------------------------------------------------------------------ the loop's side

    def start(self, name: str, body: Callable[[], None], at: float = 0.0) -> VirtualThread:
        """Have a thread begin at a time, in a copy of the running context."""
        thread = VirtualThread(name)
        context = copy_context()
        thread.thread = threading.Thread(
            target=context.run, args=(self._live, thread, body), name=f"zmqtrain-sim-{name}", daemon=True
        )
        self._threads.append(thread)
        self.loop.call_at(max(at, self.now), self._resume, thread, 0)
        thread.thread.start()
        return thread

    def kill(self, thread: VirtualThread) -> None:
        if not thread.ended:
            thread.killed = True
            self.loop.call_soon(self._resume, thread, thread.token)

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.loop.stop()

    def stop(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    async def wait_threads(self, until: float = inf) -> None:
        """Wait until all threads have ended, `stop` was called, or the time is over."""
        if until < inf:
            self.loop.call_at(until, self.stop)
        if self._threads and all(thread.ended for thread in self._threads):
            self.stop()
        await self._over

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task of the loop; what it raises ends the run."""
        task = self.loop.create_task(coroutine)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run until `main` has ended, or, without one, until nothing happens any more; then unwind all threads.

        Raises what `main`, a thread or a callback raised.
        """
        loop, task = self.loop, None
        loop.set_exception_handler(self._callback_failed)
        try:
            if main is not None:
                task = loop.create_task(main())
                task.add_done_callback(lambda _: loop.stop())
            with contextlib.suppress(*([NothingLeft] if main is None else [])):
                loop.run_forever()
        finally:
            self._unwind()
            self._cancel_all()
            loop.close()
        if self._failure is not None:
            raise self._failure
        if task is not None:
            task.result()

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(error := context.get("exception"), Exception) and "future" not in context:
            self.fail(error)

    def _live(self, thread: VirtualThread, body: Callable[[], None]) -> None:
        asyncio._set_running_loop(self.loop)  # the loop itself stands still while a thread runs
        thread.turn.acquire()
        try:
            if not thread.killed:
                body()
        except Ended:
            pass
        except BaseException as error:
            self.fail(error)
        finally:
            thread.ended = True
            if all(one.ended for one in self._threads):
                self.stop()
            self._running = None
            self._turn.release()

    def _resume(self, thread: VirtualThread, token: int) -> None:
        if thread.ended or thread.token != token:
            return
        thread.token += 1
        self._running = thread
        thread.turn.release()
        while not self._turn.acquire(timeout=LOOK_SECONDS):
            pass  # an interrupt is seen between two looks

    def _cancel_all(self) -> None:
        """Cancel all tasks until each has ended."""
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def _unwind(self) -> None:
        self._turn.acquire(blocking=self._running is not None)  # interrupted while a thread ran, or just after
        for thread in self._threads:
            thread.killed = True
            self._resume(thread, thread.token)
            assert thread.thread is not None
            thread.thread.join()


class VirtualCondition(threading.Condition):
    """A condition in virtual time: it needs no lock, for only one thread runs."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__()
        self._clock = clock
        self._waiting: list[VirtualThread] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        return None

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until the predicate holds, at most `timeout` seconds; return what it last gave."""
        until = self._clock.now + (inf if timeout is None else timeout)
        while not (result := predicate()) and self._clock.now < until:
            self.wait(until - self._clock.now)
        return result

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is notified, at most `timeout` seconds; return whether it was."""
        thread = self._clock.current
        self._waiting.append(thread)
        self._clock.wait(inf if timeout is None else timeout)
        notified = thread not in self._waiting
        if not notified:
            self._waiting.remove(thread)
        return notified

    def notify(self, n: int = 1) -> None:
        for thread in self._waiting[:n]:
            self._clock.wake(thread)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class VirtualEvent(threading.Event):
    """An event in virtual time."""

    def __init__(self, clock: VirtualTime) -> None:
        super().__init__()
        self._changed = VirtualCondition(clock)

    def set(self) -> None:
        super().set()
        self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        return bool(self._changed.wait_for(self.is_set, timeout))


class VirtualExecutor:
    """An executor that does its jobs inline in the loop, each at the end of its time."""

    def __init__(self, process: VirtualEnvironment, capacity: int, owner: JobOwner) -> None:
        self.process, self._capacity, self._owner = process, capacity, owner
        self.seconds = 0.0
        self._jobs: deque[tuple[Callable[[], None], float]] = deque()
        self._free_at, self._closed = 0.0, False

    def submit(self, job: Callable[[], None], values: int = 0) -> bool:
        if self._closed or len(self._jobs) >= self._capacity:
            return False
        clock, seconds = self.process.clock, self.process.codec_seconds(values) if values else 0.0
        self._free_at = max(self._free_at, clock.now) + seconds
        self._jobs.append((job, seconds))
        clock.call_at(self._free_at, self._do_next)
        return True

    def _do_next(self) -> None:
        if not self._jobs:
            return  # done by `close`
        job, seconds = self._jobs.popleft()
        self.seconds += seconds
        try:
            job()
        except Exception as error:
            self._owner.on_job_failed(error)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """See Executor: what waits is done at once."""
        self._closed = True
        while self._jobs:
            self._do_next()
        return True


@dataclass(frozen=True)
class _LoopTask:
    """A network thread in virtual time: a task of the run's loop. over: set once it has ended."""

    over: threading.Event

    def join(self, timeout: float, /) -> None:
        self.over.wait(timeout)


class VirtualEnvironment:
    """The environment of one process of a virtual run.

    codec_seconds: the time of a job that encodes, decodes or adds so many values.
    """

    virtual = True

    def __init__(self, clock: VirtualTime) -> None:
        self.clock = clock
        self.codec_seconds: Callable[[int], float] = lambda values: 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def cpu_seconds(self) -> float:
        """See Environment: work takes modelled time alone."""
        return 0.0

    def executor(self, name: str, capacity: int, owner: JobOwner) -> Executor:
        return VirtualExecutor(self, capacity, owner)

    def event(self) -> threading.Event:
        return VirtualEvent(self.clock)

    def condition(self) -> threading.Condition:
        return VirtualCondition(self.clock)

    def start(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> LoopThread:
        task, over = self.clock.loop.create_task(main()), self.event()
        task.add_done_callback(lambda _: over.set())
        self._tasks.append(task)
        return _LoopTask(over)

    def begin(self, name: str, body: Callable[[], None], at: float = 0.0) -> VirtualThread:
        """Have a thread of this process begin at a time."""

        def live() -> None:
            enter(self)
            body()

        return self.clock.start(name, live, at)

    def kill(self) -> None:
        for task in self._tasks:
            task.cancel()

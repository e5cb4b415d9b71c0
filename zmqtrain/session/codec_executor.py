"""The order of what a loop does: effects one after the other, jobs of a codec thread, coroutines that wait for it.

Rule 1: jobs run in the order in which they are submitted, and their results come to the loop in that order.
Rule 2: a service writes `result = await codec(function, ...)` in a coroutine given to `spawn`: it runs at once up to
its first await, and goes on in the loop when the job is done.  Rule 3: a CodecError of a job is raised at the await,
because a peer sent unsound data.  Any other exception is a bug of our own: it ends the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from zmqtrain.core.errors import CodecError, ZmqTrainError
from zmqtrain.session.environment import environment

logger = logging.getLogger(__name__)

MOST_JOBS = 1 << 17
"""More than all that peers may have open at once: two for each of the most publishes of the most members."""
CLOSE_SECONDS = 60.0

T = TypeVar("T")
Effect = TypeVar("Effect")
Resume = Callable[[Any], None]


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
        self._once: set[str] = set()
        self._worker = environment().executor(name, MOST_JOBS, self.fail)

    @property
    def seconds(self) -> float:
        """CPU time of all jobs so far."""
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

    def do_once(self, name: str, work: Callable[[], object]) -> None:
        """Do as `do`, unless a job of this name is waiting already."""
        if name in self._once:
            return
        self._once.add(name)

        def first() -> None:
            self._once.discard(name)
            work()

        self.do(first)

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
            self.fail(ZmqTrainError(f"the codec thread cannot keep up: {MOST_JOBS} jobs wait"))

    def fail(self, error: BaseException | None) -> None:
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
            self.fail(error)

    def _call(self, what: Callable[[], object]) -> None:
        assert self._loop is not None, "jobs are given once the broker runs"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the results of the last jobs
            self._loop.call_soon_threadsafe(what)

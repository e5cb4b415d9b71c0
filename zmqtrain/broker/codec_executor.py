"""The broker's codec thread: jobs in order, and their results in order in the broker's loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from zmqtrain.core.errors import CodecError, ZmqTrainError
from zmqtrain.session.mailbox import Worker

logger = logging.getLogger(__name__)

MOST_JOBS = 1 << 17
"""More than all that peers may have open at once: two for each of the most publishes of the most members."""
CLOSE_SECONDS = 60.0


class CodecExecutor:
    """The codec thread of a broker. broken: called in the loop, once a job has failed and nothing can go on.

    failure: why, if so.  seconds: CPU of all jobs so far.
    """

    def __init__(self, name: str, broken: Callable[[], object]) -> None:
        self.failure: BaseException | None = None
        self.seconds = 0.0
        self._broken = broken
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._once: set[str] = set()
        self._worker = Worker(name, MOST_JOBS, self.fail)

    def start(self) -> None:
        """Have results come to the running loop."""
        self._loop = asyncio.get_running_loop()

    def do(self, work: Callable[[], Any], then: Callable[..., None] | None = None, *facts: Any) -> None:
        """Do `work` in the codec thread, then `then(result or CodecError, *facts)` in the loop; both in order."""

        def job() -> None:
            if self.failure is not None:  # what follows a job that failed would be built on nothing
                return
            began = time.thread_time()
            result: Any
            try:
                result = work()
            except CodecError as error:
                result = error
            self.seconds += time.thread_time() - began
            if then is not None:
                self._call(lambda: self._finish(then, result, facts))

        if not self._worker.submit(job) and not self._closing:  # a copy that ends then gives the other thread no job
            self.fail(ZmqTrainError(f"the codec thread cannot keep up: {MOST_JOBS} jobs wait"))

    def do_once(self, name: str, work: Callable[[], object]) -> None:
        """Do as `do`, unless what has this name is waiting to be done."""
        if name in self._once:
            return
        self._once.add(name)

        def first() -> None:
            self._once.discard(name)
            work()

        self.do(first)

    def fail(self, error: BaseException | None) -> None:
        """Something of our own broke: there is no honest way on. Save what is saved, and end with the error."""
        logger.error("the broker stops: %s", "lack of memory" if isinstance(error, MemoryError) else repr(error))
        self.failure = self.failure or error
        self._call(self._broken)

    async def close(self) -> bool:
        """Let it finish what it has; its results are of no use any more, and nobody hears of them.

        Return whether it has; if not, that is its failure, and what it works on is still its own.
        """
        self._closing = True
        if await asyncio.to_thread(self._worker.close, CLOSE_SECONDS):
            return True
        why = ZmqTrainError(f"the codec thread has not ended within {CLOSE_SECONDS:g} s: its last job goes on")
        logger.error("%s", why)
        self.failure = self.failure or why
        return False

    def _finish(self, then: Callable[..., None], result: object, facts: tuple[Any, ...]) -> None:
        if self._closing:
            return
        try:
            then(result, *facts)
        except Exception as error:
            self.fail(error)

    def _call(self, what: Callable[[], object]) -> None:
        assert self._loop is not None, "jobs are given once the broker runs"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for what the last jobs give
            self._loop.call_soon_threadsafe(what)

"""An asyncio event loop in virtual time: minutes run in milliseconds, and always in the same order.

Time stands still while there is something to do, and then jumps to the next timer.  Timers of one time fire in the
order in which they were set.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from contextvars import Context
from typing import Any


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
        """Return the virtual time in seconds."""
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See AbstractEventLoop."""
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

"""Let tasks of one event loop wait for "something may have changed", and be woken without losing anything.

Rule 1: a waiter tries first, waits only if that failed, and tries again when woken: a gate carries no message, so a
cancelled wait loses none.
Rule 2: everybody who waits is woken; who comes too late waits again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Gate:
    """A place where tasks wait until somebody calls `open`."""

    __slots__ = ("_called", "_waiters")

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []
        self._called: Callable[[], object] | None = None

    @property
    def waited_at(self) -> bool:
        """Whether anybody waits here."""
        return bool(self._waiters) or self._called is not None

    def call(self, what: Callable[[], object]) -> None:
        """Call this at each `open`, from now on, in the midst of who opens: it takes note, and does no more."""
        self._called = what

    def open(self) -> None:
        """Wake all who wait here now."""
        if self._called is not None:
            self._called()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until the next `open`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:  # cancelled, not woken
                self._waiters.remove(waiter)


class Fairness:
    """Give the loop's other tasks a turn now and then, where a call under load would never have to wait."""

    __slots__ = ("_turns", "every")

    def __init__(self, every: int = 8) -> None:
        self.every, self._turns = every, 0

    async def turn(self) -> None:
        """Count one call, before it takes a message (it may be cancelled here); let others run at each `every`-th."""
        self._turns += 1
        if self._turns >= self.every:
            self._turns = 0
            await asyncio.sleep(0)

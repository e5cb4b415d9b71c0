"""Run an event loop in virtual time, so that what takes minutes is tested in milliseconds, and exactly.

Rule 1: time stands still while there is something to do, and then jumps to the next timer.
Rule 2: where a real loop would hang for ever, this one says so.
"""

from __future__ import annotations

import asyncio
import selectors


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that does not sleep: it moves the loop's clock."""

    virtual_now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("every task waits, and no timer is set: this would hang for ever")
        self.virtual_now += max(0.0, timeout)
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at 0 and jumps to the next timer when nothing else is left to do.

    `asyncio.Runner(loop_factory=VirtualClockLoop)` runs a coroutine under it.  Raises RuntimeError where a real loop
    would hang for ever.  No threads: what a thread does takes no virtual time, and is not waited for.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jumping.virtual_now

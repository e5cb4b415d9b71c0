"""Do something once more when its time has come, and at no other time.

Rule: used by the loop that runs when it is set, alone; a time that is set anew takes the place of the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf


class Alarm:
    """A timer that is set again and again. what: called when its time has come."""

    def __init__(self, what: Callable[[], None]) -> None:
        self._what = what
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Call in so many seconds, whatever was set before; inf: not at all."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._what) if seconds < inf else None

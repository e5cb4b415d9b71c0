"""An operation that the test lets go on, and how long a test of the engine waits for anything."""

from __future__ import annotations

import threading

__all__ = ["SECONDS", "Gate"]

SECONDS = 20.0
"""A wait that takes longer has failed; none of them does."""


class Gate:
    """An operation that has begun, and goes on when it is let."""

    def __init__(self) -> None:
        self._begun, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._begun.set()
        assert self._open.wait(SECONDS)

    def wait_begun(self) -> None:
        assert self._begun.wait(SECONDS)

    def open(self) -> None:
        self._open.set()

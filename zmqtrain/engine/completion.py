"""Tell an engine that an asynchronous operation has ended: once, from any thread.

Rule 1: the first call counts; a second one is an error of who makes it.  Rule 2: to end never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from zmqtrain.core.errors import EngineError


class OnComplete(Protocol):
    """What an operation of `push_async` calls when it has ended, once, from any thread."""

    def __call__(self, error: BaseException | None = None, value: Any = None) -> None:
        """Say that the operation has ended: with this error, or with this value for its first changed variable."""


class Request(Protocol):
    """Something on its way, as a communicator's non-blocking calls return it."""

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        """Have `call(request)` called once it is over."""

    def wait(self) -> Any:
        """Return its result, or raise what it failed with."""


class Completion:
    """The `on_complete` of one operation. finish(error, value): what the first call does."""

    def __init__(self, operation: str, finish: Callable[[BaseException | None, Any], None]) -> None:
        self._operation, self._finish = operation, finish
        self._once = threading.Lock()  # acquired by the first call, for good

    def __call__(self, error: object = None, value: Any = None) -> None:
        """Record how the operation ended; only the first call counts."""
        if error is None or isinstance(error, BaseException):
            is_first = self.end(error, value)
        else:
            what = f"on_complete got {error!r} for an error: pass an exception, or on_complete(value=...)"
            is_first = self.end(EngineError(what))
        if not is_first:
            raise EngineError(f"on_complete of {self._operation} was called twice")

    def end(self, error: BaseException | None, value: Any = None) -> bool:
        """End the operation; False if it has ended before."""
        if not self._once.acquire(blocking=False):
            return False
        self._finish(error, value)
        return True


def end_with_request(begin: Callable[[], Request], on_complete: OnComplete) -> None:
    """Begin a request, and end the operation when it is over, as it ends."""

    def over(request: Request) -> None:
        try:
            value = request.wait()
        except BaseException as error:
            on_complete(error)
        else:
            on_complete(value=value)

    begin().add_done_callback(over)

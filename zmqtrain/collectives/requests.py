"""Hold what a caller waits for: one message or one collective on its way, in whatever thread it happens.

Rule 1: every wait has an end: a result, an error that says who is lost or differs, or CollectiveTimeout, which says for
whom was waited and what they did last. A wait that ran out ends nothing: the request goes on, and can be waited for.
Rule 2: results are made in the thread that waits; callbacks run in the port's thread, and never wait. One that fails is
said in the log, and costs nobody else anything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from zmqtrain.collectives.transfers import ANY_SOURCE, ANY_TAG, Receiving, Status, status_of
from zmqtrain.core.errors import CollectiveTimeout, ZmqTrainError

logger = logging.getLogger(__name__)


class Host(Protocol):
    """Who makes the requests come true: a communicator."""

    def explain(self, request: Request, waited_seconds: float) -> CollectiveTimeout | None:
        """Say in an error why a request is not over; None: it is, by now."""

    def cancel(self, request: Request) -> bool:
        """Take a request back; True if that came in time."""

    def check_may_wait(self) -> None:
        """Raise LocalProtocolError in the port's own thread."""


_EMPTY = Status(ANY_SOURCE, ANY_TAG, (), "", 0, 0)
"""Of what is over and has received no message: a send, a collective."""


class Request:
    """A message or a collective in flight. Made by a communicator.

    what: in words.  timeout_seconds: how long `wait` waits where it is not told.  doing: the machine's side of it.
    make: makes the result, in the thread that asks for it, once.
    """

    def __init__(self, host: Host, what: str, timeout_seconds: float, make: Callable[[], Any]) -> None:
        self.what, self.timeout_seconds = what, timeout_seconds
        self.doing: Any = None
        self._host, self._make = host, make
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Request], object]] = []
        self._error: ZmqTrainError | None = None
        self._result: Any = None
        self._made = False

    def __repr__(self) -> str:
        state = ("failed" if self._error else "over") if self._over.is_set() else "on its way"
        return f"<Request {self.what}: {state}>"

    def test(self) -> bool:
        """Tell whether it is over, well or not; never waits."""
        return self._over.is_set()

    @property
    def status(self) -> Status | None:
        """The status of the message that a receive has got: source, tag, count and so on.

        None as long as it is not over, where it failed, and of every other request.
        """
        receiving, over = self.doing, self._over.is_set() and self._error is None
        if not over or not isinstance(receiving, Receiving) or receiving.envelope is None:
            return None
        return status_of(receiving.envelope)

    def get_status(self) -> Status | None:
        """Return the status of a request that is over, None as long as it is not; never waits, and changes nothing.

        It is `MPI_Request_get_status`. A send and a collective have the empty status: source ANY_SOURCE, tag ANY_TAG,
        count 0. Raises what `wait` raises if the request has failed or was cancelled.
        """
        if not self._over.is_set():
            return None
        self.wait()
        return self.status or _EMPTY

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """Wait until it is over; return its result: of a receive or a collective what came of it, else None.

        timeout_seconds: the communicator's if None.  Raises PeerLost if a rank was lost, CollectiveMismatch if ranks
        made different calls, CollectiveTimeout when the time is up: it may be waited for again.
        """
        self._wait_until_over(self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if not self._made:
                self._result, self._made = self._make(), True
                self._make = _make_nothing  # what it was made of is freed
            return self._result

    def cancel(self) -> bool:
        """Take it back: True if it was over before anybody else took part in it, and had no effect.

        A receive that nothing has come for can be; a send that its receiver has not matched, if it is too large to have
        been sent already; a collective never. `wait` of what was cancelled raises LocalProtocolError.
        """
        return self._host.cancel(self)

    def add_done_callback(self, call: Callable[[Request], object]) -> None:
        """Have `call(request)` called once it is over, in the port's thread, where it must not wait; or at once."""
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(call)
                return
        call(self)

    def complete(self, error: ZmqTrainError | None) -> None:
        """Say that it is over; for the communicator."""
        with self._lock:
            if self._over.is_set():
                return
            self._error = error
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            try:
                call(self)
            except Exception:
                logger.exception("a callback of %s failed", self.what)

    def _wait_until_over(self, timeout_seconds: float) -> None:
        if self._over.is_set():
            return
        self._host.check_may_wait()
        started = time.monotonic()
        if not self._over.wait(max(0.0, timeout_seconds)):
            error = self._host.explain(self, time.monotonic() - started)
            if error is not None and not self._over.is_set():
                raise error


def _make_nothing() -> None:
    pass


def wait_all(requests: Sequence[Request], timeout_seconds: float | None = None) -> list[Any]:
    """Wait until all are over; return their results in order.

    timeout_seconds: for all together; the longest of their communicators' if None.  Raises as `Request.wait` does, for
    the first in order that failed.
    """
    if not requests:
        return []
    seconds = max(request.timeout_seconds for request in requests) if timeout_seconds is None else timeout_seconds
    until = time.monotonic() + seconds
    return [request.wait(max(0.0, until - time.monotonic())) for request in requests]


def wait_any(requests: Sequence[Request], timeout_seconds: float | None = None) -> int:
    """Wait until one is over, well or not; return its index, the lowest if several are.

    timeout_seconds: the longest of their communicators' if None.  Raises CollectiveTimeout for the first one if none
    is, and ValueError if there is none to wait for.
    """
    if not requests:
        raise ValueError("wait_any needs at least one request")
    seconds = max(request.timeout_seconds for request in requests) if timeout_seconds is None else timeout_seconds
    some = threading.Event()
    for request in requests:
        request.add_done_callback(lambda _: some.set())
    if not any(request.test() for request in requests):
        requests[0]._host.check_may_wait()
        if not some.wait(max(0.0, seconds)):
            requests[0]._wait_until_over(0.0)
    return next(index for index, request in enumerate(requests) if request.test())

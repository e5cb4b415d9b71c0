"""Give a port its thread: one event loop, calls from other threads in their order, and a listener that is told.

Rule 1: whatever is called or told here happens in the thread, one after the other; what fails is said, and the next
goes on.  Rule 2: what is told before there is a listener is kept for it.  Rule 3: after `silence` nothing is done or
told any more: the port is closing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine

from zmqtrain.core.errors import LocalProtocolError, ZmqTrainError
from zmqtrain.core.interfaces import PortListener

logger = logging.getLogger(__name__)


class PortThread:
    """A thread that lives `main`. name: of whom it is, for messages.

    failed: told, in the thread, of what `main` raised after the port was ready.
    """

    def __init__(
        self, main: Callable[[], Coroutine[None, None, None]], failed: Callable[[BaseException], None]
    ) -> None:
        self._main, self._failed = main, failed
        self.name = "a process"
        self.silent = False
        self._listener: PortListener | None = None
        self._untold: deque[Callable[[PortListener], object]] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="zmqtrain-mesh", daemon=True)

    # ------------------------------------------------------------------ any thread

    def open(self) -> None:
        """Start, and wait until `ready` is called; raise what `main` raised before."""
        self._thread.start()
        self._ready.wait()
        if isinstance(self._failure, ZmqTrainError):  # its message says it all: where in the thread is of no use
            raise self._failure.with_traceback(None)
        if self._failure is not None:
            raise self._failure

    def call(self, what: Callable[[], object]) -> None:
        """Have the thread do something soon; nothing happens once it has ended."""
        with self._lock:
            self._calls.append(what)
            wake, self._woken = not self._woken, True
        loop = self._loop
        if wake and loop is not None:  # there is none yet: it looks when it begins
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._do_calls)

    def start(self, listener: PortListener) -> None:
        """Tell this listener from now on, first what was told before."""
        self.call(lambda: self._start(listener))

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the thread, unless this is it."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)

    # ------------------------------------------------------------------ the thread

    def check(self) -> None:
        """Raise LocalProtocolError in another thread."""
        if threading.get_ident() != self._thread.ident:
            raise LocalProtocolError("a port sends in its own thread: use call")

    def ready(self) -> None:
        """Let `open` return."""
        self._ready.set()

    def silence(self) -> None:
        """Do and tell nothing more."""
        self.silent = True

    @property
    def has_listener(self) -> bool:
        """Whether there is a listener yet."""
        return self._listener is not None

    def tell(self, tell: Callable[[PortListener], object]) -> None:
        """Tell the listener something, once there is one."""
        listener = self._listener
        if listener is None:
            self._untold.append(tell)
        elif not self.silent:
            self._do(lambda: tell(listener))

    def _start(self, listener: PortListener) -> None:
        self._listener = listener
        while self._untold:
            self.tell(self._untold.popleft())

    def _do_calls(self) -> None:
        with self._lock:
            self._woken = False
            count = len(self._calls)
        for _ in range(count):
            what = self._calls.popleft()
            if not self.silent:
                self._do(what)

    def _do(self, what: Callable[[], object]) -> None:
        try:
            what()
        except Exception:
            logger.exception("%s: what its port was to do failed", self.name)

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():  # nobody waits for it any more
                logger.error("the port of %s failed", self.name, exc_info=error)
                self._failed(error)
        finally:
            self._ready.set()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._do_calls)  # those of before
        await self._main()

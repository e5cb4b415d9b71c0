"""The environment of a process: its time, its threads and its wires.

Brokers and nodes take time and threads from here alone, so that the same classes run for real (`RealEnvironment`) and
in virtual time (`session.virtual`).  `environment` returns that of the running context: a virtual run sets it for its
tasks and threads; everywhere else it is the real one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from zmqtrain.core.interfaces import Channel, Clock, Environment, Executor, HubChannel, LoopThread
from zmqtrain.core.types import PeerId
from zmqtrain.session.mailbox import Worker
from zmqtrain.transport.key_folder import Access
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel


class _RealLoopThread:
    """A thread that runs one coroutine in an event loop of its own."""

    def __init__(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(main()), name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float) -> None:
        """See LoopThread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)


class RealEnvironment:
    """The real time, real threads, and ZeroMQ. access: this process's keys as a client of hubs; None: no keys."""

    clock: Clock = time
    virtual = False
    tick_seconds = 0.05

    def __init__(self, access: Access | None = None) -> None:
        self._access = access

    def cpu_seconds(self) -> float:
        """See Environment."""
        return time.thread_time()

    def executor(self, name: str, capacity: int, failed: Callable[[BaseException], None]) -> Executor:
        """See Environment."""
        return Worker(name, capacity, failed)

    def event(self) -> threading.Event:
        """See Environment."""
        return threading.Event()

    def condition(self) -> threading.Condition:
        """See Environment."""
        return threading.Condition()

    def start(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> LoopThread:
        """See Environment."""
        return _RealLoopThread(name, main)

    def dial(self, address: str, peer: PeerId) -> Channel:
        """See Environment."""
        return DealerChannel.connect(address, peer=peer, access=self._access)

    def listen(self, address: str) -> HubChannel:
        """See Environment."""
        return RouterChannel.bind(address)


_REAL = RealEnvironment()
_current: ContextVar[Environment] = ContextVar("environment", default=_REAL)


def environment() -> Environment:
    """Return the environment of the running context."""
    return _current.get()


def enter(one: Environment) -> None:
    """Have the running context, and the tasks that it makes from now on, live in this environment."""
    _current.set(one)


class _Clock:
    """The time of the running context: a `Clock`."""

    def monotonic(self) -> float:
        """See Clock."""
        return _current.get().clock.monotonic()

    def sleep(self, seconds: float, /) -> None:
        """See Clock."""
        _current.get().clock.sleep(seconds)

    def thread_time(self) -> float:
        """Return the CPU seconds that the running thread has taken; in virtual time always 0."""
        return _current.get().cpu_seconds()


clock = _Clock()
"""What brokers and sessions use in place of the module `time`."""

"""Join the processes of a group within one process: the public double of `Port`, for tests, with real threads.

Rule 1: it behaves as ports on the network do: in order per pair, a large frame is read when it is delivered, not when
it is sent (who writes into it too early is found out), calls and news come in the port's own thread.
Rule 2: faults come when a test asks for them: `kill`, `kill_after`, `cut_off`, `hold` and `release`, a delay.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence

from zmqtrain.core.errors import ConfigError, LocalProtocolError
from zmqtrain.core.interfaces import Clock, PortListener
from zmqtrain.core.types import Buffer
from zmqtrain.transport.pacing import COPY_BELOW_BYTES, check_message

TICK_SECONDS = 0.05
"""How often a listener is told that time has passed."""

_Doing = Callable[[], object]


class MemoryPort:
    """One rank's end (a `Port`); made by `memory_ports`. names: what people call the ranks."""

    clock: Clock = time

    def __init__(self, group: MemoryPorts, rank: int, names: tuple[str, ...]) -> None:
        self.rank, self.names, self._group = rank, names, group
        self._listener: PortListener | None = None
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, _Doing]] = []  # a heap: when, in which order, what
        self._order = itertools.count()
        self._told_lost: set[int] = set()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"memory-port-{rank}", daemon=True)

    def start(self, listener: PortListener) -> None:
        """Tell this listener what happens from now on, and what came before it; start the thread."""
        if self._listener is not None:
            raise LocalProtocolError(f"the port of rank {self.rank} has a listener")
        self._listener = listener
        self._thread.start()

    def call(self, what: _Doing) -> None:
        """Have the port's thread do something soon; from any thread. Nothing happens after `close` or `kill`."""
        self._put(what, 0.0)

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Queue one message to that rank; in the port's thread only.

        Raise LocalProtocolError in another thread, for a rank that is not one of the others, and for a message that no
        channel carries.
        """
        check_message(frames)
        if threading.current_thread() is not self._thread:
            raise LocalProtocolError("a port sends in its own thread: use call")
        if not 0 <= rank < len(self.names) or rank == self.rank:
            raise LocalProtocolError(f"rank {self.rank} of {len(self.names)} has no way to rank {rank}")
        self._group._carry(self.rank, rank, [_as_sent(frame) for frame in frames])

    def close(self, linger_seconds: float = 1.0) -> None:
        """Do the calls that came before this one, tell the others, end the thread; twice is once."""
        if self._listener is None:
            self._leave()
            return
        self.call(self._leave)
        if threading.current_thread() is not self._thread:
            self._thread.join(linger_seconds + 5.0)

    def _leave(self) -> None:
        if not self._ended:
            self._end()
            self._group._say_lost(self.rank, "it has left the group")

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._waiting.clear()
            self._changed.notify_all()

    def _put(self, what: _Doing, due: float) -> None:
        with self._changed:
            if not self._ended:
                heapq.heappush(self._waiting, (due, next(self._order), what))
                self._changed.notify_all()

    def _deliver(self, source: int, frames: list[Buffer]) -> None:
        if source not in self._told_lost:
            self._told().on_message(source, [_as_received(frame) for frame in frames])

    def _lose(self, rank: int, why: str) -> None:
        if rank not in self._told_lost:
            self._told_lost.add(rank)
            self._told().on_lost(rank, why)

    def _told(self) -> PortListener:
        assert self._listener is not None  # the thread starts with it
        return self._listener

    def _run(self) -> None:
        next_tick = time.monotonic() + TICK_SECONDS
        while True:
            with self._changed:
                if self._ended:
                    return
                now = time.monotonic()
                what: _Doing | None = None
                if now < next_tick:
                    if not self._waiting or self._waiting[0][0] > now:
                        due = min(next_tick, self._waiting[0][0]) if self._waiting else next_tick
                        self._changed.wait(due - now)
                        continue
                    what = heapq.heappop(self._waiting)[2]
            if what is not None:
                what()
            else:
                next_tick = now + TICK_SECONDS
                self._told().on_tick(now)


class MemoryPorts(list[MemoryPort]):
    """The ports of one group, by rank, and the hands of a test on the network between them."""

    def __init__(self, names: tuple[str, ...], delay_seconds: float) -> None:
        super().__init__(MemoryPort(self, rank, names) for rank in range(len(names)))
        self._delay_seconds = delay_seconds
        self._lock = threading.Lock()
        self._last_messages: dict[int, int] = {}
        self._held: dict[tuple[int, int], list[tuple[MemoryPort, _Doing]]] = {}

    def kill(self, rank: int, why: str = "its process was killed") -> None:
        """End a rank in the middle of whatever it does, without a word of its own; the others are told."""
        self[rank]._end()
        self._say_lost(rank, why)

    def kill_after(self, rank: int, messages: int) -> None:
        """End a rank as `kill` does when it has sent so many messages more: the last of them still arrives."""
        with self._lock:
            self._last_messages[rank] = messages

    def cut_off(self, rank: int, why: str = "its cable is out") -> None:
        """Part a rank from all others, for good: they are told that it is lost, and so is it itself."""
        with self._lock:
            self._last_messages[rank] = 0
        self._say_lost(rank, why)
        self[rank]._put(lambda: self[rank]._lose(rank, why), 0.0)

    def hold(self, source: int, to: int) -> None:
        """Keep on the way what `source` sends to `to` from now on, until `release`."""
        with self._lock:
            self._held.setdefault((source, to), [])

    def release(self, source: int, to: int) -> None:
        """Deliver what was held, in order, and hold no more."""
        with self._lock:
            for port, doing in self._held.pop((source, to), []):
                port._put(doing, 0.0)

    def close(self) -> None:
        for port in self:
            port.close()

    def _carry(self, source: int, to: int, frames: list[Buffer]) -> None:
        port = self[to]
        with self._lock:
            left = self._last_messages.get(source)
            if left:
                self._last_messages[source] = left - 1
        if (left is None or left > 0) and to not in self[source]._told_lost:
            self._put(source, to, lambda: port._deliver(source, frames))
        if left == 1:
            self.kill(source)

    def _say_lost(self, rank: int, why: str) -> None:
        for to, port in enumerate(self):
            if to != rank:
                self._put(rank, to, lambda port=port: port._lose(rank, why))  # type: ignore[misc]

    def _put(self, source: int, to: int, doing: _Doing) -> None:
        with self._lock:
            if (source, to) in self._held:
                self._held[source, to].append((self[to], doing))
            else:
                self[to]._put(doing, time.monotonic() + self._delay_seconds if self._delay_seconds else 0.0)


def _as_sent(frame: Buffer) -> Buffer:
    """Copy a small frame now, a large one later."""
    view = memoryview(frame)
    return bytes(view) if view.nbytes < COPY_BELOW_BYTES else view.cast("B")


def _as_received(frame: Buffer) -> Buffer:
    return frame if isinstance(frame, bytes) else memoryview(bytes(frame))


def memory_ports(size: int, *, names: Sequence[str] = (), delay_seconds: float = 0.0) -> MemoryPorts:
    """Make the ports of a group of `size` ranks: a list, with `kill`, `hold`, `release` and `close`.

    names: what people call the ranks ("pc-0", "pc-1"... if none are given).  delay_seconds: how long each message is on
    its way.  Raise ConfigError for a size under 1, or names that are not so many.
    """
    if size < 1 or (names and len(names) != size):
        raise ConfigError(f"a group has at least 1 rank and a name for each, got size={size} and {len(names)} names")
    return MemoryPorts(tuple(names) or tuple(f"pc-{rank}" for rank in range(size)), delay_seconds)

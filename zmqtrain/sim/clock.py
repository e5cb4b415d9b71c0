"""Let threads live in virtual time, one at a time: one queue of events, one baton.

Rule 1: only who holds the baton runs; it is handed on only in `sleep` and `wait`, and at a thread's end. So a run is a
sequence: the same seeds, the same bits.  Rule 2: who waits works the queue itself, and hands the baton on only when the
next event is another thread's: a thread whose own time is next just goes on.  Rule 3: events of one time happen in the
order in which they were asked for.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Any

LOOK_SECONDS = 0.5


class Ended(BaseException):
    """Unwinds a simulated thread that is killed, or whose simulation is over; nothing in a thread may catch it."""


class Task:
    """One simulated thread. token: of its next waking; an event with another one was overtaken.

    waits: it can be woken before its time.
    """

    __slots__ = ("ended", "killed", "name", "thread", "token", "turn", "waits")

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread: threading.Thread | None = None
        self.turn = threading.Lock()
        self.turn.acquire()
        self.token = 0
        self.waits = self.ended = self.killed = False


class Scheduler:
    """The virtual clock of a simulation, and its queue of events. It is a `zmqtrain.core.types.Clock`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.failure: BaseException | None = None
        self._queue: list[tuple[float, int, Task | None, Callable[[], object] | int]] = []
        self._asked = 0
        self._main = self._running = Task("main")
        self._tasks: list[Task] = []
        self._alive = 0
        self._stopping = self._unwinding = False
        self._until = float("inf")

    # ------------------------------------------------------------------ time

    def monotonic(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def sleep(self, seconds: float, /) -> None:
        """Let so much virtual time pass for the calling thread."""
        task = self._running
        task.token += 1
        self._push(self.now + max(0.0, seconds), task, task.token)
        self._advance(task)

    def wait(self, seconds: float) -> None:
        """Wait until somebody wakes the calling thread, at most `seconds`."""
        task = self._running
        task.waits = True
        try:
            self.sleep(seconds)
        finally:
            task.waits = False

    def wake(self, task: Task) -> None:
        """End the waiting of a task now; does nothing to one that does not wait."""
        if task.waits:
            self._push(self.now, task, task.token)

    def call_at(self, when: float, what: Callable[[], object]) -> None:
        """Have something done at a time, or at once if that is over. It must not sleep."""
        self._push(max(when, self.now), None, what)

    def call_later(self, seconds: float, what: Callable[[], object]) -> None:
        """Have something done after some seconds. It must not sleep."""
        self._push(self.now + seconds, None, what)

    # ------------------------------------------------------------------ threads

    @property
    def current(self) -> Task:
        """The task that runs now."""
        return self._running

    def start(self, name: str, body: Callable[[], None], at: float = 0.0) -> Task:
        """Have a thread begin at a time."""
        task = Task(name)
        task.thread = threading.Thread(target=self._live, args=(task, body), name=f"zmqtrain-sim-{name}", daemon=True)
        self._tasks.append(task)
        self._alive += 1
        self._push(max(at, self.now), task, task.token)
        task.thread.start()
        return task

    def kill(self, task: Task) -> None:
        """End a task where it stands: what it waits for does not come any more."""
        if not task.ended:
            task.killed = True
            self._push(self.now, task, task.token)

    def stop(self) -> None:
        """End `run` soon: nothing more happens."""
        self._stopping = True

    def run(self, until: float = float("inf")) -> None:
        """Let events happen until none is left, all threads have ended, `stop` was called, or the time is over.

        Then every thread is unwound. Raises what a thread or an event raised.
        """
        self._until = until
        try:
            self._advance(self._main)
        finally:
            if self._running is self._main:  # else a second interrupt came: leave at once
                self._unwind()
        if self.failure is not None:
            raise self.failure

    def _live(self, task: Task, body: Callable[[], None]) -> None:
        task.turn.acquire()
        try:
            if not task.killed:
                body()
        except Ended:
            pass
        except BaseException as error:
            self._failed(error)
        finally:
            task.ended = True
            self._alive -= 1
            if not self._unwinding:
                self._advance(task)

    def _failed(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._stopping = True

    def _unwind(self) -> None:
        self._unwinding = True
        for task in self._tasks:
            assert task.thread is not None
            if not task.ended:
                task.killed, self._running = True, task
                task.turn.release()
            task.thread.join()
        self._running = self._main
        self._queue.clear()

    # ------------------------------------------------------------------ the queue and the baton

    def _push(self, when: float, task: Task | None, what: Callable[[], object] | int) -> None:
        self._asked += 1
        heapq.heappush(self._queue, (when, self._asked, task, what))

    def _advance(self, me: Task) -> None:
        """Work the queue until it is the turn of `me`."""
        while self._goes_on():
            when, _, task, what = heapq.heappop(self._queue)
            self.now = when
            if task is None:
                try:
                    what()  # type: ignore[operator]
                except BaseException as error:
                    self._failed(error)
            elif task.ended or task.token != what:
                continue
            else:
                return self._hand_over(me, task)
        self._hand_over(me, self._main)

    def _goes_on(self) -> bool:
        if self._stopping or not self._queue or (self._tasks and not self._alive):
            return False
        return self._queue[0][0] <= self._until

    def _hand_over(self, me: Task, task: Task) -> None:
        task.token += 1
        if task is not me:
            self._running = task
            try:
                task.turn.release()
                if me.ended:
                    return
                self._await_turn(me)
            except BaseException:  # interrupted, while another thread runs
                if me is self._main:
                    self._stopping = True
                    if self._running is not me:
                        me.turn.acquire()
                raise
        if me.killed:
            raise Ended

    def _await_turn(self, me: Task) -> None:
        if me is not self._main:
            me.turn.acquire()
            return
        while not me.turn.acquire(timeout=LOOK_SECONDS):
            pass  # an interrupt that came just before the waiting is seen now


class VirtualCondition(threading.Condition):
    """A condition for code that waits on one, in virtual time: it needs no lock, for only one thread runs."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._waiters_here: list[Task] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        return None

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until the predicate holds, at most `timeout` seconds; return what it last gave."""
        until = self._scheduler.now + (float("inf") if timeout is None else timeout)
        while not (result := predicate()) and self._scheduler.now < until:
            self.wait(until - self._scheduler.now)
        return result

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is notified, at most `timeout` seconds; return whether it was."""
        task = self._scheduler.current
        self._waiters_here.append(task)
        self._scheduler.wait(float("inf") if timeout is None else timeout)
        notified = task not in self._waiters_here
        if not notified:
            self._waiters_here.remove(task)
        return notified

    def notify(self, n: int = 1) -> None:
        """Wake `n` of those that wait."""
        for task in self._waiters_here[:n]:
            self._scheduler.wake(task)
        del self._waiters_here[:n]

    def notify_all(self) -> None:
        """Wake all that wait."""
        self.notify(len(self._waiters_here))

"""The thread of a port: calls in their order, what was told before the listener came, and how it ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from zmqtrain.collectives.mesh import PortThread
from zmqtrain.core.errors import HubUnreachable, LocalProtocolError

WAIT = 60.0


class Life:
    """A main that is ready at once (or fails), and ends when it is told to."""

    def __init__(self, error=None, later=None):
        self.error, self.later, self.failures = error, later, []
        self.thread = PortThread(self)

    def on_failed(self, error):
        self.failures.append(error)

    async def live(self):
        self.stop = asyncio.Event()
        if self.error is not None:
            raise self.error
        self.thread.ready()
        await self.stop.wait()
        if self.later is not None:
            raise self.later

    def end(self):
        self.thread.call(lambda: self.stop.set())
        self.thread.join(WAIT)


class Told(list):
    def on_message(self, rank, frames):
        self.append((rank, frames))
        if frames == ["fail"]:
            raise ValueError("a mistake of the listener")


def message(rank, *frames):
    return lambda listener: listener.on_message(rank, list(frames))


def test_calls_are_done_in_order_also_those_of_before_it_lived_and_of_several_threads():
    life, done = Life(), []
    life.thread.call(lambda: done.append(-1))
    life.thread.open()
    callers = [
        threading.Thread(
            target=lambda base=base: [life.thread.call(lambda n=n: done.append(n)) for n in range(base, base + 200)]
        )
        for base in (0, 1000)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    life.end()
    assert done[0] == -1 and len(done) == 401
    for base in (0, 1000):
        assert [n for n in done if base <= n < base + 200] == list(range(base, base + 200))


def test_a_call_that_fails_is_said_and_the_next_is_done(caplog):
    life, done = Life(), []
    life.thread.name = "pc-1"
    life.thread.open()
    life.thread.call(lambda: done.append(1 // 0))
    life.thread.call(lambda: done.append(1))
    life.end()
    assert done == [1] and "ZeroDivisionError" in caplog.text and not life.failures


def test_a_listener_is_told_what_came_before_it_and_nothing_after_silence(caplog):
    life, told = Life(), Told()
    life.thread.open()
    life.thread.call(lambda: [life.thread.tell(message(rank, "fail" if rank == 1 else "x")) for rank in range(3)])
    life.thread.start(told)
    life.thread.call(lambda: life.thread.tell(message(3)))
    life.thread.call(
        lambda: [life.stop.set(), setattr(life.thread, "silent", True)]
    )  # in one: the thread may end after the first
    life.thread.call(lambda: told.append("never"))
    life.thread.join(WAIT)
    life.thread.tell(message(4))
    assert told == [(0, ["x"]), (1, ["fail"]), (2, ["x"]), (3, [])] and "a mistake of the listener" in caplog.text


def test_what_fails_before_it_is_ready_is_raised_to_who_opens_it():
    life = Life(error=ValueError("nobody is there"))
    with pytest.raises(ValueError, match="nobody is there"):
        life.thread.open()
    life.thread.call(lambda: None)
    assert life.failures == []


def test_an_error_that_says_all_comes_without_the_ways_of_the_thread():
    life = Life(error=HubUnreachable("no broker answers", "tcp://hub:5555"))
    with pytest.raises(HubUnreachable) as raised:
        life.thread.open()
    assert [entry.name for entry in raised.traceback][1:] == ["open"]


def test_what_fails_afterwards_is_said_and_told(caplog):
    life = Life(later=ValueError("broken"))
    life.thread.open()
    life.end()
    assert [str(error) for error in life.failures] == ["broken"] and "the port of a process failed" in caplog.text


def test_another_thread_is_found_out():
    life, found = Life(), []
    life.thread.open()
    life.thread.call(life.thread.check)
    with pytest.raises(LocalProtocolError, match="use call"):
        life.thread.check()
    life.thread.call(lambda: found.append("in order"))
    life.end()
    assert found == ["in order"]

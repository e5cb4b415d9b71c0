"""Threads in virtual time: one at a time, in an order that is always the same."""

from __future__ import annotations

import asyncio
import signal
import threading
from types import SimpleNamespace

import pytest

from zmqtrain.session.virtual import VirtualCondition, VirtualEnvironment, VirtualEvent, VirtualTime


@pytest.fixture
def clock():
    return VirtualTime()


def test_events_happen_in_the_order_of_their_times_and_then_of_their_asking(clock):
    happened = []
    for when, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        clock.call_at(when, lambda name=name: happened.append((clock.now, name)))
    clock.run()
    assert happened == [(1.0, "first"), (1.0, "second"), (2.0, "late")]


def test_threads_sleep_past_each_other_without_real_time(clock):
    seen = []

    def body(name, seconds):
        for _ in range(3):
            clock.sleep(seconds)
            seen.append((clock.monotonic(), name))

    clock.start("slow", lambda: body("slow", 1000.0))
    clock.start("fast", lambda: body("fast", 400.0), at=100.0)
    clock.run()
    assert seen == [
        (500.0, "fast"), (900.0, "fast"), (1000.0, "slow"), (1300.0, "fast"), (2000.0, "slow"), (3000.0, "slow"),
    ]  # fmt: skip


def test_a_thread_alone_never_hands_over(clock, monkeypatch):
    resumed = []
    resume = VirtualTime._resume
    monkeypatch.setattr(VirtualTime, "_resume", lambda *these: (resumed.append(these[2]), resume(*these)))
    clock.start("alone", lambda: [clock.sleep(1.0) for _ in range(100)])
    clock.run()
    assert clock.now == 100.0 and resumed == [0, 1], "only at its beginning, and when it is unwound"


def test_what_waits_is_woken_and_what_sleeps_is_not(clock):
    condition, seen = VirtualCondition(clock), []

    def waits():
        seen.append(("woken", condition.wait(60.0), clock.now))
        seen.append(("in vain", condition.wait(10.0), clock.now))

    def sleeps():
        clock.sleep(30.0)
        seen.append(("slept", True, clock.now))

    clock.start("waits", waits)
    asleep = clock.start("sleeps", sleeps)
    clock.call_at(5.0, condition.notify_all)
    clock.call_at(6.0, lambda: clock.wake(asleep))
    clock.run()
    assert seen == [("woken", True, 5.0), ("in vain", False, 15.0), ("slept", True, 30.0)]


def test_waiting_for_a_condition_looks_again_whenever_it_is_notified(clock):
    condition, box, seen = VirtualCondition(clock), [], []

    def waits():
        seen.append((condition.wait_for(lambda: len(box) >= 2, 60.0), clock.now))
        seen.append((condition.wait_for(lambda: len(box) >= 3, 10.0), clock.now))

    def put():
        with condition:
            box.append(1)
            condition.notify_all()

    clock.start("waits", waits)
    clock.call_at(1.0, put)
    clock.call_at(2.0, put)
    clock.run()
    assert seen == [(True, 2.0), (False, 12.0)]


def test_a_killed_thread_ends_where_it_stands_and_the_others_go_on(clock):
    seen = []

    def body(name):
        try:
            for _ in range(4):
                clock.sleep(1.0)
                seen.append((clock.now, name))
        finally:
            seen.append((clock.now, f"{name} ends"))

    victim = clock.start("victim", lambda: body("victim"))
    clock.start("other", lambda: body("other"))
    clock.call_at(1.5, lambda: clock.kill(victim))
    clock.run()
    assert [entry for entry in seen if entry[1].startswith("victim")] == [(1.0, "victim"), (1.5, "victim ends")]
    assert seen[-1] == (4.0, "other ends")


def test_what_goes_wrong_in_a_thread_ends_the_run_and_is_raised(clock):
    def fails():
        clock.sleep(1.0)
        raise ValueError("as asked")

    endless = clock.start("endless", lambda: [clock.sleep(1.0) for _ in range(10**9)])
    clock.start("fails", fails)
    with pytest.raises(ValueError, match="as asked"):
        clock.run()
    assert endless.ended and not endless.thread.is_alive()


def test_what_goes_wrong_in_an_event_is_raised_too(clock):
    clock.start("endless", lambda: [clock.sleep(1.0) for _ in range(10**9)])
    clock.call_at(3.0, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        clock.run()


def test_a_run_ends_at_its_time_or_when_it_is_stopped_and_every_thread_is_unwound(clock):
    thread = clock.start("endless", lambda: [clock.sleep(1.0) for _ in range(10**9)])
    clock.run(lambda: clock.wait_threads(7.5))
    assert clock.now == 7.5 and not thread.thread.is_alive()
    other = VirtualTime()
    other.start("endless", lambda: [other.sleep(1.0) for _ in range(10**9)])
    other.call_at(2.5, other.stop)
    other.run(other.wait_threads)
    assert other.now == 2.5


def test_an_interrupt_ends_the_run_and_every_thread(clock):
    def interrupted():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        for _ in range(10**9):
            clock.sleep(1.0)

    tasks = [clock.start("other", lambda: [clock.sleep(1.0) for _ in range(10**9)])]
    tasks.append(clock.start("interrupted", interrupted, at=5.0))
    with pytest.raises(KeyboardInterrupt):
        clock.run()
    assert not any(task.thread.is_alive() for task in tasks)


def test_a_thread_whose_time_never_came_does_not_run(clock):
    ran = []
    clock.start("early", lambda: [clock.sleep(1.0) for _ in range(10**9)])
    clock.start("late", lambda: ran.append(True), at=100.0)
    clock.run(lambda: clock.wait_threads(10.0))
    assert not ran


def test_a_run_ends_when_its_threads_have(clock):
    clock.start("short", lambda: clock.sleep(3.0))
    clock.call_at(9.0, lambda: pytest.fail("the run goes on"))
    clock.run(clock.wait_threads)
    assert clock.now == 3.0


def test_an_executor_does_its_jobs_in_order_each_at_the_end_of_its_time(clock):
    process, done, failed = VirtualEnvironment(clock), [], []
    process.codec_seconds = lambda values: 0.1 * values
    executor = process.executor("codec", 3, SimpleNamespace(on_job_failed=failed.append))

    def note(name):
        done.append((name, clock.now))

    assert executor.submit(lambda: note("a"), 10) and executor.submit(lambda: note("b"), 5)
    assert executor.submit(lambda: 1 / 0) and not executor.submit(lambda: note("one too many"))
    clock.run()
    assert done == [("a", 1.0), ("b", 1.5)] and executor.seconds == 1.5
    assert [type(error) for error in failed] == [ZeroDivisionError]


def test_a_network_thread_is_a_task_and_a_thread_waits_for_its_event_and_its_end(clock):
    process, seen = VirtualEnvironment(clock), []

    async def main():
        await heard.wait()
        ready.set()
        await stopped.wait()

    def body():
        thread = process.start("network", main)
        seen.append((ready.wait(10.0), clock.now))
        thread.join(10.0)
        seen.append(clock.now)

    ready, heard, stopped = VirtualEvent(clock), asyncio.Event(), asyncio.Event()
    clock.call_at(2.0, heard.set)
    clock.call_at(5.0, stopped.set)
    process.begin("node", body)
    clock.run()
    assert seen == [(True, 2.0), 5.0]

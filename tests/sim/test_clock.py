"""Threads in virtual time: one at a time, in an order that is always the same."""

from __future__ import annotations

import signal
import threading

import pytest

from zmqtrain.sim.clock import Scheduler, VirtualCondition


@pytest.fixture
def scheduler():
    return Scheduler()


def test_events_happen_in_the_order_of_their_times_and_then_of_their_asking(scheduler):
    happened = []
    for when, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        scheduler.call_at(when, lambda name=name: happened.append((scheduler.now, name)))
    scheduler.run()
    assert happened == [(1.0, "first"), (1.0, "second"), (2.0, "late")]


def test_threads_sleep_past_each_other_without_real_time(scheduler):
    seen = []

    def body(name, seconds):
        for _ in range(3):
            scheduler.sleep(seconds)
            seen.append((scheduler.monotonic(), name))

    scheduler.start("slow", lambda: body("slow", 1000.0))
    scheduler.start("fast", lambda: body("fast", 400.0), at=100.0)
    scheduler.run()
    assert seen == [
        (500.0, "fast"), (900.0, "fast"), (1000.0, "slow"), (1300.0, "fast"), (2000.0, "slow"), (3000.0, "slow"),
    ]  # fmt: skip


def test_a_thread_alone_never_hands_the_baton_on(scheduler):
    switches = []

    def body():
        hand_over = scheduler._hand_over
        scheduler._hand_over = lambda me, task: (switches.append(task is not me), hand_over(me, task))
        for _ in range(100):
            scheduler.sleep(1.0)

    scheduler.start("alone", body)
    scheduler.run()
    assert switches.count(True) == 1, "only at its end"


def test_what_waits_is_woken_and_what_sleeps_is_not(scheduler):
    condition, seen = VirtualCondition(scheduler), []

    def waits():
        seen.append(("woken", condition.wait(60.0), scheduler.now))
        seen.append(("in vain", condition.wait(10.0), scheduler.now))

    def sleeps():
        scheduler.sleep(30.0)
        seen.append(("slept", True, scheduler.now))

    scheduler.start("waits", waits)
    asleep = scheduler.start("sleeps", sleeps)
    scheduler.call_at(5.0, condition.notify_all)
    scheduler.call_at(6.0, lambda: scheduler.wake(asleep))
    scheduler.run()
    assert seen == [("woken", True, 5.0), ("in vain", False, 15.0), ("slept", True, 30.0)]


def test_waiting_for_a_condition_looks_again_whenever_it_is_notified(scheduler):
    condition, box, seen = VirtualCondition(scheduler), [], []

    def waits():
        seen.append((condition.wait_for(lambda: len(box) >= 2, 60.0), scheduler.now))
        seen.append((condition.wait_for(lambda: len(box) >= 3, 10.0), scheduler.now))

    def put():
        with condition:
            box.append(1)
            condition.notify_all()

    scheduler.start("waits", waits)
    scheduler.call_at(1.0, put)
    scheduler.call_at(2.0, put)
    scheduler.run()
    assert seen == [(True, 2.0), (False, 12.0)]


def test_a_killed_thread_ends_where_it_stands_and_the_others_go_on(scheduler):
    seen = []

    def body(name):
        try:
            for _ in range(4):
                scheduler.sleep(1.0)
                seen.append((scheduler.now, name))
        finally:
            seen.append((scheduler.now, f"{name} ends"))

    victim = scheduler.start("victim", lambda: body("victim"))
    scheduler.start("other", lambda: body("other"))
    scheduler.call_at(1.5, lambda: scheduler.kill(victim))
    scheduler.run()
    assert [entry for entry in seen if entry[1].startswith("victim")] == [(1.0, "victim"), (1.5, "victim ends")]
    assert seen[-1] == (4.0, "other ends")


def test_what_goes_wrong_in_a_thread_ends_the_run_and_is_raised(scheduler):
    def fails():
        scheduler.sleep(1.0)
        raise ValueError("as asked")

    endless = scheduler.start("endless", lambda: [scheduler.sleep(1.0) for _ in range(10**9)])
    scheduler.start("fails", fails)
    with pytest.raises(ValueError, match="as asked"):
        scheduler.run()
    assert endless.ended and not endless.thread.is_alive()


def test_what_goes_wrong_in_an_event_is_raised_too(scheduler):
    scheduler.start("endless", lambda: [scheduler.sleep(1.0) for _ in range(10**9)])
    scheduler.call_at(3.0, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scheduler.run()


def test_a_run_ends_at_its_time_or_when_it_is_stopped_and_every_thread_is_unwound(scheduler):
    task = scheduler.start("endless", lambda: [scheduler.sleep(1.0) for _ in range(10**9)])
    scheduler.run(until=7.5)
    assert scheduler.now == 7.0 and not task.thread.is_alive()
    other = Scheduler()
    other.start("endless", lambda: [other.sleep(1.0) for _ in range(10**9)])
    other.call_at(2.5, other.stop)
    other.run()
    assert other.now == 2.5


def test_an_interrupt_ends_the_run_and_every_thread(scheduler):
    def interrupted():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        for _ in range(10**9):
            scheduler.sleep(1.0)

    tasks = [scheduler.start("other", lambda: [scheduler.sleep(1.0) for _ in range(10**9)])]
    tasks.append(scheduler.start("interrupted", interrupted, at=5.0))
    with pytest.raises(KeyboardInterrupt):
        scheduler.run()
    assert not any(task.thread.is_alive() for task in tasks)


def test_a_thread_whose_time_never_came_does_not_run(scheduler):
    ran = []
    scheduler.start("early", lambda: scheduler.sleep(1.0))
    scheduler.start("late", lambda: ran.append(True), at=100.0)
    scheduler.run(until=10.0)
    assert not ran

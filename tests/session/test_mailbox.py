"""The door between threads: bounded, in order, and nobody is left waiting."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from zmqtrain.core.errors import ChannelClosed
from zmqtrain.session.mailbox import NICENESS, Mailbox, Worker

WAIT = 60.0
"""Seconds: longer than a loaded machine needs for what is waited for here."""


def in_thread(work):
    """Run `work` in a thread that says when it has begun; return (thread, results)."""
    begun, results = threading.Event(), []

    def body():
        begun.set()
        try:
            results.append(work())
        except ChannelClosed as error:
            results.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    assert begun.wait(WAIT)
    return thread, results


def test_what_goes_in_comes_out_in_order_and_no_more_than_it_holds():
    mailbox = Mailbox(2)
    assert [mailbox.put_nowait(item) for item in "abc"] == [True, True, False]
    assert len(mailbox) == 2 and mailbox.peek() == "a"
    assert [mailbox.get_nowait(), mailbox.get(), mailbox.get_nowait()] == ["a", "b", None]
    assert mailbox.peek() is None


def test_who_waits_is_woken_by_an_item():
    mailbox = Mailbox(1)
    thread, results = in_thread(lambda: mailbox.get(WAIT))
    mailbox.put_nowait("a")
    thread.join(WAIT)
    assert results == ["a"]


def test_who_waits_is_woken_by_the_end():
    mailbox = Mailbox(1)
    waiting = [in_thread(mailbox.get), in_thread(lambda: mailbox.wait(WAIT))]
    mailbox.close()
    for thread, _ in waiting:
        thread.join(WAIT)
    assert isinstance(waiting[0][1][0], ChannelClosed) and waiting[1][1] == [False]


def test_a_wait_ends_with_its_time():
    mailbox = Mailbox(1)
    assert mailbox.get(0.0) is None and mailbox.wait(0.0) is False
    mailbox.put_nowait("a")
    assert mailbox.wait(0.0) is True


def test_a_closed_mailbox_takes_nothing_in_and_gives_out_what_it_has():
    mailbox = Mailbox(2)
    mailbox.put_nowait("a")
    mailbox.close()
    assert mailbox.put_nowait("b") is False and mailbox.get() == "a"
    with pytest.raises(ChannelClosed):
        mailbox.get()


def test_many_threads_lose_nothing_and_double_nothing():
    mailbox, taken = Mailbox(8), []

    def take():
        while (item := mailbox.get(WAIT)) is not None and item >= 0:
            taken.append(item)

    def put(numbers):
        for number in numbers:
            while not mailbox.put_nowait(number):
                threading.Event().wait(0.0)

    takers = [threading.Thread(target=take) for _ in range(3)]
    putters = [threading.Thread(target=put, args=(range(start, 300, 3),)) for start in range(3)]
    for thread in takers + putters:
        thread.start()
    for thread in putters:
        thread.join(WAIT)
    put([-1, -1, -1])
    for thread in takers:
        thread.join(WAIT)
    assert sorted(taken) == list(range(300))


def test_a_worker_does_its_jobs_in_order_in_one_thread():
    done = []
    worker = Worker("jobs", 100, failed=lambda error: None)
    for number in range(50):
        assert worker.submit(lambda number=number: done.append((number, threading.current_thread().name)))
    worker.close(WAIT)
    assert done == [(number, "jobs") for number in range(50)]
    assert worker.submit(lambda: None) is False


def test_a_job_that_fails_is_told_and_the_next_is_done():
    failures, done = [], []
    worker = Worker("jobs", 10, failures.append)
    error = ValueError("a job")

    def fail():
        raise error

    worker.submit(fail)
    worker.submit(lambda: done.append(True))
    worker.close(WAIT)
    assert failures == [error] and done == [True]


def test_a_worker_with_its_hands_full_refuses():
    held, begun = threading.Event(), threading.Event()
    worker = Worker("jobs", 1, failed=lambda error: None)
    worker.submit(lambda: (begun.set(), held.wait(WAIT)))
    assert begun.wait(WAIT)
    assert [worker.submit(lambda: None), worker.submit(lambda: None)] == [True, False]
    held.set()
    worker.close()


def test_a_worker_may_be_closed_by_its_own_job():
    closed = threading.Event()
    worker = Worker("jobs", 2, failed=lambda error: None)
    worker.submit(lambda: (worker.close(), closed.set()))
    assert closed.wait(WAIT)
    worker.close()


def test_a_worker_works_where_nobody_may_be_nicer(monkeypatch):
    def forbidden(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", forbidden, raising=False)
    done = []
    worker = Worker("jobs", 1, failed=lambda error: None)
    worker.submit(lambda: done.append(True))
    worker.close(WAIT)
    assert done == [True]


def niceness():
    """Of this thread; where threads have none of their own, of the process."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id() if sys.platform == "linux" else 0)


def test_a_worker_is_nicer_than_the_thread_that_made_it_which_stays_as_it_was():
    own, theirs = niceness(), []
    worker = Worker("jobs", 1, failed=lambda error: None)
    worker.submit(lambda: theirs.append(niceness()))
    worker.close(WAIT)
    assert theirs == [min(19, own + NICENESS) if sys.platform == "linux" else own]
    assert niceness() == own

"""The worker: jobs in order in one thread, failures told, a bound, and a lower priority."""

from __future__ import annotations

import os
import sys
import threading

from zmqtrain.core.priority import NICENESS
from zmqtrain.session.environment import Worker

WAIT = 30.0


class Failures:
    """An owner of jobs that keeps what they raise."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def on_job_failed(self, error: BaseException) -> None:
        self.errors.append(error)


def test_a_worker_does_its_jobs_in_order_in_one_thread():
    done = []
    worker = Worker("jobs", 100, Failures())
    for number in range(50):
        assert worker.submit(lambda number=number: done.append((number, threading.current_thread().name)))
    worker.close(WAIT)
    assert done == [(number, "jobs") for number in range(50)]
    assert worker.submit(lambda: None) is False


def test_a_job_that_fails_is_told_and_the_next_is_done():
    failures, done = Failures(), []
    worker = Worker("jobs", 10, failures)
    error = ValueError("a job")

    def fail():
        raise error

    worker.submit(fail)
    worker.submit(lambda: done.append(True))
    worker.close(WAIT)
    assert failures.errors == [error] and done == [True]


def test_a_worker_with_its_hands_full_refuses():
    held, begun = threading.Event(), threading.Event()
    worker = Worker("jobs", 1, Failures())
    worker.submit(lambda: (begun.set(), held.wait(WAIT)))
    assert begun.wait(WAIT)
    assert [worker.submit(lambda: None), worker.submit(lambda: None)] == [True, False]
    held.set()
    worker.close()


def test_a_worker_may_be_closed_by_its_own_job():
    closed = threading.Event()
    worker = Worker("jobs", 2, Failures())
    worker.submit(lambda: (worker.close(), closed.set()))
    assert closed.wait(WAIT)
    worker.close()


def test_a_worker_works_where_nobody_may_be_nicer(monkeypatch):
    def forbidden(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", forbidden, raising=False)
    done = []
    worker = Worker("jobs", 1, Failures())
    worker.submit(lambda: done.append(True))
    worker.close(WAIT)
    assert done == [True]


def niceness():
    """Of this thread; where threads have none of their own, of the process."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id() if sys.platform == "linux" else 0)


def test_a_worker_is_nicer_than_the_thread_that_made_it_which_stays_as_it_was():
    own, theirs = niceness(), []
    worker = Worker("jobs", 1, Failures())
    worker.submit(lambda: theirs.append(niceness()))
    worker.close(WAIT)
    assert theirs == [min(19, own + NICENESS) if sys.platform == "linux" else own]
    assert niceness() == own


def policy():
    """The policy by which this thread is given a core; None where the system does not say."""
    return os.sched_getscheduler(0) if sys.platform == "linux" else None


def test_a_worker_takes_no_core_from_who_wakes_it_which_stays_as_it_was():
    own, theirs = policy(), []
    worker = Worker("jobs", 1, Failures())
    worker.submit(lambda: theirs.append(policy()))
    worker.close(WAIT)
    usual = sys.platform == "linux" and own == os.SCHED_OTHER
    assert theirs == [os.SCHED_BATCH if usual else own]
    assert policy() == own

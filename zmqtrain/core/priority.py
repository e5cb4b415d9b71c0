"""How a thread leaves the cores to others where these are short: on Linux, where each thread has a priority."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

NICENESS = 5
"""A thread that stands back is nicer by this than the one that made it, so that training, heartbeats and sockets go
first: it has a third of their weight at a core."""


def stand_back() -> None:
    """Make this thread nicer, if that is allowed, and have it `follow`. Elsewhere it would be the whole process."""
    if sys.platform == "linux":
        this = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, this, min(19, os.getpriority(os.PRIO_PROCESS, this) + NICENESS))
    follow()


def follow() -> None:
    """Have this thread, when it is woken, wait for a core until those who run there have had their turn.

    Else a scheduler may run it in the place of the thread that woke it, while another core is idle; and training, which
    hands work over, would wait for the work.
    Source: sched(7), SCHED_BATCH.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

"""The thread that writes checkpoints: its failures stop nobody, and nobody waits for it without end."""

from __future__ import annotations

import threading
import time
from math import inf

import pytest

from tests.clocks import VirtualClock
from zmqtrain.checkpoint import background_writer
from zmqtrain.checkpoint.background_writer import BackgroundWriter
from zmqtrain.core.errors import CheckpointError


@pytest.mark.parametrize("error", [CheckpointError("No space left on device"), RuntimeError("not foreseen")])
def test_a_write_that_fails_is_a_warning_and_is_due_again(error, caplog, monkeypatch):
    monkeypatch.setattr(background_writer, "AGAIN_SECONDS", 0.0)
    writer = BackgroundWriter("checkpoints", "training", time)

    def fail():
        raise error

    writer.begin()
    writer.start(3, fail)
    assert writer.wait(60) and writer.unsaved and writer.retry_at <= time.monotonic()
    assert str(error) in caplog.text and "Training goes on" in caplog.text
    writer.begin()
    assert writer.retry_at == inf
    writer.start(4, lambda: None)
    assert writer.wait(60) and not writer.unsaved
    assert "written again, from version 4" in caplog.text


def test_a_write_that_fails_is_due_again_by_the_clock_of_its_owner():
    def fail():
        raise CheckpointError("No space left on device")

    clock = VirtualClock(1000.0)
    writer = BackgroundWriter("checkpoints", "training", clock)
    writer.begin()
    writer.start(3, fail)
    assert writer.wait(60) and writer.retry_at == 1000.0 + background_writer.AGAIN_SECONDS


def test_one_write_at_a_time_and_the_wait_for_it_is_bounded():
    writer, go_on, order = BackgroundWriter("checkpoints", "training", time), threading.Event(), []
    writer.begin()
    writer.start(1, lambda: go_on.wait(60) and order.append(1))
    assert writer.busy and not writer.wait(0.01)
    threading.Timer(0.01, go_on.set).start()
    writer.begin()
    writer.start(2, lambda: order.append(2))
    assert writer.wait(60) and order == [1, 2]


def test_a_write_for_which_there_is_no_thread_is_put_off(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    writer = BackgroundWriter("checkpoints", "training", time)
    writer.begin()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer.start(1, lambda: None)
    assert writer.unsaved and not writer.busy and writer.retry_at < inf

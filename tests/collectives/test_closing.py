"""Closing a communicator waits for what is in flight, never for what nobody brings about, and never for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zmqtrain.core.errors import ConfigError, PeerLost

Make = Callable[..., Any]
LARGE = 300_000


def begin(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def closing_begins(comm: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set once the closing communicator has refused what it will not receive."""
    begun, stop = threading.Event(), comm._group.stop_receiving

    def stop_receiving() -> None:
        stop()
        begun.set()

    monkeypatch.setattr(comm._group, "stop_receiving", stop_receiving)
    return begun


def test_a_large_send_arrives_though_its_sender_closes_before_it_is_received(
    ranks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks(2).communicators
    begun = closing_begins(first, monkeypatch)
    x = np.arange(LARGE)
    request = first.isend(x, dest=1)
    closing = begin(first.close)
    assert begun.wait(20) and closing.is_alive()
    np.testing.assert_array_equal(second.recv(), x)
    closing.join(20)
    assert not closing.is_alive() and request.wait() is None
    with pytest.raises(PeerLost, match="closed"):
        second.recv(source=0)


def test_a_collective_ends_well_though_a_rank_closes_in_the_middle_of_it(
    ranks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks(2).communicators
    begun = closing_begins(first, monkeypatch)
    request = first.iallreduce(np.ones(LARGE), algorithm="ring")
    closing = begin(first.close)
    assert begun.wait(20) and closing.is_alive()
    assert second.allreduce(np.ones(LARGE), algorithm="ring")[-1] == 2
    closing.join(20)
    assert not closing.is_alive() and request.wait()[-1] == 2


def test_a_message_that_has_begun_to_come_is_received_before_the_communicator_is_closed(
    ranks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = ranks(2)
    first, second = group.communicators
    begun = closing_begins(first, monkeypatch)
    x = np.arange(LARGE)
    sending = second.isend(x, dest=0)
    message = first.mprobe()
    group.ports.hold(1, 0)
    request = first.imrecv(message)
    closing = begin(first.close)
    assert begun.wait(20) and closing.is_alive()
    group.ports.release(1, 0)
    closing.join(20)
    assert not closing.is_alive()
    np.testing.assert_array_equal(request.wait(), x)
    sending.wait()


def test_a_receive_that_no_message_has_come_for_is_not_waited_for(ranks: Make) -> None:
    first, _ = ranks(2).communicators
    request = first.irecv(source=1)
    closing = begin(first.close)
    closing.join(20)  # the communicator's own time is 30 s
    assert not closing.is_alive()
    with pytest.raises(PeerLost, match="closed"):
        request.wait()


@pytest.mark.parametrize("who", [0, 1])
def test_two_ranks_that_close_do_not_wait_for_each_other_to_receive(ranks: Make, who: int) -> None:
    communicators = ranks(2).communicators
    requests = [comm.isend(np.ones(LARGE), dest=1 - comm.rank) for comm in communicators]
    threads = [begin(comm.close) for comm in (communicators[who], communicators[1 - who])]
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for request in requests:
        with pytest.raises(PeerLost, match="closed its communicator"):
            request.wait()


def test_a_close_ends_when_its_time_is_up_and_says_what_it_waited_for(
    ranks: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmqtrain.collectives.group.EXPLAIN_SECONDS", 60.0)
    monkeypatch.setattr("zmqtrain.collectives.group.GRACE_SECONDS", 60.0)
    first, _ = ranks(2).communicators
    request, other = first.isend(np.ones(LARGE), dest=1, tag=7), first.ibarrier()
    with caplog.at_level(logging.WARNING):
        first.close(timeout_seconds=0.05)
    assert "is closed all the same" in caplog.text and "rank 1 (pc-1)" in caplog.text
    assert "; 1 more in flight" in caplog.text
    for one in (request, other):
        with pytest.raises(PeerLost, match="closed"):
            one.wait()


def test_a_with_block_that_an_exception_ends_does_not_wait(ranks: Make, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = ranks(2).communicators
    with pytest.raises(ValueError, match="a mistake"), first:
        request = first.ibarrier()
        raise ValueError("a mistake")
    with pytest.raises(PeerLost):
        request.wait()
    assert caplog.text == ""


def test_what_ended_a_rank_is_told_in_one_line_that_can_be_printed(ranks: Make) -> None:
    first, second = ranks(2).communicators
    with pytest.raises(ValueError, match="two"), first:
        raise ValueError("two\nlines \ud800 \x1b[31m")
    with pytest.raises(PeerLost, match=r"after ValueError: two lines \s*\[31m$"):
        second.recv(source=0)


def test_a_mistake_that_ends_one_rank_is_named_on_all_others(ranks: Make) -> None:
    group = ranks(3)

    def part(comm: Any) -> Any:
        with comm:
            return comm.scatterv([np.ones(3)] * 2 if comm.rank == 0 else None)  # for three ranks

    first, *others = group.play(part)
    assert isinstance(first, ConfigError)
    for error in others:
        assert isinstance(error, PeerLost) and error.rank == 0
        assert str(error) == f"pc-0 is lost: it has closed its communicator after ConfigError: {first}"

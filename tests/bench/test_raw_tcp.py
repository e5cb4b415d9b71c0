"""What is counted of plain TCP: what comes while it is counted, and nothing that had come before."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

import raw_tcp


@pytest.mark.parametrize(
    ("warmup_seconds", "later", "counted", "seconds"),
    [
        (0.5, [60.0, 60.0], 3, 2.0),  # asked how much waits, and answered at once
        (0.5, [60.0, 61.0, 61.0, 61.0], 3, 1.0),  # it was held up in the midst of asking, and asks again
        (0.0, [60.0], 100_003, 2.0),
    ],
)
def test_what_came_to_a_receiver_that_was_held_up_as_it_warmed_up_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, warmup_seconds: float, later: list[float], counted: int, seconds: float
) -> None:
    sender, receiver = socket.socketpair()
    sender.sendall(bytes(100_000))
    times = iter([0.0, 60.0, *later])  # of the accepting, of the warm-up's end; then of when the count begins

    def passed() -> float:
        if (now := next(times, None)) is not None:
            return now
        if sender.fileno() >= 0:
            sender.sendall(b"now")
            sender.close()
        return 62.0

    monkeypatch.setattr(raw_tcp, "_accept_one", lambda: receiver)
    used = iter([1.0, 1.5])  # when the count begins and ends
    monkeypatch.setattr(raw_tcp, "time", SimpleNamespace(perf_counter=passed, process_time=lambda: next(used)))
    assert raw_tcp.receive(5.0, warmup_seconds) == {"bytes": counted, "seconds": seconds, "cpu_seconds": 0.5}

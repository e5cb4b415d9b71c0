"""What is counted of plain TCP: what comes while it is counted, and nothing that had come before."""

from __future__ import annotations

import socket

import pytest

import raw_tcp


@pytest.mark.parametrize(("warmup_seconds", "counted"), [(0.5, 3), (0.0, 100_003)])
def test_what_came_to_a_receiver_that_was_held_up_as_it_warmed_up_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, warmup_seconds: float, counted: int
) -> None:
    sender, receiver = socket.socketpair()
    sender.sendall(bytes(100_000))
    times = iter([0.0, 60.0])  # of the accepting, and of the warm-up's end; then the count begins

    def passed() -> float:
        if (now := next(times, None)) is not None:
            return now
        if sender.fileno() >= 0:
            sender.sendall(b"now")
            sender.close()
        return 60.0

    monkeypatch.setattr(raw_tcp, "_accept_one", lambda: receiver)
    monkeypatch.setattr(raw_tcp.time, "perf_counter", passed)
    assert raw_tcp.receive(2.0, warmup_seconds)["bytes"] == counted

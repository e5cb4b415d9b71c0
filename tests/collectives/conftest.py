"""Ranks of a group, each in a thread of its own, on ports in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zmqtrain.collectives import calls
from zmqtrain.collectives.communicator import Communicator
from zmqtrain.transport.memory_ports import MemoryPorts, memory_ports

PATIENCE_SECONDS = 30.0


class Ranks:
    """The communicators of one group, and what their ranks do side by side."""

    def __init__(self, size: int, **options: Any) -> None:
        self.ports: MemoryPorts = memory_ports(size, **options)
        self.communicators = [Communicator(port, timeout_seconds=PATIENCE_SECONDS) for port in self.ports]

    def play(self, part: Callable[[Communicator], Any], communicators: list[Communicator] | None = None) -> list[Any]:
        """Have each rank do its part; return what each returns, or raises."""
        chosen = self.communicators if communicators is None else communicators
        results: list[Any] = [None] * len(chosen)

        def do(index: int) -> None:
            try:
                results[index] = part(chosen[index])
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=do, args=(index,), daemon=True) for index in range(len(chosen))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_SECONDS)
            assert not thread.is_alive(), "a rank hangs"
        return results

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close(timeout_seconds=0.0)


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    """Make groups that are closed after the test: ranks(size)."""
    made: list[Ranks] = []

    def make(size: int, **options: Any) -> Ranks:
        made.append(Ranks(size, **options))
        return made[-1]

    yield make
    for group in made:
        group.close()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred bytes are many, so that flow control has something to do."""
    monkeypatch.setattr(calls, "PART_BYTES", 64)
    monkeypatch.setattr(calls, "WINDOW_BYTES", 256)
    monkeypatch.setattr(calls, "REPORT_BYTES", 64)
    monkeypatch.setattr(calls, "COPIED_BELOW_BYTES", 32)

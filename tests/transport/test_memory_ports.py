"""The ports in memory: what they deliver, in which order and thread, and the faults that a test asks for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from zmqtrain.core.errors import ConfigError, LocalProtocolError
from zmqtrain.core.types import Buffer
from zmqtrain.transport.memory_ports import MemoryPort, MemoryPorts, memory_ports

PATIENCE_SECONDS = 20


class Recorder:
    """A listener that notes what it is told, and in which thread."""

    def __init__(self) -> None:
        self.told: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.ticks: queue.Queue[float] = queue.Queue()
        self.threads: set[str] = set()

    def on_message(self, rank: int, frames: list[Buffer]) -> None:
        self.threads.add(threading.current_thread().name)
        self.told.put(("message", rank, frames))

    def on_lost(self, rank: int, why: str) -> None:
        self.told.put(("lost", rank, why))

    def on_tick(self, now: float) -> None:
        self.ticks.put(now)

    def next(self) -> tuple[Any, ...]:
        return self.told.get(timeout=PATIENCE_SECONDS)


@pytest.fixture
def ports() -> Iterator[MemoryPorts]:
    made = memory_ports(3)
    yield made
    made.close()


def listen(ports: list[MemoryPort]) -> list[Recorder]:
    recorders = [Recorder() for _ in ports]
    for port, recorder in zip(ports, recorders, strict=True):
        port.start(recorder)
    return recorders


def test_messages_of_a_pair_come_in_order_in_the_ports_own_thread(ports: MemoryPorts) -> None:
    recorders = listen(ports)
    for index in range(20):
        ports[0].call(lambda index=index: ports[0].send(2, [b"%d" % index, b"more"]))
    assert [recorders[2].next() for _ in range(20)] == [("message", 0, [b"%d" % i, b"more"]) for i in range(20)]
    assert recorders[2].threads == {"memory-port-2"}


def test_what_came_before_the_listener_is_told_to_it(ports: MemoryPorts) -> None:
    ports[0].start(Recorder())
    sent = threading.Event()
    ports[0].call(lambda: ports[0].send(1, [b"early"]))
    ports[0].call(sent.set)
    assert sent.wait(PATIENCE_SECONDS)
    late = Recorder()
    ports[1].start(late)
    assert late.next() == ("message", 0, [b"early"])


def test_a_large_frame_is_read_when_it_is_delivered_and_stays_as_it_came(ports: MemoryPorts) -> None:
    recorders = listen(ports)
    ports.hold(0, 1)
    large, sent = bytearray(1 << 17), threading.Event()
    ports[0].call(lambda: ports[0].send(1, [b"head", large]))
    ports[0].call(sent.set)
    assert sent.wait(PATIENCE_SECONDS)
    large[0] = 7
    ports.release(0, 1)
    _, _, (_, frame) = recorders[1].next()
    large[0] = 9
    assert frame[0] == 7 and frame.readonly


def test_a_killed_rank_is_told_to_the_others_and_says_nothing_more(ports: MemoryPorts) -> None:
    recorders = listen(ports)
    ports.kill(1, "pulled")
    assert recorders[0].next() == ("lost", 1, "pulled") == recorders[2].next()
    ports[1].call(lambda: ports[1].send(0, [b"from the dead"]))
    ports[2].call(lambda: ports[2].send(0, [b"alive"]))
    assert recorders[0].next() == ("message", 2, [b"alive"])


def test_a_rank_is_killed_in_the_middle_of_what_it_sends(ports: MemoryPorts) -> None:
    recorders = listen(ports)
    ports.kill_after(0, 2)

    def send() -> None:
        for index in range(4):
            ports[0].send(1, [b"%d" % index])

    ports[0].call(send)
    assert [recorders[1].next() for _ in range(2)] == [("message", 0, [b"0"]), ("message", 0, [b"1"])]
    assert recorders[1].next()[:2] == ("lost", 0) == recorders[2].next()[:2]


def test_a_rank_that_is_cut_off_is_told_so_itself(ports: MemoryPorts) -> None:
    recorders = listen(ports)
    ports.cut_off(1)
    assert recorders[0].next() == ("lost", 1, "its cable is out") == recorders[1].next()
    ports[1].call(lambda: ports[1].send(0, [b"nobody hears it"]))
    ports[2].call(lambda: ports[2].send(0, [b"alive"]))
    assert recorders[0].next() == ("message", 2, [b"alive"])


def test_who_closes_sends_what_it_was_asked_to_before_the_others_are_told(ports: MemoryPorts) -> None:
    recorders = listen(ports)
    ports[0].call(lambda: ports[0].send(1, [b"last"]))
    ports[0].close()
    ports[0].close()
    assert recorders[1].next() == ("message", 0, [b"last"])
    assert recorders[1].next()[:2] == ("lost", 0)


def test_time_passes_and_a_delay_keeps_the_order() -> None:
    ports = memory_ports(2, delay_seconds=0.01)
    recorders = listen(ports)
    for index in range(5):
        ports[0].call(lambda index=index: ports[0].send(1, [b"%d" % index]))
    assert [recorders[1].next()[2] for _ in range(5)] == [[b"%d" % index] for index in range(5)]
    assert recorders[0].ticks.get(timeout=PATIENCE_SECONDS) < recorders[0].ticks.get(timeout=PATIENCE_SECONDS)
    ports.close()


def test_what_no_port_carries_is_refused(ports: MemoryPorts) -> None:
    with pytest.raises(LocalProtocolError, match="own thread"):
        ports[0].send(1, [b"x"])
    refused: queue.Queue[Exception] = queue.Queue()

    def send_to(rank: int) -> None:
        try:
            ports[0].send(rank, [b"x"])
        except LocalProtocolError as error:
            refused.put(error)

    listen(ports)
    for rank in (0, 3, -1):
        ports[0].call(lambda rank=rank: send_to(rank))
        assert "has no way to" in str(refused.get(timeout=PATIENCE_SECONDS))
    with pytest.raises(ConfigError, match="at least 1 rank"):
        memory_ports(0)

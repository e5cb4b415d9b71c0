"""Ports of a group for tests: brokers, listeners that remember, ports in threads and in processes of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from zmqtrain.broker.serve import BrokerThread
from zmqtrain.collectives.mesh import MeshPort, open_port
from zmqtrain.core.settings import RunSettings
from zmqtrain.transport.zmq_keys import CurveKeys

WAIT_SECONDS = 60.0


NOWHERE = "tcp://127.0.0.1:9"
"""Nobody listens there."""


@contextlib.contextmanager
def broker(keys: CurveKeys | None = None) -> Iterator[str]:
    """Give the address of a broker."""
    with BrokerThread("tcp://127.0.0.1:0", RunSettings(), keys=keys) as thread:
        yield thread.address


class Remembering:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, list[bytes]]] = []
        self.lost: dict[int, str] = {}
        self.ticks = 0
        self._changed = threading.Condition()

    def on_message(self, rank: int, frames: list[Any]) -> None:
        with self._changed:
            self.messages.append((rank, [bytes(frame) for frame in frames]))
            self._changed.notify_all()

    def on_lost(self, rank: int, why: str) -> None:
        with self._changed:
            assert rank not in self.lost
            self.lost[rank] = why
            self._changed.notify_all()

    def on_tick(self, now: float) -> None:
        with self._changed:
            self.ticks += 1
            self._changed.notify_all()

    def wait(self, done: Callable[[Remembering], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: done(self), WAIT_SECONDS), (self.messages[-3:], self.lost)


def open_all(
    hub: str, size: int, here: int | None = None, addresses: dict[int, str] | None = None, **options: Any
) -> list[MeshPort]:
    """Open the ports of a group in this process, one thread each; the options are those of `open_port`.

    However slow the machine is, they are reached directly, if that is not asked otherwise.
    here: how many of the group are in this process, the first ranks; None: all.  addresses: by rank what it says.
    """

    def open_one(rank: int) -> MeshPort:
        said = (addresses or {}).get(rank, "")
        usual = {"name": f"pc-{rank}", "timeout_seconds": WAIT_SECONDS, "direct_seconds": WAIT_SECONDS}
        return open_port(hub, size, rank, **usual | options, address=said)

    ranks = range(size if here is None else here)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(open_one, ranks))


@contextlib.contextmanager
def ports(
    hub: str, size: int, here: int | None = None, addresses: dict[int, str] | None = None, **options: Any
) -> Iterator[tuple[list[MeshPort], list[Remembering]]]:
    """Give the ports of a group, as `open_all` opens them, and their listeners; close them afterwards."""
    opened = open_all(hub, size, here, addresses, **options)
    listeners = [Remembering() for _ in opened]
    for port, listener in zip(opened, listeners, strict=True):
        port.start(listener)
    try:
        yield opened, listeners
    finally:
        for port in opened:
            port.close(0.2)


def send(port: MeshPort, rank: int, *messages: list[Any]) -> None:
    """Send messages from the port's own thread."""
    port.call(lambda: [port.send(rank, message) for message in messages])


ECHO = """
import ctypes, sys, threading
from zmqtrain.collectives.mesh import open_port
hub, size, rank, key = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
done = threading.Event()
class Echo:
    def on_message(self, source, frames): port.send(source, frames)
    def on_lost(self, rank, why): print("lost", rank, why, flush=True)
    def on_tick(self, now): pass
key = key.encode() or None
port = open_port(hub, size, rank, name=f"pc-{rank}", server_key=key, timeout_seconds=60, direct_seconds=60)
print("ready", flush=True)  # before whatever it is told
port.start(Echo())
while sys.stdin.readline() == "hold\\n":  # the interpreter's lock, for 2 s
    ctypes.PyDLL(None).usleep(2_000_000)
    print("held", flush=True)
port.close()
"""


@contextlib.contextmanager
def echoing(hub: str, size: int, ranks: range, key: str = "") -> Iterator[dict[int, subprocess.Popen[str]]]:
    """Give processes that send back what they are sent; an empty line on their stdin closes their ports."""
    processes = {
        rank: subprocess.Popen(
            [sys.executable, "-c", ECHO, hub, str(size), str(rank), key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    }
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()

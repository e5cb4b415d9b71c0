"""Move bytes by plain TCP sockets and nothing else, to know what a link can carry before anything is built on it.

Rule 1: each command is one process with one connection, so that it can run inside a network namespace.
Rule 2: a listener prints its port as soon as it listens; nobody has to guess when it is ready.
Rule 3: the receiver measures: bytes that were sent may still lie in a queue.  What had come before it begins to count
is not counted: one that was held up would find more in its own buffer than the link carries meanwhile.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import socket
import statistics
import struct
import termios
import time
from collections.abc import Callable

__all__ = ["receive", "send", "echo", "ping", "main"]

PIECE_BYTES = 1 << 20
PING_BYTES = 64
CONNECT_SECONDS = 5.0
ASKED_SECONDS = 1e-3


def receive(seconds: float, warmup_seconds: float) -> dict[str, float]:
    """Accept one sender, let it warm up, then count for `seconds`; return {"bytes", "seconds", "cpu_seconds"}.

    A sender that closes earlier ends the count; with no warm-up all that it sent is counted.
    """
    piece = memoryview(bytearray(PIECE_BYTES))
    with _accept_one() as connection:
        warm = time.perf_counter() + warmup_seconds
        while time.perf_counter() < warm and connection.recv_into(piece):
            pass
        started, waiting = _bytes_waiting(connection) if warmup_seconds else (time.perf_counter(), 0)
        while waiting > 0 and (received := connection.recv_into(piece, min(waiting, PIECE_BYTES))):
            waiting -= received
        count, used = 0, time.process_time()
        while (now := time.perf_counter()) < started + seconds and (received := connection.recv_into(piece)):
            count += received
    return {"bytes": count, "seconds": now - started, "cpu_seconds": time.process_time() - used}


def send(address: str, port: int, limit_bytes: int | None) -> dict[str, float]:
    """Send zeros until `limit_bytes` or until the receiver closes; return {"bytes", "cpu_seconds"}.

    bytes: what the kernel has taken.
    """
    piece, count = bytes(PIECE_BYTES), 0
    with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
        connection.settimeout(None)
        used = time.process_time()
        try:
            while limit_bytes is None or count < limit_bytes:
                wanted = PIECE_BYTES if limit_bytes is None else min(PIECE_BYTES, limit_bytes - count)
                count += connection.send(piece[:wanted])
        except (BrokenPipeError, ConnectionResetError):
            pass
        used = time.process_time() - used
    return {"bytes": count, "cpu_seconds": used}


def echo() -> dict[str, float]:
    """Accept one peer and send back whatever comes, until it closes; return {"bytes": ...}."""
    count = 0
    with _accept_one() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while piece := connection.recv(PIECE_BYTES):
            connection.sendall(piece)
            count += len(piece)
    return {"bytes": count}


def ping(address: str, port: int, count: int) -> dict[str, float]:
    """Make `count` round trips of 64 bytes, after a tenth as many to warm up; return {"p50_milliseconds": ..., p99}."""
    question, trips = bytes(PING_BYTES), []
    with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count + count // 10):
            started = time.perf_counter()
            connection.sendall(question)
            missing = PING_BYTES
            while missing:
                answer = connection.recv(missing)
                if not answer:
                    raise ConnectionError(f"{address}:{port} closed in the middle of a round trip")
                missing -= len(answer)
            trips.append(1e3 * (time.perf_counter() - started))
    kept = sorted(trips[-count:])
    return {"p50_milliseconds": statistics.median(kept), "p99_milliseconds": kept[int(0.99 * (len(kept) - 1))]}


def main() -> None:
    """Run one of the commands; print its result as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("receive", help="print a port, accept one sender, measure")
    command.add_argument("--seconds", type=float, required=True)
    command.add_argument("--warmup-seconds", type=float, default=0.0)
    command = commands.add_parser("send", help="send zeros")
    command.add_argument("address")
    command.add_argument("port", type=int)
    command.add_argument("--limit-bytes", type=int)
    commands.add_parser("echo", help="print a port, accept one peer, echo")
    command = commands.add_parser("ping", help="make round trips of 64 bytes")
    command.add_argument("address")
    command.add_argument("port", type=int)
    command.add_argument("--count", type=int, default=500)
    chosen = vars(parser.parse_args())
    programs: dict[str, Callable[..., dict[str, float]]] = {
        "receive": receive,
        "send": send,
        "echo": echo,
        "ping": ping,
    }
    print(json.dumps(programs[chosen.pop("command")](**chosen)), flush=True)


def _accept_one() -> socket.socket:
    """Listen on a free port of all addresses, print it, and return the first connection."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        return listener.accept()[0]


def _bytes_waiting(connection: socket.socket) -> tuple[float, int]:
    """Return a moment, and how many bytes had come over a connection and were not read then.

    It is asked again until the answer takes less than a millisecond: whoever is held up in the midst of it knows the
    moment too badly.
    """
    while True:
        asked = time.perf_counter()
        count: int = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0]
        if time.perf_counter() - asked < ASKED_SECONDS:
            return asked, count


if __name__ == "__main__":
    main()

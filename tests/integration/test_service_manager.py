"""Reports to a service manager: sd_notify's datagrams, of a broker and of a node that run as commands."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import broker

from zmqtrain.core.launcher import Service
from zmqtrain.core.settings import RunSettings
from zmqtrain.transport.service_manager import REPORT_SECONDS, ServiceManager

SECONDS = 60.0


@contextmanager
def listening(place: str) -> Iterator[socket.socket]:
    """Listen as systemd does, at a path or an abstract name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + place[1:] if place.startswith("@") else place)
        listener.settimeout(SECONDS)
        yield listener


def reports_until(listener: socket.socket, wanted: str) -> list[list[str]]:
    """Return the lines of all datagrams up to the first that has a line that begins with `wanted`."""
    found: list[list[str]] = []
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        found.append(listener.recv(4096).decode().split("\n"))
        if any(line.startswith(wanted) for line in found[-1]):
            return found
    raise AssertionError(f"no {wanted}: {found}")


def start(place: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zmqtrain.cli", *arguments]
    environment = {**os.environ, "NOTIFY_SOCKET": place, **more}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(params=["path", "abstract"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "path" else f"@zmqtrain-{secrets.token_hex(8)}"


def test_each_report_is_one_datagram_with_a_line_of_status(place):
    manager = ServiceManager(Service(place, 30.0))
    assert manager.listens and manager.interval_seconds == REPORT_SECONDS
    assert ServiceManager(Service(place, 0.9)).interval_seconds == pytest.approx(0.3)
    with listening(place) as listener:
        manager.ready("a node\nof a run")
        manager.alive("version 3")
        manager.stopping("saves")
        got = [listener.recv(4096) for _ in range(3)]
    assert got == [
        b"READY=1\nSTATUS=a node of a run",
        b"WATCHDOG=1\nSTATUS=version 3",
        b"STOPPING=1\nSTATUS=saves",
    ]


def test_a_report_that_nobody_takes_is_dropped(place, tmp_path):
    ServiceManager(Service(place, 1.0)).ready("nobody listens")
    ServiceManager(Service("/" + "x" * 200, 1.0)).ready("no socket can have that name")
    assert not ServiceManager().listens
    ServiceManager().ready("there is no service manager")


def test_a_broker_is_ready_when_it_listens_feeds_the_watchdog_unless_it_hangs_and_says_that_it_stops(tmp_path):
    place = str(tmp_path / "notify")
    with listening(place) as listener:
        process = start(place, "broker", "--bind", "tcp://127.0.0.1:*", "--no-checkpoint", WATCHDOG_USEC="300000")
        try:
            assert not any("STOPPING=1" in lines for lines in reports_until(listener, "READY=1"))
            fed = [reports_until(listener, "WATCHDOG=1")[-1] for _ in range(3)]
            assert all(re.fullmatch(r"STATUS=run-\w+: 0 nodes, nobody has trained yet", lines[1]) for lines in fed)
            os.kill(process.pid, signal.SIGSTOP)
            listener.settimeout(1.0)
            with pytest.raises(TimeoutError):
                for _ in range(20):  # the few that were sent before it was stopped
                    listener.recv(4096)
            os.kill(process.pid, signal.SIGCONT)
            os.kill(process.pid, signal.SIGINT)
            listener.settimeout(SECONDS)
            reports_until(listener, "STOPPING=1")
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
            process.communicate()


def test_a_node_is_ready_when_its_broker_has_let_it_in_and_says_that_it_stops(tmp_path):
    place = str(tmp_path / "notify")
    with listening(place) as listener, broker(RunSettings(program="image")) as hub:
        process = start(place, "node", hub.address, "--name", "pc-1")
        try:
            (*_, ready) = reports_until(listener, "READY=1")
            assert re.fullmatch(r"STATUS=pc-1: a node of run-\w+ at tcp://127.0.0.1:\d+", ready[1])
            os.kill(process.pid, signal.SIGINT)
            reports_until(listener, "STOPPING=1")
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
            process.communicate()


def test_a_node_that_finds_no_broker_never_says_that_it_is_ready(tmp_path):
    place = str(tmp_path / "notify")
    with listening(place) as listener:
        process = start(place, "node", "tcp://127.0.0.1:1", "--wait-seconds", "0.2")
        assert process.communicate(timeout=SECONDS) and process.returncode == 2
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(4096)

"""Reports of this process to the service manager that started it, as systemd takes them (sd_notify).

A report is one datagram of lines NAME=value to a Unix socket: a path, or "@name" for an abstract one.
Rule: without a service manager nothing is sent, and a report that cannot be sent is dropped: no process ends by it.
Source: sd_notify(3), systemd 252.
"""

from __future__ import annotations

import contextlib
import socket

from zmqtrain.core.launcher import Service

REPORT_SECONDS = 5.0
"""The longest time between two reports."""


class ServiceManager:
    """Takes this process's reports. service: how it listens; the default takes none."""

    def __init__(self, service: Service | None = None) -> None:
        self._service = service or Service("", 0.0)

    @property
    def listens(self) -> bool:
        """Whether reports are taken."""
        return bool(self._service.socket)

    @property
    def interval_seconds(self) -> float:
        """How often `alive` is to be called: three times in the time of the watchdog, and often enough to be read."""
        watchdog = self._service.watchdog_seconds
        return min(REPORT_SECONDS, watchdog / 3) if watchdog else REPORT_SECONDS

    def ready(self, status: str) -> None:
        """Report that this process serves now; `systemctl start` waits for it. status: one line for people."""
        self._send("READY=1", _status(status))

    def alive(self, status: str) -> None:
        """Feed the watchdog."""
        self._send("WATCHDOG=1", _status(status))

    def stopping(self, status: str) -> None:
        """Report that this process ends in order."""
        self._send("STOPPING=1", _status(status))

    def _send(self, *lines: str) -> None:
        place = self._service.socket
        if not place:
            return
        if place.startswith("@"):
            place = "\0" + place[1:]
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode("utf-8", "replace"), place)


def _status(text: str) -> str:
    return f"STATUS={' '.join(text.split())}"

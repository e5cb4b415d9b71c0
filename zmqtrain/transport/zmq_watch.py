"""Tell at once when a connection that was there has gone: libzmq makes it anew by itself, and says nothing.

Rule 1: only a loss is told, not an attempt that fails.  Rule 2: who is told may close the watch at once.
Source: zmq_socket_monitor(3), ZMQ_EVENT_DISCONNECTED.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

__all__ = ["ConnectionWatch"]


class ConnectionWatch:
    """The watch over the connections of one socket, in the running loop. told: called there at each loss."""

    def __init__(self, socket: zmq.SyncSocket, told: Callable[[], None]) -> None:
        self._socket, self._told, self._loop = socket, told, asyncio.get_running_loop()
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._descriptor = self._monitor.FD
        self._loop.add_reader(self._descriptor, self._look)
        self._look()  # from the first look on the descriptor tells of news

    def _look(self) -> None:
        lost = False
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # the descriptor is edge-triggered: take all
            self._monitor.recv_multipart(zmq.NOBLOCK)
            lost = True
        if lost:
            self._told()

    def close(self) -> None:
        """End the watch; before its socket is closed."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

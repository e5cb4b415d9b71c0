"""Tell at once when a connection that was there has gone, and why one does not come about: libzmq makes it anew by
itself, and says nothing.

Rule 1: as a loss only that is told of which had been a connection, not an attempt that fails.  Rule 2: who is told may
close the watch at once.
Source: zmq_socket_monitor(3), ZMQ_EVENT_DISCONNECTED and ZMQ_EVENT_HANDSHAKE_*.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import zmq

_SUCCEEDED, _REFUSED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_GONE = int(zmq.EVENT_DISCONNECTED)
_ENDS = {
    _SUCCEEDED: "",
    _REFUSED: "key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "broken",
}
_WATCHED = sum(_ENDS) | _GONE


class ConnectionWatch:
    """The watch over the connections of one socket, in the running loop. lost: called there at each loss.

    ended: called at the end of each handshake, with "" if it succeeded, "key" if the other end knows this key and does
    not let it in, "handshake" if the two do not understand each other (after these libzmq does not try again), "broken"
    if the other end ended the connection in its midst: so does a hub that has other keys or wants some,
    and one that is just ending.
    """

    def __init__(self, socket: zmq.SyncSocket, lost: Callable[[], None], ended: Callable[[str], None]) -> None:
        self._socket, self._lost, self._ended, self._loop = socket, lost, ended, asyncio.get_running_loop()
        self._there = self._closed = False
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._descriptor = self._monitor.FD
        self._loop.add_reader(self._descriptor, self._look)
        self._look()  # from the first look on the descriptor tells of news

    def _look(self) -> None:
        while not self._closed and int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # edge-triggered: take all
            event = struct.unpack("=HI", self._monitor.recv_multipart(zmq.NOBLOCK)[0])[0]
            if event != _GONE:
                self._there = self._there or event == _SUCCEEDED
                self._ended(_ENDS[event])
            elif self._there:
                self._there = False
                self._lost()

    def close(self) -> None:
        """End the watch; before its socket is closed."""
        self._closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

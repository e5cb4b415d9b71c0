"""Stand at the door of a ROUTER: answer libzmq who may come in (ZAP), watch its connections, and cut some.

Rule 1: as in zmq_port, no call waits inside zmq: each socket is read until nothing is left.
Rule 2: a descriptor that libzmq names may be closed, and its number taken by another connection, while its event is in
flight.  So it is duplicated, looked at, and only then shut down: what was looked at is what is shut.  The number of the
duplicate is reserved from the beginning: connections are cut also when they have taken all descriptors of the process.
Rule 3: who is refused is told so (status 400), and nothing else.  libzmq then tries no more; a channel of ours does
(`zmq_watch`), so that a key that is authorised later comes in.

Source: ZAP (RFC 27), zmq_socket_monitor(3); libzmq has no call to disconnect a peer of a ROUTER (its issue 2877).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket as sockets
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator

import zmq
import zmq.utils.z85

from zmqtrain.transport.admission import Admission
from zmqtrain.transport.connections import Connection, ConnectionLimits, Connections, Cut
from zmqtrain.transport.refusals import Refusals

ZAP_ADDRESS, ZAP_DOMAIN = "inproc://zeromq.zap.01", b"zmqtrain"
MAX_WAITING_REQUESTS = 1024
"""Who asks while it is not known who may come in waits; of more than so many the oldest is refused."""
SPARE_DESCRIPTORS, LEAST_CONNECTIONS = 128, 16
"""Open files that are left for all else; and what a hub takes in however few there may be."""

_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_UNFINISHED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_FAILED = _REFUSED | _UNFINISHED | int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_ACCEPTED, _DISCONNECTED, _CLOSED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED), int(zmq.EVENT_CLOSED)
_NUMBERS = itertools.count()


class _Reader:
    """Hand on what comes at a socket of this process (inproc), in the running loop."""

    def __init__(self, socket: zmq.SyncSocket, take: Callable[[list[bytes]], None]) -> None:
        self._socket, self._take = socket, take
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.FD
        self._loop.add_reader(self._descriptor, self.read)
        self._loop.call_soon(self.read)  # what came before the descriptor was watched rings no more

    def read(self) -> None:
        """Take all that is here (its descriptor is edge-triggered)."""
        with contextlib.suppress(zmq.Again):
            while not self._socket.closed:
                self._take(self._socket.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)


class ZapHandler:
    """Answers for a context which CURVE keys come in.  admission: who does.  refused: told the address of who does not.

    Made before the socket that it guards is bound; there is one in a context.
    """

    def __init__(
        self, context: zmq.Context[zmq.SyncSocket], admission: Admission, refused: Callable[[str], None]
    ) -> None:
        self._admission, self._refused = admission, refused
        self._waiting: deque[list[bytes]] = deque()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)
        self._reader = _Reader(self._socket, self._take)

    def _take(self, frames: list[bytes]) -> None:
        # routing id, "", version, request id, domain, address, identity, mechanism, the public key
        if len(frames) != 9 or frames[2] != b"1.0" or frames[7] != b"CURVE":
            return
        if self._admission.known:
            return self._answer(frames)
        self._waiting.append(frames)
        if len(self._waiting) > MAX_WAITING_REQUESTS:
            self._answer(self._waiting.popleft())

    def answer_waiting(self) -> None:
        """Answer who has waited until it was known who may come in."""
        while self._waiting:
            self._answer(self._waiting.popleft())

    def _answer(self, frames: list[bytes]) -> None:
        routing_id, _, version, request, _, address, _, _, public = frames
        key = zmq.utils.z85.encode(public).decode() if len(public) == 32 else ""
        if self._admission.name_of(key) is not None:
            status = [b"200", b"", key.encode(), b""]
        else:
            status = [b"400", b"this key is not authorised", b"", b""]
            self._refused(address.decode("ascii", "replace"))
        with contextlib.suppress(zmq.ZMQError):  # who asked is gone
            self._socket.send_multipart([routing_id, b"", version, request, *status], zmq.NOBLOCK)

    def close(self) -> None:
        """Answer no more."""
        self._reader.close()


class _Duplicates:
    """One descriptor, reserved for duplicates of others."""

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._reserved = os.dup(self._nothing)

    @contextlib.contextmanager
    def of(self, descriptor: int) -> Iterator[sockets.socket]:
        """Lend a duplicate of this connection's descriptor. Raises OSError if there is no such connection."""
        os.dup2(descriptor, self._reserved, inheritable=False)
        try:
            duplicate = sockets.socket(fileno=self._reserved)
            try:
                yield duplicate
            finally:
                duplicate.detach()
        finally:
            os.dup2(self._nothing, self._reserved, inheritable=False)

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._reserved)
        os.close(self._nothing)


class Doorway:
    """The connections of a bound socket, as its monitor tells of them; cuts those that are too many.

    gone: called with the descriptor of a connection that has ended.  told: called when one has begun or ended.
    clock: seconds; never goes back.
    """

    def __init__(
        self,
        socket: zmq.SyncSocket,
        limits: ConnectionLimits,
        refusals: Refusals,
        told: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connections = Connections(limits)
        self.gone: Callable[[int], None] = lambda descriptor: None
        self._socket, self._refusals, self._told, self.clock = socket, refusals, told, clock
        address = f"inproc://zmqtrain-monitor-{next(_NUMBERS)}"
        socket.monitor(address, _ACCEPTED | _DISCONNECTED | _CLOSED | _FAILED)
        monitor = socket.context.socket(zmq.PAIR)
        monitor.rcvhwm = 0  # no bound: libzmq's own thread would wait for us
        monitor.connect(address)
        self._duplicates = _Duplicates()
        self._reader = _Reader(monitor, self._take)

    def look(self) -> None:
        """Take note of what has happened up to now."""
        self._reader.read()

    def _take(self, frames: list[bytes]) -> None:
        event, value = struct.unpack("=HI", frames[0])
        if event == _ACCEPTED:
            self._accepted(value)
        elif event in (_DISCONNECTED, _CLOSED):
            self.connections.closed(value)
            self.gone(value)
            self._told()
        elif event & _FAILED and event != _REFUSED:  # that was counted by who refused it
            self._refusals.count("unfinished" if event == _UNFINISHED else "handshake")

    def _accepted(self, descriptor: int) -> None:
        try:
            with self._duplicates.of(descriptor) as connection:
                address, port = connection.getpeername()[:2]
        except OSError:  # it is gone already
            return
        for cut in self.connections.accepted(descriptor, address.removeprefix("::ffff:"), port, self.clock()):
            self._shut(cut)
        self._told()

    def _shut(self, cut: Cut) -> None:
        self._refusals.count(cut.reason, cut.connection.address)
        self._shut_down(cut.connection)

    def cut(self, descriptor: int) -> None:
        """Shut the connection with this descriptor, if it is still there; libzmq then closes it."""
        self.look()
        if (connection := self.connections.get(descriptor)) is not None:
            self.connections.closed(descriptor)
            self._shut_down(connection)

    def _shut_down(self, connection: Connection) -> None:
        """End a TCP connection both ways, if its descriptor still is this connection's."""
        with contextlib.suppress(OSError), self._duplicates.of(connection.descriptor) as duplicate:
            address, port = duplicate.getpeername()[:2]
            if (address.removeprefix("::ffff:"), port) == (connection.address, connection.port):
                duplicate.shutdown(sockets.SHUT_RDWR)

    def close(self) -> None:
        """Watch no more; before the socket is closed."""
        self._socket.disable_monitor()
        self._reader.close()
        self._duplicates.close()


def descriptor_room(wanted: int, grow: bool = False) -> int:
    """Return how many connections fit beside all else in this process's limit of open files, at most `wanted`.

    grow: raise the soft limit for them first, as far as it may be raised.
    """
    try:
        import resource
    except ImportError:  # not on this system, which has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if grow and soft < wanted + SPARE_DESCRIPTORS:
        raised = wanted + SPARE_DESCRIPTORS
        if hard != resource.RLIM_INFINITY:
            raised = min(raised, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    return max(LEAST_CONNECTIONS, min(wanted, soft - SPARE_DESCRIPTORS))

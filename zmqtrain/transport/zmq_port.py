"""Use one ZeroMQ socket in an asyncio loop, without ever waiting inside zmq.

Rule: try, wait at a gate, try again.  What a cancelled call had not taken is still there.
Source: zmq_getsockopt(3) on ZMQ_FD (edge-triggered) and ZMQ_EVENTS.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

import zmq
import zmq.utils.garbage  # at the interpreter's end it lets go what is on its way uncopied: after who closes then

from zmqtrain.core.types import Buffer
from zmqtrain.transport.gate import Gate
from zmqtrain.transport.limits import COPY_BELOW_BYTES, MAX_WIRE_FRAME_BYTES

# As plain numbers: pyzmq's enumerations cost as much as the calls they are for.
_EVENTS, _READABLE, _WRITABLE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
_NO_WAIT, _NO_WAIT_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

_HANDSHAKE_MILLISECONDS = 10_000  # a connection of ours that is not greeted by then is tried anew
_KEEPALIVE_IDLE_SECONDS, _KEEPALIVE_INTERVAL_SECONDS, _KEEPALIVE_PROBES = 10, 5, 3  # an unplugged peer: 25 s

_DISCARD_AT_ONCE = 64  # frames of one stranger's endless message that are thrown away between two turns of the loop


class Port:
    """One ZeroMQ socket in the running loop: calls that never wait, and gates for what to wait for.

    ZMQ_FD is edge-triggered, and any call on the socket may swallow the edge: so after each call, whoever else waits
    is looked after (`_look`), and who is about to wait asks once more (`readable`, `writable`): the edge may have gone
    to whom was looked after.  From then on the loop watches the descriptor, until it rings where nobody waits: it also
    rings for what is no news to anybody.
    """

    def __init__(self, socket: zmq.SyncSocket, readable: Gate, writable: Gate) -> None:
        self._socket, self._readable, self._writable = socket, readable, writable
        self._discarding = False
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.FD
        self._watched = False

    def listen(self, take: Callable[[], bool]) -> None:
        """Have the loop call `take` whenever messages may be here, from now on.

        It receives some, and returns whether there may be more: then it is called again in the loop's next turn, and if
        it raises, too.  However much is sent meanwhile, only one such call waits at a time: others have their turn.
        """
        waits = False

        def soon() -> None:
            nonlocal waits
            if not waits:
                waits = True
                self._loop.call_soon(again)

        def again() -> None:
            nonlocal waits
            waits = False
            if not self._socket.closed:
                look()

        def look() -> None:
            more = True
            try:
                more = take()
            finally:
                if more:
                    soon()

        self._readable.call(soon)  # a call on the socket may have swallowed the edge
        self._loop.add_reader(self._descriptor, look)
        self._watched = True
        soon()

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self._descriptor, self._ring)

    def _ring(self) -> None:
        if self._readable.waited_at or self._writable.waited_at:
            self._look()
        else:
            self._watched = False
            self._loop.remove_reader(self._descriptor)

    def _look(self) -> int:
        events = self._events()
        if events & _READABLE:
            self._readable.open()
        if events & _WRITABLE:
            self._writable.open()
        return events

    @property
    def readable(self) -> bool:
        """Whether a message is here; ask before waiting for one."""
        self._watch()
        return bool(self._look() & _READABLE)

    @property
    def writable(self) -> bool:
        """Whether there is room for a message; ask before waiting for it."""
        self._watch()
        return bool(self._look() & _WRITABLE)

    def _events(self) -> int:
        return int(self._socket.getsockopt(_EVENTS))

    def send(self, frames: Sequence[Buffer], routing_id: bytes | None = None) -> None:
        """Send one message; raise zmq.Again if it would wait, ZMQError(EHOSTUNREACH) if nobody has that routing id.

        Only the first part can fail so: then nothing was sent.
        """
        socket, last = self._socket, len(frames) - 1
        try:
            if routing_id is not None:
                socket.send(routing_id, _NO_WAIT_MORE)
            for index, frame in enumerate(frames):
                large = memoryview(frame).nbytes >= COPY_BELOW_BYTES
                socket.send(frame, _NO_WAIT_MORE if index < last else _NO_WAIT, copy=not large)
        finally:
            if self._readable.waited_at:
                self._look()

    def receive(self, limit: int) -> list[zmq.Frame] | None:
        """Take the next message; None if there is none, [] for (a part of) one of more than `limit` frames."""
        try:
            if not self._events() & _READABLE:
                return None
            if self._discarding:
                self._discard()
                return []
            frames = [self._next_frame()]
            while frames[-1].more:
                if len(frames) == limit:
                    self._discarding = True
                    return []
                frames.append(self._next_frame())
            return frames
        except zmq.Again:
            return None
        finally:
            if self._writable.waited_at:
                self._look()

    def _next_frame(self) -> zmq.Frame:
        return self._socket.recv(_NO_WAIT, copy=False)

    def _discard(self) -> None:
        for _ in range(_DISCARD_AT_ONCE):
            if not self._next_frame().more:
                self._discarding = False
                return

    def close(self, linger_seconds: float) -> None:
        """Close the socket; what is queued is sent for at most so long, by `terminate_context`."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=max(0, round(1000 * linger_seconds)))


def open_socket(context: zmq.Context[zmq.SyncSocket], kind: int, send: int, receive: int) -> zmq.SyncSocket:
    """Make a socket with the options that both ends share (TCP_NODELAY is libzmq's own default)."""
    socket = context.socket(kind)
    socket.sndhwm, socket.rcvhwm = send, receive
    socket.maxmsgsize = MAX_WIRE_FRAME_BYTES
    socket.linger = 0
    socket.handshake_ivl = _HANDSHAKE_MILLISECONDS
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = _KEEPALIVE_IDLE_SECONDS
    socket.tcp_keepalive_intvl = _KEEPALIVE_INTERVAL_SECONDS
    socket.tcp_keepalive_cnt = _KEEPALIVE_PROBES
    return socket


def as_buffer(frame: zmq.Frame) -> Buffer:
    """Return a small frame as bytes, a large one as a read-only view that keeps it alive."""
    return frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer.toreadonly()


async def terminate_context(context: zmq.Context[zmq.SyncSocket]) -> None:
    """Wait for what lingers, beside the loop (it takes as long as the sockets' linger).

    Not in the loop's executor: at the interpreter's end neither that nor a thread can be started; then in the loop.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def terminate() -> None:
        context.term()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    try:
        threading.Thread(target=terminate, name="zmqtrain-linger", daemon=True).start()
    except RuntimeError:
        context.term()
    else:
        await ended.wait()


def libzmq_version() -> str:
    """Return the version of the library under pyzmq."""
    return zmq.zmq_version()

"""Channels over ZeroMQ: two DEALERs at a node, one for each lane; at the hub one ROUTER for both lanes of every node.

1. A call on a socket never blocks and never waits inside zmq: try, wait at a gate, try again. So a cancelled `receive`
   loses no message, and closing leaves no future behind. (zmq.asyncio takes the message first and hands it to a future;
   if its task is cancelled just then the message is lost.)
2. Every queue is bounded. The high-water marks are a safety net under the credits, not the flow control.
3. No ZMTP heartbeats: they time out in the middle of large messages. Heartbeats are the protocol's messages.
4. The hub counts and ignores messages that are not ours (unknown routing ids, junk, too many frames).
5. A message counts only if its connection may speak as the peer that it names: with an authorised key, which opened
   this peer's id, and in the life of the peer that connected last (`admission`). This is checked for each message, so a
   revoked key is out with the next one.
6. A node's first message on a lane is empty: it shows whose connection that is, and is not handed on.
7. `ConnectionWatch` reports a connection that was there and is gone, and why one fails; libzmq reconnects silently.

Needs an event loop with `add_reader` (on Windows the selector loop).
Source: ZeroMQ RFC 28 (ROUTER, DEALER); zmq_getsockopt(3) on ZMQ_FD (edge-triggered) and ZMQ_EVENTS;
zmq_socket_monitor(3), ZMQ_EVENT_DISCONNECTED and ZMQ_EVENT_HANDSHAKE_*.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import zmq
import zmq.utils.garbage  # at exit it frees uncopied frames in flight: import it first, so that our closing runs before

from zmqtrain.core.errors import ChannelClosed, ChannelFull, ConfigError, PeerLost
from zmqtrain.core.types import Buffer, Lane, PeerId
from zmqtrain.transport.address import (
    bind_error,
    check_reachable,
    connectable_host,
    is_own_address,
    parse_address,
    split_key,
)
from zmqtrain.transport.admission import (
    EVERYBODY,
    NOTICES,
    Admission,
    Refusals,
    Seats,
    first_life,
    next_life,
    notice,
    reason_of,
    routing_id_of,
    sender_of,
)
from zmqtrain.transport.key_folder import Access
from zmqtrain.transport.pacing import (
    COPY_BELOW_BYTES,
    MAX_MESSAGE_FRAMES,
    MAX_WIRE_FRAME_BYTES,
    ConnectionLimits,
    Fairness,
    Gate,
    check_message,
    check_peer_id,
)
from zmqtrain.transport.zmq_keys import (
    ZAP_DOMAIN,
    ConnectionGuard,
    CurveKeys,
    Reader,
    ZapHandler,
    check_key,
    descriptor_room,
)

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
    """Watches the connections of one socket for its channel, in the running loop."""

    def __init__(self, socket: zmq.SyncSocket, channel: DealerChannel) -> None:
        self._socket, self._channel, self._there = socket, channel, False
        self._reader = Reader(socket.get_monitor_socket(_WATCHED), self)

    def take(self, frames: list[bytes]) -> None:
        """Record one event of the monitor; the channel may close the watch at once."""
        event = struct.unpack("=HI", frames[0])[0]
        if event != _GONE:
            self._there = self._there or event == _SUCCEEDED
            self._channel.on_handshake(_ENDS[event])
        elif self._there:
            self._there = False
            self._channel.on_connection_lost()

    def close(self) -> None:
        """End the watch; before its socket is closed."""
        self._socket.disable_monitor()
        self._reader.close()


# As plain numbers: pyzmq's enumerations cost as much as the calls they are for.
_EVENTS, _READABLE, _WRITABLE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
_NO_WAIT, _NO_WAIT_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

_HANDSHAKE_MILLISECONDS = 10_000  # a connection of ours that is not greeted by then is retried
_KEEPALIVE_IDLE_SECONDS, _KEEPALIVE_INTERVAL_SECONDS, _KEEPALIVE_PROBES = 10, 5, 3  # an unplugged peer: 25 s

_DISCARD_AT_ONCE = 64  # frames of one stranger's endless message that are thrown away between two turns of the loop


class Port:
    """One ZeroMQ socket in the running loop: calls that never wait, and gates for what to wait for.

    ZMQ_FD is edge-triggered, and any call on the socket may swallow the edge: so after each call the other waiters
    are checked (`_look`), and a task that is about to wait asks once more (`readable`, `writable`), because another may
    have taken the edge.  From then on the loop watches the descriptor, until it rings and nobody waits: it also rings
    without news.
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
    return zmq.zmq_version()


# High-water marks: whole messages, per connection and side; a message of ours is at most one chunk (4 MiB) and a head.
# Control messages are small; of bulk a node queues what was granted (out, 4), and what its window lets come (in, 16).
_SEND_MESSAGES = {Lane.CONTROL: 64, Lane.BULK: 4}
_RECEIVE_MESSAGES = {Lane.CONTROL: 64, Lane.BULK: 16}

_REFUSED_SECONDS = 1.0
_BROKEN_IN_A_ROW = 4
"""Connections that ended in the midst of their handshake, of both lanes, before that is taken for more than a hub that
was just ending."""
_RECONNECT_MILLISECONDS, _RECONNECT_MAX_MILLISECONDS = 100, 500
"""libzmq adds a random time of up to the first: who all lost one hub do not all come at once."""


class DealerChannel:
    """A node's end (a `Channel`): one connection per lane to the one port of the hub at `address`.

    libzmq connects in the background, and again when the connection is lost; until it is there, what is sent queues.
    While the hub does not authorise this channel's key, it is asked again every second, and what had queued is lost.
    Made in a running loop.  server_key: the hub's public CURVE key; keys: this node's pair (a fresh one if there is
    only a server_key, which comes in only where all do that know it).  beside: a channel of this process, with which
    this one shares libzmq's threads; it must be closed after this.  access: both keys, in place of the two; a pair that
    was found and not given is left out at a hub without keys.
    Raises ConfigError for an address, a name or keys that cannot be used.

    refused: why the last attempt to connect ended in its handshake: "key" (this channel's is not authorised there),
    "handshake" (what listens there wants keys, or none), "broken" (it ended several connections in a row: it has other
    keys or wants some, or is no hub); or why nothing is heard that comes over the connection: "name" (this peer came
    with another key before); "" if nothing is known to be wrong.
    """

    def __init__(
        self,
        address: str,
        *,
        peer: PeerId,
        keys: CurveKeys | None = None,
        server_key: bytes | None = None,
        beside: RouterChannel | None = None,
        access: Access | None = None,
    ) -> None:
        check_reachable(address)
        _, its_key = split_key(address)
        check_peer_id(peer)
        if its_key is not None:
            check_key("public", its_key)
        if server_key is None and keys is not None:
            raise ConfigError("keys without a server_key: the hub's public key is needed too (its file NAME.key)")
        if server_key is not None:
            check_key("public", server_key)
            keys = keys or CurveKeys.generate()
        if access is None:
            access = Access((server_key, keys))
        elif access.given[0] is not None and access.given[1] is None:  # of which a hub may know that it is the same
            access.given = access.given[0], CurveKeys.generate()
        self.address, self.peer = address, peer
        self._access, self._life = access, first_life()
        self._unheard: list[tuple[Lane, Sequence[Buffer]]] = []  # sent before it is known whether a found key is used
        self._tries_found_key = access.found is not None and not access.declined and its_key is None
        self._watches: list[ConnectionWatch] = []
        self.refused, self._broken, self._news = "", 0, Gate()
        self._retry: asyncio.TimerHandle | None = None
        self._shares = beside is not None
        self._context: zmq.Context[zmq.SyncSocket] = zmq.Context() if beside is None else beside.context
        self._incoming = Gate()
        self._writable = {lane: Gate() for lane in Lane}
        self._ports: dict[Lane, Port] = {}
        self._told: Callable[[], None] = lambda: None
        self._untold = False  # a connection has gone, and what had come over it is not all received
        self._fairness = Fairness()
        self._attempt = 0
        self._closed = False
        try:
            self._open()
        except BaseException:
            self._close_ports(0.0)
            if not self._shares:
                self._context.term()
            raise

    @property
    def obstacle(self) -> str:
        """See Channel: what `refused` means, for people."""
        if self.refused == "key":
            where = f", that in {self._access.found}" if self._access.found is not None else ""
            return (
                f"the hub does not authorise this PC's key{where} (there, `zmqtrain keys list` shows whose it does, "
                "and `zmqtrain keys new NAME` makes one)"
            )
        if self.refused == "name":
            return (
                f"it knows {self.peer} by another key than this PC's: a node that goes on from a checkpoint is the one "
                "that it was. Start it with the key file of then (--keys), or with a checkpoint folder of its own"
            )
        if self.refused and self._access.credentials[0] is not None:
            if (found := self._access.found) is not None:
                return (
                    f"what listens there ended the connection while keys were exchanged: the key in {found}, which was "
                    "found there, seems to be for another hub. Give the file that was made for this one (--keys FILE)"
                )
            return (
                "what listens there ended the connection while keys were exchanged: the key file (--keys, "
                "--server-key) is of another hub, or that broker asks for no keys (then leave the file out), or it is "
                "no zmqtrain-broker"
            )
        looked = f". No key file was found here ({self._access.looked})" if self._access.looked else ""
        if self.refused == "handshake":
            return (
                "what listens there wants keys: give the file that was made for this PC (--keys FILE, in Python "
                f"keys='FILE'){looked}"
            )
        if self.refused:
            return (
                "what listens there ends every connection before it is greeted: it wants keys (--keys FILE, made for "
                f"this PC), or it is no zmqtrain-broker{looked}"
            )
        return ""

    async def changed(self) -> None:
        """Wait until `refused` is another; see Channel.  Raise ChannelClosed."""
        self._check_open()
        await self._news.wait()
        self._check_open()

    def _learn(self, how: str) -> None:
        if how != self.refused:
            self.refused = how
            self._news.open()

    def on_handshake(self, how: str) -> None:
        """Record how a handshake ended.

        "": it succeeded.  "key": this key is not authorised there.  "handshake": the two do not understand each other
        (after these two libzmq does not try again).  "broken": the other end closed the connection, as a hub does that
        has other keys or wants some, or that is just ending.
        """
        if how == "handshake" and self._tries_found_key:
            return self._leave_key_out()
        if how == "":
            self._unheard, self._tries_found_key = [], False
        self._broken = self._broken + 1 if how == "broken" else 0
        if how == "broken" and self._broken < _BROKEN_IN_A_ROW:
            return
        # "name" is told after the handshake, of each connection; after "key" both lanes reconnect
        if how or (self.refused != "name" and self._retry is None):
            self._learn(how)
        if how == "key" and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_REFUSED_SECONDS, self._try_again)

    def _leave_key_out(self) -> None:
        """Reconnect without the key that was found, because the hub uses none; nothing is lost."""
        self._access.decline(self.address)
        self._tries_found_key, unheard, self._unheard = False, self._unheard, []
        self._attempt -= 1  # senders that wait go on
        self._reopen()
        for lane, frames in unheard:
            with contextlib.suppress(zmq.Again):
                self._ports[lane].send(frames)

    def _try_again(self) -> None:
        self._retry = None
        if not self._closed:
            self._reopen()

    def _configure(self, socket: zmq.SyncSocket) -> None:
        server_key, keys = self._access.credentials
        server_key = split_key(self.address)[1] or server_key
        if keys is not None and server_key is not None:
            socket.curve_serverkey = server_key
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret

    def _open(self) -> None:
        self._life = next_life(self._life)
        for lane in Lane:
            socket = open_socket(self._context, zmq.DEALER, _SEND_MESSAGES[lane], _RECEIVE_MESSAGES[lane])
            self._ports[lane] = Port(socket, self._incoming, self._writable[lane])
            socket.routing_id = routing_id_of(lane, self.peer, self._life)
            socket.probe_router = 1
            socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MILLISECONDS, _RECONNECT_MAX_MILLISECONDS
            self._configure(socket)
            self._watches.append(ConnectionWatch(socket, self))
            address, _ = split_key(self.address)
            socket.ipv6 = ":" in parse_address(address)[0]
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"cannot connect to {address!r} ({error.strerror}); an address is, for example,"
                    " tcp://192.168.1.10:5555"
                ) from error

    def watch(self, told: Callable[[], None]) -> None:
        """Call `told` in the loop when an established connection has ended, once the messages that came over it (a
        goodbye, perhaps) are received."""
        self._told = told

    def on_connection_lost(self) -> None:
        """Record that an established connection has ended."""
        if any(port.readable for port in self._ports.values()):
            self._untold = True
            self._incoming.open()
        else:
            self._told()

    def _close_ports(self, linger_seconds: float) -> None:
        for watch in self._watches:
            watch.close()
        self._watches.clear()
        for port in self._ports.values():
            port.close(linger_seconds)
        self._ports.clear()

    def _wake_all(self) -> None:
        for gate in (self._incoming, *self._writable.values()):
            gate.open()

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"the channel of {self.peer} to {self.address} is closed")

    def try_send(self, lane: Lane, frames: Sequence[Buffer]) -> bool:
        """Send one message as `send` does, but never wait: False if the lane is full."""
        check_message(frames)
        return self._put(lane, frames)

    def _put(self, lane: Lane, frames: Sequence[Buffer]) -> bool:
        self._check_open()
        try:
            self._ports[lane].send(frames)
        except zmq.Again:
            return False
        if self._tries_found_key:
            self._unheard.append((lane, frames))
        return True

    async def send(self, lane: Lane, frames: Sequence[Buffer]) -> None:
        """Send one message; wait while the lane is full.

        Large frames are not copied: nobody may write into them again.  Raise ChannelClosed, and LocalProtocolError for
        a message that no channel carries.  One that still waits when `reconnect` is called is lost like all that is
        queued.
        """
        check_message(frames)
        attempt = self._attempt
        await self._fairness.turn()
        while self._attempt == attempt and not self._put(lane, frames):
            if not self._ports[lane].writable:
                await self._writable[lane].wait()

    async def receive(self) -> tuple[Lane, list[Buffer]]:
        """Return the next message of either lane, CONTROL first; raise ChannelClosed.

        Frames from 64 KiB on are read-only views of what zmq received, the others bytes.
        """
        while True:
            await self._fairness.turn()
            self._check_open()  # one that is closed has no ports
            for lane in self._ports:
                if (message := self.try_receive(lane)) is not None:
                    return lane, message
            if any(port.readable for port in self._ports.values()):
                continue
            if self._untold:
                self._untold = False
                self._told()
            else:
                await self._incoming.wait()

    def try_receive(self, lane: Lane) -> list[Buffer] | None:
        """Return the next message of a lane as `receive` does, but never wait: None if none is here, or none that a hub
        of ours has sent."""
        self._check_open()
        frames = self._ports[lane].receive(limit=MAX_MESSAGE_FRAMES)
        if not frames:  # nothing, or too many
            return None
        message = [as_buffer(frame) for frame in frames]
        reason = reason_of(message)
        if reason or self.refused == "name":
            self._learn(reason or "")
        return message if reason is None else None

    async def reconnect(self, address: str = "") -> None:
        """Drop both connections and all that is queued on them, and reconnect under the same name.

        address: where the hub is from now on; "": where it was.  Raise ChannelClosed.
        """
        self._check_open()
        self.address = address or self.address
        self._learn("")
        self._reopen()

    def _reopen(self) -> None:
        self._attempt += 1
        self._untold, self._unheard = False, []
        if self._retry is not None:  # this is another try already
            self._retry.cancel()
            self._retry = None
        self._close_ports(0.0)
        self._open()
        self._wake_all()

    async def close(self, linger_seconds: float = 1.0) -> None:
        """Wake who waits here, send what is queued for at most `linger_seconds`, then close; twice is once."""
        if self._closed:
            return
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._wake_all()
        self._news.open()
        self._close_ports(linger_seconds)
        if not self._shares:
            await terminate_context(self._context)


logger = logging.getLogger(__name__)

# High-water marks: whole messages, per connection and side; a message of ours is at most one chunk (4 MiB) and a head.
# The hub's port has one pair for both lanes of every node.  Out, 64: bulk is held to its window (4 MiB) by the Outbox,
# so these are control messages; 64 of them unread mean a node that has stopped.  In, 8: at most 32 MiB per connection
# if somebody sends without being granted; what does not fit waits in TCP, on the sender's side.
_ROUTER_SENDS, _ROUTER_RECEIVES = 64, 8

_TOLD_AT_ONCE = 8  # messages, before the loop's other tasks have a turn

_SOURCE, _USER = int(zmq.SRCFD), "User-Id"

_FAREWELL_SECONDS = 0.5
"""Between the notice why a connection is not heard and its end, so that it can be read."""

_BACKLOG = 128  # connections that wait to be accepted: a whole classroom started at once


class RouterChannel:
    """The hub's end (a `HubChannel`): one port for both lanes of every node, in the running loop.

    It listens at `address`: tcp://*:5555, or an IP address or interface of this machine; port 0 chooses a free one.
    keys: the hub's CURVE keys; then every client must use CURVE, and know the public one.  admission: which clients'
    keys come in; without it, every client's that knows the hub's.  limits: of connections.
    Raises ConfigError for an address that cannot be used, AddressInUse if somebody listens there.

    address: from then on where nodes on this machine connect to; from others, its name takes the place of 127.0.0.1.
    context: libzmq's threads, for channels beside this one.  strangers: the messages ignored because no node of ours
    could have sent them.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: CurveKeys | None = None,
        admission: Admission | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        host, _ = parse_address(address, "tcp://*:5555")
        if admission is not None and keys is None:
            raise ConfigError("who comes in is decided by keys, and this hub has none: give it a pair")
        limits = limits or ConnectionLimits()
        limits = replace(limits, total=descriptor_room(limits.total))
        self.context: zmq.Context[zmq.SyncSocket] = zmq.Context()
        self._admission, self._seats, self._news = admission, Seats(), Gate()
        self._refusals = Refusals(f"the port at {address}", self._news)
        self._handler = None if admission is None else ZapHandler(self.context, admission, self._refusals)
        socket = open_socket(self.context, zmq.ROUTER, _ROUTER_SENDS, _ROUTER_RECEIVES)
        self._guard = ConnectionGuard(socket, limits, self._refusals, self._news)
        self._guard.gone = self._gone
        self._speakers: dict[int, tuple[PeerId, bytes, str, Lane]] = {}  # by descriptor: who was heard there
        self._dismissed: dict[int, int] = {}  # by descriptor: the number of a connection that was told why it will end
        self._incoming = Gate()
        self._port = Port(socket, self._incoming, Gate())
        self._fairness = Fairness()
        self._closed = False
        self.strangers = 0
        try:
            socket.router_mandatory = 1
            socket.router_handover = 1
            socket.backlog = _BACKLOG
            socket.handshake_ivl = round(1000 * limits.handshake_seconds)
            socket.ipv6 = ":" in host
            if keys is not None:
                socket.curve_server = 1
                socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
                socket.zap_domain = ZAP_DOMAIN
            socket.bind(address)
        except zmq.ZMQError as error:
            self._close(0.0)
            self.context.term()
            raise bind_error(address, error.errno or 0) from error
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        port = endpoint.rpartition(":")[2]
        self.address = f"tcp://{connectable_host(host)}:{port}"
        self._refusals.where = f"the port at {address.rpartition(':')[0]}:{port}"  # of port 0, the one that was found

    @property
    def refusals(self) -> Counter[str]:
        """How many connections and messages were refused, by `refusals.REASONS`."""
        return Counter(self._refusals.counts)

    @property
    def turned_away(self) -> int:
        """The refusals of the last minute, without those of normal operation."""
        return self._refusals.recent

    @property
    def connections(self) -> int:
        """How many TCP connections there are now."""
        self._guard.look()
        return len(self._guard.connections)

    async def changed(self) -> None:
        """Wait until `connections` or `refusals` change, if only for a moment.  Raise ChannelClosed."""
        self._check_open()
        await self._news.wait()
        self._check_open()

    def name_of(self, peer: PeerId) -> str:
        """Return the name of the key with which a peer came; "" where no keys are asked for, or it never came."""
        seat = self._seats.get(peer)
        return "" if seat is None else seat.name

    def remember(self, owner_of: Callable[[PeerId], str]) -> None:
        """Reserve the id of a peer that came before for the name of its key, while that key is authorised.

        owner_of: that name; "" for who has not come.
        """

        def owner(peer: PeerId) -> str:
            name = owner_of(peer)
            return name if name and self._admission is not None and self._admission.knows(name) else ""

        self._seats.owner_of = owner

    def host_of(self, peer: PeerId) -> str:
        """Return the number of the machine from which a peer is connected; "" if it is not, or from several."""
        seat = self._seats.get(peer)
        self._guard.look()
        there = [self._guard.connections.get(descriptor) for descriptor in ([] if seat is None else seat.descriptors)]
        hosts = {"" if one is None else one.address for one in there}
        return hosts.pop() if len(hosts) == 1 else ""

    def is_of_this_machine(self, peer: PeerId) -> bool:
        """Return whether a peer is connected, and from an address of this machine alone."""
        host = self.host_of(peer)
        return bool(host) and is_own_address(host)

    def admit(self, names: Mapping[str, str]) -> dict[str, str]:
        """Authorise clients with these public keys from now on, under these names, and no others.

        Return those that were let in before and are not any more: nothing of theirs is received from now on; `cut`
        ends their connections.  Raise ConfigError where no keys are asked for.
        """
        if self._admission is None or self._handler is None:
            raise ConfigError(f"the port at {self.address} asks for no keys")
        gone = self._admission.change(names)
        self._handler.answer_waiting()
        return gone

    def peers_with(self, key: str) -> list[PeerId]:
        """Return the peers that are connected, and came with this public key."""
        return self._seats.with_key(key)

    def cut(self, key: str) -> None:
        """End all connections of a public key; and those from the same addresses that were not heard yet."""
        self._guard.look()
        theirs = [descriptor for descriptor, (_, _, used, _) in self._speakers.items() if used == key]
        table = self._guard.connections
        addresses = {here.address for descriptor in theirs if (here := table.get(descriptor)) is not None}
        for address in addresses:
            theirs += [here.descriptor for here in table.of(address) if here.descriptor not in self._speakers]
        for descriptor in theirs:
            self._guard.cut(descriptor)

    def _gone(self, descriptor: int) -> None:
        self._dismissed.pop(descriptor, None)
        if (speaker := self._speakers.pop(descriptor, None)) is not None:
            self._seats.left(speaker[0], descriptor)

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"the hub's channel at {self.address} is closed")

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Buffer]) -> None:
        """Send one message; never waits.  Large frames are not copied: nobody may write into them again.

        Raise PeerLost, ChannelFull, ChannelClosed, and LocalProtocolError for a message that no channel carries.
        BULK, which a node connects after CONTROL, counts as full while it may still connect: see `Seats.awaits`.
        """
        check_message(frames)
        self._check_open()
        if (seat := self._seats.get(peer)) is None:
            raise PeerLost(peer)
        try:
            self._port.send(frames, routing_id_of(lane, peer, seat.life))
        except zmq.Again as error:
            raise ChannelFull(f"the {lane.name} lane to {peer} holds {_ROUTER_SENDS} messages") from error
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            seconds = self._guard.connections.limits.handshake_seconds
            if lane is Lane.BULK and self._seats.awaits(peer, lane, seconds, self._guard.clock.monotonic()):
                raise ChannelFull(f"the {lane.name} lane to {peer} is not there yet") from error
            raise PeerLost(peer) from error

    async def receive(self) -> tuple[PeerId, Lane, list[Buffer]]:
        """Return the next message of any peer (fair among connections); raise ChannelClosed.

        Frames from 64 KiB on are read-only views of what zmq received, the others bytes.
        """
        while True:
            await self._fairness.turn()
            self._check_open()
            frames = self._port.receive(limit=1 + MAX_MESSAGE_FRAMES)
            if frames is None:
                if not self._port.readable:
                    await self._incoming.wait()
            elif (message := self._read(frames)) is not None:
                return message

    def listen(self, told: Callable[[PeerId, Lane, list[Buffer]], object]) -> None:
        """From now on give each message to `told` as it arrives, in place of `receive`: no task has to be woken.

        told: the loop handles what it raises; the next message is given to it all the same.
        """

        def take() -> bool:
            for _ in range(_TOLD_AT_ONCE):
                if self._closed or (frames := self._port.receive(limit=1 + MAX_MESSAGE_FRAMES)) is None:
                    return False
                if (message := self._read(frames)) is not None:
                    told(*message)
            return True

        self._port.listen(take)

    def _read(self, frames: list[zmq.Frame]) -> tuple[PeerId, Lane, list[Buffer]] | None:
        """Return what a message is; None for one that does not count, or is no more than a beginning."""
        if len(frames) < 2 or (sender := sender_of(frames[0].bytes)) is None:
            self.strangers += 1
            return None
        if not self._counts(frames[1], *sender) or (len(frames) == 2 and not len(frames[1])):
            return None
        if (seat := self._seats.get(sender[0])) is not None and not seat.spoke:
            seat.spoke = True
            for descriptor in seat.descriptors:
                self._guard.connections.spoke(descriptor)
        return sender[0], sender[1], [as_buffer(frame) for frame in frames[1:]]

    def _counts(self, frame: zmq.Frame, peer: PeerId, lane: Lane, life: bytes) -> bool:
        """Whether the connection over which this frame came may speak as `peer` in this life of it."""
        key = name = EVERYBODY
        if self._admission is not None:
            key = str(frame.get(_USER))
            known = self._admission.name_of(key)
            if known is None:
                self._refusals.count("revoked", _name_in_a_log(peer))
                self._end_soon(int(frame.get(_SOURCE)))
                return False
            name = known
        descriptor, speaker = int(frame.get(_SOURCE)), (peer, life, key, lane)
        if descriptor in self._dismissed:
            self._guard.look()  # that connection may have ended, and this be another
            if descriptor in self._dismissed:
                self._refusals.count("dismissed", name or _name_in_a_log(peer))
                return False
        if self._speakers.get(descriptor) == speaker and self._seats.get(peer) is not None:
            return True
        self._guard.look()  # so that the number is this connection's
        connection = self._guard.connections.get(descriptor)
        number = -1 if connection is None else connection.number
        reason, ended = self._seats.hear(peer, name, key, life, descriptor, number)
        if reason in NOTICES and connection is not None:
            self._refusals.count(reason, f"{_name_in_a_log(peer)} with the key of {name}")
            if self._end_soon(descriptor):
                with contextlib.suppress(zmq.ZMQError):  # it is gone, or reads nothing
                    self._port.send(notice(reason), routing_id_of(lane, peer, life))
            return False
        seat = self._seats.get(peer)
        for former in ended if reason else ended - {descriptor}:
            there = self._speakers.get(former)
            if there is None or (there[0] == peer and (seat is None or seat.life != there[1])):
                self._speakers.pop(former, None)
                self._guard.cut(former)  # else that descriptor is another's by now
        if reason:
            self._refusals.count(reason, name or _name_in_a_log(peer))
            return False
        if name and seat is not None and not seat.told:
            seat.told = True
            logger.info("%s comes with the key of %s", _name_in_a_log(peer), name)
        self._speakers[descriptor] = speaker
        self._seats.note_lane(peer, lane, self._guard.clock.monotonic())
        self._guard.connections.proved(descriptor)
        if seat is not None and seat.spoke:
            self._guard.connections.spoke(descriptor)
        return True

    def dismiss(self, peer: PeerId) -> None:
        """End the connections of a peer in a while; nothing that comes over them is received until then."""
        if (seat := self._seats.get(peer)) is not None:
            for descriptor in list(seat.descriptors):
                self._end_soon(descriptor)

    def _end_soon(self, descriptor: int) -> bool:
        """Cut this connection in a while; what was said to it can be read until then. False if that is already due."""
        self._guard.look()
        connection = self._guard.connections.get(descriptor)
        if connection is None or self._dismissed.get(descriptor) == connection.number:
            return False
        self._dismissed[descriptor] = connection.number
        asyncio.get_running_loop().call_later(_FAREWELL_SECONDS, self._end, descriptor, connection.number)
        return True

    def _end(self, descriptor: int, number: int) -> None:
        if self._closed:
            return
        self._guard.look()  # its number may be another connection's by now
        if self._dismissed.get(descriptor) == number:
            self._guard.cut(descriptor)

    async def close(self, linger_seconds: float = 1.0) -> None:
        """Wake who waits here, send what is queued for at most `linger_seconds`, then close; twice is once."""
        if self._closed:
            return
        self._close(linger_seconds)
        await terminate_context(self.context)

    def _close(self, linger_seconds: float) -> None:
        self._closed = True
        self._incoming.open()
        self._news.open()
        self._guard.close()
        self._port.close(linger_seconds)
        if self._handler is not None:
            self._handler.close()
        self._refusals.close()


def _name_in_a_log(peer: PeerId) -> str:
    """Return what may be read of a peer's id: of one within a group (RANK@TOKEN) not the token, which is a secret."""
    return peer if "#" in peer else peer.partition("@")[0]

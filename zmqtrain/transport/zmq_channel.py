"""Carry messages over ZeroMQ: one ROUTER at the hub, two DEALERs at each node (the one file that imports zmq).

Rule 1: a call on a socket never blocks and never waits inside zmq: try, wait at a gate, try again.  So a cancelled
`receive` loses no message, and closing leaves no future behind.  (zmq.asyncio takes the message first and hands it to a
future; if its task is cancelled just then the message is gone.)
Rule 2: who is not one of ours (a stranger's routing id, junk, too many frames) is counted and ignored.
Rule 3: every queue is bounded.  The high-water marks are a net under the credits, not the flow control.
Rule 4: no ZMTP heartbeats: they time out in the middle of large messages.  Heartbeats are the protocol's messages.

A routing id is the lane, b"C" or b"B", and the peer's id in utf-8.  Needs an event loop with `add_reader` (on Windows
the selector loop).
Source: ZeroMQ RFC 28 (ROUTER, DEALER), zmq_getsockopt(3) on ZMQ_FD (edge-triggered) and ZMQ_EVENTS.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.garbage  # at the interpreter's end it lets go what is on its way uncopied: after who closes then
from zmq.auth.certs import load_certificate

from zmqtrain.errors import ChannelClosed, ChannelFull, ConfigError, PeerLost
from zmqtrain.transport.address import bind_error, connectable_host, is_loopback, parse_address
from zmqtrain.transport.gate import Fairness, Gate
from zmqtrain.transport.limits import (
    COPY_BELOW_BYTES,
    MAX_MESSAGE_FRAMES,
    MAX_WIRE_FRAME_BYTES,
    check_message,
    check_peer_id,
    is_peer_id,
)
from zmqtrain.transport.zmq_watch import ConnectionWatch
from zmqtrain.types import Buffer, Lane, PeerId

__all__ = ["CurveKeys", "DealerChannel", "RouterChannel", "is_loopback", "libzmq_version", "load_public_key"]

_LANE_BYTES = {Lane.CONTROL: b"C", Lane.BULK: b"B"}
_LANES = {value: lane for lane, value in _LANE_BYTES.items()}

# High-water marks: whole messages, per connection and side; a message of ours is at most one chunk (4 MiB) and a head.
# The hub's port has one pair for both lanes of every node.  Out, 64: bulk is held to its window (4 MiB) by the Outbox,
# so these are control messages; 64 of them unread mean a node that has stopped.  In, 8: at most 32 MiB per connection
# if somebody sends without being granted; what does not fit waits in TCP, on the sender's side.
_HUB_SEND_MESSAGES, _HUB_RECEIVE_MESSAGES = 64, 8
# A node's: control messages are small; of bulk it queues what was granted (out, 4), and what its window lets come
# (in, 16).
_NODE_SEND_MESSAGES = {Lane.CONTROL: 64, Lane.BULK: 4}
_NODE_RECEIVE_MESSAGES = {Lane.CONTROL: 64, Lane.BULK: 16}

# As plain numbers: pyzmq's enumerations cost as much as the calls they are for.
_EVENTS, _READABLE, _WRITABLE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
_NO_WAIT, _NO_WAIT_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

_BACKLOG = 128  # connections that wait to be accepted: a whole classroom started at once
_HANDSHAKE_MILLISECONDS = 10_000  # a connection that has not said who it is by then is closed
_RECONNECT_MILLISECONDS, _RECONNECT_MAX_MILLISECONDS = 100, 500
"""libzmq adds a random time of up to the first: who all lost one hub do not all come at once."""
_KEEPALIVE_IDLE_SECONDS, _KEEPALIVE_INTERVAL_SECONDS, _KEEPALIVE_PROBES = 10, 5, 3  # an unplugged peer: 25 s

_DISCARD_AT_ONCE = 64  # frames of one stranger's endless message that are thrown away between two turns of the loop


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CURVE key pair, each 40 characters of Z85 (RFC 32)."""

    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        for name, key in (("public", self.public), ("secret", self.secret)):
            _check_key(name, key)

    @classmethod
    def generate(cls) -> CurveKeys:
        """Make a new pair."""
        return cls(*zmq.curve_keypair())

    def save(self, folder: Path | str, name: str) -> tuple[Path, Path]:
        """Write `name`.key (public, for others) and `name`.key_secret (both keys, mode 0600); return the paths.

        The format is that of zmq.auth.  Raise ConfigError if one exists already, or cannot be written.
        """
        base = Path(folder)
        public_path, secret_path = base / f"{name}.key", base / f"{name}.key_secret"
        public = f'curve\n    public-key = "{self.public.decode()}"\n'
        secret = f'{public}    secret-key = "{self.secret.decode()}"\n'
        warning = "# Secret: whoever has this file can pass for its owner. Do not copy it.\n"
        try:
            base.mkdir(parents=True, exist_ok=True)
            for path, mode, text in ((secret_path, 0o600, warning + secret), (public_path, 0o644, public)):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                with os.fdopen(descriptor, "w", encoding="ascii") as file:
                    file.write(text)
        except FileExistsError as error:
            raise ConfigError(f"{error.filename} exists: a key is not overwritten; remove it first") from error
        except OSError as error:
            raise ConfigError(f"cannot write the keys {public_path} and {secret_path}: {error}") from error
        return public_path, secret_path

    @classmethod
    def load(cls, path: Path | str) -> CurveKeys:
        """Read a pair from a `.key_secret` file; raise ConfigError if there is none in it."""
        public, secret = _load(path)
        if secret is None:
            raise ConfigError(f"{path} holds a public key only; the file of a pair is named NAME.key_secret")
        return cls(public, secret)


def libzmq_version() -> str:
    """Return the version of the library under pyzmq."""
    return zmq.zmq_version()


def load_public_key(path: Path | str) -> bytes:
    """Read the public key from a `.key` (or `.key_secret`) file; raise ConfigError if there is none in it."""
    public, _ = _load(path)
    _check_key("public", public)
    return public


def _load(path: Path | str) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(path)
    except (OSError, ValueError, IndexError) as error:  # the last: a line that has no "="
        raise ConfigError(f"cannot read a key from {path}: {error}") from error


def _check_key(name: str, key: bytes) -> None:
    if len(key) != 40 or not re.fullmatch(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", key):
        raise ConfigError(f"a {name} CURVE key is 40 characters of Z85; this has {len(key)} bytes, or others")


class _Port:
    """One ZeroMQ socket in the running loop: calls that never wait, and gates for what to wait for.

    ZMQ_FD is edge-triggered, and any call on the socket may swallow the edge: so after each call, whoever else waits
    is looked after (`_look`), and who is about to wait asks once more (`readable`, `writable`): the edge may have gone
    to whom was looked after.
    """

    def __init__(self, socket: zmq.SyncSocket, readable: Gate, writable: Gate) -> None:
        self._socket, self._readable, self._writable = socket, readable, writable
        self._discarding = False
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.FD
        self._loop.add_reader(self._descriptor, self._look)

    def _look(self) -> int:
        events = self._events()
        if events & _READABLE:
            self._readable.open()
        if events & _WRITABLE:
            self._writable.open()
        return events

    @property
    def readable(self) -> bool:
        """Whether a message is here."""
        return bool(self._look() & _READABLE)

    @property
    def writable(self) -> bool:
        """Whether there is room for a message."""
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
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=max(0, round(1000 * linger_seconds)))


def _open_socket(context: zmq.Context[zmq.SyncSocket], kind: int, send: int, receive: int) -> zmq.SyncSocket:
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


def _buffer(frame: zmq.Frame) -> Buffer:
    """Return a small frame as bytes, a large one as a read-only view that keeps it alive."""
    return frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer.toreadonly()


async def _terminate(context: zmq.Context[zmq.SyncSocket]) -> None:
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


class RouterChannel:
    """The hub's end (a `HubChannel`): one port for both lanes of every node.  Made by `bind`.

    context: libzmq's threads, for channels beside this one.
    """

    def __init__(self, context: zmq.Context[zmq.SyncSocket], socket: zmq.SyncSocket, address: str) -> None:
        self.context, self._address = context, address
        self._incoming = Gate()
        self._port = _Port(socket, self._incoming, Gate())
        self._fairness = Fairness()
        self._strangers = 0
        self._closed = False

    @classmethod
    def bind(cls, address: str, *, keys: CurveKeys | None = None) -> RouterChannel:
        """Listen at `address`: tcp://*:5555, or an IP address or interface of this machine; port 0 chooses a free one.

        keys: the hub's CURVE keys; then every client must use CURVE, and know the public one.  Call it in a running
        loop.
        Raise ConfigError for an address that cannot be used, AddressInUse if somebody listens there.
        """
        host, _ = parse_address(address, "tcp://*:5555")
        context: zmq.Context[zmq.SyncSocket] = zmq.Context()
        socket = _open_socket(context, zmq.ROUTER, _HUB_SEND_MESSAGES, _HUB_RECEIVE_MESSAGES)
        try:
            socket.router_mandatory = 1
            socket.router_handover = 1
            socket.backlog = _BACKLOG
            socket.ipv6 = ":" in host
            if keys is not None:
                socket.curve_server = 1
                socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
            socket.bind(address)
            endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            return cls(context, socket, f"tcp://{connectable_host(host)}:{endpoint.rpartition(':')[2]}")
        except zmq.ZMQError as error:
            socket.close(linger=0)
            context.term()
            raise bind_error(address, error.errno or 0) from error

    @property
    def address(self) -> str:
        """Where nodes on this machine connect to; from others, its name takes the place of 127.0.0.1."""
        return self._address

    @property
    def strangers(self) -> int:
        """How many messages were ignored because no node of ours could have sent them."""
        return self._strangers

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"the hub's channel at {self._address} is closed")

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Buffer]) -> None:
        """Send one message; never waits.  Large frames are not copied: nobody may write into them again.

        Raise PeerLost, ChannelFull, ChannelClosed, and LocalProtocolError for a message that no channel carries.
        """
        check_message(frames)
        self._check_open()
        try:
            self._port.send(frames, _LANE_BYTES[lane] + peer.encode())
        except zmq.Again as error:
            raise ChannelFull(f"the {lane.name} lane to {peer} holds {_HUB_SEND_MESSAGES} messages") from error
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
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
                await self._incoming.wait()
            elif len(frames) < 2 or (sender := _sender(frames[0].bytes)) is None:
                self._strangers += 1
            else:
                return *sender, [_buffer(frame) for frame in frames[1:]]

    async def close(self, linger_seconds: float = 1.0) -> None:
        """Wake who waits here, send what is queued for at most `linger_seconds`, then close; twice is once."""
        if self._closed:
            return
        self._closed = True
        self._incoming.open()
        self._port.close(linger_seconds)
        await _terminate(self.context)


def _sender(routing_id: bytes) -> tuple[PeerId, Lane] | None:
    """Return who has this routing id, None if it is not one of ours (libzmq's own begin with a zero byte)."""
    lane = _LANES.get(routing_id[:1])
    if lane is None:
        return None
    try:
        name = routing_id[1:].decode()
    except UnicodeDecodeError:
        return None
    return (PeerId(name), lane) if is_peer_id(name) else None


class DealerChannel:
    """A node's end (a `Channel`): one connection per lane to the hub's one port.  Made by `connect`.

    libzmq connects in the background, and again when the connection is lost; until it is there, what is sent queues.
    """

    def __init__(
        self,
        address: str,
        peer: PeerId,
        configure: Callable[[zmq.SyncSocket], None],
        context: zmq.Context[zmq.SyncSocket] | None = None,
    ) -> None:
        self.address, self.peer = address, peer
        self._configure, self._shares = configure, context is not None
        self._context: zmq.Context[zmq.SyncSocket] = context or zmq.Context()
        self._incoming = Gate()
        self._writable = {lane: Gate() for lane in Lane}
        self._ports: dict[Lane, _Port] = {}
        self._watches: list[ConnectionWatch] = []
        self._told: Callable[[], None] = lambda: None
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

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        peer: PeerId,
        keys: CurveKeys | None = None,
        server_key: bytes | None = None,
        beside: RouterChannel | None = None,
    ) -> DealerChannel:
        """Connect to the hub at `address` as `peer`.  Call it in a running loop; it does not wait for the hub.

        server_key: the hub's public CURVE key; keys: this node's pair (a fresh one if there is only a server_key).
        beside: a channel of this process, with which this one shares libzmq's threads; it must be closed after this.
        Raise ConfigError for an address, a name or keys that cannot be used.
        """
        host, port = parse_address(address)
        if host == "*" or port == 0:
            raise ConfigError(
                f"{address!r} says where to listen, not where to connect to: name the hub, for example"
                " tcp://192.168.1.10:5555"
            )
        check_peer_id(peer)
        if server_key is None and keys is not None:
            raise ConfigError("keys without a server_key: the hub's public key is needed too (its file NAME.key)")
        if server_key is not None:
            _check_key("public", server_key)
            keys = keys or CurveKeys.generate()

        def configure(socket: zmq.SyncSocket) -> None:
            if keys is not None and server_key is not None:
                socket.curve_serverkey = server_key
                socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret

        return cls(address, peer, configure, beside.context if beside is not None else None)

    def _open(self) -> None:
        for lane in Lane:
            socket = _open_socket(self._context, zmq.DEALER, _NODE_SEND_MESSAGES[lane], _NODE_RECEIVE_MESSAGES[lane])
            self._ports[lane] = _Port(socket, self._incoming, self._writable[lane])
            socket.routing_id = _LANE_BYTES[lane] + self.peer.encode()
            socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MILLISECONDS, _RECONNECT_MAX_MILLISECONDS
            self._configure(socket)
            self._watches.append(ConnectionWatch(socket, lambda: self._told()))
            socket.ipv6 = ":" in parse_address(self.address)[0]
            try:
                socket.connect(self.address)
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"cannot connect to {self.address!r} ({error.strerror}); an address is, for example,"
                    " tcp://192.168.1.10:5555"
                ) from error

    def watch(self, told: Callable[[], None]) -> None:
        """Have `told` called in the loop when a connection that was there has gone."""
        self._told = told

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
        self._check_open()
        try:
            self._ports[lane].send(frames)
        except zmq.Again:
            return False
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
        while self._attempt == attempt:
            self._check_open()
            try:
                self._ports[lane].send(frames)
                return
            except zmq.Again:
                if not self._ports[lane].writable:
                    await self._writable[lane].wait()

    async def receive(self) -> tuple[Lane, list[Buffer]]:
        """Return the next message of either lane, CONTROL first; raise ChannelClosed.

        Frames from 64 KiB on are read-only views of what zmq received, the others bytes.
        """
        while True:
            await self._fairness.turn()
            self._check_open()
            for lane, port in self._ports.items():
                frames = port.receive(limit=MAX_MESSAGE_FRAMES)
                if frames:
                    return lane, [_buffer(frame) for frame in frames]
                if frames is not None:  # too many of them: not a hub of ours; look again
                    break
            else:
                if not any(port.readable for port in self._ports.values()):
                    await self._incoming.wait()

    async def reconnect(self, address: str = "") -> None:
        """Drop both connections and all that is queued on them, and connect anew under the same name.

        address: where the hub is from now on; "": where it was.  Raise ChannelClosed.
        """
        self._check_open()
        self.address = address or self.address
        self._attempt += 1
        self._close_ports(0.0)
        self._open()
        self._wake_all()

    async def close(self, linger_seconds: float = 1.0) -> None:
        """Wake who waits here, send what is queued for at most `linger_seconds`, then close; twice is once."""
        if self._closed:
            return
        self._closed = True
        self._wake_all()
        self._close_ports(linger_seconds)
        if not self._shares:
            await _terminate(self._context)

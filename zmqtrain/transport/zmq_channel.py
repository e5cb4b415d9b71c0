"""Carry messages over ZeroMQ: one ROUTER at the hub, two DEALERs at each node.

Rule 1: a call on a socket never blocks and never waits inside zmq: try, wait at a gate, try again.  So a cancelled
`receive` loses no message, and closing leaves no future behind.  (zmq.asyncio takes the message first and hands it to a
future; if its task is cancelled just then the message is gone.)
Rule 2: who is not one of ours (a stranger's routing id, junk, too many frames) is counted and ignored.
Rule 3: every queue is bounded.  The high-water marks are a net under the credits, not the flow control.
Rule 4: no ZMTP heartbeats: they time out in the middle of large messages.  Heartbeats are the protocol's messages.
Rule 5: a message counts only if its connection may speak as the peer that it names: with an authorised key, which
opened this peer's id, and in the life of the peer that connected last (`admission`).  That is asked of each message, so
a key that is revoked is out with the next one.

A routing id is the lane, b"C" or b"B", the peer's id in utf-8, a zero byte, and the life of this channel: random, so
that nobody else can take the place of a connection (libzmq gives it to whoever comes last with the same id).  A node's
first message on a lane is empty: it shows whose connection that is, and is not handed on.  Needs an event loop with
`add_reader` (on Windows the selector loop).
Source: ZeroMQ RFC 28 (ROUTER, DEALER).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import zmq

from zmqtrain.errors import ChannelClosed, ChannelFull, ConfigError, PeerLost
from zmqtrain.transport.address import bind_error, connectable_host, parse_address
from zmqtrain.transport.admission import EVERYBODY, Admission, Seats
from zmqtrain.transport.connections import ConnectionLimits
from zmqtrain.transport.gate import Fairness, Gate
from zmqtrain.transport.limits import (
    MAX_MESSAGE_FRAMES,
    check_message,
    check_peer_id,
    is_peer_id,
)
from zmqtrain.transport.refusals import Refusals
from zmqtrain.transport.zmq_access import ZAP_DOMAIN, Doorway, ZapHandler, descriptor_room
from zmqtrain.transport.zmq_keys import CurveKeys, check_key
from zmqtrain.transport.zmq_port import Port, as_buffer, open_socket, terminate_context
from zmqtrain.transport.zmq_watch import ConnectionWatch
from zmqtrain.types import Buffer, Lane, PeerId

__all__ = ["DealerChannel", "RouterChannel", "libzmq_version"]

logger = logging.getLogger(__name__)

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

_SOURCE, _USER = int(zmq.SRCFD), "User-Id"

_LIFE_BYTES = 8
_BACKLOG = 128  # connections that wait to be accepted: a whole classroom started at once
_REFUSED_SECONDS = 1.0
_RECONNECT_MILLISECONDS, _RECONNECT_MAX_MILLISECONDS = 100, 500
"""libzmq adds a random time of up to the first: who all lost one hub do not all come at once."""


def libzmq_version() -> str:
    """Return the version of the library under pyzmq."""
    return zmq.zmq_version()


class RouterChannel:
    """The hub's end (a `HubChannel`): one port for both lanes of every node.  Made by `bind`.

    context: libzmq's threads, for channels beside this one.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.SyncSocket],
        socket: zmq.SyncSocket,
        doorway: Doorway,
        refusals: Refusals,
        admission: Admission | None,
        handler: ZapHandler | None,
        seats: Seats,
    ) -> None:
        self.context = context
        self._doorway, self._refusals, self._admission, self._handler = doorway, refusals, admission, handler
        self._seats = seats
        self._speakers: dict[int, tuple[PeerId, bytes, str]] = {}  # by descriptor: who was heard there
        self._incoming = Gate()
        self._port = Port(socket, self._incoming, Gate())
        self._fairness = Fairness()
        self._strangers = 0
        self._closed = False
        self._address = ""

    @classmethod
    def bind(
        cls,
        address: str,
        *,
        keys: CurveKeys | None = None,
        admission: Admission | None = None,
        limits: ConnectionLimits | None = None,
    ) -> RouterChannel:
        """Listen at `address`: tcp://*:5555, or an IP address or interface of this machine; port 0 chooses a free one.

        keys: the hub's CURVE keys; then every client must use CURVE, and know the public one.  admission: which
        clients' keys come in; without it, every client's that knows the hub's.  limits: of connections.  Call it in a
        running loop.
        Raise ConfigError for an address that cannot be used, AddressInUse if somebody listens there.
        """
        host, _ = parse_address(address, "tcp://*:5555")
        if admission is not None and keys is None:
            raise ConfigError("who comes in is decided by keys, and this hub has none: give it a pair")
        limits = limits or ConnectionLimits()
        limits = replace(limits, total=descriptor_room(limits.total))
        context: zmq.Context[zmq.SyncSocket] = zmq.Context()
        refusals, seats = Refusals(f"the port at {address}"), Seats()
        handler = None
        if admission is not None:
            handler = ZapHandler(context, admission, lambda whose: refusals.count("key", whose))
        socket = open_socket(context, zmq.ROUTER, _HUB_SEND_MESSAGES, _HUB_RECEIVE_MESSAGES)
        doorway = Doorway(socket, limits, refusals)
        channel = cls(context, socket, doorway, refusals, admission, handler, seats)
        doorway.gone = channel._gone
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
            channel._close(0.0)
            context.term()
            raise bind_error(address, error.errno or 0) from error
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        channel._address = f"tcp://{connectable_host(host)}:{endpoint.rpartition(':')[2]}"
        return channel

    @property
    def address(self) -> str:
        """Where nodes on this machine connect to; from others, its name takes the place of 127.0.0.1."""
        return self._address

    @property
    def strangers(self) -> int:
        """How many messages were ignored because no node of ours could have sent them."""
        return self._strangers

    @property
    def refusals(self) -> Counter[str]:
        """How many connections and messages were refused, by `refusals.REASONS`."""
        return Counter(self._refusals.counts)

    @property
    def connections(self) -> int:
        """How many TCP connections there are now."""
        self._doorway.look()
        return len(self._doorway.connections)

    def name_of(self, peer: PeerId) -> str:
        """Return the name of the key with which a peer came; "" where no keys are asked for, or it never came."""
        seat = self._seats.get(peer)
        return "" if seat is None else seat.name

    def admit(self, names: Mapping[str, str]) -> dict[str, str]:
        """Let clients with these public keys in from now on, under these names, and no others.

        Return those that were let in before and are not any more: nothing of theirs is received from now on; `cut`
        ends their connections.  Raise ConfigError where no keys are asked for.
        """
        if self._admission is None or self._handler is None:
            raise ConfigError(f"the port at {self._address} asks for no keys")
        gone = self._admission.change(names)
        self._handler.answer_waiting()
        return gone

    def peers_with(self, key: str) -> list[PeerId]:
        """Return the peers that are connected, and came with this public key."""
        return self._seats.with_key(key)

    def cut(self, key: str) -> None:
        """End all connections of a public key; and those from the same addresses that were not heard yet."""
        self._doorway.look()
        theirs = [descriptor for descriptor, (_, _, used) in self._speakers.items() if used == key]
        table = self._doorway.connections
        addresses = {here.address for descriptor in theirs if (here := table.get(descriptor)) is not None}
        for address in addresses:
            theirs += [here.descriptor for here in table.of(address) if here.descriptor not in self._speakers]
        for descriptor in theirs:
            self._doorway.cut(descriptor)

    def _gone(self, descriptor: int) -> None:
        if (speaker := self._speakers.pop(descriptor, None)) is not None:
            self._seats.left(speaker[0], descriptor)

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"the hub's channel at {self._address} is closed")

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Buffer]) -> None:
        """Send one message; never waits.  Large frames are not copied: nobody may write into them again.

        Raise PeerLost, ChannelFull, ChannelClosed, and LocalProtocolError for a message that no channel carries.
        """
        check_message(frames)
        self._check_open()
        if (seat := self._seats.get(peer)) is None:
            raise PeerLost(peer)
        try:
            self._port.send(frames, _routing_id(lane, peer, seat.life))
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
            elif self._counts(frames[1], sender[0], sender[2]) and (len(frames) > 2 or len(frames[1])):
                return sender[0], sender[1], [as_buffer(frame) for frame in frames[1:]]

    def _counts(self, frame: zmq.Frame, peer: PeerId, life: bytes) -> bool:
        """Whether the connection over which this frame came may speak as `peer` in this life of it."""
        key = name = EVERYBODY
        if self._admission is not None:
            key = str(frame.get(_USER))
            known = self._admission.name_of(key)
            if known is None:
                self._refusals.count("revoked", _name_in_a_log(peer))
                return False
            name = known
        descriptor = int(frame.get(_SOURCE))
        if self._speakers.get(descriptor) == (peer, life, key):
            return True
        self._doorway.look()  # so that the number is this connection's
        connection = self._doorway.connections.get(descriptor)
        number = -1 if connection is None else connection.number
        reason, ended = self._seats.hear(peer, name, key, life, descriptor, number)
        if reason:
            self._refusals.count(reason, name or _name_in_a_log(peer))
            self._doorway.cut(descriptor)
            return False
        for former in ended - {descriptor}:
            self._speakers.pop(former, None)
            self._doorway.cut(former)
        if name and peer not in (speaker[0] for speaker in self._speakers.values()):
            logger.info("%s comes with the key of %s", _name_in_a_log(peer), name)
        self._speakers[descriptor] = (peer, life, key)
        self._doorway.connections.proved(descriptor)
        return True

    async def close(self, linger_seconds: float = 1.0) -> None:
        """Wake who waits here, send what is queued for at most `linger_seconds`, then close; twice is once."""
        if self._closed:
            return
        self._close(linger_seconds)
        await terminate_context(self.context)

    def _close(self, linger_seconds: float) -> None:
        self._closed = True
        self._incoming.open()
        self._doorway.close()
        self._port.close(linger_seconds)
        if self._handler is not None:
            self._handler.close()
        self._refusals.close()


def _routing_id(lane: Lane, peer: PeerId, life: bytes) -> bytes:
    return _LANE_BYTES[lane] + peer.encode() + (b"\0" + life if life else b"")


def _name_in_a_log(peer: PeerId) -> str:
    """Return what may be read of a peer's id: of one within a group (RANK@TOKEN) not the token, which is a secret."""
    return peer if "#" in peer else peer.partition("@")[0]


def _sender(routing_id: bytes) -> tuple[PeerId, Lane, bytes] | None:
    """Return (peer, lane, life) of a routing id, None if it is none of ours (libzmq's own begin with a zero byte)."""
    lane = _LANES.get(routing_id[:1])
    if lane is None:
        return None
    who, _, life = routing_id[1:].partition(b"\0")
    try:
        name = who.decode()
    except UnicodeDecodeError:
        return None
    return (PeerId(name), lane, life) if is_peer_id(name) else None


class DealerChannel:
    """A node's end (a `Channel`): one connection per lane to the hub's one port.  Made by `connect`.

    libzmq connects in the background, and again when the connection is lost; until it is there, what is sent queues.
    While the hub does not authorise this channel's key, it is asked again every second, and what had queued is lost.
    """

    def __init__(
        self,
        address: str,
        peer: PeerId,
        configure: Callable[[zmq.SyncSocket], None],
        context: zmq.Context[zmq.SyncSocket] | None = None,
        keyed: bool = False,
    ) -> None:
        self.address, self.peer = address, peer
        self._keyed = keyed
        self._configure, self._shares = configure, context is not None
        self._watches: list[ConnectionWatch] = []
        self._refused = ""
        self._retry: asyncio.TimerHandle | None = None
        self._context: zmq.Context[zmq.SyncSocket] = context or zmq.Context()
        self._incoming = Gate()
        self._writable = {lane: Gate() for lane in Lane}
        self._ports: dict[Lane, Port] = {}
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

        server_key: the hub's public CURVE key; keys: this node's pair (a fresh one if there is only a server_key, which
        comes in only where all do that know it).
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
            check_key("public", server_key)
            keys = keys or CurveKeys.generate()

        def configure(socket: zmq.SyncSocket) -> None:
            if keys is not None and server_key is not None:
                socket.curve_serverkey = server_key
                socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret

        context = beside.context if beside is not None else None
        return cls(address, peer, configure, context, server_key is not None)

    @property
    def refused(self) -> str:
        """Why the last attempt to connect ended in its handshake: "key" (this channel's is not authorised there),
        "handshake" (what listens there wants other keys, or none, or is no hub); "" if it did not."""
        return self._refused

    @property
    def obstacle(self) -> str:
        """See Channel: what is known of an attempt to connect that ended in its handshake."""
        if self._refused == "key":
            return "it does not authorise this PC's key (on the hub, `zmqtrain keys list` shows whose it does)"
        if self._refused:
            return (
                "what listens there ended the connection while keys were exchanged: is --server-key (in the file of "
                "--keys) this hub's?"
                if self._keyed
                else "what listens there wants keys: give the file that was made for this PC (--keys FILE)"
            )
        return ""

    def _handshake_ended(self, how: str) -> None:
        self._refused = how
        if how == "key" and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_REFUSED_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        if not self._closed:
            self._reopen()

    def _open(self) -> None:
        life = secrets.token_bytes(_LIFE_BYTES)
        for lane in Lane:
            socket = open_socket(self._context, zmq.DEALER, _NODE_SEND_MESSAGES[lane], _NODE_RECEIVE_MESSAGES[lane])
            self._ports[lane] = Port(socket, self._incoming, self._writable[lane])
            socket.routing_id = _routing_id(lane, self.peer, life)
            socket.probe_router = 1
            socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MILLISECONDS, _RECONNECT_MAX_MILLISECONDS
            self._configure(socket)
            self._watches.append(ConnectionWatch(socket, lambda: self._told(), self._handshake_ended))
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
                    return lane, [as_buffer(frame) for frame in frames]
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
        self._reopen()

    def _reopen(self) -> None:
        self._attempt += 1
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
        self._close_ports(linger_seconds)
        if not self._shares:
            await terminate_context(self._context)

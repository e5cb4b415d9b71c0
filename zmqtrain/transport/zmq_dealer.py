"""Carry a node's messages over ZeroMQ: two DEALERs, one for each lane, to the one port of the hub.

Rule 1: a call on a socket never blocks and never waits inside zmq: try, wait at a gate, try again.  So a cancelled
`receive` loses no message, and closing leaves no future behind.  (zmq.asyncio takes the message first and hands it to a
future; if its task is cancelled just then the message is gone.)
Rule 2: every queue is bounded.  The high-water marks are a net under the credits, not the flow control.
Rule 3: no ZMTP heartbeats: they time out in the middle of large messages.  Heartbeats are the protocol's messages.

Needs an event loop with `add_reader` (on Windows the selector loop).
Source: ZeroMQ RFC 28 (ROUTER, DEALER).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import zmq

from zmqtrain.core.errors import ChannelClosed, ConfigError
from zmqtrain.core.types import Buffer, Lane, PeerId
from zmqtrain.transport.address import check_reachable, parse_address
from zmqtrain.transport.found_keys import Access
from zmqtrain.transport.gate import Fairness, Gate
from zmqtrain.transport.limits import MAX_MESSAGE_FRAMES, check_message, check_peer_id
from zmqtrain.transport.notice import reason_of
from zmqtrain.transport.routing import first_life, next_life, routing_id_of
from zmqtrain.transport.zmq_keys import CurveKeys, check_key
from zmqtrain.transport.zmq_port import Port, as_buffer, open_socket, terminate_context
from zmqtrain.transport.zmq_router import RouterChannel
from zmqtrain.transport.zmq_watch import ConnectionWatch

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
    """A node's end (a `Channel`): one connection per lane to the hub's one port.  Made by `connect`.

    libzmq connects in the background, and again when the connection is lost; until it is there, what is sent queues.
    While the hub does not authorise this channel's key, it is asked again every second, and what had queued is lost.
    """

    def __init__(
        self,
        address: str,
        peer: PeerId,
        access: Access,
        context: zmq.Context[zmq.SyncSocket] | None = None,
    ) -> None:
        self.address, self.peer = address, peer
        self._access, self._life = access, first_life()
        self._shares = context is not None
        self._unheard: list[tuple[Lane, Sequence[Buffer]]] = []  # sent before it is known whether a found key is used
        self._tries_found_key = access.found is not None and not access.declined
        self._watches: list[ConnectionWatch] = []
        self._refused, self._broken, self._news = "", 0, Gate()
        self._retry: asyncio.TimerHandle | None = None
        self._context: zmq.Context[zmq.SyncSocket] = context or zmq.Context()
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

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        peer: PeerId,
        keys: CurveKeys | None = None,
        server_key: bytes | None = None,
        beside: RouterChannel | None = None,
        access: Access | None = None,
    ) -> DealerChannel:
        """Connect to the hub at `address` as `peer`.  Call it in a running loop; it does not wait for the hub.

        server_key: the hub's public CURVE key; keys: this node's pair (a fresh one if there is only a server_key, which
        comes in only where all do that know it).
        beside: a channel of this process, with which this one shares libzmq's threads; it must be closed after this.
        access: both keys, in place of the two; a pair that was found and not given is left out at a hub without keys.
        Raise ConfigError for an address, a name or keys that cannot be used.
        """
        check_reachable(address)
        check_peer_id(peer)
        if server_key is None and keys is not None:
            raise ConfigError("keys without a server_key: the hub's public key is needed too (its file NAME.key)")
        if server_key is not None:
            check_key("public", server_key)
            keys = keys or CurveKeys.generate()
        if access is None:
            access = Access((server_key, keys))
        elif access.given[0] is not None and access.given[1] is None:  # of which a hub may know that it is the same
            access.given = access.given[0], CurveKeys.generate()
        return cls(address, peer, access, beside.context if beside is not None else None)

    @property
    def refused(self) -> str:
        """Why the last attempt to connect ended in its handshake: "key" (this channel's is not authorised there),
        "handshake" (what listens there wants keys, or none), "broken" (it ended several connections in a row: it has
        other keys or wants some, or is no hub); or why nothing is heard that comes over the connection: "name" (this
        peer came with another key before); "" if nothing is known to be wrong."""
        return self._refused

    @property
    def obstacle(self) -> str:
        """See Channel: what `refused` means, for people."""
        if self._refused == "key":
            where = f", that in {self._access.found}" if self._access.found is not None else ""
            return (
                f"the hub does not authorise this PC's key{where} (there, `zmqtrain keys list` shows whose it does, "
                "and `zmqtrain keys new NAME` makes one)"
            )
        if self._refused == "name":
            return (
                f"it knows {self.peer} by another key than this PC's: a node that goes on from a checkpoint is the one "
                "that it was. Start it with the key file of then (--keys), or with a checkpoint folder of its own"
            )
        if self._refused and self._access.credentials[0] is not None:
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
        if self._refused == "handshake":
            return f"what listens there wants keys: give the file that was made for this PC (--keys FILE){looked}"
        if self._refused:
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
        if how != self._refused:
            self._refused = how
            self._news.open()

    def _handshake_ended(self, how: str) -> None:
        if how == "handshake" and self._tries_found_key:
            return self._leave_key_out()
        if how == "":
            self._unheard, self._tries_found_key = [], False
        self._broken = self._broken + 1 if how == "broken" else 0
        if how == "broken" and self._broken < _BROKEN_IN_A_ROW:
            return
        # "name" is told after the handshake, of each connection; after "key" both lanes are opened anew
        if how or (self._refused != "name" and self._retry is None):
            self._learn(how)
        if how == "key" and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_REFUSED_SECONDS, self._try_again)

    def _leave_key_out(self) -> None:
        """Open both connections anew without the key that was found, as the hub uses none; nothing is lost."""
        self._access.decline(self.address)
        self._tries_found_key, unheard, self._unheard = False, self._unheard, []
        self._attempt -= 1  # whoever waits to send goes on
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
            self._watches.append(ConnectionWatch(socket, self._gone, self._handshake_ended))
            socket.ipv6 = ":" in parse_address(self.address)[0]
            try:
                socket.connect(self.address)
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"cannot connect to {self.address!r} ({error.strerror}); an address is, for example,"
                    " tcp://192.168.1.10:5555"
                ) from error

    def watch(self, told: Callable[[], None]) -> None:
        """Have `told` called in the loop when a connection that was there has gone, once what had come over it (a
        goodbye, perhaps) is received."""
        self._told = told

    def _gone(self) -> None:
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
        while self._attempt == attempt:
            self._check_open()
            try:
                self._ports[lane].send(frames)
                if self._tries_found_key:
                    self._unheard.append((lane, frames))
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
        if reason or self._refused == "name":
            self._learn(reason or "")
        return message if reason is None else None

    async def reconnect(self, address: str = "") -> None:
        """Drop both connections and all that is queued on them, and connect anew under the same name.

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

"""Carry a hub's messages over ZeroMQ: one ROUTER, for both lanes of every node.

Rule 1: a call on a socket never blocks and never waits inside zmq: try, wait at a gate, try again (`zmq_port`).
Rule 2: who is not one of ours (a stranger's routing id, junk, too many frames) is counted and ignored.
Rule 3: every queue is bounded.  The high-water marks are a net under the credits, not the flow control.
Rule 4: no ZMTP heartbeats: they time out in the middle of large messages.  Heartbeats are the protocol's messages.
Rule 5: a message counts only if its connection may speak as the peer that it names: with an authorised key, which
opened this peer's id, and in the life of the peer that connected last (`admission`).  That is asked of each message, so
a key that is revoked is out with the next one.

A node's first message on a lane is empty: it shows whose connection that is, and is not handed on.  Needs an event loop
with `add_reader` (on Windows the selector loop).
Source: ZeroMQ RFC 28 (ROUTER, DEALER).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import zmq

from zmqtrain.core.errors import ChannelClosed, ChannelFull, ConfigError, PeerLost
from zmqtrain.core.types import Buffer, Lane, PeerId
from zmqtrain.transport.address import bind_error, connectable_host, is_own_address, parse_address
from zmqtrain.transport.admission import EVERYBODY, Admission, Seats
from zmqtrain.transport.connections import ConnectionLimits
from zmqtrain.transport.gate import Fairness, Gate
from zmqtrain.transport.limits import MAX_MESSAGE_FRAMES, check_message
from zmqtrain.transport.notice import NOTICES, notice
from zmqtrain.transport.refusals import Refusals
from zmqtrain.transport.routing import routing_id_of, sender_of
from zmqtrain.transport.zmq_access import ZAP_DOMAIN, Doorway, ZapHandler, descriptor_room
from zmqtrain.transport.zmq_keys import CurveKeys
from zmqtrain.transport.zmq_port import Port, as_buffer, open_socket, terminate_context

logger = logging.getLogger(__name__)

# High-water marks: whole messages, per connection and side; a message of ours is at most one chunk (4 MiB) and a head.
# The hub's port has one pair for both lanes of every node.  Out, 64: bulk is held to its window (4 MiB) by the Outbox,
# so these are control messages; 64 of them unread mean a node that has stopped.  In, 8: at most 32 MiB per connection
# if somebody sends without being granted; what does not fit waits in TCP, on the sender's side.
_SEND_MESSAGES, _RECEIVE_MESSAGES = 64, 8

_TOLD_AT_ONCE = 8  # messages, before the loop's other tasks have a turn

_SOURCE, _USER = int(zmq.SRCFD), "User-Id"

_FAREWELL_SECONDS = 0.5
"""Between the notice why a connection is not heard and its end, so that it can be read."""

_BACKLOG = 128  # connections that wait to be accepted: a whole classroom started at once


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
        news: Gate,
    ) -> None:
        self.context = context
        self._doorway, self._refusals, self._admission, self._handler = doorway, refusals, admission, handler
        self._seats, self._news = Seats(), news
        self._speakers: dict[int, tuple[PeerId, bytes, str, Lane]] = {}  # by descriptor: who was heard there
        self._dismissed: dict[int, int] = {}  # by descriptor: the number of a connection that was told why it will end
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
        news = Gate()
        refusals = Refusals(f"the port at {address}", news.open)
        handler = None
        if admission is not None:
            handler = ZapHandler(context, admission, lambda whose: refusals.count("key", whose))
        socket = open_socket(context, zmq.ROUTER, _SEND_MESSAGES, _RECEIVE_MESSAGES)
        doorway = Doorway(socket, limits, refusals, news.open)
        channel = cls(context, socket, doorway, refusals, admission, handler, news)
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
    def turned_away(self) -> int:
        """How many of them were refused in the last minute, but for what happens in normal life."""
        return self._refusals.recent

    @property
    def connections(self) -> int:
        """How many TCP connections there are now."""
        self._doorway.look()
        return len(self._doorway.connections)

    async def changed(self) -> None:
        """Wait until `connections` or `refusals` are others than now, if only for a moment.  Raise ChannelClosed."""
        self._check_open()
        await self._news.wait()
        self._check_open()

    def name_of(self, peer: PeerId) -> str:
        """Return the name of the key with which a peer came; "" where no keys are asked for, or it never came."""
        seat = self._seats.get(peer)
        return "" if seat is None else seat.name

    def remember(self, owner_of: Callable[[PeerId], str]) -> None:
        """Let nobody else speak as a peer that has come before, under the name of a key that still comes in.

        owner_of: that name; "" for who has not come.
        """

        def owner(peer: PeerId) -> str:
            name = owner_of(peer)
            return name if name and self._admission is not None and self._admission.knows(name) else ""

        self._seats.owner_of = owner

    def is_of_this_machine(self, peer: PeerId) -> bool:
        """Return whether a peer is connected, and from an address of this machine alone."""
        seat = self._seats.get(peer)
        self._doorway.look()
        there = [self._doorway.connections.get(descriptor) for descriptor in ([] if seat is None else seat.descriptors)]
        return bool(there) and all(one is not None and is_own_address(one.address) for one in there)

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
        theirs = [descriptor for descriptor, (_, _, used, _) in self._speakers.items() if used == key]
        table = self._doorway.connections
        addresses = {here.address for descriptor in theirs if (here := table.get(descriptor)) is not None}
        for address in addresses:
            theirs += [here.descriptor for here in table.of(address) if here.descriptor not in self._speakers]
        for descriptor in theirs:
            self._doorway.cut(descriptor)

    def _gone(self, descriptor: int) -> None:
        self._dismissed.pop(descriptor, None)
        if (speaker := self._speakers.pop(descriptor, None)) is not None:
            self._seats.left(speaker[0], descriptor)

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"the hub's channel at {self._address} is closed")

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Buffer]) -> None:
        """Send one message; never waits.  Large frames are not copied: nobody may write into them again.

        Raise PeerLost, ChannelFull, ChannelClosed, and LocalProtocolError for a message that no channel carries.
        BULK, which a node connects after CONTROL, counts as full while it may be on its way: see `Seats.awaits`.
        """
        check_message(frames)
        self._check_open()
        if (seat := self._seats.get(peer)) is None:
            raise PeerLost(peer)
        try:
            self._port.send(frames, routing_id_of(lane, peer, seat.life))
        except zmq.Again as error:
            raise ChannelFull(f"the {lane.name} lane to {peer} holds {_SEND_MESSAGES} messages") from error
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            seconds = self._doorway.connections.limits.handshake_seconds
            if lane is Lane.BULK and self._seats.awaits(peer, lane, seconds, self._doorway.clock()):
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
        """Have each message told as it comes, from now on, instead of handed out by `receive`: no task need be woken.

        told: what it raises is the loop's to handle; the next message is told all the same.
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
            self._strangers += 1
            return None
        if not self._counts(frames[1], *sender) or (len(frames) == 2 and not len(frames[1])):
            return None
        if (seat := self._seats.get(sender[0])) is not None and not seat.spoke:
            seat.spoke = True
            for descriptor in seat.descriptors:
                self._doorway.connections.spoke(descriptor)
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
            self._doorway.look()  # that connection may have ended, and this be another
            if descriptor in self._dismissed:
                self._refusals.count("dismissed", name or _name_in_a_log(peer))
                return False
        if self._speakers.get(descriptor) == speaker and self._seats.get(peer) is not None:
            return True
        self._doorway.look()  # so that the number is this connection's
        connection = self._doorway.connections.get(descriptor)
        number = -1 if connection is None else connection.number
        reason, ended = self._seats.hear(peer, name, key, life, descriptor, number)
        if reason in NOTICES and connection is not None:
            self._refusals.count(reason, f"{_name_in_a_log(peer)} with the key of {name}")
            if self._end_soon(descriptor):
                with contextlib.suppress(zmq.ZMQError):  # it is gone, or reads nothing
                    self._port.send(notice(reason), routing_id_of(lane, peer, life))
            return False
        for former in ended if reason else ended - {descriptor}:
            there = self._speakers.get(former)
            if there is None or (there[0] == peer and not self._seats.is_now(peer, there[1])):
                self._speakers.pop(former, None)
                self._doorway.cut(former)  # else that descriptor is another's by now
        if reason:
            self._refusals.count(reason, name or _name_in_a_log(peer))
            return False
        if name and (seat := self._seats.get(peer)) is not None and not seat.told:
            seat.told = True
            logger.info("%s comes with the key of %s", _name_in_a_log(peer), name)
        self._speakers[descriptor] = speaker
        self._seats.note_lane(peer, lane, self._doorway.clock())
        self._doorway.connections.proved(descriptor)
        if (seat := self._seats.get(peer)) is not None and seat.spoke:
            self._doorway.connections.spoke(descriptor)
        return True

    def dismiss(self, peer: PeerId) -> None:
        """End the connections of a peer in a while; nothing that comes over them is received until then."""
        if (seat := self._seats.get(peer)) is not None:
            for descriptor in list(seat.descriptors):
                self._end_soon(descriptor)

    def _end_soon(self, descriptor: int) -> bool:
        """Cut this connection in a while; what was said to it can be read until then. False if that is on its way."""
        self._doorway.look()
        connection = self._doorway.connections.get(descriptor)
        if connection is None or self._dismissed.get(descriptor) == connection.number:
            return False
        self._dismissed[descriptor] = connection.number
        asyncio.get_running_loop().call_later(_FAREWELL_SECONDS, self._end, descriptor, connection.number)
        return True

    def _end(self, descriptor: int, number: int) -> None:
        if self._closed:
            return
        self._doorway.look()  # its number may be another connection's by now
        if self._dismissed.get(descriptor) == number:
            self._doorway.cut(descriptor)

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
        self._doorway.close()
        self._port.close(linger_seconds)
        if self._handler is not None:
            self._handler.close()
        self._refusals.close()


def _name_in_a_log(peer: PeerId) -> str:
    """Return what may be read of a peer's id: of one within a group (RANK@TOKEN) not the token, which is a secret."""
    return peer if "#" in peer else peer.partition("@")[0]

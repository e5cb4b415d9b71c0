"""Be the wires: ports of a star with rates and latency, and what a cut does to what is on its way.

Rule 1: a port carries one payload after the other, each way; the switch forwards as it receives.
Rule 2: heads are small: they take the latency alone, and never wait behind payloads (a second connection).
Rule 3: a wire that is cut holds what is sent over it, as TCP does, and delivers it when it is whole again; what was
sent on a connection that one side has given up by then is lost.
Rule 4: where noise is on a wire, it decides of every head and payload what becomes of it (`zmqtrain.sim.faults`).

    node --tx port--> switch --hub's rx port--> hub          node <--rx port-- switch <--hub's tx port-- hub
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zmqtrain.sim.clock import Scheduler
from zmqtrain.sim.faults import FrameNoise
from zmqtrain.transport.memory import LinkModel

Delivery = Callable[[], object]


class Port:
    """One direction of one machine's port: free again at a time."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0

    def reserve(self, now: float, seconds: float) -> float:
        """Occupy the port for `seconds` as soon as it is free; return when that starts."""
        start = max(now, self.free_at)
        self.free_at = start + seconds
        return start


class HubPorts:
    """The two directions of the hub's one port, which all nodes share. link: what it can do; None: as a node's."""

    def __init__(self, link: LinkModel | None = None) -> None:
        self.link = link
        self.receiving, self.sending = Port(), Port()


class Wire:
    """The connection of one node with the hub, both ways. up, down: bytes of payload and heads that were sent.

    noise: what becomes of its frames, None for nothing.  broken: is called when the connection breaks; the hub is not
    told.
    """

    def __init__(self, scheduler: Scheduler, link: LinkModel, hub: HubPorts) -> None:
        self.up = self.down = 0
        self.dead = False
        self.noise: FrameNoise | None = None
        self.broken: Callable[[], object] = lambda: None
        self._scheduler, self._link = scheduler, link
        self._hub_link = hub.link or link
        self._ports = {True: (Port(), hub.receiving), False: (hub.sending, Port())}
        self._connection = 0
        self._cut = False
        self._held: list[tuple[int, bool, int, Delivery]] = []

    def head(self, up: bool, size: int, deliver: Delivery) -> None:
        """Send a head of `size` bytes."""
        self._count(up, size)
        self._send_through_noise(up, 0, deliver, None)

    def payload(self, up: bool, size: int, deliver: Delivery, flipped: Delivery | None = None) -> None:
        """Send a payload of `size` bytes through the ports. flipped: delivers it with a bit flipped, on the way up."""
        self._count(up, size)
        self._send_through_noise(up, size, deliver, flipped)

    def _send_through_noise(self, up: bool, size: int, deliver: Delivery, flipped: Delivery | None) -> None:
        if self.noise is None or self.dead:
            return self._send(self._connection, up, size, deliver)
        fate, connection = self.noise.fate(flipped is not None), self._connection
        if fate.breaks:
            self.reconnect()
            self._scheduler.call_later(0.0, self.broken)
            return None
        what = flipped if fate.flipped and flipped is not None else deliver
        for late in fate.delays:
            if late:
                self._scheduler.call_later(late, partial(self._send, connection, up, size, what))
            else:
                self._send(connection, up, size, what)
        return None

    def reconnect(self) -> None:
        """Give the connection up: what is on its way, or held, is lost."""
        self._connection += 1
        self._held.clear()

    def cut(self) -> None:
        """Let nothing through until `mend`."""
        self._cut = True

    def mend(self) -> None:
        """Be whole again: what was held goes on its way."""
        self._cut = False
        held, self._held = self._held, []
        for connection, up, size, deliver in held:
            self._send(connection, up, size, deliver)

    def die(self) -> None:
        """The node is dead: nothing gets through any more, and the hub is told when it sends."""
        self.dead = True
        self.reconnect()

    def _count(self, up: bool, size: int) -> None:
        if up:
            self.up += size
        else:
            self.down += size

    def _send(self, connection: int, up: bool, size: int, deliver: Delivery) -> None:
        if self._cut:
            self._held.append((connection, up, size, deliver))
            return
        first, second = self._ports[up]
        first_link, second_link = (self._link, self._hub_link) if up else (self._hub_link, self._link)
        seconds, first_seconds = second_link.seconds(size), first_link.seconds(size)
        start = first.reserve(self._scheduler.now, first_seconds) if size else self._scheduler.now
        last_byte_at = start + self._link.latency_seconds + first_seconds

        def reach() -> None:
            if connection != self._connection:
                return
            if self._cut:
                self._held.append((connection, up, size, deliver))
            elif size:
                forwarded_at = second.reserve(self._scheduler.now, seconds) + seconds
                self._scheduler.call_at(max(forwarded_at, last_byte_at), arrive)
            else:
                deliver()

        def arrive() -> None:
            if connection != self._connection:
                return
            if self._cut:
                self._held.append((connection, up, size, deliver))
            else:
                deliver()

        self._scheduler.call_at(start + self._link.latency_seconds, reach)

"""Bound the connections at a hub's port: how many there are, from one address and in all, and how many are half open.

Rule 1: a connection is half open until a message has come over it, or until it is older than a handshake may last:
libzmq closes what has not finished its handshake by then.
Rule 2: who has too many loses its own.  From an address with too many half-open connections the oldest of them goes; if
there are too many in all, the oldest of the address that has most.  A connection that was heard is never given up for a
new one.
Rule 3: nothing here waits, or touches a socket: it says which descriptors are to be cut, and why.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Connection", "ConnectionLimits", "Connections", "Cut"]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be, and how long a handshake may last.

    A node has two connections to a hub.  The bounds of those that are half open bound the memory that strangers can
    take: each may send one frame of at most 4.06 MiB before it is known.
    """

    total: int = 4096
    per_address: int = 512
    half_open: int = 256
    half_open_per_address: int = 64
    handshake_seconds: float = 5.0


@dataclass(slots=True)
class Connection:
    """One TCP connection. address, port: of the other end.  since: when it was accepted, in seconds.  number: higher
    for each."""

    descriptor: int
    address: str
    port: int
    since: float
    number: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A connection that is to be cut: "half-open", "address" (too many from it) or "full"."""

    connection: Connection
    reason: str


class Connections:
    """All connections at a port, by the number of their descriptor."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._all: dict[int, Connection] = {}
        self._of: dict[str, dict[int, Connection]] = {}
        self._half: dict[str, dict[int, Connection]] = {}  # by address, the oldest first
        self._half_open = self._accepted = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def half_open(self) -> int:
        """How many are half open, those not looked at for long included."""
        return self._half_open

    def get(self, descriptor: int) -> Connection | None:
        """Return the connection with this descriptor; None if there is none."""
        return self._all.get(descriptor)

    def of(self, address: str) -> list[Connection]:
        """Return the connections from an address, in the order in which they were accepted."""
        return list(self._of.get(address, {}).values())

    def accepted(self, descriptor: int, address: str, port: int, now: float) -> list[Cut]:
        """Take note of a new connection; return those that are to be cut for it, itself perhaps."""
        self.closed(descriptor)
        self._forget_old(now)
        self._accepted += 1
        new = Connection(descriptor, address, port, now, self._accepted)
        self._all[descriptor] = self._of.setdefault(address, {})[descriptor] = new
        self._half.setdefault(address, {})[descriptor] = new
        self._half_open += 1
        limits = self.limits
        if len(self._of[address]) > limits.per_address:
            return [self._cut(new, "address")]
        if len(self._half[address]) > limits.half_open_per_address:
            return [self._cut_oldest(address)]
        if len(self._all) > limits.total:
            oldest = self._crowded()
            return [self._cut_oldest(oldest) if len(self._half[oldest]) > 1 else self._cut(new, "full")]
        if self._half_open > limits.half_open:
            return [self._cut_oldest(self._crowded())]
        return []

    def proved(self, descriptor: int) -> None:
        """Take note that a message has come over this connection: it is not half open any more."""
        if (connection := self._all.get(descriptor)) is not None:
            self._settle(connection)

    def closed(self, descriptor: int) -> None:
        """Take note that this connection is gone, or will be."""
        if (connection := self._all.pop(descriptor, None)) is not None:
            self._settle(connection)
            here = self._of[connection.address]
            del here[descriptor]
            if not here:
                del self._of[connection.address]

    def _crowded(self) -> str:
        """Return the address with most half-open connections (there is one)."""
        return max(self._half, key=lambda address: len(self._half[address]))

    def _cut_oldest(self, address: str) -> Cut:
        return self._cut(next(iter(self._half[address].values())), "half-open")

    def _cut(self, connection: Connection, reason: str) -> Cut:
        self.closed(connection.descriptor)
        return Cut(connection, reason)

    def _settle(self, connection: Connection) -> None:
        half = self._half.get(connection.address, {})
        if half.pop(connection.descriptor, None) is not None:
            self._half_open -= 1
            if not half:
                del self._half[connection.address]

    def _forget_old(self, now: float) -> None:
        """Take those for open that have outlived a handshake."""
        for half in list(self._half.values()):
            for connection in list(half.values()):
                if now - connection.since <= self.limits.handshake_seconds:
                    break
                self._settle(connection)

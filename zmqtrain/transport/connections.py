"""Bound the connections at a hub's port: how many there are, from one address and in all, and how many are half open.

Rule 1: a connection is half open until a message has come over it, however long ago its handshake ended; it is greeted
until its peer has said something: the first message on each lane is empty.
Rule 2: an address over a limit loses its own connections.  From an address with too many half-open connections the
oldest of them goes; if there are too many in all, the oldest of the address that has most.
Rule 3: when all places are taken, a new connection takes that of a half-open one, else of a greeted one.  One whose
peer has said something is never given up for a new one.
Rule 4: nothing here waits, or touches a socket: it says which descriptors are to be cut, and why.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        self._greeted: dict[str, dict[int, Connection]] = {}  # likewise
        self._half_open = self._accepted = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def half_open(self) -> int:
        """How many are half open."""
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
            least = self._least_known()
            return [self._cut(least, "full" if least is new else "half-open")]
        if self._half_open > limits.half_open:
            return [self._cut_oldest(_crowded(self._half))]
        return []

    def proved(self, descriptor: int) -> None:
        """Record that a message has come over this connection: it is not half open any more."""
        if (connection := self._all.get(descriptor)) is not None and self._leave_half(connection):
            self._greeted.setdefault(connection.address, {})[descriptor] = connection

    def spoke(self, descriptor: int) -> None:
        """Record that the peer of this connection has said something: it is never given up for a new one."""
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

    def _least_known(self) -> Connection:
        """Return whose place a new connection takes when none is free; its own, if all others have spoken."""
        address = _crowded(self._half)
        table = self._greeted if self._greeted and len(self._half[address]) == 1 else self._half
        return next(iter(table[_crowded(table)].values()))

    def _cut_oldest(self, address: str) -> Cut:
        return self._cut(next(iter(self._half[address].values())), "half-open")

    def _cut(self, connection: Connection, reason: str) -> Cut:
        self.closed(connection.descriptor)
        return Cut(connection, reason)

    def _settle(self, connection: Connection) -> None:
        if not self._leave_half(connection):
            _take_out(self._greeted, connection)

    def _leave_half(self, connection: Connection) -> bool:
        left = _take_out(self._half, connection)
        self._half_open -= left
        return left


def _crowded(table: dict[str, dict[int, Connection]]) -> str:
    """Return the address with most connections in a table (there is one)."""
    return max(table, key=lambda address: len(table[address]))


def _take_out(table: dict[str, dict[int, Connection]], connection: Connection) -> bool:
    """Take a connection out of a table by address; return whether it was there."""
    here = table.get(connection.address, {})
    found = here.pop(connection.descriptor, None) is not None
    if found and not here:
        del table[connection.address]
    return found

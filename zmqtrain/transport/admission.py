"""Know who may come in: which public keys have which names, and which peer ids have been opened under which name.

Rule 1: who is not named here stays out; who loses its name is out from that moment, also on a connection that lives.
Rule 2: a peer id belongs to the name under which it was first heard; nobody else speaks as that peer.  Those who share
a key share its name: nothing tells them apart.
Rule 3: of two lives of a peer, the one whose connection was made last counts; what a former one sent is not heard.
Rule 4: what is kept is bounded: who is here by its connections; of those that have left, the last DEPARTED_SEATS.
Rule 5: a life's lanes are connected one after the other: one that was not heard yet is awaited, for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from zmqtrain.core.types import Lane, PeerId
from zmqtrain.transport.routing import is_former

EVERYBODY = ""
"""The name of all who come in where keys are not asked for."""

DEPARTED_SEATS = 1024


class Admission:
    """The public keys (Z85) that come in, each with a name; None as long as it is not known: who asks then waits."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = None if names is None else dict(names)

    @property
    def known(self) -> bool:
        """Whether it is known who may come in."""
        return self._names is not None

    def name_of(self, key: str) -> str | None:
        """Return the name of a key; None for one that does not come in."""
        return None if self._names is None else self._names.get(key)

    def knows(self, name: str) -> bool:
        """Whether a key of this name comes in."""
        return self._names is not None and name in self._names.values()

    def change(self, names: Mapping[str, str]) -> dict[str, str]:
        """Let these in from now on, and nobody else; return those that were let in before and are not any more, or
        under another name."""
        gone = {key: name for key, name in (self._names or {}).items() if names.get(key) != name}
        self._names = dict(names)
        return gone


@dataclass(slots=True)
class Seat:
    """A peer's place. name: under which it came.  key: its public key.  life: what tells its connections from those of
    its former lives.  newest: the number of its newest connection.  descriptors: of those that have been heard, with
    their numbers.  lanes: those heard in this life, since it was last without any connection, each with
    when that was first.  spoke: more than the empty first message has come in this life.  told: that it has come is
    logged, once."""

    name: str
    key: str
    life: bytes
    newest: int
    descriptors: dict[int, int] = field(default_factory=dict)
    lanes: dict[Lane, float] = field(default_factory=dict)
    spoke: bool = False
    told: bool = False


class Seats:
    """The places of all peers that have been heard. owner_of: the name under which a peer came first, in the lives of
    this hub before this one; "": it did not, or nobody has that name any more."""

    def __init__(self, departed: int = DEPARTED_SEATS) -> None:
        self._most_departed = departed
        self.owner_of: Callable[[PeerId], str] = lambda peer: ""
        self._seats: dict[PeerId, Seat] = {}
        self._departed: dict[PeerId, None] = {}  # in the order in which they left

    def __len__(self) -> int:
        return len(self._seats)

    def get(self, peer: PeerId) -> Seat | None:
        """Return the place of a peer; None for one that was never heard, or is forgotten."""
        return self._seats.get(peer)

    def is_now(self, peer: PeerId, life: bytes) -> bool:
        """Return whether this is the life in which the peer is heard."""
        seat = self._seats.get(peer)
        return seat is not None and seat.life == life

    def hear(
        self, peer: PeerId, name: str, key: str, life: bytes, descriptor: int, number: int
    ) -> tuple[str, set[int]]:
        """Take note that a message of `peer` came over a connection.

        number: of the connection, higher for each that is made; -1 for one that has ended.  Which of two lives is the
        later one they tell themselves, if they are of one channel (a message may be heard when its connection has ended
        and another has its descriptor), else their connections do.
        Return why it does not count, "" if it does, and the connections that are to end for it: of the life that this
        one ends; or, of "life" (another life of the peer has connected since), this one.  None if both lives are of one
        channel, which has ended its former connections itself: their descriptors may be another's by now, even this
        life's own.  "name": the peer is another's.
        """
        seat = self._seats.get(peer)
        if seat is None:
            if name and self.owner_of(peer) not in ("", name):
                return "name", set()
            seat = self._seats[peer] = Seat(name, key, life, number)
            self._keep(peer, seat, descriptor, number)
            return "", set()
        if seat.name != name:
            return "name", set()
        ended: set[int] = set()
        if seat.life != life:
            former = is_former(life, seat.life)
            if number <= seat.newest if former is None else former:
                return "life", {descriptor} if former is None else ended
            if former is None:
                ended = {one for one, its_number in seat.descriptors.items() if its_number < number}
            seat.life, seat.descriptors, seat.lanes, seat.spoke = life, {}, {}, False
        seat.key, seat.newest = key, max(seat.newest, number)
        self._keep(peer, seat, descriptor, number)
        return "", ended

    def _keep(self, peer: PeerId, seat: Seat, descriptor: int, number: int) -> None:
        """Note over which connection a peer was heard; one that has ended already keeps nobody here."""
        if number >= 0:
            seat.descriptors[descriptor] = number
        self._note_whether_here(peer, seat)

    def note_lane(self, peer: PeerId, lane: Lane, now: float) -> None:
        """Take note that this lane of a peer is heard, in the life that counts."""
        if (seat := self._seats.get(peer)) is not None:
            seat.lanes.setdefault(lane, now)

    def awaits(self, peer: PeerId, lane: Lane, seconds: float, now: float) -> bool:
        """Return whether a lane of a peer that is here may be on its way: it was not heard since the peer came, and
        another one was, for the first time no more than `seconds` ago."""
        seat = self._seats.get(peer)
        if seat is None or not seat.descriptors or lane in seat.lanes:
            return False
        return now - min(seat.lanes.values(), default=-inf) <= seconds

    def left(self, peer: PeerId, descriptor: int) -> None:
        """Take note that a connection of a peer is gone; its place stays its own."""
        if (seat := self._seats.get(peer)) is not None:
            seat.descriptors.pop(descriptor, None)
            if not seat.descriptors:  # the same life may come again
                seat.lanes.clear()
            self._note_whether_here(peer, seat)

    def _note_whether_here(self, peer: PeerId, seat: Seat) -> None:
        self._departed.pop(peer, None)
        if seat.descriptors:
            return
        self._departed[peer] = None
        if len(self._departed) > self._most_departed:
            oldest = next(iter(self._departed))
            del self._departed[oldest], self._seats[oldest]

    def with_key(self, key: str) -> list[PeerId]:
        """Return the peers that are here, last heard with this key."""
        return [peer for peer, seat in self._seats.items() if seat.key == key and seat.descriptors]

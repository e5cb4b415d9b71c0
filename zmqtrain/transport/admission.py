"""Who may speak at a hub's port: routing ids, authorised keys, seats of peers, and counts of what was refused (pure).

1. A routing id is the lane, b"C" or b"B", the peer's id in utf-8, a zero byte, and the life of that channel. A life is
   a random series, so that nobody else can take over a connection (libzmq gives it to the last comer with the same
   id), and a count: of two lives of one series the later has the higher.
2. A key that has no name here is refused. A key that loses its name is out from that moment, also on an open
   connection. A peer id belongs to the name under which it was first heard; those who share a key share its name.
3. Of two lives of a peer, the one that connected last counts. The lanes of a life connect one after the other; a lane
   that was not heard yet is waited for.
4. What is kept is bounded: present peers by their connections, departed ones by DEPARTED_SEATS.
5. A refusal is logged at once; more of them within `SAY_SECONDS` make one line. Refusals of normal life (a node that
   connects again, a look at the port) are counted only.
6. A notice tells an authorised node why the hub does not hear it: an empty frame, then the reason. Channels do not hand
   it on; no head of a protocol message is empty. An unauthenticated peer gets none (`zmq_keys`).
Source: ZeroMQ RFC 28 (ROUTER, DEALER).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from zmqtrain.core.interfaces import Clock
from zmqtrain.core.types import Buffer, Lane, PeerId
from zmqtrain.transport.pacing import Gate, is_peer_id

_LANE_BYTES = {Lane.CONTROL: b"C", Lane.BULK: b"B"}
_LANES = {value: lane for lane, value in _LANE_BYTES.items()}
_SERIES_BYTES, _COUNT_BYTES = 8, 4

_REMEMBERED = 1024  # routing ids that were read: the same ones come with each message


def first_life() -> bytes:
    """Return an identifier of a new channel of a peer, different from all its former ones."""
    return secrets.token_bytes(_SERIES_BYTES) + bytes(_COUNT_BYTES)


def next_life(life: bytes) -> bytes:
    """Return the life of the same channel when it is opened once more."""
    count = int.from_bytes(life[_SERIES_BYTES:], "big") + 1
    return life[:_SERIES_BYTES] + count.to_bytes(_COUNT_BYTES, "big")


def is_former(life: bytes, other: bytes) -> bool | None:
    """Return whether `life` was before `other`; None for lives of two series, in unknown order."""
    if life[:_SERIES_BYTES] != other[:_SERIES_BYTES]:
        return None
    return life < other


def routing_id_of(lane: Lane, peer: PeerId, life: bytes) -> bytes:
    """Return the routing id of one lane of a peer's channel. life: as above; b"" for none."""
    return _LANE_BYTES[lane] + peer.encode() + (b"\0" + life if life else b"")


@lru_cache(maxsize=_REMEMBERED)
def sender_of(routing_id: bytes) -> tuple[PeerId, Lane, bytes] | None:
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


logger = logging.getLogger(__name__)

SAY_SECONDS = 10.0

RECENT_SECONDS = 60.0
"""For so long a refusal is shown beside the run: who was turned away long ago is no news."""
GRAIN_SECONDS = 5.0

REASONS = {
    "handshake": (
        "connection that does not speak as our nodes do here (without keys, or with another hub's key)",
        "connections that do not speak as our nodes do here (without keys, or with another hub's key)",
    ),
    "with a key": ("connection with a key, where none is used", "connections with a key, where none is used"),
    "unfinished": ("connection that ended before it was greeted", "connections that ended before they were greeted"),
    "key": ("connection with a key that is not authorised", "connections with a key that is not authorised"),
    "revoked": ("message of a key that was revoked", "messages of a key that was revoked"),
    "name": (
        "message under the name of a peer that came with another key",
        "messages under the name of a peer that came with another key",
    ),
    "life": ("message of a peer's former life", "messages of a peer's former life"),
    "dismissed": (
        "message of a peer that was shown out, or of another's id",
        "messages of peers that were shown out, or of others' ids",
    ),
    "half-open": (
        "connection that had not said who it is, to make room",
        "connections that had not said who they are, to make room",
    ),
    "address": ("connection from an address that has too many", "connections from an address that has too many"),
    "full": ("connection, as there are too many in all", "connections, as there are too many in all"),
}
"""What is refused: in a few words, of one and of several."""

NORMAL = frozenset({"life", "unfinished", "with a key"})
"""What happens in normal life: a node connects again, `zmqtrain doctor` looks whether the port is open, a program tries
the key that it has found at a hub that uses none, and then comes in without."""


class Refusals:
    """The refusals at one port, in its loop. where: the port, in words.  news: opened at each.  counts: by reason,
    since the beginning."""

    def __init__(self, where: str, news: Gate | None = None, clock: Clock = time) -> None:
        self.where, self._news, self._clock = where, news or Gate(), clock
        self._recent: deque[tuple[float, int]] = deque()  # the beginnings of spans of GRAIN_SECONDS, with counts
        self.counts: Counter[str] = Counter()
        self._unsaid: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None

    def count(self, reason: str, whose: str = "") -> None:
        """Count one. whose: an address or a name, for people."""
        self.counts[reason] += 1
        if reason in NORMAL:
            logger.debug("%s: a %s (%s)", self.where, REASONS[reason][0], whose)
            return self._news.open()
        self._unsaid[reason] += 1
        now = self._clock.monotonic()
        if not self._recent or now - self._recent[-1][0] >= GRAIN_SECONDS:
            self._recent.append((now, 0))
        self._recent[-1] = self._recent[-1][0], self._recent[-1][1] + 1
        if whose:
            self._last[reason] = whose
        self._news.open()
        if self._timer is None:
            self._say()
            self._timer = asyncio.get_running_loop().call_later(SAY_SECONDS, self._say_again)

    @property
    def recent(self) -> int:
        """The refusals of the last minute, without those of normal operation."""
        while self._recent and self._clock.monotonic() - self._recent[0][0] > RECENT_SECONDS:
            self._recent.popleft()
        return sum(count for _, count in self._recent)

    def close(self) -> None:
        """Say what was not said yet, and nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._say()

    def _say_again(self) -> None:
        self._timer = None
        if self._unsaid:
            self._say()
            self._timer = asyncio.get_running_loop().call_later(SAY_SECONDS, self._say_again)

    def _say(self) -> None:
        for reason, count in self._unsaid.items():
            last = f" (the last: {self._last[reason]})" if reason in self._last else ""
            logger.warning("%s refused %d %s%s", self.where, count, REASONS[reason][count > 1], last)
        self._unsaid.clear()


NOTICES = frozenset({"name"})
"""The reasons that a node is told, as in `refusals.REASONS`."""


def notice(reason: str) -> list[bytes]:
    """Return the frames of a notice; reason: one of `NOTICES`."""
    return [b"", reason.encode("ascii")]


def reason_of(frames: Sequence[Buffer]) -> str | None:
    """Return the reason if this message is a notice ("" for one that is not known here); None for any other."""
    if len(frames) != 2 or len(frames[0]):
        return None
    reason = bytes(frames[1]).decode("ascii", "replace")
    return reason if reason in NOTICES else ""


EVERYBODY = ""
"""The name of all who come in where keys are not asked for."""

DEPARTED_SEATS = 1024


class Admission:
    """The authorised public keys (Z85), each with a name; None while they are unknown: connections then wait."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = None if names is None else dict(names)

    @property
    def known(self) -> bool:
        return self._names is not None

    def name_of(self, key: str) -> str | None:
        """Return the name of a key; None for one that does not come in."""
        return None if self._names is None else self._names.get(key)

    def knows(self, name: str) -> bool:
        return self._names is not None and name in self._names.values()

    def change(self, names: Mapping[str, str]) -> dict[str, str]:
        """Authorise these keys from now on, and no others; return those that are no longer authorised, or have another
        name now."""
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
        """Return the seat of a peer; None for one that was never heard, or is forgotten."""
        return self._seats.get(peer)

    def hear(
        self, peer: PeerId, name: str, key: str, life: bytes, descriptor: int, number: int
    ) -> tuple[str, set[int]]:
        """Record that a message of `peer` came over a connection.

        number: of the connection, higher for each new one; -1 for one that has ended.  Two lives of one channel tell
        their own order (a message may be read when its connection has ended and another has its descriptor); else the
        numbers of their connections decide. Returns (reason, connections to end): reason is "" if the message counts;
        "life" if another life of the peer has connected since; "name" if the peer belongs to another name.
        connections: those of the life that this one ends, or, with "life", this one; none if both lives are of one
        channel, which has ended its former connections itself: their descriptors may belong to others by now, even to
        this life.
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
        """Record the connection over which a peer was heard; one that has ended keeps nobody present."""
        if number >= 0:
            seat.descriptors[descriptor] = number
        self._note_whether_here(peer, seat)

    def note_lane(self, peer: PeerId, lane: Lane, now: float) -> None:
        """Record that this lane of a peer is heard, in the life that counts."""
        if (seat := self._seats.get(peer)) is not None:
            seat.lanes.setdefault(lane, now)

    def awaits(self, peer: PeerId, lane: Lane, seconds: float, now: float) -> bool:
        """Return whether a lane of a present peer may still connect: it was not heard since the peer came, and
        another one was, for the first time no more than `seconds` ago."""
        seat = self._seats.get(peer)
        if seat is None or not seat.descriptors or lane in seat.lanes:
            return False
        return now - min(seat.lanes.values(), default=-inf) <= seconds

    def left(self, peer: PeerId, descriptor: int) -> None:
        """Record that a connection of a peer has ended; the peer keeps its seat."""
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

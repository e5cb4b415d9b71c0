"""Hold what a node knows of its hub and of its run, and say in which states it can be, and what moves it to another.

Rule 1: `PEER_TRANSITIONS` says what moves which state where; `_move` is the only way from one to another.
Rule 2: nothing is asked for, or answered, here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum

from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import ModelSpec, PeerId, Version
from zmqtrain.protocol.fencing import Connection
from zmqtrain.protocol.following import Following
from zmqtrain.protocol.masters import Claim
from zmqtrain.protocol.members import MOST_WAITING
from zmqtrain.protocol.messages import (
    Aggregate,
    Fetch,
    Message,
    Preempt,
    Quarantine,
    Roster,
    Snapshot,
    Stop,
    Welcome,
    WireSchedule,
)
from zmqtrain.protocol.schedules import Timetable
from zmqtrain.protocol.search import Search
from zmqtrain.protocol.standby_messages import Promote


class PeerState(Enum):
    """Where a node stands with its hub."""

    CONNECTING = "connecting"
    WELCOMED = "welcomed"
    SYNCING = "waiting for a snapshot"
    FOUNDING = "founding the run"
    APART = "training apart"
    LIVE = "live"
    CLOSED = "closed"


class Move(Enum):
    """What moves a node's state besides what the hub says."""

    FETCH = "it asks for the run's parameters"
    FETCH_APART = "the same, as one of a population whose run is not founded"
    LOSE = (
        "its hub is lost: silence, Goodbye, garbage, a gap in the numbers, a connection that is gone, `unknown`, `run`"
    )
    CLOSE = "it leaves, the run is over, or it is refused for good"


_WITH_HUB = (PeerState.WELCOMED, PeerState.SYNCING, PeerState.FOUNDING, PeerState.APART, PeerState.LIVE)
PEER_TRANSITIONS: dict[tuple[PeerState, type[Message] | Move], PeerState] = {
    (PeerState.CONNECTING, Welcome): PeerState.WELCOMED,
    (PeerState.SYNCING, Fetch): PeerState.FOUNDING,
    (PeerState.SYNCING, Snapshot): PeerState.LIVE,
    (PeerState.FOUNDING, Snapshot): PeerState.LIVE,
    (PeerState.APART, Fetch): PeerState.APART,
    (PeerState.APART, Snapshot): PeerState.LIVE,
    (PeerState.LIVE, Aggregate): PeerState.LIVE,
    (PeerState.LIVE, Preempt): PeerState.SYNCING,
    (PeerState.SYNCING, Preempt): PeerState.SYNCING,
    (PeerState.LIVE, Quarantine): PeerState.SYNCING,
    (PeerState.SYNCING, Quarantine): PeerState.SYNCING,
    (PeerState.WELCOMED, Move.FETCH_APART): PeerState.APART,
    (PeerState.APART, Move.FETCH_APART): PeerState.APART,
    **{(state, Move.FETCH): PeerState.SYNCING for state in _WITH_HUB},
    **{(state, Move.LOSE): PeerState.CONNECTING for state in (PeerState.CONNECTING, *_WITH_HUB)},
    **{(state, Move.CLOSE): PeerState.CLOSED for state in PeerState},
}
"""All moves of a node's state; the machine makes no other. What is said in a state that has no entry for it is ignored.
A Snapshot of what is not the run's (version -1) moves nothing."""


class PeerBook:
    """A node's hub, its run, and where it stands in that.

    peer: how the hub knows this node.  name: for people.  observer: only watch.  link, share, exchange: as in
    Hello.
    order: of an operator, said after each Hello: Promote to a standby, Stop to a hub; None: nothing.
    claim: be the master of a shard, who registers with the first and then watches.  founding: the number with which a
    node founds the shards of several masters: as the first said it, and, at the others, as it is said to them.
    over: the hub has said so to a master, or to an operator.
    score: of this node's own parameters, as it last said.
    timetable: which k and d hold when, from Welcome on.  quarantined_until: until then the hub takes no delta of this
    node.  held: as in Fetch: what a lost connection has left of a snapshot.
    incarnation: of the last Hello; what is given is that of the last one that this id has said, in whatever process (0:
    not fenced).  addresses: where the hub is looked for, in turn; without any no standby is.  term: of the hub that was
    last believed.  without: as in Hello.  dropped: messages of the hub that were not of now, by what they were.
    heard, called: as in Welcome.
    overtaken: what was pending at the checkpoint that this node goes on from has landed since, or will: a former life
    had offered it; until that is dropped.
    """

    def __init__(
        self,
        peer: PeerId,
        name: str,
        observer: bool = False,
        link: float = 0.0,
        share: float = 1.0,
        claim: Claim | None = None,
        exchange: str = "",
        incarnation: int = 0,
        addresses: Sequence[str] = (),
        order: Promote | Stop | None = None,
    ) -> None:
        self.term = self.without = 0
        self._search, self._following = Search(peer, addresses), Following()
        self.incarnation, self.dropped = incarnation, Counter[str]()
        self._connection = Connection(0)
        self.heard, self.called = -1, ""
        self.peer, self.name, self.observer, self.link, self.share = peer, name, observer, link, share
        self.exchange, self.order = exchange, order
        self.observer, self.claim = observer or claim is not None, claim
        self.timetable: Timetable | None = None
        self._state = PeerState.CONNECTING
        self.run = ""
        self.settings: RunSettings | None = None
        self.model: ModelSpec = ()
        self.run_model: ModelSpec = ()
        self.roster: Roster | None = None
        self.run_samples = 0
        """Of all nodes, as the hub last said."""
        self.shard = self.founding = 0
        self.masters: tuple[str, ...] = ()
        self.over = False
        self.quarantined_until = 0.0
        self.held: tuple[str, int] = ("", 0)
        self.round_trip_seconds: float | None = None
        self.in_flight: set[int] = set()
        self.score = math.nan
        self.run_version = -1
        self._beats: dict[float, int] = {}  # per heartbeat that is not answered, the last publish before it
        self.checkpoints: tuple[int, ...] = ()
        self._asks_of: tuple[int, ...] = ()
        self._next_sequence = -1
        self.overtaken = False
        self.obstacle = ""
        """What the last broker that was no hub said of itself, "" once one has welcomed this peer."""
        self.rewound = -1
        """The version to which all have gone back, -1 if they have not."""
        self._voting = False  # since it was last asked for its parameters, the mean has come
        self._beat_at = 0.0
        self._heard = self._ticked = 0.0

    def resume(
        self,
        run: str,
        version: int,
        settings: RunSettings,
        model: ModelSpec,
        in_flight: Sequence[int],
        checkpoints: tuple[int, ...] = (),
        next_sequence: int = -1,
        schedules: Iterable[WireSchedule] = (),
    ) -> None:
        """Be a node of this run, as it was at this version: before `start`. checkpoints: as in Hello.

        next_sequence: of the first offer that the checkpoint does not know of, -1 for none: that a former life made.
        schedules: as `Timetable.since` gave them; a hub that was started again may not know the last ones: what its
        Welcome says holds instead.
        """
        self.run, self.settings, self.run_model = run, settings, model
        self._following.version = version
        self.timetable, self.run_version = Timetable(settings, schedules), version
        self.in_flight, self.checkpoints = set(in_flight), checkpoints
        self._asks_of, self._next_sequence = tuple(sorted(self.in_flight))[:MOST_WAITING], next_sequence

    def keep_pending(self) -> None:
        """Drop nothing of what is pending, whatever a former life had offered of it, if no hub has said so yet."""
        self._next_sequence = -1

    @property
    def state(self) -> PeerState:
        """Where this node stands with its hub."""
        return self._state

    def _move(self, cause: type[Message] | Move) -> None:
        """Move to where `PEER_TRANSITIONS` says."""
        self._state = PEER_TRANSITIONS[self._state, cause]

    @property
    def version(self) -> Version:
        """Of the last aggregate or snapshot that is here whole; -1: none."""
        return self._following.version

    @property
    def confirmed(self) -> bool:
        """Whether the hub has said that what this node held is the run's (of a founder: that its parameters are)."""
        return self._following.confirmed

    @property
    def measured_rate(self) -> float:
        """The rate of this node's port as the hub last said, in bytes per second; 0: it has not."""
        members = self.roster.members if self.roster is not None else ()
        return next((float(one.get("link_rate", 0.0)) for one in members if one.get("peer") == self.called), 0.0)

    @property
    def is_evaluator(self) -> bool:
        """Whether this node is the one that scores the shared model, as the hub last said."""
        return self.roster is not None and bool(self.called) and self.roster.evaluator == self.called

    @property
    def founded(self) -> bool:
        """Whether the run has parameters, as far as the hub has said."""
        return self.run_version >= 0 or (self.roster is not None and self.roster.version >= 0)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the hub is looked for: as given, then the standbys that were heard of."""
        return self._search.addresses

    def know(self, standby: str) -> None:
        """Take note of where a standby of the hub is, or was."""
        self._search.know(standby)

    def _may_begin_anew(self, welcome: Welcome) -> bool:
        """Whether this node has nothing of its run yet and is offered the same again: its broker died founding it."""
        nothing, settings = self.version < 0 and self.claim is None, self.settings
        return nothing and settings is not None and settings.masters == 1 and welcome.settings == settings.to_dict()

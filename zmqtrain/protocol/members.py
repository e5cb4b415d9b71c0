"""Peers as the hub sees them: states, allowed messages, the registry of shards, and records that outlive a connection.

Rule 1: `ALLOWED` is the whole table: a message that it does not allow disconnects its sender and nobody else.
Rule 2: the first of several brokers (shard 0) has the settings, the data units and the roster; the others register with
it, and it tells nodes where they are. A shard has one broker: another one is refused while that one is alive, unless it
is at the very same address, which only its successor can have.
Rule 3: records are bounded: the newest landings of each peer, and the most recent peers. A peer that only says Hello
never displaces one that has published. A record is small (landings are 64-bit numbers in an array, 1 KB in all),
because each node that joins is another peer here, and is kept long after it has left.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from math import isnan
from typing import Any

from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.core.types import ModelSpec, PeerId, Recent, Version
from zmqtrain.protocol.fencing import MAX_INCARNATION
from zmqtrain.protocol.messages import (
    KEY_REQUESTS,
    MAX_NAME,
    Fetch,
    Goodbye,
    GroupLost,
    Heartbeat,
    Hello,
    Holding,
    Host,
    JoinGroup,
    Message,
    Probe,
    Promote,
    Publish,
    ReduceChunk,
    Relay,
    Relayed,
    Report,
    Scalar,
    Snapshot,
    Stop,
    WorkRequest,
    printable,
)
from zmqtrain.protocol.pipelines import Share, is_covered

RUN_OVER = "the run is over"
"""Reason of the first broker's Goodbye that ends the other brokers too; after any other reason they wait for it."""
PUBLIC_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", re.ASCII)
"""A public CURVE key (Z85), which the address of a broker carries that a node serves (`transport.address`)."""
ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]*]+):[1-9]\d{0,4}", re.ASCII)
"""An address that nodes connect to."""
MOST_WAITING = 64
"""Publishes of one node in flight or waiting for a round (more only if d requires it): the hub holds them in memory."""
PIPELINE_LETTERS = 4
"""Of a pipeline's id, so many are shown to people."""
MOST_CHECKPOINTS = 1024
"""Checkpoints that a Hello may name."""
LANDED_KEPT, RECORDS_KEPT = 64, 1024
RANGES_KEPT = 64
"""Ranges of older landings; there are few gaps between landed sequences."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The registration of a broker: its shard, and the address at which nodes reach it."""

    shard: int
    address: str


def name_missing(shards: Sequence[str]) -> str:
    """Return, for people, which shards have no broker now; "" if none is missing."""
    missing = [str(shard) for shard, address in enumerate(shards) if shard and not address]
    if not missing:
        return ""
    which = f"shard {missing[0]}" if len(missing) == 1 else f"shards {', '.join(missing[:-1])} and {missing[-1]}"
    return f"the {'broker' if len(missing) == 1 else 'brokers'} of {which} of {len(shards)}"


class ShardRegistry:
    """The brokers of one run, as its first broker knows them. count: their number, with the first.

    within_reach: the shards whose brokers others are known to reach; None: all that are registered.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.within_reach: set[int] | None = None
        self._claims: dict[int, tuple[PeerId, str]] = {}

    def claim(self, peer: PeerId, claim: Claim) -> tuple[str, PeerId | None]:
        """Register a broker; return (why it is refused, "" if it is not; the peer that it succeeds, None for none)."""
        shard, last = claim.shard, self.count - 1
        if self.count <= 1:
            return "this broker has the whole model; start it with --shard 0/M to divide that among M brokers", None
        if not 1 <= shard <= last:
            return f"shard {shard}/{self.count}: the first has shard 0, the others have 1 to {last}", None
        address, _, key = claim.address.partition("#")
        if not ADDRESS.fullmatch(address) or (key and not PUBLIC_KEY.fullmatch(key)):
            return f"{claim.address!r} is no address at which nodes reach it: --address tcp://HOST:PORT", None
        holder, former = self._claims.get(shard, (peer, claim.address))
        if holder != peer and former != claim.address:
            text = (
                f"shard {shard}/{self.count} has a broker already, at {former.partition('#')[0]}: stop that one first, "
                "or take another shard (one that has just died is forgotten within seconds)"
            )
            return text, None
        self.forget(peer)
        self._claims[shard] = (peer, claim.address)
        return "", holder if holder != peer else None

    def forget(self, peer: PeerId) -> None:
        self._claims = {shard: one for shard, one in self._claims.items() if one[0] != peer}

    @property
    def addresses(self) -> tuple[str, ...]:
        """By shard the address of its broker, "" if it has none within reach, and for the first; () where there is one
        broker, or it is not decided yet how many there are."""
        seen = self.within_reach
        return tuple("" if seen is not None and n not in seen else one for n, one in enumerate(self.registered))

    @property
    def registered(self) -> tuple[str, ...]:
        """The same, within reach or not."""
        if self.count <= 1:
            return ()
        return tuple(self._claims.get(shard, ("", ""))[1] for shard in range(self.count))

    def holder(self, shard: int) -> PeerId | None:
        """Return the broker of a shard, None if it has none."""
        return self._claims[shard][0] if shard in self._claims else None


class MemberState(Enum):
    """Where a peer stands with the hub."""

    OBSERVER = "observing"
    SHARD = "serving a shard"
    PROCESS = "in a group"
    STANDBY = "following as standby"
    WELCOMED = "welcomed"
    WAITING = "waiting for its snapshot"
    FOUNDING = "founding the run"
    APART = "training apart"
    LENDING = "lending its parameters"
    LIVE = "live"


_NODES = frozenset(MemberState) - {
    MemberState.OBSERVER,
    MemberState.SHARD,
    MemberState.PROCESS,
    MemberState.STANDBY,
}
ALLOWED: dict[type[Message], frozenset[MemberState]] = {
    Hello: frozenset(MemberState),
    Heartbeat: frozenset(MemberState),
    Goodbye: frozenset(MemberState),
    Probe: frozenset(MemberState),
    Report: _NODES,
    Host: _NODES,
    Fetch: (_NODES - {MemberState.FOUNDING}) | {MemberState.OBSERVER},
    Snapshot: frozenset({MemberState.FOUNDING, MemberState.LENDING}),
    Publish: frozenset({MemberState.LIVE}),
    WorkRequest: frozenset({MemberState.LIVE}),
    Holding: frozenset({MemberState.STANDBY}),
    Promote: frozenset({MemberState.OBSERVER}),
    Stop: frozenset({MemberState.OBSERVER}),
    **dict.fromkeys((JoinGroup, GroupLost, Relay, Relayed, ReduceChunk), frozenset({MemberState.PROCESS})),
    **dict.fromkeys(KEY_REQUESTS, frozenset({MemberState.PROCESS})),
}
MEMBER_TRANSITIONS: dict[MemberState, frozenset[MemberState]] = {
    MemberState.WELCOMED: frozenset({MemberState.WAITING, MemberState.APART, MemberState.FOUNDING}),
    MemberState.WAITING: frozenset({MemberState.WAITING, MemberState.APART, MemberState.FOUNDING, MemberState.LIVE}),
    MemberState.FOUNDING: frozenset({MemberState.WAITING}),
    MemberState.APART: frozenset({MemberState.LENDING, MemberState.WAITING}),
    MemberState.LENDING: frozenset({MemberState.APART}),
}
"""Moves between the states of a node; `Member.move` is the only way. A peer of any other role keeps its state, and a
live node stays live until it leaves or connects again, as a new Member."""


@dataclass
class Member:
    """One peer as the hub sees it.

    known_version: the version that it holds.  newcomer: it never held parameters of this run.  score: of its own
    parameters, as last reported; NaN: not known.  scored: it has reported it for its present parameters.  lineage: the
    node whose initial parameters its own descend from.
    link: rate of its port as it said, bytes per second (0: not said); share: the part of it that it gives; measured:
    measured rate of its link (0: not yet).  dropped: its messages that were duplicates or of a former connection.
    whole: as in Hello.  address: of a standby.  checkpoints: as in Hello.  digest, held: as in its last Fetch.
    steps, units: steps of its deltas, and data units done, since it joined.  counted: rounds await it, and it counts in
    a mean.  quarantined: its deltas are rejected and not awaited.  voter: its key, "" where there are none.
    restarts: it was told to restart from the shared parameters, and has not fetched them.  begins_at: the version at
    which it restarted, None: it has not; what it computed on earlier versions is rejected.
    asked_at: when it was last sent a message because it was overdue.  founds_since: when it was asked for its
    parameters, None: it is not.  unreachable_since: when its connection was first found gone, None: it was not.
    holds: what it has as one PC of a pipeline.  number: its place among all that have joined.  same_as: the last node
    with the same first step, None: none.
    open: announced transfers that are not whole, by number.
    """

    peer: PeerId
    name: str
    state: MemberState
    last_seen: float
    joined: float
    known_version: Version = -1
    newcomer: bool = True
    model: ModelSpec = ()
    score: float = float("nan")
    scored: bool = False
    lineage: PeerId | None = None
    idle: bool = False
    drained: bool = False
    contributions: int = 0
    samples: int = 0
    steps: int = 0
    units: int = 0
    counted: bool = True
    staleness: int = 0
    refused: int = 0
    report: Report | None = None
    link: float = 0.0
    share: float = 1.0
    holds: Share | None = None
    whole: bool = False
    measured: float = 0.0
    dropped: int = 0
    address: str = ""
    checkpoints: tuple[int, ...] = ()
    quarantined: bool = False
    voter: str = ""
    restarts: bool = False
    begins_at: Version | None = None
    digest: str = ""
    held: int = 0
    asked_at: float = 0.0
    founds_since: float | None = None
    unreachable_since: float | None = None
    number: int = 0
    same_as: PeerId | None = None
    open: dict[int, Publish | Snapshot] = field(default_factory=dict)

    def move(self, state: MemberState) -> None:
        """Change the state. Raises LocalProtocolError for a move that `MEMBER_TRANSITIONS` does not have."""
        if state not in MEMBER_TRANSITIONS.get(self.state, ()):
            raise LocalProtocolError(f"{self.peer} cannot be {state.value}: it is {self.state.value}")
        self.state = state

    @property
    def link_rate(self) -> float:
        """Rate of its port in bytes per second, as said or as measured; 0: not known."""
        return self.link or self.measured

    @property
    def called(self) -> str:
        """Its name in a Roster. Its id stays secret, because a process that knows it can say Hello with it."""
        return f"{self.name}#{self.number}"

    @property
    def held_out(self) -> str:
        """The digest of the data that it evaluates on, as last reported; "": not known."""
        return "" if self.report is None else self.report.data.partition("/")[2]

    @property
    def follows(self) -> bool:
        """Whether this is a PC of a pipeline for which another one stands."""
        return self.holds is not None and not self.holds.leads

    @property
    def is_node(self) -> bool:
        """Whether this is a node of the run, which trains or will."""
        return self.state in _NODES

    def describe(self) -> dict[str, Scalar]:
        entry: dict[str, Scalar] = {
            "peer": self.called,
            "name": self.name,
            "state": "quarantined" if self.quarantined else "idle" if self.idle else self.state.value,
            "contributions": self.contributions,
            "staleness": self.staleness,
            "refused": self.refused,
        }
        if self.holds is not None:
            entry["pipeline"] = self.holds.pipeline[:PIPELINE_LETTERS]
            entry["parts"] = f"{self.holds.first} to {self.holds.end - 1} of {self.holds.parts}"
        if self.link_rate:
            entry |= {"link_rate": self.link_rate, "share": self.share}
        if self.dropped:
            entry["dropped"] = self.dropped
        if (report := self.report) is not None:
            shown = ("step", "samples", "samples_per_second", "loss", "age_steps", "bytes_sent", "bytes_received")
            entry |= {name: getattr(report, name) for name in shown}
            entry["put_off"] = report.offers_refused
            entry["waiting"] = printable(report.waiting)
            if report.device:
                entry["device"] = printable(report.device, MAX_NAME)
        return entry

    @property
    def rank(self) -> tuple[bool, float, PeerId]:
        """Sort key, best score first, unknown scores last; the same order on every run."""
        return isnan(self.score), 0.0 if isnan(self.score) else self.score, self.peer


class Members(dict[PeerId, Member]):
    """The peers at one hub."""

    def in_state(self, *states: MemberState) -> list[Member]:
        return [member for member in self.values() if member.state in states]

    @property
    def training(self) -> set[PeerId]:
        """The nodes that train: idle ones too, or the last to finish would weigh more than the others in a mean. Of a
        pipeline that is whole, the member that stands for it."""
        live = [member for member in self.in_state(MemberState.LIVE) if not member.quarantined]
        shares: dict[str, list[Share]] = {}
        for one in live:
            if one.holds is not None:
                shares.setdefault(one.holds.pipeline, []).append(one.holds)
        whole = {pipeline for pipeline, held in shares.items() if is_covered(held)}
        return {one.peer for one in live if one.holds is None or (one.holds.leads and one.holds.pipeline in whole)}

    def pipeline(self, member: Member) -> list[Member]:
        """Return the PCs of a member's pipeline in the order of their parts; the member alone if it is of none."""
        if member.holds is None:
            return [member]
        of_it = [
            (one.holds.first, one)
            for one in self.values()
            if one.holds is not None and one.holds.pipeline == member.holds.pipeline
        ]
        return [one for _, one in sorted(of_it, key=lambda held: held[0])]

    def is_whole(self, member: Member) -> bool:
        """Return whether all PCs of a member's pipeline are here."""
        return member.holds is None or is_covered(one.holds for one in self.pipeline(member) if one.holds is not None)

    @property
    def counted(self) -> set[PeerId]:
        """The nodes that a mean is over: those that train and have contributed; see `Hub.counts_newcomers`."""
        return {peer for peer in self.training if self[peer].counted}

    @property
    def electorate(self) -> set[PeerId]:
        """The nodes that vote between a hub and its standby: those that have contributed; if none has, those that
        train; if none does, all.

        A node that joins and never publishes has no vote: many of them could keep a hub from going on without its
        standby.
        """
        return self.counted or self.training or {member.peer for member in self.values() if member.is_node}


@dataclass
class _Record:
    """numbers: sequence and version of each of the newest landings in turn, oldest first.  older: ranges of sequences
    that landed before.  recalled: older landings that a restarted process asked for, as of version 0."""

    numbers: array[int] = field(default_factory=lambda: array("Q"))
    heard: int = -1
    incarnation: int = 0
    older: list[list[int]] = field(default_factory=list)
    recalled: tuple[tuple[int, Version], ...] = ()
    owner: str = ""

    @property
    def landed(self) -> Iterator[tuple[int, Version]]:
        return zip(self.numbers[::2], self.numbers[1::2], strict=True)

    def land(self, sequence: int, version: Version) -> None:
        landing = array("Q", (sequence, version))  # raises OverflowError before anything has changed
        if len(self.numbers) == 2 * LANDED_KEPT:
            self._age(self.numbers[0])
            del self.numbers[:2]
        self.numbers += landing
        self.heard = max(self.heard, sequence)

    def _age(self, sequence: int) -> None:
        at = bisect([one[0] for one in self.older], sequence)
        if at and sequence <= self.older[at - 1][1] + 1:
            self.older[at - 1][1] = max(self.older[at - 1][1], sequence)
            at -= 1
        else:
            self.older.insert(at, [sequence, sequence])
        if at + 1 < len(self.older) and self.older[at + 1][0] <= self.older[at][1] + 1:
            self.older[at][1] = max(self.older[at][1], self.older.pop(at + 1)[1])
        del self.older[:-RANGES_KEPT]


class Records:
    """What outlives the connection of each peer: the highest sequence heard, the newest landings with their versions,
    the highest incarnation, and the owner: the name of the key with which it came first ("": without one)."""

    def __init__(self) -> None:
        self._records = Recent[PeerId, _Record](RECORDS_KEPT)
        self._greeted = Recent[PeerId, _Record](RECORDS_KEPT)  # of peers that have published nothing

    def _of(self, peer: PeerId) -> _Record | None:
        return self._records.get(peer) or self._greeted.get(peer)

    def heard(self, peer: PeerId) -> int:
        """Return the highest sequence heard of a peer, -1 for none."""
        return -1 if (record := self._of(peer)) is None else record.heard

    def landed(self, peer: PeerId) -> tuple[tuple[int, Version], ...]:
        """Return the (sequence, version) of a peer's newest landings, oldest first; before them the recalled ones."""
        return () if (record := self._of(peer)) is None else (*record.recalled, *record.landed)

    def recall(self, peer: PeerId, sequences: Sequence[int]) -> None:
        """List those of these sequences that landed long ago in `landed` too, as of version 0: a process that went back
        to a checkpoint does not know."""
        if (record := self._records.get(peer)) is not None:
            old = (s for s in sequences if any(first <= s <= last for first, last in record.older))
            record.recalled = tuple((sequence, 0) for sequence in sorted(old))

    def incarnation(self, peer: PeerId) -> int:
        """Return the highest incarnation that a peer id has said Hello with; 0: none that is fenced."""
        return 0 if (record := self._of(peer)) is None else record.incarnation

    def greet(self, peer: PeerId, incarnation: int) -> None:
        if incarnation:
            record = self._take(peer)
            record.incarnation = incarnation
            self._put(peer, record)

    def owner(self, peer: PeerId) -> str:
        """Return the name of the key with which a peer came first; "" without one, or if the peer is unknown."""
        return "" if (record := self._of(peer)) is None else record.owner

    def own(self, peer: PeerId, name: str) -> None:
        """Record the key with which a fenced peer has come; the first one stays its owner."""
        if (record := self._of(peer)) is not None and not record.owner:
            record.owner = name

    def hear(self, peer: PeerId, sequence: int) -> None:
        record = self._take(peer)
        record.heard = max(record.heard, sequence)
        self._put(peer, record)

    def land(self, peer: PeerId, sequence: int, version: Version) -> None:
        """Record that a publish is in the parameters from `version` on. Raises OverflowError beyond 64 bits."""
        record = self._take(peer)
        record.land(sequence, version)
        self._put(peer, record)

    def clear(self) -> None:
        """Forget all publishes, but no incarnation."""
        for record in self._records.values():
            del record.numbers[:]
            record.older, record.recalled, record.heard = [], (), -1

    def forget_unlanded(self) -> None:
        for record in self._records.values():
            record.heard = max((sequence for sequence, _ in record.landed), default=-1)

    def _take(self, peer: PeerId) -> _Record:
        return self._records.pop(peer, None) or self._greeted.pop(peer, None) or _Record()

    def _put(self, peer: PeerId, record: _Record) -> None:
        (self._records if record.heard >= 0 else self._greeted)[peer] = record

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold. The landings of each peer are one short text, because a list of numbers
        would become as many objects, and there may be many peers."""
        return {
            peer: [record.heard, _steps_of(record.numbers), record.incarnation, record.older, record.owner]
            for peer, record in [*self._greeted.items(), *self._records.items()]
        }

    def restore(self, state: dict[str, Any], latest_incarnation: int = MAX_INCARNATION - 1) -> None:
        """Take over what `state` wrote; an earlier release wrote no owners. An incarnation above the latest that a hub
        takes is forgotten, because no sound peer has said it.

        Raises KeyError, TypeError, ValueError, AttributeError or OverflowError for anything else.
        """
        for peer, (heard, landed, said, older, *owner) in state.items():
            before = self._take(PeerId(peer))
            incarnation = int(said) if int(said) <= latest_incarnation else 0
            record = _Record(heard=int(heard), incarnation=max(incarnation, before.incarnation))
            record.owner = before.owner or "".join(str(name) for name in owner)
            record.older = [[int(first), int(last)] for first, last in older]
            self._put(PeerId(peer), record)
            steps = [int(step) for step in landed.split(",") if step]
            for sequence, version in zip(accumulate(steps[::2]), accumulate(steps[1::2]), strict=True):
                self.land(PeerId(peer), sequence, version)


def _steps_of(numbers: array[int]) -> str:
    """Return landings as text: the first as it is, of the others the difference to the one before."""
    before = [0, 0, *numbers][: len(numbers)]
    return ",".join(str(number - last) for number, last in zip(numbers, before, strict=True))

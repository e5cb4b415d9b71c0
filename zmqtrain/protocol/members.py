"""Say what the hub holds of one peer, in which states a peer can be, and which message is welcome in which.

Rule: `ALLOWED` is the whole truth: a message that it does not allow costs its sender its place, and nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import isnan

from zmqtrain.core.types import ModelSpec, PeerId, Version
from zmqtrain.protocol.group_messages import Fold, GroupLost, JoinGroup, Relay, Relayed
from zmqtrain.protocol.messages import (
    KEY_REQUESTS,
    Announcement,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Probe,
    Publish,
    Report,
    Scalar,
    Snapshot,
    Stop,
    WorkRequest,
)
from zmqtrain.protocol.standby_messages import Holding, Promote
from zmqtrain.protocol.words import MAX_NAME, words

MOST_WAITING = 64
"""So many publishes of one node may be on their way or wait for their round (more only if d asks for it): each is held
in memory at the hub."""
MOST_CHECKPOINTS = 1024
"""Of one node, as its Hello names them."""


class MemberState(Enum):
    """Where a peer stands with the hub."""

    OBSERVER = "observing"
    MASTER = "serving a shard"
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
    MemberState.MASTER,
    MemberState.PROCESS,
    MemberState.STANDBY,
}
ALLOWED: dict[type[Message], frozenset[MemberState]] = {
    Hello: frozenset(MemberState),
    Heartbeat: frozenset(MemberState),
    Goodbye: frozenset(MemberState),
    Probe: frozenset(MemberState),
    Report: _NODES,
    Fetch: (_NODES - {MemberState.FOUNDING}) | {MemberState.OBSERVER},
    Snapshot: frozenset({MemberState.FOUNDING, MemberState.LENDING}),
    Publish: frozenset({MemberState.LIVE}),
    WorkRequest: frozenset({MemberState.LIVE}),
    Holding: frozenset({MemberState.STANDBY}),
    Promote: frozenset({MemberState.OBSERVER}),
    Stop: frozenset({MemberState.OBSERVER}),
    **dict.fromkeys((JoinGroup, GroupLost, Relay, Relayed, Fold), frozenset({MemberState.PROCESS})),
    **dict.fromkeys(KEY_REQUESTS, frozenset({MemberState.PROCESS})),
}


@dataclass
class Member:
    """One peer as the hub sees it. number: of those that have come to this hub.

    known_version: what it holds.  newcomer: it has never held parameters of this run.  score: of its own parameters, as
    it last told; NaN: not known.  told: whether it has told it for the parameters that it has now.  lineage: the node
    whose initial parameters its own descend from.  link: the rate of its port as it said, bytes per second (0: not
    said); share: what it gives of it; measured: how fast its link was seen (0: not yet).  dropped: messages of it that
    were not of now.  address: where nodes reach a standby.  checkpoints: as in Hello.
    steps, units: that its deltas stand for, and data units that it has done, since it came in.  counted: rounds await
    it, and it is one of those that a mean is over.
    quarantined: none of its deltas is taken, and none awaited.  voter: its key, "" where there are none.
    restarts: it was told to begin again from the shared parameters, and has not fetched them yet.  begins_at: the
    version at which it has begun again, None: it has not; what it computed on an earlier one is not taken.
    digest, held: as in its last Fetch.
    asked_at: when it was last sent something because nothing was heard of it.  founds_since: when it was asked for its
    parameters, None: it is not.
    unreachable_since: when its connection was first found gone; None: it was not.
    same_as: the last node that was found to have made the same first step; None: none.
    """

    peer: PeerId
    name: str
    state: MemberState
    last_seen: float
    joined: float
    known_version: int = -1
    newcomer: bool = True
    model: ModelSpec = ()
    score: float = float("nan")
    told: bool = False
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
    open: dict[int, Announcement] = field(default_factory=dict)

    @property
    def link_rate(self) -> float:
        """The rate of its port in bytes per second, as it said or as it was seen; 0: not known."""
        return self.link or self.measured

    @property
    def called(self) -> str:
        """What a Roster calls this member: its id is for the hub alone, as who knows that can say Hello with it."""
        return f"{self.name}#{self.number}"

    @property
    def held_out(self) -> str:
        """The digest of the data that it evaluates on, as it last said; "": not known."""
        return "" if self.report is None else self.report.data.partition("/")[2]

    @property
    def is_node(self) -> bool:
        """Whether this is a node of the run, which trains or will."""
        return self.state in _NODES

    def describe(self) -> dict[str, Scalar]:
        """Return what a Roster says of this member."""
        entry: dict[str, Scalar] = {
            "peer": self.called,
            "name": self.name,
            "state": "quarantined" if self.quarantined else "idle" if self.idle else self.state.value,
            "contributions": self.contributions,
            "staleness": self.staleness,
            "refused": self.refused,
        }
        if self.link_rate:
            entry |= {"link_rate": self.link_rate, "share": self.share}
        if self.dropped:
            entry["dropped"] = self.dropped
        if self.report is not None:
            entry |= {
                "step": self.report.step,
                "samples": self.report.samples,
                "samples_per_second": self.report.samples_per_second,
                "loss": self.report.loss,
                "age_steps": self.report.age_steps,
                "bytes_sent": self.report.bytes_sent,
                "bytes_received": self.report.bytes_received,
                "waiting": words(self.report.waiting),
            }
            if self.report.device:
                entry["device"] = words(self.report.device, MAX_NAME)
        return entry

    @property
    def rank(self) -> tuple[bool, float, PeerId]:
        """What members are ordered by, the best first: scores, unknown ones last, and the same order on every run."""
        return isnan(self.score), 0.0 if isnan(self.score) else self.score, self.peer


def training(members: Mapping[PeerId, Member]) -> set[PeerId]:
    """Return the nodes that train: idle ones too, or the last to finish would weigh more than the others in a mean."""
    return {peer for peer, member in members.items() if member.state is MemberState.LIVE and not member.quarantined}


def counted(members: Mapping[PeerId, Member]) -> set[PeerId]:
    """Return the nodes that a mean is over: those that train, but none of which no delta has come: see
    `HubBook.counts_newcomers`."""
    return {peer for peer in training(members) if members[peer].counted}


def crew(members: Mapping[PeerId, Member]) -> set[PeerId]:
    """Return the nodes whose word decides between a hub and its standby: those of which a delta has come; before there
    is one, those that train; before any does, all.

    A node that joins and never publishes has no word: many of them could keep a hub from going on without its standby.
    """
    return counted(members) or training(members) or {peer for peer, member in members.items() if member.is_node}

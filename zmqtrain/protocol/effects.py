"""Say what the machines ask their living halves to do.

Rule 1: an effect is a wish; a machine never acts.  Rule 2: effects are carried out in the order in which they come.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqtrain.core.types import ModelSpec, PeerId, Version
from zmqtrain.protocol.fencing import Stamp
from zmqtrain.protocol.messages import (
    Aggregate,
    Announcement,
    KeyRequest,
    Message,
    Probe,
    Publish,
    ReduceChunk,
    Relay,
    Replica,
    Snapshot,
)


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send a message to one peer. stamp: that of what it answers, where no connection was made of it; None: the next of
    the peer's connection."""

    peer: PeerId
    message: Message
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send a message to every member and observer."""

    message: Message


@dataclass(frozen=True, slots=True)
class Expect:
    """Let the chunks of this announcement come; then tell the machine `received` or `broken`."""

    peer: PeerId
    announcement: Announcement


@dataclass(frozen=True, slots=True)
class Found:
    """The founder's parameters are here: the run's parameters are these, at version 0."""

    peer: PeerId
    announcement: Snapshot
    model: ModelSpec


@dataclass(frozen=True, slots=True)
class Average:
    """These nodes' parameters are here: tell the machine `averaged` if they are related, else `unrelated`.

    Their mean then takes the place of the first one's.
    """

    snapshots: tuple[tuple[PeerId, Snapshot], ...]
    model: ModelSpec


@dataclass(frozen=True, slots=True)
class Propose:
    """Send the mean of an Average to these nodes, which will say how it scores; it stays here, for the run may begin
    with it. Nobody: forget it."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Lend:
    """Send the lender's parameters, which are here, to these peers: they start again from them. Nobody: forget them."""

    lender: PeerId
    announcement: Snapshot
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Serve:
    """Send `peer` a snapshot, and from then on every aggregate. At a node: send the hub this node's parameters.

    known_version: what the peer holds (it gets an empty snapshot if that is current).  landed, reset, rewound: as in
    Snapshot.
    moments: add the founder's optimizer state, if it came with its parameters.  digest, held: as in Fetch.
    """

    peer: PeerId
    known_version: int
    landed: tuple[tuple[int, int], ...] = ()
    moments: bool = False
    reset: bool = False
    rewound: bool = False
    digest: str = ""
    held: int = 0


@dataclass(frozen=True, slots=True)
class Rewind:
    """In strict mode, after a restart, all nodes are here: go back to this version, which all have kept, and say so by
    `Hub.rewound`. -1: there is none; the run goes on from where it is, and not to the same bits."""

    version: Version


@dataclass(frozen=True, slots=True)
class Replicate:
    """Send the standby all that this hub is, and from then on every release, before the nodes."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Hear:
    """The standby holds this version: nodes may hear of it."""

    version: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer this probe on the lane that it came on, with the padding that it asks for."""

    peer: PeerId
    probe: Probe


@dataclass(frozen=True, slots=True)
class Forward:
    """Send a message to one peer on BULK, with the frames that came behind the one that this answers."""

    peer: PeerId
    message: Relay


@dataclass(frozen=True, slots=True)
class Consult:
    """Give this to the key server."""

    peer: PeerId
    request: KeyRequest


@dataclass(frozen=True, slots=True)
class Combine:
    """Reduce what came behind this message with what the other ranks of the group send; peers: all of it, by rank."""

    generation: int
    rank: int
    peers: tuple[PeerId, ...]
    chunk: ReduceChunk


@dataclass(frozen=True, slots=True)
class Discard:
    """Somebody of this group is lost: nothing of it will be reduced any more."""

    generation: int


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add this received publish to the sum of the round."""

    peer: PeerId
    publish: Publish


@dataclass(frozen=True, slots=True)
class Contribution:
    """One publish of a round. staleness: versions that its base is behind; too_stale: it lands, and counts nothing."""

    peer: PeerId
    sequence: int
    fragment: int
    samples: int
    score: float
    base_version: int
    staleness: int
    too_stale: bool = False


@dataclass(frozen=True, slots=True)
class Reduce:
    """Close the round: aggregate over `live` nodes, outer step, encode against what was published, send to all.

    contributions: the publishes in it, in the order in which they were accumulated; dense: send the result
    uncompressed; plain: the mean is the step, whatever the outer optimizer.  back_to: of a version that takes back what
    was published after this one, and holds nothing else; -1: of any other.  codec: how the result is coded, and outer:
    the outer optimizer, where they are fitted to what is measured ("": as before).
    """

    version: int
    fragments: tuple[int, ...]
    contributions: tuple[Contribution, ...]
    live: int
    dense: bool
    plain: bool = False
    back_to: int = -1
    codec: str = ""
    outer: str = ""

    @property
    def landed(self) -> tuple[tuple[PeerId, int], ...]:
        """The (peer, sequence) of each publish in it."""
        return tuple((one.peer, one.sequence) for one in self.contributions)

    @property
    def samples(self) -> int:
        """What the publishes stand for."""
        return sum(one.samples for one in self.contributions)


@dataclass(frozen=True, slots=True)
class Deliver:
    """At a node: a whole aggregate or snapshot is here; at a standby: a release, or a copy of the hub.

    landed: own sequences in it; reset: drop what is pending.
    keep: the node goes on from its own parameters; all that they differ from this snapshot is pending.
    warm: of a reset: the optimizer goes on as it is.
    """

    announcement: Aggregate | Snapshot | Replica
    landed: tuple[int, ...]
    reset: bool = False
    keep: bool = False
    warm: bool = False


@dataclass(frozen=True, slots=True)
class Rebase:
    """At the hub: the norm gate turns away these nodes, more than half of the voters: it is to let deltas be larger by
    one factor, toward theirs. why: it is not, and they stay out."""

    peers: tuple[PeerId, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class TakeBack:
    """At the hub: this node was found to diverge: look since which version what it contributed was a part of that, and
    tell `Hub.take_back`."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Withdraw:
    """At a node: this publish will not land; what it carried is still pending."""

    sequence: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The peer (at a node: the hub) is gone or was sent away: forget its transfers. reason: a code; text: words."""

    peer: PeerId
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Send:
    """At a node: send a message to the hub."""

    message: Message


@dataclass(frozen=True, slots=True)
class Connect:
    """At a node: drop the connections and what is queued on them, and make them anew. address: "": where they were."""

    address: str = ""


HubEffect = (
    SendTo
    | Broadcast
    | Expect
    | Found
    | Average
    | Propose
    | Lend
    | Serve
    | Replicate
    | Hear
    | Rewind
    | Answer
    | Forward
    | Consult
    | Combine
    | Discard
    | Accumulate
    | Reduce
    | Rebase
    | TakeBack
    | Disconnect
)
PeerEffect = Send | Connect | Expect | Serve | Deliver | Withdraw | Disconnect

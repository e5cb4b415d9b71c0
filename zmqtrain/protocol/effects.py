"""Effects: what the machines ask the code around them to do. They are carried out in order."""

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
    """Send a message to one peer. stamp: that of the message it answers, if that made no connection; None: the next of
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
    """Accept the chunks of this announcement; then call `received` or `broken` of the machine."""

    peer: PeerId
    announcement: Announcement


@dataclass(frozen=True, slots=True)
class Found:
    """The run begins with the parameters of this node, which are here, as version 0."""

    peer: PeerId
    announcement: Snapshot
    model: ModelSpec


@dataclass(frozen=True, slots=True)
class Average:
    """These nodes' parameters are here: call `averaged` of the machine if they are related, else `unrelated`. Their
    mean then replaces the first one's."""

    snapshots: tuple[tuple[PeerId, Snapshot], ...]
    model: ModelSpec


@dataclass(frozen=True, slots=True)
class Propose:
    """Send the mean of an Average to these nodes, which will score it, and keep it: the run may begin with it. No
    nodes: drop it."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Lend:
    """Send the lender's parameters, which are here, to these peers: they start again from them. No peers: drop them."""

    lender: PeerId
    announcement: Snapshot
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Serve:
    """Send `peer` a snapshot, and from then on every aggregate. At a node: send the hub this node's parameters.

    known_version: what the peer holds; it gets an empty snapshot if that is current.  landed, reset, rewound: as in
    Snapshot.  moments: add the founder's optimizer state, if it came with its parameters.  digest, held: as in Fetch.
    """

    peer: PeerId
    known_version: Version
    landed: tuple[tuple[int, int], ...] = ()
    moments: bool = False
    reset: bool = False
    rewound: bool = False
    digest: str = ""
    held: int = 0


@dataclass(frozen=True, slots=True)
class Rewind:
    """In strict mode, after a restart, all nodes are here: go back to this version, which all have kept, and call
    `Hub.rewound`. -1: there is none; the run goes on from where it is, and not to the same bits."""

    version: Version


@dataclass(frozen=True, slots=True)
class Replicate:
    """Send the standby a copy of this hub, and from then on every release, before the nodes."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Hear:
    """The standby holds this version: nodes may hear of it."""

    version: Version


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer this probe on its own lane, with the padding that it asks for."""

    peer: PeerId
    probe: Probe


@dataclass(frozen=True, slots=True)
class Forward:
    """Send a message to one peer on BULK, with the frames that came behind the message that this answers."""

    peer: PeerId
    message: Relay


@dataclass(frozen=True, slots=True)
class Consult:
    """Give this request to the key server."""

    peer: PeerId
    request: KeyRequest


@dataclass(frozen=True, slots=True)
class Combine:
    """Reduce the frames behind this message with those of the other ranks of the group; peers: all ranks, in order."""

    generation: int
    rank: int
    peers: tuple[PeerId, ...]
    chunk: ReduceChunk


@dataclass(frozen=True, slots=True)
class Discard:
    """A member of this group is lost: nothing of the group is reduced any more."""

    generation: int


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add this received publish to the sum of the round."""

    peer: PeerId
    publish: Publish


@dataclass(frozen=True, slots=True)
class Contribution:
    """One publish of a round. staleness: versions that its base is behind; too_stale: it lands with no weight."""

    peer: PeerId
    sequence: int
    fragment: int
    samples: int
    score: float
    base_version: Version
    staleness: int
    too_stale: bool = False


@dataclass(frozen=True, slots=True)
class Reduce:
    """Close the round: aggregate over `live` nodes, outer step, encode against what was published, send to all.

    contributions: the publishes in it, in the order of accumulation.  dense: send the result uncompressed.  plain: the
    mean is the step, without the outer optimizer.  back_to: of a version that takes back all published after this one,
    and holds nothing else; -1: of any other.  codec, outer: of the result, where they are auto ("": unchanged).
    """

    version: Version
    fragments: tuple[int, ...]
    contributions: tuple[Contribution, ...]
    live: int
    dense: bool
    plain: bool = False
    back_to: Version = -1
    codec: str = ""
    outer: str = ""

    @property
    def landed(self) -> tuple[tuple[PeerId, int], ...]:
        """The (peer, sequence) of each publish in it."""
        return tuple((one.peer, one.sequence) for one in self.contributions)

    @property
    def samples(self) -> int:
        """The samples of all publishes in it."""
        return sum(one.samples for one in self.contributions)


@dataclass(frozen=True, slots=True)
class Deliver:
    """At a node: a whole aggregate or snapshot is here; at a standby: a release, or a copy of the hub.

    landed: own sequences in it.  reset: drop what is pending; warm: the optimizer goes on as it is.  keep: the node
    goes on from its own parameters, and their whole difference from this snapshot is pending.
    """

    announcement: Aggregate | Snapshot | Replica
    landed: tuple[int, ...]
    reset: bool = False
    keep: bool = False
    warm: bool = False


@dataclass(frozen=True, slots=True)
class Rebase:
    """At the hub: the norm gate rejects these nodes, more than half of the voters: widen it by one factor, toward their
    deltas. why: it is not widened, and they stay out."""

    peers: tuple[PeerId, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class TakeBack:
    """At the hub: this node diverges: find the version since which its contributions were part of that, and call
    `Hub.take_back`."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Withdraw:
    """At a node: this publish will not land; its content is still pending."""

    sequence: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The peer (at a node: the hub) is gone or was refused: forget its transfers. reason: a code; text: why."""

    peer: PeerId
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Send:
    """At a node: send a message to the hub."""

    message: Message


@dataclass(frozen=True, slots=True)
class Connect:
    """At a node: drop the connections with all that is queued, and connect again. address: "": as before."""

    address: str = ""


# fmt: off
HubEffect = (
    SendTo | Broadcast | Expect | Found | Average | Propose | Lend | Serve | Replicate | Hear | Rewind | Answer
    | Forward | Consult | Combine | Discard | Accumulate | Reduce | Rebase | TakeBack | Disconnect
)
# fmt: on
PeerEffect = Send | Connect | Expect | Serve | Deliver | Withdraw | Disconnect

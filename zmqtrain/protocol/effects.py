"""Effects: what the machines ask the code around them to do. They are carried out in order."""

from __future__ import annotations

import msgspec

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


class Effect(msgspec.Struct, frozen=True):
    """One request of a machine."""


class SendTo(Effect, frozen=True):
    """Send a message to one peer. stamp: that of the message it answers, if that made no connection; None: the next of
    the peer's connection."""

    peer: PeerId
    message: Message
    stamp: Stamp | None = None


class Broadcast(Effect, frozen=True):
    """Send a message to every member and observer."""

    message: Message


class Expect(Effect, frozen=True):
    """Accept the chunks of this announcement; then call `received` or `broken` of the machine."""

    peer: PeerId
    announcement: Announcement


class Divide(Effect, frozen=True):
    """The model of this run, which has not begun, is divided among so many brokers. why: of one alone."""

    shards: int
    why: str = ""


class AskPorts(Effect, frozen=True):
    """Listen at a further port of this machine, and ask these nodes whether they reach it."""

    peers: tuple[PeerId, ...]


class TryPort(Effect, frozen=True):
    """Try whether this machine reaches a port of a node's."""

    peer: PeerId
    port: int


class ServeShard(Effect, frozen=True):
    """Serve a shard from this machine, as another broker of the run."""

    shard: int


class FollowShard(Effect, frozen=True):
    """Follow the broker of a shard, which a node serves at this address, as its standby."""

    shard: int
    address: str


class TakeShard(Effect, frozen=True):
    """Take over a shard that is followed, because the node that serves it leaves."""

    shard: int


class Found(Effect, frozen=True):
    """The run begins with the parameters of this node, which are here, as version 0. others: of a pipeline, the PCs
    that hold the following parts, in order."""

    peer: PeerId
    announcement: Snapshot
    model: ModelSpec
    others: tuple[tuple[PeerId, Snapshot], ...] = ()


class Average(Effect, frozen=True):
    """These nodes' parameters are here: call `averaged` of the machine if they are related, else `unrelated`. Their
    mean then replaces the first one's."""

    snapshots: tuple[tuple[PeerId, Snapshot], ...]
    model: ModelSpec


class Propose(Effect, frozen=True):
    """Send the mean of an Average to these nodes, which will score it, and keep it: the run may begin with it. No
    nodes: drop it."""

    peers: tuple[PeerId, ...]


class Lend(Effect, frozen=True):
    """Send the lender's parameters, which are here, to these peers: they start again from them. No peers: drop them."""

    lender: PeerId
    announcement: Snapshot
    peers: tuple[PeerId, ...]


class Serve(Effect, frozen=True):
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


class Rewind(Effect, frozen=True):
    """In strict mode, after a restart, all nodes are here: go back to this version, which all have kept, and call
    `Hub.rewound`. -1: there is none; the run goes on from where it is, and not to the same bits."""

    version: Version


class Replicate(Effect, frozen=True):
    """Send the standby a copy of this hub, and from then on every release, before the nodes."""

    peer: PeerId


class Hear(Effect, frozen=True):
    """The standby holds this version: nodes may hear of it."""

    version: Version


class Answer(Effect, frozen=True):
    """Answer this probe on its own lane, with the padding that it asks for."""

    peer: PeerId
    probe: Probe


class Forward(Effect, frozen=True):
    """Send a message to one peer on BULK, with the frames that came behind the message that this answers."""

    peer: PeerId
    message: Relay


class Consult(Effect, frozen=True):
    """Give this request to the key server."""

    peer: PeerId
    request: KeyRequest


class Combine(Effect, frozen=True):
    """Reduce the frames behind this message with those of the other ranks of the group; peers: all ranks, in order."""

    generation: int
    rank: int
    peers: tuple[PeerId, ...]
    chunk: ReduceChunk


class Discard(Effect, frozen=True):
    """A member of this group is lost: nothing of the group is reduced any more."""

    generation: int


class Accumulate(Effect, frozen=True):
    """Add this received publish to the sum of the round."""

    peer: PeerId
    publish: Publish


class Dismiss(Effect, frozen=True):
    """Drop this publish, which is here whole: it will not land."""

    peer: PeerId
    publish: Publish


class Contribution(Effect, frozen=True):
    """One publish of a round. staleness: versions that its base is behind; too_stale: it lands with no weight.

    late: how many seconds it came after the first one of its round.  node: of a part of a pipeline's turn, the member
    that stands for the pipeline; "": a node of its own.
    """

    peer: PeerId
    sequence: int
    fragment: int
    samples: int
    score: float
    base_version: Version
    staleness: int
    too_stale: bool = False
    late: float = 0.0
    node: PeerId = PeerId("")
    turn: int = -1

    @property
    def counts(self) -> bool:
        """Whether its samples count: of a turn only those of the first part, for all stand for the same."""
        return not self.node or self.fragment == 0


class Reduce(Effect, frozen=True):
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
        return sum(one.samples for one in self.contributions if one.counts)


class Deliver(Effect, frozen=True):
    """At a node: a whole aggregate or snapshot is here; at a standby: a release, or a copy of the hub.

    landed: own sequences in it.  reset: drop what is pending; warm: the optimizer goes on as it is.  keep: the node
    goes on from its own parameters, and their whole difference from this snapshot is pending.
    """

    announcement: Aggregate | Snapshot | Replica
    landed: tuple[int, ...]
    reset: bool = False
    keep: bool = False
    warm: bool = False


class Rebase(Effect, frozen=True):
    """At the hub: the norm gate rejects these nodes, more than half of the voters: widen it by one factor, toward their
    deltas. why: it is not widened, and they stay out."""

    peers: tuple[PeerId, ...]
    why: str = ""


class TakeBack(Effect, frozen=True):
    """At the hub: this node diverges: find the version since which its contributions were part of that, and call
    `Hub.take_back`."""

    peer: PeerId


class Withdraw(Effect, frozen=True):
    """At a node: this publish will not land; its content is still pending."""

    sequence: int
    reason: str
    text: str


class Disconnect(Effect, frozen=True):
    """The peer (at a node: the hub) is gone or was refused: forget its transfers. reason: a code; text: why."""

    peer: PeerId
    reason: str
    text: str


class Send(Effect, frozen=True):
    """At a node: send a message to the hub."""

    message: Message


class Connect(Effect, frozen=True):
    """At a node: drop the connections with all that is queued, and connect again. address: "": as before."""

    address: str = ""


# fmt: off
HubEffect = (
    SendTo | Broadcast | Expect | Found | Average | Propose | Lend | Serve | Replicate | Hear | Rewind | Answer
    | Forward | Consult | Combine | Discard | Accumulate | Dismiss | Reduce | Rebase | TakeBack | Disconnect
    | Divide | AskPorts | TryPort | ServeShard | FollowShard | TakeShard
)
# fmt: on
PeerEffect = Send | Connect | Expect | Serve | Deliver | Withdraw | Disconnect

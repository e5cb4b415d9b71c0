"""Say what nodes and hub tell each other, and what their machines ask the living half to do.

Rule 1: a message is frozen, flat and of plain types; arrays never ride in one, they follow as `Chunk`s of a transfer.
Rule 2: a message that announces a transfer (`ANNOUNCEMENTS`) carries the bytes of each frame, so that the receiver can
refuse before it allocates.  Rule 3: an effect is a wish; a machine never acts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from math import prod

from zmqtrain.errors import FramingError
from zmqtrain.protocol.keys import (
    KEY_REQUESTS,
    Awaited,
    Declare,
    Done,
    Enrol,
    Enrolled,
    Founded,
    Initialise,
    Placed,
    Pull,
    Push,
    Values,
)
from zmqtrain.types import LeafSpec, ModelSpec, PeerId

__all__ = [
    "Hello",
    "Welcome",
    "Refused",
    "Heartbeat",
    "Goodbye",
    "Report",
    "Roster",
    "Schedule",
    "Fetch",
    "Snapshot",
    "Publish",
    "Aggregate",
    "Chunk",
    "Credit",
    "Preempt",
    "WorkRequest",
    "WorkUnit",
    "JoinGroup",
    "Forming",
    "Group",
    "GroupLost",
    "Leave",
    "Relay",
    "Relayed",
    "Fold",
    "Folded",
    "Probe",
    "Probed",
    "Message",
    "MESSAGES",
    "Announcement",
    "ANNOUNCEMENTS",
    "KeyRequest",
    "KEY_REQUESTS",
    "WireLeaf",
    "WireProcess",
    "model_to_wire",
    "model_from_wire",
    "SendTo",
    "Broadcast",
    "Expect",
    "Found",
    "Average",
    "Lend",
    "Answer",
    "Forward",
    "Combine",
    "Discard",
    "Serve",
    "Consult",
    "Accumulate",
    "Contribution",
    "Reduce",
    "Deliver",
    "Withdraw",
    "Disconnect",
    "HubEffect",
    "Send",
    "PeerEffect",
]

WireLeaf = tuple[str, tuple[int, ...], str]
"""A LeafSpec as it travels: path, shape, dtype."""

WireProcess = tuple[str, str, str, str]
"""One process of a group: its name, its address, its public CURVE key ("": none), and its token, which the connections
of the others to it must carry."""

MAX_LEAF_VALUES = 1 << 40
Scalar = int | float | str | bool


def model_to_wire(model: ModelSpec) -> tuple[WireLeaf, ...]:
    """Return a model's description as plain tuples."""
    return tuple((leaf.path, leaf.shape, leaf.dtype) for leaf in model)


def model_from_wire(wire: tuple[WireLeaf, ...]) -> ModelSpec:
    """Read what `model_to_wire` wrote. Raises FramingError for a shape that no array has."""
    for path, shape, dtype in wire:
        if any(size < 0 for size in shape) or prod(shape) > MAX_LEAF_VALUES or len(path) > 512 or len(dtype) > 32:
            raise FramingError(f"the leaf {path[:80]!r} cannot be {dtype[:32]}{list(shape)}")
    return tuple(LeafSpec(path, shape, dtype) for path, shape, dtype in wire)


@dataclass(frozen=True, slots=True)
class Hello:
    """Node to hub: I am `name`. run, version: what I last followed ("", -1: nothing).

    role: "node", "observer", "process" (of a group, no node of the run), or "master": of a `shard`, which nodes reach
    at `address`.
    link: the rate of this node's port, bytes of payload per second, one way (0: not known). share: what training may
    use of it.  exchange: how this node exchanges gradients in every step, past the hub ("": it does not; it publishes).
    """

    name: str
    role: str = "node"
    run: str = ""
    version: int = -1
    link: float = 0.0
    share: float = 1.0
    shard: int = -1
    address: str = ""
    exchange: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Hub to node: the run and its settings; model is empty until somebody founds it.

    landed: (sequence, version) of this node's publishes that are in the parameters; accepted: those that will be.
    schedules: (from_version, every, delay), as in Schedule: the one that holds, and the next one if there is one.
    shard: which of several masters this is.  masters: by shard where nodes reach it ("": it is not here), as the first
    knows; another says where the first is.
    """

    run: str
    version: int
    settings: dict[str, Scalar]
    model: tuple[WireLeaf, ...] = ()
    landed: tuple[tuple[int, int], ...] = ()
    accepted: tuple[int, ...] = ()
    schedules: tuple[tuple[int, int, int], ...] = ()
    shard: int = 0
    masters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """No, and why: `reason` is a short code, `text` a sentence for people, `sequence` the publish it is about or -1."""

    reason: str
    text: str
    sequence: int = -1


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I live. A node's carries its own clock; the hub sends it back, which gives the round trip.

    heard: in the hub's answer the highest sequence of this node's publishes that reached it: one that was sent before
    this heartbeat and is higher was lost on its way.
    """

    sent: float = 0.0
    heard: int = -1


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender leaves and will not be waited for."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Node to hub: how training goes. scores: of the shared model at score_version, when this node evaluated it.

    exchange_seconds: CPU of the codec for one exchange, encode and decode (0: none yet).
    """

    step: int
    samples: int
    samples_per_second: float
    loss: float
    age_steps: float
    offers_refused: int
    bytes_sent: int
    bytes_received: int
    waiting: str = ""
    scores: dict[str, float] | None = None
    score_version: int = -1
    exchange_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Roster:
    """Hub to all: who is here and how the run stands. members: one map a node; evaluator: who scores the model.

    every, delay: k and d at `version`.  masters: as in Welcome.  served: what the parameter server here has: keys,
    bytes, pushes, clients; nothing if it has no keys.
    """

    version: int
    members: tuple[dict[str, Scalar], ...]
    evaluator: str
    samples: int
    contributions: int
    units_done: int
    units_total: int
    seconds: float
    scores: dict[str, float]
    score_version: int
    every: int = 0
    delay: int = 0
    masters: tuple[str, ...] = ()
    served: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Hub to all: from the step boundary at which you have applied `from_version` on, k is `every` and d is `delay`."""

    every: int
    delay: int
    from_version: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Node to hub: bring me up to date; I hold `version` (-1: nothing). Hub to node: send your parameters.

    score: of this node's own parameters, lower is better (NaN: not known). A node that trains apart says it again and
    again, without its model.  founding: the number that the first of several masters gives when it asks; with it the
    node founds the others' shards before it answers.
    """

    version: int = -1
    model: tuple[WireLeaf, ...] = ()
    score: float = math.nan
    founding: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The anchor at `version`, whole, as float32, fragment by fragment; no sizes: what you hold is it.

    version -1: not the run's parameters, but another node's, lent while the run has none.  landed: as in Welcome.
    moments: how many of the last frames are the state of the sender's optimizer.  reset: start again from these
    parameters, and drop what is your own.
    """

    transfer: int
    version: int
    sizes: tuple[int, ...]
    landed: tuple[tuple[int, int], ...] = ()
    moments: int = 0
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Publish:
    """Node to hub: a delta of one fragment waits for credit. score: the local loss (NaN: none).

    dense: coded as float32 whatever the run's codec, to drain what is pending; what it lands in is answered so too.
    """

    transfer: int
    sequence: int
    base_version: int
    fragment: int
    codec: str
    sizes: tuple[int, ...]
    samples: int
    steps: int
    score: float
    dense: bool = False


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Hub to all: the step from version - 1 to version. frames: how many frames each of the fragments has."""

    transfer: int
    version: int
    codec: str
    fragments: tuple[int, ...]
    frames: tuple[int, ...]
    sizes: tuple[int, ...]
    landed: tuple[tuple[str, int], ...]
    live: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The head of one payload frame: the `index`-th of a transfer that the same sender announced."""

    transfer: int
    index: int


@dataclass(frozen=True, slots=True)
class Credit:
    """Receiver to sender: `chunks` more chunks of this transfer may come (up), or have been taken (down).

    On the way down the announcement itself counts as a chunk: it rides on the same lane.
    """

    transfer: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """Hub to node: drop what is pending and start again from the shared parameters."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """Node to hub: these data units are done; deal me `want` more. idle: I have none left and wait for the answer.

    After the last unit, idle and wanting nothing says: all that I had pending has landed.
    """

    done: tuple[int, ...]
    want: int
    idle: bool


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Hub to node: work on these data units; finished: there are no more.

    end_version: -1, or the run's last version: every node has drained, and who has applied that may leave.
    """

    numbers: tuple[int, ...]
    finished: bool = False
    end_version: int = -1


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Process to hub: let me meet the others of `group`, of `size` processes who all give the same `description`.

    rank: which of them I want to be; -1: any.  address, key, token: as in WireProcess.
    """

    group: str
    size: int
    rank: int = -1
    description: str = ""
    address: str = ""
    key: str = ""
    token: str = ""


@dataclass(frozen=True, slots=True)
class Forming:
    """Hub to process: your group waits for `missing` more. here: the names of those who have come, in that order."""

    group: str
    here: tuple[str, ...]
    missing: int


@dataclass(frozen=True, slots=True)
class Group:
    """Hub to process: your group is complete, and you are its `rank`. members: by rank.

    generation: one number for each group that was ever complete at this hub.
    """

    group: str
    generation: int
    rank: int
    members: tuple[WireProcess, ...]


@dataclass(frozen=True, slots=True)
class GroupLost:
    """Hub to process: that rank of your group is gone for good, perhaps yourself. Process to hub: so I think; likewise
    process to process, where the hub does not answer.  left: it said goodbye.
    """

    rank: int
    why: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """Process to process: I leave the group once you have had so many `messages` of mine."""

    messages: int


@dataclass(frozen=True, slots=True)
class Relay:
    """Process to process through the hub: what comes behind it, `size` bytes. rank: the receiver's on the way up, the
    sender's on the way down."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Relayed:
    """The receiver of relayed messages has had `messages` more of them; to the sender, through the hub.

    rank: the sender's on the way up, the receiver's on the way down.
    """

    rank: int
    messages: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Process to hub: reduce this chunk with that of every other rank. `size` bytes come behind it, in frames: the last
    one is the values, those before it are the sender's own and come back.

    key: of one reduction all ranks send their chunks with the same key, in one order.  op, dtype: as in HubChunk.
    """

    key: int
    op: str
    dtype: str
    size: int


@dataclass(frozen=True, slots=True)
class Folded:
    """Hub to process: a chunk of all ranks, reduced, in the frames behind it: the receiver's own of its Fold, and the
    values."""

    key: int
    size: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Peer to hub, on either lane: answer me, with `answer` bytes of padding. size: of the padding that came with this.

    Measures a link from outside of a run: on BULK the padding is a frame of its own, on CONTROL there is none.
    """

    number: int
    size: int = 0
    answer: int = 0


@dataclass(frozen=True, slots=True)
class Probed:
    """Hub to peer: the answer to a Probe, with the padding asked for. seconds: the hub's clock, since 1970; software:
    what the hub runs, for people."""

    number: int
    seconds: float
    software: str


Message = (
    Hello
    | Welcome
    | Refused
    | Heartbeat
    | Goodbye
    | Report
    | Roster
    | Schedule
    | Fetch
    | Snapshot
    | Publish
    | Aggregate
    | Chunk
    | Credit
    | Preempt
    | WorkRequest
    | WorkUnit
    | JoinGroup
    | Forming
    | Group
    | GroupLost
    | Leave
    | Relay
    | Relayed
    | Fold
    | Folded
    | Probe
    | Probed
    | Enrol
    | Enrolled
    | Declare
    | Placed
    | Founded
    | Initialise
    | Push
    | Pull
    | Values
    | Done
    | Awaited
)
MESSAGES: tuple[type[Message], ...] = (
    Hello,
    Welcome,
    Refused,
    Heartbeat,
    Goodbye,
    Report,
    Roster,
    Schedule,
    Fetch,
    Snapshot,
    Publish,
    Aggregate,
    Chunk,
    Credit,
    Preempt,
    WorkRequest,
    WorkUnit,
    JoinGroup,
    Forming,
    Group,
    GroupLost,
    Leave,
    Relay,
    Relayed,
    Fold,
    Folded,
    Probe,
    Probed,
    Enrol,
    Enrolled,
    Declare,
    Placed,
    Founded,
    Initialise,
    Push,
    Pull,
    Values,
    Done,
    Awaited,
)
Announcement = Publish | Aggregate | Snapshot | Initialise | Push | Values
ANNOUNCEMENTS = (Publish, Aggregate, Snapshot, Initialise, Push, Values)
KeyRequest = Enrol | Declare | Founded | Initialise | Push | Pull


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send a message to one peer."""

    peer: PeerId
    message: Message


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
class Lend:
    """Send the lender's parameters, which are here, to these peers: they start again from them. Nobody: forget them."""

    lender: PeerId
    announcement: Snapshot
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Serve:
    """Send `peer` a snapshot, and from then on every aggregate. At a node: send the hub this node's parameters.

    known_version: what the peer holds (it gets an empty snapshot if that is current).  landed, reset: as in Snapshot.
    moments: add the founder's optimizer state, if it came with its parameters.
    """

    peer: PeerId
    known_version: int
    landed: tuple[tuple[int, int], ...] = ()
    moments: bool = False
    reset: bool = False


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
    fold: Fold


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
    uncompressed; plain: the mean is the step, whatever the outer optimizer.
    """

    version: int
    fragments: tuple[int, ...]
    contributions: tuple[Contribution, ...]
    live: int
    dense: bool
    plain: bool = False

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
    """At a node: a whole aggregate or snapshot is here. landed: own sequences in it; reset: drop what is pending.

    keep: the node goes on from its own parameters; all that they differ from this snapshot is pending.
    """

    announcement: Aggregate | Snapshot
    landed: tuple[int, ...]
    reset: bool = False
    keep: bool = False


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


HubEffect = (
    SendTo
    | Broadcast
    | Expect
    | Found
    | Average
    | Lend
    | Serve
    | Answer
    | Forward
    | Consult
    | Combine
    | Discard
    | Accumulate
    | Reduce
    | Disconnect
)
PeerEffect = Send | Expect | Serve | Deliver | Withdraw | Disconnect

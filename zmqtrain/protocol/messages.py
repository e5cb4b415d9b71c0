"""Messages of the protocol; docs/protocol.md says when each is sent, and what its fields mean.

Rule 1: a message is frozen, flat and of plain types. Arrays never travel in a message; they follow as `Chunk`s of a
transfer.
Rule 2: a message that announces a transfer (`ANNOUNCEMENTS`) carries the size of each frame in bytes, so that the
receiver can refuse it before it allocates memory.
Rule 3: a sentence for people is bounded and has no control characters (`printable`), on both sides of the wire.
Rule 4: a client of the parameter server numbers its requests; the number of a request that announces a transfer is the
number of the transfer. A broker refuses a request by that number (`Refused.sequence`).
"""

from __future__ import annotations

import math
from math import prod
from typing import get_args

import msgspec

from zmqtrain.core.errors import FramingError
from zmqtrain.core.types import LeafSpec, ModelSpec

MAX_WORDS, MAX_SENTENCE, MAX_NAME = 200, 1000, 64
"""Characters of a peer's sentence, of a refusal (which may quote what was refused), and of a name."""
MAX_LEAF_VALUES = 1 << 40

Scalar = int | float | str | bool
WireLeaf = tuple[str, tuple[int, ...], str]  # a LeafSpec: path, shape, dtype
WireSchedule = tuple[int, int, int, str, str, str]
"""A Schedule in a Welcome: from_version, every, delay, codec, broadcast_codec, outer."""
WireProcess = tuple[str, str, str, str]
"""A process of a group: name, address, public CURVE key ("": none), and the token that connections to it must carry."""
WireKey = tuple[str, tuple[int, ...], str]  # a key of the parameter server: name, shape, dtype
WirePlace = tuple[str, tuple[int, ...], str, tuple[tuple[int, int, int], ...]]
"""A key and its pieces: for each the broker, its first value in the flat key, and the number of values."""


def printable(text: str, most: int = MAX_WORDS) -> str:
    """Return at most `most` characters of a text; "?" for each that would move a cursor or begin a line."""
    short = text[:most]
    return short if short.isprintable() else "".join(one if one.isprintable() else "?" for one in short)


def model_to_wire(model: ModelSpec) -> tuple[WireLeaf, ...]:
    return tuple((leaf.path, leaf.shape, leaf.dtype) for leaf in model)


def model_from_wire(wire: tuple[WireLeaf, ...]) -> ModelSpec:
    """Read what `model_to_wire` wrote. Raises FramingError for a shape that no array has."""
    for path, shape, dtype in wire:
        if any(size < 0 for size in shape) or prod(shape) > MAX_LEAF_VALUES or len(path) > 512 or len(dtype) > 32:
            raise FramingError(f"the leaf {path[:80]!r} cannot be {dtype[:32]}{list(shape)}")
    return tuple(LeafSpec(path, shape, dtype) for path, shape, dtype in wire)


class Message(msgspec.Struct, frozen=True):
    """One message: its subclass in this module is its kind, and its fields travel by name, in this order."""

    def _bound(self, **most: int) -> None:
        """Make the texts of these fields printable, and no longer than so many characters."""
        for name, characters in most.items():
            msgspec.structs.force_setattr(self, name, printable(getattr(self, name), characters))


replace_fields = msgspec.structs.replace
"""Gives a copy of a message, or of an effect, with other values in these fields."""
fields_of = msgspec.structs.asdict
"""Gives the fields of a message by name."""
message_of = msgspec.convert
"""Makes a message of a kind from fields by name, as a record holds them; ValueError where these are of other kinds."""


# ---------------------------------------------------------------------- nodes and hub


class Hello(Message, frozen=True):
    """Node to hub: I am `name`. run, version: what I last followed ("", -1: nothing).

    role: "node", "observer", "process" (of a group, no node of the run), "broker" of a `shard`, which nodes reach at
    `address`, or "standby": the hub's successor, which nodes reach at `address`.
    link: bytes of payload per second, one way (0: not known).  share: the part of it that training may use.
    incarnation: as in `fencing`; 0: not fenced.  term: the highest of a hub that this node knows.  without: number of
    the last lease from which it releases its hub (`standby`; 0: none).
    in_flight: of a node that goes on from a checkpoint, the sequences in flight then: Welcome says which of them have
    landed, however long ago.  checkpoints: in strict mode, the versions that it could go back to.
    whole: this node takes part only where one broker has all of the model.
    pipeline: id of the pipeline of which this is one PC ("": of none).  holds: then the parts of the model that it has:
    from, to, of so many.
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
    incarnation: int = 0
    term: int = 0
    without: int = 0
    in_flight: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()
    pipeline: str = ""
    holds: tuple[int, ...] = ()
    whole: bool = False


class Welcome(Message, frozen=True):
    """Hub to node: the run and its settings; model is empty until the run is initialized.

    landed: (sequence, version) of this node's publishes that are in the parameters; accepted: those that will be.
    schedules: the one that holds, and the next one if there is one.  shards: address of each shard's broker ("": not
    here), from the first broker; from another, the address of the first.  term: number of takeovers of this run so far.
    standby: address of the hub's successor ("": none).  called: name of this peer in a Roster.
    """

    run: str
    version: int
    settings: dict[str, Scalar]
    model: tuple[WireLeaf, ...] = ()
    landed: tuple[tuple[int, int], ...] = ()
    accepted: tuple[int, ...] = ()
    schedules: tuple[WireSchedule, ...] = ()
    shard: int = 0
    shards: tuple[str, ...] = ()
    heard: int = -1
    term: int = 0
    standby: str = ""
    called: str = ""
    samples: int = 0


class Refused(Message, frozen=True):
    """No, and why: `reason` is a short code, `text` a sentence for people, `sequence` the publish it is about or -1."""

    reason: str
    text: str
    sequence: int = -1

    def __post_init__(self) -> None:
        self._bound(reason=MAX_NAME, text=MAX_SENTENCE)


class Heartbeat(Message, frozen=True):
    """I am alive. A node's carries its own clock; the hub sends it back, which gives the round trip.

    heard: in the hub's answer, the highest sequence of this node's publishes that arrived.  In a standby's, the number
    of the books that it has read last; in a node's, `without` as in Hello.
    """

    sent: float = 0.0
    heard: int = -1


class Goodbye(Message, frozen=True):
    """The sender leaves; nothing waits for it."""

    reason: str = ""

    def __post_init__(self) -> None:
        self._bound(reason=MAX_SENTENCE)


class Report(Message, frozen=True):
    """Node to hub: the state of training. scores: of the shared model at score_version, if this node evaluated it.

    exchange_seconds: CPU time of the codec for one offer and its answer, encode and decode (0: none yet).
    held_seconds: time that one exchange, of all that is offered at once, holds the training thread (0: not known).
    data, first_step: digests ("": not known).  first_unit: -1: it takes none, or has not begun.
    software: versions, as in "zmqtrain 0.2.0, Python 3.11.2, jax 0.7.0".
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
    held_seconds: float = 0.0
    data: str = ""
    device: str = ""
    first_step: str = ""
    first_unit: int = -1
    software: str = ""


class Roster(Message, frozen=True):
    """Hub to all: the nodes and the state of the run. members: one map a node; evaluator: the node that scores the
    model. Both use the names of Welcome, not ids, because a process that knows an id can say Hello with it.

    every, delay: k and d at `version`.  hub: of the hub itself (`Hub.roster`, and `broker.admin` for a live broker).
    events: of the last seconds, for people (`broker.core.RecentEvents`).
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
    shards: tuple[str, ...] = ()
    served: dict[str, Scalar] = {}
    exchange: str = ""
    hub: dict[str, Scalar] = {}
    events: tuple[dict[str, Scalar], ...] = ()


class Schedule(Message, frozen=True):
    """Hub to all: from the step boundary on at which you have applied `from_version`, k is `every`, d is `delay`, and
    these specs hold ("": as at the beginning of the run); outer concerns the hub only."""

    every: int
    delay: int
    from_version: int
    codec: str = ""
    broadcast_codec: str = ""
    outer: str = ""


class Fetch(Message, frozen=True):
    """Node to hub: send me the parameters; I hold `version` (-1: nothing). Hub to node: send yours.

    score: of this node's own parameters, lower is better (NaN: not known).  founding: number that the first of several
    brokers gives when it asks.  digest, held: of a snapshot cut short by a lost connection, and how many of its first
    frames are here ("", 0: none).
    """

    version: int = -1
    model: tuple[WireLeaf, ...] = ()
    score: float = math.nan
    founding: int = 0
    digest: str = ""
    held: int = 0


class Snapshot(Message, frozen=True):
    """The anchor at `version`, whole, as float32, fragment by fragment; no sizes: what you hold is it.

    version -1: not the run's parameters, but another node's, or the mean to vote on.  moments: how many of the last
    frames are the sender's optimizer state.  reset: start again from these parameters, and drop your own.  rewound: all
    have gone back to this version: go on from your checkpoint of it.  digest: BLAKE2b of all frames ("": none).  first:
    index of the first chunk sent.
    """

    transfer: int
    version: int
    sizes: tuple[int, ...]
    landed: tuple[tuple[int, int], ...] = ()
    moments: int = 0
    reset: bool = False
    rewound: bool = False
    digest: str = ""
    first: int = 0


class Publish(Message, frozen=True):
    """Node to hub: a delta of one fragment waits for credit. score: the local loss (NaN: none).

    dense: coded as float32 whatever the run's codec, to drain what is pending; so is the aggregate that it lands in.
    turn: of a PC of a pipeline, which offers of all its PCs belong together; it rises.
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
    turn: int = -1


class Aggregate(Message, frozen=True):
    """Hub to all: the step from version - 1 to version. frames: number of frames of each fragment.

    samples: of all publishes in it.
    """

    transfer: int
    version: int
    codec: str
    fragments: tuple[int, ...]
    frames: tuple[int, ...]
    sizes: tuple[int, ...]
    landed: tuple[tuple[str, int], ...]
    live: int
    samples: int = 0


class Chunk(Message, frozen=True):
    """The head of one payload frame: the `index`-th of a transfer that the same sender announced."""

    transfer: int
    index: int


class Credit(Message, frozen=True):
    """Receiver to sender: `chunks` more chunks of this transfer may come (up), or have been taken (down).

    On the way down the announcement itself counts as a chunk, because it goes on the same lane.
    """

    transfer: int
    chunks: int


class Host(Message, frozen=True):
    """The first of several brokers to a node: serve this shard from your PC; to the broker of a shard that a node
    serves: these keys come in with you. Node to the first: I do not serve it, and why; or, leaves, I have served it,
    and am about to leave; or, unreached, I do not reach its broker at this address.

    Of shard 0 the first asks, before it divides the model: do you reach this port of my machine? The node answers with
    a port of its own to be tried, 0 where it serves nothing, or says in `text` why it does not reach the first's.
    keys: public ones, with their names.
    """

    shard: int
    text: str = ""
    leaves: bool = False
    keys: dict[str, str] = {}
    unreached: str = ""
    port: int = 0


class Preempt(Message, frozen=True):
    """Hub to node: drop what is pending and start again from the shared parameters; with reason "over" (your quarantine
    is) the optimizer goes on as it is."""

    reason: str


class Quarantine(Message, frozen=True):
    """Hub to node: your deltas are rejected for `seconds`, because too many were refused. reason, text: of the last
    one, as in Refused. Drop what is pending and start again from the shared parameters; with "norm" and "again" the
    optimizer goes on as it is. seconds 0: the quarantine is over, go on as you are."""

    reason: str
    text: str
    seconds: float

    def __post_init__(self) -> None:
        self._bound(reason=MAX_NAME, text=MAX_SENTENCE)


class WorkRequest(Message, frozen=True):
    """Node to hub: these data units are done; deal me `want` more. idle: I have none left and wait for the answer.

    After the last unit, idle with nothing wanted says: all that I had pending has landed.
    held: units that I had in hand when I was lost; the answer, which then always comes, has those that are mine again.
    reached: in a run that has gone back, the units of my lane before this one are done (-1: not said).
    """

    done: tuple[int, ...]
    want: int
    idle: bool
    held: tuple[int, ...] = ()
    reached: int = -1


class WorkUnit(Message, frozen=True):
    """Hub to node: work on these data units; finished: there are no more.

    end_version: -1, or the run's last version: every node has drained, and a node that has applied it may leave.
    """

    numbers: tuple[int, ...]
    finished: bool = False
    end_version: int = -1


class Stop(Message, frozen=True):
    """Operator (an observer) to hub: end the run.  Hub to its nodes: the run ends: drain what is pending and leave."""


# ---------------------------------------------------------------------- groups


class JoinGroup(Message, frozen=True):
    """Process to hub: add me to `group`, of `size` processes that all give the same `description`.

    rank: which of them I want to be; -1: any.  address, key, token: as in WireProcess.  repeated: groups of this name
    meet one after the other: one that is complete is no obstacle.
    """

    group: str
    size: int
    rank: int = -1
    description: str = ""
    address: str = ""
    key: str = ""
    token: str = ""
    repeated: bool = False


class Forming(Message, frozen=True):
    """Hub to process: your group waits for `missing` more. here: the names of those present, in order of arrival."""

    group: str
    here: tuple[str, ...]
    missing: int


class Group(Message, frozen=True):
    """Hub to process: your group is complete, and you are its `rank`. members: by rank.

    generation: a number of its own for each complete group of this hub.
    """

    group: str
    generation: int
    rank: int
    members: tuple[WireProcess, ...]


class GroupLost(Message, frozen=True):
    """Hub to process: that rank of your group, perhaps yourself, is gone for good. Process to hub: I think so; likewise
    process to process, where the hub does not answer.  left: it said goodbye.
    """

    rank: int
    why: str
    left: bool = False

    def __post_init__(self) -> None:
        self._bound(why=MAX_SENTENCE)


class Leave(Message, frozen=True):
    """Process to process: I leave the group once you have received so many `messages` of mine."""

    messages: int


class Relay(Message, frozen=True):
    """Process to process through the hub: `size` bytes follow. rank: the receiver's on the way up, the sender's on the
    way down."""

    rank: int
    size: int


class Relayed(Message, frozen=True):
    """Receiver to sender of relayed messages, through the hub: `messages` more of them have arrived.

    rank: the sender's on the way up, the receiver's on the way down.
    """

    rank: int
    messages: int


class ReduceChunk(Message, frozen=True):
    """Process to hub: reduce this chunk with that of every other rank. `size` bytes follow, in frames: the last one is
    the values, those before it are the sender's own and come back.

    key: of one reduction; all ranks send their chunks with the same key, in one order.  op, dtype: as in HubChunk.
    """

    key: int
    op: str
    dtype: str
    size: int


class ReducedChunk(Message, frozen=True):
    """Hub to process: a reduced chunk of all ranks. The receiver's own frames of its ReduceChunk follow, then the
    values."""

    key: int
    size: int


# ---------------------------------------------------------------------- probes


class Probe(Message, frozen=True):
    """Peer to hub, on either lane: answer me, with `answer` bytes of padding. size: of the padding with this message.

    Measures a link from outside of a run: on BULK the padding is a frame of its own, on CONTROL there is none.
    """

    number: int
    size: int = 0
    answer: int = 0


class Probed(Message, frozen=True):
    """Hub to peer: the answer to a Probe, with the padding asked for. seconds: the hub's clock, since 1970; software:
    of the hub, for people."""

    number: int
    seconds: float
    software: str


# ---------------------------------------------------------------------- standby


class Replica(Message, frozen=True):
    """Hub to standby: a copy of this hub at `version` (-1: the run has no parameters).

    state: how many of the first frames are its state (JSON); the others are a safetensors file of its arrays.
    """

    transfer: int
    version: int
    sizes: tuple[int, ...]
    state: int


class Books(Message, frozen=True):
    """Hub to standby, periodically: the state that changes between releases, and the electorate (JSON).

    The standby confirms in its Heartbeats which books it has read last.
    """

    text: str


class Holding(Message, frozen=True):
    """Standby to hub: I hold this version: the nodes may hear of it."""

    version: int


class Promote(Message, frozen=True):
    """Operator (an observer) to standby: take over now, even if the first hub is there."""


# ---------------------------------------------------------------------- parameter server


class Enrol(Message, frozen=True):
    """Client to broker: I use your keys by these rules. "" and 0: whatever they are here.

    store: as the first of the brokers named it.  shard: which of `shards` this client takes you for.
    workers: clocks begin to move when so many have enrolled.  reads: this client never pushes.
    """

    store: str
    shard: int
    shards: int
    consistency: str
    optimizer: str
    workers: int
    reads: bool


class Enrolled(Message, frozen=True):
    """Broker to client: these are the rules."""

    store: str
    consistency: str
    optimizer: str
    workers: int


class Declare(Message, frozen=True):
    """Client to the first broker: I have values for these keys; where do they lie? With a dtype of "": only where."""

    request: int
    keys: tuple[WireKey, ...]


class Placed(Message, frozen=True):
    """First broker to client: the places of keys of that request, some now, others when their values are there.

    found: bring the values of these to all their brokers, then say Founded.  given: the values of these are there.
    """

    request: int
    found: tuple[WirePlace, ...]
    given: tuple[WirePlace, ...]


class Founded(Message, frozen=True):
    """Client to the first broker: the values of these keys are with all their brokers."""

    keys: tuple[str, ...]


class Initialise(Message, frozen=True):
    """Client to broker: the first values of your piece of a key wait for credit."""

    transfer: int
    key: str
    dtype: str
    start: int
    values: int
    sizes: tuple[int, ...]


class Push(Message, frozen=True):
    """Client to broker: a gradient for your piece of a key waits for credit. pull: send me the values after it."""

    transfer: int
    key: str
    dtype: str
    pull: bool
    sizes: tuple[int, ...]


class Pull(Message, frozen=True):
    """Client to broker: send me the values of your piece of a key."""

    request: int
    key: str


class Values(Message, frozen=True):
    """Broker to client: the values for this request, after `version` steps."""

    transfer: int
    request: int
    version: int
    sizes: tuple[int, ...]


class Done(Message, frozen=True):
    """Broker to client: this request, which wants no values, is done."""

    request: int


class Awaited(Message, frozen=True):
    """Broker to client: your requests wait for these workers, and for so many that have not enrolled."""

    workers: tuple[str, ...]
    missing: int


MESSAGES: tuple[type[Message], ...] = tuple(Message.__subclasses__())
Announcement = Publish | Aggregate | Snapshot | Replica | Initialise | Push | Values
ANNOUNCEMENTS: tuple[type[Announcement], ...] = get_args(Announcement)
KeyRequest = Enrol | Declare | Founded | Initialise | Push | Pull
"""Messages of a client of the parameter server to a broker."""
KEY_REQUESTS: tuple[type[KeyRequest], ...] = get_args(KeyRequest)

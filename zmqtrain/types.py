"""Hold the words that every room speaks: who, which version, what a model looks like, and the interfaces between rooms.

Rule 1: nothing here does anything; a function here only reads what it is given.
Rule 2: arrays are named by their role: a *leaf* is one array of the model, a *segment* the part of one leaf that one
fragment carries (flat float32), a *frame* at most `MAX_FRAME_BYTES` of encoded segments.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any, NewType, Protocol

from zmqtrain.errors import PeerLost
from zmqtrain.settings import RunSettings

__all__ = [
    "VERSION",
    "PeerId",
    "Version",
    "Score",
    "Buffer",
    "Array",
    "MAX_FRAME_BYTES",
    "LOCAL_UNITS",
    "first_local_unit",
    "Lane",
    "LeafSpec",
    "ModelSpec",
    "count_values",
    "describe_mismatch",
    "Offer",
    "Part",
    "Update",
    "Layout",
    "ExchangeStatistics",
    "Clock",
    "Exchange",
    "Turn",
    "GradientExchange",
    "Channel",
    "HubChannel",
    "PortListener",
    "Port",
    "HUB",
    "HubChunk",
    "HubPort",
]

VERSION = "0.1.0"
"""Of this package: `zmqtrain.__version__`."""

PeerId = NewType("PeerId", str)
"""A node, unique per process: its name, "#", and a random part. It sorts by name."""

Version = int
"""How many aggregates the hub has published; -1 is "none known"."""

Score = float
"""Lower is better: a loss, an error rate."""

Buffer = bytes | bytearray | memoryview
Array = Any
"""A numpy or a jax array: rooms that take both say so."""

MAX_FRAME_BYTES = 4 << 20
"""No payload frame is larger; a chunk on the wire is a small head and one such frame."""


LOCAL_UNITS = 1 << 40
"""Data units that no hub dealt, but a node draws for itself, are numbered from here, each node in its own range."""


def first_local_unit(name: str) -> int:
    """Return where the range of local units begins that belongs to this name (or peer id)."""
    return LOCAL_UNITS + (zlib.crc32(name.encode()) << 24)


class Lane(IntEnum):
    """The two connections between a node and its hub: a ping on CONTROL never waits behind BULK."""

    CONTROL = 0
    BULK = 1


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One array of a model: where it is in the tree, its shape and its dtype's name."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def values(self) -> int:
        """The number of values in this leaf."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.path} {self.dtype}[{','.join(map(str, self.shape))}]"


ModelSpec = tuple[LeafSpec, ...]


def count_values(spec: ModelSpec) -> int:
    """Return the number of values in a whole model."""
    return sum(leaf.values for leaf in spec)


def describe_mismatch(run: ModelSpec, node: ModelSpec) -> tuple[str, str] | None:
    """Compare the run's model with a node's; return (leaf path, sentence) for the first difference, None if equal."""
    ours, theirs = {leaf.path: leaf for leaf in run}, {leaf.path: leaf for leaf in node}
    for path, leaf in ours.items():
        if path not in theirs:
            return path, f"the run's model has the leaf {leaf}, this node's has none of that name"
        if theirs[path] != leaf:
            return path, f"the leaf {path} is {leaf} in the run and {theirs[path]} on this node"
    for path, leaf in theirs.items():
        if path not in ours:
            return path, f"this node's model has the leaf {leaf}, the run's has none of that name"
    if run != node:
        return run[0].path, "the two models have the same leaves in different orders"
    return None


@dataclass(frozen=True, slots=True)
class Offer:
    """What the training thread hands over every k steps.

    segments: the pending progress of one fragment, one flat float32 array per leaf that the fragment touches (numpy or
    jax); nobody writes into them again.  samples, steps: the work since the last accepted offer.
    scores: the losses of the steps since then, floats or device scalars.  applied: the sequences whose landing has been
    applied since the last offer.  dense: send uncompressed, to drain what is pending.
    """

    sequence: int
    fragment: int
    segments: Sequence[Array]
    samples: int
    steps: int
    scores: tuple[Any, ...] = ()
    applied: tuple[int, ...] = ()
    dense: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one leaf. values: float32, `start` and what follows of the flat leaf; a whole leaf is in its shape."""

    leaf: int
    start: int
    values: Array


@dataclass(frozen=True, slots=True)
class Update:
    """What comes back: an aggregate, or an anchor (a snapshot). Of several masters each sends its own part of both.

    aggregate: per fragment the segments of D(U), to be added to the anchor and to the parameters.
    own: per fragment the segments of the sum of this node's D(u) that landed, to be taken from pending.
    anchor: None, or what the anchor is from now on (a snapshot replaces it; then `aggregate` is empty): all of it, or
    the part that the master has which sent it.
    landed: the sequences of this node's offers that `own` holds.
    reset: drop what is pending there, and go on from the anchor (the node was preempted); only with an anchor.
    keep: go on from the own parameters, whatever the anchor is: all that they differ from it is pending.
    moments: the optimizer state that came with the anchor, as float32 values laid end to end, in one array or several.
    """

    version: Version
    aggregate: Mapping[int, Sequence[Array]]
    own: Mapping[int, Sequence[Array]]
    landed: tuple[int, ...] = ()
    anchor: Sequence[Part] | None = None
    reset: bool = False
    keep: bool = False
    moments: Sequence[Array] | None = None


class Layout(Protocol):
    """How a model is cut in fragments: the same on the hub and on every node, so that no index travels."""

    def __hash__(self) -> int:
        """Equal cuts have equal hashes: what is compiled for one serves the others."""

    @property
    def fragments(self) -> int:
        """Into how many fragments the model is cut."""

    def leaves(self, fragment: int) -> tuple[int, ...]:
        """Return the indices of the leaves that the fragment touches."""

    def spans(self, leaf_index: int, fragment: int) -> Array:
        """Return where in the flat leaf the fragment's part of it lies: int64[pieces, 2] of (start, end), rising."""

    def take(self, leaf: Array, leaf_index: int, fragment: int) -> Array:
        """Return the fragment's part of one leaf, flat (numpy, jax, or traced by jax)."""

    def add(self, leaf: Array, leaf_index: int, fragment: int, segment: Array) -> Array:
        """Return the leaf with `segment` added to the fragment's part of it."""


@dataclass(frozen=True)
class ExchangeStatistics:
    """Running figures of an exchange. encode_seconds, decode_seconds: CPU time, not of the training thread.

    link_rate: of this machine's port, in bytes of payload per second, one way, as told or measured; 0: not known.
    """

    version: Version
    peers: int
    bytes_sent: int
    bytes_received: int
    encode_seconds: float
    decode_seconds: float
    publishes: int
    publishes_refused: int
    round_trip_seconds: float | None
    link_rate: float = 0.0


class Clock(Protocol):
    """Where time comes from: the module `time`, or a simulator's virtual clock."""

    def monotonic(self) -> float:
        """Return the time in seconds; it never goes back."""

    def sleep(self, seconds: float, /) -> None:
        """Let so much time pass."""


class Exchange(Protocol):
    """The loop's only view of other nodes: the hub, an allreduce and a parameter server are each one of these.

    All of it is called by the training thread, and never waits, except `join` and `wait_update`.
    """

    @property
    def clock(self) -> Clock:
        """The time that this exchange lives in."""

    @property
    def settings(self) -> RunSettings:
        """The settings of the run."""

    @property
    def layout(self) -> Layout:
        """How the model is cut; known once `join` has returned."""

    @property
    def is_evaluator(self) -> bool:
        """True while this node is the one that scores the shared model."""

    @property
    def unreachable(self) -> tuple[int, ...]:
        """The masters that cannot be exchanged with now (training goes on alone, for their part of the model); where
        there is one, it is number 0."""

    @property
    def name(self) -> str:
        """What people call this node; no two nodes of a run should have the same."""

    @property
    def founded(self) -> bool:
        """False while the run has no shared parameters yet, as far as this node knows."""

    def join(
        self, model: ModelSpec, leaves: Sequence[Array], *, score: Score = math.nan, moments: Sequence[Array] = ()
    ) -> Update | None:
        """Join the run with this model. Return the run's parameters (an update with an anchor), None if this node goes
        on from its own: it has founded the run, or is one of a population whose run is not founded yet.

        leaves: this node's own parameters as float32 numpy arrays, used if it founds the run.  score: theirs, on
        training data that was held out (NaN: not known).  moments: the state of its optimizer as float32 arrays, for
        who adopts its parameters.
        """

    def compare(self, score: Score) -> None:
        """Say how this node's own parameters score now, in a population whose run is not founded yet."""

    @property
    def wanted(self) -> bool:
        """True while the others of a population wait for this node's parameters: answer with `lend`."""

    def lend(self, leaves: Sequence[Array], moments: Sequence[Array] = ()) -> None:
        """Give what is wanted: parameters and optimizer state as they are now, as for `join`."""

    def next_fragments(self) -> tuple[int, ...]:
        """Return the fragments that the offers of now should carry: one for each master, none for one that would refuse
        it now."""

    def offer(
        self,
        fragment: int,
        segments: Sequence[Array],
        *,
        samples: int,
        steps: int,
        scores: tuple[Any, ...] = (),
        dense: bool = False,
    ) -> int | None:
        """Hand over the pending progress of one fragment; return its sequence number, or None if it was not taken.

        What was not taken is still pending: the next offer holds it too. The arguments are those of `Offer`.
        """

    def in_flight(self) -> tuple[int, ...]:
        """Return the sequences of the offers that have neither landed in a polled update nor been withdrawn."""

    def peek(self) -> Update | None:
        """Return the update that `poll` would return, without taking it."""

    def poll(self) -> Update | None:
        """Take the next update, in version order; the caller applies it at once."""

    def wait_update(self, timeout_seconds: float, sequence: int) -> Update:
        """Take the next update of the master that this offer went to, waiting for it; raise AggregateTimeout, naming
        what is waited for."""

    def everyone_drained(self, master: int) -> bool:
        """Say that nothing is pending here of what a master has; return True once that is so on all nodes of a run that
        is over.

        True at once while the run goes on (this node leaves early), or when there is nobody to ask.
        """

    def schedule(self) -> tuple[int, int]:
        """Return the run's k and d as they hold at the version that is applied here; asked where k or d are auto."""

    def pace(self) -> tuple[float, Sequence[float]]:
        """Return the samples per second of this node and of all live ones, as last reported (NaN: not known)."""

    def report(self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int) -> None:
        """Say how training goes, for whoever watches. loss may be a device scalar: nobody waits for it."""

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        """Say how the shared model of `version` scores on held-out data."""

    def statistics(self) -> ExchangeStatistics:
        """Return the running figures."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What those who take part in a synchronous step have agreed on.

    samples: by what the samples of each are divided to weigh its mean gradient; 0: nobody has any, and no step is made.
    over: nobody will have any more.
    """

    samples: int
    over: bool


class GradientExchange(Protocol):
    """What makes of the gradients of all processes the next parameters: an allreduce, or a parameter server.

    All of it is called by the training thread, and waits for the others.  A step is `agree`, then, unless its `Turn`
    has no samples, `begin` for one bucket of whole leaves after the other, and `finish`.  Where one of the others is
    lost each of these raises PeerLost: after `recover` and `align` whoever has not completed the step makes it again.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """What people call those who take part, by rank."""

    @property
    def rank(self) -> int:
        """Which of them this process is, from 0."""

    @property
    def gives_weights(self) -> bool:
        """True if `finish` gives new parameters (a server's), False if it gives the gradients' mean."""

    def agree(self, samples: int, over: bool) -> Turn:
        """Say how many samples this process has for the next step (it takes part with none, too), and whether it will
        never have any more; wait until the others have said so as well."""

    def begin(self, leaves: Sequence[int], values: Array) -> None:
        """Send one bucket on its way, without waiting for what comes of it.

        leaves: the numbers of the leaves in it.  values: their gradients end to end, flat float32 on the host, already
        weighed with `samples / turn.samples`. Nobody writes there before `finish` has returned.
        """

    def finish(self) -> list[Array]:
        """Wait for what came of the buckets, and return it in the order in which they were begun: the caller's own."""

    def align(self, step: int, state: Callable[[], Sequence[Array]]) -> tuple[int, Sequence[Array] | None]:
        """Bring all to the state of whoever has made most steps. Return their number, and that state (None if it is
        this process's own).

        step: how many steps this process has completed (nobody is ahead by more than one); -1: its state is not the
        others'.  state: gives its arrays, on the host: the parameters' leaves in their order, and, unless
        `gives_weights`, those of the optimizer after them.
        """

    def gather(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the numbers of all (as many of each, of 32 bits), by rank."""

    def recover(self, lost: PeerLost) -> None:
        """Go on with those who are left, after PeerLost; wait for them. Raises PeerLost where nobody can go on."""

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received so far."""

    def close(self) -> None:
        """Leave; the others go on without this process."""


class Channel(Protocol):
    """A node's way to its hub: whole multi-part messages, in order within a lane."""

    async def send(self, lane: Lane, frames: Sequence[Buffer]) -> None:
        """Send one message; wait while the lane is full. Raise ChannelClosed."""

    async def receive(self) -> tuple[Lane, list[Buffer]]:
        """Return the next message of either lane, CONTROL first. Raise ChannelClosed."""

    async def reconnect(self, address: str = "") -> None:
        """Drop the connections and all that is queued on them, and connect anew under the same name.

        address: where the hub is from now on; "": where it was.
        """

    async def close(self, linger_seconds: float = 1.0) -> None:
        """Send what is queued for at most `linger_seconds`, then close."""


class HubChannel(Protocol):
    """The hub's way to its nodes."""

    @property
    def address(self) -> str:
        """The address that nodes connect to (with the port that was chosen, where 0 was asked for)."""

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Buffer]) -> None:
        """Send one message; the hub never waits for a peer. Raise PeerLost, ChannelFull or ChannelClosed."""

    async def receive(self) -> tuple[PeerId, Lane, list[Buffer]]:
        """Return the next message of any peer. Raise ChannelClosed."""

    async def close(self, linger_seconds: float = 1.0) -> None:
        """Send what is queued for at most `linger_seconds`, then close."""


class PortListener(Protocol):
    """Who is told what happens at a port, in the port's own thread; it never waits."""

    def on_message(self, rank: int, frames: list[Buffer]) -> None:
        """A whole message of that rank is here. Frames are read-only, and stay as they are as long as they are held."""

    def on_lost(self, rank: int, why: str) -> None:
        """That rank is gone for good: nothing more comes from it. Told once for each.

        Of this process's own rank it says that it is cut off from the others, who take it for lost; nothing follows.
        """

    def on_tick(self, now: float) -> None:
        """Time has passed (monotonic seconds): told some 20 times a second."""


class Port(Protocol):
    """One process's way to the other processes of its group, over sockets of their own or through the hub."""

    @property
    def rank(self) -> int:
        """Which of the group this process is, from 0."""

    @property
    def names(self) -> tuple[str, ...]:
        """What people call the processes, by rank; their number is the group's size."""

    @property
    def clock(self) -> Clock:
        """The time that this port lives in."""

    def start(self, listener: PortListener) -> None:
        """Tell this listener what happens from now on, and what came before it."""

    def call(self, what: Callable[[], object]) -> None:
        """Have the port's thread do something soon; from any thread. Calls are done in order; none after `close`."""

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Queue one message, in order with all others to that rank: at most 4 frames, each at most `MAX_FRAME_BYTES`.

        In the port's thread only. It never waits, and nothing is said when the rank is lost (`on_lost` says so). Frames
        from 64 KiB on are not copied: nobody writes into them before the other side has them.
        """

    def close(self, linger_seconds: float = 1.0) -> None:
        """Send what is queued for at most `linger_seconds`, tell the others that this process leaves, end the thread.

        From any thread; twice is once.
        """


HUB = -1
"""The rank of the hub, as one that reduces."""


@dataclass(frozen=True, slots=True)
class HubChunk:
    """What the hub is to do with a chunk of values.

    key: 0 to 2^63 - 1, the same on all ranks for the chunks of one reduction, and for no other that is under way.
    op: sum, mean, max, min or prod.  dtype: of the values, by its numpy name.
    """

    key: int
    op: str
    dtype: str


class HubPort(Port, Protocol):
    """A port whose hub reduces: who finds a `reduce` at a port may use it."""

    def reduce(self, chunk: HubChunk, frames: Sequence[Buffer]) -> None:
        """Have the hub reduce a chunk with those of all other ranks: the n-th of this key with the n-th of theirs.

        In the port's thread only; it never waits. frames: the last is the values, not empty; those before it (at most
        2, of 4 KiB in all) are this rank's own. The result comes as a message of rank HUB: this rank's own frames, then
        the values: ((x[0] op x[1]) op ...) op x[size-1]. Where ranks differ in op, dtype or length nothing comes: they
        compare their calls. If the hub is gone, `on_lost` says so of rank HUB; if a rank is, nothing comes.
        Raises ConfigError for an operation or a dtype that the hub does not reduce.
        """

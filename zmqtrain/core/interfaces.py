"""Interfaces between folders that must not import each other. A class that fulfils one need not inherit from it."""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from zmqtrain.core.errors import PeerLost
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import (
    Array,
    Buffer,
    Counts,
    ExchangeState,
    ExchangeStatistics,
    HubChunk,
    Lane,
    ModelSpec,
    PeerId,
    Score,
    StepSchedule,
    Turn,
    Update,
    Version,
)

Made = TypeVar("Made")


class Layout(Protocol):
    """How a model is cut in fragments: the same on the hub and on every node, so that no index travels."""

    def __hash__(self) -> int:
        """Equal cuts have equal hashes: what is compiled for one serves the others."""

    @property
    def fragments(self) -> int:
        """Into how many fragments the model is cut."""

    def leaves(self, fragment: int) -> tuple[int, ...]:
        """Return the indices of the leaves that the fragment touches."""

    def counts(self, fragment: int) -> tuple[int, ...]:
        """Return how many values of each of these leaves the fragment holds."""

    def spans(self, leaf_index: int, fragment: int) -> Array:
        """Return where in the flat leaf the fragment's part of it lies: int64[pieces, 2] of (start, end), rising."""

    def take(self, leaf: Array, leaf_index: int, fragment: int) -> Array:
        """Return the fragment's part of one leaf, flat (numpy, jax, or traced by jax)."""

    def add(self, leaf: Array, leaf_index: int, fragment: int, segment: Array) -> Array:
        """Return the leaf with `segment` added to the fragment's part of it."""


class CodedSegments(Sequence[Array]):
    """The segments of one fragment, still encoded. Who takes a segment has all of them decoded, once."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """How many bytes of memory they take as they are."""

    @abstractmethod
    def decoded(self) -> Sequence[Array]:
        """Return the segments."""

    @abstractmethod
    def rebases_with(self, own: Sequence[Array] | None) -> bool:
        """Return whether `rebase` can take this own part."""

    @abstractmethod
    def rebase(self, own: CodedSegments | None, places: Array, params: Array, anchor: Array) -> None:
        """Add these values to the anchor, and to the parameters these less `own`; nothing as large as they is made.

        own: of the same fragment; None is nothing.  places: int64[n, 4], of each piece of a leaf:
        where its values begin among those of all segments, how many they are, the number of the leaf, and where in
        the leaf they begin; rising, without a gap.  params, anchor: int64[leaves], where the values of each leaf begin
        in memory: float32, written in place. The sums are rounded as `params + (these - own)` and `anchor + these` are.
        """

    def __getitem__(self, index: Any) -> Any:
        return self.decoded()[index]


class PinnedSegments(Sequence[Array]):
    """The segments of an offer, not computed yet: `params - anchor` of the leaves of one fragment, on a processor.

    The training thread either pins the leaves for the thread that encodes the offer, or has the segments computed. To
    take a segment is to wait for it. It is a numpy array where the leaves were pinned, and else a jax array.
    """

    @abstractmethod
    def pin(self) -> None:
        """Let `read` have the leaves, once XLA has computed them: nobody writes there meanwhile (training thread)."""

    @abstractmethod
    def settle(self) -> None:
        """Have the segments computed, unless the leaves are pinned (training thread)."""

    @abstractmethod
    def read(self, work: Callable[[Array, Array, Array], Made]) -> Made | None:
        """Return what `work` makes of the leaves; None where they were not pinned, or cannot wait any longer.

        work: is called with the table `places` of `CodedSegments`, and where the values of the parameters' leaves and
        of the anchor's begin in memory, int64[leaves] each; nothing may be written there. What it raises is raised.
        """


class Clock(Protocol):
    """Where time comes from: the module `time`, or a simulator's virtual clock."""

    def monotonic(self) -> float:
        """Return the time in seconds; it never goes back."""

    def sleep(self, seconds: float, /) -> None:
        """Let so much time pass."""


class Executor(Protocol):
    """Does jobs one after the other, in the order in which they were given. seconds: CPU of all jobs so far."""

    @property
    def seconds(self) -> float:
        """CPU seconds of all jobs so far."""

    def submit(self, job: Callable[[], None], values: int = 0) -> bool:
        """Give it a job; False if it has as many as it may, or is closed. Never waits.

        values: how many values the job encodes, decodes or adds; in virtual time that takes its time.
        """

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Let it finish its jobs, and wait for its end; return whether it has ended."""


class JobOwner(Protocol):
    """Owner of the jobs of an `Executor`."""

    def on_job_failed(self, error: BaseException) -> None:
        """A job has raised this; called by the executor, which goes on."""


class LoopThread(Protocol):
    """A thread that runs an event loop; in virtual time a task."""

    def join(self, timeout: float, /) -> None:
        """Wait for its end, at most so many seconds; not in the thread itself."""


class Dialer(Protocol):
    """Connects to hubs, with the keys of its owner."""

    def dial(self, address: str, peer: PeerId) -> Channel:
        """Connect to the hub at an address, in the running loop; it does not wait for the hub."""


class Environment(Protocol):
    """Where a process gets its time and its threads: real ones, or those of a run in virtual time."""

    @property
    def clock(self) -> Clock:
        """Its time."""

    @property
    def virtual(self) -> bool:
        """Whether time is simulated: runs repeat exactly, so nothing that is measured may decide anything."""

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the running thread has taken."""

    def executor(self, name: str, capacity: int, owner: JobOwner) -> Executor:
        """Start an executor that holds so many jobs; owner: told of those that raise."""

    def event(self) -> threading.Event:
        """Return an event for threads to wait on."""

    def condition(self) -> threading.Condition:
        """Return a condition for threads to wait on."""

    def start(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> LoopThread:
        """Run a coroutine in a thread with an event loop of its own."""


class Exchange(Protocol):
    """The training loop's view of the other nodes: the hub's, several brokers', or a recorded one.

    The training thread calls it. Only `join`, `wait_update` and `Population.vote` wait.
    """

    @property
    def name(self) -> str:
        """What people call this node; no two nodes of a run should have the same."""

    @property
    def clock(self) -> Clock:
        """The clock of this exchange."""

    @property
    def settings(self) -> RunSettings:
        """The settings of the run."""

    @property
    def layout(self) -> Layout:
        """How the model is cut; known once `join` has returned."""

    @property
    def population(self) -> Population | None:
        """What nodes ask of each other before the run has shared parameters; None: they begin in another way."""

    def join(
        self,
        model: ModelSpec,
        leaves: Sequence[Array],
        *,
        score: Score = math.nan,
        optimizer_state: Sequence[Array] = (),
    ) -> Update | None:
        """Join the run with this model. Return the run's parameters (an update with an anchor), None if this node goes
        on from its own: they are the run's first, or it is in a population that has none yet. An update of
        version -1 is the mean that the run may begin with (initial mean): score it, and `vote`.

        leaves: this node's own parameters as float32 numpy arrays.  score: theirs, on training data that was held out
        (NaN: not known).  optimizer_state: as float32 arrays, for a node that adopts its parameters.
        """

    def state(self) -> ExchangeState:
        """Return how the exchange stands now."""

    def schedule(self, paced: bool = False) -> StepSchedule:
        """Return the run's k and d at the version that is applied here, and encode by the codecs that hold there.

        paced: with the paces of the nodes.
        """

    def next_fragments(self) -> tuple[int, ...]:
        """Return the fragments that offers should carry now: one for each broker, or all of the model where an
        exchange carries all; none that would be refused now."""

    def offer(self, fragment: int, segments: Sequence[Array], counts: Counts, *, dense: bool = False) -> int | None:
        """Hand over the pending progress of one fragment; return its sequence number, or None if it was not taken.

        What was not taken is still pending: the next offer contains it. counts: the work that it stands for; segments,
        dense: as in `Offer`.
        """

    def peek(self) -> Update | None:
        """Return the update that `poll` would return, without taking it."""

    def poll(self) -> Update | None:
        """Take the next update, in version order; the caller applies it at once."""

    def wait_update(self, timeout_seconds: float, sequence: int) -> Update:
        """Wait for the next update of the broker that this offer went to, and take it. Raises AggregateTimeout."""

    def everyone_drained(self, shard: int) -> bool:
        """Report that nothing is pending here for this broker; return whether that is so on all nodes of a run that is
        over. True at once while the run goes on (this node leaves early), or if the broker is not there."""

    def report(
        self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int, held_seconds: float = 0.0
    ) -> None:
        """Report how training goes, for people and for the plan. loss may be a device scalar: it is not waited for.
        held_seconds: how long the training thread is held for one exchange (0: not known)."""

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        """Report how the shared model of `version` scores on held-out data."""

    def statistics(self) -> ExchangeStatistics:
        """Return the running figures."""


class Population(Protocol):
    """What nodes ask of each other while each still has its own parameters (initial own, or mean)."""

    def compare(self, score: Score, *, declined: bool = False) -> None:
        """Report how this node's own parameters score now.

        declined: it was lent others, which score worse on its own held-out data, and keeps these.
        """

    def vote(self, score: Score) -> Update | None:
        """Report how the mean scores that `join` has returned (NaN: not known here), and return what `join` does: it
        has ended only now, or raises JoinRefused, which says why the run does not begin with the mean."""

    def lend(self, leaves: Sequence[Array], optimizer_state: Sequence[Array] = ()) -> None:
        """Give the parameters and the optimizer's state of now, as for `join`: others wait for them
        (`ExchangeState.wanted`)."""


class Keeping(Protocol):
    """Where a node keeps its checkpoints, as its training thread uses it.

    state: what JSON can hold.  arrays: numpy's, by name, copies that nobody writes into again.
    """

    def take(self) -> tuple[dict[str, Any], Mapping[str, Array]] | None:
        """Return, once, the state and the arrays that the training thread goes on from; None for nothing. Asked when
        `join` has returned."""

    def is_due(self) -> bool:
        """Return whether it is time to save; asked at a step boundary, after the due updates are applied."""

    def save(self, state: dict[str, Any], arrays: Mapping[str, Array], wait: bool = False) -> None:
        """Save this, with the state of the exchange at this very step boundary; wait: until it is written. A failed
        write is a warning, and training goes on."""


@runtime_checkable
class Keeps(Protocol):
    """An exchange whose node keeps checkpoints, or could."""

    @property
    def checkpoint(self) -> Keeping | None:
        """Where they are kept; None: nowhere."""


@runtime_checkable
class Closes(Protocol):
    """An exchange that can leave its run."""

    def close(self, reason: str = "") -> None:
        """Say goodbye, and end what it has begun; calling it twice does nothing more."""


@runtime_checkable
class Agrees(Protocol):
    """An exchange of several processes that make the same calls: all of them have the same answers."""

    def agreed_time(self) -> float:
        """Return the time of one of them in seconds, the same in all processes, which call this together."""


@runtime_checkable
class OffersTogether(Protocol):
    """An exchange whose offers of one step count together or not at all: at the end, too, all are sent at once."""

    def together(self) -> None:
        """All fragments that are offered from now on, until this is called again, are one delta."""


@runtime_checkable
class Describes(Protocol):
    """An exchange that describes to its hub what a node trains on."""

    def describe(self, *, data: str | None = None, device: str | None = None, first_step: str | None = None) -> None:
        """Describe the digests of this node's data (of those that it trains on, "/", of those that are held out), its
        device in at most 64 characters, or a digest of the first step: of its loss, and of the parameters after it."""


class GradientExchange(Protocol):
    """Makes of the gradients of all processes the next parameters: an allreduce, or a parameter server.

    The training thread calls it, and waits for the others.  A step is `agree`, then, unless its `Turn` has no samples,
    `begin` for one bucket of whole leaves after the other, and `finish`.  If another process is lost each of these
    raises PeerLost: after `recover` and `align`, processes that have not completed the step repeat it.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """What people call the processes, by rank."""

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""

    @property
    def gives_weights(self) -> bool:
        """True if `finish` gives new parameters (a server's), False if it gives the gradients' mean."""

    def agree(self, samples: int, over: bool) -> Turn:
        """Report how many samples this process has for the next step (with none it takes part, too), and whether it
        will never have any more; wait for the reports of the others."""

    def begin(self, leaves: Sequence[int], values: Array) -> None:
        """Begin to send one bucket, without waiting.

        leaves: the numbers of the leaves in it.  values: their gradients end to end, flat float32 on the host, already
        weighed with `samples / turn.samples`. Nobody writes there before `finish` has returned.
        """

    def finish(self) -> list[Array]:
        """Wait for the results of the buckets, and return them in the order of `begin`: the caller's own."""

    def align(self, step: int, state: Callable[[], Sequence[Array]]) -> tuple[int, Sequence[Array] | None]:
        """Bring all to the state of the process that has made most steps. Return their number, and that state (None if
        it is this process's own).

        step: how many steps this process has completed (nobody is ahead by more than one); -1: its state is not the
        others'.  state: gives its arrays, on the host: the parameters' leaves in their order, and, unless
        `gives_weights`, those of the optimizer after them.
        """

    def gather(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the numbers of all (as many of each, of 32 bits), by rank."""

    def recover(self, lost: PeerLost) -> None:
        """Go on with the others, after PeerLost; wait for them. Raises PeerLost where nobody can go on."""

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received so far."""

    def close(self) -> None:
        """Leave; the others go on without this process."""


class Channel(Protocol):
    """A node's connection to its hub: whole multi-part messages, in order within a lane."""

    @property
    def obstacle(self) -> str:
        """Why this channel cannot reach its hub, if that is known; else ""."""

    @property
    def refused(self) -> str:
        """Why the hub does not hear this channel, if that is known: "key" (it is not authorised there), "handshake",
        "broken" (that ended in its midst), "name" (this peer came with another key before); or ""."""

    async def changed(self) -> None:
        """Wait until `refused` changes, if only for a moment. Raise ChannelClosed."""

    async def send(self, lane: Lane, frames: Sequence[Buffer]) -> None:
        """Send one message; wait while the lane is full. Raise ChannelClosed."""

    async def receive(self) -> tuple[Lane, list[Buffer]]:
        """Return the next message of either lane, CONTROL first. Raise ChannelClosed."""

    def watch(self, told: Callable[[], None]) -> None:
        """Call `told` in the loop when an established connection is lost, as far as that can be seen."""

    async def reconnect(self, address: str = "") -> None:
        """Drop the connections and all that is queued on them, and connect again under the same name.

        address: where the hub is from now on; "": where it was.
        """

    async def close(self, linger_seconds: float = 1.0) -> None:
        """Send what is queued for at most `linger_seconds`, then close."""


class HubChannel(Protocol):
    """The hub's connections to its nodes."""

    @property
    def address(self) -> str:
        """The address that nodes connect to (with the port that was chosen, where 0 was asked for)."""

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Buffer]) -> None:
        """Send one message; the hub never waits for a peer. Raise PeerLost, ChannelFull (nothing was sent: try again
        later) or ChannelClosed."""

    async def receive(self) -> tuple[PeerId, Lane, list[Buffer]]:
        """Return the next message of any peer. Raise ChannelClosed."""

    def dismiss(self, peer: PeerId) -> None:
        """Drop what is queued of a peer, and close its connections after a time to read; it may connect again."""

    async def close(self, linger_seconds: float = 1.0) -> None:
        """Send what is queued for at most `linger_seconds`, then close."""


class PortListener(Protocol):
    """Receives the events of a port, in the port's own thread; it never waits."""

    def on_message(self, rank: int, frames: list[Buffer]) -> None:
        """A whole message of that rank is here. Frames are read-only, and stay as they are as long as they are held."""

    def on_lost(self, rank: int, why: str) -> None:
        """That rank is lost for good; called once a rank. The own rank: the others take this process for lost."""

    def on_tick(self, now: float) -> None:
        """Called some 20 times a second; now: monotonic seconds."""


class Port(Protocol):
    """One process's connections to the others of its group, over sockets of their own or through the hub."""

    @property
    def rank(self) -> int:
        """Which of the group this process is, from 0."""

    @property
    def names(self) -> tuple[str, ...]:
        """What people call the processes, by rank; their number is the group's size."""

    @property
    def clock(self) -> Clock:
        """The clock of this port."""

    def start(self, listener: PortListener) -> None:
        """Pass all events to this listener, those before this call too."""

    def call(self, what: Callable[[], object]) -> None:
        """Call this soon in the port's thread, in order; from any thread. None is called after `close`."""

    def send(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Queue one message, in order with all others to that rank: at most 4 frames, each at most `MAX_FRAME_BYTES`.

        In the port's thread only. It never waits, and nothing is said when the rank is lost (`on_lost` says so). Frames
        from 64 KiB on are not copied: nobody writes into them before the other side has them.
        """

    def close(self, linger_seconds: float = 1.0) -> None:
        """Send what is queued for at most `linger_seconds`, tell the others that this process leaves, end the thread.

        From any thread; safe to call twice.
        """


class HubPort(Port, Protocol):
    """A port whose hub reduces."""

    def reduce(self, chunk: HubChunk, frames: Sequence[Buffer]) -> None:
        """Have the hub reduce a chunk with those of all other ranks: the n-th of this key with the n-th of theirs.

        In the port's thread only; it never waits. frames: the last is the values, not empty; those before it (at most
        2, of 4 KiB in all) are this rank's own. The result comes as a message of rank HUB: this rank's own frames, then
        the values: ((x[0] op x[1]) op ...) op x[size-1]. Where ranks differ in op, dtype or length nothing comes: they
        compare their calls. If the hub is gone, `on_lost` says so of rank HUB; if a rank is, nothing comes.
        Raises ConfigError for an operation or a dtype that the hub does not reduce.
        """

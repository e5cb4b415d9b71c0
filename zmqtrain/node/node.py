"""The running node: the API used by the training thread, which it never makes wait but where it says so.

Three threads: the caller's trains, the link's speaks with the hub, the executor's encodes and decodes. The training
thread owns the offers, the codec thread the coder, the network thread the link; what passes between them is never
written again. An update is applied when it is polled. If the hub is lost, offers are refused, training goes on, and
the node rejoins by itself.
"""

from __future__ import annotations

import atexit
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zmqtrain.averaging.coder import DeltaCoder, Encoded
from zmqtrain.averaging.compiling import compile_codecs
from zmqtrain.codecs.fragment import layout_of
from zmqtrain.core.errors import (
    AggregateTimeout,
    CodecError,
    ConfigError,
    HubUnreachable,
    JoinRefused,
    LocalProtocolError,
    NonFiniteDelta,
    ZmqTrainError,
)
from zmqtrain.core.installed import software
from zmqtrain.core.interfaces import Dialer, Layout, PinnedSegments, Population
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings
from zmqtrain.core.types import (
    Array,
    Buffer,
    Counts,
    ExchangeState,
    ExchangeStatistics,
    ModelSpec,
    Offer,
    PeerId,
    StepSchedule,
    Update,
    Version,
)
from zmqtrain.monitor.recorder import NodeRecorder
from zmqtrain.node.checkpoint import CheckpointOptions, NodeCheckpoint, SavedNode
from zmqtrain.node.codec import CodecOn, Inbox, NodeCodec, codec_failure
from zmqtrain.node.hosting import END_SECONDS, HostedBroker, try_port
from zmqtrain.node.offers import Offers, Restarts
from zmqtrain.node.progress import Progress, paces
from zmqtrain.node.units import Batch, Source, UnitQueue
from zmqtrain.protocol.effects import Deliver
from zmqtrain.protocol.fencing import begin_incarnation
from zmqtrain.protocol.messages import (
    Aggregate,
    Host,
    Message,
    Promote,
    Quarantine,
    Report,
    Roster,
    Snapshot,
    Stop,
    WorkRequest,
    WorkUnit,
    printable,
    replace_fields,
)
from zmqtrain.protocol.peer import Peer, PeerRole, PeerState
from zmqtrain.protocol.pipelines import Share
from zmqtrain.session.environment import environment
from zmqtrain.session.hub_session import REFUSED_SECONDS, HubSession, NullListener, Solitude
from zmqtrain.transport.address import say_addresses, say_unknown_host, say_unreachable, unknown_host
from zmqtrain.transport.key_folder import Access
from zmqtrain.transport.pacing import LinkShare

if TYPE_CHECKING:
    from zmqtrain.codecs.payload_jax import DeviceCoder

logger = logging.getLogger(__name__)

NO_PEER = PeerId("")
SAY_WAITING_SECONDS = 2.0
TAKEN_OVER_SECONDS = 5.0
"""A node that leaves waits at most so long for another broker to take over from the one that it serves."""
SAY_AGAIN_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """What one node is, and what it is asked to do.

    peer: the id under which it connects.  addresses: of the broker, tried in turn.  codec_on: where deltas are
    encoded.  events: recorder of what happens here.  share: what training may use of this machine's port.  exchange:
    the name of its synchronous exchange, see `connect`.  holds: what it has as one PC of a pipeline.  incarnation:
    above which this process begins (`begin_incarnation`); 0: the node is not fenced.  keep: its checkpoints.  order: of
    an operator for the broker.  hosts: it serves a shard of the run, if the first of several brokers asks it to, and
    comes to that with these keys; None: it serves none.
    whole: it takes part only where one broker has all of the model.
    """

    name: str
    peer: PeerId = NO_PEER
    addresses: Sequence[str] = ()
    observer: bool = False
    codec_on: CodecOn = "auto"
    events: NodeRecorder | None = None
    share: LinkShare = field(default_factory=LinkShare)
    exchange: str = ""
    holds: Share | None = None
    incarnation: int = 0
    keep: CheckpointOptions | None = None
    order: Promote | Stop | None = None
    hosts: Access | None = None
    whole: bool = False


class Node(NullListener):
    """One node of a run: an `Exchange` for its training thread, and the `Listener` of its link.

    dialer: reaches the hub.  first: the node at the first of several brokers, if this is the connection to another one.
    """

    messages = (Host,)

    def __init__(self, options: NodeOptions, dialer: Dialer, first: Node | None = None) -> None:
        here = environment()
        self.options, self.clock, self._virtual = options, here.clock, here.virtual
        self.name, self.peer_id = options.name, options.peer
        self.population: Population | None = self
        """See Exchange."""
        self._events, self._is_first, share = options.events, first is None, options.share
        role: PeerRole = options.order or ("observer" if options.observer else "node")
        self.peer = Peer(
            options.peer, options.name, role, share.rate, share.share, options.exchange, options.incarnation,
            options.addresses,
        )  # fmt: skip
        self.peer.holds, self.peer.whole = options.holds, options.whole
        self.turn = -1
        """Of what is offered now, at a PC of a pipeline; see `Publish`."""
        self._changed = here.condition()
        self.units = UnitQueue(options.peer, self, here.condition(), self._events)
        """The data units that are dealt to this node."""
        self.idle: Callable[[], None] | None = None
        """Called in the training thread, now and then, while it waits for a data unit."""
        self.progress: Progress = Progress(self.clock, here.virtual) if first is None else first.progress
        if not here.virtual:  # there a message's size, and so its time, must not depend on this machine
            self.progress.software = software()
        self.restarts, self.offers, self.inbox = Restarts(), Offers(), Inbox()
        self.codec = NodeCodec(self, self.offers, self.inbox, self.restarts, options.codec_on, self._events)
        self._model: ModelSpec = ()
        self._values: list[int] = []  # by fragment
        self._making = threading.Lock()
        self._executor = here.executor("zmqtrain-codec", 256, self)
        self.link = HubSession(dialer, self.peer, options.addresses[0], self, share)
        self.checkpoint: NodeCheckpoint | None = None
        """See Keeps."""
        if options.keep is not None:
            self.checkpoint = NodeCheckpoint(options.keep, self)
            self.link.undecided = options.keep.saved is not None
        self.answers_later = False
        """Whether the hub's request for initial parameters is answered by `lend`, not at once."""
        self.wanted = False
        """See Exchange."""
        self._initial: tuple[Sequence[Any], Sequence[Any]] = ((), ())  # parameters and optimizer state of `join`
        self.message_delay: Callable[[], float] | None = None
        """For experiments: draws by how many seconds a delta is sent late; none overtakes an earlier one."""
        self._publish_at = 0.0
        self._unpublished: deque[tuple[Offer, Version, Encoded, float]] = deque()
        self._copies: list[tuple[Snapshot, list[Buffer]]] | None = None  # None: `fetch_copy` was not called
        self._withdrawals = 0
        self._without_units = self._closed = False
        self._hosted: HostedBroker | None = None
        self._scheduled: tuple[int, int, str, str] | None = None

    def start(self) -> None:
        """Say Hello to the broker. Raises what opening the connection raises; the node is closed then."""
        self.link.start()
        try:
            self.check()
        except ZmqTrainError:
            self.close()
            raise

    def close(self, reason: str = "") -> None:
        """Say goodbye and end the threads; safe to call twice."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            if (hosted := self._hosted) is not None and self.link.live and not self.ended_with_run:
                self.link.call(lambda: self.link.send(Host(hosted.shard, "this node leaves", leaves=True)))
                hosted.wait(TAKEN_OVER_SECONDS)
            self.link.close(reason)
            self._executor.close()
            if hosted is not None:
                if self.ended_with_run:  # others may be at it still; it ends once all have left
                    hosted.wait(END_SECONDS)
                hosted.close()
            if self.checkpoint is not None:
                self.checkpoint.close()
            if self._events is not None:
                self._events.closed()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ waiting and failing (any thread)

    def check(self) -> None:
        """Raise the first failure of this node, if it has failed."""
        if self.failure is not None:
            raise self.failure

    def wait(self, condition: Callable[[], bool], timeout_seconds: float | None) -> bool:
        """Wait until the condition holds; False when the time is up. Raises the node's failure."""
        with self._changed:
            came = self._changed.wait_for(lambda: condition() or self.failure is not None, timeout_seconds)
        self.check()
        return came

    def notify(self) -> None:
        """Have `wait` look again."""
        with self._changed:
            self._changed.notify_all()

    def in_codec(self, job: Callable[[], None], values: int = 0) -> bool:
        """Have the codec thread do something, after all earlier jobs; False if it has too much to do.

        values: how many the job codes.
        """
        return self._executor.submit(job, values)

    # ------------------------------------------------------------------ what is known of the run

    @property
    def live(self) -> bool:
        """Whether this node takes part in the run now."""
        return self.link.live

    @property
    def address(self) -> str:
        """Where the broker is looked for."""
        return self.link.address

    @property
    def settings(self) -> RunSettings:
        """The run's settings, as the broker gave them; waits for its Welcome."""
        return self.wait_welcome() if self.peer.settings is None else self.peer.settings

    @property
    def run(self) -> str:
        """The id of the run."""
        return self.peer.run

    @property
    def roster(self) -> Roster | None:
        """The members of the run, as the broker last listed them."""
        return self.peer.roster

    @property
    def shard(self) -> int:
        """The shard of the broker that this node speaks with here."""
        return self.peer.shard

    @property
    def shards(self) -> tuple[str, ...]:
        """By shard the address of its broker, as the first broker last listed them."""
        return self.peer.shards

    @property
    def ended_with_run(self) -> bool:
        """Whether the run is over, every node has drained, and this one holds its last version."""
        return 0 <= self.units.end_version <= self.offers.version

    @property
    def quarantined_seconds(self) -> float:
        """For how long the hub will accept no delta of this node; 0: it accepts them."""
        return max(0.0, self.peer.quarantined_until - self.clock.monotonic())

    @property
    def layout(self) -> Layout:
        """See Exchange. Raises LocalProtocolError before `join`."""
        if self.codec.coder is None:
            raise LocalProtocolError(f"{self.name} has not joined the run yet: call join first")
        return self.codec.coder.layout

    @property
    def device_coder(self) -> DeviceCoder | None:
        """The coder that compresses on the device, and counts the bytes that leave it; None: the processor does."""
        return None if self.codec.coder is None else self.codec.coder.device

    @property
    def exchange_seconds(self) -> float:
        """The CPU seconds of the codec for one exchange; 0: not known yet."""
        return self.codec.exchange_seconds

    @property
    def waiting_for(self) -> str:
        """What this node is waiting for, in a few words; "" for nothing."""
        match self.peer.state:
            case PeerState.CONNECTING:
                return "the broker" if self._is_first else f"the broker at {self.address}"
            case PeerState.SYNCING if not self._is_first:
                return f"the parameters of shard {self.shard}, from {self.address}"
            case PeerState.SYNCING:
                return "the run's parameters" if self.peer.run_model else "the nodes that the run starts with"
            case PeerState.LIVE if self.units.waiting:
                return "data units"
            case PeerState.LIVE if self.quarantined_seconds > 0:
                return f"the end of its quarantine, in {self.quarantined_seconds:.0f} s"
        return ""

    @property
    def alone(self) -> Solitude | None:
        """How this node trains without a hub; None: it has one."""
        if (seconds := self.link.alone_seconds()) is None:
            return None
        where = say_addresses(self.link.whereabouts)
        return Solitude(seconds, where, self.link.why_alone, self.progress.step, self.progress.loss)

    def statistics(self) -> ExchangeStatistics:
        """See Exchange. In virtual time the codec takes no time that could be measured."""
        roster, measured = self.peer.roster, not self._virtual
        return ExchangeStatistics(
            version=self.offers.version,
            peers=len(roster.members) if roster else 0,
            bytes_sent=self.link.bytes_sent,
            bytes_received=self.link.bytes_received,
            encode_seconds=self.codec.encode_seconds if measured else 0.0,
            decode_seconds=self.inbox.decode_seconds if measured else 0.0,
            publishes=self.link.publishes,
            publishes_refused=self._withdrawals,
            round_trip_seconds=self.peer.round_trip_seconds,
            link_rate=self.link.link_rate,
            run_samples=self.peer.run_samples,
        )

    # ------------------------------------------------------------------ an operator's, and the broker's address

    def wait_over(self, timeout_seconds: float) -> bool:
        """Wait until the hub says that its run is over; False when the time is up.

        For an operator who has ordered its end.  Raises JoinRefused (this one may not), HubUnreachable if the hub goes
        away without a word.
        """
        self.wait(lambda: self.peer.over or bool(self.link.trouble[0]), timeout_seconds)
        if not self.peer.over and (why := self.link.trouble[1]):
            text = f"the broker at {self.address} is gone before it has said that its run is over: {why}"
            raise HubUnreachable(text, self.address)
        return self.peer.over

    def fetch_copy(self, timeout_seconds: float) -> tuple[Snapshot, list[Buffer]]:
        """Return a copy of the published parameters, as the hub sends it, at an observer.

        Raises ConfigError where the run has no parameters yet, HubUnreachable if the hub goes away or is too slow.
        """
        if not self.peer.run_model:
            raise ConfigError(
                f"the run at {self.address} has no parameters yet: no node has joined it; try again later"
            )
        self._copies = []
        self.link.call(lambda: self.link.carry_out(self.peer.join(self.peer.run_model, self.clock.monotonic())))
        if not self.wait(lambda: bool(self._copies or self.link.trouble[0]), timeout_seconds):
            raise HubUnreachable(
                f"the broker at {self.address} has sent no copy in {timeout_seconds:g} s", self.address
            )
        if not self._copies:
            text = f"the broker at {self.address} is gone before its copy was here: {self.link.trouble[1]}"
            raise HubUnreachable(text, self.address)
        return self._copies[0]

    def wait_welcome(self, timeout_seconds: float = 10.0) -> RunSettings:
        """Wait for the broker's Welcome and return the run's settings. Raises HubUnreachable or JoinRefused.

        A broker that refuses this node is not waited for as long as one that does not answer.
        """
        began, link = self.clock.monotonic(), self.link

        def welcomed() -> bool:
            return self.peer.settings is not None

        def answered() -> bool:
            return welcomed() or (bool(link.refused) and len(link.whereabouts) == 1)

        soon = min(SAY_WAITING_SECONDS, timeout_seconds)
        came = self.wait(answered, soon)
        where = say_addresses(link.whereabouts)
        host = "" if came or self._virtual else unknown_host(link.whereabouts)
        if not came and (rest := timeout_seconds - soon) > 0:
            if host:
                logger.warning("%s; trying for %.0f s more", say_unknown_host(host, where), rest)
            else:
                logger.info("nobody answers yet at %s; trying for %.0f s more", where, rest)
            self.wait(answered, rest)
        if answered() and not welcomed():
            rest = began + timeout_seconds - self.clock.monotonic()
            self.wait(welcomed, min(REFUSED_SECONDS, max(0.0, rest)))
        if self.peer.settings is None:
            waited = min(timeout_seconds, self.clock.monotonic() - began) if link.refused else timeout_seconds
            text = say_unreachable(link.whereabouts, waited, link.obstacle)
            if host and unknown_host(link.whereabouts):
                text = say_unknown_host(host, where)
            raise HubUnreachable(text, self.address, link.refused)
        return self.peer.settings

    def wait_hub_of_checkpoint(self, timeout_seconds: float, new_run: bool) -> bool:
        """Wait for the broker, at a node that goes on from a checkpoint; without one it goes on alone, unless in strict
        mode, where `join` waits for all.

        Returns False if the broker's run is another and `new_run` allows to leave the checkpoint's.
        Raises JoinRefused if it does not.
        """
        link = self.link

        def answered() -> bool:
            other = link.trouble[0] in ("run", "version") and len(link.whereabouts) == 1
            return self.peer.state is not PeerState.CONNECTING or other

        came = self.wait(answered, timeout_seconds)
        link.undecided = False
        if came and self.peer.state is not PeerState.CONNECTING:
            return True
        if not link.trouble[0]:
            why = f" ({link.obstacle})" if link.obstacle else ""
            text = "nobody answers at %s%s: %s goes on from its checkpoint of version %d of %s, alone until it does"
            where = say_addresses(link.whereabouts)
            logger.warning(text, where, why, self.name, self.peer.version, self.peer.run)
        elif link.trouble[0] == "run":
            if new_run:
                return False
            assert self.checkpoint is not None
            raise JoinRefused(
                f"the checkpoint in {self.checkpoint.folder.folder} is not of the run at {self.address}: "
                f"{link.trouble[1].partition('. ')[0]}. Restart the broker with the checkpoint of the old run; or, to "
                "leave that for the new one, say --new-run (new_run=True); its checkpoints are then set aside",
                "run",
            )
        return True

    # ------------------------------------------------------------------ joining (training thread)

    def join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, optimizer_state: Sequence[Any] = ()
    ) -> Update | None:
        """See Exchange. Waits for the other nodes of a run that starts with several, unless it is a population.

        Raises ModelMismatch, JoinRefused, HubUnreachable, NonFiniteDelta.
        """
        self.begin_join(model, leaves, score=score, optimizer_state=optimizer_state)
        self._wait_to_join()
        update = self.end_join()
        if self.device_coder is not None:  # while the caller compiles its own
            self.in_codec(lambda: self._warm_up(0))
        return update

    def begin_join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, optimizer_state: Sequence[Any] = ()
    ) -> None:
        """Ask to join, without waiting: the first third of `join`. Raises LocalProtocolError for a second time."""
        if self._model:
            raise LocalProtocolError(
                f"{self.name} has joined the run already, with another DelayedSync: a node exchanges one tree. Give "
                'both models to one, as DelayedSync(node, {"generator": g, "discriminator": d}), and to its `step` '
                "too; or connect another node, to a broker of its own, for the second model"
            )
        self._initial = leaves, optimizer_state
        if self.settings.shards != AUTO_SHARDS:
            self._make_coder(model)
        elif not self._virtual and self.codec.device_coder() is None:
            compile_codecs(layout_of(model, replace(self.settings, shards=1)), self.settings)
        self._model = model
        resuming = None
        if self.checkpoint is not None:
            self.checkpoint.begin(model)
            resuming = self.checkpoint.resuming
        if self._events is not None:
            version = -1 if resuming is None else resuming.version
            self._events.joining(self.peer.peer, self.peer.run, self.settings, self.peer.founded, version)
        self.link.call(lambda: self.link.carry_out(self.peer.join(model, self.clock.monotonic(), score)))

    def get_ready(self) -> None:
        """Make the coder, once the hub has decided among how many brokers the model is divided: what it sends then
        shows that it has. From any thread."""
        with self._making:
            if self.codec.coder is None and self._model:
                if self.settings.shards == AUTO_SHARDS:
                    self.peer.divided(1)
                self._make_coder(self._model)

    def _make_coder(self, model: ModelSpec) -> None:
        coder = self.make_coder(model)
        self._values = [sum(coder.layout.counts(fragment)) for fragment in range(coder.layout.fragments)]
        self.codec.coder = coder

    def make_coder(self, model: ModelSpec) -> DeltaCoder:
        """Return the coder of the deltas of this model."""
        coder = DeltaCoder(model, self.settings, self.codec.device_coder(), self.shard)
        if coder.device is None:
            compile_codecs(coder.layout, self.settings)
        return coder

    def has_joined(self) -> bool:
        """Return whether the hub has answered; for a node that goes on from a checkpoint, whether it may."""
        if self.checkpoint is not None and self.checkpoint.resuming is not None:
            return self.checkpoint.may_go_on()
        if self.peer.state is PeerState.APART or self._lent_mean() is not None:
            return True
        return self.link.live and (len(self.inbox) > 0 or self.peer.following.confirmed)

    def end_join(self) -> Update | None:
        """Return the result of `join`; once `has_joined`."""
        if (lent := self._lent_mean()) is not None:
            self.inbox.take()
            self.restarts.done(self.offers.next_sequence)
            self.in_codec(self.codec.decode)
            return lent
        self._initial = ((), ())
        if self.checkpoint is not None and self.checkpoint.resuming is not None:
            self.checkpoint.go_on()
            return None
        if self.peer.state is PeerState.APART:
            return None
        first = self.inbox.peek()
        if first is None or first.anchor is None:  # this node's are the run's: version 0; an aggregate is the next one
            self.offers.version = 0
            return None
        return self.poll()

    def _lent_mean(self) -> Update | None:
        """The mean with which the run may begin, if it is here to be scored."""
        first, settings = self.inbox.peek(), self.peer.settings
        is_mean = settings is not None and settings.initial == "mean" and first is not None and first.version < 0
        return first if is_mean else None

    def _wait_to_join(self) -> None:
        waited = 0.0
        while not self.wait(self.has_joined, SAY_AGAIN_SECONDS):
            waited += SAY_AGAIN_SECONDS
            logger.info("%s has waited %.0f s for %s", self.name, waited, self.waiting_for or "its first parameters")

    def compare(self, score: float, *, declined: bool = False) -> None:
        self.link.call(lambda: self.link.carry_out(self.peer.compare(score, declined)))

    def vote(self, score: float) -> Update | None:
        """See Population. Raises what `join` does."""
        if self._lent_mean() is None:  # else the score is of another mean: all were asked again meanwhile
            self.link.call(lambda: self.link.carry_out(self.peer.vote(score)))
        self._wait_to_join()
        return self.end_join()

    def lend(self, leaves: Sequence[Any], optimizer_state: Sequence[Any] = ()) -> None:
        self.wanted = False
        self.in_codec(lambda: self._send_initial(leaves, optimizer_state))

    # ------------------------------------------------------------------ exchange (training thread)

    def next_fragments(self) -> tuple[int, ...]:
        """See Exchange; decided by `Offers.next_fragments`."""
        self.offers.withdrawn(self.inbox.take_withdrawn())
        timetable = self.peer.timetable
        dropping = self.restarts.begun or self.peer.overtaken
        if timetable is None or self.codec.coder is None or dropping or self.quarantined_seconds > 0:
            return ()
        settings, together = timetable.at(self.offers.version), self.options.holds is not None
        return self.offers.next_fragments(settings, self.layout.fragments, self.link.live, together)

    def offer(self, fragment: int, segments: Sequence[Array], counts: Counts, *, dense: bool = False) -> int | None:
        """See Exchange. Raises NonFiniteDelta or JoinRefused when the node cannot go on."""
        self.check()
        if not self.next_fragments():
            return None
        self.offers.skip_to(self.peer.heard + 1)  # a former process of this node may have used those before
        offer = replace(self.offers.draft(fragment, segments, counts, dense=dense), turn=self.turn)
        if isinstance(segments, PinnedSegments):
            if self._virtual:  # there a thread must not wait for another that is real
                segments.settle()
            else:
                segments.pin()
        base, taken = self.offers.version, [offer]  # popped: the segments need not stay until the next job
        if not self.in_codec(lambda: self.codec.encode(taken.pop(), base), self._values[fragment]):
            return None
        self.check()
        self.offers.made(offer, self.layout.fragments)
        if self._events is not None:
            self._events.offered(offer.sequence, fragment, base, dense)
        return offer.sequence

    def state(self) -> ExchangeState:
        self.offers.withdrawn(self.inbox.take_withdrawn())
        return ExchangeState(
            self.offers.in_flight(),
            () if self.link.live else (0,),
            self.peer.founded,
            self.wanted,
            self.peer.is_evaluator,
            self.units.stopped and not self.units.used,
        )

    def peek(self) -> Update | None:
        self.check()
        return self.inbox.peek()

    def poll(self) -> Update | None:
        self.check()
        update = self.inbox.take()
        if update is not None:
            self.offers.took(update)
            self.restarts.landed(len(update.landed))
            if update.reset:
                self.restarts.done(self.offers.next_sequence)
                self.peer.overtaken = False
            self.in_codec(self.codec.decode)  # there is room now
            if self._events is not None:
                self._events.applied(update)
        return update

    def await_update(self, timeout_seconds: float) -> None:
        """Wait until an update is here. Raises AggregateTimeout, and what has failed."""
        until = self.clock.monotonic() + timeout_seconds
        while not self.wait(
            lambda: len(self.inbox) > 0, min(SAY_AGAIN_SECONDS, max(0.0, until - self.clock.monotonic()))
        ):
            waiting = self.waiting_for or "the other nodes' contributions"
            if self.clock.monotonic() >= until:
                raise AggregateTimeout(
                    f"{self.name} waited {timeout_seconds:g} s for the aggregate after version {self.offers.version} "
                    f"from {waiting}. In strict mode every node must contribute; `zmqtrain status {self.address}` says "
                    "which does not"
                )
            logger.info("%s waits for the aggregate after version %d: %s", self.name, self.offers.version, waiting)

    def wait_update(self, timeout_seconds: float, sequence: int) -> Update:
        self.await_update(timeout_seconds)
        update = self.poll()
        assert update is not None
        return update

    def not_reached(self, shard: int, address: str) -> None:
        """Tell the first broker that this node does not reach that of a shard, at this address."""
        self.link.call(lambda: self.link.send(Host(shard, unreached=address)))

    def begin_again(self, diverged: bool) -> None:
        """Drop what is pending at this broker too, as another of several begins again from the shared parameters.
        diverged: it counts as a divergence."""
        if diverged:
            self.restarts.begin(self.settings)
        self.restarts.begun = True
        version = self.offers.version
        taken = self.in_codec(lambda: self.on_decoded(self.inbox.restart(self.codec.joined_coder, version)))
        self.restarts.begun = taken  # else at the next look

    def batches(self, source: Source[Batch]) -> Iterator[Batch]:
        """Give the batches of the data units that the broker deals to this node, until the run is over.

        source: a program, or any function from a unit's number to its batches.  While no broker deals any, the node
        draws units of its own, so that training never stops.
        """
        return self.units.batches(source)

    def batches_as_they_come(self, source: Source[Batch], wait_seconds: float) -> Iterator[Batch | None]:
        """Give the batches as `batches` does, and None where no unit has come within this time: for synchronous
        training, where the others must hear that there is nothing now."""
        return self.units.batches_within(source, wait_seconds)

    def say_idle(self) -> None:
        """Tell a hub that deals no data units that this node waits for some, and offers nothing meanwhile."""
        self.link.call(lambda: self.link.send(WorkRequest((), 1, True)) if self.link.live else None)

    def while_idle(self) -> None:
        if self.idle is not None:
            self.idle()

    def everyone_drained(self, shard: int) -> bool:
        return not self.link.live or not self.units.drain() or self.ended_with_run

    def schedule(self, paced: bool = False) -> StepSchedule:
        timetable = self.peer.timetable
        settings = self.settings if timetable is None else timetable.at(self.offers.version)
        scheduled = (settings.every, settings.delay, settings.codec, settings.broadcast_codec)
        if scheduled != self._scheduled:
            coder = self.codec.joined_coder
            if self.in_codec(lambda: coder.adopt(*scheduled[2:])):  # else at the next step
                self._scheduled = scheduled
                if self._events is not None:
                    self._events.scheduled(*scheduled)
        if not paced:
            return StepSchedule(*scheduled[:2])
        own, rates = paces(self.peer.roster, self.peer.called)
        if self._events is not None:
            self._events.paced(own, rates)
        return StepSchedule(*scheduled[:2], own, rates)

    # ------------------------------------------------------------------ reports (training thread)

    def describe(self, *, data: str | None = None, device: str | None = None, first_step: str | None = None) -> None:
        progress = self.progress
        progress.data = progress.data if data is None else data
        progress.device = progress.device if device is None else device
        if first_step is not None:
            progress.first_unit = self.units.first  # first: no report has the one without the other
            progress.first_step = first_step

    def report(
        self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int, held_seconds: float = 0.0
    ) -> None:
        progress = self.progress
        progress.step, progress.samples, progress.loss = step, samples, loss
        progress.age_steps, progress.offers_refused = age_steps, offers_refused
        progress.held_seconds, progress.first_unit = held_seconds, self.units.first
        alone = self.options.holds is None  # a pipeline takes its units by one of its PCs, each time another
        if alone and self.units.first < 0 and self.settings.units and not self._without_units:
            self._without_units = True
            text = (
                "%s takes no data units, and the run has --units %d: they neither count nor end what this loop does. "
                "`for batch in node.batches(batches_of)` takes them; leave --units out at the broker otherwise"
            )
            logger.warning(text, self.name, self.settings.units)
        if self.checkpoint is not None:
            self.checkpoint.stepped()
        if self._events is not None:
            self._events.stepped(step, samples, loss)

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        """See Exchange. A simulation scores the shared model itself."""
        if self._virtual:
            return
        scores = {name: float(score) for name, score in scores.items()}  # a program may give device or numpy scalars
        self.progress.scores, self.progress.score_version = scores, version
        self.link.call(lambda: self.link.send(self.make_report()) if self.link.live else None)

    def ask_for_units(self) -> None:
        self.link.call(self._request_units)

    # ------------------------------------------------------------------ Listener (network thread)

    def on_delivered(self, deliver: Deliver, frames: list[Buffer]) -> None:
        announcement = deliver.announcement
        if self._copies is not None:
            if isinstance(announcement, Snapshot):  # later aggregates are of no use here
                self._copies.append((announcement, frames))
                self.notify()
            return
        self.get_ready()
        if not isinstance(announcement, Aggregate):
            taken = self.in_codec(lambda: self.codec.arrive(deliver, frames), sum(self._values))
        elif self.inbox.full:
            taken = self.in_codec(lambda: self.inbox.skip(deliver))
            self.link.carry_out(self.peer.resync())
        else:
            values = sum(self._values[fragment] for fragment in announcement.fragments)
            taken = self.in_codec(lambda: self.codec.arrive(deliver, frames), values)
        if not taken:
            self.on_failed(ZmqTrainError(f"the codec thread of {self.name} cannot keep up"))

    def on_withdrawn(self, sequence: int, reason: str, text: str) -> None:
        if reason not in ("lost", "non-finite") and not self._virtual:
            why = f"{reason}: {text}"
            logger.warning("%s: the broker refused delta %d (%s); the next one holds it", self.name, sequence, why)
        self._withdrawals += 1
        if reason == "non-finite":
            said = f"the broker refused a delta of {self.name}, which is not finite: {text}"
            self.in_codec(lambda: self.codec.diverged(sequence, NonFiniteDelta(said)))
        if (coder := self.codec.coder) is not None:
            self.in_codec(lambda: self.codec.withdraw(coder, sequence, reason))
        self.inbox.withdraw(sequence)

    def on_quarantined(self, quarantine: Quarantine) -> None:
        if quarantine.seconds <= 0:
            logger.info("%s is not quarantined any more: %s", self.name, quarantine.text)
            return
        text = (
            f"{self.name} is quarantined for {quarantine.seconds:.0f} s: the broker has refused too much of what it "
            f"sent ({quarantine.reason}: {quarantine.text})"
        )
        advice = "If that happens again, look at its learning rate, its memory, its card and its cable"
        logger.warning("%s. It begins again from the shared parameters, and trains on meanwhile. %s", text, advice)

    def on_founding(self) -> None:
        """See Listener. A node of a population, or of several brokers, answers when its training thread lends."""
        self.get_ready()
        if self.peer.state is PeerState.APART or self.answers_later:  # its parameters may change with every step
            self.wanted = True
            self.notify()
        else:
            leaves, optimizer_state = self._initial
            self.in_codec(lambda: self._send_initial(leaves, optimizer_state))

    def on_work(self, answer: WorkUnit) -> None:
        self.units.dealt(answer)

    def on_stopped(self) -> None:
        logger.info("%s ends with its run: an operator has ended it. What is computed is sent first", self.name)
        self.units.stop()

    def on_changed(self) -> None:
        if self.peer.state is PeerState.CONNECTING:  # a node that only waits for a snapshot keeps its units
            self.units.reset()
            self.wanted = False
        if self.units.drained:  # a hub that had lost this node has forgotten that it has drained
            self._request_units()
        self.notify()

    def on_failed(self, error: ZmqTrainError) -> None:
        """See Listener. The first failure counts; it is raised in the training thread."""
        super().on_failed(error)
        self.units.reset()  # wakes a training thread that waits for a unit
        self.notify()

    def make_report(self) -> Report:
        sent, received = self.link.bytes_sent, self.link.bytes_received
        if self._hosted is not None and (why := self._hosted.why_ended()) is not None:
            logger.warning("the broker of shard %d on this PC has ended: %s", self._hosted.shard, why)
            self.link.send(Host(self._hosted.shard, printable(why)))
            self._hosted.close()
            self._hosted = None
        report = self.progress.report(sent, received, self.waiting_for, self.exchange_seconds)
        return report if self._is_first else replace_fields(report, scores=None, score_version=-1)

    def on_message(self, message: Message, frames: Sequence[Buffer]) -> bool:
        """See Listener: serve a shard as the first broker asks, or say why not."""
        assert isinstance(message, Host)
        if not message.shard:
            try_port(self.link.address, message.port, self.options.hosts is not None, self._tell_ports)
        elif why := self._host(message.shard):
            self.link.send(Host(message.shard, printable(why)))
        return True

    def _tell_ports(self, why: str, port: int) -> None:
        self.link.call(lambda: self.link.send(Host(0, printable(why), port=port)))

    def _host(self, shard: int) -> str:
        """Serve a shard; return why it is not served, "" if it is."""
        if self.options.hosts is None:
            return "it looks on"
        if self._hosted is not None and self._hosted.why_ended() is None:
            return "it serves another shard"
        server_key, pair = self.options.hosts.credentials
        if pair is not None and server_key is not None:
            pair = replace(pair, server=server_key)
        try:
            self._hosted = HostedBroker(shard, self.settings.shards, self.link.address, pair)
        except OSError as error:
            return str(error)
        return ""

    def _request_units(self) -> None:
        if self.link.live and (request := self.units.request()) is not None:
            self.link.send(request)

    # ------------------------------------------------------------------ codec thread

    def publish(self, offer: Offer, base: Version, encoded: Encoded, score: float) -> None:
        now, late = self.clock.monotonic(), self.message_delay() if self.message_delay is not None else 0.0
        self._publish_at = max(self._publish_at, now + late)
        self._unpublished.append((offer, base, encoded, score))
        self.link.call(lambda: self.link.publish(*self._unpublished.popleft()), self._publish_at - now)

    def on_decoded(self, spoiled: CodecError | None) -> None:
        """See CodecNode. A corrupted aggregate is lost; a snapshot takes its place."""
        if spoiled is not None:
            logger.warning("%s fetches the run's parameters: an aggregate is not what was sent: %s", self.name, spoiled)
            self.link.call(lambda: self.link.carry_out(self.peer.resync()))
        self.notify()

    def on_job_failed(self, error: BaseException) -> None:
        """A job of the codec thread has failed with this error."""
        self.on_failed(codec_failure(self.name, error))

    def _send_initial(self, leaves: Sequence[Any], optimizer_state: Sequence[Any]) -> None:
        initial = self.codec.encode_initial(leaves, optimizer_state)
        self.link.call(lambda: self.link.send_founding(*initial))

    def _warm_up(self, fragment: int) -> None:
        """Compile for one fragment, then for the next ones, after the jobs that have come meanwhile."""
        if self.codec.warm_up(fragment):
            self.in_codec(lambda: self._warm_up(fragment + 1))


def open_node(options: NodeOptions, dialer: Dialer, saved: SavedNode | None = None, first: Node | None = None) -> Node:
    """Start a node with an id of its own, or go on as the one that this checkpoint is of. Raises what `start` does.

    first: as of `Node`.
    """
    keep = None if options.keep is None else replace(options.keep, saved=saved)
    peer = PeerId(f"{options.name}#{secrets.token_hex(4)}") if saved is None else saved.peer
    before = 0 if saved is None else saved.incarnation
    incarnation = begin_incarnation(before, time.time_ns(), secrets.randbits(20))
    options = replace(options, peer=peer, name=peer.rpartition("#")[0], incarnation=incarnation, keep=keep)
    node = Node(options, dialer, first)
    node.start()
    return node

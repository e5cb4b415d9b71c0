"""Be a node alive, as its training thread sees it: an Exchange that never makes it wait.

Rule 1: three threads: the caller trains, one talks to the hub (`HubSession`), one codes and decodes; what they decide
is in `PeerExchange`.  Rule 2: whatever happens to the broker, offers are refused, training goes on, and the node comes
back by itself.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from zmqtrain.averaging.coder import DeltaCoder, Encoded, OnDevice
from zmqtrain.checkpoint.folder import CheckpointFolder
from zmqtrain.codecs.fast import LARGE_SLAB, kernels
from zmqtrain.core.errors import (
    AggregateTimeout,
    ConfigError,
    HubUnreachable,
    JoinRefused,
    NonFiniteDelta,
    ZmqTrainError,
)
from zmqtrain.core.interfaces import Channel
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, ExchangeStatistics, ModelSpec, Offer, PeerId, Update, Version
from zmqtrain.node.codec_jobs import say_codec_failure
from zmqtrain.node.coder_place import CodecOn, CoderPlace
from zmqtrain.node.exchange import PeerExchange
from zmqtrain.node.keeper import SavedNode
from zmqtrain.protocol.effects import Deliver
from zmqtrain.protocol.messages import Promote, Report, Roster, Snapshot, Stop
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.session.connect_deadline import REFUSED_SECONDS
from zmqtrain.session.events import NodeEvents
from zmqtrain.session.hub_session import HubSession, Solitude
from zmqtrain.session.mailbox import Worker
from zmqtrain.transport.address import say_addresses, say_unreachable
from zmqtrain.transport.pacing import LinkShare

logger = logging.getLogger(__name__)

SAY_WAITING_SECONDS = 2.0
SAY_AGAIN_SECONDS = 5.0


class Node(PeerExchange):
    """One node of a run, alive: an `Exchange`, and the `Listener` of its link.

    open_channel: makes the channel to the hub.  peer: the id under which it does so.  address: where that is, or
    several with commas, where it is looked for in turn; the channel goes to the first.
    codec_on: where deltas are compressed; the bytes are the same.  events: who is told what happens here, None for
    nobody.  share: what training may use of this machine's port; None: all there is.  first: the same node at the first
    of several masters, if this is its line to another.  exchange: as in `connect`, which makes the usual one.
    incarnation: above which this process begins (`new_incarnation`); 0: the node is not fenced.
    keep: the folder for its checkpoints, how often to save, and what it goes on from, None for nothing.
    order: of an operator, for who is at the address: to take over, or to end the run.
    """

    _link: HubSession

    def __init__(
        self,
        open_channel: Callable[[], Channel],
        peer: PeerId,
        name: str,
        address: str,
        observer: bool = False,
        codec_on: CodecOn = "auto",
        events: NodeEvents | None = None,
        share: LinkShare | None = None,
        first: Node | None = None,
        exchange: str = "",
        incarnation: int = 0,
        keep: tuple[CheckpointFolder, str, SavedNode | None] | None = None,
        order: Promote | Stop | None = None,
    ) -> None:
        share, addresses = share or LinkShare(), address.split(",")
        machine = Peer(
            peer, name, observer, share.rate, share.share, exchange=exchange, incarnation=incarnation,
            addresses=addresses, order=order,
        )  # fmt: skip
        super().__init__(name, machine, threading.Condition, time, events)
        self._is_first = first is None
        if first is not None:  # it says the same of the training
            self._progress = first._progress
        self.peer_id = peer
        self.message_delay: Callable[[], float] | None = None
        """For experiments: draws by how many seconds a delta is sent late; none is overtaken by a later one."""
        self._publish_at = 0.0
        self._unpublished: deque[tuple[Offer, Version, Encoded, float]] = deque()
        self._closed = False
        self._copies: list[tuple[Snapshot, list[Buffer]]] | None = None
        """What has come of the copy that was asked for; None: none was."""
        self._place = CoderPlace(codec_on, name)
        self._link = HubSession(open_channel, self._peer, addresses[0], self, share)
        self._worker = Worker("zmqtrain-codec", 256, self._codec_failed)
        if keep is not None:
            self._keep_in(*keep)
            self._link.undecided = keep[2] is not None
        self._link.start()
        try:
            self._waiting.check()
        except ZmqTrainError:
            self.close()
            raise

    @property
    def incarnation(self) -> int:
        """Of the last Hello: what a checkpoint holds, so that the next life begins above it."""
        return self._peer.incarnation

    @property
    def address(self) -> str:
        """Where the broker is looked for."""
        return self._link.address

    @property
    def term(self) -> int:
        """How many standbys have taken over this run, as far as this node knows."""
        return self._peer.term

    @property
    def run_model(self) -> ModelSpec:
        """The run's model as the hub described it at the last welcome; () before the run had one."""
        return self._peer.run_model

    @property
    def run_version(self) -> Version:
        """The version that the run had when this node was last welcomed."""
        return self._peer.run_version

    def wait_over(self, timeout_seconds: float) -> bool:
        """Wait until the hub says that its run is over; False when the time is up.

        For an operator who has told it to end the run.  Raises JoinRefused (of who may not), HubUnreachable if the hub
        goes away without a word.
        """
        self._waiting.wait(lambda: self._peer.over or bool(self._link.trouble[0]), timeout_seconds)
        if not self._peer.over and (why := self._link.trouble[1]):
            text = f"the broker at {self.address} is gone before it has said that its run is over: {why}"
            raise HubUnreachable(text, self.address)
        return self._peer.over

    def fetch_copy(self, timeout_seconds: float) -> tuple[Snapshot, list[Buffer]]:
        """Return a copy of what the hub has published, as it sends it, at a node that only looks on.

        Raises ConfigError where the run has no parameters yet, HubUnreachable if the hub goes away or is too slow.
        """
        if not self._peer.run_model:
            raise ConfigError(
                f"the run at {self.address} has no parameters yet: no node has joined it; try again later"
            )
        self._copies = []
        self._link.call(lambda: self._link.carry_out(self._peer.join(self._peer.run_model, time.monotonic())))
        if not self._waiting.wait(lambda: bool(self._copies or self._link.trouble[0]), timeout_seconds):
            raise HubUnreachable(
                f"the broker at {self.address} has sent no copy in {timeout_seconds:g} s", self.address
            )
        if not self._copies:
            text = f"the broker at {self.address} is gone before its copy was here: {self._link.trouble[1]}"
            raise HubUnreachable(text, self.address)
        return self._copies[0]

    def move(self, address: str) -> None:
        """Look for the broker at this address from now on, unless it is heard where it was."""
        self._link.move(address)

    # ------------------------------------------------------------------ joining (training thread)

    def wait_welcome(self, timeout_seconds: float = 10.0) -> RunSettings:
        """Wait for the broker's Welcome and return the run's settings. Raises HubUnreachable or JoinRefused."""
        began = time.monotonic()
        if not self._welcomed(timeout_seconds):
            waited = min(timeout_seconds, time.monotonic() - began) if self._link.refused else timeout_seconds
            text = say_unreachable(self._link.whereabouts, waited, self._link.obstacle)
            raise HubUnreachable(text, self.address, self._link.refused)
        assert self._peer.settings is not None
        return self._peer.settings

    def wait_hub_of_checkpoint(self, timeout_seconds: float, new_run: bool) -> bool:
        """Wait for the broker, at a node that goes on from a checkpoint; without one it goes on alone, unless in strict
        mode, where `join` waits for all.

        Returns False if the broker's run is another, and `new_run` says that this one may be left.
        Raises JoinRefused if it may not be.
        """

        def answered() -> bool:
            other = self._link.trouble[0] in ("run", "version") and len(self._link.whereabouts) == 1
            return self._peer.state is not PeerState.CONNECTING or other

        came = self._waiting.wait(answered, timeout_seconds)
        self._link.undecided = False
        if came and self._peer.state is not PeerState.CONNECTING:
            return True
        if not self._link.trouble[0]:
            why = f" ({self._link.obstacle})" if self._link.obstacle else ""
            text = "nobody answers at %s%s: %s goes on from its checkpoint of version %d of %s, alone until it does"
            logger.warning(
                text, say_addresses(self._link.whereabouts), why, self.name, self._peer.version, self._peer.run
            )
        elif self._link.trouble[0] == "run":
            if new_run:
                return False
            assert self.checkpoint is not None
            raise JoinRefused(
                f"the checkpoint in {self.checkpoint.folder.folder} is not of the run at {self.address}: "
                f"{self._link.trouble[1].partition('. ')[0]}. Restart the broker with the checkpoint of the old run; "
                "or, to leave that for the new one, say --new-run "
                "(new_run=True); its checkpoints are then set aside",
                "run",
            )
        return True

    def _welcomed(self, timeout_seconds: float) -> bool:
        """Wait for the broker's Welcome; say so when it takes long enough for somebody to wonder.

        A broker that refuses this node is not waited for as long as one that does not answer.
        """

        def welcomed() -> bool:
            return self._peer.settings is not None

        def refused() -> bool:
            return bool(self._link.refused) and len(self._link.whereabouts) == 1

        until = time.monotonic() + timeout_seconds
        soon = min(SAY_WAITING_SECONDS, timeout_seconds)
        if not self._waiting.wait(lambda: welcomed() or refused(), soon) and (rest := timeout_seconds - soon) > 0:
            logger.info("nobody answers yet at %s; trying for %.0f s more", say_addresses(self._link.whereabouts), rest)
            self._waiting.wait(lambda: welcomed() or refused(), rest)
        if refused() and not welcomed():
            self._waiting.wait(welcomed, min(REFUSED_SECONDS, max(0.0, until - time.monotonic())))
        return welcomed()

    def join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, moments: Sequence[Any] = ()
    ) -> Update | None:
        """See Exchange. Waits for the other nodes of a run that starts with several, unless it is a population.

        Raises ModelMismatch, JoinRefused, HubUnreachable, NonFiniteDelta.
        """
        update = super().join(model, leaves, score=score, moments=moments)
        if self.device_coder is not None:  # while the caller compiles its own
            self._worker.submit(lambda: self._warm_up(0))
        return update

    def _wait_to_join(self, condition: Callable[[], bool]) -> None:
        waited = 0.0
        while not self._waiting.wait(condition, SAY_AGAIN_SECONDS):
            waited += SAY_AGAIN_SECONDS
            logger.info("%s has waited %.0f s for %s", self.name, waited, self.waiting_for or "its first parameters")

    @property
    def waiting_for(self) -> str:
        """What this node is waiting for, in a few words; "" for nothing."""
        match self._peer.state:
            case PeerState.CONNECTING:
                return "the broker" if self._is_first else f"the master at {self.address}"
            case PeerState.SYNCING if not self._is_first:
                return f"the parameters of shard {self.shard}, from {self.address}"
            case PeerState.SYNCING:
                return "the run's parameters" if self._peer.run_model else "the nodes that the run starts with"
            case PeerState.LIVE if self.units.waiting:
                return "data units"
            case PeerState.LIVE if self.quarantined_seconds > 0:
                return f"the end of its quarantine, in {self.quarantined_seconds:.0f} s"
        return ""

    @property
    def alone(self) -> Solitude | None:
        """How this node trains without a hub; None: it has one."""
        if (seconds := self._link.alone_seconds()) is None:
            return None
        where = say_addresses(self._link.whereabouts)
        return Solitude(seconds, where, self._link.why_alone, self._progress.step, self._progress.loss)

    @property
    def settings(self) -> RunSettings:
        """The run's settings, as the broker gave them."""
        return self.wait_welcome()

    @property
    def roster(self) -> Roster | None:
        """Who is in the run, as the broker last said."""
        return self._peer.roster

    @property
    def run(self) -> str:
        """The id of the run."""
        return self._peer.run

    @property
    def shard(self) -> int:
        """Which of several masters this node speaks with here."""
        return self._peer.shard

    @property
    def masters(self) -> tuple[str, ...]:
        """By shard the address of its master, as the first master last said."""
        return self._peer.masters

    @property
    def founding(self) -> int:
        """The number with which several masters' shards are founded; see `Peer`."""
        return self._peer.founding

    @founding.setter
    def founding(self, number: int) -> None:
        self._peer.founding = number

    @property
    def device_coder(self) -> OnDevice | None:
        """What compresses on the device, and counts the bytes that leave it; None where the processor does."""
        return None if self._jobs.coder is None else self._jobs.coder.device

    @property
    def is_evaluator(self) -> bool:
        """See Exchange."""
        return self._peer.is_evaluator

    def wait_update(self, timeout_seconds: float, sequence: int) -> Update:
        """See Exchange."""
        until = time.monotonic() + timeout_seconds
        while not self._waiting.wait(
            lambda: len(self._inbox) > 0, min(SAY_AGAIN_SECONDS, max(0.0, until - time.monotonic()))
        ):
            waiting = self.waiting_for or "the other nodes' contributions"
            if time.monotonic() >= until:
                raise AggregateTimeout(
                    f"{self.name} waited {timeout_seconds:g} s for the aggregate after version {self._offers.version} "
                    f"from {waiting}. In strict mode every node must contribute; who does not is said by "
                    f"`zmqtrain status {self.address}`"
                )
            logger.info("%s waits for the aggregate after version %d: %s", self.name, self._offers.version, waiting)
        update = self.poll()
        assert update is not None
        return update

    # ------------------------------------------------------------------ figures, and the end

    def report_scores(self, scores: dict[str, float], version: Version) -> None:
        """See Exchange."""
        scores = {name: float(score) for name, score in scores.items()}  # a program may give device or numpy scalars
        self._progress.scores, self._progress.score_version = scores, version
        self._link.call(lambda: self._link.send(self.make_report()) if self._link.live else None)

    def statistics(self) -> ExchangeStatistics:
        """See Exchange."""
        roster = self._peer.roster
        return ExchangeStatistics(
            version=self._offers.version,
            peers=len(roster.members) if roster else 0,
            bytes_sent=self._link.bytes_sent,
            bytes_received=self._link.bytes_received,
            encode_seconds=self._jobs.encode_seconds,
            decode_seconds=self._inbox.decode_seconds,
            publishes=self._link.publishes,
            publishes_refused=self._withdrawals,
            round_trip_seconds=self._peer.round_trip_seconds,
            link_rate=self._link.link_rate,
            run_samples=self._peer.run_samples,
        )

    def close(self, reason: str = "") -> None:
        """Say goodbye and end the threads; safe to call twice."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._link.close(reason)
            self._worker.close()
            if self.checkpoint is not None:
                self.checkpoint.close()
            if self._events is not None:
                self._events.closed()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ Listener (network thread)

    def on_delivered(self, deliver: Deliver, frames: list[Buffer]) -> None:
        """See Listener."""
        if self._copies is None:
            return super().on_delivered(deliver, frames)
        if isinstance(deliver.announcement, Snapshot):  # what comes after it is of no use here
            self._copies.append((deliver.announcement, frames))
            self._waiting.notify()

    def on_withdrawn(self, sequence: int, reason: str, text: str) -> None:
        """See Listener."""
        if reason not in ("lost", "non-finite"):
            why = f"{reason}: {text}"
            logger.warning("%s: the broker refused delta %d (%s); the next one holds it", self.name, sequence, why)
        super().on_withdrawn(sequence, reason, text)

    def make_report(self) -> Report:
        """See Listener."""
        link = self._link
        report = self._progress.report(
            link.bytes_sent, link.bytes_received, self.waiting_for, self._jobs.exchange_seconds
        )
        return report if self._is_first else replace(report, scores=None, score_version=-1)

    # ------------------------------------------------------------------ threads

    def _in_network(self, what: Callable[[], object]) -> None:
        self._link.call(what)

    def _in_codec(self, what: Callable[[], None], fragments: Sequence[int] | None = ()) -> bool:
        return self._worker.submit(what)

    def _decode_on(self) -> None:
        self._worker.submit(self._jobs.decode)

    # ------------------------------------------------------------------ codec thread

    def _make_coder(self, model: ModelSpec) -> DeltaCoder:
        if max((leaf.values for leaf in model), default=0) >= LARGE_SLAB:
            kernels(LARGE_SLAB)  # compiled now, once on a machine, and not in the first exchange
        return DeltaCoder(model, self.settings, self._place.coder(), self.shard)

    def _encode(self, offer: Offer, base: Version) -> None:
        self._place.settle(self._jobs.joined_coder, offer.segments)
        try:
            super()._encode(offer, base)
        except NonFiniteDelta as error:
            text = (
                f"{error}, and nothing of it was sent. Start this node again (it takes the shared parameters); if it "
                "happens again, use a smaller learning rate, and let its optimizer begin anew where `take_adoption` "
                "says so"
            )
            raise NonFiniteDelta(text, error.leaf) from None

    def _publish(self, offer: Offer, base: Version, encoded: Encoded, score: float) -> None:
        now, late = self.clock.monotonic(), self.message_delay() if self.message_delay is not None else 0.0
        self._publish_at = max(self._publish_at, now + late)
        self._unpublished.append((offer, base, encoded, score))
        self._link.call(lambda: self._link.publish(*self._unpublished.popleft()), self._publish_at - now)

    def _warm_up(self, fragment: int) -> None:
        """Compile for one fragment, and the next ones after what has come meanwhile."""
        coder = self._jobs.joined_coder
        if fragment < coder.layout.fragments:
            coder.warm_up(fragment)
            self._worker.submit(lambda: self._warm_up(fragment + 1))

    def _codec_failed(self, error: BaseException) -> None:
        self.on_failed(say_codec_failure(self.name, error))

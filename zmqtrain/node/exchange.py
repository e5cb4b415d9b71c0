"""Be a node's Exchange, and the Listener of its link, whatever its threads and its time are.

Rule 1: what a node decides is decided here; who runs it (`Node`, the simulator's node) says on what threads, and how to
wait.  Rule 2: an update is applied when it is polled; until then its u is on its way.
Rule 3: the training thread owns the offers, the codec thread the coder, the network thread the link; what passes
between them is never written again.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from zmqtrain.averaging.coder import DeltaCoder, Encoded
from zmqtrain.checkpoint.folder import CheckpointFolder
from zmqtrain.core.errors import CodecError, LocalProtocolError, NonFiniteDelta, ZmqTrainError
from zmqtrain.core.interfaces import Clock, Layout
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Buffer, ModelSpec, Offer, Tally, Update, Version
from zmqtrain.node.batches import UnitBatches, UnitSource
from zmqtrain.node.checkpoint import NodeCheckpoint
from zmqtrain.node.codec_jobs import CodecJobs
from zmqtrain.node.inbox import Inbox
from zmqtrain.node.joining import Joining
from zmqtrain.node.keeper import NodeKeeper, SavedNode
from zmqtrain.node.offers import Offers
from zmqtrain.node.progress import Progress, paces
from zmqtrain.node.restarts import Restarts
from zmqtrain.node.units import UnitQueue
from zmqtrain.node.waiting import Waiting
from zmqtrain.protocol.effects import Deliver
from zmqtrain.protocol.messages import Aggregate, Quarantine, WorkRequest, WorkUnit
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.session.events import NodeEvents
from zmqtrain.session.hub_session import NullListener, PeerLink

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch", covariant=True)


class PeerExchange(NullListener, ABC):
    """An `Exchange` over a `Peer`, and the listener of its session: all but the threads, the time and the waiting.

    condition: makes what a thread waits on.  clock: see Exchange.  events: who is told what happens here, or None.
    """

    _link: PeerLink

    def __init__(
        self, name: str, peer: Peer, condition: Callable[[], threading.Condition], clock: Clock,
        events: NodeEvents | None,
    ) -> None:  # fmt: skip
        self.clock: Clock = clock
        self.name, self._peer, self._events = name, peer, events
        self._waiting = Waiting(condition())
        self.answers_later = False
        """Whether the hub that asks for parameters to found the run is answered by `lend`, not at once."""
        self.units = UnitQueue(
            peer.peer, lambda: self._in_network(self._ask_for_units), lambda: self._link.live, condition()
        )
        """The data units that are dealt to this node."""
        self._batches = UnitBatches(self.units, self._waiting.check, events)
        self._progress = Progress(clock)
        self._restarts = Restarts()
        # of the training thread
        self._offers = Offers()
        # of the other two
        self._inbox = Inbox(self._waiting.notify, self._fetch_again)
        self._jobs = CodecJobs(
            name, self._inbox, self._restarts, lambda: self.settings, lambda: self._offers.version,
            self._publish, events,
        )  # fmt: skip
        self._joining = Joining(peer, self._offers, self._inbox, self._jobs)
        self._withdrawals = 0
        self._without_units = False
        self._scheduled: tuple[int, int, str, str] | None = None

    # ------------------------------------------------------------------ threads and time: of who runs it

    @property
    @abstractmethod
    def settings(self) -> RunSettings:
        """See Exchange."""

    @abstractmethod
    def _make_coder(self, model: ModelSpec) -> DeltaCoder:
        """Return what codes the deltas of this model."""

    @abstractmethod
    def _in_network(self, what: Callable[[], object]) -> None:
        """Have the thread that owns the link do something."""

    @abstractmethod
    def _in_codec(self, what: Callable[[], None], fragments: Sequence[int] | None = ()) -> bool:
        """Have the codec thread do something, after all that it was given before; False if it has too much to do.

        fragments: those whose values it codes, None for all of them.
        """

    @abstractmethod
    def _decode_on(self) -> None:
        """Have more of what has arrived decoded: an update was taken, and there is room."""

    @abstractmethod
    def _publish(self, offer: Offer, base: Version, encoded: Encoded, score: float) -> None:
        """Give an encoded offer to the link (codec thread)."""

    @abstractmethod
    def _wait_to_join(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, however long; raise what has failed meanwhile."""

    # ------------------------------------------------------------------ joining (training thread)

    def join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, moments: Sequence[Any] = ()
    ) -> Update | None:
        """See Exchange. Waits for the other nodes of a run that starts with several, unless it is a population.

        Raises ModelMismatch, JoinRefused, NonFiniteDelta.
        """
        self.begin_join(model, leaves, score=score, moments=moments)
        self._wait_to_join(self.has_joined)
        return self.end_join()

    def begin_join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, moments: Sequence[Any] = ()
    ) -> None:
        """Ask to join, without waiting: the first third of `join`. Raises LocalProtocolError for a second time."""
        if self._jobs.coder is not None:
            raise LocalProtocolError(
                f"{self.name} has joined the run already, with another DelayedSync: a node exchanges one tree. Give "
                'both models to one, as DelayedSync(node, {"generator": g, "discriminator": d}), and to its `step` '
                "too; or connect another node, to a broker of its own, for the second model"
            )
        self._joining.begin(self._make_coder(model), leaves, moments)
        if self._events is not None:
            going_on = self._joining.goes_on_from
            self._events.joining(self._peer.peer, self._peer.run, self.settings, self.founded, going_on)
        self._in_network(lambda: self._link.carry_out(self._peer.join(model, self.clock.monotonic(), score)))

    def has_joined(self) -> bool:
        """Return whether the hub's answer is here; of a node that goes on from a checkpoint, whether it may."""
        return self._joining.is_over(self._link.live)

    def end_join(self) -> Update | None:
        """Return what `join` does; once `has_joined`."""
        if (lent := self._joining.lent) is not None:
            self._inbox.take()
            self._restarts.done(self._offers.next_sequence)
            self._decode_on()
            return lent
        return self.poll() if self._joining.end() else None

    def _keep_in(self, folder: CheckpointFolder, every: str, saved: SavedNode | None) -> None:
        """Keep checkpoints in this folder, and go on from this one: before anything is said to the hub."""
        self._joining.checkpoint = NodeCheckpoint(
            folder, every, saved, self._peer, self._offers, self.units, self._inbox, self._restarts, self._jobs,
            self._in_codec,
        )  # fmt: skip

    @property
    def checkpoint(self) -> NodeKeeper | None:
        """See Keeps."""
        return None if self._joining.checkpoint is None else self._joining.checkpoint.keeper

    @property
    def founded(self) -> bool:
        """See Exchange."""
        return self._peer.founded

    @property
    def ended_with_run(self) -> bool:
        """Whether the run is over, every node has drained, and this one holds its last version."""
        return 0 <= self.units.end_version <= self._offers.version

    @property
    def stopped(self) -> bool:
        """See Stops."""
        return self.units.stopped and not self.units.used

    def compare(self, score: float, *, declined: bool = False) -> None:
        """See Exchange."""
        self._in_network(lambda: self._link.carry_out(self._peer.compare(score, declined)))

    def vote(self, score: float) -> Update | None:
        """See Exchange. Raises what `join` does."""
        if self._joining.lent is None:  # or it is another one's score: all were asked anew meanwhile
            self._in_network(lambda: self._link.carry_out(self._peer.vote(score)))
        self._wait_to_join(self.has_joined)
        return self.end_join()

    @property
    def wanted(self) -> bool:
        """See Exchange."""
        return self._joining.wanted

    def lend(self, leaves: Sequence[Any], moments: Sequence[Any] = ()) -> None:
        """See Exchange."""
        self._joining.wanted = False
        self._in_codec(lambda: self._encode_founding(leaves, moments))

    @property
    def layout(self) -> Layout:
        """See Exchange. Raises LocalProtocolError before `join`."""
        if self._jobs.coder is None:
            raise LocalProtocolError(f"{self.name} has not joined the run yet: call join first")
        return self._jobs.coder.layout

    @property
    def unreachable(self) -> tuple[int, ...]:
        """See Exchange."""
        return () if self._link.live else (0,)

    # ------------------------------------------------------------------ exchange (training thread)

    def next_fragments(self) -> tuple[int, ...]:
        """See Exchange; decided by `Offers.next_fragments`."""
        self._offers.hear(self._inbox.take_withdrawn())
        timetable = self._peer.timetable
        dropping = self._restarts.begun or self._peer.overtaken
        if timetable is None or self._jobs.coder is None or dropping or self.quarantined_seconds > 0:
            return ()
        settings = timetable.at(self._offers.version)
        return self._offers.next_fragments(settings, self.layout.fragments, self._link.live)

    def offer(self, fragment: int, segments: Sequence[Array], tally: Tally, *, dense: bool = False) -> int | None:
        """See Exchange. Raises NonFiniteDelta or JoinRefused when the node cannot go on."""
        self._waiting.check()
        if not self.next_fragments():
            return None
        self._offers.skip_to(self._peer.heard + 1)  # of a former life, too
        offer = self._offers.draft(fragment, segments, tally, dense=dense)
        base = self._offers.version
        taken = [offer]  # from there: the segments need not stay until the next job
        if not self._in_codec(lambda: self._encode(taken.pop(), base), (fragment,)):
            return None
        self._waiting.check()
        self._offers.made(offer, self.layout.fragments)
        if self._events is not None:
            self._events.offered(offer.sequence, fragment, base, dense)
        return offer.sequence

    def in_flight(self) -> tuple[int, ...]:
        """See Exchange."""
        self._offers.hear(self._inbox.take_withdrawn())
        return self._offers.in_flight()

    def peek(self) -> Update | None:
        """See Exchange."""
        self._waiting.check()
        return self._inbox.peek()

    def poll(self) -> Update | None:
        """See Exchange."""
        self._waiting.check()
        update = self._inbox.take()
        if update is not None:
            self._offers.took(update)
            self._restarts.landed(len(update.landed))
            if update.reset:
                self._restarts.done(self._offers.next_sequence)
                self._peer.overtaken = False
            self._decode_on()
            if self._events is not None:
                self._events.applied(update)
        return update

    def batches(self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]]) -> Iterator[Batch]:
        """Give the batches of the data units that the broker deals to this node, until the run is over.

        source: a program, or any function from a unit's number to its batches.  While no broker deals any, the node
        draws units of its own, so that training never stops.
        """
        return self._batches.each(source)

    def batches_as_they_come(
        self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]], wait_seconds: float
    ) -> Iterator[Batch | None]:
        """Give the batches as `batches` does, and None where no unit has come within this time: for training in
        lockstep, where the others must hear that there is nothing now."""
        return self._batches.as_they_come(source, wait_seconds)

    def say_idle(self) -> None:
        """Say to a hub that deals no data units that this node waits for some, and offers nothing meanwhile."""
        self._in_network(lambda: self._link.send(WorkRequest((), 1, True)) if self._link.live else None)

    def everyone_drained(self, master: int) -> bool:
        """See Exchange."""
        if not self._link.live or not self.units.drain():
            return True
        return 0 <= self.units.end_version <= self._offers.version

    def schedule(self) -> tuple[int, int]:
        """See Exchange."""
        timetable = self._peer.timetable
        settings = self.settings if timetable is None else timetable.at(self._offers.version)
        codecs = (settings.codec, settings.broadcast_codec)
        scheduled = (settings.every, settings.delay, *codecs)
        if scheduled != self._scheduled:
            coder = self._jobs.joined_coder
            if not self._in_codec(lambda: coder.adopt(*codecs)):
                return scheduled[:2]  # the codec thread has too much to do: at the next step
            self._scheduled = scheduled
            if self._events is not None:
                self._events.scheduled(*scheduled)
        return scheduled[:2]

    def pace(self) -> tuple[float, Sequence[float]]:
        """See Exchange."""
        own, rates = paces(self._peer.roster, self._peer.called)
        if self._events is not None:
            self._events.paced(own, rates)
        return own, rates

    def describe_data(self, digests: str) -> None:
        """See Describes."""
        self._progress.data = digests

    def describe_device(self, device: str) -> None:
        """See Describes."""
        self._progress.device = device

    def describe_first_step(self, digest: str) -> None:
        """See Describes."""
        self._progress.first_unit = self.units.first  # first: no report says the one without the other
        self._progress.first_step = digest

    def report(
        self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int, held_seconds: float = 0.0
    ) -> None:
        """See Exchange."""
        progress = self._progress
        progress.step, progress.samples, progress.loss = step, samples, loss
        progress.age_steps, progress.offers_refused = age_steps, offers_refused
        progress.held_seconds = held_seconds
        progress.first_unit = self.units.first
        if self.units.first < 0 and self.settings.units and not self._without_units:
            self._without_units = True
            text = (
                "%s takes no data units, and the run has --units %d: they neither count nor end what this loop does. "
                "`for batch in node.batches(batches_of)` takes them; leave --units out at the broker otherwise"
            )
            logger.warning(text, self.name, self.settings.units)
        if self._joining.checkpoint is not None:
            self._joining.checkpoint.stepped()
        if self._events is not None:
            self._events.stepped(step, samples, loss)

    # ------------------------------------------------------------------ Listener (network thread)

    def on_delivered(self, deliver: Deliver, frames: list[Buffer]) -> None:
        """See Listener."""
        announcement = deliver.announcement
        if not isinstance(announcement, Aggregate):
            taken = self._in_codec(lambda: self._jobs.arrive(deliver, frames), None)
        elif self._inbox.full:
            taken = self._in_codec(lambda: self._inbox.skip(deliver))
            self._link.carry_out(self._peer.resync())
        else:
            taken = self._in_codec(lambda: self._jobs.arrive(deliver, frames), announcement.fragments)
        if not taken:
            self.on_failed(ZmqTrainError(f"the codec thread of {self.name} cannot keep up"))

    def on_withdrawn(self, sequence: int, reason: str, text: str) -> None:
        """See Listener."""
        self._withdrawals += 1
        if reason == "non-finite":
            said = f"the broker refused a delta of {self.name}, which is not finite: {text}"
            self._in_codec(lambda: self._jobs.diverged(sequence, NonFiniteDelta(said)))
        if (coder := self._jobs.coder) is not None:
            self._in_codec(lambda: self._jobs.withdraw(coder, sequence, reason))
        self._inbox.withdraw(sequence)

    def on_quarantined(self, quarantine: Quarantine) -> None:
        """See Listener."""
        if quarantine.seconds <= 0:
            logger.info("%s is not quarantined any more: %s", self.name, quarantine.text)
            return
        text = (
            f"{self.name} is quarantined for {quarantine.seconds:.0f} s: the broker has refused too much of what it "
            f"sent ({quarantine.reason}: {quarantine.text})"
        )
        if self.settings.masters > 1:
            self.on_failed(ZmqTrainError(f"{text}. Start this node again: it takes the shared parameters"))
            return
        advice = "If that happens again, look at its learning rate, its memory, its card and its cable"
        logger.warning("%s. It begins again from the shared parameters, and trains on meanwhile. %s", text, advice)

    @property
    def quarantined_seconds(self) -> float:
        """For how long the hub takes no delta of this node; 0: it takes them."""
        return max(0.0, self._peer.quarantined_until - self.clock.monotonic())

    def on_founding(self) -> None:
        """See Listener."""
        if (founding := self._joining.answer(self.answers_later)) is None:
            self._waiting.notify()
        else:
            self._in_codec(lambda: self._encode_founding(*founding))

    def on_work(self, answer: WorkUnit) -> None:
        """See Listener."""
        self.units.dealt(answer)

    def on_stopped(self) -> None:
        """See Listener."""
        logger.info("%s ends with its run: an operator has ended it. What is computed is sent first", self.name)
        self.units.stop()

    def on_changed(self) -> None:
        """See Listener."""
        if self._peer.state is PeerState.CONNECTING:  # who only waits for a snapshot keeps what it was dealt
            self.units.reset()
            self._joining.wanted = False
        if self.units.drained:  # a hub that had lost this node has forgotten that it said so
            self._ask_for_units()
        self._waiting.notify()

    def on_failed(self, error: ZmqTrainError) -> None:
        """See Listener."""
        self._waiting.fail(error)
        self.units.reset()  # whoever waits for a unit is told
        self._waiting.notify()

    def _ask_for_units(self) -> None:
        if self._link.live and (request := self.units.request()) is not None:
            self._link.send(request)

    # ------------------------------------------------------------------ codec thread

    def _encode(self, offer: Offer, base: Version) -> None:
        self._jobs.encode(offer, base)

    def _encode_founding(self, leaves: Sequence[Any], moments: Sequence[Any]) -> None:
        founding = self._jobs.encode_founding(leaves, moments)
        self._in_network(lambda: self._link.send_founding(*founding))

    def _fetch_again(self, error: CodecError) -> None:
        """An aggregate came spoiled: it is lost, as one that never came."""
        logger.warning("%s fetches the run's parameters: an aggregate is not what was sent: %s", self.name, error)
        self._in_network(lambda: self._link.carry_out(self._peer.resync()))

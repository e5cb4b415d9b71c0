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
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from zmqtrain.errors import LocalProtocolError, NonFiniteDelta, ZmqTrainError
from zmqtrain.interfaces import Clock, Layout
from zmqtrain.protocol.effects import Deliver, PeerEffect
from zmqtrain.protocol.messages import Aggregate, Message, Quarantine, Schedule, WorkRequest, WorkUnit
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.runtime.checkpoints.every import Every, every_from_text
from zmqtrain.runtime.checkpoints.folder import CheckpointFolder
from zmqtrain.runtime.equation.delta import DeltaCoder, Encoded, encode_snapshot, mean_score
from zmqtrain.runtime.equation.digest import digest_of
from zmqtrain.runtime.equation.moments import encode_moments
from zmqtrain.runtime.events import NodeEvents
from zmqtrain.runtime.mailbox import Mailbox
from zmqtrain.runtime.node.inbox import Inbox
from zmqtrain.runtime.node.keeper import NodeKeeper, SavedNode, read_saved
from zmqtrain.runtime.node.offers import Offers
from zmqtrain.runtime.node.progress import Progress, paces
from zmqtrain.runtime.node.restarts import Restarts
from zmqtrain.runtime.node.units import UnitQueue
from zmqtrain.settings import RunSettings
from zmqtrain.types import Array, Buffer, ModelSpec, Offer, Update, Version, spec_to_plain

__all__ = ["UnitSource", "PeerLink", "PeerExchange"]

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch", covariant=True)

WITHDRAWN_KEPT = 1024
EXCHANGES_WARM = 4


class UnitSource(Protocol[Batch]):
    """Where a numbered data unit becomes batches: the same number gives the same batches on every node."""

    def batches(self, unit: int) -> Iterator[Batch]:
        """Give the batches of one unit."""


class PeerLink(Protocol):
    """A node's network thread, as far as what is decided here reaches it."""

    @property
    def live(self) -> bool:
        """Whether the node takes part in the run now."""

    def send(self, message: Message) -> None:
        """Send a control message."""

    def carry_out(self, effects: Sequence[PeerEffect]) -> None:
        """Do what the machine wishes."""

    def send_founding(self, frames: Sequence[Buffer], moments: Sequence[Buffer] = (), digest: str = "") -> None:
        """Announce the parameters that the hub asked for, unless that hub is lost."""


class PeerExchange(ABC):
    """An `Exchange` over a `Peer`, and the `Listener` of its link: all but the threads, the time and the waiting.

    condition: makes what a thread waits on.  events: who is told what happens here, None for nobody.
    """

    _link: PeerLink

    def __init__(
        self, name: str, peer: Peer, condition: Callable[[], threading.Condition], events: NodeEvents | None
    ) -> None:
        self.name, self._peer, self._events = name, peer, events
        self._changed = condition()
        self._units = UnitQueue(
            peer.peer, lambda: self._in_network(self._ask_for_units), lambda: self._link.live, condition()
        )
        self._progress = Progress()
        self._failure: ZmqTrainError | None = None
        self._coder: DeltaCoder | None = None
        self._resuming: SavedNode | None = None
        self._keeper: NodeKeeper | None = None
        self._sent: dict[int, tuple[Offer, Version, float]] = {}  # by sequence, of what is on its way: as published
        self._restarts = Restarts()
        self._resets = 0  # as often the training thread has gone on from the shared parameters
        self._founding: tuple[Sequence[Any], Sequence[Any]] = ((), ())
        self._asked = False
        self.answers_later = False
        """Whether the hub that asks for parameters to found the run is answered by `lend`, not at once."""
        # of the training thread
        self._offers = Offers()
        # of the other two
        self._inbox = Inbox(self._notify)
        self._withdrawn: Mailbox[int] = Mailbox(WITHDRAWN_KEPT)
        self._withdrawals = 0
        self._encode_seconds = 0.0
        self._encoded, self._warm_seconds = 0, 0.0
        self._scheduled = (0, 0)

    # ------------------------------------------------------------------ threads and time: of who runs it

    @property
    @abstractmethod
    def clock(self) -> Clock:
        """See Exchange."""

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
        """Ask to join, without waiting: the first third of `join`."""
        self._coder, self._founding = self._make_coder(model), (leaves, moments)
        if self._resuming is not None:
            assert self._keeper is not None
            self._resuming.check_model(model, self._keeper.folder.folder)
            self._restore_coder(self._resuming)
        if self._events is not None:
            self._events.joining(self._peer.peer, self._peer.run, self.settings, self.founded)
        self._in_network(lambda: self._link.carry_out(self._peer.join(model, self.clock.monotonic(), score)))

    def has_joined(self) -> bool:
        """Return whether the hub's answer is here; of a node that goes on from a checkpoint, whether it may."""
        if self._resuming is not None:
            return self._link.live or self.settings.mode != "strict"
        apart = self._peer.state is PeerState.APART
        return apart or (self._link.live and (len(self._inbox) > 0 or self._peer.confirmed))

    def end_join(self) -> Update | None:
        """Return what `join` does; once `has_joined`."""
        self._founding = ((), ())
        if self._resuming is not None:
            self._go_on_from(self._resuming)
            return None
        if self._peer.state is PeerState.APART:
            return None
        first = self._inbox.peek()
        if first is None or first.anchor is None:  # the founder holds version 0; an aggregate that is here is the next
            self._offers.version = 0
            return None
        return self.poll()

    # ------------------------------------------------------------------ going on from a checkpoint

    @property
    def checkpoint(self) -> NodeKeeper | None:
        """See Keeps."""
        return self._keeper

    def _keep_in(self, folder: CheckpointFolder, every: str, saved: SavedNode | None) -> None:
        """Keep checkpoints in this folder, and go on from this one: before anything is said to the hub."""

        def how_often() -> Every:
            return every_from_text(every, self.settings.mode == "strict")

        self._resuming = saved
        self._keeper = NodeKeeper(
            folder, how_often, lambda: self._offers.version, self._facts, self._coded, self._in_codec
        )
        if saved is not None:
            in_flight = [sequence for sequence, *_ in saved.facts["coder"]["unacked"]]
            self._peer.term = int(saved.facts["node"]["term"])
            for address in saved.addresses:
                self._peer.know(address)
            self._peer.resume(saved.run, saved.version, saved.settings, saved.model, in_flight, saved.versions)

    def _facts(self) -> dict[str, Any]:
        """Return what this exchange has to know, in the training thread."""
        peer = self._peer
        self._hear_withdrawn()
        timetable = [] if peer.timetable is None else [list(one) for one in peer.timetable.since(self._offers.version)]
        node = {
            "peer": peer.peer,
            "name": self.name,
            "run": peer.run,
            "version": self._offers.version,
            "incarnation": peer.incarnation,
            "term": peer.term,
            "addresses": list(peer.addresses),
            "resets": self._resets,
            "settings": self.settings.to_dict(),
            "model": spec_to_plain(self._joined_coder.model),
            "schedules": timetable,
        }
        return {"node": node, "offers": self._offers.to_plain(), "units": self._units.to_plain()}

    def _coded(self, facts: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]] | None:
        """Return what the codec has to know: what is on its way by these facts, as it was sent, and what it keeps.

        In the codec thread, which may not have heard yet what of it has landed and is applied. None: it has dropped
        what is pending, and the training thread had not yet: what is on its way would count as withdrawn, and land.
        """
        coder = self._joined_coder
        if coder.restarts != facts["node"]["resets"]:
            return None
        self._sent = {sequence: sent for sequence, sent in self._sent.items() if sequence in coder.unacked}
        in_flight = sorted(sequence for sequence, _ in facts["offers"]["on_their_way"] if sequence in self._sent)
        facts, arrays = coder.kept(in_flight)
        sent = []
        for sequence in in_flight:
            offer, base, score = self._sent[sequence]
            sent.append([sequence, offer.samples, offer.steps, offer.dense, base, score])
        return {"coder": facts, "sent": sent}, arrays

    def _restore_coder(self, saved: SavedNode) -> None:
        coder = self._joined_coder
        coder.restore(saved.facts["coder"], saved.arrays)
        self._sent = {}
        for sequence, samples, steps, dense, base, score in saved.facts["sent"]:
            if sequence in coder.unacked:
                offer = Offer(sequence, coder.unacked[sequence].fragment, (), samples, steps, dense=dense)
                self._sent[sequence] = (offer, base, score)

    def _go_on_from(self, saved: SavedNode) -> None:
        """Be where the checkpoint was, that of the version to which all have gone back, if they have."""
        assert self._keeper is not None
        folder, rewound = self._keeper.folder, self._peer.rewound
        if rewound >= 0 and rewound != saved.version:
            earlier = read_saved(folder, rewound)
            assert earlier is not None, "a version that was named is in the folder"
            saved = earlier
        self._resuming = None
        self._offers.restore(saved.facts["offers"])
        self._units.restore(saved.facts["units"], exactly=rewound >= 0)
        for schedule in saved.facts["node"]["schedules"]:
            if self._peer.timetable is not None and not self._link.live:
                from_version, every, delay = schedule
                self._peer.timetable.add(Schedule(every, delay, from_version))
        unacked = {sequence for sequence, *_ in saved.facts["coder"]["unacked"]}
        for sequence in set(self._offers.in_flight()) - unacked:
            self._offers.withdrawn(sequence)  # it was just being withdrawn
        if rewound >= 0:
            folder.forget_after(rewound)
            while self._withdrawn.get_nowait() is not None:  # as the hub was before it went back
                pass
            self._in_codec(lambda: self._send_again(saved), None)
        self._keeper.saved = saved
        where = "where all have gone back to" if rewound >= 0 else f"with {len(unacked)} deltas on their way"
        logger.info("%s goes on from version %d of %s, %s", self.name, saved.version, saved.run, where)

    def _send_again(self, saved: SavedNode) -> None:
        """Publish what was on its way, to the same bits: the hub has gone back to before it came (codec thread)."""
        self._restore_coder(saved)
        for sequence, (offer, base, score) in sorted(self._sent.items()):
            self._publish(offer, base, self._joined_coder.unacked[sequence], score)

    @property
    def founded(self) -> bool:
        """See Exchange."""
        return self._peer.founded

    def compare(self, score: float) -> None:
        """See Exchange."""
        self._in_network(lambda: self._link.carry_out(self._peer.compare(score)))

    @property
    def wanted(self) -> bool:
        """See Exchange."""
        return self._asked

    def lend(self, leaves: Sequence[Any], moments: Sequence[Any] = ()) -> None:
        """See Exchange."""
        self._asked = False
        self._in_codec(lambda: self._encode_founding(leaves, moments))

    @property
    def layout(self) -> Layout:
        """See Exchange. Raises LocalProtocolError before `join`."""
        if self._coder is None:
            raise LocalProtocolError(f"{self.name} has not joined the run yet: call join first")
        return self._coder.layout

    @property
    def unreachable(self) -> tuple[int, ...]:
        """See Exchange."""
        return () if self._link.live else (0,)

    # ------------------------------------------------------------------ exchange (training thread)

    def next_fragments(self) -> tuple[int, ...]:
        """See Exchange; decided by `Offers.next_fragment`."""
        self._hear_withdrawn()
        timetable = self._peer.timetable
        if timetable is None or self._restarts.begun or self.quarantined_seconds > 0:
            return ()
        fragment = self._offers.next_fragment(timetable.at(self._offers.version), self._link.live)
        return () if fragment is None else (fragment,)

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
        """See Exchange. Raises NonFiniteDelta or JoinRefused when the node cannot go on."""
        self._raise_failure()
        if not self.next_fragments():
            return None
        self._offers.skip_to(self._peer.heard + 1)  # of a former life, too
        offer = self._offers.draft(fragment, segments, samples=samples, steps=steps, scores=scores, dense=dense)
        base = self._offers.version
        taken = [offer]  # from there: the segments need not stay until the next job
        if not self._in_codec(lambda: self._encode(taken.pop(), base), (fragment,)):
            return None
        self._raise_failure()
        self._offers.made(offer, self.layout.fragments)
        if self._events is not None:
            self._events.offered(offer.sequence, fragment, base, dense)
        return offer.sequence

    def in_flight(self) -> tuple[int, ...]:
        """See Exchange."""
        self._hear_withdrawn()
        return self._offers.in_flight()

    def peek(self) -> Update | None:
        """See Exchange."""
        self._raise_failure()
        return self._inbox.peek()

    def poll(self) -> Update | None:
        """See Exchange."""
        self._raise_failure()
        update = self._inbox.take()
        if update is not None:
            self._offers.took(update)
            self._restarts.landed(len(update.landed))
            if update.reset:
                self._resets += 1
                self._restarts.done(self._offers.next_sequence)
            self._decode_on()
            if self._events is not None:
                self._events.applied(update)
        return update

    def batches(self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]]) -> Iterator[Batch]:
        """Give the batches of the data units that the broker deals to this node, until the run is over.

        source: a program, or any function from a unit's number to its batches.  While no broker deals any, the node
        draws units of its own, so that training never stops.
        """
        while (unit := self._units.take(self._raise_failure)) is not None:
            yield from self._batches_of(source, unit)

    def batches_as_they_come(
        self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]], wait_seconds: float
    ) -> Iterator[Batch | None]:
        """Give the batches as `batches` does, and None where no unit has come within this time: for training in
        lockstep, where the others must hear that there is nothing now."""
        while (unit := self._units.take_soon(self._raise_failure, wait_seconds)) is not None or not self.data_ended:
            if unit is None:
                yield None
            else:
                yield from self._batches_of(source, unit)

    def _batches_of(self, source: UnitSource[Batch] | Callable[[int], Iterator[Batch]], unit: int) -> Iterator[Batch]:
        if self._events is not None:
            self._events.began(unit)
        batches_of: Callable[[int], Iterator[Batch]] = source.batches if hasattr(source, "batches") else source
        passed = self._units.begin(unit)
        for number, batch in enumerate(batches_of(unit)):
            if number >= passed:  # those before it were trained on before the checkpoint
                self._units.given()
                yield batch
        self._units.done(unit)

    @property
    def data_ended(self) -> bool:
        """Whether the run has no more data units."""
        return self._units.finished

    def end_data(self) -> None:
        """Take note that the run has no more data units, where this hub does not deal any."""
        self._units.finish()

    def when_idle(self, told: Callable[[], None]) -> None:
        """Call this in the training thread, now and then, while that waits for data units."""
        self._units.idle = told

    def say_idle(self) -> None:
        """Say to a hub that deals no data units that this node waits for some, and offers nothing meanwhile."""
        self._in_network(lambda: self._link.send(WorkRequest((), 1, True)) if self._link.live else None)

    def everyone_drained(self, master: int) -> bool:
        """See Exchange."""
        if not self._link.live or not self._units.drain():
            return True
        return 0 <= self._units.end_version <= self._offers.version

    def schedule(self) -> tuple[int, int]:
        """See Exchange."""
        timetable = self._peer.timetable
        settings = self.settings if timetable is None else timetable.at(self._offers.version)
        scheduled = (settings.every, settings.delay)
        if scheduled != self._scheduled:
            self._scheduled = scheduled
            if self._events is not None:
                self._events.scheduled(*scheduled)
        return scheduled

    def pace(self) -> tuple[float, Sequence[float]]:
        """See Exchange."""
        own, rates = paces(self._peer.roster, self._peer.peer)
        if self._events is not None:
            self._events.paced(own, rates)
        return own, rates

    def report(self, *, step: int, samples: int, loss: Any, age_steps: float, offers_refused: int) -> None:
        """See Exchange."""
        progress = self._progress
        progress.step, progress.samples, progress.loss = step, samples, loss
        progress.age_steps, progress.offers_refused = age_steps, offers_refused
        if self._events is not None:
            self._events.stepped(step, samples, loss)

    @property
    def _exchange_seconds(self) -> float:
        """The CPU seconds that the codec takes for one exchange; 0 until the first are over, that compile code."""
        seconds = self._encode_seconds + self._inbox.decode_seconds - self._warm_seconds
        exchanges = self._encoded - EXCHANGES_WARM
        return seconds / exchanges if exchanges > 0 else 0.0

    def _hear_withdrawn(self) -> None:
        while (withdrawn := self._withdrawn.get_nowait()) is not None:
            self._offers.withdrawn(withdrawn)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], timeout_seconds: float | None) -> bool:
        with self._changed:
            came = self._changed.wait_for(lambda: condition() or self._failure is not None, timeout_seconds)
        self._raise_failure()
        return came

    # ------------------------------------------------------------------ Listener (network thread)

    def on_delivered(self, deliver: Deliver, frames: list[Buffer]) -> None:
        """See Listener."""
        announcement = deliver.announcement
        if not isinstance(announcement, Aggregate):
            taken = self._in_codec(lambda: self._arrive(deliver, frames), None)
        elif self._inbox.full:
            taken = self._in_codec(lambda: self._inbox.skip(deliver))
            self._link.carry_out(self._peer.resync())
        else:
            taken = self._in_codec(lambda: self._arrive(deliver, frames), announcement.fragments)
        if not taken:
            self.on_failed(ZmqTrainError(f"the codec thread of {self.name} cannot keep up"))

    def on_withdrawn(self, sequence: int, reason: str, text: str) -> None:
        """See Listener."""
        self._withdrawals += 1
        if reason == "non-finite":
            said = f"the broker refused a delta of {self.name}, which is not finite: {text}"
            self._in_codec(lambda: self._diverged(sequence, NonFiniteDelta(said)))
        if self._coder is not None:
            coder = self._coder
            self._in_codec(lambda: self._withdraw(coder, sequence, reason))
        self._withdrawn.put_nowait(sequence)

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
        if self._peer.state is PeerState.APART or self.answers_later:  # what it holds may change with every step
            self._asked = True
            self._notify()
        else:
            leaves, moments = self._founding
            self._in_codec(lambda: self._encode_founding(leaves, moments))

    def on_work(self, answer: WorkUnit) -> None:
        """See Listener."""
        self._units.dealt(answer)

    def on_changed(self) -> None:
        """See Listener."""
        if self._peer.state is PeerState.CONNECTING:  # who only waits for a snapshot keeps what it was dealt
            self._units.reset()
            self._asked = False
        if self._units.drained:  # a hub that had lost this node has forgotten that it said so
            self._ask_for_units()
        self._notify()

    def on_failed(self, error: ZmqTrainError) -> None:
        """See Listener."""
        self._failure = self._failure or error
        self._units.reset()  # whoever waits for a unit is told
        self._notify()

    def _ask_for_units(self) -> None:
        if self._link.live and (request := self._units.request()) is not None:
            self._link.send(request)

    # ------------------------------------------------------------------ codec thread

    @property
    def _joined_coder(self) -> DeltaCoder:
        assert self._coder is not None, "nothing is coded before join"
        return self._coder

    def _encode(self, offer: Offer, base: Version) -> None:
        began = time.thread_time()
        try:
            encoded = self._joined_coder.encode(offer)
        except NonFiniteDelta as error:
            said = f"{self.name}: {error}: training has diverged here"
            self._diverged(offer.sequence, NonFiniteDelta(said, error.leaf))
            self._withdraw(self._joined_coder, offer.sequence, "non-finite")
            self._withdrawn.put_nowait(offer.sequence)
            return
        self._encode_seconds += time.thread_time() - began
        self._encoded += 1
        if self._encoded == EXCHANGES_WARM:
            self._warm_seconds = self._encode_seconds + self._inbox.decode_seconds
        if self._events is not None:
            self._events.encoded(offer.sequence)
        if why := self._joined_coder.judge(offer, encoded):
            logger.warning("%s: delta %d may be refused: %s", self.name, offer.sequence, why)
        score = mean_score(offer)
        offer = replace(offer, segments=(), scores=())  # their memory is the device's, and free now
        if self._keeper is not None:
            self._sent = {s: sent for s, sent in self._sent.items() if s in self._joined_coder.unacked}
            self._sent[offer.sequence] = (offer, base, score)
        self._publish(offer, base, encoded, score)

    def _diverged(self, sequence: int, error: NonFiniteDelta) -> None:
        """Begin again from the shared parameters, or raise the error that ends this node."""
        if self._restarts.is_known(sequence):
            return
        if not self._restarts.begin(self.settings):
            raise error
        logger.error("%s. It begins again from the shared parameters; what it had not shared is dropped", error)
        self._inbox.restart(self._joined_coder, self._offers.version)

    def _withdraw(self, coder: DeltaCoder, sequence: int, reason: str) -> None:
        coder.withdraw(sequence)
        if self._events is not None:
            self._events.withdrawn(sequence, reason)

    def _encode_founding(self, leaves: Sequence[Any], moments: Sequence[Any]) -> None:
        layout = self._joined_coder.layout
        try:
            frames = encode_snapshot(layout, layout.split(leaves))
            state = encode_moments(moments)
        except NonFiniteDelta as error:
            text = f"{self.name}: the initial parameters are not finite ({error}); check how they are initialised"
            raise NonFiniteDelta(text, error.leaf) from None
        digest = digest_of([*frames, *state])
        self._in_network(lambda: self._link.send_founding(frames, state, digest))

    def _arrive(self, deliver: Deliver, frames: list[Buffer]) -> None:
        self._inbox.arrive(self._joined_coder, deliver, frames)

    def _decode(self) -> None:
        self._inbox.decode(self._joined_coder)

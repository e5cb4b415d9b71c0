"""A node's offers: which fragment is next and what is in flight, when a diverged node begins again, and its codec.

`Offers` belongs to the training thread, `NodeCodec` to the codec thread; a real, a simulated and a replayed node keep
the same books.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from zmqtrain.averaging.coder import DeltaCoder, Encoded, encode_snapshot, mean_score
from zmqtrain.averaging.snapshot import digest_of, encode_optimizer_state
from zmqtrain.core.errors import CodecError, NonFiniteDelta, ZmqTrainError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Buffer, Counts, Offer, Update, Version
from zmqtrain.monitor.recorder import NodeRecorder
from zmqtrain.node.inbox import Inbox
from zmqtrain.protocol.effects import Deliver
from zmqtrain.session.environment import clock

if TYPE_CHECKING:
    from zmqtrain.codecs.payload_jax import DeviceCoder

logger = logging.getLogger(__name__)

MOST_RESTARTS, HEALTHY_OFFERS = 3, 8
EXCHANGES_WARM = 4
ADVICE = (
    ", and nothing of it was sent. Start this node again (it takes the shared parameters); if it happens again, use a "
    "smaller learning rate, and let its optimizer begin afresh where `take_adoption` says so"
)

CodecOn = Literal["auto", "host", "device"]
"""Where deltas are encoded: on the processor, on the device that trains, or there unless it is a processor (auto)."""


class Offers:
    """The offers of one node, and the version that is applied there."""

    def __init__(self) -> None:
        self.version: Version = -1
        """The last version that was applied; -1 until the node has the run's parameters."""
        self.next_sequence = 0
        """The number of the next offer."""
        self._applied: list[int] = []  # since the last offer
        self._in_flight: dict[int, int] = {}  # by sequence: the fragment
        self._offers_since: dict[int, int] = {}  # by fragment: the offers since its last one

    def next_fragments(self, settings: RunSettings, fragments: int, live: bool) -> tuple[int, ...]:
        """Return the fragments that the next exchange carries, none if there should be no exchange now.

        settings: as they hold now.  fragments: of the model.  live: whether the node takes part in the run now.
        Where an exchange carries all fragments, these are those of which fewer are in flight than may be; all nodes
        offer them in the same order.
        """
        if not live or self.version < 0:  # a run that has just begun: its parameters are in flight
            return ()
        if not settings.carries_all:
            fragment = self._next_in_turn(settings)
            return () if fragment is None else (fragment,)
        in_flight = Counter(self._in_flight.values())
        return tuple(number for number in range(fragments) if in_flight[number] < settings.offers_in_flight)

    def _next_in_turn(self, settings: RunSettings) -> int | None:
        """Return the fragment whose turn it is; None if as many are in flight as may be.

        All nodes that are up to date offer the same fragment, that of their version and those after it that are not
        in flight, so that it is aggregated once. A fragment that has waited for 2n own offers goes first: no pattern
        of versions can starve it.
        """
        if len(self._in_flight) >= settings.offers_in_flight:
            return None
        starved = [f for f, since in self._offers_since.items() if since >= 2 * settings.fragments]
        if starved:
            return max(starved, key=lambda fragment: self._offers_since[fragment])
        following = [(self.version + further) % settings.fragments for further in range(settings.fragments)]
        under_way = set(self._in_flight.values())
        free = next((fragment for fragment in following if fragment not in under_way), None)
        return (self.version + len(self._in_flight)) % settings.fragments if free is None else free

    def draft(self, fragment: int, segments: Sequence[Array], counts: Counts, *, dense: bool = False) -> Offer:
        """Return the next offer; the arguments are those of `Exchange.offer`. It counts once it is `made`."""
        return Offer(self.next_sequence, fragment, segments, *counts, tuple(self._applied), dense)

    def made(self, offer: Offer, fragments: int) -> None:
        """Record that an offer was taken. fragments: of the model."""
        self.next_sequence = offer.sequence + 1
        self._applied.clear()
        self._in_flight[offer.sequence] = offer.fragment
        for other in range(fragments):
            self._offers_since[other] = 0 if other == offer.fragment else self._offers_since.get(other, 0) + 1

    def took(self, update: Update) -> None:
        """Record that an update is applied: the offers that landed in it are no longer in flight."""
        self.version = update.version
        self._applied += update.landed
        self.withdrawn(update.landed)

    def withdrawn(self, sequences: Iterable[int]) -> None:
        """Record that these offers are not in flight; one that is unknown changes nothing."""
        for sequence in sequences:
            self._in_flight.pop(sequence, None)

    def skip_to(self, sequence: int) -> None:
        """Use no number below this one any more: the hub has heard those before, perhaps of a former process."""
        self.next_sequence = max(self.next_sequence, sequence)

    def in_flight(self) -> tuple[int, ...]:
        """Return the sequences of the offers that have neither landed nor been withdrawn, rising."""
        return tuple(sorted(self._in_flight))

    def to_plain(self) -> dict[str, Any]:
        """Return the book as JSON can hold it."""
        return {
            "version": self.version,
            "sequence": self.next_sequence,
            "applied": list(self._applied),
            "on_their_way": [list(one) for one in self._in_flight.items()],
            "since": [list(one) for one in self._offers_since.items()],
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """Take over what `to_plain` wrote."""
        self.version, self.next_sequence = int(plain["version"]), int(plain["sequence"])
        self._applied = [int(sequence) for sequence in plain["applied"]]
        self._in_flight = {int(sequence): int(fragment) for sequence, fragment in plain["on_their_way"]}
        self._offers_since = {int(fragment): int(since) for fragment, since in plain["since"]}


# ---------------------------------------------------------------------- divergence


class Restarts:
    """Decides whether a node with diverged training restarts from the shared parameters, or ends.

    A node that diverges `MOST_RESTARTS` times with fewer than `HEALTHY_OFFERS` applied in between ends with an error.
    It never begins again in strict mode, whose bits must not depend on a failure, nor with several brokers, each of
    which has a part of the parameters: there a person starts the node again.

    begun: from the divergence until the training thread has begun again.  resets: how often it has.
    """

    def __init__(self) -> None:
        self.begun = False
        self.resets = 0
        self._count = self._landed = self._fresh = 0

    def is_known(self, sequence: int) -> bool:
        """Return whether an offer that is not finite was made before the node began, or begins, again."""
        return self.begun or sequence < self._fresh

    def begin(self, settings: RunSettings) -> bool:
        """Record that training has diverged; return whether the node begins again (else it ends)."""
        if settings.mode == "strict" or settings.shards > 1:
            return False
        self._count, self._landed = self._count + 1, 0
        self.begun = self._count < MOST_RESTARTS
        return self.begun

    def done(self, sequence: int) -> None:
        """Record that the training thread goes on from the shared parameters. sequence: of its next offer."""
        self.begun, self._fresh = False, sequence
        self.resets += 1

    def landed(self, offers: int) -> None:
        """Record that the hub has applied so many offers of this node."""
        self._landed += offers
        if self._landed >= HEALTHY_OFFERS:
            self._count = 0


# ---------------------------------------------------------------------- the codec thread


class CodecNode(Protocol):
    """The node, as its codec uses it."""

    name: str

    @property
    def settings(self) -> RunSettings:
        """The settings of the run."""

    def publish(self, offer: Offer, base: Version, encoded: Encoded, score: float) -> None:
        """Give an encoded offer, based on this version, to the link (codec thread)."""

    def on_decoded(self, spoiled: CodecError | None) -> None:
        """Updates may have been decoded. spoiled: an aggregate came with other bytes than were sent."""


class NodeCodec:
    """Encodes what one node offers and decodes what arrives, in its codec thread, one job after the other.

    An offer is encoded and published once. With `keeps_sent` what was published is kept while it is in flight, for
    checkpoints. codec_on: see `CodecOn`.
    """

    def __init__(
        self,
        node: CodecNode,
        offers: Offers,
        inbox: Inbox,
        restarts: Restarts,
        codec_on: CodecOn = "host",
        events: NodeRecorder | None = None,
    ) -> None:
        self.coder: DeltaCoder | None = None
        """Of the model with which the node joins; None before that."""
        self.keeps_sent = False
        self.encode_seconds = 0.0
        """CPU so far."""
        self._node, self._offers, self._inbox, self._restarts, self._events = node, offers, inbox, restarts, events
        self._codec_on, self._settled = codec_on, False
        self._sent: dict[int, tuple[Offer, Version, float]] = {}  # by sequence, of what is in flight: as published
        self._encoded, self._warm_seconds = 0, 0.0

    @property
    def joined_coder(self) -> DeltaCoder:
        """The coder, at a node that joins or has joined."""
        assert self.coder is not None, "nothing is coded before join"
        return self.coder

    @property
    def exchange_seconds(self) -> float:
        """The CPU seconds that the codec takes for one exchange; 0 during the first ones, which compile."""
        seconds = self.encode_seconds + self._inbox.decode_seconds - self._warm_seconds
        exchanges = self._encoded - EXCHANGES_WARM
        return seconds / exchanges if exchanges > 0 else 0.0

    def device_coder(self) -> DeviceCoder | None:
        """Return the coder of jax's device if parameters live there, as far as can be known before the first offer."""
        jax = sys.modules.get("jax")  # without it no parameters are on a device, and a node need not import it
        if self._codec_on == "device" or (self._codec_on == "auto" and jax and jax.default_backend() != "cpu"):
            from zmqtrain.codecs.payload_jax import DeviceCoder

            return DeviceCoder()
        return None

    def _settle_device(self, segments: Sequence[Array]) -> None:
        """Decide for good, by the first offer, where deltas are encoded; the bytes are the same."""
        if self._settled:
            return
        self._settled, coder = True, self.joined_coder
        if self._codec_on == "auto":
            coder.device = (coder.device or self.device_coder()) if on_accelerator(segments) else None
        elif coder.device is not None and len(_devices_of(segments)) > 1:
            text = "%s cannot compress on its device: its parameters lie on several; it is done on the processor"
            logger.warning(text, self._node.name)
            coder.device = None

    # ------------------------------------------------------------------ out (codec thread)

    def encode(self, offer: Offer, base: Version) -> None:
        """Encode an offer and publish it. Raises NonFiniteDelta if this node cannot begin again."""
        began, coder = clock.thread_time(), self.joined_coder
        self._settle_device(offer.segments)
        try:
            encoded = coder.encode(offer)
        except NonFiniteDelta as error:
            said = f"{self._node.name}: {error}: training has diverged here"
            self.diverged(offer.sequence, NonFiniteDelta(said, error.leaf), ADVICE)
            self.withdraw(coder, offer.sequence, "non-finite")
            self._inbox.withdraw(offer.sequence)
            return
        self.encode_seconds += clock.thread_time() - began
        self._encoded += 1
        if self._encoded == EXCHANGES_WARM:
            self._warm_seconds = self.encode_seconds + self._inbox.decode_seconds
        if self._events is not None:
            self._events.encoded(offer.sequence)
        if why := coder.judge(offer, encoded):
            logger.warning("%s: delta %d may be refused: %s", self._node.name, offer.sequence, why)
        score = mean_score(offer)
        offer = replace(offer, segments=(), scores=())  # their memory is the device's, and free now
        if self.keeps_sent:
            self._forget_landed()
            self._sent[offer.sequence] = (offer, base, score)
        self._node.publish(offer, base, encoded, score)

    def diverged(self, sequence: int, error: NonFiniteDelta, advice: str = "") -> None:
        """Begin again from the shared parameters, or raise this error with the advice: it ends this node."""
        if self._restarts.is_known(sequence):
            return
        if not self._restarts.begin(self._node.settings):
            raise NonFiniteDelta(f"{error}{advice}", error.leaf) from None
        logger.error("%s. It begins again from the shared parameters; what it had not shared is dropped", error)
        self._node.on_decoded(self._inbox.restart(self.joined_coder, self._offers.version))

    def withdraw(self, coder: DeltaCoder, sequence: int, reason: str) -> None:
        """Record that an offer will not be applied. coder: that encoded it."""
        coder.withdraw(sequence)
        if self._events is not None:
            self._events.withdrawn(sequence, reason)

    def encode_initial(
        self, leaves: Sequence[Any], optimizer_state: Sequence[Any]
    ) -> tuple[Sequence[Buffer], Sequence[Buffer], str]:
        """Return the frames of the run's first parameters and of the optimizer's state, and their digest.

        Raises NonFiniteDelta.
        """
        coder = self.joined_coder
        try:
            frames = encode_snapshot(coder.layout, coder.layout.split(leaves))
            state = encode_optimizer_state(optimizer_state)
        except NonFiniteDelta as error:
            pairs = zip(coder.model, leaves, strict=True)
            leaf = next((spec.path for spec, leaf in pairs if not np.isfinite(leaf).all()), error.leaf)
            what = f"the leaf {leaf} holds" if leaf else "the optimizer's state holds"
            text = f"{self._node.name}: {what} NaN or infinity at the beginning: check how parameters are initialised"
            raise NonFiniteDelta(text, leaf) from None
        return frames, state, digest_of([*frames, *state])

    def warm_up(self, fragment: int) -> bool:
        """Compile the device's coder for one fragment; return whether there is a next one."""
        coder = self.joined_coder
        if fragment < coder.layout.fragments:
            coder.warm_up(fragment)
        return fragment + 1 < coder.layout.fragments

    # ------------------------------------------------------------------ in (codec thread)

    def arrive(self, deliver: Deliver, frames: Sequence[Buffer]) -> None:
        """Take in an aggregate or a snapshot, and decode as far as there is room. Raises CodecError."""
        self._node.on_decoded(self._inbox.arrive(self.joined_coder, deliver, frames))

    def decode(self) -> None:
        """Decode what has arrived, as far as there is room. Raises CodecError."""
        self._node.on_decoded(self._inbox.decode(self.joined_coder))

    # ------------------------------------------------------------------ checkpoints (codec thread)

    def kept(self, facts: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]] | None:
        """Return what a checkpoint holds of the codec: the offers in flight by these facts, as published, and more.

        None: the codec has dropped what is pending and the training thread had not yet: a checkpoint would count
        offers as withdrawn that the hub may still apply.
        """
        coder = self.joined_coder
        if coder.restarts != facts["node"]["resets"]:
            return None
        self._forget_landed()
        in_flight = sorted(sequence for sequence, _ in facts["offers"]["on_their_way"] if sequence in self._sent)
        coded, arrays = coder.kept(in_flight)
        sent = []
        for sequence in in_flight:
            offer, base, score = self._sent[sequence]
            sent.append([sequence, offer.samples, offer.steps, offer.dense, base, score])
        return {"coder": coded, "sent": sent}, arrays

    def restore(self, facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Take over what `kept` gave: while the node joins, before other jobs, or in their turn."""
        coder = self.joined_coder
        coder.restore(facts["coder"], arrays)
        self._sent = {}
        for sequence, samples, steps, dense, base, score in facts["sent"]:
            if sequence in coder.unacked:
                offer = Offer(sequence, coder.unacked[sequence].fragment, (), samples, steps, dense=dense)
                self._sent[sequence] = (offer, base, score)

    def send_again(self, facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Publish what was in flight, to the same bits: the hub has gone back to before it arrived."""
        self.restore(facts, arrays)
        for sequence, (offer, base, score) in sorted(self._sent.items()):
            self._node.publish(offer, base, self.joined_coder.unacked[sequence], score)

    def _forget_landed(self) -> None:
        unacked = self.joined_coder.unacked
        self._sent = {sequence: sent for sequence, sent in self._sent.items() if sequence in unacked}


def codec_failure(name: str, error: BaseException) -> ZmqTrainError:
    """Return what is raised in the training thread when a job of the codec thread has failed; it says what to do."""
    if isinstance(error, CodecError) and not isinstance(error, NonFiniteDelta):
        return ZmqTrainError(f"{name} cannot read what the broker sent: {error}. Start this node again")
    if isinstance(error, ZmqTrainError):
        return error
    logger.error("the codec thread of %s failed", name, exc_info=error)
    return ZmqTrainError(f"the codec thread of {name} failed: {error!r}")


def on_accelerator(segments: Sequence[Array]) -> bool:
    """Return whether these are jax arrays, all on one device that is not a processor."""
    devices = _devices_of(segments)
    everything = all(hasattr(segment, "devices") for segment in segments)
    return everything and len(devices) == 1 and devices.pop().platform != "cpu"


def _devices_of(segments: Sequence[Array]) -> set[Any]:
    return {device for segment in segments if hasattr(segment, "devices") for device in segment.devices()}

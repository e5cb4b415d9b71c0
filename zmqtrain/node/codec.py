"""The codec thread of one node: it encodes offers, and decodes aggregates and snapshots in version order.

What has arrived is compressed as long as possible. The codec thread fills the inbox and decodes; the training thread
takes updates, and the sequences of its own offers that will not be applied. Every stage is bounded: a node that is too
far behind takes one snapshot instead of many aggregates, and loses nothing. So does a node that received a corrupted
aggregate: it drops later ones until the snapshot arrives.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from zmqtrain.averaging.coder import DeltaCoder, Encoded, encode_snapshot, mean_score
from zmqtrain.averaging.snapshot import digest_of, encode_optimizer_state
from zmqtrain.core.errors import CodecError, NonFiniteDelta, ZmqTrainError
from zmqtrain.core.interfaces import CodedSegments, PinnedSegments
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Buffer, Offer, Update, Version
from zmqtrain.monitor.recorder import NodeRecorder
from zmqtrain.node.offers import Offers, Restarts
from zmqtrain.protocol.effects import Deliver
from zmqtrain.protocol.messages import Aggregate, Snapshot, replace_fields
from zmqtrain.session.environment import clock
from zmqtrain.session.hub_session import MOST_SPOILED

if TYPE_CHECKING:
    from zmqtrain.codecs.payload_jax import DeviceCoder

logger = logging.getLogger(__name__)

DECODED, MOST_DECODED = 2, 16
"""How many updates wait decoded for the training thread, and how many if all of them are small."""
DECODED_BYTES, LARGE_UPDATE_BYTES = 1 << 28, 1 << 26
"""The bytes that several decoded updates hold at most. An update larger than the second waits alone: the next one is
decoded when it is taken."""
KEPT = 32
WITHDRAWN_KEPT = 1024
EXCHANGES_WARM = 4
ADVICE = (
    ", and nothing of it was sent. Start this node again (it takes the shared parameters); if it happens again, use a "
    "smaller learning rate, and let its optimizer begin afresh where `take_adoption` says so"
)

CodecOn = Literal["auto", "host", "device"]
"""Where deltas are encoded: on the processor, on the device that trains, or there unless it is a processor (auto)."""


class Inbox:
    """The aggregates and snapshots that have arrived at one node and are not applied.

    `arrive`, `restart` and `decode` return the error of an aggregate that came with other bytes than were sent: then
    a snapshot must be fetched. They raise CodecError for a corrupted snapshot, and for the last of `MOST_SPOILED`
    corrupted aggregates in a row.
    """

    def __init__(self) -> None:
        self._spoiled = 0  # in a row
        self._lacks_snapshot = False
        self._arrived: deque[tuple[Deliver | None, Sequence[Buffer]]] = deque()  # None: begin again from the anchor
        self._version: Version = 0  # of the last update decoded
        self._landed_unseen: list[int] = []
        self._updates: deque[Update] = deque()  # between threads, as is the next
        self._withdrawn: deque[int] = deque()
        self.decode_seconds = 0.0
        """CPU so far."""

    @property
    def full(self) -> bool:
        """True when the training thread is so far behind that a snapshot is less than what waits."""
        return len(self._arrived) >= KEPT

    def __len__(self) -> int:
        return len(self._updates)

    def peek(self) -> Update | None:
        """Return the next decoded update without taking it, or None."""
        with contextlib.suppress(IndexError):
            return self._updates[0]
        return None

    def take(self) -> Update | None:
        """Take the next decoded update, or None; `decode` must run after it."""
        with contextlib.suppress(IndexError):
            return self._updates.popleft()
        return None

    def withdraw(self, sequence: int) -> None:
        """Tell the training thread that an offer will not be applied; from any thread."""
        if len(self._withdrawn) < WITHDRAWN_KEPT:
            self._withdrawn.append(sequence)

    def take_withdrawn(self) -> Iterator[int]:
        """Give the offers that will not be applied, each once (training thread)."""
        while self._withdrawn:
            yield self._withdrawn.popleft()

    def arrive(self, coder: DeltaCoder, deliver: Deliver, frames: Sequence[Buffer]) -> CodecError | None:
        """Take in one delivery and decode as far as there is room."""
        if self._lacks_snapshot and isinstance(deliver.announcement, Aggregate):
            self.skip(deliver)
            return None
        if isinstance(deliver.announcement, Snapshot):
            self._lacks_snapshot = False
            # it contains the aggregates that still wait, and the offers that landed in them
            self._landed_unseen += [sequence for one, _ in self._arrived if one for sequence in one.landed]
            before = [waiting for waiting in self._arrived if waiting[0] is None or waiting[0].reset]
            if before and not deliver.keep:
                # pending progress that an older snapshot drops is dropped all the same
                warm = all(one is not None and one.warm for one, _ in before) and (deliver.warm or not deliver.reset)
                deliver = replace_fields(deliver, reset=True, warm=warm)
            self._arrived = deque(before[-1:] if deliver.keep else ())
        self._arrived.append((deliver, frames))
        return self.decode(coder)

    def restart(self, coder: DeltaCoder, version: Version) -> CodecError | None:
        """Drop what is pending, after what has arrived already: training goes on from the anchor as it is then.

        version: that was applied last.
        """
        self._version = max(self._version, version)
        self._arrived.append((None, ()))
        return self.decode(coder)

    def skip(self, deliver: Deliver) -> None:
        """Drop an aggregate that a snapshot will contain; the offers that landed in it are reported with that."""
        self._landed_unseen += deliver.landed

    def decode(self, coder: DeltaCoder) -> CodecError | None:
        """Decode what has arrived, as far as the training thread's queue has room."""
        spoiled = None
        while self._arrived and self._has_room():
            deliver, frames = self._arrived.popleft()
            began = clock.thread_time()
            if deliver is None:
                coder.restart()
                update = Update(self._version, {}, {}, (), reset=True)
            elif isinstance(deliver.announcement, Aggregate):
                try:
                    update = coder.decode_aggregate(deliver.announcement, deliver.landed, frames)
                except CodecError as error:
                    self._drop_spoiled(deliver, error)
                    spoiled = error
                    continue
                self._spoiled = 0
            else:
                assert isinstance(deliver.announcement, Snapshot), "only a standby is sent a copy of the hub"
                landed = (*self._landed_unseen, *deliver.landed)
                self._landed_unseen.clear()
                update = coder.decode_snapshot(deliver.announcement, landed, frames, deliver.reset, deliver.keep)
                update = replace(update, warm=deliver.warm)
            self.decode_seconds += clock.thread_time() - began
            self._version = update.version
            self._updates.append(update)
        return spoiled

    def _drop_spoiled(self, deliver: Deliver, error: CodecError) -> None:
        """Drop a corrupted aggregate, and those behind it, which cannot be applied without it."""
        self._spoiled += 1
        if self._spoiled >= MOST_SPOILED:
            raise CodecError(
                f"{self._spoiled} aggregates in a row are not what the broker sent ({error}): the network or this PC's "
                "memory corrupts them: check both"
            ) from error
        waiting, self._arrived = self._arrived, deque(one for one in self._arrived if not _is_aggregate(one[0]))
        for one in (deliver, *(one for one, _ in waiting if one is not None and _is_aggregate(one))):
            self.skip(one)
        self._lacks_snapshot = True

    def _has_room(self) -> bool:
        waiting = self.peek()
        if waiting is None:
            return True
        size = _decoded_bytes(waiting)
        most = min(max(DECODED, DECODED_BYTES // max(1, size)), MOST_DECODED)
        return len(self._updates) < most and size <= LARGE_UPDATE_BYTES


def _is_aggregate(deliver: Deliver | None) -> bool:
    return deliver is not None and isinstance(deliver.announcement, Aggregate)


def _decoded_bytes(update: Update) -> int:
    anchor = [part.values for part in update.anchor or ()]
    parts = (*update.aggregate.values(), *update.own.values(), anchor, update.optimizer_state or ())
    coded = sum(arrays.held_bytes for arrays in parts if isinstance(arrays, CodedSegments))
    decoded = [arrays for arrays in parts if not isinstance(arrays, CodedSegments)]
    return int(coded + sum(4 * math.prod(array.shape) for arrays in decoded for array in arrays))


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
        """The CPU seconds of the codec's thread, not of those that help it, for one exchange; 0 during the first ones,
        which compile."""
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
        coder.stays_encoded = isinstance(segments, PinnedSegments)

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
    if isinstance(segments, PinnedSegments):
        return False
    devices = _devices_of(segments)
    everything = all(hasattr(segment, "devices") for segment in segments)
    return everything and len(devices) == 1 and devices.pop().platform != "cpu"


def _devices_of(segments: Sequence[Array]) -> set[Any]:
    if isinstance(segments, PinnedSegments):
        return set()
    return {device for segment in segments if hasattr(segment, "devices") for device in segment.devices()}

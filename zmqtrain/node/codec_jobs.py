"""Do what a node's codec thread does: code what is offered, decode what has come, and know what is on its way.

Rule 1: whatever says so below is called in that thread, one job after the other; what passes to the training thread
goes by the `Inbox`.  Rule 2: an offer is published as it was coded, once; what was published is kept as long as it is
on its way, if there are checkpoints to hold it.
Rule 3: who is seen to diverge begins again, or ends, as `Restarts` has it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zmqtrain.averaging.coder import DeltaCoder, Encoded, encode_snapshot, mean_score
from zmqtrain.averaging.snapshot import digest_of, encode_optimizer_state
from zmqtrain.core.errors import CodecError, NonFiniteDelta, ZmqTrainError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, Offer, Version
from zmqtrain.node.inbox import Inbox
from zmqtrain.node.keeper import SavedNode
from zmqtrain.node.restarts import Restarts
from zmqtrain.protocol.effects import Deliver
from zmqtrain.session.events import NodeEvents

logger = logging.getLogger(__name__)

EXCHANGES_WARM = 4

Publish = Callable[[Offer, Version, Encoded, float], None]
"""Gives an offer to the link: with the version that it is based on, coded, and its score."""


class CodecJobs:
    """What one node codes. name: its own, for messages.  settings: of the run.  version: that was applied last.

    publish: gives what is coded to the link.  events: who is told what happens here, None for nobody.
    """

    def __init__(
        self,
        name: str,
        inbox: Inbox,
        restarts: Restarts,
        settings: Callable[[], RunSettings],
        version: Callable[[], Version],
        publish: Publish,
        events: NodeEvents | None,
    ) -> None:
        self.name = name
        self.coder: DeltaCoder | None = None
        """Of the model with which the node joins; None before that."""
        self.keeps_sent = False
        """Whether what is on its way is kept as it was published: for checkpoints."""
        self.encode_seconds = 0.0
        """CPU so far."""
        self._inbox, self._restarts, self._events = inbox, restarts, events
        self._settings, self._version, self._publish = settings, version, publish
        self._sent: dict[int, tuple[Offer, Version, float]] = {}  # by sequence, of what is on its way: as published
        self._encoded, self._warm_seconds = 0, 0.0

    @property
    def joined_coder(self) -> DeltaCoder:
        """The coder, at a node that joins or has joined."""
        assert self.coder is not None, "nothing is coded before join"
        return self.coder

    @property
    def exchange_seconds(self) -> float:
        """The CPU seconds that the codec takes for one exchange; 0 until the first are over, that compile code."""
        seconds = self.encode_seconds + self._inbox.decode_seconds - self._warm_seconds
        exchanges = self._encoded - EXCHANGES_WARM
        return seconds / exchanges if exchanges > 0 else 0.0

    # ------------------------------------------------------------------ what is offered (codec thread)

    def encode(self, offer: Offer, base: Version) -> None:
        """Code an offer and publish it. Raises NonFiniteDelta if this node cannot begin again."""
        began, coder = time.thread_time(), self.joined_coder
        try:
            encoded = coder.encode(offer)
        except NonFiniteDelta as error:
            said = f"{self.name}: {error}: training has diverged here"
            self.diverged(offer.sequence, NonFiniteDelta(said, error.leaf))
            self.withdraw(coder, offer.sequence, "non-finite")
            self._inbox.withdraw(offer.sequence)
            return
        self.encode_seconds += time.thread_time() - began
        self._encoded += 1
        if self._encoded == EXCHANGES_WARM:
            self._warm_seconds = self.encode_seconds + self._inbox.decode_seconds
        if self._events is not None:
            self._events.encoded(offer.sequence)
        if why := coder.judge(offer, encoded):
            logger.warning("%s: delta %d may be refused: %s", self.name, offer.sequence, why)
        score = mean_score(offer)
        offer = replace(offer, segments=(), scores=())  # their memory is the device's, and free now
        if self.keeps_sent:
            self._forget_landed()
            self._sent[offer.sequence] = (offer, base, score)
        self._publish(offer, base, encoded, score)

    def diverged(self, sequence: int, error: NonFiniteDelta) -> None:
        """Begin again from the shared parameters, or raise the error that ends this node."""
        if self._restarts.is_known(sequence):
            return
        if not self._restarts.begin(self._settings()):
            raise error
        logger.error("%s. It begins again from the shared parameters; what it had not shared is dropped", error)
        self._inbox.restart(self.joined_coder, self._version())

    def withdraw(self, coder: DeltaCoder, sequence: int, reason: str) -> None:
        """Take note that an offer will not land. coder: that coded it."""
        coder.withdraw(sequence)
        if self._events is not None:
            self._events.withdrawn(sequence, reason)

    def encode_founding(
        self, leaves: Sequence[Any], moments: Sequence[Any]
    ) -> tuple[Sequence[Buffer], Sequence[Buffer], str]:
        """Return the frames of the parameters and of the optimizer's state for who founds the run, and their digest.

        Raises NonFiniteDelta.
        """
        layout = self.joined_coder.layout
        try:
            frames = encode_snapshot(layout, layout.split(leaves))
            state = encode_optimizer_state(moments)
        except NonFiniteDelta as error:
            bad = (
                one.path
                for one, leaf in zip(self.joined_coder.model, leaves, strict=True)
                if not np.isfinite(leaf).all()
            )
            leaf = next(bad, error.leaf)
            what = f"the leaf {leaf} holds" if leaf else "the optimizer's state holds"
            text = f"{self.name}: {what} NaN or infinity at the beginning: check how the parameters are initialised"
            raise NonFiniteDelta(text, leaf) from None
        return frames, state, digest_of([*frames, *state])

    # ------------------------------------------------------------------ what has come (codec thread)

    def arrive(self, deliver: Deliver, frames: Sequence[Buffer]) -> None:
        """Take in an aggregate or a snapshot, and decode as far as there is room. Raises CodecError."""
        self._inbox.arrive(self.joined_coder, deliver, frames)

    def decode(self) -> None:
        """Decode what has come, as far as there is room. Raises CodecError."""
        self._inbox.decode(self.joined_coder)

    # ------------------------------------------------------------------ checkpoints (codec thread)

    def kept(self, facts: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]] | None:
        """Return what the codec has to know: what is on its way by these facts, as it was sent, and what it keeps.

        It may not have heard yet what of it has landed and is applied.  None: it has dropped what is pending, and the
        training thread had not yet: what is on its way would count as withdrawn, and land.
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

    def restore(self, saved: SavedNode) -> None:
        """Be where `kept` was. While the node joins, before there are other jobs, or in their turn."""
        coder = self.joined_coder
        coder.restore(saved.facts["coder"], saved.arrays)
        self._sent = {}
        for sequence, samples, steps, dense, base, score in saved.facts["sent"]:
            if sequence in coder.unacked:
                offer = Offer(sequence, coder.unacked[sequence].fragment, (), samples, steps, dense=dense)
                self._sent[sequence] = (offer, base, score)

    def send_again(self, saved: SavedNode) -> None:
        """Publish what was on its way, to the same bits: the hub has gone back to before it came."""
        self.restore(saved)
        for sequence, (offer, base, score) in sorted(self._sent.items()):
            self._publish(offer, base, self.joined_coder.unacked[sequence], score)

    def _forget_landed(self) -> None:
        unacked = self.joined_coder.unacked
        self._sent = {sequence: sent for sequence, sent in self._sent.items() if sequence in unacked}


def say_codec_failure(name: str, error: BaseException) -> ZmqTrainError:
    """Return what is raised in the training thread where a job of the codec thread has failed: it says what to do."""
    if isinstance(error, CodecError) and not isinstance(error, NonFiniteDelta):
        return ZmqTrainError(f"{name} cannot read what the broker sent: {error}. Start this node again")
    if isinstance(error, ZmqTrainError):
        return error
    logger.error("the codec thread of %s failed", name, exc_info=error)
    return ZmqTrainError(f"the codec thread of {name} failed: {error!r}")

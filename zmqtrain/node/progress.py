"""The figures of one node's training: set by its training thread, reported to the hub by its network thread.

A loss that is still computed on the device is not waited for. It is read in the training thread, one step later: that
thread may donate its buffer at any moment, so another thread could read a deleted one.
"""

from __future__ import annotations

import math
from typing import Any

from zmqtrain.core.interfaces import Clock
from zmqtrain.core.types import Version, number_of
from zmqtrain.protocol.messages import Report, Roster

LOSS_SECONDS = 0.5
"""A device's loss is read at most this often: each read copies one value to the host."""


def paces(roster: Roster | None, called: str) -> tuple[float, list[float]]:
    """Return the samples per second of the node with this name, and of all that have reported theirs; NaN and [] if
    none has."""
    members = roster.members if roster is not None else ()
    said = {str(one["peer"]): float(one["samples_per_second"]) for one in members if "samples_per_second" in one}
    return said.get(called, math.nan), list(said.values())


class Progress:
    """The figures of one node's training. samples: so far; setting it ends a step, which gives the pace.

    waits: the newest loss is waited for (in virtual time, where a run is repeated exactly and nobody donates buffers).
    """

    def __init__(self, clock: Clock, waits: bool = False) -> None:
        self._clock, self._waits = clock, waits
        self.step = self.offers_refused = 0
        self._loss: Any = math.nan
        self.age_steps = math.nan
        self.held_seconds = 0.0
        self.scores: dict[str, float] | None = None
        self.score_version: Version = -1
        self.data = self.device = self.first_step = self.software = ""
        self.first_unit = -1
        self._loss_known, self._loss_read_at = math.nan, -math.inf
        self._counted: tuple[int, int, float] = (0, 0, math.nan)  # samples, those of the last step, when it ended
        self._measured: tuple[int, float, float] = (0, math.nan, 0.0)  # samples, when, and the pace until then

    @property
    def samples(self) -> int:
        """How many samples this node has trained on."""
        return self._counted[0]

    @samples.setter
    def samples(self, samples: int) -> None:
        self._counted = (samples, samples - self._counted[0], self._clock.monotonic())

    @property
    def loss(self) -> float:
        """The newest loss that is known."""
        return self._loss_known

    @loss.setter
    def loss(self, loss: Any) -> None:
        before, self._loss = self._loss, loss
        if not hasattr(loss, "is_ready"):
            self._loss_known = float(loss)
        elif hasattr(before, "is_ready") and not before.is_deleted() and before.is_ready():
            now = self._clock.monotonic()
            if now - self._loss_read_at >= LOSS_SECONDS:
                self._loss_known, self._loss_read_at = float(before), now

    def report(self, bytes_sent: int, bytes_received: int, waiting: str, exchange_seconds: float = 0.0) -> Report:
        """Return the report of now. exchange_seconds: CPU of the codec for one exchange."""
        samples, pace = self._pace()
        if self._waits:
            self._loss_known = number_of(self._loss)
        return Report(
            step=self.step,
            samples=samples,
            samples_per_second=pace,
            loss=self._loss_known,
            age_steps=float(self.age_steps),
            offers_refused=self.offers_refused,
            bytes_sent=bytes_sent,
            bytes_received=bytes_received,
            waiting=waiting,
            scores=self.scores,
            score_version=self.score_version,
            exchange_seconds=exchange_seconds,
            data=self.data,
            held_seconds=self.held_seconds,
            device=self.device,
            first_step=self.first_step,
            first_unit=self.first_unit,
            software=self.software,
        )

    def _pace(self) -> tuple[int, float]:
        """Return the samples, and those per second, from the end of one step to the end of another.

        So it is exact for steps that take longer than the time between two reports too: other nodes' k is held against
        it. A step that takes longer than those before lowers it while it lasts.
        """
        samples, of_step, at = self._counted
        before, before_at, pace = self._measured
        if samples > before:
            pace = (samples - before) / (at - before_at) if at > before_at else pace
            self._measured = (samples, at, pace)
        now = self._clock.monotonic()
        return samples, min(pace, of_step / (now - at)) if now > at else pace

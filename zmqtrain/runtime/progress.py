"""Turn what a training thread says of itself into the report that the hub gets, and read what others have said.

Rule: the training thread only leaves values here; a loss that is still computed on the device is not waited for.
"""

from __future__ import annotations

import math
import time
from typing import Any

from zmqtrain.protocol.messages import Report, Roster
from zmqtrain.types import PeerId, Version

__all__ = ["Progress", "paces"]


def paces(roster: Roster | None, peer: PeerId) -> tuple[float, list[float]]:
    """Return the samples per second of `peer` and of all nodes that have said theirs; NaN and [] where none has."""
    members = roster.members if roster is not None else ()
    said = {str(one["peer"]): float(one["samples_per_second"]) for one in members if "samples_per_second" in one}
    return said.get(peer, math.nan), list(said.values())


class Progress:
    """How training goes at one node."""

    def __init__(self) -> None:
        self.step = self.samples = self.offers_refused = 0
        self.loss: Any = math.nan
        self.age_steps = math.nan
        self.scores: dict[str, float] | None = None
        self.score_version: Version = -1
        self._loss_known = math.nan
        self._measured: tuple[float, int, float] = (0.0, 0, 0.0)

    def report(self, bytes_sent: int, bytes_received: int, waiting: str) -> Report:
        """Return the report of now; the pace is that since the last report."""
        loss = self.loss  # the training thread may leave another one meanwhile
        if getattr(loss, "is_ready", lambda: True)():
            self._loss_known = float(loss)
        now, (before, samples_before, pace) = time.monotonic(), self._measured
        if before and now > before:
            pace = (self.samples - samples_before) / (now - before)
        self._measured = (now, self.samples, pace)
        return Report(
            step=self.step,
            samples=self.samples,
            samples_per_second=pace,
            loss=self._loss_known,
            age_steps=float(self.age_steps),
            offers_refused=self.offers_refused,
            bytes_sent=bytes_sent,
            bytes_received=bytes_received,
            waiting=waiting,
            scores=self.scores,
            score_version=self.score_version,
        )

"""Be the listener of a broker's own line to another broker, over which nothing is offered, trained or dealt.

Rule: what such a line hears its machine keeps; who has the line looks there.
"""

from __future__ import annotations

from zmqtrain.core.errors import ZmqTrainError
from zmqtrain.core.types import Buffer
from zmqtrain.protocol.effects import Deliver
from zmqtrain.protocol.messages import Quarantine, Report, WorkUnit


class Onlooker:
    """A `Listener` that only keeps why its line cannot go on. failure: None while it can."""

    def __init__(self) -> None:
        self.failure: ZmqTrainError | None = None

    def on_changed(self) -> None:
        """See Listener."""

    def on_failed(self, error: ZmqTrainError) -> None:
        """See Listener."""
        self.failure = self.failure or error

    def on_delivered(self, deliver: Deliver, frames: list[Buffer]) -> None:
        """See Listener."""

    def on_withdrawn(self, sequence: int, reason: str, text: str) -> None:
        """See Listener: nothing was offered."""

    def on_quarantined(self, quarantine: Quarantine) -> None:
        """See Listener: who looks on sends no deltas."""

    def on_founding(self) -> None:
        """See Listener: who looks on is not asked."""

    def on_work(self, answer: WorkUnit) -> None:
        """See Listener: no unit was asked for."""

    def on_stopped(self) -> None:
        """See Listener: only nodes are told."""

    def make_report(self) -> Report:
        """See Listener."""
        raise AssertionError("who looks on reports nothing")

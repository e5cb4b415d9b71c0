"""Say what a node's network thread tells whom it works for.

Rule: a listener never waits; it is called in that thread.
"""

from __future__ import annotations

from typing import Protocol

from zmqtrain.errors import ZmqTrainError
from zmqtrain.protocol.effects import Deliver
from zmqtrain.protocol.messages import Quarantine, Report, WorkUnit
from zmqtrain.types import Buffer

__all__ = ["Listener"]


class Listener(Protocol):
    """Who is told what comes over a link, in the network thread."""

    def on_delivered(self, deliver: Deliver, frames: list[Buffer]) -> None:
        """A whole aggregate or snapshot is here."""

    def on_withdrawn(self, sequence: int, reason: str, text: str) -> None:
        """An offer will not land."""

    def on_quarantined(self, quarantine: Quarantine) -> None:
        """The hub takes nothing of this node for a while."""

    def on_founding(self) -> None:
        """The hub wants this node's parameters: answer with `HubLink.send_founding`."""

    def on_work(self, answer: WorkUnit) -> None:
        """The hub deals data units."""

    def on_changed(self) -> None:
        """The state of the link has changed."""

    def on_failed(self, error: ZmqTrainError) -> None:
        """The node cannot go on."""

    def make_report(self) -> Report:
        """Return what the hub is told about this node now."""

"""Say what a node's network thread tells whom it works for, and what is asked of it: two interfaces.

Rule: a listener never waits; it is called in that thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zmqtrain.core.errors import ZmqTrainError
from zmqtrain.core.types import Buffer
from zmqtrain.protocol.effects import Deliver, PeerEffect
from zmqtrain.protocol.messages import Message, Quarantine, Report, WorkUnit


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

    def on_stopped(self) -> None:
        """An operator has ended the run: the node drains what is pending, and leaves."""

    def on_changed(self) -> None:
        """The state of the link has changed."""

    def on_failed(self, error: ZmqTrainError) -> None:
        """The node cannot go on."""

    def make_report(self) -> Report:
        """Return what the hub is told about this node now."""


class PeerLink(Protocol):
    """A node's network thread, as far as an exchange reaches it."""

    @property
    def live(self) -> bool:
        """Whether the node takes part in the run now."""

    def send(self, message: Message) -> None:
        """Send a control message."""

    def carry_out(self, effects: Sequence[PeerEffect]) -> None:
        """Do what the machine wishes."""

    def send_founding(self, frames: Sequence[Buffer], moments: Sequence[Buffer] = (), digest: str = "") -> None:
        """Announce the parameters that the hub asked for, unless that hub is lost."""

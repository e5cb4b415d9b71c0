"""The events of a broker and of a node, for recorders.

A recorder neither waits nor raises; events may come from any thread.  No recorder is `None`, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Buffer, PeerId, Update, Version
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Schedule


class BrokerEvents(Protocol):
    """The events of a broker; releases come in the order of their versions, from the codec thread."""

    def began(self, run: str, settings: RunSettings, version: Version) -> None:
        """The broker serves. version: at which the run was resumed, -1 for a new one."""

    def member(self, peer: PeerId, what: str, text: str) -> None:
        """A node has joined or left. what: "joined", "left", "again" (it connected again), "lost", "quarantined",
        "acquitted" (the norm gate was wrong) or "taken back" (its contributions, because it diverges); text: why."""

    def averaged(self, peers: Sequence[PeerId]) -> None:
        """The run will begin with the mean of these nodes' parameters, in this order, unless they find it worse than
        their own; another mean, if any, is another event."""

    def scheduled(self, schedule: Schedule, text: str) -> None:
        """Another k, d, codec or outer optimizer is announced. text: why."""

    def founded(self, peer: PeerId) -> None:
        """The run has its first parameters."""

    def released(
        self,
        reduce: Reduce,
        nodes: int,
        codec: str,
        frames: Sequence[Sequence[Buffer]],
        left_out: Sequence[Contribution] = (),
    ) -> None:
        """An aggregate is made. nodes: live ones; frames: of its fragments, as sent to every node; left_out: the
        contributions that the norm gate left out of the sum."""

    def evaluated(self, version: Version, samples: int, scores: Mapping[str, float]) -> None:
        """A node has scored the shared model, which has been trained on so many samples."""

    def ended(self, figures: Mapping[str, Any], leaves: Sequence[Array]) -> None:
        """The broker has ended. leaves: of the published shared model, [] if no node founded the run."""


class NodeEvents(Protocol):
    """The events of a node, in the order of its training thread; `encoded` and `withdrawn` come from its codec thread,
    in that one's order."""

    def joining(self, peer: PeerId, run: str, settings: RunSettings, founded: bool, version: Version) -> None:
        """The node asks for the run's parameters. founded: whether it knows that the run has any; version: of the
        checkpoint that it resumes from, -1 for none."""

    def began(self, unit: int) -> None:
        """Training begins on a data unit."""

    def offered(self, sequence: int, fragment: int, base_version: Version, dense: bool) -> None:
        """An offer was taken."""

    def encoded(self, sequence: int) -> None:
        """An offer was encoded: the pending delta without the deltas in flight."""

    def withdrawn(self, sequence: int, reason: str) -> None:
        """An offer was rejected: from here on it does not count as in flight."""

    def applied(self, update: Update) -> None:
        """The training thread has taken an update."""

    def scheduled(self, every: int, delay: int, codec: str, broadcast_codec: str) -> None:
        """The run's k, d and codecs have changed: the node has applied the version from which they hold."""

    def paced(self, own: float, rates: Sequence[float]) -> None:
        """The node has planned its local steps by these paces, in samples per second."""

    def stepped(self, step: int, samples: int, loss: Any) -> None:
        """A step has ended. samples: of all steps; loss: of this one, perhaps a device scalar that is not ready."""

    def closed(self) -> None:
        """The node says goodbye."""

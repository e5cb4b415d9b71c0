"""Say what a living broker and a living node tell whoever records them: two interfaces, and nothing behind them.

Rule 1: who is told neither waits nor raises; it may be told from any thread.  Rule 2: nobody to tell is `None`, and
costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, Buffer, PeerId, Update, Version
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Schedule


class BrokerEvents(Protocol):
    """What happens at a broker; releases come in the order of their versions, from the thread that made them."""

    def began(self, run: str, settings: RunSettings, version: Version) -> None:
        """The broker is up. version: that the run was resumed at, -1 for a new one."""

    def member(self, peer: PeerId, what: str, text: str) -> None:
        """A node has come or gone. what: "joined", "left", "again" (it connected again), "lost", "quarantined",
        "acquitted" (the norm gate was wrong) or "taken back" (what it contributed, as it diverges); text: why."""

    def averaged(self, peers: Sequence[PeerId]) -> None:
        """The parameters with which the run will be founded are the mean of these nodes', in this order, unless they
        find it worse than their own: then others', told likewise, if any."""

    def scheduled(self, schedule: Schedule, text: str) -> None:
        """Another k, d, codec or outer optimizer is announced. text: what it follows from."""

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
        """An aggregate is made. nodes: that were live; frames: of its fragments, as every node is sent them; left_out:
        the contributions that the norm gate left out of the sum."""

    def evaluated(self, version: Version, samples: int, scores: Mapping[str, float]) -> None:
        """A node has scored the shared model. samples: in the shared model by now."""

    def ended(self, figures: Mapping[str, Any], leaves: Sequence[Array]) -> None:
        """The run is over here. leaves: of the shared model as it was published, [] if nobody founded the run."""


class NodeEvents(Protocol):
    """What happens at a node, in the order in which its training thread has it; `encoded` and `withdrawn` come from the
    thread that codes, in its order."""

    def joining(self, peer: PeerId, run: str, settings: RunSettings, founded: bool, version: Version) -> None:
        """The node asks for the run's parameters. founded: whether the run has any, as far as it knows; version: of the
        checkpoint that it goes on from, -1 for none."""

    def began(self, unit: int) -> None:
        """Training begins on a data unit."""

    def offered(self, sequence: int, fragment: int, base_version: Version, dense: bool) -> None:
        """An offer was taken."""

    def encoded(self, sequence: int) -> None:
        """An offer was encoded: pending, less what is on its way."""

    def withdrawn(self, sequence: int, reason: str) -> None:
        """An offer will not land: from here on it is not counted as on its way."""

    def applied(self, update: Update) -> None:
        """The training thread has taken an update."""

    def scheduled(self, every: int, delay: int, codec: str, broadcast_codec: str) -> None:
        """The run's k, d and codecs have changed for this node: it has applied the version from which they hold."""

    def paced(self, own: float, rates: Sequence[float]) -> None:
        """The node has planned by these paces."""

    def stepped(self, step: int, samples: int, loss: Any) -> None:
        """A step boundary is over. samples: of all steps; loss: of this one, maybe a device scalar not yet ready."""

    def closed(self) -> None:
        """The node says goodbye."""

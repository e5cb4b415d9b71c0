"""Say what a node of several masters asks of its line to each of them: an interface, and nothing behind it.

Rule: a `Node` is one; so is what a test puts in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from zmqtrain.core.interfaces import Exchange
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import ModelSpec, PeerId, Update
from zmqtrain.node.batches import UnitSource
from zmqtrain.node.units import UnitQueue
from zmqtrain.protocol.messages import Roster
from zmqtrain.session.hub_session import Solitude


class Line(Exchange, Protocol):
    """What is asked of a node at one master, besides its being an Exchange: see `zmqtrain.node.node.Node`."""

    peer_id: PeerId
    founding: int
    answers_later: bool
    units: UnitQueue
    message_delay: Callable[[], float] | None

    @property
    def address(self) -> str:
        """Where its master is looked for."""

    @property
    def run(self) -> str:
        """The id of the run."""

    @property
    def shard(self) -> int:
        """Which shard its master has."""

    @property
    def masters(self) -> tuple[str, ...]:
        """By shard where its master is, as the first last said."""

    @property
    def roster(self) -> Roster | None:
        """Who is in the run."""

    @property
    def alone(self) -> Solitude | None:
        """How the node trains without the master; None: that is there."""

    @property
    def waiting_for(self) -> str:
        """What it is waiting for."""

    def wait_welcome(self, timeout_seconds: float = 10.0) -> RunSettings:
        """Wait for the master's Welcome."""

    def describe_data(self, digests: str) -> None:
        """See Describes."""

    def describe_device(self, device: str) -> None:
        """See Describes."""

    def describe_first_step(self, digest: str) -> None:
        """See Describes."""

    def begin_join(
        self, model: ModelSpec, leaves: Sequence[Any], *, score: float = math.nan, moments: Sequence[Any] = ()
    ) -> None:
        """Ask to join, without waiting."""

    def has_joined(self) -> bool:
        """Whether `end_join` would give what `join` does."""

    def end_join(self) -> Update | None:
        """Return what `join` does."""

    def say_idle(self) -> None:
        """Say that this node waits for data units, and offers nothing meanwhile."""

    def batches(self, source: UnitSource[Any] | Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        """Give the batches of the data units that are dealt."""

    def move(self, address: str) -> None:
        """Look for the master at this address from now on, unless it is heard where it was."""

    def close(self, reason: str = "") -> None:
        """Say goodbye."""

    def batches_as_they_come(
        self, source: UnitSource[Any] | Callable[[int], Iterator[Any]], wait_seconds: float
    ) -> Iterator[Any]:
        """Give them, and None where there is none now."""

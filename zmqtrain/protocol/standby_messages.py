"""Say what a hub and its standby tell each other.

Rule: as in `messages`, which lists these too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replica:
    """Hub to standby: all that this hub is, at `version` (-1: the run is not founded).

    state: how many of the first frames are its state (JSON); the others are a safetensors file of its arrays.
    """

    transfer: int
    version: int
    sizes: tuple[int, ...]
    state: int


@dataclass(frozen=True, slots=True)
class Books:
    """Hub to standby, now and then: what of a hub's state changes besides its releases (JSON), and who is its crew.

    The standby says in its Heartbeats which books it has read last.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Holding:
    """Standby to hub: I hold this version: the nodes may hear of it."""

    version: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Operator (an observer) to standby: take over now, whoever else is there."""


StandbyMessage = Replica | Books | Holding | Promote

"""Remember, per peer, what outlives its connection: what of it has landed, the last publish and the last life heard.

Rule: bounded: the newest landings of each peer, and the peers heard of most recently.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from zmqtrain.types import PeerId, Version

__all__ = ["Records"]

LANDED_KEPT = 64
RECORDS_KEPT = 1024


@dataclass
class _Record:
    landed: deque[tuple[int, Version]] = field(default_factory=lambda: deque(maxlen=LANDED_KEPT))
    heard: int = -1
    incarnation: int = 0


class Records:
    """The publishes of all peers by their sequence numbers: heard (the highest) and landed (with the version); and the
    highest incarnation of each."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}

    def heard(self, peer: PeerId) -> int:
        """Return the highest sequence heard of a peer, -1 for none."""
        return self._records[peer].heard if peer in self._records else -1

    def landed(self, peer: PeerId) -> tuple[tuple[int, Version], ...]:
        """Return the (sequence, version) of a peer's newest landings, oldest first."""
        return tuple(self._records[peer].landed) if peer in self._records else ()

    def incarnation(self, peer: PeerId) -> int:
        """Return the highest incarnation of a peer id that has said Hello; 0: none that is fenced."""
        return self._records[peer].incarnation if peer in self._records else 0

    def greet(self, peer: PeerId, incarnation: int) -> None:
        """Take note of a Hello."""
        if incarnation:
            self._recent(peer).incarnation = incarnation

    def hear(self, peer: PeerId, sequence: int) -> None:
        """Take note of a publish that was announced."""
        record = self._recent(peer)
        record.heard = max(record.heard, sequence)

    def land(self, peer: PeerId, sequence: int, version: Version) -> None:
        """Take note that a publish is in the parameters from `version` on."""
        record = self._recent(peer)
        record.landed.append((sequence, version))
        record.heard = max(record.heard, sequence)

    def _recent(self, peer: PeerId) -> _Record:
        record = self._records.pop(peer, None) or _Record()
        self._records[peer] = record  # now the most recent
        while len(self._records) > RECORDS_KEPT:
            del self._records[next(iter(self._records))]
        return record

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {
            peer: [record.heard, [list(one) for one in record.landed], record.incarnation]
            for peer, record in self._records.items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` wrote. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        for peer, (heard, landed, incarnation) in state.items():
            self.hear(PeerId(peer), int(heard))
            self.greet(PeerId(peer), int(incarnation))
            for sequence, version in landed:
                self.land(PeerId(peer), int(sequence), int(version))

"""Remember, per peer, what outlives its connection: what of it has landed, the last publish and the last life heard.

Rule 1: bounded: the newest landings of each peer, and the peers heard of most recently; who only says Hello, under
however many names, takes no place of those who have published.
Rule 2: small: each node that joins anew is another peer here, and is kept long after it has left; so its landings are
numbers of 64 bits in an array, a kilobyte in all, and no objects.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from zmqtrain.core.types import PeerId, Version
from zmqtrain.protocol.fencing import MAX_INCARNATION

LANDED_KEPT = 64
RECORDS_KEPT = 1024
RANGES_KEPT = 64
"""Of what has landed before: hardly anything is left out between two that landed."""


@dataclass
class _Record:
    """numbers: of the newest landings, oldest first, the sequence and the version of each in turn."""

    numbers: array[int] = field(default_factory=lambda: array("Q"))
    heard: int = -1
    incarnation: int = 0
    older: list[list[int]] = field(default_factory=list)
    recalled: tuple[tuple[int, Version], ...] = ()
    owner: str = ""

    @property
    def landed(self) -> Iterator[tuple[int, Version]]:
        """The (sequence, version) of the newest landings, oldest first."""
        return zip(self.numbers[::2], self.numbers[1::2], strict=True)

    def land(self, sequence: int, version: Version) -> None:
        """Take note of a landing. Raises OverflowError for numbers that are not of 64 bits."""
        landing = array("Q", (sequence, version))
        if len(self.numbers) == 2 * LANDED_KEPT:
            self._age(self.numbers[0])
            del self.numbers[:2]
        self.numbers += landing
        self.heard = max(self.heard, sequence)

    def _age(self, sequence: int) -> None:
        """Take a landing among the older ones: ranges of sequences, rising, the newest of them."""
        at = bisect([one[0] for one in self.older], sequence)
        if at and sequence <= self.older[at - 1][1] + 1:
            self.older[at - 1][1] = max(self.older[at - 1][1], sequence)
            at -= 1
        else:
            self.older.insert(at, [sequence, sequence])
        if at + 1 < len(self.older) and self.older[at + 1][0] <= self.older[at][1] + 1:
            self.older[at][1] = max(self.older[at][1], self.older.pop(at + 1)[1])
        del self.older[:-RANGES_KEPT]


class Records:
    """The publishes of all peers by their sequence numbers: heard (the highest) and landed (with the version); and the
    highest incarnation of each, and its owner: the name of the key with which it came first ("": without one)."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}  # each dict: the most recent last
        self._greeted: dict[PeerId, _Record] = {}  # of those who have published nothing

    def _of(self, peer: PeerId) -> _Record | None:
        return self._records.get(peer) or self._greeted.get(peer)

    def heard(self, peer: PeerId) -> int:
        """Return the highest sequence heard of a peer, -1 for none."""
        return -1 if (record := self._of(peer)) is None else record.heard

    def landed(self, peer: PeerId) -> tuple[tuple[int, Version], ...]:
        """Return the (sequence, version) of a peer's newest landings, oldest first; before them those recalled."""
        return () if (record := self._of(peer)) is None else (*record.recalled, *record.landed)

    def recall(self, peer: PeerId, sequences: Sequence[int]) -> None:
        """Say of these too, from now on, whether they have landed long ago (as of version 0): a life of the peer that
        has gone back does not know."""
        if (record := self._records.get(peer)) is not None:
            old = (s for s in sequences if any(first <= s <= last for first, last in record.older))
            record.recalled = tuple((sequence, 0) for sequence in sorted(old))

    def incarnation(self, peer: PeerId) -> int:
        """Return the highest incarnation of a peer id that has said Hello; 0: none that is fenced."""
        return 0 if (record := self._of(peer)) is None else record.incarnation

    def greet(self, peer: PeerId, incarnation: int) -> None:
        """Take note of a Hello."""
        if incarnation:
            record = self._take(peer)
            record.incarnation = incarnation
            self._put(peer, record)

    def owner(self, peer: PeerId) -> str:
        """Return the name of the key with which a peer came first; "" if it came without one, or is not known."""
        return "" if (record := self._of(peer)) is None else record.owner

    def own(self, peer: PeerId, name: str) -> None:
        """Record with which key a peer has come that says who it is in each life: the first one stays its owner."""
        if (record := self._of(peer)) is not None and not record.owner:
            record.owner = name

    def hear(self, peer: PeerId, sequence: int) -> None:
        """Take note of a publish that was announced."""
        record = self._take(peer)
        record.heard = max(record.heard, sequence)
        self._put(peer, record)

    def land(self, peer: PeerId, sequence: int, version: Version) -> None:
        """Take note that a publish is in the parameters from `version` on."""
        record = self._take(peer)
        record.land(sequence, version)
        self._put(peer, record)

    def clear(self) -> None:
        """Forget all publishes, and no life."""
        for record in self._records.values():
            del record.numbers[:]
            record.older, record.recalled, record.heard = [], (), -1

    def forget_unlanded(self) -> None:
        """Forget which publishes were heard of and have not landed."""
        for record in self._records.values():
            record.heard = max((sequence for sequence, _ in record.landed), default=-1)

    def _take(self, peer: PeerId) -> _Record:
        return self._records.pop(peer, None) or self._greeted.pop(peer, None) or _Record()

    def _put(self, peer: PeerId, record: _Record) -> None:
        kept = self._records if record.heard >= 0 else self._greeted
        kept[peer] = record
        if len(kept) > RECORDS_KEPT:
            del kept[next(iter(kept))]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: of each peer its landings as one short text, for there may be many peers,
        and what writes a checkpoint makes objects of each entry of a list, and several copies of a text."""
        return {
            peer: [record.heard, _steps_of(record.numbers), record.incarnation, record.older, record.owner]
            for peer, record in [*self._greeted.items(), *self._records.items()]
        }

    def restore(self, state: dict[str, Any], latest_incarnation: int = MAX_INCARNATION - 1) -> None:
        """Take over what `state` wrote; an earlier release wrote no owners. A later incarnation than the latest that a
        hub takes is forgotten: nobody sound has said it.

        Raises KeyError, TypeError, ValueError, AttributeError or OverflowError for anything else.
        """
        for peer, (heard, landed, said, older, *owner) in state.items():
            before = self._take(PeerId(peer))
            incarnation = int(said) if int(said) <= latest_incarnation else 0
            record = _Record(heard=int(heard), incarnation=max(incarnation, before.incarnation))
            record.owner = before.owner or "".join(str(name) for name in owner)
            record.older = [[int(first), int(last)] for first, last in older]
            self._put(PeerId(peer), record)
            steps = [int(step) for step in landed.split(",") if step]
            for sequence, version in zip(accumulate(steps[::2]), accumulate(steps[1::2]), strict=True):
                self.land(PeerId(peer), sequence, version)


def _steps_of(numbers: array[int]) -> str:
    """Return landings as text: the first as it is, of the others how much each is above the one before."""
    before = [0, 0, *numbers][: len(numbers)]
    return ",".join(str(number - last) for number, last in zip(numbers, before, strict=True))

"""Pipelines at the hub: several PCs that are one node of the run, each with some parts of the model.

Rule 1: each PC of a pipeline is a member of its own, with connection, numbers and snapshots of its own. It offers the
parts that it holds, and is sent those alone.
Rule 2: the pipeline is one node. Its PCs offer at the same steps; the offers of one step, its *turn*, are one delta: it
is whole when all parts of the model are here, and only then it counts, in one round, with all parts in one version. So
no version holds a part of a turn without the others.
Rule 3: a turn that cannot become whole is refused where it is here, and its content is offered again: when a part of it
is refused, or a later turn brings a part that it lacks.
Rule 4: the member with part 0 stands for the pipeline: rounds await it and a mean counts it, while all of its members
are live.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zmqtrain.core.types import PeerId
from zmqtrain.protocol.messages import Publish

Part = tuple[PeerId, Publish]
"""A publish of one part, and its sender."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one PC of a pipeline holds: the parts `first` to `end` of `parts`."""

    pipeline: str
    first: int
    end: int
    parts: int

    @property
    def leads(self) -> bool:
        """Whether this is the member that stands for its pipeline."""
        return self.first == 0

    def overlaps(self, other: Share) -> bool:
        return self.first < other.end and other.first < self.end


def is_covered(shares: Iterable[Share]) -> bool:
    """Return whether these shares of one pipeline are all parts of the model, each once."""
    held = sorted((share.first, share.end, share.parts) for share in shares)
    if not held:
        return False
    bounds = [0, *(end for _, end, _ in held)]
    return [first for first, _, _ in held] == bounds[:-1] and bounds[-1] == held[0][2]


class Turns:
    """The turns of all pipelines that are not whole, and the whole ones that wait in a round."""

    def __init__(self) -> None:
        self._open: dict[str, dict[int, dict[int, Part]]] = {}  # by pipeline and turn: the parts that are here
        self._whole: dict[tuple[PeerId, int], tuple[Part, ...]] = {}  # by sender and sequence of part 0

    def add(self, share: Share, peer: PeerId, publish: Publish) -> tuple[tuple[Part, ...], list[Part]]:
        """Take a part that is here; return its turn, in the order of the parts, once that is whole (else ()), and the
        parts of turns that can never be: their turns are forgotten."""
        turns = self._open.setdefault(share.pipeline, {})
        refused: list[Part] = []
        for turn in [one for one in turns if one < publish.turn and publish.fragment not in turns[one]]:
            refused += turns.pop(turn).values()
        parts = turns.setdefault(publish.turn, {})
        parts[publish.fragment] = peer, publish
        if len(parts) < share.parts:
            return (), refused
        del turns[publish.turn]
        whole = tuple(parts[number] for number in range(share.parts))
        leader, first = whole[0]
        self._whole[leader, first.sequence] = whole
        return whole, refused

    def refuse(self, pipeline: str, turn: int) -> list[Part]:
        """Forget a turn of which a part was refused; return the parts that are here."""
        return list(self._open.get(pipeline, {}).pop(turn, {}).values())

    def forget(self, pipeline: str) -> list[Part]:
        """Forget the turns of a pipeline that are not whole; return their parts."""
        return [part for parts in self._open.pop(pipeline, {}).values() for part in parts.values()]

    def spread(self, taken: Sequence[Part]) -> list[Part]:
        """Return the publishes of a round with all parts of the turns that stand in it, which are forgotten."""
        return [part for peer, one in taken for part in self._whole.pop((peer, one.sequence), ((peer, one),))]

    def parts_behind(self, pending: Iterable[Part]) -> list[Part]:
        """Return the publishes that wait in rounds, each turn with all of its parts, and the parts of open turns."""
        waiting = [part for peer, one in pending for part in self._whole.get((peer, one.sequence), ((peer, one),))]
        return waiting + [part for turns in self._open.values() for parts in turns.values() for part in parts.values()]

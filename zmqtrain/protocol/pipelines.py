"""Pipelines at the hub: several PCs that are one node of the run, each with some parts of the model.

Rule 1: each PC of a pipeline is a member of its own, with connection, numbers and snapshots of its own. It offers the
parts that it holds, and is sent those alone.
Rule 2: the pipeline is one node. Its PCs offer at the same steps; the offers of one step, its *turn*, are one delta: it
counts when all parts of the model are here, in one round, with all parts in one version. So no version holds a part of
a turn without the others.
Rule 3: the turns of each part rise. So a turn lacks a part for good once a later one, or a refusal, has brought that
part: then all of its parts are refused, also those that arrive later, and their content is offered again.
Rule 4: the member with part 0 stands for the pipeline: rounds await it and a mean counts it, while all of its members
are live.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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


@dataclass
class _Open:
    """The turns of one pipeline that are not whole. parts: by turn and part.  newest: by part, the last turn of which
    that part has come, or was refused."""

    parts: dict[int, dict[int, Part]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)

    def take_dead(self, count: int) -> list[Part]:
        """Forget the turns that lack a part for good, of so many; return what is here of them."""
        dead = [
            turn
            for turn, here in self.parts.items()
            if any(part not in here and newest >= turn for part, newest in self.newest.items() if part < count)
        ]
        return [part for turn in dead for part in self.parts.pop(turn).values()]


class Turns:
    """The turns of all pipelines that are not whole, and the whole ones that wait in a round."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._whole: dict[tuple[PeerId, int], tuple[Part, ...]] = {}  # by sender and sequence of part 0

    def add(self, share: Share, peer: PeerId, publish: Publish) -> tuple[tuple[Part, ...], list[Part]]:
        """Take a part that is here. Return its turn, in the order of the parts, once that is whole (else ()), and the
        parts that are refused: of turns that lack a part for good, and this one if its turn does not rise."""
        of_it = self._open.setdefault(share.pipeline, _Open())
        if publish.turn <= of_it.newest.get(publish.fragment, -1):
            return (), [(peer, publish)]
        of_it.newest[publish.fragment] = publish.turn
        here = of_it.parts.setdefault(publish.turn, {})
        here[publish.fragment] = peer, publish
        if len(here) < share.parts:
            return (), of_it.take_dead(share.parts)
        del of_it.parts[publish.turn]
        whole = tuple(here[number] for number in range(share.parts))
        leader, first = whole[0]
        self._whole[leader, first.sequence] = whole
        return whole, of_it.take_dead(share.parts)

    def refuse(self, share: Share, publish: Publish) -> list[Part]:
        """Note that a part is refused, or was lost in flight; return the parts of turns that lack it for good."""
        of_it = self._open.setdefault(share.pipeline, _Open())
        of_it.newest[publish.fragment] = max(publish.turn, of_it.newest.get(publish.fragment, -1))
        return of_it.take_dead(share.parts)

    def forget(self, pipeline: str) -> list[Part]:
        """Forget the turns of a pipeline that are not whole; return their parts."""
        return [part for parts in self._open.pop(pipeline, _Open()).parts.values() for part in parts.values()]

    def spread(self, taken: Sequence[Part]) -> list[Part]:
        """Return the publishes of a round with all parts of the turns that stand in it, which are forgotten."""
        return [part for peer, one in taken for part in self._whole.pop((peer, one.sequence), ((peer, one),))]

    def parts_behind(self, pending: Iterable[Part]) -> list[Part]:
        """Return the publishes that wait in rounds, each turn with all of its parts, and the parts of open turns."""
        waiting = [part for peer, one in pending for part in self._whole.get((peer, one.sequence), ((peer, one),))]
        return waiting + [part for one in self._open.values() for here in one.parts.values() for part in here.values()]

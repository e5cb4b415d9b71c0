"""Keep a round for each fragment of the model, where the rule has it so: an aggregate carries one, of all nodes (pure).

Rule 1: such a rule judges each fragment's round on its own: who is late with one fragment does not mix it with the next
one of the others, which would send both of them down twice; it is in the next round of its fragment.
Rule 2: how late nodes are is known for each fragment; how often they send, of all fragments together: a round waits no
longer for the late ones because there are more fragments.
Rule 3: under the other rules there is one round, and this is `Rounds`.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Generic, Protocol, TypeVar

from zmqtrain.protocol.paces import Intervals
from zmqtrain.protocol.rounds import ReleaseRule, Rounds
from zmqtrain.types import PeerId

__all__ = ["FragmentRounds"]


class _OfFragment(Protocol):
    @property
    def fragment(self) -> int: ...


T = TypeVar("T", bound=_OfFragment)


class FragmentRounds(Generic[T]):
    """The rounds of all fragments: what has come and has not been released, under one rule.

    A contribution has a `fragment`, from 0 to fragments - 1; the other words are those of `Rounds`.
    """

    def __init__(self, rule: ReleaseRule, fragments: int) -> None:
        self.rule = rule
        intervals = Intervals()
        self._rounds = [Rounds[T](rule, intervals) for _ in range(fragments if rule.by_fragment else 1)]

    def add(self, peer: PeerId, contribution: T, now: float) -> None:
        """Take one contribution."""
        self._rounds[contribution.fragment % len(self._rounds)].add(peer, contribution, now)

    def forget(self, peer: PeerId) -> None:
        """Drop what waits of a node."""
        for of_fragment in self._rounds:
            of_fragment.forget(peer)

    @property
    def pending(self) -> tuple[tuple[PeerId, T], ...]:
        """What waits: fragment by fragment, each in the order of arrival."""
        return tuple(one for of_fragment in self._rounds for one in of_fragment.pending)

    def due_at(self, live: Set[PeerId]) -> float | None:
        """Return when the next round is due, None if nothing waits or only a further arrival can make one due."""
        due = [at for of_fragment in self._rounds if (at := of_fragment.due_at(live)) is not None]
        return min(due, default=None)

    def take(self, live: Set[PeerId], now: float) -> list[tuple[PeerId, T]]:
        """Return the contributions of the round that was due first, and by `now`, and forget them; [] when none is."""
        due = [(at, number) for number, one in enumerate(self._rounds) if (at := one.due_at(live)) is not None]
        return self._rounds[min(due)[1]].take(live, now) if due and min(due)[0] <= now else []

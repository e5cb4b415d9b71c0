"""Keep a round for each fragment of the model, where the rule has it so: an aggregate carries one, of all nodes (pure).

Rule 1: such a rule judges each fragment's round on its own: who is late with one fragment does not mix it with the next
one of the others, which would send both of them down twice; it is in the next round of its fragment.
Rule 2: how late nodes are is known for each fragment.  How often they send is known of all fragments together where
they take turns, because a round should wait no longer when there are more fragments; where every exchange carries all
of them it is known of each.
Rule 3: under the other rules there is one round, and this is `Rounds`.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Generic, Protocol, TypeVar

from zmqtrain.core.types import PeerId
from zmqtrain.protocol.paces import Intervals
from zmqtrain.protocol.rounds import ReleaseRule, Rounds


class _OfFragment(Protocol):
    @property
    def fragment(self) -> int: ...


T = TypeVar("T", bound=_OfFragment)


class FragmentRounds(Generic[T]):
    """The rounds of all fragments: what has come and has not been released, under one rule.

    A contribution has a `fragment`, which the caller has checked; the other words are those of `Rounds`.
    together: every exchange of a node carries all fragments.
    """

    def __init__(self, rule: ReleaseRule, together: bool = False) -> None:
        self.rule, self._together = rule, together
        self._intervals = Intervals()
        self._of_fragment: dict[int, Rounds[T]] = {}

    def add(self, peer: PeerId, contribution: T, now: float) -> None:
        """Take one contribution."""
        fragment = contribution.fragment if self.rule.by_fragment else 0
        if fragment not in self._of_fragment:
            intervals = Intervals() if self._together else self._intervals
            self._of_fragment[fragment] = Rounds(self.rule, intervals)
            self._of_fragment = dict(sorted(self._of_fragment.items()))
        self._of_fragment[fragment].add(peer, contribution, now)

    @property
    def _rounds(self) -> list[Rounds[T]]:
        return list(self._of_fragment.values())

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

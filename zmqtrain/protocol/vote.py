"""Let the nodes whose mean a run would begin with say how it scores, before it is the run's (pure).

Rule 1: who knows how its own parameters score is sent the mean, and says how that scores. Who does not know it, leaves,
or says nothing in time is not counted: nobody is waited for without end.
Rule 2: the mean is refused if more than half of those who have said find it worse than their own (`is_barrier`).
Source: loss barriers, Frankle et al. 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, isnan

from zmqtrain.core.types import BARRIER_SHARE, ModelSpec, PeerId, Score, count_values, is_barrier

VOTE_SECONDS = 60.0
"""For so long the nodes may score the mean; besides, it must come to each of them, over the hub's one port."""
SLOW_BYTES_PER_SECOND = 10e6
"""What that port is taken to give, if not more."""


class Vote:
    """One vote. own: how the parameters score of which the mean is made, of those nodes that are here."""

    def __init__(self, own: Mapping[PeerId, Score], model: ModelSpec) -> None:
        self._own = dict(own)
        self._said: dict[PeerId, Score] = {}
        self._seconds = VOTE_SECONDS + len(self.voters) * 4 * count_values(model) / SLOW_BYTES_PER_SECOND
        self._until: float | None = None

    @property
    def is_of_nobody(self) -> bool:
        """Whether all have left of whose parameters the mean is made."""
        return not self._own

    @property
    def voters(self) -> tuple[PeerId, ...]:
        """Those who can compare: their own parameters have a score, and one that can be worse."""
        return tuple(sorted(peer for peer, score in self._own.items() if isfinite(score)))

    def say(self, peer: PeerId, score: Score) -> None:
        """Take note of how the mean scores at a node; NaN: it cannot say. What others say is ignored."""
        if peer in self._own:
            self._said[peer] = score

    def leave(self, peer: PeerId) -> None:
        """Take note that a node has left: it is not awaited, and what it has said does not count."""
        self._own.pop(peer, None)

    def is_over(self, now: float, late: float = 0.0) -> bool:
        """Return whether all have said, or have had their time: it begins with the first look. late: so much of it was
        nobody's, because the hub itself did not listen."""
        self._until = now + self._seconds if self._until is None else self._until + late
        return now >= self._until or all(peer in self._said for peer in self.voters)

    def objection(self) -> str:
        """Say to people why the run does not begin with the mean, and what to do; "" if it does."""
        said = {peer: self._said[peer] for peer in self.voters if not isnan(self._said.get(peer, float("nan")))}
        worse = [peer for peer, mean in said.items() if is_barrier(self._own[peer], mean)]
        if 2 * len(worse) <= len(said):
            return ""
        worst = max(worse, key=lambda peer: said[peer] - self._own[peer])
        return (
            f"the mean of the initial parameters is worse than they are: {len(worse)} of the {len(said)} nodes that "
            f"scored it find it worse than their own by more than {BARRIER_SHARE:.0%} (at {worst.partition('#')[0]} it "
            f"scores {said[worst]:.4g}, and its own {self._own[worst]:.4g}). They are related, but lie in different "
            "valleys of the loss (a barrier at the midpoint, Frankle et al. 2020). Begin with --initial best or "
            "--initial founder, or give all nodes the same checkpoint"
        )

"""Decide when a round of contributions is due (pure: no clock, no sockets; times are arguments).

Rule 1: every release rule lives here.  Rule 2: a rule counts contributions; it never looks inside one.
Rule 3: a rule answers one question, `due_at`: from when on is this round due, if nothing else comes?
Sources: bulk-synchronous and asynchronous parallel as in Ho et al. 2013; quorum with a grace as in torchft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Generic, Protocol, TypeVar

from zmqtrain.errors import ConfigError
from zmqtrain.specs import parse_spec
from zmqtrain.types import PeerId

__all__ = ["ReleaseRule", "AfterAll", "AfterQuorum", "Immediately", "release_rule_from_spec", "Rounds"]

T = TypeVar("T")


class ReleaseRule(Protocol):
    """When the contributions that have come are aggregated and sent out."""

    @property
    def one_each(self) -> bool:
        """True: a release takes exactly the oldest contribution of each node; False: all there are."""

    def due_at(self, first: Mapping[PeerId, float], live: Set[PeerId]) -> float | None:
        """Return the time from which the round is due, or None while only a further arrival can make it so.

        first: per contributing node, when its oldest waiting contribution came (at least one).
        live: the nodes from which a contribution can be awaited.
        """


@dataclass(frozen=True, slots=True)
class AfterAll:
    """Due when every live node has contributed (BSP: the slowest sets the pace)."""

    one_each: bool = field(default=True, init=False)

    def due_at(self, first: Mapping[PeerId, float], live: Set[PeerId]) -> float | None:
        """See ReleaseRule."""
        return max(first.values()) if live <= first.keys() else None


@dataclass(frozen=True, slots=True)
class AfterQuorum:
    """Due `grace_seconds` after the `count`-th node has contributed, or at once when all live nodes have.

    count 0: half of the live nodes, rounded up.  A round below its quorum is due `patience_seconds` after its first
    contribution: no silence of others can hold it for ever.
    """

    count: int = 0
    grace_seconds: float = 0.5
    patience_seconds: float = 5.0
    one_each: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.count < 0 or self.grace_seconds < 0 or self.patience_seconds < self.grace_seconds:
            raise ConfigError(
                f"quorum: count and grace must be at least 0 and patience at least grace; got count={self.count}, "
                f"grace={self.grace_seconds:g}, patience={self.patience_seconds:g}"
            )

    def due_at(self, first: Mapping[PeerId, float], live: Set[PeerId]) -> float | None:
        """See ReleaseRule."""
        times = sorted(first.values())
        if live <= first.keys():
            return times[-1]
        needed = min(self.count or ceil(len(live) / 2), len(live))
        patient = times[0] + self.patience_seconds
        return min(times[needed - 1] + self.grace_seconds, patient) if 0 < needed <= len(times) else patient


@dataclass(frozen=True, slots=True)
class Immediately:
    """Due as soon as anything is there (fully asynchronous): most messages, least waiting."""

    one_each: bool = field(default=False, init=False)

    def due_at(self, first: Mapping[PeerId, float], live: Set[PeerId]) -> float | None:
        """See ReleaseRule."""
        return min(first.values())


_FAMILIES: dict[str, tuple[dict[str, Any], Callable[..., ReleaseRule]]] = {
    "all": ({}, AfterAll),
    "quorum": (
        {"count": 0, "grace": 0.5, "patience": 5.0},
        lambda count, grace, patience: AfterQuorum(count, grace, patience),
    ),
    "immediately": ({}, Immediately),
}


def release_rule_from_spec(spec: str) -> ReleaseRule:
    """Return the rule that a string names: "all", "quorum:count=3,grace=0.2", "immediately". Raises ConfigError."""
    name, arguments = parse_spec(spec, {name: defaults for name, (defaults, _) in _FAMILIES.items()})
    return _FAMILIES[name][1](**arguments)


class Rounds(Generic[T]):
    """The contributions that have come and have not been released, oldest first."""

    def __init__(self, rule: ReleaseRule) -> None:
        self.rule = rule
        self._waiting: list[tuple[PeerId, float, T]] = []

    def add(self, peer: PeerId, contribution: T, now: float) -> None:
        """Take one contribution."""
        self._waiting.append((peer, now, contribution))

    @property
    def pending(self) -> tuple[tuple[PeerId, T], ...]:
        """What waits, in the order of arrival."""
        return tuple((peer, contribution) for peer, _, contribution in self._waiting)

    def due_at(self, live: Set[PeerId]) -> float | None:
        """Return when the round is due, None if nothing waits or only a further arrival can make it due."""
        first: dict[PeerId, float] = {}
        for peer, came, _ in self._waiting:
            first.setdefault(peer, came)
        return self.rule.due_at(first, live) if first else None

    def take(self, live: Set[PeerId], now: float) -> list[tuple[PeerId, T]]:
        """Return the contributions of a round that is due by `now` and forget them; [] when none is."""
        due = self.due_at(live)
        if due is None or due > now:
            return []
        taken: list[tuple[PeerId, T]] = []
        kept: list[tuple[PeerId, float, T]] = []
        seen: set[PeerId] = set()
        for peer, came, contribution in self._waiting:
            if self.rule.one_each and peer in seen:
                kept.append((peer, came, contribution))
            else:
                taken.append((peer, contribution))
                seen.add(peer)
        self._waiting = kept
        return taken

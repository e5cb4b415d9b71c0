"""Release rules: when a round of contributions is due. Pure: no clock, no sockets; times are arguments, in seconds.

Rule 1: every release rule is here. A rule counts contributions; it never looks inside one.
Rule 2: a rule has no memory: it judges a `RoundView`. Observations are kept, and bounded, by `Paces`.
Rule 3: no timeout is configured: how long a quorum waits for the others follows from how late they have been.
Rule 4: some rules keep one round for each fragment of the model: a node that is late with one fragment is in the next
round of that fragment, and does not mix it with the next one of the others. Lateness is known for each fragment; the
interval between contributions over all fragments where nodes send them in turn, and for each where every exchange
carries all.
Rule 5: callers pass the live nodes at every call; nothing else is announced. The clock of a new node begins where the
slowest live node stands; a node that is no longer live is forgotten once nothing of it waits.
Sources: bulk-synchronous, asynchronous and stale-synchronous parallel: Ho et al. 2013; Async-FMB and Async-Timed:
Al-Lawati et al., JSAIT 2021.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from math import ceil, inf
from statistics import median
from typing import ClassVar

from zmqtrain.core.specs import Family, Range, format_spec
from zmqtrain.core.types import PeerId
from zmqtrain.protocol.messages import Publish

LATENESS_KEPT, LATENESS_OF_A_ROUND = 64, 16
"""Observations of lateness that are kept, and that one round gives at most."""
INTERVALS_KEPT = 5  # between contributions of one node
FIRST_GRACE_SECONDS = 0.5  # of a quorum until LATENESS_ENOUGH observations of lateness
LATENESS_ENOUGH = 4
LEAST_SPREAD = 0.01
"""The MAD counts for at least this share of the median, so that a node that is always equally late is awaited."""


class Intervals:
    """How often nodes send. seconds: between two contributions of one node, the median over the nodes at the last
    `observe`; None: no node had sent two."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._last: dict[PeerId, float] = {}
        self._newest: dict[PeerId, deque[float]] = {}

    def came(self, peer: PeerId, now: float) -> None:
        if (last := self._last.get(peer)) is not None:
            self._newest.setdefault(peer, deque(maxlen=INTERVALS_KEPT)).append(now - last)
        self._last[peer] = now

    def forget(self, peer: PeerId) -> None:
        self._last.pop(peer, None)
        self._newest.pop(peer, None)

    def observe(self) -> None:
        """At a release, compute `seconds`."""
        medians = [median(newest) for newest in self._newest.values()]
        self.seconds = median(medians) if medians else None


class Paces:
    """The paces of all nodes in one series of rounds.

    intervals: how often they send, to any of the series that share it; None: this one alone.
    clocks, landed: by node, how many of its contributions have come, and have been released.
    lateness: seconds after the quorum of their round at which others came, the newest last.
    """

    def __init__(self, intervals: Intervals | None = None) -> None:
        self.intervals = intervals or Intervals()
        self.clocks: dict[PeerId, int] = {}
        self.landed: dict[PeerId, int] = {}
        self.lateness: deque[float] = deque(maxlen=LATENESS_KEPT)
        self._live: Set[PeerId] = frozenset()
        self._missed: tuple[float, Set[PeerId]] = (0.0, frozenset())

    def came(self, peer: PeerId, now: float) -> None:
        if peer not in self.clocks:
            self._meet({peer})
        self.clocks[peer] += 1
        self.intervals.came(peer, now)

    def look(self, live: Set[PeerId], waiting: Set[PeerId]) -> None:
        """Record the live nodes; forget a node that is neither live nor has anything waiting. (Of several series that
        share `intervals`, the first one to forget it does so for all.)"""
        for peer in self.clocks.keys() - live - waiting:
            del self.clocks[peer], self.landed[peer]
            self.intervals.forget(peer)
        self._live = live
        if newcomers := live - self.clocks.keys():
            self._meet(newcomers)

    def observe(self, first: Mapping[PeerId, float], quorum: int) -> None:
        """At a release, record how late nodes came in this round, or after the one before.

        first: by contributing node, when its oldest contribution came.  quorum: how many nodes the round awaited.
        """
        self.intervals.observe()
        times = sorted(first.values())
        reached = times[quorum - 1] if 0 < quorum <= len(times) else None
        before, missed = self._missed
        late = [
            came - before for peer, came in first.items() if peer in missed and (reached is None or came <= reached)
        ]
        if reached is None:
            self._missed = (before, missed - first.keys())
        else:
            self._missed = (reached, self._live - first.keys())
            late += [came - reached for came in times[quorum:]]
        late.sort()
        self.lateness.extend(late[:: ceil(len(late) / LATENESS_OF_A_ROUND) or 1])

    def _meet(self, newcomers: Set[PeerId]) -> None:
        # the slowest node's released contributions, not those that have come: a node may be new since before the newest
        known = self.clocks.keys() & self._live or self.clocks.keys()
        start = min((self.landed[peer] for peer in known), default=0)
        for peer in newcomers:
            self.clocks[peer] = self.landed[peer] = start


@dataclass(frozen=True, slots=True)
class RoundView:
    """What a rule may know of the open round; at least one contribution waits.

    came: arrival of each waiting contribution, in order.  first: by contributing node, arrival of its oldest one.
    live: the nodes from which a contribution can be awaited.  released_at: when the last round was due; None: none was.
    clocks, landed: of the live and the contributing nodes, how many contributions have come, and have been released;
        both begin, for a new node, where the slowest live node stands.
    lateness: seconds after the quorum of their round at which others came, in past rounds (the newest 64).
    interval_seconds: between two contributions of one node, of any fragment, the median over the nodes; None: no node
        has sent two.
    """

    came: Sequence[float]
    first: Mapping[PeerId, float]
    live: Set[PeerId]
    released_at: float | None = None
    clocks: Mapping[PeerId, int] = field(default_factory=dict)
    landed: Mapping[PeerId, int] = field(default_factory=dict)
    lateness: Sequence[float] = ()
    interval_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ReleaseRule(ABC):
    """When waiting contributions are aggregated and sent out. Equal rules have equal names.

    family: its name in a spec; its fields are the arguments.
    one_each: a release takes at most one contribution of each node, the oldest, and may hold back some; otherwise all.
    by_fragment: every fragment of the model has a round of its own; otherwise one round takes any contribution.
    """

    family: ClassVar[str]
    one_each: ClassVar[bool] = False
    by_fragment: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The canonical spec: `release_rule_from_spec(name)` gives an equal rule."""
        return format_spec(self.family, asdict(self))

    @abstractmethod
    def due_at(self, view: RoundView) -> float | None:
        """Return the time from which the round is due, or None while only a further arrival can make it so."""

    def admitted(self, view: RoundView) -> Set[PeerId]:
        """Return the contributing nodes whose oldest contribution a release may take now."""
        return view.first.keys()

    def quorum(self, live: int) -> int | None:
        """Return how many of `live` nodes a round awaits before others are late; None: the rule has no quorum."""
        return None


@dataclass(frozen=True, slots=True)
class AfterAll(ReleaseRule):
    """Due when every live node has contributed (BSP: the slowest sets the pace)."""

    family: ClassVar[str] = "all"
    one_each: ClassVar[bool] = True

    def due_at(self, view: RoundView) -> float | None:
        return max(view.first.values()) if view.live <= view.first.keys() else None


@dataclass(frozen=True, slots=True)
class AfterQuorum(ReleaseRule):
    """Due a grace after the `count`-th node has contributed, or at once when all live nodes have.

    count 0: half of the live nodes, rounded up.  share: the longest grace, as a share of one node's own interval (its k
    steps, for any number of fragments); 0: no grace.  patience: seconds after its first contribution from which a round
    below its quorum is due, so silent nodes cannot hold it for ever.
    """

    family: ClassVar[str] = "quorum"
    by_fragment: ClassVar[bool] = True
    count: int = 0
    share: float = 0.5
    patience: float = 5.0

    def quorum(self, live: int) -> int:
        return min(self.count or ceil(live / 2), live)

    def grace_seconds(self, view: RoundView) -> float:
        """Return how long a round waits after its quorum: median + 3 MAD of past lateness, at most the share."""
        usual = FIRST_GRACE_SECONDS
        if len(view.lateness) >= LATENESS_ENOUGH:
            middle = median(view.lateness)
            spread = median(abs(late - middle) for late in view.lateness)
            usual = middle + 3 * max(spread, LEAST_SPREAD * middle)
        if view.interval_seconds is None:
            return min(usual, FIRST_GRACE_SECONDS) if self.share else 0.0
        return min(usual, self.share * view.interval_seconds)

    def due_at(self, view: RoundView) -> float | None:
        times = sorted(view.first.values())
        if view.live <= view.first.keys():
            return times[-1]
        needed = self.quorum(len(view.live))
        patient = times[0] + self.patience
        return min(times[needed - 1] + self.grace_seconds(view), patient) if needed <= len(times) else patient


@dataclass(frozen=True, slots=True)
class Immediately(ReleaseRule):
    """Due as soon as one contribution waits (fully asynchronous): most messages, least waiting."""

    family: ClassVar[str] = "immediately"

    def due_at(self, view: RoundView) -> float | None:
        return view.came[0]


@dataclass(frozen=True, slots=True)
class AfterCount(ReleaseRule):
    """Due when so many contributions have come, from any nodes (the broker of Async-FMB).

    If fewer nodes are live, their number is enough, because a node whose offers all wait here sends no more.
    """

    family: ClassVar[str] = "count"
    contributions: int = 3

    def due_at(self, view: RoundView) -> float | None:
        needed = max(1, min(self.contributions, len(view.live)))
        return view.came[needed - 1] if needed <= len(view.came) else None


@dataclass(frozen=True, slots=True)
class AfterTime(ReleaseRule):
    """Due so many seconds after the last round was, with the contributions that wait (the broker of Async-Timed).

    If none waits then, it is due at the first contribution, and the next `seconds` begin with that.  Before the first
    release they begin with the first contribution.
    """

    family: ClassVar[str] = "time"
    seconds: float = 0.2

    def due_at(self, view: RoundView) -> float | None:
        if view.released_at is None:
            return view.came[0] + self.seconds
        return max(view.came[0], view.released_at + self.seconds)


@dataclass(frozen=True, slots=True)
class BoundedStaleness(ReleaseRule):
    """Due at once, but a node's i-th contribution only when i - `staleness` have come from every live node (SSP).

    So a node waits when it is more than `staleness` exchanges ahead of the slowest; the slowest never waits.  0:
    bulk-synchronous, the very rounds of AfterAll; a huge one: asynchronous.  Source: Ho et al. 2013.
    """

    family: ClassVar[str] = "bounded"
    one_each: ClassVar[bool] = True
    staleness: int = 4

    def admitted(self, view: RoundView) -> Set[PeerId]:
        if view.live:
            slowest = min(view.clocks[peer] for peer in view.live)
        else:
            slowest = 1 + min(view.landed[peer] for peer in view.first)
        return {peer for peer in view.first if view.landed[peer] < slowest + self.staleness}

    def due_at(self, view: RoundView) -> float | None:
        return max((view.first[peer] for peer in self.admitted(view)), default=None)


RELEASE_RULES = Family[ReleaseRule](
    {rule.family: rule for rule in (AfterAll, AfterQuorum, Immediately, AfterCount, AfterTime, BoundedStaleness)},
    {
        **dict.fromkeys(("count", "patience", "staleness"), Range(0)),
        "share": Range(0, 1),
        "contributions": Range(1),
        "seconds": Range(0, above=True),
    },
)


def release_rule_from_spec(spec: str) -> ReleaseRule:
    """Return the rule that a string names. Raises ConfigError.

    "all", "quorum:count=0,share=0.5,patience=5", "immediately", "count:contributions=3", "time:seconds=0.2",
    "bounded:staleness=4"; an omitted argument takes the value shown.
    """
    return RELEASE_RULES.from_spec(spec)


class Rounds:
    """The contributions that have come and are not released, oldest first. paces: how the nodes have sent them.

    intervals: shared by all rounds that the same nodes send to; None: there are these alone.
    """

    def __init__(self, rule: ReleaseRule, intervals: Intervals | None = None) -> None:
        self.rule = rule
        self.paces = Paces(intervals)
        self.came: tuple[float, ...] = ()
        """When each of the contributions came that `take` has returned last, in their order."""
        self._waiting: list[tuple[PeerId, float, Publish]] = []
        self._released_at: float | None = None

    def add(self, peer: PeerId, contribution: Publish, now: float) -> None:
        self.paces.came(peer, now)
        self._waiting.append((peer, now, contribution))

    def forget(self, peer: PeerId) -> None:
        self._waiting = [one for one in self._waiting if one[0] != peer]

    @property
    def pending(self) -> tuple[tuple[PeerId, Publish], ...]:
        return tuple((peer, contribution) for peer, _, contribution in self._waiting)

    def due_at(self, live: Set[PeerId]) -> float | None:
        """Return when the round is due, None if nothing waits or only a further arrival can make it due."""
        view = self._view(live)
        return self.rule.due_at(view) if view.first else None

    def take(self, live: Set[PeerId], now: float) -> list[tuple[PeerId, Publish]]:
        """Return the contributions of a round that is due by `now` and forget them; [] when none is."""
        view = self._view(live)
        due = self.rule.due_at(view) if view.first else None
        if due is None or due > now:
            return []
        if (quorum := self.rule.quorum(len(live))) is not None:
            self.paces.observe(view.first, quorum)
        self._released_at = due  # not `now`: a late look must not delay the rounds that follow
        taken: list[tuple[PeerId, Publish]] = []
        kept: list[tuple[PeerId, float, Publish]] = []
        times: list[float] = []
        open_to = set(self.rule.admitted(view))
        for peer, came, contribution in self._waiting:
            if peer in open_to:
                taken.append((peer, contribution))
                times.append(came)
                self.paces.landed[peer] += 1
                if self.rule.one_each:
                    open_to.discard(peer)
            else:
                kept.append((peer, came, contribution))
        self._waiting, self.came = kept, tuple(times)
        return taken

    def _view(self, live: Set[PeerId]) -> RoundView:
        first: dict[PeerId, float] = {}
        for peer, came, _ in self._waiting:
            first.setdefault(peer, came)
        self.paces.look(live, first.keys())
        return RoundView(
            came=tuple(came for _, came, _ in self._waiting),
            first=first,
            live=live,
            released_at=self._released_at,
            clocks=self.paces.clocks,
            landed=self.paces.landed,
            lateness=tuple(self.paces.lateness),
            interval_seconds=self.paces.intervals.seconds,
        )


class FragmentRounds:
    """The rounds of all fragments, or one for all, under one rule; see `Rounds`.

    The caller has checked the fragment of each contribution.  together: every exchange of a node carries all.
    """

    def __init__(self, rule: ReleaseRule, together: bool = False) -> None:
        self.rule, self._together = rule, together
        self._intervals = Intervals()
        self._of_fragment: dict[int, Rounds] = {}
        self.came: tuple[float, ...] = ()
        """As `Rounds.came`, of the round that was taken last."""

    def add(self, peer: PeerId, contribution: Publish, now: float) -> None:
        fragment = contribution.fragment if self.rule.by_fragment else 0
        if fragment not in self._of_fragment:
            intervals = Intervals() if self._together else self._intervals
            self._of_fragment[fragment] = Rounds(self.rule, intervals)
            self._of_fragment = dict(sorted(self._of_fragment.items()))
        self._of_fragment[fragment].add(peer, contribution, now)

    def forget(self, peer: PeerId) -> None:
        for rounds in self._of_fragment.values():
            rounds.forget(peer)

    @property
    def pending(self) -> tuple[tuple[PeerId, Publish], ...]:
        """The waiting contributions: fragment by fragment, each in the order of arrival."""
        return tuple(one for rounds in self._of_fragment.values() for one in rounds.pending)

    def due_at(self, live: Set[PeerId]) -> float | None:
        """Return when the next round is due, None if nothing waits or only a further arrival can make one due."""
        return min((at for at, _ in self._due(live)), default=None)

    def take(self, live: Set[PeerId], now: float) -> list[tuple[PeerId, Publish]]:
        """Return the contributions of the round that was due first, and by `now`, and forget them; [] when none is."""
        due, fragment = min(self._due(live), default=(inf, 0))
        if due > now:
            return []
        rounds = self._of_fragment[fragment]
        taken = rounds.take(live, now)
        self.came = rounds.came
        return taken

    def _due(self, live: Set[PeerId]) -> list[tuple[float, int]]:
        rounds = self._of_fragment.items()
        return [(at, fragment) for fragment, one in rounds if (at := one.due_at(live)) is not None]

"""Know which k and d hold at which version, where a run's follow from what is measured (auto).

Rule 1: a schedule begins at a version, some versions ahead: every node comes to it at the step boundary at which it has
applied that version, and all agree without having asked.
Rule 2: a plan is made anew when nodes come or go, and when what was measured asks for another one without a break,
for `HOLD_VERSIONS` and `HOLD_SECONDS`: one that changes with every hesitation of a PC would cost more than it gains.
Rule 3: what a plan follows from is the planner's affair; what is fixed in the settings stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.errors import FramingError
from zmqtrain.protocol.members import Member
from zmqtrain.protocol.messages import Schedule
from zmqtrain.settings import AUTO_DELAY, AUTO_EVERY, RunSettings
from zmqtrain.types import ModelSpec, PeerId, Version

__all__ = ["FIRST_EVERY", "FIRST_DELAY", "Timetable", "Plan", "Planner", "Replanning"]

FIRST_EVERY, FIRST_DELAY = 8, 4
"""What holds until enough is known for a plan."""
LEAD_VERSIONS = 4
"""So many versions ahead a schedule begins: who is told now has not applied that yet."""
HOLD_VERSIONS, HOLD_SECONDS = 16, 5.0
CHANGE, DELAY_CHANGE = 0.25, 2
"""What counts as another plan: k or d by this share, d by at least so many steps."""
MOST_STEPS = 1 << 20


class Timetable:
    """The settings of a run by version. settings: as they were given; schedules: (from_version, every, delay)."""

    def __init__(self, settings: RunSettings, schedules: Iterable[tuple[int, int, int]] = ()) -> None:
        self._given = settings
        first = (
            FIRST_EVERY if settings.every == AUTO_EVERY else settings.every,
            FIRST_DELAY if settings.delay == AUTO_DELAY else settings.delay,
        )
        self._entries: list[tuple[Version, RunSettings]] = [(-1, settings.scheduled(*first))]
        for from_version, every, delay in schedules:
            self.add(Schedule(every, delay, from_version))

    def add(self, schedule: Schedule) -> None:
        """Take over a schedule; it takes the place of those that would begin later.

        Raises FramingError for one that cannot be; ignores all where k and d are given.
        """
        if not (1 <= schedule.every <= MOST_STEPS and 0 <= schedule.delay <= MOST_STEPS):
            raise FramingError(f"a schedule with every {schedule.every} and delay {schedule.delay}")
        if self._given.is_planned:
            settings = self._given.scheduled(schedule.every, schedule.delay)
            kept = [entry for entry in self._entries if entry[0] < schedule.from_version]
            self._entries = [*kept, (schedule.from_version, settings)]

    def at(self, version: Version) -> RunSettings:
        """Return the settings that hold at the step boundary at which `version` was applied, k and d in numbers."""
        for from_version, settings in reversed(self._entries):
            if from_version <= version:
                return settings
        return self._entries[0][1]

    def since(self, version: Version) -> tuple[tuple[int, int, int], ...]:
        """Return (from_version, every, delay) of what holds at `version`, and of what follows; () where k and d are
        given. What was before is forgotten."""
        if not self._given.is_planned:
            return ()
        passed = sum(from_version <= version for from_version, _ in self._entries)
        del self._entries[: max(0, passed - 1)]
        return tuple((from_version, one.every, one.delay) for from_version, one in self._entries)


@dataclass(frozen=True)
class Plan:
    """What a planner wants. text: what it follows from, for people."""

    every: int
    delay: int
    text: str = ""


class Planner(Protocol):
    """What k and d follow from: a pure function of what the hub knows."""

    def __call__(self, model: ModelSpec, members: Sequence[Member]) -> Plan | None:
        """Return the plan for these live nodes; None as long as too little is known of them."""


class Replanning:
    """Decide when a planner's plan is announced. text: what the last announced one follows from."""

    def __init__(self, timetable: Timetable, planner: Planner | None) -> None:
        self.text = ""
        self._timetable, self._planner = timetable, planner
        self._crew: frozenset[PeerId] = frozenset()
        self._from_version: Version = -1
        self._other_since: tuple[Version, float] | None = None

    def look(self, version: Version, model: ModelSpec, members: Sequence[Member], now: float) -> Schedule | None:
        """Return the schedule that is to be announced now, already in the timetable; None: what holds is good.

        version: of the hub; members: the live nodes.
        """
        settings = self._timetable.at(max(version, self._from_version))
        if self._planner is None or version < 0 or not members or version < self._from_version:
            return None
        plan = self._planner(model, members)
        if plan is None:
            return None
        every, delay = _within(plan.every, 1), _within(plan.delay, 0)
        crew = frozenset(member.peer for member in members)
        if crew == self._crew and not self._holds(_is_other(settings, every, delay), version, now):
            return None
        self._crew, self._other_since = crew, None
        if (every, delay) == (settings.every, settings.delay):
            return None
        self.text, self._from_version = plan.text, version + LEAD_VERSIONS
        schedule = Schedule(every, delay, self._from_version)
        self._timetable.add(schedule)
        return schedule

    def _holds(self, other: bool, version: Version, now: float) -> bool:
        """Whether another plan has been asked for, at each look, for long enough."""
        if not other:
            self._other_since = None
            return False
        if self._other_since is None:
            self._other_since = (version, now)
        since_version, since = self._other_since
        return version >= since_version + HOLD_VERSIONS and now >= since + HOLD_SECONDS


def _within(steps: int, least: int) -> int:
    return min(max(steps, least), MOST_STEPS)


def _is_other(settings: RunSettings, every: int, delay: int) -> bool:
    """Whether this k and d are more than a hesitation away from those that hold."""
    if abs(every - settings.every) >= CHANGE * settings.every:
        return every != settings.every
    return abs(delay - settings.delay) >= max(DELAY_CHANGE, CHANGE * settings.delay)

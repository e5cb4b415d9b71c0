"""Know which k, d, codecs and outer optimizer hold at which version, where they are fitted to what is measured (auto).

Rule 1: a schedule begins at a version, some versions ahead: every node comes to it at the step boundary at which it has
applied that version, and all agree without having asked.  A delta and an aggregate name their codec, so one that is
still in flight at the change is read all the same.
Rule 2: a plan is made anew when nodes come or go, and when what was measured asks for another one without a break,
for `HOLD_VERSIONS` and `HOLD_SECONDS`: one that changes with every hesitation of a PC would cost more than it gains.
Rule 3: what a plan follows from is the planner's affair; what is fixed in the settings stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from zmqtrain.core.errors import FramingError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import ModelSpec, PeerId, Version
from zmqtrain.protocol.members import Member
from zmqtrain.protocol.messages import Schedule, WireSchedule

LEAD_VERSIONS = 4
"""So many versions ahead a schedule begins: who is told now has not applied that yet."""
HOLD_VERSIONS, HOLD_SECONDS = 16, 5.0
CHANGE, DELAY_CHANGE = 0.25, 2
"""What counts as another plan, where its gain is not known: k or d by this share, d by at least so many steps."""
LEAST_GAIN, USUAL_GAIN = 1.03, 0.1
"""A plan is another one if the run is said to be so many times as fast with it; one that gains less than a tenth is
held back for all of `HOLD_VERSIONS` and `HOLD_SECONDS`, one that gains more for a part of them."""
MOST_STEPS = 1 << 20
LOOK_SECONDS = 0.25
"""A plan is computed so often at most, while the same nodes are here."""
LONGEST_SPEC = 256
CODECS_KEPT = 8
"""Of so many codecs, the newest of a run, a delta is taken: it may have been coded before the last change."""


def schedule_from_plain(plain: Iterable[Any]) -> Schedule:
    """Read a schedule as a Welcome and a checkpoint have it; one of three numbers is of version 0.1.

    Raises FramingError.
    """
    try:
        from_version, every, delay, *specs = plain
        if len(specs) not in (0, 3):
            raise ValueError(f"it has 3 or 6 parts, not {3 + len(specs)}")
        return Schedule(int(every), int(delay), int(from_version), *(str(spec) for spec in specs))
    except (TypeError, ValueError) as error:
        raise FramingError(f"no schedule: {error}") from error


class Timetable:
    """The settings of a run by version. settings: as they were given; schedules: as `since` gives them."""

    def __init__(self, settings: RunSettings, schedules: Iterable[WireSchedule] = ()) -> None:
        self._given = settings
        self._entries: list[tuple[Version, RunSettings]] = [(-1, settings.at_first)]
        self._codecs = deque([settings.at_first.codec], maxlen=CODECS_KEPT)
        for schedule in schedules:
            self.add(schedule_from_plain(schedule))

    def add(self, schedule: Schedule) -> None:
        """Take over a schedule; it takes the place of those that would begin later.

        Raises FramingError for one that cannot be; ignores all where nothing is auto.
        """
        if not (1 <= schedule.every <= MOST_STEPS and 0 <= schedule.delay <= MOST_STEPS):
            raise FramingError(f"a schedule with every {schedule.every} and delay {schedule.delay}")
        specs = (schedule.codec, schedule.broadcast_codec, schedule.outer)
        if any(len(spec) > LONGEST_SPEC for spec in specs):
            raise FramingError(f"a schedule with a spec of more than {LONGEST_SPEC} characters")
        if self._given.is_planned:
            settings = self._given.scheduled(
                every=schedule.every,
                delay=schedule.delay,
                codec=schedule.codec,
                broadcast_codec=schedule.broadcast_codec,
                outer=schedule.outer,
            )
            settings = settings.at_first  # of version 0.1, or of a spec that is left out: as at the beginning
            kept = [entry for entry in self._entries if entry[0] < schedule.from_version]
            self._entries = [*kept, (schedule.from_version, settings)]
            if settings.codec not in self._codecs:
                self._codecs.append(settings.codec)

    def at(self, version: Version) -> RunSettings:
        """Return the settings that hold at the step boundary at which `version` was applied: nothing is auto in them,
        but for the fragments, which follow from the model."""
        for from_version, settings in reversed(self._entries):
            if from_version <= version:
                return settings
        return self._entries[0][1]

    def takes(self, codec: str) -> bool:
        """Whether a delta may be coded so: by a codec that holds, held of late, or will hold."""
        return codec in self._codecs

    def since(self, version: Version) -> tuple[WireSchedule, ...]:
        """Return (from_version, every, delay, codec, broadcast_codec, outer) of what holds at `version`, and of what
        follows; () where nothing is auto. What was before is forgotten."""
        if not self._given.is_planned:
            return ()
        passed = sum(from_version <= version for from_version, _ in self._entries)
        self._entries = self._entries[max(0, passed - 1) :]
        return tuple(
            (from_version, one.every, one.delay, one.codec, one.broadcast_codec, one.outer)
            for from_version, one in self._entries
        )


@dataclass(frozen=True)
class Plan:
    """What a planner wants, of what is auto. text: what it follows from, for people. gain: how many times as fast the
    run reaches a loss with it as with what holds, as predicted (0: not known)."""

    every: int
    delay: int
    text: str = ""
    codec: str = ""
    broadcast_codec: str = ""
    outer: str = ""
    gain: float = 0.0

    @property
    def chosen(self) -> dict[str, Any]:
        """What it chooses, by setting."""
        names = ("every", "delay", "codec", "broadcast_codec", "outer")
        return {name: getattr(self, name) for name in names}


class Planner(Protocol):
    """What the settings that are auto follow from: a pure function of what the hub knows."""

    def __call__(self, model: ModelSpec, members: Sequence[Member], now: RunSettings) -> Plan | None:
        """Return the plan for these live nodes; None as long as too little is known of them. now: what holds."""


class Replanning:
    """Decide when a planner's plan is announced. text: what the last announced one follows from."""

    def __init__(self, timetable: Timetable, planner: Planner | None) -> None:
        self.text = ""
        self._timetable, self._planner = timetable, planner
        self._nodes: frozenset[PeerId] = frozenset()
        self._from_version: Version = -1
        self._other_since: tuple[Version, float] | None = None
        self._looked_at = -inf

    def look(self, version: Version, model: ModelSpec, members: Sequence[Member], now: float) -> Schedule | None:
        """Return the schedule that is to be announced now, already in the timetable; None: what holds is good.

        version: of the hub; members: the live nodes.
        """
        nodes = frozenset(member.peer for member in members)
        settings = self._timetable.at(max(version, self._from_version))
        if self._planner is None or version < 0 or not members or version < self._from_version:
            return None
        if nodes == self._nodes and now < self._looked_at + LOOK_SECONDS:
            return None
        self._looked_at = now
        plan = self._planner(model, members, settings)
        if plan is None:
            return None
        wanted = settings.to_dict() | {name: value for name, value in plan.chosen.items() if value != ""}
        wanted |= {"every": _within(plan.every, 1), "delay": _within(plan.delay, 0)}
        if nodes == self._nodes and not self._holds(_is_other(settings, wanted, plan.gain), plan.gain, version, now):
            return None
        self._nodes, self._other_since = nodes, None
        if wanted == settings.to_dict():
            return None
        self.text, self._from_version = plan.text, version + LEAD_VERSIONS
        specs = (wanted["codec"], wanted["broadcast_codec"], wanted["outer"])
        schedule = Schedule(wanted["every"], wanted["delay"], self._from_version, *specs)
        self._timetable.add(schedule)
        return schedule

    def _holds(self, other: bool, gain: float, version: Version, now: float) -> bool:
        """Whether another plan has been asked for, at each look, for long enough: the less it gains, the longer."""
        if not other:
            self._other_since = None
            return False
        if self._other_since is None:
            self._other_since = (version, now)
        since_version, since = self._other_since
        patience = min(1.0, USUAL_GAIN / (gain - 1)) if gain > 1 else 1.0
        return version >= since_version + patience * HOLD_VERSIONS and now >= since + patience * HOLD_SECONDS


def _within(steps: int, least: int) -> int:
    return min(max(steps, least), MOST_STEPS)


def _is_other(settings: RunSettings, wanted: Mapping[str, Any], gain: float) -> bool:
    """Whether a plan is more than a hesitation away from what holds."""
    if gain:
        return gain >= LEAST_GAIN
    every, delay = wanted["every"], wanted["delay"]
    if abs(every - settings.every) >= CHANGE * settings.every:
        return bool(every != settings.every)
    return bool(abs(delay - settings.delay) >= max(DELAY_CHANGE, CHANGE * settings.delay))

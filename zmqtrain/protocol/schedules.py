"""Schedules: which k, d, codecs and outer optimizer hold at which version, where they are auto.

Rule 1: a schedule begins some versions ahead: every node adopts it at the step boundary at which it has applied that
version, so all agree without asking. A delta and an aggregate name their codec, so one that is in flight at the change
can still be read.
Rule 2: a plan is made when nodes join or leave, when the first node reports the time of its step, and when measurements
ask for another one without interruption for `HOLD_VERSIONS` and `HOLD_SECONDS`: a plan that changes with every
hesitation of a PC costs more than it gains. A provisional plan is for the beginning, at version 0: later, as where all
nodes come again, what holds is of measurements, and stays until there are new ones.
Rule 3: how a plan follows from measurements is the planner's business; what is fixed in the settings stays.
Rule 4: a plan under which offers are put off is a wrong one: what an exchange takes longer than was predicted is
measured then, and the next plan, made at once, counts with it.
Rule 5: of several brokers the first plans. The others announce what it has announced, each at a version of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from statistics import median_high, median_low
from typing import Any, NamedTuple, Protocol

from zmqtrain.core.errors import FramingError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import ModelSpec, PeerId, Version
from zmqtrain.protocol.members import Member
from zmqtrain.protocol.messages import Schedule, WireSchedule
from zmqtrain.protocol.rounds import Immediately, ReleaseRule

LEAD_VERSIONS = 4
"""A schedule begins this many versions ahead: no node has applied that version yet. At version 0 it begins at once,
because no aggregate was made yet."""
HOLD_VERSIONS, HOLD_SECONDS = 16, 5.0
CHANGE, DELAY_CHANGE = 0.25, 2
"""Another plan, if its gain is not known, differs in k or d by this share, and in d by at least so many steps."""
LEAST_GAIN, USUAL_GAIN = 1.03, 0.1
"""Another plan makes the run at least this many times as fast. One that gains less than a tenth is held back for all of
`HOLD_VERSIONS` and `HOLD_SECONDS`, one that gains more for a part of them."""
MOST_STEPS = 1 << 20
LOOK_SECONDS = 0.5  # between two plans, while the same nodes are here
LONGEST_SPEC = 256
PLANNED = ("every", "delay", "codec", "broadcast_codec", "outer")
"""The settings that a plan chooses and a schedule announces."""
WINDOW_VERSIONS, WINDOW_SECONDS = 8, 5.0
MOST_PUT_OFF = 0.02
"""Offers are put off where it is so for more than this share of them in two windows that follow each other."""
STILL_PUT_OFF = 0.67
"""A larger k has not helped where such a share of the offers that were put off still is."""
KEPT_SECONDS, KEPT_WINDOWS = 600.0, 16
"""So long a plan counts with what was measured while offers were put off, and for so many windows at least; twice as
long when it is measured again."""
CODECS_KEPT = 8
"""A delta may be coded by this many codecs, the newest of a run: it may be older than the last change."""


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
    """The settings of a run by version. settings: as configured; schedules: as `since` gives them."""

    def __init__(self, settings: RunSettings, schedules: Iterable[WireSchedule] = ()) -> None:
        self._given = settings
        self._entries: list[tuple[Version, RunSettings]] = [(-1, settings.at_first)]
        self._codecs = deque([settings.at_first.codec], maxlen=CODECS_KEPT)
        for schedule in schedules:
            self.add(schedule_from_plain(schedule))

    def add(self, schedule: Schedule) -> None:
        """Add a schedule in place of those that would begin later; ignored where nothing is auto.

        Raises FramingError for one that cannot be.
        """
        if not (1 <= schedule.every <= MOST_STEPS and 0 <= schedule.delay <= MOST_STEPS):
            raise FramingError(f"a schedule with every {schedule.every} and delay {schedule.delay}")
        if max(map(len, (schedule.codec, schedule.broadcast_codec, schedule.outer))) > LONGEST_SPEC:
            raise FramingError(f"a schedule with a spec of more than {LONGEST_SPEC} characters")
        if self._given.is_planned:
            chosen = {name: getattr(schedule, name) for name in PLANNED}
            # a spec that is left out, as in version 0.1, is as at the beginning
            settings = self._given.scheduled(**chosen).at_first
            kept = [entry for entry in self._entries if entry[0] < schedule.from_version]
            self._entries = [*kept, (schedule.from_version, settings)]
            if settings.codec not in self._codecs:
                self._codecs.append(settings.codec)

    @property
    def is_planned(self) -> bool:
        """Whether something in it is auto."""
        return self._given.is_planned

    @property
    def newest(self) -> RunSettings:
        """The settings that hold, or will hold, last."""
        return self._entries[-1][1]

    def at(self, version: Version) -> RunSettings:
        """Return the settings from the step boundary on at which `version` was applied: nothing is auto in them except
        the fragments, which follow from the model."""
        for from_version, settings in reversed(self._entries):
            if from_version <= version:
                return settings
        return self._entries[0][1]

    def takes(self, codec: str) -> bool:
        """Whether a delta may be coded by this codec, which holds, held recently, or will hold."""
        return codec in self._codecs

    def since(self, version: Version) -> tuple[WireSchedule, ...]:
        """Return (from_version, every, delay, codec, broadcast_codec, outer) of what holds at `version` and of what
        follows; () where nothing is auto. Earlier entries are forgotten."""
        if not self._given.is_planned:
            return ()
        passed = sum(from_version <= version for from_version, _ in self._entries)
        self._entries = self._entries[max(0, passed - 1) :]
        return tuple(
            (start, one.every, one.delay, one.codec, one.broadcast_codec, one.outer) for start, one in self._entries
        )


@dataclass(frozen=True)
class Plan:
    """A planner's choice of what is auto. text: its reasons, for people. gain: how many times as fast the run reaches a
    loss with it as with what holds, as predicted (0: not known).  provisional: it assumes what is measured soon.
    fits: the smallest k and d with which no offer is put off, as predicted, whatever was configured."""

    every: int
    delay: int
    text: str = ""
    codec: str = ""
    broadcast_codec: str = ""
    outer: str = ""
    gain: float = 0.0
    provisional: bool = False
    fits: tuple[int, int] = (0, 0)

    @property
    def chosen(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in PLANNED}


class Planner(Protocol):
    """A pure function from what the hub knows to the settings that are auto."""

    def __call__(
        self, model: ModelSpec, members: Sequence[Member], now: RunSettings, crowded: OfferFigures | None
    ) -> Plan | None:
        """Return the plan for these live nodes; None while too little is known of them. now: what holds.  crowded:
        what was measured while offers were put off; None: they were not, or long ago."""


class OfferFigures(NamedTuple):
    """What a typical node's offers did in a window of time.

    put_off: the share of them that was put off, because those before had not landed.  seconds: between two exchanges.
    age_steps: from an offer to its application (NaN: not known).  settings: what held.
    """

    put_off: float
    seconds: float
    age_steps: float
    settings: RunSettings

    @property
    def crowded(self) -> bool:
        return self.put_off > MOST_PUT_OFF


class OfferMeter:
    """Measures whether offers are put off, and how long an exchange then takes.

    Rule 1: a window is of nodes that stay, under one schedule.  Rule 2: one window may have seen a hesitation, or the
    end of the schedule before; so two count that follow each other, and of them the shorter time of an exchange.
    Rule 3: where twice the k does not put clearly fewer offers off, no exchange is too long for k, but something else
    is waited for; then nothing is concluded for a while.
    crowded: what a plan has to count with: what was found last, until other nodes are here, or a schedule under which
    it was found has none put off, or it is too old.
    put_off: the share of offers that is put off now; 0: (nearly) none.
    """

    def __init__(self) -> None:
        self.crowded: OfferFigures | None = None
        self._has_helped = self._is_of_no_use = False
        self._first: OfferFigures | None = None
        """What was found before the schedules under which offers are put off still."""
        self._kept_until, self._kept_seconds = 0.0, KEPT_SECONDS
        self._begun: tuple[Version, float, tuple[Any, ...]] = (0, 0.0, ())
        self._counts: dict[PeerId, tuple[int, int]] = {}
        """Of each node its contributions, and its offers that were put off, when the window began."""
        self._windows: tuple[OfferFigures | None, OfferFigures | None] = (None, None)

    @property
    def put_off(self) -> float:
        before, last = self._windows
        return last.put_off if before and last and before.crowded and last.crowded else 0.0

    def look(
        self, version: Version, settings: RunSettings, members: Sequence[Member], at_once: int, now: float
    ) -> None:
        """Count what nodes have done. settings: what holds.  at_once: fragments that an exchange carries."""
        counts = {
            one.peer: (one.contributions, one.report.offers_refused)
            for one in members
            if one.report and not (one.idle or one.quarantined)
        }
        others = counts.keys() != self._counts.keys()
        if others:
            self.crowded, self._is_of_no_use, self._kept_seconds = None, False, KEPT_SECONDS
        elif (self.crowded or self._is_of_no_use) and now >= self._kept_until:
            self.crowded, self._is_of_no_use, self._kept_seconds = None, False, 2 * self._kept_seconds
        (begun_at, since, held_then), held = self._begun, planned_of(settings)
        if others or held != held_then:
            self._windows = (None, None)
        elif version < begun_at + WINDOW_VERSIONS or now < since + WINDOW_SECONDS:
            return
        else:
            figures = self._figures(settings, members, counts, at_once, now - since)
            self._windows = self._windows[1], figures
            self._conclude(*self._windows, now, now - since)
        self._begun, self._counts = (version, now, held), counts

    def _figures(
        self,
        settings: RunSettings,
        members: Sequence[Member],
        counts: Mapping[PeerId, tuple[int, int]],
        at_once: int,
        seconds: float,
    ) -> OfferFigures | None:
        """Return what the typical node's offers did in this window; None: nothing landed.

        Left out is who has begun to count again (its process is another one), or has offered nothing.
        """
        shares, landed, ages = [], [], []
        for one in members:
            if one.peer not in counts or one.report is None:
                continue
            after, before = counts[one.peer], self._counts[one.peer]
            made, put_off = after[0] - before[0], after[1] - before[1]
            if made > 0 and put_off >= 0:
                shares.append(put_off / (put_off + made * max(1, settings.shards)))
                landed.append(made)
                ages += [one.report.age_steps] if isfinite(one.report.age_steps) else []
        if not landed:
            return None
        typical = seconds * at_once / median_high(landed)
        return OfferFigures(median_low(shares), typical, median_low(ages) if ages else nan, settings)

    def _conclude(self, before: OfferFigures | None, last: OfferFigures | None, now: float, seconds: float) -> None:
        """seconds: that a window takes."""
        if before is None or last is None or before.crowded != last.crowded or self._is_of_no_use:
            return
        if last.crowded:
            found = last._replace(seconds=min(before.seconds, last.seconds))
            if self.crowded is None or self._has_helped:
                self._first, self._has_helped = found, False
            self._is_of_no_use = self._first is not None and _has_not_helped(self._first, found)
            self.crowded = None if self._is_of_no_use else found
            self._kept_until = now + max(self._kept_seconds, KEPT_WINDOWS * seconds)
        elif self.crowded is not None:
            self._has_helped = planned_of(self.crowded.settings) != planned_of(last.settings)
            self.crowded = self.crowded if self._has_helped else None


def _has_not_helped(before: OfferFigures, after: OfferFigures) -> bool:
    """Whether k is twice as large, and as many offers are put off, or nearly."""
    return after.settings.every >= 2 * before.settings.every and after.put_off >= STILL_PUT_OFF * before.put_off


def planned_of(settings: RunSettings) -> tuple[Any, ...]:
    """Return what a schedule has chosen, in the order of PLANNED."""
    return tuple(getattr(settings, name) for name in PLANNED)


class Replanning:
    """Decides when a planner's plan is announced. text: the reasons of the last announced one.

    rule: of release: offers are measured where it is `immediately`, or a quorum of half of the nodes or fewer; under
    others they are put off in any case. Nor are those of pipelines measured: its PCs have different parts of the model.
    offers: whether they are put off.  fits: the k and d of a plan with which none would be, as predicted last.
    """

    def __init__(self, timetable: Timetable, planner: Planner | None, rule: ReleaseRule) -> None:
        self.text, self.fits, self.offers = "", (0, 0), OfferMeter()
        self._timetable, self._planner, self._rule = timetable, planner, rule
        self._nodes: frozenset[PeerId] = frozenset()
        self._from_version: Version = -1
        self._other_since: tuple[Version, float] | None = None
        self._planned_for: tuple[Any, ...] = ()
        """The schedule under which offers were put off, if a plan was made for that."""
        self._looked_at = -inf
        self._looked_for: frozenset[PeerId] = frozenset()

    def look(self, version: Version, model: ModelSpec, members: Sequence[Member], now: float) -> Schedule | None:
        """Return the schedule to announce now, which is in the timetable already; None: what holds is good.

        version: of the hub; members: the live nodes.
        """
        nodes = frozenset(member.peer for member in members)
        settings = self._timetable.at(max(version, self._from_version))
        if self._planner is None or version < 0 or not members or version < self._from_version:
            return None
        if nodes == self._looked_for and now < self._looked_at + LOOK_SECONDS:
            return None
        self._looked_at, self._looked_for = now, nodes
        if self._waits_for_few(len(nodes)) and not any(member.holds for member in members):
            at_once = settings.fragments_of(model) if settings.carries_all else 1
            self.offers.look(version, settings, members, at_once, now)
        else:
            self.offers = OfferMeter()
        crowded = self.offers.crowded
        if not (self._timetable.is_planned or crowded):
            return None
        plan = self._planner(model, members, settings, crowded)
        if plan is None or (plan.provisional and version > 0):
            return None
        self.fits = plan.fits
        if not self._timetable.is_planned:
            return None
        wanted = settings.to_dict() | {name: value for name, value in plan.chosen.items() if value != ""}
        wanted |= {"every": min(max(plan.every, 1), MOST_STEPS), "delay": min(max(plan.delay, 0), MOST_STEPS)}
        # where offers are put off under what holds, another plan needs no gain, and no more patience than the meter's
        held = planned_of(settings) if crowded and planned_of(crowded.settings) == planned_of(settings) else ()
        at_once = bool(held) and held != self._planned_for
        self._planned_for = held if crowded else ()
        other = _is_other(settings, wanted, plan.gain)
        if nodes == self._nodes and not at_once and not self._holds(other, plan.gain, version, now):
            return None
        self._nodes, self._other_since = frozenset() if plan.provisional else nodes, None
        return None if wanted == settings.to_dict() else self._announce(plan.text, version, wanted)

    def _waits_for_few(self, nodes: int) -> bool:
        if isinstance(self._rule, Immediately):
            return True
        quorum = self._rule.quorum(nodes)
        return quorum is not None and 2 * quorum <= nodes + 1

    def follow(self, version: Version, planned: RunSettings) -> Schedule | None:
        """Return the schedule with which another broker of the run has what the first has planned; None: it has it.

        version: of this hub.  planned: the newest settings of the first.
        """
        wanted, newest = planned.to_dict(), self._timetable.newest
        if version < 0 or all(wanted[name] == getattr(newest, name) for name in PLANNED):
            return None
        return self._announce("as the first broker has planned", version, wanted)

    def _announce(self, text: str, version: Version, wanted: Mapping[str, Any]) -> Schedule:
        self.text, self._from_version = text, version + LEAD_VERSIONS if version else 0
        schedule = Schedule(from_version=self._from_version, **{name: wanted[name] for name in PLANNED})
        self._timetable.add(schedule)
        return schedule

    def _holds(self, other: bool, gain: float, version: Version, now: float) -> bool:
        """Whether another plan was wanted at each look for long enough: the less it gains, the longer."""
        if not other:
            self._other_since = None
            return False
        if self._other_since is None:
            self._other_since = (version, now)
        since_version, since = self._other_since
        patience = min(1.0, USUAL_GAIN / (gain - 1)) if gain > 1 else 1.0
        return version >= since_version + patience * HOLD_VERSIONS and now >= since + patience * HOLD_SECONDS


def _is_other(settings: RunSettings, wanted: Mapping[str, Any], gain: float) -> bool:
    """Whether a plan differs from what holds by more than noise."""
    if gain:
        return gain >= LEAST_GAIN
    every, delay = wanted["every"], wanted["delay"]
    if abs(every - settings.every) >= CHANGE * settings.every:
        return bool(every != settings.every)
    return bool(abs(delay - settings.delay) >= max(DELAY_CHANGE, CHANGE * settings.delay))

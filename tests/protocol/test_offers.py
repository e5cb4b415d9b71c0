"""Whether offers are put off, as the hub measures it, and what that does to a plan and to what is said of a run."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan

import pytest

from tests.protocol.hubs import hub_of, live_hub
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings
from zmqtrain.core.types import LeafSpec, PeerId
from zmqtrain.protocol.members import Member, MemberState
from zmqtrain.protocol.messages import Report, Schedule
from zmqtrain.protocol.rounds import AfterQuorum, release_rule_from_spec
from zmqtrain.protocol.schedules import (
    KEPT_SECONDS,
    KEPT_WINDOWS,
    LOOK_SECONDS,
    WINDOW_SECONDS,
    WINDOW_VERSIONS,
    OfferFigures,
    OfferMeter,
    Plan,
    Replanning,
    Timetable,
)

AUTO = RunSettings(release="immediately").at_first
OTHER = replace(AUTO, every=9)
MODEL = (LeafSpec("w", (3, 4), "float32"),)


class Crew:
    """Live nodes that land and put off offers, window after window, before a meter."""

    def __init__(self, *names: str) -> None:
        self.meter, self.version, self.now = OfferMeter(), 0, 0.0
        self.members = [Member(PeerId(name), name, MemberState.LIVE, 0.0, 0.0) for name in names]
        for member in self.members:
            member.report = Report(0, 0, 1.0, 1.0, nan, 0, 0, 0)
        self.look()

    def look(self, settings: RunSettings = AUTO, at_once: int = 1) -> None:
        self.meter.look(self.version, settings, self.members, at_once, self.now)

    def window(
        self, landed: int, put_off: int, settings: RunSettings = AUTO, seconds: float = WINDOW_SECONDS, at_once: int = 1
    ) -> None:
        """Let each node land and put off so many offers, in the last look of a window."""
        self.version, self.now = self.version + WINDOW_VERSIONS, self.now + seconds
        for member in self.members:
            self.did(member, landed, put_off)
        self.look(settings, at_once)

    def did(self, member: Member, landed: int, put_off: int, age: float = 14.0) -> None:
        assert member.report is not None
        refused = member.report.offers_refused + put_off
        member.contributions += landed
        member.report = Report(0, 0, 1.0, 1.0, age, refused, 0, 0)


def test_two_windows_that_follow_each_other_tell_it_and_the_shorter_time_of_an_exchange_counts() -> None:
    crew = Crew("a", "b")
    crew.window(10, 10, seconds=8.0)
    assert crew.meter.crowded is None and not crew.meter.put_off
    crew.window(10, 5)
    assert crew.meter.crowded == OfferFigures(5 / 15, WINDOW_SECONDS / 10, 14.0, AUTO)
    assert crew.meter.put_off == 5 / 15


def test_a_window_has_versions_and_seconds() -> None:
    crew = Crew("a")
    for _ in range(50):
        crew.version, crew.now = crew.version + 1, crew.now + WINDOW_SECONDS / WINDOW_VERSIONS / 2
        crew.did(crew.members[0], 1, 1)
        crew.look()
    assert crew.meter.crowded is not None
    assert crew.meter.crowded.seconds == pytest.approx(WINDOW_SECONDS / WINDOW_VERSIONS / 2)


def test_where_a_clearly_larger_k_puts_as_many_off_something_else_is_waited_for_and_plans_do_without_it() -> None:
    crew = found("a")
    for _ in range(5):  # k = 9 for 2: a third of the offers was put off, and still is
        crew.window(10, 5, settings=OTHER)
    assert crew.meter.crowded is None and crew.meter.put_off == 5 / 15, "it is said all the same"
    windows = 0
    while crew.meter.crowded is None:
        crew.window(10, 5)
        windows += 1
    assert windows == pytest.approx(KEPT_SECONDS / WINDOW_SECONDS, abs=3), "then it is tried again"


@pytest.mark.parametrize(("every", "put_off"), [(9, 2), (9, 0), (2, 5)])
def test_where_a_larger_k_helps_or_k_is_hardly_larger_the_next_plan_counts_with_what_is_found_then(
    every: int, put_off: int
) -> None:
    crew, after = found("a"), replace(AUTO, every=every, delay=7)
    for _ in range(4):
        crew.window(10, put_off, settings=after)
    assert crew.meter.crowded is not None
    assert crew.meter.crowded.settings == (after if put_off else AUTO)


def test_exchanges_that_take_long_are_counted_with_for_as_many_windows() -> None:
    crew = Crew("a")
    for _ in range(2):
        crew.window(8, 4, seconds=600.0)
    windows = 0
    while crew.meter.crowded is not None:
        crew.window(8, 0, settings=OTHER, seconds=600.0)
        windows += 1
    assert windows == KEPT_WINDOWS


def test_figures_of_a_crew_go_with_the_right_to_measure_them() -> None:
    """Two of four nodes leave, and the quorum of two is all of them."""
    timetable, crew = Timetable(RunSettings(release="quorum:count=2")), Crew("a", "b", "c", "d")
    machine = Replanning(timetable, Planner(), AfterQuorum(count=2))
    for _ in range(4):
        crew.now, crew.version = crew.now + WINDOW_SECONDS, crew.version + WINDOW_VERSIONS
        for member in crew.members:
            crew.did(member, 10, 5)
        machine.look(crew.version, MODEL, crew.members, crew.now)
    assert machine.offers.crowded is not None
    machine.look(crew.version + 2 * WINDOW_VERSIONS, MODEL, crew.members[:2], crew.now + 1.0)
    assert not machine.offers.put_off and machine.offers.crowded is None


@pytest.mark.parametrize(
    ("rule", "measures"),
    [
        ("immediately", True),
        ("quorum", True),
        ("quorum:count=4", False),
        ("all", False),
        ("time", False),
        ("count", False),
    ],
)
def test_offers_that_a_release_rule_keeps_waiting_say_nothing_of_k_and_d(rule: str, measures: bool) -> None:
    timetable, crew = Timetable(RunSettings(release=rule)), Crew("a", "b", "c", "d")
    machine = Replanning(timetable, Planner(), release_rule_from_spec(rule))
    for _ in range(6):
        crew.now, crew.version = crew.now + WINDOW_SECONDS, crew.version + WINDOW_VERSIONS
        for member in crew.members:
            crew.did(member, 10, 5)
        machine.look(crew.version, MODEL, crew.members, crew.now)
    assert (machine.offers.crowded is not None) is measures


@pytest.mark.parametrize("put_off", [[5, 0], [0, 5], [5, 0, 5, 0]])
def test_one_window_alone_tells_nothing(put_off: list[int]) -> None:
    crew = Crew("a")
    for count in put_off:
        crew.window(10, count)
    assert crew.meter.crowded is None


def test_one_node_of_three_that_puts_offers_off_says_nothing_of_the_run() -> None:
    crew = Crew("a", "b", "c")
    for _ in range(3):
        crew.did(crew.members[0], 0, 50)
        crew.window(10, 0)
    assert crew.meter.crowded is None


def test_what_an_exchange_carries_and_how_many_brokers_take_their_parts_is_counted() -> None:
    crew = Crew("a")
    four = replace(AUTO, shards=4, initial="founder")
    crew.look(four)
    for _ in range(2):
        crew.window(20, 20, settings=four, at_once=2)
    assert crew.meter.crowded == OfferFigures(20 / (20 + 4 * 20), WINDOW_SECONDS / 10, 14.0, four)


def test_of_a_run_whose_brokers_are_not_counted_yet_one_is_taken() -> None:
    crew, undecided = Crew("a"), replace(AUTO, start_nodes=8, shards=AUTO_SHARDS)
    assert undecided.shards == AUTO_SHARDS == 0
    crew.look(undecided)
    for put_off in (0, 0, 10, 10):
        crew.window(20, put_off, settings=undecided)
    assert crew.meter.put_off == 10 / 30


def found(*names: str) -> Crew:
    crew = Crew(*names)
    for _ in range(2):
        crew.window(10, 5)
    assert crew.meter.crowded is not None
    return crew


def test_it_is_known_for_as_long_as_another_schedule_keeps_offers_from_being_put_off() -> None:
    crew, windows = found("a"), 0
    while crew.meter.crowded is not None:
        crew.window(10, 0, settings=OTHER)
        windows += 1
        assert not crew.meter.put_off
    assert windows == KEPT_SECONDS / WINDOW_SECONDS
    for _ in range(3):  # the first begins a window only: another schedule
        crew.window(10, 5)
    begun = crew.now
    while crew.meter.crowded is not None:
        crew.window(10, 0, settings=OTHER)
    assert crew.now - begun == 2 * KEPT_SECONDS, "it was so again: it is kept for twice as long"


def test_it_is_forgotten_where_the_same_schedule_has_none_put_off_any_more() -> None:
    crew = found("a")
    crew.window(10, 0)
    assert crew.meter.crowded is not None
    crew.window(10, 0)
    assert crew.meter.crowded is None


def test_it_is_forgotten_when_other_nodes_are_here() -> None:
    crew = found("a", "b")
    crew.members.pop()
    crew.look()
    assert crew.meter.crowded is None


def test_a_process_that_begins_to_count_again_is_left_out_of_that_window_and_hides_nothing() -> None:
    crew = Crew("a", "b", "c")
    for window in range(4):
        crew.did(crew.members[0], 0, 0 if window % 2 else -5)
        crew.window(10, 5)
    assert crew.meter.crowded == OfferFigures(5 / 15, WINDOW_SECONDS / 10, 14.0, AUTO)


@pytest.mark.parametrize("state", ["quarantined", "idle", "offers nothing"])
def test_one_of_two_nodes_that_takes_no_part_says_nothing_of_the_other(state: str) -> None:
    crew = Crew("a", "b")
    first = crew.members[0]
    first.quarantined, first.idle = state == "quarantined", state == "idle"
    for _ in range(4):
        crew.version, crew.now = crew.version + WINDOW_VERSIONS, crew.now + WINDOW_SECONDS
        crew.did(first, 0, 10)
        crew.did(crew.members[1], 10, 0)
        crew.look()
    assert crew.meter.crowded is None and not crew.meter.put_off


def test_nodes_that_land_nothing_and_ages_that_are_not_known_are_no_figures() -> None:
    crew = Crew("a")
    for _ in range(3):
        crew.window(0, 5)
    assert crew.meter.crowded is None
    crew = Crew("a")
    for _ in range(2):
        crew.version, crew.now = crew.version + WINDOW_VERSIONS, crew.now + WINDOW_SECONDS
        crew.did(crew.members[0], 10, 5, age=nan)
        crew.look()
    assert crew.meter.crowded is not None and isnan(crew.meter.crowded.age_steps)


# ---------------------------------------------------------------------- a plan, and what is said


class Planner:
    """Wants k = 6 and d = 14 where offers were put off, else 4 and 10; neither gains anything."""

    def __call__(self, model: object, members: object, now: RunSettings, crowded: OfferFigures | None) -> Plan:
        every, delay = (4, 10) if crowded is None else (6, 14)
        return Plan(every, delay, gain=1.0, fits=(6, 14))


def test_where_offers_are_put_off_another_plan_is_announced_at_once_and_is_kept() -> None:
    timetable = Timetable(RunSettings(release="immediately"))
    machine, crew = Replanning(timetable, Planner(), AfterQuorum()), Crew("a", "b")
    crew.now, said = 1.0, [machine.look(1, MODEL, crew.members, 1.0)]
    for _ in range(60):
        crew.now += WINDOW_SECONDS
        crew.version += WINDOW_VERSIONS
        put_off = 5 if timetable.at(crew.version).every == 4 else 0
        for member in crew.members:
            crew.did(member, 10, put_off)
        said.append(machine.look(crew.version, MODEL, crew.members, crew.now))
    schedules = [one for one in said if one is not None]
    assert [(one.every, one.delay) for one in schedules] == [(4, 10), (6, 14)]
    assert schedules[1].from_version < 6 * WINDOW_VERSIONS


def test_configured_k_and_d_stay_and_those_that_would_fit_are_known_and_said() -> None:
    hub = live_hub("a", "b", every=4, delay=14)
    hub.replanning = Replanning(hub.timetable, Planner(), hub.rule)
    for window in range(4):
        now = 1.0 + (WINDOW_SECONDS + LOOK_SECONDS) * window
        for peer in ("a", "b"):
            hub.members[PeerId(peer)].contributions += 10
            hub.receive(PeerId(peer), Report(1, 8, 1.0, 1.0, 14.0, 5 * window, 0, 0), now)
        hub.version += WINDOW_VERSIONS
        effects = hub.tick(now)
        assert not any(isinstance(getattr(one, "message", None), Schedule) for one in effects)
    assert hub.crowded == {"put_off": 5 / 15, "fitting_every": 6}, "d = 14 is enough"
    assert hub.crowded.items() <= hub.roster(99.0).hub.items()
    assert not hub_of().crowded

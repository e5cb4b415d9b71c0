"""Which k and d hold when, and when others are announced: by versions, with hysteresis (no clock, no sockets)."""

from __future__ import annotations

import itertools
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import FramingError, RemoteProtocolError
from zmqtrain.protocol.effects import Broadcast, SendTo
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.members import Member, MemberState
from zmqtrain.protocol.messages import (
    Fetch,
    Goodbye,
    Hello,
    Publish,
    Report,
    Roster,
    Schedule,
    Snapshot,
    Welcome,
    model_to_wire,
)
from zmqtrain.protocol.peer import Peer
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.protocol.schedules import (
    FIRST_DELAY,
    FIRST_EVERY,
    HOLD_SECONDS,
    HOLD_VERSIONS,
    LEAD_VERSIONS,
    Plan,
    Replanning,
    Timetable,
)
from zmqtrain.settings import AUTO_DELAY, AUTO_EVERY, RunSettings
from zmqtrain.types import LeafSpec, PeerId

AUTO = RunSettings(every=AUTO_EVERY, delay=AUTO_DELAY, release="immediately")
MODEL = (LeafSpec("w", (3, 4), "float32"),)
FIRST = (FIRST_EVERY, FIRST_DELAY)


def at(timetable: Timetable, version: int) -> tuple[int, int]:
    settings = timetable.at(version)
    return settings.every, settings.delay


# ---------------------------------------------------------------------- the timetable


def test_what_is_given_holds_for_ever_and_a_schedule_changes_nothing() -> None:
    timetable = Timetable(RunSettings(every=3, delay=2))
    timetable.add(Schedule(7, 7, 0))
    assert at(timetable, 100) == (3, 2) and timetable.since(100) == ()


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        (AUTO, FIRST),
        (RunSettings(every=3, delay=AUTO_DELAY), (3, FIRST_DELAY)),
        (RunSettings(every=AUTO_EVERY, delay=9), (FIRST_EVERY, 9)),
    ],
)
def test_until_a_plan_is_made_what_is_auto_begins_somewhere(settings: RunSettings, first: tuple[int, int]) -> None:
    assert at(Timetable(settings), -1) == at(Timetable(settings), 50) == first


def test_a_schedule_holds_from_its_version_on_and_not_before() -> None:
    timetable = Timetable(AUTO, [(10, 20, 5)])
    assert [at(timetable, version) for version in (-1, 9, 10, 11)] == [FIRST, FIRST, (20, 5), (20, 5)]


def test_a_schedule_takes_the_place_of_one_that_would_begin_later() -> None:
    timetable = Timetable(AUTO, [(10, 20, 5), (30, 40, 5)])
    timetable.add(Schedule(6, 2, 25))
    assert [at(timetable, version) for version in (12, 25, 40)] == [(20, 5), (6, 2), (6, 2)]


@pytest.mark.parametrize("schedule", [Schedule(0, 1, 0), Schedule(1, -1, 0), Schedule(1 << 30, 1, 0)])
def test_a_schedule_that_cannot_be_is_refused(schedule: Schedule) -> None:
    with pytest.raises(FramingError):
        Timetable(AUTO).add(schedule)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50), st.integers(0, 50)), max_size=8), st.integers(-1, 40))
def test_who_is_told_what_holds_now_has_the_same_timetable_from_now_on(
    said: list[tuple[int, int, int]], now: int
) -> None:
    hub, node = Timetable(AUTO), Timetable(AUTO)
    for from_version, every, delay in said:
        hub.add(Schedule(every, delay, from_version))
    for from_version, every, delay in hub.since(now):
        node.add(Schedule(every, delay, from_version))
    assert [at(hub, version) for version in range(now, 60)] == [at(node, version) for version in range(now, 60)]


# ---------------------------------------------------------------------- when a plan is announced


class Wanted:
    """A planner that wants what the test says, and counts how often it was asked."""

    def __init__(self, every: int = 12, delay: int = 5) -> None:
        self.plan: Plan | None = Plan(every, delay, "because")
        self.asked = 0

    def __call__(self, model: object, members: object) -> Plan | None:
        self.asked += 1
        return self.plan


def crew(*names: str) -> list[Member]:
    return [Member(PeerId(name), name, MemberState.LIVE, 0.0, 0.0) for name in names]


def replanning(wanted: Wanted) -> tuple[Replanning, Timetable]:
    timetable = Timetable(AUTO)
    return Replanning(timetable, wanted), timetable


def test_the_first_plan_is_announced_for_some_versions_ahead() -> None:
    machine, timetable = replanning(Wanted())
    assert machine.look(3, MODEL, crew("a"), 0.0) == Schedule(12, 5, 3 + LEAD_VERSIONS)
    assert machine.text == "because"
    assert [at(timetable, version) for version in (3, 2 + LEAD_VERSIONS, 3 + LEAD_VERSIONS)] == [FIRST, FIRST, (12, 5)]


def test_nothing_is_planned_before_the_run_has_parameters_or_while_too_little_is_known() -> None:
    wanted = Wanted()
    machine, _ = replanning(wanted)
    assert (
        machine.look(-1, MODEL, crew("a"), 0.0) is None and machine.look(0, MODEL, [], 0.0) is None and not wanted.asked
    )
    wanted.plan = None
    assert machine.look(0, MODEL, crew("a"), 0.0) is None and wanted.asked == 1


def test_what_is_measured_changes_the_plan_only_when_it_does_so_for_long_enough() -> None:
    wanted, team = Wanted(12, 8), crew("a", "b")
    machine, _ = replanning(wanted)
    machine.look(0, MODEL, team, 0.0)
    wanted.plan = Plan(15, 8)
    later = HOLD_VERSIONS + LEAD_VERSIONS
    assert machine.look(LEAD_VERSIONS, MODEL, team, 1.0) is None
    assert machine.look(later - 1, MODEL, team, 1.0 + HOLD_SECONDS) is None  # not enough versions
    assert machine.look(later, MODEL, team, 0.9 + HOLD_SECONDS) is None  # not enough seconds
    assert machine.look(later, MODEL, team, 1.0 + HOLD_SECONDS) == Schedule(15, 8, later + LEAD_VERSIONS)


def test_a_plan_that_is_asked_for_now_and_then_is_never_announced() -> None:
    wanted, team = Wanted(12, 8), crew("a")
    machine, _ = replanning(wanted)
    machine.look(0, MODEL, team, 0.0)
    for look in range(1, 50):
        wanted.plan = Plan(24 if look % 4 else 12, 8)
        assert machine.look(8 * look, MODEL, team, 2.0 * look) is None


@pytest.mark.parametrize("plan", [Plan(14, 8), Plan(10, 8), Plan(12, 9), Plan(14, 7)])
def test_a_small_change_is_none_however_long_it_lasts(plan: Plan) -> None:
    wanted, team = Wanted(12, 8), crew("a")
    machine, _ = replanning(wanted)
    machine.look(0, MODEL, team, 0.0)
    wanted.plan = plan
    assert all(machine.look(100 * look, MODEL, team, 100.0 * look) is None for look in range(1, 5))


def test_who_joins_or_leaves_changes_the_plan_at_once_but_not_before_the_last_one_holds() -> None:
    wanted = Wanted(12, 5)
    machine, _ = replanning(wanted)
    machine.look(0, MODEL, crew("a"), 0.0)
    wanted.plan = Plan(13, 5)
    assert machine.look(LEAD_VERSIONS - 1, MODEL, crew("a", "b"), 0.0) is None
    assert machine.look(LEAD_VERSIONS, MODEL, crew("a", "b"), 0.0) == Schedule(13, 5, 2 * LEAD_VERSIONS)
    wanted.plan = Plan(12, 5)
    assert machine.look(2 * LEAD_VERSIONS, MODEL, crew("b"), 0.0) == Schedule(12, 5, 3 * LEAD_VERSIONS)


def test_what_a_planner_wants_is_kept_within_what_can_be() -> None:
    machine, _ = replanning(Wanted(0, -3))
    assert machine.look(0, MODEL, crew("a"), 0.0) == Schedule(1, 0, LEAD_VERSIONS)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60))
def test_however_measurements_jump_there_are_few_plans(wishes: list[int]) -> None:
    wanted = Wanted()
    machine, _ = replanning(wanted)
    said = []
    for version, every in enumerate(wishes):
        wanted.plan = Plan(every, 4)
        if (schedule := machine.look(version, MODEL, crew("a"), 1.0 * version)) is not None:
            said.append(schedule.from_version)
    assert all(later - earlier >= HOLD_VERSIONS for earlier, later in itertools.pairwise(said))


# ---------------------------------------------------------------------- at the hub, and at a node


def founded(planner: Wanted, *peers: str) -> Hub:
    hub = Hub(AUTO, release_rule_from_spec("immediately"), "run-1", planner=planner)
    for peer in peers:
        join(hub, peer)
    return hub


def join(hub: Hub, peer: str) -> Welcome:
    (welcome,) = [one.message for one in hub.receive(PeerId(peer), Hello(peer), 0.0) if isinstance(one, SendTo)]
    hub.receive(PeerId(peer), Fetch(-1, model_to_wire(MODEL)), 0.0)
    if hub.version < 0:
        hub.receive(PeerId(peer), Snapshot(1, 0, (64,)), 0.0)
        hub.received(PeerId(peer), 1, 0.0)
    hub.receive(PeerId(peer), Report(1, 8, 1.0, 0.5, 4.0, 0, 0, 0), 0.0)
    assert isinstance(welcome, Welcome)
    return welcome


def announced(hub: Hub) -> list[Schedule]:
    effects = hub.tick(0.0)
    return [one.message for one in effects if isinstance(one, Broadcast) and isinstance(one.message, Schedule)]


def advance(hub: Hub, peer: str, versions: int) -> None:
    for _ in range(versions):
        sequence = hub.version
        hub.receive(PeerId(peer), Publish(2, sequence, hub.version, 0, hub.settings.codec, (64,), 8, 8, nan), 0.0)
        hub.received(PeerId(peer), 2, 0.0)


def test_the_hub_says_a_plan_once_and_again_when_nodes_come_or_go() -> None:
    wanted = Wanted(12, 5)
    hub = founded(wanted, "a")
    assert announced(hub) == [Schedule(12, 5, LEAD_VERSIONS)] and announced(hub) == []
    advance(hub, "a", LEAD_VERSIONS)
    wanted.plan = Plan(24, 6)
    join(hub, "b")
    assert announced(hub) == [Schedule(24, 6, 2 * LEAD_VERSIONS)]
    advance(hub, "a", LEAD_VERSIONS)
    wanted.plan = Plan(12, 5)
    hub.receive(PeerId("b"), Goodbye(), 0.0)
    assert announced(hub) == [Schedule(12, 5, 3 * LEAD_VERSIONS)]


def test_a_newcomer_is_told_what_holds_and_what_follows_and_the_roster_says_what_holds() -> None:
    wanted = Wanted(12, 5)
    hub = founded(wanted, "a")
    announced(hub)
    assert join(hub, "b").schedules == ((-1, *FIRST), (LEAD_VERSIONS, 12, 5))
    assert (hub.roster(0.0).every, hub.roster(0.0).delay) == FIRST
    advance(hub, "a", LEAD_VERSIONS)
    assert join(hub, "c").schedules == ((LEAD_VERSIONS, 12, 5),)
    assert (hub.roster(0.0).every, hub.roster(0.0).delay) == (12, 5)


def test_where_k_and_d_are_given_no_planner_is_asked() -> None:
    wanted = Wanted()
    hub = Hub(RunSettings(every=3, delay=2), release_rule_from_spec("immediately"), "run-1", planner=wanted)
    assert join(hub, "a").schedules == () and announced(hub) == [] and not wanted.asked
    assert (hub.roster(0.0).every, hub.roster(0.0).delay) == (3, 2)


def test_a_restarted_hub_goes_on_with_the_schedule_that_was_said() -> None:
    hub = founded(Wanted(12, 5), "a")
    announced(hub)
    again = Hub(AUTO, release_rule_from_spec("immediately"), "other")
    again.restore(hub.state())
    assert [at(again.timetable, version) for version in (0, LEAD_VERSIONS)] == [FIRST, (12, 5)]


@pytest.mark.parametrize("link", [{"link": -1.0}, {"link": nan}, {"link": inf}, {"share": 0.0}, {"share": 2.0}])
def test_a_link_that_no_port_has_costs_who_says_it_its_place(link: dict[str, float]) -> None:
    hub = founded(Wanted(), "a")
    with pytest.raises(RemoteProtocolError):
        hub.receive(PeerId("x"), Hello("x", **link), 0.0)
    assert PeerId("x") not in hub.members


def test_a_measured_link_is_said_in_the_roster_and_a_node_finds_its_own() -> None:
    hub = founded(Wanted(), "a", "b")
    hub.receive(PeerId("c"), Hello("c", link=2e8, share=0.5), 0.0)
    hub.measured(PeerId("a"), 1e8)
    roster = hub.roster(0.0)
    links = {one["peer"]: (one.get("link_rate"), one.get("share")) for one in roster.members}
    assert links == {"a#1": (1e8, 1.0), "b#2": (None, None), "c#3": (2e8, 0.5)}
    node = Peer(PeerId("a"), "a")
    assert node.measured_rate == 0.0
    node.receive(Welcome("run-1", 0, AUTO.to_dict(), called="a#1"), 0.0)
    node.receive(roster, 0.0)
    assert node.measured_rate == 1e8


def test_a_node_comes_to_a_schedule_at_its_version_also_after_it_was_welcomed_again() -> None:
    node = Peer(PeerId("a"), "a")
    node.receive(Schedule(9, 9, 0), 0.0)  # nobody has welcomed it
    assert node.timetable is None
    node.receive(Welcome("run-1", 3, AUTO.to_dict(), schedules=((2, 12, 5), (7, 24, 6))), 0.0)
    node.receive(Schedule(30, 7, 11), 0.0)
    assert node.timetable is not None
    assert [at(node.timetable, version) for version in (3, 7, 11)] == [(12, 5), (24, 6), (30, 7)]
    node.receive(Goodbye(), 0.0)
    node.receive(Welcome("run-1", 8, AUTO.to_dict(), schedules=((7, 24, 6),)), 2.0)
    assert [at(node.timetable, version) for version in (3, 8, 20)] == [(12, 5), (24, 6), (24, 6)]


def test_a_roster_of_a_given_run_says_its_k_and_d_to_observers_too() -> None:
    hub = founded(Wanted(), "a")
    effects = hub.receive(PeerId("w"), Hello("w", "observer"), 0.0)
    (roster,) = [one.message for one in effects if isinstance(one, SendTo) and isinstance(one.message, Roster)]
    assert (roster.every, roster.delay) == FIRST

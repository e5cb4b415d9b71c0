"""Which k, d, codecs and outer optimizer hold when, and when others are announced: by versions, with hysteresis."""

from __future__ import annotations

import itertools
import json
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixed import FIXED_RUN
from zmqtrain.core.errors import FramingError, RemoteProtocolError
from zmqtrain.core.settings import AUTO_DELAY, AUTO_EVERY, FIRST, RunSettings
from zmqtrain.core.types import LeafSpec, PeerId
from zmqtrain.protocol.effects import Broadcast, Expect, Reduce, SendTo
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.members import Member, MemberState
from zmqtrain.protocol.messages import (
    Fetch,
    Goodbye,
    Hello,
    Publish,
    Refused,
    Report,
    Roster,
    Schedule,
    Snapshot,
    Welcome,
    model_to_wire,
)
from zmqtrain.protocol.peer import Peer
from zmqtrain.protocol.rounds import Immediately, release_rule_from_spec
from zmqtrain.protocol.schedules import (
    CODECS_KEPT,
    HOLD_SECONDS,
    HOLD_VERSIONS,
    LEAD_VERSIONS,
    LEAST_GAIN,
    LONGEST_SPEC,
    LOOK_SECONDS,
    OfferFigures,
    Plan,
    Replanning,
    Timetable,
    schedule_from_plain,
)

AUTO = RunSettings(release="immediately")
GIVEN = RunSettings(**FIXED_RUN | {"every": 3, "delay": 2})
MODEL = (LeafSpec("w", (3, 4), "float32"),)
SPECS = (FIRST["codec"], FIRST["broadcast_codec"], FIRST["outer"])
BEGIN = (FIRST["every"], FIRST["delay"])
INT8 = "int8:block=256"


def at(timetable: Timetable, version: int) -> tuple[int, int]:
    settings = timetable.at(version)
    return settings.every, settings.delay


def specs_at(timetable: Timetable, version: int) -> tuple[str, str, str]:
    settings = timetable.at(version)
    return settings.codec, settings.broadcast_codec, settings.outer


# ---------------------------------------------------------------------- the timetable


def test_what_is_given_holds_for_ever_and_a_schedule_changes_nothing() -> None:
    timetable = Timetable(GIVEN)
    timetable.add(Schedule(7, 7, 0, INT8, INT8, "sgd:rate=1"))
    assert timetable.at(100) == GIVEN and timetable.since(100) == () and not timetable.takes(INT8)


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        (AUTO, BEGIN),
        (RunSettings(every=3, delay=AUTO_DELAY), (3, FIRST["delay"])),
        (RunSettings(every=AUTO_EVERY, delay=9), (FIRST["every"], 9)),
    ],
)
def test_until_a_plan_is_made_what_is_auto_begins_somewhere(settings: RunSettings, first: tuple[int, int]) -> None:
    assert at(Timetable(settings), -1) == at(Timetable(settings), 50) == first


def test_a_schedule_holds_from_its_version_on_and_not_before() -> None:
    timetable = Timetable(AUTO, [(10, 20, 5, "", "", "")])
    assert [at(timetable, version) for version in (-1, 9, 10, 11)] == [BEGIN, BEGIN, (20, 5), (20, 5)]


def test_a_schedule_takes_the_place_of_one_that_would_begin_later() -> None:
    timetable = Timetable(AUTO, [(10, 20, 5, "", "", ""), (30, 40, 5, "", "", "")])
    timetable.add(Schedule(6, 2, 25))
    assert [at(timetable, version) for version in (12, 25, 40)] == [(20, 5), (6, 2), (6, 2)]


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(0, 1, 0),
        Schedule(1, -1, 0),
        Schedule(1 << 30, 1, 0),
        Schedule(1, 1, 0, "x" * (LONGEST_SPEC + 1)),
        Schedule(1, 1, 0, "", "x" * (LONGEST_SPEC + 1)),
        Schedule(1, 1, 0, "", "", "x" * (LONGEST_SPEC + 1)),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(schedule: Schedule) -> None:
    with pytest.raises(FramingError):
        Timetable(AUTO).add(schedule)


def schedules_said():
    spec = st.sampled_from(["", "int8:block=256", "ternary:block=128", "topk:density=0.05+sign:block=256"])
    outer = st.sampled_from(["", "sgd:rate=1", "nesterov:rate=0.8,momentum=0.5"])
    return st.builds(Schedule, st.integers(1, 50), st.integers(0, 50), st.integers(0, 30), spec, spec, outer)


@given(st.lists(schedules_said(), max_size=8), st.integers(-1, 40))
def test_who_is_told_what_holds_now_has_the_same_timetable_from_now_on(said: list[Schedule], now: int) -> None:
    hub, node = Timetable(AUTO), Timetable(AUTO)
    for schedule in said:
        hub.add(schedule)
    for plain in hub.since(now):
        node.add(schedule_from_plain(plain))
    assert [hub.at(version) for version in range(now, 60)] == [node.at(version) for version in range(now, 60)]
    assert not any(hub.at(version).is_planned for version in range(now, 60)), "nothing is auto in what holds"


def test_a_schedule_says_codecs_and_outer_optimizer_and_one_that_says_none_has_those_of_the_beginning() -> None:
    timetable = Timetable(AUTO)
    timetable.add(Schedule(4, 2, 5, INT8, "bf16", "nesterov:rate=0.8,momentum=0.5"))
    timetable.add(Schedule(4, 2, 9))  # of version 0.1
    said = (INT8, "bf16", "nesterov:rate=0.8,momentum=0.5")
    assert [specs_at(timetable, version) for version in (4, 5, 8, 9)] == [SPECS, said, said, SPECS]


def test_what_is_told_stays_whatever_a_schedule_says() -> None:
    timetable = Timetable(RunSettings(codec="float32", delay=3))
    timetable.add(Schedule(4, 9, 5, INT8, INT8, "sgd:rate=0.5"))
    assert (at(timetable, 5), specs_at(timetable, 5)) == ((4, 3), ("float32", INT8, "sgd:rate=0.5"))


def test_a_delta_of_a_codec_that_held_or_will_hold_is_taken_and_one_of_another_codec_is_not() -> None:
    timetable = Timetable(AUTO)
    for number in range(CODECS_KEPT):
        timetable.add(Schedule(1, 1, number, f"topk:density=0.{number + 1}"))
    assert not timetable.takes(FIRST["codec"]), "too many others since"
    assert all(timetable.takes(f"topk:density=0.{number + 1}") for number in range(CODECS_KEPT))
    assert not timetable.takes("int4:block=256")


def test_a_welcome_or_a_checkpoint_may_have_schedules_of_three_numbers_but_none_of_more_than_six_parts() -> None:
    assert schedule_from_plain((7, 12, 5)) == Schedule(12, 5, 7)
    assert schedule_from_plain([7, 12, 5, "a", "b", "c"]) == Schedule(12, 5, 7, "a", "b", "c")
    for wrong in ((7, 12, 5, "a", "b", "c", "d"), (7, 12), ("x", 1, 1), 7):
        with pytest.raises(FramingError):
            schedule_from_plain(wrong)


# ---------------------------------------------------------------------- when a plan is announced


class Wanted:
    """A planner that wants what the test says, and counts how often it was asked."""

    def __init__(self, every: int = 12, delay: int = 5) -> None:
        self.plan: Plan | None = Plan(every, delay, "because")
        self.asked = 0

    def __call__(self, model: object, members: object, now: RunSettings, crowded: OfferFigures | None) -> Plan | None:
        self.asked += 1
        self.held, self.crowded = now, crowded
        return self.plan


def crew(*names: str) -> list[Member]:
    return [Member(PeerId(name), name, MemberState.LIVE, 0.0, 0.0) for name in names]


def replanning(wanted: Wanted) -> tuple[Replanning, Timetable]:
    timetable = Timetable(AUTO)
    return Replanning(timetable, wanted, Immediately()), timetable


def test_the_first_plan_is_announced_for_some_versions_ahead() -> None:
    machine, timetable = replanning(Wanted())
    assert machine.look(3, MODEL, crew("a"), 0.0) == Schedule(12, 5, 3 + LEAD_VERSIONS, *SPECS)
    assert machine.text == "because"
    assert [at(timetable, version) for version in (3, 2 + LEAD_VERSIONS, 3 + LEAD_VERSIONS)] == [BEGIN, BEGIN, (12, 5)]


def test_before_the_first_aggregate_a_plan_holds_at_once() -> None:
    machine, timetable = replanning(Wanted())
    assert machine.look(0, MODEL, crew("a"), 0.0) == Schedule(12, 5, 0, *SPECS)
    assert at(timetable, 0) == (12, 5)


def test_a_provisional_plan_gives_way_to_the_first_measured_one_at_once_and_is_announced_once() -> None:
    wanted = Wanted()
    machine, _ = replanning(wanted)
    wanted.plan = Plan(12, 5, gain=2.0, provisional=True)
    assert machine.look(0, MODEL, crew("a"), 0.0) == Schedule(12, 5, 0, *SPECS)
    assert machine.look(1, MODEL, crew("a"), LOOK_SECONDS) is None
    wanted.plan = Plan(13, 5, gain=1.01)
    assert machine.look(2, MODEL, crew("a"), 2 * LOOK_SECONDS) == Schedule(13, 5, 2 + LEAD_VERSIONS, *SPECS)
    wanted.plan = Plan(14, 5, gain=1.01)
    assert machine.look(2 + LEAD_VERSIONS, MODEL, crew("a"), 3 * LOOK_SECONDS) is None


def test_a_provisional_plan_never_takes_the_place_of_a_measured_one_when_all_nodes_come_again() -> None:
    wanted = Wanted(4, 2)
    machine, timetable = replanning(wanted)
    machine.look(9, MODEL, crew("a", "b"), 0.0)
    wanted.plan = Plan(30, 1, gain=2.0, provisional=True)  # nobody has reported the time of a step again
    assert all(machine.look(100, MODEL, crew("c"), 100.0 + look) is None for look in range(3))
    again = Replanning(timetable, wanted, Immediately())  # of a broker that was started again
    assert again.look(100, MODEL, crew("a", "b"), 0.0) is None and at(timetable, 200) == (4, 2)
    wanted.plan = Plan(5, 2, gain=1.2)
    assert again.look(101, MODEL, crew("a", "b"), LOOK_SECONDS) == Schedule(5, 2, 101 + LEAD_VERSIONS, *SPECS)


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
    later = HOLD_VERSIONS + LEAD_VERSIONS
    for too_early in ((later - 1, 1.0 + HOLD_SECONDS), (later, 0.9 + HOLD_SECONDS)):  # in versions, in seconds
        machine, _ = replanning(wanted)
        wanted.plan = Plan(12, 8)
        machine.look(0, MODEL, team, 0.0)
        wanted.plan = Plan(15, 8)
        assert machine.look(LEAD_VERSIONS, MODEL, team, 1.0) is None
        assert machine.look(too_early[0], MODEL, team, too_early[1]) is None
        now = too_early[1] + LOOK_SECONDS
        assert machine.look(later, MODEL, team, now) == Schedule(15, 8, later + LEAD_VERSIONS, *SPECS)


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


def test_a_plan_is_held_back_the_longer_the_less_it_gains_and_one_that_gains_next_to_nothing_is_none() -> None:
    announced_at = {}
    for gain in (LEAST_GAIN - 0.001, 1.05, 1.09, 1.25, 1.5):
        wanted, team = Wanted(2, 2), crew("a")
        machine, _ = replanning(wanted)
        machine.look(0, MODEL, team, 0.0)
        wanted.plan = Plan(2, 2, codec=INT8, gain=gain)
        for look in range(1, 60):  # two versions a look
            if machine.look(LEAD_VERSIONS + 2 * look, MODEL, team, LOOK_SECONDS * look) is not None:
                announced_at[gain] = look
                break
    in_full = max(HOLD_VERSIONS // 2, round(HOLD_SECONDS / LOOK_SECONDS))
    assert announced_at == {1.05: 1 + in_full, 1.09: 1 + in_full, 1.25: 1 + in_full * 2 // 5, 1.5: 1 + in_full // 5}


def test_another_codec_is_announced_with_what_else_holds_and_the_planner_is_told_what_does() -> None:
    wanted, team = Wanted(12, 5), crew("a")
    machine, timetable = replanning(wanted)
    wanted.plan = Plan(12, 5, codec=INT8, gain=1.5)
    assert machine.look(0, MODEL, team, 0.0) == Schedule(12, 5, 0, INT8, *SPECS[1:])
    assert (wanted.held.codec, wanted.held.is_planned) == (FIRST["codec"], False)
    machine.look(LEAD_VERSIONS, MODEL, team, LOOK_SECONDS)
    assert wanted.held.codec == INT8 == timetable.at(LEAD_VERSIONS).codec


def test_while_the_same_nodes_are_here_a_plan_is_computed_now_and_then_only() -> None:
    wanted = Wanted()
    machine, _ = replanning(wanted)
    machine.look(0, MODEL, crew("a"), 0.0)
    for hundredth in range(1, 101):
        machine.look(LEAD_VERSIONS, MODEL, crew("a"), 0.01 * hundredth)
    assert wanted.asked == 1 + round(1 / LOOK_SECONDS)
    machine.look(LEAD_VERSIONS, MODEL, crew("a", "b"), 1.0)
    assert wanted.asked == 2 + round(1 / LOOK_SECONDS), "at once for a newcomer"


def test_a_plan_without_measurements_is_computed_now_and_then_only_too() -> None:
    wanted = Wanted()
    wanted.plan = Plan(12, 5, provisional=True)
    machine, _ = replanning(wanted)
    for hundredth in range(1, 101):
        machine.look(1, MODEL, crew("a"), 0.01 * hundredth)
    assert wanted.asked == round(1 / LOOK_SECONDS)


def test_who_joins_or_leaves_changes_the_plan_at_once_but_not_before_the_last_one_holds() -> None:
    wanted = Wanted(12, 5)
    machine, _ = replanning(wanted)
    machine.look(1, MODEL, crew("a"), 0.0)
    wanted.plan = Plan(13, 5)
    assert machine.look(LEAD_VERSIONS, MODEL, crew("a", "b"), 0.0) is None
    assert machine.look(1 + LEAD_VERSIONS, MODEL, crew("a", "b"), 0.0) == Schedule(13, 5, 1 + 2 * LEAD_VERSIONS, *SPECS)
    wanted.plan = Plan(12, 5)
    assert machine.look(1 + 2 * LEAD_VERSIONS, MODEL, crew("b"), 0.0) == Schedule(12, 5, 1 + 3 * LEAD_VERSIONS, *SPECS)


def test_what_a_planner_wants_is_kept_within_what_can_be() -> None:
    machine, _ = replanning(Wanted(0, -3))
    assert machine.look(0, MODEL, crew("a"), 0.0) == Schedule(1, 0, 0, *SPECS)


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
        hub.receive(
            PeerId(peer),
            Publish(2, sequence, hub.version, 0, hub.timetable.at(hub.version).codec, (64,), 8, 8, nan),
            0.0,
        )
        hub.received(PeerId(peer), 2, 0.0)


def test_another_broker_says_what_the_first_has_planned_at_a_version_of_its_own_and_once() -> None:
    timetable = Timetable(AUTO)
    there, here = Timetable(AUTO), Replanning(timetable, None, Immediately())
    assert here.follow(9, there.newest) is None, "nothing was planned yet"
    there.add(Schedule(6, 3, 40, INT8, INT8, "sgd:rate=1"))
    assert here.follow(-1, there.newest) is None, "this shard has no parameters yet"
    assert here.follow(9, there.newest) == Schedule(6, 3, 9 + LEAD_VERSIONS, INT8, INT8, "sgd:rate=1")
    assert here.follow(10, there.newest) is None
    assert at(timetable, 9) == BEGIN and at(timetable, 9 + LEAD_VERSIONS) == (6, 3)
    assert Replanning(Timetable(AUTO), None, Immediately()).follow(0, there.newest) == Schedule(
        6, 3, 0, INT8, INT8, "sgd:rate=1"
    )


def test_the_hub_says_a_plan_once_and_again_when_nodes_come_or_go() -> None:
    wanted = Wanted(12, 5)
    hub = founded(wanted, "a")
    assert announced(hub) == [Schedule(12, 5, 0, *SPECS)] and announced(hub) == []
    advance(hub, "a", LEAD_VERSIONS)
    wanted.plan = Plan(24, 6)
    join(hub, "b")
    assert announced(hub) == [Schedule(24, 6, 2 * LEAD_VERSIONS, *SPECS)]
    advance(hub, "a", LEAD_VERSIONS)
    wanted.plan = Plan(12, 5)
    hub.receive(PeerId("b"), Goodbye(), 0.0)
    assert announced(hub) == [Schedule(12, 5, 3 * LEAD_VERSIONS, *SPECS)]


def test_a_newcomer_is_told_what_holds_and_what_follows_and_the_roster_says_what_holds() -> None:
    wanted = Wanted(12, 5)
    hub = founded(wanted, "a")
    advance(hub, "a", 1)
    announced(hub)
    assert join(hub, "b").schedules == ((-1, *BEGIN, *SPECS), (1 + LEAD_VERSIONS, 12, 5, *SPECS))
    assert (hub.roster(0.0).every, hub.roster(0.0).delay) == BEGIN
    advance(hub, "a", LEAD_VERSIONS)
    assert join(hub, "c").schedules == ((1 + LEAD_VERSIONS, 12, 5, *SPECS),)
    assert (hub.roster(0.0).every, hub.roster(0.0).delay) == (12, 5)


def test_where_nothing_is_auto_no_planner_is_asked() -> None:
    wanted = Wanted()
    hub = Hub(GIVEN, release_rule_from_spec("immediately"), "run-1", planner=wanted)
    assert join(hub, "a").schedules == () and announced(hub) == [] and not wanted.asked
    assert (hub.roster(0.0).every, hub.roster(0.0).delay) == (3, 2)


def test_a_hub_goes_on_from_a_checkpoint_of_version_0_1_with_schedules_of_three_numbers() -> None:
    hub = founded(Wanted(12, 5), "a")
    advance(hub, "a", 1)
    announced(hub)
    state = hub.state()
    state["schedules"] = [list(one[:3]) for one in state["schedules"]]
    again = Hub(AUTO, release_rule_from_spec("immediately"), "other")
    again.restore(state)
    assert [at(again.timetable, version) for version in (1, 1 + LEAD_VERSIONS)] == [BEGIN, (12, 5)]
    assert specs_at(again.timetable, 1 + LEAD_VERSIONS) == SPECS


def test_a_delta_of_the_codec_before_is_taken_and_a_stranger_s_codec_is_refused() -> None:
    wanted = Wanted(12, 5)
    hub = founded(wanted, "a")
    wanted.plan = Plan(12, 5, codec=INT8, broadcast_codec=INT8)
    assert announced(hub) == [Schedule(12, 5, 0, INT8, INT8, SPECS[2])]
    advance(hub, "a", LEAD_VERSIONS)
    for sequence, codec in ((10, FIRST["codec"]), (11, INT8)):
        publish = Publish(sequence, sequence, hub.version, 0, codec, (64,), 8, 8, nan)
        assert hub.receive(PeerId("a"), publish, 0.0) == [Expect(PeerId("a"), publish)]
        reduce = [one for one in hub.received(PeerId("a"), sequence, 0.0) if isinstance(one, Reduce)]
        assert [(one.codec, one.outer) for one in reduce] == [(INT8, SPECS[2])]
    effects = hub.receive(PeerId("a"), Publish(12, 12, hub.version, 0, "bf16", (64,), 8, 8, nan), 0.0)
    (refused,) = [one.message for one in effects if isinstance(one, SendTo)]
    assert isinstance(refused, Refused) and refused.reason == "codec" and INT8 in refused.text


def test_a_restarted_hub_goes_on_with_the_schedule_that_was_said() -> None:
    hub = founded(Wanted(12, 5), "a")
    advance(hub, "a", 1)
    announced(hub)
    again = Hub(AUTO, release_rule_from_spec("immediately"), "other")
    again.restore(hub.state())
    assert [at(again.timetable, version) for version in (1, 1 + LEAD_VERSIONS)] == [BEGIN, (12, 5)]


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
    node.receive(Welcome("run-1", 3, AUTO.to_dict(), schedules=((2, 12, 5, *SPECS), (7, 24, 6, *SPECS))), 0.0)
    node.receive(Schedule(30, 7, 11), 0.0)
    assert node.timetable is not None
    assert [at(node.timetable, version) for version in (3, 7, 11)] == [(12, 5), (24, 6), (30, 7)]
    node.receive(Goodbye(), 0.0)
    node.receive(Welcome("run-1", 8, AUTO.to_dict(), schedules=((7, 24, 6, *SPECS),)), 2.0)
    assert [at(node.timetable, version) for version in (3, 8, 20)] == [(12, 5), (24, 6), (24, 6)]


def test_a_roster_of_a_given_run_says_its_k_and_d_to_observers_too() -> None:
    hub = founded(Wanted(), "a")
    effects = hub.receive(PeerId("w"), Hello("w", "observer"), 0.0)
    (roster,) = [one.message for one in effects if isinstance(one, SendTo) and isinstance(one.message, Roster)]
    assert (roster.every, roster.delay) == BEGIN


def test_a_standby_that_takes_over_goes_on_with_what_holds_and_with_what_was_announced() -> None:
    wanted = Wanted(12, 5)
    hub = founded(wanted, "a")
    before = hub.state()
    wanted.plan = Plan(12, 5, codec=INT8, broadcast_codec=INT8)
    announced(hub)
    standby = Hub(AUTO, release_rule_from_spec("immediately"), "other")
    standby.restore(before | {"schedules": json.loads(hub.books(0.0))["schedules"]})
    for version in (0, LEAD_VERSIONS - 1, LEAD_VERSIONS, 100):
        assert standby.timetable.at(version) == hub.timetable.at(version)
    assert standby.timetable.takes(INT8) and standby.timetable.takes(FIRST["codec"])

"""From what a hub knows of its nodes to k and d: what counts, what is assumed, and what a liar can do (nothing)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import ConfigError
from zmqtrain.protocol.members import Member, MemberState
from zmqtrain.protocol.messages import Report
from zmqtrain.runtime.planning.auto import ASSUMED_BITS, LoadPlanner, link_share, typical_rate
from zmqtrain.runtime.planning.schedule import exchange_bytes, fit, payload_rate
from zmqtrain.settings import AUTO_DELAY, AUTO_EVERY, RunSettings
from zmqtrain.transport.reservation import LinkShare
from zmqtrain.types import LeafSpec, PeerId

MODEL = tuple(LeafSpec(f"w{number}", (1000, 1000), "float32") for number in range(25))
GIGABIT = payload_rate(1e9)


def auto(**settings: object) -> RunSettings:
    return RunSettings(**{"every": AUTO_EVERY, "delay": AUTO_DELAY, **settings})  # type: ignore[arg-type]


def member(name: str, step_seconds: float = 0.05, link: float = GIGABIT, share: float = 1.0, **report: float) -> Member:
    one = Member(PeerId(name), name, MemberState.LIVE, 0.0, 0.0, link=link, share=share)
    facts = {"step": 10, "samples": 320, "samples_per_second": 32 / step_seconds, **report}
    one.report = Report(**facts, loss=1.0, age_steps=4.0, offers_refused=0, bytes_sent=0, bytes_received=0)  # type: ignore[arg-type]
    return one


def crew(count: int, **facts: float) -> list[Member]:
    return [member(f"n{number}", **facts) for number in range(count)]


def planned(members: list[Member], share: LinkShare | None = None, **settings: object) -> tuple[int, int]:
    plan = LoadPlanner(auto(**settings), share or LinkShare())(MODEL, members)
    assert plan is not None
    return plan.every, plan.delay


def test_the_plan_is_the_fit_of_what_the_nodes_have_said() -> None:
    planner = LoadPlanner(auto(), LinkShare(GIGABIT, 0.8), lambda: 0.01)
    members = crew(4, exchange_seconds=0.1)
    load = planner.load(MODEL, members, [0.05] * 4)
    sizes = exchange_bytes(MODEL, "ternary", "ternary")
    assert (load.nodes, load.bytes_up, load.bytes_down) == (4, sizes.up, sizes.down)
    assert (load.step_seconds, load.node_rate, load.hub_rate) == pytest.approx((0.05, GIGABIT, 0.8 * GIGABIT))
    assert (load.node_seconds, load.hub_seconds) == pytest.approx((0.1, 0.04))
    plan, fitting = planner(MODEL, members), fit(load)
    assert plan is not None and (plan.every, plan.delay) == (fitting.every, fitting.delay)
    assert plan.text == "4 nodes, 1 Gb/s x 0.8, 5.39 MB up and 5.39 MB down, step 50 ms"


def test_nothing_is_planned_until_a_node_has_said_how_fast_it_is() -> None:
    planner = LoadPlanner(auto(), LinkShare())
    silent = Member(PeerId("a"), "a", MemberState.LIVE, 0.0, 0.0)
    assert planner(MODEL, [silent, member("b", samples_per_second=math.nan)]) is None
    assert planner(MODEL, [silent, member("b")]) is not None


def test_more_nodes_a_smaller_share_and_faster_steps_make_k_longer() -> None:
    usual = planned(crew(2))
    assert planned(crew(8))[0] > usual[0]
    assert planned(crew(2, step_seconds=0.01))[0] > usual[0]
    assert planned(crew(2), LinkShare(GIGABIT, 0.2))[0] > usual[0]
    assert planned(crew(2, share=0.1))[0] > usual[0]


def test_what_is_given_stays_as_it_is() -> None:
    assert planned(crew(4), every=77)[0] == 77
    assert planned(crew(4), delay=3)[1] == 3


def test_a_release_for_each_delta_sends_as_many_aggregates_down() -> None:
    members, steps = crew(4), [0.05] * 4
    sizes = exchange_bytes(MODEL, "ternary", "ternary")
    down = {
        release: LoadPlanner(auto(release=release), LinkShare()).load(MODEL, members, steps).bytes_down
        for release in ("quorum", "immediately", "count:contributions=2")
    }
    assert down == {"quorum": sizes.down, "immediately": 4 * sizes.down, "count:contributions=2": 2 * sizes.down}


def test_a_port_of_which_nothing_is_known_is_taken_for_a_gigabit_and_the_hubs_for_a_typical_nodes() -> None:
    planner = LoadPlanner(auto(), LinkShare())
    unknown = planner.load(MODEL, crew(2, link=0.0), [0.05])
    assert unknown.node_rate == unknown.hub_rate == payload_rate(ASSUMED_BITS)
    slow = planner.load(MODEL, [member("a", link=1e7), member("b", link=3e7), member("c", link=2e7)], [0.05])
    assert (slow.node_rate, slow.hub_rate) == (2e7, 2e7)
    assert typical_rate([]) == typical_rate(crew(2, link=0.0)) == 0.0


def test_who_does_not_train_says_nothing_of_the_hubs_port() -> None:
    stranger = member("stranger", link=1.0)
    stranger.state = MemberState.OBSERVER
    assert typical_rate([stranger]) == 0.0 and typical_rate([stranger, *crew(1, link=2e7)]) == 2e7


def test_one_slow_link_decides_only_where_the_run_waits_for_its_slowest() -> None:
    members = [*crew(3), member("slow", link=1e6)]
    assert planned(members) == planned([*crew(3), member("as fast as the others")])
    assert planned(members, release="all")[0] > 4 * planned(crew(4), release="all")[0]


def test_where_k_follows_each_nodes_speed_it_is_that_of_the_reference() -> None:
    members = [member(f"n{number}", step_seconds=0.05 if number < 3 else 0.2) for number in range(6)]
    assert planned(members)[0] > planned(members, local_updates="fixed")[0]


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(numbers, numbers, st.integers(-(1 << 62), 1 << 62), st.integers(-(1 << 62), 1 << 62), st.floats(1e-300, 1e300))
def test_whatever_a_node_says_of_itself_a_plan_can_be_made(
    pace: float, exchange_seconds: float, step: int, samples: int, link: float
) -> None:
    liar = member("liar", link=link, share=1e-6)
    liar.report = Report(step, samples, pace, 1.0, 4.0, 0, 0, 0, exchange_seconds=exchange_seconds)
    for members in ([liar], [member("a"), liar], [member("a"), liar, member("b")]):
        plan = LoadPlanner(auto(), LinkShare())(MODEL, members)
        assert plan is None or (plan.every >= 1 and plan.delay >= 1)


def test_a_link_is_read_as_people_write_it() -> None:
    assert link_share("1gbit", 0.8) == LinkShare(GIGABIT, 0.8)
    assert link_share("2.5 Gbit/s", 1.0).rate == pytest.approx(2.5 * GIGABIT)
    assert link_share("12.5MB/s", 1.0) == link_share("100mbit", 1.0) == link_share("100Mb/s", 1.0)
    assert link_share("", 0.5) == LinkShare(share=0.5)
    for text in ("fast", "-1gbit", "0", "1 parsec"):
        with pytest.raises(ConfigError, match="link is written like 1gbit"):
            link_share(text, 1.0)

"""From what a hub knows of its nodes to its settings: what counts, what is assumed, and that a liar can do nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings, pieces_of
from zmqtrain.core.types import LeafSpec, PeerId, count_values
from zmqtrain.planning.costs import exchange_costs
from zmqtrain.planning.plans import ASSUMED_BITS, ASSUMED_STEP_SECONDS, LoadPlanner, link_share, typical_rate
from zmqtrain.planning.schedule import (
    Load,
    Schedule,
    crowding,
    density_of,
    exchange_bytes,
    fitting_delay,
    latency_seconds,
    least_period,
    payload_rate,
    stages,
)
from zmqtrain.protocol.members import Member, MemberState
from zmqtrain.protocol.messages import Report
from zmqtrain.protocol.schedules import OfferFigures, Plan
from zmqtrain.transport.pacing import LinkShare

MODEL = tuple(LeafSpec(f"w{number}", (1000, 1000), "float32") for number in range(25))
GIGABIT = payload_rate(1e9)


PIECES = pieces_of(count_values(MODEL))
TERNARY = {"codec": "ternary:block=128", "broadcast_codec": "ternary:block=128"}


class Meter:
    port_measured = 0.0

    def __init__(self, seconds: float, shards_on_nodes: bool = False) -> None:
        self.seconds, self.shards_on_nodes = seconds, shards_on_nodes

    def contribution_seconds(self) -> float:
        return self.seconds


def auto(**settings: object) -> RunSettings:
    return RunSettings(**settings)  # type: ignore[arg-type]


def member(name: str, step_seconds: float = 0.05, link: float = GIGABIT, share: float = 1.0, **report: float) -> Member:
    one = Member(PeerId(name), name, MemberState.LIVE, 0.0, 0.0, link=link, share=share)
    facts = {"step": 10, "samples": 320, "samples_per_second": 32 / step_seconds, **report}
    one.report = Report(**facts, loss=1.0, age_steps=4.0, offers_refused=0, bytes_sent=0, bytes_received=0)  # type: ignore[arg-type]
    return one


def crew(count: int, **facts: float) -> list[Member]:
    return [member(f"n{number}", **facts) for number in range(count)]


def made(members: list[Member], share: LinkShare | None = None, seconds: float = 0.0, **settings: object) -> Plan:
    run = auto(**settings)
    plan = LoadPlanner(run, share or LinkShare(), Meter(seconds))(MODEL, members, run.at_first)
    assert plan is not None
    return plan


def planned(members: list[Member], share: LinkShare | None = None, **settings: object) -> tuple[int, int]:
    plan = made(members, share, **settings)
    return plan.every, plan.delay


def load_of(
    planner: LoadPlanner, members: list[Member], steps: list[float], codec: str = TERNARY["codec"], held: float = 0.0
) -> Load:
    return planner.loads(MODEL, members, steps, planner.settings.at_first, held)(codec, codec)


def test_the_load_is_what_the_nodes_have_said_and_what_the_hub_has_measured() -> None:
    planner = LoadPlanner(auto(fragments=1, **TERNARY), LinkShare(GIGABIT, 0.8), Meter(0.01))
    members = crew(4, exchange_seconds=0.1)
    load = load_of(planner, members, [0.05] * 4)
    sizes = exchange_bytes(MODEL, TERNARY["codec"], TERNARY["codec"])
    assert (load.nodes, load.bytes_up, load.bytes_down) == (4, sizes.up, sizes.down)
    assert (load.step_seconds, load.node_rate, load.hub_rate) == pytest.approx((0.05, GIGABIT, 0.8 * GIGABIT))
    assert (load.node_seconds, load.hub_seconds, load.pieces) == (pytest.approx(0.1), pytest.approx(0.04), 0)


def test_an_exchange_of_all_fragments_takes_so_many_times_the_bytes_and_the_seconds_of_one() -> None:
    planner = LoadPlanner(auto(), LinkShare(GIGABIT, 0.8), Meter(0.01))
    load = load_of(planner, crew(4, exchange_seconds=0.1), [0.05] * 4)
    assert PIECES > 1 and (load.pieces, load.fragments) == (PIECES, 1)
    assert load.bytes_up == PIECES * exchange_bytes(MODEL, TERNARY["codec"], TERNARY["codec"], PIECES).up
    assert (load.node_seconds, load.hub_seconds) == pytest.approx((PIECES * 0.1, PIECES * 0.04))


def test_brokers_share_what_the_first_has_measured_of_its_shard_and_the_ports_of_nodes_if_they_run_there() -> None:
    members = crew(4, exchange_seconds=0.1)
    for on_nodes in (False, True):
        planner = LoadPlanner(auto(shards=4, initial="founder"), LinkShare(), Meter(0.01, on_nodes))
        load = load_of(planner, members, [0.05] * 4)
        assert (load.shards, load.on_nodes, load.fragments) == (4, on_nodes, 1)
        assert load.pieces == planner.settings.fragments_of(MODEL) <= PIECES
        assert load.node_seconds == pytest.approx(load.pieces * 4 * 0.1)
        assert load.hub_seconds == pytest.approx(load.pieces * 4 * 0.01)
    many = LoadPlanner(auto(shards=6, initial="founder"), LinkShare(), Meter(0.01, True))
    assert not load_of(many, members, [0.05] * 4).on_nodes, "two brokers more than nodes"


def test_what_another_codec_takes_follows_from_what_the_one_that_holds_was_measured_to_take() -> None:
    planner = LoadPlanner(auto(fragments=1), LinkShare(), Meter(0.01))
    members, values, nodes = crew(4, exchange_seconds=0.1), count_values(MODEL), 4
    costs = {}
    for codec in ("int8", TERNARY["codec"]):
        sizes = exchange_bytes(MODEL, codec, codec)
        costs[codec] = exchange_costs(values, sizes.up, sizes.down, codec, codec, nodes, codec_on="host")
    load = load_of(planner, members, [0.05] * 4, "int8")
    assert load.node_seconds == pytest.approx(0.1 * costs["int8"].node_seconds / costs[TERNARY["codec"]].node_seconds)
    assert load.hub_seconds == pytest.approx(0.04 * costs["int8"].hub_seconds / costs[TERNARY["codec"]].hub_seconds)


def test_the_time_for_which_an_exchange_holds_the_training_thread_is_no_part_of_a_step() -> None:
    planner = LoadPlanner(auto(), LinkShare())
    held = load_of(planner, crew(2), [0.05] * 2, held=0.02)  # every second step exchanges
    assert (held.held_seconds, held.step_seconds) == pytest.approx((0.02, 0.04))
    assert made(crew(2, held_seconds=0.2)).every > made(crew(2)).every


def test_the_plan_says_what_it_follows_from_and_what_is_the_limit() -> None:
    plan = made(crew(4, exchange_seconds=0.001), LinkShare(GIGABIT, 0.8))
    assert plan.text.startswith("4 nodes, 1 Gb/s x 0.8, ") and "step 50 ms; predicted: " in plan.text
    assert plan.text.endswith(" is the limit") and plan.gain > 1


def test_on_a_slow_link_the_codec_is_sparser_than_on_a_fast_one() -> None:
    slow, fast = (made(crew(4, link=rate), LinkShare(rate)) for rate in (GIGABIT / 20, 10 * GIGABIT))
    assert slow.codec == slow.broadcast_codec and density_of(slow.codec) < 0.2 * density_of(fast.codec)


def test_where_the_hubs_codec_is_the_limit_k_is_larger() -> None:
    usual, busy = (
        made(crew(4, exchange_seconds=0.001), seconds=1e-4),
        made(crew(4, exchange_seconds=0.001), seconds=0.2),
    )
    assert busy.every > usual.every and busy.text.endswith("the hub's codec is the limit")


def test_until_a_node_has_said_how_fast_it_is_the_plan_is_that_of_a_usual_step_and_provisional() -> None:
    planner = LoadPlanner(auto(), LinkShare(GIGABIT))
    silent = Member(PeerId("a"), "a", MemberState.LIVE, 0.0, 0.0)
    first = planner.settings.at_first
    assumed = planner(MODEL, [silent, member("b", samples_per_second=math.nan)], first)
    measured = planner(MODEL, [silent, member("b", step_seconds=ASSUMED_STEP_SECONDS)], first)
    assert assumed is not None and assumed.provisional and "assumed" in assumed.text
    assert measured is not None and not measured.provisional
    assert (assumed.every, assumed.codec) == (measured.every, measured.codec)


def test_a_run_on_a_thin_link_begins_with_a_sparser_code_than_one_on_a_fast_link() -> None:
    silent = Member(PeerId("a"), "a", MemberState.LIVE, 0.0, 0.0)
    plans = [
        LoadPlanner(auto(), LinkShare(rate))(MODEL, [silent] * 4, auto().at_first) for rate in (GIGABIT, GIGABIT / 100)
    ]
    thick, thin = (density_of(plan.codec) for plan in plans if plan is not None)
    assert thin < thick


def test_nothing_is_planned_until_a_link_is_known_that_the_model_fills() -> None:
    planner, small = LoadPlanner(auto(), LinkShare()), (LeafSpec("w", (100, 100), "float32"),)
    first = planner.settings.at_first
    assert planner(MODEL, crew(2, link=0.0), first) is None
    assert planner(small, crew(2, link=0.0), first) is not None, "a small model is fetched too soon to be measured"
    assert LoadPlanner(auto(), LinkShare(GIGABIT))(MODEL, crew(2, link=0.0), first) is not None, "it was told"


def test_more_nodes_a_smaller_share_and_faster_steps_make_k_longer() -> None:
    usual = planned(crew(2), **TERNARY)
    assert planned(crew(8), **TERNARY)[0] > usual[0]
    assert planned(crew(2, step_seconds=0.01), **TERNARY)[0] > usual[0]
    assert planned(crew(2), LinkShare(GIGABIT, 0.2), **TERNARY)[0] > usual[0]
    assert planned(crew(2, share=0.1), **TERNARY)[0] > usual[0]


def test_what_is_given_stays_as_it_is() -> None:
    assert planned(crew(4), every=77)[0] == 77
    assert planned(crew(4), delay=3)[1] == 3
    assert made(crew(4), codec="ternary").codec == "ternary" == made(crew(4), codec="ternary").broadcast_codec
    assert made(crew(4), broadcast_codec="bf16").broadcast_codec == "bf16"


def test_a_large_k_has_the_outer_optimizer_that_is_for_it() -> None:
    assert made(crew(4), every=1).outer == "sgd:rate=1" and made(crew(4), every=50).outer.startswith("nesterov")


def test_a_release_for_each_delta_sends_as_many_aggregates_down() -> None:
    members, steps = crew(4), [0.05] * 4
    sizes = exchange_bytes(MODEL, TERNARY["codec"], TERNARY["codec"])
    down = {
        release: load_of(LoadPlanner(auto(release=release, fragments=1), LinkShare()), members, steps).bytes_down
        for release in ("quorum", "immediately", "count:contributions=2")
    }
    assert down == {"quorum": sizes.down, "immediately": 4 * sizes.down, "count:contributions=2": 2 * sizes.down}


def test_a_port_of_which_nothing_is_known_is_taken_for_a_gigabit_and_the_hubs_for_a_typical_nodes() -> None:
    planner = LoadPlanner(auto(), LinkShare())
    unknown = load_of(planner, crew(2, link=0.0), [0.05])
    assert unknown.node_rate == unknown.hub_rate == payload_rate(ASSUMED_BITS)
    slow = load_of(planner, [member("a", link=1e7), member("b", link=3e7), member("c", link=2e7)], [0.05])
    assert (slow.node_rate, slow.hub_rate) == (2e7, 2e7)
    assert typical_rate([]) == typical_rate(crew(2, link=0.0)) == 0.0


def test_who_does_not_train_says_nothing_of_the_hubs_port() -> None:
    stranger = member("stranger", link=1.0)
    stranger.state = MemberState.OBSERVER
    assert typical_rate([stranger]) == 0.0 and typical_rate([stranger, *crew(1, link=2e7)]) == 2e7


def test_one_slow_link_decides_only_where_the_run_waits_for_its_slowest() -> None:
    members = [*crew(3), member("slow", link=1e6)]
    assert planned(members) == planned([*crew(3), member("as fast as the others")])
    assert planned(members, release="all", **TERNARY)[0] > 4 * planned(crew(4), release="all", **TERNARY)[0]


def test_where_k_follows_each_nodes_speed_it_is_that_of_the_reference() -> None:
    members = [member(f"n{number}", step_seconds=0.05 if number < 3 else 0.2) for number in range(6)]
    assert planned(members, **TERNARY)[0] > planned(members, local_updates="fixed", **TERNARY)[0]


def test_where_offers_were_put_off_a_plan_counts_with_what_an_exchange_took() -> None:
    settings = auto(fragments=1, **TERNARY)
    planner, members = LoadPlanner(settings, LinkShare(GIGABIT), Meter(0.01)), crew(4, exchange_seconds=0.1)
    now = replace(settings.at_first, every=4, delay=10)
    alone = planner(MODEL, members, now)
    slowest = max(stages(load_of(planner, members, [0.05])).values())
    crowded = OfferFigures(0.3, 2 * slowest, 40.0, now)
    plan = planner(MODEL, members, now, crowded)
    assert alone is not None and plan is not None
    assert plan.every == least_period(load_of(planner, members, [0.05]).slower(2.0)) == plan.fits[0] > alone.every
    assert alone.delay < plan.delay == plan.fits[1] and "2 times as long" in plan.text
    seen = planner(MODEL, members, now, crowded._replace(age_steps=alone.delay + 1.0))
    assert seen is not None and seen.delay <= alone.delay + 2, "no exchange took longer, though offers waited"


def test_where_aggregates_come_in_time_and_offers_are_put_off_all_the_same_a_stage_is_too_slow_for_k() -> None:
    settings = auto(fragments=1, **TERNARY)
    planner, members = LoadPlanner(settings, LinkShare(GIGABIT), Meter(0.01)), crew(4, exchange_seconds=0.1)
    now = replace(settings.at_first, every=4, delay=14)
    slowest = max(stages(load_of(planner, members, [0.05])).values())
    plan = planner(MODEL, members, now, OfferFigures(0.13, 2.5 * slowest, 14.0, now))
    assert plan is not None and plan.every == least_period(load_of(planner, members, [0.05]).slower(2.5))
    assert plan.delay == 15, "what came in time is no reason for a longer d"


def test_a_delay_that_was_too_short_is_not_taken_for_a_stage_that_is_too_slow() -> None:
    """One offer may be in flight at d = 4, and an exchange takes longer: the next waits for it, a whole k."""
    settings = auto(fragments=1, **TERNARY)
    planner, members = LoadPlanner(settings, LinkShare(GIGABIT), Meter(0.01)), crew(4, exchange_seconds=0.1)
    load = load_of(planner, members, [0.05])
    took = latency_seconds(load) / load.step_seconds
    given = replace(settings.at_first, every=4, delay=4)
    assert crowding(load, Schedule(4, 4), 8 * load.step_seconds, took * load.step_seconds) == pytest.approx(1.0)
    plan = planner(MODEL, members, given, OfferFigures(0.5, 8 * load.step_seconds, took, given))
    assert plan is not None and plan.fits[0] == least_period(load) and took < plan.fits[1] <= fitting_delay(load)


@given(
    st.floats(0.0, 1.0),
    st.floats(1e-300, 1e300),
    st.floats(allow_nan=True),
    st.integers(1, 1 << 20),
    st.integers(0, 1 << 20),
)
def test_whatever_was_measured_of_offers_a_plan_can_be_made(
    put_off: float, seconds: float, age: float, every: int, delay: int
) -> None:
    now = replace(auto().at_first, every=every, delay=delay)
    plan = LoadPlanner(auto(), LinkShare(GIGABIT))(MODEL, crew(2), now, OfferFigures(put_off, seconds, age, now))
    assert plan is not None and plan.every >= 1 and plan.delay >= 1


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(numbers, numbers, st.integers(-(1 << 62), 1 << 62), st.integers(-(1 << 62), 1 << 62), st.floats(1e-300, 1e300))
def test_whatever_a_node_says_of_itself_a_plan_can_be_made(
    pace: float, exchange_seconds: float, step: int, samples: int, link: float
) -> None:
    liar = member("liar", link=link, share=1e-6)
    liar.report = Report(step, samples, pace, 1.0, 4.0, 0, 0, 0, exchange_seconds=exchange_seconds)
    for members in ([liar], [member("a"), liar], [member("a"), liar, member("b")]):
        plan = LoadPlanner(auto(), LinkShare())(MODEL, members, auto().at_first)
        assert plan is None or (plan.every >= 1 and plan.delay >= 1)


def test_a_link_is_read_as_people_write_it() -> None:
    assert link_share("1gbit", 0.8) == LinkShare(GIGABIT, 0.8)
    assert link_share("2.5 Gbit/s", 1.0).rate == pytest.approx(2.5 * GIGABIT)
    assert link_share("12.5MB/s", 1.0) == link_share("100mbit", 1.0) == link_share("100Mb/s", 1.0)
    assert link_share("", 0.5) == LinkShare(share=0.5)
    for text in ("fast", "-1gbit", "0", "1 parsec"):
        with pytest.raises(ConfigError, match="link is written like 1gbit"):
            link_share(text, 1.0)

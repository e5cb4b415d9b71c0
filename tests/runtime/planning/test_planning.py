"""Plans: the densest codec that keeps the period, the cut with the youngest aggregates, and what is given is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.protocol.rounds import FIRST_GRACE_SECONDS
from zmqtrain.runtime.planning.costs import COSTS
from zmqtrain.runtime.planning.planning import Wish, load_of, make_plan, variants
from zmqtrain.runtime.planning.schedule import CODEC_WEIGHT, fit, nicer_slowdown, stages

WISH = Wish(parameters=25_000_000, nodes=4, step_seconds=0.05)


def density(plan):
    return list(COSTS).index(plan.codec)


def test_the_densest_codec_is_taken_that_keeps_the_period():
    plan = make_plan(WISH)
    assert plan.prediction.model_period_steps <= WISH.period_steps
    denser = list(COSTS)[density(plan) - 1]
    assert make_plan(replace(WISH, codec=denser)).prediction.model_period_steps > WISH.period_steps


def test_where_none_keeps_the_period_the_smallest_codec_is_taken_in_more_fragments():
    plan = make_plan(replace(WISH, nodes=64))
    assert plan.codec == "ternary" and plan.fragments > make_plan(replace(WISH, codec="ternary")).fragments
    assert plan.prediction.model_period_steps > WISH.period_steps


def test_a_cut_is_chosen_that_makes_aggregates_younger_and_turns_hardly_longer():
    wish = replace(WISH, parameters=100_000_000, nodes=8, step_seconds=0.18, codec="int8")
    whole, chosen = make_plan(replace(wish, fragments=1)).prediction, make_plan(wish).prediction
    assert chosen.age_steps < whole.age_steps
    assert chosen.model_period_steps <= 1.1 * whole.model_period_steps


def test_exchanges_are_cut_so_short_that_a_quorums_first_grace_waits_for_all_deltas():
    for nodes in (32, 64, 128):
        load = make_plan(replace(WISH, parameters=100_000_000, nodes=nodes, step_seconds=0.18, codec="ternary")).load
        assert load.fragments > 1
        assert max(stages(load)["the hub's port, up"], stages(load)["the hub's codec"]) <= 2 * FIRST_GRACE_SECONDS


def test_what_is_given_is_kept():
    plan = make_plan(replace(WISH, codec="int8", broadcast_codec="bf16", fragments=2, every=50, delay=7))
    assert (plan.codec, plan.broadcast_codec, plan.fragments) == ("int8", "bf16", 2)
    assert (plan.schedule.every, plan.schedule.delay) == (50, 7)
    assert plan.load.bytes_down > 1.9 * plan.load.bytes_up


def test_without_a_given_k_the_plan_has_the_schedule_that_a_broker_would_fit():
    plan = make_plan(WISH)
    assert plan.schedule == fit(plan.load)


def test_a_plan_knows_what_is_on_its_way_when_a_node_encodes():
    wish = replace(WISH, codec="ternary", fragments=1, codec_on="host")
    plan = make_plan(replace(wish, every=8, delay=24))
    assert plan.schedule.on_the_way(1) == 2
    late = make_plan(replace(wish, every=8, delay=8))
    assert late.schedule.on_the_way(1) == 0
    two = 2 * COSTS["ternary"].subtract_ns * WISH.parameters / 1e9
    assert plan.load.node_seconds - late.load.node_seconds == pytest.approx(two)


def test_a_fitted_plan_has_the_time_in_it_that_what_is_on_its_way_takes():
    plan = make_plan(replace(WISH, codec="ternary", fragments=1, codec_on="host", cores=64.0))
    on_the_way = plan.schedule.on_the_way(1)
    assert on_the_way > 0
    assert plan.schedule == fit(plan.load)
    alone = load_of(plan.wish, "ternary", "ternary", 1)
    more = on_the_way * COSTS["ternary"].subtract_ns * WISH.parameters / 1e9
    assert plan.load.node_seconds - alone.node_seconds >= more - 1e-9
    assert plan.schedule.delay >= fit(alone).delay


def test_where_a_step_keeps_all_cores_busy_a_nicer_codec_takes_longer_than_its_cpu_time():
    wish = replace(WISH, codec="ternary", codec_on="host", cores=8.0)
    card, processor = (load_of(replace(wish, step_on=place), "ternary", "ternary", 1) for place in ("device", "host"))
    assert processor.node_seconds == pytest.approx(card.node_seconds * (8 + CODEC_WEIGHT) / (8 * CODEC_WEIGHT))
    assert nicer_slowdown(8, 7) == 1 and nicer_slowdown(1, 1) > nicer_slowdown(8, 8) > 3


def test_variants_have_one_two_and_four_masters_and_faster_hubs_and_never_send_less():
    plans = list(variants(WISH))
    assert [(plan.wish.masters, plan.wish.hub_bits) for plan in plans] == [
        (1, 1e9),
        (2, 1e9),
        (4, 1e9),
        (1, 2.5e9),
        (1, 10e9),
    ]
    assert all(density(plan) <= density(plans[0]) for plan in plans)


def test_more_masters_on_nodes_than_nodes_are_no_variant():
    assert [plan.wish.masters for plan in variants(replace(WISH, nodes=2, on_nodes=True))] == [1, 2, 1, 1]


def test_a_tiny_model_is_not_cut_in_more_fragments_than_it_has_blocks():
    assert make_plan(replace(WISH, parameters=5000)).fragments <= 2
    with pytest.raises(ConfigError, match="fragments must be 1 to 2"):
        make_plan(replace(WISH, parameters=5000, fragments=3))


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.5}, {"fragments": -1}, {"period_steps": 0.0}])
def test_a_wish_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        replace(WISH, **wrong)

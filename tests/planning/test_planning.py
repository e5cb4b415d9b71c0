"""Plans: what is best for the time to a loss, and what is given is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import pieces_of
from zmqtrain.planning.costs import COSTS
from zmqtrain.planning.plans import Wish, load_of, make_plan, variants
from zmqtrain.planning.schedule import (
    CODEC_WEIGHT,
    CODECS,
    averaging_gain,
    density_of,
    fitting_delay,
    ideal_speedup,
    nicer_slowdown,
)

WISH = Wish(parameters=25_000_000, nodes=4, step_seconds=0.05)


def test_no_other_codec_or_period_would_be_faster_to_a_loss():
    plan = make_plan(WISH)
    assert all(plan.time <= make_plan(replace(WISH, codec=codec)).time for codec in CODECS)
    for factor in (1.25, 2, 4, 8):
        every = round(factor * plan.schedule.every)
        assert plan.time <= make_plan(replace(WISH, every=every)).time + 1e-9


def test_of_plans_that_are_equally_fast_the_one_with_the_fewest_bytes_is_made_as_a_broker_would_choose() -> None:
    wish = Wish(parameters=10**5, nodes=4, step_seconds=0.02)
    plan, others = make_plan(wish), [make_plan(replace(wish, codec=codec)) for codec in CODECS]
    equal = [other for other in others if round(other.time, 3) == round(plan.time, 3)]
    assert len({other.codec for other in equal}) > 1
    assert all(plan.prediction.mb_up <= other.prediction.mb_up for other in equal)


def test_the_slower_the_link_the_sparser_the_codec():
    densities = [density_of(make_plan(replace(WISH, node_bits=bits, hub_bits=bits)).codec) for bits in (1e8, 1e9, 1e11)]
    assert densities == sorted(densities) and densities[0] < densities[-1]


def test_nothing_told_means_that_an_exchange_carries_the_whole_model_in_the_pieces_that_a_broker_would_cut():
    plan = make_plan(WISH)
    assert (plan.load.pieces, plan.fragments, plan.load.fragments) == (pieces_of(WISH.parameters),) * 2 + (1,)
    whole = make_plan(replace(WISH, fragments=1, codec=plan.codec))
    assert plan.prediction.age_steps <= whole.prediction.age_steps, "both ways at once"


def test_a_speed_up_is_said_of_one_pc_and_follows_from_that_of_a_free_network():
    for nodes in (2, 4, 8):
        plan = make_plan(replace(WISH, nodes=nodes))
        assert 1 < plan.speedup < plan.ideal * averaging_gain(nodes)
        assert plan.ideal == ideal_speedup(nodes) < nodes
    assert make_plan(replace(WISH, node_batches=1e9)).ideal == pytest.approx(4)
    assert make_plan(replace(WISH, node_batches=4)).ideal == pytest.approx(4 * 5 / 8)


def test_what_is_given_is_kept():
    plan = make_plan(replace(WISH, codec="int8", broadcast_codec="bf16", fragments=2, every=50, delay=7))
    assert (plan.codec, plan.broadcast_codec, plan.fragments) == ("int8", "bf16", 2)
    assert (plan.schedule.every, plan.schedule.delay) == (50, 7)
    assert plan.load.bytes_down > 1.9 * plan.load.bytes_up


def test_a_plan_knows_what_is_on_its_way_when_a_node_encodes():
    wish = replace(WISH, codec="ternary", fragments=1, codec_on="host")
    plan = make_plan(replace(wish, every=8, delay=24))
    assert plan.schedule.deltas_in_flight(1) == 2
    late = make_plan(replace(wish, every=8, delay=8))
    assert late.schedule.deltas_in_flight(1) == 0
    two = 2 * COSTS["ternary"].subtract_ns * WISH.parameters / 1e9
    assert plan.load.node_seconds - late.load.node_seconds == pytest.approx(two)


def test_a_fitted_plan_has_the_time_in_it_that_what_is_on_its_way_takes():
    plan = make_plan(replace(WISH, codec="ternary", fragments=1, codec_on="host", cores=64.0))
    in_flight = plan.schedule.deltas_in_flight(1)
    assert in_flight > 0
    alone = load_of(plan.wish, "ternary", "ternary", 1)
    more = in_flight * COSTS["ternary"].subtract_ns * WISH.parameters / 1e9
    assert plan.load.node_seconds - alone.node_seconds >= more - 1e-9
    assert plan.schedule.delay >= fitting_delay(alone)


def test_where_a_step_keeps_all_cores_busy_a_nicer_codec_takes_longer_than_its_cpu_time():
    wish = replace(WISH, codec="ternary", codec_on="host", cores=8.0)
    card, processor = (load_of(replace(wish, step_on=place), "ternary", "ternary", 1) for place in ("device", "host"))
    assert processor.node_seconds == pytest.approx(card.node_seconds * (8 + CODEC_WEIGHT) / (8 * CODEC_WEIGHT))
    assert nicer_slowdown(8, 7) == 1 and nicer_slowdown(1, 1) > nicer_slowdown(8, 8) > 3


def test_variants_have_one_two_and_four_shards_and_faster_hubs_which_are_no_slower():
    plans = list(variants(WISH))
    assert [(plan.wish.shards, plan.wish.hub_bits) for plan in plans] == [
        (1, 1e9),
        (2, 1e9),
        (4, 1e9),
        (1, 2.5e9),
        (1, 10e9),
    ]
    assert all(plan.speedup >= plans[0].speedup for plan in plans[3:])


def test_more_shards_on_nodes_than_nodes_are_no_variant():
    assert [plan.wish.shards for plan in variants(replace(WISH, nodes=2, on_nodes=True))] == [1, 2, 1, 1]


def test_a_tiny_model_is_not_cut_in_more_fragments_than_it_has_blocks():
    assert make_plan(replace(WISH, parameters=5000)).fragments <= 2
    with pytest.raises(ConfigError, match="fragments must be 1 to 2"):
        make_plan(replace(WISH, parameters=5000, fragments=3))


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.5}, {"fragments": -1}, {"node_batches": 0.0}])
def test_a_wish_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        replace(WISH, **wrong)

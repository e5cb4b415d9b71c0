"""What an exchange costs processors: sums of measured numbers, unless the user has better ones."""

from __future__ import annotations

from dataclasses import fields

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.planning.costs import COSTS, NODE_LOCKED, CodecCosts, costs_of, exchange_costs, slab_threads

EXCHANGE = {
    "parameters": 1e6,
    "bytes_up": 200_000,
    "bytes_down": 200_000,
    "codec": "ternary",
    "broadcast_codec": "int8",
}


def test_a_codec_that_was_measured_has_its_own_costs_whatever_its_arguments():
    assert costs_of("ternary:block=64;<1024=bf16") == COSTS["ternary"]
    assert costs_of("int8") == COSTS["int8"]


def test_a_codec_that_was_not_measured_counts_as_the_slowest():
    assert costs_of("blocktopk:keep=2+int8").encode_ns == max(cost.encode_ns for cost in COSTS.values())
    assert costs_of("topk:density=0.01+dct+int8").encode_ns == max(cost.encode_ns for cost in COSTS.values())
    with pytest.raises(ConfigError, match="there is no 'fast'"):
        costs_of("fast")


@pytest.mark.parametrize("kind", [field.name for field in fields(CodecCosts)])
def test_a_top_k_codec_costs_by_its_density(kind):
    none, some, more = (
        getattr(costs_of(f"topk:density={density}+sign;<1024=float32"), kind) for density in (1e-5, 0.05, 0.1)
    )
    assert 0 < none < some < more
    assert more - some == pytest.approx(some - none, rel=0.001)


def test_the_hubs_threads_share_what_sparse_contributions_add_to_a_release():
    sparse = EXCHANGE | {"codec": "topk:density=0.05+sign", "broadcast_codec": "topk:density=0.05+sign", "nodes": 4}
    costs = costs_of("topk:density=0.05+sign")
    one, two = (exchange_costs(**sparse, hub_threads=threads).hub_seconds for threads in (1, 2))
    assert one - two == pytest.approx(1e-3 * (4 * costs.held_ns + costs.release_ns) / 2)
    dense = EXCHANGE | {"nodes": 4}
    assert exchange_costs(**dense, hub_threads=2) == exchange_costs(**dense)


def test_a_nodes_threads_share_what_its_codec_does_with_sparse_deltas():
    sparse = EXCHANGE | {"codec": "topk:density=0.05+sign", "broadcast_codec": "topk:density=0.05+sign", "nodes": 4}
    costs = costs_of("topk:density=0.05+sign")
    one, two = (exchange_costs(**sparse, codec_on="host", node_threads=threads).node_seconds for threads in (1, 2))
    assert one - two == pytest.approx(1e-3 * (costs.encode_ns + costs.decode_ns) / 2)
    dense = EXCHANGE | {"codec_on": "host", "nodes": 4}
    assert exchange_costs(**dense, node_threads=2) == exchange_costs(**dense)
    assert slab_threads(1) == 1 < slab_threads(2, NODE_LOCKED) < slab_threads(2) < slab_threads(9) == slab_threads(4)


def test_the_hub_pays_for_each_contribution_and_once_for_the_aggregate():
    four, five = (exchange_costs(**EXCHANGE, nodes=nodes).hub_seconds for nodes in (4, 5))
    one_more = five - four
    assert one_more > 0
    assert four - 4 * one_more == pytest.approx(1e-3 * COSTS["int8"].release_ns)


def test_what_is_on_its_way_is_subtracted_where_a_processor_encodes():
    none, two = (exchange_costs(**EXCHANGE, nodes=4, codec_on="host", in_flight=n) for n in (0, 2))
    assert two.node_seconds - none.node_seconds == pytest.approx(2e-3 * COSTS["ternary"].subtract_ns)
    assert exchange_costs(**EXCHANGE, nodes=4, in_flight=2) == exchange_costs(**EXCHANGE, nodes=4)


def test_shards_share_what_the_hub_pays():
    whole, half = (exchange_costs(**EXCHANGE, nodes=4, shards=shards).hub_seconds for shards in (1, 2))
    assert half == pytest.approx(whole / 2)


def test_a_codec_on_a_card_costs_the_processor_by_the_byte_and_the_card_a_little():
    card = exchange_costs(**EXCHANGE, nodes=4, codec_on="device")
    host = exchange_costs(**EXCHANGE, nodes=4, codec_on="host")
    assert card.node_seconds < host.node_seconds
    assert card.thread_seconds > host.thread_seconds
    assert card.thread_seconds < exchange_costs(**EXCHANGE, nodes=4, step_on="host", codec_on="host").thread_seconds


def test_a_users_own_numbers_take_the_place_of_the_sums():
    own = exchange_costs(**EXCHANGE, nodes=4, node_ns=6.0, hub_ns=2.0, held_seconds=0.02)
    assert (own.node_seconds, own.hub_seconds, own.thread_seconds) == pytest.approx((6e-3, 8e-3, 0.02))

"""N nodes contribute at the same time, each from the same version: whoever comes first, the model is the same.

Rule: the hub's machine and its aggregator together, as the broker has them: a release may follow each arrival.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from tests.protocol.hubs import MODEL, live_hub, publish
from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import cut, encode_snapshot
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.payload import encode_payload
from zmqtrain.protocol.effects import Accumulate, Reduce
from zmqtrain.protocol.rounds import release_rule_from_spec

NODES = ("a", "b", "c", "d")
ORDER = st.permutations(NODES)
VALUES = sum(int(np.prod(leaf.shape)) for leaf in MODEL)
ONE_ROUND = ("all", "bounded:staleness=0", "quorum", "quorum:count=4", "count:contributions=4", "time:seconds=0.9")
SEVERAL_ROUNDS = {"immediately": 4, "bounded:staleness=1": 4, "count:contributions=2": 2, "quorum:share=0": 2}
"""And how many rounds four arrivals are."""
OUTERS = ("sgd:rate=1", "nesterov:rate=0.8,momentum=0.5", "delayed_nesterov:rate=0.8,momentum=0.5", "adam")
AGGREGATES = ("mean", "weighted", "median", "trimmed:share=0.25", "clipped:factor=1.5", "majority")


def model_of(orders, release, **options):
    """Let each node contribute once in each of these orders; return the parameters and the version."""
    hub = live_hub(*NODES, release=release, codec="float32", broadcast_codec="float32", **options)
    aggregator = Aggregator(hub.settings)
    aggregator.plan(MODEL)
    aggregator.found(encode_snapshot(aggregator.layout, [np.zeros(VALUES, np.float32)]))
    counts, codecs = aggregator.layout.counts(0), coding_from_spec("float32").of_fragment(aggregator.layout, 0)
    here = {}

    def carry_out(effects):
        for effect in effects:
            if isinstance(effect, Accumulate):
                aggregator.accumulate(effect.peer, effect.publish, here[effect.peer])
            elif isinstance(effect, Reduce):
                aggregator.release(effect)

    for exchange, order in enumerate(orders):
        base = hub.version
        for peer in order:
            random = np.random.default_rng((exchange, NODES.index(peer)))
            here[peer] = encode_payload(codecs, cut(random.normal(0, 0.1, VALUES).astype(np.float32), counts))
            sizes = tuple(len(frame) for frame in here[peer])
            samples = 8 + 8 * NODES.index(peer)
            message = publish(exchange, codec="float32", base_version=base, sizes=sizes, samples=samples)
            carry_out(hub.receive(peer, message, float(exchange)))
            carry_out(hub.received(peer, message.transfer, float(exchange)))
        carry_out(hub.tick(exchange + 0.9))
    assert hub.rounds.pending == () and aggregator.version == hub.version
    return aggregator.parameters[0], hub.version


@pytest.mark.parametrize("release", ONE_ROUND)
@settings(max_examples=examples(25))
@given(orders=st.tuples(ORDER, ORDER), outer=st.sampled_from(OUTERS), aggregate=st.sampled_from(AGGREGATES))
def test_of_arrivals_that_are_one_round_the_order_does_not_matter(release, orders, outer, aggregate):
    model, version = model_of(orders, release, outer=outer, aggregate=aggregate)
    sorted_model, sorted_version = model_of((NODES, NODES), release, outer=outer, aggregate=aggregate)
    assert version == sorted_version == 2 and model.any()
    np.testing.assert_allclose(model, sorted_model, rtol=0, atol=1e-6)
    if release_rule_from_spec(release).one_each:  # added in the order of names: what strict mode stands on
        assert model.tobytes() == sorted_model.tobytes()


STEADY = ("sgd:rate=1", "delayed_nesterov:rate=0.8,momentum=0.5", "delayed_nesterov:rate=0.8,momentum=0.5,share=0.5")


@pytest.mark.parametrize("release", SEVERAL_ROUNDS)
@settings(max_examples=examples(25))
@given(orders=st.tuples(ORDER, ORDER, ORDER), outer=st.sampled_from(STEADY))
def test_of_arrivals_in_several_rounds_it_does_not_matter_either_if_momentum_waits_for_all(release, orders, outer):
    model, version = model_of(orders, release, outer=outer)
    sorted_model, sorted_version = model_of((NODES,) * 3, release, outer=outer)
    assert version == sorted_version == 3 * SEVERAL_ROUNDS[release] and model.any()
    np.testing.assert_allclose(model, sorted_model, rtol=0, atol=1e-6)
    at_once, _ = model_of((NODES,) * 3, "all", outer=outer)  # and the rounds do not matter
    np.testing.assert_allclose(model, at_once, rtol=0, atol=1e-6)


@pytest.mark.parametrize("outer", ["nesterov:rate=0.8,momentum=0.5", "adam"])
def test_an_outer_step_that_moves_its_momentum_at_each_arrival_makes_the_order_matter(outer):
    model, _ = model_of((NODES,), "immediately", outer=outer)
    other, _ = model_of((NODES[::-1],), "immediately", outer=outer)
    assert np.abs(model - other).max() > 1e-3

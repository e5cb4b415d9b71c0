"""The hub samples what its deltas add to a sum, whichever way they are coded and held."""

from __future__ import annotations

import numpy as np
import pytest

from tests.averaging.aggregators import codecs_of, founded, random_flats
from zmqtrain.averaging.coder import cut
from zmqtrain.averaging.held_rounds import SAMPLED, DeltaMeter
from zmqtrain.codecs.payload import encode_payload
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Publish, replace_fields
from zmqtrain.strategies.measures import WINDOW

NOISE = 4.0


def lived(aggregator, rounds, nodes=4, dense=False, values=None):
    """Rounds of deltas with a common direction, and noise of NOISE times its energy."""
    (direction,) = random_flats(1, 1)
    for version in range(1, rounds + 1):
        contributions = []
        for node in range(nodes):
            (noise,) = random_flats(1000 * version + node, 1)
            u = direction + np.float32(np.sqrt(NOISE)) * noise if values is None else np.full_like(noise, values)
            frames = encode_payload(codecs_of(aggregator, "float32", 0), cut(u, aggregator.layout.counts(0)))
            sizes = tuple(len(frame) for frame in frames)
            publish = Publish(1, version, version - 1, 0, "float32", sizes, 8, 1, 0.5)
            aggregator.accumulate(f"n{node}", replace_fields(publish, dense=dense), frames)
            contributions.append(Contribution(f"n{node}", version, 0, 8, 0.5, version - 1, 0))
        aggregator.release(Reduce(version, (0,), tuple(contributions), nodes, False))
    return aggregator.meter.noise


@pytest.mark.parametrize("rule", ["mean", "trimmed"])
def test_the_noise_scale_of_the_deltas_is_measured_as_they_are_added(rule):
    assert lived(founded(aggregate=rule, fragments=1), 2 * WINDOW) == pytest.approx(NOISE, rel=0.15)


def test_what_nodes_end_with_is_no_measure():
    assert lived(founded(fragments=1), 2 * WINDOW, dense=True) is None


def test_deltas_whose_sum_is_not_finite_are_not_measured():
    with np.errstate(over="ignore", invalid="ignore"):
        assert lived(founded(fragments=1), 2 * WINDOW, values=3e38) is None


def test_a_run_that_begins_anew_is_measured_anew():
    aggregator = founded(fragments=1)
    lived(aggregator, WINDOW)
    aggregator.restore(WINDOW, aggregator.arrays())
    assert aggregator.meter.noise is None


@pytest.mark.parametrize("size", [0, 1, SAMPLED - 1, SAMPLED, 10 * SAMPLED + 7])
def test_the_places_looked_at_are_spread_over_all_of_a_fragment(size):
    places = DeltaMeter().read(0, np.arange(size, dtype=np.float32)).astype(int)
    assert len(places) == min(size, SAMPLED) and (np.diff(places) > 0).all()
    assert not size or (places[0] < size / len(places) and places[-1] >= size - 2 * size / len(places))

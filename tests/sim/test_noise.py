"""The noise scale that a hub measures is that of training, not of the codec that the deltas come in."""

from __future__ import annotations

import pytest

from zmqtrain.broker import broker
from zmqtrain.core.settings import RunSettings
from zmqtrain.programs import load_program
from zmqtrain.sim.run import simulate
from zmqtrain.sim.scenario import Scenario, SimNode
from zmqtrain.transport.memory import LinkModel


@pytest.fixture(scope="module")
def program():
    return load_program("image", {"batch": 16})


def noise_of(program, codec, monkeypatch, steps=80):
    made = []

    class Kept(broker.Aggregator):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(broker, "Aggregator", Kept)
    settings = RunSettings(
        program="image", every=1, delay=1, fragments=1, codec=codec, broadcast_codec=codec, outer="sgd:rate=1",
        initial="founder", start_nodes=3,
    )  # fmt: skip
    nodes = tuple(SimNode(step_seconds=0.05, steps=steps) for _ in range(3))
    simulate(Scenario(settings=settings, nodes=nodes, link=LinkModel(latency_seconds=0.001)), program)
    return made[0].meter.noise


@pytest.mark.nightly
def test_the_noise_scale_of_coded_deltas_is_within_a_factor_of_two_of_that_of_float32(program, monkeypatch):
    whole = noise_of(program, "float32", monkeypatch)
    for codec in ("ternary", "topk:density=0.05+sign"):
        assert whole / 2 < noise_of(program, codec, monkeypatch) < 2 * whole, codec

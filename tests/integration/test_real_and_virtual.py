"""The same scenario with real threads and sockets, and in virtual time: the same deltas in the same versions."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest

from tests.sim.conftest import Line
from tests.sim.conftest import scenario as scenario_fixture
from zmqtrain.broker.serve import BrokerThread
from zmqtrain.monitor.ledger import lives_of
from zmqtrain.monitor.recorder import BrokerRecorder
from zmqtrain.node.connect import connect
from zmqtrain.sim import simulate
from zmqtrain.train.loop import TrainingLoop

scenario = scenario_fixture
NODES = 3


def releases(folder):
    """By version: the deltas in it, and the digest of its bytes."""
    (records,) = lives_of(folder / "broker.jsonl")
    made = [one for one in records if one["kind"] == "release"]
    deltas = {
        one["version"]: sorted((each["node"], each["sequence"], each["samples"]) for each in one["contributions"])
        for one in made
    }
    return deltas, [one["crc"] for one in made]


def run_for_real(run, program, folder):
    """Run a scenario's nodes in threads, with sockets; the names decide who has which data, as in virtual time."""
    ended = {}

    def train(name, joined, before):
        before.wait(30.0)
        with connect(broker.address, name, codec_on="host") as node:
            joined.set()
            loop = TrainingLoop(program, node)
            ended[name] = loop.run(node.batches(program.batches)).params

    with BrokerRecorder(folder / "broker.jsonl") as events:
        broker = BrokerThread("tcp://127.0.0.1:0", run.settings, events=events)
        turns = [threading.Event() for _ in range(NODES + 1)]
        turns[0].set()
        threads = [
            threading.Thread(target=train, args=(f"node-{number}", turns[number + 1], turns[number]))
            for number in range(NODES)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90.0)
        broker.stop()
    return ended


@pytest.mark.parametrize("every", [1, 4])
def test_a_scenario_has_the_same_releases_for_real_and_in_virtual_time(scenario, tmp_path, every):
    program = Line()
    run = scenario(
        NODES, mode="strict", release="all", every=every, delay=0, codec="int8:block=8", broadcast_codec="int8:block=8",
        evaluate_seconds=0.0,
    )  # fmt: skip
    folders = {kind: tmp_path / kind for kind in ("real", "virtual")}
    for folder in folders.values():
        folder.mkdir()
    virtual = simulate(run, program, record=folders["virtual"])
    real = run_for_real(run, program, folders["real"])
    assert releases(folders["virtual"]) == releases(folders["real"])
    assert len(releases(folders["virtual"])[0]) == virtual.version > 3
    for name, params in real.items():
        for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(virtual.nodes[name].params), strict=True):
            np.testing.assert_array_equal(one, other)

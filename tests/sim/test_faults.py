"""Faults in virtual time: whatever befalls nodes and frames, what was acknowledged is in the parameters once."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from zmqtrain.chaos.schedule import Fault, draw_schedule
from zmqtrain.core.errors import ConfigError
from zmqtrain.monitor.ledger import audit, lives_of, releases_of
from zmqtrain.sim import SimNode, simulate
from zmqtrain.sim.reading import scenario_from_tables
from zmqtrain.sim.scenario import SIM_KINDS, FrameNoise, pauses_and_cuts
from zmqtrain.transport.memory import Fate

QUICK = {"heartbeat_seconds": 0.2, "lost_seconds": 0.6, "codec": "int8:block=8", "broadcast_codec": "int8:block=8"}


def flat(params):
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(params)])


def books(folder, nodes):
    (broker,) = lives_of(folder / "broker.jsonl")
    return releases_of(broker), [life for node in nodes for life in lives_of(folder / f"{node.name}.jsonl")]


def nodes_named(count):
    return [SimNode(name=f"pc-{number}", straggler=((0.0, 0.01, 1.0),)) for number in range(count)]


@pytest.mark.parametrize("kind", ["drop", "corrupt", "duplicate", "reorder"])
def test_frames_that_fare_badly_are_made_good_and_everything_computed_lands_once(program, scenario, tmp_path, kind):
    nodes = nodes_named(3)
    faults = [Fault(0.5 + 0.1 * turn, kind, "pc-1", 0.05, 0.5) for turn in range(20)]
    faults += [Fault(0.5, kind, "pc-2", 5.0, 0.05)]
    run = scenario(
        nodes, units=36, release="immediately", outer="sgd:rate=1", of_scenario={"faults": tuple(faults)}, **QUICK
    )
    result = simulate(run, program, record=tmp_path)
    assert sum(record["what"] == kind for record in result.of_kind("membership")) > 10
    found = audit(*books(tmp_path, nodes))
    assert found.faults == () and found.contributions > 20
    assert found.contributions - found.acknowledged <= 1, "a node may end before it hears of its last delta"
    assert found.computed == result.steps * program.samples_per_batch  # nobody was killed, and nothing is lost
    last = [np.allclose(flat(ended.params), flat(result.params), atol=1e-5) for ended in result.nodes.values()]
    assert len(last) == 3 and last.count(False) <= 1, "a node that ends while it has no hub misses the last version"


def test_a_schedule_of_all_faults_leaves_exact_books_and_can_be_repeated(program, scenario, tmp_path):
    nodes = nodes_named(12)
    drawn = draw_schedule(5, 24.0, [node.name for node in nodes], SIM_KINDS, mean_seconds=0.8)
    faults = (*drawn, Fault(4.0, "drop", "pc-0"), Fault(5.0, "corrupt", "pc-1", 4.0, 0.05))
    assert {fault.kind for fault in faults} == set(SIM_KINDS)
    of_scenario = {"faults": faults, "max_seconds": 24.0}
    run = scenario(nodes, units=0, every=8, delay=4, of_scenario=of_scenario, **QUICK)
    result = simulate(run, program, record=tmp_path)
    found = audit(*books(tmp_path, nodes))
    assert found.faults == () and found.lives == 12 + sum(fault.kind == "kill" for fault in faults)
    assert found.goodput > 0.85  # the run is cut off with what is on its way
    assert flat(simulate(run, program).params).tobytes() == flat(result.params).tobytes()


def test_what_befalls_a_node_is_recorded_with_the_id_of_the_life_that_it_befell(program, scenario, tmp_path):
    faults = (Fault(0.5, "drop", "pc-0"), Fault(1.0, "kill", "pc-0"))
    run = scenario(nodes_named(2), units=0, of_scenario={"faults": faults, "max_seconds": 20.0}, **QUICK)
    run = replace(run, nodes=tuple(replace(node, leaves_at=15.0) for node in run.nodes))
    simulate(run, program, record=tmp_path)
    (broker,) = lives_of(tmp_path / "broker.jsonl")
    said = [(one["what"], one["peer"]) for one in broker if one["kind"] == "membership" and one["node"] == "pc-0"]
    first, second = (life[0]["peer"] for life in lives_of(tmp_path / "pc-0.jsonl"))
    assert list(dict.fromkeys(one for one in said if one[0] not in ("again", "lost"))) == [
        ("joined", first), ("drop", first), ("kill", first), ("killed", first), ("joined", second), ("left", second),
    ]  # fmt: skip
    assert {one for one in said if one[0] in ("again", "lost")} == {("again", first), ("lost", first)}


def test_windows_of_faults():
    assert pauses_and_cuts(Fault(2.0, "stop", "a", 3.0)) == (((2.0, 5.0),), ((2.0, 5.0),))
    assert pauses_and_cuts(Fault(2.0, "unplug", "a", 3.0)) == ((), ((2.0, 5.0),))
    assert pauses_and_cuts(Fault(2.0, "slow", "a", 2.5, 0.25)) == (((2.0, 2.25), (3.0, 3.25)), ())
    assert pauses_and_cuts(Fault(2.0, "kill", "a")) == ((), ())


def test_the_fate_of_a_frame_is_drawn_from_the_seed_and_a_break_befalls_one():
    noise = FrameNoise("1")
    assert noise.fate(True) == Fate()
    noise.drop()
    assert noise.fate(False).breaks and noise.fate(False) == Fate()
    noise.set("corrupt", 1.0)
    assert noise.fate(True).flipped and noise.fate(False).breaks
    noise.set("corrupt", 0.0)
    noise.set("duplicate", 1.0)
    assert len(noise.fate(True).delays) == 2


def tables(**more):
    run = {"program": "text", "units": 4, "every": 4, "delay": 2}
    return {"run": run, "node": [{"name": "a"}, {"name": "b"}], **more}


def test_faults_are_written_or_drawn_in_a_scenario_file():
    one = {"at": 3, "kind": "stop", "target": "b", "seconds": 10}
    assert scenario_from_tables(tables(fault=[one]), "x.toml").faults == (Fault(3.0, "stop", "b", 10.0),)
    drawn = scenario_from_tables(tables(chaos={"seed": 3, "seconds": 60, "kinds": ["kill"]}), "x.toml").faults
    assert drawn == draw_schedule(3, 60.0, ["a", "b"], ["kill"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"fault": [{"at": 1, "kind": "disk", "target": "a"}]}, "is not simulated"),
        ({"fault": [{"at": 1, "kind": "kill", "target": "broker"}]}, "is not simulated"),
        ({"fault": [{"at": 1, "kind": "kill", "target": "c"}]}, "befalls nobody"),
        ({"fault": [{"at": 1, "kind": "kil", "target": "a"}]}, "there is no fault 'kil'"),
        ({"fault": [{"kind": "kill", "target": "a"}]}, "says no at"),
        ({"fault": [{"at": -1, "kind": "kill", "target": "a"}]}, "at least 0"),
        ({"fault": {"at": 1}}, "two brackets"),
        ({"chaos": {"sed": 1}}, "did you mean seed"),
        ({"chaos": {"seed": "x"}}, "whole number"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(more, words):
    with pytest.raises(ConfigError, match=words):
        scenario_from_tables(tables(**more), "x.toml")

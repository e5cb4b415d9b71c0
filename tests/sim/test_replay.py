"""A recorded run is computed again, bit for bit: here runs of the simulator, which records as a real run does."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from zmqtrain.cli import main
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO_DELAY, AUTO_EVERY, FIRST, FITTED
from zmqtrain.monitor.records import read_records
from zmqtrain.sim import SimNode, simulate
from zmqtrain.sim.replay import replay
from zmqtrain.train.leaves import host_leaves
from zmqtrain.transport.memory import LinkModel


class Recorded:
    """A simulated run and its records: the broker's, and each node's by name."""

    def __init__(self, folder, run, program, **options):
        self.folder = folder
        self.result = simulate(run, program, record=folder, **options)
        self.read()

    def read(self):
        self.broker = read_records(self.folder / "broker.jsonl")
        files = sorted(file for file in self.folder.glob("*.jsonl") if file.stem != "broker")
        self.nodes = {file.stem: read_records(file) for file in files if file.stat().st_size}

    def replay(self, program):
        return replay(self.broker, list(self.nodes.values()), program)

    def of_kind(self, name, kind):
        return [record for record in self.nodes[name] if record["kind"] == kind]

    def releases(self):
        return [record for record in self.broker if record["kind"] == "release"]


@pytest.fixture
def record(tmp_path, scenario, program):
    """A function that simulates and records a scenario."""

    def make(nodes=3, **settings):
        return Recorded(tmp_path, scenario(nodes, **settings), program)

    return make


SLOW = [SimNode(), SimNode(slowness=1.7), SimNode(slowness=2.3, joins_at=0.6)]

RUNS = {
    "quorum": {"release": "quorum", "units": 24},
    "immediately": {"release": "immediately", "units": 24},
    "the timed rule": {"release": "time:seconds=0.3", "units": 24},
    "bounded staleness": {"release": "bounded:staleness=1", "units": 24},
    "two in flight and two fragments": {"release": "quorum", "every": 2, "delay": 4, "fragments": 2, "units": 24},
    "no delay": {"release": "immediately", "delay": 0, "units": 18},
    "a round that is held": {"release": "count:contributions=2", "aggregate": "weighted", "selection": "better"},
    "deltas that are refused": {"release": "immediately", "every": 1, "delay": 2, "max_staleness": 1, "units": 18},
    "the best of those who began, and its moments": {"initial": "best", "apart_steps": 6, "fresh_moments": False},
    "parameters of their own": {"initial": "own", "elastic": 0.5},
    "steps of several batches": {"minibatch": "fixed:batches=3", "every": 2, "delay": 1},
    "timed steps of a run that one node begins": {
        "minibatch": "timed:seconds=0.12,partitions=4",
        "initial": "best",
        "start_nodes": 1,
        "delay": 1,
    },
    "timed steps": {"minibatch": "timed:seconds=0.12,partitions=4", "every": 2, "delay": 1},
    "k and d from what is measured": {"every": AUTO_EVERY, "delay": AUTO_DELAY, "release": "quorum", "units": 90},
    "nothing told": {**FITTED, "release": "quorum", "units": 90},
    "dynamic local updates": {"local_updates": "dynamic", "release": "immediately", "units": 30},
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS.keys())
def test_a_run_is_replayed_to_the_same_bits(record, program, settings):
    run = record(SLOW, **{"start_nodes": 2, **settings})
    refused = {one["reason"] for name in run.nodes for one in run.of_kind(name, "withdrawal")}
    assert refused == ({"stale"} if settings.get("max_staleness") else set())
    result = run.replay(program)
    assert result.difference == "" and result.equal
    assert result.version == run.result.version > 3 and result.crc == result.recorded_crc
    for ours, theirs in zip(result.params, host_leaves(run.result.params), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    assert len(result.nodes) == 3
    for name, ended in run.result.nodes.items():
        assert result.nodes[name].crc == result.nodes[name].recorded_crc is not None
        assert result.nodes[name].steps == ended.statistics.steps


def test_every_node_comes_to_other_k_and_d_at_the_version_for_which_they_were_announced(tmp_path, scenario, program):
    narrow = LinkModel(bits_per_second=30e3)
    nodes = [SimNode(), SimNode(slowness=1.5), SimNode(joins_at=6.0, leaves_at=14.0)]
    run = scenario(nodes, every=AUTO_EVERY, delay=AUTO_DELAY, release="quorum", units=240)
    run = Recorded(tmp_path, replace(run, link=narrow), program)
    plans = [record for record in run.broker if record["kind"] == "plan"]
    assert len({plan["every"] for plan in plans}) > 1 and any("3 nodes" in plan["text"] for plan in plans)
    seen = set()
    for name in run.nodes:
        version, held = 0, None
        for event in run.nodes[name]:
            if event["kind"] == "application":
                version = event["version"]
            elif event["kind"] == "schedule":
                held = (event["every"], event["delay"])
            elif event["kind"] == "offer" and not event["dense"]:
                of_plan = [plan for plan in plans if plan["from_version"] <= version]
                wanted = (of_plan[-1]["every"], of_plan[-1]["delay"]) if of_plan else (FIRST["every"], FIRST["delay"])
                assert held == wanted, f"{name} at version {version}"
                seen.add(wanted)
    assert len(seen) > 1
    assert run.replay(program).difference == ""


@pytest.mark.parametrize("spoilt", [{"corrupt": "labels"}, {"initial_scale": 4.0}, {"initial": "diverged"}])
def test_a_run_with_a_spoilt_node_is_replayed_with_it(record, program, spoilt):
    run = record([SimNode(**spoilt), SimNode()], release="immediately", units=24)
    result = run.replay(program)
    assert result.difference == "" and result.version == run.result.version > 3


def test_strict_runs_are_replayed_too(record, program):
    run = record(3, mode="strict", release="all", units=18, fragments=2)
    assert run.replay(program).difference == ""


def test_a_run_that_begins_with_the_mean_of_all_is_replayed_too(tmp_path, scenario, program):
    class Related(type(program)):
        """Initial parameters that differ little from node to node: their mean is worth something."""

        def init(self, seed):
            return {"bias": jnp.zeros((2,)), "weights": 0.1 * super().init(seed)["weights"] - jnp.asarray(self.true)}

    related = Related()
    run = Recorded(tmp_path, scenario(3, initial="mean"), related)
    founded = next(one for one in run.broker if one["kind"] == "founding")
    assert founded["nodes"] == ["node-0", "node-1", "node-2"]
    assert run.replay(related).difference == ""


def test_a_node_that_joins_late_begins_with_the_snapshot_that_it_was_sent(record, program):
    run = record(SLOW, start_nodes=2, release="immediately", units=24)
    first = run.of_kind("node-2", "application")[0]
    assert first["snapshot"] and first["version"] > 0 and first["step"] == 1
    assert run.replay(program).difference == ""


def test_a_node_that_was_cut_off_comes_back_by_a_snapshot_and_offers_again_what_was_lost(record, program):
    nodes = [SimNode(), SimNode(cut=((1.0, 6.0),))]
    run = record(nodes, release="immediately", every=2, delay=4, units=40, lost_seconds=1.5)
    assert run.of_kind("node-1", "withdrawal")
    assert any(one["snapshot"] and one["version"] > 5 for one in run.of_kind("node-1", "application"))
    assert run.replay(program).difference == ""


def test_a_killed_node_is_replayed_as_far_as_its_record_goes(record, program):
    run = record([SimNode(), SimNode(), SimNode(killed_at=1.3)], release="immediately", units=30)
    assert not run.of_kind("node-2", "node_end")
    result = run.replay(program)
    assert result.difference == "" and result.nodes["node-2"].params is None
    assert 0 < result.nodes["node-2"].steps < result.nodes["node-0"].steps


def test_a_broker_that_was_killed_is_replayed_as_far_as_its_record_goes(record, program):
    run = record(SLOW, start_nodes=2, release="immediately", units=24)
    last = len(run.releases()) // 2
    run.broker = run.broker[: run.broker.index(run.releases()[last])]
    for name, records in run.nodes.items():
        end = next(i for i, one in enumerate(records) if one["kind"] == "application" and one["version"] > last)
        run.nodes[name] = records[:end]
    result = run.replay(program)
    assert result.difference == "" and result.version == last and result.recorded_crc is None


def test_another_order_of_arrival_is_another_model(record, program):
    run = record(3, release="count:contributions=3", codec="float32", broadcast_codec="float32")
    assert run.replay(program).difference == ""
    for release in run.releases():  # the sum of floats depends on it, but not that of any three: the model is tiny
        assert len(release["contributions"]) == 3
        release["contributions"].reverse()
        if difference := run.replay(program).difference:
            found = re.fullmatch(r"the aggregate to version (\d+) has other bytes", difference)
            assert found and int(found[1]) >= release["version"]  # or one after it, if that sum rounds to the same
            return
    pytest.fail("no order mattered")


def test_an_order_that_cannot_have_been_is_said_to_be_none(record, program):
    run = record(SLOW, start_nodes=2, release="immediately", units=24)
    one, other = (next(r for r in run.releases() if r["contributions"][0]["sequence"] == s) for s in (0, 5))
    one["contributions"], other["contributions"] = other["contributions"], one["contributions"]
    difference = run.replay(program).difference
    assert re.search(r"the replay ends at version \d+: version \d+ waits for offer 5 of node-\d", difference)


def test_an_update_that_is_applied_a_step_later_is_another_model(record, program):
    run = record(SLOW, start_nodes=2, release="immediately", units=24)
    applied = next(one for one in run.of_kind("node-0", "application")[3:] if not one["draining"])
    applied["step"] += 1
    result = run.replay(program)
    assert not result.equal and ("other bytes" in result.difference or "node-0" in result.difference)


def test_an_offer_that_nobody_makes_is_named(record, program):
    run = record(SLOW, start_nodes=2, release="immediately", units=24)
    contribution = run.releases()[-1]["contributions"][0]
    contribution["sequence"] = 1000
    result = run.replay(program)
    assert f"waits for offer 1000 of {contribution['node']}" in result.difference


def test_a_program_with_other_numbers_differs_from_the_first_aggregate_on(record, program):
    run = record(2, release="immediately")
    other = type(program)(rate=0.04)
    assert run.replay(other).difference == "the aggregate to version 1 has other bytes"


def test_records_that_cannot_be_replayed_are_refused_with_the_reason(record, program):
    run = record(2)
    nodes = list(run.nodes.values())

    def head(**changes):
        return [{**run.broker[0], **changes}, *run.broker[1:]]

    settings = run.broker[0]["settings"]
    for broker, others, about in (
        (run.broker, nodes[:1], "the records of node-1 are missing"),
        (run.broker, [*nodes, nodes[0]], "node-0 is given twice"),
        (nodes[0], nodes, "a broker's record begins with its run"),
        (run.broker, [run.broker, *nodes], "a node's record begins with the node"),
        (run.broker[:1], nodes, "nobody has founded"),
        (head(version=3), nodes, "from its beginning"),
        (head(run="run-other"), nodes, "was a node of run-simulated"),
        (head(settings={**settings, "initial": "own"}), nodes, "initial own"),
        (head(settings={**settings, "initial": "best", "minibatch": "timed:seconds=1"}), nodes, "timed steps apart"),
    ):
        with pytest.raises(ConfigError, match=about):
            replay(broker, others, program)
    preempted = [
        {**one, "reset": True} if one["kind"] == "application" else one for one in nodes[0]
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="preempted"):
        replay(run.broker, [preempted, nodes[1]], program)
    went_on = [{**nodes[0][0], "version": 3}, *nodes[0][1:]]
    with pytest.raises(ConfigError, match="node-0 went on from its checkpoint of version 3"):
        replay(run.broker, [nodes[0], went_on, nodes[1]], program)
    with pytest.raises(ConfigError, match="loops of one's own"):
        replay(run.broker, nodes)


def test_recording_changes_nothing(record, scenario, program):
    run = record(SLOW, start_nodes=2, release="immediately")
    plain = simulate(scenario(SLOW, start_nodes=2, release="immediately"), program)
    np.testing.assert_array_equal(
        *(np.concatenate([x.ravel() for x in host_leaves(r.params)]) for r in (run.result, plain))
    )
    assert [one["version"] for one in run.releases()] == [one["version"] for one in plain.of_kind("release")]


def test_the_simulator_and_its_recorder_say_the_same_of_a_release(record):
    run = record(SLOW, start_nodes=2, release="immediately")
    for ours, theirs in zip(run.releases(), run.result.of_kind("release"), strict=True):
        assert {key: ours[key] for key in theirs} == json.loads(json.dumps(theirs))


def test_the_command_replays_and_says_equal_or_where_it_differs(record, program, monkeypatch, capsys):
    monkeypatch.setattr("zmqtrain.sim.replay._Replay._load", lambda self, data: program)
    run = record(2, release="immediately")
    files = [str(run.folder / f"{name}.jsonl") for name in ("broker", "node-0", "node-1")]
    assert main(["sim", "--replay", *files]) == 0
    out, _ = capsys.readouterr()
    assert "equal: every aggregate, the shared model" in out and "of 2 of 2 nodes" in out
    lines = (run.folder / "broker.jsonl").read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"kind": "release"' in line)
    release = json.loads(lines[number])
    lines[number] = json.dumps({**release, "live": release["live"] + 1})
    (run.folder / "broker.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["sim", "--replay", *files]) == 1
    assert "different: the aggregate to version 1 has other bytes" in capsys.readouterr().out
    assert main(["sim", "--replay", files[0]]) == 2
    assert main(["sim"]) == 2

"""Whole simulated runs: the laws of a real run hold, time is what the models say, and a run can be repeated."""

from __future__ import annotations

import zlib
from math import inf

import jax
import numpy as np
import pytest

from tests.fixed import fixed_run
from tests.sim.conftest import Line
from zmqtrain.core.errors import ConfigError, JoinRefused, NonFiniteDelta
from zmqtrain.programs import load_program
from zmqtrain.sim import Scenario, SimNode, simulate
from zmqtrain.strategies.measures import relatedness
from zmqtrain.train.loop import own_seed
from zmqtrain.train.step import MinibatchStep
from zmqtrain.train.sync import DelayedSync
from zmqtrain.transport.memory import LinkModel


def flat(params):
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(params)])


def watched():
    """A DelayedSync that notes what each node computes, and the anchors by version."""

    class Watched(DelayedSync):
        nodes, anchors = [], {}

        def __init__(self, exchange, params, *arguments, **named):
            super().__init__(exchange, params, *arguments, **named)
            self.computed, self.last = 0.0, flat(self._anchor).astype(np.float64)
            Watched.nodes.append(self)

        def step(self, params, *arguments, **named):
            self.computed = self.computed + flat(params).astype(np.float64) - self.last
            params = super().step(params, *arguments, **named)
            self.last = flat(params).astype(np.float64)
            return params

        def _apply(self, leaves, update, *arguments, **named):
            result = super()._apply(leaves, update, *arguments, **named)
            crc = zlib.crc32(flat(self._anchor).tobytes())
            Watched.anchors.setdefault(update.version, set()).add(crc)
            return result

    return Watched


def comparable(records):
    return [{key: "nan" if value != value else value for key, value in record.items()} for record in records]


UNEVEN = [
    SimNode(straggler=((0.0, 0.02, 1.0),), message_sigma=0.05),
    SimNode(slowness=3, message_sigma=0.02),
    SimNode(pauses=((0.3, 0.7),)),
]


def test_the_same_seed_gives_the_same_run_bit_for_bit_and_another_one_another(program, scenario):
    same = [simulate(scenario(UNEVEN, seed=3, codec="ternary:block=8"), program) for _ in range(2)]
    assert comparable(same[0].records) == comparable(same[1].records)
    assert flat(same[0].params).tobytes() == flat(same[1].params).tobytes()
    other = simulate(scenario(UNEVEN, seed=4, codec="ternary:block=8"), program)
    assert comparable(other.records) != comparable(same[0].records)


@pytest.mark.parametrize("release", ["all", "quorum", "immediately", "count:contributions=2", "time:seconds=0.3"])
def test_whatever_the_rule_all_anchors_are_equal_and_what_was_computed_is_in_the_shared_parameters(
    program, scenario, release
):
    sync = watched()
    run = scenario(UNEVEN, release=release, codec="int8:block=8", broadcast_codec="int8:block=8", outer="sgd:rate=1")
    result = simulate(run, program, make_sync=sync)
    assert result.version > 3 and result.contributions >= result.version
    assert all(len(crcs) == 1 for crcs in sync.anchors.values()), "a version has one anchor"
    computed = sum(node.computed for node in sync.nodes) / len(UNEVEN)
    start = flat(program.init(run.settings.seed)).astype(np.float64)
    np.testing.assert_allclose(flat(result.params), start + computed, atol=2e-5)
    ended = [flat(node.params) for node in result.nodes.values()]
    assert len(ended) == 3
    for params in ended:
        np.testing.assert_allclose(params, flat(result.params), atol=1e-6)


def test_strict_mode_is_the_sequential_computation(program, scenario):
    nodes, units = 3, 6
    run = scenario(
        nodes, mode="strict", release="all", every=1, delay=0, codec="float32", broadcast_codec="float32",
        outer="sgd:rate=1", units=units,
    )  # fmt: skip
    result = simulate(run, program)
    local, shared = MinibatchStep(program), program.init(run.settings.seed)
    lanes = [[batch for unit in range(lane, units, nodes) for batch in program.batches(unit)] for lane in range(nodes)]
    for batches in zip(*lanes, strict=True):
        ends = []
        for batch in batches:
            state = local.init(0)._replace(params=jax.tree.map(jax.numpy.copy, shared))
            ends.append(local.step(state, iter([batch]))[0].params)
        shared = jax.tree.map(lambda *leaves: sum(leaves) / nodes, *ends)
    np.testing.assert_allclose(flat(result.params), flat(shared), rtol=1e-5, atol=1e-6)


def test_a_slow_node_holds_nobody_up_under_quorum_and_everybody_under_strict_mode(program, scenario):
    nodes = [SimNode(), SimNode(), SimNode(slowness=10)]

    def steps_of_the_first(**settings):
        run = scenario(nodes, units=300, of_scenario={"max_seconds": 4.0}, **settings)
        records = simulate(run, program).of_kind("step")
        return sum(record["node"] == "node-0" for record in records)

    assert steps_of_the_first(release="quorum") == 79  # at 0.05 s each, a little after 0
    assert steps_of_the_first(release="all", mode="strict") <= 14


def test_a_node_whose_step_is_longer_than_the_time_between_reports_keeps_its_dynamic_k(program, scenario):
    nodes = [*[SimNode(step_seconds=0.1)] * 3, SimNode(step_seconds=1.6)]
    run = scenario(nodes, units=0, every=8, local_updates="dynamic", release="immediately",
                   of_scenario={"max_seconds": 40.0})  # fmt: skip
    result = simulate(run, program)
    ks = {f"node-{number}": [] for number in range(4)}
    for record in result.of_kind("release"):
        for one in record["contributions"]:
            ks[one["node"]].append(one["samples"] // program.samples_per_batch)
    # a fast node makes 80 samples a second, the slow one 5; before it has ended a step, its k is the run's
    assert ks["node-3"][0] == 8 and set(ks["node-3"][1:]) == {1} and len(ks["node-3"]) > 10
    assert all(set(ks[f"node-{number}"][3:-1]) == {8} for number in range(3))


def test_a_report_waits_for_the_loss_and_does_not_depend_on_the_device(program, scenario):
    class Late:
        def is_ready(self):
            return False

        def is_deleted(self):
            return False

        def __float__(self):
            return 0.5

    said = []

    class Reporting(DelayedSync):
        def step(self, params, **named):
            self.exchange.report(step=1, samples=8, loss=Late(), age_steps=0.0, offers_refused=0)
            said.append(self.exchange.make_report().loss)
            return super().step(params, **named)

    simulate(scenario(1, units=1), program, make_sync=Reporting)
    assert said == [0.5] * program.batches_per_unit


@pytest.mark.parametrize("begins", [(0.0, 0.07, 0.11, 0.31), (0.0, 0.1, 0.2, 0.3), (0.05, 0.39, 0.2, 0.0)])
def test_nodes_of_one_speed_are_all_in_every_aggregate_from_whatever_phases_they_begin(program, scenario, begins):
    nodes = [SimNode(joins_at=begin, straggler=((0.0, 0.005, 1.0),), leaves_at=12.0) for begin in begins]
    run = scenario(nodes, units=0, start_nodes=1, every=8, delay=12, release="quorum")
    rounds = [one for one in simulate(run, program).of_kind("release") if 4.0 < one["seconds"] < 11.0]
    nodes_in = [len({one["node"] for one in each["contributions"]}) for each in rounds]
    assert len(rounds) >= 15 and sum(nodes_in) >= 3.9 * len(rounds)


def test_bounded_staleness_lets_the_fastest_be_so_many_exchanges_ahead_and_no_more(program, scenario):
    nodes = [SimNode(), SimNode(slowness=5)]
    run = scenario(nodes, units=60, release="bounded:staleness=2", every=2, delay=0, of_scenario={"max_seconds": 8.0})
    ahead = {"node-0": 0, "node-1": 0}
    for record in simulate(run, program).of_kind("release"):
        for one in record["contributions"]:
            ahead[one["node"]] += 1
        assert ahead["node-0"] - ahead["node-1"] <= 3
    assert ahead["node-0"] - ahead["node-1"] >= 2


def test_a_payload_is_in_the_parameters_when_latency_and_rate_say_so(program, scenario):
    link = LinkModel(bits_per_second=8000.0, latency_seconds=0.01)  # a byte takes a millisecond
    run = scenario(
        1, codec="float32", every=5, delay=5, release="immediately", units=0,
        of_scenario={"link": link, "max_seconds": 4.0},
    )  # fmt: skip
    result = simulate(run, program)
    first_step = result.of_kind("step")[0]["seconds"]
    published = first_step + 4 * 0.05
    frame = result.of_kind("release")[0]["seconds"] - published - 3 * 0.01  # the head, the credit, the payload
    assert frame == pytest.approx(0.001 * (24 * 4 + 16), abs=1e-9)  # the frame's header has 16 bytes


def test_the_codec_threads_take_their_time_per_value(program, scenario):
    def first_release(**of_scenario):
        run = scenario(1, release="immediately", units=8, of_scenario=of_scenario)
        return simulate(run, program).of_kind("release")[0]["seconds"]

    start = first_release()
    assert first_release(node_codec_ns=1e6) == pytest.approx(start + 24e-3, abs=1e-3)
    founding = 24e-3 * 2  # the hub checks and takes the founder's parameters
    assert first_release(hub_codec_ns=1e6) == pytest.approx(start + founding + 3 * 24e-3, abs=1e-3)


def test_who_is_killed_is_noticed_and_its_units_are_done_by_the_others(program, scenario):
    nodes = [SimNode(), SimNode(), SimNode(killed_at=0.5)]
    run = scenario(nodes, units=30, heartbeat_seconds=0.05, lost_seconds=0.2)
    result = simulate(run, program)
    assert sorted(result.nodes) == ["node-0", "node-1"]
    assert result.of_kind("release")[-1]["live"] == 2
    assert sum(ended.statistics.steps for ended in result.nodes.values()) + 10 >= 30 * program.batches_per_unit
    assert {"killed", "left", "joined"} == {record["what"] for record in result.of_kind("membership")}


def test_who_joins_late_has_the_anchor_of_the_others_and_who_leaves_early_has_sent_everything(program, scenario):
    sync = watched()
    nodes = [SimNode(), SimNode(joins_at=1.0), SimNode(leaves_at=0.7)]
    run = scenario(nodes, units=40, start_nodes=2, codec="float32", broadcast_codec="float32", outer="sgd:rate=1")
    result = simulate(run, program, make_sync=sync)
    assert len(result.nodes) == 3 and all(len(crcs) == 1 for crcs in sync.anchors.values())
    left = next(r["seconds"] for r in result.of_kind("membership") if (r["node"], r["what"]) == ("node-2", "left"))
    assert 0.7 <= left < 1.0
    sent = [c for r in result.of_kind("release") for c in r["contributions"] if c["node"] == "node-2"]
    assert sum(one["samples"] for one in sent) == result.nodes["node-2"].samples


@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_who_is_cut_off_trains_on_and_loses_nothing(program, scenario, seconds):
    sync = watched()
    nodes = [SimNode(), SimNode(), SimNode(cut=((0.5, 0.5 + seconds),))]
    run = scenario(
        nodes, units=90, codec="int8:block=8", outer="sgd:rate=1", heartbeat_seconds=0.1, lost_seconds=0.5,
    )  # fmt: skip
    result = simulate(run, program, make_sync=sync)
    assert len(result.nodes) == 3 and all(len(crcs) == 1 for crcs in sync.anchors.values())
    during = [r for r in result.of_kind("step") if r["node"] == "node-2" and 0.5 < r["seconds"] < 0.5 + seconds]
    assert len(during) >= 20 * seconds - 2
    sent = [c for r in result.of_kind("release") for c in r["contributions"] if c["node"] == "node-2"]
    assert sum(one["samples"] for one in sent) == result.nodes["node-2"].samples


def test_many_nodes_and_runs_compile_a_program_once(program, scenario):
    class Counted(type(program)):
        traced = 0

        def loss(self, params, batch):
            Counted.traced += 1
            return super().loss(params, batch)

    counted = Counted()
    for seed in (0, 1):
        simulate(scenario(3, seed=seed), counted)
    assert Counted.traced == 1


def test_sixty_four_nodes_run(program, scenario):
    nodes = [SimNode(straggler=((0.0, 0.01, 1.0),)) for _ in range(64)]
    sync = watched()
    result = simulate(scenario(nodes, units=128), program, make_sync=sync)
    assert len(result.nodes) == 64 and result.steps == 128 * program.batches_per_unit
    assert all(len(crcs) == 1 for crcs in sync.anchors.values())


def test_the_target_loss_ends_the_run(program, scenario):
    settings = {"units": 10_000, "codec": "float32", "broadcast_codec": "float32", "of_scenario": {
        "target_loss": 2.0, "evaluate_seconds": 0.25}}  # fmt: skip
    result = simulate(scenario(2, **settings), program)
    assert result.scores["loss"] <= 2.0 and result.target_seconds == result.seconds < inf
    before = [loss for _, _, loss in result.curve()[:-2]]
    assert before and all(loss > 2.0 for loss in before)


def test_evaluations_by_version_and_the_curve(program, scenario):
    result = simulate(scenario(2, of_scenario={"evaluate_versions": 2}), program)
    versions = [record["version"] for record in result.of_kind("evaluation")]
    assert versions[:-1] == [v for v in range(2, result.version + 1, 2)]
    assert result.curve()[-1] == (result.seconds, result.samples, result.scores["loss"])


def test_each_node_stops_after_its_own_steps(program, scenario):
    run = scenario([SimNode(steps=12), SimNode(steps=20, slowness=2)], units=0)
    result = simulate(run, program)
    assert {name: ended.statistics.steps for name, ended in result.nodes.items()} == {"node-0": 12, "node-1": 20}
    assert result.samples == 32 * program.samples_per_batch


def test_all_nodes_begin_with_given_parameters_and_one_may_be_spoilt(program, scenario):
    given = {"bias": np.full(2, 0.5, np.float32), "weights": program.true}
    result = simulate(scenario(2, of_scenario={"max_seconds": 0.04}), program, initial_params=given)
    np.testing.assert_array_equal(flat(result.params), flat(given))
    spoilt = [SimNode(initial_scale=4.0), SimNode()]
    result = simulate(scenario(spoilt, of_scenario={"max_seconds": 0.04}), program, initial_params=given)
    np.testing.assert_array_equal(flat(result.params), 4 * flat(given))
    diverged = [SimNode(initial="diverged"), SimNode()]
    result = simulate(scenario(diverged, of_scenario={"max_seconds": 0.04}), program, initial_params=given)
    assert result.scores["loss"] > 100


def test_a_node_with_shuffled_labels_learns_what_is_not_there(program, scenario):
    result = simulate(scenario(1, units=30), program)
    corrupt = simulate(scenario([SimNode(corrupt="labels")], units=30), program)
    assert corrupt.scores["loss"] > 2 * result.scores["loss"]


def test_own_final_parameters_are_scored_where_that_is_asked_for(program, scenario):
    plain = simulate(scenario(2), program)
    assert all(ended.scores == {} for ended in plain.nodes.values())
    scored = simulate(scenario(2, of_scenario={"score_nodes": True}), program)
    for ended in scored.nodes.values():
        assert ended.scores["loss"] == pytest.approx(scored.scores["loss"], rel=1e-4)


@pytest.mark.parametrize("on_nodes", [True, False])
def test_several_brokers_serve_one_model_with_one_plan_and_the_run_can_be_repeated(scenario, on_nodes):
    program = Line(width=3 * 4096)  # with the bias four blocks
    of_scenario = {"shards_on_nodes": on_nodes, "link": LinkModel(1e6, 1e-3), "evaluate_seconds": 1.0}
    auto = {"codec": "auto", "broadcast_codec": "auto", "every": "auto", "delay": "auto", "fragments": "auto"}
    run = scenario(UNEVEN, shards=4, units=24, of_scenario=of_scenario, **auto)
    one, again = (simulate(run, program) for _ in range(2))
    assert comparable(one.records) == comparable(again.records)
    for ended in one.nodes.values():
        np.testing.assert_allclose(flat(ended.params), flat(one.params), atol=1e-6)
    assert len(one.nodes) == 3 and one.scores["loss"] < one.curve()[0][2]


def test_brokers_on_nodes_share_their_ports_and_those_beside_them_have_more_room(scenario):
    run = {"units": 24, "shards": 4, "fragments": 1, "codec": "float32", "broadcast_codec": "float32"}
    ended = [
        simulate(
            scenario(3, **run, of_scenario={"shards_on_nodes": on_nodes, "link": LinkModel(1e6)}), Line(width=3 * 4096)
        )
        for on_nodes in (True, False)
    ]
    assert ended[0].seconds > ended[1].seconds
    assert ended[0].samples == ended[1].samples


def test_a_node_that_diverges_ends_the_run_with_its_name(program, scenario):
    broken = {"bias": np.full(2, np.nan, np.float32), "weights": program.true}
    with pytest.raises(NonFiniteDelta, match="node-0"):
        simulate(scenario(1), program, initial_params=broken)


def test_every_record_is_seen_when_it_is_made(program, scenario):
    seen = []
    result = simulate(scenario(2), program, watch=seen.append)
    assert seen == result.records


@pytest.mark.parametrize("initial", ["best", "mean", "own"])
def test_runs_with_other_initial_parameters_end_with_one_model(program, scenario, initial):
    given = {"bias": np.full(2, 0.5, np.float32), "weights": -program.true}
    run = scenario(3, initial=initial, apart_steps=4, units=36, codec="float32", broadcast_codec="float32")
    result = simulate(run, program, initial_params=given)
    assert len(result.nodes) == 3 and result.scores["loss"] < program.evaluate(given)["loss"] / 2


def test_the_mean_of_unrelated_initial_parameters_is_refused(program, scenario):
    with pytest.raises(JoinRefused, match="unrelated"):
        simulate(scenario(3, initial="mean"), program)


class Valleys:
    """A program of two valleys: halfway between them lies a ridge. Its nodes begin in either, by their seeds."""

    def __init__(self, line):
        self.line, self.half = line, np.tile(np.float32([0.25, -0.25]), 11)

    def __getattr__(self, name):
        return getattr(self.line, name)

    def init(self, seed):
        weights = self.line.true + (self.half if seed & 2 else -self.half)
        return {"bias": np.zeros(2, np.float32), "weights": weights}

    def score(self, params):
        ways = [np.asarray(params["weights"]) - self.line.true + sign * self.half for sign in (-1, 1)]
        return 1.0 + min(float(np.square(way).sum()) for way in ways)


def test_the_mean_of_related_initial_parameters_is_refused_where_its_nodes_find_it_worse(program, scenario):
    valleys, run = Valleys(program), scenario(3, initial="mean")
    assert {own_seed(run.settings, f"node-{number}") & 2 for number in range(3)} == {0, 2}
    assert relatedness([valleys.init(0)["weights"]], [valleys.init(2)["weights"]]) > 0.5
    with pytest.raises(JoinRefused, match=r"3 of the 3 nodes .* different valleys"):
        simulate(run, valleys)


def test_training_apart_takes_its_time(program, scenario):
    run = scenario(2, initial="best", apart_steps=10)
    assert simulate(run, program).of_kind("step")[0]["seconds"] == pytest.approx(11 * 0.05, abs=1e-4)


def test_a_timed_minibatch_is_as_large_as_its_time_allows(program, scenario):
    nodes = [SimNode(step_seconds=0.08), SimNode(step_seconds=0.08, slowness=2)]
    run = scenario(nodes, minibatch="timed:seconds=0.2,partitions=8", every=1, delay=0, units=40)
    result = simulate(run, program)
    # a part is one sample, of 0.01 s (0.02 s); one that was begun within the time is finished
    first, second = (result.nodes[name] for name in ("node-0", "node-1"))
    assert first.samples == pytest.approx(20 * first.statistics.steps, rel=0.1)
    assert second.samples == pytest.approx(10 * second.statistics.steps, rel=0.1)


@pytest.mark.nightly
def test_the_text_program_learns(scenario, tmp_path):
    (tmp_path / "text").write_bytes(b"a few words, again and again; " * 1000)
    small = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 2, "rate": 0.01}
    program = load_program("text", {**small, "data": str(tmp_path / "text")})
    run = scenario(2, units=8, of_scenario={"evaluate_seconds": 1.0})
    result = simulate(run, program)
    assert result.curve()[0][2] > result.scores["loss"] + 0.3
    assert result.samples == 8 * 16 * 32


def test_a_scenario_that_cannot_be_is_refused():
    settings = fixed_run(units=1)
    for wrong, about in (
        ({"nodes": ()}, "at least one node"),
        ({"nodes": (SimNode(name="a"), SimNode(name="a"))}, "same name"),
        ({"nodes": (SimNode(),), "target_loss": 1.0}, "target_loss needs"),
        ({"nodes": (SimNode(),), "settings": fixed_run()}, "never end"),
        ({"nodes": (SimNode(),), "max_seconds": 0.0}, "max_seconds"),
        ({"nodes": (SimNode(),), "settings": fixed_run(units=1, shards=3)}, "beside the first each broker"),
        ({"nodes": (SimNode(cut=((1.0, 2.0),)),), "settings": fixed_run(units=1, shards=2)}, "with one broker"),
    ):
        with pytest.raises(ConfigError, match=about):
            Scenario(**{"settings": settings, **wrong})
    for wrong, about in (
        ({"slowness": 0.0}, "slowness"),
        ({"cut": ((2.0, 1.0),)}, "cut"),
        ({"straggler": ((1.0, 2.0),)}, "straggler"),
        ({"straggler": "beech"}, "beech"),
        ({"initial": "nan"}, "initial"),
        (
            {"corrupt": "label", "name": "a"},
            'corrupt of the node \'a\' must be one of "", "labels", "bytes", got \'label\'',
        ),
        ({"name": "a#b"}, "name"),
    ):
        with pytest.raises(ConfigError, match=about):
            SimNode(**wrong)

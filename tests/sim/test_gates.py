"""Nodes whose training goes wrong, in virtual time: what is refused, who is quarantined, and that all end well."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from tests.grids import nightly
from zmqtrain.core.errors import NonFiniteDelta
from zmqtrain.sim import SimNode, simulate
from zmqtrain.strategies.norms import NormGate
from zmqtrain.train.sync import DelayedSync


def spoiled(node, steps, spoil):
    """Make the DelayedSync of one node see its parameters spoiled at these steps."""

    class Spoiled(DelayedSync):
        def step(self, params, *arguments, **named):
            if self.exchange.name == node and self.steps in steps:
                params = jax.tree.map(spoil, params)
            return super().step(params, *arguments, **named)

    return Spoiled


def test_a_node_that_diverges_once_begins_again_by_itself(program, scenario, caplog):
    run = scenario(3, units=36)
    with caplog.at_level(logging.ERROR):
        result = simulate(run, program, make_sync=spoiled("node-1", {20}, lambda leaf: leaf * np.nan))
    assert "node-1: the delta of bias holds 2 values that are not finite" in caplog.text
    assert "begins again from the shared parameters" in caplog.text
    assert result.nodes["node-1"].statistics.steps == result.nodes["node-0"].statistics.steps
    assert result.scores["loss"] < 2 * simulate(run, program).scores["loss"] + 0.01


def test_a_node_that_diverges_again_and_again_ends_with_an_error(program, scenario):
    with pytest.raises(NonFiniteDelta, match="node-1: the delta of bias holds 2 values"):
        simulate(
            scenario(3, units=36), program, make_sync=spoiled("node-1", set(range(100)), lambda leaf: leaf * np.nan)
        )


def test_in_strict_mode_a_node_that_diverges_ends_at_once(program, scenario):
    run = scenario(2, mode="strict", release="all", units=12)
    with pytest.raises(NonFiniteDelta, match="node-1"):
        simulate(run, program, make_sync=spoiled("node-1", {20}, lambda leaf: leaf * np.nan))


@pytest.mark.parametrize("times", [100.0, 1e30, *nightly(-100.0, 1e6)])
def test_a_delta_that_is_far_too_large_never_reaches_the_others(times, program, scenario, tmp_path):
    nodes = [SimNode(step_seconds=0.5) for _ in range(3)]
    run = scenario(nodes, units=60, codec="float32", broadcast_codec="float32")
    spoil = spoiled("node-1", {40}, lambda leaf: leaf * np.float32(times))
    result = simulate(run, program, make_sync=spoil, record=tmp_path)
    quiet = simulate(run, program)
    assert result.scores["loss"] < 2 * quiet.scores["loss"] + 0.01
    assert "quarantined" in (tmp_path / "broker.jsonl").read_text()
    # it came back, and ends with the others' parameters
    ends = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(one.params)]) for one in result.nodes.values()]
    np.testing.assert_allclose(ends[1], ends[0], atol=1e-4)


@pytest.fixture
def converging(program):
    """The line without noise, by Adam: its steps become ever smaller, but for an optimizer that begins fresh."""

    class Converging(type(program)):
        def optimizer(self):
            return optax.adam(self.rate)

        def batches(self, unit):
            for batch in super().batches(unit):
                yield {"x": batch["x"], "label": batch["x"] @ self.true}

    return Converging(rate=0.02)


def test_late_in_a_run_that_has_converged_no_newcomer_is_refused_and_the_run_goes_on(
    converging, scenario, monkeypatch, tmp_path
):
    said, judge = [], NormGate.judge

    def listen(gate, peer, fragment, norm, *facts, **named):
        judgement = judge(gate, peer, fragment, norm, *facts, **named)
        said.append((norm, judgement.why))
        return judgement

    monkeypatch.setattr(NormGate, "judge", listen)
    # the first dies and is replaced; at last only those are left that came late
    nodes = [SimNode(killed_at=25.0), SimNode(killed_at=31.0), SimNode(joins_at=22.0), SimNode(joins_at=28.0)]
    run = scenario(nodes, units=400, start_nodes=2, codec="float32", broadcast_codec="float32", lost_seconds=2.0)
    simulate(run, converging, record=tmp_path)
    norms = [norm for norm, _ in said]
    assert min(norms) < max(norms) / 500
    assert {why for _, why in said} == {""}
    assert "quarantined" not in (tmp_path / "broker.jsonl").read_text()


@pytest.mark.parametrize(("times", "fresh"), [(100.0, 0), (1e9, 1)])
def test_only_what_is_enormous_costs_a_node_its_optimizer(times, fresh, program, scenario, tmp_path):
    adopted = []

    class Watched(spoiled("node-1", {40}, lambda leaf: leaf * np.float32(times))):
        def take_adoption(self):
            adoption = super().take_adoption()
            if adoption is not None and self.steps > 40:
                adopted.append(self.exchange.name)
            return adoption

    nodes = [SimNode(step_seconds=0.5) for _ in range(3)]
    run = scenario(nodes, units=60, codec="float32", broadcast_codec="float32")
    simulate(run, program, make_sync=Watched, record=tmp_path)
    assert "quarantined" in (tmp_path / "broker.jsonl").read_text()
    assert adopted == ["node-1"] * fresh


@pytest.mark.parametrize(
    ("codec", "away"),
    [
        ("float32", False),
        ("ternary", True),
        ("int8,fragments=2", False),
        ("topk:density=0.1+int8", True),
        *nightly(("float32", True), ("ternary", False), ("int8,fragments=2", True), ("topk:density=0.1+int8", False)),
    ],
)
def test_no_delta_of_sound_training_is_refused_for_its_size(codec, away, program, scenario, monkeypatch):
    said, judge = [], NormGate.judge
    monkeypatch.setattr(NormGate, "judge", lambda *facts, **named: said.append(judge(*facts, **named)) or said[-1])
    nodes = [
        SimNode(),
        SimNode(slowness=2.5, cut=((2.0, 8.0),) if away else ()),
        SimNode(joins_at=4.0),
    ]
    run = scenario(nodes, units=60, start_nodes=2, codec=codec.partition(",")[0], broadcast_codec="float32")
    run = replace(run, settings=replace(run.settings, fragments=2 if "fragments" in codec else 1, norm_gate="10"))
    result = simulate(run, program)
    assert result.scores["loss"] < 5  # of 34, untrained
    assert len(said) > 50 and {judgement.why for judgement in said} == {""}
    assert result.refused == 0


def hurried(node, factor):
    """Make the DelayedSync of one node, whose steps are so many times as long."""

    class Hurried(DelayedSync):
        last = None

        def step(self, params, *arguments, **named):
            if self.exchange.name == node and self.last is not None:
                params = jax.tree.map(lambda new, old: old + factor * (new - old), params, self.last)
            params = super().step(params, *arguments, **named)
            self.last = jax.tree.map(np.array, params)
            return params

    return Hurried


@pytest.mark.parametrize(
    ("release", "factor"),
    [("immediately", -3.0), ("quorum", -30.0), *nightly(("immediately", -30.0), ("quorum", -3.0))],
)
def test_a_node_that_diverges_from_its_first_step_costs_the_others_next_to_nothing(
    release, factor, program, scenario, tmp_path
):
    run = scenario(3, units=99, release=release, codec="float32", broadcast_codec="float32")
    nodes = tuple(SimNode(name=name, steps=160) for name in ("node-0", "node-1", "node-2"))
    run = replace(run, nodes=nodes, settings=replace(run.settings, units=0))
    result = simulate(run, program, make_sync=hurried("node-0", factor), record=tmp_path)
    alone = replace(run, nodes=run.nodes[1:], settings=replace(run.settings, start_nodes=2))
    assert result.scores["loss"] < 1.1 * simulate(alone, program).scores["loss"] + 0.01
    if release == "immediately":  # its first delta was a version of its own before anybody could judge it
        assert "taken back" in (tmp_path / "broker.jsonl").read_text()
    ends = [result.nodes[name].params for name in ("node-1", "node-2")]
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)

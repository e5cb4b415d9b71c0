"""The federation in one process: the one equation, the bytes, what the product itself makes of the same run; and beside
it replicas that exchange coded gradients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import broker

from tests.grids import examples
from zmqtrain import RunSettings, TrainingLoop, connect
from zmqtrain.codecs.base import codec_from_spec, coding_from_spec
from zmqtrain.codecs.payload import encode_payload
from zmqtrain.core.errors import ConfigError

from codec_methods import parse_row
from coded_gradients import CodedGradients
from federation import (
    ExchangeSettings,
    Federation,
    LocalSteps,
    cosine_scales,
    draw_batches,
    join_batches,
    plan_exchanges,
)

NODES, STEPS = 3, 24
TARGET = np.random.default_rng(0).normal(size=(160, 60)).astype(np.float32)


@dataclass(eq=False)
class Linear:
    """A linear regression with plain SGD, or AdamW: two leaves, of 9,600 values (three blocks) and of 60."""

    adam: bool = False
    rate: float = 1.0
    name: str = "linear"
    sample_word: str = "rows"
    samples_per_batch: int = 8
    units_per_epoch: int | None = None

    def init(self, seed: int) -> dict[str, jax.Array]:
        return {"w": 0.1 * jax.random.normal(jax.random.key(seed), (160, 60)), "b": jnp.zeros(60)}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch @ params["w"] + params["b"] - batch @ TARGET) ** 2)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(self.rate) if self.adam else optax.sgd(self.rate)

    def batches(self, unit: int) -> Iterator[np.ndarray]:
        generator = np.random.default_rng(unit)
        return (generator.normal(size=(8, 160)).astype(np.float32) for _ in range(4))

    def evaluate(self, params: Any) -> dict[str, float]:
        return {"loss": float(self.loss(params, next(self.batches(10_000))))}


@cache
def local_steps(adam: bool, rate: float = 1.0) -> LocalSteps:
    """The same for all tests, so that each step is compiled once."""
    return LocalSteps(Linear(adam, rate), on_device=True)


def federate(exchange: ExchangeSettings, adam: bool = False, nodes: int = NODES) -> Federation:
    local = local_steps(adam)
    return Federation(local, exchange, local.program.init(0), nodes)


def flat(params: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(params)])


def shared_of(federation: Federation) -> np.ndarray:
    return flat(federation.shared)


# ---------------------------------------------------------------------- the plan


@given(
    every=st.one_of(st.integers(1, 9), st.just(((0.0, 1), (0.3, 5), (0.7, 2)))),
    delay=st.one_of(st.none(), st.integers(0, 12)),
    steps=st.integers(1, 60),
)
@settings(max_examples=examples(60))
def test_an_exchange_lands_before_the_next_is_offered_and_within_the_run(
    every: int | tuple[tuple[float, int], ...], delay: int | None, steps: int
) -> None:
    exchange = ExchangeSettings(every=every, delay=delay)
    plan = plan_exchanges(exchange, steps)
    assert all(planned.offer <= planned.land <= steps for planned in plan)
    assert all(before.land <= after.offer for before, after in pairwise(plan))
    if isinstance(every, int):
        assert [planned.offer for planned in plan] == list(range(every, steps + 1, every))


def test_k_grows_with_the_run() -> None:
    plan = plan_exchanges(ExchangeSettings(every=((0.0, 2), (0.5, 4)), delay=None), 16)
    assert [tuple(planned) for planned in plan] == [(2, 3), (4, 5), (6, 7), (8, 10), (12, 14), (16, 16)]


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"delay": -1}, {"every": ((0.1, 2),)}, {"every": ((0.0, 2), (0.0, 4))}]
)
def test_settings_that_make_no_plan_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="every"):
        ExchangeSettings(**wrong)


# ---------------------------------------------------------------------- the one equation


def test_what_the_nodes_computed_is_what_landed_and_what_is_pending() -> None:
    fragments = 2
    federation = federate(ExchangeSettings(codec="ternary", broadcast_codec="int8", fragments=fragments))
    batches = [federation.local.load(of_node) for of_node in draw_batches(federation.local.program, NODES, STEPS)]
    scales = np.full(STEPS, 0.05, np.float32)
    layout, anchor = federation.layout, shared_of(federation)
    computed, landed = np.zeros((NODES, anchor.size)), np.zeros((NODES, anchor.size))

    def advance(first: int, last: int) -> None:
        before = [flat(node.params) for node in federation.nodes]
        federation.advance(batches, scales, first, last)
        for node, old in enumerate(before):
            computed[node] += flat(federation.nodes[node].params) - old

    for offer in range(0, STEPS, 4):
        advance(offer, offer + 2)
        federation.offer()
        sent = np.asarray(federation.in_flight)
        advance(offer + 2, offer + 4)
        for node in range(NODES):
            flats = [np.zeros(sum(layout.counts(f)), np.float32) for f in range(fragments)]
            flats[federation.fragment] = sent[node]
            landed[node] += flat(layout.join(flats))
        federation.land()
        assert federation.in_flight is None
    pending = np.stack([flat(node.params) for node in federation.nodes]) - shared_of(federation)
    assert np.abs(pending).max() > 1e-3
    np.testing.assert_allclose(computed, landed + pending, atol=3e-6)


def test_after_the_drain_all_nodes_have_what_is_published_and_the_hub_no_more() -> None:
    outer = "nesterov:rate=0.8,momentum=0.5"
    federation = federate(ExchangeSettings(codec="ternary", broadcast_codec="int8", fragments=2, every=4, outer=outer))
    batches = draw_batches(federation.local.program, NODES, STEPS)
    shared = flat(federation.run(batches, np.full(STEPS, 0.05, np.float32)))
    for node in federation.nodes:
        np.testing.assert_allclose(flat(node.params), shared, atol=2e-6)
    for anchor, hub in zip(federation.anchor, federation.hub, strict=True):
        np.testing.assert_allclose(np.asarray(anchor), np.asarray(hub), atol=2e-6)


def test_exact_exchanges_after_every_step_of_sgd_are_synchronous_training() -> None:
    federation = federate(ExchangeSettings(codec="float32", broadcast_codec="float32", every=1, delay=0))
    local, scales = federation.local, cosine_scales(0.05, STEPS, "cosine")
    batches = draw_batches(local.program, NODES, STEPS)
    state = local.init(local.program.init(0))
    state, _ = local.advance(state, local.load(join_batches(batches)), scales, 0, STEPS)
    np.testing.assert_allclose(flat(federation.run(batches, scales)), flat(state.params), atol=5e-6)


def test_averaged_second_moments_are_the_same_on_all_nodes_and_cost_two_bytes_a_value_each_way() -> None:
    plain, averaging = (
        federate(ExchangeSettings(every=4, average_second_moments=every), adam=True) for every in (0, 2)
    )
    batches = draw_batches(plain.local.program, NODES, STEPS)
    for federation in (plain, averaging):
        loaded = [federation.local.load(of_node) for of_node in batches]
        for step in (0, 4):
            federation.advance(loaded, np.full(STEPS, 0.01, np.float32), step, step + 4)
            federation.offer()
            federation.land()
    moments = [[flat(node.opt_state[0].nu) for node in federation.nodes] for federation in (plain, averaging)]
    assert np.abs(moments[0][0] - moments[0][1]).max() > 0
    for of_node in moments[1]:
        np.testing.assert_allclose(of_node, np.mean(moments[0], axis=0), rtol=0.02)
        np.testing.assert_array_equal(of_node, moments[1][0])
    values = flat(plain.shared).size
    assert averaging.bytes_up - plain.bytes_up == averaging.bytes_down - plain.bytes_down == 2 * values


def test_the_bytes_are_those_of_the_frames() -> None:
    codec = "ternary;<100=float32"
    federation = federate(ExchangeSettings(codec=codec, broadcast_codec="bf16", fragments=2, every=4))
    federation.run(draw_batches(federation.local.program, NODES, STEPS), np.full(STEPS, 0.05, np.float32))
    layout, up, down = federation.layout, 0, 0

    def frames_bytes(spec: str, fragment: int) -> int:
        segments = [np.ones(count, np.float32) for count in layout.counts(fragment)]
        return sum(map(len, encode_payload(coding_from_spec(spec).of_fragment(layout, fragment), segments)))

    for exchange in range(STEPS // 4):
        up += frames_bytes(codec, exchange % 2)
        down += frames_bytes("bf16", exchange % 2)
    dense = sum(frames_bytes("float32", fragment) for fragment in range(2))
    assert (federation.bytes_up, federation.bytes_down) == (up + dense, down + dense)


def test_slabs_of_every_size_come_back_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    small = codec_from_spec("float32")._replace(slab=1000)
    monkeypatch.setattr("fragment_moves.coding_from_spec", lambda spec: coding_from_spec(spec).__class__(small))
    exact = federate(ExchangeSettings(codec="bf16", broadcast_codec="bf16"))  # a name of its own: moves are kept by it
    before = [flat(node.params) for node in exact.nodes]
    exact.nodes = [node._replace(params=jax.tree.map(lambda leaf: leaf + 1, node.params)) for node in exact.nodes]
    exact.offer()
    assert np.asarray(exact.in_flight).shape == (NODES, before[0].size)
    exact.land()
    np.testing.assert_allclose(shared_of(exact), before[0] + 1, atol=1e-6)


# ---------------------------------------------------------------------- coded gradients

SPARSE = "feedback+topk:density=0.1+int8"


def replicas(codec: str, adam: bool = False) -> CodedGradients:
    local = local_steps(adam)
    return CodedGradients(local, parse_row(f"kind=gradients|codec={codec}").exchange, local.program.init(0), NODES)


def test_exact_gradients_are_synchronous_training() -> None:
    local, scales = local_steps(adam=True), cosine_scales(4e-3, STEPS, "cosine")
    batches = draw_batches(local.program, NODES, STEPS)
    state = local.init(local.program.init(0))
    state, _ = local.advance(state, local.load(join_batches(batches)), scales, 0, STEPS)
    trained = replicas("feedback+float32", adam=True).run(batches, scales)
    np.testing.assert_allclose(flat(trained), flat(state.params), atol=2e-5)


@pytest.mark.nightly
def test_what_was_not_sent_of_the_gradients_waits_at_the_nodes_and_at_the_hub() -> None:
    rate, program = 0.05, local_steps(adam=False).program
    together, params = replicas(SPARSE), program.init(0)
    begun, gradients = flat(params), np.zeros((NODES, flat(params).size))
    batches = draw_batches(program, NODES, STEPS)
    for step in range(STEPS):
        of_step = [of_node[step : step + 1] for of_node in batches]
        gradients += [flat(jax.grad(program.loss)(params, of_node[0])) for of_node in of_step]
        params = jax.tree.map(np.array, together.run(of_step, np.full(1, rate, np.float32)))
    assert np.abs(flat(params) - begun).max() > 1e-3
    up, down = together.waiting
    assert np.abs(up).max() > 1e-3 and np.abs(down).max() > 1e-3
    np.testing.assert_allclose(flat(params), begun - rate * ((gradients - up).mean(axis=0) - down), atol=3e-6)


def test_the_bytes_are_those_of_the_frames_of_every_step() -> None:
    together = replicas(SPARSE)
    batches = draw_batches(local_steps(adam=False).program, NODES, 5)
    together.run(batches, np.full(5, 0.05, np.float32))
    segments = [np.ones(9_600, np.float32), np.ones(60, np.float32)]
    frames = encode_payload([codec_from_spec(SPARSE)] * len(segments), segments)
    assert together.bytes_up == together.bytes_down == 5 * sum(map(len, frames))


def test_a_codec_that_forgets_what_it_does_not_send_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"say feedback\+int8"):
        replicas("int8")


# ---------------------------------------------------------------------- the local step


def test_a_rate_given_as_data_is_the_program_s_own_rate_wherever_the_loop_is() -> None:
    program, scaled = Linear(adam=True, rate=4e-3), Linear(adam=True, rate=1.0)
    batches = draw_batches(program, 1, 8)[0]
    results = []
    for one, rate, on_device in ((program, 1.0, False), (scaled, 4e-3, True)):
        local, scales = LocalSteps(one, on_device), cosine_scales(rate, 8, "cosine")
        state, loss = local.advance(local.init(program.init(0)), local.load(batches), scales, 0, 8)
        assert np.isfinite(float(loss))
        results.append(flat(state.params))
    np.testing.assert_allclose(results[1], results[0], atol=2e-5)


def test_the_rate_falls_to_a_tenth_or_stays() -> None:
    scales = cosine_scales(2.0, 1000, "cosine")
    assert scales[0] == 2.0
    assert scales[500] == pytest.approx(1.1)
    assert scales[-1] == pytest.approx(0.2, rel=1e-3)
    assert set(cosine_scales(2.0, 3, "constant").tolist()) == {2.0}


# ---------------------------------------------------------------------- the product itself


def train_with_the_product(run: RunSettings, rate: float) -> list[float]:
    """Train in strict mode with a real broker and real nodes on 127.0.0.1; return the loss of each node."""
    losses: list[float] = []
    failures: list[BaseException] = []

    def train(address: str, name: str) -> None:
        try:
            with connect(address, name=name) as node:
                program = Linear(adam=True, rate=rate)
                losses.append(TrainingLoop(program, node).run(node.batches(program)).scores["loss"])
        except BaseException as error:
            failures.append(error)

    with broker(run) as hub:
        threads = [
            threading.Thread(target=train, args=(hub.address, f"node-{number}"), daemon=True) for number in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures
    assert len(losses) == 2
    return losses


def test_the_product_in_strict_mode_ends_with_the_same_loss() -> None:
    exchange = ExchangeSettings(every=4, delay=2, outer="nesterov:rate=0.8,momentum=0.5")
    run = RunSettings(
        initial="founder",
        every=4,
        delay=2,
        outer=exchange.outer,
        mode="strict",
        release="all",
        units=2 * STEPS // 4,
        start_nodes=2,
        evaluate_seconds=0.0,
        lost_seconds=60.0,  # who is lost meanwhile trains on other data
    )
    losses = train_with_the_product(run, 4e-3)
    federation = federate(exchange, adam=True, nodes=2)
    program = federation.local.program
    params = federation.run(draw_batches(program, 2, STEPS), cosine_scales(4e-3, STEPS, "constant"))
    begun, ended = (program.evaluate(some)["loss"] for some in (program.init(0), params))
    assert ended < 0.95 * begun
    assert losses == pytest.approx([ended, ended], rel=1e-3)

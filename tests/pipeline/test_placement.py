"""What a PC measures of a loss, and the costs that a plan is made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zmqtrain as zt
from tests.pipeline.losses import NAMES, Case, case
from zmqtrain.pipeline.boundary import Boundary
from zmqtrain.pipeline.costs import PC
from zmqtrain.pipeline.placement import SEGMENTS_PER_PC, costs_of, cut_into_segments, held_bytes, measure
from zmqtrain.pipeline.split import MicroBatches, Split, split
from zmqtrain.pipeline.stage import Stage
from zmqtrain.programs.text import TextProgram

ADAM = optax.adamw(1e-3)


def segments_of(one: Case, pcs: int = 2) -> Split:
    shapes = jax.eval_shape(lambda tree: tree, one.params)
    return cut_into_segments(one.loss, shapes, MicroBatches(one.batch, 1, frozenset()), pcs)


@pytest.mark.parametrize("name", NAMES)
def test_every_segment_of_every_loss_can_be_measured(name: str) -> None:
    segments = segments_of(case(name))
    figures = measure(segments)
    assert len(figures) == len(segments) >= 2
    assert all(one.forward_seconds > 0 and one.backward_seconds > 0 and one.activation_bytes >= 0 for one in figures)


def test_segments_that_are_alike_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = TextProgram(width=16, layers=6, heads=2, context=16, batch=4, tied=False, clip=0.0)
    batches = MicroBatches(next(iter(program.batches(0))), 2, frozenset())
    segments = cut_into_segments(program.loss, jax.eval_shape(program.init, 0), batches, 2)
    compiled = []
    compile_stage = Stage.compiled_backward
    monkeypatch.setattr(Stage, "compiled_backward", lambda stage: compiled.append(stage) or compile_stage(stage))
    figures = measure(segments)
    assert len(compiled) < len(segments) == len(figures)


def test_segments_lie_where_few_bytes_travel_and_each_has_some_work() -> None:
    program = TextProgram(width=16, layers=6, heads=2, context=16, batch=4, tied=False, clip=0.0)
    batches = MicroBatches(next(iter(program.batches(0))), 2, frozenset())
    segments = cut_into_segments(program.loss, jax.eval_shape(program.init, 0), batches, 3)
    assert 6 <= len(segments) <= 3 * SEGMENTS_PER_PC
    assert len({cut.carry_bytes for cut in segments.cuts}) == 1
    assert all(segment.parameter_bytes > 0 for segment in segments)


def test_marks_are_the_segments() -> None:
    def loss(params: list[jax.Array], batch: jax.Array) -> jax.Array:
        for weights in params:
            batch = zt.stage_end(batch @ weights)
        return jnp.mean(batch @ params[0])

    weights = [jnp.ones((4, 4)) for _ in range(5)]
    assert len(segments_of(Case(loss, weights, jnp.ones((2, 4))))) == 6


def test_what_segments_cost_together_is_what_the_stage_of_them_costs() -> None:
    one = case("tied")
    segments = segments_of(one)
    figures = measure(segments)
    costs = costs_of(segments, {"a": figures, "b": figures}, ADAM, Boundary("bf16"))
    whole = split(one.loss, jax.eval_shape(lambda tree: tree, one.params), one.batch, 0)[0]
    tied = {leaf.name: leaf for cost in costs for leaf in cost.tied}
    assert tied
    own = sum(cost.parameter_bytes for cost in costs) + sum(leaf.parameter_bytes for leaf in tied.values())
    assert own == whole.parameter_bytes
    held = sum(cost.held_bytes for cost in costs) + sum(leaf.held_bytes for leaf in tied.values())
    assert held == pytest.approx(held_bytes(whole, ADAM), abs=8 * len(segments))  # each has a count
    assert [cost.carry_bytes for cost in costs[:-1]] == [cut.carry_bytes for cut in segments.cuts]
    assert costs[-1].carry_bytes == 0 and costs[0].seconds_on(PC(name="b", memory_bytes=0))[0] > 0


@pytest.mark.parametrize(("codec", "bytes_a_value"), [("float32", 4), ("bf16", 2), ("int8:block=64", 1 + 4 / 64)])
def test_bytes_on_the_wire_are_those_of_the_codec(codec: str, bytes_a_value: float) -> None:
    one = case("mlp")
    stage = split(one.loss, one.params, one.batch, 1)[0]
    boundary = Boundary(codec)
    values = [np.ones(value.shape, value.dtype) for value in stage.carry_out]
    expected = boundary.nbytes(boundary.pack(values, stage.carry_out, "forward", "a carry"))
    assert boundary.wire_bytes(stage.carry_out) == expected
    assert expected >= bytes_a_value * sum(value.size for value in values)


def test_adam_holds_four_times_the_parameters() -> None:
    one = case("mlp")
    stage = split(one.loss, one.params, one.batch, 1)[0]
    assert held_bytes(stage, None) == 2 * stage.parameter_bytes
    assert held_bytes(stage, ADAM) == pytest.approx(4 * stage.parameter_bytes, abs=16)

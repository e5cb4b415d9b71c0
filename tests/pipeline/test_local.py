"""All stages in one process: losses, gradients and trained parameters are those of one PC, under every schedule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zmqtrain as zt
from tests.grids import nightly
from tests.pipeline.losses import WIDTH, cross_entropy, dense, normal
from tests.pipeline.test_split import assert_same
from zmqtrain.core.errors import ConfigError
from zmqtrain.pipeline.coupling import check_separable
from zmqtrain.pipeline.local import LocalPipeline, value_and_grad
from zmqtrain.pipeline.schedule import Schedule
from zmqtrain.pipeline.split import Split

MICRO_BATCHES = 4
EAGER, TEXTBOOK = Schedule("1f1b", "eager"), Schedule("1f1b", "textbook")


def loss_fn(params: Any, batch: Any) -> Any:
    """Three layers between a tied embedding, with dropout."""
    h = params["embedding"][batch["y"]] + batch["x"]
    for number, layer in enumerate(params["layers"]):
        kept = jax.random.bernoulli(jax.random.fold_in(batch["key"], number), 0.8, h.shape)
        h = zt.stage_end(h + jnp.where(kept, jnp.tanh(h @ layer["w"] + layer["b"]), 0))
    return cross_entropy(h @ params["embedding"].T, batch["y"])


PARAMS = {"embedding": normal(3, 3, WIDTH), "layers": dense()}


def batch(step: int) -> dict[str, Any]:
    return {"x": normal(step, 8, WIDTH), "y": (jnp.arange(8) + step) % 3, "key": jax.random.key(step)}


@pytest.fixture(scope="module")
def stages() -> Split:
    return zt.split(loss_fn, PARAMS, batch(0), 2, micro_batches=MICRO_BATCHES)


of_micro_batch = jax.jit(jax.value_and_grad(loss_fn))


def expected(params: Any, of_step: Any, late: int = 0, late_params: Any = None) -> tuple[Any, Any]:
    """Loss and gradients of one PC: the mean over micro-batches, each with its own key. late: so many of them are
    computed with other parameters."""
    found = []
    for number in range(MICRO_BATCHES):
        part = {name: of_step[name][2 * number : 2 * number + 2] for name in ("x", "y")}
        part["key"] = jax.random.fold_in(of_step["key"], number)
        found.append(of_micro_batch(late_params if number < late else params, part))
    return jax.tree.map(lambda *each: sum(each) / MICRO_BATCHES, *found)


@pytest.mark.parametrize("schedule", [Schedule("gpipe"), EAGER, TEXTBOOK, Schedule(), Schedule("2bw")], ids=str)
def test_loss_and_gradients_are_those_of_one_pc_and_have_the_same_bits_under_every_schedule(
    stages: Split, schedule: Schedule
) -> None:
    found = value_and_grad(stages, PARAMS, batch(0), schedule)
    assert_same(found, expected(PARAMS, batch(0)))
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(value_and_grad(stages, PARAMS, batch(0), EAGER)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_gradients_are_clipped_by_the_norm_of_all_stages_tied_rows_counted_once(stages: Split) -> None:
    clip, rate = 0.05, 0.1
    pipeline = LocalPipeline(stages, PARAMS, optax.sgd(rate), clip_norm=clip)
    whole = optax.chain(optax.clip_by_global_norm(clip), optax.sgd(rate))
    params, state = PARAMS, whole.init(PARAMS)
    for step in range(3):
        _, gradients = expected(params, batch(step))
        assert optax.tree.norm(gradients) > 2 * clip
        updates, state = whole.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        pipeline.step(batch(step))
    for one, other in zip(jax.tree.leaves(pipeline.params()), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_norm_that_no_gradient_has_clips_nothing(stages: Split) -> None:
    clipped, free = (LocalPipeline(stages, PARAMS, optax.sgd(0.1), clip_norm=clip) for clip in (1e6, 0.0))
    assert float(clipped.step(batch(0))) == float(free.step(batch(0)))
    for one, other in zip(jax.tree.leaves(clipped.params()), jax.tree.leaves(free.params()), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("clip", [-1.0, float("nan"), float("inf"), "1"])
def test_a_clip_norm_is_a_norm(stages: Split, clip: Any) -> None:
    with pytest.raises(ConfigError, match="clip_norm"):
        LocalPipeline(stages, PARAMS, optax.sgd(0.1), clip_norm=clip)


@pytest.mark.parametrize("name", ["1f1b", *nightly("gpipe")])
def test_training_with_adamw_is_that_of_one_pc(stages: Split, name: Any) -> None:
    optimizer = optax.adamw(0.01)
    pipeline = LocalPipeline(stages, PARAMS, optimizer, Schedule(name))
    params, state = PARAMS, optimizer.init(PARAMS)
    for step in range(3):
        loss, gradients = expected(params, batch(step))
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        assert_same(pipeline.step(batch(step)), loss)
    assert_same(pipeline.params(), params)


@pytest.mark.parametrize("predicts", [True, False])
@pytest.mark.parametrize(("depth", "late"), [("textbook", 3), ("eager", 4)])
def test_without_flush_the_first_micro_batches_lack_the_last_update_at_every_stage(
    stages: Split, predicts: bool, depth: Any, late: int
) -> None:
    optimizer, steps = optax.sgd(0.1, momentum=0.9), 5
    pipeline = LocalPipeline(stages, PARAMS, optimizer, Schedule("2bw", depth, predicts))
    params, state, losses = [PARAMS, PARAMS], optimizer.init(PARAMS), []
    for step in range(steps):
        used = params[step]
        if predicts and step:  # what the last update has changed is added once more
            used = jax.tree.map(lambda new, old: new + (new - old), used, params[step - 1])
        loss, gradients = expected(params[-1], batch(step), late, used)
        updates, state = optimizer.update(gradients, state)
        params.append(optax.apply_updates(params[-1], updates))
        losses.append(loss)
    assert_same(list(pipeline.steps(map(batch, range(steps)))), losses)
    assert_same(pipeline.params(), params[-1])


def test_without_flush_a_step_begins_while_the_one_before_is_in_flight(stages: Split) -> None:
    pipeline = LocalPipeline(stages, PARAMS, optax.sgd(0.1), Schedule("2bw"))
    list(pipeline.steps(map(batch, range(3))))
    tasks = [task for stage, task in pipeline.tasks if stage == 0]
    begun = tasks.index(next(task for task in tasks if (task.kind, task.step) == ("forward", 1)))
    assert ("backward", 0) in [(task.kind, task.step) for task in tasks[begun:]]


@pytest.mark.parametrize(
    ("schedule", "most"), [(EAGER, [4, 3, 1]), (TEXTBOOK, [3, 2, 1]), (Schedule("gpipe"), [4] * 3)]
)
def test_a_stage_has_as_many_micro_batches_in_flight_as_its_schedule_allows(
    stages: Split, schedule: Schedule, most: list[int]
) -> None:
    pipeline = LocalPipeline(stages, PARAMS, schedule=schedule)
    pipeline.step(batch(0))
    for stage, limit in enumerate(most):
        kinds = [task.kind for number, task in pipeline.tasks if number == stage]
        in_flight = np.cumsum([{"forward": 1, "backward": -1, "update": 0}[kind] for kind in kinds])
        assert in_flight.max() <= limit and in_flight[-1] == 0
        assert kinds.count("forward") == kinds.count("backward") == MICRO_BATCHES


# ---------------------------------------------------------------------- batches


def test_a_batch_that_the_micro_batches_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError):
        zt.split(loss_fn, PARAMS, batch(0), 2, micro_batches=3)


def test_leaves_of_different_lengths_are_refused_unless_they_are_named() -> None:
    def masked(params: Any, one: Any) -> Any:
        return jnp.mean((one["x"] * one["mask"]) @ params["layers"][0]["w"])

    rows = {"x": normal(0, 8, WIDTH), "mask": jnp.ones(WIDTH)}
    with pytest.raises(ConfigError):
        zt.split(masked, PARAMS, rows, 1, micro_batches=2)
    with pytest.raises(ConfigError):
        zt.split(masked, PARAMS, rows, 1, micro_batches=2, uncut=["nothing"])
    stages = zt.split(masked, PARAMS, rows, 1, micro_batches=2, uncut=["mask"])
    assert [part["mask"].shape for part in stages.parts(rows)] == [(WIDTH,)] * 2
    assert_same(value_and_grad(stages, PARAMS, rows), jax.value_and_grad(masked)(PARAMS, rows))


def test_fewer_micro_batches_than_stages_are_refused() -> None:
    stages = zt.split(loss_fn, PARAMS, batch(0), 2, micro_batches=2)
    with pytest.raises(ConfigError):
        value_and_grad(stages, PARAMS, batch(0))


# ---------------------------------------------------------------------- optimizers


SEPARABLE = {
    "adamw": optax.adamw(0.1),
    "muon": optax.contrib.muon(0.1),
    "lamb": optax.lamb(0.1),
    "clipped": optax.chain(optax.clip(1.0), optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "accumulated": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}
COUPLED = {
    "global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
}


@pytest.mark.parametrize("name", SEPARABLE)
def test_optimizers_that_look_at_one_leaf_at_a_time_are_taken(name: str) -> None:
    check_separable(SEPARABLE[name], PARAMS)


@pytest.mark.parametrize("name", COUPLED)
def test_optimizers_that_look_at_several_leaves_are_refused(name: str, stages: Split) -> None:
    with pytest.raises(ConfigError):
        LocalPipeline(stages, PARAMS, COUPLED[name])

"""A loss that is cut anywhere has the gradients of the whole one, and each stage holds only what it needs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import zmqtrain as zt
from tests.grids import examples, nightly
from tests.pipeline.losses import LAYERS, NAMES, WIDTH, Case, case, normal
from zmqtrain.core.errors import ConfigError, ModelMismatch
from zmqtrain.pipeline.split import Split

IN_EVERY_RUN = ("scan", "keys_in_scan", "masks")
"""Losses that are cut everywhere in every run: rows of leaves, keys and integers that travel."""


def split_at(one: Case, positions: list[int]) -> Split:
    return zt.split(one.loss, one.params, one.batch, positions)


def run(stages: Split, params: Any, batch: Any) -> tuple[Any, Any]:
    """Loss and gradients: forward through all stages, then backward, without a schedule."""
    own, carries = stages.own(params), [()]
    for stage, held in zip(stages[:-1], own[:-1], strict=True):
        carries.append(stage.forward(held, stage.data_of(batch), carries[-1]))
    gradients: dict[int, Any] = {}
    loss, cotangents = None, ()
    for stage in reversed(stages):
        result = stage.backward(
            own[stage.number], stage.data_of(batch), carries[stage.number], stage.zero_gradients(), cotangents
        )
        gradients[stage.number], cotangents = result.gradients, result.cotangents
        loss = result.loss if result.loss is not None else loss
    added = stages.add_tied(gradients)
    return loss, stages.gather([added[number] for number in range(len(stages))])


def assert_same(found: Any, expected: Any) -> None:
    """The trees are equal to 1e-5, relative to the largest value of each leaf."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * max(1e-3, float(jnp.abs(other).max())))


@pytest.mark.nightly
@settings(max_examples=examples(60))
@given(data=st.data())
def test_gradients_are_those_of_the_whole_loss_wherever_it_is_cut(data: st.DataObject) -> None:
    one = case(data.draw(st.sampled_from(NAMES)))
    places = st.lists(st.integers(1, one.positions.units - 1), unique=True, min_size=1, max_size=4)
    stages = split_at(one, sorted(data.draw(places)))
    assert_same(jax.jit(partial(run, stages))(one.params, one.batch), one.expected)


@pytest.mark.parametrize("name", [*IN_EVERY_RUN, *nightly(*sorted(set(NAMES) - set(IN_EVERY_RUN)))])
def test_gradients_are_those_of_the_whole_loss_when_it_is_cut_everywhere(name: str) -> None:
    one = case(name)
    stages = split_at(one, list(range(1, one.positions.units)))
    assert_same(jax.jit(partial(run, stages))(one.params, one.batch), one.expected)


@pytest.mark.parametrize("name", ["marked", *nightly("masks")])
def test_stages_that_are_compiled_one_by_one_give_the_same(name: str) -> None:
    one = case(name)
    assert_same(run(zt.split(one.loss, one.params, one.batch, 1), one.params, one.batch), one.expected)


@pytest.mark.parametrize("name", [*(name for name in NAMES if name != "flax_model"), *nightly("flax_model")])
def test_what_a_cut_is_said_to_cost_is_what_travels_and_what_is_tied(name: str) -> None:
    one = case(name)
    cuts = one.positions.cuts()
    for cut in cuts[:: max(1, len(cuts) // 5)]:
        before, after = stages = split_at(one, [cut.position])
        assert sum(value.nbytes for value in after.carry_in) == cut.carry_bytes
        assert before.carry_out == after.carry_in
        assert sum(tied.nbytes for tied in stages.tied) == cut.tied_bytes


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_is_a_function_of_its_own_leaves_only(name: str) -> None:
    one = case(name)
    stages = zt.split(one.loss, one.params, one.batch, None if one.positions.marks else 2)
    traced = stages.traced
    used = {id(atom) for equation in traced.equations for atom in equation.invars}
    unused = {number for number, leaf in enumerate(traced.parameters) if id(leaf) not in used}
    for stage in stages:
        own = jax.tree.leaves(stage.own(one.params))
        names = stage.jaxpr.jaxpr.debug_info.arg_names
        assert [leaf.shape for leaf in own] == [leaf.shape for leaf in stage.held]
        assert [aval.shape for aval in stage.jaxpr.in_avals[: len(own)]] == [leaf.shape for leaf in stage.held]
        assert len(stage.jaxpr.in_avals) == len(own) + len(stage.data) + len(stage.carry_in)
        assert names[: len(own)] == tuple(leaf.name for leaf in stage.held)
        read = {id(atom) for equation in stage.jaxpr.eqns for atom in equation.invars}
        unread = {
            leaf.number
            for leaf, variable in zip(stage.held, stage.jaxpr.jaxpr.invars, strict=False)
            if id(variable) not in read
        }
        assert unread == (unused if stage.number == 0 else set())
    assert_same(stages.gather(stages.own(one.params)), one.params)


def test_each_stage_of_a_scan_holds_its_own_layers() -> None:
    one = case("scan")
    stages = zt.split(one.loss, one.params, one.batch, list(range(1, 1 + LAYERS)))
    held = [[leaf.name for leaf in stage.held] for stage in stages]
    rows = [name for names in held for name in names if name.startswith("layers/w")]
    assert rows == [f"layers/w[{layer}:{layer + 1}]" for layer in range(LAYERS)]
    assert sum(stage.parameter_bytes for stage in stages) == sum(leaf.nbytes for leaf in jax.tree.leaves(one.params))


def test_layers_that_the_loss_stacks_are_held_one_by_one() -> None:
    one = case("reversed_scan")
    held = [{leaf.name for leaf in stage.held} for stage in split_at(one, list(range(1, LAYERS)))]
    assert [sorted(name for name in names if name.endswith("/w")) for names in held] == [
        [f"layers/{layer}/w"] for layer in reversed(range(LAYERS))
    ]


def test_a_tied_leaf_is_held_by_both_stages_and_its_gradients_are_added() -> None:
    one = case("tied")
    stages = zt.split(one.loss, one.params, one.batch, 1)
    (tied,) = stages.tied
    assert (tied.path, tied.stages, tied.nbytes) == ("embedding", (0, 1), one.params["embedding"].nbytes)
    assert_same(run(stages, one.params, one.batch)[1]["embedding"], one.expected[1]["embedding"])


def test_labels_and_keys_never_travel() -> None:
    for name in ("dropout", "text", "mlp"):
        one = case(name)
        stages = zt.split(one.loss, one.params, one.batch, 2)
        assert all(value.has_cotangent for stage in stages for value in stage.carry_in)
        assert all(len(stage.carry_in) == 1 for stage in stages[1:])


def test_a_transformer_is_cut_at_its_residual_stream() -> None:
    one = case("text")
    (cut,) = zt.split(one.loss, one.params, one.batch, 1).cuts
    windows, context = one.batch["text"].shape
    assert cut.carry_bytes == windows * (context - 1) * one.params["embedding"].shape[1] * 4
    assert cut.after.startswith("text.py:")


def test_stages_are_even_where_the_layers_are() -> None:
    def loss(params: Any, batch: Any) -> Any:
        h = batch
        for weights in params:
            h = jnp.tanh(h @ weights)
        return jnp.mean(h)

    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 12
    stages = zt.split(loss, params, jax.ShapeDtypeStruct((8, 64), jnp.float32), 3)
    assert [len(stage.held) for stage in stages] == [3, 3, 3, 3]


def test_every_mark_is_a_cut_and_marks_are_the_only_choice() -> None:
    one = case("marked")
    assert len(zt.split(one.loss, one.params, one.batch)) == LAYERS + 1
    chosen = zt.split(one.loss, one.params, one.batch, 1)
    assert all(cut.marked for cut in chosen.cuts) and len(chosen) == 2
    with pytest.raises(ConfigError):
        zt.split(one.loss, one.params, one.batch, LAYERS + 1)


def test_a_mark_in_the_body_of_a_scan_marks_the_end_of_each_iteration() -> None:
    def loss(params: Any, batch: Any) -> Any:
        h, _ = lax.scan(lambda h, w: (zt.stage_end(jnp.tanh(h @ w)), None), batch, params["layers"])
        return jnp.mean(h @ params["head"])

    params = {"layers": normal(0, LAYERS, WIDTH, WIDTH), "head": normal(1, WIDTH)}
    stages = zt.split(loss, params, normal(2, 4, WIDTH))
    assert [[leaf.name for leaf in stage.held] for stage in stages] == [
        *([f"layers[{layer}:{layer + 1}]"] for layer in range(LAYERS)),
        ["head"],
    ]


def test_a_mark_changes_nothing_on_one_pc() -> None:
    def layer(x: Any) -> Any:
        return jnp.sum(zt.stage_end({"a": jnp.sin(x), "b": 2 * x})["a"])

    x = normal(0, 3, 4)
    for function in (layer, jax.jit(layer), jax.checkpoint(layer)):
        assert_same(jax.grad(function)(x), jnp.cos(x))
        assert_same(jax.vmap(jax.grad(function))(x), jnp.cos(x))
        assert_same(jax.jvp(function, (x,), (x,))[1], jnp.sum(x * jnp.cos(x)))
    assert_same(jax.linear_transpose(lambda v: zt.stage_end(3 * v), x)(x)[0], 3 * x)
    assert jax.tree.structure(zt.stage_end([1.0, {"a": 2}])) == jax.tree.structure([1.0, {"a": 2}])


# ---------------------------------------------------------------------- parameters


def test_a_stage_makes_its_own_parameters_and_no_others() -> None:
    def init(key: Any) -> Any:
        keys = jax.random.split(key, 6)
        return {f"w{number}": jax.random.uniform(one, (64, 64)) for number, one in enumerate(keys)}

    def loss(params: Any, batch: Any) -> Any:
        h = batch
        for name in sorted(params):
            h = h @ params[name]
        return jnp.mean(h)

    def bytes_of(function: Any) -> int:
        memory = jax.jit(function).lower(key).compile().memory_analysis()
        return int(memory.output_size_in_bytes + memory.temp_size_in_bytes)

    key = jax.random.key(0)
    stages = zt.split(loss, jax.eval_shape(init, key), jax.ShapeDtypeStruct((2, 64), jnp.float32), 2)
    assert_same(stages[1].init(init, key), stages[1].own(jax.jit(init)(key)))
    assert 2 * bytes_of(lambda key: stages[1].own(init(key))) < bytes_of(init)


def test_a_parameter_that_the_loss_does_not_use_is_kept() -> None:
    one = case("mlp")
    params = {**one.params, "unused": {"w": jnp.ones(3)}}
    stages = zt.split(one.loss, params, one.batch, 2)
    assert "unused/w" in [leaf.name for leaf in stages[0].held]
    found = jax.jit(partial(run, stages))(params, one.batch)
    assert_same(found, jax.jit(jax.value_and_grad(one.loss))(params, one.batch))


def test_own_trees_have_the_names_of_the_whole_one() -> None:
    one = case("flax_model")
    stages = zt.split(one.loss, one.params, one.batch, 2)
    for stage, own in zip(stages, stages.own(one.params), strict=True):
        paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(own)]
        assert paths == [leaf.whole.path for leaf in stage.held]


def test_parameters_and_batches_of_another_form_are_refused() -> None:
    one = case("mlp")
    stages = zt.split(one.loss, one.params, one.batch, 1)
    with pytest.raises(ModelMismatch) as refused:
        stages[0].own({**one.params, "head": jnp.zeros((WIDTH, 9))})
    assert refused.value.leaf == "head"
    with pytest.raises(ModelMismatch):
        stages.own({"layers": one.params["layers"]})
    with pytest.raises(ModelMismatch) as refused:
        stages.parts({**one.batch, "x": jnp.zeros((9, WIDTH))})
    assert refused.value.leaf == "x"


# ---------------------------------------------------------------------- what cannot be cut


def perceptron(params: Any, batch: Any) -> Any:
    return jnp.mean(jnp.tanh(batch["x"] @ params["w"]))


PARAMS, BATCH = {"w": jnp.ones((WIDTH, WIDTH))}, {"x": jnp.ones((6, WIDTH))}


@pytest.mark.parametrize("cuts", [-1, 50, [0], [3, 2], [2, 2], [99], None])
def test_cuts_that_cannot_be_made_are_refused(cuts: Any) -> None:
    with pytest.raises(ConfigError):
        zt.split(perceptron, PARAMS, BATCH, cuts)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, b: lax.cond(b["x"][0, 0] > 0, zt.stage_end, lambda x: x, jnp.sum(b["x"] @ p["w"])),
        lambda p, b: jnp.mean(zt.stage_end(b["x"]) @ p["w"]),
        lambda p, b: zt.stage_end(jnp.mean(b["x"] @ p["w"])),
        lambda p, b: jnp.mean(b["x"]),
        lambda p, b: jnp.mean(p["w"]),
        lambda p, b: b["x"] @ p["w"],
        lambda p, b: (jnp.mean(b["x"] @ p["w"]), 1.0),
        lambda p, b: jax.debug.print("{}", b["x"]) or jnp.mean(b["x"] @ p["w"]),
    ],
    ids=["mark in cond", "empty first", "empty last", "no params", "no data", "no scalar", "two results", "effects"],
)
def test_losses_that_cannot_be_cut_are_refused(loss: Any) -> None:
    with pytest.raises(ConfigError):
        zt.split(loss, PARAMS, BATCH)


def test_a_parameter_without_a_gradient_is_refused() -> None:
    with pytest.raises(ConfigError):
        zt.split(lambda p, b: jnp.mean(b["x"] @ p["w"]), {"w": jnp.ones((WIDTH, 2), int)}, BATCH, 1)

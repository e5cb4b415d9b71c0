"""A model file is loaded into any tree of the form that was trained, by the names of its leaves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import zmqtrain as zt
from zmqtrain.checkpoint.model_files import ModelFacts, read_model, write_model
from zmqtrain.core.errors import CheckpointError, ModelMismatch
from zmqtrain.train.step import describe_model


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "act", "layers"], meta_fields=["size"])
@dataclass
class Module:
    """A tree with the path kinds of an equinox module: attributes, places, and functions among its leaves."""

    weight: Any
    act: Any
    layers: Any
    size: int = 3


def module(value):
    return Module(jnp.full((2, 3), value), jnp.tanh, [{"b": jnp.full(3, value + 1)}, (jnp.int32(7), None)])


class Dense(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.first, self.norm = nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def linen_variables(seed):
    return linen.Sequential([linen.Dense(4), linen.BatchNorm(True), linen.Dense(1)]).init(
        jax.random.key(seed), jnp.ones((1, 2))
    )


TREES = {
    "dict": lambda n: {"a": {"w": jnp.full((2, 3), float(n))}, "b": [jnp.float32(n), np.full(2, n, np.float32)]},
    "one array": lambda n: jnp.full((2, 2), float(n)),
    "linen": linen_variables,
    "nnx state": lambda n: nnx.state(Dense(n), nnx.Param),
    "nnx module": Dense,
    "bfloat16": lambda n: {"w": jnp.full(5, n + 0.5, jnp.bfloat16)},
}


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_comes_back_by_the_names_of_its_leaves(kind, tmp_path):
    path, tree = tmp_path / "model.safetensors", TREES[kind](3)
    zt.save_model(path, tree)
    assert set(load_file(path)) == {leaf.path for leaf in describe_model(tree)}
    other = TREES[kind](5)
    same(zt.load_model(path, like=other), tree)
    if kind != "nnx module":
        same(zt.load_model(path, like=jax.eval_shape(lambda: jax.tree.map(jnp.asarray, other))), tree)


def test_an_nnx_module_is_updated_with_what_was_trained_of_it(tmp_path):
    zt.save_model(tmp_path / "m.safetensors", nnx.state(trained := Dense(3), nnx.Param))
    model = Dense(5)
    nnx.update(model, zt.load_model(tmp_path / "m.safetensors", like=nnx.state(model, nnx.Param)))
    np.testing.assert_array_equal(model.first.kernel[...], trained.first.kernel[...])
    with pytest.raises(ModelMismatch, match="the tree has the leaves 'norm/mean/value', 'norm/var/value', which"):
        zt.load_model(tmp_path / "m.safetensors", like=model)


def test_functions_counters_and_what_is_none_stay_as_they_are_in_a_module(tmp_path):
    path = tmp_path / "model.safetensors"
    arrays = {"weight": np.full((2, 3), 9, np.float32), "layers/0/b": np.full(3, 8, np.float32)}
    write_model(path, arrays, ModelFacts())  # what was trained: the float arrays of the module
    model = zt.load_model(path, like=module(0.0))
    assert model.act is jnp.tanh and model.layers[1] == (7, None) and model.size == 3
    np.testing.assert_array_equal(model.weight, arrays["weight"])
    np.testing.assert_array_equal(model.layers[0]["b"], arrays["layers/0/b"])


def test_values_come_back_as_the_kind_of_array_that_was_given(tmp_path):
    path = tmp_path / "model.safetensors"
    zt.save_model(path, {"n": 1.5, "w": jnp.ones(3)})
    loaded = zt.load_model(path, like={"n": 0.0, "w": np.zeros(3, np.float32)})
    assert loaded["n"] == 1.5 and type(loaded["n"]) is float and type(loaded["w"]) is np.ndarray
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tied = zt.load_model(path, like={"n": 0.0, "w": jax.device_put(jnp.zeros(3), sharding)})["w"]
    assert tied.committed and tied.sharding == sharding
    assert zt.load_model(path).keys() == {"n", "w"}, "without a tree: arrays by name"


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"a": {"w": jnp.ones(2)}, "b": jnp.ones(2)}, r"the tree has the leaf 'b', which .* does not hold\. Give the"),
        ({}, "holds the leaf 'a/w', which the tree has not"),
        ({"a": {"w": jnp.ones((1, 2))}}, r"the leaf 'a/w' is \[2\] in .* and \[1, 2\] in the tree"),
        ({"a": {"w": jnp.ones(2, jnp.bfloat16)}}, "the leaf 'a/w' is float32 in .* and bfloat16 in the tree"),
        ({"a": {"w": jnp.ones(2, int)}}, "is float32 in .* and int32 in the tree"),
        ({"a": {"w": jnp.tanh}}, "the leaf 'a/w' of the tree is no array"),
        ({"w": jnp.ones(2)}, r"had them under 'a': say like=\{'a': \.\.\.\}"),
        ({"x": {"a": {"w": jnp.ones(2)}}}, r"had them without 'x': say like=params\['x'\]"),
        ({"a": {"w": jnp.ones(2)}, "a/w": jnp.ones(2)}, "two leaves of the tree have the name 'a/w'"),
        ({f"l{n}": jnp.ones(2) for n in range(9)}, "leaves 'l0', 'l1', 'l2' and 6 more"),
    ],
)
def test_what_does_not_fit_is_said_with_the_leaf(like, words, tmp_path):
    zt.save_model(tmp_path / "m", {"a": {"w": jnp.ones(2)}})
    with pytest.raises(ModelMismatch, match=words) as caught:
        zt.load_model(tmp_path / "m", like=like)
    assert caught.value.leaf


def test_what_is_no_model_file_is_refused_in_one_sentence(tmp_path):
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "other")
    np.testing.assert_array_equal(zt.load_model(tmp_path / "other", {"w": jnp.zeros(2)})["w"], np.ones(2))
    (tmp_path / "torn").write_bytes((tmp_path / "other").read_bytes()[:20])
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "checkpoint", {"state": "{}"})
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "part", {"format": "zmqtrain part 1", "part": "{}"})
    said = {"format": "zmqtrain model 1", "leaves": '[["w", [3], "float32"]]'}
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "lies", said)
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "nonsense", said | {"leaves": "["})
    for name, words in {
        "torn": "cannot be read as a safetensors file",
        "missing": "there is no file",
        "checkpoint": "is a checkpoint, not a model: `zmqtrain export",
        "part": "make the whole of all parts with `zmqtrain merge`",
        "lies": r"say that the leaf 'w' is \(3,\), and it is \(2,\)",
        "nonsense": "not those of a model file",
        ".": "is a folder",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            zt.load_model(tmp_path / name)


def test_what_is_not_trained_is_not_saved(tmp_path):
    with pytest.raises(ModelMismatch, match="the leaf n int32"):
        zt.save_model(tmp_path / "m", {"n": jnp.int32(1)})
    assert not list(tmp_path.iterdir())


def test_the_facts_of_a_file_come_back(tmp_path):
    leaves = describe_model({"w": jnp.ones(2, jnp.bfloat16)})
    facts = ModelFacts(
        run="run-1", version=5, newest=7, samples=90, program="text", program_arguments="width=8",
        evaluation={"loss": 0.25, "accuracy": 0.9}, evaluation_version=4, leaves=leaves,
    )  # fmt: skip
    write_model(tmp_path / "m", {"w": np.ones(2, np.float32)}, facts)
    assert read_model(tmp_path / "m")[1] == facts
    assert facts.description == "version 5 of run-1, held-out loss 0.25, accuracy 0.9 (at version 4)"
    assert ModelFacts().description == "parameters of no run"

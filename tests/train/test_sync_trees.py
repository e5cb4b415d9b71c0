"""Which trees a node exchanges, in which numbers, and that they stay whose they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.scripted_exchange import ScriptedExchange, run, tree, value
from zmqtrain.core.errors import ConfigError, ModelMismatch
from zmqtrain.core.types import Part
from zmqtrain.train.sync import DelayedSync


class Keeping:
    """Keeps nothing but the names of what it was given, and only when it is asked."""

    def __init__(self, kept):
        self.kept = kept

    def is_due(self):
        return False

    def save(self, facts, arrays, wait):
        self.kept.append(sorted(arrays))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_leaves_of_half_precision_are_exchanged_as_float32(dtype, donate):
    exchange = ScriptedExchange(every=2, delay=1)
    sync = DelayedSync(exchange, tree(0.0, dtype), donate=donate)
    params = run(sync, tree(0.0, dtype), 2)
    assert exchange.offers[0].u.dtype == np.float32
    exchange.land(0, others=10.0)
    params = run(sync, params, 1)
    assert value(params) == 13.0 and params["b"].dtype == dtype


def test_a_leaf_of_whole_numbers_is_refused_by_name():
    with pytest.raises(ModelMismatch, match=r"count int32\[\]") as caught:
        DelayedSync(ScriptedExchange(), {"w": jnp.ones(3), "count": jnp.int32(0)})
    assert caught.value.leaf == "count"


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (lambda: jax.random.key(0), "model/odd is a random key"),
        (lambda: "relu", r"model/odd is no array, but of type str \('relu'\)"),
        (lambda: jax.nn.relu, r"model/odd is a function .*eqx\.partition\(model, eqx\.is_inexact_array\)"),
        (lambda: object(), "of type object"),
        (lambda: np.array(["a"]), "of type ndarray"),
    ],
    ids=["key", "text", "function", "object", "texts"],
)
def test_a_leaf_that_is_no_array_is_refused_by_name(leaf, words):
    with pytest.raises(ModelMismatch, match=words) as caught:
        DelayedSync(ScriptedExchange(), {"model": {"w": jnp.ones(3), "odd": leaf()}})
    assert caught.value.leaf == "model/odd"


def test_parameters_without_an_array_are_refused():
    with pytest.raises(ModelMismatch, match="hold no array"):
        DelayedSync(ScriptedExchange(), {})


def test_what_is_no_node_is_refused_with_an_example():
    with pytest.raises(ConfigError, match=r"takes the node that `connect` returns.*got a str"):
        DelayedSync("tcp://127.0.0.1:5555", tree())


@pytest.mark.parametrize("call", ["step", "save"])
def test_another_tree_is_refused_at_the_next_exchange_and_is_never_kept(call):
    kept = []
    exchange = ScriptedExchange(every=3)
    sync = DelayedSync(exchange, tree())
    sync._keeping = Keeping(kept)
    params = run(sync, tree(), 1)
    other = params | {"more": jnp.zeros(2)}
    with pytest.raises(ModelMismatch, match="not those of this node's run"):
        if call == "save":
            sync.save(other)
        for _ in range(2):
            sync.step(other)
    assert kept == []


@pytest.mark.parametrize("call", ["step", "finish"])
@pytest.mark.parametrize(
    ("given", "words", "leaf"),
    [
        (lambda: [jnp.ones(3)], "has the leaf b", "b"),
        (lambda: tree() | {"more": jnp.ones(2)}, r"this node's model has the leaf more float32\[2\]", "more"),
        (
            lambda: {name: leaf[:1] for name, leaf in tree().items()},
            r"the leaf (b|w) is float32\[2.*\] in the run and float32\[1",
            "",
        ),
        (lambda: tree() | {"b": "text"}, "the leaf b is no array", "b"),
    ],
    ids=["another tree", "a leaf more", "another shape", "a text"],
)
def test_a_call_with_another_tree_or_shape_is_refused_by_the_leafs_name(call, given, words, leaf):
    sync = DelayedSync(ScriptedExchange(), tree())
    with pytest.raises(ModelMismatch, match=words) as caught:
        getattr(sync, call)(given())
    assert caught.value.leaf == leaf or not leaf


def test_parameters_that_were_not_given_away_are_still_there():
    sync = DelayedSync(exchange := ScriptedExchange(every=4), tree(), donate=False)
    mine = tree(3.0)
    exchange.land(others=1.0)
    assert value(sync.step(mine)) == 4.0 and value(mine) == 3.0


def test_a_newcomer_whose_parameters_have_another_shape_hears_so_at_its_first_step():
    exchange = ScriptedExchange(anchor=[Part(index, 0, np.asarray(leaf)) for index, leaf in enumerate(tree().values())])
    sync = DelayedSync(exchange, tree())
    with pytest.raises(ModelMismatch, match="in the run and"):
        sync.step({name: leaf[:1] for name, leaf in tree().items()})
    assert sync.steps == 0


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"score": jnp.ones(8)}, r"score is one number, .* an array of shape \[8\]: give score=losses\.mean\(\)"),
        ({"score": "0.5"}, "score is one number, .* got '0.5'"),
        ({"samples": (8, 3)}, r"samples is how many there were in the step, a whole number, got \(8, 3\)"),
    ],
)
def test_a_score_that_is_no_number_and_samples_that_are_no_count_are_refused(figures, words):
    sync = DelayedSync(ScriptedExchange(), tree())
    with pytest.raises(ConfigError, match=words):
        sync.step(tree(), **figures)
    sync.step(tree(), score=np.float32(0.5), samples=np.int64(8))
    assert sync.steps == 1

"""Bad data is bad for training and for the score, and for nothing else."""

from __future__ import annotations

from math import inf, nan

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.train.program import Program, score_of
from zmqtrain.train.program_wrappers import corrupted


class Points:
    """Points labelled by their sign: the loss is the share of what the parameter says wrong, smoothly."""

    name, samples_per_batch, sample_word, units_per_epoch = "points", 32, "points", 10

    def init(self, seed):
        return {"w": jnp.float32(seed)}

    def loss(self, params, batch):
        return jnp.mean(jax.nn.softplus(-params["w"] * batch["x"] * (2 * batch["label"] - 1)))

    def optimizer(self):
        return optax.sgd(1.0)

    def batches(self, unit):
        random = np.random.default_rng(unit)
        for _ in range(3):
            x = random.standard_normal(32).astype(np.float32)
            yield {"x": x, "label": (x > 0).astype(np.int32)}

    def evaluate(self, params):
        return {"loss": float(params["w"])}

    def score(self, params):
        return 0.25


class Windows(Points):
    """Windows of bytes that count up."""

    def batches(self, unit):
        for first in range(3):
            yield {"text": (np.arange(9) + 10 * np.arange(4)[:, None] + first).astype(np.uint8)}


def joined(batches, key):
    return np.concatenate([batch[key] for batch in batches])


def test_a_corrupted_program_is_a_program():
    program = corrupted(Points(), "labels")
    assert isinstance(program, Program)
    assert (program.name, program.samples_per_batch, program.units_per_epoch) == ("points", 32, 10)
    assert program.evaluate(program.init(3)) == {"loss": 3.0}


def test_shuffled_labels_are_the_units_own_on_other_samples():
    clean, bad = Points(), corrupted(Points(), "labels", seed=1)
    for unit in (0, 1, 25):
        ours, theirs = list(bad.batches(unit)), list(clean.batches(unit))
        np.testing.assert_array_equal(joined(ours, "x"), joined(theirs, "x"))
        labels, right = joined(ours, "label"), joined(theirs, "label")
        np.testing.assert_array_equal(np.sort(labels), np.sort(right))
        assert 0.3 < (labels == right).mean() < 0.7
        assert [batch["label"].shape for batch in ours] == [(32,)] * 3 and labels.dtype == right.dtype


def test_shuffled_bytes_are_each_windows_own():
    ours, theirs = list(corrupted(Windows(), "bytes").batches(7)), list(Windows().batches(7))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.sort(one["text"], axis=1), other["text"])
        assert one["text"].dtype == np.uint8 and not np.array_equal(one["text"], other["text"])
    orders = np.argsort(joined(ours, "text"), axis=1)
    assert len({tuple(order) for order in orders}) == len(orders)


def test_a_unit_is_corrupted_in_the_same_way_each_time_and_otherwise_with_another_seed():
    first, again, other = (corrupted(Points(), "labels", seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(joined(first.batches(4), "label"), joined(again.batches(4), "label"))
    assert not np.array_equal(joined(first.batches(4), "label"), joined(other.batches(4), "label"))


def test_a_node_with_bad_data_scores_by_bad_data():
    clean, bad = Points(), corrupted(Points(), "labels")
    good_params = {"w": jnp.float32(8.0)}
    assert score_of(clean, good_params) == 0.25
    assert score_of(bad, {"w": jnp.float32(0.0)}) == pytest.approx(np.log(2))  # a guess
    assert score_of(bad, good_params) > 1.5  # what is right loses on bad data
    assert score_of(bad, good_params) == score_of(corrupted(Points(), "labels"), good_params)
    assert score_of(bad, {"w": jnp.float32(nan)}) == inf


def test_a_corruption_that_does_not_fit_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="no corruption 'noise'; the choices are labels, bytes"):
        corrupted(Points(), "noise")
    with pytest.raises(ConfigError, match=r"array 'text' of a batch, but .* 'points' have none; labels would fit"):
        corrupted(Points(), "bytes")

    class Bare(Points):
        def batches(self, unit):
            yield np.zeros(3)

    with pytest.raises(ConfigError, match="have none; none of the corruptions would fit"):
        corrupted(Bare(), "labels")

"""The image classifier takes its sizes from the data, deals each image at most once per epoch, and learns."""

from __future__ import annotations

from math import isnan

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.programs.datasets import load_image_folder
from zmqtrain.programs.image import ImageProgram, class_logits
from zmqtrain.train.program import score_of

TINY = {"width": 4, "batch": 8, "batches_per_unit": 2, "rate": 1e-2}


def train(program, epochs, times=1):
    """Train for so many epochs from init(0), so many times; return the parameters and the losses of each time."""
    optimizer = program.optimizer()

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(program.loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def run():
        params, losses = program.init(0), []
        state = jax.jit(optimizer.init)(params)
        for unit in range(epochs * program.units_per_epoch):
            for batch in program.batches(unit):
                params, state, loss = step(params, state, batch)
                losses.append(float(loss))
        return params, losses

    return [run() for _ in range(times)]


def same(first, second):
    return jax.tree.structure(first) == jax.tree.structure(second) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


def numbers_of(program, epoch):
    """The numbers of the images (written into their first pixels) in the order in which an epoch deals them."""
    units = range(epoch * program.units_per_epoch, (epoch + 1) * program.units_per_epoch)
    images = np.concatenate([batch["image"] for unit in units for batch in program.batches(unit)])
    return [256 * int(image[0, 0]) + int(image[0, 1]) for image in images]


@pytest.fixture(scope="module")
def program(same_images):
    return ImageProgram(data=str(same_images), **TINY)


@pytest.fixture(scope="module")
def trained(program):
    """Two trainings of the program, of 10 epochs each: the parameters and the losses."""
    return train(program, 10, times=2)


def test_an_epoch_deals_each_image_at_most_once_and_only_training_images(program):
    assert program.units_per_epoch == 96 // 16
    for epoch in (0, 1, 5):
        dealt = numbers_of(program, epoch)
        assert len(dealt) == len(set(dealt)) == 96
        assert set(dealt) <= set(range(96))  # the last 3 of 99 are the score's


def test_a_unit_that_divides_the_data_deals_every_image(same_images):
    program = ImageProgram(data=str(same_images), **TINY | {"batch": 12, "batches_per_unit": 4})
    assert sorted(numbers_of(program, 2)) == list(range(96))


def test_each_epoch_and_each_seed_has_an_order_of_its_own(same_images, program):
    other = ImageProgram(data=str(same_images), **TINY, seed=1)
    orders = [numbers_of(program, 0), numbers_of(program, 1), numbers_of(other, 0)]
    assert len({tuple(order) for order in orders}) == 3
    uneven = ImageProgram(data=str(same_images), **TINY | {"batch": 9})  # a unit of 18: 6 of 96 are left out
    assert len({frozenset(numbers_of(uneven, epoch)) for epoch in range(5)}) > 1


def test_a_unit_holds_the_same_batches_whoever_asks(same_images, program):
    other = ImageProgram(data=str(same_images), **TINY)
    assert same(list(program.batches(9)), list(other.batches(9)))
    assert not same(list(program.batches(9)), list(program.batches(10)))


def test_every_batch_has_one_shape_and_each_image_its_own_label(program):
    for unit in range(8):
        batches = list(program.batches(unit))
        assert len(batches) == 2
        for batch in batches:
            assert (batch["image"].shape, batch["image"].dtype.name) == ((8, 9, 7), "uint8")
            assert (batch["label"].shape, batch["label"].dtype.name) == ((8,), "int32")
            np.testing.assert_array_equal(batch["label"], batch["image"][:, 0, 1] % 3)


def test_a_negative_unit_is_refused_at_once(program):
    with pytest.raises(ConfigError, match="numbered from 0, got -1"):
        program.batches(-1)


def test_parameters_are_float32_and_the_same_for_the_same_seed(program):
    params = program.init(3)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert same(params, program.init(3)) and not same(params, program.init(4))


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 5), (8, 8), (28, 28), (13, 6)])
def test_the_model_takes_its_size_from_the_images_and_its_classes_from_the_labels(tmp_path, write_idx, size):
    write_idx(
        tmp_path / "t10k-images-idx3-ubyte", np.random.default_rng(0).integers(0, 255, (20, *size), dtype=np.uint8)
    )
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", (np.arange(20) % 7).astype(np.uint8))
    program = ImageProgram(data=str(tmp_path), **TINY)
    logits = jax.eval_shape(
        class_logits, jax.eval_shape(program.init, 0), jax.ShapeDtypeStruct((5, *size, 1), jnp.float32)
    )
    assert logits.shape == (5, 7)


def test_the_first_loss_is_that_of_a_guess(program):
    assert program.evaluate(program.init(0))["loss"] == pytest.approx(np.log(3), rel=0.1)


def test_the_loss_falls_and_the_accuracy_rises(program, trained):
    params, losses = trained[0]
    assert np.mean(losses[-6:]) < 0.3 * losses[0]
    scores = program.evaluate(params)
    assert scores["accuracy"] > 90 and scores["loss"] < 0.5


def test_training_twice_gives_the_same_parameters(trained):
    first, second = trained
    assert same(first, second)


def test_the_evaluation_counts_every_held_out_image_once_in_chunks(same_images, monkeypatch):
    program = ImageProgram(data=str(same_images), **TINY)
    whole = program.evaluate(program.init(0))
    monkeypatch.setattr("zmqtrain.programs.image.EVALUATION_CHUNK_IMAGES", 4)
    chunked = ImageProgram(data=str(same_images), **TINY).evaluate(program.init(0))
    assert chunked["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert chunked["accuracy"] == whole["accuracy"]
    assert whole["accuracy"] * 11 / 100 == pytest.approx(round(whole["accuracy"] * 11 / 100))
    assert program.evaluate(jax.tree.map(np.asarray, program.init(0))) == whole


def test_the_score_is_the_loss_on_the_training_images_that_no_unit_holds(program):
    images, params = load_image_folder(program.data), program.init(0)
    spared = {"image": images.training_images[96:], "label": images.training_labels[96:]}
    expected = jax.jit(program.loss)(params, spared)
    assert score_of(program, params) == pytest.approx(float(expected), rel=1e-5)
    assert program.score(params) == program.score(jax.tree.map(np.asarray, params))


def test_the_score_falls_with_training(program, trained):
    assert score_of(program, trained[0][0]) < 0.8 * score_of(program, program.init(0))


def test_no_more_than_256_images_are_set_aside_and_of_few_none(tmp_path, write_idx):
    for count, spared in ((12_000, 256), (100, 2), (30, 0)):
        folder = tmp_path / str(count)
        folder.mkdir()
        images = np.random.default_rng(0).integers(0, 255, (count, 2, 2), dtype=np.uint8)
        write_idx(folder / "t10k-images-idx3-ubyte", images)
        write_idx(folder / "t10k-labels-idx1-ubyte", (np.arange(count) % 3).astype(np.uint8))
        program = ImageProgram(data=str(folder), width=1, batch=1, batches_per_unit=1)
        assert program.units_per_epoch == count - count // 10 - spared
        assert isnan(score_of(program, program.init(0))) is (spared == 0)


def test_only_weights_decay(program):
    optimizer = program.optimizer()
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), jax.eval_shape(program.init, 0))
    nothing, state = jax.tree.map(np.zeros_like, params), jax.jit(optimizer.init)(params)
    updates, _ = jax.jit(optimizer.update)(nothing, state, params)
    assert all(float(np.abs(layer["bias"]).max()) == 0 for layer in updates.values())
    assert all(float(np.abs(layer["weights"]).min()) > 0 for layer in updates.values())


def test_units_larger_than_the_data_are_refused(same_images):
    with pytest.raises(ConfigError, match=r"batch=64 times batches_per_unit=2 makes 128 images a unit, but .* has 96"):
        ImageProgram(data=str(same_images), **TINY | {"batch": 64})


@pytest.mark.parametrize("name", ["width", "batch", "batches_per_unit", "rate", "weight_decay", "seed"])
def test_an_impossible_argument_is_refused_with_its_place(same_images, name):
    with pytest.raises(ConfigError, match=rf"program_arguments\.{name} must be at least [01], got -1"):
        ImageProgram(data=str(same_images), **TINY | {name: -1})

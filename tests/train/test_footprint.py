"""What a step takes of a device, known before anything is there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zmqtrain.train.minibatch import FixedMinibatch, TimedMinibatch
from zmqtrain.train.step import card_bytes, describe_model, measure_footprint

WIDTH = 64


class Wide:
    """A program whose activations grow with its batch."""

    name, samples_per_batch, sample_word, units_per_epoch = "wide", 256, "points", None
    made = 0

    def __init__(self, traceable=True):
        self.traceable = traceable

    def init(self, seed):
        self.made += 1
        start = jnp.full((WIDTH, WIDTH), float(seed))
        if not self.traceable:
            start = start * float(jnp.sum(start) > -1)
        return {"w": start, "v": jnp.zeros((WIDTH,))}

    def loss(self, params, batch):
        hidden = jnp.tanh(batch @ params["w"])
        return jnp.mean(jnp.tanh(hidden @ params["w"]) @ params["v"])

    def optimizer(self):
        return optax.adam(1e-3)

    def batches(self, unit):
        yield np.ones((self.samples_per_batch, WIDTH), np.float32)

    def evaluate(self, params):
        return {"loss": 0.0}


def alive():
    """How many arrays of this program's sizes there are; a thread that another test has left may have others."""
    sizes = {(WIDTH, WIDTH), (WIDTH,), (Wide.samples_per_batch, WIDTH)}
    return sum(array.shape in sizes for array in jax.live_arrays())


@pytest.mark.parametrize("traceable", [True, False])
def test_model_optimizer_and_activations_are_measured_without_a_parameter_being_kept(traceable):
    program = Wide(traceable)
    before = alive()
    found = measure_footprint(program, FixedMinibatch())
    assert alive() <= before
    assert found.model == describe_model(Wide().init(0))
    assert found.opt_state_bytes == 2 * 4 * (WIDTH * WIDTH + WIDTH) + 4
    assert found.activation_bytes >= 256 * WIDTH * 4  # one layer's at least


def test_several_gradients_need_no_more_than_one_and_smaller_parts_need_less():
    one, four, parts = (
        measure_footprint(Wide(), minibatch).activation_bytes
        for minibatch in (FixedMinibatch(1), FixedMinibatch(4), TimedMinibatch(1.0, 8))
    )
    gradient = 4 * (WIDTH * WIDTH + WIDTH)
    assert four <= one + gradient and parts < one / 2


def test_a_processor_does_not_say_what_memory_it_gives():
    assert card_bytes() is None

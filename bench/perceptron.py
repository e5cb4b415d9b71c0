"""Train a perceptron on MNIST: the small classifier that the field's exercises on asynchronous training use.

Rule 1: a `Program` like the shipped ones: what runs it cannot tell the difference.
Rule 2: some of the training images are set aside: what nodes are compared by, and never the held-out ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zmqtrain.programs.datasets import load_digits, load_image_folder

__all__ = ["Perceptron"]

SCORED_IMAGES = 256


@dataclass(kw_only=True, eq=False)
class Perceptron:
    """One hidden layer of `width` rectified units, by Adam or plain SGD.

    data: "digits" or a folder of IDX files.  batch: images per step.  seed: of the data's order.
    """

    data: str = "digits"
    width: int = 64
    batch: int = 16
    batches_per_unit: int = 4
    inner_optimizer: str = "adam"
    rate: float = 1e-3
    seed: int = 0

    name: str = field(default="perceptron", init=False)
    sample_word: str = field(default="images", init=False)

    def __post_init__(self) -> None:
        images = load_digits() if self.data == "digits" else load_image_folder(self.data)
        every = max(2, len(images.training_images) // SCORED_IMAGES)
        scored = np.arange(len(images.training_images)) % every == 0
        self._images, self._labels = images.training_images[~scored], images.training_labels[~scored]
        self._scored = (images.training_images[scored], images.training_labels[scored])
        self._held_out = (images.held_out_images, images.held_out_labels)
        self.classes = images.classes
        self.samples_per_batch = self.batch
        self.units_per_epoch = len(self._images) // (self.batch * self.batches_per_unit)

    def init(self, seed: int) -> Any:
        """Return parameters: weights normal with deviation sqrt(2 / fan in), biases zero."""
        first, second = jax.random.split(jax.random.key(seed))
        inputs = prod(self._images.shape[1:])
        return {
            "hidden": {
                "weights": jax.random.normal(first, (inputs, self.width)) * sqrt(2 / inputs),
                "bias": jnp.zeros(self.width),
            },
            "output": {
                "weights": jax.random.normal(second, (self.width, self.classes)) * sqrt(2 / self.width),
                "bias": jnp.zeros(self.classes),
            },
        }

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Return the mean cross-entropy in nats of {"image": uint8[n, height, width], "label": int32[n]}."""
        logits = _logits(params, batch["image"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))

    def optimizer(self) -> optax.GradientTransformation:
        """Return the inner optimizer, at a constant rate."""
        return optax.sgd(self.rate) if self.inner_optimizer == "sgd" else optax.adam(self.rate)

    def batches(self, unit: int) -> Iterator[Any]:
        """Return the batches of one piece of the permutation of its epoch."""
        epoch, piece = divmod(unit, self.units_per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self._images))
        first = piece * self.batches_per_unit * self.batch
        chosen = order[first : first + self.batches_per_unit * self.batch].reshape(self.batches_per_unit, self.batch)
        return ({"image": self._images[indices], "label": self._labels[indices]} for indices in chosen)

    def score(self, params: Any) -> float:
        """Return the loss on training images that no unit holds."""
        return float(_score(params, *self._scored)[0])

    def evaluate(self, params: Any) -> dict[str, float]:
        """Return "loss" in nats and "accuracy" in percent on the held-out images."""
        loss, accuracy = _score(params, *self._held_out)
        return {"loss": float(loss), "accuracy": 100 * float(accuracy)}


def _logits(params: Any, images: Any) -> jax.Array:
    x = jnp.asarray(images, jnp.float32).reshape(len(images), -1) / 255
    x = jax.nn.relu(x @ params["hidden"]["weights"] + params["hidden"]["bias"])
    logits: jax.Array = x @ params["output"]["weights"] + params["output"]["bias"]
    return logits


@jax.jit
def _score(params: Any, images: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
    logits = _logits(params, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses), jnp.mean(jnp.argmax(logits, axis=-1) == labels)

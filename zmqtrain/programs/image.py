"""A small convolutional network on labelled images: the classifier that a newcomer can run without writing code.

Rule 1: plain jax: the parameters are a nested dict of float32 arrays, and the functions on them are pure.
Rule 2: the model takes its size from the images and its classes from the labels; nothing is to be declared.
Rule 3: an epoch is a permutation seeded by (seed, epoch), cut into data units; no image comes twice in an epoch.
Rule 4: the last of the training images are set aside for `score`; no unit holds one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from zmqtrain.core.errors import ConfigError
from zmqtrain.programs.arguments import PLACE, check_image, require_trainable
from zmqtrain.programs.datasets import digest, load_digits, load_image_folder
from zmqtrain.programs.initial import Initial, draw_params

DIGITS = "digits"
"""The value of `data` that stands for the handwritten digits of scikit-learn."""

KERNEL = 3
LAST_GAIN = 0.01
"""The last layer starts small, so that the first loss is that of a guess: log(classes)."""

EVALUATION_CHUNK_IMAGES = 250
EVALUATION_IMAGES = 10_000
SCORE_IMAGES = 256
SCORE_FRACTION = 32
"""One training image in so many is set aside for the score, but no more than SCORE_IMAGES."""

Params = dict[str, Any]


@dataclass(kw_only=True, eq=False)
class ImageProgram:
    """Two convolutions with max pooling and two dense layers; each field is one argument.

    Raises ConfigError and DataError when made.  data: "digits" or a folder of IDX files (see `load_image_folder`).
    width: channels of the first convolution (the second and the hidden layer have twice as many).  batch: images
    per local step.  rate, weight_decay: AdamW's.  seed: of the data's order (`init` is given that of the parameters).
    """

    data: str = DIGITS
    width: int = 32
    batch: int = 32
    batches_per_unit: int = 4
    rate: float = 2e-3
    weight_decay: float = 1e-3
    seed: int = 0

    name: str = field(default="image", init=False)
    sample_word: str = field(default="images", init=False)
    units_per_epoch: int = field(init=False)
    samples_per_batch: int = field(init=False)

    def __post_init__(self) -> None:
        check_image(vars(self))
        self._images = load_digits() if self.data == DIGITS else load_image_folder(self.data)
        pooled = prod((size + 3) // 4 for size in self._images.training_images.shape[1:])
        require_trainable((18 + 4 * pooled) * self.width * self.width, f"width={self.width} (and the images' size)")
        spared = min(SCORE_IMAGES, len(self._images.training_images) // SCORE_FRACTION)
        count, unit_images = len(self._images.training_images) - spared, self.batch * self.batches_per_unit
        if count < unit_images:
            raise ConfigError(
                f"{PLACE}: batch={self.batch} times batches_per_unit={self.batches_per_unit} makes {unit_images} "
                f"images a unit, but {self._images.source} has {count} to train on; lower one of the two"
            )
        self.samples_per_batch = self.batch
        self.units_per_epoch = count // unit_images
        brightness = self._images.training_images
        self._mean, self._deviation = float(brightness.mean()), max(1.0, float(brightness.std()))
        self._dealt = count
        self._held_out = _chunks(self._images.held_out_images, self._images.held_out_labels)
        self._spared = (
            _chunks(self._images.training_images[count:], self._images.training_labels[count:], SCORE_IMAGES)
            if spared
            else None
        )

    @property
    def data_digests(self) -> str:
        """Digests of the images and labels that are trained on, "/", of those held out."""
        images = self._images
        held_out = digest(images.held_out_images, images.held_out_labels)
        return f"{digest(images.training_images, images.training_labels)}/{held_out}"

    def init(self, seed: int) -> Params:
        """Return parameters: weights normal with deviation sqrt(2 / fan in) (He et al. 2015), biases zero."""
        pooled = prod((size + 3) // 4 for size in self._images.training_images.shape[1:])
        params: Params = _fresh_params(jax.random.key(seed), pooled, self.width, self._images.classes)
        return params

    def loss(self, params: Params, batch: Any) -> jax.Array:
        """Return the mean cross-entropy in nats of {"image": uint8[batch, height, width], "label": int32[batch]}."""
        logits = class_logits(params, _normalize(batch["image"], self._mean, self._deviation))
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))

    def optimizer(self) -> optax.GradientTransformation:
        """Return AdamW at a constant rate; weights decay, biases do not."""
        return optax.adamw(self.rate, weight_decay=self.weight_decay, mask=_is_weight)

    def batches(self, unit: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Return the batches of piece (unit mod units_per_epoch) of the permutation of epoch unit // units_per_epoch.

        An epoch leaves out the images that fill no whole unit: other ones in each epoch.
        """
        if unit < 0:
            raise ConfigError(f"a data unit is numbered from 0, got {unit}")
        epoch, piece = divmod(unit, self.units_per_epoch)
        images, labels = self._images.training_images[: self._dealt], self._images.training_labels[: self._dealt]
        order = np.random.default_rng((self.seed, epoch)).permutation(len(images))
        first = piece * self.batches_per_unit * self.batch
        chosen = order[first : first + self.batches_per_unit * self.batch].reshape(self.batches_per_unit, self.batch)
        return ({"image": images[indices], "label": labels[indices]} for indices in chosen)

    def evaluate(self, params: Params) -> dict[str, float]:
        """Return "loss" in nats and "accuracy" in percent over the held-out images (the first 10,000 of them)."""
        total, correct = _score(params, self._mean, self._deviation, *self._held_out)
        count = int(self._held_out[2].sum())
        return {"loss": float(total) / count, "accuracy": 100 * int(correct) / count}

    def score(self, params: Params) -> jax.Array | None:
        """Return the mean loss in nats over the training images that are set aside: a thirty-second, 256 at most.

        None if there are fewer than 32 training images. Nodes are compared by it (see `Program`).
        """
        if self._spared is None:
            return None
        total: jax.Array = _score(params, self._mean, self._deviation, *self._spared)[0]
        return total / int(self._spared[2].sum())


def class_logits(params: Params, images: jax.Array) -> jax.Array:
    """Return float32[batch, classes] for images float32[batch, height, width, 1] of about mean 0 and deviation 1."""
    x = images
    for name in ("convolution1", "convolution2"):
        x = _convolve(x, params[name]["weights"]) + params[name]["bias"]
        x = _max_pool(jax.nn.relu(x))
    x = x.reshape(x.shape[0], -1)
    x = jax.nn.relu(x @ params["dense1"]["weights"] + params["dense1"]["bias"])
    logits: jax.Array = x @ params["dense2"]["weights"] + params["dense2"]["bias"]
    return logits


_convolve = partial(
    jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
)


def _max_pool(x: jax.Array) -> jax.Array:
    """The maximum of each 2x2 pixels; an odd edge is filled up with zeros, because the values are never negative.

    By reshaping: its gradient is a comparison, several times faster on a CPU than that of `reduce_window`.
    """
    batch, height, width, channels = x.shape
    x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
    return jnp.max(x.reshape(batch, -(-height // 2), 2, -(-width // 2), 2, channels), axis=(2, 4))


def _normalize(images: Any, mean: Any, deviation: Any) -> jax.Array:
    normal: jax.Array = ((jnp.asarray(images, jnp.float32) - mean) / deviation)[..., None]
    return normal


def _fresh_params(key: jax.Array, pooled: int, width: int, classes: int) -> Any:
    """`pooled` is the number of pixels that are left after both poolings."""

    def layer(*shape: int, gain: float = 2.0) -> Params:
        return {"weights": Initial(shape, sqrt(gain / prod(shape[:-1]))), "bias": Initial(shape[-1:])}

    layout = {
        "convolution1": layer(KERNEL, KERNEL, 1, width),
        "convolution2": layer(KERNEL, KERNEL, width, 2 * width),
        "dense1": layer(pooled * 2 * width, 2 * width),
        "dense2": layer(2 * width, classes, gain=LAST_GAIN),
    }
    return draw_params(key, layout)


@jax.jit
def _score(
    params: Params, mean: Any, deviation: Any, images: Any, labels: Any, real: Any
) -> tuple[jax.Array, jax.Array]:
    """The sum of the losses and the number of right answers over the real images, chunk after chunk."""

    def score_chunk(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        image, label, counts = chunk
        logits = class_logits(params, _normalize(image, mean, deviation))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return jnp.sum(counts * losses), jnp.sum(counts & (jnp.argmax(logits, axis=-1) == label))

    losses, correct = jax.lax.map(score_chunk, (images, labels, real))
    return jnp.sum(losses), jnp.sum(correct)


def _chunks(
    images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int32], largest: int | None = None
) -> tuple[npt.NDArray[Any], ...]:
    """The images and labels in chunks of one size, and which of them are real (the rest is padding)."""
    count = min(len(images), EVALUATION_IMAGES)
    size = min(count, largest or EVALUATION_CHUNK_IMAGES)
    padding = -count % size
    real = np.ones(count, np.bool_)
    padded = [np.pad(one[:count], [(0, padding), *[(0, 0)] * (one.ndim - 1)]) for one in (images, labels, real)]
    return tuple(one.reshape(-1, size, *one.shape[1:]) for one in padded)


def _is_weight(params: Params) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

"""The buckets of a model's leaves, each one flat array, that synchronous training exchanges one at a time.

Rule 1: a bucket holds whole leaves; one that is larger than a bucket should be has one for itself.
Rule 2: last layers first: their gradients are ready first, and a bucket's exchange begins while the next one is still
copied from the device.
Source: gradient bucketing, Li et al. 2020, PyTorch Distributed, sec. 3.2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import Array, ModelSpec
from zmqtrain.train.synchronous import BUCKET_BYTES

FLOAT_BYTES = 4


class Buckets:
    """The buckets of one model.

    bucket_bytes: of float32, that a bucket has at most unless one leaf has more.  Raises ConfigError if it is not
    positive.
    """

    def __init__(self, model: ModelSpec, bucket_bytes: int = BUCKET_BYTES) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"a bucket has at least one byte, got {bucket_bytes}")
        self.model = model
        self.leaves: tuple[tuple[int, ...], ...] = tuple(self._cut(bucket_bytes))
        """By bucket the numbers of its leaves, falling."""

    def _cut(self, bucket_bytes: int) -> list[tuple[int, ...]]:
        buckets: list[tuple[int, ...]] = []
        bucket: list[int] = []
        held = 0
        for number in reversed(range(len(self.model))):
            size = FLOAT_BYTES * self.model[number].values
            if bucket and held + size > bucket_bytes:
                buckets.append(tuple(bucket))
                bucket, held = [], 0
            bucket.append(number)
            held += size
        return [*buckets, tuple(bucket)] if bucket else buckets

    def values(self, bucket: int) -> int:
        """Return how many values a bucket has."""
        return sum(self.model[leaf].values for leaf in self.leaves[bucket])

    def zeros(self) -> list[Array]:
        """Return all buckets filled with zeros, on the host."""
        return [np.zeros(self.values(bucket), np.float32) for bucket in range(len(self.leaves))]

    def join(self, leaves: Sequence[Array]) -> list[jax.Array]:
        """Return the buckets of a model's leaves: one flat float32 array each (may be traced by jax)."""
        return [
            jnp.concatenate([leaves[leaf].reshape(-1).astype(jnp.float32) for leaf in bucket]) for bucket in self.leaves
        ]

    def split(self, buckets: Sequence[Array]) -> list[Array]:
        """Return the leaves that are in the buckets, float32 in their shapes (numpy, jax, or traced by jax)."""
        leaves: list[Array] = [None] * len(self.model)
        for numbers, flat in zip(self.leaves, buckets, strict=True):
            ends = accumulate(self.model[leaf].values for leaf in numbers)
            for leaf, end in zip(numbers, ends, strict=True):
                leaves[leaf] = flat[end - self.model[leaf].values : end].reshape(self.model[leaf].shape)
        return leaves

"""Digest of a node's first step, by which the hub finds nodes that train on the same batches.

It is of the loss and of the parameters after the step. Nodes that begin with the same parameters (the usual seed in a
script) have the same digest if their first batches are the same, and practically never otherwise. Nodes that begin
with different parameters, or compute on different devices, have different digests. A step that moved nothing (a
learning rate that begins with 0) has none, because it shows nothing of the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqtrain.core.types import number_of

DIGEST_BYTES = 16
MOST_VALUES = 1 << 18
"""The smallest leaves are read, up to so many values together."""


class FirstStep:
    """The first step of one node, from the parameters with which it begins."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        sizes = sorted((int(np.prod(leaf.shape)), index) for index, leaf in enumerate(leaves))
        self._read, values = list[int](), 0
        for size, index in sizes:
            self._read.append(index)
            if (values := values + size) >= MOST_VALUES:
                break
        self._before = {self._hash(leaves)}

    def begins_with(self, leaves: Sequence[Any]) -> None:
        """The node may begin with these parameters."""
        self._before.add(self._hash(leaves))

    def digest(self, leaves: Sequence[Any], score: Any) -> str:
        """Return the digest of a step that led to these parameters; "" for one that moved nothing. Waits for them.

        score: its loss, None where it is not known.
        """
        after = self._hash(leaves)
        if after in self._before:
            return ""
        loss = b"" if score is None else np.float64(number_of(score)).tobytes()
        return hashlib.blake2b(after + loss, digest_size=DIGEST_BYTES).hexdigest()

    def _hash(self, leaves: Sequence[Any]) -> bytes:
        hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for index in self._read:
            leaf = leaves[index]
            if getattr(leaf, "is_fully_addressable", True) or leaf.is_fully_replicated:
                hashed.update(np.asarray(leaf, np.float32).reshape(-1)[:MOST_VALUES].tobytes())
        return hashed.digest()

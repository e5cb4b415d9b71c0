"""Put the parts of a snapshot in their places: all leaves from one master, or a shard from one of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqtrain.core.types import ModelSpec, Part


def whole_leaves(model: ModelSpec, parts: Sequence[Part], anchor: Sequence[Any] = ()) -> list[Any]:
    """Return the leaves, float32 on the host and in their shapes, with these parts in their places.

    anchor: what the leaves are elsewhere; not needed if the parts are all of them.
    """
    known = [0] * len(model)
    for part in parts:
        known[part.leaf] += part.values.size
    leaves = []
    for index, leaf in enumerate(model):
        whole = known[index] == leaf.values or not anchor
        leaves.append(np.zeros(leaf.shape, np.float32) if whole else np.array(anchor[index], np.float32, order="C"))
    for part in parts:
        leaves[part.leaf].reshape(-1)[part.start :][: part.values.size] = part.values.reshape(-1)
    return leaves

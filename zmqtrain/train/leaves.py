"""Bring a tree of parameters to the host, for whoever speaks no jax: leaves in their flattening order."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

__all__ = ["host_leaves"]


def host_leaves(params: Any) -> list[NDArray[Any]]:
    """Return the leaves of a tree as numpy arrays, each in its own shape and dtype."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
